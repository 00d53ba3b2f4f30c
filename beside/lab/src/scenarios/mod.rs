//! The scenarios.

mod host;

use crate::scenario::Scenario;

/// All of them, in the order of `--list`.
pub const ALL: &[Scenario] = &[host::SCENARIO];
