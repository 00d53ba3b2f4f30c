//! The remembered state of idle queue pairs, in a compact table: a scan of thousands reads only this and the guests' indices.

/// [`Quiet::index`] of a queue pair that a scan has to check itself.
const NOT_QUIET: u32 = u32::MAX;

/// [`Quiet::index`] of a queue pair on the active list, for which no requester waits: its turn finds the work.
const ACTIVE: u32 = u32::MAX - 1;

/// An idle queue pair: it has no work while the guest's index has this value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Quiet {
    /// Guest address of the send queue's producer index.
    pub index_at: u64,
    /// Its value when the queue pair was found idle, or [`NOT_QUIET`], or [`ACTIVE`]. Rings have far fewer slots than these values.
    pub index: u32,
}

impl Quiet {
    /// Whether a scan can skip it, whatever the guest's index is.
    #[inline]
    pub fn is_active(self) -> bool {
        self.index == ACTIVE
    }

    /// Address of the guest's index for a scan to load.
    #[inline]
    pub fn to_load(self) -> Option<u64> {
        (self.index < ACTIVE).then_some(self.index_at)
    }
}

const UNKNOWN: Quiet = Quiet { index_at: 0, index: NOT_QUIET };

const _: () = assert!(size_of::<Quiet>() == 16);

/// By queue pair handle; grows to the highest remembered handle.
#[derive(Debug, Default)]
pub(crate) struct QuietTable(Vec<Quiet>);

impl QuietTable {
    /// The remembered state of a queue pair.
    #[inline]
    pub fn of(&self, handle: u32) -> Quiet {
        self.0.get(handle as usize).copied().unwrap_or(UNKNOWN)
    }

    /// Forgets a queue pair. Call it after any change of what the queue pair waits for, its state, or its ring.
    #[inline]
    pub fn forget(&mut self, handle: u32) {
        if let Some(quiet) = self.0.get_mut(handle as usize) {
            quiet.index = NOT_QUIET;
        }
    }

    /// Remembers that a queue pair is idle. `handle` is that of a live one, so the table stays below the device's limit.
    pub fn remember(&mut self, handle: u32, index_at: u64, index: u32) {
        self.set(handle, Quiet { index_at, index });
    }

    /// Remembers that a queue pair is on the active list and no requester waits for it; as [`QuietTable::remember`].
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
