//! Test tools for `dsm`: litmus tests with a reference of x86-TSO, the model checker's world, a simulator.

pub mod dice;
pub mod litmus;
pub mod sim;
pub mod world;
