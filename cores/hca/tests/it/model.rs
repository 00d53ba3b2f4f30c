//! Random programs of verbs calls by two guests, on the engine and on a reference model. Memory, completions and states must be the same
//! after every call.
//!
//! The model is as simple as possible: bytes in vectors, a look-up in the page list for each byte, requests executed whole. The engine uses
//! a quantum of a few bytes here, so nearly all messages take several.

mod engine_side;
mod reference;

use proptest::prelude::*;

/// A region in a request, and a change to its key that makes it invalid.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Named {
    /// Index of the region.
    pub(crate) region: usize,
    /// XORed with the key.
    pub(crate) wrong: u32,
}

/// A scatter-gather element.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Element {
    pub(crate) named: Named,
    /// Relative to the region's start.
    pub(crate) offset: i64,
    pub(crate) length: u32,
}

/// The operation.
#[derive(Debug, Clone)]
pub(crate) enum Kind {
    Send { immediate: Option<u8> },
    Write { named: Named, offset: i64, immediate: Option<u8> },
    Read { named: Named, offset: i64 },
    FetchAdd { named: Named, offset: i64, add: u64 },
    CompareSwap { named: Named, offset: i64, compare: u64, swap: u64 },
    Malformed,
}

/// A step of a program. Queue pairs 2n and 2n+1 are peers.
#[derive(Debug, Clone)]
pub(crate) enum Call {
    Post {
        qp: usize,
        kind: Kind,
        elements: Vec<Element>,
        signaled: bool,
    },
    Receive {
        qp: usize,
        elements: Vec<Element>,
    },
    Deregister {
        region: usize,
    },
    Fail {
        qp: usize,
    },
    Reconnect {
        pair: usize,
    },
    /// All retry timers expire.
    Pass,
}

/// Number of connections: between the guests, and of guest 0 with itself.
pub(crate) const PAIRS: usize = 3;
pub(crate) const QPS: usize = 2 * PAIRS;
/// Number of regions; even ones are guest 0's.
pub(crate) const REGIONS: usize = 8;
/// Number of pages of a guest's RAM.
pub(crate) const PAGES: u64 = 6;

/// The guest that a queue pair belongs to.
pub(crate) fn guest_of_qp(qp: usize) -> usize {
    // The last pair is guest 0's with itself.
    if qp >= QPS - 2 { 0 } else { qp % 2 }
}

/// A region: owner, start, length, pages, rights.
pub(crate) struct RegionPlan {
    pub(crate) guest: usize,
    pub(crate) start: u64,
    pub(crate) length: u64,
    pub(crate) pages: Vec<u64>,
    pub(crate) access: u32,
}

pub(crate) fn region_plan(index: usize) -> RegionPlan {
    let number = index as u64;
    let start = 0x10_0000 * (number + 1) + [0, 0x7F0, 0xFF8, 0x10][index / 2];
    let length = [0x3000, 0x1900, 0x20, 0x2FF0][index / 2];
    let count = (start % 4096 + length).div_ceil(4096);
    // Adjacent pages, reversed, and the same page twice.
    let pages = (0..count)
        .map(|page| match index / 2 {
            0 => page,
            1 => PAGES - 1 - page,
            2 => 2,
            _ => [3, 1, 3][usize::try_from(page).expect("small") % 3],
        })
        .map(|page| page * 4096)
        .collect();
    // Everything; everything; no atomics or remote reads; local reads only.
    let access = [15, 15, 3, 0][index / 2];
    RegionPlan { guest: index % 2, start, length, pages, access }
}

fn named() -> impl Strategy<Value = Named> {
    let wrong = prop_oneof![20 => Just(0u32), 1 => 1u32..256, 1 => Just(0x100u32)];
    (0..REGIONS, wrong).prop_map(|(region, wrong)| Named { region, wrong })
}

fn offset() -> impl Strategy<Value = i64> {
    prop_oneof![
        6 => 0i64..0x20,
        4 => (0i64..0x180).prop_map(|word| word * 8),
        2 => 0xFF0i64..0x1010,
        1 => -4i64..0x3010,
    ]
}

fn elements() -> impl Strategy<Value = Vec<Element>> {
    let length = prop_oneof![4 => 0u32..20, 2 => Just(8u32), 1 => 0u32..5000];
    let element =
        (named(), offset(), length).prop_map(|(named, offset, length)| Element { named, offset, length });
    prop::collection::vec(element, 0..4)
}

fn kind() -> impl Strategy<Value = Kind> {
    let immediate = || prop::option::of(any::<u8>());
    prop_oneof![
        4 => immediate().prop_map(|immediate| Kind::Send { immediate }),
        4 => (named(), offset(), immediate())
            .prop_map(|(named, offset, immediate)| Kind::Write { named, offset, immediate }),
        4 => (named(), offset()).prop_map(|(named, offset)| Kind::Read { named, offset }),
        2 => (named(), offset(), any::<u64>())
            .prop_map(|(named, offset, add)| Kind::FetchAdd { named, offset, add }),
        2 => (named(), offset(), 0u64..2, any::<u64>()).prop_map(|(named, offset, compare, swap)| {
            Kind::CompareSwap { named, offset, compare, swap }
        }),
        1 => Just(Kind::Malformed),
    ]
}

fn call() -> impl Strategy<Value = Call> {
    prop_oneof![
        12 => (0..QPS, kind(), elements(), any::<bool>())
            .prop_map(|(qp, kind, elements, signaled)| Call::Post { qp, kind, elements, signaled }),
        8 => (0..QPS, elements()).prop_map(|(qp, elements)| Call::Receive { qp, elements }),
        1 => (0..REGIONS).prop_map(|region| Call::Deregister { region }),
        1 => (0..QPS).prop_map(|qp| Call::Fail { qp }),
        4 => (0..PAIRS).prop_map(|pair| Call::Reconnect { pair }),
        2 => Just(Call::Pass),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]

    #[test]
    fn the_engine_does_what_the_model_does(program in prop::collection::vec(call(), 1..60), quantum in 1u64..40, many_active in 1u32..4) {
        let mut engine = engine_side::Side::new(quantum * quantum, many_active);
        let mut model = reference::Model::new(engine.keys());
        for (number, call) in program.iter().enumerate() {
            engine.call(number as u64, call);
            model.call(number as u64, call);
            model.adopt(|guest| engine.memory(guest));
            for qp in 0..QPS {
                prop_assert_eq!(engine.state(qp), model.state(qp), "state of {} after {}", qp, number);
                prop_assert_eq!(engine.take(qp), model.take(qp), "completions of {} after {}", qp, number);
            }
            for guest in 0..2 {
                prop_assert!(engine.memory(guest) == model.memory(guest), "memory of {} after {}", guest, number);
            }
        }
    }
}
