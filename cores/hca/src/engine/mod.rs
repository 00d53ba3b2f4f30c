//! The engine: it owns the devices of all VMs of a host, and executes what their queue pairs ask for.
//!
//! ```text
//! doorbell_*, scan_context ──▶ active list ──▶ poll: one turn per queue pair, round robin
//!                                                │ fetch, execute (local transport), retire, push completions
//!                       timers ◀── waits ────────┤ no receive at the peer, no answer, rate limit
//!                                                └▶ Sink: completion and asynchronous events
//! ```
//!
//! Nothing here is concurrent: a verb that has returned is finished, and nothing touches a destroyed object's memory
//! afterwards. Work is proportional to the queue pairs on the active list; idle ones are never looked at.
//!
//! **Completion events.** Where arms are exact, an armed completion queue gets one event with its next completion. Where
//! doorbells are plain memory and an arm may have been overwritten, each completion queue counts as possibly armed: when
//! completions lie there and its consumer has not moved for [`EngineConfig::notify_after_ns`], one event goes out; the next
//! not before the consumer has moved.

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
use crate::remote::Action;
use crate::work::AsyncEvent;

pub(crate) use create::power_on_attributes;
pub(crate) use failure::completed;
pub use hold::Verdict;
pub(crate) use inbound::Inbound;
pub(crate) use late::Late;
pub(crate) use modify::PSN_MASK;
pub use query::{DeviceReport, ObjectCounts};
pub use save::{SavedCq, SavedQp, SavedSrq};
pub use teardown::Teardown;

/// How an engine works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineConfig {
    /// How long a completion may lie unconsumed before an event goes out where arms may be missed, nanoseconds.
    pub notify_after_ns: u64,
    /// Bytes that a queue pair moves per turn.
    pub quantum_bytes: u64,
    /// The same where no other queue pair is active, so that nobody waits for the end of the turn but doorbells and commands.
    pub quantum_alone_bytes: u64,
    /// Bytes after which a poll ends: how long a command waits at most.
    pub bytes_per_poll: u64,
    /// Requests that a queue pair executes per turn.
    pub requests_per_turn: u32,
    /// Turns per poll.
    pub turns_per_poll: u32,
    /// Queue pairs that a scan looks at per poll at most.
    pub scans_per_poll: u32,
    /// Timers that run out per poll.
    pub timers_per_poll: u32,
    /// Turns without work after which a queue pair leaves the active list.
    pub empty_looks: u32,
    /// With so many active queue pairs turns share the stores that show what they did, and each gets half as many empty looks, with
    /// twice as many a third, and so on. Not 0.
    pub many_active: u32,
    /// When a full event ring is tried again, nanoseconds.
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

/// A device to add.
#[derive(Debug, Clone)]
pub struct DeviceConfig {
    /// For reports.
    pub name: String,
    /// The isolated network it is in.
    pub segment: SegmentId,
    /// What the VM may use.
    pub limits: Limits,
    /// What the guest ABI promises.
    pub capabilities: Capabilities,
}

/// A user memory region to register.
#[derive(Debug, Clone)]
pub struct MrInit {
    /// First address; its offset within a page is the offset into the first page.
    pub start: u64,
    /// Bytes.
    pub length: u64,
    /// Access flags as the guest gave them; unknown bits are ignored.
    pub access: u32,
    /// Guest addresses of the 4 KiB pages.
    pub pages: Box<[u64]>,
}

/// A memory region's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MrInfo {
    /// Handle.
    pub handle: MrHandle,
    /// Local key.
    pub lkey: u32,
    /// Remote key.
    pub rkey: u32,
}

/// A shared receive queue to create.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SrqInit {
    /// Requests.
    pub max_wr: u32,
    /// Elements per request.
    pub max_sge: u32,
    /// Limit that raises the event, 0 for none.
    pub limit: u32,
}

/// A shared receive queue's attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SrqAttributes {
    /// Requests.
    pub max_wr: u32,
    /// Elements per request.
    pub max_sge: u32,
    /// Limit; 0 when it is not armed.
    pub limit: u32,
}

/// A queue pair to create.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpInit {
    /// Protection domain.
    pub pd: PdHandle,
    /// Kind.
    pub kind: QpKind,
    /// Completion queue of the send queue.
    pub send_cq: CqHandle,
    /// Completion queue of the receive queue.
    pub receive_cq: CqHandle,
    /// Shared receive queue instead of an own one.
    pub srq: Option<SrqHandle>,
    /// Every send request completes with a completion.
    pub signal_all: bool,
    /// Send requests.
    pub max_send_wr: u32,
    /// Receive requests; 0 with a shared receive queue.
    pub max_receive_wr: u32,
    /// Elements per send request.
    pub max_send_sge: u32,
    /// Elements per receive request.
    pub max_receive_sge: u32,
}

/// A queue pair's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpInfo {
    /// Handle, below the device's limit.
    pub handle: QpHandle,
    /// Number, 24 bits: the handle in bits 15:0, a generation in bits 23:16. The general services queue pair has 1.
    pub qpn: Qpn,
}

/// What a poll did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Whether anything was done.
    pub worked: bool,
    /// When to poll again at the latest; `None`: not before a doorbell. Not later than now: at once.
    pub next: Option<u64>,
    /// Requests executed.
    pub requests: u32,
}

/// What a timer is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Timer {
    /// A queue pair's wait is over.
    Qp(QpRef),
    /// A device's rate limit allows more.
    Device(u32),
    /// What peers may write into a device's memory.
    Inbound(u32),
    /// Memory of a device's guest that is still to come.
    Late(u32),
}

/// A scan of a context's queue pairs.
#[derive(Debug, Clone, Copy)]
struct Scan {
    device: u32,
    context: u32,
    stamp: u64,
    /// How many of its queue pairs were looked at.
    position: usize,
}

/// By [`DeviceId`], which is never used again.
type Devices<P> = Vec<Option<Box<Device<P>>>>;

/// The engine. `P` is the guest ABI that its devices speak.
pub struct Engine<P: Provider> {
    config: EngineConfig,
    /// Time of the last poll, nanoseconds.
    now: u64,
    devices: Devices<P>,
    /// Who has which address.
    gids: HashMap<(SegmentId, Gid), u32>,
    /// Source of stamps.
    stamps: u64,
    /// Changes whenever addresses, devices or ways between them come or go.
    topology: u64,
    /// How often a queue pair's path was looked up.
    path_lookups: u64,
    /// Devices with active queue pairs. Turns go round robin over devices, and within one over its queue pairs, so that a VM with
    /// many takes no more than one with few.
    active: VecDeque<u32>,
    /// Queue pairs on all devices' active lists.
    active_qps: u32,
    timers: BTreeSet<(u64, Timer)>,
    /// When those timers run out of which a device has at most one of each kind.
    device_timers: HashMap<Timer, u64>,
    scans: VecDeque<Scan>,
    /// Nanoseconds of which scans have a share that they haven't used.
    scan_time: u64,
    /// The last poll executed nothing.
    idle: bool,
    /// Completion queues whose consumer is to be looked at, in the order of time.
    watched: VecDeque<(u64, CqRef)>,
    /// Completion queues with an event to deliver.
    notifications: Vec<CqRef>,
    /// Those for whose event the sink had no room, and when they are tried again.
    undelivered: Vec<CqRef>,
    retry_at: u64,
    /// Events to deliver.
    events: Vec<(u32, AsyncEvent)>,
    /// The queue pair whose turn it is.
    turn_of: Option<QpRef>,
    /// What [`Engine::settle`] is to show: queue pairs with as many slots to give back, and completion queues with completions
    /// that nobody published. Empty between polls.
    unretired: Vec<(QpRef, u32)>,
    unpublished: Vec<CqRef>,
    /// Turns since then.
    unsettled_turns: u32,
    /// Completion queues that failed and whose queue pairs are still to be told.
    failed_cqs: Vec<CqRef>,
    /// Segments whose addresses that nobody here has may be reached by a transport.
    pub(crate) uplinks: HashSet<SegmentId>,
    /// Devices and addresses that they don't send to for now.
    held: HashSet<(u32, Gid)>,
    /// Queue pairs that found themselves held.
    parked: WaitList,
    /// Devices of which somebody wants to know what peers write into their guests' memory.
    inbound_watched: usize,
    /// Devices whose guests' memory is still to come.
    late_devices: usize,
    /// Addresses whose VMs have moved to another engine.
    pub(crate) moved: HashSet<(SegmentId, Gid)>,
    /// What transports have to do.
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

    /// A queue pair that is still the one referred to.
    #[inline]
    pub(crate) fn qp(&self, at: QpRef) -> Option<&Qp<P>> {
        self.device(at.device)?.qps.get(at.handle).map(Box::as_ref).filter(|qp| qp.stamp == at.stamp)
    }

    /// As [`Engine::qp`], with its device's other parts left out.
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

    /// Changes whenever addresses or ways come or go.
    #[inline]
    #[must_use]
    pub fn topology(&self) -> u64 {
        self.topology
    }

    /// How often the path of a connected queue pair was looked up since the engine began: once per connection and change of addresses or ways,
    /// and of either end's state or attributes.
    #[must_use]
    pub fn path_lookups(&self) -> u64 {
        self.path_lookups
    }

    pub(crate) fn count_path_lookup(&mut self) {
        self.path_lookups += 1;
    }

    /// Paths may have come or gone.
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

    /// The copy's two sides, as gathered.
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

    /// An event for the guest, delivered at the latest with the next poll.
    pub(crate) fn event(&mut self, device: u32, event: AsyncEvent) {
        self.events.push((device, event));
    }
}
