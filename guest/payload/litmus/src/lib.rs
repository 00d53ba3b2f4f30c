//! Litmus tests as machine code: the table that the host writes into the file of the program `litmus` ([`table`]), and the loop that
//! runs a test many times ([`runner`]). The host's crate `litmus` writes the code and judges outcomes.

#![cfg_attr(not(test), no_std)]

mod clock;
pub mod runner;
pub mod table;

/// Limit of a test's threads.
pub const MOST_THREADS: usize = 4;
/// Limit of a test's locations.
pub const MOST_LOCATIONS: usize = 4;
/// Limit of a thread's observed registers.
pub const MOST_OBSERVED: usize = 4;
