//! The spatial prefetcher: learns which pages of a region a vCPU requests in one round, and predicts them at the start of the next.
//!
//! Source: *Spatial Memory Streaming* (Somogyi and others, ISCA 2006), which prefetches cache lines.

use std::collections::HashMap;

use crate::Page;

/// Pages of a region: 256 KiB.
const REGION_PAGES: u64 = 64;
/// Pages of a region in one round from which on all count as confirmed. Four in a row count, too; other pages must occur in two rounds.
const DENSE_REGION_PAGES: u32 = 32;
/// In each round, one page in `TEST_ONE_IN` isn't prefetched, as a test of whether the vCPU still requests it. After `MAX_CONFIRMATIONS`
/// confirmations it is one in `REGION_PAGES`.
const TEST_ONE_IN: u64 = 4;
const MAX_CONFIRMATIONS: u32 = 8;

/// Pages that a vCPU requested together, to read or to write, by region. A round of a region ends when a page is requested a second time,
/// since it was revoked meanwhile. With random accesses this happens soon, so rounds are short.
#[derive(Debug, Default)]
pub(crate) struct SpatialPrefetcher(HashMap<u64, Region>);

/// State of a region, one bit per page.
#[derive(Debug, Clone, Copy, Default)]
struct Region {
    /// Requested in this round by the vCPU.
    requested: u64,
    /// Prefetched when the round began.
    fetched: u64,
    /// Known, but left out in this round as a test.
    left_out: u64,
    /// Consecutive confirmations by such tests, up to [`MAX_CONFIRMATIONS`].
    confirmations: u32,
    /// Probably fetched in vain: to be tested in the next round, by the first page of each row.
    suspected: u64,
    /// Suspects whose rows are tested in this round.
    tested: u64,
    /// Left out as a test, and requested: no suspects any more.
    proven: u64,
    /// Needed in the previous round.
    before: u64,
    /// Pages to prefetch when the next round begins, unless they are here.
    known: u64,
    /// Known pages that were here when the round began: no other node has requested them.
    idle: u64,
    /// Number of rounds.
    rounds: u32,
}

fn place(page: Page) -> (u64, u64) {
    (page / REGION_PAGES, 1 << (page % REGION_PAGES))
}

/// The pages of a region whose bits are set, with their bits.
fn pages(region: u64, bits: u64) -> impl Iterator<Item = (Page, u64)> {
    let all = (0..REGION_PAGES).map(|at| (at, 1 << at)).filter(move |(_, bit)| bits & bit != 0);
    all.map(move |(at, bit)| (region * REGION_PAGES + at, bit))
}

/// The bits of `pages` that are in a row with one of `some`.
fn rows_with(pages: u64, some: u64) -> u64 {
    (0..REGION_PAGES).fold(some & pages, |row, _| row | ((row << 1 | row >> 1) & pages))
}

/// The bits that belong to a row of four or more.
fn rows(pages: u64) -> u64 {
    let first = pages & (pages >> 1) & (pages >> 2) & (pages >> 3);
    first | (first << 1) | (first << 2) | (first << 3)
}

impl SpatialPrefetcher {
    /// Counts a page as requested or used.
    pub(crate) fn requested(&mut self, page: Page) {
        let (region, bit) = place(page);
        self.0.entry(region).or_default().requested |= bit;
    }

    /// Whether a known page was left out when the round began, and hasn't been requested since.
    pub(crate) fn is_left_out(&self, page: Page) -> bool {
        let (region, bit) = place(page);
        self.0.get(&region).is_some_and(|region| region.left_out & !region.requested & bit != 0)
    }

    /// Number of known pages in the page's region.
    pub(crate) fn known(&self, page: Page) -> u32 {
        self.0.get(&place(page).0).map_or(0, |region| region.known.count_ones())
    }

    /// Counts a request for `page`, and returns the pages to fetch with it. `is_present` tells which pages need no fetch. A page that is
    /// here for two rounds is no longer known: when a region is filled and then shared in part, only that part stays known.
    pub(crate) fn fault(&mut self, page: Page, is_present: impl Fn(Page) -> bool) -> Vec<Page> {
        let (number, bit) = place(page);
        let region = self.0.entry(number).or_default();
        if (region.requested | region.fetched | region.idle) & bit == 0 {
            region.requested |= bit;
            return Vec::new();
        }
        let wanted = region.requested | region.fetched;
        let dense = wanted.count_ones() >= DENSE_REGION_PAGES;
        // The result of a test holds for the page's whole row.
        let tested = region.left_out & region.tested;
        region.proven |=
            (region.left_out & region.requested) | rows_with(region.tested, tested & region.requested);
        let in_vain = rows_with(region.tested, tested & !region.requested) & !region.requested;
        let missed = (region.left_out & region.requested).count_ones();
        region.confirmations = match region.left_out & !region.requested {
            // Requested, not prefetched: this many pages are evidence of the program's pattern.
            _ if region.requested.count_ones() >= DENSE_REGION_PAGES => MAX_CONFIRMATIONS,
            _ if 2 * rows(region.requested).count_ones() >= region.requested.count_ones() => {
                MAX_CONFIRMATIONS
            }
            0 => (region.confirmations + missed).min(MAX_CONFIRMATIONS),
            unwanted if unwanted.count_ones() > missed => 0,
            _ => region.confirmations / 2,
        };
        let confirmed = if dense { wanted } else { rows(wanted) | (wanted & region.before) };
        let known = ((region.known & !region.left_out) | confirmed) & !in_vain;
        let here = pages(number, known & !bit)
            .filter(|(page, _)| is_present(*page))
            .fold(0, |all, (_, bit)| all | bit);
        region.known = known & !(here & region.idle);
        region.idle = here & region.known;
        region.before = wanted;
        region.rounds = region.rounds.wrapping_add(1);
        let one_in = if region.confirmations >= MAX_CONFIRMATIONS { REGION_PAGES } else { TEST_ONE_IN };
        let left_out =
            (0..REGION_PAGES).filter(|at| at.is_multiple_of(one_in)).fold(0, |bits, at| bits | 1_u64 << at);
        // Steps of 27 spread the tests: pages of one row aren't left out in consecutive rounds.
        let rotation = region.rounds.wrapping_mul(27) % 64;
        let absent = region.known & !bit & !here;
        region.tested = absent & region.suspected & !region.proven;
        region.suspected = 0;
        region.left_out = absent & (left_out.rotate_left(rotation) | region.tested & !(region.tested << 1));
        region.fetched = absent & !region.left_out;
        region.requested = bit;
        pages(number, region.fetched).map(|(page, _)| page).collect()
    }

    /// Marks a page that was revoked soon after its prefetch. Such a page may be one that the vCPU read once before others wrote it, or one
    /// that it didn't need. A test tells which: the page is left out once.
    pub(crate) fn suspect(&mut self, page: Page) {
        let (region, bit) = place(page);
        if let Some(region) = self.0.get_mut(&region) {
            region.suspected |= bit & !(region.proven | region.left_out & region.requested);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::Range;

    impl SpatialPrefetcher {
        /// Begins a round in which `known` are known, of one region, and `left_out` is left out as a test.
        pub(crate) fn begin_round(&mut self, known: Range<Page>, left_out: Page) {
            let region = known.start / REGION_PAGES;
            let known = known.map(place).fold(0, |all, (_, bit)| all | bit);
            self.0.insert(region, Region { known, left_out: place(left_out).1, ..Region::default() });
        }
    }

    /// Faults of a vCPU that uses `pages` in a round, starting with none of them, and the number of prefetched pages.
    fn round(rounds: &mut SpatialPrefetcher, pages: impl Iterator<Item = Page>) -> (usize, usize) {
        let (mut here, mut faults) = (std::collections::HashSet::new(), 0);
        let mut fetched = 0;
        for page in pages {
            if !here.contains(&page) {
                let more = rounds.fault(page, |page| here.contains(&page));
                fetched += more.len();
                here.extend(more);
                here.insert(page);
                faults += 1;
            }
        }
        (faults, fetched)
    }

    /// Pages are requested one by one in the first round, and by regions from then on, in any order. One page is left out in each round.
    #[test]
    fn repeated_pages_are_predicted() {
        let mut rounds = SpatialPrefetcher::default();
        assert_eq!(round(&mut rounds, 128..384), (256, 0));
        for pass in 0..200 {
            let pages = (0..256).map(|at| 128 + (at * 77 + pass * 31) % 256);
            let (faults, fetched) = round(&mut rounds, pages);
            assert!(faults <= 8 && fetched >= 248, "{pass}: {faults} {fetched}");
        }
    }

    /// A few pages of a region must occur twice before they are prefetched.
    #[test]
    fn a_few_pages_are_confirmed_first() {
        let mut rounds = SpatialPrefetcher::default();
        let all: Vec<_> = (0..64).map(|_| round(&mut rounds, [7, 9, 30].into_iter())).collect();
        assert_eq!(all[..2], [(3, 0), (3, 0)]);
        assert!(all[2..16].iter().map(|round| round.0).sum::<usize>() < 2 * 14, "{all:?}");
        assert!(all[32..].iter().map(|round| round.0).sum::<usize>() <= 34, "{all:?}");
        // The vCPU doesn't use page 30 any more. A test reveals it.
        let later: Vec<_> = (0..128).map(|_| round(&mut rounds, [7, 9].into_iter()).1).collect();
        assert!(later[64..].iter().all(|fetched| *fetched <= 1) && later[64..].contains(&1), "{later:?}");
    }

    /// Pages in a row are prefetched from the second round on.
    #[test]
    fn a_row_is_known_at_once() {
        assert_eq!(rows(0b1110_0111_1011_1110), 0b0111_1011_1110);
        assert_eq!((rows(0b1110_0111_0101), rows(u64::MAX), rows(15 << 60)), (0, u64::MAX, 15 << 60));
        let mut rounds = SpatialPrefetcher::default();
        let all: Vec<_> = (0..3).map(|_| round(&mut rounds, 70..78)).collect();
        assert_eq!(all, [(8, 0), (1, 7), (1, 7)]);
    }

    /// A vCPU fills a region, and other nodes repeatedly take some of its pages. These are prefetched with the first of them. Pages that
    /// stay here get no requests, which is no evidence against them.
    #[test]
    fn pages_that_stay_here_are_not_suspected() {
        let mut rounds = SpatialPrefetcher::default();
        assert_eq!(round(&mut rounds, 64..128), (64, 0));
        let shared = 105..113;
        for pass in 0..64 {
            let mut taken: Vec<Page> = shared.clone().collect();
            let (mut faults, mut fetched) = (0, 0);
            for page in shared.clone() {
                if taken.contains(&page) {
                    let more = rounds.fault(page, |page| !taken.contains(&page));
                    fetched += more.len();
                    taken.retain(|other| *other != page && !more.contains(other));
                    faults += 1;
                }
            }
            assert_eq!(faults + fetched, 8);
            assert!(faults <= 2, "{pass}: {faults}");
        }
        assert_eq!(rounds.0[&1].known, 0xff << (105 - 64), "the others are forgotten");
        // Other nodes soon take pages a second time while the first page is still here: the next round begins with the first page again.
        for first in [105, 106, 105, 105] {
            let fetched = rounds.fault(first, |page| page == 105 && first != 105);
            assert!(fetched.len() + 2 >= shared.clone().count(), "{first}: {fetched:?}");
        }
        // A page that other nodes take later must be requested once first.
        assert!(!rounds.fault(105, |page| page != 80).contains(&80));
    }

    /// With random accesses, few pages are prefetched.
    #[test]
    fn random_accesses_are_hardly_predicted() {
        let mut rounds = SpatialPrefetcher::default();
        let mut random = 1_u64;
        let (mut fetched, faults) = (0, 100_000);
        for _ in 0..faults {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            fetched += rounds.fault(random >> 54, |_| false).len();
        }
        assert!(fetched < faults / 2, "{fetched}");
    }

    /// A page that was revoked soon is left out once. If the vCPU requests it, it is prefetched from then on, however soon it is revoked.
    /// If not, it
    /// is never prefetched again.
    #[test]
    fn suspected_pages_are_tested() {
        let mut rounds = SpatialPrefetcher::default();
        for _ in 0..3 {
            round(&mut rounds, 70..78);
        }
        rounds.suspect(72);
        assert_eq!(round(&mut rounds, 70..78), (2, 6));
        for _ in 0..3 {
            rounds.suspect(72);
            // In some rounds another page is left out as a test.
            let (faults, fetched) = round(&mut rounds, 70..78);
            assert!(faults + fetched == 8 && faults <= 2);
            assert!(rounds.0[&1].fetched & 1 << 8 != 0, "page 72 wasn't fetched");
        }
        rounds.suspect(73);
        for _ in 0..40 {
            assert!(!rounds.fault(70, |_| false).contains(&73));
        }
    }

    /// If all pages of a row are revoked soon after their prefetch, one is left out as a test for all.
    #[test]
    fn a_row_is_tested_by_one_of_its_pages() {
        assert_eq!(rows_with(0b1101_1100_1110, 0b0100_0010_0010), 0b1100_0000_1110);
        let mut rounds = SpatialPrefetcher::default();
        for _ in 0..3 {
            round(&mut rounds, 70..78);
        }
        let mut faults = 0;
        for _ in 0..8 {
            (71..78).for_each(|page| rounds.suspect(page));
            faults += round(&mut rounds, 70..78).0;
        }
        assert!((8 + 1..=8 + 3).contains(&faults), "one tried, and now and then one left out: {faults}");
        // The vCPU doesn't use them any more.
        let mut rounds = SpatialPrefetcher::default();
        for _ in 0..3 {
            round(&mut rounds, 70..78);
        }
        (71..78).for_each(|page| rounds.suspect(page));
        assert_eq!(rounds.fault(70, |_| false).len(), 6);
        assert!(rounds.fault(70, |_| false).is_empty());
    }
}
