//! Integration tests of `roce`: one binary, since linking takes most of the time.
#![allow(clippy::unwrap_used)] // A test that can't continue has failed.

mod hostile;
mod packets;
mod simulation;
