//! Rules on which hardware differs; docs/reference/rdma.md lists Causeway's, docs/design/specs/verbs-rules.md the sources.

use crate::common;

use common::{Pair, statuses};
use hca::attributes::{QpKind, QpState};
use hca::work::{Operation, Remote, Status};
use hca_testbed::requests;

/// As rxe: the key is checked before a receive is consumed, so the receive is flushed when the queue pair fails.
#[test]
fn a_write_with_immediate_and_a_bad_key_flushes_the_receive() {
    let mut pair = Pair::new(QpKind::Rc);
    pair.receive(5, &[(0x2000, 64)]);
    let remote = Remote { address: 0, rkey: pair.right_mr.rkey ^ 1 };
    let operation = Operation::Write { remote, immediate: Some([1, 2, 3, 4]) };
    pair.send(requests::request(1, operation, &[pair.left_sge(0, 8)]));
    assert_eq!(statuses(&pair.left), [(1, Status::RemoteAccess)]);
    assert_eq!(statuses(&pair.right), [(5, Status::Flushed)]);
    assert_eq!(pair.world.state(&pair.right), QpState::Error);
}

/// A READ or an atomic without a valid local buffer changes nothing at the peer, and doesn't fail the peer's queue pair.
#[test]
fn local_keys_are_checked_before_remote_memory_changes() {
    let requests: [fn(&Pair) -> hca::work::SendRequest; 3] = [
        |pair| requests::read(1, 0, pair.right_mr.rkey, &[bad(pair)]),
        |pair| requests::fetch_add(1, 0, pair.right_mr.rkey, 1, &[bad(pair)]),
        |pair| {
            let at = Remote { address: 0, rkey: pair.right_mr.rkey };
            requests::compare_swap(1, at, 0, 9, &[bad(pair)])
        },
    ];
    for request in requests {
        let mut pair = Pair::new(QpKind::Rc);
        let request = request(&pair);
        pair.send(request);
        assert_eq!(statuses(&pair.left), [(1, Status::LocalProtection)]);
        assert_eq!(pair.right_bytes(0, 8), [0; 8]);
        assert_eq!(pair.world.state(&pair.right), QpState::ReadyToSend);
    }
}

fn bad(pair: &Pair) -> hca::work::Sge {
    let mut sge = pair.left_sge(0, 8);
    sge.lkey ^= 1;
    sge
}

/// A list longer than 8 bytes is accepted, in one element or several, and only its first 8 bytes are written. A shorter one is refused.
#[test]
fn an_atomic_takes_a_longer_list_and_no_shorter_one() {
    for lengths in [&[9][..], &[8], &[4, 5], &[3, 3, 3], &[8, 1]] {
        let mut pair = Pair::new(QpKind::Rc);
        pair.fill_left(0x1000, &[0xAA; 64]);
        pair.fill_right(0, &7u64.to_le_bytes());
        let mut at = 0x1000;
        let mut sges = Vec::new();
        for length in lengths {
            sges.push(pair.left_sge(at, *length));
            at += u64::from(*length);
        }
        pair.send(requests::fetch_add(1, 0, pair.right_mr.rkey, 3, &sges));
        let done = pair.left.completions.poll().unwrap();
        assert_eq!((done.status, done.byte_len), (Status::Success, 8), "{lengths:?}");
        assert_eq!(pair.left_bytes(0x1000, 8), 7u64.to_le_bytes());
        assert_eq!(pair.left_bytes(0x1008, 8), [0xAA; 8]);
        assert_eq!(pair.right_bytes(0, 8), 10u64.to_le_bytes());
    }
    let mut pair = Pair::new(QpKind::Rc);
    pair.send(requests::fetch_add(1, 0, pair.right_mr.rkey, 3, &[pair.left_sge(0x1000, 7)]));
    assert_eq!(statuses(&pair.left), [(1, Status::LocalLength)]);
    assert_eq!(pair.right_bytes(0, 8), [0; 8]);
}
