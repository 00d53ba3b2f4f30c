//! Neighbours: VMs of one host that read each other's memory. This crate has protocol and state only: no threads, clocks, files or KVM. It
//! doesn't use the standard library, so that a payload program runs the same code that the host tests.
//!
//! ```text
//!  VM a (slot 0)                                    VM b (slot 1)
//!  ┌─────────────┐   window of a, read-only         ┌──────────────────────┐
//!  │ RAM         │ ───────────────────────────────▶ │ base + 0 * stride    │
//!  │ (a buffer)  │                                  │  (the same buffer)   │
//!  └─────────────┘                                  └──────────────────────┘
//!        │ its global address and length                      ▲ checked against a's window
//!        ▼                                                    │
//!  ┌──────────────── segment of the pair, writable by both ───┴───────────┐
//!  │ message ring a → b, completion ring b → a; the same the other way    │
//!  └──────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`window`] | [`Geometry`](window::Geometry): addresses of windows, the same in every VM; checks of addresses |
//! | [`layout`] | the segment of a pair: offsets, header; `include/causeway_neighbour.h` has them for C drivers |
//! | [`words`] | shared memory as 64-bit words |
//! | [`ring`] | one ring: stamps, arming |
//! | [`channel`] | [`Sender`](channel::Sender) and [`Receiver`](channel::Receiver): lists of buffers, and their completions |
//! | [`heartbeat`] | detection of dead and hung members, with time as an input |
//! | [`registry`] | a neighbourhood: members, slots, permission per pair |
//! | [`pause`] | back-off before a pair is connected again |
//! | [`mod@registers`], [`device`] | the PCI function that a guest sees |
//!
//! A neighbour is trusted to be honest and may be broken. All its data is read once and checked. A violation ends the connection
//! ([`channel::Violation`]), never the VM.

#![cfg_attr(not(test), no_std)]

#[cfg(feature = "alloc")]
extern crate alloc;

pub mod channel;
#[cfg(feature = "alloc")]
pub mod device;
mod faults;
pub mod heartbeat;
pub mod layout;
mod part;
#[cfg(feature = "alloc")]
pub mod pause;
#[cfg(feature = "alloc")]
mod permit;
pub mod registers;
#[cfg(feature = "alloc")]
pub mod registry;
pub mod ring;
pub mod window;
pub mod words;
