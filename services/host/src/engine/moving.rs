//! The engine thread's part of a migration: devices of VMs that leave or arrive, and queue pairs connected with them. The migration thread
//! runs the protocol ([`crate::migration::manager`]); monitors transfer state and memory.

use std::collections::BTreeSet;

use dma::MappedMemory;
use hca::names::{DeviceId, Gid};
use nomad::objects::{Piece, Total};
use pvrdma::DoorbellMode as Doorbells;

use super::handshake::Handshake;
use super::load::Load;
use super::pace::Pace;
use super::served::{DeviceSetup, Served, Vectors};
use super::worker::Worker;
use crate::migration::{Destination, MigrationError, Parts, Place, Source};
use crate::transport::{Immovable, VmId};

/// A VM and its addresses.
pub type Addressed = (VmId, Vec<Gid>);

impl Worker {
    /// The device and its surroundings, for a migration.
    fn parts(&mut self, id: DeviceId) -> Result<Parts<'_, MappedMemory>, MigrationError> {
        let now = self.now();
        let Self { engine, devices, transports, .. } = self;
        let transports = transports.as_mut().ok_or(MigrationError::NoDevice(id))?;
        Ok(Parts { engine, devices, transports, now })
    }

    /// Whether the host's RDMA device has completed all requests of a VM, whose queue pairs are suspended.
    ///
    /// # Errors
    /// The incomplete requests.
    pub fn is_at_rest(&mut self, vm: VmId) -> Result<(), Immovable> {
        let devices = self.devices_of(vm).into_iter().map(|id| (id, None)).collect();
        self.at_rest(devices)
    }

    /// The same for queue pairs of other VMs of this host that are connected with a VM.
    ///
    /// # Errors
    /// The incomplete requests.
    pub fn are_peers_at_rest(&mut self, vm: VmId) -> Result<(), Immovable> {
        let devices = self.others(vm).into_iter().map(|(id, _)| (id, Some(vm))).collect();
        self.at_rest(devices)
    }

    fn at_rest(&mut self, devices: Vec<(DeviceId, Option<VmId>)>) -> Result<(), Immovable> {
        let now = self.now();
        let Self { engine, transports, .. } = self;
        let Some(transports) = transports else { return Ok(()) };
        // A request on its way to the transport isn't complete either.
        transports.take_over(engine, now);
        devices.into_iter().try_for_each(|(id, peer)| transports.at_rest(id, peer))
    }

    /// Whether a device is connected with peers outside of the cluster.
    #[must_use]
    pub fn faces_outside(&self, id: DeviceId) -> bool {
        self.transports.as_ref().is_some_and(|transports| transports.faces_outside(id))
    }

    /// Whether a device's VM is pinned to the host's RDMA device.
    #[must_use]
    pub fn is_pinned_to_verbs(&self, id: DeviceId) -> bool {
        self.transports.as_ref().is_some_and(|transports| transports.is_pinned_to_verbs(id))
    }

    /// Begins to track changes of a device's objects.
    ///
    /// # Errors
    /// When this host has no transports.
    pub fn begin_outgoing(&mut self, id: DeviceId) -> Result<(), MigrationError> {
        if !self.leaving.contains_key(&id) {
            let source = Source::begin(&mut self.parts(id)?, id);
            self.leaving.insert(id, source);
            self.engine.watch_inbound(id, true);
            self.paces.insert(id, Pace::begin(self.now()));
        }
        Ok(())
    }

    /// Limits peers' writes to a device that leaves: `percent` less than the highest rate that was measured.
    ///
    /// # Errors
    /// When it isn't leaving.
    pub fn throttle(&mut self, id: DeviceId, percent: u8) -> Result<(), MigrationError> {
        let now = self.now();
        let known = self.paces.get_mut(&id).zip(self.engine.inbound_bytes(id));
        let (pace, bytes) = known.ok_or(MigrationError::NoDevice(id))?;
        let limit = pace.hold_back(now, bytes, percent);
        self.engine.limit_inbound(id, limit);
        Ok(())
    }

    fn end_pace(&mut self, id: DeviceId) {
        if self.paces.remove(&id).is_some() {
            self.engine.watch_inbound(id, false);
        }
    }

    /// Number of objects of a leaving device that have changed since the last round.
    pub fn outgoing_left(&self, id: DeviceId) -> usize {
        self.leaving.get(&id).map_or(0, |source| source.left(&self.engine))
    }

    /// Saves objects that have changed since the last round, at most `most`.
    ///
    /// # Errors
    /// When the device isn't leaving.
    pub fn outgoing_part(&mut self, id: DeviceId, most: usize) -> Result<Vec<Piece>, MigrationError> {
        let mut source = self.leaving.remove(&id).ok_or(MigrationError::NoDevice(id))?;
        let mut pieces = Vec::new();
        let done = self.parts(id).map(|mut parts| source.part(most, &mut parts, |piece| pieces.push(piece)));
        self.leaving.insert(id, source);
        done.map(|_| pieces)
    }

    /// Stops a device whose vCPUs are suspended. Returns the last pieces, and the totals that the destination must have then.
    ///
    /// # Errors
    /// When it can't be stopped or saved. Call [`Worker::stay`] then.
    pub fn stop_outgoing(&mut self, id: DeviceId) -> Result<(Vec<Piece>, Total), MigrationError> {
        self.begin_outgoing(id)?;
        self.end_pace(id);
        let missing = || MigrationError::NoDevice(id);
        let now = self.now();
        let Self { engine, devices, transports, served, leaving, .. } = self;
        let transports = transports.as_mut().ok_or_else(missing)?;
        let (served, source) = served.get(&id).zip(leaving.get_mut(&id)).ok_or_else(missing)?;
        if !engine.is_stopped(id) {
            let mut parts = Parts { engine, devices, transports, now };
            source.stop(&mut parts, served.pages.memory(), &served.msix)?;
        }
        let pieces = self.outgoing_part(id, usize::MAX)?;
        let total = self.leaving.get(&id).and_then(Source::total).ok_or_else(missing)?;
        Ok((pieces, total))
    }

    /// Resumes a device that was to leave (rollback). No effect if it isn't leaving.
    ///
    /// # Errors
    /// When another device has one of its addresses meanwhile.
    pub fn roll_back(&mut self, id: DeviceId) -> Result<(), MigrationError> {
        self.end_pace(id);
        match self.leaving.remove(&id) {
            Some(source) => source.stay(&mut self.parts(id)?),
            None => Ok(()),
        }
    }

    /// Removes a device that has moved.
    pub fn remove_migrated(&mut self, id: DeviceId) {
        self.detach(id);
    }

    /// Adds a dormant device for a VM that arrives; no peer reaches it.
    ///
    /// # Errors
    /// When the configuration is invalid, or the directory doesn't know its VM.
    pub fn attach_dormant(
        &mut self,
        setup: DeviceSetup,
        memory: MappedMemory,
        vm: VmId,
    ) -> Result<DeviceId, MigrationError> {
        let now = self.now();
        setup.pages.clear();
        let place = Place { vm, segment: setup.segment, segment_id: setup.config.segment };
        let mut parts = self.parts(DeviceId(0))?;
        let arrival = Destination::begin(&mut parts, setup.config, memory, &place)?;
        let id = arrival.device();
        let served = Served {
            pages: setup.pages,
            msix: Vectors(setup.msix),
            mode: setup.mode,
            handshake: Handshake::new(),
            load: Load::new(now),
        };
        self.served.insert(id, served);
        self.arriving.insert(id, arrival);
        Ok(id)
    }

    /// Restores pieces of a device that arrives.
    ///
    /// # Errors
    /// When a piece is invalid. The device is unusable then.
    pub fn restore_pieces(&mut self, id: DeviceId, pieces: Vec<Piece>) -> Result<(), MigrationError> {
        let mut arrival = self.arriving.remove(&id).ok_or(MigrationError::NoDevice(id))?;
        let taken = self
            .parts(id)
            .and_then(|mut parts| pieces.into_iter().try_for_each(|piece| arrival.take(&mut parts, piece)));
        self.arriving.insert(id, arrival);
        taken
    }

    /// Whether a device has arrived completely.
    ///
    /// # Errors
    /// When a piece is missing.
    pub fn check_incoming(&self, id: DeviceId, total: Total) -> Result<(), MigrationError> {
        self.arriving.get(&id).ok_or(MigrationError::NoDevice(id))?.check(total)
    }

    /// Starts a device that has arrived, as a device of the VM called `name`. No effect if it runs already.
    ///
    /// # Errors
    /// When another device has one of its addresses.
    pub fn start_incoming(
        &mut self,
        id: DeviceId,
        name: &str,
        wire: std::sync::Arc<crate::transport::WirePort>,
    ) -> Result<(), MigrationError> {
        let Some(arrival) = self.arriving.remove(&id) else { return Ok(()) };
        let mut parts = self.parts(id)?;
        arrival.start(&mut parts)?;
        parts.transports.adopt(parts.engine, id, name, wire);
        // The client reports its own doorbell mode, whatever the source's was. Also scans all queues.
        if let Some((device, served)) = self.devices.get_mut(id).zip(self.served.get(&id)) {
            let offered = served.handshake.offered();
            let mode = if offered { Doorbells::Trapped } else { Doorbells::Shared };
            device.set_doorbells(&mut self.engine, mode);
        }
        Ok(())
    }

    /// Devices of a VM, those that leave or arrive included.
    #[must_use]
    pub fn devices_of(&self, vm: VmId) -> Vec<DeviceId> {
        let transports = self.transports.as_ref();
        self.served
            .keys()
            .copied()
            .filter(|id| transports.and_then(|all| all.vm_of(*id)) == Some(vm))
            .collect()
    }

    /// Other VMs that run on this host.
    fn others(&self, vm: VmId) -> Vec<(DeviceId, VmId)> {
        let Some(transports) = &self.transports else { return Vec::new() };
        let works = |id: &DeviceId| !self.arriving.contains_key(id);
        let named =
            self.served.keys().copied().filter(works).filter_map(|id| Some((id, transports.vm_of(id)?)));
        named.filter(|(_, other)| *other != vm).collect()
    }

    /// VMs with which queue pairs of a device are connected.
    fn peers_of(&self, id: DeviceId) -> BTreeSet<VmId> {
        let Some(transports) = &self.transports else { return BTreeSet::new() };
        let connections = self.engine.connections(id).into_iter();
        connections
            .filter_map(|(handle, ..)| {
                let (attributes, _) = self.engine.query_qp(id, handle).ok()?;
                transports.owner(id, attributes.address.dgid)
            })
            .collect()
    }

    /// VMs with which queue pairs of a VM are connected.
    #[must_use]
    pub fn peers(&self, vm: VmId) -> BTreeSet<VmId> {
        self.devices_of(vm).into_iter().flat_map(|id| self.peers_of(id)).filter(|peer| *peer != vm).collect()
    }

    /// VMs of this host whose queue pairs are connected with a VM.
    #[must_use]
    pub fn connected_to(&self, vm: VmId) -> BTreeSet<VmId> {
        let others = self.others(vm).into_iter();
        others.filter(|(id, _)| self.peers_of(*id).contains(&vm)).map(|(_, other)| other).collect()
    }

    /// Suspends queue pairs of other VMs of this host towards a VM.
    pub fn suspend_peers_of(&mut self, vm: &Addressed) {
        for (id, _) in self.others(vm.0) {
            self.hold(id, vm);
        }
    }

    /// Ends all suspensions of other VMs towards a VM that is gone, so that later VMs with its addresses are reached.
    pub fn forget_peer(&mut self, (peer, gids): &Addressed) {
        let now = self.now();
        for (id, _) in self.others(*peer) {
            for gid in gids {
                self.engine.open(id, *gid);
            }
            if let Some(transports) = &mut self.transports {
                transports.go_on(&mut self.engine, id, *peer, now);
            }
        }
    }

    /// Suspends queue pairs of a VM towards these peers.
    pub fn suspend_towards(&mut self, vm: VmId, peers: &[Addressed]) {
        for id in self.devices_of(vm) {
            for peer in peers {
                self.hold(id, peer);
            }
        }
    }

    fn hold(&mut self, id: DeviceId, (peer, gids): &Addressed) {
        let now = self.now();
        for gid in gids {
            self.engine.hold(id, *gid);
        }
        if let Some(transports) = &mut self.transports {
            transports.hold(id, *peer, now);
        }
    }

    /// Resumes queue pairs of a VM towards a peer, at the host in the directory: this one, or another. Returns the number of connections
    /// that changed from the network to RAM.
    pub fn resume_towards(&mut self, vm: VmId, (peer, gids): &Addressed, here: bool) -> usize {
        let now = self.now();
        let devices = self.devices_of(vm);
        let beside = if here { self.devices_of(*peer) } else { Vec::new() };
        let mut came_local = 0;
        for id in devices {
            let Some(transports) = &mut self.transports else { return 0 };
            if here {
                transports.take_over(&mut self.engine, now);
                for other in &beside {
                    came_local += transports.come_local(&mut self.engine, id, *other);
                }
            } else if let Some(segment) = transports.segment_of(id) {
                for gid in gids {
                    self.engine.moved_away(segment, *gid);
                }
            }
            for gid in gids {
                self.engine.open(id, *gid);
            }
            transports.go_on(&mut self.engine, id, *peer, now);
        }
        came_local
    }
}
