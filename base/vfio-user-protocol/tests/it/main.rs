//! Integration tests of `vfio-user-protocol`. They form one binary, since each binary links everything.
#![allow(clippy::unwrap_used)] // A failed unwrap fails the test.

mod conversation;
mod hostile;
mod interoperability;
mod migration;
