//! A record that couldn't be written: the coordinator goes on as it was before the step that made it, and no migration suffers from it.

use std::collections::BTreeMap;

use super::{Action, Coordinator, Ledger, Progress, Record, Stage};
use crate::names::MigrationId;

/// What a coordinator knows of migrations besides its ledger, at one time.
#[derive(Debug, Clone, Default)]
pub struct Checkpoint(BTreeMap<MigrationId, Progress>);

impl Coordinator {
    /// What it knows besides its ledger, as of now.
    #[must_use]
    pub fn checkpoint(&self) -> Checkpoint {
        Checkpoint(self.progress.clone())
    }

    /// Goes back to a checkpoint, with the ledger as it is really written, which may have what a failed write was to bring. Says again what is waited for, and gives each
    /// migration the time of its stage anew: what a failed step was to set wasn't.
    pub fn roll_back(&mut self, checkpoint: Checkpoint, ledger: Ledger, actions: &mut Vec<Action>) {
        self.ledger = ledger;
        self.progress = checkpoint.0;
        self.progress.retain(|migration, _| self.ledger.migrations.contains_key(migration));
        let bind = self.ledger.migrations.iter().filter(|(_, stored)| stored.binds());
        let migrations: Vec<_> = bind.map(|(migration, stored)| (*migration, stored.decision)).collect();
        for (migration, decision) in migrations {
            match (decision, self.stage(migration)) {
                (None, Some(_)) | (Some(_), Some(Stage::Telling)) => self.enter(migration, actions),
                (None, None) => {
                    // Its beginning was written after all, and whoever asked was told that it wasn't.
                    self.write(Record::Aborted { migration }, actions);
                    self.tell_decision(migration, actions);
                }
                (Some(_), _) => self.tell_decision(migration, actions),
            }
        }
        let owed: Vec<_> = self.ledger.migrations.keys().copied().filter(|one| self.is_owed(*one)).collect();
        for migration in owed {
            self.progress.remove(&migration);
            self.remind(migration, actions);
        }
        self.admit(actions);
    }
}
