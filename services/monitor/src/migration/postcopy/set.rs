//! Sets of pages of a VM's RAM.

use machine::slots::DirtyPages;

use crate::migration::pages::PAGE;

const STEP: u64 = PAGE as u64;

/// A page outside the VM's RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a page at {0:#x}, which isn't RAM")]
pub struct NoSuchPage(pub u64);

/// A set of pages in ranges of RAM, by guest-physical address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageSet {
    /// One per range, ascending.
    sets: Vec<DirtyPages>,
    /// Number of pages in each range: the last word of a bitmap has room for more.
    pages: Vec<u64>,
    count: u64,
}

/// Position of a page: set, word, bit.
type Place = (usize, usize, u64);

impl PageSet {
    /// An empty set for these ranges: start and bytes, both multiples of the page size.
    pub fn empty(ranges: &[(u64, u64)]) -> Self {
        let set = |&(start, bytes): &(u64, u64)| {
            let words = usize::try_from((bytes / STEP).div_ceil(64)).unwrap_or(usize::MAX);
            DirtyPages { start, bitmap: vec![0; words] }
        };
        let mut ranges = ranges.to_vec();
        ranges.sort_unstable();
        let pages = ranges.iter().map(|(_, bytes)| bytes / STEP).collect();
        Self { sets: ranges.iter().map(set).collect(), pages, count: 0 }
    }

    /// Number of pages in the set.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// One set per range.
    pub fn sets(&self) -> &[DirtyPages] {
        &self.sets
    }

    fn place(&self, address: u64) -> Result<Place, NoSuchPage> {
        let none = NoSuchPage(address);
        // The last range that begins at or below the address.
        let at = self.sets.partition_point(|set| set.start <= address).checked_sub(1).ok_or(none)?;
        let set = self.sets.get(at).ok_or(none)?;
        let offset = address - set.start;
        let index = offset / STEP;
        let word = usize::try_from(index / 64).map_err(|_| none)?;
        if !offset.is_multiple_of(STEP) || self.pages.get(at).is_none_or(|pages| index >= *pages) {
            return Err(none);
        }
        Ok((at, word, 1 << (index % 64)))
    }

    /// Whether the set contains a page.
    ///
    /// # Errors
    /// When no range has this page.
    pub fn contains(&self, address: u64) -> Result<bool, NoSuchPage> {
        let (at, word, bit) = self.place(address)?;
        Ok(self.sets[at].bitmap[word] & bit != 0)
    }

    /// Adds a page; `false` when the set contained it.
    ///
    /// # Errors
    /// When no range has this page.
    pub fn insert(&mut self, address: u64) -> Result<bool, NoSuchPage> {
        let (at, word, bit) = self.place(address)?;
        let word = &mut self.sets[at].bitmap[word];
        let new = *word & bit == 0;
        *word |= bit;
        self.count += u64::from(new);
        Ok(new)
    }

    /// Removes a page; `false` when the set didn't contain it.
    ///
    /// # Errors
    /// When no range has this page.
    pub fn remove(&mut self, address: u64) -> Result<bool, NoSuchPage> {
        let (at, word, bit) = self.place(address)?;
        let word = &mut self.sets[at].bitmap[word];
        let was = *word & bit != 0;
        *word &= !bit;
        self.count -= u64::from(was);
        Ok(was)
    }

    /// Adds all pages of a set.
    ///
    /// # Errors
    /// When no range has one of the pages; the pages before it have been added then.
    pub fn insert_all(&mut self, more: &DirtyPages) -> Result<(), NoSuchPage> {
        for (index, word) in (0u64..).zip(&more.bitmap).filter(|(_, word)| **word != 0) {
            let first = more.start.saturating_add(index * 64 * STEP);
            let last = first.saturating_add(u64::from(63 - word.leading_zeros()) * STEP);
            match (self.place(first), self.place(last)) {
                // The bits belong to one word of this set, too.
                (Ok((at, to, 1)), Ok((end, _, _))) if at == end => {
                    let to = &mut self.sets[at].bitmap[to];
                    self.count += u64::from((word & !*to).count_ones());
                    *to |= word;
                }
                _ => {
                    let pages = (0..64).filter(|bit| word >> bit & 1 == 1);
                    pages
                        .map(|bit| first.saturating_add(bit * STEP))
                        .try_for_each(|page| self.insert(page).map(drop))?;
                }
            }
        }
        Ok(())
    }

    /// The first run of pages at or after an address, or else the first run of the set: address, and number of pages, at most `max_pages`.
    pub fn run(&self, from: u64, max_pages: usize) -> Option<(u64, usize)> {
        let first = self.next(from).or_else(|| self.next(0))?;
        let more = (1..max_pages).take_while(|index| {
            let page = (*index as u64).checked_mul(STEP).and_then(|offset| first.checked_add(offset));
            page.is_some_and(|page| self.contains(page) == Ok(true))
        });
        Some((first, 1 + more.count()))
    }

    fn next(&self, from: u64) -> Option<u64> {
        self.sets.iter().find_map(|set| {
            let skip = from.saturating_sub(set.start).div_ceil(STEP);
            let first = usize::try_from(skip / 64).ok()?;
            (first..set.bitmap.len()).find_map(|at| {
                let below = if at == first { (1u64 << (skip % 64)) - 1 } else { 0 };
                let word = set.bitmap[at] & !below;
                let index = at as u64 * 64 + u64::from(word.trailing_zeros());
                (word != 0).then(|| set.start + index * STEP)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// Two ranges with a hole between them, 100 and 70 pages.
    const RANGES: [(u64, u64); 2] = [(0x100_0000, 70 * 4096), (0, 100 * 4096)];

    /// Pages behind a range's end for which its bitmap has room, in the hole between ranges, unaligned, and far away.
    #[test]
    fn only_pages_of_the_ranges_are_accepted() {
        let mut set = PageSet::empty(&RANGES);
        for (address, good) in
            [(0, 1), (99 * 4096, 1), (100 * 4096, 0), (4095, 0), (0x100_0000 + 69 * 4096, 1), (0xff_f000, 0)]
        {
            assert_eq!(set.insert(address).is_ok(), good == 1, "{address:#x}");
        }
        assert_eq!(set.insert(u64::MAX - 4095), Err(NoSuchPage(u64::MAX - 4095)));
        assert_eq!(set.insert(1 << 40), Err(NoSuchPage(1 << 40)));
    }

    fn page() -> impl Strategy<Value = u64> {
        prop_oneof![0u64..100, (0u64..70).prop_map(|page| 4096 + page)].prop_map(|page| page * 4096)
    }

    proptest! {
        /// Adding a bitmap has the same result as adding its pages one by one, for any start.
        #[test]
        fn bits_are_pages(start in page(), words in prop::collection::vec(any::<u64>(), 1..4)) {
            let more = DirtyPages { start, bitmap: words };
            let (mut all, mut each) = (PageSet::empty(&RANGES), PageSet::empty(&RANGES));
            let one_by_one = more.pages().try_for_each(|page| each.insert(page).map(drop));
            prop_assert_eq!(all.insert_all(&more), one_by_one);
            prop_assert_eq!(all, each);
        }

        /// After any additions and removals, the set equals a `BTreeSet`: members, count, and runs from any address.
        #[test]
        fn it_is_a_set(steps in prop::collection::vec((page(), any::<bool>()), 0..200), from in page(), max_pages in 1usize..80) {
            let (mut set, mut model) = (PageSet::empty(&RANGES), BTreeSet::new());
            for (page, add) in steps {
                if add {
                    prop_assert_eq!(set.insert(page), Ok(model.insert(page)));
                } else {
                    prop_assert_eq!(set.remove(page), Ok(model.remove(&page)));
                }
                prop_assert_eq!(set.count(), model.len() as u64);
            }
            let first = model.range(from..).next().or_else(|| model.first()).copied();
            let expected = first.map(|first| {
                let length = (0..max_pages as u64).take_while(|index| model.contains(&(first + index * 4096))).count();
                (first, length)
            });
            prop_assert_eq!(set.run(from, max_pages), expected);
            let all: Vec<u64> = set.sets().iter().flat_map(|set| set.pages().collect::<Vec<_>>()).collect();
            prop_assert_eq!(all, model.into_iter().collect::<Vec<_>>());
        }
    }
}
