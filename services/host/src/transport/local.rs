//! This host's devices: what the directory is notified of, and their numbers in it. A directory may learn of a VM after its device was
//! added, or find that it is on another host. Its owner then calls [`Transports::directory_changed`].

use std::collections::BTreeSet;
use std::sync::Arc;

use hca::engine::Engine;
use hca::names::{DeviceId, Gid, SegmentId};
use hca::provider::Provider;

use super::directory::{News, VmId};
use super::pin::TransportKind;
use super::{Nic, Transports, WirePort, header};

/// A device in the engine.
#[derive(Debug)]
pub(super) struct Local {
    vm: String,
    segment: String,
    segment_id: SegmentId,
    /// Addresses in the last notification of the directory.
    addresses: BTreeSet<Gid>,
}

impl Transports {
    /// Handles a device that was added to the engine. A VM that the directory doesn't know reaches no remote peers.
    pub fn attach<P: Provider>(
        &mut self,
        engine: &mut Engine<P>,
        device: DeviceId,
        vm: &str,
        segment: &str,
        segment_id: SegmentId,
    ) {
        let addresses = BTreeSet::new();
        let local = Local { vm: vm.to_owned(), segment: segment.to_owned(), segment_id, addresses };
        self.directory.tell(News::Nic { device, vm, segment, addresses: &local.addresses });
        self.local.insert(device, local);
        self.name(engine, device);
    }

    /// Makes a device that arrived with its VM one of this host's, and so part of its notifications to the directory.
    pub fn adopt<P: Provider>(
        &mut self,
        engine: &mut Engine<P>,
        device: DeviceId,
        vm: &str,
        port: Arc<WirePort>,
    ) {
        let Some((segment, segment_id)) =
            self.nics.get(&device).map(|nic| (nic.segment.clone(), nic.segment_id))
        else {
            return;
        };
        let addresses: BTreeSet<Gid> = engine.gid_table(device).into_iter().map(|(_, gid, _)| gid).collect();
        let local = Local { vm: vm.to_owned(), segment, segment_id, addresses };
        self.directory.tell(News::Nic { device, vm, segment: &local.segment, addresses: &local.addresses });
        self.local.insert(device, local);
        self.attach_wire(engine, device, segment_id, port);
        self.wire.lands(device);
    }

    /// The VM of a device, if the directory knows it.
    #[must_use]
    pub fn vm_of(&self, device: DeviceId) -> Option<VmId> {
        self.nics.get(&device).map(|nic| nic.vm)
    }

    /// The segment of a device.
    #[must_use]
    pub fn segment_of(&self, device: DeviceId) -> Option<SegmentId> {
        self.nics.get(&device).map(|nic| nic.segment_id)
    }

    /// Handles a device before it leaves the engine.
    pub fn detach(&mut self, device: DeviceId) {
        self.forget(device);
        if self.local.remove(&device).is_some() {
            self.directory.tell(News::NicGone { device });
        }
        self.wire.detach(device);
        self.connections.remove_device(device);
        self.verbs.remove_device(device);
        self.instead.retain(|qp, _| qp.device != device);
    }

    /// Handles a change of the directory: numbers of local VMs, and hosts of others.
    pub fn directory_changed<P: Provider>(&mut self, engine: &mut Engine<P>) {
        let devices: Vec<DeviceId> = self.local.keys().copied().collect();
        for device in devices {
            self.name(engine, device);
        }
        let directory = &self.directory;
        self.connections.locate(|peer| directory.host(peer));
    }

    /// Notifies the directory of guests' bound addresses and of connected pairs, if they have changed.
    pub(super) fn tell<P: Provider>(&mut self, engine: &Engine<P>) {
        if engine.topology() != self.topology {
            self.topology = engine.topology();
            for (device, local) in &mut self.local {
                let addresses: BTreeSet<Gid> =
                    engine.gid_table(*device).into_iter().map(|(_, gid, _)| gid).collect();
                if addresses != local.addresses {
                    local.addresses = addresses;
                    let (device, addresses) = (*device, &local.addresses);
                    self.directory.tell(News::Nic {
                        device,
                        vm: &local.vm,
                        segment: &local.segment,
                        addresses,
                    });
                }
            }
        }
        // Both must be called, whatever the first returns.
        if self.connections.pairs_changed() | self.verbs.pairs_changed() {
            let pairs = self.connections.pairs().chain(self.verbs.pairs());
            // A device carries connections that are pinned to it within a host as well.
            let elsewhere = |pair: &Pair| self.nics.values().all(|nic| nic.vm != pair.1);
            self.directory.tell(News::Connected(pairs.filter(elsewhere).collect()));
        }
    }

    /// Sets a device's number to its VM's current one in the directory.
    fn name<P: Provider>(&mut self, engine: &mut Engine<P>, device: DeviceId) {
        let Some(local) = self.local.get(&device) else { return };
        let vm = self.directory.vm(&local.vm);
        if self.nics.get(&device).map(|nic| nic.vm) == vm {
            return;
        }
        let (segment, segment_id) = (local.segment.clone(), local.segment_id);
        self.forget(device);
        let Some(vm) = vm else { return };
        let nic = Nic { vm, segment_id, tag: header::tag(&segment), segment };
        if self.devices.insert((vm, nic.tag), device).is_some_and(|other| self.nics.contains_key(&other)) {
            tracing::warn!(
                vm = vm.0,
                segment = nic.segment,
                "A VM has a second RDMA NIC in a segment; other hosts reach the last one only"
            );
        }
        self.pin(engine, device, &nic);
        self.nics.insert(device, nic);
        engine.set_uplink(segment_id, true);
    }

    fn pin<P: Provider>(&self, engine: &mut Engine<P>, device: DeviceId, nic: &Nic) {
        let Some(pin) = self.directory.pin(nic.vm) else { return };
        // A connection that must not be from RAM to RAM comes here, and is carried or refused.
        engine.set_detour(device, pin != TransportKind::Local);
        let (vm, segment) = (nic.vm.0, &nic.segment);
        tracing::info!(vm, segment, "A VM's RDMA is pinned to transport {}", pin.name());
        if pin == TransportKind::Verbs && !self.verbs.is_there() {
            tracing::warn!(vm, "Connections of that VM are refused: {}", self.verbs.why_absent());
        }
    }

    /// Removes a device from the look-up of other hosts' packets.
    fn forget(&mut self, device: DeviceId) {
        if let Some(nic) = self.nics.remove(&device)
            && self.devices.get(&(nic.vm, nic.tag)) == Some(&device)
        {
            self.devices.remove(&(nic.vm, nic.tag));
        }
    }
}

/// A VM of this host, and a remote VM that it is connected with.
pub type Pair = (VmId, VmId);
