//! The module's end with a peer that writes anything to the segment.

use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::BTreeMap;

use mmnet_rings::{Part, PostError, Rings};
use neighbour::channel::{self, Message, STATUS_UNREACHABLE};
use neighbour::layout::{FLAG_MORE, Layout, Side};
use neighbour::ring::stamp;
use proptest::prelude::*;

use crate::bed::{
    BASE, COMMON, CRATE, EPOCH, KIND, MODULE, NOBODY, RAM, SLOTS, STATUS_DEAD, STATUS_NOBODY, STRANGER,
    STRIDE, place, segment, window,
};

const ENTRIES: u32 = 16;

/// A message entry from a peer: mostly valid.
#[derive(Debug, Clone)]
struct Entry {
    part: Part,
    flags: u16,
    kind: u16,
    id: u32,
    note: u32,
    stamped: bool,
}

fn address() -> impl Strategy<Value = u64> {
    let slots = prop_oneof![
        6 => Just(CRATE),
        1 => Just(MODULE),
        1 => prop::sample::select(&COMMON),
        1 => Just(STRANGER),
        1 => Just(NOBODY),
        1 => 0..=SLOTS,
    ];
    let edges = RAM.iter().flat_map(|&(at, size)| [at, at + size]).chain([STRIDE]).collect::<Vec<_>>();
    prop_oneof![
        20 => (slots, prop::sample::select(edges), -0x40i64..0x40).prop_map(|(slot, edge, by)| {
            (BASE + u64::from(slot) * STRIDE + edge).saturating_add_signed(by)
        }),
        20 => (0u64..0x7000).prop_map(|at| window(CRATE).start() + at),
        1 => any::<u64>(),
        1 => (0u64..100).prop_map(|below| u64::MAX - below),
    ]
}

fn part() -> impl Strategy<Value = Part> {
    let length = prop_oneof![20 => 1u32..0x80, 1 => Just(0), 1 => any::<u32>()];
    (address(), length).prop_map(|(address, length)| Part { address, length })
}

fn entry() -> impl Strategy<Value = Entry> {
    let flags = prop_oneof![20 => Just(0), 10 => Just(FLAG_MORE), 1 => any::<u16>()];
    let kind = prop_oneof![9 => (0u16..256).prop_map(|own| KIND | own), 1 => any::<u16>()];
    let id = prop_oneof![30 => 0..ENTRIES, 1 => ENTRIES..ENTRIES + 3, 1 => any::<u32>()];
    (part(), flags, kind, id, any::<u32>(), prop::bool::weighted(0.98))
        .prop_map(|(part, flags, kind, id, note, stamped)| Entry { part, flags, kind, id, note, stamped })
}

/// Entries of one message usually have one id.
fn entries() -> impl Strategy<Value = Vec<Entry>> {
    (prop::collection::vec(entry(), 0..ENTRIES as usize), prop::bool::weighted(0.9)).prop_map(
        |(mut entries, same)| {
            for at in 1..entries.len() {
                let before = entries[at - 1].clone();
                if same && before.flags == FLAG_MORE {
                    entries[at].id = before.id;
                }
            }
            entries
        },
    )
}

fn write(words: &[AtomicU64], layout: &Layout, entries: &[Entry]) {
    let first = layout.messages(Side::Second).first;
    for (number, entry) in (0..).zip(entries) {
        let at = first + 4 * number as usize;
        let values = [
            entry.part.address,
            u64::from(entry.kind) << 48 | u64::from(entry.flags) << 32 | u64::from(entry.part.length),
            u64::from(entry.note) << 32 | u64::from(entry.id),
            if entry.stamped { stamp(EPOCH, number) } else { 0 },
        ];
        for (word, value) in words[at..].iter().zip(values) {
            word.store(value, Ordering::Relaxed);
        }
    }
}

/// Returns the module's completions: ids and statuses.
fn given_back(words: &[AtomicU64], layout: &Layout) -> Vec<(u32, u32)> {
    let first = layout.completions(Side::Second).first;
    (0..layout.entries())
        .map_while(|number| {
            let at = first + 2 * number as usize;
            let word = words[at].load(Ordering::Relaxed);
            let there = words[at + 1].load(Ordering::Relaxed) == stamp(EPOCH, number);
            there.then_some(((word & 0xffff_ffff) as u32, (word >> 32) as u32))
        })
        .collect()
}

/// A part's classification for the module, by arithmetic that can't overflow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Whose {
    /// RAM of the sender.
    Sender,
    /// RAM of a third VM that both may read.
    Common(u32),
    /// In another window, and not readable.
    Unreachable,
    /// In no window, or not RAM of its owner.
    Nobody,
}

fn whose(part: &Part) -> Whose {
    let (from, to) = (u128::from(part.address), u128::from(part.address) + u128::from(part.length));
    let of = |slot: u32| {
        let start = u128::from(BASE) + u128::from(slot) * u128::from(STRIDE);
        let in_window = from >= start && to <= start + u128::from(STRIDE) && from < to;
        let in_ram = RAM.iter().any(|&(at, size)| {
            from >= start + u128::from(at) && to <= start + u128::from(at) + u128::from(size)
        });
        (in_window, in_window && in_ram)
    };
    match (0..SLOTS).find(|slot| of(*slot).0) {
        Some(CRATE) if of(CRATE).1 => Whose::Sender,
        Some(slot) if COMMON.contains(&slot) && of(slot).1 => Whose::Common(slot),
        None | Some(CRATE) => Whose::Nobody,
        Some(_) => Whose::Unreachable,
    }
}

fn of_crate(part: &Part) -> channel::Part {
    channel::Part { address: part.address, length: part.length }
}

proptest! {
    /// For any entries, module and crate accept the same messages, refuse the same, and detect the same violations.
    #[test]
    fn module_and_crate_judge_alike(entries in entries()) {
        let ((one, layout), (two, _)) = (segment(ENTRIES), segment(ENTRIES));
        write(one.words(), &layout, &entries);
        // The crate's receiver stands for the module's side, over a ring with the same content.
        write(two.words(), &layout, &entries);
        let mut judge = channel::Receiver::new(two.words(), &layout, EPOCH, Side::Second, window(CRATE)).unwrap();
        let mut rings = Rings::new(&one, ENTRIES, EPOCH, place(), &RAM);
        rings.poll();

        let (mut message, mut back) = (Message::default(), Vec::new());
        let broken = loop {
            match judge.receive(two.words(), &mut message) {
                Err(_) => break true,
                Ok(false) => break false,
                // The crate leaves it to its users to detect an id that is already outstanding.
                Ok(true) if !is_free(&back, message.id) => break true,
                Ok(true) => {}
            }
            if message.unreachable() {
                back.push((message.id, Some(STATUS_UNREACHABLE)));
            } else if message.kind >> 8 != KIND >> 8 {
                back.push((message.id, Some(STATUS_NOBODY)));
            } else {
                let got = rings.received();
                prop_assert!(got.is_some(), "the module doesn't take {message:?}");
                let got = got.unwrap();
                prop_assert_eq!((got.id, got.kind, got.note), (message.id, message.kind, message.note));
                prop_assert_eq!(got.parts.iter().map(of_crate).collect::<Vec<_>>(), message.parts());
                back.push((message.id, None));
            }
        };
        prop_assert_eq!(rings.received(), None);
        prop_assert_eq!(rings.violation().is_some(), broken, "{:?}", rings.violation());
        let refused: Vec<(u32, u32)> =
            back.iter().filter_map(|(id, status)| Some((*id, (*status)?))).collect();
        prop_assert_eq!(given_back(one.words(), &layout), refused);
    }

    /// Parts in RAM of the sender, or of at most two third VMs that both may read, are accepted. Parts in no VM's memory end the
    /// connection.
    #[test]
    fn a_message_names_only_what_both_may_read(parts in prop::collection::vec(part(), 1..8)) {
        let (segment, layout) = segment(ENTRIES);
        let mut rings = Rings::new(&segment, ENTRIES, EPOCH, place(), &RAM);
        for slot in COMMON {
            rings.third(slot, &RAM, true);
        }
        rings.third(STRANGER, &RAM, false);
        let last = parts.len() - 1;
        let list: Vec<Entry> = (0..).zip(&parts).map(|(at, part)| Entry {
            part: *part,
            flags: if at < last { FLAG_MORE } else { 0 },
            kind: KIND,
            id: 5,
            note: 0,
            stamped: true,
        }).collect();
        write(segment.words(), &layout, &list);
        rings.poll();

        let whose: Vec<Whose> = parts.iter().map(whose).collect();
        let mut thirds: Vec<u32> = whose.iter().filter_map(|whose| match whose {
            Whose::Common(slot) => Some(*slot),
            _ => None,
        }).collect();
        thirds.sort_unstable();
        thirds.dedup();
        if whose.contains(&Whose::Nobody) {
            prop_assert_eq!((rings.received(), rings.violation().is_some()), (None, true));
            prop_assert_eq!(given_back(segment.words(), &layout), []);
        } else if whose.contains(&Whose::Unreachable) || thirds.len() > 2 {
            prop_assert_eq!((rings.received(), rings.violation()), (None, None));
            prop_assert_eq!(given_back(segment.words(), &layout), [(5, STATUS_UNREACHABLE)]);
        } else {
            prop_assert_eq!(rings.violation(), None);
            prop_assert_eq!(rings.received().map(|message| message.parts), Some(parts));
            prop_assert!(rings.complete(5, 1));
            prop_assert_eq!(given_back(segment.words(), &layout), [(5, 1)]);
        }
        // Only its own connection still uses a third VM's window.
        prop_assert!(COMMON.iter().all(|slot| rings.third_uses(*slot) == 1));
    }

    /// For any writes of a peer at any time: each posted message completes once, and no invariant of the module breaks.
    #[test]
    fn nothing_that_a_peer_writes_breaks_the_module(steps in prop::collection::vec(chaos(), 0..200)) {
        let (segment, layout) = segment(ENTRIES);
        let words = segment.words();
        let mut rings = Rings::new(&segment, ENTRIES, EPOCH, place(), &RAM);
        rings.third(COMMON[0], &RAM, true);
        let own = Part { address: window(MODULE).start(), length: 64 };
        let (mut cookies, mut held) = (BTreeMap::new(), Vec::new());
        for (number, step) in (0..).zip(&steps) {
            match *step {
                Chaos::Poke { word, value } => words[word % words.len()].store(value, Ordering::Relaxed),
                Chaos::Entry { at, ref entry } => {
                    let mut list = vec![Entry { stamped: false, ..entry.clone() }; at];
                    list.push(entry.clone());
                    write(words, &layout, &list);
                }
                Chaos::Completion { at, id, status } => {
                    let place = layout.completions(Side::First).first + 2 * (at % ENTRIES) as usize;
                    words[place].store(u64::from(status) << 32 | u64::from(id), Ordering::Relaxed);
                    words[place + 1].store(stamp(EPOCH, at), Ordering::Relaxed);
                }
                Chaos::Taken(count) => {
                    words[layout.taken(Side::First)].store(u64::from(EPOCH) << 32 | u64::from(count), Ordering::Relaxed);
                }
                Chaos::Post(count) => {
                    if rings.post(&vec![own; count], KIND, 0, number).is_ok() {
                        cookies.insert(number, ());
                    }
                }
                Chaos::Poll => {
                    rings.poll();
                    while let Some(message) = rings.received() {
                        let allowed = message.parts.iter().all(|part| {
                            matches!(whose(part), Whose::Sender | Whose::Common(3))
                        });
                        prop_assert!(allowed, "{:?}", message.parts);
                        held.push(message.id);
                    }
                }
                Chaos::Complete => {
                    if let Some(id) = held.pop() {
                        prop_assert!(rings.complete(id, 0));
                    }
                }
            }
            while let Some((cookie, status)) = rings.sent() {
                prop_assert_eq!(cookies.remove(&cookie), Some(()));
                prop_assert!(status != STATUS_DEAD, "a peer says that the connection ended");
            }
        }
        rings.end();
        while let Some((cookie, _)) = rings.sent() {
            prop_assert_eq!(cookies.remove(&cookie), Some(()));
        }
        prop_assert!(cookies.is_empty());
        for id in held {
            prop_assert!(rings.complete(id, 0));
        }
    }
}

/// A list of more parts than permitted is detected before it is stored, independent of the ring's size.
#[test]
fn a_list_without_end_is_found() {
    for (entries, parts) in [(8, 8), (64, 32), (64, 33), (64, 64)] {
        let (segment, layout) = segment(entries);
        let mut rings = Rings::new(&segment, entries, EPOCH, place(), &RAM);
        let more = Entry {
            part: Part { address: window(CRATE).start(), length: 1 },
            flags: FLAG_MORE,
            kind: KIND,
            id: 1,
            note: 0,
            stamped: true,
        };
        let mut list = vec![more; parts];
        if parts == 32 {
            list[31].flags = 0;
        }
        write(segment.words(), &layout, &list);
        rings.poll();
        assert_eq!(rings.violation().is_none(), parts == 32, "{parts} parts in a ring of {entries}");
        assert_eq!(rings.received().map(|message| message.parts.len()), (parts == 32).then_some(32));
    }
}

/// A peer that claims to have received messages that were never sent, or fewer than before, is detected by the side that needs the
/// room. Claims about another epoch are ignored and aren't violations.
#[test]
fn a_peer_that_took_what_was_never_sent_is_found() {
    let (segment, layout) = segment(ENTRIES);
    let taken = &segment.words()[layout.taken(Side::First)];
    let says = |epoch: u32, count: u64| taken.store(u64::from(epoch) << 32 | count, Ordering::Relaxed);
    let own = Part { address: window(MODULE).start(), length: 64 };
    // More than was sent, by one and by the maximum; fewer than claimed before.
    for wrong in [3 * 8 + 1, u64::from(u32::MAX), 7] {
        says(EPOCH, 0);
        let mut rings = Rings::new(&segment, ENTRIES, EPOCH, place(), &RAM);
        let mut post = || rings.post(&[own; 8], KIND, 0, 0);
        assert_eq!((post(), post(), post()), (Ok(()), Ok(()), Err(PostError::Full)));
        says(EPOCH - 1, u64::from(ENTRIES));
        assert_eq!(post(), Err(PostError::Full));
        says(EPOCH, 8);
        assert_eq!((post(), post()), (Ok(()), Err(PostError::Full)));
        says(EPOCH, wrong);
        assert_eq!(post(), Err(PostError::Full));
        assert_eq!(rings.violation(), Some("it says that it took messages which were never sent"), "{wrong}");
    }
}

/// Returns whether an id isn't outstanding at its receiver.
fn is_free(back: &[(u32, Option<u32>)], id: u32) -> bool {
    !back.contains(&(id, None))
}

#[derive(Debug, Clone)]
enum Chaos {
    Poke { word: usize, value: u64 },
    Entry { at: usize, entry: Entry },
    Completion { at: u32, id: u32, status: u32 },
    Taken(u32),
    Post(usize),
    Poll,
    Complete,
}

fn chaos() -> impl Strategy<Value = Chaos> {
    prop_oneof![
        1 => (any::<usize>(), any::<u64>()).prop_map(|(word, value)| Chaos::Poke { word, value }),
        3 => (0..ENTRIES as usize, entry()).prop_map(|(at, entry)| Chaos::Entry { at, entry }),
        3 => (0u32..40, prop_oneof![9 => 0..ENTRIES, 1 => any::<u32>()], prop_oneof![any::<u32>(), Just(STATUS_DEAD)])
            .prop_map(|(at, id, status)| Chaos::Completion { at, id, status }),
        1 => prop_oneof![9 => 0u32..40, 1 => any::<u32>()].prop_map(Chaos::Taken),
        4 => (0usize..5).prop_map(Chaos::Post),
        4 => Just(Chaos::Poll),
        2 => Just(Chaos::Complete),
    ]
}
