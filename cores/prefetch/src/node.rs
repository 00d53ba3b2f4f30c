//! The prefetches of a node: which predicted pages are requested, and when.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use crate::prefetcher::Prefetcher;
use crate::{Page, PageRequest};

/// Prefetch contexts of a node: the limit of pages that are prefetched at the same time.
pub const MAX_PREFETCH_CONTEXTS: u16 = 128;
/// Pages of a stream that are requested at once. The next part is requested when the first page of this one arrives, while the vCPU uses
/// pages.
const STREAM_PART_PAGES: usize = 32;

/// What the node knows about its pages.
pub trait PageStates {
    /// Whether the page exists, and isn't here with the rights to read it, or to write it.
    fn needs_fetch(&self, request: PageRequest) -> bool;
    /// Whether a neighbor's fault may predict one of this page.
    fn is_predictable(&self, request: PageRequest) -> bool;
}

/// A page to request by a fault of a context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefetchRequest {
    /// Below [`MAX_PREFETCH_CONTEXTS`], and in no other request until [`NodePrefetcher::arrived`].
    pub context: u16,
    /// The page.
    pub page: Page,
    /// Whether the right to write is requested.
    pub write: bool,
}

/// Prefetchers of a node's vCPUs, and its contexts.
#[derive(Debug)]
pub struct NodePrefetcher {
    vcpus: Vec<Prefetcher>,
    contexts: Contexts,
    /// Predictions to request, the oldest first.
    batches: VecDeque<Batch>,
}

/// Predicted pages.
#[derive(Debug, PartialEq, Eq)]
enum Batch {
    /// Requested as far as contexts are free.
    Whole(VecDeque<PageRequest>),
    /// Requested in parts, each when a page of the previous part arrives.
    Stream(Vec<PageRequest>),
    /// A part that is being requested: the pages to request, the first requested one, and the parts behind it.
    Part { left: VecDeque<PageRequest>, first: Option<Page>, behind: Vec<PageRequest> },
}

impl NodePrefetcher {
    /// Knows no faults yet.
    pub fn new(vcpus: usize) -> Self {
        Self {
            vcpus: (0..vcpus).map(|_| Prefetcher::default()).collect(),
            contexts: Contexts::default(),
            batches: VecDeque::new(),
        }
    }

    /// Learns a fault of a vCPU at `now` (ns), and predicts others. Returns prefetched pages that the vCPU has used.
    pub fn fault(
        &mut self,
        vcpu: usize,
        request: PageRequest,
        now: u64,
        pages: &impl PageStates,
    ) -> Range<Page> {
        let (page, write) = request;
        let Some(prefetcher) = self.vcpus.get_mut(vcpu) else { return page..page };
        let prediction = prefetcher.fault(page, write, now, |wanted| !pages.needs_fetch(wanted));
        if !prediction.known.is_empty() {
            self.batches.push_back(Batch::Whole(prediction.known.into()));
        }
        // An operation that vCPUs here have never done to a page that they used isn't predicted from neighbors: another vCPU's part begins
        // there.
        let stream = prediction.stream_pages.into_iter().map(|page| (page, write));
        let stream: Vec<PageRequest> = stream.filter(|wanted| pages.is_predictable(*wanted)).collect();
        if !stream.is_empty() {
            self.batches.push_back(Batch::Stream(stream));
        }
        prediction.used
    }

    /// The next request. The caller passes it to the protocol before it calls again.
    pub fn next(&mut self, pages: &impl PageStates) -> Option<PrefetchRequest> {
        loop {
            match self.batches.front_mut()? {
                Batch::Whole(left) => {
                    if let Some(request) = self.contexts.begin_one(left, pages) {
                        return Some(request);
                    }
                    self.batches.pop_front();
                }
                Batch::Stream(wanted) => {
                    let contexts = &self.contexts;
                    wanted.retain(|request| pages.needs_fetch(*request) && !contexts.is_fetching(request.0));
                    let behind = wanted.split_off(wanted.len().min(STREAM_PART_PAGES));
                    let left = std::mem::take(wanted).into();
                    self.set_front(Batch::Part { left, first: None, behind });
                }
                Batch::Part { left, first, behind } => {
                    if let Some(request) = self.contexts.begin_one(left, pages) {
                        first.get_or_insert(request.page);
                        return Some(request);
                    }
                    let (first, behind) = (*first, std::mem::take(behind));
                    self.batches.pop_front();
                    match first.filter(|page| self.contexts.is_fetching(*page)) {
                        _ if behind.is_empty() => {}
                        Some(page) => {
                            self.contexts.next_parts.insert(page, behind);
                        }
                        // All of the part was here, or has arrived.
                        None => self.batches.push_front(Batch::Stream(behind)),
                    }
                }
            }
        }
    }

    fn set_front(&mut self, batch: Batch) {
        if let Some(front) = self.batches.front_mut() {
            *front = batch;
        }
    }

    /// A context's page has arrived, or other nodes request it: the context is free, since no instruction needs the page. Returns the page;
    /// none if the context was free.
    pub fn arrived(&mut self, context: u16) -> Option<Page> {
        let page = self.contexts.end(context)?;
        if let Some(part) = self.contexts.next_parts.remove(&page) {
            self.batches.push_back(Batch::Stream(part));
        }
        Some(page)
    }

    /// A page was revoked soon after its prefetch: it may have been fetched in vain.
    pub fn suspect(&mut self, page: Page) {
        self.vcpus.iter_mut().for_each(|prefetcher| prefetcher.suspect(page));
    }

    /// Forgets predictions that aren't requested yet. Requests under way still arrive.
    pub fn cancel(&mut self) {
        self.batches.clear();
    }
}

/// The contexts, and the pages they fetch.
#[derive(Debug, Default)]
struct Contexts {
    /// A bit for each context in use.
    busy: u128,
    /// The page of each context in use, and the context of each page.
    waits: Vec<Page>,
    pages: HashMap<Page, u16>,
    /// Parts of streams to request when a page in flight arrives.
    next_parts: HashMap<Page, Vec<PageRequest>>,
}

impl Contexts {
    /// Whether a context fetches the page.
    fn is_fetching(&self, page: Page) -> bool {
        self.pages.contains_key(&page)
    }

    /// Begins the first request of `left` that needs one, and removes it and those before it. None if none needs one, or all contexts are
    /// in use.
    fn begin_one(
        &mut self,
        left: &mut VecDeque<PageRequest>,
        pages: &impl PageStates,
    ) -> Option<PrefetchRequest> {
        while let Some((page, write)) = left.pop_front() {
            if self.is_fetching(page) || !pages.needs_fetch((page, write)) {
                continue;
            }
            let context = self.begin(page)?;
            return Some(PrefetchRequest { context, page, write });
        }
        None
    }

    /// Assigns a free context to a page; none if all are in use.
    fn begin(&mut self, page: Page) -> Option<u16> {
        let context = (!self.busy).trailing_zeros();
        if context >= u32::from(MAX_PREFETCH_CONTEXTS) {
            return None;
        }
        self.busy |= 1 << context;
        self.waits.resize(usize::from(MAX_PREFETCH_CONTEXTS), 0);
        let context = u16::try_from(context).ok()?;
        *self.waits.get_mut(usize::from(context))? = page;
        self.pages.insert(page, context);
        Some(context)
    }

    fn end(&mut self, context: u16) -> Option<Page> {
        let bit = 1_u128.checked_shl(context.into()).filter(|bit| self.busy & bit != 0)?;
        self.busy &= !bit;
        let page = *self.waits.get(usize::from(context))?;
        self.pages.remove(&page);
        Some(page)
    }
}

#[cfg(test)]
#[path = "node_tests.rs"]
mod tests;
