//! Integration tests of `roce`: one program, since each is linked with everything.
#![allow(clippy::unwrap_used)] // A test that can't go on has failed.

mod hostile;
mod packets;
mod simulation;
