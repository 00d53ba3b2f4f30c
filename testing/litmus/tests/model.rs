//! Checks the reference model against published results, against a second implementation, and against the axiomatic definition.
#![allow(clippy::unwrap_used)] // Clippy doesn't recognize helpers of tests as tests.

use litmus::model::{Memory, Order, outcomes};
use litmus::{Condition, Instruction, Observed, Operand, Register, Test, Width, corpus};
use proptest::prelude::*;
use std::collections::BTreeSet;

fn named(name: &str) -> Test {
    corpus::all()
        .unwrap()
        .into_iter()
        .find(|test| test.name == name)
        .unwrap_or_else(|| panic!("no test {name}"))
}

fn allowed(test: &Test, order: Order, memory: Memory) -> bool {
    outcomes(test, order, memory).iter().any(|outcome| test.asks_about(outcome))
}

/// Verdicts from two papers: the x86-TSO paper's section 3, and the tables of *Herding Cats* for TSO, for shapes with the same names.
/// The former's examples are SB, iwp2.3.b, iwp2.4 (here SB+rfis), n6, n5, n4b, IRIW, iwp2.5 (WRC), and iwp2.6 to iwp2.8.b.
#[test]
fn verdicts_are_as_published() {
    let weak = ["SB", "SB+mfence+po", "SB+rfis", "SB64", "SB+mixed", "R", "RWC", "3.SB", "n6", "wide-SB"];
    let forbidden = [
        "SB+mfences",
        "SB+rfis+mfences",
        "SB+xchgs",
        "SB+lockadds",
        "SB+lockelsewhere",
        "SB+lockown",
        "MP",
        "MP+xchg",
        "MP64",
        "LB",
        "R+po+mfence",
        "S",
        "2+2W",
        "2+2W+reads",
        "CoRR",
        "CoWW",
        "CoRW1",
        "CoRW2",
        "CoWR",
        "n4",
        "n5",
        "lockinc",
        "xadds",
        "cmpxchgs",
        "xchg-xchg",
        "bits",
        "WRC",
        "WRC+locked",
        "RWC+mfence",
        "ISA2",
        "WWC",
        "Z6.3",
        "3.SB+mfences",
        "3.LB",
        "IRIW",
        "IRIW+xchgs",
        "CoIRIW",
        "W+RWC",
        "4.SB+mfences",
        "4.xadds",
    ];
    for name in weak {
        let test = named(name);
        assert!(allowed(&test, Order::Tso, Memory::Whole), "{name} is allowed by x86-TSO");
        assert!(!allowed(&test, Order::Sequential, Memory::Whole), "{name} needs a store queue");
    }
    for name in forbidden {
        assert!(!allowed(&named(name), Order::Tso, Memory::Whole), "{name} is forbidden by x86-TSO");
    }
    // An unlocked increment loses counts on any machine.
    assert!(allowed(&named("inc"), Order::Sequential, Memory::Whole));
}

/// Accesses across a boundary may be torn unless they are locked. Aligned ones may not.
#[test]
fn only_what_crosses_a_boundary_is_torn() {
    for name in ["wide-CoRR", "wide-CoWW", "wide-MP"] {
        assert!(!allowed(&named(name), Order::Tso, Memory::Whole), "{name}");
    }
    for name in ["wide-CoRR", "wide-CoWW"] {
        assert!(allowed(&named(name), Order::Sequential, Memory::Split), "{name}");
    }
    for name in [
        "wide-MP",
        "wide-lockadd",
        "wide-xadds",
        "wide-cmpxchg",
        "wide-SB+mfences",
        "wide-SB+xchgs",
        "wide-LB",
        "wide-IRIW",
    ] {
        assert!(!allowed(&named(name), Order::Tso, Memory::Split), "{name}");
    }
}

const EAX: Register = Register(0);

/// An instruction of random programs: location 0 to 2, and a value that no other store has.
#[derive(Debug, Clone, Copy)]
enum Random {
    Load(usize),
    Store(usize),
    Fence,
    Add(usize),
}

fn programs(most: usize, with_adds: bool) -> impl Strategy<Value = Vec<Vec<Random>>> {
    let instruction = prop_oneof![
        3 => (0..2_usize).prop_map(Random::Load),
        3 => (0..2_usize).prop_map(Random::Store),
        1 => Just(Random::Fence),
        u32::from(with_adds) => (0..2_usize).prop_map(Random::Add),
    ];
    prop::collection::vec(prop::collection::vec(instruction, 1..=3), 2..=most)
}

/// Converts to a test: loads use separate registers, values count up.
fn as_test(programs: &[Vec<Random>]) -> Test {
    let mut value = 0;
    let registers = [EAX, Register(1), Register(2), Register(3)];
    let threads = programs
        .iter()
        .map(|program| {
            let mut free = registers.iter().copied();
            program
                .iter()
                .map(|instruction| match *instruction {
                    Random::Load(location) => {
                        Instruction::Load(Width::Double, free.next().unwrap(), location)
                    }
                    Random::Store(location) => {
                        value += 1;
                        Instruction::Store(Width::Double, location, Operand::Constant(value))
                    }
                    Random::Fence => Instruction::Fence,
                    Random::Add(location) => {
                        Instruction::ExchangeAdd(Width::Double, location, free.next().unwrap())
                    }
                })
                .collect()
        })
        .collect();
    // Added values distinguish threads, also in the eight bits of the other implementation.
    let given = programs
        .iter()
        .enumerate()
        .flat_map(|(thread, _)| registers.iter().map(move |register| (thread, *register, 32 << thread)));
    Test {
        name: "random".into(),
        locations: vec!["x".into(), "y".into()],
        initial: vec![0, 0],
        registers: given.collect(),
        threads,
        condition: Condition::True,
    }
}

/// Returns the outcomes by the axiomatic definition of TSO, which is independent of the model's machine. It enumerates all ways to
/// read from stores, and to order the stores of a location, that satisfy two axioms:
/// 1. Each location by itself is sequentially consistent.
/// 2. The union of four relations has no cycle: program order without store-load pairs (except over a fence), reads from other
///    threads, the order of stores, and the order of reads before later stores.
///
/// Source: Alglave, Maranget and Tautschnig, *Herding Cats* (2014), section 4.4 (TSO).
fn axiomatic(test: &Test) -> BTreeSet<Vec<u64>> {
    #[derive(Clone, Copy)]
    struct Event {
        thread: usize,
        place: usize,
        location: usize,
        store: Option<u64>,
        load: Option<Register>,
    }
    let mut events = Vec::new();
    let mut fences = Vec::new();
    for (thread, program) in test.threads.iter().enumerate() {
        for (place, instruction) in program.iter().enumerate() {
            match *instruction {
                Instruction::Load(_, register, location) => {
                    events.push(Event { thread, place, location, store: None, load: Some(register) });
                }
                Instruction::Store(_, location, Operand::Constant(value)) => {
                    events.push(Event { thread, place, location, store: Some(value.into()), load: None });
                }
                Instruction::Fence => fences.push((thread, place)),
                _ => unreachable!("not drawn"),
            }
        }
    }
    let stores = |location: usize| -> Vec<usize> {
        (0..events.len())
            .filter(|event| events[*event].store.is_some() && events[*event].location == location)
            .collect()
    };
    let loads: Vec<usize> = (0..events.len()).filter(|event| events[*event].load.is_some()).collect();
    let orders: Vec<Vec<Vec<usize>>> = (0..2).map(|location| permutations(&stores(location))).collect();
    let acyclic = |edges: &[(usize, usize)]| {
        let mut left: BTreeSet<usize> = (0..events.len()).collect();
        loop {
            let free = left
                .iter()
                .copied()
                .find(|event| !edges.iter().any(|(from, to)| to == event && left.contains(from)));
            match free {
                Some(event) => {
                    left.remove(&event);
                }
                None => return left.is_empty(),
            }
        }
    };
    let mut program = Vec::new();
    for (one, first) in events.iter().enumerate() {
        for (other, second) in events.iter().enumerate() {
            if first.thread == second.thread && first.place < second.place {
                let fenced = fences.iter().any(|(thread, place)| {
                    *thread == first.thread && (first.place..second.place).contains(place)
                });
                program.push((
                    one,
                    other,
                    first.store.is_none() || second.load.is_none() || fenced,
                    first.location == second.location,
                ));
            }
        }
    }
    let mut found = BTreeSet::new();
    // The store that each load reads from; the last choice is the initial value.
    let choices: Vec<Vec<Option<usize>>> = loads
        .iter()
        .map(|load| stores(events[*load].location).into_iter().map(Some).chain([None]).collect())
        .collect();
    for first in &orders[0] {
        for second in &orders[1] {
            let order = [first, second];
            for reads in product(&choices) {
                let mut common = Vec::new();
                for order in order {
                    for (index, one) in order.iter().enumerate() {
                        common.extend(order[index + 1..].iter().map(|other| (*one, *other)));
                    }
                }
                let (mut own, mut external) = (Vec::new(), Vec::new());
                for (load, from) in loads.iter().zip(&reads) {
                    let order = order[events[*load].location];
                    let after =
                        from.map_or(0, |from| 1 + order.iter().position(|store| *store == from).unwrap());
                    common.extend(order[after..].iter().map(|store| (*load, *store)));
                    if let Some(from) = from {
                        own.push((*from, *load));
                        if events[*from].thread != events[*load].thread {
                            external.push((*from, *load));
                        }
                    }
                }
                let per_location =
                    program.iter().filter(|(_, _, _, same)| *same).map(|(one, other, ..)| (*one, *other));
                let uniproc: Vec<_> = per_location.chain(common.iter().copied()).chain(own).collect();
                let preserved =
                    program.iter().filter(|(_, _, kept, _)| *kept).map(|(one, other, ..)| (*one, *other));
                let tso: Vec<_> = preserved.chain(common.iter().copied()).chain(external).collect();
                if acyclic(&uniproc) && acyclic(&tso) {
                    found.insert(
                        test.observed()
                            .iter()
                            .map(|observed| match observed {
                                Observed::Register(thread, register) => {
                                    let at = loads
                                        .iter()
                                        .position(|load| {
                                            events[*load].thread == *thread
                                                && events[*load].load == Some(*register)
                                        })
                                        .unwrap();
                                    reads[at].map_or(0, |from| events[from].store.unwrap())
                                }
                                Observed::Location(location) => {
                                    order[*location].last().map_or(0, |last| events[*last].store.unwrap())
                                }
                            })
                            .collect(),
                    );
                }
            }
        }
    }
    found
}

/// The lowest byte.
fn byte(value: u64) -> u8 {
    value.to_le_bytes()[0]
}

fn permutations(items: &[usize]) -> Vec<Vec<usize>> {
    if items.is_empty() {
        return vec![Vec::new()];
    }
    (0..items.len())
        .flat_map(|index| {
            let mut rest = items.to_vec();
            let first = rest.remove(index);
            permutations(&rest).into_iter().map(move |rest| [vec![first], rest].concat())
        })
        .collect()
}

fn product<T: Copy>(choices: &[Vec<T>]) -> Vec<Vec<T>> {
    choices.iter().fold(vec![Vec::new()], |all, choices| {
        all.iter()
            .flat_map(|before| choices.iter().map(move |choice| [before.as_slice(), &[*choice]].concat()))
            .collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// The machine has exactly the axioms' outcomes.
    #[test]
    fn the_machine_agrees_with_the_axioms(drawn in programs(3, false)) {
        let test = as_test(&drawn);
        prop_assert_eq!(outcomes(&test, Order::Tso, Memory::Whole), axiomatic(&test));
    }

    /// Another implementation (that of the protocol's checker) finds the same registers.
    #[test]
    fn the_machine_agrees_with_the_checkers(drawn in programs(3, true)) {
        use dsm_testbed::litmus::{Instruction as Other, Litmus, var};
        let test = as_test(&drawn);
        let programs = test.threads.iter().enumerate().map(|(thread, program)| program.iter().map(|instruction| {
            let at = |location: usize| var(u8::try_from(location).unwrap(), 0);
            match *instruction {
                Instruction::Load(_, _, location) => Other::Load(at(location)),
                Instruction::Store(_, location, Operand::Constant(value)) => Other::Store(at(location), u8::try_from(value).unwrap()),
                Instruction::ExchangeAdd(_, location, _) => Other::Add(at(location), byte(32 << thread)),
                _ => Other::Fence,
            }
        }).collect()).collect();
        let other = Litmus { name: "random", programs };
        for (order, buffered) in [(Order::Tso, true), (Order::Sequential, false)] {
            let registers = test.observed().len() - 2;
            let ours: BTreeSet<Vec<u8>> = outcomes(&test, order, Memory::Whole)
                .into_iter().map(|values| values[..registers].iter().map(|value| byte(*value)).collect()).collect();
            let theirs: BTreeSet<Vec<u8>> = other.allowed(buffered).into_iter().map(|values| values.concat()).collect();
            prop_assert_eq!(ours, theirs);
        }
    }

    /// x86-TSO allows what sequential consistency allows. With a fence after every instruction it allows nothing more. A split memory
    /// allows what a whole one does.
    #[test]
    fn models_contain_each_other(drawn in programs(3, true)) {
        let test = as_test(&drawn);
        let sequential = outcomes(&test, Order::Sequential, Memory::Whole);
        let tso = outcomes(&test, Order::Tso, Memory::Whole);
        prop_assert!(sequential.is_subset(&tso));
        let mut fenced = test.clone();
        for thread in &mut fenced.threads {
            *thread = thread.iter().flat_map(|instruction| [*instruction, Instruction::Fence]).collect();
        }
        prop_assert_eq!(&outcomes(&fenced, Order::Tso, Memory::Whole), &sequential);
        if drawn.iter().map(Vec::len).sum::<usize>() <= 5 {
            prop_assert!(tso.is_subset(&outcomes(&test, Order::Tso, Memory::Split)));
        }
    }
}
