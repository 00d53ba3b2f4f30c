//! What is remembered of idle queue pairs, close together: a scan of thousands reads this and the guests' indices, nothing else.

/// [`Quiet::index`] where a scan has to look at the queue pair itself.
pub(crate) const NOT_QUIET: u32 = u32::MAX;

/// An idle queue pair: nothing is to be done for it as long as the guest's index has this value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Quiet {
    /// Guest address of the send queue's producer index.
    pub index_at: u64,
    /// Its value when the queue pair was found idle, or [`NOT_QUIET`].
    pub index: u32,
}

const UNKNOWN: Quiet = Quiet { index_at: 0, index: NOT_QUIET };

const _: () = assert!(size_of::<Quiet>() == 16);

/// By queue pair handle; grows to the highest handle remembered.
#[derive(Debug, Default)]
pub(crate) struct QuietTable(Vec<Quiet>);

impl QuietTable {
    /// What is remembered of a queue pair.
    #[inline]
    pub fn of(&self, handle: u32) -> Quiet {
        self.0.get(handle as usize).copied().unwrap_or(UNKNOWN)
    }

    /// Whoever changes what a queue pair waits for, its state, or its ring says so here.
    #[inline]
    pub fn forget(&mut self, handle: u32) {
        if let Some(quiet) = self.0.get_mut(handle as usize) {
            quiet.index = NOT_QUIET;
        }
    }

    /// A queue pair was found idle; `handle` is that of a live one, so the table stays below the device's limit.
    pub fn remember(&mut self, handle: u32, index_at: u64, index: u32) {
        let at = handle as usize;
        if at >= self.0.len() {
            self.0.resize(at + 1, UNKNOWN);
        }
        self.0[at] = Quiet { index_at, index };
    }
}
