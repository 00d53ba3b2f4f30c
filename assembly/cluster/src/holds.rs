//! How long hosts held what faces VMs that moved: for those who look at a migration afterwards. It isn't written down; another instance that takes over
//! knows nothing of what was reported before.

use std::collections::BTreeMap;

use nomad::{HostId, MigrationId, VmId};

/// Migrations that are remembered, the last ones.
const MIGRATIONS: usize = 256;
/// Reports of one migration at most.
const REPORTS: usize = 4096;

/// What hosts have said.
#[derive(Debug, Default)]
pub(crate) struct Holds(BTreeMap<MigrationId, BTreeMap<(VmId, HostId), u64>>);

impl Holds {
    /// A host held what faces a VM for so many microseconds. The first report counts: one that is repeated is the same.
    pub fn report(&mut self, migration: MigrationId, vm: VmId, host: HostId, microseconds: u64) {
        let reports = self.0.entry(migration).or_default();
        if reports.len() < REPORTS {
            reports.entry((vm, host)).or_insert(microseconds);
        }
        while self.0.len() > MIGRATIONS {
            self.0.pop_first();
        }
    }

    /// What is known of a migration: VM, host, microseconds.
    pub fn of(&self, migration: MigrationId) -> impl Iterator<Item = (VmId, HostId, u64)> {
        let reports = self.0.get(&migration).into_iter().flatten();
        reports.map(|((vm, host), microseconds)| (*vm, *host, *microseconds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The last migrations are remembered, each with what was said first, and with a limit.
    #[test]
    fn what_is_remembered_is_bounded() {
        let mut holds = Holds::default();
        for migration in 1..=1000 {
            holds.report(MigrationId(migration), VmId(1), HostId(2), migration);
            holds.report(MigrationId(migration), VmId(1), HostId(2), 7);
        }
        assert_eq!(holds.0.len(), MIGRATIONS);
        assert_eq!(holds.of(MigrationId(1000)).collect::<Vec<_>>(), [(VmId(1), HostId(2), 1000)]);
        assert_eq!(holds.of(MigrationId(1)).count(), 0);
        for host in 0..2 * u32::try_from(REPORTS).unwrap() {
            holds.report(MigrationId(1000), VmId(1), HostId(host), 1);
        }
        assert_eq!(holds.of(MigrationId(1000)).count(), REPORTS);
    }
}
