//! Integration tests of `vfio-user-protocol`. They form one binary, since each binary links everything.
#![allow(clippy::unwrap_used)] // A test that can't go on has failed.

mod conversation;
mod hostile;
mod interoperability;
mod migration;
