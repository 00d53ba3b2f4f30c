//! The machine as firmware describes it to the guest.

use crate::layout;
pub use crate::ranges::{AddressRange, RamRange};

/// One virtual CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpu {
    /// Local APIC id.
    pub apic_id: u8,
    /// NUMA node.
    pub node: u32,
}

/// Address windows that the PCI root decodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PciWindows {
    /// Memory below 4 GiB.
    pub memory32: AddressRange,
    /// Memory above 4 GiB.
    pub memory64: Option<AddressRange>,
}

/// Interrupt pin of a PCI slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PciRoute {
    /// Slot (device number), 0 to 31.
    pub slot: u8,
    /// 0 for INTA to 3 for INTD.
    pub pin: u8,
    /// I/O APIC pin.
    pub gsi: u32,
}

/// I/O ports of the registers that ACPI names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PowerPorts {
    /// Reset register.
    pub reset: u16,
    /// Value that triggers a reset.
    pub reset_value: u8,
    /// Sleep control register.
    pub sleep_control: u16,
    /// Sleep status register.
    pub sleep_status: u16,
    /// Pending events of the generic event device, which a read clears: bit 0 is the power button.
    pub events: u16,
}

/// The machine's description for the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineMap {
    /// RAM, ascending and disjoint; the first range starts at 0. See [`layout::place_ram`].
    pub ram: Vec<RamRange>,
    /// CPUs; the first is the boot CPU.
    pub cpus: Vec<Cpu>,
    /// Distances between NUMA nodes, `distances[from][to]`, 10 on the diagonal. Empty means one node without SRAT and
    /// SLIT.
    pub node_distances: Vec<Vec<u8>>,
    /// PCI windows.
    pub pci: PciWindows,
    /// INTx routing. See [`default_pci_routes`].
    pub pci_routes: Vec<PciRoute>,
    /// Power registers.
    pub power: PowerPorts,
    /// Whether local APICs have x2APIC mode only: their tables are those of x2APICs then.
    pub x2apic: bool,
    /// Whether COM1 is a console.
    pub console: bool,
}

/// INTx routing of all 32 slots: pin `p` of slot `s` goes to `PCI_GSIS[(s + p) % 4]`.
pub fn default_pci_routes() -> Vec<PciRoute> {
    (0u8..32)
        .flat_map(|slot| {
            (0u8..4).map(move |pin| PciRoute {
                slot,
                pin,
                gsi: layout::PCI_GSIS[usize::from((slot + pin) % 4)],
            })
        })
        .collect()
}
