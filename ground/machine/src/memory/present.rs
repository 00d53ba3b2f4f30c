//! Which pages of guest RAM have ever been touched.

use std::io;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use super::{GuestRam, RamRegion};
use crate::slots::{DirtyPages, PAGE};

/// Pages of a region that have memory behind them; see [`GuestRam::present`].
///
/// # Errors
/// When the host can't tell.
pub(super) fn present_in(region: &RamRegion) -> io::Result<DirtyPages> {
    let pages = region.range.size / PAGE;
    let words = usize::try_from(pages.div_ceil(64)).map_err(io::Error::other)?;
    let mut bitmap = vec![0u64; words];
    let end = region.file_offset + region.range.size;
    let mut at = region.file_offset;
    while at < end {
        let data = match seek(&*region.file, SeekFrom::Data(at)) {
            Ok(data) if data < end => data,
            // Nothing behind it, or in another region.
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
    /// The pages that have memory behind them, one set per region; all others read as zero, and reading them would give
    /// them memory. A page that is touched meanwhile may be missing: start logging writes first.
    ///
    /// # Errors
    /// When the host can't tell.
    pub fn present(&self) -> io::Result<Vec<DirtyPages>> {
        self.regions().iter().map(present_in).collect()
    }
}

#[cfg(test)]
mod tests {
    use crate::memory::{Bytes, GuestAddress, GuestAddressSpace, GuestRam, RamLayout, RamOptions};

    /// What was written is present, what never was is not, and looking changes nothing.
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
