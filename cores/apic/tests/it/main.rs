//! Integration tests of `apic`: one program, since each is linked with everything.
#![allow(clippy::unwrap_used)] // A test that can't go on has failed.

mod common;
mod delivery;
mod invariants;
mod saved;
mod threads;
