//! Phases of VMs' migrations, as monitors query them.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

/// Maximum number of VMs with a phase, unless more are in a migration.
const MAX_RECORDED_VMS: usize = 4096;

/// The phase of a VM's migration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Phase {
    /// No migration is known to this host.
    #[default]
    Idle,
    /// This host has requested a migration from the cluster service.
    Begun,
    /// Source: pre-copy of memory and state, while the VM runs. The migration's number.
    Copying(u64),
    /// Source: peers' queue pairs are suspended; the monitor is to stop the VM now.
    Stop,
    /// Source: the VM is stopped, and the rest of its state moves to the destination.
    Handing,
    /// Destination: capacity is reserved. The migration's number.
    Reserved(u64),
    /// Destination: committed; the monitor may run the vCPUs.
    Running,
    /// Source: committed; another host runs the VM.
    Moved,
    /// Source: aborted for this reason; this host runs the VM.
    Aborted(String),
    /// Destination: committed, but the VM's devices failed. The log has the reason.
    Failed,
}

impl Phase {
    /// Whether the migration has ended.
    #[must_use]
    pub fn is_end(&self) -> bool {
        matches!(self, Self::Running | Self::Moved | Self::Aborted(_) | Self::Failed)
    }
}

/// A VM's last migration.
#[derive(Debug, Default)]
struct Last {
    phase: Phase,
    /// The number of its monitor's attempt, if the VM moves in a group.
    attempt: Option<u64>,
    /// At the source: the migration's number, and the hosts of the VM's peers.
    peers: Option<(u64, BTreeSet<String>)>,
    /// The epoch in which the VM runs here, or will run here after a commit; 0: not known.
    epoch: u64,
    /// During pre-copy: the VM whose switchover goes first.
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

    /// Sets a VM's phase, and notifies waiters.
    pub fn set(&self, vm: &str, phase: Phase) {
        let mut all = self.all();
        make_room(&mut all, vm);
        let last = all.entry(vm.to_owned()).or_default();
        last.phase = phase;
        last.waits_for = None;
        drop(all);
        self.changed();
    }

    /// During pre-copy: another VM, a peer or a peer of its group, switches over first.
    pub fn set_waits_for(&self, vm: &str, other: &str) {
        if let Some(last) = self.all().get_mut(vm).filter(|last| matches!(last.phase, Phase::Copying(_))) {
            last.waits_for = Some(other.to_owned());
        }
    }

    /// The VM that switches over first, by name.
    #[must_use]
    pub fn waits_for(&self, vm: &str) -> Option<String> {
        self.all().get(vm)?.waits_for.clone()
    }

    /// At the start of a switchover: the hosts of the VM's peers, which suspend queue pairs connected to it.
    pub fn set_peers(&self, vm: &str, migration: u64, hosts: BTreeSet<String>) {
        if let Some(last) = self.all().get_mut(vm) {
            last.peers = Some((migration, hosts));
        }
    }

    /// Sets the epoch in which a VM runs here, or will run here after a commit.
    pub fn set_epoch(&self, vm: &str, epoch: u64) {
        let mut all = self.all();
        make_room(&mut all, vm);
        all.entry(vm.to_owned()).or_default().epoch = epoch;
    }

    /// The epoch of [`Phases::set_epoch`]; 0: not known.
    #[must_use]
    pub fn epoch(&self, vm: &str) -> u64 {
        self.all().get(vm).map_or(0, |last| last.epoch)
    }

    /// The hosts of a VM's peers in its last migration as source, with the migration's number.
    #[must_use]
    pub fn peers(&self, vm: &str) -> Option<(u64, BTreeSet<String>)> {
        self.all().get(vm)?.peers.clone()
    }

    /// Requests a migration. Returns `false` while another one is in progress. `attempt`: the VM moves in a group, and
    /// its monitor retries. A request with the number of the last attempt changes nothing, whatever its result.
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

    /// Cancels a request. Returns `false`, and changes nothing, if the migration has begun or wasn't requested.
    pub fn withdraw(&self, vm: &str, phase: Phase) -> bool {
        let mut all = self.all();
        let Some(asked) = all.get_mut(vm).filter(|asked| asked.phase == Phase::Begun) else { return false };
        asked.phase = phase;
        drop(all);
        self.changed();
        true
    }

    /// Waits for a wanted phase, without a timeout.
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

/// Drops ended migrations when the table is full and another VM needs an entry.
fn make_room(all: &mut HashMap<String, Last>, vm: &str) {
    if all.len() >= MAX_RECORDED_VMS && !all.contains_key(vm) {
        all.retain(|_, last| last.phase != Phase::Idle && !last.phase.is_end());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A repeated attempt changes nothing, whatever its result. A new one begins after the previous one has ended.
    #[test]
    fn an_attempt_is_begun_once() {
        let phases = Phases::default();
        assert!(phases.begin("a", Some(1)));
        assert_eq!(phases.get("a"), Phase::Begun);
        phases.set("a", Phase::Copying(7));
        assert!(phases.begin("a", Some(1)));
        assert_eq!(phases.get("a"), Phase::Copying(7));
        assert!(!phases.begin("a", Some(2)), "another one is under way");
        assert!(!phases.begin("a", None));
        phases.set("a", Phase::Aborted("no".to_owned()));
        assert!(phases.begin("a", Some(1)));
        assert_eq!(phases.get("a"), Phase::Aborted("no".to_owned()), "the monitor hasn't heard of that");
        assert!(phases.begin("a", Some(2)));
        assert_eq!(phases.get("a"), Phase::Begun);
    }

    /// The VM that goes first is known during pre-copy only.
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

    /// A migration that has begun can't be withdrawn.
    #[test]
    fn only_a_request_is_withdrawn() {
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
