//! Making reports of the thread and its devices.

use hca::names::{DeviceId, Gid, Qpn};

use super::report::{DeviceView, EngineView, LoopCounters, PeerView};
use super::served::Device;
use super::worker::Worker;
use crate::transport::Transports;

impl Worker {
    /// The loop's counters.
    #[must_use]
    pub fn loop_counters(&self) -> LoopCounters {
        self.counters
    }

    /// Report of the engine's thread.
    #[must_use]
    pub fn view(&self) -> EngineView {
        let devices = self.devices.iter().filter_map(|device| self.device_view(device)).collect();
        let sockets = self.transports.as_ref().filter(|transports| transports.has_fabric());
        let fabric = sockets.map(Transports::fabric);
        let verbs = self.transports.as_ref().map(Transports::verbs);
        let directory = self.transports.as_ref().and_then(Transports::directory);
        EngineView { counters: self.counters, fabric, directory, verbs, devices }
    }

    /// Whether a queue pair's peer is reached on this host without a transport, or was when they last communicated.
    fn has_beside(&self, id: DeviceId, qpn: Qpn, peer: Gid) -> bool {
        let connected = self.engine.connected(id, qpn).and_then(|qp| self.engine.connection(qp));
        connected.is_some_and(|connection| self.engine.is_beside(id, connection.segment, peer))
            || self.engine.was_local(id, qpn)
    }

    /// Report of one device.
    #[must_use]
    pub fn view_of(&self, id: DeviceId) -> Option<DeviceView> {
        self.device_view(self.devices.get(id)?)
    }

    fn device_view(&self, device: &Device) -> Option<DeviceView> {
        let id = device.id();
        let served = self.served.get(&id)?;
        let hca = self.engine.inspect(id);
        let queue_pairs = hca.iter().flat_map(|hca| &hca.queue_pairs);
        let peers = queue_pairs
            .filter_map(|qp| {
                let connected = matches!(qp.kind, hca::attributes::QpKind::Rc | hca::attributes::QpKind::Uc)
                    && (2..=5).contains(&(qp.state as u32));
                let (attributes, _) = self.engine.query_qp(id, qp.handle).ok().filter(|_| connected)?;
                let remote = self.transports.as_ref().and_then(|transports| transports.report(id, qp.qpn));
                let dgid = attributes.address.dgid;
                let transport = match &remote {
                    Some(remote) => remote.transport,
                    None if self.has_beside(id, qp.qpn, dgid) => "local",
                    None => {
                        let transports = self.transports.as_ref();
                        transports.and_then(|transports| transports.reaches(id, dgid)).unwrap_or("none")
                    }
                };
                Some(PeerView {
                    handle: qp.handle.0,
                    gid: format!("{dgid:?}"),
                    qpn: attributes.destination_qpn.0,
                    transport,
                    remote,
                })
            })
            .collect();
        Some(DeviceView {
            id: id.0,
            doorbells: served.handshake.describe(),
            doorbell_mode_switches: served.handshake.switches,
            doorbell_mode_failures: served.handshake.failures,
            interrupts: served.msix.0.counts(),
            function: device.report(),
            hca,
            roce: self.transports.as_ref().and_then(|transports| transports.device_counters(id)),
            late_memory: self.engine.is_late(id),
            memory_waits: self.engine.memory_waits(id),
            peers,
        })
    }
}
