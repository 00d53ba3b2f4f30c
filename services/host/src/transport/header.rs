//! Header before a RoCE packet between daemons.
//!
//! ```text
//! plain   UDP │ version 1 · kind · 0 (2) │ source VM (4) │ destination VM (4) │ segment (4) │ [addresses (40)] │ BTH … pad
//! sealed  UDP │ version 2 · kind · 0 (2) │ source VM (4) │ destination VM (4) │ segment (4) │ session (4) │ counter (8)
//!             │ encrypted: [addresses (40)] │ BTH … pad │ tag (16)
//! ```
//!
//! Numbers are big-endian. `segment` is a hash of its name. Datagrams carry the addresses for the receiving guest's GRH area. There is no
//! ICRC: UDP's checksum covers the packet, and a sealed one's tag covers all of it, its header included.

use hca::names::Gid;

use super::directory::VmId;

/// Bytes before a packet.
pub(super) const HEADER: usize = 16;
/// Bytes between header and packet of a datagram.
pub(super) const ADDRESSES: usize = 40;
/// Version of packets that aren't encrypted.
pub(super) const PLAIN: u8 = 1;
/// Version of packets that are.
pub(super) const SEALED: u8 = 2;

/// Kind of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Packet of a connection.
    Connected,
    /// A datagram; its addresses come first.
    Datagram,
    /// Message between daemons about a connection by `verbs`.
    Control,
}

/// Sender and receiver of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub kind: Kind,
    pub source: VmId,
    pub destination: VmId,
    pub segment: u32,
}

impl Header {
    pub fn encode(&self, version: u8) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[0] = version;
        bytes[1] = match self.kind {
            Kind::Connected => 1,
            Kind::Datagram => 2,
            // Three to five are messages between daemons, see `secure`.
            Kind::Control => 6,
        };
        bytes[4..8].copy_from_slice(&self.source.0.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.destination.0.to_be_bytes());
        bytes[12..16].copy_from_slice(&self.segment.to_be_bytes());
        bytes
    }

    /// The header of a sealed packet between the daemons themselves.
    pub fn between_daemons(kind: u8) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[0] = SEALED;
        bytes[1] = kind;
        bytes
    }

    /// Decodes the header of a packet of a version; returns it and the rest. The bytes may be hostile.
    pub fn decode(bytes: &[u8], version: u8) -> Option<(Self, &[u8])> {
        let (header, rest) = bytes.split_first_chunk::<HEADER>()?;
        let [found, kind, 0, 0, s0, s1, s2, s3, d0, d1, d2, d3, t0, t1, t2, t3] = *header else {
            return None;
        };
        if found != version {
            return None;
        }
        let kind = match kind {
            1 => Kind::Connected,
            2 => Kind::Datagram,
            6 => Kind::Control,
            _ => return None,
        };
        let header = Self {
            kind,
            source: VmId(u32::from_be_bytes([s0, s1, s2, s3])),
            destination: VmId(u32::from_be_bytes([d0, d1, d2, d3])),
            segment: u32::from_be_bytes([t0, t1, t2, t3]),
        };
        Some((header, rest))
    }
}

/// Network header fields for a datagram's receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Addresses {
    pub source: Gid,
    pub destination: Gid,
    pub traffic_class: u8,
    pub hop_limit: u8,
    pub flow_label: u32,
}

impl Addresses {
    pub fn encode(&self) -> [u8; ADDRESSES] {
        let mut bytes = [0; ADDRESSES];
        bytes[..16].copy_from_slice(&self.source.0);
        bytes[16..32].copy_from_slice(&self.destination.0);
        bytes[32] = self.traffic_class;
        bytes[33] = self.hop_limit;
        bytes[36..].copy_from_slice(&self.flow_label.to_be_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (addresses, rest) = bytes.split_first_chunk::<ADDRESSES>()?;
        let (source, more) = addresses.split_first_chunk::<16>()?;
        let (destination, more) = more.split_first_chunk::<16>()?;
        let [traffic_class, hop_limit, _, _, f0, f1, f2, f3] = *more else { return None };
        let addresses = Self {
            source: Gid(*source),
            destination: Gid(*destination),
            traffic_class,
            hop_limit,
            flow_label: u32::from_be_bytes([f0, f1, f2, f3]) & 0xF_FFFF,
        };
        Some((addresses, rest))
    }
}

/// Segment identifier in packets: the FNV-1a hash of the segment's name.
pub(super) fn tag(segment: &str) -> u32 {
    segment.bytes().fold(0x811C_9DC5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // For tests only.
mod tests {
    use super::*;

    #[test]
    fn headers_are_read_as_written_and_nothing_else_is() {
        let header = Header {
            kind: Kind::Datagram,
            source: VmId(1),
            destination: VmId(0xA0B0_C0D0),
            segment: tag("s0"),
        };
        for version in [PLAIN, SEALED] {
            let mut bytes = header.encode(version).to_vec();
            bytes.push(0x55);
            assert_eq!(Header::decode(&bytes, version), Some((header, &[0x55][..])));
            for (at, value) in [(0, 3 - version), (1, 0), (1, 4), (2, 1), (3, 1)] {
                let mut wrong = bytes.clone();
                wrong[at] = value;
                assert_eq!(Header::decode(&wrong, version), None);
            }
            for len in 0..HEADER {
                assert_eq!(Header::decode(&bytes[..len], version), None);
            }
        }
        let addresses = Addresses {
            source: Gid([1; 16]),
            destination: Gid([2; 16]),
            traffic_class: 3,
            hop_limit: 4,
            flow_label: 0xF_FFFF,
        };
        assert_eq!(Addresses::decode(&addresses.encode()), Some((addresses, &[][..])));
        assert_eq!(Addresses::decode(&[0; ADDRESSES - 1]), None);
    }
}
