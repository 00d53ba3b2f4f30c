//! A disk's shared state: image, rules, counters.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use telemetry::guest_log::GuestLog;
use telemetry::guest_warn;

use super::chunks::Written;
use super::counters::BlockCounters;
use super::direct::Direct;
use super::gate::Gate;
use super::image::{Backend, Image};
use super::request::{ID_BYTES, Limits, SECTOR};

/// State shared by all queues of a disk.
pub struct Disk {
    /// Device name.
    pub(super) name: String,
    pub(super) limits: Limits,
    pub(super) serial: [u8; ID_BYTES],
    pub(super) image: Image,
    pub(super) counters: BlockCounters,
    /// Log of written chunks while a migration copies the disk.
    pub(super) written: Written,
    /// Ranges being written with `O_DIRECT`.
    pub(super) gate: Arc<Gate>,
    /// Rate-limited log for messages that the guest can cause.
    pub(super) log: GuestLog,
    /// Every write is durable before it completes: the driver can't flush, or has requested it.
    write_through: AtomicBool,
    /// The driver disabled the write cache: completed writes must become durable.
    flush_wanted: AtomicBool,
    /// The file system can't zero a range; zeroes are written instead.
    zero_by_writing: AtomicBool,
}

impl Disk {
    pub(super) fn new(name: &str, serial: [u8; ID_BYTES], image: Image) -> Self {
        let limits = Limits {
            capacity: image.size / SECTOR,
            read_only: image.read_only,
            discard: image.can_punch || image.device_discard.is_some(),
            write_zeroes: !image.read_only,
        };
        Self {
            name: name.to_owned(),
            limits,
            serial,
            image,
            counters: BlockCounters::default(),
            written: Written::default(),
            gate: Arc::default(),
            log: GuestLog::new(),
            write_through: AtomicBool::new(false),
            flush_wanted: AtomicBool::new(false),
            zero_by_writing: AtomicBool::new(false),
        }
    }

    pub(super) fn backend(&self) -> &Backend {
        &self.image.backend
    }

    /// The image opened with `O_DIRECT`, if configured.
    pub(super) fn direct(&self) -> Option<&Direct> {
        match self.backend() {
            Backend::Raw { direct, .. } => direct.as_ref(),
            Backend::Qcow2(_) => None,
        }
    }

    pub(super) fn write_through(&self) -> bool {
        self.write_through.load(Ordering::Relaxed)
    }

    pub(super) fn set_write_through(&self, on: bool) {
        self.write_through.store(on, Ordering::Relaxed);
    }

    /// Makes the next thread that serves a queue flush the image.
    pub(super) fn want_flush(&self) {
        self.flush_wanted.store(true, Ordering::Release);
    }

    /// Flushes, if [`Disk::want_flush`] was called since the last time.
    pub(super) fn flush_if_wanted(&self) {
        if !self.flush_wanted.swap(false, Ordering::AcqRel) {
            return;
        }
        if let Some(Err(error)) = self.backend().raw().map(File::sync_data) {
            guest_warn!(
                self.log,
                "Disk {}: flushing failed as the write cache was turned off: {error}",
                self.name
            );
        }
    }

    pub(super) fn zeroes_by_writing(&self) -> bool {
        self.zero_by_writing.load(Ordering::Relaxed)
    }

    /// Switches to zeroing ranges by writing, and logs that once.
    pub(super) fn zero_by_writing(&self) {
        if !self.zero_by_writing.swap(true, Ordering::Relaxed) {
            tracing::info!(
                "Disk {}: the file system of {} can't zero ranges, so zeroes are written",
                self.name,
                self.image.path.display()
            );
        }
    }
}
