//! One memory region.

use crate::attributes::Access;

use super::Piece;

/// x86-64 base page, bytes.
const PAGE: u64 = 4096;

/// How a region was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) enum Kind {
    /// Registration of user memory by a page list.
    User,
    /// All of guest memory, by guest addresses; for local use only.
    Dma,
    /// Fast registration: work requests supply the pages.
    Fast {
        /// Limit of pages of a registration.
        max_pages: u32,
    },
}

/// Location of a region's bytes, by offset into the region.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) enum Extent {
    /// Offsets are guest addresses.
    Identity,
    /// One contiguous range from this guest address on.
    Single(u64),
    /// Several runs.
    Runs(Box<[Run]>),
}

/// A contiguous part of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Run {
    /// First offset into the region.
    pub offset: u64,
    /// Guest address.
    pub address: u64,
}

impl Extent {
    pub fn is_identity(&self) -> bool {
        matches!(self, Self::Identity)
    }

    /// Whether a restored extent is valid for a region of `length` bytes: translation relies on it.
    pub fn is_sound(&self, length: u64) -> bool {
        match self {
            Self::Identity => true,
            Self::Single(address) => address.checked_add(length).is_some(),
            Self::Runs(runs) => {
                let in_order = runs.windows(2).all(|pair| pair[0].offset < pair[1].offset);
                let ends = runs.iter().skip(1).map(|run| run.offset).chain([length]);
                let fit = runs.iter().zip(ends).all(|(run, end)| {
                    end.checked_sub(run.offset).is_some_and(|bytes| run.address.checked_add(bytes).is_some())
                });
                runs.first().is_some_and(|first| first.offset == 0) && in_order && fit
            }
        }
    }

    /// From a page list; `first` is the offset into the first page. `None` when a page address is unaligned or wraps around.
    pub fn from_pages(first: u64, pages: &[u64]) -> Option<Self> {
        let mut list = MrPages::new(first);
        pages.iter().try_for_each(|page| list.push(*page).ok())?;
        list.into_extent()
    }

    /// Number of pieces.
    pub fn runs(&self) -> usize {
        match self {
            Self::Identity | Self::Single(_) => 1,
            Self::Runs(runs) => runs.len(),
        }
    }
}

/// The pages of a region to register. They are added one by one, so that a long list can be read in slices. Contiguous neighbours are
/// merged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MrPages {
    /// Offset into the first page.
    first: u64,
    runs: Vec<Run>,
    count: u64,
    /// Address at which the next page would be contiguous with the last.
    expected: Option<u64>,
}

/// An invalid page: its address isn't aligned to 4 KiB, or wraps around.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0:#x} is not the address of a page of 4 KiB")]
pub struct NotAPage(pub u64);

impl MrPages {
    /// No pages yet, of a region that begins at `start`.
    #[must_use]
    pub fn new(start: u64) -> Self {
        Self { first: start % PAGE, runs: Vec::new(), count: 0, expected: None }
    }

    /// Number of pages.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Adds a page by its guest address.
    ///
    /// # Errors
    /// [`NotAPage`].
    pub fn push(&mut self, page: u64) -> Result<(), NotAPage> {
        let end = page.checked_add(PAGE).filter(|_| page.is_multiple_of(PAGE)).ok_or(NotAPage(page))?;
        if self.expected != Some(page) {
            // The first run starts inside its page, all others at the start of a page.
            let run = if self.count == 0 {
                Run { offset: 0, address: page + self.first }
            } else {
                Run { offset: self.count * PAGE - self.first, address: page }
            };
            self.runs.push(run);
        }
        self.expected = Some(end);
        self.count += 1;
        Ok(())
    }

    /// The extent; `None` without pages.
    pub(crate) fn into_extent(self) -> Option<Extent> {
        match self.runs.as_slice() {
            [] => None,
            [run] => Some(Extent::Single(run.address)),
            _ => Some(Extent::Runs(self.runs.into())),
        }
    }
}

/// A memory region.
#[derive(Debug)]
pub(crate) struct Region {
    /// lkey and rkey.
    pub key: u32,
    /// Protection domain.
    pub pd: u32,
    pub access: Access,
    /// Fast-register regions are invalid until registered.
    pub valid: bool,
    pub kind: Kind,
    /// First address in requests' terms.
    pub start: u64,
    /// Length in bytes.
    pub length: u64,
    /// A transport has a registration of its own for it.
    pub exported: bool,
    pub extent: Extent,
}

impl Region {
    /// Offset of `address`, if `length` bytes from there lie in the region.
    #[inline]
    pub fn offset_of(&self, address: u64, length: u64) -> Option<u64> {
        let offset = address.checked_sub(self.start)?;
        (offset.checked_add(length)? <= self.length).then_some(offset)
    }

    /// Appends the pieces of `len` bytes from `offset` on; the range was checked.
    #[inline]
    pub fn pieces(&self, offset: u64, len: u64, into: &mut Vec<Piece>) {
        match &self.extent {
            Extent::Identity => into.push(Piece { address: offset, len }),
            Extent::Single(base) => into.push(Piece { address: base + offset, len }),
            Extent::Runs(runs) => Self::run_pieces(runs, offset, len, into),
        }
    }

    fn run_pieces(runs: &[Run], mut offset: u64, mut len: u64, into: &mut Vec<Piece>) {
        let mut index = runs.partition_point(|run| run.offset <= offset).saturating_sub(1);
        while len > 0 {
            let run = runs[index];
            let end = runs.get(index + 1).map_or(u64::MAX, |next| next.offset);
            let now = len.min(end - offset);
            into.push(Piece { address: run.address + (offset - run.offset), len: now });
            offset += now;
            len -= now;
            index += 1;
        }
    }
}
