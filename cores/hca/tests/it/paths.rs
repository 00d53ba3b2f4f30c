//! Look-ups of a connection's path: after its own changes, and not after those of others.

use crate::common;

use common::{Pair, statuses};
use dma::HeapMemory;
use hca::attributes::{QpAttributeMask as Mask, QpKind, QpState};
use hca::work::Status;
use hca_testbed::{World, requests};

fn write(pair: &mut Pair, number: u64) -> Vec<(u64, Status)> {
    let (sge, rkey) = (pair.left_sge(0, 8), pair.right_mr.rkey);
    pair.send(requests::write(number, 0, rkey, &[sge]));
    statuses(&pair.left)
}

/// A VM that changes, fails, resets and destroys queue pairs causes no path look-up of other VMs.
#[test]
fn changes_of_one_vms_queue_pairs_cost_others_no_lookup() {
    let mut pair = Pair::new(QpKind::Rc);
    assert_eq!(write(&mut pair, 1), [(1, Status::Success)]);
    let (other, facing) = [(); 2].map(|()| pair.world.guest(HeapMemory::new(4096))).into();
    let before = pair.world.engine.path_lookups();
    assert_eq!(write(&mut pair, 2), [(2, Status::Success)]);
    let added = pair.world.engine.path_lookups() - before;
    assert!(added <= 1, "two devices came, with their addresses");
    let (mine, _) = pair.world.connect(&other, &facing, QpKind::Rc);
    let attributes = World::<HeapMemory>::attributes(facing.gid, mine.qp.qpn);
    for (round, to) in (3..).zip([QpState::ReadyToSend, QpState::Error, QpState::Reset, QpState::Init]) {
        let mut with = attributes;
        with.state = to;
        let mask = if to == QpState::Init {
            Mask::PKEY_INDEX | Mask::PORT | Mask::ACCESS_FLAGS
        } else {
            Mask::empty()
        };
        pair.world.modify(mine.device, mine.qp.handle, mask, &with).unwrap();
        let before = pair.world.engine.path_lookups();
        assert_eq!(write(&mut pair, round), [(round, Status::Success)]);
        assert_eq!(pair.world.engine.path_lookups(), before, "after a change to {to:?}");
    }
    pair.world.engine.destroy_qp(mine.device, mine.qp.handle).unwrap();
    let before = pair.world.engine.path_lookups();
    assert_eq!(write(&mut pair, 9), [(9, Status::Success)]);
    assert_eq!(pair.world.engine.path_lookups(), before, "after a destruction");
}

/// A change of either end takes effect at once.
#[test]
fn a_peer_that_changes_is_looked_up_again() {
    let mut pair = Pair::new(QpKind::Rc);
    assert_eq!(write(&mut pair, 1), [(1, Status::Success)]);
    let mut failed = World::<HeapMemory>::attributes(pair.a.gid, pair.left.qp.qpn);
    failed.state = QpState::Error;
    let right = pair.right.clone();
    pair.world.modify(right.device, right.qp.handle, Mask::empty(), &failed).unwrap();
    assert_eq!(write(&mut pair, 2), [], "nobody answers");
    pair.world.pass(1_000_000_000);
    assert_eq!(statuses(&pair.left), [(2, Status::RetryExceeded)]);
}

/// An unreliable requester finds its peer as soon as the peer is ready.
#[test]
fn an_unreliable_requester_finds_a_peer_that_comes_up_later() {
    let mut pair = Pair::raw(QpKind::Uc);
    let attributes = World::<HeapMemory>::attributes(pair.b.gid, pair.right.qp.qpn);
    pair.raise_left(QpState::ReadyToSend, &attributes);
    pair.fill_left(0, &[5; 8]);
    assert_eq!(write(&mut pair, 1), [(1, Status::Success)]);
    assert_eq!(pair.right_bytes(0, 8), [0; 8], "nobody was there");
    pair.raise_right(QpState::ReadyToReceive);
    assert_eq!(write(&mut pair, 2), [(2, Status::Success)]);
    assert_eq!(pair.right_bytes(0, 8), [5; 8]);
}

/// A queue pair that is destroyed or reset while its peer is suspended leaves the list of parked ones.
#[test]
fn a_held_queue_pair_that_goes_is_forgotten() {
    for destroyed in [true, false] {
        let mut pair = Pair::new(QpKind::Rc);
        pair.world.engine.hold(pair.a.device, pair.b.gid);
        assert_eq!(write(&mut pair, 1), []);
        assert_eq!(pair.world.engine.parked(), 1);
        let left = pair.left.clone();
        if destroyed {
            pair.world.engine.destroy_qp(left.device, left.qp.handle).unwrap();
        } else {
            let mut reset = World::<HeapMemory>::attributes(pair.b.gid, pair.right.qp.qpn);
            reset.state = QpState::Reset;
            pair.world.modify(left.device, left.qp.handle, Mask::empty(), &reset).unwrap();
        }
        assert_eq!(pair.world.engine.parked(), 0, "destroyed: {destroyed}");
        pair.world.engine.open(pair.a.device, pair.b.gid);
        pair.world.settle();
        assert_eq!(statuses(&left), []);
    }
}
