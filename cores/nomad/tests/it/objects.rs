//! Objects that change while they are copied arrive as they are when the source stops.

use std::collections::BTreeMap;

use nomad::objects::{Incoming, Incomplete, Kind, Object, Outgoing, Piece, Total};
use proptest::collection::vec;
use proptest::prelude::*;

const KINDS: [Kind; 4] = [Kind::Context, Kind::MemoryRegion, Kind::CompletionQueue, Kind::QueuePair];

#[derive(Debug, Clone)]
enum Step {
    /// An object is made or gets another value.
    Touch { kind: usize, handle: u32, value: u8 },
    /// It is destroyed.
    Remove { kind: usize, handle: u32 },
    /// So many objects are copied.
    Round { most: usize },
    /// Pieces of before come again, from this one on.
    Again { from: usize },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..4_usize, 0..6_u32, any::<u8>())
            .prop_map(|(kind, handle, value)| Step::Touch { kind, handle, value }),
        1 => (0..4_usize, 0..6_u32).prop_map(|(kind, handle)| Step::Remove { kind, handle }),
        2 => (0..8_usize).prop_map(|most| Step::Round { most }),
        1 => (0..64_usize).prop_map(|from| Step::Again { from }),
    ]
}

struct Copy {
    truth: BTreeMap<Object, Vec<u8>>,
    outgoing: Outgoing,
    incoming: Incoming,
    log: Vec<Piece>,
}

impl Copy {
    fn new() -> Self {
        let (outgoing, incoming) = (Outgoing::new(), Incoming::new(1_000));
        Self { truth: BTreeMap::new(), outgoing, incoming, log: Vec::new() }
    }

    fn round(&mut self, most: usize) {
        let (truth, log, incoming) = (&self.truth, &mut self.log, &mut self.incoming);
        self.outgoing.round(
            most,
            |object| truth[&object].clone(),
            |piece| {
                incoming.take(piece.clone()).expect("there is room");
                log.push(piece);
            },
        );
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Touch { kind, handle, value } => {
                let object = Object { kind: KINDS[kind], handle };
                self.truth.insert(object, vec![value; 3]);
                self.outgoing.touched(object);
            }
            Step::Remove { kind, handle } => {
                let object = Object { kind: KINDS[kind], handle };
                self.truth.remove(&object);
                self.outgoing.removed(object);
            }
            Step::Round { most } => self.round(most),
            Step::Again { from } => {
                for piece in self.log.iter().skip(from) {
                    assert_eq!(self.incoming.take(piece.clone()), Ok(false), "an old piece changes nothing");
                }
            }
        }
    }
}

proptest! {
    /// Whatever is touched between rounds, and whatever is repeated, the destination has what the source has when it stops.
    #[test]
    fn the_destination_has_what_the_source_has(steps in vec(step(), 0..80)) {
        let mut copy = Copy::new();
        for step in &steps {
            copy.step(step);
        }
        copy.round(usize::MAX);
        let total = copy.outgoing.total().unwrap();
        let truth: Vec<_> = copy.truth.into_iter().collect();
        prop_assert_eq!(copy.incoming.finish(total), Ok(truth));
    }

    /// A piece that is lost is noticed, whichever it is, unless a newer one of its object came.
    #[test]
    fn a_lost_piece_is_noticed(steps in vec(step(), 1..80), lost in any::<prop::sample::Index>()) {
        let mut copy = Copy::new();
        for step in &steps {
            copy.step(step);
        }
        copy.round(usize::MAX);
        prop_assume!(!copy.log.is_empty());
        let lost = lost.index(copy.log.len());
        let gone = copy.log.remove(lost);
        let replaced = copy.log[lost..].iter().any(|piece| piece.object == gone.object);
        // One that was made and destroyed unseen isn't missed.
        let seen = copy.log[..lost].iter().rev().find(|piece| piece.object == gone.object);
        let matters = gone.state.is_some() || seen.is_some_and(|piece| piece.state.is_some());
        let mut incoming = Incoming::new(1_000);
        for piece in copy.log {
            incoming.take(piece).unwrap();
        }
        let result = incoming.finish(copy.outgoing.total().unwrap());
        prop_assert_eq!(result.is_ok(), replaced || !matters, "{:?} was lost", gone);
    }
}

/// What is left for the pause is what was touched since the last round, however many objects there are.
#[test]
fn the_last_round_depends_on_what_was_touched() {
    let mut outgoing = Outgoing::new();
    let qp = |handle| Object { kind: Kind::QueuePair, handle };
    (0..30_000).for_each(|handle| outgoing.touched(qp(handle)));
    let mut first = 0;
    outgoing.round(usize::MAX, |_| vec![0; 256], |_| first += 1);
    assert_eq!((first, outgoing.left()), (30_000, 0));
    (0..64).for_each(|handle| outgoing.touched(qp(handle * 400)));
    let mut last = 0;
    outgoing.round(usize::MAX, |_| vec![0; 256], |_| last += 1);
    assert_eq!(last, 64);
}

/// A source that sends without end is refused.
#[test]
fn capacity_is_bounded() {
    let mut incoming = Incoming::new(2);
    let piece = |handle, bytes| {
        let object = Object { kind: Kind::QueuePair, handle };
        Piece { object, version: 1, state: Some(vec![0; bytes]) }
    };
    assert_eq!(incoming.take(piece(1, 1)), Ok(true));
    assert_eq!(incoming.take(piece(2, 2 << 20)), Err(Incomplete::Big(2 << 20)));
    assert_eq!(incoming.take(piece(2, 1)), Ok(true));
    assert_eq!(incoming.take(piece(3, 1)), Err(Incomplete::Many(2)));
    let expected = Incomplete::Differs { got: 2, expected: 0 };
    assert_eq!(incoming.finish(Total::default()), Err(expected));
}
