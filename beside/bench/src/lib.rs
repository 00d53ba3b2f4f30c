//! Benchmarks against peers, natively: `make bench`, or `cargo run --release -p bench -- [group...]`.
//!
//! A group measures figures, each beside its peer: the same work by other means, in the same run, the two
//! taking turns so that what disturbs one disturbs the other. A group leaves `target/bench/<group>.json`.
//!
//! | module | what it holds |
//! |---|---|
//! | `programs` | builds the payload programs |
//! | `host_daemon` | `causeway host` as a process of its own |
//! | `measuring_vm` | a VM that runs measurements one by one |
//! | `peers` | the same measurements in host threads |
//! | `outside` | peers that are programs of others, on this host or between network namespaces |
//! | `figures` | samples, medians, ratios; the JSON and the table |
//! | `results` | what a run leaves: JSON, and tables for documents |
//! | `conditions` | what machine it was |
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
