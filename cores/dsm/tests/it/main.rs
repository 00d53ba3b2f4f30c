//! Integration tests of `dsm`, in one binary, since each is linked with the whole crate.
#![allow(clippy::unwrap_used)] // A test that can't continue has failed.

mod contents;
mod explore;
mod hostile;
mod simulation;
mod versions;
