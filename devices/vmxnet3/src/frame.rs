//! Ethernet frames: their headers, and the location of their bytes.

use dma::access::CopyFault;
use dma::{Dma, DmaFault};

use crate::mac::MacAddress;

/// Bytes of destination, source and type.
pub const ETHERNET_HEADER: usize = 14;
/// Bytes of a VLAN tag.
pub const VLAN_TAG: usize = 4;
/// Limit of the device's MTU.
pub const MTU_MAX: u64 = 9190;
/// Limit of a frame without segmentation: MTU, Ethernet header, two VLAN tags.
pub const FRAME_MAX: usize = 9190 + ETHERNET_HEADER + 2 * VLAN_TAG;
/// Limit of a frame for segmentation: the longest IP packet (IPv6 without jumbograms), and its Ethernet header.
pub const LARGE_FRAME_MAX: usize = 65_535 + 40 + ETHERNET_HEADER + 2 * VLAN_TAG;
/// EtherType of 802.1Q.
pub(crate) const ETHERTYPE_VLAN: u16 = 0x8100;
const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86DD;
const PROTOCOL_TCP: u8 = 6;
const PROTOCOL_UDP: u8 = 17;

/// The work left on a frame before a receiver that expects a complete frame may get it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub enum Offload {
    /// None; its checksums are not verified.
    #[default]
    None,
    /// None; its checksums were verified or computed, and are good.
    Verified,
    /// Compute the checksum over everything from `start` on, and store it at `at`, which holds the sum of the pseudo-header. Offsets are
    /// bytes from the start of the frame.
    Checksum {
        /// Offset of the first summed byte.
        start: u16,
        /// Offset of the checksum field.
        at: u16,
    },
    /// Segment a TCP packet into pieces of `mss` bytes, and compute all checksums.
    Tso {
        /// Bytes of TCP payload per piece.
        mss: u16,
    },
}

/// Destination address of a frame. Frames here have at least [`ETHERNET_HEADER`] bytes.
pub(crate) fn destination(frame: &[u8]) -> MacAddress {
    MacAddress(std::array::from_fn(|i| frame.get(i).copied().unwrap_or(0)))
}

/// Source address of a frame.
pub(crate) fn source(frame: &[u8]) -> MacAddress {
    MacAddress(std::array::from_fn(|i| frame.get(6 + i).copied().unwrap_or(0)))
}

pub(crate) fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    let pair = bytes.get(at..at.checked_add(2)?)?;
    Some(u16::from_be_bytes([pair[0], pair[1]]))
}

/// The VLAN tag of a frame, if it has one.
pub(crate) fn vlan_tag(frame: &[u8]) -> Option<u16> {
    if be16(frame, 12)? == ETHERTYPE_VLAN { be16(frame, ETHERNET_HEADER) } else { None }
}

/// Location of the headers of TCP or UDP over IP; offsets in bytes from the start of the frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Transport {
    pub v6: bool,
    pub udp: bool,
    /// Offset of the IP header.
    pub ip: usize,
    /// Offset of the TCP or UDP header.
    pub l4: usize,
    /// End of the IP packet by its header; may be beyond the frame's end.
    pub end: usize,
}

impl Transport {
    /// Parses a frame, of which at least the headers are in `head`. `None` for anything but unfragmented TCP or UDP
    /// over IPv4 or IPv6 behind at most two VLAN tags, without IPv6 extension headers.
    pub fn parse(head: &[u8]) -> Option<Self> {
        let mut at = 12;
        let mut ethertype = be16(head, at)?;
        for _ in 0..2 {
            if ethertype == ETHERTYPE_VLAN || ethertype == 0x88A8 {
                at += VLAN_TAG;
                ethertype = be16(head, at)?;
            }
        }
        let ip = at + 2;
        match ethertype {
            ETHERTYPE_IPV4 => {
                let first = *head.get(ip)?;
                let len = usize::from(first & 0xF) * 4;
                // A fragment's offset or "more fragments".
                let fragment = be16(head, ip + 6)? & 0x3FFF != 0;
                let total = usize::from(be16(head, ip + 2)?);
                if first >> 4 != 4 || len < 20 || fragment || total < len {
                    return None;
                }
                let udp = is_udp(*head.get(ip + 9)?)?;
                Some(Self { v6: false, udp, ip, l4: ip + len, end: ip + total })
            }
            ETHERTYPE_IPV6 => {
                if *head.get(ip)? >> 4 != 6 {
                    return None;
                }
                let udp = is_udp(*head.get(ip + 6)?)?;
                let payload = usize::from(be16(head, ip + 4)?);
                Some(Self { v6: true, udp, ip, l4: ip + 40, end: ip + 40 + payload })
            }
            _ => None,
        }
    }
}

fn is_udp(protocol: u8) -> Option<bool> {
    match protocol {
        PROTOCOL_TCP => Some(false),
        PROTOCOL_UDP => Some(true),
        _ => None,
    }
}

/// A piece of a frame in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub address: u64,
    pub len: usize,
}

/// Copies bytes of a frame in pieces, from byte `skip` on. The pieces hold at least that many bytes.
pub(crate) fn gather(
    memory: &impl Dma,
    pieces: &[Piece],
    mut skip: usize,
    mut into: &mut [u8],
) -> Result<(), DmaFault> {
    for piece in pieces {
        if into.is_empty() {
            break;
        }
        if skip >= piece.len {
            skip -= piece.len;
            continue;
        }
        let now = into.len().min(piece.len - skip);
        let (part, rest) = into.split_at_mut(now);
        memory.read(piece.address.wrapping_add(skip as u64), part)?;
        into = rest;
        skip = 0;
    }
    Ok(())
}

/// A frame's bytes on the way to a receiver. First `parts` in the daemon's memory; for a frame that is copied directly from guest to guest,
/// the rest in the sender's memory.
pub(crate) struct FrameBytes<'a, M> {
    pub parts: [&'a [u8]; 2],
    pub rest: Option<GuestBytes<'a, M>>,
}

/// Bytes of a frame in the sender's memory, until they are copied to the receiver.
pub(crate) struct GuestBytes<'a, M> {
    pub memory: &'a M,
    pub pieces: &'a [Piece],
    /// Bytes at the start of the pieces that aren't part of it.
    pub skip: usize,
    pub len: usize,
}

impl<'a, M: Dma> FrameBytes<'a, M> {
    /// A frame in the daemon's memory.
    pub fn whole(frame: &'a [u8]) -> Self {
        Self { parts: [frame, &[]], rest: None }
    }

    /// Total length, bytes.
    pub fn len(&self) -> usize {
        self.parts[0].len() + self.parts[1].len() + self.rest.as_ref().map_or(0, |rest| rest.len)
    }

    /// The first part, which holds all headers.
    pub fn head(&self) -> &'a [u8] {
        self.parts[0]
    }

    /// Removes the VLAN tag, which the frame must have in its first part, by splitting that part.
    pub fn without_tag(self) -> Self {
        let [first, second] = self.parts;
        debug_assert!(second.is_empty());
        let (addresses, tagged) = first.split_at(12.min(first.len()));
        Self { parts: [addresses, tagged.get(VLAN_TAG..).unwrap_or(&[])], rest: self.rest }
    }

    /// Copies `len` bytes from byte `from` on into the receiver's memory.
    pub fn copy(&self, mut from: usize, to: &M, mut address: u64, mut len: usize) -> Result<(), CopyFault> {
        for part in self.parts {
            if from >= part.len() {
                from -= part.len();
                continue;
            }
            let now = len.min(part.len() - from);
            to.write(address, &part[from..from + now]).map_err(CopyFault::Destination)?;
            address = address.wrapping_add(now as u64);
            len -= now;
            from = 0;
        }
        let Some(rest) = self.rest.as_ref().filter(|_| len > 0) else { return Ok(()) };
        let mut skip = rest.skip + from;
        for piece in rest.pieces {
            if len == 0 {
                break;
            }
            if skip >= piece.len {
                skip -= piece.len;
                continue;
            }
            let now = len.min(piece.len - skip);
            rest.memory.copy_to(piece.address.wrapping_add(skip as u64), to, address, now as u64)?;
            address = address.wrapping_add(now as u64);
            len -= now;
            skip = 0;
        }
        Ok(())
    }
}

/// Kinds of destinations in statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MacKind {
    Unicast,
    Multicast,
    Broadcast,
}

impl MacKind {
    pub fn of(address: MacAddress) -> Self {
        if address == MacAddress::BROADCAST {
            Self::Broadcast
        } else if address.is_group() {
            Self::Multicast
        } else {
            Self::Unicast
        }
    }
}
