//! Objects: ownership, quotas, discovery of work, and adding and removing devices.

use crate::common;

use common::{Pair, SIZE, statuses};
use dma::HeapMemory;
use hca::attributes::{Access, QpAttributeMask as Mask, QpKind, QpState};
use hca::names::{ContextHandle, DeviceId, PdHandle, QpHandle, SegmentId};
use hca::work::Status;
use hca::{Capabilities, DeviceConfig, Limits, MrInit, QpInit, VerbsError};
use hca_testbed::{CompletionRing, Guest, ReceiveRing, SendRing, World, gid, mac, requests};

const KERNEL: ContextHandle = ContextHandle(0);

#[test]
fn a_context_takes_all_that_is_its_own_along() {
    let mut world: World = World::default();
    let kernel = world.guest(HeapMemory::new(0x10000));
    let device = kernel.device;
    let context = world.engine.create_context(device).unwrap();
    let pd = world.engine.create_pd(device, context).unwrap();
    let user = Guest { pd, ..kernel.clone() };
    world.register(&user, 0x1000, 0x2000, Access::LOCAL_WRITE);
    let cq = world.engine.create_cq(device, context, 16, CompletionRing::new(16)).unwrap();
    let (srq, _) = world.shared_queue(&user, 0);
    let init = QpInit {
        pd,
        kind: QpKind::Rc,
        send_cq: cq,
        receive_cq: cq,
        srq: Some(srq),
        signal_all: false,
        max_send_wr: 1,
        max_receive_wr: 0,
        max_send_sge: 1,
        max_receive_sge: 0,
    };
    let qp = world.engine.create_qp(device, init, SendRing::default(), None).unwrap();
    assert_eq!(world.engine.context_of_qp(device, qp.handle), Some(context));
    assert_eq!(world.engine.context_of_cq(device, cq), Some(context));
    assert_eq!(world.engine.context_of_srq(device, srq), Some(context));
    world.engine.destroy_context(device, context).unwrap();
    let objects = world.engine.inspect(device).unwrap().objects;
    assert_eq!((objects.queue_pairs, objects.completion_queues, objects.shared_receive_queues), (0, 0, 0));
    assert_eq!((objects.memory_regions, objects.registered_bytes, objects.contexts), (0, 0, 0));
    assert_eq!(objects.protection_domains, 1, "the kernel's stays");
    assert!(world.engine.destroy_context(device, context).is_err());
    assert!(world.engine.destroy_context(device, KERNEL).is_err());
}

#[test]
fn handles_and_numbers_are_never_zero_nor_beyond_the_limit() {
    let mut world: World = World::default();
    let guest = world.guest(HeapMemory::new(0x10000));
    for _ in 0..200 {
        let one = world.queue_pair(&guest, QpKind::Rc, None);
        assert!((1..32_768).contains(&one.qp.handle.0));
        assert!((0x1_0000..0x100_0000).contains(&one.qp.qpn.0));
        world.engine.destroy_qp(guest.device, one.qp.handle).unwrap();
        world.engine.destroy_cq(guest.device, one.cq).unwrap();
    }
}

#[test]
fn quotas_hold_and_can_be_changed() {
    let mut world: World = World::default();
    let guest = world.guest(HeapMemory::new(0x10000));
    let limits = Limits {
        queue_pairs: 1,
        completion_queues: 2,
        memory_regions: 2,
        registered_bytes: 0x2000,
        protection_domains: 2,
        contexts: 1,
        shared_receive_queues: 0,
        ..Limits::default()
    };
    world.engine.set_limits(guest.device, limits);
    let full = |what| VerbsError::OutOfResources { what, limit: 1 };
    let _one = world.queue_pair(&guest, QpKind::Rc, None);
    let cq = world.engine.create_cq(guest.device, KERNEL, 16, CompletionRing::new(16)).unwrap();
    let init = QpInit {
        pd: guest.pd,
        kind: QpKind::Ud,
        send_cq: cq,
        receive_cq: cq,
        srq: None,
        signal_all: false,
        max_send_wr: 1,
        max_receive_wr: 1,
        max_send_sge: 1,
        max_receive_sge: 1,
    };
    let receives = || Some(ReceiveRing::default());
    let refused = world.engine.create_qp(guest.device, init, SendRing::default(), receives());
    assert_eq!(refused, Err(full("queue pairs")));
    assert!(world.engine.create_cq(guest.device, KERNEL, 16, CompletionRing::new(16)).is_err());
    world.engine.create_context(guest.device).unwrap();
    assert_eq!(world.engine.create_context(guest.device), Err(full("contexts")));
    world.engine.create_pd(guest.device, KERNEL).unwrap();
    assert!(world.engine.create_pd(guest.device, KERNEL).is_err());
    let region = |pages: u64| MrInit {
        start: 0,
        length: pages * 4096,
        access: 1,
        pages: (0..pages).map(|page| page * 4096).collect(),
    };
    assert!(world.engine.register_mr(guest.device, guest.pd, region(3)).is_err(), "bytes");
    let mr = world.engine.register_mr(guest.device, guest.pd, region(2)).unwrap();
    assert!(world.engine.register_mr(guest.device, guest.pd, region(1)).is_err(), "bytes");
    world.engine.deregister_mr(guest.device, mr.handle).unwrap();
    world.engine.register_mr(guest.device, guest.pd, region(1)).unwrap();
    world.engine.set_limits(guest.device, Limits::default());
    world.engine.create_qp(guest.device, init, SendRing::default(), receives()).unwrap();
}

#[test]
fn regions_that_can_not_be_are_refused() {
    let mut world: World = World::default();
    let guest = world.guest(HeapMemory::new(0x10000));
    let mut register = |start, length, pages: &[u64]| {
        let init = MrInit { start, length, access: 1, pages: pages.into() };
        world.engine.register_mr(guest.device, guest.pd, init).is_ok()
    };
    assert!(register(0x10, 0x1000, &[0x1000, 0x2000]));
    assert!(!register(0x10, 0x1000, &[0x1000]), "a page short");
    assert!(!register(0, 0x1000, &[0x1000, 0x2000]), "a page too many");
    assert!(!register(0, 0x1000, &[0x1001]), "not a page");
    assert!(!register(0, 0, &[]), "nothing");
    assert!(!register(u64::MAX - 0xFFF, 0x1001, &[0x1000, 0x2000]), "wraps around");
    assert!(!register(0, (1 << 30) + 1, &vec![0; (1 << 18) + 1]), "more than 1 GiB");
    let no_pd = world.engine.allocate_fast_mr(guest.device, PdHandle(99), 1);
    assert!(matches!(no_pd, Err(VerbsError::NoSuchObject { .. })));
}

#[test]
fn an_address_belongs_to_one_device_of_a_segment() {
    let mut world: World = World::default();
    let (a, b) = (world.guest(HeapMemory::new(0)), world.guest(HeapMemory::new(0)));
    let taken = world.engine.bind_gid(b.device, 1, a.gid, mac(9));
    assert_eq!(taken, Err(VerbsError::AddressTaken { gid: a.gid }));
    world.engine.bind_gid(a.device, 1, a.gid, mac(9)).unwrap();
    world.engine.unbind_gid(a.device, 0, a.gid).unwrap();
    assert!(world.engine.bind_gid(b.device, 1, a.gid, mac(9)).is_err(), "it still has it at index 1");
    world.engine.unbind_gid(a.device, 1, a.gid).unwrap();
    world.engine.bind_gid(b.device, 1, a.gid, mac(9)).unwrap();
    assert!(world.engine.bind_gid(b.device, 128, gid(50), mac(9)).is_err(), "beyond the table");
    let config = DeviceConfig {
        name: "elsewhere".into(),
        segment: SegmentId(2),
        limits: Limits::default(),
        capabilities: Capabilities::default(),
    };
    let other = world.engine.add_device(config, HeapMemory::new(0)).unwrap();
    world.engine.bind_gid(other, 0, a.gid, mac(9)).unwrap();
}

#[test]
fn the_state_table_is_kept() {
    let mut pair = Pair::raw(QpKind::Rc);
    let mut with = World::<HeapMemory>::attributes(pair.b.gid, pair.right.qp.qpn);
    let (device, qp) = (pair.a.device, pair.left.qp.handle);
    let first = Mask::PKEY_INDEX | Mask::PORT | Mask::ACCESS_FLAGS;
    with.state = QpState::ReadyToReceive;
    assert!(pair.world.modify(device, qp, first, &with).is_err(), "not from RESET");
    with.state = QpState::Init;
    assert!(pair.world.modify(device, qp, first - Mask::PORT, &with).is_err(), "the port is missing");
    assert!(pair.world.modify(device, qp, first | Mask::QKEY, &with).is_err(), "a Q_Key on RC");
    with.port = 2;
    assert!(pair.world.modify(device, qp, first, &with).is_err(), "there is one port");
    with.port = 1;
    pair.world.modify(device, qp, first, &with).unwrap();
    assert_eq!(pair.world.state(&pair.left), QpState::Init);
    let missing = pair.world.modify(device, QpHandle(999), first, &with);
    assert_eq!(missing, Err(VerbsError::NoSuchObject { kind: "queue pair", handle: 999 }));
    with.address.sgid_index = 5;
    with.state = QpState::ReadyToReceive;
    let connect = Mask::ADDRESS_VECTOR
        | Mask::PATH_MTU
        | Mask::DESTINATION_QPN
        | Mask::RQ_PSN
        | Mask::MAX_DEST_RD_ATOMIC
        | Mask::MIN_RNR_TIMER;
    assert!(pair.world.modify(device, qp, connect, &with).is_err(), "no such own address");
    assert_eq!(pair.world.state(&pair.left), QpState::Init, "nothing has changed");
}

#[test]
fn a_scan_finds_work_that_no_doorbell_told_of() {
    let mut pair = Pair::new(QpKind::Rc);
    pair.world.settle();
    pair.world.pass(1_000_000);
    assert_eq!(pair.world.poll().next, None, "idle");
    pair.left.sends.post(requests::send(1, &[]));
    pair.world.settle();
    assert_eq!(pair.left.sends.waiting(), 1, "nobody looked");
    pair.world.engine.scan_context(pair.a.device, KERNEL);
    pair.world.settle();
    assert_eq!(pair.left.sends.waiting(), 0);
    // It waits for a receive, which a scan finds as well.
    pair.right.receives.post(hca::work::ReceiveRequest { wr_id: 2, sges: Default::default() });
    pair.world.engine.scan_context(pair.b.device, KERNEL);
    pair.world.settle();
    assert_eq!(statuses(&pair.left), [(1, Status::Success)]);
}

#[test]
fn a_scan_is_spread_over_polls_and_misses_nobody() {
    let config = hca::EngineConfig { scans_per_poll: 7, ..hca::EngineConfig::default() };
    let mut world: World = World::new(config);
    let (a, b) = (world.guest(HeapMemory::new(0)), world.guest(HeapMemory::new(0)));
    let pairs: Vec<_> = (0..50).map(|_| world.connect(&a, &b, QpKind::Uc)).collect();
    world.pass(1_000_000);
    world.engine.scan_context(a.device, KERNEL);
    world.poll();
    for (left, _) in &pairs {
        left.sends.post(requests::send(1, &[]));
    }
    world.engine.scan_context(a.device, KERNEL);
    world.engine.destroy_qp(a.device, pairs[3].0.qp.handle).unwrap();
    world.settle();
    let done = pairs.iter().filter(|(left, _)| left.sends.waiting() == 0).count();
    assert_eq!(done, 49);
}

#[test]
fn rates_are_kept() {
    let mut pair = Pair::new(QpKind::Uc);
    let limits = Limits { messages_per_second: Some(1_000_000), ..Limits::default() };
    pair.world.engine.set_limits(pair.a.device, limits);
    for wr_id in 0..20_000 {
        let mut request = requests::send(wr_id, &[]);
        request.signaled = false;
        pair.left.sends.post(request);
    }
    pair.world.engine.doorbell_send(pair.left.device, pair.left.qp.handle);
    pair.world.pass(10_000_000);
    let done = pair.left.sends.retired();
    assert!((10_000..11_500).contains(&done), "{done} in 10 ms at a million a second");
    pair.world.engine.set_limits(pair.a.device, Limits::default());
    pair.world.settle();
    assert_eq!(pair.left.sends.waiting(), 0, "without a limit it is done at once");
}

#[test]
fn bytes_are_limited_as_well_and_shared_by_queue_pairs() {
    let mut world: World = World::default();
    let size = usize::try_from(SIZE).unwrap();
    let (a, b) = (world.guest(HeapMemory::new(size)), world.guest(HeapMemory::new(size)));
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let (from, to) = (world.register(&a, 0, SIZE, access), world.register(&b, 0, SIZE, access));
    let limits = Limits { bytes_per_second: Some(100_000_000), ..Limits::default() };
    world.engine.set_limits(a.device, limits);
    let pairs: Vec<_> = (0..4).map(|_| world.connect(&a, &b, QpKind::Rc)).collect();
    for (left, _) in &pairs {
        for wr_id in 0..100 {
            left.sends.post(requests::write(wr_id, 0, to.rkey, &[common::sge(0, 10_000, from.lkey)]));
        }
        world.engine.doorbell_send(left.device, left.qp.handle);
    }
    // 10 ms at 100 MB/s are a megabyte, plus the bucket's burst.
    world.pass(10_000_000);
    let done: Vec<u32> = pairs.iter().map(|(left, _)| left.sends.retired()).collect();
    let sum: u32 = done.iter().sum();
    assert!((100..200).contains(&sum), "{done:?}");
    assert!(done.iter().all(|done| *done > 10), "each has its turn: {done:?}");
}

#[test]
fn without_bus_mastering_no_memory_is_touched() {
    let mut pair = Pair::new(QpKind::Rc);
    pair.world.engine.set_enabled(pair.a.device, false);
    pair.send(requests::write(1, 0x5000, pair.right_mr.rkey, &[pair.left_sge(0x1000, 8)]));
    assert_eq!(pair.left.sends.waiting(), 1);
    pair.world.engine.set_enabled(pair.a.device, true);
    pair.world.settle();
    assert_eq!(statuses(&pair.left), [(1, Status::Success)]);
    pair.world.engine.set_enabled(pair.b.device, false);
    pair.send(requests::write(2, 0x5000, pair.right_mr.rkey, &[pair.left_sge(0x1000, 8)]));
    pair.world.pass(100_000);
    assert_eq!(statuses(&pair.left), [(2, Status::RetryExceeded)], "a peer sees no answer");
}

#[test]
fn a_device_that_goes_takes_its_addresses_along() {
    let mut pair = Pair::new(QpKind::Rc);
    pair.send(requests::send(1, &[]));
    pair.world.engine.remove_device(pair.b.device);
    pair.world.pass(100_000);
    assert_eq!(statuses(&pair.left), [(1, Status::RetryExceeded)]);
    let again = pair.world.guest(HeapMemory::new(0x1000));
    assert_ne!(again.device, pair.b.device);
    pair.world.engine.bind_gid(again.device, 1, pair.b.gid, mac(2)).unwrap();
    assert!(pair.world.engine.inspect(pair.b.device).is_none());
    let gone = pair.world.engine.create_pd(pair.b.device, KERNEL);
    assert_eq!(gone, Err(VerbsError::NoSuchDevice(DeviceId(1))));
}

#[test]
fn a_reset_device_is_empty() {
    let mut pair = Pair::new(QpKind::Rc);
    pair.receive(1, &[]);
    pair.send(requests::send(2, &[]));
    pair.world.engine.reset_device(pair.b.device);
    let report = pair.world.engine.inspect(pair.b.device).unwrap();
    assert_eq!(report.objects, hca::ObjectCounts::default());
    assert!(report.gids.is_empty());
    assert!(report.counters.completions > 0, "counters stay");
    let _ = pair.left.completions.drain();
    pair.send(requests::send(3, &[]));
    pair.world.pass(100_000);
    assert_eq!(statuses(&pair.left), [(3, Status::RetryExceeded)]);
    pair.world.engine.reset_device(pair.a.device);
    assert_eq!(pair.world.poll().next, None, "no timer of what is gone");
}

#[test]
fn a_neighbour_with_many_queue_pairs_takes_no_more_turns() {
    let mut world: World = World::default();
    let size = usize::try_from(SIZE).unwrap();
    let (hog, victim) = (world.guest(HeapMemory::new(size)), world.guest(HeapMemory::new(size)));
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let own = world.register(&hog, 0, SIZE, access);
    let hogs: Vec<_> = (0..100).map(|_| world.connect(&hog, &hog, QpKind::Rc).0).collect();
    let (quiet, _) = world.connect(&victim, &victim, QpKind::Uc);
    world.settle();
    for (wr_id, hog) in (0..).zip(&hogs) {
        for _ in 0..3 {
            hog.sends.post(requests::write(wr_id, 0, own.rkey, &[common::sge(0, 0x8_0000, own.lkey)]));
        }
        world.engine.doorbell_send(hog.device, hog.qp.handle);
    }
    for _ in 0..8 {
        let mut request = requests::send(1, &[]);
        request.signaled = false;
        world.send(&quiet, request);
        let before = world.engine.counters(hog.device).requests;
        world.poll();
        assert_eq!(quiet.sends.waiting(), 0, "served within one poll");
        assert!(world.engine.counters(hog.device).requests - before < 10, "which is a short one");
    }
}
