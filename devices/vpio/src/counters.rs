//! Event counters per guest.

use serde::Serialize;

/// Counters of one guest since it was added. An access that touches several registers counts once per register.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// The guest's requests.
    pub requests: u64,
    /// Requests that ran a checking function.
    pub decisions: u64,
    /// Requests that the model answered without the device.
    pub virtual_requests: u64,
    /// Requests that the monitor passed to the device.
    pub forwarded: u64,
    /// Writes to denied registers, which the model dropped.
    pub denied: u64,
    /// Requests that a check refused.
    pub refused: u64,
    /// Values from the device that the model rejected as impossible.
    pub disbelieved: u64,
    /// Register reads and writes on the device, including the monitor's own.
    pub device_accesses: u64,
    /// Hand-offs of the device to this guest.
    pub switches: u64,
    /// Requests that waited for the device.
    pub waits: u64,
}
