//! Devices at fixed addresses: the 16550 console, the power button, sleep and reset registers.
//!
//! Each is a [`machine::bus::BusDevice`] that implements its guest interface and doesn't use KVM. An interrupt is a
//! closure ([`Interrupt`]), and a request to the whole machine is a [`MachineEvent`].

pub mod console;
pub mod legacy;
pub mod power;
pub mod serial;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// A request of a platform device to the monitor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MachineEvent {
    /// The guest requested a reset.
    Reset(ResetCause),
    /// The guest entered S5: power off.
    PowerOff,
    /// The user typed Ctrl-A x on the console.
    ConsoleQuit,
}

/// The register that reset the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResetCause {
    /// ACPI reset register.
    Acpi,
    /// Keyboard controller, port 0x64.
    KeyboardController,
    /// PCI reset control, port 0xCF9.
    ResetControl,
}

/// Receives [`MachineEvent`]s on the thread of the vCPU or console that caused them, so it must only queue them. It may
/// be called more than once for one reset or power-off.
pub type EventSink = Arc<dyn Fn(MachineEvent) + Send + Sync>;

/// Pulses an edge-triggered interrupt.
pub type Interrupt = Arc<dyn Fn() -> io::Result<()> + Send + Sync>;

/// An [`Interrupt`] that writes 1 to an eventfd (KVM irqfd).
pub fn eventfd_interrupt(eventfd: Arc<OwnedFd>) -> Interrupt {
    Arc::new(move || {
        match rustix::io::write(eventfd.as_fd(), &1u64.to_ne_bytes()) {
            // A full counter means that the interrupt is already pending.
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    })
}

/// Returns the ports that an access of `len` bytes at `offset` touches; `None` for a port beyond any range.
fn ports(offset: u64, len: usize) -> impl Iterator<Item = Option<u16>> {
    (0..len as u64).map(move |byte| offset.checked_add(byte).and_then(|port| u16::try_from(port).ok()))
}

/// A saved state can't be restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The version isn't supported.
    #[error("The saved state of {device} has version {found}; this program restores version {known}")]
    Version {
        /// Name of the device: `serial` or `power`.
        device: &'static str,
        /// The saved version.
        found: u32,
        /// The supported version.
        known: u32,
    },
    /// A value is out of range.
    #[error("The saved state of {device} is damaged: {what}")]
    Damaged {
        /// Name of the device: `serial` or `power`.
        device: &'static str,
        /// The problem.
        what: String,
    },
    /// The console failed.
    #[error("The {device} device can't be restored with its console")]
    Console {
        /// Name of the device.
        device: &'static str,
        /// The cause.
        #[source]
        source: console::ConsoleError,
    },
    /// The interrupt failed.
    #[error("The {device} device can't be restored, as it can't interrupt the guest")]
    Interrupt {
        /// Name of the device.
        device: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
}
