//! Doorbell mode: a device server chooses whether its mappable BAR ranges are memory or trap. An extension of Causeway
//! within VFIO's rules, with a device-specific region and a device-specific interrupt. Clients without the extension
//! ignore both.
//!
//! For a device that polls, doorbells should be plain memory: no exit per store. For a device that sleeps, each store
//! must reach it as a wake-up. The server changes between the two:
//!
//! ```text
//!  server                                        client (VM monitor)
//!    │                                             │  at start: trapped; sets an eventfd on interrupt 5
//!    │  wanted = MAPPED; signals interrupt 5       │
//!    │────────────────────────────────────────────▶│
//!    │              REGION_READ  region 9, WANTED  │
//!    │◀────────────────────────────────────────────│
//!    │                                             │  maps the ranges into the running guest
//!    │              REGION_WRITE region 9, REACHED = MAPPED
//!    │◀────────────────────────────────────────────│
//!    │  only now may it stop handling trapped stores
//!    │  wanted = TRAPPED; signals interrupt 5      │
//!    │────────────────────────────────────────────▶│  unmaps the ranges: a store now exits
//!    │              REGION_WRITE region 9, REACHED = TRAPPED
//!    │◀────────────────────────────────────────────│
//!    │  polls the memory once more, then sleeps    │
//! ```
//!
//! Rules:
//!
//! - The mode applies to all mappable ranges of all BARs of the function.
//! - In trapped mode, a guest's store to such a range arrives as REGION_WRITE of the BAR's region, and the vCPU waits
//!   for the reply. The client doesn't write it to the memory: the server interprets the store like one to any
//!   register. A load arrives as REGION_READ.
//! - No store is lost: each reaches the memory or arrives as REGION_WRITE. A store that reaches the memory does so
//!   before the client sends `REACHED = TRAPPED`. A trapped store may overtake or follow the `REACHED` message of
//!   either mode. So a server accepts trapped stores at any time.
//! - The server may change the wanted mode at any time. The client reads [`WANTED_OFFSET`] for each signal. It writes
//!   [`REACHED_OFFSET`] once per handled signal, even without a change. If a change fails, it writes the current mode.
//! - Changes are expensive. Unmapping memory of a running guest makes KVM drop all of the guest's page tables, so the
//!   guest faults its working set in again, for some milliseconds. From Linux 6.12 on `KVM_X86_QUIRK_SLOT_ZAP_ALL` can
//!   disable this. A server keeps a mode for at least tens of milliseconds.
//! - A new connection starts in trapped mode, independent of the previous one. The client writes `REACHED = TRAPPED`
//!   after it has set the eventfd, and then acts as if it had got one signal.

/// Index of the device-specific region.
pub const REGION: u32 = 9;
/// Type of the device-specific region, in the capability that the server adds to a region with this index and size. Bit
/// 31 means vendor-defined.
pub const REGION_TYPE: u32 = 0x8000_CA5E;
/// Subtype of the device-specific region.
pub const REGION_SUBTYPE: u32 = 0xD00B;
/// Size of the region in bytes.
pub const REGION_SIZE: u64 = 4096;
/// Index of the device-specific interrupt; its count is 1.
pub const INTERRUPT: u32 = 5;
/// Offset of the u32 with the mode that the server wants (client reads).
pub const WANTED_OFFSET: u64 = 0;
/// Offset of the u32 with the mode that the client has reached (client writes).
pub const REACHED_OFFSET: u64 = 4;

/// Values of both registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DoorbellMode {
    /// Guest accesses to mappable ranges exit and arrive as messages.
    #[default]
    Trapped,
    /// The ranges are memory.
    Mapped,
}

impl DoorbellMode {
    /// Converts a register value; `None` for an undefined value.
    #[must_use]
    pub const fn from_register(value: u32) -> Option<Self> {
        match value {
            0 => Some(Self::Trapped),
            1 => Some(Self::Mapped),
            _ => None,
        }
    }

    /// Converts to a register value.
    #[must_use]
    pub const fn to_register(self) -> u32 {
        match self {
            Self::Trapped => 0,
            Self::Mapped => 1,
        }
    }
}
