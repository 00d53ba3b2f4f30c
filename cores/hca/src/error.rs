//! Why a verb fails.

use crate::attributes::QpState;
use crate::names::{DeviceId, Gid};

/// Why a verb fails. A failed verb changes nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VerbsError {
    /// No such device.
    #[error("There is no device {0} in this engine")]
    NoSuchDevice(DeviceId),
    /// No such object.
    #[error("There is no {kind} with handle {handle}")]
    NoSuchObject {
        /// Kind of object.
        kind: &'static str,
        /// Handle as given.
        handle: u32,
    },
    /// Other objects still refer to the object.
    #[error("The {kind} with handle {handle} is in use; destroy what uses it first")]
    InUse {
        /// Kind of object.
        kind: &'static str,
        /// Handle as given.
        handle: u32,
    },
    /// A quota or a capability is exhausted.
    #[error("The device has no room for more {what}: its limit is {limit}")]
    OutOfResources {
        /// Name of the resource.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// A value out of range.
    #[error("{what} can't be {value:#x}")]
    Invalid {
        /// Name of the value.
        what: &'static str,
        /// Value as given.
        value: u64,
    },
    /// The state table has no such transition, or the mask doesn't fit it.
    #[error("A queue pair in state {from:?} can't go to {to:?} with attributes {mask:#x}")]
    Transition {
        /// Current state.
        from: QpState,
        /// Requested state.
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
