//! The daemon of a host (`causeway host`): it serves RDMA NICs to the VMs' monitors.
//!
//! ```text
//!  monitor                     control thread            engine thread
//!    │ AttachNic ── gRPC ──────▶ registry                 all RDMA state of the host
//!    │◀──────── two sockets ────                            ▲            ▲
//!    │ vfio-user, function 1 ──▶ its thread ── calls ───────┘            │ doorbells in memory
//!    │ vfio-user, function 0 ──▶ its thread ── calls ──▶ segment thread  │ (guest's stores)
//!    ▼                                                   Ethernet        │
//!  guest ────────────────────────────────────────────────────────────────┘
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`daemon`] | [`Daemon`]: start and end |
//! | [`registry`] | NICs and their owners, released when their monitors disconnect |
//! | [`function`] | the two PCI functions of a NIC as vfio-user devices |
//! | [`engine`] | the thread that owns all RDMA state; doorbell modes |
//! | [`segments`] | named networks, taps |
//! | [`cluster`] | the directory of a host whose cluster has a service |
//! | [`peer_messages`] | messages of the migration protocol between daemons, by direct connections |
//! | [`neighbours`] | VMs that read each other's memory: permissions, descriptors, heartbeats |
//! | [`card`] | one card for several VMs: a daemon of its own (`causeway card`) |
//! | [`access`], [`identity`], `nic` | authorization; names and addresses; identities of NICs |
//! | [`listener`], [`remembered`] | sockets; state that outlives the daemon |
//! | [`migration`] | the state of a migrating HCA, and the thread that runs migrations with the cluster service and other daemons |
//! | [`sandbox`] | confinement of the daemon |
//! | `service`, `server`, `inspect`, `hw_counters` | gRPC, metrics, the live tree |

pub mod access;
pub mod card;
pub mod cluster;
pub mod daemon;
pub mod engine;
pub mod function;
mod hardening;
mod hw_counters;
pub mod identity;
mod inspect;
pub mod listener;
mod metrics_server;
pub mod migration;
pub mod neighbours;
mod nic;
pub mod peer_messages;
pub mod registry;
pub mod remembered;
pub mod sandbox;
pub mod segments;
mod server;
mod service;
pub mod transport;
pub mod uar;

pub use daemon::{Daemon, DaemonConfig, DaemonError, DirectorySource, FabricConfig};
