use super::*;
use proptest::prelude::*;
use std::collections::HashSet;

/// Pages that are here.
#[derive(Default)]
struct Here(HashSet<Page>);

impl PageStates for Here {
    fn needs_fetch(&self, (page, _): PageRequest) -> bool {
        !self.0.contains(&page)
    }

    fn is_predictable(&self, _: PageRequest) -> bool {
        true
    }
}

fn drain(node: &mut NodePrefetcher, here: &Here) -> Vec<PrefetchRequest> {
    std::iter::from_fn(|| node.next(here)).collect()
}

/// Each page has one context, and each context one page.
#[test]
fn contexts_are_limited_and_reused() {
    let mut contexts = Contexts::default();
    let all: Vec<_> =
        (0..u64::from(MAX_PREFETCH_CONTEXTS)).map(|page| contexts.begin(page).unwrap()).collect();
    assert!(contexts.begin(9999).is_none() && contexts.is_fetching(3) && !contexts.is_fetching(9999));
    assert_eq!(contexts.end(all[3]), Some(3));
    assert_eq!(contexts.end(all[3]), None);
    assert!(!contexts.is_fetching(3));
    assert_eq!(contexts.begin(9999), Some(all[3]));
}

/// A stream is requested in parts: the part behind the first is due once, when the first page arrives.
#[test]
fn the_next_part_is_due_when_a_page_arrives() {
    let mut node = NodePrefetcher::new(1);
    let here = Here::default();
    let part = STREAM_PART_PAGES as Page;
    node.batches.push_back(Batch::Stream((100..100 + 2 * part).map(|page| (page, true)).collect()));
    let first = drain(&mut node, &here);
    assert_eq!(first.iter().map(|request| request.page).collect::<Vec<_>>(), Vec::from_iter(100..100 + part));
    assert!(first.iter().all(|request| request.write));
    // Another page of the part isn't awaited.
    assert_eq!(node.arrived(first[1].context), Some(101));
    assert_eq!(drain(&mut node, &here), []);
    assert_eq!(node.arrived(first[0].context), Some(100));
    assert_eq!(node.arrived(first[0].context), None);
    let second = drain(&mut node, &here);
    assert_eq!(
        second.iter().map(|request| request.page).collect::<Vec<_>>(),
        Vec::from_iter(100 + part..100 + 2 * part)
    );
    assert!(node.contexts.next_parts.is_empty());
}

/// Where a part is here already, or arrives while it is requested, the next part follows at once.
#[test]
fn a_part_that_is_here_is_not_awaited() {
    let mut node = NodePrefetcher::new(1);
    let mut here = Here::default();
    let part = STREAM_PART_PAGES as Page;
    node.batches.push_back(Batch::Stream((0..3 * part).map(|page| (page, false)).collect()));
    let mut requested = Vec::new();
    while let Some(request) = node.next(&here) {
        requested.push(request.page);
        here.0.insert(request.page);
        assert_eq!(node.arrived(request.context), Some(request.page));
    }
    assert_eq!(requested, Vec::from_iter(0..3 * part));
    node.batches.push_back(Batch::Stream((0..3 * part).map(|page| (page, false)).collect()));
    assert_eq!(node.next(&here), None);
}

/// A vCPU that advances page by page faults rarely, and no page behind its stream is requested twice at a time.
#[test]
fn a_stream_is_requested_ahead_of_its_vcpu() {
    let mut node = NodePrefetcher::new(2);
    let mut here = Here::default();
    let mut faults = 0;
    for page in 0..1000 {
        if here.0.insert(page) {
            faults += 1;
            node.fault(1, (page, false), page * 1000, &here);
            while let Some(request) = node.next(&here) {
                here.0.insert(request.page);
                node.arrived(request.context);
            }
        }
    }
    assert!(faults < 20, "{faults}");
}

/// A cancelled prediction isn't requested. A fault of an unknown vCPU predicts nothing.
#[test]
fn predictions_are_cancelled() {
    let mut node = NodePrefetcher::new(1);
    node.batches.push_back(Batch::Whole([(5, true)].into()));
    node.cancel();
    assert_eq!(node.fault(7, (3, true), 0, &Here::default()), 3..3);
    assert_eq!(node.next(&Here::default()), None);
}

proptest! {
    /// Whatever faults, arrivals and losses occur: a context has one page at a time, no page is requested that is here or under way, and
    /// what waits is bounded.
    #[test]
    fn requests_are_unique_and_bounded(steps in prop::collection::vec((0_usize..4, 0_u64..300, any::<bool>()), 1..400)) {
        let mut node = NodePrefetcher::new(3);
        let mut here = Here::default();
        let mut in_flight: Vec<PrefetchRequest> = Vec::new();
        for (at, (what, page, write)) in steps.into_iter().enumerate() {
            match what {
                0 | 1 => {
                    node.fault(what, (page, write), at as u64 * 1000, &here);
                    here.0.insert(page);
                }
                2 => {
                    if let Some(request) = in_flight.pop() {
                        here.0.insert(request.page);
                        prop_assert_eq!(node.arrived(request.context), Some(request.page));
                    }
                }
                _ => {
                    here.0.remove(&page);
                    node.suspect(page);
                }
            }
            while let Some(request) = node.next(&here) {
                prop_assert!(here.needs_fetch((request.page, request.write)));
                prop_assert!(request.context < MAX_PREFETCH_CONTEXTS);
                prop_assert!(in_flight.iter().all(|other| other.page != request.page && other.context != request.context));
                in_flight.push(request);
            }
            prop_assert!(node.batches.is_empty());
            prop_assert!(node.contexts.next_parts.len() <= in_flight.len());
        }
    }
}
