//! The cluster service, begun: what the coordinator of migrations must not forget, in a database.
//!
//! | module | holds |
//! |---|---|
//! | [`store`] | the ledger in a file: one transaction per record |
//!
//! The protocol is in the crate `nomad`. No service answers yet: docs/migration.md.

pub mod store;

pub use store::{Store, StoreError};
