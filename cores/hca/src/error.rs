//! Why a verb fails.

use crate::attributes::QpState;
use crate::names::{DeviceId, Gid};

/// Why a verb fails. Nothing has changed then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VerbsError {
    /// No such device.
    #[error("There is no device {0} in this engine")]
    NoSuchDevice(DeviceId),
    /// No such object.
    #[error("There is no {kind} with handle {handle}")]
    NoSuchObject {
        /// What.
        kind: &'static str,
        /// As given.
        handle: u32,
    },
    /// The object is needed by others.
    #[error("The {kind} with handle {handle} is in use; destroy what uses it first")]
    InUse {
        /// What.
        kind: &'static str,
        /// As given.
        handle: u32,
    },
    /// A quota or a capability is exhausted.
    #[error("The device has no room for more {what}: its limit is {limit}")]
    OutOfResources {
        /// Of what.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// A value that can't be.
    #[error("{what} can't be {value:#x}")]
    Invalid {
        /// What.
        what: &'static str,
        /// As given.
        value: u64,
    },
    /// The queue pair's state table has no such transition.
    #[error("A queue pair in state {from:?} can't go to {to:?} with attributes {mask:#x}")]
    Transition {
        /// Present state.
        from: QpState,
        /// Asked for.
        to: QpState,
        /// Attribute mask as given.
        mask: u32,
    },
    /// Another device of the segment has that GID.
    #[error("The address {gid:?} belongs to another device of this segment; give each VM its own address")]
    AddressTaken {
        /// The address.
        gid: Gid,
    },
}

impl VerbsError {
    pub(crate) fn missing(kind: &'static str, handle: u32) -> Self {
        Self::NoSuchObject { kind, handle }
    }

    pub(crate) fn invalid(what: &'static str, value: impl Into<u64>) -> Self {
        Self::Invalid { what, value: value.into() }
    }
}
