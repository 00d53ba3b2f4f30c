//! A world as a model of stateright. Shared with examples/check_coherence.rs.

#![allow(dead_code, reason = "the test and the example use parts of it")]

use dsm_testbed::litmus::Outcome;
use dsm_testbed::world::{Setup, Step, World};
use stateright::{Checker, HasDiscoveries, Model, Property};

/// A world with its setup, and an outcome to search for.
struct Machine {
    setup: Setup,
    expect: Option<Outcome>,
}

const DONE: &str = "all is done";
const SEEN: &str = "the expected outcome is seen";

impl Model for Machine {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(&self.setup)]
    }

    fn actions(&self, state: &World, actions: &mut Vec<Step>) {
        state.steps(&self.setup, actions);
    }

    fn next_state(&self, state: &World, action: Step) -> Option<World> {
        state.after(&self.setup, action)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("invariants hold", |_, world: &World| world.verdict.is_none()),
            Property::always("nothing stands still before the end", |machine: &Machine, world: &World| {
                !world.is_stuck(&machine.setup)
            }),
            Property::always("links hold few messages", |_, world: &World| world.longest_link() <= 24),
            Property::sometimes(DONE, |machine: &Machine, world: &World| world.is_done(&machine.setup)),
            Property::sometimes(SEEN, |machine: &Machine, world: &World| {
                machine
                    .expect
                    .as_ref()
                    .is_some_and(|expect| world.is_done(&machine.setup) && world.outcome() == *expect)
            }),
        ]
    }
}

/// Result of an exploration.
pub struct Found {
    /// Distinct states.
    pub states: usize,
    /// Number of states generated, repeated ones included.
    pub transitions: usize,
    /// Steps of the longest run.
    pub depth: usize,
    /// Whether all states were explored.
    pub complete: bool,
    /// Whether the expected outcome occurred.
    pub seen: bool,
    /// The first failure, and the steps that lead to it.
    pub fault: Option<(String, Vec<String>)>,
}

/// Explores until all states are known, a check fails, or the number of transitions is reached.
pub fn explore(setup: Setup, expect: Option<Outcome>, transitions: usize, threads: usize) -> Found {
    let checker = Machine { setup, expect }
        .checker()
        .threads(threads)
        .finish_when(HasDiscoveries::AnyFailures)
        .target_state_count(transitions.max(1))
        .spawn_dfs()
        .join();
    let discoveries = checker.discoveries();
    let seen = discoveries.contains_key(SEEN);
    let fault = discoveries.into_iter().find(|(name, _)| *name != DONE && *name != SEEN);
    let fault = fault.map(|(name, path)| {
        let last = path.last_state();
        let what = last.verdict.clone().unwrap_or_else(|| format!("Not so: {name}"));
        if std::env::var_os("EXPLORE_STATE").is_some() {
            eprintln!("{last:?}");
        }
        (what, path.into_actions().iter().map(|step| format!("{step:?}")).collect())
    });
    Found {
        states: checker.unique_state_count(),
        transitions: checker.state_count(),
        depth: checker.max_depth(),
        complete: fault.is_none() && checker.state_count() < transitions,
        seen,
        fault,
    }
}
