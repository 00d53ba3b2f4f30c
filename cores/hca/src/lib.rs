//! A host channel adapter without I/O.
//!
//! The traits of [`provider`] hide the guest's ABI: how work requests are fetched and completions delivered. [`dma::Dma`] hides guest
//! memory. The caller passes the time in, as a number of nanoseconds.
//!
//! | module | holds |
//! |---|---|
//! | [`names`] | handles, queue pair numbers, keys, GIDs: names inside one VM |
//! | [`work`] | work requests and completions, as copies that a guest can't change |
//! | [`provider`] | what a guest ABI implements, and the events that it receives |
//! | [`attributes`] | queue pair attributes and states |
//! | [`engine`] | verbs, and the execution of work requests |
//! | [`limits`] | capabilities of a device, quotas and rates of its VM |
//! | [`counters`] | counters, under Linux's names |
//! | [`error`] | why a verb fails |
//! | [`saved`] | the saved state of a device's objects |
//! | `memory` | regions, keys, protection, translation |
//! | `objects` | the state of queue pairs, completion queues, devices |
//! | `local` | the transport between queue pairs of this engine |
//! | [`remote`], `transport` | the interface to transports, which reach other engines; what the engine passes to them |
//!
//! A guest without an ABI, for tests and benchmarks, is in the crate `hca-testbed`.

pub mod attributes;
pub mod counters;
pub mod engine;
pub mod error;
pub mod limits;
mod local;
mod memory;
pub mod names;
mod objects;
pub mod provider;
pub mod remote;
pub mod saved;
mod table;
mod transport;
pub mod work;

pub use counters::{DeviceCounters, QpCounters, QpReport};
pub use engine::{
    DeviceConfig, DeviceReport, Engine, EngineConfig, MrInfo, MrInit, ObjectCounts, Progress, QpInfo, QpInit,
    SrqAttributes, SrqInit, Teardown,
};
pub use error::VerbsError;
pub use limits::{Capabilities, Limits};
pub use memory::{MrPages, NotAPage};
