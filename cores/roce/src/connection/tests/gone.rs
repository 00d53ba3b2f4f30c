//! Packets for a queue pair that is gone or suspended while its connection still exists: they are dropped without a NAK.

use super::*;

/// Every kind of request that accesses the queue pair more than once.
const KINDS: [(Kind, u32); 7] = [
    (SEND, 700),
    (Kind::Send { immediate: None, invalidate: Some(9) }, 700),
    (Kind::Write { remote: AT, immediate: None }, 700),
    (Kind::Write { remote: AT, immediate: Some([5; 4]) }, 700),
    (Kind::Read { remote: AT }, 700),
    (Kind::FetchAdd { remote: AT, add: 5 }, 8),
    (Kind::CompareSwap { remote: AT, compare: 1, swap: 2 }, 8),
];

/// Sends a SEND, then one of [`KINDS`]; `arrived` of its packets arrive before the queue pair is gone.
fn gone_after(kind: Kind, length: u32, arrived: usize) -> Pair {
    let mut pair = Pair::new(|_| {});
    pair.ends[1].1.receives.extend([4096; 2]);
    pair.post(1, SEND, 10);
    pair.settle();
    pair.post(2, kind, length);
    let packets = pair.packets(0);
    let (before, behind) = packets.split_at(arrived.min(packets.len()));
    pair.deliver(1, before);
    pair.ends[1].1.refuse = Some(Refusal::Gone);
    pair.deliver(1, behind);
    pair
}

#[test]
fn requests_to_a_queue_pair_that_is_gone_get_no_nak_and_end_as_a_lost_peer_ends_them() {
    for (kind, length) in KINDS {
        let mut pair = gone_after(kind, length, 0);
        while pair.ends[0].0.state() == State::Ready {
            let answers = pair.packets(1);
            assert!(answers.is_empty(), "{kind:?} is answered");
            pair.wait(0);
            let again = pair.packets(0);
            pair.deliver(1, &again);
        }
        assert_eq!(pair.ends[0].1.completions[1..], [(2, Status::RetryExceeded, 0)], "{kind:?}");
        let (connection, memory) = &pair.ends[1];
        assert_eq!(connection.state(), State::Ready);
        assert_eq!(memory.events, [Event::Established], "{kind:?}: its owner is told nothing");
        assert!(connection.counters().dropped_packets > 0);
    }
}

#[test]
fn a_queue_pair_that_was_only_held_goes_on_where_it_was() {
    for (kind, length) in KINDS {
        for arrived in 0..=3 {
            let mut pair = gone_after(kind, length, arrived);
            // Its acknowledgements meanwhile cover at most what it has received.
            let answers = pair.packets(1);
            pair.deliver(0, &answers);
            pair.ends[1].1.refuse = None;
            if !pair.ends[0].0.is_drained() {
                pair.wait(0);
                pair.settle();
            }
            assert_eq!(
                pair.ends[0].1.completions[1..],
                [(2, Status::Success, length)],
                "{kind:?}, {arrived}"
            );
            let executed = pair.ends[1].1.received.len();
            let takes = !matches!(
                kind,
                Kind::Write { immediate: None, .. }
                    | Kind::Read { .. }
                    | Kind::FetchAdd { .. }
                    | Kind::CompareSwap { .. }
            );
            assert_eq!(executed, 1 + usize::from(takes), "{kind:?}, {arrived}: once");
        }
    }
}

#[test]
fn nothing_is_acknowledged_beyond_a_read_that_nobody_answers() {
    let mut pair = Pair::new(|_| {});
    pair.ends[1].1.receives.push_back(4096);
    pair.post(1, Kind::Read { remote: AT }, 100);
    pair.post(2, SEND, 100);
    let packets = pair.packets(0);
    pair.deliver(1, &packets);
    // Both were executed; the READ's data are not read yet.
    pair.ends[1].1.refuse = Some(Refusal::Gone);
    for packet in pair.packets(1) {
        assert!(
            psn::wire(pair.ends[0].0.config().sq_psn.into()) > Packet::parse(&packet).unwrap().header.psn
        );
    }
    pair.ends[1].1.refuse = None;
    pair.wait(0);
    pair.settle();
    let statuses: Vec<_> = pair.ends[0].1.completions.iter().map(|done| (done.0, done.1)).collect();
    assert_eq!(statuses, [(1, Status::Success), (2, Status::Success)]);
    assert_eq!(pair.ends[1].1.received.len(), 1);
}

#[test]
fn an_unreliable_message_for_nobody_is_dropped_and_the_connection_stands() {
    let mut pair = Pair::new(|config| config.reliability = Reliability::Unreliable);
    pair.ends[1].1.receives.push_back(4096);
    pair.ends[1].1.refuse = Some(Refusal::Gone);
    pair.post(1, SEND, 700);
    pair.settle();
    assert_eq!(pair.ends[1].0.state(), State::Ready);
    pair.ends[1].1.refuse = None;
    pair.post(2, SEND, 700);
    pair.settle();
    assert_eq!(pair.ends[1].1.received.len(), 1);
}
