//! Why migrations were given up, as far as this host has had to do with it: the last ones.

use std::collections::BTreeMap;

use nomad::MigrationId;

/// Migrations whose reasons are kept. A monitor asks for its own while that ends, or soon after; more can't be under way on one host.
const MAX_REASONS: usize = 2 * nomad::config::MAX_MIGRATIONS_PER_HOST;

/// The reasons, by migration; those of the oldest are dropped.
#[derive(Debug, Default)]
pub(super) struct Reasons(BTreeMap<MigrationId, String>);

impl Reasons {
    pub fn note(&mut self, migration: MigrationId, reason: String) {
        self.0.insert(migration, reason);
        while self.0.len() > MAX_REASONS {
            self.0.pop_first();
        }
    }

    pub fn of(&self, migration: MigrationId) -> Option<&str> {
        self.0.get(&migration).map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However many migrations a daemon lives to see.
    #[test]
    fn reasons_do_not_pile_up() {
        let mut reasons = Reasons::default();
        for migration in 1..=10_000 {
            reasons.note(MigrationId(migration), format!("{migration} took too long"));
            assert!(reasons.0.len() <= MAX_REASONS);
        }
        assert_eq!(reasons.of(MigrationId(10_000)), Some("10000 took too long"));
        assert_eq!(reasons.of(MigrationId(1)), None);
    }
}
