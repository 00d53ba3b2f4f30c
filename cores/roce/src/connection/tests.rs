//! Unit tests of connections: two of them back to back.

mod closing;
mod ends;
mod gone;

use super::*;
use crate::memory::*;
use ends::{AT, Pair, SEND};

#[test]
fn every_operation_goes_through() {
    let mut pair = Pair::new(|_| {});
    pair.ends[1].1.receives.extend([4096; 4]);
    pair.post(1, SEND, 1000);
    pair.post(2, Kind::Send { immediate: Some([1, 2, 3, 4]), invalidate: None }, 0);
    pair.post(3, Kind::Send { immediate: None, invalidate: Some(9) }, 256);
    pair.post(4, Kind::Write { remote: AT, immediate: None }, 5000);
    pair.post(5, Kind::Write { remote: AT, immediate: Some([5; 4]) }, 512);
    pair.post(6, Kind::Read { remote: AT }, 10_000);
    pair.post(7, Kind::FetchAdd { remote: AT, add: 5 }, 8);
    pair.post(8, Kind::CompareSwap { remote: AT, compare: 1, swap: 2 }, 8);
    pair.post(9, Kind::Local { wait: true }, 0);
    pair.post(10, Kind::Read { remote: AT }, 0);
    pair.settle();
    let lengths = [1000, 0, 256, 5000, 512, 10_000, 8, 8, 0, 0];
    let expected: Vec<_> = (1..=10).zip(lengths).map(|(token, len)| (token, Status::Success, len)).collect();
    assert_eq!(pair.ends[0].1.completions, expected);
    assert_eq!(pair.ends[0].1.locals, [9]);
    let received: Vec<_> = pair.ends[1].1.received.iter().map(|r| r.unwrap()).collect();
    let lengths: Vec<_> = received.iter().map(|r| r.length).collect();
    assert_eq!(lengths, [1000, 0, 256, 512]);
    assert_eq!(received[1].immediate, Some([1, 2, 3, 4]));
    assert_eq!(received[2].invalidated, Some(9));
    assert_eq!(received[3].operation, ReceivedOperation::WriteImmediate);
    assert_eq!(pair.ends[0].0.counters().retransmitted_packets, 0);
    assert!(pair.ends[0].0.is_drained());
    assert_eq!(pair.ends[0].0.timeout(), None, "no timer without anything outstanding");
}

#[test]
fn a_send_without_receive_waits_as_long_as_the_timer_code_says() {
    let mut pair = Pair::new(|config| config.min_rnr_timer = 14);
    pair.post(1, SEND, 10);
    pair.settle();
    let start = pair.now;
    pair.ends[1].1.receives.push_back(10);
    pair.wait(0);
    assert_eq!(pair.now - start, 1_280_000);
    pair.settle();
    assert_eq!(pair.ends[0].1.completions, [(1, Status::Success, 10)]);
    assert_eq!(pair.ends[1].0.counters().rnr_nak_sent, 1);
}

#[test]
fn a_receive_that_is_posted_ends_the_wait() {
    let mut pair = Pair::new(|config| config.min_rnr_timer = 0);
    pair.post(1, SEND, 10);
    pair.settle();
    pair.ends[1].1.receives.push_back(10);
    pair.ends[1].0.receive_posted();
    pair.settle();
    assert_eq!(pair.ends[0].1.completions, [(1, Status::Success, 10)]);
}

fn failure_time(change: impl Fn(&mut Config)) -> (u64, Config, Counters) {
    let mut pair = Pair::new(change);
    pair.post(1, SEND, 10);
    pair.post(2, SEND, 10);
    let start = pair.now;
    while pair.ends[0].1.completions.is_empty() {
        // The packets are lost.
        pair.packets(0);
        pair.wait(0);
    }
    assert_eq!(pair.ends[0].1.completions, [(1, Status::RetryExceeded, 0), (2, Status::Flushed, 0)]);
    assert_eq!(pair.ends[0].1.events, [Event::Failed]);
    assert_eq!(pair.ends[0].0.state(), State::Failed);
    assert!(pair.packets(0).is_empty() && pair.ends[0].0.timeout().is_none());
    (pair.now - start, *pair.ends[0].0.config(), *pair.ends[0].0.counters())
}

#[test]
fn a_peer_that_never_answers_is_given_up_after_the_specified_time() {
    for (timeout, retries) in [(14, 7), (14, 0), (8, 3), (19, 1)] {
        let (took, config, counters) = failure_time(|config| {
            config.timeout = timeout;
            config.retry_count = retries;
        });
        assert_eq!(took, timing::time_to_failure(config.timeout, config.retry_count).unwrap());
        let tries = u64::from(retries) + 1;
        let t = timing::ack_timeout(timeout).unwrap();
        assert!(took >= tries * t && took <= tries * 4 * t);
        assert_eq!(counters.local_ack_timeout_err, tries);
        assert_eq!(counters.req_transport_retries_exceeded, 1);
    }
}

#[test]
fn without_a_timeout_a_requester_waits_for_ever() {
    let mut pair = Pair::new(|config| config.timeout = 0);
    pair.post(1, SEND, 10);
    assert_eq!(pair.packets(0).len(), 1);
    assert_eq!(pair.ends[0].0.timeout(), None);
}

#[test]
fn rnr_retries_run_out() {
    let mut pair = Pair::new(|config| config.rnr_retry = 2);
    pair.post(1, SEND, 10);
    for _ in 0..2 {
        pair.settle();
        pair.wait(0);
    }
    assert!(pair.ends[0].1.completions.is_empty());
    pair.settle();
    assert_eq!(pair.ends[0].1.completions, [(1, Status::RnrRetryExceeded, 0)]);
    assert_eq!(pair.ends[0].0.counters().rnr_nak_retry_err, 3);
    assert_eq!(pair.ends[1].0.counters().out_of_buffer, 3);
    assert_eq!(pair.ends[1].0.state(), State::Ready, "the responder goes on");
}

#[test]
fn one_acknowledgement_covers_many_messages() {
    let mut pair = Pair::new(|config| config.window = 512);
    pair.ends[1].1.receives.extend([100; 100]);
    for token in 1..=100 {
        pair.post(token, SEND, 8);
    }
    let packets = pair.packets(0);
    assert_eq!(packets.len(), 100);
    pair.deliver(1, &packets);
    let answers = pair.packets(1);
    assert_eq!(answers.len(), 1);
    pair.deliver(0, &answers);
    assert_eq!(pair.ends[0].1.completions.len(), 100);
}

#[test]
fn a_missing_packet_is_asked_for_once_and_sent_again_at_once() {
    let mut pair = Pair::new(|_| {});
    pair.ends[1].1.receives.push_back(4096);
    pair.post(1, SEND, 2000);
    let mut packets = pair.packets(0);
    assert_eq!(packets.len(), 8);
    packets.remove(2);
    pair.deliver(1, &packets);
    let answers = pair.packets(1);
    assert_eq!(answers.len(), 1);
    let nak = Packet::parse(&answers[0]).unwrap();
    assert_eq!(Syndrome::decode(nak.header.aeth.syndrome), Syndrome::SequenceError);
    assert_eq!(nak.header.psn, 0xFF_FFF2);
    assert_eq!(pair.ends[1].0.counters().out_of_sequence, 5);
    // A duplicate changes nothing.
    pair.deliver(0, &answers);
    pair.deliver(0, &answers);
    let again = pair.packets(0);
    assert_eq!(again.len(), 6, "from the missing one on");
    assert_eq!(pair.ends[0].0.counters().retransmitted_packets, 6);
    pair.deliver(1, &again);
    pair.settle();
    assert_eq!(pair.ends[0].1.completions, [(1, Status::Success, 2000)]);
    assert_eq!(pair.ends[1].0.counters().duplicate_request, 0);
}

#[test]
fn a_read_goes_on_where_its_answer_broke_off() {
    let mut pair = Pair::new(|config| config.window = 64);
    pair.post(1, Kind::Read { remote: AT }, 2560);
    let request = pair.packets(0);
    pair.deliver(1, &request);
    let mut answers = pair.packets(1);
    assert_eq!(answers.len(), 10);
    answers.truncate(4);
    pair.deliver(0, &answers);
    pair.wait(0);
    let again = pair.packets(0);
    assert_eq!(again.len(), 1);
    let header = Packet::parse(&again[0]).unwrap().header;
    assert_eq!((header.reth.address, header.reth.length), (AT.address + 4 * 256, 2560 - 4 * 256));
    pair.deliver(1, &again);
    assert_eq!(pair.packets(1).len(), 6);
    assert_eq!(pair.ends[1].0.counters().duplicate_request, 1);
}

#[test]
fn an_atomic_that_comes_again_gets_the_same_answer() {
    let mut pair = Pair::new(|_| {});
    pair.post(1, Kind::FetchAdd { remote: AT, add: 1 }, 8);
    let request = pair.packets(0);
    pair.deliver(1, &request);
    let first = pair.packets(1);
    pair.deliver(1, &request);
    assert_eq!(pair.packets(1), first);
    let before = Packet::parse(&first[0]).unwrap().header.original;
    let word: [u8; 8] = pair.ends[1].1.slice(AT.address, 8).try_into().unwrap();
    assert_eq!(u64::from_ne_bytes(word), before.wrapping_add(1), "added once");
}

#[test]
fn refusals_end_as_the_specification_says() {
    let cases = [
        (Refusal::InvalidRequest, Status::RemoteInvalidRequest, Event::RequestError),
        (Refusal::Access, Status::RemoteAccess, Event::AccessError),
        (Refusal::Operation, Status::RemoteOperation, Event::Fatal),
    ];
    for (refusal, status, event) in cases {
        let mut pair = Pair::new(|_| {});
        pair.ends[1].1.refuse = Some(refusal);
        pair.post(1, Kind::Write { remote: AT, immediate: None }, 10);
        pair.post(2, SEND, 10);
        let packets = pair.packets(0);
        pair.deliver(1, &packets);
        // The NAK is lost. The responder repeats it when the peer repeats the request.
        assert_eq!(pair.packets(1).len(), 1);
        pair.wait(0);
        pair.settle();
        assert_eq!(pair.ends[0].1.completions, [(1, status, 0), (2, Status::Flushed, 0)]);
        assert_eq!(pair.ends[1].1.events, [Event::Established, event, Event::Failed]);
        assert_eq!(pair.ends[0].1.events, [Event::Failed]);
    }
}

#[test]
fn a_send_longer_than_the_receive_fails_at_both_ends() {
    let mut pair = Pair::new(|_| {});
    pair.ends[1].1.receives.push_back(300);
    pair.post(1, SEND, 301);
    pair.settle();
    assert_eq!(pair.ends[0].1.completions, [(1, Status::RemoteInvalidRequest, 0)]);
    assert_eq!(pair.ends[1].1.received, [Err(Status::LocalLength)]);
}

#[test]
fn a_local_error_waits_for_those_before_it() {
    let mut pair = Pair::new(|_| {});
    pair.ends[1].1.receives.extend([4096; 3]);
    pair.post(1, SEND, 100);
    pair.post(2, SEND, 1000);
    pair.post(3, SEND, 100);
    pair.ends[0].1.lost_from = 512;
    let packets = pair.packets(0);
    assert_eq!(packets.len(), 3, "up to where the memory is gone");
    assert!(pair.ends[0].1.completions.is_empty());
    pair.deliver(1, &packets);
    let answers = pair.packets(1);
    pair.deliver(0, &answers);
    let expected = [(1, Status::Success, 100), (2, Status::LocalProtection, 0), (3, Status::Flushed, 0)];
    assert_eq!(pair.ends[0].1.completions, expected);
}

#[test]
fn more_reads_than_agreed_on_are_refused_and_a_responder_without_room_takes_none() {
    let mut pair = Pair::new(|config| {
        config.max_rd_atomic = 3;
        config.max_dest_rd_atomic = 2;
    });
    for token in 1..=3 {
        pair.post(token, Kind::Read { remote: AT }, 8);
    }
    pair.settle();
    let statuses: Vec<_> = pair.ends[0].1.completions.iter().map(|completion| completion.1).collect();
    assert_eq!(statuses, [Status::Success, Status::Success, Status::RemoteInvalidRequest]);

    let mut pair = Pair::new(|config| config.max_dest_rd_atomic = 0);
    pair.post(1, Kind::Read { remote: AT }, 8);
    pair.settle();
    assert_eq!(pair.ends[0].1.completions, [(1, Status::RemoteInvalidRequest, 0)]);

    let mut pair = Pair::new(|config| config.max_rd_atomic = 0);
    pair.post(1, Kind::Read { remote: AT }, 8);
    pair.settle();
    assert_eq!(pair.ends[0].1.completions, [(1, Status::LocalQpOperation, 0)]);
}

#[test]
fn a_slow_peer_gets_no_more_than_the_window() {
    let mut pair = Pair::new(|config| config.window = 16);
    pair.post(1, Kind::Write { remote: AT, immediate: None }, 100_000);
    assert_eq!(pair.packets(0).len(), 16);
    assert!(pair.packets(0).is_empty());
    let room = pair.ends[0].0.room();
    assert_eq!(room, 255);
    for token in 0..255 {
        pair.post(token, SEND, 8);
    }
    assert_eq!(pair.ends[0].0.post(Request::new(0, SEND, 8)), Err(PostError::Full));
    // READ responses count as well, so the READ is sent as several requests.
    let mut pair = Pair::new(|config| config.window = 16);
    pair.post(1, Kind::Read { remote: AT }, 100_000);
    let requests = pair.packets(0);
    assert_eq!(requests.len(), 2);
    pair.deliver(1, &requests);
    assert_eq!(pair.packets(1).len(), 16);
}

#[test]
fn a_held_connection_sends_nothing_and_counts_no_time() {
    let mut pair = Pair::new(|_| {});
    pair.ends[1].1.receives.push_back(4096);
    pair.post(1, SEND, 1000);
    let lost = pair.packets(0);
    assert_eq!(lost.len(), 4);
    for end in &mut pair.ends {
        end.0.suspend(pair.now);
    }
    pair.now += 1_000_000_000_000;
    assert_eq!(pair.ends[0].0.timeout(), None);
    let now = pair.now;
    let (connection, memory) = &mut pair.ends[0];
    connection.expired(now, memory);
    assert!(pair.packets(0).is_empty());
    for end in &mut pair.ends {
        end.0.resume(pair.now);
    }
    pair.settle();
    assert_eq!(pair.ends[0].1.completions, [(1, Status::Success, 1000)]);
    assert_eq!(pair.ends[0].0.counters().local_ack_timeout_err, 0);
}

#[test]
fn a_marked_packet_is_answered_with_one_notification_per_interval() {
    let parameters = Parameters { line_rate: 1e9, ..Parameters::default() };
    let mut pair = Pair::new(|config| config.congestion = Some(parameters));
    pair.ends[1].1.receives.extend([4096; 2]);
    pair.post(1, SEND, 2000);
    let packets = pair.packets(0);
    for packet in &packets {
        let (connection, memory) = &mut pair.ends[1];
        connection.receive(pair.now, packet, Arrival { congested: true, ..Arrival::default() }, memory);
    }
    let answers = pair.packets(1);
    let notifications: Vec<_> = answers.iter().filter(|packet| packet[0] == 0x81).collect();
    assert_eq!(notifications.len(), 1);
    assert_eq!(pair.ends[1].0.counters().np_ecn_marked_roce_packets, packets.len() as u64);
    pair.deliver(0, &answers);
    assert!(pair.ends[0].0.rate().unwrap() < 0.6e9);
    assert_eq!(pair.ends[0].0.counters().rp_cnp_handled, 1);
    // Congestion control is off: no notification is sent.
    let mut pair = Pair::new(|_| {});
    pair.ends[1].1.receives.push_back(4096);
    pair.post(1, SEND, 10);
    let packets = pair.packets(0);
    let (connection, memory) = &mut pair.ends[1];
    connection.receive(pair.now, &packets[0], Arrival { congested: true, ..Arrival::default() }, memory);
    assert_eq!(pair.packets(1).len(), 1, "the acknowledgement alone");
    assert_eq!(pair.ends[0].0.rate(), None);
}

/// A receiver that can't keep up with 20 MB/s notifies the sender, without congestion control. The sender approaches that rate and doesn't
/// exceed it, and nothing is retransmitted.
#[test]
fn a_receiver_that_asks_for_less_gets_less() {
    let mut pair = Pair::new(|_| {});
    let (mut posted, mut taken, mut debt) = (0, 0u64, 0f64);
    let (tick, ticks) = (50_000, 20_000);
    for _ in 0..ticks {
        pair.now += tick;
        debt = (debt - 20e6 * tick as f64 / 1e9).max(0.0);
        while posted < pair.ends[0].1.completions.len() as u64 + 16 {
            pair.post(posted, SEND, 4096);
            pair.ends[1].1.receives.push_back(4096);
            posted += 1;
        }
        for packet in pair.packets(0) {
            taken += packet.len() as u64;
            debt += packet.len() as f64;
            let too_fast = debt > 20e3;
            let (connection, memory) = &mut pair.ends[1];
            connection.receive(pair.now, &packet, Arrival { too_fast, ..Arrival::default() }, memory);
        }
        let answers = pair.packets(1);
        pair.deliver(0, &answers);
    }
    assert!((10_000_000..26_000_000).contains(&taken), "{taken} bytes in a second");
    assert!(pair.ends[1].0.counters().np_cnp_sent > 10);
    assert_eq!(pair.ends[1].0.counters().np_ecn_marked_roce_packets, 0);
    assert_eq!(pair.ends[0].0.counters().retransmitted_packets, 0);
    assert!(pair.ends[0].1.completions.iter().all(|(_, status, _)| *status == Status::Success));
}

#[test]
fn packets_of_others_are_dropped() {
    let mut pair = Pair::new(|_| {});
    pair.ends[1].1.receives.push_back(4096);
    pair.post(1, SEND, 10);
    let good = pair.packets(0).remove(0);
    let mut partition = good.clone();
    partition[3] = 0x17;
    let mut service = good.clone();
    service[0] |= 0x20;
    pair.deliver(1, &[partition, service, good[..11].to_vec()]);
    assert_eq!(pair.ends[1].0.counters().dropped_packets, 3);
    assert!(pair.packets(1).is_empty());
    pair.deliver(1, &[good]);
    assert_eq!(pair.ends[1].1.received.len(), 1);
}

#[test]
fn an_unreliable_message_with_a_gap_is_dropped_and_its_receive_kept() {
    let mut pair = Pair::new(|config| config.reliability = Reliability::Unreliable);
    pair.ends[1].1.receives.extend([4096; 2]);
    pair.post(1, SEND, 700);
    pair.post(2, SEND, 700);
    let mut packets = pair.packets(0);
    assert_eq!(packets.len(), 6);
    assert_eq!(pair.ends[0].1.completions.len(), 2, "complete when they are sent");
    packets.remove(1);
    pair.deliver(1, &packets);
    let lengths: Vec<_> = pair.ends[1].1.received.iter().map(|received| received.unwrap().length).collect();
    assert_eq!(lengths, [700]);
    assert_eq!(pair.ends[1].1.receives.len(), 1);
    assert!(pair.packets(1).is_empty());
}

#[test]
fn failing_flushes_everything() {
    let mut pair = Pair::new(|_| {});
    pair.post(1, SEND, 700);
    pair.post(2, Kind::Local { wait: true }, 0);
    pair.packets(0);
    let (connection, memory) = &mut pair.ends[0];
    connection.fail(memory);
    connection.fail(memory);
    assert_eq!(memory.completions, [(1, Status::Flushed, 0), (2, Status::Flushed, 0)]);
    assert_eq!(memory.events, [Event::Failed]);
    assert_eq!(connection.post(Request::new(3, SEND, 1)), Err(PostError::Failed));
    assert!(pair.packets(0).is_empty());
    // Later requests of the peer get no response.
    let (other, _) = &mut pair.ends[1];
    other.post(Request::new(4, SEND, 10)).unwrap();
    let packets = pair.packets(1);
    pair.deliver(0, &packets);
    assert!(pair.packets(0).is_empty());
}

#[test]
fn the_window_yields_to_loss_and_recovers() {
    for yields in [true, false] {
        let mut pair = Pair::new(|config| {
            config.window = 64;
            config.yields_to_loss = yields;
        });
        pair.post(1, Kind::Write { remote: AT, immediate: None }, 400_000);
        for _ in 0..3 {
            // All packets are lost.
            pair.packets(0);
            pair.wait(0);
        }
        assert_eq!(
            pair.packets(0).len(),
            if yields { 32 } else { 64 },
            "one loss, since nothing got through between"
        );
        pair.wait(0);
        pair.settle();
        assert_eq!(pair.ends[0].1.completions, [(1, Status::Success, 400_000)]);
        pair.post(2, Kind::Write { remote: AT, immediate: None }, 400_000);
        assert_eq!(pair.packets(0).len(), 64);
    }
}
