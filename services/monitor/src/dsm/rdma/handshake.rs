//! The handshake of a link by RDMA, over TCP after the [`Hello`](super::super::join): each side's queue pair and buffers.
//!
//! ```text
//!  0 "CWPAIR01"   8 number of the queue pair (4)   12 first PSN that it sends (4)   16 GID (16)
//!  32 bytes of a receive buffer (4)   36 receive buffers (2)   38 code of the path MTU (1)   39 zero (1)
//! ```
//! Then each side sends one byte when its queue pair can receive.

use std::io::{Read as _, Write as _};
use std::net::{Ipv6Addr, TcpStream};
use std::sync::Arc;

use super::device::Device;
use super::flow::{HEADER, MIN_RECEIVE_BUFFERS, Shape};
use super::pair::Pair;
use super::queue_pair::Unconnected;

const MAGIC: &[u8; 8] = b"CWPAIR01";
/// Bytes of an offer.
const LEN: usize = 40;
/// The byte that announces that the queue pair can receive.
const READY: u8 = b'r';
/// Limits for the peer's number of receive buffers, and for the bytes of one.
const MAX_PEER_RECEIVES: Shape = Shape { count: 4096, size: 1 << 20 };
/// Smallest receive buffer, bytes.
const MIN_BUFFER_BYTES: u32 = 64;
/// Mask of the 24 bits of queue pair numbers and PSNs.
const BITS_24: u32 = 0xff_ffff;

/// One side's end of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Offer {
    /// Number of the queue pair.
    pub(super) number: u32,
    /// First PSN that it sends.
    pub(super) psn: u32,
    /// GID of its port.
    pub(super) gid: [u8; 16],
    /// Code of its path MTU: 1 to 5 for 256 to 4096 bytes.
    pub(super) mtu: u8,
    /// Its receive buffers.
    pub(super) receives: Shape,
}

impl Offer {
    fn to_bytes(self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&self.number.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.psn.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.gid);
        bytes[32..36].copy_from_slice(&self.receives.size.to_le_bytes());
        bytes[36..38].copy_from_slice(&self.receives.count.to_le_bytes());
        bytes[38] = self.mtu;
        bytes
    }

    /// Parses and checks an offer. `expected` is the peer's address.
    fn parse(bytes: &[u8; LEN], expected: Ipv6Addr) -> Result<Self, String> {
        if &bytes[..8] != MAGIC {
            return Err(
                "it answers with something else than a queue pair; is it of the same version?".to_owned()
            );
        }
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let mut gid = [0; 16];
        gid.copy_from_slice(&bytes[16..32]);
        let receives = Shape { size: word(32), count: u16::from_le_bytes([bytes[36], bytes[37]]) };
        let offer = Self { number: word(8), psn: word(12), gid, mtu: bytes[38], receives };
        let right = (1..=BITS_24).contains(&offer.number)
            && offer.psn <= BITS_24
            && (1..=5).contains(&offer.mtu)
            && (MIN_RECEIVE_BUFFERS..=MAX_PEER_RECEIVES.count).contains(&receives.count)
            && (MIN_BUFFER_BYTES..=MAX_PEER_RECEIVES.size).contains(&receives.size)
            && bytes[39] == 0;
        if !right {
            return Err(format!("its queue pair can't be: {offer:?}"));
        }
        if gid != expected.octets() {
            return Err(format!(
                "its RDMA device has the address {}, not {} as here; name each node by the address of its device, the same on all nodes",
                shown(gid.into()),
                shown(expected)
            ));
        }
        Ok(offer)
    }
}

/// For messages: IPv4 addresses in their own notation.
fn shown(address: Ipv6Addr) -> std::net::IpAddr {
    address.to_canonical()
}

// A receive buffer holds a header and at least one more byte.
const _: () = assert!(MIN_BUFFER_BYTES as usize > HEADER);

/// Creates a queue pair, and connects it with the peer's over `stream`. `expected` is the peer's address. The stream's timeouts limit each
/// answer.
///
/// # Errors
/// The problem as text for the operator.
pub(in crate::dsm) fn connect(
    device: &Arc<Device>,
    stream: TcpStream,
    expected: Ipv6Addr,
) -> Result<Pair, String> {
    let unanswered = |error: std::io::Error| format!("it doesn't tell of its queue pair: {error}");
    let here = Unconnected::new(device).map_err(|error| error.to_string())?;
    (&stream).write_all(&here.offer().to_bytes()).map_err(unanswered)?;
    let mut bytes = [0; LEN];
    (&stream).read_exact(&mut bytes).map_err(unanswered)?;
    let there = Offer::parse(&bytes, expected)?;
    let ready = here.connect(&there).map_err(|error| error.to_string())?;
    // The peer may send at once: until the own queue pair can receive, its device retries.
    (&stream).write_all(&[READY]).map_err(unanswered)?;
    let mut answer = [0];
    (&stream).read_exact(&mut answer).map_err(unanswered)?;
    if answer != [READY] {
        return Err("its queue pair doesn't get ready".to_owned());
    }
    Ok(ready.over(stream))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // For tests only.
mod tests {
    use super::*;

    fn offer() -> Offer {
        let gid = std::net::Ipv4Addr::new(10, 0, 0, 2).to_ipv6_mapped().octets();
        Offer { number: 17, psn: 0xff_fffe, gid, mtu: 3, receives: Shape { count: 64, size: 8192 } }
    }

    #[test]
    fn offers_are_read_as_they_were_written() {
        assert_eq!(Offer::parse(&offer().to_bytes(), offer().gid.into()).unwrap(), offer());
    }

    /// Invalid numbers, unusable buffers and another address are refused, each with its own message.
    #[test]
    fn offers_that_can_not_be_are_refused() {
        let fine = offer();
        let shape = |count, size| Offer { receives: Shape { count, size }, ..fine };
        for wrong in [
            Offer { number: 0, ..fine },
            Offer { number: 1 << 24, ..fine },
            Offer { psn: 1 << 24, ..fine },
            Offer { mtu: 0, ..fine },
            Offer { mtu: 6, ..fine },
            shape(3, 8192),
            shape(u16::MAX, 8192),
            shape(64, 8),
            shape(64, u32::MAX),
        ] {
            let problem = Offer::parse(&wrong.to_bytes(), fine.gid.into()).unwrap_err();
            assert!(problem.contains("can't be"), "{problem}");
        }
        let mut bytes = fine.to_bytes();
        bytes[39] = 1;
        assert!(Offer::parse(&bytes, fine.gid.into()).is_err());
        bytes[0] = b'x';
        assert!(Offer::parse(&bytes, fine.gid.into()).unwrap_err().contains("same version"));
        let elsewhere = std::net::Ipv4Addr::new(10, 0, 0, 3).to_ipv6_mapped();
        let problem = Offer::parse(&fine.to_bytes(), elsewhere).unwrap_err();
        assert!(problem.contains("10.0.0.2") && problem.contains("10.0.0.3"), "{problem}");
    }
}
