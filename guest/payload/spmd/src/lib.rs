//! SPMD programs: the participants ([`Team`]), synchronization ([`Barrier`], [`TicketLock`], [`QueueLock`]), shared memory ([`Heap`],
//! [`Shared`]), arguments ([`Settings`]) and results ([`Outcome`]).
//!
//! Only [`Team::node_of`] refers to nodes: this is plain x86 code on ordinary memory. It also runs, and is tested, on threads of a
//! host. The contract with the monitor is in `guest/payload/README.md`.

#![cfg_attr(not(test), no_std)]

pub mod barrier;
pub mod heap;
pub mod locks;
pub mod outcome;
pub mod random;
pub mod settings;
pub mod sums;
pub mod team;

pub use barrier::Barrier;
pub use heap::{Heap, Shared};
pub use locks::{QueueLock, QueuePlace, TicketLock};
pub use outcome::{Figure, Outcome};
pub use random::Random;
pub use settings::{Refused, Settings};
pub use sums::Sums;
pub use team::{Machine, Team};

/// Size of a page in bytes. Data that different vCPUs write separately is on separate pages.
pub const PAGE: usize = 4096;

/// A value on a page of its own.
#[derive(Debug, Default)]
#[repr(align(4096))]
pub struct OwnPage<T>(pub T);
