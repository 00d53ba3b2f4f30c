//! Integration tests of `bench`. They form one binary, since each binary links everything.
#![allow(clippy::unwrap_used)] // A failed unwrap fails the test.

mod dsm_litmus;
mod dsm_replay;
mod litmus;
mod neighbours;
mod payload;
mod programs;
mod rdma;
mod spmd;
