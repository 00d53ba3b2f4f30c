//! Links by RDMA: SENDs of a reliable connection over RoCE version 2, on the host's RDMA device (hardware, or Linux's rdma_rxe).
//!
//! ```text
//!  node 0                                                                node 1
//!    │ ◀───────────── TCP: Hello, Hello, offer, offer, ready, ready ───────▶ │   then idle: it closes when either process ends
//!  send ─ cut ─▶ send buffers ══ SEND ═▶ receive buffers ─▶ arrived ─▶ reader    the device retransmits lost packets
//!    ▲                                        │ reposted
//!    └────────── credits, with messages or alone ◀───────────────────────┘
//! ```
//!
//! Each SEND consumes a receive buffer. Without one, the receiving device refuses it ("receiver not ready") and the sender waits. So each
//! side reports its number of buffers and how many it has reposted, and no side sends without a buffer that is known to be free.
//!
//! | module | contents |
//! |---|---|
//! | `flow` | flow control: cutting, credits; no devices or threads |
//! | `handshake` | the exchange of queue pairs and buffers |
//! | `device`, `queue_pair` | the open device; a queue pair with its completion queues and buffers |
//! | `pair` | a connected queue pair: sends, waits, and its end |

mod device;
mod flow;
mod handshake;
mod pair;
mod queue_pair;

pub use device::NoDevice;
pub(super) use device::{Device, address_of};
pub(super) use handshake::connect;
pub(super) use pair::Pair;
