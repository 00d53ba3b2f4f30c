//! The interface of the API to the VM.

use control_api::types::{ExitTable, NicBehind, VmState, VmSummary};
use telemetry::metrics::Family;

/// A running VM. The API thread makes one call at a time. A call may block for as long as its work takes (a pause waits until every device
/// is quiescent).
pub trait VmControl: Send + Sync {
    /// A summary of the VM.
    fn summary(&self) -> VmSummary;
    /// The live device tree with counters: an object of objects, one per part. The server selects paths.
    fn inspect(&self) -> serde_json::Value;
    /// Suspends vCPUs and devices until [`VmControl::resume`]. No effect on a paused VM.
    fn pause(&self) -> Result<(), ControlError>;
    /// Resumes a paused VM. No effect on a running VM. A VM in doubt resumes only if `forced`, since it may run on another host.
    fn resume(&self, forced: bool) -> Result<(), ControlError>;
    /// Moves the guest of a commodity NIC between its card and the emulation while it runs. No effect if the backend is the same.
    fn change_nic(&self, nic: &str, behind: NicBehind) -> Result<(), ControlError>;
    /// Cancels the migration in progress. Returns before the guest resumes.
    fn cancel_migration(&self) -> Result<(), ControlError>;
    /// Presses the ACPI power button. The guest decides what follows.
    fn power_button(&self) -> Result<(), ControlError>;
    /// Resets the machine at once, as a reset button does. A VM in doubt is reset only if `forced`.
    fn reset(&self, forced: bool) -> Result<(), ControlError>;
    /// Requests the VM's end. Returns before the VM has ended, so that the response can be sent.
    fn stop(&self) -> Result<(), ControlError>;
    /// VM exits since the start.
    fn exits(&self) -> ExitTable;
    /// Metrics for `/metrics`, without the `vm` label, which the server adds.
    fn metrics(&self) -> Vec<Family>;
}

/// Why a VM can't perform an operation.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The VM's state doesn't permit the operation.
    #[error("The VM is {state}, so it can't {what}")]
    WrongState {
        /// The VM's state.
        state: VmState,
        /// The operation.
        what: &'static str,
    },
    /// The operation has no object, or comes too late.
    #[error("{reason}")]
    NotNow {
        /// The reason.
        reason: String,
    },
    /// This VM doesn't support the operation.
    #[error("This VM can't {what}: {reason}")]
    Unsupported {
        /// The operation.
        what: &'static str,
        /// The reason.
        reason: String,
    },
    /// The operation failed.
    #[error("The VM failed to {what}")]
    Failed {
        /// The operation.
        what: &'static str,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}
