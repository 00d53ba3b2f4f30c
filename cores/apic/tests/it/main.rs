//! Integration tests of `apic` in one binary, which saves link time.
#![allow(clippy::unwrap_used)] // A test that can't continue has failed.

mod common;
mod delivery;
mod invariants;
mod saved;
mod threads;
