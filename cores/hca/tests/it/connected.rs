//! Connected queue pairs: data, completions, and the errors at either end.

use crate::common;

use common::{Pair, SIZE, sge, statuses};
use dma::Dma;
use hca::attributes::{Access, QpAttributeMask as Mask, QpKind, QpState};
use hca::work::{Arm, AsyncEvent, CompletedOperation, Malformed, Operation, ReceiveRequest, Remote, Status};
use hca_testbed::{World, requests};

#[test]
fn a_send_lands_in_the_receive_and_completes_at_both_ends() {
    let mut pair = Pair::new(QpKind::Rc);
    pair.fill_left(0x1000, b"hello, world");
    pair.receive(1, &[(0x2000, 5), (0x3000, 100)]);
    let mut request = requests::send(2, &[pair.left_sge(0x1000, 7), pair.left_sge(0x1007, 5)]);
    request.operation = Operation::Send { immediate: Some([1, 2, 3, 4]), invalidate: None, datagram: None };
    pair.send(request);
    assert_eq!(pair.right_bytes(0x2000, 5), b"hello");
    assert_eq!(pair.right_bytes(0x3000, 7), b", world");
    let done = pair.right.completions.poll().unwrap();
    assert_eq!((done.wr_id, done.status, done.byte_len), (1, Status::Success, 12));
    assert_eq!((done.operation, done.immediate), (CompletedOperation::Receive, Some([1, 2, 3, 4])));
    assert_eq!(done.qp, pair.right.qp.handle);
    let done = pair.left.completions.poll().unwrap();
    assert_eq!((done.wr_id, done.status), (2, Status::Success));
    assert_eq!(pair.left.sends.retired(), 1);
}

#[test]
fn a_large_message_goes_in_quanta_between_those_of_others() {
    let mut pair = Pair::new(QpKind::Rc);
    let bytes: Vec<u8> = (0..600_000u32).map(|i| i.to_le_bytes()[0] ^ i.to_le_bytes()[1]).collect();
    pair.fill_left(0x4_0001, &bytes);
    pair.receive(1, &[(0x4_0003, 600_000)]);
    pair.left.sends.post(requests::send(2, &[pair.left_sge(0x4_0001, 600_000)]));
    pair.world.engine.doorbell_send(pair.left.device, pair.left.qp.handle);
    pair.world.poll();
    assert_eq!(pair.right.completions.waiting(), 0, "one turn is one quantum");
    pair.world.settle();
    assert_eq!(statuses(&pair.right), [(1, Status::Success)]);
    assert_eq!(pair.right_bytes(0x4_0003, 600_000), bytes);
}

#[test]
fn write_and_read_leave_the_peer_unaware() {
    let mut pair = Pair::new(QpKind::Rc);
    pair.fill_left(0x1000, b"abcdef");
    let (rkey, sges) = (pair.right_mr.rkey, [pair.left_sge(0x1000, 6)]);
    pair.send(requests::write(1, 0x5000, rkey, &sges));
    assert_eq!(pair.right_bytes(0x5000, 6), b"abcdef");
    let sges = [pair.left_sge(0x7000, 2), pair.left_sge(0x7100, 4)];
    pair.send(requests::read(2, 0x5000, rkey, &sges));
    assert_eq!(pair.left_bytes(0x7000, 2), b"ab");
    assert_eq!(pair.left_bytes(0x7100, 4), b"cdef");
    let done = pair.left.completions.drain();
    assert_eq!(done.iter().map(|c| (c.wr_id, c.byte_len)).collect::<Vec<_>>(), [(1, 0), (2, 6)]);
    assert_eq!(pair.right.completions.waiting(), 0);
}

#[test]
fn write_with_immediate_consumes_a_receive_when_the_data_is_there() {
    let mut pair = Pair::new(QpKind::Rc);
    pair.fill_left(0x1000, b"abcdef");
    let remote = Remote { address: 0x5000, rkey: pair.right_mr.rkey };
    let operation = Operation::Write { remote, immediate: Some([9; 4]) };
    pair.send(requests::request(1, operation, &[pair.left_sge(0x1000, 6)]));
    assert_eq!(pair.right_bytes(0x5000, 6), b"abcdef");
    assert_eq!(pair.left.completions.waiting(), 0, "no receive yet");
    pair.receive(2, &[]);
    pair.world.settle();
    let done = pair.right.completions.poll().unwrap();
    assert_eq!((done.operation, done.byte_len), (CompletedOperation::ReceiveWriteImmediate, 6));
    assert_eq!(done.immediate, Some([9; 4]));
    assert_eq!(statuses(&pair.left), [(1, Status::Success)]);
}

#[test]
fn atomics_return_the_value_before() {
    let mut pair = Pair::new(QpKind::Rc);
    pair.fill_right(0x5000, &40u64.to_le_bytes());
    let rkey = pair.right_mr.rkey;
    let sges = [pair.left_sge(0x1000, 4), pair.left_sge(0x1100, 4)];
    pair.send(requests::fetch_add(1, 0x5000, rkey, 2, &sges));
    assert_eq!(pair.left_bytes(0x1000, 4), 40u32.to_le_bytes());
    let at = Remote { address: 0x5000, rkey };
    let sges = [pair.left_sge(0x1000, 8)];
    pair.send(requests::compare_swap(2, at, 41, 7, &sges));
    assert_eq!(pair.right_bytes(0x5000, 8), 42u64.to_le_bytes());
    pair.send(requests::compare_swap(3, at, 42, 7, &sges));
    assert_eq!(pair.right_bytes(0x5000, 8), 7u64.to_le_bytes());
    assert_eq!(pair.left_bytes(0x1000, 8), 42u64.to_le_bytes());
    assert!(pair.left.completions.drain().iter().all(|c| c.status == Status::Success && c.byte_len == 8));
}

/// The outcome of a failing request: its status, the responder's event, and whether the responder fails as well.
fn fails(
    change: impl FnOnce(&mut Pair) -> hca::work::SendRequest,
) -> (Status, Vec<AsyncEvent>, QpState, QpState) {
    let mut pair = Pair::new(QpKind::Rc);
    let request = change(&mut pair);
    pair.left.sends.post(request);
    pair.left.sends.post(requests::send(77, &[]));
    pair.world.engine.doorbell_send(pair.left.device, pair.left.qp.handle);
    pair.world.settle();
    let done = statuses(&pair.left);
    assert_eq!(done[1], (77, Status::Flushed), "what is behind is flushed");
    let events = pair.world.events.others.iter().map(|(_, event)| *event).collect();
    (done[0].1, events, pair.world.state(&pair.left), pair.world.state(&pair.right))
}

#[test]
fn local_errors_stay_with_the_requester() {
    let local = |status| (status, vec![], QpState::Error, QpState::ReadyToSend);
    let bad_key = |pair: &mut Pair| requests::send(1, &[sge(0x1000, 1, pair.left_mr.lkey ^ 0x100)]);
    assert_eq!(fails(bad_key), local(Status::LocalProtection));
    let beyond = |pair: &mut Pair| requests::send(1, &[pair.left_sge(SIZE - 1, 2)]);
    assert_eq!(fails(beyond), local(Status::LocalProtection));
    let datagram = |pair: &mut Pair| requests::datagram(1, 1, pair.b.gid, pair.right.qp.qpn, 0, &[]);
    assert_eq!(fails(datagram), local(Status::LocalQpOperation));
    let short =
        |pair: &mut Pair| requests::fetch_add(1, 0x5000, pair.right_mr.rkey, 1, &[pair.left_sge(0x1000, 7)]);
    assert_eq!(fails(short), local(Status::LocalLength));
    let long = |pair: &mut Pair| {
        let sges = vec![sge(0x1000, u32::MAX, pair.left_mr.lkey); 2];
        requests::send(1, &sges)
    };
    assert_eq!(fails(long), local(Status::LocalLength));
    let read_only = |pair: &mut Pair| {
        let mr = pair.world.register(&pair.a, 0x1000, 0x1000, Access::empty());
        requests::read(1, 0x5000, pair.right_mr.rkey, &[sge(0x1000, 8, mr.lkey)])
    };
    assert_eq!(fails(read_only), local(Status::LocalProtection));
    let unknown_key = |_: &mut Pair| requests::invalidate(1, 0x1234);
    assert_eq!(fails(unknown_key), local(Status::MemoryBind));
}

#[test]
fn access_errors_fail_both_ends() {
    let handle = Pair::new(QpKind::Rc).right.qp.handle;
    let denied =
        (Status::RemoteAccess, vec![AsyncEvent::QpAccessError(handle)], QpState::Error, QpState::Error);
    let bad_key =
        |pair: &mut Pair| requests::write(1, 0x5000, pair.right_mr.rkey ^ 1, &[pair.left_sge(0x1000, 1)]);
    assert_eq!(fails(bad_key), denied);
    let beyond =
        |pair: &mut Pair| requests::write(1, SIZE - 1, pair.right_mr.rkey, &[pair.left_sge(0x1000, 2)]);
    assert_eq!(fails(beyond), denied);
    let wraps =
        |pair: &mut Pair| requests::read(1, u64::MAX, pair.right_mr.rkey, &[pair.left_sge(0x1000, 2)]);
    assert_eq!(fails(wraps), denied);
    let no_right = |pair: &mut Pair| {
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ;
        let mr = pair.world.register(&pair.b, 0x5000, 0x1000, access);
        requests::write(1, 0x5000, mr.rkey, &[pair.left_sge(0x1000, 2)])
    };
    assert_eq!(fails(no_right), denied);
    let other_pd = |pair: &mut Pair| {
        let pd = pair.world.engine.create_pd(pair.b.device, hca::names::ContextHandle(0)).unwrap();
        let other = hca_testbed::Guest { pd, ..pair.b.clone() };
        let mr = pair.world.register(&other, 0x5000, 0x1000, Access::all());
        requests::write(1, 0x0, mr.rkey, &[pair.left_sge(0x1000, 2)])
    };
    assert_eq!(fails(other_pd), denied);
    let gone = |pair: &mut Pair| {
        pair.world.engine.deregister_mr(pair.b.device, pair.right_mr.handle).unwrap();
        requests::write(1, 0x5000, pair.right_mr.rkey, &[pair.left_sge(0x1000, 2)])
    };
    assert_eq!(fails(gone), denied);
    let dma = |pair: &mut Pair| {
        let mr = pair.world.engine.register_dma_mr(pair.b.device, pair.b.pd, 0xFF).unwrap();
        requests::write(1, 0x5000, mr.rkey, &[pair.left_sge(0x1000, 2)])
    };
    assert_eq!(fails(dma), denied, "all of guest memory is nothing for peers");
}

#[test]
fn invalid_requests_fail_both_ends() {
    let handle = Pair::new(QpKind::Rc).right.qp.handle;
    let event = vec![AsyncEvent::QpRequestError(handle)];
    let refused = (Status::RemoteInvalidRequest, event, QpState::Error, QpState::Error);
    let misaligned =
        |pair: &mut Pair| requests::fetch_add(1, 0x5004, pair.right_mr.rkey, 1, &[pair.left_sge(0x1000, 8)]);
    assert_eq!(fails(misaligned), refused);
    let not_permitted = |pair: &mut Pair| {
        let mut with = pair.world.engine.query_qp(pair.b.device, pair.right.qp.handle).unwrap().0;
        with.access = Access::REMOTE_READ;
        let (device, qp) = (pair.b.device, pair.right.qp.handle);
        pair.world.modify(device, qp, Mask::ACCESS_FLAGS, &with).unwrap();
        requests::write(1, 0x5000, pair.right_mr.rkey, &[pair.left_sge(0x1000, 8)])
    };
    assert_eq!(fails(not_permitted), refused);
}

#[test]
fn a_send_that_does_not_fit_fails_both_ends() {
    let mut pair = Pair::new(QpKind::Rc);
    pair.receive(1, &[(0x2000, 5)]);
    pair.receive(2, &[(0x2000, 5)]);
    pair.send(requests::send(3, &[pair.left_sge(0x1000, 6)]));
    assert_eq!(statuses(&pair.right), [(1, Status::LocalLength), (2, Status::Flushed)]);
    assert_eq!(statuses(&pair.left), [(3, Status::RemoteInvalidRequest)]);
    assert_eq!(pair.right_bytes(0x2000, 5), [0; 5]);
}

#[test]
fn a_receive_into_foreign_memory_fails_both_ends() {
    let mut pair = Pair::new(QpKind::Rc);
    pair.world.receive(&pair.right, 1, &[sge(0x2000, 5, 0x1234)]);
    pair.send(requests::send(3, &[pair.left_sge(0x1000, 5)]));
    assert_eq!(statuses(&pair.right), [(1, Status::LocalProtection)]);
    assert_eq!(statuses(&pair.left), [(3, Status::RemoteOperation)]);
    let mut pair = Pair::new(QpKind::Rc);
    pair.right.receives.post_malformed(1, Malformed::SgeCount(99));
    pair.send(requests::send(3, &[]));
    assert_eq!(statuses(&pair.right), [(1, Status::LocalQpOperation)]);
    assert_eq!(statuses(&pair.left), [(3, Status::RemoteOperation)]);
}

#[test]
fn malformed_requests_and_broken_rings_fail_the_queue_pair() {
    let mut pair = Pair::new(QpKind::Rc);
    pair.left.sends.post_malformed(5, Malformed::Opcode(99));
    pair.send(requests::send(6, &[]));
    assert_eq!(statuses(&pair.left), [(5, Status::LocalQpOperation), (6, Status::Flushed)]);
    let mut pair = Pair::new(QpKind::Rc);
    pair.left.sends.break_ring();
    pair.world.engine.doorbell_send(pair.left.device, pair.left.qp.handle);
    pair.world.settle();
    assert_eq!(pair.world.state(&pair.left), QpState::Error);
    let fatal = AsyncEvent::QpFatal(pair.left.qp.handle);
    assert_eq!(pair.world.events.others, [(pair.a.device, fatal)]);
}

#[test]
fn without_a_receive_the_requester_waits_and_goes_on_at_once_when_there_is_one() {
    let mut pair = Pair::new(QpKind::Rc);
    pair.send(requests::send(1, &[pair.left_sge(0x1000, 8)]));
    assert_eq!(pair.left.completions.waiting(), 0);
    assert_eq!(pair.world.engine.counters(pair.b.device).rnr_nak_sent, 1);
    pair.receive(2, &[(0x2000, 8)]);
    pair.world.settle();
    assert_eq!(statuses(&pair.left), [(1, Status::Success)]);
    assert_eq!(statuses(&pair.right), [(2, Status::Success)]);
}

#[test]
fn rnr_retries_run_out_by_the_responders_timer() {
    let mut pair = Pair::new(QpKind::Rc);
    pair.send(requests::send(1, &[]));
    // Timer code 1 is 10 microseconds; the first try and two retries.
    pair.world.pass(29_000);
    assert_eq!(pair.left.completions.waiting(), 0);
    pair.world.pass(2_000);
    assert_eq!(statuses(&pair.left), [(1, Status::RnrRetryExceeded)]);
    assert_eq!(pair.world.state(&pair.left), QpState::Error);
    assert_eq!(pair.world.state(&pair.right), QpState::ReadyToSend);
    assert_eq!(pair.world.engine.counters(pair.a.device).rnr_nak_retry_err, 1);
}

#[test]
fn rnr_retry_seven_is_for_ever() {
    let mut pair = Pair::raw(QpKind::Rc);
    let mut with = World::<dma::HeapMemory>::attributes(pair.b.gid, pair.right.qp.qpn);
    with.rnr_retry = 7;
    pair.raise_left(QpState::ReadyToSend, &with);
    pair.raise_right(QpState::ReadyToSend);
    pair.send(requests::send(1, &[]));
    pair.world.pass(100_000_000);
    assert_eq!(pair.left.completions.waiting(), 0);
    pair.receive(2, &[]);
    pair.world.settle();
    assert_eq!(statuses(&pair.left), [(1, Status::Success)]);
}

#[test]
fn a_peer_that_does_not_answer_is_tried_until_the_retries_run_out() {
    let mut pair = Pair::raw(QpKind::Rc);
    let with = World::<dma::HeapMemory>::attributes(pair.b.gid, pair.right.qp.qpn);
    pair.raise_left(QpState::ReadyToSend, &with);
    pair.send(requests::send(1, &[]));
    // Timeout code 1 is 8.192 microseconds; the first try and two retries.
    pair.world.pass(3 * 8192 - 1);
    assert_eq!(pair.left.completions.waiting(), 0);
    pair.world.pass(2);
    assert_eq!(statuses(&pair.left), [(1, Status::RetryExceeded)]);
    assert_eq!(pair.world.engine.counters(pair.a.device).local_ack_timeout_err, 3);
}

#[test]
fn a_peer_that_comes_up_is_served_at_once() {
    let mut pair = Pair::raw(QpKind::Rc);
    let with = World::<dma::HeapMemory>::attributes(pair.b.gid, pair.right.qp.qpn);
    pair.raise_left(QpState::ReadyToSend, &with);
    pair.send(requests::send(1, &[]));
    pair.right.receives.post(ReceiveRequest { wr_id: 2, sges: Default::default() });
    pair.raise_right(QpState::ReadyToReceive);
    pair.world.settle();
    assert_eq!(statuses(&pair.left), [(1, Status::Success)]);
    let established = AsyncEvent::CommunicationEstablished(pair.right.qp.handle);
    assert_eq!(pair.world.events.others, [(pair.b.device, established)]);
}

#[test]
fn who_is_not_named_as_peer_is_not_answered() {
    type Change = fn(&mut hca::attributes::QpAttributes);
    let changes: [(&str, Change); 4] = [
        ("packet sequence number", |with| with.rq_psn += 1),
        ("number", |with| with.destination_qpn.0 ^= 1 << 16),
        ("address", |with| with.address.dgid = hca_testbed::gid(77)),
        ("all is well", |_| ()),
    ];
    for (what, change) in changes {
        let mut pair = Pair::raw(QpKind::Rc);
        let with = World::<dma::HeapMemory>::attributes(pair.b.gid, pair.right.qp.qpn);
        pair.raise_left(QpState::ReadyToSend, &with);
        let mut with = World::<dma::HeapMemory>::attributes(pair.a.gid, pair.left.qp.qpn);
        change(&mut with);
        let (device, qp) = (pair.right.device, pair.right.qp.handle);
        pair.world.raise(device, qp, QpKind::Rc, QpState::ReadyToSend, &with);
        pair.receive(2, &[]);
        pair.send(requests::send(1, &[]));
        pair.world.pass(100_000);
        let expected = if what == "all is well" { Status::Success } else { Status::RetryExceeded };
        assert_eq!(statuses(&pair.left), [(1, expected)], "{what}");
    }
}

#[test]
fn sequence_numbers_move_as_on_a_wire() {
    let mut pair = Pair::new(QpKind::Rc);
    let rkey = pair.right_mr.rkey;
    // Path MTU 1024: 3 packets, 1 packet, 2 responses.
    pair.send(requests::write(1, 0x5000, rkey, &[pair.left_sge(0x1000, 2049)]));
    pair.send(requests::write(2, 0x5000, rkey, &[]));
    pair.send(requests::read(3, 0x5000, rkey, &[pair.left_sge(0x1000, 2048)]));
    let left = pair.world.engine.query_qp(pair.a.device, pair.left.qp.handle).unwrap().0;
    let right = pair.world.engine.query_qp(pair.b.device, pair.right.qp.handle).unwrap().0;
    assert_eq!((left.sq_psn, right.rq_psn), (13, 13));
    assert_eq!((left.rq_psn, right.sq_psn), (7, 7));
}

#[test]
fn in_error_everything_is_flushed_also_what_is_posted_later() {
    let mut pair = Pair::new(QpKind::Rc);
    pair.receive(1, &[]);
    pair.world.settle();
    let mut with = World::<dma::HeapMemory>::attributes(pair.a.gid, pair.left.qp.qpn);
    with.state = QpState::Error;
    pair.world.modify(pair.b.device, pair.right.qp.handle, Mask::empty(), &with).unwrap();
    pair.world.settle();
    assert_eq!(statuses(&pair.right), [(1, Status::Flushed)]);
    pair.receive(2, &[]);
    let right = pair.right.clone();
    let mut unsignaled = requests::send(3, &[]);
    unsignaled.signaled = false;
    pair.world.send(&right, unsignaled);
    pair.world.settle();
    let mut done = statuses(&pair.right);
    done.sort_by_key(|(wr_id, _)| *wr_id);
    assert_eq!(done, [(2, Status::Flushed), (3, Status::Flushed)], "unsignaled ones as well");
    pair.send(requests::send(4, &[]));
    pair.world.pass(100_000);
    assert_eq!(statuses(&pair.left), [(4, Status::RetryExceeded)]);
}

#[test]
fn draining_finishes_what_was_started_and_says_so() {
    let mut pair = Pair::new(QpKind::Rc);
    pair.send(requests::send(1, &[]));
    pair.left.sends.post(requests::send(2, &[]));
    let mut with = World::<dma::HeapMemory>::attributes(pair.b.gid, pair.right.qp.qpn);
    (with.state, with.sqd_notify) = (QpState::SendQueueDrained, true);
    pair.world.modify(pair.a.device, pair.left.qp.handle, Mask::SQD_NOTIFY, &with).unwrap();
    assert!(pair.world.engine.query_qp(pair.a.device, pair.left.qp.handle).unwrap().1, "it drains");
    pair.receive(3, &[]);
    pair.receive(4, &[]);
    pair.world.settle();
    assert_eq!(statuses(&pair.left), [(1, Status::Success)]);
    assert_eq!(pair.world.events.others, [(pair.a.device, AsyncEvent::SqDrained(pair.left.qp.handle))]);
    with.state = QpState::ReadyToSend;
    pair.world.modify(pair.a.device, pair.left.qp.handle, Mask::empty(), &with).unwrap();
    pair.world.settle();
    assert_eq!(statuses(&pair.left), [(2, Status::Success)]);
}

#[test]
fn after_reset_nothing_completes() {
    let mut pair = Pair::new(QpKind::Rc);
    pair.send(requests::send(1, &[]));
    let mut with = World::<dma::HeapMemory>::attributes(pair.b.gid, pair.right.qp.qpn);
    with.state = QpState::Reset;
    pair.world.modify(pair.a.device, pair.left.qp.handle, Mask::empty(), &with).unwrap();
    pair.receive(2, &[]);
    pair.world.pass(1_000_000);
    assert_eq!((pair.left.completions.waiting(), pair.right.completions.waiting()), (0, 0));
}

#[test]
fn a_destroyed_queue_pair_completes_nothing_and_its_peer_learns_by_timeout() {
    let mut pair = Pair::new(QpKind::Rc);
    pair.send(requests::send(1, &[]));
    pair.world.engine.destroy_qp(pair.b.device, pair.right.qp.handle).unwrap();
    pair.world.pass(100_000);
    assert_eq!(statuses(&pair.left), [(1, Status::RetryExceeded)]);
    assert_eq!(pair.right.completions.waiting(), 0);
}

#[test]
fn unsignaled_requests_complete_silently() {
    let mut pair = Pair::new(QpKind::Rc);
    let mut request = requests::write(1, 0x5000, pair.right_mr.rkey, &[pair.left_sge(0x1000, 8)]);
    request.signaled = false;
    pair.send(request);
    assert_eq!((pair.left.completions.waiting(), pair.left.sends.retired()), (0, 1));
}

#[test]
fn fast_registration_and_both_invalidations() {
    let mut pair = Pair::new(QpKind::Rc);
    let mr = pair.world.engine.allocate_fast_mr(pair.b.device, pair.b.pd, 4).unwrap();
    let key = (mr.rkey & !0xFF) | 0x5A;
    let access = (Access::LOCAL_WRITE | Access::REMOTE_WRITE).bits();
    let right = pair.right.clone();
    // Before, it is invalid; then pages 3 and 1 are the region.
    pair.world.send(&right, requests::fast_register(1, key, 0x10, access, &[0x3000, 0x1000]));
    pair.world.settle();
    assert_eq!(statuses(&pair.right), [(1, Status::Success)]);
    pair.fill_left(0x1000, b"xy");
    pair.send(requests::write(2, 0xFFF, key, &[pair.left_sge(0x1000, 2)]));
    assert_eq!(pair.right_bytes(0x3FFF, 1), b"x");
    assert_eq!(pair.right_bytes(0x1000, 1), b"y");
    assert_eq!(statuses(&pair.left), [(2, Status::Success)]);
    // SEND with invalidate invalidates it.
    pair.receive(3, &[]);
    let operation = Operation::Send { immediate: None, invalidate: Some(key), datagram: None };
    pair.send(requests::request(4, operation, &[]));
    let done = pair.right.completions.poll().unwrap();
    assert_eq!(done.invalidated.map(|key| key.0), Some(key));
    // Valid again, then invalidated locally.
    pair.world.send(&right, requests::fast_register(5, key, 0x10, access, &[0x3000]));
    pair.world.send(&right, requests::invalidate(6, key));
    pair.world.settle();
    assert_eq!(statuses(&pair.right), [(5, Status::Success), (6, Status::Success)]);
    let _ = pair.left.completions.drain();
    pair.send(requests::write(7, 0x10, key, &[pair.left_sge(0x1000, 2)]));
    assert_eq!(statuses(&pair.left), [(7, Status::RemoteAccess)]);
}

#[test]
fn a_valid_fast_region_is_not_registered_again() {
    let mut pair = Pair::new(QpKind::Rc);
    let mr = pair.world.engine.allocate_fast_mr(pair.a.device, pair.a.pd, 1).unwrap();
    pair.send(requests::fast_register(1, mr.rkey, 0, 1, &[0x1000]));
    pair.send(requests::fast_register(2, mr.rkey, 0, 1, &[0x2000]));
    assert_eq!(statuses(&pair.left), [(1, Status::Success), (2, Status::MemoryBind)]);
    let mut pair = Pair::new(QpKind::Rc);
    let mr = pair.world.engine.allocate_fast_mr(pair.a.device, pair.a.pd, 1).unwrap();
    pair.send(requests::fast_register(1, mr.rkey, 0, 1, &[0x1000, 0x2000]));
    assert_eq!(statuses(&pair.left), [(1, Status::MemoryBind)], "more pages than it was made for");
}

#[test]
fn zero_based_regions_count_from_zero() {
    let mut pair = Pair::new(QpKind::Rc);
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::ZERO_BASED;
    let mr = pair.world.register(&pair.b, 0x5010, 0x100, access);
    pair.fill_left(0x1000, b"z");
    pair.send(requests::write(1, 0xFF, mr.rkey, &[pair.left_sge(0x1000, 1)]));
    assert_eq!(pair.right_bytes(0x510F, 1), b"z");
    pair.send(requests::write(2, 0x5010, mr.rkey, &[pair.left_sge(0x1000, 1)]));
    assert_eq!(statuses(&pair.left), [(1, Status::Success), (2, Status::RemoteAccess)]);
}

#[test]
fn a_queue_pair_may_be_its_own_peer() {
    let mut world: World = World::default();
    let guest = world.guest(dma::HeapMemory::new(0x10000));
    let mr = world.register(&guest, 0, 0x10000, Access::all() - Access::ZERO_BASED);
    let own = world.queue_pair(&guest, QpKind::Rc, None);
    let with = World::<dma::HeapMemory>::attributes(guest.gid, own.qp.qpn);
    world.raise(guest.device, own.qp.handle, QpKind::Rc, QpState::ReadyToSend, &with);
    guest.memory.write(0x1000, b"self").unwrap();
    world.receive(&own, 1, &[sge(0x2000, 4, mr.lkey)]);
    world.send(&own, requests::send(2, &[sge(0x1000, 4, mr.lkey)]));
    world.send(&own, requests::write(3, 0x3000, mr.rkey ^ 1, &[sge(0x1000, 4, mr.lkey)]));
    world.settle();
    assert_eq!(statuses(&own), [(1, Status::Success), (2, Status::Success), (3, Status::RemoteAccess)]);
    assert_eq!(world.state(&own), QpState::Error);
    assert_eq!(dma::access::read_array::<4>(&guest.memory, 0x2000).unwrap(), *b"self");
}

#[test]
fn shared_receives_serve_all_and_report_their_limit() {
    let mut world: World = World::default();
    let (a, b) = (world.guest(dma::HeapMemory::new(0x10000)), world.guest(dma::HeapMemory::new(0x10000)));
    let (srq, ring) = world.shared_queue(&b, 2);
    let mut pairs = Vec::new();
    for _ in 0..3 {
        let (left, right) =
            (world.queue_pair(&a, QpKind::Rc, None), world.queue_pair(&b, QpKind::Rc, Some(srq)));
        world.join(&a, &left, &b, &right, QpKind::Rc);
        pairs.push((left, right));
    }
    for (left, _) in &pairs {
        world.send(left, requests::send(1, &[]));
    }
    world.settle();
    for wr_id in 10..13 {
        ring.post(ReceiveRequest { wr_id, sges: Default::default() });
    }
    world.engine.doorbell_srq(b.device, srq);
    world.settle();
    let mut received: Vec<u64> = pairs.iter().flat_map(|(_, right)| statuses(right)).map(|c| c.0).collect();
    received.sort_unstable();
    assert_eq!(received, [10, 11, 12]);
    assert_eq!(world.events.others, [(b.device, AsyncEvent::SrqLimitReached(srq))], "once");
    // A failed queue pair has consumed its last receive.
    world.events.others.clear();
    let right = &pairs[0].1;
    let mut with = World::<dma::HeapMemory>::attributes(a.gid, pairs[0].0.qp.qpn);
    with.state = QpState::Error;
    world.modify(b.device, right.qp.handle, Mask::empty(), &with).unwrap();
    assert_eq!(world.events.others, [(b.device, AsyncEvent::LastWqeReached(right.qp.handle))]);
}

#[test]
fn unreliable_connections_drop_silently() {
    let mut pair = Pair::new(QpKind::Uc);
    pair.send(requests::send(1, &[pair.left_sge(0x1000, 8)]));
    pair.send(requests::write(2, 0x5000, pair.right_mr.rkey ^ 1, &[pair.left_sge(0x1000, 8)]));
    pair.receive(3, &[(0x2000, 4)]);
    pair.send(requests::send(4, &[pair.left_sge(0x1000, 8)]));
    pair.send(requests::send(5, &[pair.left_sge(0x1000, 4)]));
    let ok = Status::Success;
    assert_eq!(statuses(&pair.left), [(1, ok), (2, ok), (4, ok), (5, ok)]);
    assert_eq!(statuses(&pair.right), [(3, ok)]);
    pair.send(requests::read(6, 0x5000, pair.right_mr.rkey, &[pair.left_sge(0x1000, 8)]));
    assert_eq!(statuses(&pair.left), [(6, Status::LocalQpOperation)]);
    assert_eq!(pair.world.state(&pair.left), QpState::SendQueueError);
}

#[test]
fn an_overrun_completion_queue_fails_its_queue_pairs() {
    let mut world: World = World::default();
    let (a, b) = (world.guest(dma::HeapMemory::new(0x10000)), world.guest(dma::HeapMemory::new(0x10000)));
    let completions = hca_testbed::CompletionRing::new(2);
    let kernel = hca::names::ContextHandle(0);
    let cq = world.engine.create_cq(a.device, kernel, 2, completions.clone()).unwrap();
    let left = world.queue_pair_on(&a, QpKind::Rc, None, cq, completions.clone());
    let bystander = world.queue_pair_on(&a, QpKind::Rc, None, cq, completions);
    let right = world.queue_pair(&b, QpKind::Rc, None);
    world.join(&a, &left, &b, &right, QpKind::Rc);
    let with = World::<dma::HeapMemory>::attributes(b.gid, right.qp.qpn);
    world.raise(a.device, bystander.qp.handle, QpKind::Rc, QpState::ReadyToReceive, &with);
    for wr_id in 0..3 {
        world.receive(&right, wr_id, &[]);
        world.send(&left, requests::send(wr_id, &[]));
    }
    world.settle();
    assert_eq!(world.events.others, [(a.device, AsyncEvent::CqError(cq))]);
    assert_eq!((world.state(&left), world.state(&bystander)), (QpState::Error, QpState::Error));
    assert_eq!(left.completions.waiting(), 2, "what was published stays");
    world.engine.arm_cq(a.device, cq, Arm::Next, &mut world.events);
}

/// Completions of a turn become visible together, and their slots before them. A poll leaves nothing unpublished.
#[test]
fn a_turn_shows_its_completions_at_its_end() {
    let mut pair = Pair::new(QpKind::Rc);
    for wr_id in 0..40 {
        pair.left.sends.post(requests::write(wr_id, 0, pair.right_mr.rkey, &[pair.left_sge(0, 8)]));
    }
    pair.world.engine.doorbell_send(pair.left.device, pair.left.qp.handle);
    let (mut shown, mut polls) = (0, 0);
    while shown < 40 {
        pair.world.poll();
        assert_eq!(pair.left.completions.hidden(), 0, "after a poll");
        shown = pair.left.completions.waiting();
        assert_eq!(pair.left.sends.retired() as usize, shown);
        assert_eq!(pair.left.sends.in_flight(), 0);
        polls += 1;
    }
    assert!(polls < 10, "{polls} polls for 40 requests");
}
