//! Doorbell mode: how a device server says whether its mapped BAR ranges shall be memory or be trapped. An
//! extension of ours within VFIO's rules (a device-specific region and a device-specific interrupt): clients
//! that don't know it leave both alone.
//!
//! A polling device wants doorbells to be plain memory: no exit per store. A sleeping device wants each store
//! to reach it, so that it can wake. The server changes between the two:
//!
//! ```text
//!  server                                        client (VM monitor)
//!    │                                             │  at start: trapped; sets an eventfd on interrupt 5
//!    │  wanted = MAPPED; signals interrupt 5       │
//!    │────────────────────────────────────────────▶│
//!    │              REGION_READ  region 9, WANTED  │
//!    │◀────────────────────────────────────────────│
//!    │                                             │  maps the ranges into the guest, while it runs
//!    │              REGION_WRITE region 9, REACHED = MAPPED
//!    │◀────────────────────────────────────────────│
//!    │  only now may it stop listening             │
//!    │  wanted = TRAPPED; signals interrupt 5      │
//!    │────────────────────────────────────────────▶│  takes them away: a store now exits
//!    │              REGION_WRITE region 9, REACHED = TRAPPED
//!    │◀────────────────────────────────────────────│
//!    │  looks at the memory once more, then sleeps │
//! ```
//!
//! Rules:
//!
//! - The mode concerns all mappable ranges of all BARs of the function.
//! - While trapped, a guest's store to such a range arrives as REGION_WRITE of the BAR's region, and the vCPU goes on when
//!   it is answered. The client doesn't put it into the memory: what the store means is the server's to decide, as for
//!   any register. A load arrives as REGION_READ.
//! - No store is lost: each lands in the memory or arrives as REGION_WRITE. A store that lands in the memory
//!   does so before `REACHED = TRAPPED` is sent; one that is trapped may overtake or follow the `REACHED` message
//!   of either mode, so that a server takes trapped stores at any time.
//! - The server may change its mind at any time; the client reads [`WANTED_OFFSET`] anew for each signal, and writes
//!   [`REACHED_OFFSET`] once per signal that it handled, also when nothing had to be changed. If a change fails it
//!   writes the mode that holds.
//! - Changes aren't cheap: taking memory from a running guest makes KVM forget all of that guest's page tables, so that
//!   the guest faults its working set in again (some milliseconds; from Linux 6.12 on KVM can be told not to,
//!   `KVM_X86_QUIRK_SLOT_ZAP_ALL`). A server stays in a mode for tens of milliseconds at least.
//! - A new connection begins trapped, whatever the last one ended with. The client writes `REACHED = TRAPPED`
//!   when it has set the eventfd, then handles one signal as if it had come.

/// Index of the device-specific region.
pub const REGION: u32 = 9;
/// Type of the device-specific region, in the capability that the server side adds by itself to a region with this
/// index and size: bit 31 says "a vendor's own".
pub const REGION_TYPE: u32 = 0x8000_CA5E;
/// Subtype of the device-specific region.
pub const REGION_SUBTYPE: u32 = 0xD00B;
/// Its size in bytes.
pub const REGION_SIZE: u64 = 4096;
/// Index of the device-specific interrupt; its count is 1.
pub const INTERRUPT: u32 = 5;
/// Offset within the region of the u32 that says which mode the server wants (client reads).
pub const WANTED_OFFSET: u64 = 0;
/// Offset within the region of the u32 that says which mode the client has reached (client writes).
pub const REACHED_OFFSET: u64 = 4;

/// Values of both registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DoorbellMode {
    /// Guest accesses to mappable ranges exit and arrive as messages.
    #[default]
    Trapped,
    /// They are memory.
    Mapped,
}

impl DoorbellMode {
    /// From a register's value; `None` for values that mean nothing.
    #[must_use]
    pub const fn from_register(value: u32) -> Option<Self> {
        match value {
            0 => Some(Self::Trapped),
            1 => Some(Self::Mapped),
            _ => None,
        }
    }

    /// As a register's value.
    #[must_use]
    pub const fn to_register(self) -> u32 {
        match self {
            Self::Trapped => 0,
            Self::Mapped => 1,
        }
    }
}
