//! The C rings of the guest module `mmnet`, with a peer that writes anything to the pair's segment.
//!
//! Checked:
//! - Messages that the module delivers are in the sender's window, or in that of the one third VM that both may read.
//! - An id is outstanding at most once at a time, and each posted message completes once.
//! - The process ends on a violation of the module's own invariants, undefined behavior, or an access outside of its tables.

#![no_main]

use std::sync::atomic::Ordering;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use mmnet_rings::{Part, Place, Rings, Segment};
use neighbour::layout::{Layout, Side};
use neighbour::ring::stamp;

const EPOCH: u32 = 3;
const ENTRIES: u32 = 8;
const STRIDE: u64 = 1 << 30;
const PLACE: Place = Place { base: STRIDE, stride: STRIDE, slots: 5, own: 1, peer: 2 };
const THIRD: u32 = 3;
const STRANGER: u32 = 4;
const RAM: &[(u64, u64)] = &[(0, 0x8000), (0x10_0000, 0x4000)];

#[derive(Debug, Arbitrary)]
enum Step {
    /// Any word of the segment.
    Poke {
        word: u16,
        value: u64,
    },
    /// A message entry that is well-formed except for the input's changes.
    Entry {
        number: u8,
        slot: u8,
        address: u16,
        far: Option<u64>,
        length: u16,
        flags: u8,
        kind: u16,
        id: u8,
        epoch: u8,
    },
    /// A completion entry that is well-formed except for the input's changes.
    Completion {
        number: u8,
        id: u8,
        status: u32,
        epoch: u8,
    },
    Taken {
        count: u8,
        epoch: u8,
    },
    /// The module's stamp of the events for which the peer sleeps.
    Sleeps {
        completions: bool,
        number: u8,
    },
    Post {
        parts: u8,
    },
    Poll,
    Complete {
        which: u8,
    },
    Kick,
}

fn epoch(choice: u8) -> u32 {
    // Mostly the right one.
    match choice {
        0..=7 => u32::from(choice),
        _ => EPOCH,
    }
}

fn start(slot: u32) -> u64 {
    PLACE.base + u64::from(slot) * STRIDE
}

fn in_ram(part: &Part, slot: u32) -> bool {
    part.address.checked_sub(start(slot)).is_some_and(|at| {
        let end = at + u64::from(part.length);
        part.length > 0 && RAM.iter().any(|(start, size)| at >= *start && end <= start + size)
    })
}

fuzz_target!(|steps: Vec<Step>| run(&steps));

fn run(steps: &[Step]) {
    let layout = Layout::new(ENTRIES).expect("a possible layout");
    let segment = Segment::new(layout.size());
    let words = segment.words();
    let put = |word: usize, value: u64| words[word % words.len()].store(value, Ordering::Relaxed);
    let mut rings = Rings::new(&segment, ENTRIES, EPOCH, PLACE, RAM);
    rings.third(THIRD, RAM, true);
    rings.third(STRANGER, RAM, false);
    let mut held = Vec::new();
    let (mut posted, mut back) = (0_u64, Vec::new());
    for step in steps.iter().take(256) {
        match *step {
            Step::Poke { word, value } => put(usize::from(word), value),
            Step::Entry { number, slot, address, far, length, flags, kind, id, epoch: of } => {
                let at = layout.messages(Side::Second).first + 4 * usize::from(number % 8);
                let near = start(u32::from(if slot < 6 { slot } else { 2 })) + u64::from(address);
                put(at, far.unwrap_or(near));
                let kind = if kind & 7 == 0 { kind } else { 0x0100 };
                put(at + 1, u64::from(kind) << 48 | u64::from(flags & 3) << 32 | u64::from(length));
                put(at + 2, u64::from(id % 10));
                put(at + 3, stamp(epoch(of), u32::from(number)));
            }
            Step::Completion { number, id, status, epoch: of } => {
                let at = layout.completions(Side::First).first + 2 * usize::from(number % 8);
                put(at, u64::from(status) << 32 | u64::from(id % 10));
                put(at + 1, stamp(epoch(of), u32::from(number)));
            }
            Step::Taken { count, epoch: of } => {
                put(layout.taken(Side::First), u64::from(epoch(of)) << 32 | u64::from(count));
            }
            Step::Sleeps { completions, number } => {
                let place =
                    if completions { layout.completions(Side::Second) } else { layout.messages(Side::First) };
                put(place.sleeps, stamp(EPOCH, u32::from(number)));
            }
            Step::Post { parts } => {
                let parts = vec![Part { address: start(1), length: 16 }; usize::from(parts % 10)];
                if rings.post(&parts, 0x0100, 2, posted).is_ok() {
                    posted += 1;
                }
            }
            Step::Poll => {
                rings.poll();
                while let Some(message) = rings.received() {
                    assert!(!message.parts.is_empty() && message.id < ENTRIES);
                    for part in &message.parts {
                        assert!(in_ram(part, PLACE.peer) || in_ram(part, THIRD), "{part:?}");
                    }
                    held.push(message.id);
                }
            }
            Step::Complete { which } => {
                if !held.is_empty() {
                    let id = held.swap_remove(usize::from(which) % held.len());
                    assert!(rings.complete(id, 0), "{id} was out");
                }
            }
            Step::Kick => rings.kick(),
        }
        while let Some((cookie, _)) = rings.sent() {
            back.push(cookie);
        }
    }
    rings.end();
    while let Some((cookie, _)) = rings.sent() {
        back.push(cookie);
    }
    back.sort_unstable();
    assert!(back.iter().copied().eq(0..posted), "posted {posted}, back {back:?}");
}
