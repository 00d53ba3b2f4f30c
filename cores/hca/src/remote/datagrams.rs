//! Datagrams to and from remote peers.

use dma::Dma;

use crate::engine::Engine;
use crate::local::datagram::{GRH_AREA, grh_area};
use crate::local::receive::Received;
use crate::local::total;
use crate::names::{Gid, Qpn, SegmentId};
use crate::objects::QpRef;
use crate::provider::Provider;
use crate::work::{CompletedOperation, Datagram, NetworkHeader, Status};

use super::responder::bytes;
use super::{Action, OutgoingDatagram};

/// A received datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IncomingDatagram<'a> {
    /// Segment that it was received in.
    pub segment: SegmentId,
    /// The sender's queue pair number.
    pub source_qpn: Qpn,
    /// The sender's address.
    pub source_gid: Gid,
    /// The receiver's address.
    pub dgid: Gid,
    /// The receiver's queue pair number.
    pub qpn: Qpn,
    /// Q_Key in the datagram.
    pub qkey: u32,
    /// Traffic class, for the GRH area.
    pub traffic_class: u8,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Hop limit.
    pub hop_limit: u8,
    /// Immediate data, as wire bytes.
    pub immediate: Option<[u8; 4]>,
    /// Raises a solicited event.
    pub solicited: bool,
    /// The GRH area, where the packet had a network header; otherwise the engine makes it from the fields above.
    pub header: Option<[u8; 40]>,
    /// Payload of the datagram, without the GRH area.
    pub payload: &'a [u8],
}

impl<P: Provider> Engine<P> {
    /// Passes a datagram whose source was gathered to the transport.
    pub(crate) fn datagram_elsewhere(
        &mut self,
        at: QpRef,
        to: Datagram,
        source_gid: Gid,
        source_qpn: Qpn,
        immediate: Option<[u8; 4]>,
        solicited: bool,
    ) -> Result<(), Status> {
        let Some(qp) = self.qp_id(at) else { return Err(Status::General) };
        let device = self.device(at.device).ok_or(Status::General)?;
        let mut payload = Vec::new();
        for piece in self.pieces().0 {
            let from = payload.len();
            payload.resize(from + usize::try_from(piece.len).unwrap_or(0), 0);
            device.memory.read(piece.address, &mut payload[from..]).map_err(|_| Status::LocalProtection)?;
        }
        let entry = device.gids.iter().flatten().find(|entry| entry.gid == source_gid);
        let source_mac = entry.map_or([0; 6], |entry| entry.mac);
        let segment = device.segment;
        self.actions.push(Action::Datagram(Box::new(OutgoingDatagram {
            qp,
            segment,
            source_qpn,
            source_gid,
            source_mac,
            to,
            immediate,
            solicited,
            payload,
        })));
        Ok(())
    }

    /// Delivers a received datagram. `false`: it was dropped, and counted if its device exists.
    pub fn remote_datagram(&mut self, datagram: &IncomingDatagram<'_>) -> bool {
        let Some(owner) = self.owner_of(datagram.segment, datagram.dgid) else { return false };
        let Some(receiver) = self.datagram_receiver(owner, datagram.qpn, datagram.qkey) else {
            if let Some(device) = self.device_mut(owner) {
                device.counters.rx_dropped += 1;
            }
            return false;
        };
        let Some(receive) = self.datagram_receive(owner, receiver) else { return false };
        let length = u64::from(bytes(datagram.payload.len()));
        let all = GRH_AREA + length;
        if total(&receive.sges) < all {
            self.stash_receive(receiver, receive);
            if let Some(device) = self.device_mut(owner) {
                device.counters.rx_dropped += 1;
            }
            return false;
        }
        if self.buffer_is_late(receiver, &receive, all) {
            self.stash_receive(receiver, receive);
            if let Some(device) = self.device_mut(owner) {
                device.counters.rx_dropped += 1;
            }
            return false;
        }
        let to = Datagram {
            qpn: datagram.qpn,
            qkey: datagram.qkey,
            pd: 0,
            dgid: datagram.dgid,
            sgid_index: 0,
            traffic_class: datagram.traffic_class,
            flow_label: datagram.flow_label,
            hop_limit: datagram.hop_limit,
            dmac: [0; 6],
        };
        let made = || grh_area(datagram.source_gid, &to, length, datagram.immediate.is_some());
        let header = datagram.header.unwrap_or_else(made);
        let shared = self.shared_queue(receiver);
        let placed = self.gather_target(receiver, shared, &receive.sges, all, 0..GRH_AREA).is_ok()
            && self.write_target(owner, &header).is_ok()
            && (length == 0
                || (self.gather_target(receiver, shared, &receive.sges, all, GRH_AREA..all).is_ok()
                    && self.write_target(owner, datagram.payload).is_ok()));
        if !placed {
            self.complete_receive_error(receiver, receive.wr_id, Status::LocalProtection);
            self.enter_error(receiver);
            return false;
        }
        if let Some(device) = self.device_mut(owner) {
            device.counters.port_rcv_packets += 1;
            device.counters.port_rcv_data += length.div_ceil(4);
            device.counters.rx_send_requests += 1;
        }
        if let Some(qp) = self.qp_mut(receiver) {
            qp.counters.served_bytes += length;
        }
        let ipv4 = datagram.source_gid.ipv4().is_some();
        let received = Received {
            wr_id: receive.wr_id,
            operation: CompletedOperation::Receive,
            byte_len: u32::try_from(all).unwrap_or(u32::MAX),
            immediate: datagram.immediate,
            invalidated: None,
            source: Some(datagram.source_qpn),
            grh: Some(if ipv4 { NetworkHeader::Ipv4 } else { NetworkHeader::Ipv6 }),
        };
        self.complete_receive(receiver, datagram.solicited, received);
        true
    }
}
