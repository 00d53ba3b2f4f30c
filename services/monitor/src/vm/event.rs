//! Events that wake the main thread.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use machine::vcpu::VcpuEvent;
use platform_devices::{MachineEvent, ResetCause};

use super::incoming::ReceivedVm;
use crate::migration::MigrationError;
use crate::migration::state::GuestRequest;

/// An event for the main thread. Sending never blocks.
#[derive(Debug)]
pub enum Event {
    /// From a platform device.
    Machine(MachineEvent),
    /// From a vCPU thread.
    Vcpu(VcpuEvent),
    /// A device's policy is to stop a guest whose request it refused: the device, and the refused request.
    Refused(String, String),
    /// A device's policy is a machine check, for a deferred write that it refused.
    MachineCheck,
    /// The API requests a reset. With `forced` also of a VM in doubt.
    Reset {
        /// The user has asserted that the VM doesn't run at its destination.
        forced: bool,
    },
    /// The API requests the VM's end.
    Stop,
    /// The VM runs at its destination now.
    Moved,
    /// The VM was lost during its migration.
    Lost(MigrationError),
    /// An incoming VM's memory and state have been received, or the migration failed.
    Received(Box<Result<ReceivedVm, MigrationError>>),
    /// A signal requests the VM's end.
    Signal(i32),
}

impl Event {
    /// The request of the guest, or of the API on its behalf, that this event carries.
    pub fn request(&self) -> Option<GuestRequest> {
        match self {
            Self::Machine(MachineEvent::PowerOff) => Some(GuestRequest::PowerOff),
            Self::Machine(MachineEvent::Reset(_)) | Self::Vcpu(VcpuEvent::Shutdown { .. }) => {
                Some(GuestRequest::Reset)
            }
            Self::Reset { .. } => Some(GuestRequest::Reset),
            _ => None,
        }
    }
}

/// Sender of events. Its channel closes when the main thread leaves its loop; later events are dropped.
///
/// A guest's request (reset, power-off) stays recorded until the main thread has executed it. A migration may stop the requesting vCPU
/// and save the guest before that.
#[derive(Debug, Clone)]
pub struct Events {
    sender: Sender<Event>,
    pending: Arc<Mutex<Option<GuestRequest>>>,
}

impl Events {
    /// Sends through `sender`.
    pub fn new(sender: Sender<Event>) -> Self {
        Self { sender, pending: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Option<GuestRequest>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends an event. Drops it when the VM is ending already.
    pub fn send(&self, event: Event) {
        self.remember(event.request());
        if self.sender.send(event).is_err() {
            tracing::debug!("an event came after the VM had ended");
        }
    }

    /// Records a request that the guest made on its source host. [`Events::resend_request`] sends its event.
    pub fn remember(&self, request: Option<GuestRequest>) {
        let mut pending = self.lock();
        *pending = request.max(*pending);
    }

    /// The request that was recorded and not yet executed.
    pub fn pending_request(&self) -> Option<GuestRequest> {
        *self.lock()
    }

    /// Clears the request: the guest that made it was reset.
    pub fn clear_request(&self) {
        *self.lock() = None;
    }

    /// Sends the event of a recorded request again. Returns whether there was one.
    pub fn resend_request(&self) -> bool {
        let event = match self.pending_request() {
            None => return false,
            Some(GuestRequest::PowerOff) => MachineEvent::PowerOff,
            Some(GuestRequest::Reset) => MachineEvent::Reset(ResetCause::Acpi),
        };
        self.send(Event::Machine(event));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request stays recorded until it is executed, also when its event was received. A reset doesn't replace a power-off.
    #[test]
    fn a_guests_request_stays_recorded_until_it_is_executed() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let events = Events::new(sender);
        events.send(Event::Stop);
        assert!(events.pending_request().is_none() && !events.resend_request());
        events.send(Event::Vcpu(VcpuEvent::Shutdown { vcpu: 0, rip: None }));
        assert_eq!(receiver.try_iter().count(), 2);
        assert_eq!(events.clone().pending_request(), Some(GuestRequest::Reset));
        assert!(events.resend_request());
        assert!(matches!(receiver.try_recv(), Ok(Event::Machine(MachineEvent::Reset(_)))));
        events.remember(Some(GuestRequest::PowerOff));
        events.send(Event::Reset { forced: false });
        assert_eq!(events.pending_request(), Some(GuestRequest::PowerOff));
        events.clear_request();
        assert_eq!(events.pending_request(), None);
    }
}
