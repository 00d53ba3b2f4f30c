//! Peers of VMs that move: which they are, when queue pairs towards them are suspended, and to which host they resume.

use std::collections::BTreeSet;

use nomad::{Body, Event, HostId, Message, MigrationId, Place, VmId};

use super::MigrationManager;
use crate::cluster::Hold;
use crate::engine::Worker;
use crate::transport;

impl MigrationManager {
    /// Looks up which VMs a VM of this host is connected with.
    pub(super) fn update_peers_of(&mut self, vm: VmId) {
        let Some(peers) = self.call_engine(move |worker| worker.peers(transport::VmId(vm.0))) else { return };
        let peers: BTreeSet<VmId> = peers.into_iter().map(|peer| VmId(peer.0)).collect();
        let before = self.nomad.as_ref().map(|nomad| nomad.peers(vm)).unwrap_or_default();
        for peer in before.into_iter().filter(|peer| !peers.contains(peer)) {
            self.step(Event::Disconnected { vm, peer });
        }
        for peer in peers {
            if let Some(peer) = self.place(peer) {
                self.step(Event::Connected { vm, peer });
            }
        }
    }

    /// Records the hosts of a VM's peers, which will suspend queue pairs that face it.
    pub(super) fn remember_peers(&self, migration: MigrationId, vm: VmId) {
        let peers = self.nomad.as_ref().map(|nomad| nomad.peers(vm)).unwrap_or_default();
        let hosts = peers.into_iter().filter_map(|peer| self.directory.host_of(transport::VmId(peer.0)));
        if let Some(name) = self.name(vm) {
            self.phases.set_peers(&name, migration.0, hosts.collect());
        }
    }

    /// The queue pairs of this host that face a VM run again: ends its peer pause, and reports it.
    pub(super) fn peers_resumed(&mut self, vm: VmId) {
        let Some((migration, since)) = self.suspended_since.remove(&vm) else { return };
        let microseconds = u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.directory.held(Hold { migration: migration.0, vm: vm.0, microseconds });
    }

    /// Which VMs of this host are connected with a VM that is about to stop.
    pub(super) fn update_connected_to(&mut self, vm: VmId) {
        let Some(place) = self.place(vm) else { return };
        let facing =
            self.call_engine(move |worker| worker.connected_to(transport::VmId(vm.0))).unwrap_or_default();
        for other in facing {
            self.step(Event::Connected { vm: VmId(other.0), peer: place });
        }
    }

    /// Queue pairs of a VM that face others send nothing to them.
    pub(super) fn suspend_towards_peers(&self, vm: VmId) {
        let peers = self.nomad.as_ref().map(|nomad| nomad.peers(vm)).unwrap_or_default();
        let peers: Vec<_> = peers.into_iter().map(|peer| self.addressed(peer)).collect();
        self.call_engine(move |worker| worker.suspend_towards(transport::VmId(vm.0), &peers));
    }

    /// Changes the directory: a VM is at a place.
    pub(super) fn update_place(&self, Place { vm, host, epoch }: Place) {
        if self.directory.moved(transport::VmId(vm.0), host.0, epoch.0) {
            self.call_engine(Worker::directory_changed);
        }
    }

    /// Opens direct connections to the hosts with which this one exchanges messages in the switchover, so that it finds them established. A
    /// source connects to destinations and hosts of peers while memory is copied. A destination connects to sources when it reserves room,
    /// and to hosts of peers at the handover.
    pub(super) fn connect_directly(&self, message: &Message) {
        match &message.body {
            Body::Reserve { moves, .. } => {
                self.directory.want_direct(moves.iter().map(|moved| moved.from));
            }
            Body::Begin { moves, .. } => {
                let begun = moves.iter().all(|moved| self.outgoing.contains_key(&moved.vm));
                if begun {
                    return;
                }
                self.directory.want_direct(moves.iter().map(|moved| moved.to));
                for moved in moves.iter().take(nomad::config::MAX_VMS_PER_MIGRATION) {
                    let vm = transport::VmId(moved.vm.0);
                    let peers = self.call_engine(move |worker| worker.peers(vm)).unwrap_or_default();
                    let hosts = peers.into_iter().filter_map(|peer| self.directory.place(peer));
                    self.directory.want_direct(hosts.map(|(host, _)| HostId(host)));
                }
            }
            Body::Handover { peers, .. } => {
                self.directory.want_direct(peers.iter().map(|place| place.host).collect::<BTreeSet<_>>());
            }
            _ => {}
        }
    }

    pub(super) fn resume_towards(&self, vm: VmId, peer: Place) {
        self.update_place(peer);
        let here = self.nomad.as_ref().is_some_and(|nomad| nomad.id() == peer.host);
        let addressed = self.addressed(peer.vm);
        let came_local =
            self.call_engine(move |worker| worker.resume_towards(transport::VmId(vm.0), &addressed, here));
        tracing::debug!(vm = vm.0, peer = peer.vm.0, host = peer.host.0, came_local, "Queue pairs go on");
    }
}
