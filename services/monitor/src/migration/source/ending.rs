//! The end of a migration at the source: committed, in doubt, or aborted with a rollback.

use std::cell::Cell;
use std::time::{Duration, Instant};

use control_api::migration::{MigrationPhase, MigrationTimeline, PostCopyTimeline};

use super::{OutgoingMigration, REFUSAL_TIMEOUT, Stopped, milliseconds};
use crate::migration::daemon::{DOUBT_AFTER, Daemon, DecisionWait, MigrationOutcome};
use crate::migration::error::{MigrationError, line};
use crate::migration::frame::Kind;
use crate::migration::message;
use crate::migration::postcopy::source::PostCopy;

impl OutgoingMigration<'_> {
    /// The destination is ready: commits the migration.
    pub(super) fn commit(mut self, stopped: Instant) -> Result<MigrationTimeline, MigrationError> {
        if !self.reporter.commit() {
            return self.roll_back(MigrationError::Cancelled, Some(stopped));
        }
        let committing = Instant::now();
        self.reporter.update(|progress| progress.phase = MigrationPhase::Committing);
        if self.machine.daemon().is_some() {
            return self.commit_by_daemon(committing, stopped);
        }
        if let Err(error) = self.control().and_then(|control| control.send(Kind::Go, &[])) {
            // The destination can't decode a frame that wasn't sent completely.
            return self.roll_back(error, Some(stopped));
        }
        let running = self.answer(Kind::Running);
        match (running, self.post_copy.take()) {
            (Ok(_), None) => Ok(self.committed(committing, stopped)),
            (Err(error), None) => Err(self.doubt(error)),
            (running, Some(post_copy)) => self.serve(&post_copy, running.err(), committing, stopped),
        }
    }

    /// With a daemon the coordinator decides, whatever this side gets from the destination.
    fn commit_by_daemon(
        mut self,
        committing: Instant,
        stopped: Instant,
    ) -> Result<MigrationTimeline, MigrationError> {
        // A destination that has all pages runs the guest: its `Complete` shows that, if the daemon doesn't answer.
        let timeout = self.post_copy.is_some().then_some(DOUBT_AFTER);
        match self.decision(Daemon::await_decision, timeout) {
            Ok(MigrationOutcome::RunsThere) => self.moved(committing, stopped),
            Ok(MigrationOutcome::RunsHere) => {
                self.roll_back(MigrationError::Aborted("it runs here".to_owned()), Some(stopped))
            }
            Ok(MigrationOutcome::Aborted(reason)) => {
                self.roll_back(MigrationError::Aborted(reason), Some(stopped))
            }
            Err(error) => match self.post_copy.take() {
                None => Err(self.doubt(error)),
                Some(post_copy) => match post_copy.serve(self.reporter, self.timeline.bytes) {
                    Ok(served) => Ok(self.served(served, committing, stopped)),
                    Err(lost) => match self.decision(Daemon::await_decision, None) {
                        Ok(MigrationOutcome::Aborted(reason)) => {
                            self.roll_back(MigrationError::Aborted(reason), Some(stopped))
                        }
                        Ok(MigrationOutcome::RunsThere) => Err(self.lost(lost)),
                        Ok(MigrationOutcome::RunsHere) => Err(self.doubt(error)),
                        Err(error) => Err(self.doubt(error)),
                    },
                },
            },
        }
    }

    /// Waits for the daemon's decision, without a time limit or up to `timeout`. The VM becomes in doubt when the decision is unknown
    /// for a while.
    fn decision(
        &self,
        request: impl Fn(&Daemon, &DecisionWait<'_>) -> Result<MigrationOutcome, MigrationError>,
        timeout: Option<Duration>,
    ) -> Result<MigrationOutcome, MigrationError> {
        let none = || MigrationError::Protocol("nothing: there is no daemon".to_owned());
        let (machine, reporter) = (self.machine, self.reporter);
        let (began, in_doubt) = (Instant::now(), Cell::new(false));
        let on_doubt = |reason: &str| {
            in_doubt.set(true);
            machine.set_in_doubt();
            reporter.update(|progress| {
                progress.phase = MigrationPhase::InDoubt;
                progress.problem = Some(format!(
                    "The decision about the migration isn't known: {reason}. The VM stays stopped here, in doubt, until it is; see `causeway cluster vms`"
                ));
            });
        };
        // The user may resume a VM in doubt.
        let resumed = || in_doubt.get() && !machine.is_stopped();
        let is_over = || resumed() || timeout.is_some_and(|timeout| began.elapsed() > timeout);
        request(machine.daemon().ok_or_else(none)?, &DecisionWait { on_doubt: &on_doubt, is_over: &is_over })
    }

    /// The guest runs at the destination.
    fn moved(mut self, committing: Instant, stopped: Instant) -> Result<MigrationTimeline, MigrationError> {
        let machine = self.machine;
        let timeline = match self.post_copy.take() {
            None => Ok(self.committed(committing, stopped)),
            Some(post_copy) => self.serve(&post_copy, None, committing, stopped),
        };
        let peers = |timeline| MigrationTimeline {
            peers: machine.daemon().map(Daemon::peers).unwrap_or_default(),
            ..timeline
        };
        timeline.map(peers)
    }

    fn served(
        mut self,
        post_copy: PostCopyTimeline,
        committing: Instant,
        stopped: Instant,
    ) -> MigrationTimeline {
        self.timeline.commit_ms = milliseconds(committing.elapsed());
        self.timeline.pause_ms = milliseconds(stopped.elapsed());
        self.timeline.total_ms = milliseconds(self.began.elapsed());
        self.timeline.bytes += post_copy.bytes;
        self.timeline.post_copy = Some(post_copy);
        self.timeline
    }

    /// Serves pages to the end. If the destination's `Running` was missed, its `Complete` shows as well that the guest runs.
    fn serve(
        mut self,
        post_copy: &PostCopy,
        doubt: Option<MigrationError>,
        committing: Instant,
        stopped: Instant,
    ) -> Result<MigrationTimeline, MigrationError> {
        self.timeline.commit_ms = milliseconds(committing.elapsed());
        self.timeline.pause_ms = milliseconds(stopped.elapsed());
        match (post_copy.serve(self.reporter, self.timeline.bytes), doubt) {
            (Ok(post_copy), _) => {
                self.timeline.total_ms = milliseconds(self.began.elapsed());
                self.timeline.bytes += post_copy.bytes;
                self.timeline.post_copy = Some(post_copy);
                Ok(self.timeline)
            }
            (Err(_), Some(error)) => Err(self.doubt(error)),
            (Err(error), None) => Err(self.lost(error)),
        }
    }

    /// The guest runs at the destination, which can't get its remaining pages any more.
    fn lost(&self, error: MigrationError) -> MigrationError {
        self.machine.stop_logging();
        error
    }

    /// It isn't known where the guest runs.
    fn doubt(&mut self, error: MigrationError) -> MigrationError {
        self.machine.set_in_doubt();
        self.machine.stop_logging();
        MigrationError::InDoubt(Box::new(error))
    }

    fn committed(mut self, committing: Instant, stopped: Instant) -> MigrationTimeline {
        self.timeline.commit_ms = milliseconds(committing.elapsed());
        self.timeline.pause_ms = milliseconds(stopped.elapsed());
        self.timeline.total_ms = milliseconds(self.began.elapsed());
        self.timeline.bytes = self.streams.iter().map(|stream| stream.sender.bytes()).sum();
        self.timeline
    }

    /// Rolls back: resumes the guest here, and returns the cause. If the coordinator has committed already, the VM has migrated although
    /// this side failed.
    pub(super) fn roll_back(
        mut self,
        error: MigrationError,
        stopped: Stopped,
    ) -> Result<MigrationTimeline, MigrationError> {
        let unsent = self.post_copy.as_ref().map(PostCopy::left);
        let error = self.abort(error);
        let daemon = self.machine.daemon().filter(|_| self.begun);
        match (daemon, stopped) {
            (None, _) => {}
            (Some(daemon), None) => {
                if let Err(unknown) = daemon.withdraw() {
                    tracing::warn!(
                        error = line(&unknown),
                        "The host's daemon could not be notified that the migration is over"
                    );
                }
            }
            // The coordinator may have decided already.
            (Some(_), Some(stopped)) => match self.decision(Daemon::abort, None) {
                Ok(MigrationOutcome::Aborted(_) | MigrationOutcome::RunsHere) => {}
                Ok(MigrationOutcome::RunsThere) => {
                    let Some(left) = unsent else { return self.moved(Instant::now(), stopped) };
                    return Err(self.lost(MigrationError::LostDestination { left, source: Box::new(error) }));
                }
                Err(unknown) => return Err(self.doubt(unknown)),
            },
        }
        Err(self.resume_source(error, stopped))
    }

    fn resume_source(&mut self, error: MigrationError, stopped: Stopped) -> MigrationError {
        let resumed = stopped.map_or(Ok(()), |_| self.machine.rollback());
        // Dirty logging slows the guest down.
        self.machine.stop_logging();
        if let Some(stopped) = stopped {
            if let Err(also) = resumed {
                tracing::error!(error = line(&also), "The VM can't be resumed after a failed migration");
                return also;
            }
            let ms = milliseconds(stopped.elapsed());
            tracing::info!(pause_ms = ms, "The VM was resumed here after a failed migration");
        }
        error
    }

    /// Ends the streams, and finds the cause to report. The streams of a cancelled migration fail because of the cancel, and a
    /// destination that closed one may have sent its reason.
    pub(super) fn abort(&mut self, error: MigrationError) -> MigrationError {
        let cancelled = self.stop.is_set();
        let error = match error {
            _ if cancelled => match self.stop.reason() {
                Some(reason) => MigrationError::Aborted(reason.to_owned()),
                None => MigrationError::Cancelled,
            },
            error @ MigrationError::Stream { .. } => self.receive_refusal().unwrap_or(error),
            error => error,
        };
        if !cancelled {
            let text = line(&error);
            let mut end = text.len().min(1000);
            while !text.is_char_boundary(end) {
                end -= 1;
            }
            // A destination that doesn't get this frame ends when the streams do.
            let _ = self.control().and_then(|control| control.send(Kind::Abort, &text.as_bytes()[..end]));
        }
        // A destination that was ready holds the disks until the streams end.
        self.post_copy = None;
        self.streams.clear();
        error
    }

    fn receive_refusal(&mut self) -> Option<MigrationError> {
        let control = self.streams.first_mut()?;
        control.connection.set_timeout(REFUSAL_TIMEOUT);
        match self.answers.receive(&mut control.connection) {
            Ok((Kind::Refused, payload)) => Some(MigrationError::Refused(message::sentence(payload))),
            _ => None,
        }
    }
}
