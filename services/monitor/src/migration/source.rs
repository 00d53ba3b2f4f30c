//! The source's side of a migration.

mod answers;
mod disks;
mod ending;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use cluster_key::ClusterKey;
use control_api::migration::{MigrationPhase, MigrationRequest, MigrationRound, MigrationTimeline};
use machine::memory::GuestMemorySpace;
use machine::slots::DirtyPages;
use virtio_devices::block::DiskContent;

use super::connection::{Connection, Stop};
use super::daemon::{Daemon, STOP_REQUEST_TIMEOUT, StopPermission};
use super::error::MigrationError;
use super::frame::{Kind, MAX_DEVICE_STATE_BYTES, Receiver, Sender};
use super::keepalive::Keepalive;
use super::message::{self, Accepted, End, Hello, OLDEST_VERSION, VERSION};
use super::mirror::source::{DiskRound, MirrorSource};
use super::pages::{PAGE, Sent, Share, count};
use super::policy::{Decision, Policy, RoundEnd};
use super::postcopy::source::{PostCopy, check_support};
use super::progress::ProgressReporter;
use super::sealed;
use super::shape::Shape;

/// Time-out for the destination's answers.
const DESTINATION_SILENCE_TIMEOUT: Duration = Duration::from_secs(60);
/// Time-out for the destination's reason after a stream failed.
const REFUSAL_TIMEOUT: Duration = Duration::from_millis(500);
/// Period of throttling: vCPUs are paused for a part of each.
const THROTTLE_PERIOD: Duration = Duration::from_millis(20);

/// A machine that can migrate. The threads of one migration call the methods.
pub trait SourceMachine: Sync {
    /// Its guest-visible shape.
    fn shape(&self) -> Shape;
    /// Its RAM.
    fn memory(&self) -> GuestMemorySpace;
    /// Allocated pages.
    fn present(&self) -> Result<Vec<DirtyPages>, MigrationError>;
    /// Starts dirty logging for vCPUs and devices.
    fn start_logging(&self) -> Result<(), MigrationError>;
    /// Stops dirty logging. Not called when the guest has migrated.
    fn stop_logging(&self);
    /// Pages written since the last call.
    fn take_dirty(&self) -> Result<Vec<DirtyPages>, MigrationError>;
    /// Makes devices' writes so far durable, so that the stop has less to wait for.
    fn settle(&self) -> Result<(), MigrationError>;
    /// Pauses running vCPUs for `time`.
    fn throttle(&self, time: Duration);
    /// Throttles writes by peers of its devices into its memory, by so many per cent; where devices support it.
    fn throttle_peers(&self, percent: u8) -> Result<(), MigrationError>;
    /// Stops vCPUs and devices, unlocks the disks, and returns the state. After an error [`SourceMachine::rollback`] is called, too.
    fn stop(&self) -> Result<Vec<u8>, MigrationError>;
    /// Rollback: resumes the guest here.
    fn rollback(&self) -> Result<(), MigrationError>;
    /// The daemon that serves devices of the VM and takes part in its migration; `None` if there is none.
    fn daemon(&self) -> Option<&Daemon>;
    /// Starts reading the state of served devices, while they work.
    fn begin_devices(&self) -> Result<(), MigrationError>;
    /// For each served device, the state that has changed since the last call.
    fn read_devices(&self) -> Result<Vec<Vec<u8>>, MigrationError>;
    /// Its disks.
    fn disks(&self) -> &[DiskContent];
    /// It isn't known whether the guest runs at the destination: it stays stopped here, in doubt.
    fn set_in_doubt(&self);
    /// Whether the migration has stopped the guest, in doubt or not: its user may have resumed it.
    fn is_stopped(&self) -> bool;
}

/// One stream of the source.
struct Stream {
    connection: Connection,
    sender: Sender,
    announced: u64,
}

impl Stream {
    fn send(&mut self, kind: Kind, payload: &[u8]) -> Result<(), MigrationError> {
        self.sender.send(&mut self.connection, kind, &[payload]).map_err(MigrationError::stream("written"))
    }
}

/// Migrates `machine` over `streams`, of which the first also carries the control frames. Blocks until the migration is over. After an
/// error the guest is at the source, except for [`MigrationError::InDoubt`] and losses in post-copy. The caller sets the final phase of
/// the progress.
///
/// # Errors
/// See [`MigrationError`].
pub fn migrate(
    machine: &dyn SourceMachine,
    streams: Vec<OwnedFd>,
    request: &MigrationRequest,
    reporter: &ProgressReporter,
    stop: &Stop,
) -> Result<MigrationTimeline, MigrationError> {
    let connect = |fd| Stream {
        connection: Connection::new(fd, stop.clone(), DESTINATION_SILENCE_TIMEOUT),
        sender: Sender::new(),
        announced: 0,
    };
    let streams: Vec<Stream> = streams.into_iter().map(connect).collect();
    let count = streams.len();
    let mut migration = OutgoingMigration {
        machine,
        streams,
        answers: Receiver::new(),
        reporter,
        stop,
        policy: Policy {
            downtime: Duration::from_millis(request.downtime_ms),
            timeout: (request.timeout_seconds > 0).then(|| Duration::from_secs(request.timeout_seconds)),
            max_throttle: request.max_throttle_percent,
            // Rings of served devices must be present when the guest runs: a first round copies the parts that don't change.
            post_copy_after: match request.post_copy_after {
                Some(0) if machine.daemon().is_some() => Some(1),
                after => after,
            },
        },
        began: Instant::now(),
        limit_from: Instant::now(),
        mirror_request: request.mirror.clone(),
        mirror: None,
        group: request.together.clone(),
        key: request.key.as_ref().and_then(|key| ClusterKey::new(key.0)),
        begun: false,
        post_copy: None,
        keepalive: Keepalive::Unknown,
        timeline: MigrationTimeline {
            destination: request.destination.clone(),
            streams: count,
            rounds: Vec::new(),
            bytes: 0,
            state_bytes: 0,
            until_stop_ms: 0.0,
            stop_ms: 0.0,
            rest_ms: 0.0,
            restore_ms: 0.0,
            commit_ms: 0.0,
            pause_ms: 0.0,
            total_ms: 0.0,
            peers: Vec::new(),
            disks: Vec::new(),
            post_copy: None,
        },
    };
    if let Err(error) = migration.handshake() {
        // The migration hasn't begun, neither here nor at a daemon.
        return Err(migration.abort(error));
    }
    match migration.copy() {
        Ok(stopped) => migration.commit(stopped),
        Err((error, stopped)) => migration.roll_back(error, stopped),
    }
}

/// When the guest was stopped, if it was.
type Stopped = Option<Instant>;

struct OutgoingMigration<'a> {
    machine: &'a dyn SourceMachine,
    streams: Vec<Stream>,
    answers: Receiver,
    reporter: &'a ProgressReporter,
    stop: &'a Stop,
    policy: Policy,
    began: Instant,
    /// Start of the time limit.
    limit_from: Instant,
    /// Disks that the user requested to copy.
    mirror_request: Option<Vec<String>>,
    mirror: Option<MirrorSource>,
    timeline: MigrationTimeline,
    /// All VMs of the group, this one included; empty without a group.
    group: Vec<String>,
    /// Key that encrypts the streams.
    key: Option<ClusterKey>,
    /// The migration has begun at the daemon of served devices.
    begun: bool,
    /// Memory that is sent after the switchover.
    post_copy: Option<PostCopy>,
    /// When streams show that this side lives.
    keepalive: Keepalive,
}

impl OutgoingMigration<'_> {
    fn control(&mut self) -> Result<&mut Stream, MigrationError> {
        let none = || MigrationError::Protocol("nothing: there is no stream".to_owned());
        self.streams.first_mut().ok_or_else(none)
    }

    /// Sends the greetings, and asks whether the destination accepts the VM.
    fn handshake(&mut self) -> Result<(), MigrationError> {
        let key = self.key.take();
        let migration = uuid::Uuid::new_v4();
        let attempt = migration.as_u64_pair().0;
        let migration = *migration.as_bytes();
        let streams = u16::try_from(self.streams.len()).unwrap_or(u16::MAX);
        for (stream, index) in self.streams.iter_mut().zip(0u16..) {
            if let Some(key) = &key {
                sealed::as_source(&mut stream.connection, key)?;
            }
            let hello = Hello { version: VERSION, oldest: OLDEST_VERSION, stream: index, streams, migration };
            stream.send(Kind::Hello, &hello.encode())?;
        }
        let offer = message::encode(&self.machine.shape())?;
        self.control()?.send(Kind::Offer, &offer)?;
        let payload = self.answer(Kind::Accepted)?;
        let accepted: Accepted = message::decode(&payload, "an acceptance")?;
        if !(OLDEST_VERSION..=VERSION).contains(&accepted.version) {
            let text = format!("an acceptance in version {}, which was not offered", accepted.version);
            return Err(MigrationError::Protocol(text));
        }
        if self.policy.post_copy_after.is_some() {
            check_support(accepted.version, self.streams.len())?;
            self.control()?.send(Kind::Postcopy, &[])?;
            self.answer(Kind::Accepted)?;
        }
        self.keepalive = Keepalive::of(accepted.version);
        self.request_mirror(accepted.version)?;
        if let Some(daemon) = self.machine.daemon() {
            let host = accepted.host.ok_or_else(|| {
                MigrationError::Protocol(
                    "an acceptance that doesn't say which host of the cluster it is".to_owned(),
                )
            })?;
            if self.group.is_empty() {
                daemon.begin(&host)?;
            } else {
                daemon.begin_together(&host, &self.group, attempt, &|| self.stop.is_set())?;
            }
            self.begun = true;
        }
        Ok(())
    }

    /// Sends the changed state of served devices.
    fn send_devices(&mut self) -> Result<(), MigrationError> {
        if !self.begun {
            return Ok(());
        }
        for (number, state) in (0_u32..).zip(self.machine.read_devices()?) {
            for piece in state.chunks(MAX_DEVICE_STATE_BYTES) {
                let control = self.control()?;
                let sent = control.sender.send(
                    &mut control.connection,
                    Kind::Device,
                    &[&number.to_le_bytes(), piece],
                );
                sent.map_err(MigrationError::stream("written"))?;
            }
        }
        Ok(())
    }

    /// Copies disks and memory while the guest runs, until it must be stopped. Returns the rest of memory, and whether it is for
    /// post-copy.
    fn copy_running(&mut self) -> Result<(Vec<DirtyPages>, bool), MigrationError> {
        self.copy_disks()?;
        self.machine.start_logging()?;
        if self.begun {
            self.machine.begin_devices()?;
        }
        let present = self.machine.present()?;
        let (rest, post_copy) = match self.policy.post_copy_after {
            Some(0) => (present, true),
            _ => self.rounds(present, true)?,
        };
        if post_copy {
            // Disks must be complete before the switchover. Not after the next step: peers may be suspended then.
            self.copy_disks_again()?;
        }
        Ok((self.await_stop(rest)?, post_copy))
    }

    /// Copies the VM, stops the guest, and waits until the destination has everything and is ready.
    fn copy(&mut self) -> Result<Instant, (MigrationError, Stopped)> {
        let (machine, stop) = (self.machine, self.stop);
        let copied = match machine.daemon().filter(|_| self.begun) {
            Some(daemon) => daemon.watched(stop, || self.copy_running()),
            None => self.copy_running(),
        };
        let (rest, post_copy) = copied.map_err(|error| (error, None))?;

        let stopped = Instant::now();
        let while_stopped = |error| (error, Some(stopped));
        self.timeline.until_stop_ms = milliseconds(stopped - self.began);
        self.reporter.update(|progress| progress.phase = MigrationPhase::Stopped);
        let state = self.machine.stop().map_err(while_stopped)?;
        if let Some(daemon) = self.machine.daemon() {
            daemon.stopped().map_err(while_stopped)?;
        }
        self.timeline.stop_ms = milliseconds(stopped.elapsed());
        self.timeline.state_bytes = state.len() as u64;
        let last = self.machine.take_dirty().map_err(while_stopped)?;
        let rest = union(rest, last);
        self.collect_disk_writes().map_err(while_stopped)?;
        let sending = Instant::now();
        if post_copy {
            if self.mirror.is_some() {
                let sent = self.round(&[], false).map_err(while_stopped)?;
                self.note_round(sending, &sent, 0, 0, true);
            }
            self.send_missing(&rest).map_err(while_stopped)?;
        } else {
            let sent = self.round(&rest, false).map_err(while_stopped)?;
            self.note_round(sending, &sent, 0, 0, true);
        }
        self.send_devices().map_err(while_stopped)?;
        self.control().and_then(|control| control.send(Kind::State, &state)).map_err(while_stopped)?;
        for stream in &mut self.streams {
            let blackout_us = u64::try_from(stopped.elapsed().as_micros()).ok();
            let end = End { pages: stream.announced, blackout_us };
            let end = message::encode(&end).map_err(while_stopped)?;
            stream.send(Kind::End, &end).map_err(while_stopped)?;
        }
        if self.post_copy.is_some() {
            // The destination's restore may access not-present pages.
            self.begin_serving().map_err(while_stopped)?;
        }
        self.timeline.rest_ms = milliseconds(sending.elapsed());
        let waiting = Instant::now();
        self.answer(Kind::Ready).map_err(while_stopped)?;
        self.timeline.restore_ms = milliseconds(waiting.elapsed());
        Ok(stopped)
    }

    /// Little is left: waits until the daemon, if there is one, requests the stop. While other VMs of the group have more to copy, or a
    /// peer migrates first, memory is copied again, so that little stays left. Returns the remaining pages.
    fn await_stop(&mut self, rest: Vec<DirtyPages>) -> Result<Vec<DirtyPages>, MigrationError> {
        let Some(daemon) = self.machine.daemon() else { return Ok(rest) };
        let stopped = self.await_stop_request(daemon, rest);
        self.reporter.set_waits_for(None);
        stopped
    }

    fn await_stop_request(
        &mut self,
        daemon: &Daemon,
        mut rest: Vec<DirtyPages>,
    ) -> Result<Vec<DirtyPages>, MigrationError> {
        let began = Instant::now();
        loop {
            let after = match daemon.may_stop()? {
                StopPermission::Now => return Ok(rest),
                StopPermission::NotYet => None,
                StopPermission::After(other) => Some(other),
            };
            if self.stop.is_set() {
                return Err(MigrationError::Cancelled);
            }
            // A VM that waits for no other VM gets the request to stop soon.
            let waits = !self.group.is_empty() || after.is_some();
            let limit = if waits { self.policy.timeout } else { Some(STOP_REQUEST_TIMEOUT) };
            if let Some(limit) = limit.filter(|limit| began.elapsed() > *limit) {
                let first = after.map(|other| format!(", since its peer, VM {other}, was to move first"));
                let text =
                    format!("it waited for {} s to be stopped{}", limit.as_secs(), first.unwrap_or_default());
                return Err(MigrationError::Aborted(text));
            }
            self.reporter.set_waits_for(after);
            rest = union(rest, self.machine.take_dirty()?);
            rest = self.rounds(rest, false)?.0;
        }
    }

    /// Copies memory while the guest runs, until the rest is small enough or for post-copy; returns the rest, and whether it is for
    /// post-copy. `present`: `pages` are all allocated pages, and none was sent before.
    fn rounds(
        &mut self,
        pages: Vec<DirtyPages>,
        present: bool,
    ) -> Result<(Vec<DirtyPages>, bool), MigrationError> {
        throttled(self.machine, |throttle| self.copy_rounds(pages, present, throttle))
    }

    fn copy_rounds(
        &mut self,
        mut pages: Vec<DirtyPages>,
        mut first: bool,
        throttle: &AtomicU8,
    ) -> Result<(Vec<DirtyPages>, bool), MigrationError> {
        let before = u32::try_from(self.timeline.rounds.len()).unwrap_or(u32::MAX - 1);
        let disk_rounds = self.disk_rounds();
        for number in before + 1.. {
            let held = throttle.load(Ordering::Acquire);
            self.reporter.update(|progress| {
                progress.phase = MigrationPhase::Copying;
                progress.round = number;
                progress.throttle_percent = held;
            });
            let began = Instant::now();
            if first {
                // Before memory, so that the destination restores it while memory is copied, and not in the blackout.
                self.send_devices()?;
            }
            let sent = self.round(&pages, first)?;
            first = false;
            self.send_devices()?;
            let took = began.elapsed();
            self.settle()?;
            let dirty = self.machine.take_dirty()?;
            let dirtied = count(&dirty);
            let disks = self.collect_disk_writes()?;
            let bytes = self.note_round(began, &sent, dirtied, held, false);
            let end = RoundEnd {
                // Rounds of disks alone don't count.
                number: number - disk_rounds,
                bytes,
                took,
                pages: sent.pages + sent.disk_bytes / PAGE as u64,
                dirtied: dirtied + disks / PAGE as u64,
                elapsed: self.limit_from.elapsed(),
            };
            self.reporter.update(|progress| {
                progress.pages_left = dirtied;
                progress.bytes_per_second = end.rate();
                progress.predicted_pause_ms =
                    u64::try_from(end.predicted_pause().as_millis()).unwrap_or(u64::MAX);
            });
            match self.policy.decide(&end, held) {
                Decision::Stop => return Ok((dirty, false)),
                Decision::PostCopy => return Ok((dirty, true)),
                Decision::NextRound(next) => {
                    throttle.store(next, Ordering::Release);
                    if next > 0 {
                        self.machine.throttle_peers(next)?;
                    }
                }
                Decision::Abort => return Err(self.not_converging(dirtied, disks)),
            }
            pages = dirty;
        }
        Ok((pages, false))
    }

    /// Sends the numbers of the not-present pages to the destination.
    fn send_missing(&mut self, rest: &[DirtyPages]) -> Result<(), MigrationError> {
        let post_copy = PostCopy::of(&self.machine.memory(), rest)?;
        for frame in post_copy.missing_frames() {
            self.control()?.send(Kind::Missing, &frame)?;
        }
        self.post_copy = Some(post_copy);
        Ok(())
    }

    /// From here on all streams but the first serve pages.
    fn begin_serving(&mut self) -> Result<(), MigrationError> {
        let memory = self.machine.memory();
        self.timeline.bytes = self.streams.iter().map(|stream| stream.sender.bytes()).sum();
        if let Some(post_copy) = &mut self.post_copy {
            let streams = self.streams.drain(1..).map(|stream| (stream.connection, stream.sender));
            post_copy.begin(memory, streams.collect())?;
        }
        Ok(())
    }

    /// Sends pages over all streams in parallel.
    fn round(&mut self, pages: &[DirtyPages], first: bool) -> Result<Sent, MigrationError> {
        let memory = self.machine.memory();
        let streams = self.streams.len() as u64;
        let others: u64 = self.streams.iter().skip(1).map(|stream| stream.sender.bytes()).sum();
        let reporter = self.reporter;
        let disks = self.mirror.as_mut().map(MirrorSource::round);
        let disk_bytes = disks.as_ref().map_or(0, DiskRound::left);
        let keepalive = self.keepalive;
        let share = |stream| Share { sets: pages, memory: &memory, stream, streams, first, keepalive };
        let work = |stream: &mut Stream, index, reports: bool| {
            // Estimate: the other streams have sent as much in this round as this one.
            let mut after = |bytes: u64| {
                if reports {
                    disks.iter().for_each(|disks| reporter.report_disk_left(disks.left()));
                    reporter.report_sent(bytes + others);
                }
            };
            if let Some(disks) = &disks {
                disks.send(index, streams, &mut stream.sender, &mut stream.connection, &mut after)?;
                stream.send(Kind::Settle, &[])?;
            }
            let sent = share(index).send(&mut stream.sender, &mut stream.connection, &mut after)?;
            stream.announced += sent.announced;
            Ok(sent)
        };
        let work = &work;
        let Some((control, others)) = self.streams.split_first_mut() else { return Ok(Sent::default()) };
        let results: Vec<Result<Sent, MigrationError>> = std::thread::scope(|scope| {
            let threads: Vec<_> = others
                .iter_mut()
                .zip(1..)
                .map(|(stream, index)| scope.spawn(move || work(stream, index, false)))
                .collect();
            let own = work(control, 0, true);
            let panicked = || MigrationError::Protocol("nothing: a thread of this side panicked".to_owned());
            let joined = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(panicked())));
            std::iter::once(own).chain(joined).collect()
        });
        let mut total = Sent { disk_bytes, ..Sent::default() };
        for result in results {
            let sent = result?;
            total.pages += sent.pages;
            total.zero += sent.zero;
            total.announced += sent.announced;
        }
        if self.mirror.is_some() {
            self.answer(Kind::Settled)?;
        }
        Ok(total)
    }

    /// Records a round in the timeline; returns its bytes.
    fn note_round(&mut self, began: Instant, sent: &Sent, dirtied: u64, throttle: u8, stopped: bool) -> u64 {
        let all: u64 = self.streams.iter().map(|stream| stream.sender.bytes()).sum();
        let before = self.timeline.bytes;
        self.timeline.bytes = all;
        self.timeline.disks = self.mirror.as_ref().map_or_else(Vec::new, MirrorSource::summary);
        let whole = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        self.timeline.rounds.push(MigrationRound {
            began_ms: whole(began - self.began),
            took_ms: whole(began.elapsed()),
            pages: sent.pages,
            zero_pages: sent.zero,
            bytes: all.saturating_sub(before),
            dirtied,
            disk_bytes: sent.disk_bytes,
            disk_bytes_dirtied: self.mirror.as_ref().map_or(0, MirrorSource::left),
            throttle_percent: throttle,
            stopped,
        });
        all.saturating_sub(before)
    }
}

/// Union of the pages, set by set: both lists describe the same memory.
fn union(mut one: Vec<DirtyPages>, other: Vec<DirtyPages>) -> Vec<DirtyPages> {
    for set in other {
        match one.iter_mut().find(|mine| mine.start == set.start && mine.bitmap.len() == set.bitmap.len()) {
            Some(mine) => mine.bitmap.iter_mut().zip(&set.bitmap).for_each(|(to, word)| *to |= word),
            None => one.push(set),
        }
    }
    one
}

/// Runs `work` while vCPUs are throttled by the value that it sets.
fn throttled<T>(machine: &dyn SourceMachine, work: impl FnOnce(&AtomicU8) -> T) -> T {
    let throttle = AtomicU8::new(0);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let throttler = scope.spawn(|| run_throttle(machine, &throttle, &over));
        let result = work(&throttle);
        over.store(true, Ordering::Release);
        throttler.thread().unpark();
        result
    })
}

/// Pauses vCPUs for their part of each period, until the work is over.
fn run_throttle(machine: &dyn SourceMachine, throttle: &AtomicU8, over: &AtomicBool) {
    while !over.load(Ordering::Acquire) {
        let held = THROTTLE_PERIOD * u32::from(throttle.load(Ordering::Acquire)) / 100;
        if !held.is_zero() {
            machine.throttle(held);
        }
        std::thread::park_timeout(THROTTLE_PERIOD - held);
    }
}

pub(super) fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}
