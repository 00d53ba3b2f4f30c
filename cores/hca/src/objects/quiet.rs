//! What is remembered of idle queue pairs, close together: a scan of thousands reads this and the guests' indices, nothing else.

/// [`Quiet::index`] where a scan has to look at the queue pair itself.
const NOT_QUIET: u32 = u32::MAX;

/// [`Quiet::index`] of a queue pair on the active list, nobody waiting at it: its turn finds what there is to do.
const ACTIVE: u32 = u32::MAX - 1;

/// An idle queue pair: nothing is to be done for it as long as the guest's index has this value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Quiet {
    /// Guest address of the send queue's producer index.
    pub index_at: u64,
    /// Its value when the queue pair was found idle, or [`NOT_QUIET`], or [`ACTIVE`]. Rings have far fewer slots than these.
    pub index: u32,
}

impl Quiet {
    /// A scan has nothing to do here, whatever the guest's index is.
    #[inline]
    pub fn is_active(self) -> bool {
        self.index == ACTIVE
    }

    /// Where a scan will look for the guest's index.
    #[inline]
    pub fn to_load(self) -> Option<u64> {
        (self.index < ACTIVE).then_some(self.index_at)
    }
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
        self.set(handle, Quiet { index_at, index });
    }

    /// A queue pair is on the active list and nobody waits at it; as [`QuietTable::remember`].
    #[inline]
    pub fn active(&mut self, handle: u32) {
        self.set(handle, Quiet { index_at: 0, index: ACTIVE });
    }

    #[inline]
    fn set(&mut self, handle: u32, quiet: Quiet) {
        let at = handle as usize;
        if at >= self.0.len() {
            self.0.resize(at + 1, UNKNOWN);
        }
        self.0[at] = quiet;
    }
}
