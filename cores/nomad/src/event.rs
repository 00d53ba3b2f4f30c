//! What goes into a host's state machine, and what comes out.

use crate::message::Message;
use crate::names::{Epoch, HostId, MigrationId, Move, Place, VmId};

/// What a host is told.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Event {
    /// The daemon begins.
    Start,
    /// A message for it came.
    Message(Message),
    /// A VM was started here; the coordinator gave it the epoch.
    Started {
        /// The VM.
        vm: VmId,
        /// Its epoch.
        epoch: Epoch,
        /// Migrations up to this one don't concern it any more: what peers still hold for one of them goes on.
        after: MigrationId,
    },
    /// A VM of this host has ended.
    Ended {
        /// The VM.
        vm: VmId,
    },
    /// A VM of this host has a connection that is in use now, with a VM that is elsewhere or here.
    Connected {
        /// The VM of this host.
        vm: VmId,
        /// Where its peer is, as the coordinator says.
        peer: Place,
    },
    /// The last connection of a VM of this host with that peer has ended.
    Disconnected {
        /// The VM of this host.
        vm: VmId,
        /// The peer.
        peer: VmId,
    },
    /// The answer to [`Action::Reserve`].
    Room {
        /// The migration.
        migration: MigrationId,
        /// There is room.
        granted: bool,
    },
    /// What is left to copy of a VM fits into the pause.
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
    /// The answer to [`Action::Hold`]: no queue pair that faces the VM sends any more.
    Held {
        /// The migration.
        migration: MigrationId,
        /// The VM that they face.
        vm: VmId,
    },
    /// The answer to [`Action::Stop`]: the VM stands still.
    Stopped {
        /// The migration.
        migration: MigrationId,
        /// The VM.
        vm: VmId,
    },
    /// All of a VM's state has come here, and was checked.
    Arrived {
        /// The migration.
        migration: MigrationId,
        /// The VM.
        vm: VmId,
    },
    /// The time of a timer is over.
    Timer(Timer),
}

/// A timer of a host. One that is set again begins anew; [`crate::Host::awaits`] says whether it still matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Timer {
    /// The coordinator hasn't answered [`crate::message::Body::Hello`].
    Hello,
    /// What a source waits for hasn't come.
    Leaving(MigrationId),
    /// It hasn't come in time.
    Switch(MigrationId),
    /// What a destination waits for hasn't come.
    Arriving(MigrationId),
    /// Peer hosts haven't answered an announcement.
    Announce(MigrationId),
    /// Nothing was heard of a VM that queue pairs wait for.
    Ask(VmId),
}

impl Timer {
    /// Ends something, rather than saying it again.
    #[must_use]
    pub fn is_deadline(self) -> bool {
        matches!(self, Self::Switch(_))
    }
}

/// What a host does.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// Sends a message to another node.
    Send(Message),
    /// Keeps room for VMs: memory, queue pairs, keys, addresses, devices. Answered by [`Event::Room`].
    Reserve {
        /// The migration.
        migration: MigrationId,
        /// What comes.
        moves: Vec<Move>,
    },
    /// Gives the room of a migration free, with what came already.
    Release {
        /// The migration.
        migration: MigrationId,
    },
    /// Begins to copy a VM while it runs. [`Event::Converged`] tells when little is left.
    Copy {
        /// The migration.
        migration: MigrationId,
        /// What goes where.
        vm: VmId,
        /// The destination.
        to: HostId,
    },
    /// VMs that leave in a migration have to wait for a peer to move first; they are copied on. Said again while that is so.
    Queued {
        /// The migration.
        migration: MigrationId,
        /// The peer.
        behind: VmId,
    },
    /// Ends copying.
    EndCopy {
        /// The migration.
        migration: MigrationId,
    },
    /// Stops, at the end of a segment, all queue pairs of VMs of this host that face a VM. Answered by [`Event::Held`].
    Hold {
        /// The migration.
        migration: MigrationId,
        /// The VM that they face.
        vm: VmId,
    },
    /// The queue pairs of a VM that face this peer go on, and send to that host. Ends an unanswered [`Action::Hold`].
    Open {
        /// The VM of this host.
        vm: VmId,
        /// The peer, and where it is.
        peer: Place,
    },
    /// A peer has ended: queue pairs that face it fail as their protocol has it.
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
    /// Runs a VM, here: goes on with a stopped one, or begins with one that arrived. Its queue pairs stay closed until
    /// [`Action::Open`].
    Run {
        /// The VM.
        vm: VmId,
        /// The epoch that it runs in.
        epoch: Epoch,
    },
    /// Forgets a VM that runs elsewhere.
    Discard {
        /// The VM.
        vm: VmId,
    },
    /// Sets a timer.
    Timer {
        /// Which.
        timer: Timer,
        /// In so many milliseconds.
        after_ms: u32,
    },
}
