//! Tests of the connections without rings and threads, and of the whole device with a mock driver.

mod device;
mod flow;
mod hostile;
mod streams;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::counters::Counters;
use super::muxer::{Muxer, Watch};
use super::packet::{HOST_CID, Header, Op, TYPE_STREAM};
use super::socket::Listener;
use crate::worker::{Interest, Ready};

pub(super) const CID: u64 = 5;

/// A poll set that the test polls by itself.
#[derive(Default)]
pub(super) struct TestWatch(RefCell<BTreeMap<u64, (RawFd, Interest)>>);

impl Watch for TestWatch {
    fn add(&self, fd: BorrowedFd<'_>, token: u64, interest: Interest) -> io::Result<()> {
        let before = self.0.borrow_mut().insert(token, (fd.as_raw_fd(), interest));
        assert!(before.is_none(), "{token} is watched twice");
        Ok(())
    }

    fn modify(&self, fd: BorrowedFd<'_>, token: u64, interest: Interest) -> io::Result<()> {
        let before = self.0.borrow_mut().insert(token, (fd.as_raw_fd(), interest));
        assert_eq!(before.map(|(fd, _)| fd), Some(fd.as_raw_fd()), "{token} wasn't watched");
        Ok(())
    }

    fn remove(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let count = self.0.borrow().len();
        self.0.borrow_mut().retain(|_, (watched, _)| *watched != fd.as_raw_fd());
        assert_eq!(self.0.borrow().len() + 1, count, "it wasn't watched");
        Ok(())
    }
}

impl TestWatch {
    fn ready(&self) -> Vec<Ready> {
        let mut ready = Vec::new();
        for (token, (fd, interest)) in &*self.0.borrow() {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, interest.readable);
            flags.set(PollFlags::OUT, interest.writable);
            #[allow(unsafe_code)]
            // SAFETY: the muxer removes descriptors from the set before it closes them.
            let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
            let mut fds = [PollFd::new(&fd, flags)];
            poll(&mut fds, Some(&Timespec::default())).unwrap();
            let got = fds[0].revents();
            if !got.is_empty() {
                ready.push(Ready {
                    token: *token,
                    readable: got.contains(PollFlags::IN),
                    writable: got.contains(PollFlags::OUT),
                    closed: got.intersects(PollFlags::HUP | PollFlags::ERR),
                });
            }
        }
        ready
    }
}

/// A muxer, its files and the guest's side of its packets.
pub(super) struct Bench {
    pub muxer: Muxer,
    pub watch: TestWatch,
    pub counters: Arc<Counters>,
    pub folder: tempfile::TempDir,
    pub now: Instant,
    buffer: Vec<u8>,
}

impl Bench {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let counters = Arc::<Counters>::default();
        let listener = Listener::open(&folder.path().join("v")).unwrap();
        let mut muxer = Muxer::new(CID, listener, Arc::clone(&counters), Arc::default());
        let watch = TestWatch::default();
        muxer.watch_all(&watch).unwrap();
        Self { muxer, watch, counters, folder, now: Instant::now(), buffer: vec![0; 65_536] }
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("v")
    }

    /// A program that serves guest connections to `port`.
    pub fn serve(&self, port: u32) -> UnixListener {
        UnixListener::bind(self.folder.path().join(format!("v_{port}"))).unwrap()
    }

    /// A program that connects to the socket and sends `greeting`.
    pub fn connect(&self, greeting: &str) -> UnixStream {
        let mut stream = UnixStream::connect(self.path()).unwrap();
        stream.write_all(greeting.as_bytes()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        stream
    }

    /// Handles ready sockets until none is; a socket that stays ready would loop without end.
    pub fn turn(&mut self) {
        for _ in 0..10_000 {
            let ready = self.watch.ready();
            if ready.is_empty() {
                return;
            }
            for event in ready {
                self.muxer.ready(&self.watch, event, self.now).unwrap();
            }
        }
        panic!("the muxer spins: {:?}", self.watch.0.borrow());
    }

    /// The next packet to the guest with its payload.
    pub fn next(&mut self) -> Option<(Header, Vec<u8>)> {
        self.turn();
        self.pop()
    }

    /// The same without polling the sockets.
    pub fn pop(&mut self) -> Option<(Header, Vec<u8>)> {
        let header = self.muxer.next(&self.watch, 65_536, &mut self.buffer, self.now)?;
        Some((header, self.buffer[..header.len as usize].to_vec()))
    }

    /// The next packet, which has this operation.
    pub fn expect(&mut self, op: Op) -> (Header, Vec<u8>) {
        let (header, payload) = self.next().unwrap_or_else(|| panic!("no packet instead of {op:?}"));
        assert_eq!(header.op, op, "{header:?}");
        assert_eq!((header.src_cid, header.dst_cid, header.kind), (HOST_CID, CID, TYPE_STREAM));
        (header, payload)
    }

    pub fn expect_nothing(&mut self) {
        let packet = self.next();
        assert!(packet.is_none(), "{:?}", packet.map(|(header, _)| header));
    }

    /// A packet of the guest's.
    pub fn packet(&mut self, header: Header, payload: &[u8]) {
        let header = Header { len: u32::try_from(payload.len()).unwrap(), ..header };
        self.muxer.packet(&self.watch, &header, payload, self.now);
    }

    /// A connection of the guest to `port`, and the program's end of it.
    pub fn guest_connects(&mut self, guest: u32, port: u32, server: &UnixListener) -> UnixStream {
        self.packet(from_guest(guest, port, Op::REQUEST), &[]);
        let (response, _) = self.expect(Op::RESPONSE);
        assert_eq!((response.src_port, response.dst_port), (port, guest));
        let stream = server.accept().unwrap().0;
        stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        stream
    }
}

/// A packet from the guest with room for a megabyte.
pub(super) fn from_guest(guest: u32, host: u32, op: Op) -> Header {
    Header {
        src_cid: CID,
        dst_cid: HOST_CID,
        src_port: guest,
        dst_port: host,
        kind: TYPE_STREAM,
        op,
        buf_alloc: 1 << 20,
        ..Header::default()
    }
}

/// Reads exactly the expected bytes.
pub(super) fn read_exactly(stream: &mut UnixStream, expected: &[u8]) {
    let mut got = vec![0; expected.len()];
    stream.read_exact(&mut got).unwrap();
    assert!(got == expected, "the bytes differ");
}

/// Bytes that depend on their position.
pub(super) fn pattern(length: usize, seed: u64) -> Vec<u8> {
    (0..length as u64).map(|i| ((i.wrapping_mul(2_654_435_761) + seed) >> 7).to_le_bytes()[0]).collect()
}
