//! The protocol's messages between hosts and the coordinator.
//!
//! ```text
//!  coordinator          source                destination            peer hosts
//!      │── Reserve ──────────────────────────────▶│                      │
//!      │◀───────────────────────────── Reserved ──│                      │
//!      │── Begin ─────────▶│ pre-copy ═══════════▶│                      │
//!      │◀──── Converged ───│                      │                      │
//!      │── Queued ────────▶│ continues to copy: a peer is in the switchover of another migration
//!      │── Switch ────────▶│── Suspend ───────────────── tree ──────────▶│ queue pairs connected to the VM are suspended
//!      │                   │◀───────────────────────── Suspended ────────│
//!      │                   │ the VM stops         │                      │
//!      │                   │── Handover, rest ═══▶│                      │
//!      │◀────── Loaded ────┼◀───── Loaded ────────│  vote                │
//!      │◀────── Yield ─────│  vote                │                      │
//!   COMMIT (written)       │                      │                      │
//!      │── Commit ────────▶│ forgets the VM       │                      │
//!      │── Commit ───────────────────────────────▶│ runs it              │
//!      │                   │                      │── Running ── tree ──▶│ they resume, towards the new host
//!      │◀──── Settled ─────┼──────────────────────│◀────── Ready ────────│
//! ```
//! A source may abort on its own until it sends `Yield`; from then on only the coordinator decides. A source that
//! resumes its VMs after an abort sends the same `Running` as a destination that starts them.
//!
//! The network may lose, duplicate and reorder messages. The sender retransmits a message until it is answered; every
//! message is idempotent.
//!
//! A new kind of message or a new field needs a new [`crate::wire::VERSION`]. A node refuses versions that it doesn't
//! know.

use crate::names::{Epoch, HostId, Incarnation, MigrationId, Move, Node, Place, VmId};

/// One message.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Message {
    /// The sender.
    pub from: Node,
    /// The sender's incarnation: 0 for the coordinator.
    pub incarnation: Incarnation,
    /// The receiver.
    pub to: Node,
    /// The content.
    pub body: Body,
}

/// The content of a message.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Body {
    /// To the coordinator: a host's daemon has started. VMs of its earlier incarnation are lost.
    Hello,
    /// The coordinator has registered the incarnation: the answer to `Hello`.
    Welcome,
    /// The coordinator asks a destination to reserve capacity for VMs.
    Reserve {
        /// The migration.
        migration: MigrationId,
        /// VMs that are to move to this destination.
        moves: Vec<Move>,
    },
    /// The destination has reserved the capacity.
    Reserved {
        /// The migration.
        migration: MigrationId,
    },
    /// The coordinator asks a source to start pre-copy.
    Begin {
        /// The migration.
        migration: MigrationId,
        /// VMs that are to move away from this source.
        moves: Vec<Move>,
    },
    /// For each VM of this source, the rest fits into the limit of the blackout.
    Converged {
        /// The migration.
        migration: MigrationId,
    },
    /// All sources have converged, but a migration of a peer switches over first. Sources continue to copy.
    Queued {
        /// The migration that is queued.
        migration: MigrationId,
        /// The peer that moves first.
        waits_for: VmId,
    },
    /// All sources have converged: a source is to suspend its VMs' peers, then stop the VMs.
    Switch {
        /// The migration.
        migration: MigrationId,
    },
    /// Queue pairs connected to these VMs are to be suspended, at the end of a segment.
    Suspend {
        /// The migration.
        migration: MigrationId,
        /// The source that started the request, to which the answers go in the end.
        origin: HostId,
        /// The VMs.
        vms: Vec<VmId>,
        /// Hosts to which the receiver forwards the message.
        forward_to: Vec<HostId>,
    },
    /// These hosts have suspended their queue pairs.
    Suspended {
        /// The migration.
        migration: MigrationId,
        /// The source that requested it.
        origin: HostId,
        /// The hosts.
        hosts: Vec<HostId>,
    },
    /// A VM's peers and their hosts. The stream between the monitors carries the rest of the VM's state.
    Handover {
        /// The migration.
        migration: MigrationId,
        /// The VM.
        vm: VmId,
        /// Its peers.
        peers: Vec<Place>,
    },
    /// A destination's vote, to the source and the coordinator: it has received and checked all state. It runs the VMs
    /// once it receives the commit.
    Loaded {
        /// The migration.
        migration: MigrationId,
    },
    /// A source's vote: it runs its VMs again only if the coordinator aborts.
    Yield {
        /// The migration.
        migration: MigrationId,
    },
    /// A source or destination can't continue, or a source has aborted on its own.
    Failed {
        /// The migration.
        migration: MigrationId,
        /// The cause, for the coordinator's record and for users.
        reason: AbortReason,
    },
    /// The coordinator has committed the migration: these hosts may run these VMs.
    Commit {
        /// The migration.
        migration: MigrationId,
        /// All VMs of the migration.
        places: Vec<Place>,
    },
    /// The coordinator has aborted the migration: the VMs stay on their sources.
    Abort {
        /// The migration.
        migration: MigrationId,
        /// All VMs of the migration. Empty if the coordinator has forgotten the migration, which it does once all hosts
        /// have settled.
        places: Vec<Place>,
    },
    /// A host has carried the decision out.
    Settled {
        /// The migration.
        migration: MigrationId,
        /// VMs that the decision places on this host and that it doesn't have, because its daemon restarted after its
        /// vote.
        lost: Vec<VmId>,
    },
    /// To the coordinator: a host asks for a migration's decision.
    Outcome {
        /// The migration.
        migration: MigrationId,
    },
    /// The origin runs these VMs: queue pairs connected to them resume, towards that host.
    Running {
        /// The VMs' last migration that has ended.
        after: MigrationId,
        /// The host that runs the VMs and made the announcement.
        origin: HostId,
        /// The VMs.
        vms: Vec<(VmId, Epoch)>,
        /// Hosts to which the receiver forwards the message.
        forward_to: Vec<HostId>,
    },
    /// At these hosts, queue pairs connected to the VMs have resumed.
    Ready {
        /// `after` of the announcement.
        after: MigrationId,
        /// The host that announced.
        origin: HostId,
        /// The hosts.
        hosts: Vec<HostId>,
    },
    /// A host asks where a VM runs. It asks the coordinator and the VM's last known host.
    Where {
        /// The VM.
        vm: VmId,
    },
    /// The coordinator's answer to `Where`. The VM may not run there yet.
    At {
        /// The VM's host and epoch in the ledger.
        place: Place,
    },
    /// The coordinator's answer to `Where`: the VM was lost with its host, or has ended.
    Lost {
        /// The VM.
        vm: VmId,
        /// Its last epoch.
        epoch: Epoch,
    },
}

/// Why a migration was aborted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, thiserror::Error)]
pub enum AbortReason {
    /// A user or a monitor cancelled it.
    #[error("it was cancelled")]
    Cancelled,
    /// A destination lacks capacity for its VMs.
    #[error("a destination has no room for its VMs")]
    NoRoom,
    /// A source doesn't run one of its VMs.
    #[error("a source doesn't run one of its VMs")]
    NotHere,
    /// A VM of it takes part in another migration, or a host in too many.
    #[error("a host or VM is busy with another migration")]
    Busy,
    /// The stream from source to destination broke.
    #[error("the stream from source to destination broke")]
    Stream,
    /// A peer's host didn't suspend its queue pairs before the switchover's timeout.
    #[error("a host of a peer didn't stop its queue pairs in time")]
    Peers,
    /// A timeout of [`crate::Config`] expired.
    #[error("it took too long")]
    Timeout,
    /// The daemon of a participating host restarted.
    #[error("a host that takes part was restarted")]
    Restarted,
    /// A VM's epoch changed after the migration had begun.
    #[error("a VM's owner changed meanwhile")]
    Epoch,
    /// It was queued behind its peers' switchovers for longer than [`crate::Config::queue_ms`].
    #[error("it waited too long for migrations of its VMs' peers to switch over")]
    Queue,
}

impl Body {
    /// The kind of message, for logs.
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
            Self::Lost { .. } => "gone",
        }
    }
}
