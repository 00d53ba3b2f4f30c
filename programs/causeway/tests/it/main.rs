//! Integration tests of `causeway`: one program, since each is linked with everything.
#![allow(clippy::unwrap_used)] // A test that can't go on has failed.

mod cli;
mod nodes;
mod nodes_contended;
mod own_faults;
mod payload_programs;
mod small_guests;
