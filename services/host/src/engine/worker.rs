//! The loop of the engine's thread.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use crossbeam_channel::Receiver;
use dma::MappedMemory;
use hca::engine::Engine;
use hca::limits::Limits;
use hca::names::DeviceId;
use pvrdma::abi::{PAGE, doorbells};
use pvrdma::device::FatalError;
use pvrdma::{ConfigError, Devices, DoorbellMode as Doorbells, Phase, Pvrdma, Uar};
use quanta::Clock;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vfio_user_protocol::doorbell_mode::DoorbellMode;

use super::handshake::{Handshake, Reached};
use super::late::PostcopyDevice;
use super::load::Load;
use super::pace::Pace;
use super::report::LoopCounters;
use super::served::{Device, DeviceSetup, Served, Vectors};
use super::{EngineSetup, Message, Wake};
use crate::migration::{Destination, Source};
use crate::transport::Transports;

/// Number of messages processed before devices get their turn.
const MESSAGES_PER_ROUND: usize = 64;
/// Number of passes without work after which the thread yields its CPU in each pass: a guest that shares the CPU may be the source of the
/// awaited work.
const EAGER_ROUNDS: u32 = 200;

/// Result of a register write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// Complete; guest address of the driver's shared region, if there is a driver.
    Done(Option<u64>),
    /// It needs not-present memory, and changed nothing.
    Postponed,
    /// A slice is complete. Repeat the write at once; other devices are served in between.
    Unfinished,
}

/// State of the thread.
pub struct Worker {
    pub(super) engine: Engine<Pvrdma<MappedMemory>>,
    pub(super) devices: Devices<MappedMemory>,
    pub(super) served: BTreeMap<DeviceId, Served>,
    /// Devices of VMs that leave, and of VMs that arrive.
    pub(super) leaving: BTreeMap<DeviceId, Source>,
    pub(super) arriving: BTreeMap<DeviceId, Destination>,
    /// Devices with not-present guest memory.
    pub(super) late: BTreeMap<DeviceId, PostcopyDevice>,
    /// Limits of peers' writes to devices that leave.
    pub(super) paces: BTreeMap<DeviceId, Pace>,
    inbox: Receiver<Message>,
    wake: Arc<Wake>,
    clock: Clock,
    /// Time of the engine's start.
    started: u64,
    idle: u64,
    busy_window: u64,
    pub(super) counters: LoopCounters,
    stopping: bool,
    /// A slice of a long command was executed: serve others before the next one.
    slice_done: bool,
    /// Transports to other hosts.
    pub(super) transports: Option<Transports>,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Worker").field("counters", &self.counters).finish_non_exhaustive()
    }
}

impl Worker {
    pub(super) fn new(
        setup: EngineSetup,
        transports: Option<Transports>,
        inbox: Receiver<Message>,
        wake: Arc<Wake>,
    ) -> Self {
        let clock = Clock::new();
        Self {
            engine: Engine::new(setup.engine),
            devices: Devices::default(),
            served: BTreeMap::new(),
            leaving: BTreeMap::new(),
            arriving: BTreeMap::new(),
            late: BTreeMap::new(),
            paces: BTreeMap::new(),
            inbox,
            wake,
            started: clock.raw(),
            clock,
            idle: u64::try_from(setup.idle.as_nanos()).unwrap_or(u64::MAX),
            busy_window: u64::try_from(setup.busy_window.as_nanos()).unwrap_or(u64::MAX),
            counters: LoopCounters::default(),
            stopping: false,
            slice_done: false,
            transports,
        }
    }

    pub(super) fn now(&self) -> u64 {
        self.clock.delta_as_nanos(self.started, self.clock.raw())
    }

    pub(super) fn run(&mut self) {
        let mut empty = 0;
        while !self.stopping {
            let worked = self.round();
            if worked.anything {
                empty = 0;
                if worked.received {
                    std::thread::yield_now();
                }
                continue;
            }
            self.counters.empty_polls += 1;
            if worked.again && !worked.shares {
                empty = 0;
                continue;
            }
            if worked.again || worked.poll_on {
                empty += 1;
                if worked.shares || empty > EAGER_ROUNDS {
                    std::thread::yield_now();
                } else {
                    std::hint::spin_loop();
                }
                continue;
            }
            empty = 0;
            self.sleep(worked.until);
        }
    }

    /// One pass: messages, doorbells, work, events.
    fn round(&mut self) -> Round {
        self.counters.polls += 1;
        let mut anything = self.take_messages();
        anything |= self.poll_arrived_pages();
        let now = self.now();
        anything |= self.look_at_doorbells(now);
        let mut received = false;
        if let Some(transports) = &mut self.transports {
            received = transports.receive(&mut self.engine, now);
            anything |= received;
        }
        let progress = self.engine.poll(now, &mut self.devices);
        anything |= progress.worked;
        let mut until = progress.next;
        let again = until.is_some_and(|time| time <= now);
        let (mut poll_on, mut shares) = (false, false);
        if let Some(transports) = &mut self.transports {
            anything |= transports.carry(&mut self.engine, now);
            poll_on |= transports.is_busy(now);
            shares = transports.has_remote_peers();
            if let Some(time) = transports.next() {
                earliest(&mut until, Some(time));
            }
        }
        // Both are ordered by identifier.
        for (device, (id, served)) in self.devices.iter_mut().zip(&mut self.served) {
            debug_assert_eq!(device.id(), *id);
            if self.engine.is_stopped(*id) {
                continue;
            }
            // Doorbells, calls and passes that execute nothing also queue events, and reminders are sent here.
            earliest(&mut until, device.flush_events(now, &served.msix));
            match served.follow(device, self.idle, now) {
                Wait::Doorbells => {}
                Wait::Poll => poll_on = true,
                Wait::Look(time) => earliest(&mut until, Some(time)),
            }
        }
        Round { anything, received, again, poll_on, shares, until }
    }

    fn take_messages(&mut self) -> bool {
        for count in 0..MESSAGES_PER_ROUND {
            match self.inbox.try_recv() {
                Ok(Message::Job(job)) => {
                    self.counters.calls += 1;
                    job(self);
                    if std::mem::take(&mut self.slice_done) {
                        return true;
                    }
                }
                Ok(Message::Doorbell { device, offset, value }) => {
                    self.counters.trapped_doorbells += 1;
                    self.trapped_doorbell(device, offset, value);
                }
                Err(_) => return count > 0,
            }
        }
        true
    }

    /// Sleeps until a message arrives, or until a time.
    fn sleep(&mut self, until: Option<u64>) {
        self.wake.sleeping.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        // An earlier sender read `sleeping` before it was set.
        if self.inbox.is_empty() {
            let left = until.map(|until| until.saturating_sub(self.now()));
            if left != Some(0) {
                self.counters.sleeps += 1;
                let timeout = left.map(|left| Timespec {
                    tv_sec: i64::try_from(left / 1_000_000_000).unwrap_or(i64::MAX),
                    tv_nsec: i64::try_from(left % 1_000_000_000).unwrap_or(0),
                });
                let mut fds = vec![PollFd::from_borrowed_fd(self.wake.event.as_fd(), PollFlags::IN)];
                if let Some(transports) = &self.transports {
                    fds.extend(transports.fds().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
                }
                fds.extend(
                    self.late.values().map(|device| PollFd::from_borrowed_fd(device.fd(), PollFlags::IN)),
                );
                // Interrupted or not: the loop checks everything.
                let _ = poll(&mut fds, timeout.as_ref());
            }
        }
        self.wake.sleeping.store(false, Ordering::SeqCst);
        // Fails when no sender has signalled.
        let _ = rustix::io::read(&self.wake.event, &mut [0_u8; 8]);
        self.clear_arrivals();
    }

    /// Polls doorbells in memory.
    fn look_at_doorbells(&mut self, now: u64) -> bool {
        let mut found = false;
        for (device, (id, served)) in self.devices.iter_mut().zip(&mut self.served) {
            debug_assert_eq!(device.id(), *id);
            // The words of a stopped device need no polling; those of one that arrives are empty.
            if self.engine.is_stopped(*id) {
                continue;
            }
            if served.handshake.in_memory() && (served.handshake.offered() || served.load.next_look() <= now)
            {
                match served.look_if_due(device, &mut self.engine, now) {
                    Some(true) => {
                        served.load.worked(now);
                        found = true;
                    }
                    Some(false) => served.load.found_nothing(now),
                    // It has active queue pairs, and was polled a moment ago.
                    None => {}
                }
            }
        }
        found
    }

    /// Handles a trapped doorbell for which the vCPU waits.
    pub fn doorbell(&mut self, device: DeviceId, offset: u64, value: u32) {
        self.counters.trapped_doorbells += 1;
        self.trapped_doorbell(device, offset, value);
    }

    fn trapped_doorbell(&mut self, id: DeviceId, offset: u64, value: u32) {
        let now = self.now();
        let (Some(device), Some(served)) = (self.devices.get_mut(id), self.served.get_mut(&id)) else {
            return;
        };
        device.doorbell_write(&mut self.engine, offset, value);
        if is_user_arm(offset, value) {
            served.load.armed(now);
        }
        if served.load.trapped(now, self.busy_window) && served.handshake.want(DoorbellMode::Mapped, now) {
            tracing::debug!(device = id.0, "Doorbells are to be memory: many came");
            served.load.enters_memory(now);
            // From here on a store may go to memory, and overwrite an arm there.
            device.set_doorbells(&mut self.engine, Doorbells::Shared);
            served.mode.raise(0);
        }
    }

    /// A device and its state.
    fn find(
        &mut self,
        id: DeviceId,
    ) -> Option<(&mut Device, &mut Served, &mut Engine<Pvrdma<MappedMemory>>)> {
        Some((self.devices.get_mut(id)?, self.served.get_mut(&id)?, &mut self.engine))
    }

    /// Ends the loop.
    pub(super) fn stop(&mut self) {
        self.stopping = true;
    }

    /// Adds a device in its power-on state, without memory or bus mastering.
    ///
    /// # Errors
    /// When the engine has no room, or the configuration is invalid.
    pub fn attach(&mut self, setup: DeviceSetup) -> Result<DeviceId, ConfigError> {
        let now = self.now();
        setup.pages.clear();
        let segment_id = setup.config.segment;
        let device = Device::new(setup.config, MappedMemory::default(), &mut self.engine)?;
        let id = device.id();
        if let Some(transports) = &mut self.transports {
            transports.attach(&mut self.engine, id, &setup.vm, &setup.segment, segment_id);
            transports.attach_wire(&mut self.engine, id, segment_id, setup.wire);
        }
        self.devices.insert(device);
        let served = Served {
            pages: setup.pages,
            msix: Vectors(setup.msix),
            mode: setup.mode,
            handshake: Handshake::new(),
            load: Load::new(now),
        };
        self.served.insert(id, served);
        Ok(id)
    }

    /// Removes a device, whose guest's memory isn't accessed any more. To its peers it vanishes.
    pub fn detach(&mut self, id: DeviceId) {
        self.leaving.remove(&id);
        self.arriving.remove(&id);
        self.paces.remove(&id);
        self.late.remove(&id);
        if let Some(transports) = &mut self.transports {
            transports.detach(id);
        }
        self.served.remove(&id);
        if let Some(device) = self.devices.remove(id) {
            device.remove(&mut self.engine);
        }
    }

    /// Replaces the table of the guest's memory; the old one isn't used any more.
    pub fn set_memory(&mut self, id: DeviceId, memory: MappedMemory) {
        self.suspend(id);
        if let Some((device, _, engine)) = self.find(id) {
            device.set_memory(engine, memory);
        }
    }

    /// Sets Bus Master Enable.
    pub fn set_bus_master(&mut self, id: DeviceId, enabled: bool) {
        if !enabled {
            self.suspend(id);
        }
        if let Some((device, _, engine)) = self.find(id) {
            device.set_bus_master(engine, enabled);
        }
    }

    /// Conventional reset.
    pub fn reset(&mut self, id: DeviceId) {
        if let Some((device, served, engine)) = self.find(id) {
            device.reset(engine);
            served.pages.clear();
        }
        self.settle(self.now());
    }

    /// Ends at the host's RDMA device the objects that a command has destroyed.
    fn settle(&mut self, now: u64) {
        if let Some(transports) = &mut self.transports {
            transports.settle(&mut self.engine, now);
        }
    }

    /// Ends all access of the host's RDMA device to a guest's memory.
    fn suspend(&mut self, id: DeviceId) {
        if let Some(transports) = &mut self.transports {
            transports.suspend(&mut self.engine, id);
        }
    }

    /// Reads a register of BAR 1.
    pub fn register_read(&mut self, id: DeviceId, offset: u64) -> u32 {
        self.find(id).map_or(u32::MAX, |(device, _, _)| device.register_read(offset))
    }

    /// Writes a register of BAR 1; its effect is complete when this returns. Returns where a driver's shared region is now, if there is a
    /// driver. Or returns that the write must be repeated: when its memory has arrived, or at once.
    pub fn register_write(&mut self, id: DeviceId, offset: u64, value: u32) -> Written {
        let now = self.now();
        if let Some(transports) = &mut self.transports {
            transports.catch_up(&mut self.engine, now);
        }
        let Some((device, served, engine)) = self.find(id) else { return Written::Done(None) };
        device.register_write(engine, offset, value, &served.msix);
        if device.is_postponed() {
            return Written::Postponed;
        }
        let unfinished = device.is_unfinished();
        served.load.worked(now);
        self.settle(now);
        if unfinished {
            self.slice_done = true;
            return Written::Unfinished;
        }
        Written::Done(self.shared_region(id))
    }

    /// Guest address of a device driver's shared region, if there is a driver.
    pub fn shared_region(&mut self, id: DeviceId) -> Option<u64> {
        let (device, _, _) = self.find(id)?;
        device.shared_region().filter(|_| matches!(device.phase(), Phase::Described | Phase::Active))
    }

    /// Handles a change of the directory of hosts and VMs.
    pub fn directory_changed(&mut self) {
        if let Some(transports) = &mut self.transports {
            transports.directory_changed(&mut self.engine);
        }
    }

    /// Sets quotas and rates of the VM.
    pub fn set_limits(&mut self, id: DeviceId, limits: Limits) {
        if let Some((device, _, engine)) = self.find(id) {
            device.set_limits(engine, limits);
        }
    }

    /// Records that the client has set or removed the eventfd of the doorbell mode.
    pub fn set_mode_offered(&mut self, id: DeviceId, offered: bool) {
        if let Some((device, served, engine)) = self.find(id) {
            served.handshake.set_offered(offered);
            if engine.is_stopped(id) {
                // Its doorbells are polled when it starts.
                return;
            }
            let doorbells = if offered { Doorbells::Trapped } else { Doorbells::Shared };
            device.set_doorbells(engine, doorbells);
        }
    }

    /// Handles the client's read of the wanted doorbell mode.
    pub fn read_wanted(&mut self, id: DeviceId) -> u32 {
        self.find(id).map_or(0, |(_, served, _)| served.handshake.read_wanted())
    }

    /// Handles the client's report of the doorbell mode that it has reached.
    pub fn reach(&mut self, id: DeviceId, mode: DoorbellMode) {
        let now = self.now();
        let Some((device, served, engine)) = self.find(id) else { return };
        let reached = served.handshake.reach(mode, now);
        if engine.is_stopped(id) {
            return;
        }
        match reached {
            Reached::Same => {}
            Reached::Mapped => {
                device.set_doorbells(engine, Doorbells::Shared);
                served.load.worked(now);
            }
            Reached::Trapped => {
                // Stores to memory precede the client's message, so one last poll finds them all.
                let _ = served.look(device, engine, now);
                // Also scans all queues, whatever the words contain.
                device.set_doorbells(engine, Doorbells::Trapped);
            }
        }
    }

    /// Notifies the guest's driver that its device failed with an earlier daemon, whose shared region was at `address`.
    ///
    /// # Errors
    /// When there is no region, or its ring is full.
    pub fn announce_fatal(&mut self, id: DeviceId, address: u64) -> Result<(), FatalError> {
        match self.find(id) {
            Some((device, served, engine)) => device.announce_fatal(engine, address, &served.msix),
            None => Ok(()),
        }
    }
}

/// Result of a pass.
struct Round {
    anything: bool,
    /// Packets arrived: a guest that shares the CPU may wait for them.
    received: bool,
    /// Nothing was done, and the engine polls its queues once more.
    again: bool,
    /// Doorbells may be in memory: don't sleep.
    poll_on: bool,
    /// There are connections to other hosts, so each pass makes system calls anyway. Yielding the CPU adds little to them, and a guest that
    /// shares it reads received data at once.
    shares: bool,
    /// Latest time of the next pass.
    until: Option<u64>,
}

/// What a device needs from an idle thread.
enum Wait {
    /// No polling: its doorbells trap.
    Doorbells,
    /// Constant polling.
    Poll,
    /// Polling by this time.
    Look(u64),
}

impl Served {
    /// Polls the doorbells in memory.
    fn look(&mut self, device: &mut Device, engine: &mut Engine<Pvrdma<MappedMemory>>, now: u64) -> bool {
        let pages = Looked { memory: self.pages.memory(), user_arm: Cell::new(false) };
        let any = device.scan(engine, &pages, now);
        if pages.user_arm.get() {
            self.load.armed(now);
        }
        any
    }

    /// As [`Served::look`], if a poll is due.
    fn look_if_due(
        &mut self,
        device: &mut Device,
        engine: &mut Engine<Pvrdma<MappedMemory>>,
        now: u64,
    ) -> Option<bool> {
        let pages = Looked { memory: self.pages.memory(), user_arm: Cell::new(false) };
        let any = device.look(engine, &pages, now);
        if pages.user_arm.get() {
            self.load.armed(now);
        }
        any
    }

    /// Changes the doorbell mode if that is due, and returns what the device needs.
    fn follow(&mut self, device: &Device, idle: u64, now: u64) -> Wait {
        if !self.handshake.in_memory() {
            return Wait::Doorbells;
        }
        // Without a driver, doorbells have no meaning.
        let active = device.phase() == Phase::Active;
        let users = || device.report().uar_pages > 1;
        if !self.handshake.offered() {
            return match () {
                () if !active => Wait::Doorbells,
                () if !self.load.idle_for(idle) => Wait::Poll,
                () => Wait::Look(self.load.nap(now, users())),
            };
        }
        let idle = self.load.idle_for(idle);
        if (idle || self.load.event_driven(now)) && self.handshake.want(DoorbellMode::Trapped, now) {
            tracing::debug!(device = device.id().0, idle, load = ?self.load, "Doorbells are to be trapped");
            if idle {
                self.load.leaves_memory(now);
            }
            self.mode.raise(0);
        }
        if self.handshake.is_late(now) { Wait::Look(self.load.nap(now, users())) } else { Wait::Poll }
    }
}

/// Doorbell pages that record when a user process arms a completion queue.
struct Looked<'a> {
    memory: &'a MappedMemory,
    user_arm: Cell<bool>,
}

impl Uar for Looked<'_> {
    fn load(&self, page: u32, word: u32) -> u32 {
        Uar::load(self.memory, page, word)
    }

    fn swap(&self, page: u32, word: u32) -> u32 {
        let value = Uar::swap(self.memory, page, word);
        if is_user_arm(u64::from(page) * PAGE + u64::from(word) * 4, value) {
            self.user_arm.set(true);
        }
        value
    }
}

/// Whether a doorbell arms a completion queue of a user process. The first page is the guest kernel's, whose consumers tolerate additional
/// events.
pub(crate) fn is_user_arm(offset: u64, value: u32) -> bool {
    offset >= PAGE && is_arm(offset, value)
}

/// Whether a doorbell arms a completion queue.
pub(crate) fn is_arm(offset: u64, value: u32) -> bool {
    offset % PAGE == doorbells::CQ && value & (doorbells::CQ_ARM | doorbells::CQ_ARM_SOLICITED) != 0
}

fn earliest(until: &mut Option<u64>, time: Option<u64>) {
    if let Some(time) = time {
        *until = Some(until.map_or(time, |until| until.min(time)));
    }
}
