//! Benchmarks against peers, natively: `make bench`, or `cargo run --release -p bench -- [group...]`.
//!
//! A group measures figures, each with its peer: the same work by other means, in the same run. The two take turns, so that a
//! disturbance affects both. A group writes `target/bench/<group>.json`.
//!
//! | module | what it holds |
//! |---|---|
//! | `programs` | builds the payload programs |
//! | `host_daemon` | `causeway host` as a process of its own |
//! | `measuring_vm` | a VM that runs measurements one by one |
//! | `peers` | the same measurements in host threads |
//! | `outside` | peers that are programs of others, on this host or between network namespaces |
//! | `figures` | samples, medians, ratios; the JSON and the table |
//! | `results` | a run's output: JSON, and tables for documents |
//! | `conditions` | the machine and its other load |
//! | `groups` | the groups themselves |

pub mod conditions;
pub mod figures;
pub mod groups;
pub mod host_daemon;
pub mod measuring_vm;
pub mod outside;
pub mod peers;
pub mod programs;
pub mod results;
