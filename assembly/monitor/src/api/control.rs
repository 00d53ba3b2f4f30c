//! What the API asks of a VM; implemented by the VM.

use control_api::types::{ExitTable, NicBehind, VmState, VmSummary};
use telemetry::metrics::Family;

/// A running VM. Calls come from the API thread, one at a time, and may block for as long as the work takes (a
/// pause waits until every device is quiet).
pub trait VmControl: Send + Sync {
    /// The VM in a few words.
    fn summary(&self) -> VmSummary;
    /// The whole live device tree with counters: an object of objects, one per part. The server picks out paths.
    fn inspect(&self) -> serde_json::Value;
    /// Stops vCPUs and devices until [`VmControl::resume`]. Pausing a paused VM changes nothing.
    fn pause(&self) -> Result<(), ControlError>;
    /// Lets a paused VM go on. Resuming a running VM changes nothing. One in doubt goes on only if that is `forced`: it may run elsewhere.
    fn resume(&self, forced: bool) -> Result<(), ControlError>;
    /// Takes the guest of a commodity NIC from its card to the emulation, or back, while it runs. Changing nothing changes nothing.
    fn change_nic(&self, nic: &str, behind: NicBehind) -> Result<(), ControlError>;
    /// Cancels the migration that is under way; returns before the guest goes on.
    fn cancel_migration(&self) -> Result<(), ControlError>;
    /// Presses the ACPI power button; what happens is up to the guest.
    fn power_button(&self) -> Result<(), ControlError>;
    /// Resets the machine at once, as the reset button does; one in doubt only if that is `forced`.
    fn reset(&self, forced: bool) -> Result<(), ControlError>;
    /// Asks the monitor to end the VM at once. Returns before it has ended, so that the answer gets out.
    fn stop(&self) -> Result<(), ControlError>;
    /// Exits so far.
    fn exits(&self) -> ExitTable;
    /// Counters for `/metrics`, without the `vm` label, which the server adds.
    fn metrics(&self) -> Vec<Family>;
}

/// A VM could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// It can't while in this state.
    #[error("The VM is {state}, so it can't {what}")]
    WrongState {
        /// What it is doing.
        state: VmState,
        /// What was asked.
        what: &'static str,
    },
    /// There is nothing to do it to, or it is too late.
    #[error("{reason}")]
    NotNow {
        /// Why not.
        reason: String,
    },
    /// It never can.
    #[error("This VM can't {what}: {reason}")]
    Unsupported {
        /// What was asked.
        what: &'static str,
        /// Why not.
        reason: String,
    },
    /// It tried and failed.
    #[error("The VM failed to {what}")]
    Failed {
        /// What was asked.
        what: &'static str,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}
