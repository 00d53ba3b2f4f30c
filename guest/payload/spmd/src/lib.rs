//! One program, many vCPUs: who takes part ([`Team`]), how they wait for each other ([`Barrier`], [`TicketLock`], [`QueueLock`]), what
//! memory they share ([`Heap`], [`Shared`]), what they were told ([`Settings`]) and what comes out ([`Outcome`]).
//!
//! Nothing here knows of nodes but [`Team::node_of`]: it is plain x86 code on ordinary memory, which also runs on threads of a host, and is
//! tested so. The contract with the monitor is in `guest/payload/README.md`.

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

/// Bytes of a page: what vCPUs write apart lies on pages of its own.
pub const PAGE: usize = 4096;

/// Something on a page of its own.
#[derive(Debug, Default)]
#[repr(align(4096))]
pub struct OwnPage<T>(pub T);
