//! Names of what takes part.

use std::fmt;

/// A VM, in the whole cluster. Never 0, never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VmId(pub u32);

/// A host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub u32);

/// A migration, of one VM or a group. The coordinator counts them; a later one has a higher number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MigrationId(pub u64);

/// Counts the hosts that a VM has had, from 1. In one epoch one host may run the VM.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u64);

/// Counts the starts of a host's daemon. A message of an earlier one means nothing any more: what it promised is lost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Incarnation(pub u64);

/// Who sends or gets a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Node {
    /// The cluster service.
    Coordinator,
    /// A host's daemon.
    Host(HostId),
}

/// Which host may run a VM, in which epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The VM.
    pub vm: VmId,
    /// Its host.
    pub host: HostId,
    /// Since when.
    pub epoch: Epoch,
}

/// What a host knows of when a VM last ran: an order on what is said of it. Later epochs are newer, and within one, later migrations
/// that were given up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp {
    /// The epoch in which it runs.
    pub epoch: Epoch,
    /// The last migration of it that has ended.
    pub after: MigrationId,
}

/// A VM that moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Move {
    /// The VM.
    pub vm: VmId,
    /// Where it runs.
    pub from: HostId,
    /// Where it will run.
    pub to: HostId,
    /// The epoch that it gets there.
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
