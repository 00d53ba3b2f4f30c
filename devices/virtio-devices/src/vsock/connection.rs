//! One connection: a Unix stream on the host's side, credit and half-closes towards the guest.
//!
//! ```text
//!   host connects: Requested ──RESPONSE──▶ Established ─┬─ SHUTDOWN(both) sent ──RST──▶ gone
//!  guest connects: ───────────────────────▶ Established ─┤
//!                                                         └─ RST from either, timeout ──▶ gone
//! ```

use std::num::Wrapping;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags, Shutdown};

use super::packet::{Header, Op, PAYLOAD_MAX, shutdown};
use crate::worker::Interest;

/// Credit of the guest, bytes: what it may send before the host's program has received it.
pub const BUFFER: u32 = 256 * 1024;

/// Both ends of a connection: the host's port and the guest's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    /// Port on the host's side.
    pub host: u32,
    /// Port in the guest.
    pub guest: u32,
}

/// State of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// A request was sent to the guest.
    Requested,
    /// Data may be sent.
    Established,
}

/// Packets that a connection still has to send, besides data.
#[derive(Debug, Clone, Copy, Default)]
pub struct Owed {
    /// A REQUEST, for a connection that the host opens.
    pub request: bool,
    /// A RESPONSE, which accepts the guest's connection.
    pub response: bool,
    /// A CREDIT_UPDATE, which reports buffer space to the guest.
    pub credit: bool,
}

/// State of a connection after an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It continues.
    Lives,
    /// It is over: the guest gets a reset.
    Reset,
}

/// A connection.
pub struct Connection {
    /// Its ends.
    pub key: Key,
    /// State of the connection.
    pub state: State,
    /// When it is aborted.
    pub deadline: Option<Instant>,
    /// The polled events; `None`: it isn't in the poll set.
    pub watched: Option<Interest>,
    /// Whether it is in the muxer's list of connections with packets to send.
    pub queued: bool,
    /// Packets that it has to send.
    pub owed: Owed,
    socket: OwnedFd,
    /// Bytes from the guest that the socket has not accepted yet; at most [`BUFFER`].
    pending: Vec<u8>,
    pending_from: usize,
    /// Number of bytes at the front of `pending` that are the host's own line "OK ...", not the guest's.
    own: usize,
    /// Number of bytes from the guest; how many of them the socket accepted; and how many of those were reported to the guest.
    received: Wrapping<u32>,
    forwarded: Wrapping<u32>,
    told: Wrapping<u32>,
    /// Number of bytes to the guest, and the guest's last report of its buffer.
    sent: Wrapping<u32>,
    guest_buffer: u32,
    guest_forwarded: Wrapping<u32>,
    /// CREDIT_REQUEST was sent since the guest's credit ran out.
    asked: bool,
    /// Halves that the guest has shut down.
    guest_closed: u32,
    /// Whether the write half of the socket is shut down.
    write_closed: bool,
    /// Whether the socket has bytes, or its end, to read.
    readable: bool,
    /// The host's program sends no more.
    ended: bool,
    /// The host's program receives no more: further data of the guest is discarded.
    deaf: bool,
    /// Closed halves that were reported to the guest.
    told_closed: u32,
}

impl Connection {
    fn new(key: Key, state: State, socket: OwnedFd) -> Self {
        Self {
            key,
            state,
            deadline: None,
            watched: None,
            queued: false,
            owed: Owed::default(),
            socket,
            pending: Vec::new(),
            pending_from: 0,
            own: 0,
            received: Wrapping(0),
            forwarded: Wrapping(0),
            told: Wrapping(0),
            sent: Wrapping(0),
            guest_buffer: 0,
            guest_forwarded: Wrapping(0),
            asked: false,
            guest_closed: 0,
            write_closed: false,
            readable: false,
            ended: false,
            deaf: false,
            told_closed: 0,
        }
    }

    /// A connection from the host. The guest gets a request, and must respond before `deadline`.
    pub fn from_host(key: Key, socket: OwnedFd, deadline: Instant) -> Self {
        let mut connection = Self::new(key, State::Requested, socket);
        connection.owed.request = true;
        connection.deadline = Some(deadline);
        connection
    }

    /// A connection from the guest, by `request`.
    pub fn from_guest(key: Key, socket: OwnedFd, request: &Header) -> Self {
        let mut connection = Self::new(key, State::Established, socket);
        connection.owed.response = true;
        connection.update_credit(request);
        connection
    }

    /// The socket, for polling.
    pub fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Number of the guest's bytes that wait for the host's program.
    pub fn pending(&self) -> usize {
        self.pending.len() - self.pending_from
    }

    /// Applies a packet's report of the guest's buffer.
    pub fn update_credit(&mut self, header: &Header) {
        self.guest_buffer = header.buf_alloc;
        self.guest_forwarded = Wrapping(header.fwd_cnt);
        if self.credit() > 0 {
            self.asked = false;
        }
    }

    /// Free bytes in the guest's buffer. 0 for a guest that claims to have received more than was sent.
    fn credit(&self) -> usize {
        let outstanding = (self.sent - self.guest_forwarded).0;
        usize::try_from(self.guest_buffer.saturating_sub(outstanding)).unwrap_or(0)
    }

    /// Handles the guest's acceptance: the host's program gets the port, and the deadline ends.
    pub fn established(&mut self) {
        self.state = State::Established;
        self.deadline = None;
        let line = format!("OK {}\n", self.key.host);
        let taken = self.push(line.as_bytes());
        self.own = line.len() - taken;
    }

    /// Handles data from the guest.
    pub fn data(&mut self, payload: &[u8]) -> Fate {
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        let occupied = (self.received - self.forwarded).0;
        let fits = occupied.checked_add(length).is_some_and(|total| total <= BUFFER);
        if self.state != State::Established || self.guest_closed & shutdown::SEND != 0 || !fits {
            return Fate::Reset;
        }
        self.received += length;
        let taken = self.push(payload);
        self.took(taken);
        Fate::Lives
    }

    /// Records that `bytes` of the guest's data left the buffer.
    fn took(&mut self, bytes: usize) {
        self.forwarded += u32::try_from(bytes).unwrap_or(0);
        // Report before the guest has to request it: when half of the buffer is full by its last information.
        let believes_used = (self.received - self.told).0;
        if self.forwarded != self.told && believes_used >= BUFFER / 2 {
            self.owed.credit = true;
        }
    }

    /// Passes bytes to the socket and keeps those that it doesn't accept. Returns how many it accepted.
    fn push(&mut self, bytes: &[u8]) -> usize {
        let taken = if self.pending() == 0 { self.write(bytes) } else { 0 };
        if self.deaf {
            return bytes.len();
        }
        let rest = &bytes[taken..];
        if !rest.is_empty() {
            if self.pending_from > 0 {
                self.pending.drain(..self.pending_from);
                self.pending_from = 0;
            }
            self.pending.extend_from_slice(rest);
        }
        taken
    }

    /// Writes as many bytes as the socket accepts. A closed reader makes the connection deaf.
    fn write(&mut self, bytes: &[u8]) -> usize {
        let mut done = 0;
        while done < bytes.len() && !self.deaf {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(&self.socket, &bytes[done..], flags) {
                Ok(count) => done += count,
                Err(rustix::io::Errno::AGAIN) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => self.deaf = true,
            }
        }
        done
    }

    /// Writes pending bytes to the socket.
    pub fn flush(&mut self) -> Fate {
        if self.pending() > 0 {
            let pending = std::mem::take(&mut self.pending);
            let waiting = pending.len() - self.pending_from;
            let written = self.write(&pending[self.pending_from..]);
            let gone = if self.deaf { waiting } else { written };
            let own = self.own.min(gone);
            self.own -= own;
            self.took(gone - own);
            if gone == waiting {
                // Releases the memory of a burst.
                self.pending_from = 0;
            } else {
                self.pending_from += gone;
                self.pending = pending;
            }
        }
        self.close_write();
        self.verdict()
    }

    /// Handles a shutdown by the guest.
    pub fn guest_shutdown(&mut self, flags: u32) -> Fate {
        self.guest_closed |= flags & shutdown::BOTH;
        if self.guest_closed & shutdown::RECEIVE != 0 {
            // The host's program learns of it when it writes.
            let _ = rustix::net::shutdown(&self.socket, Shutdown::Read);
            self.readable = false;
        }
        self.close_write();
        self.verdict()
    }

    fn close_write(&mut self) {
        if self.guest_closed & shutdown::SEND != 0 && self.pending() == 0 && !self.write_closed {
            self.write_closed = true;
            let _ = rustix::net::shutdown(&self.socket, Shutdown::Write);
        }
    }

    /// A connection that the guest has closed in both directions ends when its last bytes are delivered.
    fn verdict(&self) -> Fate {
        let over = self.guest_closed == shutdown::BOTH && self.pending() == 0;
        if over { Fate::Reset } else { Fate::Lives }
    }

    /// Records that the socket has bytes, or its end, to read.
    pub fn mark_readable(&mut self) {
        if self.guest_closed & shutdown::RECEIVE == 0 && !self.ended {
            self.readable = true;
        }
    }

    /// Records a hang-up: the host's program has closed the socket, but data may be left to read.
    pub fn mark_hung_up(&mut self) {
        self.deaf = true;
        self.mark_readable();
    }

    /// Events to poll for. `None`: not even a hang-up, which would wake the thread needlessly.
    pub fn interest(&self) -> Option<Interest> {
        let writable = self.pending() > 0 && !self.deaf;
        let reads = self.state == State::Established
            && self.guest_closed & shutdown::RECEIVE == 0
            && !self.ended
            && !self.readable;
        // After the end of its data, a program may still read; then only its hang-up matters.
        let lingers = self.ended && !self.deaf;
        (reads || writable || lingers).then_some(Interest { readable: reads, writable })
    }

    /// Halves that the host's side has closed.
    fn host_closed(&self) -> u32 {
        let send = if self.ended { shutdown::SEND } else { 0 };
        let receive = if self.deaf { shutdown::RECEIVE } else { 0 };
        send | receive
    }

    /// Whether [`Connection::next`] has a packet.
    pub fn has_packet(&self) -> bool {
        let Owed { request, response, credit } = self.owed;
        if request || response || credit {
            return true;
        }
        if self.state != State::Established {
            return false;
        }
        (self.readable && (self.credit() > 0 || !self.asked)) || self.host_closed() & !self.told_closed != 0
    }

    /// The next packet to the guest without the addresses, and its payload, read into at most `space` bytes of `buffer`. `None`: there is
    /// none after all.
    pub fn next(&mut self, space: usize, buffer: &mut [u8]) -> Option<Header> {
        let owed = std::mem::take(&mut self.owed);
        let simple = |connection: &mut Self, op| Some(connection.header(op));
        if owed.request {
            return simple(self, Op::REQUEST);
        }
        if owed.response {
            return simple(self, Op::RESPONSE);
        }
        if owed.credit {
            return simple(self, Op::CREDIT_UPDATE);
        }
        let room = self.credit().min(space).min(PAYLOAD_MAX).min(buffer.len());
        if self.readable && room == 0 && !self.asked {
            self.asked = true;
            return simple(self, Op::CREDIT_REQUEST);
        }
        if self.readable && room > 0 {
            match rustix::net::recv(&self.socket, &mut buffer[..room], RecvFlags::DONTWAIT) {
                Ok((0, _)) => {
                    self.readable = false;
                    self.ended = true;
                    self.deaf |= is_hung_up(&self.socket);
                }
                Ok((count, _)) => {
                    let mut header = self.header(Op::RW);
                    header.len = u32::try_from(count).unwrap_or(0);
                    self.sent += header.len;
                    return Some(header);
                }
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => self.readable = false,
                Err(_) => {
                    // ECONNRESET: the program closed the socket without reading everything.
                    self.readable = false;
                    (self.ended, self.deaf) = (true, true);
                }
            }
        }
        let closed = self.host_closed();
        if closed & !self.told_closed != 0 {
            self.told_closed |= closed;
            let mut header = self.header(Op::SHUTDOWN);
            header.flags = closed;
            return Some(header);
        }
        None
    }

    /// Whether both closed halves of the host were reported to the guest, which should respond with a reset.
    pub fn is_closing(&self) -> bool {
        self.told_closed == shutdown::BOTH
    }

    fn header(&mut self, op: Op) -> Header {
        self.told = self.forwarded;
        Header { op, buf_alloc: BUFFER, fwd_cnt: self.forwarded.0, ..Header::default() }
    }
}

/// Whether both directions of a socket are closed.
fn is_hung_up(socket: &OwnedFd) -> bool {
    let socket = socket.as_fd();
    let mut fds = [PollFd::new(&socket, PollFlags::empty())];
    let ready = poll(&mut fds, Some(&Timespec::default()));
    ready.is_ok() && fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
}
