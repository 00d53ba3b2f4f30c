//! Counters, rate-limited logging of guest-triggered events, set-up of tracing, and containment of panics.

pub mod containment;
pub mod counter;
pub mod guest_log;
pub mod logging;
pub mod metrics;

pub use counter::Counter;

/// For this crate's macros only.
#[doc(hidden)]
pub mod reexport {
    pub use tracing;
}
