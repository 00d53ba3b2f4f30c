//! Every order of events of small machines: stateright explores `step` and checks the invariants of `dsm_testbed::world`.
//!
//! The long run is `cargo run --release -p dsm --example check_coherence`.

mod ends;
mod model;
mod scenarios;

use dsm::Plant;
use dsm_testbed::litmus::{Litmus, Outcome, classics, var};
use dsm_testbed::world::{Budget, Setup};
use model::explore;
use scenarios::{
    classic, crowd, crowd_of_copies, fences_with_copies, one_among_many, policies, probing, setup, skewed,
    told_late, turns, two_pages, two_pages_and_stores,
};

const NOTHING: Budget = Budget { discards: 0, modes: 0, tokens: 0, restarts: 0, prefetches: 0 };

fn holds(setup: Setup, most: usize) -> usize {
    let name = setup.litmus.name;
    let found = explore(setup, None, most, 1);
    assert!(found.fault.is_none(), "{name}: {:#?}", found.fault);
    assert!(found.complete || found.transitions >= most, "{name}: depth {} only", found.depth);
    found.states
}

/// All states of every classic litmus test keep the invariants and TSO, and no state is stuck. With each choice of write-update pages.
#[test]
fn classics_hold() {
    let mut states = 0;
    for updates in [&[][..], &[0], &[1], &[0, 1]] {
        for y in [var(1, 0), var(0, 1)] {
            for litmus in classics(var(0, 0), y) {
                states += holds(setup(litmus, updates, NOTHING), 100_000);
            }
        }
    }
    assert!(states > 50_000, "{states} states are fewer than there were");
}

/// The same while modes change, the sequencer's role moves and pages are discarded.
#[test]
fn classics_hold_when_disturbed() {
    let budgets = [
        Budget { modes: 1, ..NOTHING },
        Budget { tokens: 1, ..NOTHING },
        Budget { discards: 1, ..NOTHING },
        Budget { modes: 2, tokens: 1, discards: 1, ..NOTHING },
    ];
    for budget in budgets {
        for updates in [&[][..], &[0], &[0, 1]] {
            for name in ["SB+mfences", "MP", "WRC", "xadd three times"] {
                holds(setup(classic(name, false), updates, budget), 12_000);
            }
        }
    }
}

/// The same while nodes prefetch any page at any moment.
#[test]
fn classics_hold_with_prefetch() {
    let budgets = [
        Budget { prefetches: 1, ..NOTHING },
        Budget { prefetches: 3, ..NOTHING },
        Budget { prefetches: 2, modes: 1, tokens: 1, discards: 1, ..NOTHING },
        Budget { prefetches: 1, restarts: 1, ..NOTHING },
    ];
    for budget in budgets {
        for updates in [&[][..], &[0]] {
            for name in ["SB+mfences", "MP", "CoRR", "xadd three times"] {
                holds(setup(classic(name, false), updates, budget), 12_000);
            }
            holds(setup(two_pages(), updates, budget), 12_000);
        }
    }
}

/// The same with a restart at any moment at which nothing is in flight. Programs continue with the owners' contents, and outcomes are still
/// those of x86-TSO.
#[test]
fn classics_hold_over_a_restart() {
    let budgets = [
        Budget { restarts: 1, ..NOTHING },
        Budget { restarts: 2, ..NOTHING },
        Budget { restarts: 1, modes: 1, tokens: 1, ..NOTHING },
    ];
    for budget in budgets {
        for updates in [&[][..], &[0], &[0, 1]] {
            for name in ["SB+mfences", "MP", "WRC", "CoRR", "xadd three times"] {
                holds(setup(classic(name, false), updates, budget), 12_000);
            }
            holds(setup(two_pages_and_stores(), updates, budget), 12_000);
        }
    }
}

/// The same with nodes that close copies to learn whether they are read, and leave.
#[test]
fn classics_hold_when_copies_are_looked_after() {
    for updates in [&[0][..], &[0, 1]] {
        for litmus in classics(var(0, 0), var(1, 0)) {
            holds(probing(litmus, updates, Budget { tokens: 1, ..NOTHING }), 20_000);
        }
    }
}

/// The same when the monitor reports a retired instruction only on request. A vCPU may then wait for a page while the node still holds
/// pages
/// for its earlier instructions.
#[test]
fn classics_hold_when_nodes_have_to_ask_what_has_retired() {
    for updates in [&[][..], &[0], &[0, 1]] {
        for litmus in classics(var(0, 0), var(1, 0)) {
            holds(told_late(litmus, updates, NOTHING), 20_000);
        }
        for litmus in [two_pages(), two_pages_and_stores(), turns(), crowd_of_copies(), crowd()] {
            holds(told_late(litmus, updates, NOTHING), 30_000);
        }
    }
    for (litmus, updates) in
        [(turns(), &[][..]), (two_pages_and_stores(), &[]), (classic("WRC", false), &[0])]
    {
        let longest = ends::longest_run(&told_late(litmus, updates, NOTHING));
        assert!(longest.is_some_and(|longest| longest < 200), "{longest:?}");
    }
}

/// Regressions, in as many states as each needed. A request that the token's arrival had answered was answered again after write-update had
/// ended. `Sync` returned to its requester, and waited there behind messages that waited for its answer.
#[test]
fn tokens_that_overtake_requests_and_questions_do_no_harm() {
    let budget = Budget { modes: 2, tokens: 1, ..NOTHING };
    for updates in [&[0, 1][..], &[1], &[0]] {
        holds(setup(fences_with_copies(), updates, budget), 40_000);
        holds(told_late(fences_with_copies(), updates, budget), 40_000);
    }
    for name in ["SB", "MP", "WRC"] {
        holds(probing(classic(name, false), &[0], Budget { tokens: 2, ..NOTHING }), 40_000);
    }
}

/// The same with each other policy that changes which messages nodes send.
#[test]
fn other_policies_hold() {
    for (_, policy) in policies() {
        for updates in [&[][..], &[0]] {
            for litmus in [turns(), classic("WRC", false), classic("xadd three times", false), two_pages()] {
                holds(Setup { policy, ..setup(litmus, updates, NOTHING) }, 20_000);
            }
        }
    }
}

/// Instructions that need two pages retire in every order: older ones take pages from younger ones that wait.
#[test]
fn instructions_with_two_pages_end() {
    for updates in [&[][..], &[0], &[0, 1]] {
        for litmus in [two_pages(), two_pages_and_stores(), crowd_of_copies(), crowd()] {
            holds(setup(litmus, updates, NOTHING), 30_000);
        }
    }
}

/// The same on hosts whose clocks and uptimes differ. No instruction loses its pages repeatedly, since an instruction that begins after
/// its age is known is younger.
#[test]
fn instructions_with_two_pages_end_on_the_host_that_is_up_longest() {
    for updates in [&[][..], &[0], &[0, 1]] {
        for litmus in [one_among_many(), two_pages(), two_pages_and_stores(), crowd_of_copies(), crowd()] {
            holds(skewed(litmus, updates, NOTHING), 30_000);
        }
    }
}

/// An outcome that x86 allows and a stronger model forbids occurs: the store buffers of the model work.
#[test]
fn a_weak_outcome_that_x86_allows_is_seen() {
    let weak: Outcome = vec![vec![0], vec![0]];
    // Both vCPUs on one node: between nodes the faults drain the store buffers.
    let one_node = |litmus| Setup { places: vec![1, 1], ..setup(litmus, &[], NOTHING) };
    let found = explore(one_node(classic("SB", false)), Some(weak.clone()), usize::MAX, 1);
    assert!(found.fault.is_none() && found.complete && found.seen);
    let found = explore(one_node(classic("SB+mfences", false)), Some(weak.clone()), usize::MAX, 1);
    assert!(found.fault.is_none() && found.complete && !found.seen);
    // So a live run shows the outcome only on nodes with several vCPUs.
    for updates in [&[][..], &[0], &[0, 1]] {
        let apart = Setup { places: vec![1, 2], ..setup(classic("SB", false), updates, NOTHING) };
        let found = explore(apart, Some(weak.clone()), usize::MAX, 1);
        assert!(found.fault.is_none() && found.complete && !found.seen, "{updates:?}");
    }
}

/// No run has a cycle: every fault is answered within a bounded number of steps of the whole machine, in every schedule.
#[test]
fn every_run_ends() {
    let machines = [
        (classic("SB+mfences", false), &[][..], NOTHING),
        (classic("xadd three times", false), &[], NOTHING),
        (classic("WRC", false), &[0], NOTHING),
        (two_pages(), &[], NOTHING),
        (two_pages(), &[0], NOTHING),
        (classic("SB+mfences", false), &[0], Budget { modes: 1, ..NOTHING }),
        (classic("CoRR", false), &[0], Budget { tokens: 1, ..NOTHING }),
        (classic("MP", false), &[0], Budget { discards: 1, ..NOTHING }),
    ];
    for (litmus, updates, budget) in machines {
        let name = litmus.name;
        let longest = ends::longest_run(&setup(litmus, updates, budget));
        println!("{name}, updates {updates:?}: the longest run takes {longest:?} steps");
        assert!(longest.is_some_and(|longest| longest < 200), "{name}: {longest:?}");
    }
}

fn finds(plant: Plant, litmus: Litmus, updates: &[u8], budget: Budget, what: &str) {
    finds_in(plant, &setup(litmus, updates, budget), what);
}

fn finds_in(plant: Plant, sound: &Setup, what: &str) {
    let planted = Setup { plant, ..sound.clone() };
    let found = explore(planted, None, 2_000_000, 1);
    let (text, way) =
        found.fault.unwrap_or_else(|| panic!("{plant:?} isn't found in {} states", found.states));
    println!("{plant:?} is found after {} states, {} steps: {text}", found.states, way.len());
    assert!(text.contains(what), "{plant:?} shows as: {text}");
    let sound = explore(sound.clone(), None, 2_000_000, 1);
    assert!(sound.fault.is_none(), "without it: {:#?}", sound.fault);
}

/// Without the stamp on `InvalidateAck`, fences don't order a write-update page and a write-invalidate page.
#[test]
fn a_dropped_stamp_is_found() {
    finds(Plant::DropAckStamp, fences_with_copies(), &[0], NOTHING, "forbidden");
}

#[test]
fn an_update_applied_twice_is_found() {
    finds(Plant::ApplyTwice, classic("CoRR", false), &[0], NOTHING, "than the sequencer has");
}

#[test]
fn a_release_before_progress_is_found() {
    finds(Plant::ReleaseEarly, classic("CoRR", false), &[], NOTHING, "before its instruction retired");
}

#[test]
fn answers_that_nobody_waits_for_are_found() {
    finds(Plant::SkipAcks, classic("IRIW", false), &[], NOTHING, "nodes that can read");
}

#[test]
fn a_circle_of_waits_is_found() {
    finds(Plant::NeverYield, two_pages(), &[], NOTHING, "nothing stands still");
}

/// With ages by the hosts' clocks, an instruction on the host whose clock leads loses its pages repeatedly: later ones of the other host
/// are older.
#[test]
fn ages_by_the_hosts_clocks_are_found() {
    finds_in(Plant::HostClockAges, &skewed(one_among_many(), &[], NOTHING), "lost pages 3 times");
}

#[test]
fn a_forgotten_update_is_found() {
    finds(
        Plant::ForgetEarly,
        classic("MP", false),
        &[0],
        Budget { tokens: 1, ..NOTHING },
        "than the sequencer has",
    );
}

/// Without the owners that homes know, two nodes own a page after a restart.
#[test]
fn a_saved_node_without_owners_is_found() {
    finds(
        Plant::ForgetOwners,
        classic("MP", false),
        &[],
        Budget { restarts: 1, ..NOTHING },
        "owners after a restart",
    );
}
