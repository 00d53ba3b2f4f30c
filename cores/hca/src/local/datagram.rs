//! Datagrams: UD, and the general services queue pair. The sender never learns of an error at the receiver.

use dma::Dma;
use dma::access::CopyFault;

use crate::attributes::QpKind;
use crate::engine::Engine;
use crate::memory::Piece;
use crate::names::{GSI, Gid, Qpn, SegmentId};
use crate::objects::QpRef;
use crate::provider::Provider;
use crate::work::{
    AsyncEvent, CompletedOperation, Datagram, NetworkHeader, ReceiveRequest, SendRequest, Status,
};

use super::receive::{Received, Taken};
use super::{Step, message_len, total};

/// Bytes before the payload in a datagram's receive buffer: the area of the global routing header (GRH).
pub(crate) const GRH_AREA: u64 = 40;
/// UDP, BTH, DETH and ICRC around a payload.
const HEADERS: u64 = 8 + 12 + 8 + 4;

impl<P: Provider> Engine<P> {
    /// Sends a datagram.
    pub(super) fn datagram(
        &mut self,
        at: QpRef,
        request: &SendRequest,
        to: &Datagram,
        immediate: Option<[u8; 4]>,
    ) -> Step {
        let sent = match self.checked_datagram(at, request, to, immediate) {
            Ok(sent) => sent,
            Err(step) => return step,
        };
        self.charge(at, sent.length);
        if let Some(device) = self.device_mut(at.device) {
            device.counters.port_xmit_packets += 1;
            device.counters.port_xmit_data += sent.length.div_ceil(4);
        }
        if let Some(qp) = self.qp_mut(at) {
            qp.counters.bytes += sent.length;
        }
        let one_family = sent.source_gid.ipv4().is_some() == to.dgid.ipv4().is_some();
        let owner = self.owner_of(sent.segment, to.dgid);
        if let Some(owner) = owner.filter(|owner| one_family && !self.detours(at.device, *owner)) {
            return self.deliver_datagram(at, owner, &sent);
        }
        if !one_family || !self.uplinks.contains(&sent.segment) {
            return Step::DONE;
        }
        let to = Datagram { qkey: sent.qkey, ..*to };
        let Sent { source_gid, source_qpn, .. } = sent;
        match self.datagram_elsewhere(at, to, source_gid, source_qpn, immediate, request.solicited) {
            Ok(()) => Step::DONE,
            Err(status) => Step::Failed(status),
        }
    }

    /// Checks a datagram at its sender. The error: what becomes of the request instead.
    fn checked_datagram<'a>(
        &mut self,
        at: QpRef,
        request: &'a SendRequest,
        to: &'a Datagram,
        immediate: Option<[u8; 4]>,
    ) -> Result<Sent<'a>, Step> {
        let length = total(&request.sges);
        let Some(device) = self.device(at.device) else { return Err(Step::Failed(Status::General)) };
        let Some(qp) = self.qp(at) else { return Err(Step::Failed(Status::General)) };
        let port_mtu = u64::from(device.port_mtu);
        let source_qpn = if qp.kind == QpKind::Gsi { GSI } else { qp.qpn };
        // IBTA 10.2.5: a Q_Key with bit 31 selects the queue pair's own.
        let qkey = if to.qkey & (1 << 31) != 0 { qp.attributes.qkey } else { to.qkey };
        let source_gid = device.gid(to.sgid_index);
        let segment = device.segment;
        if to.pd != qp.pd {
            return Err(Step::Failed(Status::LocalQpOperation));
        }
        let source_gid = source_gid.ok_or(Step::Failed(Status::LocalQpOperation))?;
        if length > port_mtu {
            // IBTA C10-93.1.1 forbids to send any of it. The error completion follows hardware.
            if let Some(device) = self.device_mut(at.device) {
                device.counters.req_local_length_error += 1;
            }
            return Err(Step::Failed(Status::LocalLength));
        }
        if self.gather_source(at, &request.sges, length, 0..length).is_err() {
            return Err(Step::Failed(Status::LocalProtection));
        }
        if self.awaits_memory(at, false, Some(at.device), None) {
            return Err(Step::NotHere);
        }
        Ok(Sent { request, to, immediate, length, segment, source_gid, source_qpn, qkey })
    }

    /// Delivers a datagram to a device of this engine.
    fn deliver_datagram(&mut self, at: QpRef, owner: u32, sent: &Sent<'_>) -> Step {
        let &Sent { request, to, immediate, length, source_gid, source_qpn, .. } = sent;
        let Some(receiver) = self.datagram_receiver(owner, to.qpn, sent.qkey) else {
            self.count_dropped_datagram(owner);
            return Step::DONE;
        };
        let header = grh_area(source_gid, to, length, immediate.is_some());
        let Some(receive) = self.datagram_receive(owner, receiver) else { return Step::DONE };
        // Any device can send a datagram, so an invalid one must not consume the receiver's buffer. With not-present pages the buffer
        // counts as not posted: no requester waits for a datagram.
        if total(&receive.sges) < GRH_AREA + length
            || self.buffer_is_late(receiver, &receive, GRH_AREA + length)
        {
            self.stash_receive(receiver, receive);
            self.count_dropped_datagram(owner);
            return Step::DONE;
        }
        match self.place(at, receiver, &receive, &header, length) {
            Ok(()) => {}
            Err(Side::Source) => {
                self.stash_receive(receiver, receive);
                return Step::Failed(Status::LocalProtection);
            }
            Err(Side::Target) => {
                self.complete_receive_error(receiver, receive.wr_id, Status::LocalProtection);
                self.enter_error(receiver);
                return Step::DONE;
            }
        }
        if let Some(device) = self.device_mut(owner) {
            device.counters.port_rcv_packets += 1;
            device.counters.port_rcv_data += length.div_ceil(4);
            device.counters.rx_send_requests += 1;
        }
        if let Some(qp) = self.qp_mut(receiver) {
            qp.counters.served_bytes += length;
        }
        let received = Received {
            wr_id: receive.wr_id,
            operation: CompletedOperation::Receive,
            byte_len: message_len(GRH_AREA + length),
            immediate,
            invalidated: None,
            source: Some(source_qpn),
            grh: Some(if source_gid.ipv4().is_some() { NetworkHeader::Ipv4 } else { NetworkHeader::Ipv6 }),
        };
        self.complete_receive(receiver, request.solicited, received);
        Step::DONE
    }

    fn count_dropped_datagram(&mut self, owner: u32) {
        if let Some(device) = self.device_mut(owner) {
            device.counters.rx_dropped += 1;
        }
    }

    /// The queue pair that receives a datagram.
    pub(crate) fn datagram_receiver(&self, owner: u32, qpn: Qpn, qkey: u32) -> Option<QpRef> {
        let device = self.device(owner).filter(|device| device.enabled)?;
        let qp = device.qp_by_number(qpn)?;
        let takes =
            matches!(qp.kind, QpKind::Ud | QpKind::Gsi) && qp.receives() && qp.attributes.qkey == qkey;
        takes.then_some(QpRef { device: owner, handle: qp.handle.0, stamp: qp.stamp })
    }

    /// Consumes a receive for a datagram; without one, the datagram is dropped.
    pub(crate) fn datagram_receive(&mut self, owner: u32, receiver: QpRef) -> Option<ReceiveRequest> {
        match self.take_receive(receiver) {
            Taken::Request(receive) => Some(receive),
            Taken::Empty => {
                if let Some(device) = self.device_mut(owner) {
                    device.counters.out_of_buffer += 1;
                }
                None
            }
            Taken::Malformed(wr_id) => {
                self.complete_receive_error(receiver, wr_id, Status::LocalQpOperation);
                self.enter_error(receiver);
                None
            }
            Taken::Broken => {
                let handle = crate::names::QpHandle(receiver.handle);
                self.event(owner, AsyncEvent::QpFatal(handle));
                self.enter_error(receiver);
                None
            }
        }
    }

    /// Whether a datagram's buffer has not-present pages, and requests them.
    pub(crate) fn buffer_is_late(&mut self, receiver: QpRef, receive: &ReceiveRequest, total: u64) -> bool {
        if self.device(receiver.device).is_none_or(|device| device.late.is_none()) {
            return false;
        }
        let shared = self.shared_queue(receiver);
        if self.gather_target(receiver, shared, &receive.sges, total, 0..total).is_err() {
            return false;
        }
        let Some(device) = self.device(receiver.device) else { return false };
        // Evaluated for all pieces, so that all their pages are requested. Header and data are written separately: no page counts as
        // overwritten as a whole.
        let awaits = |piece: &&Piece| device.memory.awaits(piece.address, piece.len, false);
        self.pieces().1.iter().filter(awaits).count() > 0
    }

    /// Writes the GRH area, and copies the payload behind it.
    fn place(
        &mut self,
        at: QpRef,
        receiver: QpRef,
        receive: &ReceiveRequest,
        header: &[u8; 40],
        length: u64,
    ) -> Result<(), Side> {
        let shared = self.shared_queue(receiver);
        let target = |_| Side::Target;
        let total = GRH_AREA + length;
        self.gather_target(receiver, shared, &receive.sges, total, 0..GRH_AREA).map_err(target)?;
        let device = self.device(receiver.device).ok_or(Side::Target)?;
        let mut done = 0;
        for piece in self.pieces().1 {
            let len = usize::try_from(piece.len).map_err(|_| Side::Target)?;
            device.memory.write(piece.address, &header[done..done + len]).map_err(|_| Side::Target)?;
            done += len;
        }
        if length == 0 {
            return Ok(());
        }
        self.gather_target(receiver, shared, &receive.sges, total, GRH_AREA..total).map_err(target)?;
        self.copy(at.device, receiver.device).map_err(|fault| match fault {
            CopyFault::Source(_) => Side::Source,
            CopyFault::Destination(_) => Side::Target,
        })
    }
}

/// A datagram that was checked at its sender.
struct Sent<'a> {
    request: &'a SendRequest,
    to: &'a Datagram,
    immediate: Option<[u8; 4]>,
    /// Bytes of the payload.
    length: u64,
    segment: SegmentId,
    source_gid: Gid,
    source_qpn: Qpn,
    qkey: u32,
}

/// The side whose memory caused a fault.
enum Side {
    Source,
    Target,
}

/// The first 40 bytes of a receive buffer: an IPv6 header, or 20 zero bytes and an IPv4 header with its checksum.
pub(crate) fn grh_area(source: Gid, to: &Datagram, length: u64, immediate: bool) -> [u8; 40] {
    let immediate = if immediate { 4 } else { 0 };
    let payload = HEADERS + immediate + length.next_multiple_of(4);
    // At most the port's MTU plus headers.
    let payload = u16::try_from(payload).unwrap_or(u16::MAX);
    let hop_limit = if to.hop_limit == 0 { 64 } else { to.hop_limit };
    let mut area = [0; 40];
    if let (Some(from), Some(dest)) = (source.ipv4(), to.dgid.ipv4()) {
        let header = &mut area[20..];
        header[0] = 0x45;
        header[1] = to.traffic_class;
        header[2..4].copy_from_slice(&payload.saturating_add(20).to_be_bytes());
        // Don't fragment.
        header[6] = 0x40;
        header[8] = hop_limit;
        header[9] = 17;
        header[12..16].copy_from_slice(&from.octets());
        header[16..20].copy_from_slice(&dest.octets());
        let checksum = internet_checksum(header);
        header[10..12].copy_from_slice(&checksum.to_be_bytes());
    } else {
        let first = (6 << 28) | (u32::from(to.traffic_class) << 20) | (to.flow_label & 0xF_FFFF);
        area[..4].copy_from_slice(&first.to_be_bytes());
        area[4..6].copy_from_slice(&payload.to_be_bytes());
        area[6] = 17;
        area[7] = hop_limit;
        area[8..24].copy_from_slice(&source.0);
        area[24..40].copy_from_slice(&to.dgid.0);
    }
    area
}

/// The checksum of an IPv4 header (RFC 1071) whose checksum field is 0.
fn internet_checksum(header: &[u8]) -> u16 {
    let mut sum: u32 = 0;
    for pair in header.chunks_exact(2) {
        sum += u32::from(u16::from_be_bytes([pair[0], pair[1]]));
    }
    while sum > 0xFFFF {
        sum = (sum & 0xFFFF) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn to(dgid: [u8; 16]) -> Datagram {
        Datagram {
            qpn: GSI,
            qkey: 0,
            pd: 1,
            dgid: Gid(dgid),
            sgid_index: 0,
            traffic_class: 0x6B,
            flow_label: 0x12345,
            hop_limit: 7,
            dmac: [0; 6],
        }
    }

    fn mapped(last: [u8; 4]) -> [u8; 16] {
        let mut gid = [0; 16];
        gid[10] = 0xFF;
        gid[11] = 0xFF;
        gid[12..].copy_from_slice(&last);
        gid
    }

    #[test]
    fn the_ipv4_header_is_valid() {
        let area = grh_area(Gid(mapped([10, 0, 0, 1])), &to(mapped([10, 0, 0, 2])), 5, false);
        assert_eq!(area[..20], [0; 20]);
        assert_eq!(area[20], 0x45);
        assert_eq!(u16::from_be_bytes([area[22], area[23]]), 20 + 32 + 8);
        assert_eq!(internet_checksum(&area[20..]), 0, "a header with its checksum sums to all ones");
    }

    #[test]
    fn the_ipv6_header_has_both_addresses() {
        let mut source = [0; 16];
        source[0] = 0xFD;
        source[15] = 1;
        let mut dest = source;
        dest[15] = 2;
        let area = grh_area(Gid(source), &to(dest), 16, true);
        assert_eq!(area[..8], [0x66, 0xB1, 0x23, 0x45, 0, 52, 17, 7]);
        assert_eq!(area[8..24], source);
        assert_eq!(area[24..], dest);
    }
}
