//! Whether every run of a machine ends, and the length of the longest.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use dsm_testbed::world::{Setup, World};

/// Result for a state.
#[derive(Clone, Copy)]
enum Known {
    /// The state is on the current path: reaching it again is a cycle.
    Open,
    /// All runs from it end after at most this number of steps.
    Ends(usize),
}

struct Place {
    name: u64,
    next: Vec<World>,
    longest: usize,
}

fn name(world: &World) -> u64 {
    let mut hasher = DefaultHasher::new();
    world.hash(&mut hasher);
    hasher.finish()
}

fn place(setup: &Setup, world: &World) -> Place {
    let mut steps = Vec::new();
    world.steps(setup, &mut steps);
    let next =
        steps.into_iter().filter_map(|step| world.after(setup, step)).filter(|next| next != world).collect();
    Place { name: name(world), next, longest: 0 }
}

/// Steps of the longest run; none if a run has a cycle.
pub fn longest_run(setup: &Setup) -> Option<usize> {
    let start = World::new(setup);
    let mut known = HashMap::from([(name(&start), Known::Open)]);
    let mut way = vec![place(setup, &start)];
    loop {
        let here = way.last_mut()?;
        if let Some(next) = here.next.pop() {
            match known.get(&name(&next)) {
                Some(Known::Open) => return None,
                Some(Known::Ends(steps)) => here.longest = here.longest.max(steps + 1),
                None => {
                    known.insert(name(&next), Known::Open);
                    way.push(place(setup, &next));
                }
            }
            continue;
        }
        let done = way.pop()?;
        known.insert(done.name, Known::Ends(done.longest));
        match way.last_mut() {
            Some(before) => before.longest = before.longest.max(done.longest + 1),
            None => return Some(done.longest),
        }
    }
}
