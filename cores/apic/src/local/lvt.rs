//! The local vector table (LVT): the interrupt of each local source.

use crate::registers::{
    LVT_ERROR, LVT_LEVEL, LVT_LINT0, LVT_LINT1, LVT_MASKED, LVT_PERFORMANCE, LVT_PERIODIC, LVT_REMOTE_IRR,
    LVT_THERMAL, LVT_TIMER,
};

/// A local interrupt source of the APIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LocalSource {
    Timer,
    Thermal,
    Performance,
    Lint0,
    Lint1,
    Error,
}

impl LocalSource {
    pub(crate) const ALL: [Self; 6] =
        [Self::Timer, Self::Thermal, Self::Performance, Self::Lint0, Self::Lint1, Self::Error];

    /// The source whose LVT entry is the MSR `index`.
    pub(crate) fn of_msr(index: u32) -> Option<Self> {
        match index {
            LVT_TIMER => Some(Self::Timer),
            LVT_THERMAL => Some(Self::Thermal),
            LVT_PERFORMANCE => Some(Self::Performance),
            LVT_LINT0 => Some(Self::Lint0),
            LVT_LINT1 => Some(Self::Lint1),
            LVT_ERROR => Some(Self::Error),
            _ => None,
        }
    }

    /// Bits that software may change: vector, mask, and those of the source.
    pub(crate) fn writable(self) -> u32 {
        const DELIVERY_MODE: u32 = 0x700;
        const POLARITY: u32 = 1 << 13;
        let own = match self {
            Self::Timer => LVT_PERIODIC,
            Self::Thermal | Self::Performance => DELIVERY_MODE,
            Self::Lint0 | Self::Lint1 => DELIVERY_MODE | POLARITY | LVT_LEVEL,
            Self::Error => 0,
        };
        0xFF | LVT_MASKED | own
    }

    /// Bits that software may write without effect: delivery status, and remote IRR of LINT0 and LINT1.
    pub(crate) fn read_only(self) -> u32 {
        const DELIVERY_STATUS: u32 = 1 << 12;
        match self {
            Self::Lint0 | Self::Lint1 => DELIVERY_STATUS | LVT_REMOTE_IRR,
            _ => DELIVERY_STATUS,
        }
    }
}

/// The entries by source, in the order of [`LocalSource::ALL`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LocalVectorTable([u32; 6]);

impl LocalVectorTable {
    /// The state after a reset: all entries are masked.
    pub(crate) fn new() -> Self {
        Self([LVT_MASKED; 6])
    }

    pub(crate) fn get(&self, source: LocalSource) -> u32 {
        self.0[source as usize]
    }

    /// Sets the writable bits of an entry. The caller has checked that `value` has no reserved bits. An edge-triggered entry has no remote
    /// IRR.
    pub(crate) fn set(&mut self, source: LocalSource, value: u32) {
        let entry = &mut self.0[source as usize];
        let remote_irr = if value & LVT_LEVEL != 0 { *entry & LVT_REMOTE_IRR } else { 0 };
        *entry = value & source.writable() | remote_irr;
    }

    pub(crate) fn set_remote_irr(&mut self, source: LocalSource, pending: bool) {
        let entry = &mut self.0[source as usize];
        *entry = if pending { *entry | LVT_REMOTE_IRR } else { *entry & !LVT_REMOTE_IRR };
    }

    pub(crate) fn mask(&mut self, source: LocalSource) {
        self.0[source as usize] |= LVT_MASKED;
    }

    pub(crate) fn mask_all(&mut self) {
        for entry in &mut self.0 {
            *entry |= LVT_MASKED;
        }
    }

    pub(crate) fn is_masked(&self, source: LocalSource) -> bool {
        self.get(source) & LVT_MASKED != 0
    }

    pub(crate) fn entries(&self) -> [u32; 6] {
        self.0
    }
}
