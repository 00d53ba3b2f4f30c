//! Integration tests of `roce`: one binary, since linking takes most of the time.
#![allow(clippy::unwrap_used)] // A test that can't go on has failed.

mod hostile;
mod packets;
mod simulation;
