//! A guest's memory, with page tables that tests build.

use std::cell::Cell;
use std::collections::BTreeMap;

use guest_paging::{EntryWidth, GuestPhysical, PageSize, Tables};

/// Address of the first table.
pub const TABLES: u64 = 0x10_0000;

/// Entries by address; others are zero.
#[derive(Debug, Default)]
pub struct Memory {
    pub entries: BTreeMap<u64, u64>,
    /// Number of a page that can't be read.
    pub absent_page: Option<u64>,
    pub reads: Cell<usize>,
    next_table: u64,
}

impl Tables for Memory {
    fn entry(&self, address: GuestPhysical, width: EntryWidth) -> Option<u64> {
        self.reads.set(self.reads.get() + 1);
        let bytes = if width == EntryWidth::Four { 4 } else { 8 };
        assert_eq!(address.0 % bytes, 0, "{address}");
        if self.absent_page == Some(address.page()) {
            return None;
        }
        Some(self.entries.get(&address.0).copied().unwrap_or(0))
    }
}

/// A paging mode, described independently of the crate's own code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Two,
    Pae,
    Four,
    Five,
}

impl Kind {
    /// Lowest bit and number of bits of each index, from the root on.
    pub fn levels(self) -> &'static [(u32, u32)] {
        match self {
            Self::Two => &[(22, 10), (12, 10)],
            Self::Pae => &[(30, 2), (21, 9), (12, 9)],
            Self::Four => &[(39, 9), (30, 9), (21, 9), (12, 9)],
            Self::Five => &[(48, 9), (39, 9), (30, 9), (21, 9), (12, 9)],
        }
    }

    fn entry_bytes(self) -> u64 {
        if self == Self::Two { 4 } else { 8 }
    }

    fn leaf_shift(size: PageSize) -> u32 {
        match size {
            PageSize::Size4K => 12,
            PageSize::Size2M => 21,
            PageSize::Size4M => 22,
            PageSize::Size1G => 30,
        }
    }
}

impl Memory {
    fn table(&mut self) -> u64 {
        self.next_table += 1;
        TABLES + (self.next_table - 1) * 4096
    }

    /// Allocates an empty root table; returns its address.
    pub fn root(&mut self) -> u64 {
        self.table()
    }

    /// Maps the page of `linear` to `physical`. Entries of tables get `table_bits`, the leaf `leaf_bits`. Returns the leaf's address, or
    /// `None` if a page covers the address already.
    pub fn map(
        &mut self,
        kind: Kind,
        root: u64,
        (linear, physical): (u64, u64),
        size: PageSize,
        (table_bits, leaf_bits): (u64, u64),
    ) -> Option<u64> {
        let mut table = root;
        for (shift, bits) in kind.levels() {
            let at = table + (linear >> shift & ((1 << bits) - 1)) * kind.entry_bytes();
            let present = self.entries.get(&at).copied().unwrap_or(0);
            if *shift == Kind::leaf_shift(size) {
                if present != 0 {
                    return None;
                }
                let large = if size == PageSize::Size4K { 0 } else { 1 << 7 };
                let high = if size == PageSize::Size4M {
                    physical >> 32 << 13 | physical & 0xffff_ffff
                } else {
                    physical
                };
                self.entries.insert(at, high | leaf_bits | large);
                return Some(at);
            }
            let is_pointer = kind == Kind::Pae && *shift == 30;
            if present & 1 << 7 != 0 && !is_pointer {
                return None;
            }
            table = if present == 0 {
                let next = self.table();
                // Most bits of a PAE page-directory pointer are reserved.
                self.entries.insert(at, next | if is_pointer { 1 } else { table_bits });
                next
            } else {
                present & 0x000f_ffff_ffff_f000
            };
        }
        None
    }

    /// The four pointers that PAE paging loads with CR3.
    pub fn pointers(&self, root: u64) -> [u64; 4] {
        [0, 8, 16, 24].map(|offset| self.entries.get(&(root + offset)).copied().unwrap_or(0))
    }
}
