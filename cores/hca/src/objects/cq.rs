//! A completion queue.

use std::collections::BTreeSet;

use crate::work::Arm;

/// [`Cq::notified_at`] before any notification.
pub(crate) const NOT_NOTIFIED: u64 = u64::MAX;

/// A completion queue and what its consumer wants to be told.
pub(crate) struct Cq<R> {
    pub stamp: u64,
    pub ring: R,
    /// Owner.
    pub context: u32,
    /// Overrun or broken: takes nothing any more.
    pub failed: bool,
    /// Arms reach us exactly; else any completion may be awaited (rule 2 of the engine's notifications).
    pub exact: bool,
    pub arm: Option<Arm>,
    /// Completions pushed so far; less the unconsumed ones it is what the guest consumed, a number that never repeats.
    pub pushed: u64,
    /// Value of `pushed` after the last solicited completion.
    pub solicited: u64,
    /// A look at the consumer is due.
    pub watched: bool,
    /// How much was consumed when the watch began.
    pub watched_at: u64,
    /// How much was consumed when the last notification went out.
    pub notified_at: u64,
    /// Completions were pushed and not published.
    pub unpublished: bool,
    /// A notification waits for room in the sink.
    pub notifying: bool,
    /// Queue pairs that complete here.
    pub users: BTreeSet<u32>,
}
