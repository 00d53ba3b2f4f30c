//! Queue pairs with remote peers: the interface between the engine and transports.
//!
//! The engine fetches, checks and completes requests as it does for local peers. In between a transport executes them. It takes
//! [`Action`]s with [`Engine::take_actions`] after each poll, and reads the sender's memory as it sends ([`Engine::remote_gather`]). At the
//! other end it executes what arrives (`remote_receive`, `remote_write`, …), through the same checks as for a local peer. The engine keeps
//! nothing of a message: a retransmitted packet is read from memory again.
//!
//! ```text
//! send queue ─▶ fetch, check ─▶ Action::Post ─▶ transport ─ … ─▶ transport ─▶ remote_receive/write/read/atomic
//!                    outstanding ◀─ remote_complete ◀─┘
//! ```
//!
//! **Which peers are remote.** In a segment with an uplink ([`Engine::set_uplink`]): an address that no device of this engine has, or that
//! is to be reached by a transport all the same ([`Engine::set_detour`]). A connection that became remote stays so until its queue pair is
//! reset: its PSNs are part of the transport's state. A local connection stays local as well. When its peer vanishes, its data isn't sent
//! to a network, and no host there can take the peer's place. Only a migration changes one into the other ([`Engine::moved_away`],
//! [`Engine::come_local`]).

mod datagrams;
mod queued;
mod requester;
mod responder;

use std::collections::VecDeque;

use crate::attributes::{QpAttributes, QpKind, QpState};
use crate::engine::Engine;
use crate::names::{DeviceId, Gid, QpHandle, Qpn, SegmentId};
use crate::objects::{Path, QpRef};
use crate::provider::Provider;
use crate::saved;
use crate::work::{ReceiveRequest, Remote, SendRequest, Status};

pub use datagrams::{IncomingDatagram, OutgoingDatagram};
pub use queued::{AheadReceived, NotQueued, Queued, RegionInfo, first_bytes};
pub use requester::Unmoved;
pub use responder::{AtomicOperation, Refusal};

/// Identifier of a queue pair for transports. Never reused, so the identifier of a destroyed queue pair finds nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QpId {
    /// Its device.
    pub device: DeviceId,
    /// Its handle.
    pub handle: QpHandle,
    stamp: u64,
    /// Number of times that it has left RESET: another incarnation is another connection.
    incarnation: u32,
}

impl QpId {
    pub(crate) fn incarnation(self) -> u32 {
        self.incarnation
    }

    pub(crate) fn at(self) -> QpRef {
        QpRef { device: self.device.0, handle: self.handle.0, stamp: self.stamp }
    }
}

/// The operation of a posted request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PostedOperation {
    /// A SEND: consumes a receive of the peer.
    Send {
        /// Immediate data, as wire bytes.
        immediate: Option<[u8; 4]>,
        /// The peer's key to invalidate.
        invalidate: Option<u32>,
    },
    /// A WRITE: consumes a receive of the peer only with immediate data.
    Write {
        /// Remote address and key.
        remote: Remote,
        /// Immediate data, as wire bytes.
        immediate: Option<[u8; 4]>,
    },
    /// A READ: [`Posted::length`] bytes from the peer's memory.
    Read {
        /// Remote address and key.
        remote: Remote,
    },
    /// Compare and swap.
    CompareSwap {
        /// Remote address and key of the word.
        remote: Remote,
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Fetch and add.
    FetchAdd {
        /// Remote address and key of the word.
        remote: Remote,
        /// The addend.
        add: u64,
    },
}

/// A request for a transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Posted {
    /// Identifier in [`Engine::remote_gather`], [`Engine::remote_place`] and [`Engine::remote_complete`]; increases by one per request.
    pub token: u64,
    /// The operation.
    pub operation: PostedOperation,
    /// Bytes of the message; 8 for atomics.
    pub length: u32,
    /// Waits for earlier READs and atomics.
    pub fence: bool,
    /// Raises a solicited event at the peer.
    pub solicited: bool,
}

/// An action for a transport. Actions of a queue pair must be executed in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Send a request of a connected queue pair to its peer.
    Post {
        /// Queue pair.
        qp: QpId,
        /// The request, whose token increases by one per request of the queue pair.
        request: Posted,
    },
    /// Send a datagram; nothing waits for it.
    Datagram(Box<OutgoingDatagram>),
    /// A receive was posted after [`Refusal::NotReady`].
    ReceivePosted {
        /// Queue pair.
        qp: QpId,
    },
    /// The not-present guest memory of a message of a connected queue pair ([`Refusal::NotHere`], [`Unmoved::NotHere`]) has arrived.
    MemoryCame {
        /// Queue pair.
        qp: QpId,
    },
    /// The connection is closed: the queue pair was reset, failed, or is gone. The transport may still send pending responses.
    Closed {
        /// Queue pair.
        qp: QpId,
    },
    /// A region that the transport has registered ([`Engine::remote_region`]) is gone: its memory must not be accessed any more.
    RegionGone {
        /// Device that owns the region.
        device: DeviceId,
        /// Key of the region.
        key: u32,
    },
}

/// State of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionInfo {
    /// Queue pair.
    pub qp: QpId,
    /// Segment of its device.
    pub segment: SegmentId,
    /// Transport type.
    pub kind: QpKind,
    /// Own queue pair number.
    pub qpn: Qpn,
    /// Own address.
    pub source_gid: Gid,
    /// Own MAC, as bound to that address.
    pub source_mac: [u8; 6],
    /// Path, peer, initial sequence numbers, timers.
    pub attributes: QpAttributes,
    /// Whether it sends: RTS or SQD.
    pub sends: bool,
}

/// A request that a transport has.
#[derive(Debug)]
pub(crate) struct Outstanding {
    token: u64,
    pub request: SendRequest,
    /// Outcome, while earlier requests are not complete.
    outcome: Option<Result<u32, Status>>,
}

/// State that a queue pair has only while its peer is remote.
#[derive(Debug, Default)]
pub(crate) struct Elsewhere {
    pub outstanding: VecDeque<Outstanding>,
    /// Receives that a transport consumed before there was a message for them.
    pub ahead: VecDeque<ReceiveRequest>,
    /// Receives that a transport consumed ahead and returned unused: they come before those in the ring.
    pub returned: VecDeque<ReceiveRequest>,
    next_token: u64,
    /// The peer got an RNR NAK, and is to be notified of the next receive.
    pub awaits_receive: bool,
}

impl Elsewhere {
    /// Saves it.
    pub fn save(&self) -> saved::Elsewhere {
        saved::Elsewhere {
            first_token: self.outstanding.front().map_or(self.next_token, |front| front.token),
            outstanding: self.outstanding.iter().map(Outstanding::save).collect(),
            awaits_receive: self.awaits_receive,
        }
    }

    /// Restores it from a saved state that was checked.
    pub fn restore(saved: saved::Elsewhere) -> Self {
        let mut next_token = saved.first_token;
        let outstanding = saved.outstanding.into_iter().map(|saved::Outstanding { request, outcome }| {
            next_token += 1;
            Outstanding { token: next_token - 1, request, outcome }
        });
        let outstanding = outstanding.collect();
        Self { outstanding, next_token, awaits_receive: saved.awaits_receive, ..Self::default() }
    }

    /// Receives that were taken from the ring and not used, oldest first.
    pub fn taken_receives(&self) -> impl Iterator<Item = &ReceiveRequest> {
        self.ahead.iter().chain(&self.returned)
    }

    /// Removes and returns the oldest of them.
    pub fn pop_receive(&mut self) -> Option<ReceiveRequest> {
        self.ahead.pop_front().or_else(|| self.returned.pop_front())
    }

    /// The rest of the state when no transport has requests any more.
    pub fn without_requests(self) -> Option<Box<Self>> {
        (!self.returned.is_empty()).then(|| Box::new(Self { returned: self.returned, ..Self::default() }))
    }

    /// The requests that transports have.
    pub fn requests(&self) -> impl Iterator<Item = &SendRequest> {
        self.outstanding.iter().map(|outstanding| &outstanding.request)
    }

    /// Removes and returns the requests.
    pub fn take_outstanding(&mut self) -> VecDeque<saved::Outstanding> {
        let strip = |Outstanding { request, outcome, .. }| saved::Outstanding { request, outcome };
        std::mem::take(&mut self.outstanding).into_iter().map(strip).collect()
    }
}

impl Outstanding {
    fn save(&self) -> saved::Outstanding {
        saved::Outstanding { request: self.request.clone(), outcome: self.outcome }
    }
}

/// Limit of requests of one queue pair that transports have.
const MOST_OUTSTANDING: usize = 256;

impl<P: Provider> Engine<P> {
    /// Declares whether a transport may reach addresses of a segment that no device here has.
    pub fn set_uplink(&mut self, segment: SegmentId, there: bool) {
        if there {
            self.uplinks.insert(segment);
        } else {
            self.uplinks.remove(&segment);
        }
        self.topology_changed();
    }

    /// Declares that a device and other devices of this engine reach each other by a transport, as if they were on different hosts (the
    /// device is pinned to it). A device reaches itself as before.
    pub fn set_detour(&mut self, device: DeviceId, there: bool) {
        if let Some(device) = self.device_mut(device.0) {
            device.detour = there;
        }
        self.topology_changed();
    }

    /// Whether two devices here reach each other by a transport only ([`Engine::set_detour`]).
    #[must_use]
    pub fn detoured(&self, one: DeviceId, other: DeviceId) -> bool {
        self.detours(one.0, other.0)
    }

    /// Whether two devices here reach each other by a transport only.
    pub(crate) fn detours(&self, one: u32, other: u32) -> bool {
        let is_set = |device| self.device(device).is_some_and(|device| device.detour);
        one != other && (is_set(one) || is_set(other))
    }

    /// Returns the actions since the last call.
    #[must_use]
    pub fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// Returns the vector of [`Engine::take_actions`], to be reused without an allocation.
    pub fn recycle_actions(&mut self, mut actions: Vec<Action>) {
        actions.clear();
        if self.actions.is_empty() {
            self.actions = actions;
        }
    }

    /// Puts actions of [`Engine::take_actions`] back, before newer ones.
    pub fn put_back_actions(&mut self, mut actions: Vec<Action>) {
        actions.append(&mut self.actions);
        self.actions = actions;
    }

    /// Whether there are actions.
    #[must_use]
    pub fn has_actions(&self) -> bool {
        !self.actions.is_empty()
    }

    /// The state of a queue pair's connection, once it is connected (RTR or later). `None` when it isn't, or `qp` is of an older
    /// incarnation.
    #[must_use]
    pub fn connection(&self, qp: QpId) -> Option<ConnectionInfo> {
        let device = self.device(qp.device.0).filter(|device| device.enabled)?;
        let found = self.qp(qp.at()).filter(|found| found.incarnation == qp.incarnation)?;
        if !matches!(found.kind, QpKind::Rc | QpKind::Uc) || !found.receives() {
            return None;
        }
        let entry = device.gids.iter().flatten().find(|entry| entry.gid == found.source_gid)?;
        Some(ConnectionInfo {
            qp,
            segment: device.segment,
            kind: found.kind,
            qpn: found.qpn,
            source_gid: found.source_gid,
            source_mac: entry.mac,
            attributes: found.attributes,
            sends: matches!(found.state, QpState::ReadyToSend | QpState::SendQueueDrained),
        })
    }

    /// The connected queue pair with a number.
    #[must_use]
    pub fn connected(&self, device: DeviceId, qpn: Qpn) -> Option<QpId> {
        let qp = self.device(device.0).filter(|device| device.enabled)?.qp_by_number(qpn)?;
        let serves = matches!(qp.kind, QpKind::Rc | QpKind::Uc) && qp.receives();
        serves.then_some(QpId { device, handle: qp.handle, stamp: qp.stamp, incarnation: qp.incarnation })
    }

    /// The queue pair with a handle, in any state.
    #[must_use]
    pub fn qp_by_handle(&self, device: DeviceId, handle: QpHandle) -> Option<QpId> {
        self.qp_id(self.qp_ref(device, handle)?)
    }

    /// Whether a queue pair has had a local peer since it left RESET: no transport serves it then.
    #[must_use]
    pub fn was_local(&self, device: DeviceId, qpn: Qpn) -> bool {
        let Some(found) = self.device(device.0) else { return false };
        found.qp_by_number(qpn).is_some_and(|qp| {
            qp.was_local && !self.moved.contains(&(found.segment, qp.attributes.address.dgid))
        })
    }

    /// Whether a device of this engine has an address.
    #[must_use]
    pub fn has_address(&self, segment: SegmentId, gid: Gid) -> bool {
        self.owner_of(segment, gid).is_some()
    }

    /// Whether a device of this engine has an address, and `device` reaches it without a transport.
    #[must_use]
    pub fn is_beside(&self, device: DeviceId, segment: SegmentId, gid: Gid) -> bool {
        self.owner_of(segment, gid).is_some_and(|owner| !self.detours(device.0, owner))
    }

    /// The addresses of a device, with their MACs.
    pub fn addresses(&self, device: DeviceId) -> impl Iterator<Item = (Gid, [u8; 6])> {
        let entries = self.device(device.0).into_iter().flat_map(|device| device.gids.iter().flatten());
        entries.map(|entry| (entry.gid, entry.mac))
    }

    /// The path of a queue pair. Looked up again after a change of addresses or paths, or of either end. Changes of other queue pairs cost
    /// nothing.
    #[inline]
    pub(crate) fn path(&mut self, at: QpRef) -> Path {
        let topology = self.topology();
        let Some(qp) = self.qp(at) else { return Path::Unreachable };
        let known = match qp.path {
            Path::Elsewhere => true,
            Path::Local(peer) => {
                qp.path_at == topology && self.qp(peer).is_some_and(|peer| peer.version == qp.path_version)
            }
            // The peer may have become ready since.
            Path::Unreachable => false,
        };
        if known {
            return qp.path;
        }
        self.count_path_lookup();
        let mut path = self.find_path(at);
        let moved = path == Path::Elsewhere
            && self.device(at.device).zip(self.qp(at)).is_some_and(|(device, qp)| {
                self.moved.contains(&(device.segment, qp.attributes.address.dgid))
            });
        let mut path_version = 0;
        if let Path::Local(peer) = path
            && let Some(peer) = self.qp_mut(peer)
        {
            peer.was_local = true;
            path_version = peer.version;
        }
        if let Some(qp) = self.qp_mut(at) {
            qp.was_local |= matches!(path, Path::Local(_));
            if qp.was_local && path == Path::Elsewhere && !moved {
                path = Path::Unreachable;
            }
            qp.was_local &= !moved;
            qp.path = path;
            qp.path_at = topology;
            qp.path_version = path_version;
        }
        path
    }

    fn find_path(&self, at: QpRef) -> Path {
        if let Some(peer) = self.find_peer(at) {
            return Path::Local(peer);
        }
        let elsewhere = self.device(at.device).zip(self.qp(at)).is_some_and(|(device, qp)| {
            let dgid = qp.attributes.address.dgid;
            self.uplinks.contains(&device.segment)
                && self.owner_of(device.segment, dgid).is_none_or(|owner| self.detours(at.device, owner))
                && self.owner_of(device.segment, qp.source_gid) == Some(at.device)
                && dgid.ipv4().is_some() == qp.source_gid.ipv4().is_some()
        });
        if elsewhere { Path::Elsewhere } else { Path::Unreachable }
    }

    pub(crate) fn qp_id(&self, at: QpRef) -> Option<QpId> {
        let qp = self.qp(at)?;
        Some(QpId {
            device: DeviceId(at.device),
            handle: qp.handle,
            stamp: qp.stamp,
            incarnation: qp.incarnation,
        })
    }

    /// Closes the connection at the transport. Must be called while the queue pair still exists.
    pub(crate) fn close_elsewhere(&mut self, at: QpRef) {
        self.leave_late(at, true);
        if self.qp(at).is_some_and(|qp| qp.path == Path::Elsewhere)
            && let Some(qp) = self.qp_id(at)
        {
            self.actions.push(Action::Closed { qp });
        }
    }

    /// Handles a receive for which this queue pair's peer may wait.
    #[inline]
    pub(crate) fn receive_came(&mut self, at: QpRef) {
        let waits = self
            .qp_mut(at)
            .and_then(|qp| qp.elsewhere.as_mut())
            .is_some_and(|elsewhere| std::mem::take(&mut elsewhere.awaits_receive));
        if waits && let Some(qp) = self.qp_id(at) {
            self.actions.push(Action::ReceivePosted { qp });
        }
    }

    /// The queue pair of an identifier, if it still exists and accepts messages.
    fn served(&self, qp: QpId) -> Result<QpRef, Refusal> {
        let at = qp.at();
        let there = self.device(at.device).is_some_and(|device| device.enabled)
            && self.qp(at).is_some_and(|found| found.incarnation == qp.incarnation && found.receives());
        if there { Ok(at) } else { Err(Refusal::Gone) }
    }
}
