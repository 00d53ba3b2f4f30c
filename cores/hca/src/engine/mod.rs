//! The engine: it owns the devices of all VMs of a host, and executes their queue pairs' requests.
//!
//! ```text
//! doorbell_*, scan_context ──▶ active list ──▶ poll: one turn per queue pair, round robin
//!                                                │ fetch, execute (local transport), retire, push completions
//!                       timers ◀── waits ────────┤ no receive at the peer, no response, rate limit
//!                                                └▶ Sink: completion and asynchronous events
//! ```
//!
//! Nothing here is concurrent. When a verb returns, it is complete, and the engine doesn't access a destroyed object's memory any more.
//! Work is proportional to the queue pairs on the active list; the engine doesn't poll idle ones.
//!
//! **Completion events.** Exact arms: an armed completion queue gets one event with its next completion. Sampled arms (doorbells are plain
//! memory, and an arm may have been overwritten): each completion queue counts as possibly armed. If it has unconsumed completions and its
//! consumer has not moved for [`EngineConfig::notify_after_ns`], the engine sends one event. It sends the next only after the consumer has
//! moved.

mod completion;
mod create;
mod destroy;
mod devices;
mod failure;
mod hold;
mod inbound;
mod late;
mod modify;
mod poll;
mod query;
mod restore;
mod save;
mod scan;
mod teardown;
mod timers;
mod transitions;

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};

use crate::attributes::QpKind;
use crate::limits::{Capabilities, Limits};
use crate::memory::Piece;
use crate::names::{
    ContextHandle, CqHandle, DeviceId, Gid, MrHandle, PdHandle, QpHandle, Qpn, SegmentId, SrqHandle,
};
use crate::objects::{CqRef, Device, Qp, QpRef, WaitList};
use crate::provider::Provider;
use crate::transport::Action;
use crate::work::AsyncEvent;

pub(crate) use failure::completed;
pub use hold::Verdict;
pub(crate) use inbound::Inbound;
pub(crate) use late::Late;
pub(crate) use modify::PSN_MASK;
pub use query::{DeviceReport, ObjectCounts};
pub use save::{SavedCq, SavedQp, SavedSrq};
pub use teardown::Teardown;

/// Parameters of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineConfig {
    /// Time that a completion lies unconsumed before an event is sent where arms are sampled, nanoseconds.
    pub notify_after_ns: u64,
    /// Quantum: bytes that a queue pair moves per turn.
    pub quantum_bytes: u64,
    /// Quantum where no other queue pair is active, bytes. Only doorbells and commands wait for its end.
    pub quantum_alone_bytes: u64,
    /// Bytes after which a poll ends. Bounds how long a command waits.
    pub bytes_per_poll: u64,
    /// Limit of requests that a queue pair executes per turn.
    pub requests_per_turn: u32,
    /// Limit of turns per poll.
    pub turns_per_poll: u32,
    /// Limit of queue pairs that scans check per poll.
    pub scans_per_poll: u32,
    /// Limit of timers that a poll processes.
    pub timers_per_poll: u32,
    /// Turns in a row without work after which a queue pair leaves the active list.
    pub empty_looks: u32,
    /// Number of active queue pairs from which on turns share the stores that publish their work. From there on each queue pair gets half
    /// as many turns without work, from twice that number a third, and so on. Not 0.
    pub many_active: u32,
    /// Retry interval for a full event ring, nanoseconds.
    pub retry_events_ns: u64,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            notify_after_ns: 20_000,
            quantum_bytes: 64 << 10,
            quantum_alone_bytes: 128 << 10,
            bytes_per_poll: 512 << 10,
            requests_per_turn: 16,
            turns_per_poll: 32,
            scans_per_poll: 128,
            timers_per_poll: 128,
            empty_looks: 32,
            many_active: 32,
            retry_events_ns: 50_000,
        }
    }
}

/// Configuration of a new device.
#[derive(Debug, Clone)]
pub struct DeviceConfig {
    /// Name in reports.
    pub name: String,
    /// The isolated network of the device.
    pub segment: SegmentId,
    /// Quotas and rates of the VM.
    pub limits: Limits,
    /// Limits that the guest ABI announces.
    pub capabilities: Capabilities,
}

/// Parameters of a user memory region.
#[derive(Debug, Clone)]
pub struct MrInit {
    /// First address; its offset within a page is the offset into the first page.
    pub start: u64,
    /// Length in bytes.
    pub length: u64,
    /// Access flags from the guest; unknown bits are ignored.
    pub access: u32,
    /// Guest addresses of the 4 KiB pages.
    pub pages: Box<[u64]>,
}

/// Handle and keys of a memory region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MrInfo {
    /// Handle of the region, never 0.
    pub handle: MrHandle,
    /// Local key.
    pub lkey: u32,
    /// Remote key.
    pub rkey: u32,
}

/// Parameters of a shared receive queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SrqInit {
    /// Capacity, requests.
    pub max_wr: u32,
    /// Limit of elements per request.
    pub max_sge: u32,
    /// Limit of the limit event; 0 for none.
    pub limit: u32,
}

/// A shared receive queue's attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SrqAttributes {
    /// Capacity, requests.
    pub max_wr: u32,
    /// Limit of elements per request.
    pub max_sge: u32,
    /// Limit of the limit event; 0 when it is not armed.
    pub limit: u32,
}

/// Parameters of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpInit {
    /// Protection domain.
    pub pd: PdHandle,
    /// Transport service (`enum ib_qp_type`).
    pub kind: QpKind,
    /// Completion queue of the send queue.
    pub send_cq: CqHandle,
    /// Completion queue of the receive queue.
    pub receive_cq: CqHandle,
    /// Shared receive queue instead of a receive ring.
    pub srq: Option<SrqHandle>,
    /// Whether every send request produces a completion.
    pub signal_all: bool,
    /// Capacity of the send queue, requests.
    pub max_send_wr: u32,
    /// Capacity of the receive queue, requests; 0 with a shared receive queue.
    pub max_receive_wr: u32,
    /// Limit of elements per send request.
    pub max_send_sge: u32,
    /// Limit of elements per receive request.
    pub max_receive_sge: u32,
}

/// Handle and number of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpInfo {
    /// Handle, below the device's limit.
    pub handle: QpHandle,
    /// Queue pair number, 24 bits: the handle in bits 15:0, a generation in bits 23:16. The general services queue pair has 1.
    pub qpn: Qpn,
}

/// Result of a poll.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Whether anything was done.
    pub worked: bool,
    /// Latest time of the next poll, nanoseconds. `None`: only after a doorbell. Not later than now: at once.
    pub next: Option<u64>,
    /// Requests executed.
    pub requests: u32,
}

/// Purpose of a timer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Timer {
    /// Ends the wait of a queue pair.
    Qp(QpRef),
    /// A device's rate limit permits more.
    Device(u32),
    /// The limit of peers' writes to a device's memory permits more.
    Inbound(u32),
    /// Retries requests that wait for not-present memory of a device's guest.
    Late(u32),
}

/// A scan of a context's queue pairs in progress.
#[derive(Debug, Clone, Copy)]
struct Scan {
    device: u32,
    context: u32,
    stamp: u64,
    /// How many of its queue pairs the scan has checked.
    position: usize,
}

/// By [`DeviceId`], which is never reused.
type Devices<P> = Vec<Option<Box<Device<P>>>>;

/// The engine. `P` is the guest ABI of its devices.
pub struct Engine<P: Provider> {
    config: EngineConfig,
    /// Time of the last poll, nanoseconds.
    now: u64,
    devices: Devices<P>,
    /// Device with an address.
    gids: HashMap<(SegmentId, Gid), u32>,
    /// Source of stamps, which identify objects.
    stamps: u64,
    /// Increases whenever addresses, devices or paths are added or removed.
    topology: u64,
    /// Number of path look-ups.
    path_lookups: u64,
    /// Devices with active queue pairs. Turns are round robin over devices, and within a device over its queue pairs. So a VM with many
    /// queue pairs gets no more than one with few.
    active: VecDeque<u32>,
    /// Number of queue pairs on all devices' active lists.
    active_qps: u32,
    timers: BTreeSet<(u64, Timer)>,
    /// Deadlines of timers that exist at most once per device and kind.
    device_timers: HashMap<Timer, u64>,
    scans: VecDeque<Scan>,
    /// Accumulated time that scans may use, nanoseconds.
    scan_time: u64,
    /// The last poll executed no request.
    idle: bool,
    /// Completion queues with a due check of their consumer, ordered by time.
    watched: VecDeque<(u64, CqRef)>,
    /// Completion queues with an event to deliver.
    notifications: Vec<CqRef>,
    /// Completion queues whose event the sink had no room for, and when it is retried.
    undelivered: Vec<CqRef>,
    retry_at: u64,
    /// Events to deliver.
    events: Vec<(u32, AsyncEvent)>,
    /// The queue pair whose turn it is.
    turn_of: Option<QpRef>,
    /// Work to publish in [`Engine::settle`]: queue pairs with the number of slots to release, and completion queues with unpublished
    /// completions. Empty between polls.
    unretired: Vec<(QpRef, u32)>,
    unpublished: Vec<CqRef>,
    /// Turns since the last [`Engine::settle`].
    unsettled_turns: u32,
    /// Failed completion queues whose queue pairs have not been failed yet.
    failed_cqs: Vec<CqRef>,
    /// Segments in which a transport may reach addresses that no device here has.
    pub(crate) uplinks: HashSet<SegmentId>,
    /// Suspended addresses, by device.
    held: HashSet<(u32, Gid)>,
    /// Queue pairs parked at a suspended address.
    parked: WaitList,
    /// Number of devices whose inbound writes are counted.
    inbound_watched: usize,
    /// Number of devices whose guests have not-present memory.
    late_devices: usize,
    /// Addresses of VMs that have moved to another engine.
    pub(crate) moved: HashSet<(SegmentId, Gid)>,
    /// Actions for transports.
    pub(crate) actions: Vec<Action>,
    /// Scratch for a copy's two sides.
    source: Vec<Piece>,
    target: Vec<Piece>,
}

impl<P: Provider> Engine<P> {
    /// An engine without devices.
    #[must_use]
    pub fn new(config: EngineConfig) -> Self {
        Self {
            config,
            now: 0,
            devices: Vec::new(),
            gids: HashMap::new(),
            stamps: 0,
            topology: 1,
            path_lookups: 0,
            active: VecDeque::new(),
            active_qps: 0,
            timers: BTreeSet::new(),
            device_timers: HashMap::new(),
            scans: VecDeque::new(),
            scan_time: 0,
            idle: true,
            watched: VecDeque::new(),
            notifications: Vec::new(),
            undelivered: Vec::new(),
            retry_at: 0,
            events: Vec::new(),
            turn_of: None,
            unretired: Vec::new(),
            unpublished: Vec::new(),
            unsettled_turns: 0,
            failed_cqs: Vec::new(),
            uplinks: HashSet::new(),
            held: HashSet::new(),
            parked: WaitList::default(),
            inbound_watched: 0,
            late_devices: 0,
            moved: HashSet::new(),
            actions: Vec::new(),
            source: Vec::new(),
            target: Vec::new(),
        }
    }

    fn stamp(&mut self) -> u64 {
        self.stamps += 1;
        self.stamps
    }

    #[inline]
    pub(crate) fn device(&self, device: u32) -> Option<&Device<P>> {
        self.devices.get(device as usize)?.as_deref()
    }

    #[inline]
    pub(crate) fn device_mut(&mut self, device: u32) -> Option<&mut Device<P>> {
        self.devices.get_mut(device as usize)?.as_deref_mut()
    }

    /// The queue pair, if the reference is still valid.
    #[inline]
    pub(crate) fn qp(&self, at: QpRef) -> Option<&Qp<P>> {
        self.device(at.device)?.qps.get(at.handle).map(Box::as_ref).filter(|qp| qp.stamp == at.stamp)
    }

    /// As [`Engine::qp`], mutable.
    #[inline]
    pub(crate) fn qp_mut(&mut self, at: QpRef) -> Option<&mut Qp<P>> {
        let device = self.devices.get_mut(at.device as usize)?.as_deref_mut()?;
        device.qps.get_mut(at.handle).map(Box::as_mut).filter(|qp| qp.stamp == at.stamp)
    }

    /// Reference to the queue pair with a handle.
    pub(crate) fn qp_ref(&self, device: DeviceId, handle: QpHandle) -> Option<QpRef> {
        let stamp = self.device(device.0)?.qps.get(handle.0)?.stamp;
        Some(QpRef { device: device.0, handle: handle.0, stamp })
    }

    /// The context that a queue pair belongs to.
    #[must_use]
    pub fn context_of_qp(&self, device: DeviceId, qp: QpHandle) -> Option<ContextHandle> {
        Some(ContextHandle(self.device(device.0)?.qps.get(qp.0)?.context))
    }

    /// The context that a completion queue belongs to.
    #[must_use]
    pub fn context_of_cq(&self, device: DeviceId, cq: CqHandle) -> Option<ContextHandle> {
        Some(ContextHandle(self.device(device.0)?.cqs.get(cq.0)?.context))
    }

    /// The context that a shared receive queue belongs to.
    #[must_use]
    pub fn context_of_srq(&self, device: DeviceId, srq: SrqHandle) -> Option<ContextHandle> {
        Some(ContextHandle(self.device(device.0)?.srqs.get(srq.0)?.context))
    }

    /// A number that increases whenever addresses or paths are added or removed.
    #[inline]
    #[must_use]
    pub fn topology(&self) -> u64 {
        self.topology
    }

    /// Number of path look-ups of connected queue pairs since the engine was created. A connection is looked up once, and after each change
    /// of addresses or paths, or of either end's state or attributes.
    #[must_use]
    pub fn path_lookups(&self) -> u64 {
        self.path_lookups
    }

    pub(crate) fn count_path_lookup(&mut self) {
        self.path_lookups += 1;
    }

    /// Invalidates all paths.
    pub(crate) fn topology_changed(&mut self) {
        self.topology += 1;
    }

    #[inline]
    pub(crate) fn now(&self) -> u64 {
        self.now
    }

    #[inline]
    pub(crate) fn quantum_bytes(&self) -> u64 {
        if self.active_qps == 0 { self.config.quantum_alone_bytes } else { self.config.quantum_bytes }
    }

    /// The device that has an address in a segment.
    #[inline]
    pub(crate) fn owner_of(&self, segment: SegmentId, gid: Gid) -> Option<u32> {
        self.gids.get(&(segment, gid)).copied()
    }

    /// Source and target of the copy, as gathered.
    #[inline]
    pub(crate) fn pieces(&self) -> (&[Piece], &[Piece]) {
        (&self.source, &self.target)
    }

    /// All devices, and the scratch for the copy's source.
    #[inline]
    pub(crate) fn split_source(&mut self) -> (&Devices<P>, &mut Vec<Piece>) {
        (&self.devices, &mut self.source)
    }

    /// All devices, and the scratch for the copy's target.
    #[inline]
    pub(crate) fn split_target(&mut self) -> (&Devices<P>, &mut Vec<Piece>) {
        (&self.devices, &mut self.target)
    }

    /// Queues an event for the guest, which the next poll delivers at the latest.
    pub(crate) fn event(&mut self, device: u32, event: AsyncEvent) {
        self.events.push((device, event));
    }
}
