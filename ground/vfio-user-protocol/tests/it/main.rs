//! Integration tests of `vfio-user-protocol`: one program, since each is linked with everything.
#![allow(clippy::unwrap_used)] // A test that can't go on has failed.

mod conversation;
mod hostile;
mod interoperability;
mod migration;
