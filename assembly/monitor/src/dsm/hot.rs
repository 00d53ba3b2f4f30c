//! Which pages vCPUs of this node wait for most, where in them, and from which instructions.

use std::collections::HashMap;

use dsm::{Mode, Node, Page};
use serde_json::{Value, json};

/// Pages that are told of.
const TOLD: usize = 24;
/// Places in a page, and instructions, that are remembered: the first ones that were seen.
const PLACES: usize = 4;
/// Of the faults on a page one in so many has its instruction looked at, the first among them: it costs an exit of the vCPU, and another fault.
const SAMPLED: u64 = 16;

/// A page that was waited for.
#[derive(Debug, Default)]
struct Hot {
    reads: u64,
    writes: u64,
    trapped: u64,
    waited_ns: u64,
    offsets: Vec<(u16, u64)>,
    instructions: Vec<(u64, u64)>,
}

/// All of them. As many as the guest has pages at most.
#[derive(Debug, Default)]
pub(super) struct HotPages(HashMap<Page, Hot>);

fn count<T: PartialEq>(places: &mut Vec<(T, u64)>, place: T) {
    if let Some(known) = places.iter_mut().find(|known| known.0 == place) {
        known.1 += 1;
    } else if places.len() < PLACES {
        places.push((place, 1));
    }
}

impl HotPages {
    /// A vCPU faulted here.
    pub(super) fn fault(&mut self, page: Page, offset: u16, write: bool) {
        let hot = self.0.entry(page).or_default();
        if write {
            hot.writes += 1;
        } else {
            hot.reads += 1;
        }
        count(&mut hot.offsets, offset);
    }

    /// Whether it is worth to look which instruction has just faulted here.
    pub(super) fn asks_for_instruction(&self, page: Page) -> bool {
        self.0.get(&page).is_some_and(|hot| (hot.reads + hot.writes) % SAMPLED == 1)
    }

    /// The instruction of a fault is known.
    pub(super) fn instruction(&mut self, page: Page, rip: u64) {
        count(&mut self.0.entry(page).or_default().instructions, rip);
    }

    /// It waited so long, nanoseconds.
    pub(super) fn waited(&mut self, page: Page, waited: u64) {
        let hot = self.0.entry(page).or_default();
        hot.waited_ns = hot.waited_ns.saturating_add(waited);
    }

    /// A store was carried out for it.
    pub(super) fn trapped(&mut self, page: Page, waited: u64) {
        self.0.entry(page).or_default().trapped += 1;
        self.waited(page, waited);
    }

    /// Those that cost most, first.
    pub(super) fn to_json(&self, node: &Node) -> Value {
        let mut all: Vec<_> = self.0.iter().collect();
        all.sort_by_key(|(page, hot)| (std::cmp::Reverse(hot.waited_ns), **page));
        let told = all.into_iter().take(TOLD).map(|(page, hot)| {
            let mode = match node.mode(*page) {
                Mode::Invalidate => "invalidate",
                Mode::Update => "update",
                Mode::SingleWriter => "single-writer",
            };
            json!({
                "page": page,
                "mode": mode,
                "owner": node.is_owner(*page),
                "reads": hot.reads,
                "writes": hot.writes,
                "trapped": hot.trapped,
                "waited_ns": hot.waited_ns,
                "offsets": hot.offsets,
                "instructions": hot.instructions,
            })
        });
        told.collect()
    }
}
