//! Integration tests of `dsm`: one program, since each is linked with everything.
#![allow(clippy::unwrap_used)] // A test that can't go on has failed.

mod contents;
mod explore;
mod hostile;
mod simulation;
mod versions;
