//! What checks the protocol: litmus tests with a reference of x86-TSO, a world for a model checker, a simulator.

pub mod dice;
pub mod litmus;
pub mod sim;
pub mod world;
