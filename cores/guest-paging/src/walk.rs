//! Page walks of 32-bit, PAE, 4-level and 5-level paging.

use arrayvec::ArrayVec;
use thiserror::Error;

use crate::address::{GuestPhysical, GuestVirtual};
use crate::state::{
    CR0_PG, CR0_WP, CR4_LA57, CR4_PAE, CR4_PKE, CR4_PKS, CR4_PSE, CR4_SMAP, CR4_SMEP, EFER_LMA, EFER_NXE,
    PagingState, RFLAGS_AC,
};

/// Limit of levels: those of 5-level paging.
const MAX_LEVELS: usize = 5;

const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const GLOBAL: u64 = 1 << 8;
const NO_EXECUTE: u64 = 1 << 63;
/// Address bits of an entry of 64 bits.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// Lowest bit of the protection key.
const KEY_SHIFT: u32 = 59;

/// Error code of a page fault: the entry was present.
const ERROR_PRESENT: u32 = 1;
const ERROR_WRITE: u32 = 1 << 1;
const ERROR_USER: u32 = 1 << 2;
const ERROR_RESERVED: u32 = 1 << 3;
const ERROR_FETCH: u32 = 1 << 4;

/// Kind of access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Data is read.
    Read,
    /// Data is written.
    Write,
    /// An instruction is fetched.
    Execute,
}

/// Size of a mapped page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PageSize {
    /// 4 KiB.
    Size4K,
    /// 2 MiB: PAE, 4-level and 5-level paging.
    Size2M,
    /// 4 MiB: 32-bit paging.
    Size4M,
    /// 1 GiB: 4-level and 5-level paging.
    Size1G,
}

impl PageSize {
    /// Size in bytes.
    pub fn bytes(self) -> u64 {
        match self {
            Self::Size4K => 4 << 10,
            Self::Size2M => 2 << 20,
            Self::Size4M => 4 << 20,
            Self::Size1G => 1 << 30,
        }
    }
}

/// Width of a table's entry, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryWidth {
    /// 32-bit paging.
    Four,
    /// All others.
    Eight,
}

/// Reads entries of page tables.
pub trait Tables {
    /// Reads the entry at `address`, a multiple of `width`, by one atomic load. An entry of four bytes is in the low half. `None` if the
    /// caller has no memory there, or the memory isn't present.
    fn entry(&self, address: GuestPhysical, width: EntryWidth) -> Option<u64>;
}

impl<T: Fn(GuestPhysical, EntryWidth) -> Option<u64>> Tables for T {
    fn entry(&self, address: GuestPhysical, width: EntryWidth) -> Option<u64> {
        self(address, width)
    }
}

/// The result of a walk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Translation {
    /// Address of the byte.
    pub physical: GuestPhysical,
    /// Size of its page; [`PageSize::Size4K`] while paging is off.
    pub page_size: PageSize,
    /// Addresses of the entries that were read, from the root on. An access needs their pages and that of `physical`.
    pub entries: ArrayVec<GuestPhysical, MAX_LEVELS>,
    /// Whether all accessed and dirty bits are set that the processor would set.
    pub flags_are_set: bool,
}

/// Why there is no translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum WalkError {
    /// The processor raises #PF with this error code.
    #[error("a page fault with error code {error_code:#x}")]
    Fault {
        /// Bits P, W/R, U/S, RSVD, I/D as the processor pushes them.
        error_code: u32,
    },
    /// The address isn't canonical: the processor raises #GP or #SS.
    #[error("{0} isn't canonical")]
    NotCanonical(GuestVirtual),
    /// The caller can't read the table entry at this address.
    #[error("the table entry at {0} isn't reachable")]
    Absent(GuestPhysical),
    /// The result depends on unknown registers: protection keys, or the page-directory pointers of PAE paging.
    #[error("{0} decide, and aren't known")]
    Unsupported(&'static str),
}

/// Format of the tables of a paging mode.
struct Shape {
    /// Lowest bit of each level's index, from the root on.
    shifts: &'static [u32],
    index_bits: u32,
    width: EntryWidth,
}

const FIVE_LEVELS: Shape = Shape { shifts: &[48, 39, 30, 21, 12], index_bits: 9, width: EntryWidth::Eight };
const FOUR_LEVELS: Shape = Shape { shifts: &[39, 30, 21, 12], index_bits: 9, width: EntryWidth::Eight };
/// The levels below the page-directory-pointer registers.
const PAE: Shape = Shape { shifts: &[21, 12], index_bits: 9, width: EntryWidth::Eight };
const TWO_LEVELS: Shape = Shape { shifts: &[22, 12], index_bits: 10, width: EntryWidth::Four };

impl Shape {
    fn entry_address(&self, table: u64, address: u64, shift: u32) -> GuestPhysical {
        let index = address >> shift & ((1 << self.index_bits) - 1);
        let bytes = match self.width {
            EntryWidth::Four => 4,
            EntryWidth::Eight => 8,
        };
        GuestPhysical(table | (index * bytes))
    }

    fn large_page(&self, shift: u32, state: &PagingState) -> Option<PageSize> {
        match (self.width, shift) {
            (EntryWidth::Eight, 21) => Some(PageSize::Size2M),
            // Not reached with PAE, whose tables begin at bit 21.
            (EntryWidth::Eight, 30) => Some(PageSize::Size1G),
            (EntryWidth::Four, 22) if state.cr4 & CR4_PSE != 0 => Some(PageSize::Size4M),
            _ => None,
        }
    }
}

/// The combined rights of a walk's entries.
struct Rights {
    writable: bool,
    user: bool,
    no_execute: bool,
    accessed: bool,
}

/// Translates `address` for an access of the privilege in `state`.
///
/// # Errors
/// See [`WalkError`].
pub fn walk(
    tables: &impl Tables,
    state: &PagingState,
    address: GuestVirtual,
    access: Access,
) -> Result<Translation, WalkError> {
    if state.cr0 & CR0_PG == 0 {
        return Ok(Translation {
            physical: GuestPhysical(address.0 & u64::from(u32::MAX)),
            page_size: PageSize::Size4K,
            entries: ArrayVec::new(),
            flags_are_set: true,
        });
    }
    let (shape, root) = root(state, address, access)?;
    let mut rights = Rights { writable: true, user: true, no_execute: false, accessed: true };
    let mut entries = ArrayVec::new();
    let mut table = root;
    for (level, shift) in shape.shifts.iter().enumerate() {
        let at = shape.entry_address(table, address.0, *shift);
        let entry = tables.entry(at, shape.width).ok_or(WalkError::Absent(at))?;
        entries.push(at);
        if entry & PRESENT == 0 {
            return Err(fault(state, access, 0));
        }
        let is_last = level + 1 == shape.shifts.len();
        let page_size = match shape.large_page(*shift, state) {
            Some(size) if entry & LARGE != 0 => Some(size),
            _ if is_last => Some(PageSize::Size4K),
            _ => None,
        };
        if has_reserved_bits(&shape, *shift, entry, page_size, state) {
            return Err(fault(state, access, ERROR_PRESENT | ERROR_RESERVED));
        }
        rights.writable &= entry & WRITABLE != 0;
        rights.user &= entry & USER != 0;
        rights.no_execute |= shape.width == EntryWidth::Eight && entry & NO_EXECUTE != 0;
        rights.accessed &= entry & ACCESSED != 0;
        let Some(page_size) = page_size else {
            table = entry & address_mask(&shape);
            continue;
        };
        check(state, access, &rights, entry)?;
        let dirty = access != Access::Write || entry & DIRTY != 0;
        return Ok(Translation {
            physical: GuestPhysical(base(entry, page_size) | address.0 & (page_size.bytes() - 1)),
            page_size,
            entries,
            flags_are_set: rights.accessed && dirty,
        });
    }
    // The last level always maps a page.
    Err(fault(state, access, 0))
}

/// Format of the tables, and address of the first one.
fn root(state: &PagingState, address: GuestVirtual, access: Access) -> Result<(Shape, u64), WalkError> {
    if state.efer & EFER_LMA != 0 {
        if !address.is_canonical(state.linear_bits()) {
            return Err(WalkError::NotCanonical(address));
        }
        let shape = if state.cr4 & CR4_LA57 != 0 { FIVE_LEVELS } else { FOUR_LEVELS };
        return Ok((shape, state.cr3 & ADDRESS));
    }
    if state.cr4 & CR4_PAE == 0 {
        return Ok((TWO_LEVELS, state.cr3 & 0xffff_f000));
    }
    let pointers = state.pdptes.ok_or(WalkError::Unsupported("page-directory pointers"))?;
    let [first, second, third, fourth] = pointers;
    let pointer = match address.0 >> 30 & 3 {
        0 => first,
        1 => second,
        2 => third,
        _ => fourth,
    };
    if pointer & PRESENT == 0 {
        return Err(fault(state, access, 0));
    }
    Ok((PAE, pointer & ADDRESS))
}

fn address_mask(shape: &Shape) -> u64 {
    match shape.width {
        EntryWidth::Four => 0xffff_f000,
        EntryWidth::Eight => ADDRESS,
    }
}

/// Address of the page that a leaf maps.
fn base(entry: u64, size: PageSize) -> u64 {
    match size {
        // PSE-36: bits 20 to 13 are bits 39 to 32 of the address.
        PageSize::Size4M => entry & 0xffc0_0000 | (entry >> 13 & 0xff) << 32,
        _ => entry & ADDRESS & !(size.bytes() - 1),
    }
}

fn has_reserved_bits(
    shape: &Shape,
    shift: u32,
    entry: u64,
    page_size: Option<PageSize>,
    state: &PagingState,
) -> bool {
    if shape.width == EntryWidth::Four {
        if page_size != Some(PageSize::Size4M) {
            return false;
        }
        // Bit 21, and address bits above the processor's, at most 40.
        let bits = state.physical_bits.clamp(32, 40);
        let high = entry >> 13 & 0xff;
        return entry & 1 << 21 != 0 || high >> (bits - 32) != 0;
    }
    let bits = state.physical_bits.clamp(32, 52);
    let mut reserved = ADDRESS & !((1 << bits) - 1);
    if state.efer & EFER_NXE == 0 {
        reserved |= NO_EXECUTE;
    }
    if state.efer & EFER_LMA == 0 {
        // In PAE paging bits 62 to 52 are reserved, not ignored.
        reserved |= 0x7ff0_0000_0000_0000;
    }
    match page_size {
        // Bit 12 is the page's PAT bit.
        Some(size @ (PageSize::Size2M | PageSize::Size1G)) => {
            reserved |= (size.bytes() - 1) & ADDRESS & !(1 << 12)
        }
        // No page is as large as 512 GiB or 256 TiB, so the size bit is reserved.
        None if shift >= 39 => reserved |= if state.is_amd { LARGE | GLOBAL } else { LARGE },
        _ => {}
    }
    if page_size == Some(PageSize::Size1G) && !state.has_1g_pages {
        reserved |= LARGE;
    }
    entry & reserved != 0
}

/// Checks an access against the combined rights.
fn check(state: &PagingState, access: Access, rights: &Rights, leaf: u64) -> Result<(), WalkError> {
    let by_user = state.cpl == 3;
    let protects = match (by_user, rights.user, access) {
        (true, false, _) => true,
        (false, true, Access::Execute) => state.cr4 & CR4_SMEP != 0,
        (false, true, _) => state.cr4 & CR4_SMAP != 0 && state.rflags & RFLAGS_AC == 0,
        _ => false,
    };
    let forbids = match access {
        Access::Read => false,
        Access::Write => !rights.writable && (by_user || state.cr0 & CR0_WP != 0),
        Access::Execute => rights.no_execute && state.efer & EFER_NXE != 0,
    };
    if protects || forbids {
        return Err(fault(state, access, ERROR_PRESENT));
    }
    let keys = if rights.user { CR4_PKE } else { CR4_PKS };
    if access != Access::Execute
        && state.efer & EFER_LMA != 0
        && state.cr4 & keys != 0
        && leaf >> KEY_SHIFT & 0xf != 0
    {
        // The processor also checks key 0, but no operating system forbids accesses with it.
        return Err(WalkError::Unsupported("protection keys"));
    }
    Ok(())
}

fn fault(state: &PagingState, access: Access, cause: u32) -> WalkError {
    let mut error_code = cause;
    if access == Access::Write {
        error_code |= ERROR_WRITE;
    }
    if state.cpl == 3 {
        error_code |= ERROR_USER;
    }
    // The processor sets the bit only if execution can be forbidden.
    let can_forbid = state.cr4 & CR4_SMEP != 0 || state.cr4 & CR4_PAE != 0 && state.efer & EFER_NXE != 0;
    if access == Access::Execute && can_forbid {
        error_code |= ERROR_FETCH;
    }
    WalkError::Fault { error_code }
}
