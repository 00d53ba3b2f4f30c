//! What wakes the main thread.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use machine::vcpu::VcpuEvent;
use platform_devices::{MachineEvent, ResetCause};

use super::incoming::Arrived;
use crate::migration::MigrationError;
use crate::migration::state::GuestRequest;

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

impl Event {
    /// What it asks of the machine, if it is the guest who asks, or the API for it.
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

/// Where events go; closed once the main thread has left its loop, and then nobody needs them.
///
/// What a guest asks of its machine is remembered from the moment when it asks until that is carried out: the vCPU that asks may be stopped for a migration, and the guest saved,
/// before the main thread comes to it.
#[derive(Debug, Clone)]
pub struct Events {
    sender: Sender<Event>,
    asked: Arc<Mutex<Option<GuestRequest>>>,
}

impl Events {
    /// Sends through `sender`.
    pub fn new(sender: Sender<Event>) -> Self {
        Self { sender, asked: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Option<GuestRequest>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands an event on. Dropped when the VM is ending already.
    pub fn send(&self, event: Event) {
        self.remember(event.request());
        if self.sender.send(event).is_err() {
            tracing::debug!("an event came after the VM had ended");
        }
    }

    /// Records a request that the guest made on its source host. [`Events::say_again`] sends its event.
    pub fn remember(&self, request: Option<GuestRequest>) {
        let mut asked = self.lock();
        *asked = request.max(*asked);
    }

    /// What was asked for and isn't carried out.
    pub fn asked(&self) -> Option<GuestRequest> {
        *self.lock()
    }

    /// The guest that asked isn't there any more: it was reset.
    pub fn carried_out(&self) {
        *self.lock() = None;
    }

    /// Hands on once more what was asked for, if anything was. Whether it was.
    pub fn say_again(&self) -> bool {
        let event = match self.asked() {
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

    /// A request stays pending until it is carried out, also when its event was received. A reset doesn't replace a power-off.
    #[test]
    fn what_a_guest_asks_for_is_remembered_until_it_is_carried_out() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let events = Events::new(sender);
        events.send(Event::Stop);
        assert!(events.asked().is_none() && !events.say_again());
        events.send(Event::Vcpu(VcpuEvent::Shutdown { vcpu: 0, rip: None }));
        assert_eq!(receiver.try_iter().count(), 2);
        assert_eq!(events.clone().asked(), Some(GuestRequest::Reset));
        assert!(events.say_again());
        assert!(matches!(receiver.try_recv(), Ok(Event::Machine(MachineEvent::Reset(_)))));
        events.remember(Some(GuestRequest::PowerOff));
        events.send(Event::Reset { forced: false });
        assert_eq!(events.asked(), Some(GuestRequest::PowerOff));
        events.carried_out();
        assert_eq!(events.asked(), None);
    }
}
