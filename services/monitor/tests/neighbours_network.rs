//! Virtio network devices of several VMs with a real registry: frames travel from guest memory to guest memory. Mock drivers play the
//! guests. KVM isn't needed.
#![allow(clippy::unwrap_used)] // Helpers of tests, which clippy does not take for tests.

mod common;

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use common::{HANG_LIMIT, patient, registry, wait_until};
use host::neighbours::NeighboursConfig;
use machine::memory::{Bytes, GuestAddress, GuestAddressSpace, GuestRam, RamLayout, RamOptions, Readers};
use machine::slots::HostMapping;
use monitor::description::{Neighbour, NeighbourPeer};
use monitor::neighbour::{OpenedNeighbour, OpenedNetwork, RunningNetwork};
use neighbour::channel::{Part, Sender};
use neighbour::heartbeat::Heartbeat;
use neighbour::layout::{Layout, Side};
use neighbour::window::{Geometry, Window};
use neighbour::words::Words;
use neighbour_protocol::{FromDaemon, FromMonitor, Permitted, Piece, Socket};
use rustix::event::EventfdFlags;
use virtio_devices::device::VirtioDevice;
use virtio_devices::net::header::{
    DATA_VALID, FEATURE_CSUM, FEATURE_GUEST_CSUM, HEADER_LEN, NEEDS_CSUM, VnetHeader,
};
use virtio_devices::net::{MacAddress, Net};
use virtio_devices_testbed::{self as testbed, MockDriver, MockInterrupt};

const RAM: u64 = 32 << 20;
/// Start of frames to send, and of buffers to receive.
const SENT: u64 = 8 << 20;
const RECEIVED: u64 = 16 << 20;
const HEADER: u64 = HEADER_LEN as u64;
/// Feature bit `VIRTIO_NET_F_MRG_RXBUF`.
const MERGEABLE: u64 = 1 << 15;
const EVERYBODY: [u8; 6] = [0xff; 6];

struct Guest {
    net: Net,
    membership: Option<RunningNetwork>,
    receive: MockDriver,
    transmit: MockDriver,
    mac: [u8; 6],
    posted: u64,
    _ram: GuestRam,
}

impl Guest {
    fn start(directory: &Path, name: &str, permits: &[&str], features: u64) -> Self {
        let permit = permits.iter().map(|vm| NeighbourPeer { vm: (*vm).to_owned(), uid: None }).collect();
        let wish = Neighbour { group: "lan".to_owned(), permit, host: directory.join("host.sock") };
        let opened = OpenedNeighbour::open(name, &wish).unwrap();
        let mac = [2, 0, 0, 0, 0, name.as_bytes()[0]];
        let (network, mut net) =
            OpenedNetwork::new(opened, "net0".to_owned(), MacAddress(mac), None).unwrap();
        let options =
            RamOptions { name: name.to_owned(), readers: Readers::Anybody, ..RamOptions::default() };
        let ram = GuestRam::allocate(&RamLayout::new(&[RAM]).unwrap(), &options).unwrap();
        let space = ram.memory();
        let features = testbed::RINGS | features;
        let receive = MockDriver::new(&space, 0, 256, 0x1000, features);
        let transmit = MockDriver::new(&space, 1, 256, 0x1000 + MockDriver::ring_bytes(256), features);
        let interrupt = MockInterrupt::new();
        net.activate(testbed::activation(&space, features, &[&receive, &transmit], &interrupt)).unwrap();
        let membership = Some(network.join(&ram, Arc::new(|| {})).unwrap());
        Self { net, membership, receive, transmit, mac, posted: 0, _ram: ram }
    }

    fn backend(&self) -> String {
        self.net.inspect()["backend"].as_str().unwrap().to_owned()
    }

    fn wait_for(&self, others: &str) {
        wait_until(&format!("connected with {others}"), || self.backend().contains(&format!("({others})")));
    }

    fn counter(&self, name: &str) -> u64 {
        self.net.inspect()["counters"][name].as_u64().unwrap()
    }

    /// A frame to `to` of `length` bytes, whose content depends on `number`.
    fn frame(&self, to: [u8; 6], length: usize, number: usize) -> Vec<u8> {
        let mut frame: Vec<u8> = to.into_iter().chain(self.mac).chain([0x88, 0xb5]).collect();
        frame.extend((14..length).map(|at| (at * 31 + number * 7).to_le_bytes()[0]));
        frame
    }

    /// Makes a frame available, in two pieces and with a separate header, and notifies the device.
    fn queue(&mut self, at: u64, header: VnetHeader, frame: &[u8]) -> u16 {
        self.transmit.put(at, &header.to_bytes());
        self.transmit.put(at + HEADER, frame);
        let (first, rest) = (20_u32, u32::try_from(frame.len()).unwrap() - 20);
        let chain =
            [(at, 12, false), (at + HEADER, first, false), (at + HEADER + u64::from(first), rest, false)];
        let head = self.transmit.push(&chain).unwrap();
        self.transmit.kick();
        head
    }

    fn post(&mut self, count: u64, length: u32) {
        for _ in 0..count {
            let at = RECEIVED + self.posted * u64::from(length);
            self.receive.push(&[(at, length, true)]).unwrap();
            self.posted += 1;
        }
        self.receive.kick();
    }

    /// The next frame, from buffers of `length` bytes of which `number` were used before.
    fn take(&mut self, length: u32, number: &mut u64) -> (VnetHeader, Vec<u8>) {
        let mut bytes = Vec::new();
        let mut header = VnetHeader::default();
        let mut left = 1;
        while left > 0 {
            let (_, written) = self.receive.wait_used();
            let part =
                self.receive.get(RECEIVED + *number * u64::from(length), usize::try_from(written).unwrap());
            *number += 1;
            if bytes.is_empty() && header == VnetHeader::default() {
                header = VnetHeader::parse(part[..HEADER_LEN].try_into().unwrap());
                left = header.num_buffers;
                bytes.extend_from_slice(&part[HEADER_LEN..]);
            } else {
                bytes.extend_from_slice(&part);
            }
            left -= 1;
        }
        (header, bytes)
    }
}

/// Frames of all lengths arrive complete and in order, in several receive buffers or in one. The switch learns addresses, and then sends
/// frames to their receiver only. A member without permission gets nothing.
#[test]
fn frames_go_from_vm_to_vm() {
    let directory = tempfile::tempdir().unwrap();
    let _registry = registry(directory.path(), patient());
    let mut a = Guest::start(directory.path(), "a", &["b", "c"], FEATURE_GUEST_CSUM | MERGEABLE);
    let mut b = Guest::start(directory.path(), "b", &["a", "c"], FEATURE_GUEST_CSUM | MERGEABLE);
    let c = Guest::start(directory.path(), "c", &["a", "b"], FEATURE_GUEST_CSUM | MERGEABLE);
    let d = Guest::start(directory.path(), "d", &["a", "b", "c"], FEATURE_GUEST_CSUM | MERGEABLE);
    for guest in [&a, &b, &c] {
        let others: Vec<&str> =
            ["a", "b", "c"].into_iter().filter(|name| name.as_bytes()[0] != guest.mac[5]).collect();
        guest.wait_for(&others.join(", "));
    }
    let (mut of_a, mut of_b) = (0, 0);
    a.post(64, 2048);
    b.post(200, 2048);

    // Frames to b go to all members until its address is learned. c has no buffers, so a's return only from b.
    let hello = b.frame(EVERYBODY, 60, 0);
    b.queue(SENT, VnetHeader::default(), &hello);
    assert_eq!(a.take(2048, &mut of_a).1, hello);
    for (number, length) in [60, 61, 1514, 2036, 2037, 9000, 65_534].into_iter().enumerate() {
        let frame = a.frame(b.mac, length, number);
        a.queue(SENT, VnetHeader::default(), &frame);
        let (header, bytes) = b.take(2048, &mut of_b);
        assert!(bytes == frame, "{length} bytes differ");
        assert_eq!(usize::from(header.num_buffers), (length + HEADER_LEN).div_ceil(2048));
        a.transmit.wait_used();
    }
    assert_eq!(a.counter("transmit_packets"), 7);
    assert_eq!(b.counter("receive_packets"), 7);
    assert_eq!((c.counter("receive_packets"), d.counter("receive_packets")), (0, 0));
    assert!(d.backend().contains("(nobody connected)"), "{}", d.backend());
}

/// The sender's buffers are read when the receiver has buffers, and not copied before: later stores of the sender's guest arrive, too. The
/// buffers are the guest's again only after that.
#[test]
fn there_is_one_copy_and_the_receiver_makes_it() {
    let directory = tempfile::tempdir().unwrap();
    let _registry = registry(directory.path(), patient());
    let mut a = Guest::start(directory.path(), "a", &["b"], FEATURE_GUEST_CSUM | MERGEABLE);
    let mut b = Guest::start(directory.path(), "b", &["a"], FEATURE_GUEST_CSUM | MERGEABLE);
    a.wait_for("b");
    b.wait_for("a");
    let before = a.frame(b.mac, 4000, 1);
    a.queue(SENT, VnetHeader::default(), &before);
    wait_until("the frame is lent", || a.counter("transmit_packets") == 1);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(a.transmit.pop_used(), None, "still the receiver's to read");
    let after = a.frame(b.mac, 4000, 2);
    a.transmit.put(SENT + HEADER, &after);
    b.post(2, 4096);
    assert!(b.take(4096, &mut 0).1 == after, "the frame was copied before");
    a.transmit.wait_used();
}

/// The monitor computes an open checksum for a guest that didn't negotiate open ones, and leaves it open for one that did.
#[test]
fn open_checksums_are_made_for_guests_that_want_them_made() {
    let directory = tempfile::tempdir().unwrap();
    let _registry = registry(directory.path(), patient());
    let mut a = Guest::start(directory.path(), "a", &["b", "c"], FEATURE_CSUM | MERGEABLE);
    let mut b = Guest::start(directory.path(), "b", &["a"], FEATURE_GUEST_CSUM | MERGEABLE);
    let mut c = Guest::start(directory.path(), "c", &["a"], MERGEABLE);
    a.wait_for("b, c");
    b.wait_for("a");
    c.wait_for("a");
    b.post(2, 1000);
    c.post(2, 1000);
    // The checksum's field has the pseudo-header's sum. The length is odd, so that the last byte counts as a high one.
    let mut frame = a.frame(EVERYBODY, 333, 5);
    frame[40..42].copy_from_slice(&0x1234_u16.to_be_bytes());
    let header = VnetHeader { flags: NEEDS_CSUM, csum_start: 34, csum_offset: 6, ..VnetHeader::default() };
    a.queue(SENT, header, &frame);
    let (open, bytes) = b.take(1000, &mut 0);
    assert_eq!((open.flags, open.csum_start, open.csum_offset), (NEEDS_CSUM, 34, 6));
    assert_eq!(bytes, frame);
    let (made, bytes) = c.take(1000, &mut 0);
    assert_eq!(made.flags, 0);
    // With a correct checksum, the sum of all words is all ones, with the old field in place of the pseudo-header.
    let sum = |bytes: &[u8]| {
        let words =
            bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
        let sum = words.sum::<u32>();
        let sum = (sum & 0xffff) + (sum >> 16);
        (sum & 0xffff) + (sum >> 16)
    };
    assert_ne!(bytes[40..42], frame[40..42]);
    assert_eq!(
        sum(&bytes[34..]) + 0x1234,
        if sum(&bytes[34..]) + 0x1234 > 0xffff { 0x1_fffe } else { 0xffff }
    );
    assert_eq!((&bytes[..40], &bytes[42..]), (&frame[..40], &frame[42..]));
}

/// A receiver without buffers keeps only a share of the sender's. Others still get their frames, and frames for the slow one are dropped
/// without a wait.
#[test]
fn a_receiver_without_buffers_delays_no_other_peer() {
    let directory = tempfile::tempdir().unwrap();
    let _registry = registry(directory.path(), patient());
    let mut a = Guest::start(directory.path(), "a", &["b", "c"], FEATURE_GUEST_CSUM | MERGEABLE);
    let mut b = Guest::start(directory.path(), "b", &["a"], FEATURE_GUEST_CSUM | MERGEABLE);
    let mut c = Guest::start(directory.path(), "c", &["a"], FEATURE_GUEST_CSUM | MERGEABLE);
    a.wait_for("b, c");
    b.wait_for("a");
    c.wait_for("a");
    a.post(4, 2048);
    let mut of_a = 0;
    for other in [&mut b, &mut c] {
        let hello = other.frame(EVERYBODY, 60, 0);
        other.queue(SENT, VnetHeader::default(), &hello);
        assert_eq!(a.take(2048, &mut of_a).1, hello);
    }
    let mut held = 0;
    let deadline = Instant::now() + HANG_LIMIT;
    while a.counter("transmit_drop") < 20 {
        assert!(Instant::now() < deadline, "frames for a receiver without buffers are waited for");
        let frame = a.frame(b.mac, 100, 0);
        if held < 80 {
            // Leaves descriptors for other frames.
            a.queue(SENT + 4096 * held, VnetHeader::default(), &frame);
            held += 1;
        }
        if a.transmit.pop_used().is_some() {
            held -= 1;
        }
    }
    c.post(1, 2048);
    let frame = a.frame(c.mac, 1000, 3);
    a.queue(SENT + 4096 * 100, VnetHeader::default(), &frame);
    assert!(c.take(2048, &mut 0).1 == frame);
}

/// When a peer leaves, by its monitor's end or by the registry, frames that it was reading are the guest's again. It can return.
#[test]
fn a_peer_that_leaves_returns_all_frames_and_may_reconnect() {
    let directory = tempfile::tempdir().unwrap();
    let _registry = registry(directory.path(), patient());
    let mut a = Guest::start(directory.path(), "a", &["b"], FEATURE_GUEST_CSUM | MERGEABLE);
    let b = Guest::start(directory.path(), "b", &["a"], FEATURE_GUEST_CSUM | MERGEABLE);
    a.wait_for("b");
    b.wait_for("a");
    for number in 0..10 {
        let frame = a.frame(EVERYBODY, 500, 0);
        a.queue(SENT + 4096 * number, VnetHeader::default(), &frame);
    }
    wait_until("the frames are lent", || a.counter("transmit_packets") == 10);
    assert_eq!(a.transmit.pop_used(), None);
    drop(b);
    for _ in 0..10 {
        a.transmit.wait_used();
    }
    a.wait_for("nobody connected");
    let mut b = Guest::start(directory.path(), "b", &["a"], FEATURE_GUEST_CSUM | MERGEABLE);
    a.wait_for("b");
    b.wait_for("a");
    b.post(1, 2048);
    let frame = a.frame(EVERYBODY, 700, 9);
    a.queue(SENT, VnetHeader::default(), &frame);
    assert!(b.take(2048, &mut 0).1 == frame);
}

/// A device that stops doesn't wait for a peer without buffers. The connection with it ends, all frames are the guest's, and frames after
/// the next start arrive.
#[test]
fn a_stopping_device_reclaims_lent_frames() {
    let directory = tempfile::tempdir().unwrap();
    let _registry = registry(directory.path(), Heartbeat::DEFAULT);
    let mut a = Guest::start(directory.path(), "a", &["b"], FEATURE_GUEST_CSUM | MERGEABLE);
    let mut b = Guest::start(directory.path(), "b", &["a"], FEATURE_GUEST_CSUM | MERGEABLE);
    a.wait_for("b");
    b.wait_for("a");
    let old = a.frame(b.mac, 500, 1);
    a.queue(SENT, VnetHeader::default(), &old);
    wait_until("the frame is lent", || a.counter("transmit_packets") == 1);
    let queues = a.net.stop().unwrap();
    a.transmit.wait_used();
    // The registry reports to the peer that no driver uses the device.
    b.wait_for("nobody connected");
    let activation = virtio_devices::device::Activation {
        memory: a.transmit.space.clone(),
        features: testbed::RINGS | FEATURE_GUEST_CSUM | MERGEABLE,
        queues,
        interrupt: MockInterrupt::new(),
    };
    a.net.activate(activation).unwrap();
    a.wait_for("b");
    b.wait_for("a");
    b.post(1, 2048);
    let new = a.frame(b.mac, 500, 2);
    a.queue(SENT, VnetHeader::default(), &new);
    assert!(b.take(2048, &mut 0).1 == new, "a frame of before the stop");
    drop(a.membership.take());
    b.wait_for("nobody connected");
}

/// A member that the test plays itself.
struct Hand {
    _socket: Socket,
    segment: Arc<HostMapping>,
    signal: OwnedFd,
    layout: Layout,
    epoch: u32,
    side: Side,
    own: Window,
    ram: GuestRam,
    _signals: Vec<OwnedFd>,
}

impl Hand {
    /// Joins as `name`, and connects to `peer`.
    fn join(directory: &Path, name: &str, peer: &str) -> Self {
        let socket = Socket::connect(&directory.join("host.d/neighbours")).unwrap();
        let (FromDaemon::Hello { base, stride, slots, entries, .. }, _) = socket.wait(HANG_LIMIT).unwrap()
        else {
            panic!("hello comes first")
        };
        let options =
            RamOptions { name: name.to_owned(), readers: Readers::Anybody, ..RamOptions::default() };
        let ram = GuestRam::allocate(&RamLayout::new(&[RAM]).unwrap(), &options).unwrap();
        let signals: Vec<OwnedFd> =
            (0..slots).map(|_| rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap()).collect();
        let join = FromMonitor::Join {
            vm: name.to_owned(),
            group: "lan".to_owned(),
            permits: vec![Permitted { vm: peer.to_owned(), uid: None }],
            ram: vec![Piece { address: 0, size: RAM, file: 0, offset: 0 }],
            slot: None,
            epoch: 0,
        };
        let file = ram.regions()[0].read_only.as_ref().unwrap();
        let fds: Vec<_> = std::iter::once(file.as_fd()).chain(signals.iter().map(AsFd::as_fd)).collect();
        socket.send(&join, &fds).unwrap();
        let (FromDaemon::Joined { slot: own }, _) = socket.wait(HANG_LIMIT).unwrap() else {
            panic!("refused")
        };
        let (FromDaemon::Connect { slot, epoch, .. }, mut fds) = socket.wait(HANG_LIMIT).unwrap() else {
            panic!("not connected")
        };
        let (signal, segment) = (fds.pop().unwrap(), fds.pop().unwrap());
        let layout = Layout::new(entries).unwrap();
        let segment = HostMapping::new("segment", segment.as_fd(), 0, layout.size() as u64, true).unwrap();
        let side = Side::of(own, slot).unwrap();
        let own = Geometry::new(base, stride, slots).unwrap().window(own, &[(0, RAM)]).unwrap();
        let hand =
            Self { _socket: socket, segment, signal, layout, epoch, side, own, ram, _signals: signals };
        hand.words().store_release(Layout::ready(side), u64::from(epoch));
        hand
    }

    #[allow(unsafe_code)] // The segment as atomic words.
    fn words(&self) -> &[AtomicU64] {
        let count = usize::try_from(self.segment.len()).unwrap() / 8;
        // SAFETY: mapped as long as `self`, page-aligned, and used as atomic words by both sides.
        unsafe { std::slice::from_raw_parts(self.segment.as_ptr().cast(), count) }
    }

    fn sender(&self) -> Sender<Vec<u32>> {
        let ids = vec![0; self.layout.entries() as usize];
        Sender::new(self.words(), &self.layout, self.epoch, self.side, self.own, ids).unwrap()
    }

    fn signal(&self) {
        rustix::io::write(&self.signal, &1_u64.to_ne_bytes()).unwrap();
    }
}

/// A guest verifies a frame's checksum unless the message says that the sender has, and the guest negotiated such frames.
#[test]
fn only_verified_checksums_are_reported_as_valid() {
    let directory = tempfile::tempdir().unwrap();
    let _registry = registry(directory.path(), patient());
    for (name, features, verified) in [("a", FEATURE_GUEST_CSUM | MERGEABLE, DATA_VALID), ("b", MERGEABLE, 0)]
    {
        let hand_name = format!("hand-of-{name}");
        let mut guest = Guest::start(directory.path(), name, &[&hand_name], features);
        guest.post(2, 2048);
        let hand = Hand::join(directory.path(), &hand_name, name);
        guest.wait_for(&hand_name);
        let mut sender = hand.sender();
        let mut taken = 0;
        for (kind, flags) in [(0x0100, 0), (0x0102, verified)] {
            let part = Part { address: hand.own.start(), length: 60 };
            sender.post(hand.words(), &[part], kind, 0).unwrap();
            hand.signal();
            assert_eq!(guest.take(2048, &mut taken).0.flags, flags, "{kind:#x} to {name}");
        }
    }
}

/// A frame in a third member's memory, which only mmnet's guests can read, returns to its sender, which sends a copy. The connection stays,
/// since the sender may name that memory.
#[test]
fn a_frame_in_a_third_members_memory_is_refused_and_ends_no_connection() {
    let directory = tempfile::tempdir().unwrap();
    let _registry = registry(directory.path(), patient());
    let mut a = Guest::start(directory.path(), "a", &["x"], FEATURE_GUEST_CSUM | MERGEABLE);
    a.post(2, 2048);
    let hand = Hand::join(directory.path(), "x", "a");
    a.wait_for("x");
    let third = NeighboursConfig::default().geometry.window(9, &[(0, RAM)]).unwrap();
    let ids = vec![0; hand.layout.entries() as usize];
    let mut sender = Sender::new(hand.words(), &hand.layout, hand.epoch, hand.side, third, ids).unwrap();
    for _ in 0..2 {
        let part = Part { address: third.start(), length: 60 };
        let id = sender.post(hand.words(), &[part], 0x0100, 0).unwrap();
        hand.signal();
        let mut got = None;
        wait_until("an answer", || {
            got = sender.completion(hand.words()).unwrap();
            got.is_some()
        });
        assert_eq!(got.map(|got| (got.id, got.status)), Some((id, 0xffff_0003)));
    }
    assert_eq!(a.counter("receive_packets"), 0);
}

/// An invalid frame returns with a status and reaches no guest. A message that violates the ring's rules ends the connection with its
/// sender. Other members notice neither.
#[test]
fn a_protocol_violation_reaches_no_guest_and_affects_no_other_peer() {
    let directory = tempfile::tempdir().unwrap();
    let _registry = registry(directory.path(), patient());
    let mut a = Guest::start(directory.path(), "a", &["b", "x"], FEATURE_GUEST_CSUM | MERGEABLE);
    let mut b = Guest::start(directory.path(), "b", &["a"], FEATURE_GUEST_CSUM | MERGEABLE);
    a.post(16, 2048);
    let mut of_a = 0;
    let hand = Hand::join(directory.path(), "x", "a");
    a.wait_for("b, x");
    b.wait_for("a");
    let mut sender = hand.sender();
    let at = |address: u64, length: u32| Part { address: hand.own.start() + address, length };
    let long: Vec<Part> = (0..3).map(|part| at(part * 0x1_0000, 0x1_0000)).collect();
    // Kind, note, parts, and the expected status.
    let cases: [(u16, u32, Vec<Part>, u32); 6] = [
        (0x0100, 0, vec![at(0, 13)], 0xffff_0004),
        (0x0100, 0, long, 0xffff_0004),
        (0x0101, 60 << 16, vec![at(0, 60)], 0xffff_0004),
        (0x0101, u32::MAX, vec![at(0, 60)], 0xffff_0004),
        (0x0200, 0, vec![at(0, 60)], 0xffff_0002),
        (0x0100, 0, vec![at(0x1000, 14), at(RAM - 100, 100)], 0),
    ];
    let good: Vec<u8> = (0..114).collect();
    hand.ram.memory().memory().write_slice(&good[..14], GuestAddress(0x1000)).unwrap();
    hand.ram.memory().memory().write_slice(&good[14..], GuestAddress(RAM - 100)).unwrap();
    for (kind, note, parts, answer) in cases {
        let id = sender.post(hand.words(), &parts, kind, note).unwrap();
        hand.signal();
        let mut got = None;
        wait_until("an answer", || {
            got = sender.completion(hand.words()).unwrap();
            got.is_some()
        });
        assert_eq!(got.map(|got| (got.id, got.status)), Some((id, answer)), "{kind:#x} {note:#x}");
    }
    assert_eq!(a.take(2048, &mut of_a).1, good);
    assert_eq!(a.counter("receive_packets"), 1);

    // Far more messages than one call processes, with one signal for all.
    for _ in 0..200 {
        sender.post(hand.words(), &[at(0, 60)], 0x0300, 0).unwrap();
    }
    hand.signal();
    wait_until("all are refused", || {
        while let Some(got) = sender.completion(hand.words()).unwrap() {
            assert_eq!(got.status, 0xffff_0002);
        }
        sender.outstanding() == 0
    });

    // 209 entries were used. Part of this message is beyond the sender's RAM, which the sender's own check would refuse.
    let used = 209;
    let place = usize::try_from(used % u64::from(hand.layout.entries())).unwrap();
    let first = hand.layout.messages(hand.side).first + 4 * place;
    let entry = [hand.own.start() + RAM - 10, 0x0100 << 48 | 60, 0];
    for (word, value) in (first..).zip(entry) {
        hand.words().store(word, value);
    }
    hand.words().store_release(first + 3, u64::from(hand.epoch) << 32 | (used + 1));
    hand.signal();
    wait_until("its end", || a.backend().contains("1 connections ended for broken rules"));
    a.wait_for("b");
    let frame = b.frame(EVERYBODY, 900, 4);
    b.queue(SENT, VnetHeader::default(), &frame);
    assert!(a.take(2048, &mut of_a).1 == frame);
    assert_eq!(a.counter("receive_packets"), 2);
}
