//! Counters of a disk, under the names of node_exporter's `node_disk_*`.

use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::json;
use telemetry::Counter;

/// Counters of one disk, over all its queues.
#[derive(Debug, Default)]
pub struct BlockCounters {
    /// Reads completed without an error.
    pub reads_completed: Counter,
    /// Bytes of these reads.
    pub read_bytes: Counter,
    /// Writes completed without an error.
    pub writes_completed: Counter,
    /// Bytes of these writes.
    pub written_bytes: Counter,
    /// Flushes completed without an error.
    pub flushes: Counter,
    /// Discards completed without an error.
    pub discards: Counter,
    /// Write-zeroes requests completed without an error.
    pub write_zeroes: Counter,
    /// Parts of requests that used a bounce buffer with `O_DIRECT`, since they were not aligned.
    pub bounced: Counter,
    /// Requests completed with an error, the driver's errors included.
    pub errors: Counter,
    in_flight: AtomicU64,
}

impl BlockCounters {
    /// Number of requests popped from the rings and not yet completed.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    pub(super) fn started(&self) {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn finished(&self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn inspect(&self) -> serde_json::Value {
        json!({
            "reads_completed": self.reads_completed.get(),
            "read_bytes": self.read_bytes.get(),
            "writes_completed": self.writes_completed.get(),
            "written_bytes": self.written_bytes.get(),
            "flushes": self.flushes.get(),
            "discards": self.discards.get(),
            "write_zeroes": self.write_zeroes.get(),
            "bounced": self.bounced.get(),
            "in_flight": self.in_flight(),
            "errors": self.errors.get(),
        })
    }
}
