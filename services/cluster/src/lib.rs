//! The cluster service (`causeway cluster serve`): where each VM is and in which epoch, who is connected to whom, which migrations are under way.
//!
//! ```text
//!  hosts' daemons, CLI        "cluster" thread (tokio)         "keeper" thread
//!    │ gRPC, mTLS ───────────▶ service: checks, translates ──▶ Registry: decides, with nomad's Coordinator
//!    │                                                          │ writes one transaction ──▶ Store (redb)
//!    │◀─── answer ──────────────────────────────────────────────┤ then, and only then:
//!    │◀─── Watch, Coordinate: streams ──────────────────────────┘ answers, events, messages
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`registry`] | all decisions; no threads, clocks or sockets |
//! | [`state`] | what it knows, and changes of that |
//! | [`store`] | a database of it: the trait, and one in a file (redb) |
//! | [`refusal`] | why it says no |
//! | `keeper` | the thread that owns the registry; watchers and their log |
//! | `group_requests`, `peer_pauses` | requests of a group's members; how long peers were suspended |
//! | `service`, `messages` | gRPC |
//! | [`server`] | sockets, TLS, metrics; start and end |
//!
//! Several instances that share a store, of which one leads:
//!
//! | module | holds |
//! |---|---|
//! | [`kv`] | what is needed of such a store: transactions with guards, leases |
//! | `etcd`, [`etcd_config`] | etcd is one; with the feature `etcd` |
//! | [`rows`], [`kv_store`] | the state in it; who doesn't lead any more changes nothing |
//! | [`term`], [`election`] | who leads, and until when |
//! | `roles` | what this instance says of that |

pub mod election;
#[cfg(feature = "etcd")]
pub mod etcd;
pub mod etcd_config;
mod group_requests;
mod keeper;
pub mod kv;
pub mod kv_store;
mod messages;
mod metrics;
mod peer_pauses;
pub mod refusal;
pub mod registry;
mod roles;
pub mod rows;
pub mod server;
mod service;
pub mod state;
pub mod store;
mod store_error;
pub mod term;

pub use election::Candidate;
pub use kv_store::KvStore;
pub use server::{Server, ServerConfig, ServerError};
pub use store::{RedbStore, Store};
pub use store_error::StoreError;
