//! Integration tests of `pci` in one binary, which saves link time.
#![allow(clippy::unwrap_used)] // A test that can't continue has failed.

mod intx;
mod msix;
mod root;
