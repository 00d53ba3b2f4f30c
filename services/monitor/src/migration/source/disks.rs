//! Copying disks in the source's migration: before memory until little is left, then with each round of memory.

use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use control_api::migration::MigrationPhase;

use super::{OutgoingMigration, throttled};
use crate::migration::error::MigrationError;
use crate::migration::frame::Kind;
use crate::migration::message;
use crate::migration::mirror::MIRROR_MIN_VERSION;
use crate::migration::mirror::message::MirrorReply;
use crate::migration::mirror::source::MirrorSource;
use crate::migration::pages::PAGE;
use crate::migration::policy::{Decision, Policy, RoundEnd};

impl OutgoingMigration<'_> {
    /// Asks the destination whether it accepts the disks to copy, before the migration begins.
    pub(super) fn request_mirror(&mut self, version: u16) -> Result<(), MigrationError> {
        let Some(names) = self.mirror_request.take() else { return Ok(()) };
        let mut mirror = MirrorSource::new(self.machine.disks(), &names)?;
        if version < MIRROR_MIN_VERSION {
            return Err(MigrationError::DestinationLacksMirror(version));
        }
        let request = message::encode(&mirror.request(!names.is_empty()))?;
        self.control()?.send(Kind::Mirror, &request)?;
        let answer: MirrorReply = message::decode(&self.answer(Kind::Mirror)?, "an answer about disks")?;
        mirror.handle_reply(&answer);
        self.mirror = (!mirror.is_empty()).then_some(mirror);
        Ok(())
    }

    /// Copies whole disks while the guest runs, then repeatedly what it wrote meanwhile, until little is left. The time limit starts at
    /// the end of the first copy, whose duration depends on the size alone.
    pub(super) fn copy_disks(&mut self) -> Result<(), MigrationError> {
        let Some(mirror) = &mut self.mirror else { return Ok(()) };
        mirror.begin()?;
        self.reporter.report_disk_left(mirror.left());
        let machine = self.machine;
        throttled(machine, |throttle| self.disk_rounds_until_little(true, throttle))
    }

    /// Copies what was written since, without starting from the whole disks.
    pub(super) fn copy_disks_again(&mut self) -> Result<(), MigrationError> {
        if self.mirror.is_none() {
            return Ok(());
        }
        let machine = self.machine;
        throttled(machine, |throttle| self.disk_rounds_until_little(false, throttle))
    }

    fn disk_rounds_until_little(
        &mut self,
        mut first: bool,
        throttle: &AtomicU8,
    ) -> Result<(), MigrationError> {
        // Disks must be complete before the switchover, also with post-copy.
        let policy = Policy { post_copy_after: None, ..self.policy };
        loop {
            let number = u32::try_from(self.timeline.rounds.len()).unwrap_or(u32::MAX - 1) + 1;
            let held = throttle.load(Ordering::Acquire);
            self.reporter.update(|progress| {
                progress.phase = MigrationPhase::Copying;
                progress.round = number;
                progress.throttle_percent = held;
            });
            let began = Instant::now();
            let sent = self.round(&[], false)?;
            let took = began.elapsed();
            if std::mem::take(&mut first) {
                self.limit_from = Instant::now();
            }
            let left = self.collect_disk_writes()?;
            let bytes = self.note_round(began, &sent, 0, held, false);
            let end = RoundEnd {
                number,
                bytes,
                took,
                pages: sent.disk_bytes / PAGE as u64,
                dirtied: left / PAGE as u64,
                elapsed: self.limit_from.elapsed(),
            };
            self.reporter.update(|progress| {
                progress.bytes_per_second = end.rate();
                progress.predicted_pause_ms =
                    u64::try_from(end.predicted_pause().as_millis()).unwrap_or(u64::MAX);
            });
            match policy.decide(&end, held) {
                Decision::Stop | Decision::PostCopy => return Ok(()),
                Decision::NextRound(next) => throttle.store(next, Ordering::Release),
                Decision::Abort => return Err(self.not_converging(0, left)),
            }
        }
    }

    /// Adds the guest's writes to what is left to copy; returns the bytes left.
    pub(super) fn collect_disk_writes(&mut self) -> Result<u64, MigrationError> {
        let Some(mirror) = &mut self.mirror else { return Ok(0) };
        mirror.collect_writes()?;
        let left = mirror.left();
        self.reporter.report_disk_left(left);
        Ok(left)
    }

    /// Number of rounds so far that copied disks alone.
    pub(super) fn disk_rounds(&self) -> u32 {
        let rounds = self.timeline.rounds.iter().filter(|round| round.pages == 0 && round.disk_bytes > 0);
        u32::try_from(rounds.count()).unwrap_or(u32::MAX)
    }

    /// The error for a time limit that passed, with pages of memory and bytes of disks left.
    pub(super) fn not_converging(&self, pages: u64, disk_bytes: u64) -> MigrationError {
        let downtime_ms = u64::try_from(self.policy.downtime.as_millis()).unwrap_or(u64::MAX);
        let seconds = self.policy.timeout.as_ref().map_or(0, Duration::as_secs);
        if disk_bytes > pages.saturating_mul(PAGE as u64) {
            return MigrationError::DisksNotConverging { downtime_ms, seconds, left: disk_bytes };
        }
        MigrationError::NotConverging { downtime_ms, seconds, left: pages }
    }
}
