use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::window::{Geometry, PAGE};

const STRIDE: u64 = 1 << 30;
const RAM: u64 = 64 * PAGE;

struct Pair {
    words: Vec<AtomicU64>,
    layout: Layout,
    windows: [Window; 2],
}

impl Pair {
    fn new(entries: u32) -> Self {
        let layout = Layout::new(entries).unwrap();
        let geometry = Geometry::new(STRIDE, STRIDE, 4).unwrap();
        let window = |slot| geometry.window(slot, &[(0, RAM)]).unwrap();
        let words = (0..layout.size() / 8).map(|_| AtomicU64::new(0)).collect();
        Self { words, layout, windows: [window(1), window(3)] }
    }

    fn sender(&self, epoch: u32) -> Sender<Vec<u32>> {
        let ids = vec![0; self.layout.entries() as usize];
        Sender::new(&self.words[..], &self.layout, epoch, Side::First, self.windows[0], ids).unwrap()
    }

    fn receiver(&self, epoch: u32) -> Receiver {
        Receiver::new(&self.words[..], &self.layout, epoch, Side::First, self.windows[0]).unwrap()
    }

    fn part(&self, at: u64, length: u32) -> Part {
        Part { address: self.windows[0].start() + at, length }
    }

    /// Replaces a word of message entry `entry`.
    fn poke(&self, entry: usize, word: usize, value: u64) {
        self.words[self.layout.messages(Side::First).first + 4 * entry + word]
            .store(value, Ordering::Relaxed);
    }
}

#[test]
fn a_list_of_parts_arrives_whole_and_its_buffers_come_back_once() {
    let pair = Pair::new(8);
    let (mut sender, mut receiver) = (pair.sender(3), pair.receiver(3));
    let words = &pair.words[..];
    let mut message = Message::default();
    assert_eq!(receiver.receive(words, &mut message), Ok(false));
    let parts = [pair.part(0, 10), pair.part(PAGE, 20), pair.part(RAM - 1, 1)];
    let id = sender.post(words, &parts, 7, 99).unwrap();
    assert_eq!(receiver.receive(words, &mut message), Ok(true));
    assert_eq!((message.parts(), message.id, message.kind, message.note), (&parts[..], id, 7, 99));
    assert_eq!(sender.completion(words), Ok(None));
    receiver.complete(words, id, 5);
    assert_eq!(sender.completion(words), Ok(Some(Completion { id, status: 5 })));
    // A second completion is a violation.
    receiver.complete(words, id, 5);
    assert_eq!(sender.completion(words), Err(Violation::NotOutstanding(id)));
}

#[test]
fn what_lies_outside_the_own_window_is_not_sent() {
    let pair = Pair::new(8);
    let mut sender = pair.sender(1);
    for part in [
        pair.part(RAM, 1),
        pair.part(RAM - 1, 2),
        pair.part(0, 0),
        Part { address: pair.windows[1].start(), length: 1 },
        Part { address: u64::MAX, length: u32::MAX },
    ] {
        assert_eq!(sender.post(&pair.words[..], &[part], 0, 0), Err(PostError::Outside(part)));
    }
    assert_eq!(sender.post(&pair.words[..], &[], 0, 0), Err(PostError::Parts { count: 0 }));
    let many = [pair.part(0, 1); 9];
    assert_eq!(sender.post(&pair.words[..], &many, 0, 0), Err(PostError::Parts { count: 9 }));
    assert_eq!(sender.outstanding(), 0);
}

#[test]
fn every_way_to_break_a_message_is_found() {
    let good = |pair: &Pair| {
        let mut sender = pair.sender(1);
        sender.post(&pair.words[..], &[pair.part(0, 8), pair.part(8, 8)], 0, 0).unwrap();
    };
    let broken = |change: &dyn Fn(&Pair)| {
        let pair = Pair::new(8);
        good(&pair);
        change(&pair);
        let mut receiver = pair.receiver(1);
        let first = receiver.receive(&pair.words[..], &mut Message::default());
        // Another call returns the same error.
        assert_eq!(receiver.receive(&pair.words[..], &mut Message::default()), first);
        first.unwrap_err()
    };
    let outside = Part { address: 0x1234, length: 8 };
    assert_eq!(broken(&|pair| pair.poke(1, 0, 0x1234)), Violation::Outside(outside));
    assert_eq!(broken(&|pair| pair.poke(0, 1, 4 << 32 | 8)), Violation::Flags(4));
    assert_eq!(broken(&|pair| pair.poke(0, 2, 8)), Violation::Id(8));
    assert_eq!(broken(&|pair| pair.poke(1, 2, 3)), Violation::Id(3));
    assert_eq!(broken(&|pair| pair.poke(1, 3, 0)), Violation::Torn);
    let more = |pair: &Pair| {
        let address = pair.windows[0].start();
        for entry in 0..8 {
            pair.poke(entry, 0, address);
            pair.poke(entry, 1, 1 << 32 | 8);
            pair.poke(entry, 2, 0);
            pair.poke(entry, 3, crate::ring::stamp(1, u32::try_from(entry).unwrap()));
        }
    };
    assert_eq!(broken(&more), Violation::TooLong);
    assert_eq!(broken(&|pair| pair.poke(0, 1, 2 << 32 | 8)), Violation::Flags(2));
    assert_eq!(broken(&|pair| pair.poke(0, 1, 3 << 32 | 8)), Violation::Flags(3));
}

/// A sender may name memory that it may read itself: a third member's, or the receiver's own, which it got from there. This receiver reads
/// neither through a window, and reports the message as unreachable. A part that crosses windows, or isn't the sender's RAM, is a
/// violation.
#[test]
fn parts_in_other_members_windows_are_unreachable_and_no_violation() {
    let pair = Pair::new(8);
    let words = &pair.words[..];
    let (mut sender, mut receiver) = (pair.sender(1), pair.receiver(1));
    let mut message = Message::default();
    let third = 3 * STRIDE;
    for (address, entry) in [(third, 1), (pair.windows[1].start(), 3)] {
        sender.post(words, &[pair.part(0, 8), pair.part(8, 8)], 7, 9).unwrap();
        pair.poke(entry, 0, address);
        assert_eq!(receiver.receive(words, &mut message), Ok(true));
        assert_eq!((message.unreachable(), message.parts(), message.kind), (true, &[][..], 7));
        receiver.complete(words, message.id, STATUS_UNREACHABLE);
        assert_eq!(sender.completion(words).unwrap().map(|got| got.status), Some(STATUS_UNREACHABLE));
    }
    sender.post(words, &[pair.part(0, 8)], 0, 0).unwrap();
    assert_eq!(receiver.receive(words, &mut message), Ok(true));
    assert!(!message.unreachable() && message.parts() == [pair.part(0, 8)]);
    sender.post(words, &[pair.part(0, 8)], 0, 0).unwrap();
    for address in [third + STRIDE - 4, pair.windows[0].start() + RAM] {
        pair.poke(5, 0, address);
        let outside = Part { address, length: 8 };
        assert_eq!(receiver.receive(words, &mut message), Err(Violation::Outside(outside)));
    }
}

#[test]
fn a_peer_that_took_what_was_never_sent_is_found() {
    let pair = Pair::new(8);
    let mut sender = pair.sender(2);
    let words = &pair.words[..];
    for _ in 0..8 {
        sender.post(words, &[pair.part(0, 1)], 0, 0).unwrap();
    }
    let taken = pair.layout.taken(Side::First);
    // A value of another epoch is ignored, and no violation.
    words[taken].store(1 << 32 | 8, Ordering::Relaxed);
    assert_eq!(sender.post(words, &[pair.part(0, 1)], 0, 0), Err(PostError::Full));
    words[taken].store(2 << 32 | 9, Ordering::Relaxed);
    let violation = Violation::Taken { says: 9, before: 0, sent: 8 };
    assert_eq!(sender.post(words, &[pair.part(0, 1)], 0, 0), Err(PostError::Broken(violation)));
}

#[test]
fn what_an_earlier_epoch_left_is_never_believed() {
    let pair = Pair::new(8);
    let words = &pair.words[..];
    let (mut sender, mut receiver) = (pair.sender(4), pair.receiver(4));
    for _ in 0..5 {
        let id = sender.post(words, &[pair.part(0, 1)], 0, 0).unwrap();
        receiver.receive(words, &mut Message::default()).unwrap();
        receiver.complete(words, id, 0);
    }
    assert!(receiver.arm(words));
    // The same memory in a later epoch: no old entry is valid, no old sleeper counts, and new entries arrive.
    let (mut sender, mut receiver) = (pair.sender(5), pair.receiver(5));
    let mut message = Message::default();
    assert_eq!(receiver.receive(words, &mut message), Ok(false));
    assert_eq!(sender.completion(words), Ok(None));
    sender.post(words, &[pair.part(64, 2)], 0, 0).unwrap();
    assert!(!sender.must_signal(words), "the sleeper was another epoch's");
    assert_eq!(receiver.receive(words, &mut message), Ok(true));
    assert_eq!(message.parts(), [pair.part(64, 2)]);
}

#[test]
fn a_sleeper_is_signalled_once_and_an_awake_peer_never() {
    let pair = Pair::new(8);
    let words = &pair.words[..];
    let (mut sender, mut receiver) = (pair.sender(1), pair.receiver(1));
    sender.post(words, &[pair.part(0, 1)], 0, 0).unwrap();
    assert!(!sender.must_signal(words));
    assert!(!receiver.arm(words), "there is something already");
    receiver.receive(words, &mut Message::default()).unwrap();
    assert!(receiver.arm(words));
    sender.post(words, &[pair.part(0, 1)], 0, 0).unwrap();
    sender.post(words, &[pair.part(0, 1)], 0, 0).unwrap();
    assert!(sender.must_signal(words));
    assert!(!sender.must_signal(words));
    sender.post(words, &[pair.part(0, 1)], 0, 0).unwrap();
    assert!(!sender.must_signal(words), "it was woken already");
}

#[derive(Debug, Clone)]
enum Step {
    Post(usize),
    Receive,
    Complete(prop::sample::Index),
    Collect,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (1usize..9).prop_map(Step::Post),
        3 => Just(Step::Receive),
        2 => any::<prop::sample::Index>().prop_map(Step::Complete),
        2 => Just(Step::Collect),
    ]
}

proptest! {
    /// Compared with a queue: messages arrive in order, complete, and once. Each is completed exactly once. `Full` is returned only with a
    /// reason, and positions may wrap any number of times.
    #[test]
    fn a_channel_is_a_queue_whose_buffers_come_back(bits in 3u32..6, steps in prop::collection::vec(step(), 1..400), start in any::<u32>()) {
        let pair = Pair::new(1 << bits);
        let entries = 1usize << bits;
        let words = &pair.words[..];
        let (mut sender, mut receiver) = (pair.sender(9), pair.receiver(9));
        let start = start | 0xffff_ff00; // soon before the counters wrap
        sender.messages.begin_at(start);
        sender.completions.advance(start);
        receiver.messages.advance(start);
        receiver.completions.begin_at(start);
        (sender.taken, receiver.told) = (start, start);
        let mut sent: VecDeque<(u32, Vec<Part>, u32)> = VecDeque::new();
        let mut held: Vec<u32> = Vec::new();
        let mut returned: VecDeque<u32> = VecDeque::new();
        let mut note = 0;
        let (mut in_ring, mut outstanding) = (0, 0);
        for step in steps {
            match step {
                Step::Post(count) => {
                    let parts: Vec<Part> = (0..count).map(|at| pair.part(at as u64 * 100, 50)).collect();
                    note += 1;
                    match sender.post(words, &parts, 1, note) {
                        Ok(id) => {
                            sent.push_back((id, parts, note));
                            in_ring += count;
                            outstanding += 1;
                            prop_assert!(in_ring <= entries);
                        }
                        Err(PostError::Full) => {
                            // The receiver writes "taken" at most a quarter of the ring late.
                            prop_assert!(in_ring + count + entries / 4 > entries || outstanding == entries);
                        }
                        Err(PostError::Parts { .. }) => prop_assert!(count > entries),
                        Err(other) => prop_assert!(false, "{other}"),
                    }
                }
                Step::Receive => {
                    let mut message = Message::default();
                    let got = receiver.receive(words, &mut message).unwrap();
                    prop_assert_eq!(got, !sent.is_empty());
                    if let Some((id, parts, note)) = sent.pop_front() {
                        prop_assert_eq!((message.id, message.note), (id, note));
                        prop_assert_eq!(message.parts(), &parts[..]);
                        in_ring -= parts.len();
                        held.push(id);
                    }
                }
                Step::Complete(which) => {
                    if !held.is_empty() {
                        let id = held.swap_remove(which.index(held.len()));
                        receiver.complete(words, id, id ^ 0xabc);
                        returned.push_back(id);
                    }
                }
                Step::Collect => {
                    let got = sender.completion(words).unwrap();
                    prop_assert_eq!(got, returned.pop_front().map(|id| Completion { id, status: id ^ 0xabc }));
                    outstanding -= usize::from(got.is_some());
                }
            }
            prop_assert_eq!(sender.outstanding() as usize, outstanding);
        }
    }

    /// With any content of the segment, both ends return, received parts are in the sender's window, and work is bounded.
    #[test]
    fn a_hostile_segment_only_gives_checked_parts(
        pokes in prop::collection::vec((any::<prop::sample::Index>(), 0u8..6, any::<u64>()), 0..200),
        turns in 1usize..40,
    ) {
        let pair = Pair::new(8);
        let words = &pair.words[..];
        let (mut sender, mut receiver) = (pair.sender(1), pair.receiver(1));
        let mut message = Message::default();
        for (index, kind, value) in pokes {
            let value = match kind {
                0 => value,
                1 => crate::ring::stamp(1, u32::try_from(value % 16).unwrap()),
                2 => pair.windows[0].start() + value % (2 * RAM),
                3 => (value % (1 << 17)) | ((value & 3) << 32),
                4 => (value % 90) | (2 << 32),
                _ => value % 10,
            };
            words[index.index(words.len())].store(value, Ordering::Relaxed);
        }
        for _ in 0..turns {
            let _ = sender.post(words, &[pair.part(0, 4)], 0, 0);
            let before = sender.outstanding();
            if let Ok(Some(_)) = sender.completion(words) {
                prop_assert_eq!(sender.outstanding(), before - 1);
            }
            if receiver.receive(words, &mut message) == Ok(true) {
                prop_assert!(message.parts().is_empty() == message.unreachable() && message.id < 8);
                for part in message.parts() {
                    prop_assert!(pair.windows[0].local(part.address, part.length).is_some());
                }
            }
        }
        prop_assert!(sender.outstanding() <= 8);
    }
}
