//! How far migrations are, as monitors are told.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

/// VMs that are remembered at most.
const MAX_REMEMBERED_VMS: usize = 4096;

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

/// A VM's last migration.
#[derive(Debug, Default)]
struct Last {
    phase: Phase,
    /// Which try of its monitor's it was, where it moves together with others.
    attempt: Option<u64>,
    /// Of one that leaves: the migration's number, and the hosts of its peers.
    peers: Option<(u64, BTreeSet<String>)>,
    /// The epoch in which it runs here, or is to run here; 0: not known.
    epoch: u64,
    /// While it is copied: the VM that moves first.
    waits_for: Option<String>,
}

/// The phases of all VMs. Thread-safe.
#[derive(Debug, Default)]
pub struct Phases {
    of: Mutex<HashMap<String, Last>>,
    changes: watch::Sender<u64>,
}

impl Phases {
    fn all(&self) -> MutexGuard<'_, HashMap<String, Last>> {
        self.of.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        self.changes.send_modify(|changes| *changes += 1);
    }

    /// A VM's phase.
    #[must_use]
    pub fn get(&self, vm: &str) -> Phase {
        self.all().get(vm).map(|last| last.phase.clone()).unwrap_or_default()
    }

    /// A VM is in another phase.
    pub fn set(&self, vm: &str, phase: Phase) {
        let mut all = self.all();
        make_room(&mut all, vm);
        let last = all.entry(vm.to_owned()).or_default();
        last.phase = phase;
        last.waits_for = None;
        drop(all);
        self.changed();
    }

    /// A VM that is copied has to wait until another one, its peer or a peer of its group, has moved.
    pub fn set_waits_for(&self, vm: &str, other: &str) {
        if let Some(last) = self.all().get_mut(vm).filter(|last| matches!(last.phase, Phase::Copying(_))) {
            last.waits_for = Some(other.to_owned());
        }
    }

    /// That other VM, by name.
    #[must_use]
    pub fn waits_for(&self, vm: &str) -> Option<String> {
        self.all().get(vm)?.waits_for.clone()
    }

    /// A VM that leaves is about to stop: the hosts of its peers, which hold what faces it.
    pub fn set_peers(&self, vm: &str, migration: u64, hosts: BTreeSet<String>) {
        if let Some(last) = self.all().get_mut(vm) {
            last.peers = Some((migration, hosts));
        }
    }

    /// The epoch in which a VM runs here, or is to run here, if its migration is decided so.
    pub fn set_epoch(&self, vm: &str, epoch: u64) {
        let mut all = self.all();
        make_room(&mut all, vm);
        all.entry(vm.to_owned()).or_default().epoch = epoch;
    }

    /// That epoch; 0: not known.
    #[must_use]
    pub fn epoch(&self, vm: &str) -> u64 {
        self.all().get(vm).map_or(0, |last| last.epoch)
    }

    /// Who held what faced a VM when it left: the migration's number, and hosts.
    #[must_use]
    pub fn peers(&self, vm: &str) -> Option<(u64, BTreeSet<String>)> {
        self.all().get(vm)?.peers.clone()
    }

    /// A migration is asked for: `false` where another one is under way. `attempt`: it moves with others, and its monitor asks again and again; nothing
    /// changes where that is the try that was asked for last, whatever came of it.
    pub fn begin(&self, vm: &str, attempt: Option<u64>) -> bool {
        let mut all = self.all();
        make_room(&mut all, vm);
        let last = all.entry(vm.to_owned()).or_default();
        if attempt.is_some() && attempt == last.attempt {
            return true;
        }
        let free = last.phase == Phase::Idle || last.phase.is_end();
        if free {
            *last = Last { phase: Phase::Begun, attempt, ..Last::default() };
            drop(all);
            self.changed();
        }
        free
    }

    /// What was asked for isn't wanted any more; `false`, and nothing, where it has begun meanwhile, or wasn't asked for.
    pub fn withdraw(&self, vm: &str, phase: Phase) -> bool {
        let mut all = self.all();
        let Some(asked) = all.get_mut(vm).filter(|asked| asked.phase == Phase::Begun) else { return false };
        asked.phase = phase;
        drop(all);
        self.changed();
        true
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

/// Forgets migrations that are over where another VM's has no room.
fn make_room(all: &mut HashMap<String, Last>, vm: &str) {
    if all.len() >= MAX_REMEMBERED_VMS && !all.contains_key(vm) {
        all.retain(|_, last| last.phase != Phase::Idle && !last.phase.is_end());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is said again changes nothing, whatever has come of it; what is tried again begins anew, once the one before is over.
    #[test]
    fn a_try_is_begun_once() {
        let phases = Phases::default();
        assert!(phases.begin("a", Some(1)));
        assert_eq!(phases.get("a"), Phase::Begun);
        phases.set("a", Phase::Copying(7));
        assert!(phases.begin("a", Some(1)));
        assert_eq!(phases.get("a"), Phase::Copying(7));
        assert!(!phases.begin("a", Some(2)), "another one is under way");
        assert!(!phases.begin("a", None));
        phases.set("a", Phase::Stays("no".to_owned()));
        assert!(phases.begin("a", Some(1)));
        assert_eq!(phases.get("a"), Phase::Stays("no".to_owned()), "the monitor hasn't heard of that");
        assert!(phases.begin("a", Some(2)));
        assert_eq!(phases.get("a"), Phase::Begun);
    }

    /// What a VM waits for is known while it is copied, and not when it is its turn.
    #[test]
    fn a_vm_waits_for_another_while_it_is_copied() {
        let phases = Phases::default();
        phases.set_waits_for("a", "b");
        assert_eq!(phases.waits_for("a"), None, "it isn't copied");
        phases.set("a", Phase::Copying(7));
        phases.set_waits_for("a", "b");
        assert_eq!(phases.waits_for("a").as_deref(), Some("b"));
        phases.set("a", Phase::Stop);
        assert_eq!(phases.waits_for("a"), None);
    }

    /// What has begun meanwhile isn't withdrawn.
    #[test]
    fn only_a_wish_is_withdrawn() {
        let phases = Phases::default();
        assert!(!phases.withdraw("a", Phase::Idle));
        assert!(phases.begin("a", None));
        assert!(phases.withdraw("a", Phase::Idle));
        assert_eq!(phases.get("a"), Phase::Idle);
        phases.set("a", Phase::Copying(7));
        assert!(!phases.withdraw("a", Phase::Idle));
        assert_eq!(phases.get("a"), Phase::Copying(7));
    }
}
