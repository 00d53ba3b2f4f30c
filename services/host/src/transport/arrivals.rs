//! Packets from other daemons: finding their device and queue pair, and verifying their sender.

use std::collections::HashMap;

use hca::engine::Engine;
use hca::names::{DeviceId, Qpn};
use hca::provider::Provider;
use hca::remote::IncomingDatagram;
use roce::Packet;
use roce::datagram::Datagram;

use super::carrier::Carrier;
use super::connections::Connections;
use super::directory::{Directory, VmId};
use super::fabric::Origin;
use super::header::{Addresses, Header, Kind};
use super::secure::Dropped;
use super::verbs::Message;
use super::wire::Wire;
use super::{Nic, TransportKind, entry, pin};

/// State for processing received packets.
pub(super) struct Arrivals<'a, P: Provider> {
    pub directory: &'a dyn Directory,
    pub nics: &'a HashMap<DeviceId, Nic>,
    pub devices: &'a HashMap<(VmId, u32), DeviceId>,
    pub connections: &'a mut Connections,
    pub wire: &'a Wire,
    pub engine: &'a mut Engine<P>,
    pub now: u64,
    /// The connection of the last packet: consecutive packets are mostly for the same one.
    pub last: &'a mut Option<Last>,
    /// Messages about `verbs`, for later.
    pub control: &'a mut Vec<(DeviceId, VmId, Message)>,
}

/// A packet with all look-ups done. Valid for the next packet, while only packets are processed in between.
#[derive(Debug, Clone, Copy)]
pub(super) struct Last {
    from: Origin,
    header: Header,
    qpn: u32,
    index: usize,
}

impl<P: Provider> Arrivals<'_, P> {
    /// Processes a packet. Drops it if no device here is its receiver, or its sender isn't the claimed host.
    pub fn take(
        &mut self,
        from: Origin,
        header: &Header,
        rest: &[u8],
        congested: bool,
    ) -> Result<(), Dropped> {
        match header.kind {
            Kind::Connected => {
                let qpn = Packet::destination(rest).ok_or(Dropped::Malformed)?;
                let index = match self.last.take() {
                    Some(last) if last.qpn == qpn && last.header == *header && last.from == from => {
                        last.index
                    }
                    _ => self.find(from, header, qpn)?,
                };
                *self.last = Some(Last { from, header: *header, qpn, index });
                let entry = self.connections.get_mut(index).ok_or(Dropped::NoQueuePair)?;
                let too_fast = self.engine.is_written_too_fast(entry.qp.device);
                let arrival = roce::Arrival { congested, too_fast };
                self.engine.touch_qp(entry.qp.device, entry.qp.handle);
                let mut carrier = Carrier { engine: self.engine, qp: entry.qp };
                entry.connection.receive(self.now, rest, arrival, &mut carrier);
                self.connections.ready(index);
            }
            Kind::Control => {
                let device = self.device(header)?;
                let host = self.directory.host(header.source).ok_or(Dropped::NotItsHost)?;
                if !pin::is_verbs(self.directory, header.destination, header.source) {
                    return Err(Dropped::Pinned);
                }
                if !from.is(host) {
                    return Err(Dropped::NotItsHost);
                }
                let message = Message::decode(rest).ok_or(Dropped::Malformed)?;
                self.control.push((device, header.source, message));
            }
            Kind::Datagram => {
                let device = self.device(header)?;
                let host = self.directory.host(header.source).ok_or(Dropped::NotItsHost)?;
                let nic = self.nics.get(&device).ok_or(Dropped::NoVm)?;
                pin::check(self.directory, nic.vm, header.source, TransportKind::Fabric)
                    .map_err(|_| Dropped::Pinned)?;
                let (addresses, rest) = Addresses::decode(rest).ok_or(Dropped::Malformed)?;
                let owner = self.directory.owner(&nic.segment, addresses.source);
                if !from.is(host) || owner != Some(header.source) {
                    return Err(Dropped::NotItsHost);
                }
                let packet = Packet::parse(rest).map_err(|_| Dropped::Malformed)?;
                let (datagram, payload) = Datagram::receive(&packet).ok_or(Dropped::Malformed)?;
                self.engine.remote_datagram(&IncomingDatagram {
                    segment: nic.segment_id,
                    source_qpn: Qpn(datagram.source),
                    source_gid: addresses.source,
                    dgid: addresses.destination,
                    qpn: Qpn(datagram.destination),
                    qkey: datagram.qkey,
                    traffic_class: addresses.traffic_class,
                    flow_label: addresses.flow_label,
                    hop_limit: addresses.hop_limit,
                    immediate: datagram.immediate,
                    solicited: datagram.solicited,
                    header: None,
                    payload,
                });
            }
        }
        Ok(())
    }

    fn device(&self, header: &Header) -> Result<DeviceId, Dropped> {
        self.devices.get(&(header.destination, header.segment)).copied().ok_or(Dropped::NoVm)
    }

    /// The connection of a packet, if its sender is verified.
    fn find(&mut self, from: Origin, header: &Header, qpn: u32) -> Result<usize, Dropped> {
        let device = self.device(header)?;
        pin::check(self.directory, header.destination, header.source, TransportKind::Fabric)
            .map_err(|_| Dropped::Pinned)?;
        let index = self.connection(device, qpn).ok_or(Dropped::NoQueuePair)?;
        let entry = self.connections.get(index).ok_or(Dropped::NoQueuePair)?;
        let known = entry.peer_vm == header.source && entry.host.is_some_and(|host| from.is(host));
        if known { Ok(index) } else { Err(Dropped::NotItsHost) }
    }

    /// The connection of a queue pair, created if the queue pair is connected.
    fn connection(&mut self, device: DeviceId, qpn: u32) -> Option<usize> {
        let current = self.engine.connected(device, Qpn(qpn));
        let found = self.connections.index_of(device, qpn);
        match (current, found) {
            // A failed connection that still responds.
            (None, found) => found,
            (Some(qp), Some(index)) if self.connections.get(index).is_some_and(|entry| entry.qp == qp) => {
                Some(index)
            }
            (Some(qp), _) => {
                let make = || entry(self.engine, qp, self.nics, self.directory, self.wire);
                self.connections.of(qp, make)
            }
        }
    }
}
