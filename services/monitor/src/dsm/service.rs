//! Service threads of a node: the faults thread, for faults, time, heartbeats and queued bytes; and a reader per link.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dsm::message::Intent;
use dsm::{Body, Event, Fault, Mode, Vcpu};
use machine::memory::shared::PageFault;
use machine::scheduling::{Rank, run_before_others};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

use super::DsmError;
use super::engine::{Core, Engine, Outcome, now};
use super::link::{Control, Frame, Incoming, Link};
use super::vcpus::{MAX_GRANTED_PAGES, Pending};

/// Interval of heartbeats on each link. Each wakes a thread on both sides, which costs the vCPU of the same core some 100 µs.
const HEARTBEAT_INTERVAL_NS: u64 = 100_000_000;
/// Silence of a link after which its node counts as lost. The faults thread wakes exactly then, not with the next heartbeat.
const LINK_SILENCE_TIMEOUT_NS: u64 = 900_000_000;
/// Time that stopped vCPUs may still wait for pages before shared RAM is released: some waits inside KVM can't be canceled.
const STOPPED_PAGE_WAIT_TIMEOUT_NS: u64 = 200_000_000;

/// Starts the service threads. They end after [`Engine::quit`].
pub(super) fn start(engine: &Arc<Engine>) -> Result<Vec<JoinHandle<()>>, DsmError> {
    let failed = |source| DsmError::Host { what: "a thread", source };
    let mut threads = Vec::new();
    let beginning = now();
    for (index, link) in engine.links.iter().enumerate() {
        let Some(link) = link else { continue };
        link.heard.store(beginning, Ordering::Relaxed);
        let mine = Arc::clone(engine);
        let thread = std::thread::Builder::new().name(format!("dsm-link{index}"));
        let body = move || {
            mine.prioritize(Rank::Early);
            if let Some(Some(link)) = mine.links.get(index) {
                mine.read_link(link);
            }
        };
        threads.push(thread.spawn(body).map_err(failed)?);
    }
    let mine = Arc::clone(engine);
    let thread = std::thread::Builder::new().name("dsm-faults".to_owned());
    let body = move || {
        // A link's reader may never sleep while its peer sends: heartbeats and faults need a higher priority.
        mine.prioritize(Rank::First);
        mine.serve();
    };
    threads.push(thread.spawn(body).map_err(failed)?);
    Ok(threads)
}

/// Time since bytes last arrived over a link.
pub(super) fn silence(link: &Link) -> Duration {
    Duration::from_nanos(now().saturating_sub(link.heard.load(Ordering::Relaxed)))
}

/// Time until a link's node counts as lost, if it stays silent.
pub(super) fn until_lost(link: &Link) -> Duration {
    let lost = Duration::from_nanos(LINK_SILENCE_TIMEOUT_NS);
    if link.busy.load(Ordering::Relaxed) { lost } else { lost.saturating_sub(silence(link)) }
}

impl Engine {
    /// Raises the priority of the calling service thread. Otherwise a spinning vCPU takes the CPU for a time slice, which delays each
    /// message by
    /// milliseconds.
    fn prioritize(&self, rank: Rank) {
        let done = run_before_others(rank);
        // The limit on real-time priorities may allow only the lower rank.
        if let Err(error) = done.or_else(|_| run_before_others(Rank::Early)) {
            tracing::info!(%error, "Threads that serve shared memory have ordinary priority: faults take longer while CPUs are busy; give CAP_SYS_NICE to change that");
        }
        // The threads need no other privileges. With RDMA they gave them up when the device was opened.
        if !self.links().any(Link::is_rdma) {
            crate::sandbox::privileges_used();
        }
    }

    fn serve(&self) {
        let mut next_beat = now();
        let mut stopping_since = None;
        let mut released = false;
        let mut faults = Vec::new();
        while !self.quit.load(Ordering::Relaxed) {
            let time = now();
            if time >= next_beat {
                self.beat();
                next_beat = time + HEARTBEAT_INTERVAL_NS;
            }
            let silence = self.look_for_silence();
            let mut until = u64::MAX;
            if let Some(core) = &mut *self.lock() {
                until = self.on_time(core);
                if core.stopping && self.outcome().is_some() && !released {
                    let since = *stopping_since.get_or_insert_with(now);
                    released = now().saturating_sub(since) > STOPPED_PAGE_WAIT_TIMEOUT_NS;
                    if released && let Some(machine) = self.machine.get() {
                        machine.ram.release();
                    }
                }
            }
            let until = until.min(next_beat).min(silence);
            if let Err(error) = self.sleep(until, &mut faults) {
                self.fail(format!("Node {} can't wait for faults of its guest: {error}", self.me));
                return;
            }
            if !faults.is_empty()
                && let Some(core) = &mut *self.lock()
            {
                core.outbox.batch();
                for fault in faults.drain(..) {
                    self.on_fault(core, fault);
                }
                self.flush_batched(core);
            }
        }
    }

    /// Sends a heartbeat on each link.
    fn beat(&self) {
        for link in self.links() {
            link.send_control(&Control::Heartbeat);
        }
    }

    /// Ends the VM if a node's silence exceeds the timeout. Returns when to check next, ns.
    fn look_for_silence(&self) -> u64 {
        let mut next = u64::MAX;
        for link in self.links() {
            let heard = link.heard.load(Ordering::Relaxed);
            let silent = now().saturating_sub(heard);
            if silent <= LINK_SILENCE_TIMEOUT_NS {
                next = next.min(heard.saturating_add(LINK_SILENCE_TIMEOUT_NS + 1));
            } else if !link.busy.load(Ordering::Relaxed) && self.outcome().is_none() {
                self.fail(format!(
                    "Node {} has not been heard from for {} ms over the link {}: its host is down, cut off, or stopped",
                    link.peer,
                    silent / 1_000_000,
                    link.address
                ));
            }
        }
        next
    }

    /// Handles expired timers: the protocol's deadline, and postponed kicks. Returns when the next expires, ns.
    fn on_time(&self, core: &mut Core) -> u64 {
        let time = now();
        if core.node.deadline().is_some_and(|at| at <= time) {
            self.step(core, Event::Timer);
        }
        let due: Vec<usize> =
            core.rekick.iter().filter(|(at, _)| *at <= time).map(|(_, vcpu)| *vcpu).collect();
        core.rekick.retain(|(at, _)| *at > time);
        for vcpu in due {
            let Some(slot) = core.vcpus.get_mut(vcpu) else { continue };
            if !slot.ended {
                slot.kick = true;
                self.kick_vcpu(core, vcpu);
            }
        }
        core.armed = core.node.deadline();
        let rekick = core.rekick.iter().map(|(at, _)| *at).min();
        core.armed.into_iter().chain(rekick).min().unwrap_or(u64::MAX)
    }

    /// Sleeps until `until`, a wakeup, a fault, or a writable socket with queued bytes. Appends faults.
    fn sleep(&self, until: u64, faults: &mut Vec<PageFault>) -> io::Result<()> {
        let queued: Vec<_> = self.links().filter_map(|link| Some((link, link.socket()?))).collect();
        let queued: Vec<_> = queued.into_iter().filter(|(link, _)| link.has_queue()).collect();
        let ram = self.machine.get().map(|machine| &machine.ram);
        let mut fds = vec![PollFd::new(&self.wake, PollFlags::IN)];
        fds.extend(ram.iter().map(|ram| PollFd::from_borrowed_fd(ram.fd(), PollFlags::IN)));
        fds.extend(queued.iter().map(|(_, socket)| PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::OUT)));
        let left = until.saturating_sub(now());
        let timeout = Timespec {
            tv_sec: i64::try_from(left / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: i64::try_from(left % 1_000_000_000).unwrap_or(0),
        };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        drop(fds);
        // Fails if there was no wakeup.
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        for (link, _) in queued {
            link.flush();
        }
        match ram {
            Some(ram) => ram.faults(faults),
            None => Ok(()),
        }
    }

    fn on_fault(&self, core: &mut Core, event: PageFault) {
        if core.suspended {
            // The vCPU has left the guest for a checkpoint, and faults again when it runs.
            return;
        }
        let Some(index) = core.threads.get(&event.thread).copied() else {
            self.fail(format!(
                "Thread {}, which is no vCPU, touched page {:#x} of the guest's own mapping: a fault of the monitor",
                event.thread, event.page
            ));
            return;
        };
        let fault = if event.write { Fault::Write } else { Fault::Read };
        if Self::allows(&core.node, event.page, fault) {
            // The page arrived before the fault was read.
            core.counts.late += 1;
            core.pages.wake(event.page);
            return;
        }
        let upgrade = Self::allows(&core.node, event.page, Fault::Read);
        let again = core.pages.was_lost(event.page);
        let Some(slot) = core.vcpus.get_mut(index) else { return };
        let known = slot.fault.is_some_and(|old| old.page == event.page && old.write == event.write);
        if known || slot.trap.is_some() || slot.operating || core.stopping {
            return;
        }
        if self.fault_injection.mixed_modes && event.page % 2 == 1 && core.advised.insert(event.page) {
            self.step(core, Event::Advise { page: event.page, mode: Mode::Update });
        }
        if core.vcpus.get(index).is_some_and(|slot| slot.granted.len() >= MAX_GRANTED_PAGES) {
            // Pages that are here at once are granted without a sample of registers.
            self.retired(core, index);
        }
        core.pages.note_request(event.page, event.write);
        core.hot.fault(event.page, event.offset, event.write);
        Self::predict(core, index, event.page, event.write);
        let Some(slot) = core.vcpus.get_mut(index) else { return };
        slot.fault = Some(Pending { page: event.page, write: event.write, upgrade, again, at: now() });
        slot.sampled = false;
        let Ok(vcpu) = Vcpu::try_from(index) else { return };
        self.step(core, Event::Fault { vcpu, page: event.page, fault });
        // The protocol asks for the vCPU's earlier pages when other nodes request them. Until then it sleeps in userfaultfd, the fastest
        // way back.
        let waits = core.vcpus.get(index).is_some_and(|slot| slot.fault.is_some() && !slot.sampled);
        if waits && core.hot.needs_instruction_sample(event.page) {
            self.kick_vcpu(core, index);
        }
    }

    fn read_link(&self, link: &Link) {
        match self.fault_injection.slow_link {
            Some((from, to, time)) if (from, to) == (link.peer, self.me) => {
                let (late, frames) = mpsc::channel::<(Instant, Frame)>();
                std::thread::scope(|scope| {
                    scope.spawn(move || {
                        for (arrived, frame) in frames {
                            std::thread::sleep(time.saturating_sub(arrived.elapsed()));
                            self.on_frames(link, &mut vec![frame]);
                        }
                    });
                    // Fails if the other thread has ended, which ends after this one.
                    self.read_frames(link, |frames| {
                        frames.drain(..).for_each(|frame| drop(late.send((Instant::now(), frame))));
                    });
                    drop(late);
                });
            }
            _ => self.read_frames(link, |frames| self.on_frames(link, frames)),
        }
    }

    /// Processes frames that arrived together. Their answers leave together.
    fn on_frames(&self, link: &Link, frames: &mut Vec<Frame>) {
        let mut frames = frames.drain(..).peekable();
        while let Some(frame) = frames.next() {
            match frame {
                Frame::Message(message) => {
                    let more = std::iter::from_fn(|| {
                        match frames.next_if(|frame| matches!(frame, Frame::Message(_))) {
                            Some(Frame::Message(message)) => Some(message),
                            _ => None,
                        }
                    });
                    let messages = std::iter::once(message).chain(more).collect();
                    self.on_messages(link, messages);
                }
                Frame::Control(control) => self.on_control(link, control),
            }
        }
    }

    fn read_frames(&self, link: &Link, mut each: impl FnMut(&mut Vec<Frame>)) {
        let mut incoming = Incoming::default();
        let mut frames = Vec::new();
        loop {
            match link.receive(&mut incoming, &mut frames) {
                Ok(()) => {
                    link.heard.store(now(), Ordering::Relaxed);
                    each(&mut frames);
                }
                Err(error) => {
                    self.link_ended(link, &error);
                    return;
                }
            }
        }
    }

    fn link_ended(&self, link: &Link, error: &io::Error) {
        self.peer_states().disconnected.insert(link.peer);
        if self.outcome().is_none() {
            let (peer, address) = (link.peer, &link.address);
            let overflow = link.overflow().map(|bytes| {
                format!(
                    "Node {peer} doesn't take what it is sent over the link {address}: more than {bytes} bytes wait for it"
                )
            });
            self.fail(overflow.unwrap_or_else(|| match error.kind() {
                io::ErrorKind::InvalidData => {
                    format!(
                        "Node {peer} sent bytes over the link {address} that no correct node sends: {error}"
                    )
                }
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
                    format!("The link {address} to node {peer} was closed: its monitor has died or was ended")
                }
                _ => format!("The link {address} to node {peer} is broken: {error}"),
            }));
        }
        link.close();
        self.notify_peer_states();
    }

    fn on_messages(&self, link: &Link, messages: Vec<dsm::Message>) {
        let mut refused = None;
        let mut locked = self.lock();
        if let Some(core) = &mut *locked {
            core.outbox.batch();
            // Most requests are granted at once.
            let copies = messages.iter().filter(
                |message| matches!(&message.body, Body::Request(request) if request.intent != Intent::Write),
            );
            core.pages.set_requested(copies.map(|message| message.page));
        }
        for message in messages {
            let what = message.body.name();
            let taken = match &mut *locked {
                Some(core) if message.to.0 == self.me => {
                    let before = core.node.counters().refused;
                    self.step(core, Event::Message(message));
                    core.node.counters().refused == before
                }
                _ => false,
            };
            if !taken {
                refused.get_or_insert(what);
            }
        }
        if let Some(core) = &mut *locked {
            self.flush_batched(core);
        }
        drop(locked);
        if let Some(what) = refused
            && self.outcome().is_none()
        {
            self.fail(format!(
                "Node {} sent a message ({what}) over the link {} that no correct node sends now",
                link.peer, link.address
            ));
        }
    }

    fn on_control(&self, link: &Link, control: Control) {
        match control {
            Control::Heartbeat => return,
            Control::Console(bytes) => {
                link.busy.store(true, Ordering::Relaxed);
                let result = self.write_all(&bytes);
                link.heard.store(now(), Ordering::Relaxed);
                link.busy.store(false, Ordering::Relaxed);
                if let Err(error) = result {
                    self.fail(format!("The console can't be written for node {}: {error}", link.peer));
                }
                return;
            }
            Control::Exit(code) => self.end(Outcome::Exit(code)),
            Control::Failed(text) => self.end(Outcome::Failed { text, here: false }),
            Control::Parked => drop(self.peer_states().parked.insert(link.peer)),
            Control::Report(report) => drop(self.peer_states().reports.insert(link.peer, report)),
            Control::Start => drop(self.peer_states().ready.insert(link.peer)),
            Control::Answer(answer) => drop(self.peer_states().answers.insert(link.peer, answer)),
            Control::Ask => {
                let answer = self.lock().as_ref().map(|core| core.report(self.me)).unwrap_or_default();
                self.send_control(link.peer, &Control::Answer(answer.to_string().into_bytes()));
                return;
            }
            Control::Checkpoint(step) => {
                if self.steps.try_send((link.peer, step)).is_err() && self.outcome().is_none() {
                    self.fail(format!(
                        "Node {} sends more about checkpoints over the link {} than a correct node does",
                        link.peer, link.address
                    ));
                }
                return;
            }
            Control::Phase(begins) => {
                if let Some(core) = &mut *self.lock() {
                    core.mark(begins);
                }
                return;
            }
        }
        self.notify_peer_states();
    }

    fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.write_console(bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => bytes = bytes.get(written..).unwrap_or_default(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.flush_console().map(drop)
    }
}
