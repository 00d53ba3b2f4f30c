use core::sync::atomic::AtomicU64;

use proptest::prelude::*;

use super::*;
use crate::channel::{PostError, Sender};
use crate::layout::{Layout, Side};
use crate::window::{Geometry, PAGE};

const STRIDE: u64 = 1 << 30;
const RAM: u64 = 16 * PAGE;
const ORIGIN: u32 = 1;
const MIDDLE: u32 = 2;
const END: u32 = 3;

fn geometry() -> Geometry {
    Geometry::new(STRIDE, STRIDE, 6).unwrap()
}

fn window(slot: u32) -> Window {
    geometry().window(slot, &[(0, RAM)]).unwrap()
}

fn part(slot: u32, at: u64, length: u32) -> Part {
    Part { address: STRIDE + u64::from(slot) * STRIDE + at, length }
}

/// One direction of a pair.
struct Way {
    words: Vec<AtomicU64>,
    sender: Sender<Vec<u32>>,
    receiver: Receiver,
}

impl Way {
    fn new(from: u32, to: u32, epoch: u32) -> Self {
        let layout = Layout::new(16).unwrap();
        let words: Vec<AtomicU64> = (0..layout.size() / 8).map(|_| AtomicU64::new(0)).collect();
        let side = Side::of(from, to).unwrap();
        let own = window(from);
        let sender = Sender::new(&words[..], &layout, epoch, side, own, vec![0; 16]).unwrap();
        let receiver = Receiver::new(&words[..], &layout, epoch, side, own).unwrap();
        Self { words, sender, receiver }
    }
}

/// Views of a VM that is connected with these, and has all others of them in common with each.
fn views(peers: &[u32]) -> Views {
    let mut views = Views::new();
    for peer in peers {
        assert!(views.mapped(window(*peer), 1));
        let others = peers.iter().filter(|other| *other != peer).fold(0, |all, other| all | 1 << other);
        views.common(*peer, others);
    }
    views
}

/// The same address travels over two hops; each hop holds the origin's memory until the completion has come back, also when
/// the origin dies meanwhile.
#[test]
fn a_buffer_is_held_along_the_pipeline_until_its_completion_has_come_back() {
    let (mut middle, mut end) = (views(&[ORIGIN, END]), views(&[ORIGIN, MIDDLE]));
    let (mut first, mut second) = (Way::new(ORIGIN, MIDDLE, 1), Way::new(MIDDLE, END, 1));
    let mut at_middle = Message::default();
    let mut at_end = Message::default();
    let data = part(ORIGIN, PAGE, 4096);

    let id = first.sender.post(&first.words[..], &[data], 1, 0).unwrap();
    assert_eq!(middle.receive(&mut first.receiver, ORIGIN, &first.words[..], &mut at_middle), Ok(true));
    let own = part(MIDDLE, 0, 64);
    let names = middle.to(END, window(MIDDLE));
    second.sender.post_by(&second.words[..], &names, &[own, data], 1, 0).unwrap();
    assert_eq!(end.receive(&mut second.receiver, MIDDLE, &second.words[..], &mut at_end), Ok(true));
    assert_eq!(at_end.parts(), [own, data], "not translated, not copied");
    assert_eq!((end.holds(ORIGIN), end.holds(MIDDLE), middle.holds(ORIGIN)), (1, 1, 1));

    middle.gone(ORIGIN, 1);
    end.gone(ORIGIN, 1);
    assert_eq!((middle.releasable(ORIGIN), end.releasable(ORIGIN)), (None, None));
    assert!(!end.released(ORIGIN) && !end.mapped(window(ORIGIN), 2), "the old memory is still being read");
    end.complete(&mut second.receiver, &second.words[..], &at_end, 0);
    assert_eq!((end.releasable(ORIGIN), middle.releasable(ORIGIN)), (Some(1), None));
    assert_eq!(second.sender.completion(&second.words[..]).unwrap().map(|back| back.status), Some(0));
    middle.let_go(&at_middle);
    assert!(middle.released(ORIGIN) && middle.mapped(window(ORIGIN), 2));
    assert!(first.sender.is_outstanding(id), "the origin is dead; nobody told it");
}

/// Nobody reaches through a neighbour what he may not read himself.
#[test]
fn a_third_whom_the_two_do_not_have_in_common_is_unreachable() {
    let mut end = views(&[ORIGIN, MIDDLE]);
    end.common(MIDDLE, 0);
    let mut way = Way::new(MIDDLE, END, 1);
    let mut middle = views(&[ORIGIN, END]);
    let (own, data) = (part(MIDDLE, 0, 8), part(ORIGIN, 0, 8));
    // The sender isn't held back by what it knows: it holds nothing of the origin's, and can't name it.
    let refused =
        way.sender.post_by(&way.words[..], &middle.to(END, window(MIDDLE)), &[own, data], 0, 0).unwrap_err();
    assert_eq!(refused, PostError::Outside(data));
    // A broken one names it all the same.
    let anything = geometry().window(ORIGIN, &[(0, RAM)]).unwrap();
    way.sender.post_by(&way.words[..], &anything, &[data], 0, 0).unwrap();
    let mut message = Message::default();
    assert_eq!(end.receive(&mut way.receiver, MIDDLE, &way.words[..], &mut message), Ok(true));
    assert!(message.unreachable() && message.parts().is_empty() && message.owners() == 0);
    end.complete(&mut way.receiver, &way.words[..], &message, STATUS_UNREACHABLE);
    let back = way.sender.completion(&way.words[..]).unwrap();
    assert_eq!(back.map(|back| back.status), Some(STATUS_UNREACHABLE));
    middle.common(END, 0);
    assert_eq!(middle.to(END, window(MIDDLE)).owner(data), Owner::Unreachable);
}

#[test]
fn the_dead_are_not_named_anew_and_memory_that_is_not_held_is_not_passed_on() {
    let mut middle = views(&[ORIGIN, END]);
    let data = part(ORIGIN, 0, 8);
    assert_eq!(middle.to(END, window(MIDDLE)).owner(data), Owner::Unreachable, "nothing holds it");
    assert_eq!(middle.from(END).owner(data), Owner::Slot(ORIGIN));
    middle.gone(ORIGIN, 7);
    assert_eq!(middle.from(END).owner(data), Owner::Slot(ORIGIN), "that was another connection");
    middle.gone(ORIGIN, 1);
    assert_eq!(middle.from(END).owner(data), Owner::Unreachable);
}

proptest! {
    /// Whatever is named: it is taken exactly when all of it is RAM of the sender, or RAM of one third that is in common and
    /// mapped; an address that is in nobody's window, or in two, or in a hole of the sender's, is an offence.
    #[test]
    fn the_rule_agrees_with_a_list_of_all_that_may_be_named(
        slot in 0u32..6,
        at in prop_oneof![0..2 * RAM, (STRIDE - 8)..STRIDE, Just(u64::MAX / 2)],
        length in prop_oneof![Just(0u32), 1u32..5000, Just(u32::MAX)],
        common in 0u64..64,
        mapped in 0u64..64,
        gone in 0u64..64,
    ) {
        let mut views = Views::new();
        for peer in (0..6).filter(|peer| (mapped | 1 << MIDDLE) >> peer & 1 == 1 && *peer != END) {
            prop_assert!(views.mapped(window(peer), 1));
            if gone >> peer & 1 == 1 {
                views.gone(peer, 1);
            }
        }
        views.common(MIDDLE, common);
        let address = (1 + u64::from(slot)).wrapping_mul(STRIDE).wrapping_add(at);
        let owner = views.from(MIDDLE).owner(Part { address, length });
        let (from, to) = (u128::from(address), u128::from(address) + u128::from(length));
        let base = |slot: u32| u128::from(STRIDE) * (1 + u128::from(slot));
        let ram_of = (0..6).find(|slot| length > 0 && from >= base(*slot) && to <= base(*slot) + u128::from(RAM));
        let window_of = (0..6).find(|s| length > 0 && from >= base(*s) && to <= base(*s + 1));
        let wanted = match (ram_of, window_of) {
            (Some(MIDDLE), _) => Owner::Slot(MIDDLE),
            (Some(third), _)
                if third != END && (mapped & !gone & common) >> third & 1 == 1 => Owner::Slot(third),
            (_, Some(third)) if third != MIDDLE => Owner::Unreachable,
            _ => Owner::Nobody,
        };
        prop_assert_eq!(owner, wanted);
    }

    /// Holds are counted: a window that has gone can be released exactly when as many messages were given back as received.
    #[test]
    fn a_window_is_released_only_when_no_message_holds_it(back in prop::collection::vec(any::<bool>(), 1..60)) {
        let mut end = views(&[ORIGIN, MIDDLE]);
        let mut way = Way::new(MIDDLE, END, 1);
        let mut held = Vec::new();
        for give_back in back {
            if give_back {
                if let Some(message) = held.pop() {
                    end.complete(&mut way.receiver, &way.words[..], &message, 0);
                    prop_assert!(way.sender.completion(&way.words[..]).unwrap().is_some());
                }
            } else if held.len() < 16 {
                let origin = window(ORIGIN);
                way.sender.post_by(&way.words[..], &origin, &[part(ORIGIN, 0, 8), part(ORIGIN, 64, 8)], 0, 0).unwrap();
                let mut message = Message::default();
                prop_assert_eq!(end.receive(&mut way.receiver, MIDDLE, &way.words[..], &mut message), Ok(true));
                held.push(message);
            }
            prop_assert_eq!(end.holds(ORIGIN) as usize, held.len());
            prop_assert_eq!(end.releasable(ORIGIN), None, "it is alive");
        }
        end.gone(ORIGIN, 1);
        while let Some(message) = held.pop() {
            prop_assert_eq!(end.releasable(ORIGIN), None);
            end.let_go(&message);
        }
        prop_assert!(end.released(ORIGIN));
    }
}
