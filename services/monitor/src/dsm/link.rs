//! A link to another node, over a socket or a queue pair: frames, and a queue for bytes that the transport doesn't accept at once.
//!
//! The stream of bytes consists of messages of the protocol ([`dsm::wire`], whose first byte is its version) and of control frames:
//! ```text
//!  0 mark (0xc5)   1 kind   2 zero (2)   4 length of what follows the header (4)   8 body
//! ```
//! If nodes have a cluster key, the stream is in records of [`cluster_key::stream`], on both transports.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use dsm::wire;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::net::{RecvFlags, SendFlags};

use super::checkpoint::Step;
use super::rdma::Pair;
use cluster_key::stream::{Opening, Sealing};

/// First byte of a control frame. No version of the protocol has this number.
const MARK: u8 = 0xc5;
const HEADER: usize = 8;
/// Bytes to read at once from a transport: several pages.
const MANY: usize = 1 << 16;
/// Send buffer to request for a Unix socket, bytes: a vCPU's requests at one time.
const ROOM: usize = 1 << 20;
/// Limit of a control frame's body, bytes.
const MAX_BODY: usize = 1 << 20;
/// Bytes in the send queue above which a vCPU that writes to its console waits.
const LONG_QUEUE: usize = 1 << 20;
/// Capacity of the send queue. Correct nodes never have as much in flight, with prefetches of 128 pages for each of 254 vCPUs. The link of
/// a silent peer ends by the silence timeout long before. This limit ends the link of a peer that sends and doesn't receive.
const LINK_SEND_QUEUE_BYTES: usize = 256 << 20;

/// Control frames, which nodes exchange besides the protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Control {
    /// The sender is alive.
    Heartbeat,
    /// Console output of the guest; to node 0.
    Console(Vec<u8>),
    /// The guest ended the VM with this code.
    Exit(u32),
    /// The VM can't continue, for this reason.
    Failed(String),
    /// All vCPUs of the sender have parked; to node 0.
    Parked,
    /// The sender's final report, as JSON, after its vCPUs have stopped; to node 0, as the last frame.
    Report(Vec<u8>),
    /// The sender is ready. From node 0: all nodes are, and vCPUs may run.
    Start,
    /// The guest's measurement begins (true) or has ended.
    Phase(bool),
    /// Requests an [`Control::Answer`].
    Ask,
    /// The sender's report so far, as JSON.
    Answer(Vec<u8>),
    /// A step of a checkpoint.
    Checkpoint(Step),
}

impl Control {
    fn code(&self) -> u8 {
        match self {
            Self::Heartbeat => 1,
            Self::Console(_) => 2,
            Self::Exit(_) => 3,
            Self::Failed(_) => 4,
            Self::Parked => 5,
            Self::Report(_) => 6,
            Self::Start => 7,
            Self::Phase(_) => 8,
            Self::Ask => 9,
            Self::Answer(_) => 10,
            Self::Checkpoint(_) => 11,
        }
    }

    fn encode(&self) -> Vec<u8> {
        let mut step = Vec::new();
        let body: &[u8] = match self {
            Self::Heartbeat | Self::Parked | Self::Start | Self::Ask => &[],
            Self::Console(bytes) | Self::Report(bytes) | Self::Answer(bytes) => bytes,
            Self::Phase(begins) => &[u8::from(*begins)],
            Self::Failed(text) => text.as_bytes(),
            Self::Exit(code) => &code.to_le_bytes(),
            Self::Checkpoint(one) => {
                // Serialization into memory can't fail.
                let _ = ciborium::into_writer(one, &mut step);
                &step
            }
        };
        let body = &body[..body.len().min(MAX_BODY)];
        let mut frame = vec![MARK, self.code(), 0, 0];
        frame.extend(u32::try_from(body.len()).unwrap_or(0).to_le_bytes());
        frame.extend(body);
        frame
    }

    fn parse(kind: u8, body: Vec<u8>) -> Option<Self> {
        Some(match (kind, body.len()) {
            (1, 0) => Self::Heartbeat,
            (2, _) => Self::Console(body),
            (3, 4) => Self::Exit(u32::from_le_bytes(body.try_into().ok()?)),
            (4, _) => Self::Failed(String::from_utf8_lossy(&body).into_owned()),
            (5, 0) => Self::Parked,
            (6, _) => Self::Report(body),
            (7, 0) => Self::Start,
            (8, 1) => Self::Phase(body.first().is_some_and(|byte| *byte != 0)),
            (9, 0) => Self::Ask,
            (10, _) => Self::Answer(body),
            (11, _) => Self::Checkpoint(ciborium::from_reader(body.as_slice()).ok()?),
            _ => return None,
        })
    }
}

/// A frame of a link.
#[derive(Debug)]
pub(super) enum Frame {
    Message(dsm::Message),
    Control(Control),
}

/// A connected stream socket.
#[derive(Debug)]
pub(super) enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Stream {
    pub(super) fn set_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Unix(stream) => {
                stream.set_read_timeout(timeout)?;
                stream.set_write_timeout(timeout)
            }
            Self::Tcp(stream) => {
                stream.set_nodelay(true)?;
                stream.set_read_timeout(timeout)?;
                stream.set_write_timeout(timeout)
            }
        }
    }

    fn shutdown(&self) {
        // Fails if the socket is shut down already.
        let _ = match self {
            Self::Unix(stream) => stream.shutdown(std::net::Shutdown::Both),
            Self::Tcp(stream) => stream.shutdown(std::net::Shutdown::Both),
        };
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(stream) => stream.as_fd(),
            Self::Tcp(stream) => stream.as_fd(),
        }
    }
}

impl Read for &Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => (&mut &*stream).read(into),
            Stream::Tcp(stream) => (&mut &*stream).read(into),
        }
    }
}

/// The transport of a link.
pub(super) enum Way {
    /// A socket. The faults thread offers queued bytes again when the socket is writable.
    Socket(Stream),
    /// A queue pair. The link's reader offers queued bytes again, and is woken when the queue pair has room.
    Pair(Box<Pair>),
}

/// Time that closing a link waits until the peer's RDMA device has received all bytes. (The kernel delivers a socket's bytes.)
const LAST_BYTES: Duration = Duration::from_millis(200);

/// A link to another node. Thread-safe; one thread reads it.
pub(super) struct Link {
    pub(super) peer: u8,
    /// The peer's address, for messages.
    pub(super) address: String,
    way: Way,
    queue: Mutex<Outgoing>,
    /// On a sealed link: the state that opens incoming records. Only the reader uses it.
    opened: Mutex<Option<Opened>>,
    drained: Condvar,
    closed: AtomicBool,
    /// The link was closed because its send queue was full.
    overflowed: AtomicBool,
    /// Capacity of the send queue: [`LINK_SEND_QUEUE_BYTES`], less in tests.
    capacity: usize,
    /// When bytes last arrived, ns of the engine's clock.
    pub(super) heard: AtomicU64,
    /// The reader is writing to a console, so silence isn't the peer's.
    pub(super) busy: AtomicBool,
}

/// The send queue of a link.
#[derive(Default)]
struct Outgoing {
    /// Bytes that the transport hasn't accepted, sealed if the link is, oldest first.
    bytes: Vec<u8>,
    sealing: Option<Sealing>,
}

/// The receive state of a sealed link.
struct Opened {
    opening: Opening,
    /// Bytes that have arrived and aren't opened.
    ahead: VecDeque<u8>,
    room: Vec<u8>,
}

/// Reads a link's raw bytes, many at a time.
struct Ahead<'a> {
    link: &'a Link,
    bytes: &'a mut VecDeque<u8>,
    room: &'a mut Vec<u8>,
}

impl Read for Ahead<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.bytes.is_empty() {
            self.room.resize(MANY, 0);
            let count = self.link.read_way(self.room)?;
            self.bytes.extend(&self.room[..count]);
        }
        self.bytes.read(into)
    }
}

impl Link {
    /// A link over a connected transport. With `sealed` both directions are encrypted and authenticated.
    pub(super) fn new(peer: u8, address: String, way: Way, sealed: Option<(Sealing, Opening)>) -> Self {
        // A larger buffer saves waits for a writable socket. Linux grants up to `wmem_max`. (TCP's buffers grow by themselves.)
        if let Way::Socket(Stream::Unix(stream)) = &way
            && let Err(error) = set_socket_send_buffer_size(stream, ROOM)
        {
            tracing::debug!(%error, "A link's socket keeps its room");
        }
        let (sealing, opening) = sealed.unzip();
        let opened = opening.map(|opening| Opened { opening, ahead: VecDeque::new(), room: Vec::new() });
        Self {
            peer,
            address,
            way,
            queue: Mutex::new(Outgoing { bytes: Vec::new(), sealing }),
            opened: Mutex::new(opened),
            drained: Condvar::new(),
            closed: AtomicBool::new(false),
            overflowed: AtomicBool::new(false),
            capacity: LINK_SEND_QUEUE_BYTES,
            heard: AtomicU64::new(0),
            busy: AtomicBool::new(false),
        }
    }

    /// The socket that the faults thread must watch while bytes are queued; `None` for RDMA.
    pub(super) fn socket(&self) -> Option<&Stream> {
        match &self.way {
            Way::Socket(stream) => Some(stream),
            Way::Pair(_) => None,
        }
    }

    /// Whether the link uses an RDMA device, which serves only threads with the credentials that opened it.
    pub(super) fn is_rdma(&self) -> bool {
        matches!(self.way, Way::Pair(_))
    }

    /// The capacity of the send queue, if the link was closed because it was full.
    pub(super) fn overflow(&self) -> Option<usize> {
        self.overflowed.load(Ordering::Relaxed).then_some(self.capacity)
    }

    fn queue(&self) -> MutexGuard<'_, Outgoing> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends bytes, and queues those that the transport doesn't accept at once. Returns true if queued bytes wait for a writable socket.
    /// Never blocks. Bytes for a broken link are dropped, since the link's reader detects the end.
    pub(super) fn send(&self, bytes: &[u8]) -> bool {
        let mut queue = self.queue();
        if self.closed.load(Ordering::Relaxed) {
            return false;
        }
        let idle = queue.bytes.is_empty();
        let taken = if idle && queue.sealing.is_none() { self.offer(bytes) } else { 0 };
        self.append(&mut queue, &bytes[taken..]);
        if idle && queue.sealing.is_some() {
            let taken = self.offer(&queue.bytes);
            queue.bytes.drain(..taken);
        }
        !queue.bytes.is_empty() && !self.is_rdma()
    }

    /// Appends bytes to the send queue. If it is full, closes the link, which its reader detects.
    fn append(&self, queue: &mut Outgoing, bytes: &[u8]) {
        let Outgoing { bytes: waiting, sealing } = queue;
        let mut fits = waiting.len().saturating_add(bytes.len()) <= self.capacity;
        match sealing {
            None if fits => waiting.extend_from_slice(bytes),
            Some(sealing) if fits => {
                let mut rest = bytes;
                while fits && !rest.is_empty() {
                    match sealing.write(rest, waiting) {
                        Ok(count) => rest = rest.get(count..).unwrap_or_default(),
                        // Bytes that can't be sealed aren't sent at all.
                        Err(_) => fits = false,
                    }
                }
            }
            _ => {}
        }
        if !fits {
            waiting.clear();
            self.overflowed.store(true, Ordering::Relaxed);
            self.closed.store(true, Ordering::Relaxed);
            self.shut_down();
            self.drained.notify_all();
        }
    }

    fn shut_down(&self) {
        match &self.way {
            Way::Socket(stream) => stream.shutdown(),
            Way::Pair(pair) => pair.shutdown(),
        }
    }

    pub(super) fn send_control(&self, control: &Control) -> bool {
        self.send(&control.encode())
    }

    /// The same, but waits while more than `LONG_QUEUE` bytes are queued.
    pub(super) fn send_patiently(&self, control: &Control) -> bool {
        let mut queue = self.queue();
        while queue.bytes.len() > LONG_QUEUE && !self.closed.load(Ordering::Relaxed) {
            queue = self.drained.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        drop(queue);
        self.send_control(control)
    }

    fn offer(&self, bytes: &[u8]) -> usize {
        let stream = match &self.way {
            Way::Socket(stream) => stream,
            Way::Pair(pair) => return pair.offer(bytes),
        };
        let mut taken = 0;
        while taken < bytes.len() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(stream.as_fd(), &bytes[taken..], flags) {
                Ok(count) => taken += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                // The link is broken, which its reader detects.
                Err(_) => return bytes.len(),
            }
        }
        taken
    }

    /// Sends queued bytes as far as the transport accepts them. Returns true if some are left that wait for a writable socket.
    pub(super) fn flush(&self) -> bool {
        let mut queue = self.queue();
        let long = queue.bytes.len() > LONG_QUEUE;
        let taken = self.offer(&queue.bytes);
        queue.bytes.drain(..taken);
        if long {
            self.drained.notify_all();
        }
        !queue.bytes.is_empty() && !self.is_rdma()
    }

    pub(super) fn has_queue(&self) -> bool {
        !self.queue().bytes.is_empty()
    }

    /// Closes both directions. With RDMA, first waits up to [`LAST_BYTES`] for delivery, unless the link is broken. Don't call it under the
    /// engine's lock.
    pub(super) fn close(&self) {
        if let Way::Pair(pair) = &self.way {
            let until = Instant::now() + LAST_BYTES;
            while !self.closed.load(Ordering::Relaxed)
                && (self.has_queue() || !pair.is_done())
                && Instant::now() < until
            {
                self.flush();
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        {
            // Under the lock, so that no thread is between its check and its wait.
            let _queue = self.queue();
            self.closed.store(true, Ordering::Relaxed);
        }
        self.shut_down();
        self.drained.notify_all();
    }

    /// Queues bytes without sending them. The caller must call [`Link::flush`] soon.
    pub(super) fn put_off(&self, bytes: &[u8]) {
        let mut queue = self.queue();
        if !self.closed.load(Ordering::Relaxed) {
            self.append(&mut queue, bytes);
        }
    }

    /// Blocks for bytes of frames, opened if the link is sealed.
    fn read(&self, free: &mut [u8]) -> io::Result<usize> {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Opened { opening, ahead, room }) = &mut *opened else {
            drop(opened);
            return self.read_way(free);
        };
        opening.read(free, &mut Ahead { link: self, bytes: ahead, room })
    }

    /// Blocks for raw bytes.
    fn read_way(&self, free: &mut [u8]) -> io::Result<usize> {
        match &self.way {
            // Not by a blocking `recv`: a thread that sleeps there also wakes whenever the peer receives sent bytes, and each wakeup
            // disturbs a vCPU.
            Way::Socket(stream) => loop {
                match rustix::net::recv(stream.as_fd(), &mut *free, RecvFlags::DONTWAIT) {
                    Ok((count, _)) => return Ok(count),
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => match poll(&mut [PollFd::new(stream, PollFlags::IN)], None) {
                        Ok(_) | Err(Errno::INTR) => {}
                        Err(error) => return Err(error.into()),
                    },
                    Err(error) => return Err(error.into()),
                }
            },
            Way::Pair(pair) => loop {
                let count = pair.read(free)?;
                if self.has_queue() {
                    self.flush();
                }
                if count > 0 {
                    return Ok(count);
                }
            },
        }
    }

    /// Blocks for the next frame. Appends it and all others that arrived with it.
    pub(super) fn receive(&self, incoming: &mut Incoming, frames: &mut Vec<Frame>) -> io::Result<()> {
        while frames.is_empty() {
            while let Some(frame) = incoming.next(self.peer).transpose() {
                match frame {
                    Ok(frame) => frames.push(frame),
                    // The frames before it are valid. The next call finds the error again.
                    Err(_) if !frames.is_empty() => return Ok(()),
                    Err(error) => return Err(error),
                }
            }
            if frames.is_empty() {
                incoming.fill(|free| self.read(free))?;
            }
        }
        Ok(())
    }
}

/// Received bytes that aren't parsed into frames yet.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    bytes: Vec<u8>,
    /// Offsets of the first unparsed byte, and of the end.
    start: usize,
    end: usize,
}

impl Incoming {
    /// Blocks for at least one more byte.
    fn fill(&mut self, mut read: impl FnMut(&mut [u8]) -> io::Result<usize>) -> io::Result<()> {
        self.bytes.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        // The unparsed bytes may be the start of the longest possible frame, so the buffer doubles.
        let wanted = self.end.saturating_mul(2).max(MANY);
        if self.bytes.len() < wanted {
            self.bytes.resize(wanted, 0);
        }
        loop {
            match read(self.bytes.get_mut(self.end..).unwrap_or_default()) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    self.end += count;
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The next frame, if complete. An error is returned again by each call.
    fn next(&mut self, peer: u8) -> io::Result<Option<Frame>> {
        let wrong = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
        let here = self.bytes.get(self.start..self.end).unwrap_or_default();
        let &[mark, kind, _, _, a, b, c, d, ..] = here else { return Ok(None) };
        if mark == MARK {
            let len = usize::try_from(u32::from_le_bytes([a, b, c, d])).ok().filter(|len| *len <= MAX_BODY);
            let len = len.ok_or_else(|| {
                wrong(format!("a control frame says that it is longer than {MAX_BODY} bytes"))
            })?;
            let Some(body) = here.get(HEADER..HEADER + len) else { return Ok(None) };
            let control = Control::parse(kind, body.to_vec()).ok_or_else(|| {
                wrong(format!("a control frame has kind {kind} with {len} bytes, which isn't known"))
            })?;
            self.start += HEADER + len;
            return Ok(Some(Frame::Control(control)));
        }
        let Some(header) = here.get(..wire::HEADER) else { return Ok(None) };
        let len = wire::message_len(header).map_err(|error| wrong(error.to_string()))?;
        let Some(bytes) = here.get(..len) else { return Ok(None) };
        let message = wire::parse(bytes).map_err(|error| wrong(error.to_string()))?;
        if message.from.0 != peer {
            return Err(wrong(format!("it sent a message in the name of node {}", message.from.0)));
        }
        self.start += len;
        Ok(Some(Frame::Message(message)))
    }
}

#[cfg(test)]
#[path = "link_tests.rs"]
mod tests;
