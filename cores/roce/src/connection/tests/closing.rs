//! Which packets an end still sends after it was closed.

use super::*;

#[test]
fn a_closed_end_still_acknowledges_what_it_executed_and_executes_nothing_more() {
    let mut pair = Pair::new(|_| {});
    pair.ends[1].1.receives.extend([4096; 2]);
    pair.post(1, SEND, 700);
    let packets = pair.packets(0);
    pair.deliver(1, &packets);
    assert_eq!(pair.ends[1].1.received.len(), 1);
    // Its program ends before the acknowledgement is sent; then that is lost.
    let (connection, memory) = &mut pair.ends[1];
    connection.fail(memory);
    assert_eq!(pair.packets(1).len(), 1);
    pair.wait(0);
    let again = pair.packets(0);
    assert!(!again.is_empty());
    pair.deliver(1, &again);
    let answers = pair.packets(1);
    assert_eq!(answers.len(), 1);
    pair.deliver(0, &answers);
    assert_eq!(pair.ends[0].1.completions, [(1, Status::Success, 700)]);
    // A new request gets no response.
    pair.post(2, SEND, 700);
    let packets = pair.packets(0);
    pair.deliver(1, &packets);
    assert!(pair.packets(1).is_empty());
    assert_eq!((pair.ends[1].1.received.len(), pair.ends[1].1.receives.len()), (1, 1));
}

#[test]
fn a_closed_end_acknowledges_nothing_behind_a_read_that_it_did_not_answer() {
    let mut pair = Pair::new(|_| {});
    pair.ends[1].1.receives.push_back(4096);
    pair.post(1, Kind::Write { remote: AT, immediate: None }, 100);
    pair.post(2, Kind::Read { remote: AT }, 100);
    pair.post(3, SEND, 100);
    let packets = pair.packets(0);
    pair.deliver(1, &packets);
    let (connection, memory) = &mut pair.ends[1];
    connection.fail(memory);
    loop {
        let answers = pair.packets(1);
        pair.deliver(0, &answers);
        if pair.ends[0].0.state() == State::Failed {
            break;
        }
        pair.wait(0);
        let again = pair.packets(0);
        pair.deliver(1, &again);
    }
    // The READ's data may be gone, so it fails, and the SEND after it can't be reported as complete.
    let statuses: Vec<_> = pair.ends[0].1.completions.iter().map(|done| (done.0, done.1)).collect();
    assert_eq!(statuses, [(1, Status::Success), (2, Status::RetryExceeded), (3, Status::Flushed)]);
}
