//! Integration tests of `vmxnet3` in one binary, which saves link time.
#![allow(clippy::unwrap_used)] // A test that can't continue has failed.

mod runner;
mod saved;
mod segment;
