//! Integration tests of `causeway`. They form one binary, since each binary links everything.
#![allow(clippy::unwrap_used)] // A test that can't go on has failed.

mod cli;
mod nodes;
mod nodes_contended;
mod own_faults;
mod payload_programs;
mod small_guests;
