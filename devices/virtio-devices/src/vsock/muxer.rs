//! All connections of one device: dispatch of packets, fairness, and limits.
//!
//! Independent of rings and threads: [`Muxer::packet`] receives packets, [`Muxer::ready`] readiness of sockets, [`Muxer::expire`] the time;
//! [`Muxer::next`] returns packets to send.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::net::RecvFlags;
use telemetry::guest_log::GuestLog;

use super::connection::{Connection, Fate, Key, State};
use super::counters::Counters;
use super::packet::{HOST_CID, Header, Op, TYPE_STREAM};
use super::socket::Listener;
use crate::worker::{Interest, Poller, Ready};

/// Limit of connections.
pub const CONNECTIONS_MAX: usize = 1024;
/// Limit of host programs that have connected and not yet sent a port.
pub const GREETERS_MAX: usize = 128;
/// Limit of guests' bytes that wait for programs of the host, over all connections.
pub const PENDING_MAX: usize = 32 << 20;
/// Limit of resets that wait for receive buffers; beyond it no more packets of the guest are processed.
pub const RESETS_MAX: usize = 256;
/// Timeout for a program's `CONNECT <port>`.
pub const GREETING_TIME: Duration = Duration::from_secs(5);
/// Timeout for the guest's response to a request.
pub const REQUEST_TIME: Duration = Duration::from_secs(5);
/// Timeout for the guest's confirmation that a connection is over.
pub const CLOSING_TIME: Duration = Duration::from_secs(10);
/// How long the listening socket isn't polled when the process has no descriptors left.
const LISTENER_PAUSE: Duration = Duration::from_secs(1);
/// Limit of a greeting: `CONNECT 4294967295` and a line end.
const GREETING_MAX: usize = 32;
/// First port for programs of the host; above the default range of Linux guests.
const FIRST_HOST_PORT: u32 = 1 << 30;

/// Token of the listening socket; connections have higher ones.
pub const LISTENER_TOKEN: u64 = 15;

/// Registration of polled sockets: a [`Poller`], or a test's own.
pub trait Watch {
    /// Adds `fd` to the poll set.
    fn add(&self, fd: BorrowedFd<'_>, token: u64, interest: Interest) -> io::Result<()>;
    /// Changes the polled events.
    fn modify(&self, fd: BorrowedFd<'_>, token: u64, interest: Interest) -> io::Result<()>;
    /// Removes `fd` from the poll set.
    fn remove(&self, fd: BorrowedFd<'_>) -> io::Result<()>;
}

impl Watch for Poller {
    fn add(&self, fd: BorrowedFd<'_>, token: u64, interest: Interest) -> io::Result<()> {
        Self::add(self, fd, token, interest)
    }

    fn modify(&self, fd: BorrowedFd<'_>, token: u64, interest: Interest) -> io::Result<()> {
        Self::modify(self, fd, token, interest)
    }

    fn remove(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        Self::remove(self, fd)
    }
}

/// A host program that has connected and not yet sent a port.
struct Greeter {
    socket: OwnedFd,
    said: Vec<u8>,
    deadline: Instant,
    watched: bool,
}

/// The connections of a device.
pub struct Muxer {
    cid: u64,
    listener: Listener,
    /// Whether the listening socket is polled; otherwise it is polled again from `listen_again` on.
    listening: bool,
    listen_again: Option<Instant>,
    connections: HashMap<u64, Connection>,
    keys: HashMap<Key, u64>,
    greeters: HashMap<u64, Greeter>,
    next_token: u64,
    next_port: u32,
    /// Connections with packets to send, each once.
    senders: VecDeque<u64>,
    resets: VecDeque<Header>,
    deadlines: BTreeSet<(Instant, u64)>,
    /// Number of pending bytes over all connections.
    pending: usize,
    counters: Arc<Counters>,
    log: Arc<GuestLog>,
}

impl Muxer {
    /// A muxer for a guest with `cid`.
    pub fn new(cid: u64, listener: Listener, counters: Arc<Counters>, log: Arc<GuestLog>) -> Self {
        Self {
            cid,
            listener,
            listening: false,
            listen_again: None,
            connections: HashMap::new(),
            keys: HashMap::new(),
            greeters: HashMap::new(),
            next_token: LISTENER_TOKEN + 1,
            next_port: FIRST_HOST_PORT,
            senders: VecDeque::new(),
            resets: VecDeque::new(),
            deadlines: BTreeSet::new(),
            pending: 0,
            counters,
            log,
        }
    }

    /// Registers all sockets with a new poll set, after a pause.
    pub fn watch_all(&mut self, watch: &dyn Watch) -> io::Result<()> {
        (self.listening, self.listen_again) = (false, None);
        self.listen(watch)?;
        for (token, greeter) in &mut self.greeters {
            watch.add(greeter.socket.as_fd(), *token, Interest::READ)?;
            greeter.watched = true;
        }
        for connection in self.connections.values_mut() {
            connection.watched = None;
        }
        let tokens: Vec<u64> = self.connections.keys().copied().collect();
        for token in tokens {
            self.settle(watch, token);
        }
        Ok(())
    }

    fn listen(&mut self, watch: &dyn Watch) -> io::Result<()> {
        let wanted = self.greeters.len() < GREETERS_MAX && self.listen_again.is_none();
        if wanted != self.listening {
            if wanted {
                watch.add(self.listener.fd().as_fd(), LISTENER_TOKEN, Interest::READ)?;
            } else {
                watch.remove(self.listener.fd().as_fd())?;
            }
            self.listening = wanted;
        }
        Ok(())
    }

    /// Current number of connections.
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Whether the guest must receive packets before more of its own are processed.
    pub fn is_congested(&self) -> bool {
        self.resets.len() >= RESETS_MAX
    }

    /// Closes all connections, after a reset of the device.
    pub fn clear(&mut self) {
        // Closing the sockets removes them from the poll set, if there is one.
        self.connections.clear();
        self.keys.clear();
        self.greeters.clear();
        self.senders.clear();
        self.resets.clear();
        self.deadlines.clear();
        self.pending = 0;
        self.count();
    }

    fn count(&self) {
        self.counters.set_connections(self.connections.len());
    }

    // From the guest.

    /// Processes a packet of the guest: copies of the header and the payload.
    pub fn packet(&mut self, watch: &dyn Watch, header: &Header, payload: &[u8], now: Instant) {
        if header.src_cid != self.cid {
            self.counters.errors.increment();
            telemetry::guest_warn!(self.log, "A vsock packet with source {} was dropped", header.src_cid);
            return;
        }
        let key = Key { host: header.dst_port, guest: header.src_port };
        let known = self.keys.get(&key).copied();
        if header.dst_cid != HOST_CID || header.kind != TYPE_STREAM {
            if header.op != Op::RST {
                self.reset(header);
            }
            return;
        }
        let Some(token) = known else {
            match header.op {
                Op::REQUEST => self.guest_connects(watch, key, header),
                Op::RST => {}
                _ => self.reset(header),
            }
            return;
        };
        let Some(connection) = self.connections.get_mut(&token) else { return };
        let before = connection.pending();
        connection.update_credit(header);
        let fate = match (header.op, connection.state) {
            (Op::RST, _) => {
                self.remove(watch, token);
                return;
            }
            (Op::RESPONSE, State::Requested) => {
                self.counters.opened.increment();
                connection.established();
                Fate::Lives
            }
            (Op::RW, _) => connection.data(payload),
            (Op::SHUTDOWN, State::Established) => connection.guest_shutdown(header.flags),
            (Op::CREDIT_UPDATE, _) => Fate::Lives,
            (Op::CREDIT_REQUEST, _) => {
                connection.owed.credit = true;
                Fate::Lives
            }
            _ => Fate::Reset,
        };
        self.pending = (self.pending + connection.pending()).saturating_sub(before);
        if self.pending > PENDING_MAX {
            telemetry::guest_warn!(
                self.log,
                "A vsock connection was reset: {PENDING_MAX} bytes wait already"
            );
            return self.end(watch, token);
        }
        self.note_deadline(token, now);
        match fate {
            Fate::Lives => self.settle(watch, token),
            Fate::Reset => self.end(watch, token),
        }
    }

    /// Responds to a packet with an invalid payload.
    pub fn refuse(&mut self, watch: &dyn Watch, header: &Header) {
        self.counters.errors.increment();
        let key = Key { host: header.dst_port, guest: header.src_port };
        if header.src_cid != self.cid {
            return;
        }
        match self.keys.get(&key).copied() {
            Some(token) => self.end(watch, token),
            None if header.op != Op::RST => self.reset(header),
            None => {}
        }
    }

    fn guest_connects(&mut self, watch: &dyn Watch, key: Key, header: &Header) {
        if self.connections.len() >= CONNECTIONS_MAX {
            telemetry::guest_warn!(self.log, "A vsock connection was refused: {CONNECTIONS_MAX} are open");
            self.counters.refused.increment();
            return self.reset(header);
        }
        match self.listener.connect_to_port(key.host) {
            Ok(socket) => {
                self.counters.opened.increment();
                self.insert(watch, Connection::from_guest(key, socket, header));
            }
            Err(error) => {
                tracing::debug!("Nobody serves vsock port {} on the host: {error}", key.host);
                self.counters.refused.increment();
                self.reset(header);
            }
        }
    }

    fn insert(&mut self, watch: &dyn Watch, connection: Connection) {
        let token = self.token();
        if let Some(deadline) = connection.deadline {
            self.deadlines.insert((deadline, token));
        }
        self.keys.insert(connection.key, token);
        self.connections.insert(token, connection);
        self.count();
        self.settle(watch, token);
    }

    fn token(&mut self) -> u64 {
        let token = self.next_token;
        self.next_token += 1;
        token
    }

    /// Updates the poll set and the list of senders for a connection.
    fn settle(&mut self, watch: &dyn Watch, token: u64) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        let wanted = connection.interest();
        if wanted != connection.watched {
            let socket = connection.socket().as_fd();
            let result = match (connection.watched, wanted) {
                (None, Some(interest)) => watch.add(socket, token, interest),
                (Some(_), Some(interest)) => watch.modify(socket, token, interest),
                (_, None) => watch.remove(socket),
            };
            if let Err(error) = result {
                telemetry::guest_warn!(
                    self.log,
                    "A vsock connection was reset: its socket can't be watched: {error}"
                );
                return self.end(watch, token);
            }
            connection.watched = wanted;
        }
        if connection.has_packet() && !connection.queued {
            connection.queued = true;
            self.senders.push_back(token);
        }
    }

    /// Sets the deadline of a connection that both sides have closed.
    fn note_deadline(&mut self, token: u64, now: Instant) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        if connection.is_closing() && connection.deadline.is_none() {
            let deadline = now + CLOSING_TIME;
            connection.deadline = Some(deadline);
            self.deadlines.insert((deadline, token));
        }
    }

    fn remove(&mut self, watch: &dyn Watch, token: u64) -> Option<Connection> {
        let connection = self.connections.remove(&token)?;
        if connection.watched.is_some() {
            let _ = watch.remove(connection.socket().as_fd());
        }
        if let Some(deadline) = connection.deadline {
            self.deadlines.remove(&(deadline, token));
        }
        if connection.queued {
            self.senders.retain(|sender| *sender != token);
        }
        self.keys.remove(&connection.key);
        self.pending = self.pending.saturating_sub(connection.pending());
        self.count();
        Some(connection)
    }

    /// Ends a connection with a reset to the guest.
    fn end(&mut self, watch: &dyn Watch, token: u64) {
        if let Some(connection) = self.remove(watch, token) {
            if connection.owed.request {
                // The guest doesn't know the connection yet.
                return;
            }
            self.counters.resets.increment();
            self.resets.push_back(Header {
                op: Op::RST,
                src_port: connection.key.host,
                dst_port: connection.key.guest,
                src_cid: HOST_CID,
                dst_cid: self.cid,
                kind: TYPE_STREAM,
                ..Header::default()
            });
        }
    }

    fn reset(&mut self, header: &Header) {
        self.counters.resets.increment();
        self.resets.push_back(header.reset());
    }

    // To the guest.

    /// Whether [`Muxer::next`] may have a packet.
    pub fn has_packets(&self) -> bool {
        !self.resets.is_empty() || !self.senders.is_empty()
    }

    /// The next packet for the guest, with at most `space` bytes of payload at the start of `buffer`.
    pub fn next(
        &mut self,
        watch: &dyn Watch,
        space: usize,
        buffer: &mut [u8],
        now: Instant,
    ) -> Option<Header> {
        if let Some(reset) = self.resets.pop_front() {
            return Some(reset);
        }
        // Once around the list, so that a connection without a packet isn't tried twice.
        for _ in 0..self.senders.len() {
            let Some(token) = self.senders.pop_front() else { break };
            let Some(connection) = self.connections.get_mut(&token) else { continue };
            connection.queued = false;
            let packet = connection.next(space, buffer);
            let key = connection.key;
            self.note_deadline(token, now);
            // Appends it to the list again if it has more packets: round robin.
            self.settle(watch, token);
            if let Some(packet) = packet {
                return Some(Header {
                    src_cid: HOST_CID,
                    dst_cid: self.cid,
                    src_port: key.host,
                    dst_port: key.guest,
                    kind: TYPE_STREAM,
                    ..packet
                });
            }
        }
        None
    }

    // From the host.

    /// Handles an event of a socket.
    pub fn ready(&mut self, watch: &dyn Watch, event: Ready, now: Instant) -> io::Result<()> {
        if event.token == LISTENER_TOKEN {
            self.accept(watch, now);
        } else if self.greeters.contains_key(&event.token) {
            self.greeting(watch, event.token, now);
        } else if let Some(connection) = self.connections.get_mut(&event.token) {
            let before = connection.pending();
            if event.closed {
                connection.mark_hung_up();
            } else if event.readable {
                connection.mark_readable();
            }
            let fate = connection.flush();
            self.pending = (self.pending + connection.pending()).saturating_sub(before);
            match fate {
                Fate::Lives => self.settle(watch, event.token),
                Fate::Reset => self.end(watch, event.token),
            }
        }
        self.listen(watch)
    }

    fn accept(&mut self, watch: &dyn Watch, now: Instant) {
        while self.greeters.len() < GREETERS_MAX {
            let socket = match self.listener.accept() {
                Ok(socket) => socket,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
                    ) =>
                {
                    continue;
                }
                Err(error) => {
                    telemetry::guest_warn!(
                        self.log,
                        "{} can't accept connections: {error}",
                        self.listener.path().display()
                    );
                    let again = now + LISTENER_PAUSE;
                    self.listen_again = Some(again);
                    self.deadlines.insert((again, LISTENER_TOKEN));
                    return;
                }
            };
            let token = self.token();
            if watch.add(socket.as_fd(), token, Interest::READ).is_err() {
                continue;
            }
            let deadline = now + GREETING_TIME;
            self.deadlines.insert((deadline, token));
            self.greeters.insert(token, Greeter { socket, said: Vec::new(), deadline, watched: true });
        }
    }

    /// Reads a program's greeting; consumes nothing beyond the line end.
    fn greeting(&mut self, watch: &dyn Watch, token: u64, now: Instant) {
        let Some(greeter) = self.greeters.get_mut(&token) else { return };
        let mut bytes = [0; GREETING_MAX];
        let space = &mut bytes[..GREETING_MAX - greeter.said.len()];
        let peeked =
            match rustix::net::recv(&greeter.socket, &mut *space, RecvFlags::DONTWAIT | RecvFlags::PEEK) {
                Ok((count, _)) => count,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return,
                Err(_) => 0,
            };
        let line_end = space[..peeked].iter().position(|byte| *byte == b'\n');
        let take = line_end.map_or(peeked, |at| at + 1);
        let taken = match rustix::net::recv(&greeter.socket, &mut space[..take], RecvFlags::DONTWAIT) {
            Ok((count, _)) if take > 0 => count,
            _ => 0,
        };
        greeter.said.extend_from_slice(&space[..taken]);
        let complete = greeter.said.ends_with(b"\n");
        if taken > 0 && !complete && greeter.said.len() < GREETING_MAX {
            return;
        }
        let Some(greeter) = self.drop_greeter(watch, token) else { return };
        let Some(port) = parse_greeting(&greeter.said) else {
            tracing::debug!("A program at {} didn't say CONNECT <port>", self.listener.path().display());
            return;
        };
        if self.connections.len() >= CONNECTIONS_MAX {
            self.counters.refused.increment();
            telemetry::guest_warn!(
                self.log,
                "A connection to vsock port {port} was refused: {CONNECTIONS_MAX} are open"
            );
            return;
        }
        let key = self.free_key(port);
        self.insert(watch, Connection::from_host(key, greeter.socket, now + REQUEST_TIME));
    }

    fn drop_greeter(&mut self, watch: &dyn Watch, token: u64) -> Option<Greeter> {
        let greeter = self.greeters.remove(&token)?;
        if greeter.watched {
            let _ = watch.remove(greeter.socket.as_fd());
        }
        self.deadlines.remove(&(greeter.deadline, token));
        Some(greeter)
    }

    /// A host port without a connection to `guest`. There are far more ports than connections.
    fn free_key(&mut self, guest: u32) -> Key {
        loop {
            let key = Key { host: self.next_port, guest };
            self.next_port =
                if self.next_port == u32::MAX - 1 { FIRST_HOST_PORT } else { self.next_port + 1 };
            if !self.keys.contains_key(&key) {
                return key;
            }
        }
    }

    // Time.

    /// Time of the next [`Muxer::expire`].
    pub fn deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// Aborts what has exceeded its timeout.
    pub fn expire(&mut self, watch: &dyn Watch, now: Instant) -> io::Result<()> {
        while let Some((deadline, token)) = self.deadlines.first().copied() {
            if deadline > now {
                break;
            }
            self.deadlines.pop_first();
            if token == LISTENER_TOKEN {
                self.listen_again = None;
            } else if self.greeters.contains_key(&token) {
                self.drop_greeter(watch, token);
            } else if self.connections.get(&token).is_some_and(|found| found.deadline == Some(deadline)) {
                self.end(watch, token);
            }
        }
        self.listen(watch)
    }
}

/// Parses the port of `CONNECT <port>\n`.
pub fn parse_greeting(line: &[u8]) -> Option<u32> {
    let text = std::str::from_utf8(line).ok()?.strip_suffix('\n')?;
    let text = text.strip_suffix('\r').unwrap_or(text);
    let (word, port) = text.split_once(' ')?;
    let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    (word.eq_ignore_ascii_case("connect") && digits).then(|| port.parse().ok())?
}
