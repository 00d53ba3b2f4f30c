//! Integration tests of `nomad`: one program, since each is linked with everything.
#![allow(clippy::unwrap_used)] // A test that can't go on has failed.

mod explore;
mod hostile;
mod objects;
mod simulation;
mod steps;
mod wire;
