//! Transport `fabric`: RoCE packets between host daemons, in UDP datagrams of the daemons' own addresses.
//!
//! ```text
//! UDP │ version 1 · kind 1 · 0 (2) │ source VM (4) │ destination VM (4) │ segment (4) │ [addresses (40)] │ BTH … pad
//! ```
//!
//! Numbers are big-endian. `segment` is a hash of its name. Datagrams carry the addresses that their receiver's guest sees. There is
//! no ICRC: UDP's checksum covers the packet. All queue pairs share a host's sockets; each pair of queue pairs uses one, so its packets
//! stay in order. Neighbouring packets of a queue pair leave and arrive in one system call (UDP_SEGMENT, UDP_GRO).

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};

use hca::names::Gid;
use quinn_udp::{BATCH_SIZE, EcnCodepoint, RecvMeta, Transmit, UdpSockRef, UdpSocketState};
use rustix::net::sockopt;

use super::directory::VmId;

/// Bytes before a packet.
pub(super) const HEADER: usize = 16;
/// Bytes between header and packet of a datagram.
pub(super) const ADDRESSES: usize = 40;
const VERSION: u8 = 1;
/// Bytes that one system call sends or receives.
const BURST: usize = 64 << 10;
/// Bytes asked for as a socket's send buffer: a few calls' worth.
const SEND_BUFFER: usize = 208 << 10;
/// Bytes asked for as its receive buffer; a daemon without CAP_NET_ADMIN may get less (net.core.rmem_max).
const RECEIVE_BUFFER: usize = 8 << 20;

/// What a packet is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Of a connection.
    Connected,
    /// A datagram; its addresses come first.
    Datagram,
}

/// Who sends to whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub kind: Kind,
    pub source: VmId,
    pub destination: VmId,
    pub segment: u32,
}

impl Header {
    pub fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[0] = VERSION;
        bytes[1] = match self.kind {
            Kind::Connected => 1,
            Kind::Datagram => 2,
        };
        bytes[4..8].copy_from_slice(&self.source.0.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.destination.0.to_be_bytes());
        bytes[12..16].copy_from_slice(&self.segment.to_be_bytes());
        bytes
    }

    /// The header of a packet, and what is behind it. The bytes may come from anyone.
    pub fn decode(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (header, rest) = bytes.split_first_chunk::<HEADER>()?;
        let [VERSION, kind, 0, 0, s0, s1, s2, s3, d0, d1, d2, d3, t0, t1, t2, t3] = *header else {
            return None;
        };
        let kind = match kind {
            1 => Kind::Connected,
            2 => Kind::Datagram,
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

/// What a datagram's receiver sees of its network header.
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

/// A segment as packets name it: the FNV-1a hash of its name.
pub(super) fn tag(segment: &str) -> u32 {
    segment.bytes().fold(0x811C_9DC5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// The daemon's sockets can't be had.
#[derive(Debug, thiserror::Error)]
#[error(
    "UDP port {address} can't be used for RDMA between hosts; is another daemon using it, or isn't it this host's?"
)]
pub struct FabricError {
    address: SocketAddr,
    #[source]
    source: io::Error,
}

impl FabricError {
    pub(super) fn new(address: SocketAddr, source: io::Error) -> Self {
        Self { address, source }
    }
}

/// What the sockets did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct FabricCounters {
    /// Packets handed to the kernel.
    pub packets_sent: u64,
    /// System calls for them.
    pub sends: u64,
    /// Packets received.
    pub packets_received: u64,
    /// System calls for them that had some.
    pub receives: u64,
    /// Packets dropped since they were not addressed to a VM here, or came from a host that the VM isn't on.
    pub dropped: u64,
    /// Times that a socket's buffer was full.
    pub full: u64,
    /// Packets that the kernel refused to send.
    pub send_errors: u64,
}

struct Socket {
    socket: UdpSocket,
    state: UdpSocketState,
    /// What found no room, in order.
    waiting: VecDeque<Waiting>,
}

/// Packets, equal in length but for the last, with their destination.
struct Waiting {
    to: SocketAddr,
    bytes: Vec<u8>,
    stride: usize,
    ecn: bool,
}

/// A host's sockets.
pub(super) struct Fabric {
    sockets: Vec<Socket>,
    buffers: Vec<Vec<u8>>,
    counters: FabricCounters,
}

impl Fabric {
    /// Opens `count` sockets on consecutive ports.
    pub fn open(address: SocketAddr, count: u16) -> Result<Self, FabricError> {
        let mut sockets = Vec::new();
        for index in 0..count {
            let mut address = address;
            address.set_port(address.port().saturating_add(index));
            sockets.push(Socket::open(address).map_err(|source| FabricError { address, source })?);
        }
        let buffers = (0..BATCH_SIZE.min(8)).map(|_| vec![0; BURST]).collect();
        Ok(Self { sockets, buffers, counters: FabricCounters::default() })
    }

    /// Without sockets, for a host that knows no others.
    pub fn closed() -> Self {
        Self { sockets: Vec::new(), buffers: Vec::new(), counters: FabricCounters::default() }
    }

    pub fn is_open(&self) -> bool {
        !self.sockets.is_empty()
    }

    pub fn counters(&self) -> FabricCounters {
        self.counters
    }

    pub fn drop_one(&mut self) {
        self.counters.dropped += 1;
    }

    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.sockets.iter().map(|socket| socket.socket.as_fd())
    }

    /// Which socket two queue pairs use; the same on both sides.
    pub fn index(&self, qpn: u32, peer: u32) -> usize {
        let mixed = qpn.wrapping_mul(peer | 1) ^ peer.wrapping_mul(qpn | 1);
        mixed as usize % self.sockets.len().max(1)
    }

    /// Packets that a queue pair may send in one call.
    pub fn most_segments(&self) -> usize {
        self.sockets.first().map_or(1, |socket| socket.state.max_gso_segments())
    }

    /// Whether a socket takes packets.
    pub fn has_room(&mut self, index: usize) -> bool {
        let Some(socket) = self.sockets.get_mut(index) else { return false };
        while let Some(waiting) = socket.waiting.front() {
            let Waiting { to, bytes, stride, ecn } = waiting;
            if !Self::try_send(
                &mut socket.state,
                &socket.socket,
                &mut self.counters,
                *to,
                bytes,
                *stride,
                *ecn,
            ) {
                return false;
            }
            socket.waiting.pop_front();
        }
        true
    }

    /// Whether packets wait for room.
    pub fn is_blocked(&self) -> bool {
        self.sockets.iter().any(|socket| !socket.waiting.is_empty())
    }

    /// Sends packets of `stride` bytes (the last may be shorter) to the same port of another host. What finds no room is kept
    /// and sent by the next [`Fabric::has_room`], in order: callers ask that first, so little is ever kept.
    pub fn send(&mut self, index: usize, to: SocketAddr, bytes: &[u8], stride: usize, ecn: bool) {
        let mut to = to;
        to.set_port(to.port().saturating_add(u16::try_from(index).unwrap_or(0)));
        let Some(socket) = self.sockets.get_mut(index) else { return };
        let free = socket.waiting.is_empty();
        if !free
            || !Self::try_send(&mut socket.state, &socket.socket, &mut self.counters, to, bytes, stride, ecn)
        {
            socket.waiting.push_back(Waiting { to, bytes: bytes.to_vec(), stride, ecn });
        }
    }

    /// Whether the packets are done with: sent, or refused for good.
    fn try_send(
        state: &mut UdpSocketState,
        socket: &UdpSocket,
        counters: &mut FabricCounters,
        to: SocketAddr,
        bytes: &[u8],
        stride: usize,
        ecn: bool,
    ) -> bool {
        let transmit = Transmit {
            destination: to,
            ecn: ecn.then_some(EcnCodepoint::Ect0),
            contents: bytes,
            segment_size: (bytes.len() > stride).then_some(stride),
            src_ip: None,
        };
        let packets = bytes.len().div_ceil(stride.max(1)) as u64;
        match state.try_send(UdpSockRef::from(socket), &transmit) {
            Ok(()) => {
                counters.packets_sent += packets;
                counters.sends += 1;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                counters.full += 1;
                return false;
            }
            // A peer that is gone answers with ICMP; the protocol's own timers find that out.
            Err(_) => counters.send_errors += packets,
        }
        true
    }

    /// Receives what is there, a bounded number of bursts per socket. `take` gets each packet, who sent it, and whether
    /// the network marked it.
    pub fn receive(&mut self, mut take: impl FnMut(SocketAddr, &[u8], bool)) -> bool {
        let mut any = false;
        let mut metas = [RecvMeta::default(); BATCH_SIZE];
        for socket in &mut self.sockets {
            let mut slices: Vec<IoSliceMut<'_>> =
                self.buffers.iter_mut().map(|buffer| IoSliceMut::new(buffer)).collect();
            let got = socket.state.recv(UdpSockRef::from(&socket.socket), &mut slices, &mut metas);
            let Ok(count) = got else { continue };
            drop(slices);
            self.counters.receives += 1;
            any |= count > 0;
            for (meta, buffer) in metas.iter().zip(&self.buffers).take(count) {
                let marked = meta.ecn == Some(EcnCodepoint::Ce);
                let burst = buffer.get(..meta.len).unwrap_or_default();
                for packet in burst.chunks(meta.stride.max(1)) {
                    self.counters.packets_received += 1;
                    take(meta.addr, packet, marked);
                }
            }
        }
        any
    }
}

impl Socket {
    fn open(address: SocketAddr) -> io::Result<Self> {
        let socket = UdpSocket::bind(address)?;
        let state = UdpSocketState::new(UdpSockRef::from(&socket))?;
        // Datagrams of guests may be larger than a packet of the link: the kernel cuts those, and those alone, since connections have a
        // path MTU that fits.
        if address.is_ipv4() {
            sockopt::set_ip_mtu_discover(&socket, sockopt::Ipv4PathMtuDiscovery::DONT)?;
        } else {
            sockopt::set_ipv6_mtu_discover(&socket, sockopt::Ipv6PathMtuDiscovery::DONT)?;
        }
        // What the kernel holds back delays all that comes behind it, and a peer's timer counts that: the send buffer stays small.
        let _ = sockopt::set_socket_send_buffer_size(&socket, SEND_BUFFER);
        // Beyond net.core.rmem_max where the daemon may (CAP_NET_ADMIN). Too small a buffer costs retransmissions, not correctness.
        let _ = sockopt::set_socket_recv_buffer_size_force(&socket, RECEIVE_BUFFER)
            .or_else(|_| sockopt::set_socket_recv_buffer_size(&socket, RECEIVE_BUFFER));
        Ok(Self { socket, state, waiting: VecDeque::new() })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // For tests only.
mod tests {
    use super::*;

    /// A host's sockets on a port that was free a moment ago.
    fn open(host: &str) -> (Fabric, SocketAddr) {
        loop {
            let at = UdpSocket::bind((host, 0)).and_then(|socket| socket.local_addr()).unwrap();
            if let Ok(fabric) = Fabric::open(at, 1) {
                return (fabric, at);
            }
        }
    }

    #[test]
    fn what_found_no_room_leaves_first_and_whole() {
        let (mut left, _) = open("127.0.0.1");
        let (mut right, to) = open("127.0.0.2");
        // As after two calls that the kernel took nothing of.
        for first in [1u8, 11] {
            let bytes = (first..first + 10).flat_map(|number| [number; 100]).collect();
            left.sockets[0].waiting.push_back(Waiting { to, bytes, stride: 100, ecn: false });
        }
        assert!(left.is_blocked());
        left.send(0, to, &[21; 50], 50, false);
        assert_eq!(left.counters().packets_sent, 0, "nothing overtakes what waits");
        assert!(left.has_room(0) && !left.is_blocked());
        let mut got = Vec::new();
        let start = std::time::Instant::now();
        while got.len() < 21 && start.elapsed() < std::time::Duration::from_secs(60) {
            right.receive(|_, bytes, _| got.push((bytes[0], bytes.len())));
        }
        let expected: Vec<(u8, usize)> = (1..=20).map(|number| (number, 100)).chain([(21, 50)]).collect();
        assert_eq!(got, expected);
        assert_eq!(left.counters().packets_sent, 21);
    }

    #[test]
    fn headers_are_read_as_written_and_nothing_else_is() {
        let header = Header {
            kind: Kind::Datagram,
            source: VmId(1),
            destination: VmId(0xA0B0_C0D0),
            segment: tag("s0"),
        };
        let mut bytes = header.encode().to_vec();
        bytes.push(0x55);
        assert_eq!(Header::decode(&bytes), Some((header, &[0x55][..])));
        for (at, value) in [(0, 2), (1, 0), (1, 3), (2, 1), (3, 1)] {
            let mut wrong = bytes.clone();
            wrong[at] = value;
            assert_eq!(Header::decode(&wrong), None);
        }
        for len in 0..HEADER {
            assert_eq!(Header::decode(&bytes[..len]), None);
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
