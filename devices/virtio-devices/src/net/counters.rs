//! Traffic counters from the guest's view, under the names of node_exporter's network statistics.

use telemetry::Counter;

/// Counters of one device; all queue pairs add to them.
#[derive(Debug, Default)]
pub struct Counters {
    /// Frames that reached the guest.
    pub receive_packets: Counter,
    /// Bytes of those frames, Ethernet header included, virtio header not.
    pub receive_bytes: Counter,
    /// Frames from the host that didn't fit the guest's buffers.
    pub receive_drop: Counter,
    /// Errors of the backend while receiving.
    pub receive_errs: Counter,
    /// Times that frames had to wait because the guest had posted no buffers.
    pub receive_no_buffers: Counter,
    /// Frames that the guest sent.
    pub transmit_packets: Counter,
    /// Bytes of those frames.
    pub transmit_bytes: Counter,
    /// Frames of the guest that the host refused (link down, no memory).
    pub transmit_drop: Counter,
    /// Frames of the guest with a malformed header or length.
    pub transmit_errs: Counter,
    /// Times that sending paused because the backend accepted no more.
    pub transmit_waits: Counter,
    /// Interrupts sent for used buffers.
    pub interrupts: Counter,
    /// Control commands executed.
    pub control_commands: Counter,
    /// Control commands refused.
    pub control_errs: Counter,
}

impl Counters {
    /// Name and value of each counter.
    pub fn values(&self) -> [(&'static str, u64); 13] {
        [
            ("receive_packets", self.receive_packets.get()),
            ("receive_bytes", self.receive_bytes.get()),
            ("receive_drop", self.receive_drop.get()),
            ("receive_errs", self.receive_errs.get()),
            ("receive_no_buffers", self.receive_no_buffers.get()),
            ("transmit_packets", self.transmit_packets.get()),
            ("transmit_bytes", self.transmit_bytes.get()),
            ("transmit_drop", self.transmit_drop.get()),
            ("transmit_errs", self.transmit_errs.get()),
            ("transmit_waits", self.transmit_waits.get()),
            ("interrupts", self.interrupts.get()),
            ("control_commands", self.control_commands.get()),
            ("control_errs", self.control_errs.get()),
        ]
    }
}
