//! Which transport a connection may use: what the directory pins, for one VM or the other.

use serde::{Deserialize, Serialize};

use super::directory::{Directory, VmId};

/// The ways to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TransportKind {
    /// From RAM to RAM, where both VMs are on one host.
    Local,
    /// From daemon to daemon.
    Fabric,
    /// Plain RoCEv2 frames.
    Wire,
    /// A host's own RDMA device.
    Verbs,
}

impl TransportKind {
    /// The one with a name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        [Self::Local, Self::Fabric, Self::Wire, Self::Verbs].into_iter().find(|kind| kind.name() == name)
    }

    /// Its name in reports and in the directory.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Fabric => "fabric",
            Self::Wire => "wire",
            Self::Verbs => "verbs",
        }
    }
}

/// Why a connection can't be had as it is pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refused {
    /// The two VMs are pinned to different transports.
    #[error("one VM is pinned to transport {}, the other to {}", .0.name(), .1.name())]
    Contradiction(TransportKind, TransportKind),
    /// The peer isn't reached by that transport.
    #[error("it is pinned to transport {}, and this peer is reached by {}", .0.name(), .1.name())]
    NotThatWay(TransportKind, TransportKind),
}

/// The transport that the directory pins for what two VMs have with each other; `None`: it leaves the choice.
pub(super) fn pinned(
    directory: &dyn Directory,
    own: VmId,
    peer: VmId,
) -> Result<Option<TransportKind>, Refused> {
    match (directory.pin(own), directory.pin(peer)) {
        (Some(one), Some(other)) if one != other => Err(Refused::Contradiction(one, other)),
        (one, other) => Ok(one.or(other)),
    }
}

/// Whether connections of two VMs are pinned to the hosts' RDMA devices.
pub(super) fn is_verbs(directory: &dyn Directory, own: VmId, peer: VmId) -> bool {
    pinned(directory, own, peer) == Ok(Some(TransportKind::Verbs))
}

/// Whether a transport may carry what two VMs have with each other.
pub(super) fn check(
    directory: &dyn Directory,
    own: VmId,
    peer: VmId,
    way: TransportKind,
) -> Result<(), Refused> {
    match pinned(directory, own, peer)? {
        // What an RDMA device can't carry of such a VM: datagrams, and connections of certain kinds.
        Some(TransportKind::Verbs) if way == TransportKind::Fabric => Ok(()),
        Some(pin) if pin != way => Err(Refused::NotThatWay(pin, way)),
        _ => Ok(()),
    }
}
