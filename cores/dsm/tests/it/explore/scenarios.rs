//! The machines that are explored. Shared with examples/check_coherence.rs.

#![allow(dead_code, reason = "the test and the example use parts of it")]

use dsm::{Plant, Policy};
use dsm_testbed::litmus::{Instruction, Litmus, classics, var};
use dsm_testbed::world::{Budget, Setup};

/// Without holds: the model checker has no time.
pub const POLICY: Policy = Policy { hold_ns: 0, ..Policy::IVY };

/// One machine to explore.
pub struct Scenario {
    /// Name for reports.
    pub name: String,
    /// Parameters of the world.
    pub setup: Setup,
}

fn spread(programs: usize, nodes: u8) -> Vec<u8> {
    (0..programs).map(|program| u8::try_from(program % usize::from(nodes)).unwrap_or(0)).collect()
}

/// A litmus test on three nodes with one program each; `updates` lists the write-update pages.
pub fn setup(litmus: Litmus, updates: &[u8], budget: Budget) -> Setup {
    let places = spread(litmus.programs.len(), 3);
    Setup {
        litmus,
        places,
        nodes: 3,
        policy: POLICY,
        plant: Plant::None,
        buffered: true,
        told_late: false,
        straight: false,
        updates: updates.to_vec(),
        budget,
        ahead: Vec::new(),
    }
}

/// The same on hosts whose clocks and ages differ; the first leads.
pub fn skewed(litmus: Litmus, updates: &[u8], budget: Budget) -> Setup {
    Setup { ahead: vec![2_000, 1_000, 0], ..setup(litmus, updates, budget) }
}

/// The same with copies that nodes close after every update, and leave after the next.
pub fn probing(litmus: Litmus, updates: &[u8], budget: Budget) -> Setup {
    let plain = setup(litmus, updates, budget);
    Setup { policy: Policy { probe_updates: 1, ..POLICY }, ..plain }
}

/// The same with reports of retired instructions on request only, and with stores that are emulated without a fault.
pub fn told_late(litmus: Litmus, updates: &[u8], budget: Budget) -> Setup {
    Setup { told_late: true, straight: true, ..setup(litmus, updates, budget) }
}

/// A classic litmus test by its name.
pub fn classic(name: &str, same_page: bool) -> Litmus {
    let y = if same_page { var(0, 1) } else { var(1, 0) };
    classics(var(0, 0), y)
        .into_iter()
        .find(|litmus| litmus.name == name)
        .unwrap_or_else(|| panic!("no test is named {name}"))
}

fn named(name: &'static str, programs: &[&[Instruction]]) -> Litmus {
    Litmus { name, programs: programs.iter().map(|program| program.to_vec()).collect() }
}

/// Store buffering with fences on two nodes that have copies from the start, neither of them the sequencer: an `InvalidateAck` may overtake
/// an update.
pub fn fences_with_copies() -> Litmus {
    use Instruction::{Fence, Load, Store};
    let (x, y) = (var(0, 0), var(1, 0));
    named(
        "SB+mfences with copies",
        &[&[], &[Load(x), Store(y, 1), Fence, Load(x)], &[Load(y), Store(x, 1), Fence, Load(y)]],
    )
}

/// Nodes that take turns to read and then write: a migratory page, which readers soon get for writing at once.
pub fn turns() -> Litmus {
    use Instruction::{Load, Store};
    let x = var(0, 0);
    named(
        "turns",
        &[&[], &[Load(x), Store(x, 1), Load(x), Store(x, 2)], &[Load(x), Store(x, 3), Load(x), Store(x, 4)]],
    )
}

/// Policies that differ from [`POLICY`] in one respect.
pub fn policies() -> [(&'static str, Policy); 3] {
    [
        ("a window of one update", Policy { update_window: 1, ..POLICY }),
        ("readers that write next get the page to write", Policy { migratory: true, ..POLICY }),
        (
            "reads move the ownership, copies go one by one",
            Policy { read_moves_ownership: true, serial_invalidation: true, versions: false, ..POLICY },
        ),
    ]
}

/// Instructions that need two pages each, in both orders.
pub fn two_pages() -> Litmus {
    use Instruction::Copy;
    let (x, y) = (var(0, 0), var(1, 0));
    named("copies both ways", &[&[Copy(x, y)], &[Copy(y, x)], &[Copy(x, y)]])
}

/// The same with stores between.
pub fn two_pages_and_stores() -> Litmus {
    use Instruction::{Copy, Store};
    let (x, y) = (var(0, 0), var(1, 0));
    named("copies and stores", &[&[Store(x, 1), Copy(x, y)], &[Store(y, 2), Copy(y, x)], &[Store(x, 3)]])
}

/// One instruction with two pages against many of another node.
pub fn one_among_many() -> Litmus {
    use Instruction::Copy;
    let (x, y) = (var(0, 0), var(1, 0));
    named("one copy among many", &[&[Copy(x, y)], &[Copy(y, x); 6]])
}

/// Two vCPUs on each of three nodes, all using two pages.
pub fn crowd() -> Litmus {
    use Instruction::{Add, Load, Store};
    let (x, y) = (var(0, 0), var(1, 0));
    named(
        "six vCPUs",
        &[
            &[Store(x, 1)],
            &[Load(x), Load(y)],
            &[Add(y, 1)],
            &[Store(y, 2), Load(x)],
            &[Add(x, 1)],
            &[Load(y)],
        ],
    )
}

/// Two vCPUs on each of three nodes with instructions that need two pages.
pub fn crowd_of_copies() -> Litmus {
    use Instruction::{Copy, Load, Store};
    let (x, y) = (var(0, 0), var(1, 0));
    named(
        "six vCPUs, two pages",
        &[&[Copy(x, y)], &[Copy(y, x)], &[Store(x, 1)], &[Copy(x, y)], &[Load(y)], &[Store(y, 1)]],
    )
}

const NOTHING: Budget = Budget { discards: 0, modes: 0, tokens: 0, restarts: 0, prefetches: 0 };

/// All machines that the checker explores: first those too large to complete, then many small ones.
pub fn all() -> Vec<Scenario> {
    let mut list = Vec::new();
    let budgets = [
        ("", NOTHING),
        (", a mode changes", Budget { modes: 1, ..NOTHING }),
        (", the token moves", Budget { tokens: 1, ..NOTHING }),
        (", a page is discarded", Budget { discards: 1, ..NOTHING }),
        (", two modes change and the token moves", Budget { modes: 2, tokens: 1, ..NOTHING }),
        (", all are saved and restored", Budget { restarts: 1, ..NOTHING }),
        (", two pages are prefetched", Budget { prefetches: 2, ..NOTHING }),
        (
            ", all of that and two prefetches",
            Budget { modes: 2, tokens: 2, discards: 1, prefetches: 2, ..NOTHING },
        ),
        (", all of that", Budget { modes: 2, tokens: 2, discards: 1, ..NOTHING }),
    ];
    for updates in [&[][..], &[0], &[0, 1]] {
        for litmus in [crowd(), crowd_of_copies()] {
            for (what, budget) in budgets {
                let name = format!("{}, updates {updates:?}{what}", litmus.name);
                list.push(Scenario { name, setup: setup(litmus.clone(), updates, budget) });
            }
        }
    }
    for (what, budget) in [("", NOTHING), (", two modes change and the token moves", budgets[4].1)] {
        for updates in [&[][..], &[0], &[0, 1]] {
            let tests = classics(var(0, 0), var(1, 0)).into_iter();
            for litmus in
                tests.chain([two_pages_and_stores(), fences_with_copies(), turns(), crowd_of_copies()])
            {
                let name = format!("{}, updates {updates:?}, nodes ask what has retired{what}", litmus.name);
                list.push(Scenario { name, setup: told_late(litmus, updates, budget) });
            }
        }
    }
    for (what, budget) in budgets {
        for updates in [&[][..], &[0], &[1], &[0, 1]] {
            for same_page in [false, true] {
                let y = if same_page { var(0, 1) } else { var(1, 0) };
                let tests = classics(var(0, 0), y).into_iter().chain([
                    two_pages(),
                    two_pages_and_stores(),
                    fences_with_copies(),
                ]);
                for litmus in tests {
                    if same_page && updates.contains(&1) {
                        continue;
                    }
                    let pages = if same_page { "one page" } else { "two pages" };
                    let name = format!("{} on {pages}, updates {updates:?}{what}", litmus.name);
                    list.push(Scenario { name, setup: setup(litmus, updates, budget) });
                }
            }
        }
    }
    for updates in [&[0][..], &[0, 1]] {
        for litmus in classics(var(0, 0), var(1, 0)).into_iter().chain([two_pages_and_stores()]) {
            let name = format!(
                "{}, updates {updates:?}, copies are looked after, the token moves twice",
                litmus.name
            );
            list.push(Scenario { name, setup: probing(litmus, updates, Budget { tokens: 2, ..NOTHING }) });
        }
    }
    for (what, policy) in policies() {
        for updates in [&[][..], &[0]] {
            let tests = classics(var(0, 0), var(1, 0)).into_iter().chain([two_pages_and_stores(), turns()]);
            for litmus in tests {
                let name = format!("{}, updates {updates:?}, {what}", litmus.name);
                let setup = Setup { policy, ..setup(litmus, updates, NOTHING) };
                list.push(Scenario { name, setup });
            }
        }
    }
    list
}
