//! Post-copy in the source's migration: the not-present pages, and how they are sent.

use std::time::{Duration, Instant};

use control_api::migration::{MigrationPhase, PostCopyTimeline};
use machine::memory::{Address, GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion, GuestMemorySpace};
use machine::slots::DirtyPages;

use super::message::encode_missing;
use super::serving::{Serving, Stream};
use super::set::PageSet;
use super::{POSTCOPY_MIN_STREAMS, POSTCOPY_MIN_VERSION};
use crate::migration::connection::Connection;
use crate::migration::error::MigrationError;
use crate::migration::frame::Sender;
use crate::migration::progress::ProgressReporter;

/// Checks whether a migration may end in post-copy, with this version of the destination and this number of streams.
///
/// # Errors
/// The reason why it may not.
pub fn check_support(version: u16, streams: usize) -> Result<(), MigrationError> {
    if version < POSTCOPY_MIN_VERSION {
        return Err(MigrationError::DestinationLacksPostcopy(version));
    }
    if streams < POSTCOPY_MIN_STREAMS {
        let text = format!(
            "it takes {POSTCOPY_MIN_STREAMS} streams (for control frames, requested pages and pushed pages), not {streams}"
        );
        return Err(MigrationError::NoPostcopy(text));
    }
    Ok(())
}

/// Reason: RDMA NICs of an older daemon exclude post-copy.
pub const DAEMON_TOO_OLD: &str = "the VM has RDMA NICs, and this host's daemon, which maps their VM's memory as well, is of a version that doesn't wait for pages that are still to come; start a newer one, or move it without --post-copy";

/// Memory that is sent after the switchover.
pub struct PostCopy {
    missing: PageSet,
    pages: u64,
    serving: Option<Serving>,
}

impl PostCopy {
    /// Post-copy of these pages of a memory.
    ///
    /// # Errors
    /// When a page isn't in the memory.
    pub fn of(memory: &GuestMemorySpace, pages: &[DirtyPages]) -> Result<Self, MigrationError> {
        let ranges: Vec<_> =
            memory.memory().iter().map(|region| (region.start_addr().raw_value(), region.len())).collect();
        let mut missing = PageSet::empty(&ranges);
        pages
            .iter()
            .try_for_each(|set| missing.insert_all(set))
            .map_err(MigrationError::machine("listed"))?;
        let pages = missing.count();
        Ok(Self { missing, pages, serving: None })
    }

    /// Pages that weren't sent.
    pub fn left(&self) -> u64 {
        self.serving.as_ref().map_or(self.pages, |serving| serving.progress().left)
    }

    /// Payloads of the `Missing` frames.
    pub fn missing_frames(&self) -> Vec<Vec<u8>> {
        encode_missing(&self.missing).collect()
    }

    /// Sends pages from here on, until this value is dropped. Does nothing where no page is left.
    ///
    /// # Errors
    /// When the host refuses a thread.
    pub fn begin(
        &mut self,
        memory: GuestMemorySpace,
        streams: Vec<(Connection, Sender)>,
    ) -> Result<(), MigrationError> {
        let mut streams = streams.into_iter().map(|(connection, sender)| Stream { connection, sender });
        let request_stream = streams.next().filter(|_| self.pages > 0);
        if let Some(request_stream) = request_stream {
            let missing = std::mem::replace(&mut self.missing, PageSet::empty(&[]));
            self.serving = Some(Serving::begin(memory, missing, request_stream, streams.collect())?);
        }
        Ok(())
    }

    /// The guest runs at the destination: waits until the destination has all pages. `before` is the number of bytes sent until now.
    ///
    /// # Errors
    /// When the connection to the destination is lost.
    pub fn serve(
        &self,
        reporter: &ProgressReporter,
        before: u64,
    ) -> Result<PostCopyTimeline, MigrationError> {
        let began = Instant::now();
        let report = |left, requested, bytes| {
            reporter.update(|status| {
                status.phase = MigrationPhase::PostCopy;
                status.pages_left = left;
                status.pages_asked_for = requested;
                status.bytes_sent = before + bytes;
            });
        };
        let mut timeline = PostCopyTimeline {
            missing_pages: self.pages,
            asked_pages: 0,
            pushed_pages: 0,
            left_pages: 0,
            bytes: 0,
            took_ms: 0.0,
            faults: 0,
            fault_median_us: 0,
            fault_worst_us: 0,
        };
        if let Some(serving) = &self.serving {
            let now = serving.progress();
            report(now.left, now.requested, now.bytes);
            let complete =
                serving.wait(&mut |now| report(now.left, now.requested, now.bytes)).map_err(|source| {
                    let left = serving.progress().left;
                    MigrationError::LostDestination { left, source: Box::new(source) }
                })?;
            let progress = serving.progress();
            timeline.asked_pages = progress.requested;
            timeline.pushed_pages = progress.pushed;
            timeline.bytes = progress.bytes;
            timeline.left_pages = complete.left;
            timeline.faults = complete.faults;
            timeline.fault_median_us = complete.median_us;
            timeline.fault_worst_us = complete.worst_us;
        }
        timeline.took_ms = Duration::as_secs_f64(&began.elapsed()) * 1000.0;
        Ok(timeline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each reason against post-copy is reported before the guest is stopped, in a sentence of its own.
    #[test]
    fn missing_requirements_are_reported() {
        assert!(check_support(POSTCOPY_MIN_VERSION, POSTCOPY_MIN_STREAMS).is_ok());
        for (version, streams, expected) in [
            (
                POSTCOPY_MIN_VERSION - 1,
                3,
                "speaks version 2 of the migration's protocol, which doesn't know post-copy",
            ),
            (POSTCOPY_MIN_VERSION, 2, "it takes 3 streams"),
        ] {
            let error = check_support(version, streams).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
