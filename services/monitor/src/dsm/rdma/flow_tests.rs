//! Two sides and a network, in every order of events: streams arrive unchanged, every message finds a receive buffer, and no state is
//! stuck.

#![allow(clippy::unwrap_used)] // For tests only.

use std::collections::VecDeque;
use std::io;

use proptest::prelude::*;

use super::{Failure, Flow, HEADER, Port, Shape, Violation};

/// Device of one side: incomplete sends, posted receive buffers, and messages in flight to the other side.
#[derive(Debug, Default)]
struct Device {
    unfinished: VecDeque<u16>,
    posted: VecDeque<u16>,
    leaving: VecDeque<Vec<u8>>,
    longest: usize,
}

impl Port for Device {
    fn send(&mut self, buffer: u16, header: [u8; HEADER], part: &[u8]) -> io::Result<()> {
        assert!(!self.unfinished.contains(&buffer), "a send buffer that is in use was filled");
        self.unfinished.push_back(buffer);
        let message = [&header, part].concat();
        self.longest = self.longest.max(message.len());
        self.leaving.push_back(message);
        Ok(())
    }
    fn receive(&mut self, buffer: u16) -> io::Result<()> {
        assert!(!self.posted.contains(&buffer), "a receive buffer was posted twice");
        self.posted.push_back(buffer);
        Ok(())
    }
}

struct Side {
    flow: Flow,
    device: Device,
    /// Bytes that weren't accepted; all that were; and bytes that arrived.
    queue: VecDeque<u8>,
    sent: Vec<u8>,
    came: Vec<u8>,
}

impl Side {
    fn new(sends: Shape, receives: Shape, peer: Shape) -> Self {
        let device = Device { posted: (0..receives.count).collect(), ..Device::default() };
        let flow = Flow::new(sends, receives, peer);
        Self { flow, device, queue: VecDeque::new(), sent: Vec::new(), came: Vec::new() }
    }

    /// Offers the queued bytes, as a link does.
    fn flush(&mut self) -> usize {
        let taken = self.flow.offer(self.queue.make_contiguous(), &mut self.device).unwrap();
        self.queue.drain(..taken);
        taken
    }

    /// Completes one send. Returns false if there is none.
    fn finish(&mut self) -> bool {
        let Some(buffer) = self.device.unfinished.pop_front() else { return false };
        self.flow.sent(buffer).unwrap();
        self.flow.settle(&mut self.device).unwrap();
        true
    }

    fn take(&mut self, most: usize) -> usize {
        let mut bytes = vec![0; most];
        let count = self.flow.take(&mut bytes);
        self.came.extend_from_slice(&bytes[..count]);
        count
    }
}

/// Delivers the next message. Returns false if there is none.
fn deliver(from: &mut Side, to: &mut Side) -> bool {
    let Some(message) = from.device.leaving.pop_front() else { return false };
    let buffer = to.device.posted.pop_front().expect("a message finds no receive buffer");
    to.flow.received(buffer, &message, &mut to.device).unwrap();
    to.flow.settle(&mut to.device).unwrap();
    true
}

/// An event at either side.
#[derive(Debug, Clone)]
enum Step {
    Send(usize),
    Deliver,
    Finish,
    Take(usize),
    Flush,
}

fn step() -> impl Strategy<Value = (bool, Step)> {
    let what = prop_oneof![
        (1usize..400).prop_map(Step::Send),
        Just(Step::Deliver),
        Just(Step::Deliver),
        Just(Step::Finish),
        (1usize..200).prop_map(Step::Take),
        Just(Step::Flush),
    ];
    (any::<bool>(), what)
}

/// Receive buffers, from the smallest number and size that are allowed.
fn shape() -> impl Strategy<Value = Shape> {
    (4u16..12, 12u32..80).prop_map(|(count, size)| Shape { count, size })
}

fn sends() -> impl Strategy<Value = Shape> {
    (1u16..12, 12u32..80).prop_map(|(count, size)| Shape { count, size })
}

proptest! {
    /// After any order of sends, arrivals, completions and reads, all possible events happen until none is left. Then both streams have
    /// arrived complete and in order. (On the way, asserts check that each message finds a buffer, and that no buffer is used twice.)
    #[test]
    fn streams_arrive_whole_in_order_and_never_stand_still(
        steps in proptest::collection::vec(step(), 0..400),
        shapes in (sends(), shape(), sends(), shape()),
    ) {
        let (a_sends, a_receives, b_sends, b_receives) = shapes;
        let mut sides = [Side::new(a_sends, a_receives, b_receives), Side::new(b_sends, b_receives, a_receives)];
        let mut next = 0u8;
        for (first, step) in steps {
            let [a, b] = &mut sides;
            let (one, other) = if first { (a, b) } else { (b, a) };
            match step {
                Step::Send(count) => {
                    for _ in 0..count {
                        next = next.wrapping_mul(5).wrapping_add(37);
                        one.queue.push_back(next);
                        one.sent.push(next);
                    }
                    one.flush();
                }
                Step::Deliver => drop(deliver(one, other)),
                Step::Finish => drop(one.finish()),
                Step::Take(most) => drop(one.take(most)),
                Step::Flush => drop(one.flush()),
            }
        }
        // Far above the need. A cycle of messages that answer messages would exceed it.
        let mut rounds = 0;
        loop {
            let [a, b] = &mut sides;
            let mut moved = deliver(a, b) | deliver(b, a) | a.finish() | b.finish();
            for side in [a, b] {
                // Only a side that is unblocked offers again, like a link's reader.
                if side.flow.take_unblocked() {
                    moved |= side.flush() > 0;
                }
                moved |= side.take(1000) > 0;
            }
            if !moved {
                break;
            }
            rounds += 1;
            prop_assert!(rounds < 100_000, "it goes round and round");
        }
        let [a, b] = &sides;
        prop_assert!(a.queue.is_empty() && b.queue.is_empty(), "it stands still: {:?} {:?}", a.flow, b.flow);
        prop_assert!(a.came == b.sent && b.came == a.sent, "a stream was changed");
        prop_assert!(a.flow.is_idle() && b.flow.is_idle());
        for (side, own, peer) in [(a, a_sends, b_receives), (b, b_sends, a_receives)] {
            prop_assert!(side.device.longest <= usize::try_from(own.size.min(peer.size)).unwrap());
        }
    }

    /// Every message is accepted or refused, and changes nothing beyond the stream.
    #[test]
    fn no_message_does_harm(messages in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 1..20)) {
        let shape = Shape { count: 4, size: 64 };
        let mut side = Side::new(shape, shape, shape);
        for message in messages {
            let Some(buffer) = side.device.posted.pop_front() else { break };
            let result = side.flow.received(buffer, &message, &mut side.device);
            prop_assert!(side.flow.credits <= shape.count);
            if result.is_err() {
                break;
            }
        }
    }
}

fn side() -> Side {
    let shape = Shape { count: 4, size: 64 };
    Side::new(shape, shape, shape)
}

fn refused(side: &mut Side, message: &[u8]) -> Violation {
    let buffer = side.device.posted.pop_front().unwrap();
    match side.flow.received(buffer, message, &mut side.device).unwrap_err() {
        Failure::Violation(violation) => violation,
        Failure::Port(error) => panic!("{error}"),
    }
}

/// Each violation by a peer has its own error.
#[test]
fn what_no_correct_peer_sends_is_refused() {
    let message = |credits: u16, zero: u16, said: u32, part: &[u8]| {
        [&credits.to_le_bytes()[..], &zero.to_le_bytes(), &said.to_le_bytes(), part].concat()
    };
    assert_eq!(refused(&mut side(), &[1, 0, 0]), Violation::Length(3, 0));
    assert_eq!(refused(&mut side(), &message(0, 0, 5, b"four")), Violation::Length(12, 5));
    assert_eq!(refused(&mut side(), &message(0, 0, u32::MAX, b"four")), Violation::Length(12, u32::MAX));
    assert_eq!(refused(&mut side(), &message(0, 1, 4, b"four")), Violation::Reserved);
    assert_eq!(refused(&mut side(), &message(0, 0, 0, b"")), Violation::Empty);
    let too_many = Violation::Credits { returned: 1, held: 4, all: 4 };
    assert_eq!(refused(&mut side(), &message(1, 0, 0, b"")), too_many);
    let mut one = side();
    assert_eq!(one.flow.sent(0), Err(Violation::Buffer(0)));
    assert_eq!(one.flow.sent(99), Err(Violation::Buffer(99)));
    let result = one.flow.received(99, &message(0, 0, 4, b"four"), &mut one.device);
    assert!(matches!(result, Err(Failure::Violation(Violation::Buffer(99)))));
}

/// If a side's reader doesn't read, its memory is bounded: it polls no more messages, and the peer runs out of credits.
#[test]
fn what_nobody_reads_is_bounded() {
    let shape = Shape { count: 16, size: 1 << 20 };
    let (mut a, mut b) = (Side::new(shape, shape, shape), Side::new(shape, shape, shape));
    a.queue = vec![7; 64 << 20].into();
    for _ in 0..200 {
        a.flush();
        while a.finish() {}
        while b.flow.has_room() && deliver(&mut a, &mut b) {}
        deliver(&mut b, &mut a);
        while b.finish() {}
    }
    assert!(!b.flow.has_room() && b.flow.arrived.len() < 6 << 20, "{}", b.flow.arrived.len());
    assert!(a.queue.len() > 32 << 20, "the sender was held up");
}
