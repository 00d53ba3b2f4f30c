//! Page directories: two levels, at most 262144 pages. Copied once when an object is created, since the driver frees them with the object,
//! or earlier when a command was interrupted.

use dma::Dma;

use crate::abi::{PAGE, PAGE_SIZE};

/// Limit of pages in a directory: 512 tables of 512 entries.
pub const MAX_PAGES: u32 = 512 * 512;

/// Number of entries of a directory or table.
const ENTRIES: u32 = 512;

/// Why a page directory can't be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PageListError {
    /// No pages, or more than a directory can list.
    #[error("A page directory can't have {0} pages")]
    Count(u32),
    /// A directory, table or page address that is not aligned to 4 KiB.
    #[error("The page directory names {0:#x}, which is not the start of a page")]
    Alignment(u64),
    /// An address that is not guest memory.
    #[error("The page directory names memory that is not the guest's")]
    Memory(
        #[from]
        #[source]
        dma::DmaFault,
    ),
}

/// The first pages of a directory, read table by table.
#[derive(Debug)]
pub struct PageList {
    /// Unread tables, the last first.
    tables: Vec<u64>,
    /// Number of unread pages.
    left: u32,
}

impl PageList {
    /// Copies the directory at `directory`, as far as `count` pages need it.
    ///
    /// # Errors
    /// When `count` or the directory is invalid.
    pub fn open(memory: &impl Dma, directory: u64, count: u32) -> Result<Self, PageListError> {
        if count == 0 || count > MAX_PAGES {
            return Err(PageListError::Count(count));
        }
        let mut copy = [0u8; PAGE_SIZE];
        let tables = read_entries(memory, directory, count.div_ceil(ENTRIES), &mut copy)?;
        let mut tables = tables.collect::<Result<Vec<u64>, _>>()?;
        tables.reverse();
        Ok(Self { tables, left: count })
    }

    /// Whether all pages were read.
    #[must_use]
    pub fn is_read(&self) -> bool {
        self.left == 0
    }

    /// Copies the next table, and passes its page addresses to `each`: up to 512, each aligned and currently guest memory. After an error
    /// the table is still the next one.
    ///
    /// # Errors
    /// When the table is invalid, or `each` fails.
    pub fn read_table(
        &mut self,
        memory: &impl Dma,
        mut each: impl FnMut(u64) -> Result<(), PageListError>,
    ) -> Result<(), PageListError> {
        let Some(&table) = self.tables.last() else { return Ok(()) };
        let count = self.left.min(ENTRIES);
        let mut copy = [0u8; PAGE_SIZE];
        let entries = read_entries(memory, table, count, &mut copy)?;
        self.tables.pop();
        self.left -= count;
        for page in entries {
            let page = page?;
            memory.check(page, PAGE)?;
            each(page)?;
        }
        Ok(())
    }
}

/// Copies the first `count` page addresses of the directory at `directory`, each aligned and currently guest memory. For lists of a bounded
/// length: a long one is read in slices ([`PageList`]).
pub fn read_page_list(memory: &impl Dma, directory: u64, count: u32) -> Result<Box<[u64]>, PageListError> {
    let mut list = PageList::open(memory, directory, count)?;
    let mut pages = Vec::with_capacity(count as usize);
    while !list.is_read() {
        list.read_table(memory, |page| {
            pages.push(page);
            Ok(())
        })?;
    }
    Ok(pages.into())
}

/// Reads the first `count` entries of one directory or table.
fn read_entries<'a, M: Dma>(
    memory: &M,
    address: u64,
    count: u32,
    copy: &'a mut [u8; PAGE_SIZE],
) -> Result<impl Iterator<Item = Result<u64, PageListError>> + use<'a, M>, PageListError> {
    if !address.is_multiple_of(PAGE) {
        return Err(PageListError::Alignment(address));
    }
    let copy = &mut copy[..count.min(ENTRIES) as usize * 8];
    memory.read(address, copy)?;
    Ok(copy.as_chunks::<8>().0.iter().map(|entry| {
        let entry = u64::from_le_bytes(*entry);
        if entry.is_multiple_of(PAGE) { Ok(entry) } else { Err(PageListError::Alignment(entry)) }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use dma::HeapMemory;
    use proptest::prelude::*;

    /// Pages are listed in order, over both levels, and exactly the needed entries are read.
    #[test]
    fn more_than_one_table() {
        let memory = HeapMemory::new(0x40_0000);
        let (directory, tables, count) = (0x1000, [0x3000u64, 0x2000], 700u32);
        for (index, table) in tables.iter().enumerate() {
            memory.write(directory + index as u64 * 8, &table.to_le_bytes()).unwrap();
        }
        let page = |i: u32| 0x10_0000 + u64::from((i * 7) % count) * PAGE;
        for i in 0..count {
            let at = tables[(i / 512) as usize] + u64::from(i % 512) * 8;
            memory.write(at, &page(i).to_le_bytes()).unwrap();
        }
        // The bytes after the used entries must not matter.
        memory.write(directory + 16, &[0xFF; 8]).unwrap();
        memory.write(tables[1] + (700 - 512) * 8, &[0xFF; 8]).unwrap();
        let pages = read_page_list(&memory, directory, count).unwrap();
        assert!(pages.iter().enumerate().all(|(i, p)| *p == page(u32::try_from(i).unwrap())));
        assert_eq!(pages.len(), 700);
        assert!(read_page_list(&memory, directory, 701).is_err());
    }

    #[test]
    fn hostile_directories_are_refused() {
        let memory = HeapMemory::new(0x4000);
        assert_eq!(read_page_list(&memory, 0, 0), Err(PageListError::Count(0)));
        assert_eq!(read_page_list(&memory, 0, MAX_PAGES + 1), Err(PageListError::Count(MAX_PAGES + 1)));
        assert_eq!(read_page_list(&memory, 8, 1), Err(PageListError::Alignment(8)));
        assert!(read_page_list(&memory, u64::MAX - 4095, 1).is_err());
        memory.write(0, &0x1000u64.to_le_bytes()).unwrap();
        memory.write(0x1000, &0x4000u64.to_le_bytes()).unwrap();
        assert!(matches!(read_page_list(&memory, 0, 1), Err(PageListError::Memory(_))));
        memory.write(0x1000, &0x3001u64.to_le_bytes()).unwrap();
        assert_eq!(read_page_list(&memory, 0, 1), Err(PageListError::Alignment(0x3001)));
        memory.write(0x1000, &0x3000u64.to_le_bytes()).unwrap();
        assert_eq!(&*read_page_list(&memory, 0, 1).unwrap(), &[0x3000]);
    }

    proptest! {
        /// Random tables never cause a panic, and each returned page is one that the device may access.
        #[test]
        fn random_directories(words in prop::collection::vec(0u64..0x9000, 1024), aligned: bool, count in 0u32..1100) {
            let memory = HeapMemory::new(0x8000);
            for (i, word) in words.iter().enumerate() {
                let word = if aligned { word & !0xFFF } else { *word };
                memory.write(i as u64 * 8, &word.to_le_bytes()).unwrap();
            }
            if let Ok(pages) = read_page_list(&memory, 0, count) {
                prop_assert_eq!(pages.len(), count as usize);
                for page in pages {
                    prop_assert!(page.is_multiple_of(PAGE) && memory.check(page, PAGE).is_ok());
                }
            }
        }
    }
}
