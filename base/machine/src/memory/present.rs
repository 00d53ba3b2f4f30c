//! Which pages of guest RAM are allocated, because something has accessed them.

use std::io;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use super::{GuestRam, RamRegion};
use crate::slots::{DirtyPages, PAGE};

/// Allocated pages of a region; see [`GuestRam::present`].
///
/// # Errors
/// When the host refuses SEEK_DATA or SEEK_HOLE.
pub(super) fn present_in(region: &RamRegion) -> io::Result<DirtyPages> {
    let pages = region.range.size / PAGE;
    let words = usize::try_from(pages.div_ceil(64)).map_err(io::Error::other)?;
    let mut bitmap = vec![0u64; words];
    let end = region.file_offset + region.range.size;
    let mut at = region.file_offset;
    while at < end {
        let data = match seek(&*region.file, SeekFrom::Data(at)) {
            Ok(data) if data < end => data,
            // The rest of the file is a hole, or the next data lies in another region.
            Ok(_) | Err(Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let hole = seek(&*region.file, SeekFrom::Hole(data))?.min(end);
        let first = (data - region.file_offset) / PAGE;
        for page in first..(hole - region.file_offset).div_ceil(PAGE) {
            if let Some(word) = usize::try_from(page / 64).ok().and_then(|word| bitmap.get_mut(word)) {
                *word |= 1 << (page % 64);
            }
        }
        at = hole.max(at + PAGE);
    }
    Ok(DirtyPages { start: region.range.start, bitmap })
}

impl GuestRam {
    /// The allocated pages, one set per region. All others read as zero, and reading them would allocate them. The result may lack a page
    /// that is accessed during the call: start dirty logging first.
    ///
    /// # Errors
    /// When the host refuses SEEK_DATA or SEEK_HOLE.
    pub fn present(&self) -> io::Result<Vec<DirtyPages>> {
        self.regions().iter().map(present_in).collect()
    }
}

#[cfg(test)]
mod tests {
    use crate::memory::{Bytes, GuestAddress, GuestAddressSpace, GuestRam, RamLayout, RamOptions};

    /// Written pages are present, untouched ones aren't, and the query allocates none.
    #[test]
    fn only_touched_pages_are_present() {
        let ram = GuestRam::allocate(&RamLayout::new(&[64 << 20]).unwrap(), &RamOptions::default()).unwrap();
        let pages = || {
            ram.present()
                .unwrap()
                .iter()
                .flat_map(|set| set.pages().collect::<Vec<_>>())
                .collect::<Vec<u64>>()
        };
        assert_eq!(pages(), [0u64; 0]);
        for address in [0u64, 0x5000, 0x6fff, 63 << 20] {
            ram.memory().memory().write_obj(1u8, GuestAddress(address)).unwrap();
        }
        assert_eq!(pages(), [0, 0x5000, 0x6000, 63 << 20]);
        assert_eq!(pages().len(), 4);
    }
}
