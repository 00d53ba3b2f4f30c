//! KVM's in-kernel interrupt controllers: two PICs, an IOAPIC with 24 pins, local APICs.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::interrupt::{InterruptController, LevelLine, MsiMessage, MsiRoute};
use crate::state::SavedInterruptController;
use crate::vm::{Vm, VmError};

/// Pins of the in-kernel IOAPIC.
pub const IOAPIC_PINS: u32 = 24;

/// What to create besides PICs, IOAPIC and local APICs.
#[derive(Debug, Clone, Copy, Default)]
pub struct IrqchipOptions {
    /// The 8254 timer with the speaker port. Linux boots without it when it knows the TSC or APIC timer frequency.
    pub pit: bool,
}

/// The in-kernel interrupt controllers of one VM.
pub struct KernelIrqchip {
    _vm: Arc<Vm>,
}

impl KernelIrqchip {
    /// Creates the controllers. Must come before the first vCPU.
    pub fn create(_vm: &Arc<Vm>, _options: IrqchipOptions) -> Result<Arc<Self>, VmError> {
        todo!()
    }
}

impl InterruptController for KernelIrqchip {
    fn set_line(&self, _gsi: u32, _asserted: bool) -> io::Result<()> {
        todo!()
    }
    fn edge_eventfd(&self, _gsi: u32) -> io::Result<Arc<OwnedFd>> {
        todo!()
    }
    fn level_eventfds(&self, _gsi: u32) -> io::Result<LevelLine> {
        todo!()
    }
    fn signal_msi(&self, _message: MsiMessage) -> io::Result<()> {
        todo!()
    }
    fn allocate_msi(&self, _count: u16) -> io::Result<Vec<Arc<dyn MsiRoute>>> {
        todo!()
    }
    fn save(&self) -> io::Result<SavedInterruptController> {
        todo!()
    }
    fn restore(&self, _saved: &SavedInterruptController) -> io::Result<()> {
        todo!()
    }
}
