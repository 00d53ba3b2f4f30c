//! The whole device with a mock driver as the guest.

use machine::memory::GuestMemorySpace;
use virtio_devices_testbed::{self as testbed, MockDriver, MockInterrupt};

use super::*;
use crate::device::VirtioDevice;
use crate::fixtures;
use crate::vsock::packet::HEADER_LEN;
use crate::vsock::{Vsock, VsockConfig, VsockError};

const RECEIVE: u64 = 0x10_0000;
const SEND: u64 = 0x20_0000;
const SLOT: u32 = 4096 + 44;

struct Guest {
    vsock: Vsock,
    space: GuestMemorySpace,
    receive: MockDriver,
    transmit: MockDriver,
    event: MockDriver,
    interrupt: Arc<MockInterrupt>,
    folder: tempfile::TempDir,
    slots: std::collections::VecDeque<u64>,
}

fn config(folder: &tempfile::TempDir) -> VsockConfig {
    VsockConfig { name: "vsock0".to_owned(), cid: 5, socket: folder.path().join("v") }
}

impl Guest {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let vsock = Vsock::open(config(&folder)).unwrap();
        let space = testbed::memory(&[(0, 8 << 20)]);
        let driver = |index: u16| {
            let base = 0x1000 + u64::from(index) * MockDriver::ring_bytes(128);
            MockDriver::new(&space, index, 128, base, testbed::RINGS)
        };
        let (receive, transmit, event) = (driver(0), driver(1), driver(2));
        let interrupt = MockInterrupt::new();
        Self { vsock, space, receive, transmit, event, interrupt, folder, slots: [].into() }
    }

    fn activate(&mut self) {
        let drivers = [&self.receive, &self.transmit, &self.event];
        let activation = fixtures::activation(&self.space, testbed::RINGS, &drivers, &self.interrupt);
        self.vsock.activate(activation).unwrap();
    }

    fn post(&mut self, count: u64) {
        for slot in 0..count {
            let at = RECEIVE + slot * u64::from(SLOT);
            self.receive.push(&[(at, SLOT, true)]).unwrap();
            self.slots.push_back(at);
        }
        self.receive.kick();
    }

    /// Queues a packet in `pieces` descriptors without waiting.
    fn queue(&mut self, header: Header, payload: &[u8], pieces: usize) {
        let header = Header { len: u32::try_from(payload.len()).unwrap(), ..header };
        let mut bytes = header.to_bytes().to_vec();
        bytes.extend(payload);
        self.transmit.put(SEND, &bytes);
        let mut chain = Vec::new();
        let step = bytes.len().div_ceil(pieces);
        for at in (0..bytes.len()).step_by(step) {
            let length = u32::try_from(step.min(bytes.len() - at)).unwrap();
            chain.push((SEND + at as u64, length, false));
        }
        self.transmit.push(&chain).unwrap();
        self.transmit.kick();
    }

    fn send(&mut self, header: Header, payload: &[u8], pieces: usize) {
        self.queue(header, payload, pieces);
        self.transmit.wait_used();
    }

    fn next(&mut self) -> (Header, Vec<u8>) {
        let (_, written) = self.receive.wait_used();
        let at = self.slots.pop_front().unwrap();
        let bytes = self.receive.get(at, written as usize);
        self.receive.push(&[(at, SLOT, true)]).unwrap();
        self.slots.push_back(at);
        self.receive.kick();
        let (header, payload) = bytes.split_first_chunk::<HEADER_LEN>().unwrap();
        let header = Header::parse(header);
        assert_eq!(header.len as usize, payload.len());
        (header, payload.to_vec())
    }

    fn pause_and_resume(&mut self) {
        let queues = self.vsock.stop().unwrap();
        let (memory, features) = (self.space.clone(), testbed::RINGS);
        let interrupt = self.interrupt.clone();
        self.vsock.activate(crate::device::Activation { memory, features, queues, interrupt }).unwrap();
    }
}

#[test]
fn streams_pass_both_ways_through_rings_and_a_pause() {
    let mut guest = Guest::new();
    let server = UnixListener::bind(guest.folder.path().join("v_9")).unwrap();
    guest.activate();
    guest.post(64);
    guest.send(from_guest(1, 9, Op::REQUEST), &[], 1);
    assert_eq!(guest.next().0.op, Op::RESPONSE);
    let mut program = server.accept().unwrap().0;
    program.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let words = pattern(1_000_000, 1);
    let echo = std::thread::spawn({
        let words = words.clone();
        move || {
            let mut got = vec![0; words.len()];
            program.read_exact(&mut got).unwrap();
            assert!(got == words, "what the guest sent differs");
            program.write_all(&pattern(1_000_000, 2)).unwrap();
            program
        }
    });
    let (mut sent, mut told) = (0usize, 0usize);
    for (number, chunk) in words.chunks(10_000).enumerate() {
        while sent + chunk.len() - told > crate::vsock::connection::BUFFER as usize {
            let (header, _) = guest.next();
            told = header.fwd_cnt as usize;
        }
        guest.send(from_guest(1, 9, Op::RW), chunk, 1 + number % 7);
        sent += chunk.len();
        if number % 25 == 3 {
            guest.pause_and_resume();
        }
    }
    let mut got = Vec::new();
    while got.len() < 1_000_000 {
        let (header, payload) = guest.next();
        got.extend(payload);
        if header.op == Op::RW && got.len() % 3 == 0 {
            guest.pause_and_resume();
        }
        if header.op == Op::CREDIT_REQUEST || got.len() > 500_000 {
            let taken = u32::try_from(got.len()).unwrap();
            guest.send(Header { fwd_cnt: taken, ..from_guest(1, 9, Op::CREDIT_UPDATE) }, &[], 1);
        }
    }
    assert!(got == pattern(1_000_000, 2), "what the guest received differs");
    drop(echo.join().unwrap());
    loop {
        let (header, _) = guest.next();
        if header.op == Op::SHUTDOWN {
            break;
        }
    }
    assert_eq!(guest.vsock.inspect()["connections"], 1);
    guest.vsock.stop().unwrap();
    guest.vsock.reset();
    assert_eq!(guest.vsock.inspect()["connections"], 0);
    assert_eq!(guest.interrupt.failure(), None);
}

#[test]
fn a_guest_without_receive_buffers_is_held_up_and_then_answered() {
    let mut guest = Guest::new();
    guest.activate();
    let mut queued = 0u64;
    // A reset responds to each of these; the guest has posted no buffers for them.
    for port in 0..2000u32 {
        while guest.transmit.pop_used().is_some() {}
        let header = from_guest(port, 9, Op::RW);
        guest.transmit.put(SEND, &header.to_bytes());
        if guest.transmit.push(&[(SEND, 44, false)]).is_none() {
            break;
        }
        guest.transmit.kick();
        queued += 1;
        std::thread::sleep(Duration::from_micros(50));
    }
    assert!(queued < 1000, "the device takes packets without end");
    guest.post(64);
    for _ in 0..queued {
        assert_eq!(guest.next().0.op, Op::RST);
    }
    assert_eq!(guest.interrupt.failure(), None);
}

#[test]
fn a_restored_device_tells_that_connections_are_gone() {
    let mut guest = Guest::new();
    guest.activate();
    guest.vsock.stop().unwrap();
    let saved = guest.vsock.save().unwrap();
    let other = tempfile::tempdir().unwrap();
    let elsewhere = VsockConfig { cid: 77, ..config(&other) };
    guest.vsock = Vsock::restore(elsewhere.clone(), &saved).unwrap();
    let mut cid = [0; 8];
    guest.vsock.config_read(0, &mut cid);
    assert_eq!(u64::from_le_bytes(cid), 5, "the guest keeps its id");
    guest.event.put(RECEIVE, &[0xff; 4]);
    guest.event.push(&[(RECEIVE, 4, true)]).unwrap();
    guest.event.push(&[(RECEIVE + 4, 4, true)]).unwrap();
    guest.activate();
    assert_eq!(guest.event.wait_used().1, 4);
    assert_eq!(guest.event.get(RECEIVE, 4), [0; 4]);
    guest.pause_and_resume();
    std::thread::sleep(Duration::from_millis(20));
    assert!(guest.event.pop_used().is_none(), "told once");
    guest.vsock.stop().unwrap();
    drop(guest);
    for length in 0..saved.state.len() {
        let cut = crate::device::SavedDevice { version: 1, state: saved.state[..length].to_vec() };
        assert!(matches!(Vsock::restore(elsewhere.clone(), &cut), Err(VsockError::Saved { .. })));
    }
}

#[test]
fn buffers_that_can_not_be_used_stop_the_device_with_a_reason() {
    let mut guest = Guest::new();
    guest.activate();
    guest.receive.push(&[(RECEIVE, 44, true)]).unwrap();
    guest.queue(from_guest(1, 2, Op::RW), &[], 1);
    let reason = guest.interrupt.wait_failure().expect("a failure");
    assert_eq!(reason, "Queue 0: a buffer has 44 writable bytes; at least 45 are needed");
    assert_eq!(guest.vsock.stop().unwrap().len(), 3);
}

#[test]
fn malformed_packets_are_dropped_and_their_connection_reset() {
    let mut guest = Guest::new();
    let server = UnixListener::bind(guest.folder.path().join("v_9")).unwrap();
    guest.activate();
    guest.post(16);
    guest.transmit.push(&[(SEND, 43, false)]).unwrap();
    guest.transmit.push(&[(RECEIVE + 0x8_0000, 100, true)]).unwrap();
    guest.transmit.kick();
    guest.transmit.wait_used();
    guest.transmit.wait_used();
    assert_eq!(guest.vsock.inspect()["counters"]["errors"], 2);
    guest.send(from_guest(1, 9, Op::REQUEST), &[], 1);
    assert_eq!(guest.next().0.op, Op::RESPONSE);
    let _program = server.accept().unwrap();
    for claimed in [101, 65_537, u32::MAX] {
        let header = Header { len: claimed, ..from_guest(1, 9, Op::RW) };
        guest.transmit.put(SEND, &header.to_bytes());
        guest.transmit.push(&[(SEND, 144, false)]).unwrap();
        guest.transmit.kick();
        guest.transmit.wait_used();
        assert_eq!(guest.next().0.op, Op::RST);
    }
    assert_eq!(guest.vsock.inspect()["connections"], 0);
    assert_eq!(guest.interrupt.failure(), None);
}

#[test]
fn impossible_context_ids_and_a_socket_in_use_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for cid in [0, 1, 2, u32::MAX] {
        assert!(matches!(Vsock::open(VsockConfig { cid, ..config(&folder) }), Err(VsockError::Cid { .. })));
    }
    let first = Vsock::open(config(&folder)).unwrap();
    assert!(matches!(Vsock::open(config(&folder)), Err(VsockError::Socket { .. })));
    drop(first);
    assert!(!folder.path().join("v").exists());
    Vsock::open(config(&folder)).unwrap();
}
