//! Why a NIC can't be attached, detached or changed.

use super::NicKey;
use crate::access::Denied;
use crate::identity::BadName;
use crate::listener::ListenError;
use crate::segments::SegmentError;

/// A NIC can't be attached, detached or changed.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// Not allowed.
    #[error(transparent)]
    Denied(#[from] Denied),
    /// A name.
    #[error(transparent)]
    Name(#[from] BadName),
    /// MAC address.
    #[error("{mac} can't be a NIC's address: it is a group address or zero")]
    Mac {
        /// As given.
        mac: String,
    },
    /// MAC address in use on the segment.
    #[error("{mac} is the address of {other} on segment {segment} already; give each NIC its own")]
    MacTaken {
        /// As given.
        mac: String,
        /// Whose it is.
        other: NicKey,
        /// The segment.
        segment: String,
    },
    /// MTU.
    #[error("A NIC can't have an MTU of {mtu} bytes; it is from 576 to 9000")]
    Mtu {
        /// As given.
        mtu: u32,
    },
    /// Somebody is connected to it.
    #[error("{key} is in use: its monitor is connected; end that VM, or detach the NIC, first")]
    InUse {
        /// Which.
        key: NicKey,
    },
    /// Too many.
    #[error("{what} has {limit} NICs, more are not possible")]
    TooMany {
        /// `This host` or a VM.
        what: String,
        /// How many there can be.
        limit: usize,
    },
    /// There is none.
    #[error("There is no {key}")]
    NoSuchNic {
        /// Which.
        key: NicKey,
    },
    /// There is no such VM.
    #[error("VM {vm} has no NIC here")]
    NoSuchVm {
        /// Which.
        vm: String,
    },
    /// Network or tap.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// Socket.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// Server.
    #[error("A socket of {key} can't be served")]
    Serve {
        /// Which.
        key: NicKey,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}
