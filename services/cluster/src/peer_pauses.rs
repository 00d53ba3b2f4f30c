//! Peer pauses of migrations: how long hosts suspended the queue pairs connected to a VM. Users query them after a
//! migration. They are volatile: an instance that takes over doesn't have them.

use std::collections::BTreeMap;

use nomad::{HostId, MigrationId, VmId};

/// Maximum number of migrations with records; the oldest is dropped first.
const MIGRATIONS: usize = 256;
/// Maximum number of reports of one migration.
const REPORTS: usize = 4096;

/// The reported peer pauses, in microseconds.
#[derive(Debug, Default)]
pub(crate) struct PeerPauses(BTreeMap<MigrationId, BTreeMap<(VmId, HostId), u64>>);

impl PeerPauses {
    /// Records a host's pause towards a VM. Only the first report counts: a second one is a retransmission.
    pub fn report(&mut self, migration: MigrationId, vm: VmId, host: HostId, microseconds: u64) {
        let reports = self.0.entry(migration).or_default();
        if reports.len() < REPORTS {
            reports.entry((vm, host)).or_insert(microseconds);
        }
        while self.0.len() > MIGRATIONS {
            self.0.pop_first();
        }
    }

    /// The pauses of a migration: VM, host, microseconds.
    pub fn of(&self, migration: MigrationId) -> impl Iterator<Item = (VmId, HostId, u64)> {
        let reports = self.0.get(&migration).into_iter().flatten();
        reports.map(|((vm, host), microseconds)| (*vm, *host, *microseconds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory is bounded: the last migrations stay, each with its first report, up to a limit.
    #[test]
    fn what_is_remembered_is_bounded() {
        let mut holds = PeerPauses::default();
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
