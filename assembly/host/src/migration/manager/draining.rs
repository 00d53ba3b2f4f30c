//! Queue pairs that are held and whose requests the host's RDMA device still has (transport `verbs`): what waits for their ends.
//!
//! Nothing here limits that time: the protocol gives a switch-over up that takes too long, and then nobody waits any more.

use std::time::{Duration, Instant};

use nomad::{Event, MigrationId, VmId};

use crate::transport;

use super::{Mover, Phase};

/// Between two looks.
const LOOK: Duration = Duration::from_millis(1);
/// Migrations of which it is remembered what they waited for: those that were given up leave it behind for who asks.
const REMEMBERED: usize = 64;

/// Who waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Drain {
    /// A source, for its answer to the VM's own queue pairs: it is to stop then.
    Own(VmId),
    /// A peers' host, for its answer to those that face the VM.
    Peers(VmId),
}

/// Those who wait, and when to look again.
#[derive(Debug, Default)]
pub(super) struct Draining {
    waiting: Vec<(Drain, MigrationId)>,
    next: Option<Instant>,
    /// What was still under way when it was looked at last.
    why: Vec<(MigrationId, String)>,
}

impl Draining {
    /// When to look again.
    pub fn next(&self) -> Option<Instant> {
        self.next.filter(|_| !self.waiting.is_empty())
    }

    /// What a migration waited for last.
    pub fn why(&self, migration: MigrationId) -> Option<&str> {
        self.why.iter().find(|(of, _)| *of == migration).map(|(_, why)| why.as_str())
    }

    /// Nobody waits for that any more.
    pub fn forget(&mut self, what: Drain) {
        self.waiting.retain(|(other, _)| *other != what);
    }
}

impl Mover {
    /// Waits for the ends of requests; the event where there are none.
    pub(super) fn drain(&mut self, what: Drain, migration: MigrationId) -> Option<Event> {
        self.draining.forget(what);
        if let Some(why) = self.under_way(what) {
            tracing::debug!(migration = migration.0, "Held queue pairs aren't at rest: {why}");
            self.draining.why.retain(|(of, _)| *of != migration);
            if self.draining.why.len() >= REMEMBERED {
                self.draining.why.remove(0);
            }
            self.draining.why.push((migration, why));
            self.draining.waiting.push((what, migration));
            self.draining.next = Instant::now().checked_add(LOOK);
            return None;
        }
        self.draining.why.retain(|(of, _)| *of != migration);
        match what {
            Drain::Own(vm) => {
                self.set(vm, Phase::Stop);
                None
            }
            Drain::Peers(vm) => Some(Event::Held { migration, vm }),
        }
    }

    fn under_way(&self, what: Drain) -> Option<String> {
        let rest = match what {
            Drain::Own(vm) => self.ask(move |worker| worker.is_at_rest(transport::VmId(vm.0))),
            Drain::Peers(vm) => self.ask(move |worker| worker.are_peers_at_rest(transport::VmId(vm.0))),
        };
        // Without an engine nothing is under way.
        rest.and_then(Result::err).map(|error| error.to_string())
    }

    /// Looks again, when it is time to.
    pub(super) fn look_at_draining(&mut self) {
        if self.draining.next().is_none_or(|next| next > Instant::now()) {
            return;
        }
        for (what, migration) in self.draining.waiting.clone() {
            // A step before this one may have ended it.
            if !self.draining.waiting.contains(&(what, migration)) {
                continue;
            }
            if let Some(event) = self.drain(what, migration) {
                self.step(event);
            }
        }
    }
}
