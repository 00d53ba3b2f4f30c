//! Prefetch: carries out the requests of [`::prefetch`] as faults of its contexts, whose numbers in the protocol follow those of the vCPUs.

use std::ops::Range;

use ::dsm::{Event, Fault, Node, Page, Vcpu};
use ::prefetch::PageStates;

use super::engine::{Core, Engine, now};
use super::pages::LivePages;

/// A page revoked within this time after its prefetch may have been fetched in vain, ns.
pub(super) const EARLY_REVOCATION_NS: u64 = 1_000_000;

/// The node's pages as the prefetcher sees them.
struct View<'a> {
    node: &'a Node,
    pages: &'a LivePages,
}

impl PageStates for View<'_> {
    /// Stores to a write-update page go to the sequencer, so they need no copy.
    fn needs_fetch(&self, (page, write): (Page, bool)) -> bool {
        let fault = if write { Fault::Write } else { Fault::Read };
        page < self.node.config().pages
            && !Engine::allows(self.node, page, fault)
            && !self.node.mode(page).is_update()
    }

    fn is_predictable(&self, (page, write): (Page, bool)) -> bool {
        self.pages.is_predictable(page, write)
    }
}

impl Engine {
    /// Learns a vCPU's fault. What follows from it is requested at the end of the next [`Engine::step`].
    pub(super) fn predict(core: &mut Core, index: usize, page: Page, write: bool) {
        let Core { prefetcher, node, pages, counts, .. } = core;
        for suspect in std::mem::take(&mut pages.prefetched_in_vain) {
            counts.prefetched_in_vain += 1;
            prefetcher.suspect(suspect);
        }
        let used: Range<Page> = prefetcher.fault(index, (page, write), now(), &View { node, pages });
        used.for_each(|page| pages.note_request(page, write));
    }

    /// Ends the context with this number in the protocol, if it is one: its page has arrived, or other nodes request it. Returns whether
    /// it is a context.
    pub(super) fn end_context(core: &mut Core, vcpu: Vcpu) -> bool {
        let Some(context) = usize::from(vcpu).checked_sub(core.vcpus.len()) else { return false };
        if let Some(page) = u16::try_from(context).ok().and_then(|context| core.prefetcher.arrived(context)) {
            core.counts.prefetched += 1;
            // A vCPU that has faulted on it meanwhile resumes by the protocol, or, if its fault hasn't been read, when it is.
            core.pages.prefetched.insert(page, now());
        }
        true
    }

    /// Requests predicted pages, unless the VM is stopping.
    pub(super) fn prefetch(&self, core: &mut Core) {
        if core.stopping || core.suspending || core.suspended {
            core.prefetcher.cancel();
            return;
        }
        if std::mem::replace(&mut core.prefetching, true) {
            // The outer call requests what follows from this one's.
            return;
        }
        loop {
            let Core { prefetcher, node, pages, vcpus, .. } = core;
            let Some(request) = prefetcher.next(&View { node, pages }) else { break };
            let fault = if request.write { Fault::Write } else { Fault::Read };
            // The configuration counts the contexts among the vCPUs, so their numbers fit.
            let Ok(vcpu) = Vcpu::try_from(vcpus.len() + usize::from(request.context)) else { break };
            self.step(core, Event::Fault { vcpu, page: request.page, fault });
        }
        core.prefetching = false;
    }
}
