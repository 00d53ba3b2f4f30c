//! A disk as its queues share it: the image, its rules, its counters.

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

/// What all queues of a disk share.
pub struct Disk {
    /// Device name.
    pub(super) name: String,
    pub(super) limits: Limits,
    pub(super) serial: [u8; ID_BYTES],
    pub(super) image: Image,
    pub(super) counters: BlockCounters,
    /// What the guest writes while its content is copied elsewhere.
    pub(super) written: Written,
    /// Who writes what around the page cache.
    pub(super) gate: Arc<Gate>,
    /// What the guest causes is logged through this.
    pub(super) log: GuestLog,
    /// Every write is durable before it completes: the driver can't flush, or has asked for it.
    write_through: AtomicBool,
    /// The driver turned the write cache off: what is completed shall become durable.
    flush_wanted: AtomicBool,
    /// The file system turned out to be unable to zero a range; zeroes are written instead.
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

    /// The image as it is used around the page cache, where that was asked for.
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

    /// Asks the next thread that serves a queue for a flush.
    pub(super) fn want_flush(&self) {
        self.flush_wanted.store(true, Ordering::Release);
    }

    /// Flushes, where [`Disk::want_flush`] was called since the last time.
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

    /// Remembers, and says once, that ranges are zeroed by writing.
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
