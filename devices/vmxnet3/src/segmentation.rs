//! TCP segmentation in software.

use crate::checksum;
use crate::frame::{Transport, be16};

/// Limit of pieces of one packet: 64 KiB with the smallest MSS that TCP stacks use. A guest that requests more tries to keep the thread
/// busy.
pub(crate) const SEGMENTS_MAX: usize = 1024;

const FIN: u8 = 0x01;
const PSH: u8 = 0x08;
const CWR: u8 = 0x80;

/// How a large TCP packet is segmented.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Plan {
    pub transport: Transport,
    /// Bytes of all headers.
    pub headers: usize,
    pub mss: usize,
    /// Number of pieces, at least 1.
    pub count: usize,
}

impl Plan {
    /// Plans a packet of `len` bytes whose headers are in `head`. `None` when it isn't TCP over IP, its headers are incomplete, or it would
    /// need more than [`SEGMENTS_MAX`] pieces.
    pub fn new(head: &[u8], len: usize, mss: u16) -> Option<Self> {
        let transport = Transport::parse(head).filter(|transport| !transport.udp)?;
        let words = usize::from(*head.get(transport.l4 + 12)? >> 4);
        let headers = transport.l4 + words * 4;
        let mss = usize::from(mss);
        if words < 5 || headers > head.len() || headers > len || mss == 0 {
            return None;
        }
        let count = (len - headers).div_ceil(mss).max(1);
        (count <= SEGMENTS_MAX).then_some(Self { transport, headers, mss, count })
    }

    /// Payload range of piece `index`: start and end, from the start of the packet.
    pub fn payload(&self, len: usize, index: usize) -> (usize, usize) {
        let from = (self.headers + index * self.mss).min(len);
        (from, (from + self.mss).min(len))
    }

    /// Writes piece `index` of `packet` to `into`, complete with all checksums.
    pub fn segment(&self, packet: &[u8], index: usize, into: &mut Vec<u8>) {
        let (from, to) = self.payload(packet.len(), index);
        into.clear();
        into.extend_from_slice(packet.get(..self.headers).unwrap_or(&[]));
        self.fix_headers(into, to - from, index);
        into.extend_from_slice(packet.get(from..to).unwrap_or(&[]));
        checksum::complete(into, self.transport.l4, checksum::field(&self.transport));
    }

    /// Turns the packet's headers into those of a piece with `payload` bytes. The TCP checksum field keeps the sum of the pseudo-header.
    fn fix_headers(&self, headers: &mut [u8], payload: usize, index: usize) {
        let Transport { ip, l4, .. } = self.transport;
        let wrapping16 = |value: usize| {
            let [a, b, ..] = value.to_le_bytes();
            u16::from_le_bytes([a, b])
        };
        let l4_len = self.headers - l4 + payload;
        set_lengths(headers, &self.transport, l4_len);
        if !self.transport.v6 {
            let id = be16(headers, ip + 4).unwrap_or(0).wrapping_add(wrapping16(index));
            headers[ip + 4..ip + 6].copy_from_slice(&id.to_be_bytes());
            checksum::complete_ipv4(headers, &self.transport);
        }
        let sequence: [u8; 4] = std::array::from_fn(|i| headers[l4 + 4 + i]);
        let ahead = u32::try_from(index * self.mss).unwrap_or(u32::MAX);
        let sequence = u32::from_be_bytes(sequence).wrapping_add(ahead);
        headers[l4 + 4..l4 + 8].copy_from_slice(&sequence.to_be_bytes());
        if index > 0 {
            headers[l4 + 13] &= !CWR;
        }
        if index + 1 < self.count {
            headers[l4 + 13] &= !(FIN | PSH);
        }
        checksum::store_pseudo_header(headers, &self.transport, l4_len);
    }

    /// Prepares a packet for a receiver that segments it itself, as Linux requires. Lengths and IPv4 header checksum are right, and the TCP
    /// checksum field holds the sum of the pseudo-header with the length.
    pub fn prepare_uncut(&self, packet: &mut [u8]) {
        let l4_len = packet.len() - self.transport.l4;
        set_lengths(packet, &self.transport, l4_len);
        if !self.transport.v6 {
            checksum::complete_ipv4(packet, &self.transport);
        }
        checksum::store_pseudo_header(packet, &self.transport, l4_len);
    }
}

/// Sets lengths in the IP header for `l4_len` bytes behind it. IPv6 packets of more than 64 KiB get length 0.
fn set_lengths(headers: &mut [u8], transport: &Transport, l4_len: usize) {
    let Transport { v6, ip, l4, .. } = *transport;
    let (at, len) = if v6 { (ip + 4, l4_len + l4 - ip - 40) } else { (ip + 2, l4_len + l4 - ip) };
    let len = u16::try_from(len).unwrap_or(0);
    headers[at..at + 2].copy_from_slice(&len.to_be_bytes());
}

#[cfg(test)]
mod tests;
