//! The protocol's view of guest memory, as it is on this host.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use dsm::trace::{Entry, Recorder};
use dsm::{Access, Page, Pages, wire};
use machine::memory::shared::{PageRights, SharedRam};

use super::ahead::SOON;
use super::engine::now;

/// The protocol's view of guest memory.
pub(super) struct LivePages {
    pub(super) ram: Arc<SharedRam>,
    rights: Vec<PageRights>,
    /// Pages that were taken from the guest here, wholly or for writing: a fault there is no first fetch.
    lost: Vec<bool>,
    /// Whether vCPUs here have asked for pages to read, and to write.
    asked: Vec<[bool; 2]>,
    /// Pages that were fetched before they were asked for, and when they came, nanoseconds.
    pub(super) ahead: HashMap<Page, u64>,
    /// Those of them that were taken soon after that.
    pub(super) in_vain: Vec<Page>,
    /// The host refused a change: the VM can't go on.
    pub(super) refused: Option<String>,
    /// What is recorded for the simulator, where that is wanted. In a cell as reading is recorded, too.
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
    /// None of them is here. `record`: what happens to them is kept for the simulator.
    pub(super) fn new(ram: Arc<SharedRam>, pages: usize, record: bool) -> Self {
        Self {
            ram,
            rights: vec![PageRights::None; pages],
            lost: vec![false; pages],
            asked: vec![[false; 2]; pages],
            ahead: HashMap::new(),
            in_vain: Vec::new(),
            refused: None,
            recorder: record.then(RefCell::default),
        }
    }

    fn note(&mut self, what: &str, page: Page, result: io::Result<()>) {
        if let Err(error) = result {
            self.refused.get_or_insert_with(|| format!("Page {page:#x} could not be {what}: {error}"));
        }
    }

    /// Copies code; how many bytes there were to the end of the page.
    pub(super) fn code(&self, page: Page, offset: usize, into: &mut [u8]) -> Option<usize> {
        self.ram.read_at(page, offset, into).ok()
    }

    /// What was recorded.
    pub(super) fn recorded(&mut self) -> Vec<Entry> {
        self.recorder.take().map(|recorder| recorder.into_inner().finish()).unwrap_or_default()
    }

    /// Whether a page was here, and was taken.
    pub(super) fn was_lost(&self, page: Page) -> bool {
        usize::try_from(page).ok().and_then(|page| self.lost.get(page)).copied().unwrap_or(false)
    }

    /// A vCPU has asked for a page.
    pub(super) fn is_asked_for(&mut self, page: Page, write: bool) {
        if let Some(asked) = usize::try_from(page).ok().and_then(|page| self.asked.get_mut(page)) {
            asked[usize::from(write)] = true;
        }
    }

    /// Whether a page may be wanted here as well as its neighbours: it was before, or nobody here knows it.
    pub(super) fn may_be_wanted(&self, page: Page, write: bool) -> bool {
        let Ok(index) = usize::try_from(page) else { return false };
        let new = self.rights.get(index) == Some(&PageRights::None) && !self.was_lost(page);
        new || self.asked.get(index).is_some_and(|asked| asked[usize::from(write)])
    }

    /// All pages are this host's own from here on, and there for the guest.
    pub(super) fn release(&mut self) {
        let known = |page| usize::try_from(page).ok().and_then(|page| self.rights.get(page));
        let released = self.ram.release_around(|page| known(page).copied().unwrap_or(PageRights::None));
        if let Err(error) = released {
            tracing::debug!(%error, "What the guest has in use could not be left as it is: all of it is mapped anew");
            self.ram.release();
        }
    }

    /// After [`LivePages::release`]: a vCPU has asked for a page.
    pub(super) fn give(&mut self, page: Page) {
        let result = self.ram.give(page);
        self.note("given", page, result);
    }

    pub(super) fn wake(&mut self, page: Page) {
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
        // Not shared: no correct node asks for it. What it gets is zero.
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
            if let Some(came) = self.ahead.remove(&page)
                && now().saturating_sub(came) < SOON
            {
                self.in_vain.push(page);
            }
        }
        let result = self.ram.set(page, from, to);
        self.note("protected", page, result);
    }
}
