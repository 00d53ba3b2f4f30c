//! The header of a vsock packet (virtio 1.2, 5.10.6).
//!
//! Parsed from a copy. The crate `virtio-vsock` has the same header, but only packets of one or two descriptors; Linux sends more for
//! zero-copy buffers. A test compares the two.

/// Bytes of a header.
pub const HEADER_LEN: usize = 44;
/// Limit of the payload of one packet, bytes.
pub const PAYLOAD_MAX: usize = 64 * 1024;
/// The host's context id.
pub const HOST_CID: u64 = 2;
/// Connection-oriented byte stream.
pub const TYPE_STREAM: u16 = 1;

/// Closed halves of a connection, from the view of the sender of a shutdown.
pub mod shutdown {
    /// The sender receives no more.
    pub const RECEIVE: u32 = 1;
    /// The sender sends no more.
    pub const SEND: u32 = 2;
    /// The sender neither receives nor sends any more.
    pub const BOTH: u32 = RECEIVE | SEND;
}

/// Operation of a packet. Any number is representable, since it comes from the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Op(pub u16);

impl Op {
    /// Requests a connection.
    pub const REQUEST: Self = Self(1);
    /// Accepts the connection.
    pub const RESPONSE: Self = Self(2);
    /// Refuses or ends the connection.
    pub const RST: Self = Self(3);
    /// Closes halves of the connection.
    pub const SHUTDOWN: Self = Self(4);
    /// Carries data.
    pub const RW: Self = Self(5);
    /// Reports buffer space.
    pub const CREDIT_UPDATE: Self = Self(6);
    /// Requests a report of buffer space.
    pub const CREDIT_REQUEST: Self = Self(7);
}

/// `struct virtio_vsock_hdr`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Header {
    /// Sender's context id.
    pub src_cid: u64,
    /// Receiver's context id.
    pub dst_cid: u64,
    /// Sender's port.
    pub src_port: u32,
    /// Receiver's port.
    pub dst_port: u32,
    /// Length of the payload, bytes.
    pub len: u32,
    /// Socket type.
    pub kind: u16,
    /// Operation of the packet.
    pub op: Op,
    /// Operation's flags.
    pub flags: u32,
    /// Size of the sender's buffer for this connection, bytes.
    pub buf_alloc: u32,
    /// Number of bytes that the sender has removed from that buffer so far, wrapping.
    pub fwd_cnt: u32,
}

impl Header {
    /// Decodes the wire format.
    pub fn parse(bytes: &[u8; HEADER_LEN]) -> Self {
        let mut rest = &bytes[..];
        Self {
            src_cid: u64::from_le_bytes(take(&mut rest)),
            dst_cid: u64::from_le_bytes(take(&mut rest)),
            src_port: u32::from_le_bytes(take(&mut rest)),
            dst_port: u32::from_le_bytes(take(&mut rest)),
            len: u32::from_le_bytes(take(&mut rest)),
            kind: u16::from_le_bytes(take(&mut rest)),
            op: Op(u16::from_le_bytes(take(&mut rest))),
            flags: u32::from_le_bytes(take(&mut rest)),
            buf_alloc: u32::from_le_bytes(take(&mut rest)),
            fwd_cnt: u32::from_le_bytes(take(&mut rest)),
        }
    }

    /// Encodes the wire format.
    pub fn to_bytes(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[..8].copy_from_slice(&self.src_cid.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.dst_cid.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.src_port.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.dst_port.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.len.to_le_bytes());
        bytes[28..30].copy_from_slice(&self.kind.to_le_bytes());
        bytes[30..32].copy_from_slice(&self.op.0.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.flags.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.buf_alloc.to_le_bytes());
        bytes[40..].copy_from_slice(&self.fwd_cnt.to_le_bytes());
        bytes
    }

    /// The reset in response to this packet.
    pub fn reset(&self) -> Self {
        Self {
            src_cid: self.dst_cid,
            dst_cid: self.src_cid,
            src_port: self.dst_port,
            dst_port: self.src_port,
            kind: self.kind,
            op: Op::RST,
            ..Self::default()
        }
    }
}

/// Removes `N` bytes from the front; the fields add up to the header's length.
fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let (now, later) = rest.split_first_chunk::<N>().unwrap_or((&[0; N], &[]));
    *rest = later;
    *now
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use virtio_vsock::packet::{PKT_HEADER_SIZE, VsockPacket};

    #[test]
    fn the_header_is_that_of_the_crate_virtio_vsock() {
        let bytes: [u8; HEADER_LEN] = std::array::from_fn(|i| u8::try_from(i * 5 + 1).unwrap());
        let ours = Header::parse(&bytes);
        assert_eq!(HEADER_LEN, PKT_HEADER_SIZE);
        let mut raw = [0u8; PKT_HEADER_SIZE];
        #[allow(unsafe_code)]
        // SAFETY: `raw` outlives the packet.
        let mut theirs = unsafe { VsockPacket::new(&mut raw, None) }.unwrap();
        theirs.set_header_from_raw(&bytes).unwrap();
        assert_eq!((ours.src_cid, ours.dst_cid), (theirs.src_cid(), theirs.dst_cid()));
        assert_eq!((ours.src_port, ours.dst_port), (theirs.src_port(), theirs.dst_port()));
        assert_eq!((ours.len, ours.kind, ours.op.0), (theirs.len(), theirs.type_(), theirs.op()));
        assert_eq!(
            (ours.flags, ours.buf_alloc, ours.fwd_cnt),
            (theirs.flags(), theirs.buf_alloc(), theirs.fwd_cnt())
        );
    }

    proptest! {
        #[test]
        fn any_bytes_round_trip(low: [u8; 22], high: [u8; 22]) {
            let bytes: [u8; HEADER_LEN] = [low, high].concat().try_into().unwrap();
            prop_assert_eq!(Header::parse(&bytes).to_bytes(), bytes);
        }
    }
}
