//! One connection: a Unix stream on the host's side, credit and half-closes towards the guest.
//!
//! ```text
//!   host connects: Requested ──RESPONSE──▶ Established ─┬─ SHUTDOWN(both) sent ──RST──▶ gone
//!  guest connects: ───────────────────────▶ Established ─┤
//!                                                         └─ RST either way, timeout  ──▶ gone
//! ```

use std::num::Wrapping;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, SendFlags, Shutdown};

use super::packet::{Header, Op, PAYLOAD_MAX, shutdown};
use crate::worker::Interest;

/// Bytes that the guest may send before the host's program has taken them.
pub const BUFFER: u32 = 256 * 1024;

/// Who is at both ends: the host's port and the guest's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    /// Port on the host's side.
    pub host: u32,
    /// Port in the guest.
    pub guest: u32,
}

/// How far a connection has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The guest has been asked.
    Requested,
    /// Data flows.
    Established,
}

/// Packets that a connection still has to send, besides data.
#[derive(Debug, Clone, Copy, Default)]
pub struct Owed {
    /// REQUEST.
    pub request: bool,
    /// RESPONSE.
    pub response: bool,
    /// CREDIT_UPDATE.
    pub credit: bool,
}

/// What became of a connection after an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It goes on.
    Lives,
    /// It is over: the guest gets a reset.
    Reset,
}

/// A connection.
pub struct Connection {
    /// Its ends.
    pub key: Key,
    /// How far it has come.
    pub state: State,
    /// When it is given up.
    pub deadline: Option<Instant>,
    /// What is polled for at present; `None`: it isn't in the poll set.
    pub watched: Option<Interest>,
    /// It waits in the muxer's list of connections with something to send.
    pub queued: bool,
    /// Packets it owes.
    pub owed: Owed,
    socket: OwnedFd,
    /// From the guest, not yet taken by the socket; at most [`BUFFER`] bytes.
    pending: Vec<u8>,
    pending_from: usize,
    /// Bytes at the front of `pending` that are the host's own line "OK ...", not the guest's.
    own: usize,
    /// Bytes from the guest, and how many of them the socket took; and what of the latter the guest knows.
    received: Wrapping<u32>,
    forwarded: Wrapping<u32>,
    told: Wrapping<u32>,
    /// Bytes to the guest, and what it said about its buffer.
    sent: Wrapping<u32>,
    guest_buffer: u32,
    guest_forwarded: Wrapping<u32>,
    /// CREDIT_REQUEST was sent since the guest's credit ran out.
    asked: bool,
    /// What the guest has shut down.
    guest_closed: u32,
    /// The write half of the socket was shut down.
    write_closed: bool,
    /// The socket has bytes or its end to read.
    readable: bool,
    /// The host's program sends no more.
    ended: bool,
    /// The host's program takes no more: what the guest still sends is discarded.
    deaf: bool,
    /// What the guest was told about closed halves.
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

    /// The host has connected; the guest is to be asked, and has until `deadline`.
    pub fn from_host(key: Key, socket: OwnedFd, deadline: Instant) -> Self {
        let mut connection = Self::new(key, State::Requested, socket);
        connection.owed.request = true;
        connection.deadline = Some(deadline);
        connection
    }

    /// The guest has connected with `request`.
    pub fn from_guest(key: Key, socket: OwnedFd, request: &Header) -> Self {
        let mut connection = Self::new(key, State::Established, socket);
        connection.owed.response = true;
        connection.update_credit(request);
        connection
    }

    /// The socket, to poll it.
    pub fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Bytes of the guest's that wait for the host's program.
    pub fn pending(&self) -> usize {
        self.pending.len() - self.pending_from
    }

    /// Takes over what each packet says about the guest's buffer.
    pub fn update_credit(&mut self, header: &Header) {
        self.guest_buffer = header.buf_alloc;
        self.guest_forwarded = Wrapping(header.fwd_cnt);
        if self.credit() > 0 {
            self.asked = false;
        }
    }

    /// Bytes that the guest has room for. A guest that claims to have taken more than it was sent has none.
    fn credit(&self) -> usize {
        let outstanding = (self.sent - self.guest_forwarded).0;
        usize::try_from(self.guest_buffer.saturating_sub(outstanding)).unwrap_or(0)
    }

    /// The guest accepted: the host's program is told the port. The deadline no longer holds.
    pub fn established(&mut self) {
        self.state = State::Established;
        self.deadline = None;
        let line = format!("OK {}\n", self.key.host);
        let taken = self.push(line.as_bytes());
        self.own = line.len() - taken;
    }

    /// Data of the guest's.
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

    /// `bytes` of the guest's data left the buffer.
    fn took(&mut self, bytes: usize) {
        self.forwarded += u32::try_from(bytes).unwrap_or(0);
        // Tell before the guest has to ask: when it believes that half of the buffer is full.
        let believes_used = (self.received - self.told).0;
        if self.forwarded != self.told && believes_used >= BUFFER / 2 {
            self.owed.credit = true;
        }
    }

    /// Gives bytes to the socket and keeps what it doesn't take. Returns how many it took.
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

    /// Writes what the socket takes at present. A reader that has gone makes the connection deaf.
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

    /// Goes on with what waits for the socket.
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
                // A burst's buffer isn't kept.
                self.pending_from = 0;
            } else {
                self.pending_from += gone;
                self.pending = pending;
            }
        }
        self.close_write();
        self.verdict()
    }

    /// The guest shut halves down.
    pub fn guest_shutdown(&mut self, flags: u32) -> Fate {
        self.guest_closed |= flags & shutdown::BOTH;
        if self.guest_closed & shutdown::RECEIVE != 0 {
            // The host's program learns it when it writes.
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

    /// A connection that the guest has closed both ways ends when its last bytes are delivered.
    fn verdict(&self) -> Fate {
        let over = self.guest_closed == shutdown::BOTH && self.pending() == 0;
        if over { Fate::Reset } else { Fate::Lives }
    }

    /// The socket has something to read, its end included.
    pub fn mark_readable(&mut self) {
        if self.guest_closed & shutdown::RECEIVE == 0 && !self.ended {
            self.readable = true;
        }
    }

    /// The poll set reported a hang-up: the host's program is gone altogether, apart from what it left to be read.
    pub fn mark_hung_up(&mut self) {
        self.deaf = true;
        self.mark_readable();
    }

    /// What to poll for; `None`: nothing, not even a hang-up, which would wake without use.
    pub fn interest(&self) -> Option<Interest> {
        let writable = self.pending() > 0 && !self.deaf;
        let reads = self.state == State::Established
            && self.guest_closed & shutdown::RECEIVE == 0
            && !self.ended
            && !self.readable;
        // After the end of its data, a program may still read; then only its going away is of interest.
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

    /// The next packet to the guest without the addresses, and its payload, read into `buffer`, of which at most
    /// `space` bytes are used. `None`: nothing to say after all.
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
                    // ECONNRESET: it went away without reading everything.
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

    /// Whether the guest was told that the host has closed both halves: it is to answer with a reset.
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
