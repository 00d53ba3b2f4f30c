//! Connections by `fabric` and `wire` of VMs that migrate, or are connected with one that does.
//!
//! ```text
//! peer's host    hold ─ suspended: nothing is sent, timers stop, received packets are processed ─ open, perhaps to another host
//! source         stop ─ suspended, no packet reaches the device ─ save_connection …
//! destination    attach_dormant ─ restore_connection … ─ start ─ open
//! both here      come_local: both ends are suspended, so each request's outcome is known; the rest is copied from RAM to RAM
//! ```
//! Peers of connections by `wire` are outside of the cluster, and learn nothing of the migration: see `wire::moving`. Connections by
//! `verbs` are drained before anything is stopped ([`Transports::at_rest`]), and created again on the VM's host: see `verbs::moving`.

use std::collections::BTreeSet;

use hca::engine::{Engine, Verdict};
use hca::names::{DeviceId, QpHandle, Qpn, SegmentId};
use hca::provider::Provider;
use roce::Fate;

use super::carrier::engine_status;
use super::connections::Entry;
pub use super::connections::SavedConnection;
use super::directory::VmId;
use super::header::{self, Header, Kind};
use super::{Nic, TransportKind, Transports};

/// PSNs that are skipped when a connection changes from the network to RAM. Packets from before may still be in a socket when it changes
/// back. After skipping more than a window, they are below the expected PSN, and so duplicates.
const FORWARD: u32 = 1 << 16;

/// Why a device's connections can't move.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Immovable {
    /// The host's RDMA device has incomplete requests.
    #[error(
        "Queue pair {qpn} has {requests} requests at the host's RDMA device, which alone knows how far they are; they end when VM {peer} posts receives or answers"
    )]
    UnderWay {
        /// Number of the queue pair.
        qpn: u32,
        /// Number of the peer's VM.
        peer: u32,
        /// Number of incomplete requests.
        requests: usize,
    },
    /// This host lacks the RDMA device that its connections need.
    #[error("VM {vm} is pinned to transport verbs, which this host can't offer: {why}")]
    NoDevice {
        /// Number of the VM.
        vm: u32,
        /// The reason.
        why: String,
    },
    /// A saved connection is invalid.
    #[error("The saved connection of queue pair {qpn} can't be used")]
    Invalid {
        /// Number of the queue pair.
        qpn: u32,
        /// The error.
        #[source]
        source: roce::saved::InvalidState,
    },
    /// The directory doesn't contain the VM.
    #[error("VM {0} isn't in this host's directory; start its daemon with the cluster's")]
    Unknown(u32),
}

impl Transports {
    /// Whether the host's RDMA device has completed all requests of a device, or of its queue pairs with one peer. They are suspended, so
    /// no further ones are posted.
    ///
    /// # Errors
    /// [`Immovable`] with the incomplete requests.
    pub fn at_rest(&self, device: DeviceId, peer: Option<VmId>) -> Result<(), Immovable> {
        self.verbs.at_rest(device, peer)
    }

    /// Whether a device's VM is pinned to the host's RDMA device.
    #[must_use]
    pub fn is_pinned_to_verbs(&self, device: DeviceId) -> bool {
        self.nics.get(&device).is_some_and(|nic| self.directory.pin(nic.vm) == Some(TransportKind::Verbs))
    }

    /// Accepts the engine's posted requests, and sends nothing.
    pub fn take_over<P: Provider>(&mut self, engine: &mut Engine<P>, now: u64) -> bool {
        if !engine.has_actions() {
            return false;
        }
        let mut actions = engine.take_actions();
        for action in actions.drain(..) {
            self.act(engine, action, now);
        }
        engine.recycle_actions(actions);
        true
    }

    /// Suspends a device's connections with a VM.
    pub fn hold(&mut self, device: DeviceId, peer: VmId, now: u64) {
        for index in self.connections.facing(device, Some(peer)) {
            if let Some(entry) = self.connections.get_mut(index) {
                entry.connection.suspend(now);
            }
            self.connections.follow(index, false);
        }
    }

    /// Resumes a device's connections with a VM, at its host in the directory.
    pub fn go_on<P: Provider>(&mut self, engine: &mut Engine<P>, device: DeviceId, peer: VmId, now: u64) {
        let host = self.directory.host(peer);
        self.verbs.leave_places(engine, (device, peer), host, now);
        for index in self.connections.facing(device, Some(peer)) {
            if let Some(entry) = self.connections.get_mut(index) {
                entry.host = host;
                entry.connection.resume(now);
            }
            self.connections.ready(index);
        }
    }

    /// Suspends a stopped device's connections, and stops receiving for it. The engine's posted requests were accepted before.
    pub fn stop(&mut self, device: DeviceId, now: u64) {
        if let Some(nic) = self.nics.get(&device)
            && self.devices.get(&(nic.vm, nic.tag)) == Some(&device)
        {
            self.devices.remove(&(nic.vm, nic.tag));
        }
        for index in self.connections.facing(device, None) {
            if let Some(entry) = self.connections.get_mut(index) {
                entry.connection.suspend(now);
            }
            self.connections.follow(index, false);
        }
        self.wire.stand_still(device, true);
    }

    /// Adds a device that waits for its saved state: no packet reaches it before [`Transports::start`].
    ///
    /// # Errors
    /// When the directory doesn't contain the VM.
    pub fn attach_dormant(
        &mut self,
        device: DeviceId,
        vm: VmId,
        segment: &str,
        segment_id: SegmentId,
    ) -> Result<(), Immovable> {
        if self.directory.host(vm).is_none() {
            return Err(Immovable::Unknown(vm.0));
        }
        if self.directory.pin(vm) == Some(TransportKind::Verbs) && !self.verbs.is_there() {
            return Err(Immovable::NoDevice { vm: vm.0, why: self.verbs.why_absent().to_owned() });
        }
        self.nics
            .insert(device, Nic { vm, segment: segment.to_owned(), segment_id, tag: header::tag(segment) });
        Ok(())
    }

    /// Makes a stopped or dormant device reachable. Its connections with VMs of the cluster stay suspended until they are opened.
    pub fn start<P: Provider>(&mut self, engine: &mut Engine<P>, device: DeviceId) {
        if let Some(nic) = self.nics.get(&device) {
            self.devices.insert((nic.vm, nic.tag), device);
            engine.set_uplink(nic.segment_id, true);
        }
    }

    /// Saves the connection of a device's queue pair, if it has one.
    #[must_use]
    pub fn save_connection(&self, device: DeviceId, handle: QpHandle, now: u64) -> Option<SavedConnection> {
        let entry = self.connections.get(self.connections.of_handle(device, handle)?)?;
        Some(entry.save(now))
    }

    /// Restores the connection of a dormant device's queue pair, and replaces an earlier state.
    ///
    /// # Errors
    /// When the state is invalid for that queue pair.
    pub fn restore_connection<P: Provider>(
        &mut self,
        engine: &Engine<P>,
        device: DeviceId,
        (handle, qpn): (QpHandle, Qpn),
        saved: Option<&SavedConnection>,
        now: u64,
    ) -> Result<(), Immovable> {
        if let Some(before) = self.connections.of_handle(device, handle) {
            self.connections.replace(before);
        }
        let Some((saved, nic)) = saved.zip(self.nics.get(&device)) else { return Ok(()) };
        let Some(qp) = engine.qp_by_handle(device, handle) else { return Ok(()) };
        // The fabric's header; a connection by wire doesn't use it.
        let header =
            Header { kind: Kind::Connected, source: nic.vm, destination: saved.peer_vm, segment: nic.tag };
        let entry = Entry::restore(qp, qpn.0, header, saved, now)
            .map_err(|source| Immovable::Invalid { qpn: qpn.0, source })?;
        if let Some(index) = self.connections.of(qp, || Some(entry)) {
            self.connections.follow(index, false);
        }
        Ok(())
    }

    /// Changes two devices of this host, suspended towards each other, from the network to RAM: their connections end, and each request's
    /// outcome follows from the peer's state. Returns the number of connections.
    pub fn come_local<P: Provider>(
        &mut self,
        engine: &mut Engine<P>,
        one: DeviceId,
        other: DeviceId,
    ) -> usize {
        let (Some(left), Some(right)) = (self.nics.get(&one), self.nics.get(&other)) else { return 0 };
        if left.segment_id != right.segment_id {
            return 0;
        }
        let (left, right) = (left.vm, right.vm);
        let mut pairs = BTreeSet::new();
        for index in self.connections.facing(one, Some(right)) {
            pairs.extend(self.connections.get(index).map(|entry| (entry.qpn, entry.peer_qpn)));
        }
        for index in self.connections.facing(other, Some(left)) {
            pairs.extend(self.connections.get(index).map(|entry| (entry.peer_qpn, entry.qpn)));
        }
        pairs.iter().filter(|pair| self.join(engine, (one, pair.0), (other, pair.1))).count()
    }

    fn join<P: Provider>(
        &mut self,
        engine: &mut Engine<P>,
        one: (DeviceId, u32),
        other: (DeviceId, u32),
    ) -> bool {
        let (Some(left), Some(right)) =
            (engine.connected(one.0, Qpn(one.1)), engine.connected(other.0, Qpn(other.1)))
        else {
            // One end has failed: it still sends its NAK to the other end by the network.
            return false;
        };
        let (Some(left_info), Some(right_info)) = (engine.connection(left), engine.connection(right)) else {
            return false;
        };
        let each_other = left_info.attributes.destination_qpn.0 == other.1
            && right_info.attributes.destination_qpn.0 == one.1;
        if !each_other || engine.detoured(one.0, other.0) {
            return false;
        }
        let (left_at, right_at) = (self.connections.find(left), self.connections.find(right));
        let left_has = left_at.and_then(|index| self.connections.get(index)).map(|entry| &entry.connection);
        let right_has = right_at.and_then(|index| self.connections.get(index)).map(|entry| &entry.connection);
        let works = |has: Option<&roce::Connection>| has.is_none_or(|has| has.state() == roce::State::Ready);
        if !works(left_has) || !works(right_has) {
            return false;
        }
        let left_expects = left_has.map_or(left_info.attributes.rq_psn, roce::Connection::expected);
        let right_expects = right_has.map_or(right_info.attributes.rq_psn, roce::Connection::expected);
        let verdicts = |has: Option<&roce::Connection>, peer, expects| -> Vec<Verdict> {
            let fates = has.map(|has| has.fates(peer, expects)).unwrap_or_default();
            fates.into_iter().map(verdict).collect()
        };
        let of_left = verdicts(left_has, right_has, right_expects);
        let of_right = verdicts(right_has, left_has, left_expects);
        for index in [left_at, right_at].into_iter().flatten() {
            self.connections.remove(index);
        }
        let (of_left_next, of_right_next) = (right_expects + FORWARD, left_expects + FORWARD);
        engine.come_local(left, &of_left, of_left_next, of_right_next);
        engine.come_local(right, &of_right, of_right_next, of_left_next);
        true
    }
}

fn verdict(fate: Fate) -> Verdict {
    match fate {
        Fate::Done(bytes) => Verdict::Done(bytes),
        Fate::Atomic(before) => Verdict::Atomic(before),
        Fate::Failed(status) => Verdict::Failed(engine_status(status)),
        Fate::Again => Verdict::Again,
    }
}
