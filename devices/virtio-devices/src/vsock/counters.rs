//! Counters of a vsock device.

use std::sync::atomic::{AtomicUsize, Ordering};

use telemetry::Counter;

/// Traffic and connections; "receive" and "transmit" are from the guest's view.
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
    /// Connections established, in either direction.
    pub opened: Counter,
    /// Connections refused: no listener, or too many connections.
    pub refused: Counter,
    /// Resets sent to the guest.
    pub resets: Counter,
    /// Malformed packets.
    pub errors: Counter,
    connections: AtomicUsize,
}

impl Counters {
    /// Current number of connections.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    pub(super) fn set_connections(&self, count: usize) {
        self.connections.store(count, Ordering::Relaxed);
    }

    /// Name and value of each counter.
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
