//! Integration tests of `causeway`. They form one binary, since each binary links everything.
#![allow(clippy::unwrap_used)] // A failed unwrap fails the test.

mod cli;
mod cluster;
mod guests_in_doubt;
mod moved_guests;
mod nodes;
mod nodes_contended;
mod own_faults;
mod payload_programs;
mod small_guests;
mod small_guests_interrupts;
