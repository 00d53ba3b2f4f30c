//! A host channel adapter without I/O.
//!
//! The guest's ABI is behind the traits of [`provider`]: how work requests are fetched and completions delivered.
//! Guest memory is behind [`dma::Dma`]. Time is a number of nanoseconds that the caller passes in.
//!
//! | module | holds |
//! |---|---|
//! | [`names`] | handles, queue pair numbers, keys, GIDs: names inside one VM |
//! | [`work`] | work requests and completions, as copies that no guest can change any more |
//! | [`provider`] | what a guest ABI implements, and what it is told |
//! | [`attributes`] | queue pair attributes and states |
//! | [`engine`] | verbs, and the execution of work requests |
//! | [`limits`] | what a device offers, and what its VM may use |
//! | [`counters`] | counters, named as Linux names them |
//! | [`error`] | why a verb fails |
//! | [`saved`] | the saved state of a device's objects |
//! | [`testing`] | a guest without an ABI, for tests and benchmarks |
//! | `memory` | regions, keys, protection, translation |
//! | `objects` | the state of queue pairs, completion queues, devices |
//! | `local` | the transport between queue pairs of this engine |
//! | [`remote`] | what transports to other engines need of this one |

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
pub mod testing;
pub mod work;

pub use counters::{DeviceCounters, QpCounters, QpReport};
pub use engine::{
    DeviceConfig, DeviceReport, Engine, EngineConfig, MrInfo, MrInit, ObjectCounts, Progress, QpInfo, QpInit,
    SrqAttributes, SrqInit, Teardown,
};
pub use error::VerbsError;
pub use limits::{Capabilities, Limits};
pub use memory::{MrPages, NotAPage};
