//! What the service needs of a store of keys and values that several instances share: transactions with guards, leases, and waiting for a key
//! to go. etcd has it (`etcd::Etcd`, with the feature `etcd`), and [`crate::testing::FakeKv`] for tests, with the same meaning.
//!
//! Revisions are etcd's: one counter for the whole store; a key has the revision that made it, and that of its last change. A key that isn't
//! there has 0 for both.

use std::time::Duration;

/// Operations of one transaction at most: etcd's own limit is 128 (`--max-txn-ops`).
pub const MAX_OPERATIONS: usize = 100;
/// Bytes of keys and values of one transaction at most: etcd's own limit is 1.5 MiB (`--max-request-bytes`).
pub const MAX_BYTES: usize = 512 << 10;

/// A key that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its key.
    pub key: String,
    /// What it holds.
    pub value: Vec<u8>,
    /// The revision that made it.
    pub created: i64,
    /// The revision of its last change.
    pub modified: i64,
}

/// What must hold for a transaction to be carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Guard {
    /// A key was made by a revision; 0: it isn't there.
    Created(String, i64),
    /// A key was last changed by a revision; 0: it isn't there.
    Modified(String, i64),
}

/// A change. One transaction changes no key twice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// A key holds a value; with a lease it goes when the lease ends.
    Put {
        /// Which.
        key: String,
        /// What.
        value: Vec<u8>,
        /// Whose.
        lease: Option<i64>,
    },
    /// A key isn't there.
    Delete(String),
    /// No key that begins so is there.
    DeleteAll(String),
}

impl Operation {
    /// A key holds a value for good.
    #[must_use]
    pub fn put(key: String, value: Vec<u8>) -> Self {
        Self::Put { key, value, lease: None }
    }

    /// Bytes of its key and value.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self {
            Self::Put { key, value, .. } => key.len() + value.len(),
            Self::Delete(key) | Self::DeleteAll(key) => key.len(),
        }
    }
}

/// A lease that was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// Its number.
    pub id: i64,
    /// How long it lasts from when it was given or renewed: at least as long as asked for.
    pub lasts: Duration,
}

/// Why something wasn't done, or isn't known to be done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KvError {
    /// No answer: it may have been done, and it may be done yet.
    #[error("etcd at {place} doesn't answer ({reason})")]
    Away {
        /// Its addresses.
        place: String,
        /// What was seen.
        reason: String,
    },
    /// It won't be done.
    #[error("etcd at {place} refuses: {reason}")]
    Refused {
        /// Its addresses.
        place: String,
        /// Its own words.
        reason: String,
    },
}

/// See the module. All calls block, for as long as `within` says at most.
pub trait Kv: std::fmt::Debug + Send + Sync {
    /// Where it is, for people.
    fn place(&self) -> String;

    /// Gives a lease that lasts at least `lasts`, unless it is renewed.
    ///
    /// # Errors
    /// When no answer comes, or it is refused.
    fn grant(&self, lasts: Duration, within: Duration) -> Result<Lease, KvError>;

    /// Lets a lease last anew; `None`: it has ended.
    ///
    /// # Errors
    /// As [`Kv::grant`].
    fn renew(&self, lease: i64, within: Duration) -> Result<Option<Duration>, KvError>;

    /// Ends a lease, and with it its keys.
    ///
    /// # Errors
    /// As [`Kv::grant`].
    fn revoke(&self, lease: i64, within: Duration) -> Result<(), KvError>;

    /// A key, as it is after everything that was answered before.
    ///
    /// # Errors
    /// As [`Kv::grant`].
    fn get(&self, key: &str, within: Duration) -> Result<Option<Entry>, KvError>;

    /// All keys that begin so, in order, as they were at one revision. `within` is for each request that it takes.
    ///
    /// # Errors
    /// As [`Kv::grant`].
    fn range(&self, prefix: &str, within: Duration) -> Result<Vec<Entry>, KvError>;

    /// Carries operations out, all of them and safely on its disks, if all guards hold: the revision. `None`: a guard doesn't hold, nothing
    /// has changed.
    ///
    /// # Errors
    /// As [`Kv::grant`]: [`KvError::Away`] means that it may have been carried out, and may be yet.
    fn transact(
        &self,
        guards: &[Guard],
        operations: &[Operation],
        within: Duration,
    ) -> Result<Option<i64>, KvError>;

    /// Waits until a key goes that was there at revision `since`, or the time is over. Whether it went.
    ///
    /// # Errors
    /// As [`Kv::grant`].
    fn wait_gone(&self, key: &str, since: i64, within: Duration) -> Result<bool, KvError>;
}
