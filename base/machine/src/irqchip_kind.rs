//! Where interrupt controllers are emulated.

/// Where a VM's interrupt controllers are emulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum IrqchipKind {
    /// In KVM ([`crate::irqchip::KernelIrqchip`]): local APICs, an IOAPIC and two PICs.
    #[default]
    Kernel,
    /// In the monitor: local APICs ([`crate::local_apic::LocalApics`]) in x2APIC mode, and an IOAPIC.
    Monitor,
}

impl std::fmt::Display for IrqchipKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Kernel => "kernel",
            Self::Monitor => "monitor",
        })
    }
}
