//! What wakes the main thread.

use std::sync::mpsc::Sender;

use machine::vcpu::VcpuEvent;
use platform_devices::MachineEvent;

use super::incoming::Arrived;
use crate::migration::MigrationError;

/// Something the main thread acts on. Senders never wait.
#[derive(Debug)]
pub enum Event {
    /// From a platform device.
    Machine(MachineEvent),
    /// From a vCPU thread.
    Vcpu(VcpuEvent),
    /// A device's policy is to stop a guest whose request it refused: the device, and what was refused.
    Refused(String, String),
    /// A device's policy is a machine check, for a request that came late.
    MachineCheck,
    /// The API asks for a reset; `forced`: of a VM in doubt as well.
    Reset {
        /// Its user answers for its not running elsewhere.
        forced: bool,
    },
    /// The API asks to end the VM.
    Stop,
    /// The VM runs elsewhere now.
    Moved,
    /// The VM has gone, and was lost on the way.
    Lost(MigrationError),
    /// A VM has come, or why none has.
    Arrived(Box<Result<Arrived, MigrationError>>),
    /// A signal asks to end the VM.
    Signal(i32),
}

/// Where events go; closed once the main thread has left its loop, and then nobody needs them.
#[derive(Debug, Clone)]
pub struct Events(Sender<Event>);

impl Events {
    /// Sends through `sender`.
    pub fn new(sender: Sender<Event>) -> Self {
        Self(sender)
    }

    /// Hands an event on. Dropped when the VM is ending already.
    pub fn send(&self, event: Event) {
        if self.0.send(event).is_err() {
            tracing::debug!("an event came after the VM had ended");
        }
    }
}
