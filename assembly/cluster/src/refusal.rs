//! Why the service says no, in a sentence.

use nomad::coordinator::Refused;
use nomad::{Epoch, Incarnation};

use crate::state::State;
use crate::store::StoreError;

/// Why.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// A name, an address or a number that can't be one.
    #[error("{0}")]
    Invalid(String),
    /// It isn't there.
    #[error("{0}")]
    Missing(String),
    /// Something stands against it, at present.
    #[error("{0}")]
    Conflict(String),
    /// What is said is older than what is known.
    #[error("{0}")]
    Old(String),
    /// There are too many.
    #[error("{0}")]
    TooMany(String),
    /// The database.
    #[error("Nothing was changed: {0}")]
    Store(#[from] StoreError),
}

impl Refusal {
    /// A host's message of an earlier start.
    pub(crate) fn old_start(host: &str, said: Incarnation, known: Incarnation) -> Self {
        Self::Old(format!(
            "Host {host} was started again since (start {}): what its start {} says means nothing any more",
            known.0, said.0
        ))
    }

    /// A message about a VM of an older epoch.
    pub(crate) fn old_epoch(vm: &str, said: Epoch, known: Epoch, owner: &str) -> Self {
        Self::Old(format!(
            "VM {vm} is in epoch {} on host {owner}: a message of epoch {} means nothing any more; stop the VM where it comes from",
            known.0, said.0
        ))
    }

    /// What the coordinator refuses, with names in place of numbers.
    pub(crate) fn of(refused: &Refused, state: &State) -> Self {
        let vm = |vm| state.vm_name(vm);
        let host = |host| state.host_name(host);
        match refused {
            Refused::Alive(one, wanted, owner) => Self::Conflict(format!(
                "VM {} can't be started on host {}: it runs on host {}",
                vm(*one),
                host(*wanted),
                host(*owner)
            )),
            Refused::Busy(one, migration) => Self::Conflict(format!(
                "VM {} can't be changed now: {migration} isn't over, and moves it. Wait for it, or cancel it",
                vm(*one)
            )),
            Refused::There(one, at) => {
                Self::Conflict(format!("VM {} can't move to host {}: it runs there", vm(*one), host(*at)))
            }
            Refused::NoSuchVm(_) | Refused::NoSuchHost(..) | Refused::UnknownHost(_) => {
                Self::Missing(refused.to_string())
            }
            Refused::Number(_) | Refused::Twice(_) | Refused::Itself(_) => Self::Invalid(refused.to_string()),
        }
    }
}
