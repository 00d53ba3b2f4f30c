//! RoCEv2 without I/O: the protocol of reliable and unreliable connections and of datagrams, for a software HCA.
//!
//! The caller passes in packets and the time, and gets packets and completions. A [`Connection`] keeps no payload and never allocates per
//! packet. It gathers bytes from a [`Memory`] whenever it sends them, and places received bytes there at once. Time is a number of
//! nanoseconds from any monotonic clock.
//!
//! ```text
//! post(request) ──▶ ┌────────────┐ ──▶ transmit(now, memory, output)     packets from BTH to pad
//! receive(packet) ─▶│ Connection │ ──▶ Memory::complete, complete_receive, event
//! expired(now) ───▶ └────────────┘ ──▶ timeout(): when to call expired, then transmit
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`packet`] | BTH to pad: parsing and building |
//! | [`frame`] | whole frames: Ethernet, IP, UDP, ICRC |
//! | [`icrc`] | the invariant CRC |
//! | [`connection`] | RC and UC: requester, responder, save and restore |
//! | [`datagram`] | UD |
//! | [`memory`] | what a connection's owner implements |
//! | [`request`], [`status`] | requests and their completion status |
//! | [`config`], [`timing`], [`congestion`] | attributes, timer codes, rate control |
//! | [`output`] | where packets are written |
//! | [`saved`] | saved state |
//! | [`counters`] | counters under Linux's names |
//!
//! Sources: InfiniBand Architecture Specification (IBTA), volume 1, chapters 9 and 12; annex A17 for RoCEv2; docs/design/specs/rocev2.md.

pub mod config;
pub mod congestion;
pub mod connection;
pub mod counters;
pub mod datagram;
pub mod frame;
pub mod icrc;
pub mod memory;
pub mod output;
pub mod packet;
pub mod psn;
pub mod request;
pub mod saved;
pub mod status;
pub mod timing;

pub use config::{Config, Mtu, Reliability};
pub use connection::{Arrival, Connection, Fate, SendAttributes, State};
pub use counters::Counters;
pub use memory::{Atomic, Memory, Received, ReceivedOperation, Remote};
pub use output::{Batch, Output};
pub use packet::Packet;
pub use request::{Kind, PostError, Request};
pub use status::{Event, NoReceive, Refusal, Status, Unmoved};
