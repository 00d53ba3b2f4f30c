//! What happened, per guest.

use serde::Serialize;

/// Counters of one guest. An access that touches several registers counts once per register.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Requests of the guest.
    pub requests: u64,
    /// Requests that ran a checking function.
    pub decisions: u64,
    /// Requests that the model answered without the device.
    pub virtual_requests: u64,
    /// Requests that were passed to the device.
    pub forwarded: u64,
    /// Writes to denied registers, dropped.
    pub denied: u64,
    /// Requests that a check refused.
    pub refused: u64,
    /// Values of the device that the model didn't believe.
    pub disbelieved: u64,
    /// Reads and writes of the device, the monitor's own included.
    pub device_accesses: u64,
    /// Times that the device came to this guest.
    pub switches: u64,
    /// Requests that had to wait for the device.
    pub waits: u64,
}
