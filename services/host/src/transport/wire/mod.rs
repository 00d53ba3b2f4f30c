//! Transport `wire`: plain RoCEv2 frames with the guest's own MAC and address, on its NIC's segment.
//!
//! For peers outside of Causeway: Linux's `rdma_rxe`, a hardware NIC, a guest of a daemon without this one's directory. Nothing is
//! translated: addresses, queue pair numbers, keys and PSNs on the link are the guest's. `port` connects it with the segment.
//!
//! A frame is accepted only if its ICRC is right, it has an address of the guest, and it comes from the peer with which the guest connected
//! its queue pair. An Ethernet doesn't authenticate the sender's address: that holds for any RoCE NIC.

mod moving;
mod port;

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use hca::engine::Engine;
use hca::names::{DeviceId, Gid, Qpn, SegmentId};
use hca::provider::Provider;
use hca::remote::{ConnectionInfo, IncomingDatagram, OutgoingDatagram, QpId};
use roce::congestion::Parameters;
use roce::datagram::Datagram;
use roce::frame::{self, ECN_CAPABLE, ECN_MASK, Template};
use roce::packet::{DEFAULT_PKEY, Service};
use roce::{Batch, Config, Mtu, Packet};

use super::carrier::Carrier;
use super::connections::Entry;
use super::header::{Header, Kind};
use super::{BURST, NOBODY, Transports};
pub use port::WirePort;
use port::{Address, Arrived, Bell, Inbox};

/// Limit of packets of one `transmit`.
const PACKETS: usize = 64;

/// Frames of one connection.
#[derive(Debug)]
pub(super) struct Line {
    port: Arc<WirePort>,
    template: Template,
    own: IpAddr,
    peer: IpAddr,
    /// Identification of the next IPv4 header.
    identification: u16,
}

/// The ports of an engine's devices.
pub(super) struct Wire {
    bell: Arc<Bell>,
    ports: HashMap<DeviceId, (Arc<WirePort>, SegmentId)>,
    /// Devices that have arrived with their VMs, and whose ports aren't in their segments yet.
    landing: BTreeSet<DeviceId>,
    /// The engine's topology number when the ports' addresses were set.
    topology: u64,
    inbox: Inbox,
    identification: u16,
    psn: u32,
}

fn ip(gid: Gid) -> IpAddr {
    gid.ipv4().map_or_else(|| IpAddr::from(gid.0), IpAddr::from)
}

fn gid(ip: IpAddr) -> Gid {
    Gid(match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    })
}

impl Wire {
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            bell: Arc::new(Bell::new()?),
            ports: HashMap::new(),
            landing: BTreeSet::new(),
            topology: 0,
            inbox: Inbox::default(),
            identification: 0,
            psn: 0,
        })
    }

    pub fn attach(&mut self, device: DeviceId, segment: SegmentId, port: Arc<WirePort>) {
        port.open(Arc::clone(&self.bell));
        self.ports.insert(device, (port, segment));
        self.topology = 0;
    }

    pub fn detach(&mut self, device: DeviceId) {
        self.landing.remove(&device);
        if let Some((port, _)) = self.ports.remove(&device) {
            port.close();
        }
    }

    pub fn has(&self, device: DeviceId) -> bool {
        self.ports.contains_key(&device)
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.bell.fd()
    }

    /// Updates the ports' addresses after a change.
    pub fn follow<P: Provider>(&mut self, engine: &Engine<P>) {
        let topology = engine.topology();
        if std::mem::replace(&mut self.topology, topology) == topology {
            return;
        }
        for (device, (port, _)) in &self.ports {
            let addresses = engine.addresses(*device);
            port.set_addresses(addresses.map(|(gid, mac)| Address { ip: ip(gid), mac }));
        }
    }

    /// The frame headers of a queue pair; `None` if its device has no port, or the guest set no MAC.
    fn line(&self, info: &ConnectionInfo) -> Option<Line> {
        let (port, _) = self.ports.get(&info.qp.device)?;
        let attributes = &info.attributes;
        let path = &attributes.address;
        if path.dmac == [0; 6] {
            return None;
        }
        let (own, peer) = (ip(info.source_gid), ip(path.dgid));
        let template = Template::new(&frame::Addresses {
            source_mac: info.source_mac,
            destination_mac: path.dmac,
            vlan: None,
            source: own,
            destination: peer,
            // The protocol owns the ECN bits: it sends notifications for marks, and reduces its rate at notifications.
            traffic_class: path.traffic_class & !ECN_MASK | ECN_CAPABLE,
            flow_label: path.flow_label,
            hop_limit: path.hop_limit,
            source_port: frame::source_port(path.flow_label, info.qpn.0, attributes.destination_qpn.0),
        });
        Some(Line { port: Arc::clone(port), template: template.ok()?, own, peer, identification: 0 })
    }

    /// The entry of a queue pair; `None` if its device has no port, or the guest set no MAC.
    pub fn entry(&self, info: &ConnectionInfo) -> Option<Entry> {
        let line = self.line(info)?;
        let attributes = &info.attributes;
        let mtu = Mtu::from_code(attributes.path_mtu)?;
        let config = Config { congestion: Some(Parameters::default()), ..Entry::config(info, mtu) };
        // The fabric's header, which it doesn't use.
        let header = Header { kind: Kind::Connected, source: NOBODY, destination: NOBODY, segment: 0 };
        let mut entry = Entry::new(info, config, NOBODY, None, header)?;
        (entry.outside, entry.line) = (true, Some(line));
        Some(entry)
    }
}

impl Transports {
    /// Processes packets received by wire.
    pub(super) fn receive_wire<P: Provider>(&mut self, engine: &mut Engine<P>, now: u64) -> bool {
        self.wire.follow(engine);
        self.land(engine, now);
        if !self.wire.bell.take() {
            return false;
        }
        let ports: Vec<_> = self
            .wire
            .ports
            .iter()
            .map(|(device, (port, segment))| (*device, Arc::clone(port), *segment))
            .collect();
        let mut inbox = std::mem::take(&mut self.wire.inbox);
        let mut any = false;
        for (device, port, segment) in ports {
            port.drain(&mut inbox);
            if port.is_still() {
                continue;
            }
            for (arrived, packet) in inbox.packets() {
                any = true;
                match self.take_packet(engine, (device, segment), arrived, packet, now) {
                    Ok(()) => {}
                    Err(Dropped::Malformed) => port.counters.malformed.increment(),
                    Err(Dropped::NoQueuePair) => port.counters.no_queue_pair.increment(),
                    Err(Dropped::WrongPeer) => port.counters.wrong_peer.increment(),
                }
            }
        }
        self.wire.inbox = inbox;
        any
    }

    fn take_packet<P: Provider>(
        &mut self,
        engine: &mut Engine<P>,
        (device, segment): (DeviceId, SegmentId),
        arrived: &Arrived,
        packet: &[u8],
        now: u64,
    ) -> Result<(), Dropped> {
        let parsed = Packet::parse(packet).map_err(|_| Dropped::Malformed)?;
        let source = gid(arrived.source);
        // VMs that another transport reaches are refused here, where any station can forge their addresses.
        let known = self.nics.get(&device).and_then(|nic| self.directory.owner(&nic.segment, source));
        if known.is_some() || engine.has_address(segment, source) || self.by_wire(device).is_err() {
            return Err(Dropped::WrongPeer);
        }
        if parsed.header.service == Service::Ud {
            let (datagram, payload) = Datagram::receive(&parsed).ok_or(Dropped::Malformed)?;
            if (datagram.pkey ^ DEFAULT_PKEY) & 0x7FFF != 0 {
                return Err(Dropped::NoQueuePair);
            }
            let taken = engine.remote_datagram(&IncomingDatagram {
                segment,
                source_qpn: Qpn(datagram.source),
                source_gid: source,
                dgid: gid(arrived.destination),
                qpn: Qpn(datagram.destination),
                qkey: datagram.qkey,
                traffic_class: arrived.traffic_class,
                flow_label: arrived.flow_label,
                hop_limit: arrived.hop_limit,
                immediate: datagram.immediate,
                solicited: datagram.solicited,
                header: Some(arrived.header),
                payload,
            });
            return if taken { Ok(()) } else { Err(Dropped::NoQueuePair) };
        }
        let index = self.arriving(engine, device, parsed.header.destination).ok_or(Dropped::NoQueuePair)?;
        let entry = self.connections.get_mut(index).ok_or(Dropped::NoQueuePair)?;
        let line = entry.line.as_ref().ok_or(Dropped::WrongPeer)?;
        if (line.peer, line.own) != (arrived.source, arrived.destination) {
            return Err(Dropped::WrongPeer);
        }
        let too_fast = engine.is_written_too_fast(entry.qp.device);
        let arrival = roce::Arrival { congested: arrived.congested, too_fast };
        entry.connection.receive(now, packet, arrival, &mut Carrier { engine, qp: entry.qp });
        self.connections.ready(index);
        Ok(())
    }

    /// Sends a connection's packets while there is room.
    pub(super) fn transmit_wire<P: Provider>(
        &mut self,
        engine: &mut Engine<P>,
        index: usize,
        now: u64,
    ) -> bool {
        let Self { connections, buffer, lengths, .. } = self;
        let Some(entry) = connections.get_mut(index) else { return false };
        let Some(line) = &mut entry.line else { return false };
        if !line.port.has_room(BURST) {
            connections.ready(index);
            return false;
        }
        let (before, behind) = (line.template.before(), roce::icrc::LEN);
        let mut batch = Batch::new(buffer, lengths, before, behind, PACKETS);
        entry.connection.transmit(now, &mut Carrier { engine, qp: entry.qp }, &mut batch);
        let more = entry.connection.wants_transmit(now);
        let mut rest = buffer.as_mut_slice();
        let frames = lengths.iter().filter_map(|length| {
            let length = before + usize::try_from(*length).unwrap_or(0) + behind;
            let (frame, others) = std::mem::take(&mut rest).split_at_mut_checked(length)?;
            rest = others;
            line.identification = line.identification.wrapping_add(1);
            line.template.finish(frame, line.identification).then_some(&*frame)
        });
        line.port.send(frames);
        let sent = !lengths.is_empty();
        connections.follow(index, more);
        sent
    }

    /// Sends a datagram to a peer outside of the directory.
    pub(super) fn send_datagram_by_wire(&mut self, datagram: &OutgoingDatagram) {
        let Some((port, _)) = self.wire.ports.get(&datagram.qp.device) else { return };
        let to = &datagram.to;
        let template = Template::new(&frame::Addresses {
            source_mac: datagram.source_mac,
            destination_mac: to.dmac,
            vlan: None,
            source: ip(datagram.source_gid),
            destination: ip(to.dgid),
            // Datagrams have no congestion control, so they aren't ECN-capable.
            traffic_class: to.traffic_class & !ECN_MASK,
            flow_label: to.flow_label,
            hop_limit: to.hop_limit,
            source_port: frame::source_port(to.flow_label, datagram.source_qpn.0, to.qpn.0),
        });
        let Some(template) = template.ok().filter(|_| to.dmac != [0; 6]) else {
            return port.counters.send_drops.increment();
        };
        self.wire.psn = (self.wire.psn + 1) & 0xFF_FFFF;
        self.wire.identification = self.wire.identification.wrapping_add(1);
        let sent = Datagram {
            destination: to.qpn.0,
            source: datagram.source_qpn.0,
            qkey: to.qkey,
            pkey: DEFAULT_PKEY,
            psn: self.wire.psn,
            solicited: datagram.solicited,
            immediate: datagram.immediate,
        };
        let mut batch =
            Batch::new(&mut self.buffer, &mut self.lengths, template.before(), roce::icrc::LEN, 1);
        let fill = |into: &mut [u8]| -> Result<(), ()> {
            into.copy_from_slice(datagram.payload.get(..into.len()).ok_or(())?);
            Ok(())
        };
        if sent.send(datagram.payload.len(), &mut batch, fill) != Ok(true) {
            return;
        }
        let len = batch.len();
        let Some(frame) = self.buffer.get_mut(..len) else { return };
        if template.finish(frame, self.wire.identification) {
            port.send(std::iter::once(&*frame));
        }
    }

    /// The connection of a packet's queue pair, created if the queue pair is connected.
    fn arriving<P: Provider>(&mut self, engine: &Engine<P>, device: DeviceId, qpn: u32) -> Option<usize> {
        let found = self.connections.index_of(device, qpn);
        // A failed connection that still responds.
        let Some(qp) = engine.connected(device, Qpn(qpn)) else { return found };
        self.connection_of(engine, qp)
    }

    /// The connection of a queue pair, created if needed.
    pub(super) fn connection_of<P: Provider>(&mut self, engine: &Engine<P>, qp: QpId) -> Option<usize> {
        let Self { connections, nics, directory, wire, .. } = self;
        connections.of(qp, || super::entry(engine, qp, nics, directory.as_ref(), wire))
    }
}

/// Why a packet is dropped.
enum Dropped {
    Malformed,
    NoQueuePair,
    WrongPeer,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // For tests only.
mod tests;
