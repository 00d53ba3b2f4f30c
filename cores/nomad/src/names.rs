//! Identifiers of VMs, hosts, migrations and epochs.

use std::fmt;

/// A VM's number, unique in the cluster. Never 0, and never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VmId(pub u32);

/// A host's number in the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub u32);

/// A migration's number. The coordinator counts migrations; a later one has a higher number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MigrationId(pub u64);

/// Counts a VM's placements, from 1. In one epoch only one host may run the VM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u64);

/// Counts the starts of a host's daemon. A message of an earlier incarnation is ignored: its promises ended with that
/// daemon.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Incarnation(pub u64);

/// The sender or receiver of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Node {
    /// The cluster service.
    Coordinator,
    /// A host's daemon.
    Host(HostId),
}

/// The host that may run a VM, in which epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The VM.
    pub vm: VmId,
    /// The host that may run it.
    pub host: HostId,
    /// The epoch of this placement.
    pub epoch: Epoch,
}

/// Orders statements about where a VM runs: by epoch, and within an epoch by its last aborted migration. The greatest
/// is the newest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp {
    /// The epoch in which it runs.
    pub epoch: Epoch,
    /// The last migration of it that has ended.
    pub after: MigrationId,
}

/// A VM's part in a migration: its source and destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Move {
    /// The VM.
    pub vm: VmId,
    /// The source.
    pub from: HostId,
    /// The destination.
    pub to: HostId,
    /// The epoch that the VM has at the destination.
    pub epoch: Epoch,
}

impl fmt::Display for VmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VM {}", self.0)
    }
}

impl fmt::Display for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "host {}", self.0)
    }
}

impl fmt::Display for MigrationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "migration {}", self.0)
    }
}
