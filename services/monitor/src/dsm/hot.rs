//! Statistics of the pages that this node's vCPUs stall for most: offsets and instructions of faults.

use std::collections::HashMap;

use dsm::{Mode, Node, Page};
use serde_json::{Value, json};

/// Pages in a report.
const MAX_REPORTED_PAGES: usize = 24;
/// Distinct offsets, and instructions, that are counted per page: the first ones.
const MAX_PLACES_PER_PAGE: usize = 4;
/// One fault in `SAMPLE_ONE_IN` on a page has its instruction sampled, beginning with the first. A sample costs an exit of the vCPU and
/// another fault.
const SAMPLE_ONE_IN: u64 = 16;

/// Statistics of one page.
#[derive(Debug, Default)]
struct Hot {
    reads: u64,
    writes: u64,
    trapped: u64,
    waited_ns: u64,
    offsets: Vec<(u16, u64)>,
    instructions: Vec<(u64, u64)>,
}

/// Statistics of all pages with faults. Bounded by the guest's pages.
#[derive(Debug, Default)]
pub(super) struct HotPages(HashMap<Page, Hot>);

fn count<T: PartialEq>(places: &mut Vec<(T, u64)>, place: T) {
    if let Some(known) = places.iter_mut().find(|known| known.0 == place) {
        known.1 += 1;
    } else if places.len() < MAX_PLACES_PER_PAGE {
        places.push((place, 1));
    }
}

impl HotPages {
    /// Counts a fault.
    pub(super) fn fault(&mut self, page: Page, offset: u16, write: bool) {
        let hot = self.0.entry(page).or_default();
        if write {
            hot.writes += 1;
        } else {
            hot.reads += 1;
        }
        count(&mut hot.offsets, offset);
    }

    /// Whether the instruction of the page's latest fault should be sampled.
    pub(super) fn needs_instruction_sample(&self, page: Page) -> bool {
        self.0.get(&page).is_some_and(|hot| (hot.reads + hot.writes) % SAMPLE_ONE_IN == 1)
    }

    /// Counts the instruction of a fault.
    pub(super) fn instruction(&mut self, page: Page, rip: u64) {
        count(&mut self.0.entry(page).or_default().instructions, rip);
    }

    /// Adds a stall, ns.
    pub(super) fn waited(&mut self, page: Page, waited: u64) {
        let hot = self.0.entry(page).or_default();
        hot.waited_ns = hot.waited_ns.saturating_add(waited);
    }

    /// Counts a trapped store, with its stall, ns.
    pub(super) fn trapped(&mut self, page: Page, waited: u64) {
        self.0.entry(page).or_default().trapped += 1;
        self.waited(page, waited);
    }

    /// The pages with the longest stalls, as JSON, longest first.
    pub(super) fn to_json(&self, node: &Node) -> Value {
        let mut all: Vec<_> = self.0.iter().collect();
        all.sort_by_key(|(page, hot)| (std::cmp::Reverse(hot.waited_ns), **page));
        let reported = all.into_iter().take(MAX_REPORTED_PAGES).map(|(page, hot)| {
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
        reported.collect()
    }
}
