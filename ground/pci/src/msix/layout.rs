//! Where the MSI-X table and pending bits of a function lie.

use super::{ENTRY_SIZE, MsixError};

/// The most vectors that a function can have.
pub const MAX_VECTORS: u16 = 2048;

/// Smallest BAR of [`MsixLayout::exclusive`]: a page, so that nothing else shares its page.
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
    /// Table and pending bits at given places.
    ///
    /// # Errors
    /// When there are no or more than [`MAX_VECTORS`] vectors, a BAR index or alignment (8 bytes) is
    /// wrong, or both overlap.
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

    /// A BAR of its own: the table at 0, the pending bits behind it, [`MsixLayout::bar_size`] bytes.
    ///
    /// # Errors
    /// As for [`MsixLayout::new`].
    pub fn exclusive(bar: u8, count: u16) -> Result<Self, MsixError> {
        Self::new(count, (bar, 0), (bar, 16 * u32::from(count)))
    }

    /// Number of vectors, 1 to [`MAX_VECTORS`].
    #[must_use]
    pub fn count(&self) -> u16 {
        self.count
    }

    /// BAR of the table.
    #[must_use]
    pub fn table_bar(&self) -> u8 {
        self.table.bar
    }

    /// Offset of the table in its BAR.
    #[must_use]
    pub fn table_offset(&self) -> u32 {
        self.table.offset
    }

    /// BAR of the pending bits.
    #[must_use]
    pub fn pba_bar(&self) -> u8 {
        self.pba.bar
    }

    /// Offset of the pending bits in their BAR.
    #[must_use]
    pub fn pba_offset(&self) -> u32 {
        self.pba.offset
    }

    /// Bytes of the table.
    #[must_use]
    pub fn table_size(&self) -> u64 {
        ENTRY_SIZE * u64::from(self.count)
    }

    /// Bytes of the pending bits, whole 64-bit words.
    #[must_use]
    pub fn pba_size(&self) -> u64 {
        8 * u64::from(self.count).div_ceil(64)
    }

    /// The smallest size that the BAR(s) of table and pending bits may have: a power of two, at least a page.
    #[must_use]
    pub fn bar_size(&self) -> u64 {
        let table_end = u64::from(self.table.offset) + self.table_size();
        let pba_end = u64::from(self.pba.offset) + self.pba_size();
        table_end.max(pba_end).max(PAGE).next_power_of_two()
    }

    /// Offset within the table of an offset within a BAR.
    pub(super) fn within_table(&self, bar: u8, offset: u64) -> Option<u64> {
        within(self.table, self.table_size(), bar, offset)
    }

    /// Offset within the pending bits of an offset within a BAR.
    pub(super) fn within_pba(&self, bar: u8, offset: u64) -> Option<u64> {
        within(self.pba, self.pba_size(), bar, offset)
    }
}

fn within(place: Place, size: u64, bar: u8, offset: u64) -> Option<u64> {
    let at = offset.checked_sub(u64::from(place.offset))?;
    (bar == place.bar && at < size).then_some(at)
}
