//! Which transport a connection may use: the directory's pins of both VMs.

use serde::{Deserialize, Serialize};

use super::directory::{Directory, VmId};

/// The way by which two HCAs reach each other; the names are those of the VM directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TransportKind {
    /// From RAM to RAM, between VMs of one host.
    Local,
    /// Between daemons.
    Fabric,
    /// Plain RoCEv2 frames.
    Wire,
    /// The host's own RDMA device.
    Verbs,
}

impl TransportKind {
    /// The transport with a name.
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

/// Why a connection can't use its pinned transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refused {
    /// The two VMs are pinned to different transports.
    #[error("one VM is pinned to transport {}, the other to {}", .0.name(), .1.name())]
    Contradiction(TransportKind, TransportKind),
    /// The peer can't be reached by that transport.
    #[error("it is pinned to transport {}, and this peer is reached by {}", .0.name(), .1.name())]
    NotThatWay(TransportKind, TransportKind),
}

/// The transport to which the directory pins two VMs' connections; `None`: no pin.
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

/// Checks that a transport may carry two VMs' connections.
pub(super) fn check(
    directory: &dyn Directory,
    own: VmId,
    peer: VmId,
    way: TransportKind,
) -> Result<(), Refused> {
    match pinned(directory, own, peer)? {
        // Traffic of such a VM that an RDMA device can't carry: datagrams, and connections of certain kinds.
        Some(TransportKind::Verbs) if way == TransportKind::Fabric => Ok(()),
        Some(pin) if pin != way => Err(Refused::NotThatWay(pin, way)),
        _ => Ok(()),
    }
}
