//! One VM: what belongs to neither memory, interrupts nor vCPUs.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::slots::Slots;
use crate::state::SavedClock;

/// KVM refused something about a VM.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// An ioctl failed.
    #[error("KVM refused to {what}")]
    Refused {
        /// What was tried, with its values.
        what: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// An ioeventfd that can't be.
    #[error("No eventfd can be attached to {space} address {address:#x} with width {width}: {reason}")]
    BadIoEvent {
        /// `port` or `memory`.
        space: &'static str,
        /// Address.
        address: u64,
        /// Width in bytes.
        width: u8,
        /// Why.
        reason: &'static str,
    },
}

/// Which address space an ioeventfd listens in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IoSpace {
    /// I/O ports.
    Port,
    /// Guest-physical memory.
    Memory,
}

/// A guest write that only signals an eventfd, without leaving the kernel.
#[derive(Debug, Clone)]
pub struct IoEvent {
    /// Address space.
    pub space: IoSpace,
    /// Port or guest-physical address.
    pub address: u64,
    /// Width of the writes that signal: 1, 2, 4 or 8, or 0 for any (the address alone decides).
    pub width: u8,
    /// Only this value signals, where given; needs a width.
    pub datamatch: Option<u64>,
    /// The eventfd.
    pub fd: Arc<OwnedFd>,
}

/// One VM.
pub struct Vm {
    #[allow(dead_code)]
    fd: Arc<kvm_ioctls::VmFd>,
    slots: Slots,
}

impl Vm {
    /// Its memslots.
    pub fn slots(&self) -> &Slots {
        &self.slots
    }

    /// Attaches an ioeventfd. `Refused` with EEXIST when the same address, width and value is taken.
    pub fn add_ioevent(&self, _event: &IoEvent) -> Result<(), VmError> {
        todo!()
    }

    /// Detaches it; all fields must be those given before.
    pub fn remove_ioevent(&self, _event: &IoEvent) -> Result<(), VmError> {
        todo!()
    }

    /// The paravirtual clock, while all vCPUs are paused.
    pub fn save_clock(&self) -> Result<SavedClock, VmError> {
        todo!()
    }

    /// Sets the paravirtual clock of a fresh VM, before any vCPU runs.
    pub fn restore_clock(&self, _saved: &SavedClock) -> Result<(), VmError> {
        todo!()
    }
}
