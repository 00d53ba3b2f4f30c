//! What hosts and the coordinator say to each other.
//!
//! ```text
//!  coordinator          source                destination            peer hosts
//!      │── Reserve ──────────────────────────────▶│                      │
//!      │◀───────────────────────────── Reserved ──│                      │
//!      │── Begin ─────────▶│ pre-copy ═══════════▶│                      │
//!      │◀──── Converged ───│                      │                      │
//!      │── Queued ────────▶│ goes on copying: a peer is in the switchover of another migration
//!      │── Switch ────────▶│── Suspend ───────────────── tree ──────────▶│ queue pairs that face the VM stop
//!      │                   │◀───────────────────────── Suspended ────────│
//!      │                   │ the VM stops         │                      │
//!      │                   │── Handover, rest ═══▶│                      │
//!      │◀────── Loaded ────┼◀───── Loaded ────────│  vote                │
//!      │◀────── Yield ─────│  vote                │                      │
//!   COMMIT (written)       │                      │                      │
//!      │── Commit ────────▶│ forgets the VM       │                      │
//!      │── Commit ───────────────────────────────▶│ runs it              │
//!      │                   │                      │── Running ── tree ──▶│ they go on, to the new host
//!      │◀──── Settled ─────┼──────────────────────│◀────── Ready ────────│
//! ```
//! Before its `Yield` a source may give up on its own; afterwards the coordinator alone decides. A source that goes on sends the same
//! `Running` as a destination that begins.
//!
//! Messages may be lost, repeated and overtaken. Each is sent again until it is answered, and means the same the second time.
//!
//! Version rule: a new kind of message or field is a new [`crate::wire::VERSION`]; a node refuses versions that it doesn't know.

use crate::names::{Epoch, HostId, Incarnation, MigrationId, Move, Node, Place, VmId};

/// One message.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Message {
    /// Who sends it.
    pub from: Node,
    /// Which start of the sender: 0 for the coordinator.
    pub incarnation: Incarnation,
    /// Who gets it.
    pub to: Node,
    /// What it says.
    pub body: Body,
}

/// What a message says.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Body {
    /// A host has started: whatever it ran before is gone. To the coordinator.
    Hello,
    /// The coordinator knows.
    Welcome,
    /// A destination is to hold room for VMs.
    Reserve {
        /// The migration.
        migration: MigrationId,
        /// What comes here.
        moves: Vec<Move>,
    },
    /// There is room.
    Reserved {
        /// The migration.
        migration: MigrationId,
    },
    /// A source is to begin to copy.
    Begin {
        /// The migration.
        migration: MigrationId,
        /// What leaves here.
        moves: Vec<Move>,
    },
    /// What is left to copy of all VMs of this source fits into the pause.
    Converged {
        /// The migration.
        migration: MigrationId,
    },
    /// All sources have converged, and have to wait: another migration moves a peer, and switches over first. Sources go on copying.
    Queued {
        /// The migration that waits.
        migration: MigrationId,
        /// The peer that moves first.
        behind: VmId,
    },
    /// All sources have converged: a source is to stop its peers, then the VMs.
    Switch {
        /// The migration.
        migration: MigrationId,
    },
    /// Queue pairs that face these VMs are to stop, at the end of a segment.
    Suspend {
        /// The migration.
        migration: MigrationId,
        /// Whose answer goes where in the end.
        origin: HostId,
        /// The VMs.
        vms: Vec<VmId>,
        /// Hosts that the receiver passes it on to.
        fan: Vec<HostId>,
    },
    /// They have stopped at these hosts.
    Suspended {
        /// The migration.
        migration: MigrationId,
        /// The source that asked.
        origin: HostId,
        /// The hosts.
        hosts: Vec<HostId>,
    },
    /// Who faces a VM, and where they are. The rest of its state comes as a stream.
    Handover {
        /// The migration.
        migration: MigrationId,
        /// The VM.
        vm: VmId,
        /// Its peers.
        faces: Vec<Place>,
    },
    /// All that a destination waits for has come, and been checked: it runs the VMs as soon as it hears of the commit. To the source and
    /// the coordinator.
    Loaded {
        /// The migration.
        migration: MigrationId,
    },
    /// A source won't run its VMs again unless the coordinator gives the migration up.
    Yield {
        /// The migration.
        migration: MigrationId,
    },
    /// A source or destination can't go on, or a source has given up on its own.
    Failed {
        /// The migration.
        migration: MigrationId,
        /// Why.
        reason: Reason,
    },
    /// The migration is done: these hosts may run these VMs.
    Commit {
        /// The migration.
        migration: MigrationId,
        /// All VMs of the migration.
        places: Vec<Place>,
    },
    /// The migration is given up: the VMs stay where they are.
    Abort {
        /// The migration.
        migration: MigrationId,
        /// All VMs of the migration; none if the coordinator has forgotten it, which it does when all have answered.
        places: Vec<Place>,
    },
    /// A host has done what the decision asks of it.
    Settled {
        /// The migration.
        migration: MigrationId,
        /// VMs that it should run now, and doesn't have: it has been restarted since it voted.
        lost: Vec<VmId>,
    },
    /// How has this migration been decided?
    Outcome {
        /// The migration.
        migration: MigrationId,
    },
    /// The sender runs these VMs: queue pairs that face them go on, to that host.
    Running {
        /// The last migration that has ended.
        after: MigrationId,
        /// Who announces.
        origin: HostId,
        /// The VMs.
        vms: Vec<(VmId, Epoch)>,
        /// Hosts that the receiver passes it on to.
        fan: Vec<HostId>,
    },
    /// They go on at these hosts.
    Ready {
        /// From the announcement.
        after: MigrationId,
        /// The host that announced.
        origin: HostId,
        /// The hosts.
        hosts: Vec<HostId>,
    },
    /// Where does a VM run? To the coordinator and to its last known host.
    Where {
        /// The VM.
        vm: VmId,
    },
    /// The coordinator's answer. It doesn't say that the VM is running already.
    At {
        /// Where.
        place: Place,
    },
    /// The coordinator's answer: it was lost with its host, or has ended.
    Gone {
        /// The VM.
        vm: VmId,
        /// The epoch that was its last.
        epoch: Epoch,
    },
}

/// Why a migration is given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, thiserror::Error)]
pub enum Reason {
    /// Cancelled.
    #[error("it was cancelled")]
    Cancelled,
    /// No room.
    #[error("a destination has no room for its VMs")]
    NoRoom,
    /// A source doesn't run one of the VMs.
    #[error("a source doesn't run one of its VMs")]
    NotHere,
    /// A VM takes part in too many migrations, or another one.
    #[error("a host or VM is busy with another migration")]
    Busy,
    /// The stream between source and destination broke.
    #[error("the stream from source to destination broke")]
    Stream,
    /// A peer host didn't answer.
    #[error("a host of a peer didn't stop its queue pairs in time")]
    Peers,
    /// Something took too long.
    #[error("it took too long")]
    Late,
    /// A host was restarted.
    #[error("a host that takes part was restarted")]
    Restarted,
    /// The owner isn't who it was at the beginning.
    #[error("a VM's owner changed meanwhile")]
    Epoch,
    /// Peers' switchovers took too long.
    #[error("it waited too long for migrations of its VMs' peers to switch over")]
    Queue,
}

impl Body {
    /// What kind of message it is, in a word.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Hello => "hello",
            Self::Welcome => "welcome",
            Self::Reserve { .. } => "reserve",
            Self::Reserved { .. } => "reserved",
            Self::Begin { .. } => "begin",
            Self::Converged { .. } => "converged",
            Self::Queued { .. } => "queued",
            Self::Switch { .. } => "switch",
            Self::Suspend { .. } => "suspend",
            Self::Suspended { .. } => "suspended",
            Self::Handover { .. } => "handover",
            Self::Loaded { .. } => "loaded",
            Self::Yield { .. } => "yield",
            Self::Failed { .. } => "failed",
            Self::Commit { .. } => "commit",
            Self::Abort { .. } => "abort",
            Self::Settled { .. } => "settled",
            Self::Outcome { .. } => "outcome",
            Self::Running { .. } => "running",
            Self::Ready { .. } => "ready",
            Self::Where { .. } => "where",
            Self::At { .. } => "at",
            Self::Gone { .. } => "gone",
        }
    }
}
