//! Shared RAM becomes memory of this host alone: no page comes or goes any more.
//!
//! When the kernel is told to stop watching a range, it takes all of its pages from those that KVM has mapped for the guest, and vCPUs have to ask for them once more
//! (21,000 pages took a graph search some 80 ms). So what the guest has in use stays watched ([`SharedRam::release_around`]), with all pages that there are
//! mapped and writable, and the few that come later are given when they fault ([`SharedRam::give`]).

use std::io;
use std::ops::Range as Pages;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use rustix::mm::Advice;

use super::{PAGE_64, PageRights, Piece, SharedRam};
use crate::memory::userfault::Range;

/// Pages that stay watched together, where one of them is in use: 2 MiB.
const BLOCK: u64 = 512;

impl Piece {
    /// Numbers of its pages.
    fn pages(&self) -> Pages<u64> {
        self.start / PAGE_64..(self.start + self.guest.len()) / PAGE_64
    }

    /// Where pages lie in the guest's mapping.
    fn range(&self, pages: &Pages<u64>) -> Range {
        let skip = pages.start * PAGE_64 - self.start;
        Range { start: self.guest.as_ptr().addr() as u64 + skip, len: (pages.end - pages.start) * PAGE_64 }
    }

    /// The first pages from one on, before another, that have memory behind them.
    fn next_present(&self, pages: &Pages<u64>) -> io::Result<Option<Pages<u64>>> {
        let place = |page: u64| self.offset + page * PAGE_64 - self.start;
        let page = |place: u64| (place - self.offset + self.start) / PAGE_64;
        if pages.is_empty() {
            return Ok(None);
        }
        let begin = match seek(&*self.file, SeekFrom::Data(place(pages.start))) {
            Ok(begin) if begin < place(pages.end) => begin,
            // Nothing there, or behind them.
            Ok(_) | Err(Errno::NXIO) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let end = seek(&*self.file, SeekFrom::Hole(begin))?;
        let end = end.next_multiple_of(PAGE_64).clamp(begin + 1, place(pages.end));
        Ok(Some(page(begin)..page(end).max(page(begin) + 1)))
    }
}

/// Parts of `all` in a row of which `is` says the same, in order.
fn runs<T: PartialEq>(all: Pages<u64>, mut is: impl FnMut(u64) -> T) -> Vec<(Pages<u64>, T)> {
    let mut found: Vec<(Pages<u64>, T)> = Vec::new();
    for one in all {
        let what = is(one);
        match found.last_mut() {
            Some((run, known)) if *known == what => run.end = one + 1,
            _ => found.push((one..one + 1, what)),
        }
    }
    found
}

impl SharedRam {
    /// Ends it: all that wait go on, and there will be no faults. What the guest sees from here on is this host's own memory.
    pub fn release(&self) {
        for piece in &self.pieces {
            if let Err(error) = self.uffd.unregister(piece.range(&piece.pages())) {
                tracing::error!(%error, start = piece.start, "Shared RAM could not be released");
            }
        }
    }

    /// As [`SharedRam::release`], while nobody touches it, but pages that may be written stay mapped, in the guest's page tables, too. `rights`: what the guest may do with a page by now.
    /// Faults are still told for pages near those, where there was no page before, or where the host takes one away: each is to be given back with [`SharedRam::give`].
    ///
    /// # Errors
    /// When the host refuses. Some of it may be released then, and [`SharedRam::release`] does the rest.
    pub fn release_around(&self, rights: impl Fn(u64) -> PageRights) -> io::Result<()> {
        for piece in &self.pieces {
            let all = piece.pages();
            let blocks = all.start / BLOCK..all.end.div_ceil(BLOCK);
            let within = |blocks: &Pages<u64>| {
                (blocks.start * BLOCK).max(all.start)..(blocks.end * BLOCK).min(all.end)
            };
            let in_use = |block| within(&(block..block + 1)).any(|page| rights(page) == PageRights::Write);
            for (blocks, stays) in runs(blocks, in_use) {
                let pages = within(&blocks);
                if stays {
                    self.map_all(piece, &pages, &rights)?;
                } else {
                    self.uffd.unregister(piece.range(&pages))?;
                }
            }
        }
        Ok(())
    }

    /// Has the guest write all of these pages that have memory behind them.
    fn map_all(
        &self,
        piece: &Piece,
        pages: &Pages<u64>,
        rights: impl Fn(u64) -> PageRights,
    ) -> io::Result<()> {
        let mut rest = pages.clone();
        while let Some(present) = piece.next_present(&rest)? {
            rest.start = present.end;
            for (run, known) in runs(present, &rights) {
                self.set_all(run, known, PageRights::Write)?;
            }
        }
        self.uffd.wake(piece.range(pages))
    }

    /// After [`SharedRam::release_around`]: gives the guest a page to read and write, and up to `count` in all from it on, as far as they are watched with it. Lets threads that wait
    /// for them try again. How many those were. Each takes memory of the host, whether the guest comes to it or not.
    ///
    /// # Errors
    /// When the host refuses, or the page isn't shared.
    pub fn give(&self, page: u64, count: u64) -> io::Result<u64> {
        let (guest, _, most) = self.piece_of(page)?;
        let count = count.min(BLOCK - page % BLOCK).min(most).max(1);
        self.set_all(page..page + count, PageRights::None, PageRights::Write)?;
        self.uffd.wake(Range { start: guest as u64, len: count * PAGE_64 })?;
        Ok(count)
    }

    /// Afterwards: maps all pages that there are for the guest at once, which takes a microsecond each; vCPUs may run meanwhile. Until
    /// then each that was taken from it has to be asked for by the vCPU that touches it. How many pages.
    ///
    /// # Errors
    /// When the host refuses (Linux older than 5.14, say); pages come one by one, then.
    pub fn populate(&self) -> io::Result<u64> {
        let mut populated = 0;
        for piece in &self.pieces {
            let mut rest = piece.pages();
            while let Some(present) = piece.next_present(&rest)? {
                rest.start = present.end;
                let range = piece.range(&present);
                let len = usize::try_from(range.len).map_err(io::Error::other)?;
                // SAFETY: part of the guest's mapping, whose pages get no other content by it.
                unsafe { rustix::mm::madvise(range.start as *mut _, len, Advice::LinuxPopulateWrite) }?;
                populated += present.end - present.start;
            }
        }
        Ok(populated)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::PAGE;
    use super::super::tests::{next, shared, shared_of, touch};
    use super::*;

    /// KiB of the guest's mapping that are mapped, in all of its parts.
    fn mapped(shared: &SharedRam) -> u64 {
        let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let (mut inside, mut sum) = (false, 0);
        for line in text.lines() {
            let ends = line.split_whitespace().next().and_then(|word| word.split_once('-'));
            let ends = ends.map(|(begin, end)| [begin, end].map(|hex| u64::from_str_radix(hex, 16)));
            if let Some([Ok(begin), Ok(end)]) = ends {
                inside = shared.pieces.iter().any(|piece| {
                    let whole = piece.range(&piece.pages());
                    begin >= whole.start && end <= whole.start + whole.len
                });
            } else if let Some(rss) = line.strip_prefix("Rss:").filter(|_| inside) {
                sum += rss.split_whitespace().next().unwrap().parse::<u64>().unwrap();
            }
        }
        sum
    }

    fn no_fault_is_told(shared: &SharedRam) {
        let mut faults = Vec::new();
        shared.faults(&mut faults).unwrap();
        assert!(faults.is_empty(), "{faults:?}");
    }

    /// What is there is mapped, with what it holds, whatever the guest might do with it before; what isn't there stays so.
    #[test]
    fn memory_that_is_there_is_mapped_at_once() {
        let Some((ram, shared)) = shared() else { return };
        let there = [0x200, 0x2a3, 0x2a4, 0x2a5, 0x3ff];
        for (value, page) in (1..).zip(there) {
            shared.write(page, 0, &[value]).unwrap();
        }
        shared.set(0x2a4, PageRights::None, PageRights::Read).unwrap();
        shared.set(0x2a5, PageRights::None, PageRights::Write).unwrap();
        shared.release();
        assert_eq!(shared.populate().unwrap(), 5);
        assert_eq!(mapped(&shared), 5 * 4);
        for (value, page) in (1..).zip(there) {
            assert_eq!(touch(&shared, page, true).join().unwrap(), value);
        }
        let present: u64 = ram.present().unwrap().iter().map(|pages| pages.count()).sum();
        assert_eq!(present, 5, "no page has come");
        assert_eq!(touch(&shared, 0x300, true).join().unwrap(), 0, "one that comes later is zero");
    }

    /// Near a page that may be written all that is there is mapped and writable at once, without being touched, and what comes later is told and given; other memory is
    /// ordinary memory.
    #[test]
    fn what_is_in_use_stays_mapped() {
        use PageRights::{None, Read, Write};
        // Two blocks.
        let Some((ram, shared)) = shared_of(6 << 20) else { return };
        let there = [0x301, 0x302, 0x303, 0x3a0, 0x3a1, 0x3ff, 0x400, 0x5ff];
        for (value, page) in (1..).zip(there) {
            shared.write(page, 0, &[value]).unwrap();
        }
        for (page, rights) in [(0x301, Write), (0x302, Read), (0x3a0, Read), (0x3a1, Write), (0x400, Read)] {
            shared.set(page, None, rights).unwrap();
        }
        shared
            .release_around(|page| match page {
                0x301 | 0x3a1 => Write,
                0x302 | 0x3a0 | 0x400 => Read,
                _ => None,
            })
            .unwrap();
        assert_eq!(mapped(&shared), 7 * 4, "all of the first block, of the others what the guest has had");
        for (value, page) in (1..).zip(there) {
            assert_eq!(touch(&shared, page, true).join().unwrap(), value);
            no_fault_is_told(&shared);
        }
        assert_eq!(touch(&shared, 0x401, true).join().unwrap(), 0);
        no_fault_is_told(&shared);
        let later = touch(&shared, 0x304, true);
        assert_eq!(next(&shared).page, 0x304);
        assert_eq!(shared.give(0x304, 1).unwrap(), 1);
        assert_eq!(later.join().unwrap(), 0);
        assert_eq!(touch(&shared, 0x304, true).join().unwrap(), 1);
        // With those behind it, of which some are there already, up to the end of what is watched.
        let later = touch(&shared, 0x39e, true);
        assert_eq!(next(&shared).page, 0x39e);
        assert_eq!(shared.give(0x39e, 1000).unwrap(), 0x400 - 0x39e);
        assert_eq!(later.join().unwrap(), 0);
        for (page, value) in [(0x39f, 0), (0x3a0, 5), (0x3a1, 6), (0x3fe, 0), (0x3ff, 7)] {
            assert_eq!(touch(&shared, page, false).join().unwrap(), value, "{page:#x}");
            no_fault_is_told(&shared);
        }
        // The host takes a page away.
        let address = shared.addresses(0x301).unwrap().0;
        // SAFETY: a page of the guest's mapping, which is shared: its content stays in the file.
        unsafe { rustix::mm::madvise(address as *mut _, PAGE, Advice::LinuxDontNeed) }.unwrap();
        let later = touch(&shared, 0x301, false);
        assert_eq!(next(&shared).page, 0x301);
        shared.give(0x301, 1).unwrap();
        assert_eq!(later.join().unwrap(), 2, "what was written before");
        let all = 10 + (0x400 - 0x39e) - 3;
        assert_eq!(shared.populate().unwrap(), all);
        no_fault_is_told(&shared);
        assert_eq!(mapped(&shared), all * 4);
        let present: u64 = ram.present().unwrap().iter().map(|pages| pages.count()).sum();
        assert_eq!(present, all);
        // Who waits when all of it ends goes on.
        let waits = touch(&shared, 0x305, true);
        std::thread::sleep(Duration::from_millis(20));
        shared.release();
        assert_eq!(waits.join().unwrap(), 0);
    }
}
