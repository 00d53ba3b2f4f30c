//! Breadth-first search in a random graph with uneven degrees. It proceeds level by level: each vCPU processes some vertices of the
//! level, and claims vertices by compare-and-exchange.
//!
//! Source: the Graph500 specification: recursive-matrix graphs with parameters 0.57, 0.19, 0.19, and the conditions of a correct
//! parent tree.

#![allow(unsafe_code)] // Parts of shared arrays.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use payload_spmd::{Figure, Heap, Outcome, Random, Refused, Settings, Shared, Team};

/// `scale`: 2^scale vertices (11); `degree`: edges per vertex (8); `roots`: searches (4); `seed` (1).
pub const NAMES: &[&str] = &["scale", "degree", "roots", "seed"];

/// No parent yet.
const NONE: u32 = 0;
/// Words per page, so that each vCPU has its own page of counts.
const PER_PAGE: usize = 512;

/// The graph: neighbours of vertex v are `targets[starts[v]..starts[v + 1]]`.
struct Graph<'a> {
    starts: &'a [u32],
    targets: &'a [u32],
}

impl Graph<'_> {
    fn vertices(&self) -> usize {
        self.starts.len() - 1
    }

    fn neighbours(&self, vertex: u32) -> &[u32] {
        let vertex = vertex as usize;
        &self.targets[self.starts[vertex] as usize..self.starts[vertex + 1] as usize]
    }
}

/// Returns the ends of edge `index`.
fn edge(seed: u64, index: u64, scale: u64) -> (u32, u32) {
    let mut random = Random::new(seed ^ index.wrapping_mul(0x9E6D_62D0_6F6A_9A9B));
    let (mut from, mut to) = (0, 0);
    for _ in 0..scale {
        let (right, below) = match random.unit() {
            quadrant if quadrant < 0.57 => (0, 0),
            quadrant if quadrant < 0.76 => (1, 0),
            quadrant if quadrant < 0.95 => (0, 1),
            _ => (1, 1),
        };
        from = from << 1 | below;
        to = to << 1 | right;
    }
    (from, to)
}

/// Memory of one search.
#[derive(Clone, Copy)]
struct Search {
    /// Index of the parent plus one.
    parents: Shared<AtomicU32>,
    /// Vertices of this level and of the next. Each vCPU stores those that it found in its own part.
    found: [Shared<AtomicU32>; 2],
    /// Number of vertices that each vCPU found, for both levels, on a page per vCPU.
    counts: Shared<AtomicU64>,
    /// Distance of two vCPUs' parts.
    stride: usize,
}

impl Search {
    fn new(heap: &mut Heap, vertices: usize, count: usize) -> Result<Self, Refused> {
        let stride = vertices.next_multiple_of(1024);
        Ok(Self {
            parents: heap.array(vertices)?,
            found: [heap.array(stride * count)?, heap.array(stride * count)?],
            counts: heap.array(PER_PAGE * count)?,
            stride,
        })
    }

    /// Searches from a root; returns the number of levels.
    fn run(&self, team: &Team<'_>, graph: &Graph<'_>, root: u32) -> u32 {
        let parents = self.parents.atomics();
        let counts = self.counts.atomics();
        for vertex in team.part(graph.vertices()) {
            parents[vertex].store(NONE, Ordering::Relaxed);
        }
        team.wait_patiently();
        let mut now = 0;
        let count_of = |vcpu: usize, level: usize| &counts[vcpu * PER_PAGE + level];
        count_of(team.index(), now).store(u64::from(team.leads()), Ordering::Relaxed);
        if team.leads() {
            parents[root as usize].store(root + 1, Ordering::Relaxed);
            self.found[now].atomics()[0].store(root, Ordering::Relaxed);
        }
        team.wait_patiently();
        let mut levels = 0;
        loop {
            let length = |vcpu| usize::try_from(count_of(vcpu, now).load(Ordering::Acquire)).unwrap_or(0);
            let total: usize = (0..team.count()).map(length).sum();
            if total == 0 {
                return levels;
            }
            levels += 1;
            // This vCPU's share of the level, whose parts are consecutive.
            let share = team.part(total);
            let next = self.found[1 - now].atomics();
            let mut place = team.index() * self.stride;
            let mut passed = 0;
            for vcpu in 0..team.count() {
                let here = passed..passed + length(vcpu);
                passed = here.end;
                for position in here.start.max(share.start)..here.end.min(share.end) {
                    let at = vcpu * self.stride + position - here.start;
                    let vertex = self.found[now].atomics()[at].load(Ordering::Relaxed);
                    for target in graph.neighbours(vertex) {
                        let parent = &parents[*target as usize];
                        if parent.load(Ordering::Relaxed) == NONE
                            && parent
                                .compare_exchange(NONE, vertex + 1, Ordering::Relaxed, Ordering::Relaxed)
                                .is_ok()
                        {
                            next[place].store(*target, Ordering::Relaxed);
                            place += 1;
                        }
                    }
                }
            }
            let found = place - team.index() * self.stride;
            count_of(team.index(), 1 - now).store(found as u64, Ordering::Release);
            team.wait_patiently();
            now = 1 - now;
        }
    }
}

/// Computes the depths of all vertices from the parents in `depths` (1 for the root, 0 if not reached). Returns whether the parents
/// form a tree whose edges are in the graph, with a serial search's depths.
fn check(graph: &Graph<'_>, parents: &[AtomicU32], root: u32, depths: &mut [u32], queue: &mut [u32]) -> bool {
    depths.fill(0);
    depths[root as usize] = 1;
    queue[0] = root;
    let (mut first, mut last) = (0, 1);
    while first < last {
        let vertex = queue[first];
        first += 1;
        for target in graph.neighbours(vertex) {
            if depths[*target as usize] == 0 {
                depths[*target as usize] = depths[vertex as usize] + 1;
                queue[last] = *target;
                last += 1;
            }
        }
    }
    (0_u32..).zip(parents).all(|(vertex, parent)| {
        let depth = depths[vertex as usize];
        match parent.load(Ordering::Relaxed).checked_sub(1) {
            None => depth == 0,
            Some(parent) if vertex == root => parent == root,
            Some(parent) => {
                depth == depths[parent as usize] + 1
                    && depths[parent as usize] > 0
                    && graph.neighbours(parent).contains(&vertex)
            }
        }
    })
}

/// Runs the workload.
///
/// # Errors
/// Unsuitable arguments or memory.
pub fn run(team: &Team<'_>, heap: &mut Heap, settings: &Settings) -> Result<Outcome, Refused> {
    let scale = settings.number("scale", 11, 1..=24)?;
    let degree = settings.size("degree", 8, 1..=64)?;
    let roots = settings.number("roots", 4, 1..=1 << 20)?;
    let seed = settings.number("seed", 1, 0..=u64::MAX)?;
    let vertices = 1_usize << scale;
    let edges = vertices * degree;
    let starts = heap.array::<u32>(vertices + 1)?;
    let targets = heap.array::<u32>(2 * edges)?;
    let search = Search::new(heap, vertices, team.count())?;
    let [depths, queue] = [heap.array::<u32>(vertices)?, heap.array::<u32>(vertices)?];

    if team.leads() {
        // SAFETY: others use them after the barrier below.
        let (starts, targets) = unsafe { (starts.write(0..vertices + 1), targets.write(0..2 * edges)) };
        build(seed, scale, edges, starts, targets);
    }
    team.wait_patiently();
    // SAFETY: they are no longer written.
    let (starts, targets) = unsafe { (starts.read(0..vertices + 1), targets.read(0..2 * edges)) };
    let graph = Graph { starts, targets };

    let mut random = Random::new(!seed);
    let (mut nanoseconds, mut visited, mut levels, mut right) = (0, 0_u64, 0, true);
    for number in 0..roots {
        // A root with an edge, if the draw finds one.
        let draw = |random: &mut Random| u32::try_from(random.below(vertices as u64)).unwrap_or(0);
        let mut root = draw(&mut random);
        for _ in 0..64 {
            if graph.neighbours(root).is_empty() {
                root = draw(&mut random);
            }
        }
        let mut depth = 0;
        if number == 0 {
            // The measured part is one phase for the monitor: the first search, with cold caches.
            nanoseconds += team.measure(|| depth = search.run(team, &graph, root));
        } else {
            team.wait_patiently();
            let begun = team.nanoseconds();
            depth = search.run(team, &graph, root).max(depth);
            nanoseconds += team.nanoseconds().saturating_sub(begun);
        }
        if team.leads() {
            levels = levels.max(depth);
            // SAFETY: only vCPU 0 uses these two.
            let (depths, queue) = unsafe { (depths.write(0..vertices), queue.write(0..vertices)) };
            right &= check(&graph, search.parents.atomics(), root, depths, queue);
            let reached = (0_u32..).zip(&*depths).filter(|(_, depth)| **depth > 0);
            visited += reached.map(|(vertex, _)| graph.neighbours(vertex).len() as u64).sum::<u64>();
        }
        team.wait_patiently();
    }
    Ok(Outcome::new("edge", visited, nanoseconds)
        .verified(right)
        .figure("vertices", Figure::Count(vertices as u64))
        .figure("edges", Figure::Count(edges as u64))
        .figure("roots", Figure::Count(roots))
        .figure("levels", Figure::Count(levels.into())))
}

/// Builds the undirected graph: each edge from both of its ends.
fn build(seed: u64, scale: u64, edges: usize, starts: &mut [u32], targets: &mut [u32]) {
    let all = || (0..edges as u64).map(move |index| edge(seed, index, scale));
    starts.fill(0);
    for (from, to) in all() {
        starts[from as usize] += 1;
        starts[to as usize] += 1;
    }
    let mut total = 0;
    for start in &mut *starts {
        total += *start;
        *start = total;
    }
    // Each start is now the end of its part, and moves down as the part is filled.
    for (from, to) in all() {
        for (vertex, target) in [(from, to), (to, from)] {
            starts[vertex as usize] -= 1;
            targets[starts[vertex as usize] as usize] = target;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Graph, NAMES, build, check, run};
    use crate::testing::right;
    use std::sync::atomic::AtomicU32;

    /// The tree is correct for teams of any size, also with more vCPUs than vertices.
    #[test]
    fn trees_are_right() {
        right(run, NAMES, &["scale=9", "roots=3"]);
        right(run, NAMES, &["scale=1", "degree=1", "roots=1", "seed=3"]);
    }

    /// The check detects errors: a parent that isn't adjacent, one that is too deep, an omitted vertex.
    #[test]
    fn wrong_trees_are_found() {
        // A path 0 - 1 - 2 - 3.
        let graph = Graph { starts: &[0, 1, 3, 5, 6], targets: &[1, 0, 2, 1, 3, 2] };
        let (mut depths, mut queue) = ([0; 4], [0; 4]);
        let mut judge =
            |parents: [u32; 4]| check(&graph, &parents.map(AtomicU32::new), 0, &mut depths, &mut queue);
        assert!(judge([1, 1, 2, 3]));
        assert!(!judge([1, 1, 1, 3]));
        assert!(!judge([1, 1, 4, 3]));
        assert!(!judge([1, 1, 2, 0]));
        assert!(!judge([2, 1, 2, 3]));
    }

    #[test]
    fn every_edge_has_two_ends() {
        let (mut starts, mut targets) = (vec![0; 17], vec![0; 64]);
        build(5, 4, 32, &mut starts, &mut targets);
        let graph = Graph { starts: &starts, targets: &targets };
        assert_eq!((starts[0], starts[16]), (0, 64));
        for vertex in 0..16 {
            for target in graph.neighbours(vertex) {
                let there = graph.neighbours(vertex).iter().filter(|other| *other == target).count();
                let back = graph.neighbours(*target).iter().filter(|other| **other == vertex).count();
                assert!(there == back, "{vertex} {target}");
            }
        }
    }
}
