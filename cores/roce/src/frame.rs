//! Whole frames: Ethernet, optionally one VLAN tag, IPv4 or IPv6, UDP, the packet, ICRC (IBTA annex A17, RoCEv2).

use std::net::IpAddr;

use crate::icrc;

/// UDP port of RoCEv2.
pub const PORT: u16 = 4791;

const ETHERNET: usize = 14;
const VLAN: usize = 4;
const IPV4: usize = 20;
const IPV6: usize = 40;
const UDP: usize = 8;

/// Limit of bytes before the BTH.
pub const MOST_HEADERS: usize = ETHERNET + VLAN + IPV6 + UDP;

/// The explicit congestion notification bits of the traffic class.
pub const ECN_MASK: u8 = 0b11;
/// ECN-capable transport: set by a sender that wants congestion marked instead of its packets dropped.
pub const ECN_CAPABLE: u8 = 0b10;

/// Addresses of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    /// Sender's MAC.
    pub source_mac: [u8; 6],
    /// Receiver's MAC.
    pub destination_mac: [u8; 6],
    /// VLAN tag control (priority and identifier), if tagged.
    pub vlan: Option<u16>,
    /// Sender's address.
    pub source: IpAddr,
    /// Receiver's address.
    pub destination: IpAddr,
    /// Traffic class, ECN bits included.
    pub traffic_class: u8,
    /// Flow label, 20 bits; IPv6 only.
    pub flow_label: u32,
    /// Hop limit; 0 stands for 64.
    pub hop_limit: u8,
    /// UDP source port: one per queue pair, 0xC000 or above. See [`source_port`].
    pub source_port: u16,
}

/// UDP source port of a connection, by the rule of Linux drivers: from the flow label, or from both queue pair numbers where that is 0.
#[must_use]
pub fn source_port(flow_label: u32, qpn: u32, peer_qpn: u32) -> u16 {
    let label = match flow_label & 0xF_FFFF {
        0 => {
            let mut folded = u64::from(qpn) * u64::from(peer_qpn);
            folded ^= folded >> 20;
            folded ^= folded >> 40;
            (folded & 0xF_FFFF) as u32
        }
        label => label,
    };
    0xC000 | (((label & 0x3FFF) ^ ((label >> 14) & 0x3F)) & 0x3FFF) as u16
}

/// The headers of all frames between two addresses, without lengths, identification and checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Template {
    bytes: [u8; MOST_HEADERS],
    /// Where the IP header begins.
    network: usize,
    len: usize,
}

/// The addresses are of different families.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("The path from {from} to {to} is between two address families")]
pub struct MixedFamilies {
    /// Address of the sender.
    pub from: IpAddr,
    /// Address of the receiver.
    pub to: IpAddr,
}

impl Template {
    /// Headers between these addresses.
    ///
    /// # Errors
    /// When the addresses are of different families.
    pub fn new(addresses: &Addresses) -> Result<Self, MixedFamilies> {
        let mut bytes = [0; MOST_HEADERS];
        bytes[..6].copy_from_slice(&addresses.destination_mac);
        bytes[6..12].copy_from_slice(&addresses.source_mac);
        let mut network = 12;
        if let Some(tag) = addresses.vlan {
            bytes[12..14].copy_from_slice(&[0x81, 0x00]);
            bytes[14..16].copy_from_slice(&tag.to_be_bytes());
            network = 16;
        }
        let hop_limit = if addresses.hop_limit == 0 { 64 } else { addresses.hop_limit };
        let (kind, ip) = bytes[network..].split_at_mut(2);
        network += 2;
        let len = match (addresses.source, addresses.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                kind.copy_from_slice(&[0x08, 0x00]);
                ip[0] = 0x45;
                ip[1] = addresses.traffic_class;
                ip[6] = 0x40;
                ip[8] = hop_limit;
                ip[9] = 17;
                ip[12..16].copy_from_slice(&source.octets());
                ip[16..20].copy_from_slice(&destination.octets());
                IPV4
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                kind.copy_from_slice(&[0x86, 0xDD]);
                let word = (6 << 28)
                    | (u32::from(addresses.traffic_class) << 20)
                    | (addresses.flow_label & 0xF_FFFF);
                ip[..4].copy_from_slice(&word.to_be_bytes());
                ip[6] = 17;
                ip[7] = hop_limit;
                ip[8..24].copy_from_slice(&source.octets());
                ip[24..40].copy_from_slice(&destination.octets());
                IPV6
            }
            (from, to) => return Err(MixedFamilies { from, to }),
        };
        let udp = &mut ip[len..];
        udp[..2].copy_from_slice(&addresses.source_port.to_be_bytes());
        udp[2..4].copy_from_slice(&PORT.to_be_bytes());
        Ok(Self { bytes, network, len: network + len + UDP })
    }

    /// Bytes before the BTH.
    #[inline]
    #[must_use]
    pub fn before(&self) -> usize {
        self.len
    }

    /// Completes a frame: `before()` bytes of room, the packet from BTH to pad, and four bytes of room for the ICRC. `identification` goes
    /// into IPv4's header. Returns `false`, and writes nothing, when the length is invalid for a frame.
    #[must_use]
    pub fn finish(&self, frame: &mut [u8], identification: u16) -> bool {
        let Some(ip_len) = frame.len().checked_sub(self.network) else { return false };
        let network_len = self.len - self.network - UDP;
        let (Ok(total), Some(udp_len)) = (u16::try_from(ip_len), ip_len.checked_sub(network_len)) else {
            return false;
        };
        // A frame has at least a BTH and an ICRC; the total fits 16 bits, so this does.
        let Ok(udp_len) = u16::try_from(udp_len) else { return false };
        if usize::from(udp_len) < UDP + crate::packet::BTH + icrc::LEN {
            return false;
        }
        let (headers, behind) = frame.split_at_mut(self.len);
        headers.copy_from_slice(&self.bytes[..self.len]);
        let (ip, udp) = headers[self.network..].split_at_mut(network_len);
        if network_len == IPV4 {
            ip[2..4].copy_from_slice(&total.to_be_bytes());
            ip[4..6].copy_from_slice(&identification.to_be_bytes());
            let checksum = internet_checksum(ip);
            ip[10..12].copy_from_slice(&checksum.to_be_bytes());
        } else {
            ip[4..6].copy_from_slice(&udp_len.to_be_bytes());
        }
        udp[4..6].copy_from_slice(&udp_len.to_be_bytes());
        let (packet, trailer) = behind.split_at_mut(behind.len() - icrc::LEN);
        let Some(icrc) = icrc::compute(ip, udp, packet) else { return false };
        trailer.copy_from_slice(&icrc);
        true
    }
}

/// Why a frame is refused. No refusal causes a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotTaken {
    /// Other traffic: not IP, not UDP, another port, a fragment.
    #[error("The frame isn't RoCEv2")]
    Other,
    /// Inconsistent lengths, or IPv4 options.
    #[error("The frame's headers are malformed")]
    Malformed,
    /// IPv4's header checksum is wrong.
    #[error("The frame's IPv4 checksum is wrong")]
    Checksum,
    /// The ICRC is wrong.
    #[error("The frame's ICRC is wrong")]
    Icrc,
}

/// A parsed frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Addresses; `hop_limit` is as received.
    pub addresses: Addresses,
    /// Whether the network marked it: congestion experienced.
    pub congested: bool,
    /// From BTH to pad.
    pub packet: &'a [u8],
    /// The IP header as received.
    network: &'a [u8],
}

impl<'a> Frame<'a> {
    /// Parses a frame, and checks lengths, checksum and ICRC. The bytes may be hostile.
    ///
    /// # Errors
    /// When it isn't a valid frame of RoCEv2.
    pub fn parse(frame: &'a [u8]) -> Result<Self, NotTaken> {
        let (macs, rest) = frame.split_first_chunk::<12>().ok_or(NotTaken::Other)?;
        let (kind, rest) = rest.split_first_chunk::<2>().ok_or(NotTaken::Other)?;
        let (vlan, kind, ip) = if *kind == [0x81, 0x00] {
            let (tag, rest) = rest.split_first_chunk::<2>().ok_or(NotTaken::Other)?;
            let (kind, rest) = rest.split_first_chunk::<2>().ok_or(NotTaken::Other)?;
            (Some(u16::from_be_bytes(*tag)), *kind, rest)
        } else {
            (None, *kind, rest)
        };
        let mut addresses = Addresses {
            destination_mac: [macs[0], macs[1], macs[2], macs[3], macs[4], macs[5]],
            source_mac: [macs[6], macs[7], macs[8], macs[9], macs[10], macs[11]],
            vlan,
            source: IpAddr::from([0; 4]),
            destination: IpAddr::from([0; 4]),
            traffic_class: 0,
            flow_label: 0,
            hop_limit: 0,
            source_port: 0,
        };
        let (network, udp) = match kind {
            [0x08, 0x00] => parse_ipv4(ip, &mut addresses)?,
            [0x86, 0xDD] => parse_ipv6(ip, &mut addresses)?,
            _ => return Err(NotTaken::Other),
        };
        let (header, _) = udp.split_first_chunk::<UDP>().ok_or(NotTaken::Malformed)?;
        if u16::from_be_bytes([header[2], header[3]]) != PORT {
            return Err(NotTaken::Other);
        }
        addresses.source_port = u16::from_be_bytes([header[0], header[1]]);
        if usize::from(u16::from_be_bytes([header[4], header[5]])) != udp.len() {
            return Err(NotTaken::Malformed);
        }
        let (packet, trailer) = udp
            .get(UDP..)
            .and_then(|behind| behind.split_last_chunk::<{ icrc::LEN }>())
            .ok_or(NotTaken::Malformed)?;
        let expected = icrc::compute(network, header, packet).ok_or(NotTaken::Malformed)?;
        if expected != *trailer {
            return Err(NotTaken::Icrc);
        }
        let congested = addresses.traffic_class & ECN_MASK == ECN_MASK;
        Ok(Self { addresses, congested, packet, network })
    }

    /// The first 40 bytes of a datagram's receive buffer: IPv6's header, or 20 zero bytes and IPv4's.
    #[must_use]
    pub fn receive_header(&self) -> [u8; 40] {
        let mut area = [0; 40];
        let start = area.len() - self.network.len();
        area[start..].copy_from_slice(self.network);
        area
    }
}

/// The IP header, and UDP up to the ICRC.
type Parts<'a> = (&'a [u8], &'a [u8]);

fn parse_ipv4<'a>(ip: &'a [u8], addresses: &mut Addresses) -> Result<Parts<'a>, NotTaken> {
    let header = ip.first_chunk::<IPV4>().ok_or(NotTaken::Malformed)?;
    if header[9] != 17 {
        return Err(NotTaken::Other);
    }
    if header[0] != 0x45 {
        return Err(NotTaken::Malformed);
    }
    // More fragments, or not the first one.
    if header[6] & 0x3F != 0 || header[7] != 0 {
        return Err(NotTaken::Other);
    }
    if internet_checksum(header) != 0 {
        return Err(NotTaken::Checksum);
    }
    let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
    let udp = ip.get(IPV4..total).ok_or(NotTaken::Malformed)?;
    addresses.traffic_class = header[1];
    addresses.hop_limit = header[8];
    addresses.source = IpAddr::from([header[12], header[13], header[14], header[15]]);
    addresses.destination = IpAddr::from([header[16], header[17], header[18], header[19]]);
    Ok((&ip[..IPV4], udp))
}

fn parse_ipv6<'a>(ip: &'a [u8], addresses: &mut Addresses) -> Result<Parts<'a>, NotTaken> {
    let header = ip.first_chunk::<IPV6>().ok_or(NotTaken::Malformed)?;
    if header[0] >> 4 != 6 {
        return Err(NotTaken::Malformed);
    }
    if header[6] != 17 {
        return Err(NotTaken::Other);
    }
    let len = usize::from(u16::from_be_bytes([header[4], header[5]]));
    let udp = ip.get(IPV6..IPV6 + len).ok_or(NotTaken::Malformed)?;
    addresses.traffic_class = (header[0] << 4) | (header[1] >> 4);
    addresses.flow_label = u32::from_be_bytes([0, header[1] & 0x0F, header[2], header[3]]);
    addresses.hop_limit = header[7];
    let mut address = [0; 16];
    address.copy_from_slice(&header[8..24]);
    addresses.source = IpAddr::from(address);
    address.copy_from_slice(&header[24..40]);
    addresses.destination = IpAddr::from(address);
    Ok((&ip[..IPV6], udp))
}

/// The checksum of an IPv4 header (RFC 1071). 0 if the header's checksum field is right; the right checksum if the field is 0.
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
