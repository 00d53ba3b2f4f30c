//! Integration tests of `machine` in one binary, which saves link time.
#![allow(clippy::unwrap_used)] // A test that can't continue has failed.

mod apic_peer;
mod common;
mod guest_paging;
mod late;
mod local_apics;
mod slots;
mod state;
mod vcpu;
