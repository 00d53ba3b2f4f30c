//! The interface of the key-value store that several instances of the service share: guarded transactions, leases, and
//! waiting for the deletion of a key. etcd implements it (`etcd::Etcd`, with the feature `etcd`).
//! `FakeKv` of the crate `cluster-testbed` implements it for tests, with the same semantics.
//!
//! Revisions are etcd's: one counter for the whole store. A key has the revision that created it, and the revision of
//! its last change. Both are 0 for a key that doesn't exist.

use std::time::Duration;

/// Maximum number of operations of one transaction. etcd's default limit is 128 (`--max-txn-ops`).
pub const MAX_OPERATIONS: usize = 100;
/// Maximum size of all keys and values of one transaction, in bytes. etcd's default limit is 1.5 MiB
/// (`--max-request-bytes`).
pub const MAX_BYTES: usize = 512 << 10;

/// A key that exists, with its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The key, with the instance's prefix.
    pub key: String,
    /// The stored bytes.
    pub value: Vec<u8>,
    /// The revision that created the key.
    pub created: i64,
    /// The revision of the key's last change.
    pub modified: i64,
}

/// A condition of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Guard {
    /// The key was created by this revision; 0: the key doesn't exist.
    Created(String, i64),
    /// The key's last change is this revision; 0: the key doesn't exist.
    Modified(String, i64),
}

/// A change. A transaction changes a key only once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// Stores a value. A key with a lease is deleted when the lease ends.
    Put {
        /// The key, created if it doesn't exist.
        key: String,
        /// The new value.
        value: Vec<u8>,
        /// The lease's id; `None`: the key exists until it is deleted.
        lease: Option<i64>,
    },
    /// Deletes a key, if it exists.
    Delete(String),
    /// Deletes all keys that begin with a prefix.
    DeleteAll(String),
}

impl Operation {
    /// Stores a value without a lease.
    #[must_use]
    pub fn put(key: String, value: Vec<u8>) -> Self {
        Self::Put { key, value, lease: None }
    }

    /// Size of its key and value, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::Put { key, value, .. } => key.len() + value.len(),
            Self::Delete(key) | Self::DeleteAll(key) => key.len(),
        }
    }
}

/// A granted lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// The store's identifier of it.
    pub id: i64,
    /// Time to live from its grant or renewal, at least as long as requested.
    pub lasts: Duration,
}

/// Why a request failed, or has an unknown outcome.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KvError {
    /// No response: the request may have been carried out, or may be carried out later.
    #[error("etcd at {place} doesn't answer ({reason})")]
    Away {
        /// The store's addresses.
        place: String,
        /// The client's error.
        reason: String,
    },
    /// The store refused the request and doesn't carry it out.
    #[error("etcd at {place} refuses: {reason}")]
    Refused {
        /// The store's addresses.
        place: String,
        /// The store's error message.
        reason: String,
    },
}

/// A shared key-value store. All calls block until the response, for at most `within`. Implementations are thread-safe.
pub trait Kv: std::fmt::Debug + Send + Sync {
    /// The store's addresses, for messages to users.
    fn place(&self) -> String;

    /// Grants a lease that lasts at least `lasts`, unless it is renewed.
    ///
    /// # Errors
    /// When no response comes in time, or the store refuses.
    fn grant(&self, lasts: Duration, within: Duration) -> Result<Lease, KvError>;

    /// Renews a lease, and returns its time to live. `None`: the lease has ended.
    ///
    /// # Errors
    /// As [`Kv::grant`].
    fn renew(&self, lease: i64, within: Duration) -> Result<Option<Duration>, KvError>;

    /// Ends a lease and deletes its keys.
    ///
    /// # Errors
    /// As [`Kv::grant`].
    fn revoke(&self, lease: i64, within: Duration) -> Result<(), KvError>;

    /// Reads a key. The read is linearizable.
    ///
    /// # Errors
    /// As [`Kv::grant`].
    fn get(&self, key: &str, within: Duration) -> Result<Option<Entry>, KvError>;

    /// Reads all keys with a prefix, in order, as of one revision. `within` limits each page's request.
    ///
    /// # Errors
    /// As [`Kv::grant`].
    fn range(&self, prefix: &str, within: Duration) -> Result<Vec<Entry>, KvError>;

    /// Carries out all operations if all guards hold. Returns the revision once the changes are on stable storage.
    /// `None`: a guard doesn't hold, and nothing has changed.
    ///
    /// # Errors
    /// As [`Kv::grant`]. After [`KvError::Away`] the transaction may have been carried out, or may be later.
    fn transact(
        &self,
        guards: &[Guard],
        operations: &[Operation],
        within: Duration,
    ) -> Result<Option<i64>, KvError>;

    /// Waits until a key that existed at revision `since` is deleted, or `within` has passed. Returns whether it was
    /// deleted.
    ///
    /// # Errors
    /// As [`Kv::grant`].
    fn wait_gone(&self, key: &str, since: i64, within: Duration) -> Result<bool, KvError>;
}
