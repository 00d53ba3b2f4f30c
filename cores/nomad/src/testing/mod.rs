//! A cluster in memory: hosts with engines that only count, a coordinator with a disk, and whatever is under way between them. The model
//! checker takes what is under way in any order, the simulator in the order of a virtual clock.
//!
//! | module | holds |
//! |---|---|
//! | [`cluster`] | hosts, coordinator, and what happens when something arrives |
//! | [`engine`] | what a host's HCA and monitors do, as counters |
//! | [`check`] | what must hold, always and in the end |
//! | [`world`] | a small cluster with budgets of faults, for the model checker |
//! | [`simulate`] | a larger one with random faults in virtual time |

pub mod check;
pub mod cluster;
pub mod dice;
pub mod engine;
pub mod simulate;
pub mod world;
