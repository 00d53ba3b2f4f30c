//! Migration of VMs with open RDMA connections, without I/O: messages and actions of hosts and the coordinator.
//!
//! ```text
//! messages, timers, reports of the engine ─▶ Host::step ─▶ messages, timers, actions of the engine
//! messages, timers, requests ─▶ Coordinator::step ─▶ messages, timers, records to write
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`message`], [`wire`] | messages, and as bytes |
//! | [`host`] | a host: source, destination, and host of peers |
//! | [`coordinator`] | the cluster's service: who may run a VM, and what is decided of a migration |
//! | [`monitor`] | how a VM's monitor reacts to its daemon's answers: when its guest may run |
//! | [`event`] | what goes in and out of a host |
//! | [`fanout`] | one message to many hosts |
//! | [`objects`] | state of an HCA that is copied while it is used |
//! | [`config`], [`names`] | timeouts, limits, injected bugs; identifiers |
//!
//! Published as *Nomad: Migrating OS-bypass Networks in Virtual Machines* (2006), figures 8 and 9. How it works and why it is right:
//! docs/design/migration.md.

pub mod config;
pub mod coordinator;
pub mod event;
pub mod fanout;
pub mod host;
pub mod message;
pub mod monitor;
pub mod names;
pub mod objects;
pub mod wire;

pub use config::{Config, InjectedBug};
pub use coordinator::Coordinator;
pub use event::{Action, Event, Timer};
pub use host::Host;
pub use message::{AbortReason, Body, Message};
pub use names::{Epoch, HostId, Incarnation, MigrationId, Move, Node, Place, VmId};
