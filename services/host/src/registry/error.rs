//! Why a NIC can't be attached, detached or changed.

use super::NicKey;
use crate::access::Denied;
use crate::identity::BadName;
use crate::listener::ListenError;
use crate::segments::SegmentError;

/// Why a NIC can't be attached, detached or changed.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// The caller isn't authorized.
    #[error(transparent)]
    Denied(#[from] Denied),
    /// Invalid name.
    #[error(transparent)]
    Name(#[from] BadName),
    /// Invalid MAC address.
    #[error("{mac} can't be a NIC's address: it is a group address or zero")]
    Mac {
        /// MAC address as given.
        mac: String,
    },
    /// The MAC address is in use on the segment.
    #[error("{mac} is the address of {other} on segment {segment} already; give each NIC its own")]
    MacTaken {
        /// MAC address as given.
        mac: String,
        /// NIC with that address.
        other: NicKey,
        /// Name of the segment.
        segment: String,
    },
    /// MTU out of range.
    #[error("A NIC can't have an MTU of {mtu} bytes; it is from 576 to 9000")]
    Mtu {
        /// MTU as given, bytes.
        mtu: u32,
    },
    /// The NIC has a client.
    #[error("{key} is in use: its monitor is connected; end that VM, or detach the NIC, first")]
    InUse {
        /// Identity of the NIC.
        key: NicKey,
    },
    /// Too many NICs.
    #[error("{what} has {limit} NICs, more are not possible")]
    TooMany {
        /// `This host`, or a VM.
        what: String,
        /// Limit of NICs.
        limit: usize,
    },
    /// The NIC doesn't exist.
    #[error("There is no {key}")]
    NoSuchNic {
        /// Identity of the NIC.
        key: NicKey,
    },
    /// The VM has no NIC.
    #[error("VM {vm} has no NIC here")]
    NoSuchVm {
        /// Name of the VM.
        vm: String,
    },
    /// The network or its tap can't be used.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// A socket can't be opened.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// A function's server can't be started.
    #[error("A socket of {key} can't be served")]
    Serve {
        /// Identity of the NIC.
        key: NicKey,
        /// The error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}
