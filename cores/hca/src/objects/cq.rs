//! A completion queue.

use std::collections::BTreeSet;

use crate::work::Arm;

/// [`Cq::notified_at`] before any notification.
pub(crate) const NOT_NOTIFIED: u64 = u64::MAX;

/// A completion queue, and the events that its consumer has armed.
pub(crate) struct Cq<R> {
    pub stamp: u64,
    pub ring: R,
    /// Handle of the user context that owns it.
    pub context: u32,
    /// Overrun or broken: accepts no completions any more.
    pub failed: bool,
    /// Arms reach the engine exactly. Otherwise any completion may be awaited (see [`crate::engine`], completion events).
    pub exact: bool,
    pub arm: Option<Arm>,
    /// Number of completions pushed. Less the unconsumed ones, it is the number that the guest has consumed, which never repeats.
    pub pushed: u64,
    /// Value of `pushed` after the last solicited completion.
    pub solicited: u64,
    /// A check of the consumer is scheduled.
    pub watched: bool,
    /// Number consumed when the watch began.
    pub watched_at: u64,
    /// Number consumed when the last event was sent.
    pub notified_at: u64,
    /// Completions were pushed and are not published yet.
    pub unpublished: bool,
    /// An event waits for room in the sink.
    pub notifying: bool,
    /// Queue pairs that complete here.
    pub users: BTreeSet<u32>,
}
