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

use crate::attributes::{QpAttributes, QpKind, QpState};
use crate::engine::Engine;
use crate::names::{DeviceId, Gid, QpHandle, Qpn, SegmentId};
use crate::objects::{Path, QpRef};
use crate::provider::Provider;
pub use crate::transport::{Action, OutgoingDatagram, Posted, PostedOperation, QpId};

pub use datagrams::IncomingDatagram;
pub use queued::{AheadReceived, NotQueued, Queued, RegionInfo, first_bytes};
pub use requester::Unmoved;
pub use responder::{AtomicOperation, Refusal};

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
        let found = self.qp(qp.at()).filter(|found| found.incarnation == qp.incarnation())?;
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
        serves.then_some(QpId::new(device, qp.handle, qp.stamp, qp.incarnation))
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
        Some(QpId::new(DeviceId(at.device), qp.handle, qp.stamp, qp.incarnation))
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
            && self.qp(at).is_some_and(|found| found.incarnation == qp.incarnation() && found.receives());
        if there { Ok(at) } else { Err(Refusal::Gone) }
    }
}
