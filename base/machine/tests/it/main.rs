//! Integration tests of `machine` in one binary, which saves link time.
#![allow(clippy::unwrap_used)] // A test that can't continue has failed.

mod apic_peer;
mod coalesced;
mod common;
mod guest_paging;
mod local_apics;
mod slots;
mod state;
mod vcpu;
