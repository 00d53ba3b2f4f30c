//! Counters of a vsock device.

use std::sync::atomic::{AtomicUsize, Ordering};

use telemetry::Counter;

/// Traffic and connections; "receive" and "transmit" as the guest sees them.
#[derive(Debug, Default)]
pub struct Counters {
    /// Packets to the guest.
    pub receive_packets: Counter,
    /// Their payload bytes.
    pub receive_bytes: Counter,
    /// Packets from the guest.
    pub transmit_packets: Counter,
    /// Their payload bytes.
    pub transmit_bytes: Counter,
    /// Connections made, either way.
    pub opened: Counter,
    /// Connections refused: nobody listens, or there are too many.
    pub refused: Counter,
    /// Resets sent to the guest.
    pub resets: Counter,
    /// Malformed packets.
    pub errors: Counter,
    connections: AtomicUsize,
}

impl Counters {
    /// Connections at present.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    pub(super) fn set_connections(&self, count: usize) {
        self.connections.store(count, Ordering::Relaxed);
    }

    /// Name and value of each.
    pub fn values(&self) -> [(&'static str, u64); 8] {
        [
            ("receive_packets", self.receive_packets.get()),
            ("receive_bytes", self.receive_bytes.get()),
            ("transmit_packets", self.transmit_packets.get()),
            ("transmit_bytes", self.transmit_bytes.get()),
            ("connections_opened", self.opened.get()),
            ("connections_refused", self.refused.get()),
            ("resets", self.resets.get()),
            ("errors", self.errors.get()),
        ]
    }
}
