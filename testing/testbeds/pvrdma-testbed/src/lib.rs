//! A guest for tests. It does what Linux's `vmw_pvrdma` and rdma-core's provider do, in the same order, on any guest memory. It checks what
//! those rely on (the order of responses and interrupts, indices within range, handles below the limits), and panics where they would fail.
//!
//! | module | holds |
//! |---|---|
//! | [`host`] | an engine with devices, and counted interrupts |
//! | [`guest`] | probing, commands |
//! | [`objects`] | the guest's objects |
//! | [`queues`] | posting, polling, arming, events |
//! | [`hostile`] | a guest that does everything wrong |
//! | [`watched`] | memory that knows which accesses the device may make |

#![allow(clippy::unwrap_used, clippy::missing_panics_doc)] // It is a test's other half: it panics by design.

pub mod guest;
pub mod host;
pub mod hostile;
pub mod objects;
pub mod queues;
pub mod watched;

pub use guest::{Cq, Guest, Qp, Region, Srq};
pub use host::{Host, Lines};
pub use queues::Post;
