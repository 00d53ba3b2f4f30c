//! Two engines whose guests reach each other through UDP sockets of the loopback interface.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dma::{Dma, HeapMemory};
use hca::MrInfo;
use hca::attributes::{Access, QpAttributeMask as Mask, QpAttributes, QpKind, QpState};
use hca::names::{DeviceId, Gid, SegmentId};
use hca::work::{Sge, Status};
use hca_testbed::{Connected, Guest, World, requests};

use super::header::Header;
use super::{ClusterKey, FileDirectory, Transports, VmId};

/// Size of a guest's RAM, bytes.
const SIZE: u64 = 4 << 20;

struct Side {
    world: World,
    guest: Guest,
    qp: Connected,
    mr: MrInfo,
    transports: Transports,
    started: Instant,
}

impl Side {
    fn new(
        (number, vm): (u8, &str),
        kind: QpKind,
        directory: &Arc<FileDirectory>,
        address: SocketAddr,
        key: Option<&ClusterKey>,
    ) -> Self {
        let mut world = World::after(number);
        let guest = world.guest(HeapMemory::new(usize::try_from(SIZE).unwrap()));
        let mr = world.register(&guest, 0, SIZE, Access::all() - Access::ZERO_BASED);
        let qp = world.queue_pair(&guest, kind, None);
        let directory: Arc<dyn super::Directory> = Arc::clone(directory) as _;
        let mut transports = Transports::open(directory, address, key).unwrap();
        transports.attach(&mut world.engine, guest.device, vm, "s0", SegmentId(1));
        Self { world, guest, qp, mr, transports, started: Instant::now() }
    }

    fn round(&mut self) {
        self.round_at(u64::try_from(self.started.elapsed().as_nanos()).unwrap());
    }

    fn round_at(&mut self, now: u64) {
        self.world.now = self.world.now.max(now);
        self.transports.receive(&mut self.world.engine, now);
        self.world.poll();
        self.transports.carry(&mut self.world.engine, now);
    }

    fn sge(&self, address: u64, length: u32) -> Sge {
        Sge { address, length, lkey: self.mr.lkey }
    }

    fn bytes(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.guest.memory.read(address, &mut bytes).unwrap();
        bytes
    }
}

/// Plain and encrypted packets.
fn ways() -> [Option<ClusterKey>; 2] {
    [None, Some(key(1))]
}

fn key(seed: u8) -> ClusterKey {
    ClusterKey::new(std::array::from_fn(|at| u8::try_from(at).unwrap() ^ seed)).unwrap()
}

fn pair(kind: QpKind, mtu: u32, key: Option<&ClusterKey>) -> (Side, Side) {
    pair_of(kind, mtu, [key, key])
}

fn pair_of(kind: QpKind, mtu: u32, keys: [Option<&ClusterKey>; 2]) -> (Side, Side) {
    let port = facilities::ports::free(2);
    let text = format!(
        "mtu = {mtu}\n[[host]]\nname = \"h1\"\naddress = \"127.0.0.1:{port}\"\n[[host]]\nname = \"h2\"\naddress = \"127.0.0.2:{port}\"\n\
         [[vm]]\nname = \"a\"\nid = 1\nhost = \"h1\"\n[[vm.nic]]\nsegment = \"s0\"\naddresses = [\"10.0.0.1\"]\n\
         [[vm]]\nname = \"b\"\nid = 2\nhost = \"h2\"\n[[vm.nic]]\nsegment = \"s0\"\naddresses = [\"10.0.0.8\"]\n"
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("directory.toml");
    std::fs::write(&path, text).unwrap();
    let directory = Arc::new(FileDirectory::load(&path).unwrap());
    let at = |host: &str| format!("{host}:{port}").parse().unwrap();
    let mut left = Side::new((0, "a"), kind, &directory, at("127.0.0.1"), keys[0]);
    let mut right = Side::new((7, "b"), kind, &directory, at("127.0.0.2"), keys[1]);
    let to_right = World::<HeapMemory>::attributes(right.guest.gid, right.qp.qp.qpn);
    let to_left = World::<HeapMemory>::attributes(left.guest.gid, left.qp.qp.qpn);
    let patient = |mut attributes: QpAttributes| {
        attributes.timeout = 14;
        attributes.retry_count = 7;
        attributes
    };
    let states = QpState::ReadyToSend;
    left.world.raise(left.qp.device, left.qp.qp.handle, kind, states, &patient(to_right));
    right.world.raise(right.qp.device, right.qp.qp.handle, kind, states, &patient(to_left));
    (left, right)
}

/// Runs both sides until a condition is true.
fn until(left: &mut Side, right: &mut Side, mut done: impl FnMut(&mut Side, &mut Side) -> bool) {
    let start = Instant::now();
    while !done(left, right) {
        assert!(start.elapsed() < Duration::from_secs(60), "nothing came");
        left.round();
        right.round();
    }
}

fn completion(left: &mut Side, right: &mut Side) -> hca::work::Completion {
    let mut got = None;
    until(left, right, |left, _| {
        got = got.or_else(|| left.qp.completions.poll());
        got.is_some()
    });
    got.unwrap()
}

#[test]
fn all_operations_reach_a_guest_of_another_host() {
    for (mtu, key) in [256, 1376, 4096].into_iter().flat_map(|mtu| ways().map(|key| (mtu, key))) {
        let (mut left, mut right) = pair(QpKind::Rc, mtu, key.as_ref());
        let data: Vec<u8> =
            (0..1_000_003u32).map(|at| at.wrapping_mul(0x9E37_79B9).to_le_bytes()[3]).collect();
        left.guest.memory.write(1, &data).unwrap();
        let (rkey, length) = (right.mr.rkey, 1_000_003);

        let request = requests::write(1, 0x20_0000, rkey, &[left.sge(1, length)]);
        left.world.send(&left.qp.clone(), request);
        assert_eq!(completion(&mut left, &mut right).status, Status::Success);
        assert!(right.bytes(0x20_0000, data.len()) == data, "WRITE");

        let request = requests::read(2, 0x20_0000, rkey, &[left.sge(0x10_0000, length)]);
        left.world.send(&left.qp.clone(), request);
        let done = completion(&mut left, &mut right);
        assert_eq!((done.status, done.byte_len), (Status::Success, length));
        assert!(left.bytes(0x10_0000, data.len()) == data, "READ");

        let buffer = right.sge(0x30_0000, length);
        right.world.receive(&right.qp.clone(), 3, &[buffer]);
        let request = requests::send(4, &[left.sge(1, length)]);
        left.world.send(&left.qp.clone(), request);
        assert_eq!(completion(&mut left, &mut right).status, Status::Success);
        assert!(right.bytes(0x30_0000, data.len()) == data, "SEND");
        let done = right.qp.completions.poll().unwrap();
        assert_eq!((done.wr_id, done.byte_len), (3, length));

        right.guest.memory.write(0x8, &40u64.to_le_bytes()).unwrap();
        for wr_id in 10..20 {
            let request = requests::fetch_add(wr_id, 0x8, rkey, 2, &[left.sge(0x3F_0000, 8)]);
            left.world.send(&left.qp.clone(), request);
        }
        for _ in 10..20 {
            assert_eq!(completion(&mut left, &mut right).status, Status::Success);
        }
        assert_eq!(right.bytes(8, 8), 60u64.to_le_bytes());
        assert_eq!(left.bytes(0x3F_0000, 8), 58u64.to_le_bytes(), "the last one's value before");
        let report = left.transports.report(left.qp.device, left.qp.qp.qpn).unwrap();
        assert_eq!(report.transport, "fabric");
        for side in [&left, &right] {
            let report = side.transports.fabric();
            let said = if key.is_some() { "encrypted" } else { "plain" };
            assert_eq!((report.encryption, report.counters.dropped), (said, 0), "{report:?}");
        }
    }
}

#[test]
fn a_sender_waits_for_a_receive_no_longer_than_it_takes_to_post_one() {
    for key in ways() {
        let (mut left, mut right) = pair(QpKind::Rc, 1376, key.as_ref());
        left.world.send(&left.qp.clone(), requests::send(1, &[left.sge(0, 100)]));
        until(&mut left, &mut right, |left, _| {
            left.transports
                .report(left.qp.device, left.qp.qp.qpn)
                .is_some_and(|r| r.counters.is_some_and(|counters| counters.rnr_nak_retry_err > 0))
        });
        let buffer = right.sge(0x1000, 100);
        right.world.receive(&right.qp.clone(), 2, &[buffer]);
        assert_eq!(completion(&mut left, &mut right).status, Status::Success);
        assert_eq!(right.qp.completions.poll().map(|done| done.wr_id), Some(2));
    }
}

#[test]
fn refused_requests_fail_both_ends() {
    for key in ways() {
        let (mut left, mut right) = pair(QpKind::Rc, 1376, key.as_ref());
        let request = requests::write(1, 0, right.mr.rkey ^ 1, &[left.sge(0, 5000)]);
        left.world.send(&left.qp.clone(), request);
        left.world.send(&left.qp.clone(), requests::send(2, &[left.sge(0, 8)]));
        assert_eq!(completion(&mut left, &mut right).status, Status::RemoteAccess);
        assert_eq!(completion(&mut left, &mut right).status, Status::Flushed);
        assert_eq!(left.world.state(&left.qp), QpState::Error);
        assert_eq!(right.world.state(&right.qp), QpState::Error);
    }
}

#[test]
fn a_peer_that_is_gone_ends_in_retries_exceeded() {
    for key in ways() {
        let (mut left, mut right) = pair(QpKind::Rc, 1376, key.as_ref());
        right.transports.detach(right.qp.device);
        let request = requests::write(1, 0, right.mr.rkey, &[left.sge(0, 8)]);
        let start = Instant::now();
        left.world.send(&left.qp.clone(), request);
        assert_eq!(completion(&mut left, &mut right).status, Status::RetryExceeded);
        // T is 67 ms; eight tries of T at least.
        assert!(start.elapsed() >= Duration::from_millis(8 * 67));
        assert!(right.transports.counters().dropped >= 8);
    }
}

#[test]
fn what_comes_for_a_queue_pair_in_the_moment_of_its_end_is_lost_and_not_refused() {
    // A program ends while its peer's last messages are in flight: the peer must not get an error sooner than for a lost peer.
    for ends in [QpState::Reset, QpState::Error] {
        let (mut left, mut right) = pair(QpKind::Rc, 1376, None);
        let first = requests::write(1, 0, right.mr.rkey, &[left.sge(0, 8)]);
        left.world.send(&left.qp.clone(), first);
        assert_eq!(completion(&mut left, &mut right).status, Status::Success);
        let start = Instant::now();
        left.world.send(&left.qp.clone(), requests::send(2, &[left.sge(0, 8)]));
        let later = requests::write(3, 64, right.mr.rkey, &[left.sge(0, 8)]);
        left.world.send(&left.qp.clone(), later);
        left.round();
        if ends == QpState::Reset {
            right.world.engine.destroy_qp(right.qp.device, right.qp.qp.handle).unwrap();
        } else {
            let mut error = World::<HeapMemory>::attributes(left.guest.gid, left.qp.qp.qpn);
            error.state = QpState::Error;
            right.world.modify(right.qp.device, right.qp.qp.handle, Mask::empty(), &error).unwrap();
        }
        // It receives before it learns of that end.
        assert_eq!(completion(&mut left, &mut right).status, Status::RetryExceeded, "{ends:?}");
        assert_eq!(completion(&mut left, &mut right).status, Status::Flushed);
        assert!(start.elapsed() >= Duration::from_millis(8 * 67));
    }
}

#[test]
fn datagrams_carry_their_sender_s_address() {
    for key in ways() {
        let (mut left, mut right) = pair(QpKind::Ud, 1024, key.as_ref());
        let buffer = right.sge(0x1000, 3000);
        right.world.receive(&right.qp.clone(), 1, &[buffer]);
        left.guest.memory.write(0, &[0x5A; 2048]).unwrap();
        let (gid, qpn, pd) = (right.guest.gid, right.qp.qp.qpn, left.guest.pd.0);
        let request = requests::datagram(2, pd, gid, qpn, 0x1234, &[left.sge(0, 2048)]);
        left.world.send(&left.qp.clone(), request);
        until(&mut left, &mut right, |_, right| right.qp.completions.waiting() > 0);
        let done = right.qp.completions.poll().unwrap();
        assert_eq!((done.byte_len, done.source), (2048 + 40, Some(left.qp.qp.qpn)));
        assert!(right.bytes(0x1000 + 40, 2048) == [0x5A; 2048]);
    }
}

#[test]
fn many_requests_under_way_both_ways_all_complete() {
    for key in ways() {
        // Like perftest's streams: messages of several packets, up to 128 at a time, in both directions.
        for sends in [false, true] {
            let (mut left, mut right) = pair(QpKind::Rc, 1376, key.as_ref());
            let most: u32 = 128;
            for side in [&mut left, &mut right] {
                let buffer = side.sge(0x10_0000, 4096);
                for wr_id in 0..most {
                    if sends {
                        side.world.receive(&side.qp.clone(), u64::from(wr_id), &[buffer]);
                    }
                }
            }
            let (to_right, to_left) = (right.mr.rkey, left.mr.rkey);
            for (side, rkey) in [(&mut left, to_right), (&mut right, to_left)] {
                for wr_id in 0..most {
                    let payload = [side.sge(0, 4096)];
                    let request = if sends {
                        requests::send(u64::from(wr_id), &payload)
                    } else {
                        requests::write(u64::from(wr_id), 0x10_0000, rkey, &payload)
                    };
                    side.world.send(&side.qp.clone(), request);
                }
            }
            let expected = if sends { 2 * most } else { most };
            let mut done = (0, 0);
            until(&mut left, &mut right, |left, right| {
                for (side, done) in [(left, &mut done.0), (right, &mut done.1)] {
                    while let Some(completion) = side.qp.completions.poll() {
                        assert_eq!(completion.status, Status::Success);
                        *done += 1;
                    }
                }
                done == (expected, expected)
            });
        }
    }
}

#[test]
fn long_rounds_make_no_retransmissions() {
    for key in ways() {
        let (mut left, mut right) = pair(QpKind::Rc, 1376, key.as_ref());
        for wr_id in 0..128 {
            let request = requests::write(wr_id, 0x10_0000, right.mr.rkey, &[left.sge(0, 4096)]);
            left.world.send(&left.qp.clone(), request);
        }
        // Each pass takes 10 ms of this time, the timeout is 67 ms.
        let mut now = 0;
        while left.qp.completions.waiting() < 128 {
            now += 10_000_000;
            assert!(now < 10_000_000_000, "{:?}", left.transports.counters());
            left.round_at(now);
            right.round_at(now);
        }
        let counters = left.transports.report(left.qp.device, left.qp.qp.qpn).unwrap().counters.unwrap();
        assert_eq!((counters.local_ack_timeout_err, counters.retransmitted_packets), (0, 0), "{counters:?}");
    }
}

#[test]
fn a_transport_is_told_before_anything_was_sent() {
    let (left, right) = pair(QpKind::Rc, 1376, None);
    assert!(left.transports.report(left.qp.device, left.qp.qp.qpn).is_none());
    assert_eq!(left.transports.reaches(left.qp.device, right.guest.gid), Some("fabric"));
    let nobody = Gid("10.0.0.77".parse::<std::net::Ipv4Addr>().unwrap().to_ipv6_mapped().octets());
    assert_eq!(left.transports.reaches(left.qp.device, nobody), None);
    // A device whose VM the directory doesn't contain.
    assert_eq!(right.transports.reaches(DeviceId(999), left.guest.gid), None);
}

#[test]
fn packets_of_strangers_are_dropped() {
    let (mut left, mut right) = pair(QpKind::Rc, 1376, None);
    let request = requests::write(1, 0, right.mr.rkey, &[left.sge(0, 8)]);
    left.world.send(&left.qp.clone(), request);
    assert_eq!(completion(&mut left, &mut right).status, Status::Success);
    let to = right.transports.fabric.fds().count();
    assert_eq!(to, 2);
    // A packet that claims to be from VM a, from an address that isn't its host's.
    let header = left.transports.connections.by_number(left.qp.device, left.qp.qp.qpn.0).unwrap().header;
    let mut packet = header.encode(super::header::PLAIN).to_vec();
    packet.extend([0x0A; 40]);
    let stranger = std::net::UdpSocket::bind("127.0.0.3:0").unwrap();
    let host = right.transports.directory.hosts()[1];
    stranger.send_to(&packet, host).unwrap();
    stranger.send_to(&[1, 2, 3], host).unwrap();
    until(&mut left, &mut right, |_, right| right.transports.counters().dropped == 2);
}

/// The cached look-up of one packet doesn't admit the next one.
#[test]
fn packets_of_strangers_between_good_ones_are_dropped() {
    let (mut left, mut right) = pair(QpKind::Rc, 1376, None);
    let request = requests::write(1, 0, right.mr.rkey, &[left.sge(0, 8)]);
    left.world.send(&left.qp.clone(), request);
    assert_eq!(completion(&mut left, &mut right).status, Status::Success);
    let header = left.transports.connections.by_number(left.qp.device, left.qp.qp.qpn.0).unwrap().header;
    // An invalid request, which only the connection detects.
    let to = |header: Header, qpn: u32| {
        let mut packet = header.encode(super::header::PLAIN).to_vec();
        packet.extend([0x1F, 0, 0xFF, 0xFF]);
        packet.extend(qpn.to_be_bytes());
        packet.extend([0; 4]);
        packet
    };
    let qpn = right.qp.qp.qpn.0;
    let good = to(header, qpn);
    let other_vm = to(Header { source: VmId(header.source.0 + 7), ..header }, qpn);
    let other_qpn = to(header, qpn + 1);
    let [host, target] = [0, 1].map(|at| right.transports.directory.hosts()[at]);
    let socket = |ip| std::net::UdpSocket::bind((ip, 0)).unwrap();
    let (own, stranger) = (socket(host.ip()), socket("127.0.0.3".parse().unwrap()));
    for (from, packet) in [(&stranger, &good), (&own, &other_vm), (&own, &other_qpn)] {
        own.send_to(&good, target).unwrap();
        from.send_to(packet, target).unwrap();
        own.send_to(&good, target).unwrap();
    }
    let before = right
        .transports
        .connections
        .by_number(right.qp.device, qpn)
        .unwrap()
        .connection
        .counters()
        .dropped_packets;
    until(&mut left, &mut right, |_, right| {
        let entry = right.transports.connections.by_number(right.qp.device, qpn).unwrap();
        entry.connection.counters().dropped_packets == before + 6
    });
    let counters = right.transports.counters();
    let of = |name: &str| counters.list().find(|(found, _, _)| *found == name).unwrap().2;
    assert_eq!((of("dropped_not_its_host"), of("dropped_no_queue_pair"), counters.dropped), (2, 1, 3));
}

#[test]
fn daemons_that_do_not_agree_on_a_key_do_not_talk_and_count_why() {
    let (one, other) = (key(1), key(2));
    for (keys, is_told) in [
        ([None, Some(&one)], "dropped_plain"),
        ([Some(&one), None], "dropped_encrypted"),
        ([Some(&one), Some(&other)], "dropped_handshake"),
    ] {
        let (mut left, mut right) = pair_of(QpKind::Rc, 1376, keys);
        let request = requests::write(1, 0, right.mr.rkey, &[left.sge(0, 8)]);
        left.guest.memory.write(0, &[0x77; 8]).unwrap();
        left.world.send(&left.qp.clone(), request);
        assert_eq!(completion(&mut left, &mut right).status, Status::RetryExceeded);
        assert_eq!(right.bytes(0, 8), [0; 8], "nothing was written");
        let counters = right.transports.counters();
        let count = counters.list().find(|(name, _, _)| *name == is_told).unwrap().2;
        assert!(count > 0 && count == counters.dropped, "{is_told}: {counters:?}");
    }
}

#[test]
fn a_daemon_that_was_restarted_is_talked_to_again() {
    let key = key(1);
    let (mut left, mut right) = pair(QpKind::Ud, 1024, Some(&key));
    let directory = Arc::clone(&right.transports.directory);
    let address = directory.hosts()[1];
    let (gid, qpn, pd) = (right.guest.gid, right.qp.qp.qpn, left.guest.pd.0);
    let mut got = 0;
    for restarts in 0..3 {
        if restarts > 0 {
            right.transports.detach(right.qp.device);
            // Its sockets close first.
            let nowhere =
                Transports::open(Arc::clone(&directory), "127.0.0.4:0".parse().unwrap(), None).unwrap();
            drop(std::mem::replace(&mut right.transports, nowhere));
            right.transports = Transports::open(Arc::clone(&directory), address, Some(&key)).unwrap();
            right.transports.attach(&mut right.world.engine, right.guest.device, "b", "s0", SegmentId(1));
        }
        // Datagrams may be lost, so they are repeated, as programs do.
        let start = Instant::now();
        let mut last = start;
        let before = got;
        while got == before {
            assert!(start.elapsed() < Duration::from_secs(60), "{:?}", right.transports.fabric());
            if last.elapsed() > Duration::from_millis(5) {
                last = Instant::now();
                let buffer = right.sge(0x1000, 3000);
                right.world.receive(&right.qp.clone(), 1, &[buffer]);
                let request = requests::datagram(2, pd, gid, qpn, 0x1234, &[left.sge(0, 8)]);
                left.world.send(&left.qp.clone(), request);
            }
            left.round();
            right.round();
            while right.qp.completions.poll().is_some() {
                got += 1;
            }
            while left.qp.completions.poll().is_some() {}
        }
    }
}
