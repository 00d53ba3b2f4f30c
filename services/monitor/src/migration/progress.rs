//! Progress of a migration, for the API's thread and for the client that requested the migration.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use control_api::migration::{MigrationPhase, MigrationProgress, MigrationReport, Packets};

use super::connection::Stop;

/// Interval of reports while a round is copied.
const REPORT_INTERVAL: Duration = Duration::from_millis(250);

/// The VM's current or last migration, if there was one. Thread-safe.
#[derive(Debug, Default)]
pub struct ProgressReporter(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    progress: Option<MigrationProgress>,
    began: Option<Instant>,
    reported: Option<Instant>,
    stop: Stop,
    /// A migration is running.
    busy: bool,
    /// The migration can't be cancelled any more.
    committed: bool,
    listener: Option<Arc<Packets>>,
}

/// A migration can't be cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotCancelled {
    /// No migration is running.
    #[error("No migration of this VM is under way")]
    None,
    /// The migration is committed.
    #[error("The migration is committed, so it can't be cancelled any more")]
    Committed,
}

impl ProgressReporter {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a migration; `None` when one is running. Reports also go to `listener`.
    pub fn begin(&self, destination: &str, listener: Option<Arc<Packets>>) -> Option<Stop> {
        let mut state = self.lock();
        if state.busy {
            return None;
        }
        *state = State {
            progress: Some(MigrationProgress {
                destination: destination.to_owned(),
                phase: MigrationPhase::Asking,
                round: 0,
                bytes_sent: 0,
                pages_left: 0,
                disk_bytes_left: 0,
                pages_asked_for: 0,
                bytes_per_second: 0,
                predicted_pause_ms: 0,
                throttle_percent: 0,
                waits_for: None,
                elapsed_ms: 0,
                problem: None,
                timeline: None,
            }),
            began: Some(Instant::now()),
            busy: true,
            listener,
            ..State::default()
        };
        Some(state.stop.clone())
    }

    /// Changes the progress and reports it. Logs it when the phase or the round changes; a round is reported several times a second.
    pub fn update(&self, change: impl FnOnce(&mut MigrationProgress)) {
        let mut state = self.lock();
        let elapsed = state.began.map_or(Duration::ZERO, |began| began.elapsed());
        let Some(progress) = &mut state.progress else { return };
        let before = (progress.phase, progress.round);
        change(progress);
        let advances = (progress.phase, progress.round) != before;
        progress.elapsed_ms = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
        let last = progress.phase.is_last();
        let progress = progress.clone();
        state.busy &= !last;
        state.reported = Some(Instant::now());
        let listener = if last { state.listener.take() } else { state.listener.clone() };
        drop(state);
        if advances {
            log(&progress);
        }
        if let Some(listener) = listener {
            // A listener that doesn't read, or has disconnected, misses reports; `inspect` has them. The send of the last one blocks.
            let sent = listener.send(&MigrationReport::Progress(Box::new(progress)), &[], last);
            if let Err(error) = sent {
                tracing::debug!(%error, "A report of the migration was not taken");
            }
        }
    }

    /// The VM waits until another VM has migrated; `None` ends that. Reported when it changes.
    pub fn set_waits_for(&self, other: Option<String>) {
        let known = self.lock().progress.as_ref().is_none_or(|progress| progress.waits_for == other);
        if !known {
            self.update(|progress| progress.waits_for = other);
        }
    }

    /// Records bytes sent while a round is copied, and reports them at intervals.
    pub fn report_sent(&self, bytes: u64) {
        let due = {
            let mut state = self.lock();
            let due = state.reported.is_none_or(|reported| reported.elapsed() >= REPORT_INTERVAL);
            if let (false, Some(progress)) = (due, &mut state.progress) {
                progress.bytes_sent = bytes;
            }
            due
        };
        if due {
            self.update(|progress| progress.bytes_sent = bytes);
        }
    }

    /// Records bytes of disks that are left while a round is copied. The next report of bytes sent includes them.
    pub fn report_disk_left(&self, bytes: u64) {
        if let Some(progress) = &mut self.lock().progress {
            progress.disk_bytes_left = bytes;
        }
    }

    /// Marks the migration as committed: it can't be cancelled from here on. `false` when it was cancelled before.
    pub fn commit(&self) -> bool {
        let mut state = self.lock();
        state.committed = !state.stop.is_set();
        state.committed
    }

    /// Cancels the running migration.
    pub fn cancel(&self) -> Result<(), NotCancelled> {
        let state = self.lock();
        match (state.busy, state.committed) {
            (false, _) => Err(NotCancelled::None),
            (true, true) => Err(NotCancelled::Committed),
            (true, false) => {
                state.stop.set();
                Ok(())
            }
        }
    }

    /// Progress of the running migration, or of the last one.
    pub fn progress(&self) -> Option<MigrationProgress> {
        let state = self.lock();
        let mut progress = state.progress.clone()?;
        if state.busy {
            let elapsed = state.began.map_or(Duration::ZERO, |began| began.elapsed());
            progress.elapsed_ms = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
        }
        Some(progress)
    }
}

/// Logs a migration's progress.
fn log(progress: &MigrationProgress) {
    tracing::info!(
        phase = ?progress.phase,
        round = progress.round,
        bytes = progress.bytes_sent,
        left = progress.pages_left,
        disk_bytes_left = progress.disk_bytes_left,
        predicted_pause_ms = progress.predicted_pause_ms,
        throttle = progress.throttle_percent,
        "Migration"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One migration at a time; a cancel stops its streams, and is refused after the commit.
    #[test]
    fn a_migration_is_cancelled_until_it_is_committed() {
        let reporter = ProgressReporter::default();
        assert_eq!(reporter.cancel(), Err(NotCancelled::None));
        let stop = reporter.begin("h", None).unwrap();
        assert!(reporter.begin("h", None).is_none());
        reporter.cancel().unwrap();
        assert!(stop.is_set() && !reporter.commit());
        reporter.update(|progress| progress.phase = MigrationPhase::Failed);
        assert_eq!(reporter.cancel(), Err(NotCancelled::None));
        let stop = reporter.begin("h", None).unwrap();
        assert!(reporter.commit());
        assert_eq!(reporter.cancel(), Err(NotCancelled::Committed));
        assert!(!stop.is_set());
    }

    /// The client that requested the migration gets its reports, including the last. A client that disconnects does no harm.
    #[test]
    fn reports_reach_the_requester() {
        let reporter = ProgressReporter::default();
        let (ours, theirs) = Packets::pair().unwrap();
        reporter.begin("h", Some(Arc::new(ours))).unwrap();
        reporter.update(|progress| progress.phase = MigrationPhase::Copying);
        reporter.report_sent(5);
        reporter.update(|progress| progress.phase = MigrationPhase::Done);
        let mut phases = Vec::new();
        while let Some((MigrationReport::Progress(progress), _)) = theirs.receive().unwrap() {
            phases.push((progress.phase, progress.bytes_sent));
        }
        assert_eq!(phases, [(MigrationPhase::Copying, 0), (MigrationPhase::Done, 5)]);
        let (ours, theirs) = Packets::pair().unwrap();
        reporter.begin("h", Some(Arc::new(ours))).unwrap();
        drop(theirs);
        reporter.update(|progress| progress.phase = MigrationPhase::Copying);
    }
}
