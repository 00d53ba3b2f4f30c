//! What checks the protocol: litmus tests with a reference of x86-TSO, and a world for a model checker.

pub mod litmus;
pub mod world;
