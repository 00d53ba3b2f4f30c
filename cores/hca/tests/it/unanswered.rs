//! When a requester learns that its responder doesn't respond: after the timeout and as many more as it has retries, not earlier and not
//! later.

use crate::common;

use common::Pair;
use dma::HeapMemory;
use hca::attributes::{QpAttributeMask as Mask, QpKind, QpState};
use hca::work::{Operation, Remote, SendRequest, Status};
use hca_testbed::{World, requests};

/// Timeout code and retry count of the pair.
const TIMEOUT: u8 = 5;
const RETRIES: u8 = 3;
/// The time to failure: 4.096 us times 2 to the power of the code, once for the first try and once for each retry.
const BOUND_NS: u64 = (4096 << TIMEOUT) * (RETRIES as u64 + 1);

/// Makes a request for the requester.
type Make = fn(&Pair) -> SendRequest;

const OPERATIONS: [(&str, Make); 7] = [
    ("SEND", |pair| requests::send(1, &[pair.left_sge(0, 8)])),
    ("SEND with immediate", |pair| {
        let operation = Operation::Send { immediate: Some([1; 4]), invalidate: None, datagram: None };
        requests::request(1, operation, &[pair.left_sge(0, 8)])
    }),
    ("WRITE", |pair| requests::write(1, 0, pair.right_mr.rkey, &[pair.left_sge(0, 8)])),
    ("WRITE with immediate", |pair| {
        let operation = Operation::Write { remote: remote(pair), immediate: Some([1; 4]) };
        requests::request(1, operation, &[pair.left_sge(0, 8)])
    }),
    ("READ", |pair| requests::read(1, 0, pair.right_mr.rkey, &[pair.left_sge(0, 8)])),
    ("compare and swap", |pair| requests::compare_swap(1, remote(pair), 0, 1, &[pair.left_sge(0, 8)])),
    ("fetch and add", |pair| requests::fetch_add(1, 0, pair.right_mr.rkey, 1, &[pair.left_sge(0, 8)])),
];

fn remote(pair: &Pair) -> Remote {
    Remote { address: 0, rkey: pair.right_mr.rkey }
}

fn pair_with_responder_in(state: QpState) -> Pair {
    let mut pair = Pair::raw(QpKind::Rc);
    let mut attributes = World::<HeapMemory>::attributes(pair.b.gid, pair.right.qp.qpn);
    (attributes.timeout, attributes.retry_count) = (TIMEOUT, RETRIES);
    pair.raise_left(QpState::ReadyToSend, &attributes);
    match state {
        QpState::Reset => {}
        QpState::Init => pair.raise_right(QpState::Init),
        _ => {
            pair.raise_right(QpState::ReadyToSend);
            let mut failed = World::<HeapMemory>::attributes(pair.a.gid, pair.left.qp.qpn);
            failed.state = QpState::Error;
            let right = pair.right.clone();
            pair.world.modify(right.device, right.qp.handle, Mask::empty(), &failed).unwrap();
        }
    }
    pair
}

#[test]
fn a_responder_that_is_not_ready_is_told_of_after_all_retries() {
    for state in [QpState::Reset, QpState::Init, QpState::Error] {
        for (name, operation) in OPERATIONS {
            let mut pair = pair_with_responder_in(state);
            let request = operation(&pair);
            pair.send(request);
            pair.world.pass(BOUND_NS - 1);
            assert_eq!(pair.left.completions.waiting(), 0, "{name} to {state:?}: too early");
            pair.world.pass(1);
            let done = pair.left.completions.drain();
            let done: Vec<_> = done.iter().map(|done| (done.wr_id, done.status)).collect();
            assert_eq!(done, [(1, Status::RetryExceeded)], "{name} to {state:?}");
            assert_eq!(pair.world.state(&pair.left), QpState::Error);
            let counters = pair.world.engine.counters(pair.a.device);
            assert_eq!(
                (counters.local_ack_timeout_err, counters.req_transport_retries_exceeded),
                (u64::from(RETRIES) + 1, 1)
            );
            assert_eq!(pair.right_bytes(0, 8), [0; 8]);
        }
    }
}

/// Timeout code 0: the requester waits without limit, as the specification demands.
#[test]
fn without_a_timeout_nobody_is_told() {
    let mut pair = Pair::raw(QpKind::Rc);
    let mut attributes = World::<HeapMemory>::attributes(pair.b.gid, pair.right.qp.qpn);
    attributes.timeout = 0;
    pair.raise_left(QpState::ReadyToSend, &attributes);
    let request = requests::send(1, &[pair.left_sge(0, 8)]);
    pair.send(request);
    pair.world.pass(3_600_000_000_000);
    assert_eq!(pair.left.completions.waiting(), 0);
}
