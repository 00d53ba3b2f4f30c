//! Queue pairs with shared receive queues.

use hca::provider::ReceiveQueue;
use hca::work::{Operation, Remote};
use hca_testbed::Connected;

use super::*;

const ENDS: [[bool; 2]; 3] = [[true, false], [false, true], [true, true]];

/// Number of receives left in a guest's shared queue.
fn left(side: &Side) -> u32 {
    side.qp.receives.available(&side.guest.memory)
}

/// More messages than the device has room for, alternating SENDs and WRITEs with immediate data, in both directions at once. Each consumes
/// one receive, in order, with the right bytes and values.
#[test]
fn messages_for_shared_queues_go_by_the_device_in_order() {
    for shared in ENDS {
        let mut pair = Pair::new(Setup { shared, ..Setup::default() });
        for which in [0, 1] {
            for wr_id in 0..60 {
                let sge = pair.sides[which].sge(100_000 + wr_id * 1000, 1000);
                pair.receive(which, wr_id, sge);
            }
        }
        for wr_id in 0..60u64 {
            for from in [0, 1] {
                pair.sides[from].fill(wr_id * 1000, &[u8::try_from(wr_id).unwrap() + 1; 1000]);
                let sge = pair.sides[from].sge(wr_id * 1000, 1000);
                let rkey = pair.sides[1 - from].mr.rkey;
                let request = if wr_id % 2 == 0 {
                    requests::send(wr_id, &[sge])
                } else {
                    let immediate = [9, 9, 9, u8::try_from(wr_id).unwrap()];
                    {
                        let remote = Remote { address: START + 100_000 + wr_id * 1000, rkey };
                        let operation = Operation::Write { remote, immediate: Some(immediate) };
                        requests::request(wr_id, operation, &[sge])
                    }
                };
                pair.send(from, request);
            }
        }
        let mut done = [[0u64; 2]; 2];
        pair.until(|sides| {
            for (side, done) in sides.iter_mut().zip(&mut done) {
                while let Some(got) = side.qp.completions.poll() {
                    assert_eq!(got.status, Status::Success, "{got:?}");
                    let receives = u64::from(is_receive(&got));
                    assert_eq!(got.wr_id, done[usize::try_from(receives).unwrap()], "in order");
                    if receives == 1 && got.wr_id % 2 == 1 {
                        assert_eq!(got.immediate, Some([9, 9, 9, u8::try_from(got.wr_id).unwrap()]));
                    }
                    done[usize::try_from(receives).unwrap()] += 1;
                }
            }
            (done == [[60; 2]; 2]).then_some(())
        });
        for side in &pair.sides {
            assert_eq!((side.transport(), left(side)), (("verbs", None), 0));
            for wr_id in 0..60u64 {
                let bytes = side.bytes(100_000 + wr_id * 1000, 1000);
                assert!(bytes.iter().all(|byte| u64::from(*byte) == wr_id + 1), "{wr_id}");
            }
        }
    }
}

fn is_receive(completion: &Completion) -> bool {
    use hca::work::CompletedOperation::{Receive, ReceiveWriteImmediate};
    matches!(completion.operation, Receive | ReceiveWriteImmediate)
}

/// Receives without a message stay in the shared queue, for its other users. Requests that consume no receive aren't announced.
#[test]
fn receives_leave_a_shared_queue_for_messages_alone() {
    let mut pair = Pair::new(Setup { shared: [false, true], ..Setup::default() });
    for wr_id in 0..10 {
        let sge = pair.sides[1].sge(wr_id * 100, 100);
        pair.receive(1, wr_id, sge);
    }
    let (sge, rkey) = (pair.sides[0].sge(0, 100), pair.sides[1].mr.rkey);
    pair.send(0, requests::write(0, START, rkey, &[sge]));
    assert_eq!((pair.completion(0).status, left(&pair.sides[1])), (Status::Success, 10));
    for wr_id in 0..3 {
        pair.send(0, requests::send(wr_id, &[sge]));
        assert_eq!(pair.completion(0).status, Status::Success);
        assert_eq!(
            (pair.completion(1).wr_id, left(&pair.sides[1])),
            (wr_id, 9 - u32::try_from(wr_id).unwrap())
        );
    }
    let counters =
        |side: &Side| side.transports.report(side.qp.device, side.qp.qp.qpn).unwrap().verbs.unwrap().counters;
    let (sender, receiver) = (counters(&pair.sides[0]), counters(&pair.sides[1]));
    assert_eq!((sender.announcements, receiver.announcements, receiver.receives), (3, 0, 3));
}

/// An empty shared queue delays the sender by its device's retries, and fails it if it stays empty.
#[test]
fn an_empty_shared_queue_is_waited_for() {
    let mut pair = Pair::new(Setup { shared: [false, true], ..Setup::default() });
    let sge = pair.sides[0].sge(0, 100);
    for wr_id in 0..3 {
        pair.send(0, requests::send(wr_id, &[sge]));
    }
    let start = Instant::now();
    pair.until(|sides| {
        assert!(sides[0].qp.completions.poll().is_none());
        (start.elapsed() > Duration::from_millis(100)).then_some(())
    });
    for wr_id in 0..3 {
        let buffer = pair.sides[1].sge(0, 100);
        pair.receive(1, 10 + wr_id, buffer);
        assert_eq!(pair.completion(0).wr_id, wr_id);
        assert_eq!(pair.completion(1).wr_id, 10 + wr_id);
    }
}

/// Two connections that wait for the same shared queue each get their receive, in any order. One that has failed by then passes it on.
#[test]
fn connections_share_a_queue() {
    for fails in [false, true] {
        let setup = Setup { shared: [false, true], ..Setup::default() };
        let mut pair = Pair::new(setup);
        let second = pair.sides.each_mut().map(|side| {
            let (cq, completions) = (side.qp.cq, side.qp.completions.clone());
            let mut qp = side.world.queue_pair_on(&side.guest, QpKind::Rc, side.srq, cq, completions);
            if side.srq.is_some() {
                qp.receives = side.qp.receives.clone();
            }
            qp
        });
        let ends = [0, 1].map(|at: usize| (pair.sides[at].guest.gid, second[at].qp.qpn));
        for (at, (gid, qpn)) in [ends[1], ends[0]].into_iter().enumerate() {
            let mut with = World::<MappedMemory>::attributes(gid, qpn);
            (with.timeout, with.retry_count, with.rnr_retry) = (14, 7, 7);
            let qp: &Connected = &second[at];
            pair.sides[at].world.raise(qp.device, qp.qp.handle, QpKind::Rc, QpState::ReadyToSend, &with);
        }
        let sge = pair.sides[0].sge(0, 100);
        pair.send(0, requests::send(1, &[sge]));
        pair.sides[0].world.send(&second[0], requests::send(2, &[sge]));
        let start = Instant::now();
        pair.until(|sides| {
            assert!(sides[0].qp.completions.poll().is_none());
            (start.elapsed() > Duration::from_millis(100)).then_some(())
        });
        if fails {
            // The first that waits doesn't need it any more.
            let side = &mut pair.sides[1];
            let with = World::<MappedMemory>::attributes(side.guest.gid, side.qp.qp.qpn);
            let with = QpAttributes { state: QpState::Reset, ..with };
            let (device, handle) = (side.qp.device, side.qp.qp.handle);
            side.world.modify(device, handle, QpAttributeMask::empty(), &with).unwrap();
        }
        let mut got = Vec::new();
        for wr_id in if fails { 10..11 } else { 10..12 } {
            let buffer = pair.sides[1].sge(0, 100);
            pair.receive(1, wr_id, buffer);
            let done = pair.completion(1);
            assert_eq!((done.wr_id, done.status), (wr_id, Status::Success));
            got.push(done.qp);
        }
        got.sort_unstable_by_key(|qp| qp.0);
        let mut all = vec![pair.sides[1].qp.qp.handle, second[1].qp.handle];
        all.sort_unstable_by_key(|qp| qp.0);
        assert_eq!(got, if fails { vec![second[1].qp.handle] } else { all });
    }
}

/// A connection that ends has its receives flushed before it reports that it consumes no more of the shared queue's.
#[test]
fn a_failed_connection_flushes_what_it_has_taken() {
    let mut pair = Pair::new(Setup { shared: [false, true], ..Setup::default() });
    let sge = pair.sides[0].sge(0, 100);
    let rkey = pair.sides[1].mr.rkey;
    let buffer = pair.sides[1].sge(0, 100);
    for wr_id in 0..4 {
        pair.receive(1, wr_id, buffer);
    }
    pair.send(0, requests::write(1, START + LENGTH, rkey, &[sge]));
    pair.send(0, requests::send(2, &[sge]));
    assert_eq!(pair.completion(0).status, Status::RemoteAccess);
    assert_eq!(pair.completion(0).status, Status::Flushed);
    pair.until(|sides| (sides[1].world.state(&sides[1].qp) == QpState::Error).then_some(()));
    pair.until(|_| Some(()));
    let taken = 4 - left(&pair.sides[1]);
    let mut flushed = 0;
    while let Some(done) = pair.sides[1].qp.completions.poll() {
        assert_eq!(done.status, Status::Flushed);
        flushed += 1;
    }
    assert_eq!(flushed, taken, "each receive that left the queue completes");
}
