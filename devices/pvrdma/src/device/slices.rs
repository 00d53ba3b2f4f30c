//! Commands that execute in slices. A guest's command can be long, and one thread serves the devices of a host. So a register write does a
//! bounded part of it, and its caller repeats the write while [`Device::is_unfinished`]. The thread serves other devices meanwhile. The
//! driver waits for the response, so no other command comes in between.

use dma::Dma;
use hca::names::{ContextHandle, PdHandle, QpHandle};
use hca::{Engine, MrPages, Teardown};
use zerocopy::little_endian::U64;

use super::commands::{Answer, answer, handle};
use super::doorbells::LivePage;
use super::error::CommandError;
use super::{Device, events};
use crate::abi::commands::MrResponse;
use crate::page_list::{PageList, PageListError};
use crate::provider::Pvrdma;

type Result<T> = std::result::Result<T, CommandError>;

/// Number of tables of a page list, of up to 512 pages each, that a slice reads.
pub const PAGE_TABLES_PER_SLICE: u32 = 16;
/// Number of teardown steps in a slice ([`Engine::teardown`]).
pub const TEARDOWN_STEPS_PER_SLICE: u32 = 8192;

/// A command in progress.
pub(super) struct Unfinished {
    pub code: u32,
    /// Echoed in the response.
    pub response: U64,
    pub work: Work,
}

/// The rest of a command.
pub(super) enum Work {
    /// CREATE_MR: pages are being read.
    Registration(Box<Registration>),
    /// Objects are being destroyed; then the second part follows.
    Teardown(Teardown, AfterTeardown),
}

/// A memory region whose pages are being read.
pub(super) struct Registration {
    pub pd: PdHandle,
    pub start: u64,
    pub length: u64,
    pub access: u32,
    pub list: PageList,
    pub pages: MrPages,
}

/// The step after a teardown.
#[derive(Debug, Clone, Copy)]
pub(super) enum AfterTeardown {
    /// Completes DESTROY_PD.
    Pd(u32),
    /// Completes DESTROY_UC.
    Context(ContextHandle),
    /// Continues CREATE_UC, whose UAR page belonged to a context that the driver had given up.
    Recreate(ContextHandle, u32),
}

impl<M: Dma + Clone + 'static> Device<M> {
    /// Whether the last [`Device::register_write`] executed only a slice, and must be repeated.
    #[must_use]
    pub fn is_unfinished(&self) -> bool {
        self.unfinished.is_some()
    }

    /// Executes a slice of a command. `None`: more slices follow.
    pub(super) fn slice(
        &mut self,
        engine: &mut Engine<Pvrdma<M>>,
        work: &mut Work,
    ) -> Result<Option<Answer>> {
        match work {
            Work::Registration(registration) => {
                let finished = registration.read(&self.memory)?;
                if !finished {
                    return Ok(None);
                }
                let Registration { pd, start, length, access, .. } = **registration;
                let pages = std::mem::replace(&mut registration.pages, MrPages::new(0));
                let made = engine.register_mr_pages(self.id, pd, (start, length), access, pages)?;
                Ok(Some(answer(&MrResponse {
                    handle: made.handle.0.into(),
                    lkey: made.lkey.into(),
                    rkey: made.rkey.into(),
                })))
            }
            Work::Teardown(teardown, after) => {
                let (qps, events) = (&mut self.qps, &mut self.events);
                let done = engine.teardown(teardown, TEARDOWN_STEPS_PER_SLICE, &mut |QpHandle(qp)| {
                    qps.remove(&qp);
                    events.forget(|kind, object| events::about_qp(kind) && object == qp);
                })?;
                if done { self.after_teardown(engine, *after).map(Some) } else { Ok(None) }
            }
        }
    }

    fn after_teardown(&mut self, engine: &mut Engine<Pvrdma<M>>, after: AfterTeardown) -> Result<Answer> {
        match after {
            AfterTeardown::Pd(pd) => {
                self.pds.remove(&pd);
                Ok(Answer::Silent)
            }
            AfterTeardown::Context(context) => {
                self.forget_context(context);
                Ok(Answer::Silent)
            }
            AfterTeardown::Recreate(context, page) => {
                self.forget_context(context);
                self.open_context(engine, page)
            }
        }
    }

    fn forget_context(&mut self, context: ContextHandle) {
        self.pages.retain(|live| live.context != context);
        self.pds.retain(|_, of| *of != context);
    }

    pub(super) fn open_context(&mut self, engine: &mut Engine<Pvrdma<M>>, page: u32) -> Result<Answer> {
        let context = engine.create_context(self.id)?;
        self.pages.push(LivePage { page, context });
        Ok(handle(context.0))
    }
}

impl Registration {
    /// Reads a slice of the page list; returns whether it is complete.
    fn read(&mut self, memory: &impl Dma) -> Result<bool> {
        for _ in 0..PAGE_TABLES_PER_SLICE {
            if self.list.is_read() {
                break;
            }
            let pages = &mut self.pages;
            self.list
                .read_table(memory, |page| pages.push(page).map_err(|_| PageListError::Alignment(page)))?;
        }
        Ok(self.list.is_read())
    }
}
