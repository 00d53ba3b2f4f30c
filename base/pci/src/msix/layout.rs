//! Layout of a function's MSI-X table and pending bits.

use super::{ENTRY_SIZE, MsixError};

/// Limit of vectors per function.
pub const MAX_VECTORS: u16 = 2048;

/// Smallest BAR of [`MsixLayout::exclusive`]: a page, so that nothing else shares it.
const PAGE: u64 = 4096;

/// Number of vectors, and BAR and offset of table and pending bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MsixLayout {
    count: u16,
    table: Place,
    pba: Place,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    bar: u8,
    offset: u32,
}

impl MsixLayout {
    /// Creates a layout from BAR and offset of table and pending bits.
    ///
    /// # Errors
    /// `count` is 0 or above [`MAX_VECTORS`], a BAR index or alignment (8 bytes) is wrong, or both overlap.
    pub fn new(count: u16, table: (u8, u32), pba: (u8, u32)) -> Result<Self, MsixError> {
        if count == 0 || count > MAX_VECTORS {
            return Err(MsixError::Count { count });
        }
        for (what, (bar, offset)) in [("table", table), ("pending bits", pba)] {
            if bar > 5 || offset % 8 != 0 {
                return Err(MsixError::Place { what, bar, offset });
            }
        }
        let layout = Self {
            count,
            table: Place { bar: table.0, offset: table.1 },
            pba: Place { bar: pba.0, offset: pba.1 },
        };
        let table_start = u64::from(table.1);
        let pba_start = u64::from(pba.1);
        if table.0 == pba.0
            && table_start < pba_start + layout.pba_size()
            && pba_start < table_start + layout.table_size()
        {
            return Err(MsixError::Overlap { bar: table.0, count });
        }
        Ok(layout)
    }

    /// Creates a layout in a BAR of its own, of [`MsixLayout::bar_size`] bytes: the table at 0, then the pending bits.
    ///
    /// # Errors
    /// As for [`MsixLayout::new`].
    pub fn exclusive(bar: u8, count: u16) -> Result<Self, MsixError> {
        Self::new(count, (bar, 0), (bar, 16 * u32::from(count)))
    }

    /// Returns the number of vectors, 1 to [`MAX_VECTORS`].
    #[must_use]
    pub fn count(&self) -> u16 {
        self.count
    }

    /// Returns the table's BAR.
    #[must_use]
    pub fn table_bar(&self) -> u8 {
        self.table.bar
    }

    /// Returns the table's offset in its BAR.
    #[must_use]
    pub fn table_offset(&self) -> u32 {
        self.table.offset
    }

    /// Returns the pending bits' BAR.
    #[must_use]
    pub fn pba_bar(&self) -> u8 {
        self.pba.bar
    }

    /// Returns the pending bits' offset in their BAR.
    #[must_use]
    pub fn pba_offset(&self) -> u32 {
        self.pba.offset
    }

    /// Returns the table's size in bytes.
    #[must_use]
    pub fn table_size(&self) -> u64 {
        ENTRY_SIZE * u64::from(self.count)
    }

    /// Returns the size of the pending bits in bytes: whole 64-bit words.
    #[must_use]
    pub fn pba_size(&self) -> u64 {
        8 * u64::from(self.count).div_ceil(64)
    }

    /// Returns the smallest size in bytes of the BAR or BARs of table and pending bits: a power of two, at least a
    /// page.
    #[must_use]
    pub fn bar_size(&self) -> u64 {
        let table_end = u64::from(self.table.offset) + self.table_size();
        let pba_end = u64::from(self.pba.offset) + self.pba_size();
        table_end.max(pba_end).max(PAGE).next_power_of_two()
    }

    /// Converts an offset in a BAR to one in the table.
    pub(super) fn within_table(&self, bar: u8, offset: u64) -> Option<u64> {
        within(self.table, self.table_size(), bar, offset)
    }

    /// Converts an offset in a BAR to one in the pending bits.
    pub(super) fn within_pba(&self, bar: u8, offset: u64) -> Option<u64> {
        within(self.pba, self.pba_size(), bar, offset)
    }
}

fn within(place: Place, size: u64, bar: u8, offset: u64) -> Option<u64> {
    let at = offset.checked_sub(u64::from(place.offset))?;
    (bar == place.bar && at < size).then_some(at)
}
