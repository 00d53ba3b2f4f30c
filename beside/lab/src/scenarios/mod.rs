//! The scenarios.

mod block_crash;
mod boot;
mod compare;
mod demo;
mod host;
mod net;

use crate::scenario::Scenario;

/// All of them, in the order of `--list`.
pub const ALL: &[Scenario] = &[
    boot::SCENARIO,
    block_crash::SCENARIO,
    net::SCENARIO,
    compare::SCENARIO,
    demo::SCENARIO,
    host::SCENARIO,
];
