//! Transport `fabric`: RoCE packets between host daemons, in UDP datagrams of the daemons' own addresses.
//!
//! `header` has their layout. All queue pairs share a host's sockets. A pair of queue pairs uses one socket, so its packets stay in order.
//! Consecutive packets of a queue pair leave and arrive in one system call (UDP_SEGMENT, UDP_GRO). With a cluster key they are sealed
//! before sending and opened after receiving, in place (`secure`). Packets of the other sort are dropped and logged.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use quinn_udp::{BATCH_SIZE, EcnCodepoint, RecvMeta, Transmit, UdpSockRef, UdpSocketState};
use rustix::net::sockopt;

use telemetry::guest_log::GuestLog;

use super::counters::{ENCRYPTED, FabricCounters, FabricReport, UNENCRYPTED};
use super::header::{HEADER, Header, PLAIN, SEALED};
use super::secure::{Arrived, ClusterKey, DATA_HEADER, Dropped, Sealing, Secure, TAG, host_of};

/// Buffer of a system call that sends or receives, bytes.
const BURST: usize = 64 << 10;
/// Requested size of a socket's send buffer, bytes: a few calls' worth.
const SEND_BUFFER: usize = 208 << 10;
/// Requested size of a socket's receive buffer, bytes. A daemon without CAP_NET_ADMIN may get less (net.core.rmem_max).
const RECEIVE_BUFFER: usize = 8 << 20;

/// Why the daemon's sockets can't be opened.
#[derive(Debug, thiserror::Error)]
pub enum FabricError {
    /// A port can't be bound.
    #[error(
        "UDP port {address} can't be used for RDMA between hosts; is another daemon using it, or isn't it this host's?"
    )]
    Port {
        /// Address of the port.
        address: SocketAddr,
        /// The error.
        #[source]
        source: io::Error,
    },
    /// The cryptography can't be set up.
    #[error("Packets between hosts can't be encrypted: {0}; this is a bug")]
    Cryptography(String),
}

struct Socket {
    socket: UdpSocket,
    state: UdpSocketState,
    /// Packets without room in the socket, in order.
    waiting: VecDeque<Waiting>,
}

/// Consecutive packets of `stride` bytes; the last may be shorter.
pub(super) struct Run<'a> {
    /// Index of the socket.
    pub index: usize,
    pub bytes: &'a mut [u8],
    pub stride: usize,
    /// Whether they are ECN-capable.
    pub ecn: bool,
}

/// Packets of equal length, except for the last, with their destination.
struct Waiting {
    to: SocketAddr,
    bytes: Vec<u8>,
    stride: usize,
    ecn: bool,
}

/// Sender of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Origin {
    at: SocketAddr,
    /// Whether the cluster key has authenticated `at`, the host's address in the directory. Otherwise `at` is the packet's unverified
    /// source address.
    proven: bool,
}

impl Origin {
    /// Whether the sender is this host of the directory.
    pub fn is(&self, host: SocketAddr) -> bool {
        if self.proven { host == self.at } else { host.ip() == self.at.ip() }
    }
}

/// Rate-limited logs, one per cause, so that none hides another.
#[derive(Debug)]
struct Logs {
    plain: GuestLog,
    encrypted: GuestLog,
    handshake: GuestLog,
    old_handshake: GuestLog,
}

impl Default for Logs {
    fn default() -> Self {
        let log = || GuestLog::with_limits(2, Duration::from_secs(10));
        Self { plain: log(), encrypted: log(), handshake: log(), old_handshake: log() }
    }
}

impl Logs {
    /// Logs causes that need an operator's action.
    fn tell(&self, from: SocketAddr, cause: Dropped) {
        match cause {
            Dropped::Plain => telemetry::guest_warn!(
                self.plain,
                "{from} sends plain packets, and this daemon encrypts: they are dropped; give both daemons the same --cluster-key"
            ),
            Dropped::Encrypted => telemetry::guest_warn!(
                self.encrypted,
                "{from} encrypts, and this daemon doesn't: its packets are dropped; give both daemons the same --cluster-key"
            ),
            Dropped::Handshake => telemetry::guest_warn!(
                self.handshake,
                "A handshake of {from} is not authentic: it has another cluster key or directory, or somebody meddles"
            ),
            Dropped::OldHandshake => telemetry::guest_warn!(
                self.old_handshake,
                "A handshake of {from} isn't newer than its last one: it was late or is played back, or that host's clock went back"
            ),
            _ => {}
        }
    }
}

/// A host's sockets.
pub(super) struct Fabric {
    sockets: Vec<Socket>,
    buffers: Vec<Vec<u8>>,
    counters: FabricCounters,
    secure: Option<Secure>,
    logs: Logs,
}

impl Fabric {
    /// Opens `count` sockets on consecutive ports; with a key, for encrypted packets only.
    pub fn open(address: SocketAddr, count: u16, key: Option<&ClusterKey>) -> Result<Self, FabricError> {
        let mut sockets = Vec::new();
        for index in 0..count {
            let mut address = address;
            address.set_port(address.port().saturating_add(index));
            sockets.push(Socket::open(address).map_err(|source| FabricError::Port { address, source })?);
        }
        let buffers = (0..BATCH_SIZE.min(8)).map(|_| vec![0; BURST]).collect();
        let secure = key.map(|key| Secure::new(key.clone(), address)).transpose();
        let secure = secure.map_err(|error| FabricError::Cryptography(error.to_string()))?;
        let (counters, logs) = (FabricCounters::default(), Logs::default());
        Ok(Self { sockets, buffers, counters, secure, logs })
    }

    /// No sockets, for a host without a directory.
    pub fn closed() -> Self {
        Self {
            sockets: Vec::new(),
            buffers: Vec::new(),
            counters: FabricCounters::default(),
            secure: None,
            logs: Logs::default(),
        }
    }

    pub fn is_open(&self) -> bool {
        !self.sockets.is_empty()
    }

    pub fn counters(&self) -> FabricCounters {
        self.counters
    }

    pub fn report(&self) -> FabricReport {
        let (encryption, sessions, peers) = match &self.secure {
            Some(secure) => (ENCRYPTED, Some(secure.counters()), secure.report()),
            None => (UNENCRYPTED, None, Vec::new()),
        };
        FabricReport { encryption, counters: self.counters, sessions, peers }
    }

    /// Room before each packet for [`Fabric::send`], bytes.
    pub fn before(&self) -> usize {
        if self.secure.is_some() { DATA_HEADER } else { HEADER }
    }

    /// Room after each packet for [`Fabric::send`], bytes.
    pub fn behind(&self) -> usize {
        if self.secure.is_some() { TAG } else { 0 }
    }

    /// Time of the next [`Fabric::expire`].
    pub fn next(&self) -> Option<u64> {
        self.secure.as_ref()?.next()
    }

    /// Processes timeouts of handshakes and sessions.
    pub fn expire(&mut self, now: u64) {
        if let Some(secure) = &mut self.secure {
            secure.expire(now);
            self.send_between_daemons(now);
        }
    }

    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.sockets.iter().map(|socket| socket.socket.as_fd())
    }

    /// Index of the socket that two queue pairs use; the same on both sides.
    pub fn index(&self, qpn: u32, peer: u32) -> usize {
        let mixed = qpn.wrapping_mul(peer | 1) ^ peer.wrapping_mul(qpn | 1);
        mixed as usize % self.sockets.len().max(1)
    }

    /// Limit of packets that a queue pair may send in one call.
    pub fn most_segments(&self) -> usize {
        self.sockets.first().map_or(1, |socket| socket.state.max_gso_segments())
    }

    /// Whether a socket has room for packets.
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

    /// Sends packets of `stride` bytes (the last may be shorter) to the same port of another host. Each begins with [`Fabric::before`]
    /// bytes of room for its header, and ends with [`Fabric::behind`]. Packets without room are kept, and the next [`Fabric::has_room`]
    /// sends them in order. Callers check that first, so few are ever kept.
    pub fn send(&mut self, to: SocketAddr, header: &Header, run: Run<'_>, now: u64) {
        let Run { index, bytes, stride, ecn } = run;
        let version = if self.secure.is_some() { SEALED } else { PLAIN };
        let header = header.encode(version);
        for packet in bytes.chunks_mut(stride.max(1)) {
            if let Some(room) = packet.first_chunk_mut() {
                *room = header;
            }
        }
        if let Some(secure) = &mut self.secure {
            let sealing = secure.seal(to, index, bytes, stride, now);
            if sealing == Sealing::NoSession {
                secure.hold(to, index, bytes, stride, ecn, now);
            }
            self.send_between_daemons(now);
            if sealing == Sealing::NoSession {
                return;
            }
        }
        self.send_as_is(index, to, bytes, stride, ecn);
    }

    /// Sends handshakes, and packets that waited for them.
    fn send_between_daemons(&mut self, now: u64) {
        let Some(secure) = &mut self.secure else { return };
        let messages = secure.take_outbox();
        for (to, message) in messages {
            let len = message.len();
            self.send_as_is(0, to, &message, len, false);
        }
        while let Some(mut held) = self.secure.as_mut().and_then(Secure::take_held) {
            let Some(secure) = &mut self.secure else { return };
            if secure.seal(held.to, held.lane, &mut held.packets, held.stride, now) == Sealing::NoSession {
                // The session was removed right after it was established; the protocol retransmits these packets.
                continue;
            }
            self.send_as_is(held.lane, held.to, &held.packets, held.stride, held.ecn);
        }
    }

    fn send_as_is(&mut self, index: usize, to: SocketAddr, bytes: &[u8], stride: usize, ecn: bool) {
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

    /// Sends packets. Returns whether they are done: sent, or refused for good.
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
                counters.bytes_sent += bytes.len() as u64;
                counters.sends += 1;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                counters.full += 1;
                return false;
            }
            // A vanished peer causes ICMP errors; the protocol's own timers detect it.
            Err(_) => counters.send_errors += packets,
        }
        true
    }

    /// Receives waiting packets, a bounded number of bursts per socket. `take` gets each packet after its header, its sender, and whether
    /// the network marked it; it may refuse the packet.
    pub fn receive(
        &mut self,
        now: u64,
        hosts: &dyn Fn() -> Vec<SocketAddr>,
        mut take: impl FnMut(Origin, &Header, &[u8], bool) -> Result<(), Dropped>,
    ) -> bool {
        let mut any = false;
        let mut metas = [RecvMeta::default(); BATCH_SIZE];
        let Self { sockets, buffers, counters, secure, logs } = self;
        for socket in sockets {
            let mut slices: Vec<IoSliceMut<'_>> =
                buffers.iter_mut().map(|buffer| IoSliceMut::new(buffer)).collect();
            let got = socket.state.recv(UdpSockRef::from(&socket.socket), &mut slices, &mut metas);
            let Ok(count) = got else { continue };
            drop(slices);
            counters.receives += 1;
            any |= count > 0;
            for (meta, buffer) in metas.iter().zip(buffers.iter_mut()).take(count) {
                let marked = meta.ecn == Some(EcnCodepoint::Ce);
                let burst = buffer.get_mut(..meta.len).unwrap_or_default();
                fetch_headers(burst, meta.stride);
                for packet in burst.chunks_mut(meta.stride.max(1)) {
                    counters.packets_received += 1;
                    counters.bytes_received += packet.len() as u64;
                    let taken = open(secure.as_mut(), meta.addr, packet, now, hosts).and_then(|opened| {
                        let Some((origin, header, packet)) = opened else { return Ok(()) };
                        take(origin, &header, packet, marked)
                    });
                    if let Err(cause) = taken {
                        counters.drop_one(cause);
                        logs.tell(meta.addr, cause);
                    }
                }
            }
        }
        self.send_between_daemons(now);
        any
    }
}

/// Prefetches the first cache lines of all packets at once. The kernel's copy isn't in the core's own cache, and each packet would wait for
/// its lines.
fn fetch_headers(burst: &[u8], stride: usize) {
    let second = |packet: &[u8]| packet.get(64).copied().unwrap_or(0);
    let sum = |sum: u8, packet: &[u8]| sum ^ packet.first().copied().unwrap_or(0) ^ second(packet);
    std::hint::black_box(burst.chunks(stride.max(1)).fold(0, sum));
}

/// A packet for its VM; `None`: it was for the daemon itself.
type Opened<'a> = Option<(Origin, Header, &'a [u8])>;

fn open<'a>(
    secure: Option<&mut Secure>,
    from: SocketAddr,
    packet: &'a mut [u8],
    now: u64,
    hosts: &dyn Fn() -> Vec<SocketAddr>,
) -> Result<Opened<'a>, Dropped> {
    match (secure, packet.first()) {
        (Some(secure), Some(&SEALED)) => {
            match secure.arrive(from, packet, now, &|from| host_of(&hosts(), from))? {
                Arrived::Data { host, header, packet } => {
                    Ok(Some((Origin { at: host, proven: true }, header, packet)))
                }
                Arrived::Handshake => Ok(None),
            }
        }
        (None, Some(&PLAIN)) => {
            let (header, rest) = Header::decode(packet, PLAIN).ok_or(Dropped::Malformed)?;
            Ok(Some((Origin { at: from, proven: false }, header, rest)))
        }
        (Some(_), Some(&PLAIN)) => Err(Dropped::Plain),
        (None, Some(&SEALED)) => Err(Dropped::Encrypted),
        _ => Err(Dropped::Malformed),
    }
}

impl Socket {
    fn open(address: SocketAddr) -> io::Result<Self> {
        let socket = UdpSocket::bind(address)?;
        let state = UdpSocketState::new(UdpSockRef::from(&socket))?;
        // Guests' datagrams may be larger than a packet of the link. The kernel fragments those alone, since connections have a path MTU
        // that fits.
        if address.is_ipv4() {
            sockopt::set_ip_mtu_discover(&socket, sockopt::Ipv4PathMtuDiscovery::DONT)?;
        } else {
            sockopt::set_ipv6_mtu_discover(&socket, sockopt::Ipv6PathMtuDiscovery::DONT)?;
        }
        // Packets queued in the kernel delay all later ones, and run up a peer's timer, so the send buffer is small.
        let _ = sockopt::set_socket_send_buffer_size(&socket, SEND_BUFFER);
        // Beyond net.core.rmem_max if the daemon has CAP_NET_ADMIN. Too small a buffer costs retransmissions, not correctness.
        let _ = sockopt::set_socket_recv_buffer_size_force(&socket, RECEIVE_BUFFER)
            .or_else(|_| sockopt::set_socket_recv_buffer_size(&socket, RECEIVE_BUFFER));
        Ok(Self { socket, state, waiting: VecDeque::new() })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // For tests only.
mod tests {
    use super::super::directory::VmId;
    use super::super::header::Kind;
    use super::*;

    /// A host's sockets on a port that was free a moment ago.
    fn open(host: &str) -> (Fabric, SocketAddr) {
        loop {
            let at = UdpSocket::bind((host, 0)).and_then(|socket| socket.local_addr()).unwrap();
            if let Ok(fabric) = Fabric::open(at, 1, None) {
                return (fabric, at);
            }
        }
    }

    #[test]
    fn what_found_no_room_leaves_first_and_whole() {
        let (mut left, _) = open("127.0.0.1");
        let (mut right, to) = open("127.0.0.2");
        // As after two calls of which the kernel accepted nothing.
        let header = Header { kind: Kind::Connected, source: VmId(1), destination: VmId(2), segment: 3 };
        let packet = |number: u8, len: usize| {
            let mut packet = header.encode(PLAIN).to_vec();
            packet.resize(len, number);
            packet
        };
        for first in [1u8, 11] {
            let bytes = (first..first + 10).flat_map(|number| packet(number, 100)).collect();
            left.sockets[0].waiting.push_back(Waiting { to, bytes, stride: 100, ecn: false });
        }
        assert!(left.is_blocked());
        let run = Run { index: 0, bytes: &mut packet(21, 50), stride: 50, ecn: false };
        left.send(to, &header, run, 0);
        assert_eq!(left.counters().packets_sent, 0, "nothing overtakes what waits");
        assert!(left.has_room(0) && !left.is_blocked());
        let mut got = Vec::new();
        let start = std::time::Instant::now();
        while got.len() < 21 && start.elapsed() < std::time::Duration::from_secs(60) {
            right.receive(0, &Vec::new, |_, _, bytes, _| {
                got.push((bytes[0], bytes.len()));
                Ok(())
            });
        }
        let expected: Vec<(u8, usize)> = (1..=20).map(|number| (number, 84)).chain([(21, 34)]).collect();
        assert_eq!(got, expected);
        assert_eq!(left.counters().packets_sent, 21);
    }
}
