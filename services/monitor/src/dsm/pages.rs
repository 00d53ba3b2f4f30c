//! The protocol's view of guest memory on this host.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use dsm::trace::{Entry, Recorder};
use dsm::{Access, Page, Pages, wire};
use machine::memory::shared::{PageRights, SharedRam};

use super::engine::now;
use super::prefetch::EARLY_REVOCATION_NS;

/// The protocol's view of guest memory.
///
/// It applies changes of rights to runs of consecutive pages, at [`LivePages::apply_changes`], before messages leave and the engine's lock
/// is released. Two kinds of changes may wait until then. The first gives vCPUs more rights to a page, since no vCPU has been notified. The
/// second drops a read-only copy, since no node has been notified.
pub(super) struct LivePages {
    pub(super) ram: Arc<SharedRam>,
    /// Rights that the protocol has set.
    rights: Vec<PageRights>,
    /// Rights that the guest's mapping has.
    real: Vec<PageRights>,
    /// Pages for which these two may differ.
    changed: Vec<Page>,
    /// Pages that other nodes are about to get copies of, ascending. If one becomes read-only, consecutive ones do so in the same call.
    requested_copies: Vec<Page>,
    /// Pages that the guest here has lost, or lost the right to write. A fault on one isn't its first fetch.
    lost: Vec<bool>,
    /// Whether vCPUs here have requested each page to read, and to write.
    requested: Vec<[bool; 2]>,
    /// Pages that were prefetched, with the time of arrival, ns.
    pub(super) prefetched: HashMap<Page, u64>,
    /// Prefetched pages that were revoked within [`EARLY_REVOCATION_NS`].
    pub(super) prefetched_in_vain: Vec<Page>,
    /// The host refused a change, so the VM can't continue: the reason.
    pub(super) refused: Option<String>,
    /// The recording for the simulator, if requested. In a cell, since `read` records, too.
    pub(super) recorder: Option<RefCell<Recorder>>,
}

fn rights(access: Access) -> PageRights {
    match access {
        Access::None => PageRights::None,
        Access::Read => PageRights::Read,
        Access::Write => PageRights::Write,
    }
}

impl LivePages {
    /// A view with no rights to any page. `record` starts a recording for the simulator.
    pub(super) fn new(ram: Arc<SharedRam>, pages: usize, record: bool) -> Self {
        Self {
            ram,
            rights: vec![PageRights::None; pages],
            real: vec![PageRights::None; pages],
            changed: Vec::new(),
            requested_copies: Vec::new(),
            lost: vec![false; pages],
            requested: vec![[false; 2]; pages],
            prefetched: HashMap::new(),
            prefetched_in_vain: Vec::new(),
            refused: None,
            recorder: record.then(RefCell::default),
        }
    }

    fn note(&mut self, what: &str, page: Page, result: io::Result<()>) {
        if let Err(error) = result {
            self.refused.get_or_insert_with(|| format!("Page {page:#x} could not be {what}: {error}"));
        }
    }

    /// Copies code. Returns the number of bytes, at most up to the page's end; `None` if the page can't be read.
    pub(super) fn code(&self, page: Page, offset: usize, into: &mut [u8]) -> Option<usize> {
        self.ram.read_at(page, offset, into).ok()
    }

    /// Ends the recording and returns it.
    pub(super) fn recorded(&mut self) -> Vec<Entry> {
        self.recorder.take().map(|recorder| recorder.into_inner().finish()).unwrap_or_default()
    }

    /// Whether the guest here has lost the page before.
    pub(super) fn was_lost(&self, page: Page) -> bool {
        usize::try_from(page).ok().and_then(|page| self.lost.get(page)).copied().unwrap_or(false)
    }

    /// Notes that a vCPU requested a page.
    pub(super) fn note_request(&mut self, page: Page, write: bool) {
        if let Some(requested) = usize::try_from(page).ok().and_then(|page| self.requested.get_mut(page)) {
            requested[usize::from(write)] = true;
        }
    }

    /// Whether a neighbor's fault may predict one of this page: vCPUs here requested it before, or it was never here.
    pub(super) fn is_predictable(&self, page: Page, write: bool) -> bool {
        let Ok(index) = usize::try_from(page) else { return false };
        let new = self.rights.get(index) == Some(&PageRights::None) && !self.was_lost(page);
        new || self.requested.get(index).is_some_and(|requested| requested[usize::from(write)])
    }

    fn real(&self, page: Page) -> PageRights {
        usize::try_from(page).ok().and_then(|page| self.real.get(page)).copied().unwrap_or(PageRights::None)
    }

    fn target(&self, page: Page) -> PageRights {
        usize::try_from(page).ok().and_then(|page| self.rights.get(page)).copied().unwrap_or(PageRights::None)
    }

    /// Sets the pages that other nodes request copies of now.
    pub(super) fn set_requested(&mut self, pages: impl Iterator<Item = Page>) {
        self.requested_copies.clear();
        self.requested_copies.extend(pages);
        self.requested_copies.sort_unstable();
        self.requested_copies.dedup();
    }

    /// Applies the changes of rights that have waited.
    pub(super) fn apply_changes(&mut self) {
        if self.changed.is_empty() {
            return;
        }
        let mut changed = std::mem::take(&mut self.changed);
        changed.sort_unstable();
        let mut run = 0..0;
        for page in changed.drain(..) {
            let (from, to) = (self.real(page), self.target(page));
            let continues = run.end == page && (self.real(run.start), self.target(run.start)) == (from, to);
            if from == to || continues {
                run.end += u64::from(from != to);
                continue;
            }
            self.change(std::mem::replace(&mut run, page..page + 1));
        }
        self.change(run);
        // Reuses the allocation.
        self.changed = changed;
    }

    /// Applies the changes of consecutive pages that all have the same rights now and in the protocol.
    fn change(&mut self, pages: Range<Page>) {
        self.set(pages.clone(), self.real(pages.start), self.target(pages.start));
    }

    fn set(&mut self, pages: Range<Page>, from: PageRights, to: PageRights) {
        if pages.is_empty() || from == to {
            return;
        }
        let result = self.ram.set_all(pages.clone(), from, to);
        self.note("protected", pages.start, result);
        let places = usize::try_from(pages.start).ok().zip(usize::try_from(pages.end).ok());
        if let Some(real) = places.and_then(|(start, end)| self.real.get_mut(start..end)) {
            real.fill(to);
        }
    }

    /// Makes a page read-only, with the consecutive pages that other nodes request. (`apply_changes` makes those writable again that
    /// weren't granted.)
    fn write_protect(&mut self, page: Page) {
        let closes =
            |other: &Page| self.real(*other) == PageRights::Write && self.target(*other) == PageRights::Write;
        let mut run = page..page + 1;
        if let Ok(at) = self.requested_copies.binary_search(&page) {
            let (before, after) = self.requested_copies.split_at(at);
            let behind =
                after.iter().skip(1).zip(run.end..).take_while(|(one, next)| *one == next && closes(one));
            run.end += behind.count() as u64;
            let ahead = before.iter().rev().zip((0..page).rev());
            run.start -= ahead.take_while(|(one, next)| *one == next && closes(one)).count() as u64;
        }
        self.changed.extend(run.clone().filter(|other| *other != page));
        self.set(run, PageRights::Write, PageRights::Read);
    }

    pub(super) fn wake(&mut self, page: Page) {
        self.apply_changes();
        let result = self.ram.wake(page);
        self.note("given back to those who wait for it", page, result);
    }
}

impl Pages for LivePages {
    fn size(&self) -> usize {
        wire::PAGE_SIZE
    }

    fn read(&self, page: Page, into: &mut Vec<u8>) {
        let before = into.len();
        // Not shared: no correct node requests it. It gets zeros.
        if self.ram.read(page, into).is_err() {
            into.resize(before + wire::PAGE_SIZE, 0);
        }
        if let (Some(recorder), Some(content)) = (&self.recorder, into.get(before..)) {
            recorder.borrow_mut().read(page, content);
        }
    }

    fn write(&mut self, page: Page, offset: usize, bytes: &[u8]) {
        if let Some(recorder) = &mut self.recorder {
            recorder.get_mut().write(page, wire::PAGE_SIZE, offset, bytes);
        }
        if self.real(page) > self.target(page) {
            // The page is about to be dropped: the guest must not see the write.
            self.apply_changes();
        }
        let result = self.ram.write(page, offset, bytes);
        self.note("written", page, result);
    }

    fn protect(&mut self, page: Page, access: Access) {
        let to = rights(access);
        let known = usize::try_from(page).ok().and_then(|page| self.rights.get_mut(page));
        let from = known.map_or(PageRights::None, |known| std::mem::replace(known, to));
        if to < from
            && let Some(lost) = usize::try_from(page).ok().and_then(|page| self.lost.get_mut(page))
        {
            *lost = true;
            if let Some(fetched_at) = self.prefetched.remove(&page)
                && now().saturating_sub(fetched_at) < EARLY_REVOCATION_NS
            {
                self.prefetched_in_vain.push(page);
            }
        }
        let real = self.real(page);
        match (real, to) {
            // At once: stores to this page would be lost, or would change a page while it is sent.
            (PageRights::Write, PageRights::Read) => self.write_protect(page),
            (PageRights::Write, PageRights::None) => self.set(page..page + 1, real, to),
            _ => self.changed.push(page),
        }
    }
}

#[cfg(test)]
#[path = "pages_tests.rs"]
mod tests;
