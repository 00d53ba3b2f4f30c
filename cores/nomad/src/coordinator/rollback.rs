//! Rollback after a failed write: the coordinator returns to its state before the step that made the record. No
//! migration fails by that.

use std::collections::BTreeMap;

use super::{Action, Coordinator, Ledger, MigrationProgress, Record, Stage};
use crate::names::MigrationId;

/// A coordinator's volatile state of its migrations, which isn't in the ledger, at one time.
#[derive(Debug, Clone, Default)]
pub struct Checkpoint(BTreeMap<MigrationId, MigrationProgress>);

impl Coordinator {
    /// A copy of the present volatile state.
    #[must_use]
    pub fn checkpoint(&self) -> Checkpoint {
        Checkpoint(self.progress.clone())
    }

    /// Returns to a checkpoint. `ledger` is what the store really has, which may include the failed write. Retransmits
    /// outstanding requests, and restarts the timer of each migration's stage, because the failed step may not have set
    /// it.
    pub fn roll_back(&mut self, checkpoint: Checkpoint, ledger: Ledger, actions: &mut Vec<Action>) {
        self.ledger = ledger;
        self.progress = checkpoint.0;
        self.progress.retain(|migration, _| self.ledger.migrations.contains_key(migration));
        let bind = self.ledger.migrations.iter().filter(|(_, stored)| stored.binds());
        let migrations: Vec<_> = bind.map(|(migration, stored)| (*migration, stored.decision)).collect();
        for (migration, decision) in migrations {
            match (decision, self.stage(migration)) {
                (None, Some(_)) | (Some(_), Some(Stage::Settling)) => self.enter(migration, actions),
                (None, None) => {
                    // The store has its beginning after all, but its requester has received an error.
                    self.write(Record::Aborted { migration }, actions);
                    self.start_settling(migration, actions);
                }
                (Some(_), _) => self.start_settling(migration, actions),
            }
        }
        let owed: Vec<_> =
            self.ledger.migrations.keys().copied().filter(|one| self.is_released(*one)).collect();
        for migration in owed {
            self.progress.remove(&migration);
            self.resend_kept_decision(migration, actions);
        }
        self.admit(actions);
    }
}
