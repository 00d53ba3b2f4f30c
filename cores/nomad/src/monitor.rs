//! A VM's monitor in a migration that others decide: what it makes of what its daemon says, and when its guest may run.
//!
//! ```text
//!  source       copies ─▶ stopped ───┐ asks its daemon                          ┌─ Moved ─▶ ends
//!                                    ├──────▶ Pending, silent: asks again ──────┤
//!  destination  fills ─▶ has voted ──┘        forgotten: asks the service ──────┼─ Stays ─▶ source: guest runs   destination: ends
//!                                                                               └─ Runs ──▶ destination: guest runs
//! ```
//! From its stop (source) or vote (destination) on, a monitor takes nothing for a decision but a decision: no silence, however long, and no answer of a daemon that
//! was started again and knows nothing of the migration. That one asks the service whether the VM may run on its host ([`crate::coordinator::MayRun`]).

/// Which side a monitor is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Side {
    /// It had the VM.
    Source,
    /// It is to have it.
    Destination,
}

/// What its daemon says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Answer {
    /// It isn't decided, or the daemon hasn't heard.
    Pending,
    /// The VM runs on this host.
    Runs,
    /// It runs on another host.
    Moved,
    /// The migration was given up.
    Stays,
    /// The VM is here, and its devices don't work.
    Failed,
    /// The daemon knows of no such migration.
    Forgotten,
    /// It can't be asked.
    Silent,
}

/// What the service says of a VM whose daemon has forgotten the migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Claimed {
    /// It isn't decided, or the service can't be asked.
    Unknown,
    /// The VM is this host's.
    Here,
    /// It isn't.
    Elsewhere,
}

/// What a monitor does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Next {
    /// Its guest stands still, and it asks again.
    AskAgain,
    /// Its guest stands still, and it has its daemon ask the service.
    AskTheService,
    /// It runs its guest, which has come.
    Runs,
    /// It lets its guest go on, which stays; a destination ends.
    GivenUp,
    /// It ends: the guest runs elsewhere.
    Moved,
    /// It ends: the guest is here, and what served its devices has lost them.
    Lost,
}

/// What a monitor does with an answer of its daemon, once it has stopped its guest, or has voted.
#[must_use]
pub fn next(side: Side, answer: Answer) -> Next {
    match (side, answer) {
        (_, Answer::Pending | Answer::Silent) => Next::AskAgain,
        (_, Answer::Forgotten) => Next::AskTheService,
        (Side::Source, Answer::Moved) => Next::Moved,
        (Side::Destination, Answer::Runs) => Next::Runs,
        (_, Answer::Stays) | (Side::Source, Answer::Runs) | (Side::Destination, Answer::Moved) => {
            Next::GivenUp
        }
        (_, Answer::Failed) => Next::Lost,
    }
}

/// What it does with the service's answer.
#[must_use]
pub fn after_claim(side: Side, claimed: Claimed) -> Next {
    match (side, claimed) {
        (_, Claimed::Unknown) => Next::AskAgain,
        (Side::Source, Claimed::Here) | (Side::Destination, Claimed::Elsewhere) => Next::GivenUp,
        (Side::Source, Claimed::Elsewhere) => Next::Moved,
        // Its daemon was started again: the state of its devices is gone.
        (Side::Destination, Claimed::Here) => Next::Lost,
    }
}
