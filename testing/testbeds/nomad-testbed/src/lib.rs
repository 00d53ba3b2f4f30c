//! A cluster in memory, as it is deployed: daemons with engines that only count, monitors that outlive them, a service with a coordinator
//! and a disk, and what is in flight between them. Hosts send messages to each other directly. Where two hosts have no direct path, the
//! service passes their messages on, and none while it is away. The model checker delivers what is in flight in any order, the simulator in
//! the order of a virtual clock.
//!
//! | module | holds |
//! |---|---|
//! | [`cluster`] | hosts, coordinator, and what happens when something arrives |
//! | `faults` | what can go wrong |
//! | `operations` | VMs' operations on each other |
//! | [`engine`] | what a host's HCA does, as counters |
//! | [`monitors`] | VMs' monitors: whose guest runs |
//! | [`check`] | what must hold, always and in the end |
//! | [`world`] | a small cluster with budgets of faults, for the model checker |
//! | [`simulate`] | a larger one with random faults in virtual time |

pub mod check;
pub mod cluster;
pub mod engine;
mod faults;
pub mod monitors;
mod operations;
pub mod simulate;
pub mod world;
