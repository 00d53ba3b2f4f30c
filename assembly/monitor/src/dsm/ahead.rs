//! The prefetcher: requests pages before a vCPU faults.
//!
//! | prefetcher | predicts |
//! |---|---|
//! | [`Streams`] | the next pages, for a vCPU that advances page by page in one or more places, such as matrix rows |
//! | [`Rounds`] | the pages of a region that a vCPU requested in one round, in any order, at the start of the next round |
//! | [`Follow`] | a batch of `Rounds` that a vCPU starts soon after a fault |
//!
//! A prefetch context requests a page, or the right to write where a copy is here. The protocol treats it as a vCPU of this node whose
//! instruction retires as soon as the page arrives. So messages, ages and holds are those of ordinary faults. A page that was fetched too
//! early or in vain is granted away like any other.
//!
//! `Rounds` follows *Spatial Memory Streaming* (Somogyi and others, ISCA 2006), which prefetches cache lines.

use std::collections::HashMap;
use std::ops::Range;

use dsm::{Event, Fault, Node, Page, Vcpu};

use super::engine::{Core, Engine, now};
use super::follow::{Follow, Want};
use super::streams::Streams;

/// Prefetch contexts of a node: the limit of pages that are prefetched at the same time.
pub(super) const HELPERS: u16 = 128;
/// A page revoked within this time after its prefetch may have been fetched in vain, ns.
pub(super) const SOON: u64 = 1_000_000;
/// Pages of a stream that are requested at once. The next part is requested when the first page of this one arrives, while the vCPU uses
/// pages.
const PART: usize = 32;
/// Pages of a region: 256 KiB.
const REGION: u64 = 64;
/// Pages of a region in one round from which on all count as confirmed. Four in a row count, too; other pages must occur in two rounds.
const DENSE: u32 = 32;
/// In each round, one page in `OFTEN` isn't prefetched, as a test of whether the vCPU still requests it. After `SURE` confirmations it is
/// one in
/// `REGION`.
const OFTEN: u64 = 4;
const SURE: u32 = 8;

/// Known pages from which on a batch is requested before its first fault. A single page may be about to be used by another node, for
/// example a
/// lock's.
const BATCH: u32 = 4;

/// Prefetcher of one vCPU.
#[derive(Debug, Default)]
pub(super) struct Foresight {
    streams: Streams,
    read: Rounds,
    written: Rounds,
    follow: Follow,
}

impl Foresight {
    /// Predicts from a fault on `page`. `there` tells whether a page needs no fetch.
    pub(super) fn fault(&mut self, page: Page, write: bool, there: impl Fn(Want) -> bool) -> Foreseen {
        let (used, ahead) = self.streams.fault(page, write);
        let rounds = if write { &mut self.written } else { &mut self.read };
        used.clone().for_each(|page| rounds.asked(page));
        let known = rounds.fault(page, |page| there((page, write)));
        let mut known: Vec<Want> = known.into_iter().map(|page| (page, write)).collect();
        let (read, written) = (&self.read, &self.written);
        let batch = |(page, write)| if write { written } else { read }.known(page) >= BATCH;
        if let Some((first, write)) = self.follow.fault((page, write), now(), batch) {
            let rounds = if write { &mut self.written } else { &mut self.read };
            let others = rounds.fault(first, |page| there((page, write)));
            known.extend(std::iter::once(first).chain(others).map(|page| (page, write)));
        }
        let rounds = if write { &self.written } else { &self.read };
        // A page that is left out as a test must be requested by the vCPU itself.
        let ahead = ahead.filter(|page| !rounds.is_left_out(*page)).collect();
        Foreseen { used, known, ahead }
    }

    /// A page was revoked soon after its prefetch.
    fn doubt(&mut self, page: Page) {
        self.read.doubt(page);
        self.written.doubt(page);
    }
}

/// Result of [`Foresight::fault`].
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Foreseen {
    /// Prefetched pages that the vCPU has used.
    pub(super) used: Range<Page>,
    /// Pages that the vCPU needed together with this one before, or soon after it.
    known: Vec<Want>,
    /// Pages that follow in a stream.
    ahead: Vec<Page>,
}

/// Pages that a vCPU requested together, to read or to write, by region. A round of a region ends when a page is requested a second time,
/// since it was revoked meanwhile. With random accesses this happens soon, so rounds are short.
#[derive(Debug, Default)]
struct Rounds(HashMap<u64, Region>);

/// State of a region, one bit per page.
#[derive(Debug, Clone, Copy, Default)]
struct Region {
    /// Requested in this round by the vCPU.
    asked: u64,
    /// Prefetched when the round began.
    fetched: u64,
    /// Known, but left out in this round as a test.
    left_out: u64,
    /// Consecutive confirmations by such tests, up to [`SURE`].
    sure: u32,
    /// Probably fetched in vain: to be tested in the next round, by the first page of each row.
    suspect: u64,
    /// Suspects whose rows are tested in this round.
    tried: u64,
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
    (page / REGION, 1 << (page % REGION))
}

/// The pages of a region whose bits are set, with their bits.
fn pages(region: u64, bits: u64) -> impl Iterator<Item = (Page, u64)> {
    let all = (0..REGION).map(|at| (at, 1 << at)).filter(move |(_, bit)| bits & bit != 0);
    all.map(move |(at, bit)| (region * REGION + at, bit))
}

/// The bits of `pages` that are in a row with one of `some`.
fn row_of(pages: u64, some: u64) -> u64 {
    (0..REGION).fold(some & pages, |row, _| row | ((row << 1 | row >> 1) & pages))
}

/// The bits that belong to a row of four or more.
fn rows(pages: u64) -> u64 {
    let first = pages & (pages >> 1) & (pages >> 2) & (pages >> 3);
    first | (first << 1) | (first << 2) | (first << 3)
}

impl Rounds {
    /// Counts a page as requested or used.
    fn asked(&mut self, page: Page) {
        let (region, bit) = place(page);
        self.0.entry(region).or_default().asked |= bit;
    }

    /// Whether a known page was left out when the round began, and hasn't been requested since.
    fn is_left_out(&self, page: Page) -> bool {
        let (region, bit) = place(page);
        self.0.get(&region).is_some_and(|region| region.left_out & !region.asked & bit != 0)
    }

    /// Number of known pages in the page's region.
    fn known(&self, page: Page) -> u32 {
        self.0.get(&place(page).0).map_or(0, |region| region.known.count_ones())
    }

    /// Counts a request for `page`, and returns the pages to fetch with it. `there` tells which pages need no fetch. A page that is here
    /// for two rounds is no longer known: when a region is filled and then shared in part, only that part stays known.
    fn fault(&mut self, page: Page, there: impl Fn(Page) -> bool) -> Vec<Page> {
        let (number, bit) = place(page);
        let region = self.0.entry(number).or_default();
        if (region.asked | region.fetched | region.idle) & bit == 0 {
            region.asked |= bit;
            return Vec::new();
        }
        let wanted = region.asked | region.fetched;
        let dense = wanted.count_ones() >= DENSE;
        // The result of a test holds for the page's whole row.
        let tried = region.left_out & region.tried;
        region.proven |= (region.left_out & region.asked) | row_of(region.tried, tried & region.asked);
        let in_vain = row_of(region.tried, tried & !region.asked) & !region.asked;
        let missed = (region.left_out & region.asked).count_ones();
        region.sure = match region.left_out & !region.asked {
            // Requested, not prefetched: this many pages are evidence of the program's pattern.
            _ if region.asked.count_ones() >= DENSE => SURE,
            _ if 2 * rows(region.asked).count_ones() >= region.asked.count_ones() => SURE,
            0 => (region.sure + missed).min(SURE),
            unwanted if unwanted.count_ones() > missed => 0,
            _ => region.sure / 2,
        };
        let confirmed = if dense { wanted } else { rows(wanted) | (wanted & region.before) };
        let known = ((region.known & !region.left_out) | confirmed) & !in_vain;
        let here =
            pages(number, known & !bit).filter(|(page, _)| there(*page)).fold(0, |all, (_, bit)| all | bit);
        region.known = known & !(here & region.idle);
        region.idle = here & region.known;
        region.before = wanted;
        region.rounds = region.rounds.wrapping_add(1);
        let one_in = if region.sure >= SURE { REGION } else { OFTEN };
        let left_out =
            (0..REGION).filter(|at| at.is_multiple_of(one_in)).fold(0, |bits, at| bits | 1_u64 << at);
        // Steps of 27 spread the tests: pages of one row aren't left out in consecutive rounds.
        let turn = region.rounds.wrapping_mul(27) % 64;
        let gone = region.known & !bit & !here;
        region.tried = gone & region.suspect & !region.proven;
        region.suspect = 0;
        region.left_out = gone & (left_out.rotate_left(turn) | region.tried & !(region.tried << 1));
        region.fetched = gone & !region.left_out;
        region.asked = bit;
        pages(number, region.fetched).map(|(page, _)| page).collect()
    }

    /// Marks a page that was revoked soon after its prefetch. Such a page may be one that the vCPU read once before others wrote it, or one
    /// that it didn't need. A test tells which: the page is left out once.
    fn doubt(&mut self, page: Page) {
        let (region, bit) = place(page);
        if let Some(region) = self.0.get_mut(&region) {
            region.suspect |= bit & !(region.proven | region.left_out & region.asked);
        }
    }
}

/// The prefetch contexts of a node.
#[derive(Debug, Default)]
pub(super) struct Helpers {
    /// A bit for each context in use.
    busy: u128,
    /// The page of each context in use, and the context of each page.
    waits: Vec<Page>,
    pages: HashMap<Page, u16>,
    /// Parts of streams to request when a page in flight arrives.
    behind: HashMap<Page, Vec<Want>>,
    /// Parts of streams to request now.
    next: Vec<Vec<Want>>,
}

impl Helpers {
    /// Whether a context fetches the page.
    fn fetch(&self, page: Page) -> bool {
        self.pages.contains_key(&page)
    }

    /// Assigns a free context to a page; none if all are in use.
    fn begin(&mut self, page: Page) -> Option<u16> {
        let helper = (!self.busy).trailing_zeros();
        if helper >= u32::from(HELPERS) {
            return None;
        }
        self.busy |= 1 << helper;
        self.waits.resize(usize::from(HELPERS), 0);
        let helper = u16::try_from(helper).ok()?;
        *self.waits.get_mut(usize::from(helper))? = page;
        self.pages.insert(page, helper);
        Some(helper)
    }

    fn end(&mut self, helper: u16) -> Option<Page> {
        let bit = 1_u128.checked_shl(helper.into()).filter(|bit| self.busy & bit != 0)?;
        self.busy &= !bit;
        let page = *self.waits.get(usize::from(helper))?;
        self.pages.remove(&page);
        self.next.extend(self.behind.remove(&page));
        Some(page)
    }
}

/// Whether a page needs no fetch. Stores to a write-update page go to the sequencer, so they need no copy.
pub(super) fn is_there(node: &Node, (page, write): Want) -> bool {
    let fault = if write { Fault::Write } else { Fault::Read };
    Engine::allows(node, page, fault) || node.mode(page).is_update()
}

impl Engine {
    /// The context whose number in the protocol is `vcpu`; numbers of contexts follow those of vCPUs.
    pub(super) fn helper(core: &Core, vcpu: Vcpu) -> Option<u16> {
        usize::from(vcpu).checked_sub(core.vcpus.len()).and_then(|helper| u16::try_from(helper).ok())
    }

    /// A context's page has arrived, or other nodes request it: the context ends, since no instruction needs the page.
    pub(super) fn helped(core: &mut Core, helper: u16) {
        if let Some(page) = core.helpers.end(helper) {
            core.counts.ahead += 1;
            // A vCPU that has faulted on it meanwhile resumes by the protocol, or, if its fault hasn't been read, when it is.
            core.pages.ahead.insert(page, now());
        }
    }

    /// Requests predicted pages.
    pub(super) fn fetch_ahead(&self, core: &mut Core, foreseen: Foreseen, write: bool) {
        for page in std::mem::take(&mut core.pages.in_vain) {
            core.counts.in_vain += 1;
            core.vcpus.iter_mut().for_each(|slot| slot.foresight.doubt(page));
        }
        for page in foreseen.used {
            core.pages.is_asked_for(page, write);
        }
        for (page, write) in foreseen.known {
            self.fetch(core, page, write);
        }
        // An operation that vCPUs here have never done to a page that they used isn't predicted from neighbors: another vCPU's part begins
        // there.
        let ahead = foreseen.ahead.into_iter().filter(|page| core.pages.may_be_wanted(*page, write));
        let ahead = ahead.map(|page| (page, write)).collect();
        self.fetch_in_parts(core, ahead);
    }

    /// Requests the parts of streams that follow pages which have arrived.
    pub(super) fn fetch_next(&self, core: &mut Core) {
        while let Some(wants) = core.helpers.next.pop() {
            if !core.stopping && !core.holding && !core.standing {
                self.fetch_in_parts(core, wants);
            }
        }
    }

    /// Requests the first part of `wants`; the rest follows when the first page of that part arrives.
    fn fetch_in_parts(&self, core: &mut Core, mut wants: Vec<Want>) {
        wants.retain(|want| !is_there(&core.node, *want) && !core.helpers.fetch(want.0));
        while !wants.is_empty() {
            let behind = wants.split_off(wants.len().min(PART));
            for (page, write) in &wants {
                self.fetch(core, *page, *write);
            }
            if let Some((page, _)) = wants.iter().find(|(page, _)| core.helpers.fetch(*page)) {
                if !behind.is_empty() {
                    core.helpers.behind.insert(*page, behind);
                }
                return;
            }
            wants = behind;
        }
    }

    fn fetch(&self, core: &mut Core, page: Page, write: bool) {
        if is_there(&core.node, (page, write)) || page >= core.node.config().pages || core.helpers.fetch(page)
        {
            return;
        }
        let fault = if write { Fault::Write } else { Fault::Read };
        let Some(helper) = core.helpers.begin(page) else { return };
        let Ok(vcpu) = Vcpu::try_from(core.vcpus.len() + usize::from(helper)) else { return };
        self.step(core, Event::Fault { vcpu, page, fault });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The part behind a page in flight becomes due once, when the page arrives. Parts behind other pages stay.
    #[test]
    fn what_lies_behind_a_page_is_next_when_it_has_come() {
        let mut helpers = Helpers::default();
        let [one, other] = [7, 9].map(|page| helpers.begin(page).unwrap());
        helpers.behind.insert(7, vec![(8, false)]);
        helpers.behind.insert(9, vec![(10, true)]);
        assert_eq!(helpers.end(one), Some(7));
        assert_eq!(std::mem::take(&mut helpers.next), [vec![(8, false)]]);
        assert_eq!(helpers.end(one), None);
        assert_eq!(helpers.begin(7), Some(one));
        assert_eq!(helpers.end(one), Some(7));
        assert!(helpers.next.is_empty());
        assert_eq!(helpers.end(other), Some(9));
        assert_eq!(helpers.next, [vec![(10, true)]]);
    }

    /// Faults of a vCPU that uses `pages` in a round, starting with none of them, and the number of prefetched pages.
    fn round(rounds: &mut Rounds, pages: impl Iterator<Item = Page>) -> (usize, usize) {
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
    fn what_is_done_again_is_foreseen() {
        let mut rounds = Rounds::default();
        assert_eq!(round(&mut rounds, 128..384), (256, 0));
        for turn in 0..200 {
            let pages = (0..256).map(|at| 128 + (at * 77 + turn * 31) % 256);
            let (faults, fetched) = round(&mut rounds, pages);
            assert!(faults <= 8 && fetched >= 248, "{turn}: {faults} {fetched}");
        }
    }

    /// A few pages of a region must occur twice before they are prefetched.
    #[test]
    fn a_few_pages_are_confirmed_first() {
        let mut rounds = Rounds::default();
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
        let mut rounds = Rounds::default();
        let all: Vec<_> = (0..3).map(|_| round(&mut rounds, 70..78)).collect();
        assert_eq!(all, [(8, 0), (1, 7), (1, 7)]);
    }

    /// A vCPU fills a region, and other nodes repeatedly take some of its pages. These are prefetched with the first of them. Pages that
    /// stay here get no requests, which is no evidence against them.
    #[test]
    fn what_stays_here_is_no_reason_for_doubt() {
        let mut rounds = Rounds::default();
        assert_eq!(round(&mut rounds, 64..128), (64, 0));
        let shared = 105..113;
        for turn in 0..64 {
            let mut taken: Vec<Page> = shared.clone().collect();
            let (mut faults, mut fetched) = (0, 0);
            for page in shared.clone() {
                if taken.contains(&page) {
                    let more = rounds.fault(page, |page| !taken.contains(&page));
                    fetched += more.len();
                    taken.retain(|gone| *gone != page && !more.contains(gone));
                    faults += 1;
                }
            }
            assert_eq!(faults + fetched, 8);
            assert!(faults <= 2, "{turn}: {faults}");
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
    fn at_random_little_is_foreseen() {
        let mut rounds = Rounds::default();
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
    fn what_seems_to_be_in_vain_is_tried() {
        let mut rounds = Rounds::default();
        for _ in 0..3 {
            round(&mut rounds, 70..78);
        }
        rounds.doubt(72);
        assert_eq!(round(&mut rounds, 70..78), (2, 6));
        for _ in 0..3 {
            rounds.doubt(72);
            // In some rounds another page is left out as a test.
            let (faults, fetched) = round(&mut rounds, 70..78);
            assert!(faults + fetched == 8 && faults <= 2);
            assert!(rounds.0[&1].fetched & 1 << 8 != 0, "page 72 wasn't fetched");
        }
        rounds.doubt(73);
        for _ in 0..40 {
            assert!(!rounds.fault(70, |_| false).contains(&73));
        }
    }

    /// A stream doesn't fetch pages that a round leaves out.
    #[test]
    fn streams_leave_out_what_rounds_do() {
        let mut foresight = Foresight::default();
        let bits = |pages: Range<Page>| pages.map(place).fold(0, |all, (_, bit)| all | bit);
        let begun = Region { known: bits(70..78), left_out: bits(73..74), ..Region::default() };
        foresight.written.0.insert(1, begun);
        let ahead: Vec<_> = (70..73).map(|page| foresight.fault(page, true, |_| false).ahead).collect();
        assert_eq!(ahead, [vec![], vec![], vec![74]]);
        // The vCPU has requested it.
        assert_eq!(foresight.fault(73, true, |_| false).ahead, [74]);
        assert_eq!(foresight.fault(75, true, |_| false).ahead, [76, 77, 78, 79]);
    }

    /// If all pages of a row are revoked soon after their prefetch, one is left out as a test for all.
    #[test]
    fn a_row_is_tried_by_one_of_its_pages() {
        assert_eq!(row_of(0b1101_1100_1110, 0b0100_0010_0010), 0b1100_0000_1110);
        let mut rounds = Rounds::default();
        for _ in 0..3 {
            round(&mut rounds, 70..78);
        }
        let mut faults = 0;
        for _ in 0..8 {
            (71..78).for_each(|page| rounds.doubt(page));
            faults += round(&mut rounds, 70..78).0;
        }
        assert!((8 + 1..=8 + 3).contains(&faults), "one tried, and now and then one left out: {faults}");
        // The vCPU doesn't use them any more.
        let mut rounds = Rounds::default();
        for _ in 0..3 {
            round(&mut rounds, 70..78);
        }
        (71..78).for_each(|page| rounds.doubt(page));
        assert_eq!(rounds.fault(70, |_| false).len(), 6);
        assert!(rounds.fault(70, |_| false).is_empty());
    }

    /// Each page has one context, and each context one page.
    #[test]
    fn helpers_are_few_and_come_back() {
        let mut helpers = Helpers::default();
        let all: Vec<_> = (0..u64::from(HELPERS)).map(|page| helpers.begin(page).unwrap()).collect();
        assert!(helpers.begin(9999).is_none() && helpers.fetch(3) && !helpers.fetch(9999));
        assert_eq!(helpers.end(all[3]), Some(3));
        assert_eq!(helpers.end(all[3]), None);
        assert!(!helpers.fetch(3));
        assert_eq!(helpers.begin(9999), Some(all[3]));
    }
}
