//! Traffic counters of a port, from the view of its guest (or host), under the names of Linux's network statistics.

use telemetry::Counter;

/// Counters of one port. The segment's thread writes them; any thread may read them.
#[derive(Debug, Default)]
pub struct PortCounters {
    /// Frames delivered to the port.
    pub rx_packets: Counter,
    /// Bytes of those frames, Ethernet header included.
    pub rx_bytes: Counter,
    /// Frames for the port that were dropped because its queue was full, or because the port was detached.
    pub rx_dropped: Counter,
    /// Frames that the port can't receive: longer than its MTU, or too long for its buffers.
    pub rx_errors: Counter,
    /// Times that frames had to wait because the guest had posted no buffers.
    pub rx_missed_errors: Counter,
    /// Delivered frames that went to a group (broadcast included).
    pub multicast: Counter,
    /// Frames that the port sent.
    pub tx_packets: Counter,
    /// Bytes of those frames.
    pub tx_bytes: Counter,
    /// Frames from the port that were dropped: link down, or a source address that isn't the port's.
    pub tx_dropped: Counter,
    /// Malformed frames from the port.
    pub tx_errors: Counter,
    /// Of [`PortCounters::tx_dropped`], those with a source address that isn't the port's.
    pub tx_spoofed: Counter,
    /// Large packets from the port for segmentation.
    pub tx_tso_packets: Counter,
    /// Bytes copied directly from guest memory to guest memory.
    pub direct_bytes: Counter,
    /// Interrupts sent.
    pub interrupts: Counter,
    /// Times that the port was served because of a doorbell.
    pub kicks: Counter,
}

impl PortCounters {
    /// Name and value of each counter.
    #[must_use]
    pub fn values(&self) -> [(&'static str, u64); 15] {
        [
            ("rx_packets", self.rx_packets.get()),
            ("rx_bytes", self.rx_bytes.get()),
            ("rx_dropped", self.rx_dropped.get()),
            ("rx_errors", self.rx_errors.get()),
            ("rx_missed_errors", self.rx_missed_errors.get()),
            ("multicast", self.multicast.get()),
            ("tx_packets", self.tx_packets.get()),
            ("tx_bytes", self.tx_bytes.get()),
            ("tx_dropped", self.tx_dropped.get()),
            ("tx_errors", self.tx_errors.get()),
            ("tx_spoofed", self.tx_spoofed.get()),
            ("tx_tso_packets", self.tx_tso_packets.get()),
            ("direct_bytes", self.direct_bytes.get()),
            ("interrupts", self.interrupts.get()),
            ("kicks", self.kicks.get()),
        ]
    }

    /// The value of a counter, by its name.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<u64> {
        self.values().into_iter().find(|(own, _)| *own == name).map(|(_, value)| value)
    }
}
