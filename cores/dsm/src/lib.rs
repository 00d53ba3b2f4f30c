//! Distributed shared memory, sans-IO: one guest memory on several nodes, in which the guest sees x86-TSO.
//!
//! Inputs are faults, messages and the time; outputs are messages and actions for vCPUs. A monitor, a model checker and a simulator of 64
//! nodes run the same code.
//!
//! ```text
//! Fault, Operate, Retired ─▶ ┌──────┐ ─▶ Resume, Trap, Completed, Kick      vCPUs
//! Message ─────────────────▶ │ Node │ ─▶ Send                               links
//! Timer ───────────────────▶ └──────┘ ─▶ Pages: protect, read, write        guest memory
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`node`] | the protocol: home, owner, copies, sequencer |
//! | [`message`], [`wire`] | messages and their encoding |
//! | [`event`] | events that enter a node, actions that leave it |
//! | [`operation`] | stores and atomics on write-update pages |
//! | [`payload`] | contents of pages in messages |
//! | [`pages`] | the interface to guest memory |
//! | [`config`] | policies: ours, plain Ivy, and those of two published systems |
//! | [`counters`], [`names`] | counters; nodes, sets, modes, ages |
//!
//! Write-invalidate pages follow Li and Hudak, *Memory Coherence in Shared Virtual Memory Systems* (1989), with fixed distributed managers.
//! Write-update pages follow Attiya and Welch, *Sequential Consistency versus Linearizability* (1994), the fast-read algorithm.
//! Design and correctness: docs/design/dsm.md.

pub mod config;
pub mod counters;
pub mod event;
pub mod message;
pub mod names;
pub mod node;
pub mod operation;
pub mod pages;
pub mod payload;
pub mod trace;
pub mod wire;

pub use config::{Config, ConfigError, Order, Plant, Policy};
pub use counters::Counters;
pub use event::{Action, Event, Fault};
pub use message::{Body, Message};
pub use names::{Access, Mode, NodeId, NodeSet, Page, Priority, Vcpu};
pub use node::Node;
pub use node::saved::SavedNode;
pub use operation::{Atomic, Operation};
pub use pages::Pages;
pub use payload::Payload;
