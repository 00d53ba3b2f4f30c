//! Errors with which the service refuses requests, each with a message for users.

use nomad::coordinator::Refused;
use nomad::{Epoch, Incarnation};

use crate::state::State;
use crate::store_error::StoreError;

/// Why the service refuses a request.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// A name, an address or a number is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The VM, host or migration doesn't exist.
    #[error("{0}")]
    Missing(String),
    /// The present state of a VM or host forbids it.
    #[error("{0}")]
    Conflict(String),
    /// The request has an older incarnation or epoch than the ledger.
    #[error("{0}")]
    Old(String),
    /// A limit is reached.
    #[error("{0}")]
    TooMany(String),
    /// The store failed; the state is unchanged.
    #[error("Nothing was changed: {0}")]
    Store(#[from] StoreError),
}

impl Refusal {
    /// A request of a host's earlier incarnation.
    pub(crate) fn old_start(host: &str, said: Incarnation, known: Incarnation) -> Self {
        Self::Old(format!(
            "Host {host} was started again since (start {}): what its start {} says means nothing any more",
            known.0, said.0
        ))
    }

    /// A request about a VM with an older epoch than the ledger's.
    pub(crate) fn old_epoch(vm: &str, said: Epoch, known: Epoch, owner: &str) -> Self {
        Self::Old(format!(
            "VM {vm} is in epoch {} on host {owner}: a message of epoch {} means nothing any more; stop the VM where it comes from",
            known.0, said.0
        ))
    }

    /// The coordinator's refusal, with names in place of numbers.
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
