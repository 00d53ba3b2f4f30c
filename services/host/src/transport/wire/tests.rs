//! Guests whose peers are reached by frames: over a real segment, over a link that loses frames; `frames` are constructed by hand.

mod frames;

use std::sync::Arc;
use std::time::{Duration, Instant};

use dma::{Dma, HeapMemory};
use hca::MrInfo;
use hca::attributes::{Access, QpAttributes, QpKind, QpState};
use hca::names::{Gid, SegmentId};
use hca::work::{Completion, Operation, Sge, Status};
use hca_testbed::{Connected, Guest, World, mac, requests};
use roce::frame::Frame;
use vmxnet3::{Companion, MacAddress, NicHandle, PortRules, SegmentConfig, SegmentThread, Vmxnet3Config};

use super::super::{Transports, WirePort};

/// Size of a guest's RAM, bytes.
const SIZE: u64 = 4 << 20;

struct Side {
    number: u8,
    world: World,
    guest: Guest,
    mr: MrInfo,
    transports: Transports,
    port: Arc<WirePort>,
    end: Box<dyn Companion>,
    started: Instant,
}

impl Side {
    /// A host with one guest, with address 10.0.0.`number`.
    fn new(number: u8) -> Self {
        let mut world = World::after(number - 1);
        let guest = world.guest(HeapMemory::new(usize::try_from(SIZE).unwrap()));
        let mr = world.register(&guest, 0, SIZE, Access::all() - Access::ZERO_BASED);
        let mut transports = Transports::without_directory().unwrap();
        let port = Arc::new(WirePort::default());
        transports.attach(&mut world.engine, guest.device, "vm", "s0", SegmentId(1));
        transports.attach_wire(&mut world.engine, guest.device, SegmentId(1), Arc::clone(&port));
        port.connect(Box::new(|| {}));
        let end = port.end();
        let mut side = Self { number, world, guest, mr, transports, port, end, started: Instant::now() };
        // Its port gets its addresses.
        side.round();
        side
    }

    fn now(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap()
    }

    fn round(&mut self) {
        self.round_at(self.now());
    }

    fn round_at(&mut self, now: u64) {
        self.world.now = self.world.now.max(now);
        self.transports.receive(&mut self.world.engine, now);
        self.world.poll();
        self.transports.carry(&mut self.world.engine, now);
    }

    /// The frames that it sends now.
    fn sent(&mut self) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        let mut frame = Vec::new();
        while self.end.next(&mut frame) {
            frames.push(std::mem::take(&mut frame));
        }
        frames
    }

    /// Delivers a frame. Returns whether it is the RDMA function's.
    fn give(&mut self, frame: &[u8]) -> bool {
        let wants = self.end.wants(&frame[..frame.len().min(256)]);
        if wants {
            self.end.take(frame);
        }
        wants
    }

    fn sge(&self, address: u64, length: u32) -> Sge {
        Sge { address, length, lkey: self.mr.lkey }
    }

    fn bytes(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.guest.memory.read(address, &mut bytes).unwrap();
        bytes
    }

    fn counter(&self, name: &str) -> u64 {
        self.port.counters.values().iter().find(|(own, _)| *own == name).unwrap().1
    }

    /// Attributes to connect a queue pair to one of this side's guest.
    fn towards(&self, qp: &Connected, mtu: u8) -> QpAttributes {
        let mut attributes = World::<HeapMemory>::attributes(self.guest.gid, qp.qp.qpn);
        attributes.path_mtu = mtu;
        attributes.timeout = 14;
        attributes.retry_count = 7;
        attributes.address.dmac = mac(self.number);
        attributes
    }
}

fn connect(left: &mut Side, right: &mut Side, kind: QpKind, mtu: u8) -> (Connected, Connected) {
    let at_left = left.world.queue_pair(&left.guest.clone(), kind, None);
    let at_right = right.world.queue_pair(&right.guest.clone(), kind, None);
    let (to_right, to_left) = (right.towards(&at_right, mtu), left.towards(&at_left, mtu));
    left.world.raise(at_left.device, at_left.qp.handle, kind, QpState::ReadyToSend, &to_right);
    right.world.raise(at_right.device, at_right.qp.handle, kind, QpState::ReadyToSend, &to_left);
    (at_left, at_right)
}

/// Runs both sides until a condition is true, over a link that `pass`es frames.
fn until(
    left: &mut Side,
    right: &mut Side,
    mut pass: impl FnMut(&[u8]) -> bool,
    mut done: impl FnMut(&mut Side, &mut Side) -> bool,
) {
    let start = Instant::now();
    while !done(left, right) {
        assert!(start.elapsed() < Duration::from_secs(60), "nothing came");
        left.round();
        right.round();
        for frame in left.sent().into_iter().filter(|frame| pass(frame)) {
            right.give(&frame);
        }
        for frame in right.sent().into_iter().filter(|frame| pass(frame)) {
            left.give(&frame);
        }
    }
}

/// The next completion of a queue pair of the left side.
fn completion(left: &mut Side, right: &mut Side, qp: &Connected) -> Completion {
    let mut got = None;
    until(
        left,
        right,
        |_| true,
        |_, _| {
            got = got.or_else(|| qp.completions.poll());
            got.is_some()
        },
    );
    got.unwrap()
}

#[test]
fn all_operations_reach_a_guest_of_another_host() {
    for mtu in [1, 3, 5] {
        let (mut left, mut right) = (Side::new(1), Side::new(8));
        let (qp, peer) = connect(&mut left, &mut right, QpKind::Rc, mtu);
        let data: Vec<u8> =
            (0..1_000_003u32).map(|at| at.wrapping_mul(0x9E37_79B9).to_le_bytes()[3]).collect();
        left.guest.memory.write(1, &data).unwrap();
        let (rkey, length) = (right.mr.rkey, 1_000_003);
        assert_eq!(left.transports.reaches(qp.device, right.guest.gid), Some("wire"));

        let request = requests::write(1, 0x20_0000, rkey, &[left.sge(1, length)]);
        left.world.send(&qp, request);
        assert_eq!(completion(&mut left, &mut right, &qp).status, Status::Success);
        assert!(right.bytes(0x20_0000, data.len()) == data, "WRITE");

        let request = requests::read(2, 0x20_0000, rkey, &[left.sge(0x10_0000, length)]);
        left.world.send(&qp, request);
        let done = completion(&mut left, &mut right, &qp);
        assert_eq!((done.status, done.byte_len), (Status::Success, length));
        assert!(left.bytes(0x10_0000, data.len()) == data, "READ");

        let buffer = right.sge(0x30_0000, length);
        right.world.receive(&peer, 3, &[buffer]);
        let request = requests::send(4, &[left.sge(1, length)]);
        left.world.send(&qp, request);
        assert_eq!(completion(&mut left, &mut right, &qp).status, Status::Success);
        assert!(right.bytes(0x30_0000, data.len()) == data, "SEND");
        let done = peer.completions.poll().unwrap();
        assert_eq!((done.wr_id, done.byte_len), (3, length));

        right.guest.memory.write(0x8, &40u64.to_le_bytes()).unwrap();
        for wr_id in 10..20 {
            let request = requests::fetch_add(wr_id, 0x8, rkey, 2, &[left.sge(0x3F_0000, 8)]);
            left.world.send(&qp, request);
            assert_eq!(completion(&mut left, &mut right, &qp).status, Status::Success);
        }
        assert_eq!(right.bytes(8, 8), 60u64.to_le_bytes());
        let report = left.transports.report(qp.device, qp.qp.qpn).unwrap();
        assert_eq!((report.transport, report.host), ("wire", None));
        for side in [&left, &right] {
            for name in ["icrc_errors", "malformed", "no_queue_pair", "wrong_peer", "send_drops"] {
                assert_eq!(side.counter(name), 0, "{name}");
            }
        }
    }
}

#[test]
fn lost_frames_are_sent_again() {
    let (mut left, mut right) = (Side::new(1), Side::new(8));
    let (qp, _) = connect(&mut left, &mut right, QpKind::Rc, 3);
    let data: Vec<u8> = (0..500_000u32).map(|at| at.wrapping_mul(0x9E37_79B9).to_le_bytes()[3]).collect();
    left.guest.memory.write(0, &data).unwrap();
    let rkey = right.mr.rkey;
    left.world.send(&qp, requests::write(1, 0x20_0000, rkey, &[left.sge(0, 500_000)]));
    left.world.send(&qp, requests::read(2, 0x20_0000, rkey, &[left.sge(0x10_0000, 500_000)]));
    let (mut count, mut dropped, mut done) = (0_u32, 0, 0);
    let lossy = |_: &[u8]| {
        count += 1;
        dropped += u32::from(count.is_multiple_of(37));
        !count.is_multiple_of(37)
    };
    until(&mut left, &mut right, lossy, |_, _| {
        while let Some(completion) = qp.completions.poll() {
            assert_eq!(completion.status, Status::Success);
            done += 1;
        }
        done == 2
    });
    assert!(dropped > 20, "{dropped}");
    assert!(right.bytes(0x20_0000, data.len()) == data && left.bytes(0x10_0000, data.len()) == data);
}

#[test]
fn sends_arrive_whole_and_in_order_over_a_link_that_loses_frames() {
    let (mut left, mut right) = (Side::new(1), Side::new(8));
    // Two queue pairs at once, messages of 64 packets.
    let pairs = [0, 1].map(|_| connect(&mut left, &mut right, QpKind::Rc, 3));
    let count: u32 = 24;
    for (qp, peer) in &pairs {
        for number in 0..count {
            let buffer = right.sge(0x10_0000, 65_536);
            right.world.receive(peer, u64::from(number), &[buffer]);
            let request = requests::send(u64::from(number), &[left.sge(0, 65_536)]);
            left.world.send(qp, request);
        }
    }
    let (mut frames, mut sent, mut received) = (0_u32, 0, [0, 0]);
    let lossy = |_: &[u8]| {
        frames += 1;
        !frames.wrapping_mul(0x9E37_79B9).is_multiple_of(41)
    };
    until(&mut left, &mut right, lossy, |_, _| {
        for ((qp, peer), received) in pairs.iter().zip(&mut received) {
            while let Some(done) = qp.completions.poll() {
                assert_eq!(done.status, Status::Success);
                sent += 1;
            }
            while let Some(done) = peer.completions.poll() {
                assert_eq!((done.status, done.byte_len, done.wr_id), (Status::Success, 65_536, *received));
                *received += 1;
            }
        }
        sent == 2 * count && received == [u64::from(count); 2]
    });
}

/// Interrupts without a listener.
struct Silent;

impl vmxnet3::Interrupts for Silent {
    fn raise(&self, _: u16) {}
}

#[test]
fn frames_cross_a_segment_between_two_nics() {
    let segment: SegmentThread<HeapMemory> = SegmentThread::start(SegmentConfig::new("test")).unwrap();
    let (mut left, mut right) = (Side::new(1), Side::new(8));
    let attach = |side: &Side| -> NicHandle<HeapMemory> {
        let config = Vmxnet3Config {
            name: format!("nic{}", side.number),
            mac: MacAddress(mac(side.number)),
            link_mbps: 10_000,
        };
        let nic = segment.attach(config, PortRules::default(), Box::new(Silent)).unwrap();
        nic.set_companion(Some(side.port.end()));
        side.port.connect(nic.waker());
        nic
    };
    let nics = [attach(&left), attach(&right)];
    let (qp, peer) = connect(&mut left, &mut right, QpKind::Rc, 5);
    let rkey = right.mr.rkey;
    for wr_id in 0..64 {
        left.world.send(&qp, requests::write(wr_id, 0x10_0000, rkey, &[left.sge(0, 60_000)]));
        right
            .world
            .send(&peer, requests::read(wr_id, 0x20_0000, left.mr.rkey, &[right.sge(0x20_0000, 60_000)]));
    }
    let (mut done, start) = (0, Instant::now());
    while done < 128 {
        assert!(start.elapsed() < Duration::from_secs(60), "{done} completed");
        left.round();
        right.round();
        for completions in [&qp.completions, &peer.completions] {
            while let Some(completion) = completions.poll() {
                assert_eq!(completion.status, Status::Success);
                done += 1;
            }
        }
    }
    // Each side sends 64 messages of 15 packets: WRITEs, and responses to READs.
    for (from, to) in [(&left, &right), (&right, &left)] {
        assert!(to.counter("packets_received") > 0 && from.counter("packets_sent") >= 64);
        assert_eq!(from.counter("send_drops"), 0);
    }
    assert!(left.counter("packets_sent") >= 2 * 64 * 15 && right.counter("packets_received") >= 2 * 64 * 15);
    let sent = nics[0].counters().value("tx_packets").unwrap();
    assert!(sent > 0 && sent <= left.counter("packets_sent"));
    drop(nics);
}

#[test]
fn datagrams_have_their_frame_s_header() {
    let (mut left, mut right) = (Side::new(1), Side::new(8));
    // Both address families: a second address of each guest.
    let v6 = |number: u16| Gid(std::net::Ipv6Addr::new(0xFD00, 0, 0, 0, 0, 0, 0, number).octets());
    for (side, number) in [(&mut left, 1_u8), (&mut right, 8)] {
        side.world.engine.bind_gid(side.guest.device, 1, v6(number.into()), mac(number)).unwrap();
        side.round();
    }
    let qp = left.world.queue_pair(&left.guest.clone(), QpKind::Ud, None);
    let peer = right.world.queue_pair(&right.guest.clone(), QpKind::Ud, None);
    let to_peer = right.towards(&peer, 5);
    left.world.raise(qp.device, qp.qp.handle, QpKind::Ud, QpState::ReadyToSend, &to_peer);
    right.world.raise(peer.device, peer.qp.handle, QpKind::Ud, QpState::ReadyToSend, &to_peer);
    left.guest.memory.write(0, &[0x5A; 4096]).unwrap();
    for (index, length, immediate) in
        [(0, 4096, None), (1, 4096, Some([1, 2, 3, 4])), (0, 5, None), (1, 0, None)]
    {
        let buffer = right.sge(0x1000, 4096 + 40);
        right.world.receive(&peer, 1, &[buffer]);
        let gid = if index == 0 { right.guest.gid } else { v6(8) };
        let mut request =
            requests::datagram(2, left.guest.pd.0, gid, peer.qp.qpn, 0x1234, &[left.sge(0, length)]);
        let Operation::Send { datagram: Some(to), immediate: with, .. } = &mut request.operation else {
            panic!()
        };
        (to.dmac, to.sgid_index, to.traffic_class, to.flow_label, to.hop_limit) =
            (mac(8), index, 0xB9, 0x7_1234, 9);
        *with = immediate;
        left.world.send(&qp, request);
        left.round();
        let frames = left.sent();
        let [frame] = frames.as_slice() else { panic!("{} frames", frames.len()) };
        let parsed = Frame::parse(frame).unwrap();
        // The guest's traffic class, without the ECN bits: datagrams have no congestion control.
        assert_eq!((parsed.addresses.traffic_class, parsed.addresses.hop_limit), (0xB8, 9));
        assert_eq!((parsed.addresses.source_mac, parsed.addresses.destination_mac), (mac(1), mac(8)));
        assert!(right.give(frame));
        right.round();
        let done = peer.completions.poll().unwrap();
        assert_eq!((done.byte_len, done.source, done.immediate), (length + 40, Some(qp.qp.qpn), immediate));
        assert_eq!(right.bytes(0x1000, 40), parsed.receive_header());
        let ip = if index == 0 { &frame[14..34] } else { &frame[14..54] };
        assert_eq!(right.bytes(0x1000 + 40 - ip.len() as u64, ip.len()), ip, "as on the link");
        assert_eq!(right.bytes(0x1000 + 40, length as usize), vec![0x5A; length as usize]);
    }
    // Without a receive, with a wrong Q_Key: dropped.
    let mut request = requests::datagram(2, left.guest.pd.0, right.guest.gid, peer.qp.qpn, 0x1235, &[]);
    let Operation::Send { datagram: Some(to), .. } = &mut request.operation else { panic!() };
    to.dmac = mac(8);
    left.world.send(&qp, request);
    left.round();
    for frame in left.sent() {
        assert!(right.give(&frame));
    }
    right.round();
    assert_eq!(right.counter("no_queue_pair"), 1);
    // Without a MAC there is no destination.
    let request = requests::datagram(2, left.guest.pd.0, right.guest.gid, peer.qp.qpn, 0x1234, &[]);
    left.world.send(&qp, request);
    left.round();
    assert_eq!((left.sent().len(), left.counter("send_drops")), (0, 1));
}
