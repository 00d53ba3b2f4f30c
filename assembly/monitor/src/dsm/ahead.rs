//! Fetches pages that follow before they are asked for.
//!
//! A vCPU that faults on one page after the other waits for each. When it has done so a few times, pages that follow are asked for in the name of
//! helpers, which the protocol takes for vCPUs of this node: their instructions retire as soon as their pages come. So messages, ages and holds are those
//! of ordinary faults, and a page that comes too early, or in vain, is given away like any other.

use dsm::{Access, Event, Fault, Page, Vcpu};

use super::engine::{Core, Engine};

/// Helpers of a node: pages that are fetched ahead at the same time.
pub(super) const HELPERS: u16 = 16;
/// Faults in a row before pages are fetched ahead.
const RUN: u32 = 3;
/// Pages fetched ahead at first; doubled at every fault that finds them used.
const FIRST: u64 = 2;

/// The faults of one vCPU of late.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Stream {
    /// Where the next one goes on.
    next: Page,
    write: bool,
    run: u32,
    /// Pages fetched at the last one.
    ahead: u64,
}

impl Stream {
    /// How many pages to fetch behind the one that faults now.
    pub(super) fn fault(&mut self, page: Page, write: bool) -> u64 {
        // What was fetched may have gone again.
        let goes_on = write == self.write && page <= self.next && page + self.ahead >= self.next;
        self.run = if goes_on { self.run.saturating_add(1) } else { 1 };
        self.ahead = match self.run {
            run if run < RUN => 0,
            RUN => FIRST,
            _ => (self.ahead * 2).clamp(FIRST, HELPERS.into()),
        };
        (self.next, self.write) = (page + 1 + self.ahead, write);
        self.ahead
    }
}

/// Who helps.
#[derive(Debug, Default)]
pub(super) struct Helpers {
    /// The page that each waits for.
    busy: [Option<Page>; HELPERS as usize],
}

impl Engine {
    /// The protocol's number of a helper: behind those of vCPUs.
    pub(super) fn helper(core: &Core, vcpu: Vcpu) -> Option<usize> {
        usize::from(vcpu).checked_sub(core.vcpus.len())
    }

    /// A helper's page has come, or others want it: it isn't needed by an instruction.
    pub(super) fn helped(core: &mut Core, helper: usize) {
        if let Some(page) = core.helpers.busy.get_mut(helper).and_then(Option::take) {
            core.counts.ahead += 1;
            // A vCPU may have begun to wait for it meanwhile.
            core.pages.wake(page);
        }
    }

    /// Asks for `count` pages behind one.
    pub(super) fn fetch_ahead(&self, core: &mut Core, page: Page, count: u64, write: bool) {
        let fault = if write { Fault::Write } else { Fault::Read };
        let end = core.node.config().pages.min(page + 1 + count);
        for page in page + 1..end {
            if core.node.access(page) != Access::None || core.helpers.busy.contains(&Some(page)) {
                continue;
            }
            let Some(helper) = core.helpers.busy.iter().position(Option::is_none) else { return };
            let Ok(vcpu) = Vcpu::try_from(core.vcpus.len() + helper) else { return };
            if let Some(place) = core.helpers.busy.get_mut(helper) {
                *place = Some(page);
            }
            self.step(core, Event::Fault { vcpu, page, fault });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages are fetched ahead of a vCPU that goes on from page to page, more and more, and not of one that jumps.
    #[test]
    fn streams_are_found_and_jumps_are_not() {
        let mut stream = Stream::default();
        let mut page = 100;
        let mut fetched = Vec::new();
        for _ in 0..8 {
            let ahead = stream.fault(page, false);
            fetched.push(ahead);
            page += 1 + ahead;
        }
        assert_eq!(fetched, [0, 0, 2, 4, 8, 16, 16, 16]);
        // It comes back to a page that had gone again: still the same stream.
        assert_eq!(stream.fault(page - 5, false), 16);
        // Another kind, another place, backwards.
        assert_eq!(stream.fault(page - 4, true), 0);
        assert_eq!(stream.fault(5000, true), 0);
        assert_eq!(stream.fault(4999, true), 0);
        assert_eq!(stream.fault(4998, true), 0);
        assert_eq!(stream.fault(4997, true), 0);
    }
}
