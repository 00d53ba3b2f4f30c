//! Waits for suspended queue pairs whose requests are still in flight on the host's RDMA device (transport `verbs`).
//!
//! There is no timeout here: the protocol aborts a switchover that takes too long, which ends the wait.

use std::time::{Duration, Instant};

use nomad::{Event, MigrationId, VmId};

use crate::transport;

use super::MigrationManager;
use crate::migration::phases::Phase;

/// Polling interval.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Maximum number of migrations whose reason for waiting is kept. Users can query it after an abort.
const MAX_DRAIN_REASONS: usize = 64;

/// The side of a migration that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Drain {
    /// A source, for the VM's own queue pairs. Its monitor stops the VM afterwards.
    Own(VmId),
    /// A peers' host, for queue pairs connected to the VM.
    Peers(VmId),
}

/// Migrations that wait, and the time of the next poll.
#[derive(Debug, Default)]
pub(super) struct Draining {
    waiting: Vec<(Drain, MigrationId)>,
    next: Option<Instant>,
    /// Per migration: what was in flight at the last poll.
    why: Vec<(MigrationId, String)>,
}

impl Draining {
    /// The time of the next poll, if a migration waits.
    pub fn next(&self) -> Option<Instant> {
        self.next.filter(|_| !self.waiting.is_empty())
    }

    /// What a migration waited for at the last poll.
    pub fn why(&self, migration: MigrationId) -> Option<&str> {
        self.why.iter().find(|(of, _)| *of == migration).map(|(_, why)| why.as_str())
    }

    /// Ends a wait.
    pub fn forget(&mut self, what: Drain) {
        self.waiting.retain(|(other, _)| *other != what);
    }
}

impl MigrationManager {
    /// Polls once, and waits if requests are in flight. Returns the event that follows for a peers' host.
    pub(super) fn drain(&mut self, what: Drain, migration: MigrationId) -> Option<Event> {
        self.draining.forget(what);
        if let Some(why) = self.under_way(what) {
            tracing::debug!(migration = migration.0, "Held queue pairs aren't at rest: {why}");
            self.draining.why.retain(|(of, _)| *of != migration);
            if self.draining.why.len() >= MAX_DRAIN_REASONS {
                self.draining.why.remove(0);
            }
            self.draining.why.push((migration, why));
            self.draining.waiting.push((what, migration));
            self.draining.next = Instant::now().checked_add(DRAIN_POLL_INTERVAL);
            return None;
        }
        self.draining.why.retain(|(of, _)| *of != migration);
        match what {
            Drain::Own(vm) => {
                self.set(vm, Phase::Stop);
                None
            }
            Drain::Peers(vm) => Some(Event::QpsSuspended { migration, vm }),
        }
    }

    fn under_way(&self, what: Drain) -> Option<String> {
        let rest = match what {
            Drain::Own(vm) => self.call_engine(move |worker| worker.is_at_rest(transport::VmId(vm.0))),
            Drain::Peers(vm) => {
                self.call_engine(move |worker| worker.are_peers_at_rest(transport::VmId(vm.0)))
            }
        };
        // Without an engine nothing is in flight.
        rest.and_then(Result::err).map(|error| error.to_string())
    }

    /// Polls all waits, if it is time.
    pub(super) fn poll_draining(&mut self) {
        if self.draining.next().is_none_or(|next| next > Instant::now()) {
            return;
        }
        for (what, migration) in self.draining.waiting.clone() {
            // A previous iteration may have ended it.
            if !self.draining.waiting.contains(&(what, migration)) {
                continue;
            }
            if let Some(event) = self.drain(what, migration) {
                self.step(event);
            }
        }
    }
}
