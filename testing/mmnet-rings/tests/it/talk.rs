//! Both ends follow the protocol: each direction matches a queue, and no wake-up is lost.

use std::collections::{BTreeMap, VecDeque};

use mmnet_rings::{Part, PostError, Rings};
use neighbour::channel::{self, Message, Receiver, Sender};
use proptest::prelude::*;

use crate::bed::{
    CRATE, EPOCH, KIND, MODULE, RAM, STATUS_DEAD, STATUS_NOBODY, place, receiver, segment, sender, window,
};

/// Index of what an end sleeps for.
const MESSAGES: usize = 0;
const COMPLETIONS: usize = 1;

#[derive(Debug, Clone)]
enum Step {
    /// The module's end posts.
    Send { parts: usize, own: u8 },
    /// The module's end polls.
    Poll,
    /// The module's end completes one of its received messages, with a status.
    Complete { which: prop::sample::Index, status: u32 },
    /// The crate's end posts; `user`: a kind that the module's end has a user for.
    CrateSends { parts: usize, user: bool },
    /// The crate's end receives.
    CrateReceives,
    /// The crate's end completes one of its received messages.
    CrateCompletes { which: prop::sample::Index, status: u32 },
    /// The crate's end collects completions.
    CrateCollects,
    /// The crate's end arms its wake-ups.
    CrateSleeps,
}

fn step() -> impl Strategy<Value = Step> {
    let index = any::<prop::sample::Index>();
    // Statuses of users are below 0xffff0000.
    let status = 0..0xffff_0000_u32;
    prop_oneof![
        (0usize..40, any::<u8>()).prop_map(|(parts, own)| Step::Send { parts, own }),
        (1usize..4, any::<u8>()).prop_map(|(parts, own)| Step::Send { parts, own }),
        Just(Step::Poll),
        (index.clone(), status.clone()).prop_map(|(which, status)| Step::Complete { which, status }),
        (1usize..6, prop::bool::weighted(0.9)).prop_map(|(parts, user)| Step::CrateSends { parts, user }),
        Just(Step::CrateReceives),
        (index, status).prop_map(|(which, status)| Step::CrateCompletes { which, status }),
        Just(Step::CrateCollects),
        Just(Step::CrateSleeps),
    ]
}

/// Returns parts in the RAM of a slot that encode a message's number, as do their lengths.
fn parts(slot: u32, number: u32, count: usize) -> Vec<Part> {
    let piece = |at: u32| {
        let (start, size) = RAM[(number.wrapping_add(at) % 2) as usize];
        let length = number.wrapping_mul(37).wrapping_add(at) % 999 + 1;
        let offset = u64::from(number.wrapping_mul(101).wrapping_add(at * 7)) % (size - u64::from(length));
        Part { address: window(slot).start() + start + offset, length }
    };
    (0..).take(count).map(piece).collect()
}

fn of_crate(part: &Part) -> channel::Part {
    channel::Part { address: part.address, length: part.length }
}

/// A direction's messages: in order until they are received, by number until they complete.
#[derive(Default)]
struct Sent {
    number: u32,
    coming: VecDeque<(u32, usize)>,
    /// Completed but not collected, in order: number and status.
    back: VecDeque<(u32, u32)>,
}

struct Model<'a> {
    rings: Rings<'a>,
    words: &'a [core::sync::atomic::AtomicU64],
    sender: Sender<Vec<u32>>,
    receiver: Receiver,
    entries: usize,
    /// From the module, and to it.
    out: Sent,
    to: Sent,
    /// Messages that their receiver holds: id and number.
    held_by_crate: Vec<(u32, u32)>,
    held_by_module: Vec<(u32, u32)>,
    /// Ids of the crate's outstanding messages.
    numbers: BTreeMap<u32, u32>,
    /// Whether an end has armed its wake-up for messages, and for completions: the first of these must signal.
    module_sleeps: [bool; 2],
    crate_sleeps: [bool; 2],
}

impl Model<'_> {
    fn step(&mut self, step: &Step) -> Result<(), TestCaseError> {
        match *step {
            Step::Send { parts: count, own } => self.send(count, own)?,
            Step::Poll => self.poll()?,
            Step::Complete { ref which, status } => {
                if !self.held_by_module.is_empty() {
                    let (id, number) =
                        self.held_by_module.swap_remove(which.index(self.held_by_module.len()));
                    prop_assert!(self.rings.complete(id, status) && !self.rings.complete(id, status));
                    self.to.back.push_back((number, status));
                    self.module_signals(COMPLETIONS)?;
                }
            }
            Step::CrateSends { parts: count, user } => self.crate_sends(count, user)?,
            Step::CrateReceives => self.crate_receives()?,
            Step::CrateCompletes { ref which, status } => {
                if !self.held_by_crate.is_empty() {
                    let (id, number) = self.held_by_crate.swap_remove(which.index(self.held_by_crate.len()));
                    self.receiver.complete(self.words, id, status);
                    self.out.back.push_back((number, status));
                    let must = self.receiver.must_signal(self.words);
                    prop_assert_eq!(must, core::mem::take(&mut self.module_sleeps[COMPLETIONS]));
                }
            }
            Step::CrateCollects => self.crate_collects()?,
            Step::CrateSleeps => self.crate_sleeps()?,
        }
        prop_assert_eq!(self.rings.violation(), None);
        Ok(())
    }

    fn send(&mut self, count: usize, own: u8) -> Result<(), TestCaseError> {
        let (number, kind) = (self.out.number, KIND | u16::from(own));
        match self.rings.post(&parts(MODULE, number, count), kind, number, number.into()) {
            Ok(()) => {
                prop_assert!(count > 0 && count <= 32.min(self.entries));
                self.out.number += 1;
                self.out.coming.push_back((number, count));
                self.module_signals(MESSAGES)?;
            }
            Err(PostError::Parts) => prop_assert!(count == 0 || count > 32.min(self.entries)),
            Err(PostError::Full) => prop_assert!(self.out_of_module() > 0),
            Err(PostError::NotConnected) => prop_assert!(false, "the connection is live"),
        }
        Ok(())
    }

    /// Returns the module's messages whose completion its user hasn't seen.
    fn out_of_module(&self) -> usize {
        self.out.coming.len() + self.held_by_crate.len() + self.out.back.len()
    }

    /// The module signals if the crate's end has armed its wake-up for the next event, and only then.
    fn module_signals(&mut self, what: usize) -> Result<(), TestCaseError> {
        let before = self.rings.signals();
        self.rings.kick();
        let wanted = core::mem::take(&mut self.crate_sleeps[what]);
        prop_assert_eq!(self.rings.signals() - before, u32::from(wanted));
        Ok(())
    }

    fn poll(&mut self) -> Result<(), TestCaseError> {
        // A message without a user is completed by the module itself, and signalled within the poll.
        let completes = self.to.coming.iter().any(|(_, user)| *user == 0);
        let wakes = completes && core::mem::take(&mut self.crate_sleeps[COMPLETIONS]);
        let before = self.rings.signals();
        if self.rings.poll() {
            self.module_sleeps = [true; 2];
        }
        prop_assert_eq!(self.rings.signals() - before, u32::from(wakes));
        while let Some((number, user)) = self.to.coming.pop_front() {
            if user == 0 {
                self.to.back.push_back((number, STATUS_NOBODY));
                continue;
            }
            let message = self.rings.received();
            prop_assert!(message.is_some(), "message {} was not received", number);
            let message = message.unwrap();
            let wanted = parts(CRATE, number, user);
            prop_assert_eq!((message.kind, message.note), (KIND | 7, number));
            prop_assert_eq!(message.bytes, wanted.iter().map(|part| u64::from(part.length)).sum::<u64>());
            prop_assert_eq!(message.parts, wanted);
            prop_assert_eq!(self.numbers.get(&message.id), Some(&number));
            self.held_by_module.push((message.id, number));
        }
        prop_assert_eq!(self.rings.received(), None);
        for (number, status) in self.out.back.drain(..) {
            prop_assert_eq!(self.rings.sent(), Some((number.into(), status)));
        }
        prop_assert_eq!(self.rings.sent(), None);
        Ok(())
    }

    fn crate_sends(&mut self, count: usize, user: bool) -> Result<(), TestCaseError> {
        let number = self.to.number;
        let list: Vec<channel::Part> = parts(CRATE, number, count).iter().map(of_crate).collect();
        let kind = if user { KIND | 7 } else { 0x0700 };
        if let Ok(id) = self.sender.post(self.words, &list, kind, number) {
            self.to.number += 1;
            self.to.coming.push_back((number, if user { count } else { 0 }));
            prop_assert_eq!(self.numbers.insert(id, number), None);
            let must = self.sender.must_signal(self.words);
            prop_assert_eq!(must, core::mem::take(&mut self.module_sleeps[MESSAGES]));
        }
        Ok(())
    }

    fn crate_receives(&mut self) -> Result<(), TestCaseError> {
        let mut message = Message::default();
        while let Some((number, count)) = self.out.coming.pop_front() {
            prop_assert_eq!(self.receiver.receive(self.words, &mut message), Ok(true));
            let wanted: Vec<channel::Part> = parts(MODULE, number, count).iter().map(of_crate).collect();
            prop_assert_eq!((message.parts(), message.note), (&wanted[..], number));
            self.held_by_crate.push((message.id, number));
        }
        prop_assert_eq!(self.receiver.receive(self.words, &mut message), Ok(false));
        Ok(())
    }

    fn crate_collects(&mut self) -> Result<(), TestCaseError> {
        for (number, status) in self.to.back.drain(..) {
            let got = self.sender.completion(self.words).unwrap();
            prop_assert!(got.is_some(), "message {} did not come back", number);
            let got = got.unwrap();
            prop_assert_eq!((self.numbers.remove(&got.id), got.status), (Some(number), status));
        }
        prop_assert_eq!(self.sender.completion(self.words), Ok(None));
        Ok(())
    }

    /// Arms both of its rings, as a driver does that polls both.
    fn crate_sleeps(&mut self) -> Result<(), TestCaseError> {
        let (messages, completions) = (self.receiver.arm(self.words), self.sender.arm(self.words));
        prop_assert_eq!(messages, self.out.coming.is_empty());
        prop_assert_eq!(completions, self.to.back.is_empty());
        self.crate_sleeps = [messages, completions];
        Ok(())
    }

    /// Reads, completes and collects everything; then the connection ends.
    fn finish(&mut self) -> Result<(), TestCaseError> {
        self.crate_receives()?;
        let kept = self.held_by_crate.len() / 2;
        for (id, number) in self.held_by_crate.split_off(kept) {
            self.receiver.complete(self.words, id, 0);
            self.out.back.push_back((number, 0));
        }
        self.rings.poll();
        // Messages at the end are ignored.
        while self.rings.received().is_some() {}
        for (number, status) in self.out.back.drain(..) {
            prop_assert_eq!(self.rings.sent(), Some((number.into(), status)));
        }
        self.rings.end();
        prop_assert_eq!(self.rings.post(&parts(MODULE, 0, 1), KIND, 0, 0), Err(PostError::NotConnected));
        let mut dead = BTreeMap::new();
        while let Some((number, status)) = self.rings.sent() {
            prop_assert_eq!((dead.insert(number, status), status), (None, STATUS_DEAD));
        }
        let wanted: Vec<u64> = self.held_by_crate.iter().map(|(_, number)| u64::from(*number)).collect();
        prop_assert_eq!(dead.len(), wanted.len());
        prop_assert!(wanted.iter().all(|number| dead.contains_key(number)));
        Ok(())
    }
}

proptest! {
    /// Messages arrive intact and in order in both directions. Each completes once with its status, and outstanding ones complete at
    /// the end of the connection. Exactly the sleeping ends are signalled.
    #[test]
    fn module_and_crate_understand_each_other(
        bits in 3u32..7,
        steps in prop::collection::vec(step(), 1..300),
    ) {
        let (segment, layout) = segment(1 << bits);
        let mut model = Model {
            rings: Rings::new(&segment, 1 << bits, EPOCH, place(), &RAM),
            words: segment.words(),
            sender: sender(&segment, &layout),
            receiver: receiver(&segment, &layout),
            entries: 1 << bits,
            out: Sent::default(),
            to: Sent::default(),
            held_by_crate: Vec::new(),
            held_by_module: Vec::new(),
            numbers: BTreeMap::new(),
            module_sleeps: [false; 2],
            crate_sleeps: [false; 2],
        };
        for step in &steps {
            model.step(step)?;
        }
        model.finish()?;
    }
}

/// After a full ring, a sender is notified of room once its messages are received, even without completions.
#[test]
fn a_full_ring_has_room_again_when_messages_were_taken() {
    let (segment, layout) = segment(64);
    let mut rings = Rings::new(&segment, 64, EPOCH, place(), &RAM);
    let mut receiver = receiver(&segment, &layout);
    let two = parts(MODULE, 1, 2);
    let posted = (0..).take_while(|number| rings.post(&two, KIND, 0, *number).is_ok()).count();
    assert_eq!(posted, 32);
    rings.poll();
    assert_eq!((rings.rooms(), rings.post(&two, KIND, 0, 0)), (0, Err(PostError::Full)));
    let mut message = Message::default();
    while receiver.receive(segment.words(), &mut message) == Ok(true) {}
    rings.poll();
    assert_eq!((rings.rooms(), rings.sent()), (1, None));
    assert_eq!(rings.post(&two, KIND, 0, 0), Ok(()));
}

/// A receiver that sleeps has acknowledged everything that it received, so its sender has the whole ring.
#[test]
fn a_receiver_that_sleeps_has_told_what_it_took() {
    let (segment, layout) = segment(64);
    let mut rings = Rings::new(&segment, 64, EPOCH, place(), &RAM);
    let mut sender = sender(&segment, &layout);
    let list = |count: usize| parts(CRATE, 1, count).iter().map(of_crate).collect::<Vec<_>>();
    // Fewer than a quarter of the ring, after which it would acknowledge by itself.
    for _ in 0..15 {
        sender.post(segment.words(), &list(1), KIND, 0).unwrap();
    }
    assert!(rings.poll());
    for _ in 0..2 {
        assert!(sender.post(segment.words(), &list(32), KIND, 0).is_ok());
    }
}
