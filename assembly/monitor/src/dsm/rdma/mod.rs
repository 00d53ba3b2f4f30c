//! Links by RDMA: frames go by SENDs of a reliable connection of the host's RDMA device (hardware, or Linux's rdma_rxe), with RoCE version 2.
//!
//! ```text
//!  node 0                                                                node 1
//!    │ ◀───────────── TCP: Hello, Hello, offer, offer, ready, ready ───────▶ │   then idle: it closes when either process ends
//!  send ─ cut ─▶ send buffers ══ SEND ═▶ receive buffers ─▶ arrived ─▶ reader    the device retries what is lost
//!    ▲                                        │ posted again
//!    └────────── credits, with what goes the other way, or alone ◀───────┘
//! ```
//!
//! A SEND takes a receive buffer, and whoever sends without one there makes the other device refuse it ("receiver not ready") and wait. So
//! each side says how many buffers it has, and how many it has posted again; nobody sends to one that may not be there.
//!
//! | module | holds |
//! |---|---|
//! | `flow` | what is sent when: cutting, credits. Neither devices nor threads |
//! | `handshake` | what both sides say before |
//! | `device`, `queue_pair` | the device, opened; a queue pair, its completions and buffers |
//! | `pair` | who sends, who waits for it, what ends it |

mod device;
mod flow;
mod handshake;
mod pair;
mod queue_pair;

pub use device::NoDevice;
pub(super) use device::{Device, address_of};
pub(super) use handshake::connect;
pub(super) use pair::Pair;
