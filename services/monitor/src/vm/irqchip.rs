//! The interrupt controllers of a machine, in the kernel or in the monitor.

use std::sync::Arc;

use machine::bus::AddressSpace;
use machine::interrupt::{InterruptController, IrqchipKind};
use machine::irqchip::{IrqchipOptions, KernelIrqchip};
use machine::local_apic::LocalApics;
use machine::vm::Vm;
use machine::x86::CpuTopology;

use super::error::Error;
use super::monitor_irqchip::MonitorIrqchip;
use crate::sandbox::{Sandbox, ThreadKind};

/// The interrupt controllers of a machine.
pub enum Irqchip {
    /// In the kernel.
    Kernel(Arc<KernelIrqchip>),
    /// In this process.
    Monitor(Arc<MonitorIrqchip>),
}

impl Irqchip {
    /// Creates the controllers, before the first vCPU. Those in this process get their thread, and a page on the bus.
    pub fn create(
        kind: IrqchipKind,
        vm: &Arc<Vm>,
        topology: &CpuTopology,
        memory: &AddressSpace,
        sandbox: &Sandbox,
    ) -> Result<Self, Error> {
        if kind == IrqchipKind::Kernel {
            return Ok(Self::Kernel(KernelIrqchip::create(vm, IrqchipOptions { pit: false })?));
        }
        let ids: Vec<u32> = (0..topology.vcpus()).map(|index| topology.apic_id(index)).collect();
        let irqchip = MonitorIrqchip::create(&ids, sandbox.thread_filter(ThreadKind::Interrupts))
            .map_err(|source| Error::Monitor { what: "create interrupt controllers", source })?;
        irqchip.plug(memory)?;
        Ok(Self::Monitor(Arc::new(irqchip)))
    }

    /// The controllers' interface for devices.
    pub fn controller(&self) -> Arc<dyn InterruptController> {
        match self {
            Self::Kernel(irqchip) => Arc::clone(irqchip) as _,
            Self::Monitor(irqchip) => Arc::clone(irqchip) as _,
        }
    }

    /// The controllers, if they are in this process.
    pub fn monitor(&self) -> Option<&Arc<MonitorIrqchip>> {
        match self {
            Self::Kernel(_) => None,
            Self::Monitor(irqchip) => Some(irqchip),
        }
    }

    /// The local APICs for vCPU threads; `None` where KVM has them.
    pub fn local_apics(&self) -> Option<Arc<dyn LocalApics>> {
        self.monitor().map(|irqchip| Arc::clone(irqchip) as _)
    }
}
