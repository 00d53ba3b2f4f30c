//! The local vector table: which interrupt each of the APIC's own sources makes.

use crate::registers::{
    LVT_ERROR, LVT_LEVEL, LVT_LINT0, LVT_LINT1, LVT_MASKED, LVT_PERFORMANCE, LVT_PERIODIC, LVT_REMOTE_IRR,
    LVT_THERMAL, LVT_TIMER,
};

/// A source of interrupts within the APIC.
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

    /// The source whose entry this MSR is.
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

    /// What software may change: vector and mask, and what the source has besides.
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

    /// What software may write without effect: delivery status, and remote IRR where there is one.
    pub(crate) fn read_only(self) -> u32 {
        const DELIVERY_STATUS: u32 = 1 << 12;
        match self {
            Self::Lint0 | Self::Lint1 => DELIVERY_STATUS | LVT_REMOTE_IRR,
            _ => DELIVERY_STATUS,
        }
    }
}

/// The table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LocalVectorTable([u32; 6]);

impl LocalVectorTable {
    /// After reset: all masked.
    pub(crate) fn new() -> Self {
        Self([LVT_MASKED; 6])
    }

    pub(crate) fn get(&self, source: LocalSource) -> u32 {
        self.0[source as usize]
    }

    /// Sets an entry's writable bits, of which the caller has checked `value`. An edge-triggered entry has no remote IRR.
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
