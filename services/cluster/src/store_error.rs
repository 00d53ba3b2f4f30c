//! Errors of the service's store, and the versions that it knows.

use std::path::PathBuf;

/// Version of the database's tables. A database of version 2, which has no table `owed`, becomes one of this version when it is opened.
pub const DATABASE_VERSION: u64 = 3;
/// The oldest version that is read.
pub const OLDEST_DATABASE_VERSION: u64 = 2;
/// Version of the rows in etcd. Rows of version 1, which has no `owed`, are read as well.
pub const ETCD_VERSION: u64 = 2;

/// Why the database can't be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// It can't be opened.
    #[error("The cluster's database {} can't be opened. Is another `causeway cluster` running, or is it no such database?", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The database's error.
        #[source]
        source: Box<redb::Error>,
    },
    /// Another version.
    #[error(
        "The cluster's database has version {0}, this program knows {OLDEST_DATABASE_VERSION} to {DATABASE_VERSION}: run the release that made it"
    )]
    Version(u64),
    /// Reading or writing failed.
    #[error("The cluster's database can't be {what}. See to its disk; nothing was decided")]
    Broken {
        /// `read` or `written`.
        what: &'static str,
        /// The database's error.
        #[source]
        source: Box<redb::Error>,
    },
    /// Another version, in etcd.
    #[error(
        "The cluster's state in etcd has version {0}, this program knows {known}: run the release that made it",
        known = ETCD_VERSION
    )]
    EtcdVersion(u64),
    /// The store that instances share doesn't do it.
    #[error(transparent)]
    Kv(#[from] crate::kv::KvError),
    /// Another instance leads, or may lead by now.
    #[error("This instance of the cluster service doesn't lead any more, and changed nothing: ask again")]
    NotLeading,
    /// No answer came while this instance led.
    #[error(
        "This instance of the cluster service doesn't lead any more, and doesn't know what became of its last change: ask again"
    )]
    Unknown,
    /// It has something that no ledger has.
    #[error("The cluster's database is damaged: {0}. Restore it from a copy")]
    Damaged(String),
}
