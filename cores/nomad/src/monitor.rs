//! A monitor's part in a migration that the coordinator decides: how it reacts to its daemon's answers, and when its
//! guest may run.
//!
//! ```text
//!  source       copies ─▶ stopped ───┐ asks its daemon                          ┌─ Moved ─▶ ends
//!                                    ├──────▶ Pending, silent: asks again ──────┤
//!  destination  fills ─▶ has voted ──┘        forgotten: asks the service ──────┼─ Stays ─▶ source: guest runs   destination: ends
//!                                                                               └─ Runs ──▶ destination: guest runs
//! ```
//! A source's monitor that has stopped its guest, and a destination's monitor that has voted, act only on a decision. A
//! timeout is none. The answer of a restarted daemon that has forgotten the migration is none either: the monitor then
//! has the daemon ask the service whether the VM may run on its host ([`crate::coordinator::MayRun`]).

/// The monitor's side of the migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Side {
    /// It ran the VM before the migration.
    Source,
    /// It runs the VM after a commit.
    Destination,
}

/// The daemon's answer about the migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Answer {
    /// The migration isn't decided, or the daemon hasn't received the decision.
    Pending,
    /// The VM runs on this host.
    Running,
    /// The VM runs on another host.
    Moved,
    /// The migration was aborted.
    Aborted,
    /// The VM belongs to this host, but its devices failed.
    Failed,
    /// The daemon knows of no such migration.
    Forgotten,
    /// The daemon can't be reached.
    Silent,
}

/// The service's answer about a VM whose daemon has forgotten the migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ClaimResult {
    /// The migration isn't decided, or the service can't be reached.
    Unknown,
    /// This host may run the VM.
    Here,
    /// Another host may run the VM.
    Elsewhere,
}

/// The monitor's next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Next {
    /// It keeps its guest suspended, and asks its daemon again.
    Retry,
    /// It keeps its guest suspended, and has its daemon ask the service.
    AskService,
    /// A destination runs its guest.
    Running,
    /// The migration was aborted: a source resumes its guest, a destination ends.
    Aborted,
    /// It ends: the guest runs on another host.
    Moved,
    /// It ends: the guest belongs to this host, but its devices' state is lost.
    Lost,
}

/// The next step after the daemon's answer, for a monitor that has stopped its guest or has voted.
#[must_use]
pub fn next(side: Side, answer: Answer) -> Next {
    match (side, answer) {
        (_, Answer::Pending | Answer::Silent) => Next::Retry,
        (_, Answer::Forgotten) => Next::AskService,
        (Side::Source, Answer::Moved) => Next::Moved,
        (Side::Destination, Answer::Running) => Next::Running,
        (_, Answer::Aborted) | (Side::Source, Answer::Running) | (Side::Destination, Answer::Moved) => {
            Next::Aborted
        }
        (_, Answer::Failed) => Next::Lost,
    }
}

/// The next step after the service's answer.
#[must_use]
pub fn after_claim(side: Side, claimed: ClaimResult) -> Next {
    match (side, claimed) {
        (_, ClaimResult::Unknown) => Next::Retry,
        (Side::Source, ClaimResult::Here) | (Side::Destination, ClaimResult::Elsewhere) => Next::Aborted,
        (Side::Source, ClaimResult::Elsewhere) => Next::Moved,
        // The destination's daemon has restarted: the state of the VM's devices is lost.
        (Side::Destination, ClaimResult::Here) => Next::Lost,
    }
}
