//! Integration tests of `pvrdma`: one program, since each is linked with everything.
#![allow(clippy::unwrap_used)] // A test that can't go on has failed.

mod end_to_end;
mod hostile;
mod loom;
mod rules;
mod slices;
mod support;
