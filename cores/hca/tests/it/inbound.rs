//! Peers' writes to a guest's memory are counted, and limited on request.

use dma::HeapMemory;
use hca::attributes::{Access, QpKind};
use hca::work::{Sge, Status};
use hca_testbed::{Connected, Guest, World, requests};

const SIZE: u64 = 1 << 20;
const LENGTH: u32 = 10_000;

fn guest(world: &mut World) -> (Guest, hca::MrInfo) {
    let guest = world.guest(HeapMemory::new(usize::try_from(SIZE).unwrap()));
    let region = world.register(&guest, 0, SIZE, Access::all() - Access::ZERO_BASED);
    (guest, region)
}

fn sge(region: &hca::MrInfo) -> Sge {
    Sge { address: 0, length: LENGTH, lkey: region.lkey }
}

fn statuses(at: &Connected) -> Vec<(u64, Status)> {
    at.completions.drain().into_iter().map(|done| (done.wr_id, done.status)).collect()
}

fn successes(at: &Connected) -> usize {
    let completions = statuses(at);
    assert!(completions.iter().all(|(_, status)| *status == Status::Success), "{completions:?}");
    completions.len()
}

/// Two guests write into a third over four queue pairs each, as fast as they can. Limited to 100 MB/s, they reach that rate, share it
/// equally, and nothing fails. The third's own requests, and those between the two, aren't limited.
#[test]
fn requesters_share_what_a_guest_may_be_written() {
    let mut world: World = World::default();
    let ((a, from_a), (b, to), (c, from_c)) = (guest(&mut world), guest(&mut world), guest(&mut world));
    let mut pairs = Vec::new();
    for (from, region) in [(&a, &from_a), (&c, &from_c)] {
        pairs.extend((0..4).map(|_| (world.connect(from, &b, QpKind::Rc).0, sge(region))));
    }
    let (out, _) = world.connect(&b, &c, QpKind::Rc);
    let (aside, _) = world.connect(&a, &c, QpKind::Rc);
    assert_eq!(world.engine.inbound_bytes(b.device), None);
    world.engine.watch_inbound(b.device, true);
    world.engine.limit_inbound(b.device, Some(100_000_000));
    for (left, sge) in &pairs {
        for wr_id in 0..100 {
            left.sends.post(requests::write(wr_id, 0, to.rkey, &[*sge]));
        }
        world.engine.doorbell_send(left.device, left.qp.handle);
    }
    for wr_id in 0..100 {
        out.sends.post(requests::write(wr_id, 0, from_c.rkey, &[sge(&to)]));
        aside.sends.post(requests::write(wr_id, 0, from_c.rkey, &[sge(&from_a)]));
    }
    world.engine.doorbell_send(out.device, out.qp.handle);
    world.engine.doorbell_send(aside.device, aside.qp.handle);
    // 10 ms at 100 MB/s are a megabyte, plus the bucket's burst.
    world.pass(10_000_000);
    let done: Vec<u32> = pairs.iter().map(|(left, _)| left.sends.retired()).collect();
    let sum: u32 = done.iter().sum();
    assert!((90..200).contains(&sum), "{done:?}");
    assert!(done.iter().all(|done| *done > 6), "each has its turn: {done:?}");
    assert_eq!((out.sends.waiting(), aside.sends.waiting()), (0, 0), "nobody else waits");
    assert_eq!(world.engine.inbound_bytes(b.device), Some(u64::from(sum * LENGTH)));
    assert_eq!(world.engine.inbound_bytes(c.device), None);
    assert!(world.engine.is_written_too_fast(b.device) && !world.engine.is_written_too_fast(c.device));
    world.engine.watch_inbound(b.device, false);
    world.pass(10_000_000);
    for (left, _) in &pairs {
        assert_eq!(left.sends.waiting(), 0, "without a limit all is done");
    }
    assert_eq!(pairs.iter().map(|(left, _)| successes(left)).sum::<usize>(), 800);
    assert_eq!(world.engine.inbound_bytes(b.device), None);
}

/// A message larger than a quantum waits between its quanta. SENDs and atomics count as well. A guest that is reset stays watched.
#[test]
fn large_messages_sends_and_atomics_count() {
    let mut world: World = World::default();
    let ((a, from), (b, to)) = (guest(&mut world), guest(&mut world));
    let (left, right) = world.connect(&a, &b, QpKind::Rc);
    world.engine.watch_inbound(b.device, true);
    world.engine.limit_inbound(b.device, Some(100_000_000));
    let all = Sge { address: 0, length: u32::try_from(SIZE).unwrap(), lkey: from.lkey };
    world.send(&left, requests::write(1, 0, to.rkey, &[all]));
    world.pass(5_000_000);
    assert_eq!(left.sends.retired(), 0, "half of the time that it needs");
    let half = world.engine.inbound_bytes(b.device).unwrap();
    assert!((400_000..900_000).contains(&half), "{half}");
    world.pass(10_000_000);
    assert_eq!((successes(&left), world.engine.inbound_bytes(b.device)), (1, Some(SIZE)));
    world.receive(&right, 7, &[Sge { address: 0, length: LENGTH, lkey: to.lkey }]);
    world.send(&left, requests::send(2, &[sge(&from)]));
    let word = [Sge { address: 0, length: 8, lkey: from.lkey }];
    world.send(&left, requests::fetch_add(3, 0, to.rkey, 1, &word));
    world.send(&left, requests::read(4, 0, to.rkey, &[sge(&from)]));
    world.pass(20_000_000);
    assert_eq!(successes(&left), 3);
    assert_eq!(
        world.engine.inbound_bytes(b.device),
        Some(SIZE + u64::from(LENGTH) + 8),
        "a READ writes nothing there"
    );
    world.engine.reset_device(b.device);
    assert!(world.engine.inbound_bytes(b.device).is_some());
    world.engine.remove_device(b.device);
    assert!(!world.engine.is_written_too_fast(b.device));
}

/// A guest whose inbound writes are limited may stop. Waiting requesters find its address suspended, and continue when it is opened.
#[test]
fn who_waits_finds_a_guest_that_stops_held() {
    let mut world: World = World::default();
    let ((a, from), (b, to)) = (guest(&mut world), guest(&mut world));
    let (left, _) = world.connect(&a, &b, QpKind::Rc);
    world.engine.watch_inbound(b.device, true);
    world.engine.limit_inbound(b.device, Some(1_000_000));
    for wr_id in 0..10 {
        left.sends.post(requests::write(wr_id, 0, to.rkey, &[sge(&from)]));
    }
    world.engine.doorbell_send(left.device, left.qp.handle);
    world.pass(1_000_000);
    let before = left.sends.retired();
    assert!(before < 10);
    world.engine.hold(a.device, b.gid);
    world.engine.stop(b.device, &mut world.events);
    world.pass(1_000_000_000);
    assert_eq!(left.sends.retired(), before, "it waits as long as the other is away");
    world.engine.watch_inbound(b.device, false);
    world.engine.start(b.device).unwrap();
    world.engine.open(a.device, b.gid);
    world.pass(1_000_000_000);
    assert_eq!(successes(&left), 10);
}
