//! Inputs of a host's state machine, and its outputs.

use crate::message::Message;
use crate::names::{Epoch, HostId, MigrationId, Move, Place, VmId};

/// An input of a host's state machine.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Event {
    /// The daemon starts.
    Start,
    /// A message for this host has been received.
    Message(Message),
    /// A VM has started here, in the epoch that the coordinator gave it.
    Started {
        /// The VM.
        vm: VmId,
        /// Its epoch.
        epoch: Epoch,
        /// The last migration of an earlier run of the VM. Queue pairs of peers that are suspended for it, or for an
        /// earlier one, resume.
        after: MigrationId,
    },
    /// A VM of this host has ended.
    Ended {
        /// The VM.
        vm: VmId,
    },
    /// A VM of this host has its first connection with a peer, which may be on any host.
    Connected {
        /// The VM of this host.
        vm: VmId,
        /// The peer's host and epoch, from the coordinator.
        peer: Place,
    },
    /// A VM of this host has closed its last connection with a peer.
    Disconnected {
        /// The VM of this host.
        vm: VmId,
        /// The peer.
        peer: VmId,
    },
    /// The answer to [`Action::Reserve`].
    Reservation {
        /// The migration.
        migration: MigrationId,
        /// Whether the host has the capacity.
        granted: bool,
    },
    /// The rest of a VM's state fits into the limit of the blackout.
    Converged {
        /// The migration.
        migration: MigrationId,
        /// The VM.
        vm: VmId,
    },
    /// A stream of this migration broke.
    StreamBroke {
        /// The migration.
        migration: MigrationId,
    },
    /// The answer to [`Action::SuspendQps`]: all queue pairs connected to the VM are suspended.
    QpsSuspended {
        /// The migration.
        migration: MigrationId,
        /// The VM to which they are connected.
        vm: VmId,
    },
    /// The answer to [`Action::Stop`]: the VM and its queue pairs are stopped.
    Stopped {
        /// The migration.
        migration: MigrationId,
        /// The VM.
        vm: VmId,
    },
    /// All of a VM's state has been received here and checked.
    Arrived {
        /// The migration.
        migration: MigrationId,
        /// The VM.
        vm: VmId,
    },
    /// A timer has expired.
    Timer(Timer),
}

/// A timer of a host. Setting it again restarts it. [`crate::Host::awaits`] returns whether its expiry still matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Timer {
    /// Retransmits [`crate::message::Body::Hello`], which the coordinator hasn't answered.
    Hello,
    /// Retransmits what a source waits for.
    Outgoing(MigrationId),
    /// Ends a source's switchover, unless it has voted.
    Switch(MigrationId),
    /// Retransmits what a destination waits for.
    Incoming(MigrationId),
    /// Retransmits an announcement that peers' hosts haven't answered.
    Announce(MigrationId),
    /// Asks for the place of a VM whose peers have suspended their queue pairs.
    Locate(VmId),
}

impl Timer {
    /// Whether its expiry aborts something instead of retransmitting.
    #[must_use]
    pub fn is_deadline(self) -> bool {
        matches!(self, Self::Switch(_))
    }
}

/// An output of a host's state machine, to be carried out by its caller.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// Sends a message to another node.
    Send(Message),
    /// Reserves capacity for VMs: memory, queue pairs, keys, addresses, devices. Answered by [`Event::Reservation`].
    Reserve {
        /// The migration.
        migration: MigrationId,
        /// VMs that are to move here.
        moves: Vec<Move>,
    },
    /// Frees the capacity that a migration reserved, with all state received so far.
    Release {
        /// The migration.
        migration: MigrationId,
    },
    /// Starts pre-copy of a VM. [`Event::Converged`] reports that the rest is small enough.
    Copy {
        /// The migration.
        migration: MigrationId,
        /// The VM to copy.
        vm: VmId,
        /// The destination.
        to: HostId,
    },
    /// A migration's VMs are queued behind a peer's switchover; their pre-copy continues. Repeated at every `Queued`
    /// message.
    Queued {
        /// The migration.
        migration: MigrationId,
        /// The peer.
        waits_for: VmId,
    },
    /// Ends pre-copy.
    EndCopy {
        /// The migration.
        migration: MigrationId,
    },
    /// Suspends, at the end of a segment, all queue pairs of this host that are connected to a VM. Answered by
    /// [`Event::QpsSuspended`].
    SuspendQps {
        /// The migration.
        migration: MigrationId,
        /// The VM to which they are connected.
        vm: VmId,
    },
    /// Resumes a VM's queue pairs connected to a peer, towards the peer's host. Cancels an unanswered [`Action::SuspendQps`].
    ResumeQps {
        /// The VM of this host.
        vm: VmId,
        /// The peer with its host.
        peer: Place,
    },
    /// A peer has ended or was lost: queue pairs connected to it enter the error state of their protocol.
    Lost {
        /// The peer.
        peer: VmId,
    },
    /// Stops a VM with its queue pairs. Answered by [`Event::Stopped`].
    Stop {
        /// The migration.
        migration: MigrationId,
        /// The VM.
        vm: VmId,
    },
    /// Sends the rest of a stopped VM's state.
    Finish {
        /// The migration.
        migration: MigrationId,
        /// The VM.
        vm: VmId,
        /// The destination.
        to: HostId,
    },
    /// Runs a VM here: resumes a stopped one, or starts one whose state was received. Its queue pairs stay suspended
    /// until [`Action::ResumeQps`].
    Run {
        /// The VM.
        vm: VmId,
        /// The epoch that it runs in.
        epoch: Epoch,
    },
    /// Destroys the local state of a VM that another host runs.
    Discard {
        /// The VM.
        vm: VmId,
    },
    /// Sets a timer.
    Timer {
        /// The timer to start.
        timer: Timer,
        /// Delay in milliseconds.
        after_ms: u32,
    },
}
