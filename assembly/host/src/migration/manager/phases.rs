//! How far migrations are, as monitors are told.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

/// VMs that are remembered at most.
const MOST: usize = 4096;

/// Where a VM is in a migration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Phase {
    /// In none that this host knows of.
    #[default]
    Idle,
    /// The cluster service was asked for one.
    Begun,
    /// It leaves, and runs: memory and state are copied. The migration's number.
    Copying(u64),
    /// Its peers' queue pairs are held: it is to be stopped now.
    Stop,
    /// It has stopped: the rest goes to the destination.
    Handing,
    /// It is to come here. The migration's number.
    Awaited(u64),
    /// It has come, and runs here: its vCPUs may run.
    Runs,
    /// It runs elsewhere.
    Moved,
    /// It doesn't move, for this reason: it runs where it was.
    Stays(String),
    /// It has come, and its devices don't work. The log says why.
    Failed,
}

impl Phase {
    /// Whether a migration has ended with it.
    #[must_use]
    pub fn is_end(&self) -> bool {
        matches!(self, Self::Runs | Self::Moved | Self::Stays(_) | Self::Failed)
    }
}

/// The phases of all VMs. Thread-safe.
#[derive(Debug, Default)]
pub struct Phases {
    of: Mutex<HashMap<String, Phase>>,
    changes: watch::Sender<u64>,
}

impl Phases {
    fn all(&self) -> MutexGuard<'_, HashMap<String, Phase>> {
        self.of.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A VM's phase.
    #[must_use]
    pub fn get(&self, vm: &str) -> Phase {
        self.all().get(vm).cloned().unwrap_or_default()
    }

    /// A VM is in another phase.
    pub fn set(&self, vm: &str, phase: Phase) {
        let mut all = self.all();
        if all.len() >= MOST && !all.contains_key(vm) {
            all.retain(|_, phase| !phase.is_end());
        }
        all.insert(vm.to_owned(), phase);
        drop(all);
        self.changes.send_modify(|changes| *changes += 1);
    }

    /// A migration is asked for: `false` where one is under way.
    pub fn begin(&self, vm: &str) -> bool {
        let before = self.get(vm);
        let free = before == Phase::Idle || before.is_end();
        if free {
            self.set(vm, Phase::Begun);
        }
        free
    }

    /// Waits until a VM is in a phase that is waited for; the caller limits the time.
    pub async fn wait(&self, vm: &str, wanted: impl Fn(&Phase) -> bool) -> Phase {
        let mut changes = self.changes.subscribe();
        loop {
            changes.mark_unchanged();
            let phase = self.get(vm);
            if wanted(&phase) || changes.changed().await.is_err() {
                return phase;
            }
        }
    }
}
