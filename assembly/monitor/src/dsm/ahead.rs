//! Fetches pages before they are asked for.
//!
//! Two things say which pages a vCPU will want. When it has gone on from page to page a few times, in one of several places that it goes on from in turns (rows of a
//! matrix and its vectors, say), pages that follow are fetched ([`Streams`]). And pages of a region that it asked for in one round are fetched together when the next round
//! begins, in whatever order it wants them ([`Rounds`]): what one host writes and another reads, again and again, travels together. Where such a batch is known to be wanted
//! soon after another, both are asked for at once ([`Follow`]).
//!
//! Pages, or the right to write them where copies are here, are asked for in the name of helpers, which the protocol takes for vCPUs of this node: their instructions
//! retire as soon as their pages come. So messages, ages and holds are those of ordinary faults, and a page that comes too early, or in vain, is given away like
//! any other.
//!
//! Source: the second after *Spatial Memory Streaming* (Somogyi and others, ISCA 2006), there for cache lines.

use std::collections::HashMap;
use std::ops::Range;

use dsm::{Event, Fault, Node, Page, Vcpu};

use super::engine::{Core, Engine, now};
use super::follow::{Follow, Want};
use super::streams::Streams;

/// Helpers of a node: pages that are fetched ahead at the same time.
pub(super) const HELPERS: u16 = 128;
/// A page that is taken so soon after it was fetched ahead may have been fetched in vain, nanoseconds.
pub(super) const SOON: u64 = 1_000_000;
/// Pages that are asked for at once ahead of a stream. Those behind are asked for when the first of these has come: a vCPU uses pages while others are under way.
const PART: usize = 32;
/// Pages of a region.
const REGION: u64 = 64;
/// So many pages of a region in one round, or four in a row, are taken for what the next one will want; others have to come twice.
const DENSE: u32 = 32;
/// Of pages that are known one in so many is left out each time, to see whether it is still wanted; one of the region where so many were.
const OFTEN: u64 = 4;
const SURE: u32 = 8;

/// Pages that are known to be wanted together, to be worth asking for ahead of their first. A single page may be one that others are about to use, a lock's or what it guards.
const BATCH: u32 = 4;

/// What is known of which pages a vCPU will want.
#[derive(Debug, Default)]
pub(super) struct Foresight {
    streams: Streams,
    read: Rounds,
    written: Rounds,
    follow: Follow,
}

impl Foresight {
    /// A page faults now: which pages will be wanted, and which others of late were, as is known now. `there`: whether there is nothing to fetch.
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
        // A page that is left out has to show by itself whether it is wanted.
        let ahead = ahead.filter(|page| !rounds.is_left_out(*page)).collect();
        Foreseen { used, known, ahead }
    }

    /// A page was taken soon after it was fetched.
    fn doubt(&mut self, page: Page) {
        self.read.doubt(page);
        self.written.doubt(page);
    }
}

/// See [`Foresight::fault`].
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Foreseen {
    /// Pages that were fetched ahead and used.
    pub(super) used: Range<Page>,
    /// Pages that were wanted together with this one before, or soon after it.
    known: Vec<Want>,
    /// Pages behind it that may follow.
    ahead: Vec<Page>,
}

/// Which pages a vCPU has asked for together, to read or to write, by regions. A round of a region ends when a page is asked for a second time, as it was taken away meanwhile: who
/// asks for pages at random soon comes to that, and a round is short then.
#[derive(Debug, Default)]
struct Rounds(HashMap<u64, Region>);

/// A bit for each page.
#[derive(Debug, Clone, Copy, Default)]
struct Region {
    /// Asked for in this round, by the vCPU.
    asked: u64,
    /// Fetched for it when the round began.
    fetched: u64,
    /// Some that are known but were left out, to see whether they are still wanted.
    left_out: u64,
    /// How many of those were, one after the other.
    sure: u32,
    /// Fetched in vain, as it seems: to be left out in the next round, the first of each row of them.
    suspect: u64,
    /// Those of which the first ones were left out when the round began.
    tried: u64,
    /// Left out, and asked for: they aren't suspected any more.
    proven: u64,
    /// Wanted in the round before.
    before: u64,
    /// What is fetched when the next round begins, as far as it isn't there.
    known: u64,
    /// Of these, what was there when the round began: nobody else has wanted it.
    idle: u64,
    /// Rounds so far.
    rounds: u32,
}

fn place(page: Page) -> (u64, u64) {
    (page / REGION, 1 << (page % REGION))
}

/// Some pages of a region, with the bit of each.
fn pages(region: u64, bits: u64) -> impl Iterator<Item = (Page, u64)> {
    let all = (0..REGION).map(|at| (at, 1 << at)).filter(move |(_, bit)| bits & bit != 0);
    all.map(move |(at, bit)| (region * REGION + at, bit))
}

/// Those that lie in a row with one of these.
fn row_of(pages: u64, some: u64) -> u64 {
    (0..REGION).fold(some & pages, |row, _| row | ((row << 1 | row >> 1) & pages))
}

/// Those that are one of four in a row, at the least.
fn rows(pages: u64) -> u64 {
    let first = pages & (pages >> 1) & (pages >> 2) & (pages >> 3);
    first | (first << 1) | (first << 2) | (first << 3)
}

impl Rounds {
    /// A page was asked for, or used.
    fn asked(&mut self, page: Page) {
        let (region, bit) = place(page);
        self.0.entry(region).or_default().asked |= bit;
    }

    /// Whether a page that is known wasn't fetched when the round began, and hasn't been asked for since.
    fn is_left_out(&self, page: Page) -> bool {
        let (region, bit) = place(page);
        self.0.get(&region).is_some_and(|region| region.left_out & !region.asked & bit != 0)
    }

    /// How many pages of its region are known to be wanted together.
    fn known(&self, page: Page) -> u32 {
        self.0.get(&place(page).0).map_or(0, |region| region.known.count_ones())
    }

    /// A page is asked for: the others that are to be fetched with it. `there`: which others needn't be. One that is there for two rounds isn't known to be wanted any more: of a region that
    /// is filled first and then shared in part, only that part goes on being asked for.
    fn fault(&mut self, page: Page, there: impl Fn(Page) -> bool) -> Vec<Page> {
        let (number, bit) = place(page);
        let region = self.0.entry(number).or_default();
        if (region.asked | region.fetched | region.idle) & bit == 0 {
            region.asked |= bit;
            return Vec::new();
        }
        let wanted = region.asked | region.fetched;
        let dense = wanted.count_ones() >= DENSE;
        // What shows of one shows of its row.
        let tried = region.left_out & region.tried;
        region.proven |= (region.left_out & region.asked) | row_of(region.tried, tried & region.asked);
        let in_vain = row_of(region.tried, tried & !region.asked) & !region.asked;
        let missed = (region.left_out & region.asked).count_ones();
        region.sure = match region.left_out & !region.asked {
            // Asked for, not fetched: so many show what a program is like.
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
        // In steps that take neighbours far apart: a few pages in a row aren't tried in as many rounds in a row.
        let turn = region.rounds.wrapping_mul(27) % 64;
        let gone = region.known & !bit & !here;
        region.tried = gone & region.suspect & !region.proven;
        region.suspect = 0;
        region.left_out = gone & (left_out.rotate_left(turn) | region.tried & !(region.tried << 1));
        region.fetched = gone & !region.left_out;
        region.asked = bit;
        pages(number, region.fetched).map(|(page, _)| page).collect()
    }

    /// A page was taken soon after it was fetched. Who reads a page once and then lets others write it, who wait for that, has it taken as soon as who has never
    /// wanted it: which of these it is shows when it is left out.
    fn doubt(&mut self, page: Page) {
        let (region, bit) = place(page);
        if let Some(region) = self.0.get_mut(&region) {
            region.suspect |= bit & !(region.proven | region.left_out & region.asked);
        }
    }
}

/// Who helps.
#[derive(Debug, Default)]
pub(super) struct Helpers {
    /// A bit for each that has something to do.
    busy: u128,
    /// The page that each waits for, where it has, and the helper of each page.
    waits: Vec<Page>,
    pages: HashMap<Page, u16>,
    /// What is to be asked for when a page that is under way has come.
    behind: HashMap<Page, Vec<Want>>,
    /// What is to be asked for now.
    next: Vec<Vec<Want>>,
}

impl Helpers {
    /// Whether a page is under way.
    fn fetch(&self, page: Page) -> bool {
        self.pages.contains_key(&page)
    }

    /// One that has nothing to do gets a page to wait for.
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

/// Whether there is nothing to fetch. Stores to a page that is kept by updates are carried out where the page is.
pub(super) fn is_there(node: &Node, (page, write): Want) -> bool {
    let fault = if write { Fault::Write } else { Fault::Read };
    Engine::allows(node, page, fault) || node.mode(page).is_update()
}

impl Engine {
    /// The protocol's number of a helper: behind those of vCPUs.
    pub(super) fn helper(core: &Core, vcpu: Vcpu) -> Option<u16> {
        usize::from(vcpu).checked_sub(core.vcpus.len()).and_then(|helper| u16::try_from(helper).ok())
    }

    /// A helper's page has come, or others want it: it isn't needed by an instruction.
    pub(super) fn helped(core: &mut Core, helper: u16) {
        if let Some(page) = core.helpers.end(helper) {
            core.counts.ahead += 1;
            // A vCPU that has begun to wait for it meanwhile is let go by the protocol, or, if that isn't known yet, when its fault is read.
            core.pages.ahead.insert(page, now());
        }
    }

    /// Asks for pages that will be wanted.
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
        // What vCPUs here have never done to a page that they know isn't foreseen from its neighbours: it is where another vCPU's part begins.
        let ahead = foreseen.ahead.into_iter().filter(|page| core.pages.may_be_wanted(*page, write));
        let ahead = ahead.map(|page| (page, write)).collect();
        self.fetch_in_parts(core, ahead);
    }

    /// Asks for pages that are to follow what has come now.
    pub(super) fn fetch_next(&self, core: &mut Core) {
        while let Some(wants) = core.helpers.next.pop() {
            if !core.stopping && !core.holding && !core.standing {
                self.fetch_in_parts(core, wants);
            }
        }
    }

    /// Asks for the first of these, and for the others when these come.
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

    /// What lies behind a page that is under way is to be asked for when that comes, once; what lies behind others stays.
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

    /// How often a vCPU faults that wants these pages, in a round in which it has none at first, and what is fetched for it.
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

    /// Pages that come again are asked for one by one the first time, and by regions from then on, but for one that is left out each time; in whatever order they come.
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

    /// Few pages of a region have to come twice before they are fetched.
    #[test]
    fn a_few_pages_are_confirmed_first() {
        let mut rounds = Rounds::default();
        let all: Vec<_> = (0..64).map(|_| round(&mut rounds, [7, 9, 30].into_iter())).collect();
        assert_eq!(all[..2], [(3, 0), (3, 0)]);
        assert!(all[2..16].iter().map(|round| round.0).sum::<usize>() < 2 * 14, "{all:?}");
        assert!(all[32..].iter().map(|round| round.0).sum::<usize>() <= 34, "{all:?}");
        // One of them isn't wanted any more: that shows when it is left out.
        let later: Vec<_> = (0..128).map(|_| round(&mut rounds, [7, 9].into_iter()).1).collect();
        assert!(later[64..].iter().all(|fetched| *fetched <= 1) && later[64..].contains(&1), "{later:?}");
    }

    /// Pages in a row are fetched from the second time on.
    #[test]
    fn a_row_is_known_at_once() {
        assert_eq!(rows(0b1110_0111_1011_1110), 0b0111_1011_1110);
        assert_eq!((rows(0b1110_0111_0101), rows(u64::MAX), rows(15 << 60)), (0, u64::MAX, 15 << 60));
        let mut rounds = Rounds::default();
        let all: Vec<_> = (0..3).map(|_| round(&mut rounds, 70..78)).collect();
        assert_eq!(all, [(8, 0), (1, 7), (1, 7)]);
    }

    /// Of a region that a vCPU fills first, and of which others take some pages again and again, these are fetched with the first of them from then on: that the others aren't asked for says
    /// nothing about them.
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
        // Its first page is here still when others are taken a second time, soon: the next round begins with the first again.
        for first in [105, 106, 105, 105] {
            let fetched = rounds.fault(first, |page| page == 105 && first != 105);
            assert!(fetched.len() + 2 >= shared.clone().count(), "{first}: {fetched:?}");
        }
        // One that others take later has to show first.
        assert!(!rounds.fault(105, |page| page != 80).contains(&80));
    }

    /// Of pages that are wanted at random next to none are fetched that aren't wanted soon.
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

    /// A page that was taken soon is left out once: if it is asked for then, it is fetched from then on, however soon it is taken; if not, never again.
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
            // Now and then another one is left out.
            let (faults, fetched) = round(&mut rounds, 70..78);
            assert!(faults + fetched == 8 && faults <= 2);
            assert!(rounds.0[&1].fetched & 1 << 8 != 0, "page 72 wasn't fetched");
        }
        rounds.doubt(73);
        for _ in 0..40 {
            assert!(!rounds.fault(70, |_| false).contains(&73));
        }
    }

    /// What a stream would fetch isn't, where that is left out by a round.
    #[test]
    fn streams_leave_out_what_rounds_do() {
        let mut foresight = Foresight::default();
        let bits = |pages: Range<Page>| pages.map(place).fold(0, |all, (_, bit)| all | bit);
        let begun = Region { known: bits(70..78), left_out: bits(73..74), ..Region::default() };
        foresight.written.0.insert(1, begun);
        let ahead: Vec<_> = (70..73).map(|page| foresight.fault(page, true, |_| false).ahead).collect();
        assert_eq!(ahead, [vec![], vec![], vec![74]]);
        // It has shown.
        assert_eq!(foresight.fault(73, true, |_| false).ahead, [74]);
        assert_eq!(foresight.fault(75, true, |_| false).ahead, [76, 77, 78, 79]);
    }

    /// Of a row whose pages all are taken soon after they were fetched one is left out, and shows it of all.
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
        // Now they aren't wanted any more.
        let mut rounds = Rounds::default();
        for _ in 0..3 {
            round(&mut rounds, 70..78);
        }
        (71..78).for_each(|page| rounds.doubt(page));
        assert_eq!(rounds.fault(70, |_| false).len(), 6);
        assert!(rounds.fault(70, |_| false).is_empty());
    }

    /// Each page has one helper, and each helper one page.
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
