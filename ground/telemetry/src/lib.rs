//! Counters, rate-limited logging of what guests trigger, tracing set-up, panics that end a device only.

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
