//! Distributed shared memory without I/O: one guest memory for several hosts, in which a guest sees x86-TSO.
//!
//! Faults, messages and the time come in; messages and what virtual CPUs may do come out. The same code runs in a monitor, under a
//! model checker and in a simulator of 64 nodes.
//!
//! ```text
//! Fault, Operate, Retired ─▶ ┌──────┐ ─▶ Resume, Trap, Completed, Kick      virtual CPUs
//! Message ─────────────────▶ │ Node │ ─▶ Send                               links
//! Timer ───────────────────▶ └──────┘ ─▶ Pages: protect, read, write        guest memory
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`node`] | the protocol: home, owner, copies, sequencer |
//! | [`message`], [`wire`] | messages, and as bytes |
//! | [`event`] | what goes in and comes out |
//! | [`operation`] | stores and atomics on pages that are kept by updates |
//! | [`payload`] | contents of pages in messages |
//! | [`pages`] | what is asked of guest memory |
//! | [`config`] | policies: ours, plain Ivy, and those of two published systems |
//! | [`counters`], [`names`] | counters; nodes, sets, modes, ages |
//! | [`testing`] | the model checker's world, the TSO reference, the simulator |
//!
//! Facts: spec dsm. Pages: Li and Hudak, *Memory Coherence in Shared Virtual Memory Systems* (1989), fixed distributed managers;
//! updates: Attiya and Welch, *Sequential Consistency versus Linearizability* (1994), the fast-read algorithm.
//! How it works and why it is right: docs/design/dsm.md.

pub mod config;
pub mod counters;
pub mod event;
pub mod message;
pub mod names;
pub mod node;
pub mod operation;
pub mod pages;
pub mod payload;
pub mod testing;
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
