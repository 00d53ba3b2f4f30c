//! The 12-byte header before every frame (virtio 1.2, 5.1.6), and its validation.
//!
//! A header from the guest is copied once ([`VnetHeader::parse`]) and sanitised ([`VnetHeader::sanitize`]). Only the copy goes to the
//! backend, so later stores of the guest to its buffer have no effect.

use virtio_bindings::virtio_net as b;

/// Bytes of the header when `VIRTIO_F_VERSION_1` is negotiated, which this device requires.
pub const HEADER_LEN: usize = 12;
/// Lower bound of a frame: destination, source and type, bytes.
pub const FRAME_MIN: usize = 14;
/// Limit of a frame, bytes: 64 KiB of segmentation-offloaded payload and headers after an Ethernet header with one tag.
pub const FRAME_MAX: usize = 65_535 + 14 + 4;

/// Feature: the guest may send frames with a partial checksum.
pub const FEATURE_CSUM: u64 = 1 << b::VIRTIO_NET_F_CSUM;
/// Feature: the guest accepts frames with a partial checksum.
pub const FEATURE_GUEST_CSUM: u64 = 1 << b::VIRTIO_NET_F_GUEST_CSUM;

/// The header's fields are bytes, the bindings' constants aren't.
const fn byte(constant: u32) -> u8 {
    assert!(constant < 256, "the field is a byte");
    constant.to_le_bytes()[0]
}

/// Flag: the checksum is partial.
pub const NEEDS_CSUM: u8 = byte(b::VIRTIO_NET_HDR_F_NEEDS_CSUM);
/// Flag of a received frame: its first checksum is verified. Without this and [`NEEDS_CSUM`] the guest verifies it.
pub const DATA_VALID: u8 = byte(b::VIRTIO_NET_HDR_F_DATA_VALID);
const GSO_NONE: u8 = byte(b::VIRTIO_NET_HDR_GSO_NONE);
const GSO_TCPV4: u8 = byte(b::VIRTIO_NET_HDR_GSO_TCPV4);
const GSO_UDP: u8 = byte(b::VIRTIO_NET_HDR_GSO_UDP);
const GSO_TCPV6: u8 = byte(b::VIRTIO_NET_HDR_GSO_TCPV6);
const GSO_UDP_L4: u8 = byte(b::VIRTIO_NET_HDR_GSO_UDP_L4);
const GSO_ECN: u8 = byte(b::VIRTIO_NET_HDR_GSO_ECN);

/// `struct virtio_net_hdr_v1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VnetHeader {
    /// Bits of `VIRTIO_NET_HDR_F_*`.
    pub flags: u8,
    /// One of `VIRTIO_NET_HDR_GSO_*`, perhaps with the bit `VIRTIO_NET_HDR_GSO_ECN`.
    pub gso_type: u8,
    /// Length of the headers to repeat in each segment, bytes: a hint.
    pub hdr_len: u16,
    /// Payload bytes per segment.
    pub gso_size: u16,
    /// Offset where the checksum starts.
    pub csum_start: u16,
    /// Offset of the checksum field from `csum_start`.
    pub csum_offset: u16,
    /// Number of descriptor chains that hold the frame; device to driver only.
    pub num_buffers: u16,
}

/// Why a frame of the guest isn't sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadHeader {
    /// Too short or too long to be an Ethernet frame.
    #[error("The frame has {length} bytes; {FRAME_MIN} to {FRAME_MAX} are possible")]
    FrameLength {
        /// Length in bytes, without the header.
        length: usize,
    },
    /// A partial checksum without `VIRTIO_NET_F_CSUM`.
    #[error("The header asks for a checksum, which was not negotiated")]
    ChecksumNotNegotiated,
    /// The checksum field would be outside of the frame.
    #[error("The checksum at {start} + {offset} lies outside a frame of {length} bytes")]
    ChecksumRange {
        /// `csum_start` of the header, bytes.
        start: u16,
        /// `csum_offset` of the header, bytes from `csum_start`.
        offset: u16,
        /// Frame length.
        length: usize,
    },
    /// A kind of segmentation that is unknown or wasn't negotiated.
    #[error("Segmentation type {gso_type:#x} was not negotiated or doesn't exist")]
    GsoType {
        /// `gso_type` of the header.
        gso_type: u8,
    },
    /// Segmentation without a segment size, or without a checksum.
    #[error("Segmentation type {gso_type:#x} comes with flags {flags:#x} and a segment size of {gso_size}")]
    GsoIncomplete {
        /// `gso_type` of the header.
        gso_type: u8,
        /// `flags` of the header.
        flags: u8,
        /// `gso_size` of the header, bytes.
        gso_size: u16,
    },
}

/// Whether `features` has bit `bit`.
pub(crate) const fn has(features: u64, bit: u32) -> bool {
    features & (1 << bit) != 0
}

impl VnetHeader {
    /// Decodes the wire format.
    pub fn parse(bytes: &[u8; HEADER_LEN]) -> Self {
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        Self {
            flags: bytes[0],
            gso_type: bytes[1],
            hdr_len: word(2),
            gso_size: word(4),
            csum_start: word(6),
            csum_offset: word(8),
            num_buffers: word(10),
        }
    }

    /// Encodes the wire format.
    pub fn to_bytes(self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[0] = self.flags;
        bytes[1] = self.gso_type;
        let words = [self.hdr_len, self.gso_size, self.csum_start, self.csum_offset, self.num_buffers];
        for (chunk, word) in bytes[2..].chunks_exact_mut(2).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Validates a header of the guest against the negotiated `features` and the length of its frame. Returns the header for the host
    /// (virtio 1.2, 5.1.6.2.1): unused fields are cleared, and the header length hint is clamped to the frame.
    pub fn sanitize(self, features: u64, length: usize) -> Result<Self, BadHeader> {
        if !(FRAME_MIN..=FRAME_MAX).contains(&length) {
            return Err(BadHeader::FrameLength { length });
        }
        // Only NEEDS_CSUM has a meaning in this direction; the rest must be zero, and is cleared.
        let mut clean = Self { flags: self.flags & NEEDS_CSUM, ..Self::default() };
        let mut headers_end = 0;
        if clean.flags & NEEDS_CSUM != 0 {
            if !has(features, b::VIRTIO_NET_F_CSUM) {
                return Err(BadHeader::ChecksumNotNegotiated);
            }
            headers_end = usize::from(self.csum_start) + usize::from(self.csum_offset) + 2;
            if headers_end > length {
                let (start, offset) = (self.csum_start, self.csum_offset);
                return Err(BadHeader::ChecksumRange { start, offset, length });
            }
            clean.csum_start = self.csum_start;
            clean.csum_offset = self.csum_offset;
        }
        if self.gso_type == GSO_NONE {
            return Ok(clean);
        }
        let (kind, ecn) = (self.gso_type & !GSO_ECN, self.gso_type & GSO_ECN != 0);
        let tcp = matches!(kind, GSO_TCPV4 | GSO_TCPV6);
        let negotiated = match kind {
            GSO_TCPV4 => has(features, b::VIRTIO_NET_F_HOST_TSO4),
            GSO_TCPV6 => has(features, b::VIRTIO_NET_F_HOST_TSO6),
            GSO_UDP => has(features, b::VIRTIO_NET_F_HOST_UFO),
            GSO_UDP_L4 => has(features, b::VIRTIO_NET_F_HOST_USO),
            _ => false,
        };
        if !negotiated || (ecn && !(tcp && has(features, b::VIRTIO_NET_F_HOST_ECN))) {
            return Err(BadHeader::GsoType { gso_type: self.gso_type });
        }
        if self.gso_size == 0 || clean.flags & NEEDS_CSUM == 0 {
            let Self { flags, gso_type, gso_size, .. } = self;
            return Err(BadHeader::GsoIncomplete { gso_type, flags, gso_size });
        }
        clean.gso_type = self.gso_type;
        clean.gso_size = self.gso_size;
        // A hint: at least to the end of the checksum field, at most the frame.
        let hint = usize::from(self.hdr_len).clamp(headers_end, length);
        clean.hdr_len = u16::try_from(hint).unwrap_or(u16::MAX);
        Ok(clean)
    }

    /// The header for the guest of a frame from the host with this header. The caller sets `num_buffers`. Offload fields are cleared when
    /// the guest didn't negotiate them: the kernel has finished the frame then.
    pub fn for_guest(self, features: u64) -> Self {
        let mut header = self;
        let checksums = has(features, b::VIRTIO_NET_F_GUEST_CSUM);
        header.flags &= if checksums { NEEDS_CSUM | DATA_VALID } else { 0 };
        if header.flags & NEEDS_CSUM == 0 {
            header.csum_start = 0;
            header.csum_offset = 0;
        }
        if header.gso_type == GSO_NONE {
            header.gso_size = 0;
        }
        header
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ALL: u64 = (1 << b::VIRTIO_NET_F_CSUM)
        | (1 << b::VIRTIO_NET_F_HOST_TSO4)
        | (1 << b::VIRTIO_NET_F_HOST_TSO6)
        | (1 << b::VIRTIO_NET_F_HOST_UFO)
        | (1 << b::VIRTIO_NET_F_HOST_USO)
        | (1 << b::VIRTIO_NET_F_HOST_ECN);

    fn tso(gso_type: u8) -> VnetHeader {
        VnetHeader {
            flags: NEEDS_CSUM,
            gso_type,
            hdr_len: 54,
            gso_size: 1448,
            csum_start: 34,
            csum_offset: 16,
            num_buffers: 0,
        }
    }

    #[test]
    fn a_correct_segmentation_header_passes_unchanged() {
        for gso_type in [GSO_TCPV4, GSO_TCPV6, GSO_UDP, GSO_UDP_L4, GSO_TCPV4 | GSO_ECN] {
            assert_eq!(tso(gso_type).sanitize(ALL, 20_000), Ok(tso(gso_type)));
        }
    }

    #[test]
    fn what_was_not_negotiated_is_refused() {
        assert_eq!(tso(GSO_TCPV4).sanitize(0, 20_000), Err(BadHeader::ChecksumNotNegotiated));
        let only_checksum = 1 << b::VIRTIO_NET_F_CSUM;
        for gso_type in [GSO_TCPV4, GSO_TCPV6, GSO_UDP, GSO_UDP_L4, 2, 6, GSO_ECN] {
            assert_eq!(tso(gso_type).sanitize(only_checksum, 20_000), Err(BadHeader::GsoType { gso_type }));
        }
        let gso_type = GSO_UDP_L4 | GSO_ECN;
        assert_eq!(tso(gso_type).sanitize(ALL, 20_000), Err(BadHeader::GsoType { gso_type }));
    }

    #[test]
    fn a_checksum_outside_the_frame_is_refused() {
        let header = VnetHeader { flags: NEEDS_CSUM, csum_start: 50, csum_offset: 16, ..Default::default() };
        assert!(header.sanitize(ALL, 68).is_ok());
        let refused = BadHeader::ChecksumRange { start: 50, offset: 16, length: 67 };
        assert_eq!(header.sanitize(ALL, 67), Err(refused));
        let wrap = VnetHeader { flags: NEEDS_CSUM, csum_start: u16::MAX, csum_offset: u16::MAX, ..header };
        assert!(matches!(wrap.sanitize(ALL, 1514), Err(BadHeader::ChecksumRange { .. })));
    }

    #[test]
    fn segmentation_needs_a_size_and_a_checksum() {
        let no_size = VnetHeader { gso_size: 0, ..tso(GSO_TCPV4) };
        assert!(matches!(no_size.sanitize(ALL, 20_000), Err(BadHeader::GsoIncomplete { .. })));
        let no_checksum = VnetHeader { flags: 0, ..tso(GSO_TCPV4) };
        assert!(matches!(no_checksum.sanitize(ALL, 20_000), Err(BadHeader::GsoIncomplete { .. })));
    }

    #[test]
    fn meaningless_fields_do_not_reach_the_host() {
        let noisy = VnetHeader {
            flags: 0xfe,
            gso_type: GSO_NONE,
            hdr_len: 0xffff,
            gso_size: 7,
            csum_start: 9,
            csum_offset: 9,
            num_buffers: 3,
        };
        assert_eq!(noisy.sanitize(ALL, 60), Ok(VnetHeader::default()));
    }

    proptest! {
        #[test]
        fn any_header_is_refused_or_stays_inside_its_frame(
            bytes: [u8; HEADER_LEN], features: u64, length in 0..FRAME_MAX + 100
        ) {
            let header = VnetHeader::parse(&bytes);
            prop_assert_eq!(header.to_bytes(), bytes);
            if let Ok(clean) = header.sanitize(features, length) {
                prop_assert!(usize::from(clean.hdr_len) <= length);
                let end = usize::from(clean.csum_start) + usize::from(clean.csum_offset);
                prop_assert!(clean.flags == 0 || end + 2 <= length);
                prop_assert_eq!(clean.flags & !NEEDS_CSUM, 0);
                prop_assert_eq!(clean.sanitize(features, length), Ok(clean), "sanitizing again changes nothing");
            }
        }
    }
}
