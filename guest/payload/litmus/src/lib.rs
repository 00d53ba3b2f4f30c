//! Litmus tests as machine code: the table that the host puts into the file of the program `litmus` ([`table`]), and what runs a test many
//! times ([`runner`]). Who writes the code and judges outcomes is the host's crate `litmus`; nothing here knows what is allowed.

#![cfg_attr(not(test), no_std)]

mod clock;
pub mod runner;
pub mod table;

/// Most threads of a test.
pub const MOST_THREADS: usize = 4;
/// Most locations of a test.
pub const MOST_LOCATIONS: usize = 4;
/// Most registers that a thread shows.
pub const MOST_OBSERVED: usize = 4;
