//! A device moves to another engine: its objects keep their names, and its work continues where it stopped.

use dma::{Dma, HeapMemory};
use hca::attributes::{Access, QpKind, QpState};
use hca::engine::{DeviceConfig, Verdict};
use hca::limits::{Capabilities, Limits};
use hca::names::{DeviceId, SegmentId};
use hca::remote::Action;
use hca::saved::{InvalidState, Kind, Name, decode, encode};
use hca::work::{Sge, Status};
use hca_testbed::{Connected, Guest, World, requests};

const SIZE: u64 = 4 << 20;

fn guest(world: &mut World) -> (Guest, hca::MrInfo) {
    let guest = world.guest(HeapMemory::new(usize::try_from(SIZE).unwrap()));
    let region = world.register(&guest, 0, SIZE, Access::all() - Access::ZERO_BASED);
    (guest, region)
}

fn touched(world: &mut World, device: DeviceId) -> Vec<Name> {
    let mut names = Vec::new();
    world.engine.take_touched(device, usize::MAX, |name| names.push(name));
    names
}

/// Copies objects, in encoded form.
fn copy(from: &World, device: DeviceId, to: &mut World, there: DeviceId, names: &[Name]) {
    for &name in names {
        let (old, new, handle) = (&from.engine, &mut to.engine, name.handle);
        if !old.has(device, name) {
            new.restore_gone(there, name).unwrap();
            continue;
        }
        match name.kind {
            // The device comes last, once it is stopped.
            Kind::Device => {
                if let Some(saved) = old.save_device(device) {
                    new.restore_device(there, &decode(&encode(&saved)).unwrap()).unwrap();
                }
            }
            Kind::Context => {
                let saved = old.save_context(device, handle).unwrap();
                new.restore_context(there, handle, &decode(&encode(&saved)).unwrap()).unwrap();
            }
            Kind::ProtectionDomain => {
                let saved = old.save_pd(device, handle).unwrap();
                new.restore_pd(there, handle, decode(&encode(&saved)).unwrap()).unwrap();
            }
            Kind::MemoryRegion => {
                let saved = old.save_region(device, handle).unwrap();
                new.restore_region(there, handle, decode(&encode(&saved)).unwrap()).unwrap();
            }
            Kind::CompletionQueue => {
                let saved = old.save_cq(device, handle).unwrap();
                new.restore_cq(there, handle, decode(&encode(&saved)).unwrap()).unwrap();
            }
            Kind::SharedReceiveQueue => {
                let saved = old.save_srq(device, handle).unwrap();
                new.restore_srq(there, handle, decode(&encode(&saved)).unwrap()).unwrap();
            }
            Kind::QueuePair => {
                let saved = old.save_qp(device, handle).unwrap();
                new.restore_qp(there, handle, decode(&encode(&saved)).unwrap()).unwrap();
            }
        }
    }
}

fn dormant(world: &mut World, memory: &HeapMemory) -> DeviceId {
    let config = DeviceConfig {
        name: "moved".to_owned(),
        segment: SegmentId(1),
        limits: Limits::default(),
        capabilities: Capabilities::default(),
    };
    world.engine.add_dormant(config, memory.clone()).unwrap()
}

fn stop(world: &mut World, device: DeviceId) {
    let World { engine, events, .. } = world;
    engine.stop(device, events);
}

fn sge(region: hca::MrInfo, address: u64, length: u32) -> Sge {
    Sge { address, length, lkey: region.lkey }
}

fn at(connected: &Connected, device: DeviceId) -> Connected {
    Connected { device, ..connected.clone() }
}

#[test]
fn two_connected_devices_go_on_elsewhere_in_the_middle_of_a_message() {
    let (mut old, mut new) = (World::default(), World::after(10));
    let (a, a_mr) = guest(&mut old);
    let (b, b_mr) = guest(&mut old);
    let (left, right) = old.connect(&a, &b, QpKind::Rc);
    let bytes: Vec<u8> = (0..1u32 << 20).map(|at| u8::try_from(at % 251).unwrap()).collect();
    a.memory.write(0, &bytes).unwrap();
    old.receive(&right, 7, &[sge(b_mr, 0, 2 << 20)]);
    old.send(&left, requests::send(1, &[sge(a_mr, 0, 1 << 20)]));
    old.send(&left, requests::fetch_add(2, 3 << 20, b_mr.rkey, 5, &[sge(a_mr, 2 << 20, 8)]));
    // A first round before anything happened, then a quantum of the message.
    let (there_a, there_b) = (dormant(&mut new, &a.memory), dormant(&mut new, &b.memory));
    for (device, there) in [(a.device, there_a), (b.device, there_b)] {
        old.engine.track(device, true);
        let names = touched(&mut old, device);
        copy(&old, device, &mut new, there, &names);
    }
    old.poll();
    assert!(left.completions.waiting() == 0 && left.sends.in_flight() == 1, "it is under way");
    for (device, there) in [(a.device, there_a), (b.device, there_b)] {
        stop(&mut old, device);
        let names = touched(&mut old, device);
        assert!(names.len() < 6, "only what was touched is left: {names:?}");
        copy(&old, device, &mut new, there, &names);
    }
    // The restored devices have no addresses yet, and the old ones do no work any more.
    new.settle();
    old.pass(1_000_000_000);
    assert_eq!((left.completions.waiting(), right.completions.waiting()), (0, 0));
    new.engine.start(there_a).unwrap();
    new.engine.start(there_b).unwrap();
    old.engine.remove_device(a.device);
    old.engine.remove_device(b.device);
    new.settle();
    let sent = left.completions.drain();
    assert_eq!(
        sent.iter().map(|done| (done.wr_id, done.status)).collect::<Vec<_>>(),
        [(1, Status::Success), (2, Status::Success)]
    );
    let got = right.completions.drain();
    assert_eq!(got.iter().map(|done| (done.wr_id, done.byte_len)).collect::<Vec<_>>(), [(7, 1 << 20)]);
    let mut arrived = vec![0; 1 << 20];
    b.memory.read(0, &mut arrived).unwrap();
    assert!(arrived == bytes);
    assert_eq!(b.memory.load_u32(3 << 20), Ok(5), "the addition happened once");
    // New objects don't reuse the names of restored ones.
    let pd = new.engine.create_pd(there_a, hca::names::ContextHandle(0)).unwrap();
    assert_ne!(pd, a.pd);
    assert_eq!(new.state(&at(&left, there_a)), QpState::ReadyToSend);
}

#[test]
fn only_what_was_touched_is_left() {
    let mut world = World::default();
    let (a, a_mr) = guest(&mut world);
    let (b, b_mr) = guest(&mut world);
    let (left, right) = world.connect(&a, &b, QpKind::Rc);
    for _ in 0..200 {
        world.queue_pair(&a, QpKind::Rc, None);
    }
    world.settle();
    world.engine.track(a.device, true);
    world.engine.track(b.device, true);
    let count = touched(&mut world, a.device).len();
    assert!(count > 400, "at first all of it: {count}");
    touched(&mut world, b.device);
    assert_eq!(world.engine.touched(a.device), 0);
    world.send(&left, requests::write(1, 0, b_mr.rkey, &[sge(a_mr, 0, 64)]));
    world.settle();
    let qp = |connected: &Connected| Name { kind: Kind::QueuePair, handle: connected.qp.handle.0 };
    let cq = Name { kind: Kind::CompletionQueue, handle: left.cq.0 };
    assert_eq!(touched(&mut world, a.device), [cq, qp(&left)]);
    assert_eq!(touched(&mut world, b.device), [qp(&right)], "its numbers went on");
    world.engine.track(a.device, false);
    world.send(&left, requests::write(1, 0, b_mr.rkey, &[sge(a_mr, 0, 64)]));
    world.settle();
    assert_eq!(world.engine.touched(a.device), 0);
}

#[test]
fn held_queue_pairs_leave_requests_in_their_rings_and_go_on_in_order() {
    let mut world = World::default();
    let (a, a_mr) = guest(&mut world);
    let (b, b_mr) = guest(&mut world);
    let (left, right) = world.connect(&a, &b, QpKind::Rc);
    world.engine.hold(a.device, b.gid);
    for wr_id in 0..5 {
        world.send(&left, requests::write(wr_id, 0, b_mr.rkey, &[sge(a_mr, 0, 8)]));
    }
    world.pass(1_000_000_000);
    assert_eq!((left.sends.waiting(), left.completions.waiting()), (5, 0), "nothing was fetched");
    // The other direction isn't suspended.
    world.send(&right, requests::write(9, 0, a_mr.rkey, &[sge(b_mr, 0, 8)]));
    world.settle();
    assert_eq!(right.completions.drain().len(), 1);
    world.engine.open(a.device, b.gid);
    world.settle();
    let order: Vec<u64> = left.completions.drain().iter().map(|done| done.wr_id).collect();
    assert_eq!(order, [0, 1, 2, 3, 4]);
}

#[test]
fn what_a_transport_had_is_completed_or_done_beside() {
    let mut world = World::default();
    let (a, a_mr) = guest(&mut world);
    world.engine.set_uplink(SegmentId(1), true);
    let left = world.queue_pair(&a, QpKind::Rc, None);
    let mut there = World::after(1);
    let (b, b_mr) = guest(&mut there);
    let right = there.queue_pair(&b, QpKind::Rc, None);
    let to_right = World::<HeapMemory>::attributes(b.gid, right.qp.qpn);
    world.raise(left.device, left.qp.handle, QpKind::Rc, QpState::ReadyToSend, &to_right);
    let to_left = World::<HeapMemory>::attributes(a.gid, left.qp.qpn);
    there.raise(right.device, right.qp.handle, QpKind::Rc, QpState::ReadyToSend, &to_left);
    world.send(&left, requests::write(1, 0, b_mr.rkey, &[sge(a_mr, 0, 8)]));
    world.send(&left, requests::fetch_add(2, 64, b_mr.rkey, 1, &[sge(a_mr, 128, 8)]));
    world.send(&left, requests::read(3, 0, b_mr.rkey, &[sge(a_mr, 256, 8)]));
    world.send(&left, requests::fetch_add(4, 72, b_mr.rkey, 1, &[sge(a_mr, 136, 8)]));
    world.send(&left, requests::fetch_add(5, 80, b_mr.rkey, 1, &[sge(a_mr, 144, 8)]));
    world.settle();
    let posted: Vec<Action> = world.engine.take_actions();
    assert_eq!(posted.len(), 5, "a transport has them");
    // The peer comes to this engine. It had executed the first four requests, and the READ's response was lost.
    b.memory.write(0, &77u64.to_le_bytes()).unwrap();
    there.engine.track(b.device, true);
    stop(&mut there, b.device);
    let device = dormant(&mut world, &b.memory);
    let names = touched(&mut there, b.device);
    copy(&there, b.device, &mut world, device, &names);
    world.engine.start(device).unwrap();
    let own = world.engine.connected(a.device, left.qp.qpn).unwrap();
    let peer = world.engine.connected(device, right.qp.qpn).unwrap();
    let verdicts = [Verdict::Done(8), Verdict::Atomic(40), Verdict::Again, Verdict::Atomic(41)];
    world.engine.come_local(own, &verdicts, 500, 600);
    world.engine.come_local(peer, &[], 600, 500);
    world.settle();
    let done: Vec<(u64, Status)> =
        left.completions.drain().iter().map(|done| (done.wr_id, done.status)).collect();
    assert_eq!(done, (1..=5).map(|wr_id| (wr_id, Status::Success)).collect::<Vec<_>>());
    let word = |memory: &HeapMemory, at: u64| {
        let mut bytes = [0; 8];
        memory.read(at, &mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    };
    assert_eq!((word(&a.memory, 128), word(&a.memory, 136)), (40, 41), "results that the peer had kept");
    assert_eq!(word(&a.memory, 256), 77, "the READ was done beside");
    assert_eq!((word(&b.memory, 64), word(&b.memory, 72)), (0, 0), "what was done isn't done again");
    assert_eq!(word(&b.memory, 80), 1, "what wasn't is");
    assert_eq!(left.sends.in_flight(), 0);
}

#[test]
fn what_a_transport_had_keeps_its_order_when_the_peer_leaves_again() {
    let mut world = World::default();
    let (a, a_mr) = guest(&mut world);
    world.engine.set_uplink(SegmentId(1), true);
    let (b, b_mr) = guest(&mut world);
    world.engine.set_detour(b.device, true);
    let (left, right) = world.connect(&a, &b, QpKind::Rc);
    world.send(&left, requests::read(1, 0, b_mr.rkey, &[sge(a_mr, 0, 8)]));
    world.send(&left, requests::fetch_add(2, 64, b_mr.rkey, 1, &[sge(a_mr, 128, 8)]));
    world.settle();
    assert_eq!(world.engine.take_actions().len(), 2, "a transport has them");
    // The peer comes, and leaves before anything was executed locally: the READ is sent over the network again.
    world.engine.hold(a.device, b.gid);
    world.engine.set_detour(b.device, false);
    let own = world.engine.connected(a.device, left.qp.qpn).unwrap();
    let peer = world.engine.connected(b.device, right.qp.qpn).unwrap();
    world.engine.come_local(own, &[Verdict::Again, Verdict::Atomic(9)], 500, 600);
    world.engine.come_local(peer, &[], 600, 500);
    world.settle();
    world.engine.remove_device(b.device);
    world.engine.moved_away(SegmentId(1), b.gid);
    world.engine.open(a.device, b.gid);
    world.settle();
    let posted: Vec<_> = world.engine.take_actions();
    let tokens: Vec<u64> = posted
        .iter()
        .filter_map(|action| match action {
            Action::Post { request, .. } => Some(request.token),
            _ => None,
        })
        .collect();
    assert_eq!(tokens.len(), 1, "the READ: {posted:?}");
    assert_eq!(left.completions.waiting(), 0, "the addition waits for the READ before it");
    world.engine.remote_complete(own, tokens[0], Ok(8));
    world.settle();
    let order: Vec<u64> = left.completions.drain().iter().map(|done| done.wr_id).collect();
    assert_eq!(order, [1, 2]);
}

#[test]
fn addresses_have_one_owner() {
    let mut world = World::default();
    let (a, _) = guest(&mut world);
    let mut other = World::default();
    // A guest with the same address.
    let (b, _) = guest(&mut other);
    other.engine.track(b.device, true);
    stop(&mut other, b.device);
    let device = dormant(&mut world, &b.memory);
    let names = touched(&mut other, b.device);
    copy(&other, b.device, &mut world, device, &names);
    assert_eq!(world.engine.start(device), Err(InvalidState::AddressTaken(a.gid)));
    world.engine.remove_device(device);
    assert!(world.engine.has_address(SegmentId(1), a.gid), "the one who has it keeps it");
    // The device that stays continues.
    other.engine.start(b.device).unwrap();
    assert!(other.engine.has_address(SegmentId(1), b.gid));
}
