//! Guest-virtual and guest-physical addresses, as types that can't be confused.

use std::fmt;

/// Bytes of the smallest page.
pub const PAGE_BYTES: u64 = 4096;

/// A linear address: an instruction's offset plus its segment's base, before page tables are applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestVirtual(pub u64);

/// An address on the guest's memory bus: the result of a page walk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestPhysical(pub u64);

impl GuestVirtual {
    /// Offset in its 4 KiB page, in bytes.
    pub fn page_offset(self) -> u64 {
        self.0 % PAGE_BYTES
    }

    /// Whether the address is canonical: bits 63 to `bits - 1` are equal. `bits` is 48 for 4-level paging, 57 for 5-level paging.
    pub fn is_canonical(self, bits: u32) -> bool {
        let above = self.0 >> (bits - 1);
        above == 0 || above == u64::MAX >> (bits - 1)
    }
}

impl GuestPhysical {
    /// Number of its 4 KiB page.
    pub fn page(self) -> u64 {
        self.0 / PAGE_BYTES
    }
}

impl fmt::Display for GuestVirtual {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "guest-virtual {:#x}", self.0)
    }
}

impl fmt::Display for GuestPhysical {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "guest-physical {:#x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canonical_addresses_repeat_their_highest_bit() {
        for (address, bits, canonical) in [
            (0, 48, true),
            (0x7fff_ffff_ffff, 48, true),
            (0x8000_0000_0000, 48, false),
            (0xffff_7fff_ffff_ffff, 48, false),
            (0xffff_8000_0000_0000, 48, true),
            (0xffff_8000_0000_0000, 57, true),
            (0x8000_0000_0000, 57, true),
            (0x0100_0000_0000_0000, 57, false),
            (u64::MAX, 57, true),
        ] {
            assert_eq!(GuestVirtual(address).is_canonical(bits), canonical, "{address:#x}, {bits} bits");
        }
    }
}
