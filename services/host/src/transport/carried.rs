//! Connections over the host's RDMA device, and the daemons' messages about them.

use hca::engine::Engine;
use hca::names::{DeviceId, Qpn};
use hca::provider::Provider;
use hca::remote::{Action, ConnectionInfo, QpId};

use super::directory::VmId;
use super::fabric::Run;
use super::header::{Header, Kind};
use super::rnic::Rnic;
use super::verbs::{Ends, Message, Reason, Refused, Verbs};
use super::{Absent, Found, Transports, VerbsReport, pin};

impl Transports {
    /// Opens a device for transport `verbs`. The process's credentials must not change afterwards.
    ///
    /// # Errors
    /// When it can't be opened.
    pub fn open_verbs(&mut self, found: &Found) -> Result<(), Absent> {
        self.verbs = Verbs::open(found)?;
        Ok(())
    }

    /// Uses an open device for transport `verbs`, whatever implements it.
    pub fn use_rnic(&mut self, device: Box<dyn Rnic>) {
        self.verbs = Verbs::over(device);
    }

    /// Records why there is no device.
    pub fn without_verbs(&mut self, why: &str) {
        self.verbs = Verbs::absent(why);
    }

    /// Report of transport `verbs`: its device and registrations.
    #[must_use]
    pub fn verbs(&self) -> VerbsReport {
        self.verbs.report()
    }

    /// Processes the device's completions. Call it before a guest's command, which may destroy objects of completed requests.
    pub fn catch_up<P: Provider>(&mut self, engine: &mut Engine<P>, now: u64) {
        self.verbs.poll(engine, now);
    }

    /// Ends what a guest's command has destroyed, before its vCPU continues: the device doesn't access it any more when this returns.
    pub fn settle<P: Provider>(&mut self, engine: &mut Engine<P>, now: u64) {
        if !self.verbs.is_there() || !engine.has_actions() {
            return;
        }
        let mut actions = engine.take_actions();
        actions.retain(|action| match action {
            Action::Closed { qp } => !self.verbs.close(*qp),
            Action::RegionGone { device, key } => {
                self.verbs.region_gone(*device, *key, now);
                false
            }
            _ => true,
        });
        // Nothing was added meanwhile: the engine did nothing.
        engine.put_back_actions(actions);
    }

    /// Handles a change of a device's memory, or the end of its access to it.
    pub fn suspend<P: Provider>(&mut self, engine: &mut Engine<P>, device: DeviceId) {
        for qp in self.verbs.remove_device(device) {
            engine.remote_fail(qp);
        }
    }

    /// The ends of a queue pair's connection to a VM of the directory.
    fn ends<P: Provider>(&self, engine: &Engine<P>, qp: QpId) -> Option<(Ends, ConnectionInfo)> {
        let info = engine.connection(qp)?;
        let nic = self.nics.get(&qp.device)?;
        let peer_vm = self.directory.owner(&nic.segment, info.attributes.address.dgid)?;
        let header = Header { kind: Kind::Control, source: nic.vm, destination: peer_vm, segment: nic.tag };
        let ends = Ends {
            qp,
            qpn: info.qpn.0,
            peer_qpn: info.attributes.destination_qpn.0,
            peer_vm,
            host: self.directory.host(peer_vm),
            header,
        };
        Some((ends, info))
    }

    /// The `verbs` connection of a queue pair that is pinned to `verbs`. `None`: there is none, and another transport applies.
    pub(super) fn way_by_verbs<P: Provider>(
        &mut self,
        engine: &mut Engine<P>,
        qp: QpId,
        now: u64,
    ) -> Option<Result<u32, String>> {
        if let Some(link) = self.verbs.find(qp) {
            return Some(Ok(link));
        }
        if self.connections.find(qp).is_some() {
            return None;
        }
        let (ends, _) = self.ends(engine, qp)?;
        if !pin::is_verbs(self.directory.as_ref(), ends.header.source, ends.peer_vm)
            || self.instead.contains_key(&qp)
        {
            return None;
        }
        match self.verbs.connect(engine, &ends, now) {
            Ok(link) => Some(Ok(link)),
            Err(Refused::Queued(reason)) => {
                telemetry::guest_warn!(
                    self.refusals,
                    qpn = ends.qpn,
                    "A connection pinned to transport verbs goes by fabric: {reason}"
                );
                self.instead.insert(qp, reason.to_string());
                None
            }
            Err(refused) => Some(Err(refused.to_string())),
        }
    }

    /// Processes messages of other daemons.
    pub(super) fn take_control<P: Provider>(&mut self, engine: &mut Engine<P>, now: u64) {
        if self.control.is_empty() {
            return;
        }
        let mut control = std::mem::take(&mut self.control);
        for (device, from, message) in control.drain(..) {
            let Some(found) = self.find_ends(engine, device, from, &message) else { continue };
            let (ends, info) = found;
            let by_another = self.connections.find(ends.qp).is_some() || self.instead.contains_key(&ends.qp);
            let found = if by_another { Err(Reason::Fabric) } else { Ok((ends, info)) };
            if let Some(answer) = self.verbs.take(engine, &message, found, now)
                && let Some(host) = ends.host
            {
                self.verbs.answer(host, ends.header, &answer);
            }
        }
        self.control = control;
        self.send_control(engine, now);
    }

    /// The queue pair that a message of a VM's daemon concerns.
    fn find_ends<P: Provider>(
        &self,
        engine: &Engine<P>,
        device: DeviceId,
        from: VmId,
        message: &Message,
    ) -> Option<(Ends, ConnectionInfo)> {
        let qp = engine.connected(device, Qpn(message.peer))?;
        if engine.was_local(device, Qpn(message.peer)) {
            return None;
        }
        let (ends, info) = self.ends(engine, qp)?;
        (ends.peer_vm == from && ends.peer_qpn == message.own).then_some((ends, info))
    }

    /// Sends the transport's messages, and passes on requests that another transport must carry.
    pub(super) fn send_control<P: Provider>(&mut self, engine: &mut Engine<P>, now: u64) {
        for handed in std::mem::take(&mut self.verbs.handed) {
            telemetry::guest_warn!(
                self.refusals,
                "A connection pinned to transport verbs goes by fabric: {}",
                handed.reason
            );
            self.instead.insert(handed.qp, handed.reason);
            for request in handed.requests {
                self.act(engine, Action::Post { qp: handed.qp, request }, now);
            }
        }
        if self.verbs.outbox.is_empty() {
            return;
        }
        let mut outbox = std::mem::take(&mut self.verbs.outbox);
        let (before, behind) = (self.fabric.before(), self.fabric.behind());
        for message in outbox.drain(..) {
            let index = self.fabric.index(message.pair.0, message.pair.1);
            // The peer repeats its question if it needs the answer.
            if !self.fabric.has_room(index) {
                continue;
            }
            let mut packet = vec![0; before];
            packet.extend(message.bytes);
            packet.resize(packet.len() + behind, 0);
            let stride = packet.len();
            let run = Run { index, bytes: &mut packet, stride, ecn: false };
            self.fabric.send(message.to, &message.header, run, now);
        }
        self.verbs.outbox = outbox;
    }
}
