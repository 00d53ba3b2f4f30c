//! The world as a model for stateright. `examples/check_migration.rs` uses this file too.

#![allow(dead_code, reason = "the test and the example use parts of it")]

use nomad_testbed::world::{Setup, Step, World};
use stateright::{Checker, HasDiscoveries, Model, Property};

struct Machine(Setup);

const COMMITTED: &str = "a migration is committed";
const ABORTED: &str = "a migration is aborted";
const BOTH_COMMITTED: &str = "two migrations are committed";

impl Model for Machine {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(&self.0)]
    }

    fn actions(&self, state: &World, actions: &mut Vec<Step>) {
        state.steps(&self.0, actions);
    }

    fn next_state(&self, state: &World, action: Step) -> Option<World> {
        state.after(&self.0, action)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("invariants hold", |_, world: &World| world.violation.is_none()),
            Property::sometimes(COMMITTED, |_, world: &World| world.cluster.ends.committed > 0),
            Property::sometimes(ABORTED, |_, world: &World| world.cluster.ends.aborted > 0),
            Property::sometimes(BOTH_COMMITTED, |_, world: &World| world.cluster.ends.committed > 1),
        ]
    }
}

/// The result of an exploration.
pub struct Found {
    /// Number of distinct states.
    pub states: usize,
    /// Number of generated states, repeated ones included: one per transition.
    pub transitions: usize,
    /// Length of the longest path.
    pub depth: usize,
    /// Whether the exploration covered all states.
    pub complete: bool,
    /// Whether a migration was committed in a state.
    pub committed: bool,
    /// Whether a migration was aborted in a state.
    pub aborted: bool,
    /// Whether both migrations were committed in a state.
    pub both_committed: bool,
    /// A violated property, and the path to it.
    pub fault: Option<(String, Vec<String>)>,
}

/// Explores until all states are covered, a violation is found, or `transitions` were made.
pub fn explore(setup: Setup, transitions: usize) -> Found {
    let checker = Machine(setup)
        .checker()
        .threads(1)
        .finish_when(HasDiscoveries::AnyFailures)
        .target_state_count(transitions.max(1))
        .spawn_bfs()
        .join();
    let discoveries = checker.discoveries();
    let (committed, aborted) = (discoveries.contains_key(COMMITTED), discoveries.contains_key(ABORTED));
    let both_committed = discoveries.contains_key(BOTH_COMMITTED);
    let ends = [COMMITTED, ABORTED, BOTH_COMMITTED];
    let fault = discoveries.into_iter().find(|(name, _)| !ends.contains(name)).map(|(name, path)| {
        let last = path.last_state();
        if std::env::var_os("EXPLORE_STATE").is_some() {
            eprintln!("{last:#?}");
        }
        let what = last.violation.clone().unwrap_or_else(|| format!("Not so: {name}"));
        (what, path.into_actions().iter().map(|step| format!("{step:?}")).collect())
    });
    Found {
        states: checker.unique_state_count(),
        transitions: checker.state_count(),
        depth: checker.max_depth(),
        complete: fault.is_none() && checker.state_count() < transitions,
        committed,
        aborted,
        both_committed,
        fault,
    }
}
