//! How a migration ends at the source: committed, in doubt, or given up with the guest going on here.

use std::time::Instant;

use control_api::migration::{MigrationPhase, MigrationTimeline};

use super::{Departure, LAST_WORDS, Stopped, milliseconds};
use crate::migration::error::{MigrationError, line};
use crate::migration::frame::Kind;
use crate::migration::message;
use crate::migration::postcopy::departing::PostCopy;
use crate::migration::served::Verdict;

impl Departure<'_> {
    /// The destination is ready: tells it to run the guest.
    pub(super) fn commit(mut self, stopped: Instant) -> Result<MigrationTimeline, MigrationError> {
        if !self.watch.commit() {
            return Err(self.undo(MigrationError::Cancelled, Some(stopped)));
        }
        let committing = Instant::now();
        self.watch.update(|progress| progress.phase = MigrationPhase::Committing);
        if let Some(daemon) = self.machine.daemon() {
            // Whatever this side hears of the destination: the coordinator decides.
            match daemon.outcome() {
                Ok(Verdict::RunsThere) => {
                    let timeline = match self.post_copy.take() {
                        None => Ok(self.committed(committing, stopped)),
                        Some(post_copy) => self.serve(&post_copy, None, committing, stopped),
                    };
                    return timeline.map(|timeline| MigrationTimeline { peers: daemon.peers(), ..timeline });
                }
                Ok(Verdict::RunsHere) => {
                    return Err(self.undo(MigrationError::GivenUp("it runs here".to_owned()), Some(stopped)));
                }
                Ok(Verdict::GivenUp(reason)) => {
                    return Err(self.undo(MigrationError::GivenUp(reason), Some(stopped)));
                }
                Err(error) => {
                    return match self.post_copy.take() {
                        None => Err(self.doubt(error)),
                        // A destination that has all pages has run the guest.
                        Some(post_copy) => self.serve(&post_copy, Some(error), committing, stopped),
                    };
                }
            }
        }
        if let Err(error) = self.control().and_then(|control| control.send(Kind::Go, &[])) {
            // A frame that wasn't taken whole can't be understood by the destination.
            return Err(self.undo(error, Some(stopped)));
        }
        let running = self.answer(Kind::Running);
        match (running, self.post_copy.take()) {
            (Ok(_), None) => Ok(self.committed(committing, stopped)),
            (Err(error), None) => Err(self.doubt(error)),
            (running, Some(post_copy)) => self.serve(&post_copy, running.err(), committing, stopped),
        }
    }

    /// Serves pages to the end. Where the destination's word that the guest runs was missed, its word that it has all pages says so, too.
    fn serve(
        mut self,
        post_copy: &PostCopy,
        doubt: Option<MigrationError>,
        committing: Instant,
        stopped: Instant,
    ) -> Result<MigrationTimeline, MigrationError> {
        self.timeline.commit_ms = milliseconds(committing.elapsed());
        self.timeline.pause_ms = milliseconds(stopped.elapsed());
        match (post_copy.serve(self.watch, self.timeline.bytes), doubt) {
            (Ok(post_copy), _) => {
                self.timeline.total_ms = milliseconds(self.began.elapsed());
                self.timeline.bytes += post_copy.bytes;
                self.timeline.post_copy = Some(post_copy);
                Ok(self.timeline)
            }
            (Err(_), Some(error)) => Err(self.doubt(error)),
            (Err(error), None) => {
                self.machine.stop_logging();
                Err(error)
            }
        }
    }

    /// It isn't known where the guest runs.
    fn doubt(&mut self, error: MigrationError) -> MigrationError {
        self.machine.stay_in_doubt();
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

    /// The guest goes on here; returns why.
    pub(super) fn undo(&mut self, error: MigrationError, stopped: Stopped) -> MigrationError {
        let error = self.give_up(error);
        if let Some(daemon) = self.machine.daemon().filter(|_| self.begun) {
            // It may have been decided already, or be known to be given up.
            match daemon.give_up() {
                Ok(Verdict::GivenUp(_) | Verdict::RunsHere) => {}
                Ok(Verdict::RunsThere) => {
                    return self.doubt(MigrationError::GivenUp(
                        "this side, but the cluster service had decided".to_owned(),
                    ));
                }
                Err(unknown) if stopped.is_some() => return self.doubt(unknown),
                Err(unknown) => tracing::warn!(
                    error = line(&unknown),
                    "The host's daemon can't be told that the migration is over"
                ),
            }
        }
        let gone_on = stopped.map_or(Ok(()), |_| self.machine.go_on());
        // It costs the guest time.
        self.machine.stop_logging();
        if let Some(stopped) = stopped {
            if let Err(also) = gone_on {
                tracing::error!(error = line(&also), "The VM stands still after a failed migration");
                return also;
            }
            let ms = milliseconds(stopped.elapsed());
            tracing::info!(pause_ms = ms, "The VM goes on here after a failed migration");
        }
        error
    }

    /// Ends the streams, and finds the reason that is worth telling: a cancelled migration's streams fail because of that, and
    /// a destination that broke one off may have said why.
    pub(super) fn give_up(&mut self, error: MigrationError) -> MigrationError {
        let cancelled = self.stop.is_set();
        let error = match error {
            _ if cancelled => match self.stop.reason() {
                Some(reason) => MigrationError::GivenUp(reason.to_owned()),
                None => MigrationError::Cancelled,
            },
            error @ MigrationError::Stream { .. } => self.last_words().unwrap_or(error),
            error => error,
        };
        if !cancelled {
            let text = line(&error);
            let mut end = text.len().min(1000);
            while !text.is_char_boundary(end) {
                end -= 1;
            }
            // A destination that hears nothing ends when the streams do.
            let _ = self.control().and_then(|control| control.send(Kind::Abort, &text.as_bytes()[..end]));
        }
        // A destination that was ready holds the disks until it hears that it is over.
        self.post_copy = None;
        self.streams.clear();
        error
    }

    fn last_words(&mut self) -> Option<MigrationError> {
        let control = self.streams.first_mut()?;
        control.connection.set_patience(LAST_WORDS);
        match self.answers.receive(&mut control.connection) {
            Ok((Kind::Refused, payload)) => Some(MigrationError::Refused(message::sentence(payload))),
            _ => None,
        }
    }
}
