//! Integration tests of `pvrdma`: one binary, since linking takes most of the time.
#![allow(clippy::unwrap_used)] // A test that can't continue has failed.

mod device;
mod end_to_end;
mod hostile;
mod loom;
mod rules;
mod slices;
mod support;
