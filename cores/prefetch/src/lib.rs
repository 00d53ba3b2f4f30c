//! Prefetch of shared pages, without I/O: requests pages before a vCPU faults on them.
//!
//! | prefetcher | predicts |
//! |---|---|
//! | `streams` | the next pages, for a vCPU that advances page by page in one or more places, such as matrix rows |
//! | `spatial` | the pages of a region that a vCPU requested in one round, in any order, at the start of the next round |
//! | `markov` | a batch of `spatial` that a vCPU starts soon after a fault |
//!
//! [`NodePrefetcher`] has these for each vCPU of a node, and turns their predictions into requests. Each request occupies a *context*, which
//! the coherence protocol treats as one more vCPU of the node, whose instruction retires as soon as the page arrives. So messages, ages and
//! holds are those of ordinary faults, and a page that was fetched too early or in vain is granted away like any other.
//!
//! ```text
//!   fault ──▶ NodePrefetcher::fault ──▶ next() ──▶ a fault of the context ──▶ protocol
//!                  ▲                                                            │
//!                  └───────────────── arrived(context) ◀──── the page is here ──┘
//! ```
//!
//! The monitor drives it under the lock of the node (`monitor::dsm`), the simulator and the model checker in the same order. Nothing here
//! blocks, allocates without bound or reads a clock.

mod markov;
mod node;
mod prefetcher;
mod spatial;
mod streams;

pub use node::{MAX_PREFETCH_CONTEXTS, NodePrefetcher, PageStates, PrefetchRequest};

/// Number of a page in guest memory.
pub type Page = u64;

/// A page and whether it is written.
pub type PageRequest = (Page, bool);
