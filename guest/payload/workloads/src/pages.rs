//! One kind of access to each of many pages, by vCPUs whose nodes have no copy: the cost of a page if nodes share memory over a
//! network.

use core::sync::atomic::{AtomicU64, Ordering};
use payload_spmd::{Figure, Heap, Outcome, PAGE, Random, Refused, Settings, Team};

/// `kind`: read, write or upgrade; `pages` (500); `words`: words per page that vCPU 0 has written before, 1 to 512 (512).
pub const NAMES: &[&str] = &["kind", "pages", "words"];

/// The measured access.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// The last vCPU reads data that vCPU 0 has written.
    Read,
    /// The last vCPU writes such data.
    Write,
    /// vCPU 0 writes data again that all others have read.
    Upgrade,
}

/// Runs the workload. The order of pages isn't sequential.
///
/// # Errors
/// Unsuitable arguments or memory.
pub fn run(team: &Team<'_>, heap: &mut Heap, settings: &Settings) -> Result<Outcome, Refused> {
    let kind = match settings.word("kind", &["read", "write", "upgrade"])? {
        0 => Kind::Read,
        1 => Kind::Write,
        _ => Kind::Upgrade,
    };
    let pages = settings.size("pages", 500, 1..=1 << 20)?;
    let words = settings.size("words", 512, 1..=512)?;
    let memory = heap.array::<AtomicU64>(pages * PAGE / 8)?;
    let wrong = heap.array::<AtomicU64>(1)?;
    let word = |page: usize, word: usize| &memory.atomics()[page * PAGE / 8 + word];
    // The same order for all: a shuffle from a seed (Fisher and Yates). Each vCPU has its own copy, so that reading it fetches no
    // page of others.
    let order = heap.array::<AtomicU64>((pages * team.count()).next_multiple_of(PAGE / 8))?;
    let mine = &order.atomics()[pages * team.index()..pages * (team.index() + 1)];
    let mut random = Random::new(1);
    for (place, value) in mine.iter().zip(0_u64..) {
        place.store(value, Ordering::Relaxed);
    }
    for last in (1..pages).rev() {
        let other = usize::try_from(random.below(last as u64 + 1)).unwrap_or(0);
        let value = mine[last].swap(mine[other].load(Ordering::Relaxed), Ordering::Relaxed);
        mine[other].store(value, Ordering::Relaxed);
    }
    let shuffled = || mine.iter().map(|page| usize::try_from(page.load(Ordering::Relaxed)).unwrap_or(0));
    // Unique values, so that no page equals another.
    let value = |page: usize, word: usize| (page as u64) << 32 | (word as u64) << 8 | 1;
    let fill = || {
        for page in 0..pages {
            for index in 0..words {
                word(page, index).store(value(page, index), Ordering::Relaxed);
            }
        }
    };
    // The last vCPU's node has never had a copy of these pages, which were untouched before.
    if team.leads() {
        fill();
    }
    team.wait();
    let mut lost = 0;
    let last = team.index() + 1 == team.count();
    if kind == Kind::Upgrade && !team.leads() {
        lost = shuffled().filter(|page| word(*page, 0).load(Ordering::Relaxed) != value(*page, 0)).count();
    }
    team.wait();
    let nanoseconds = team.measure(|| match kind {
        Kind::Read if last => {
            lost =
                shuffled().filter(|page| word(*page, 0).load(Ordering::Relaxed) != value(*page, 0)).count();
        }
        Kind::Write if last => shuffled().for_each(|page| word(page, 1).store(7, Ordering::Relaxed)),
        Kind::Upgrade if team.leads() => {
            shuffled().for_each(|page| word(page, 1).store(7, Ordering::Relaxed))
        }
        _ => {}
    });
    wrong.atomics()[0].fetch_add(lost as u64, Ordering::AcqRel);
    team.wait();
    if kind != Kind::Read && team.leads() {
        lost = (0..pages).filter(|page| word(*page, 1).load(Ordering::Relaxed) != 7).count();
        wrong.atomics()[0].fetch_add(lost as u64, Ordering::AcqRel);
    }
    let lost = wrong.atomics()[0].load(Ordering::Acquire);
    Ok(Outcome::new("page", pages as u64, nanoseconds)
        .verified(lost == 0)
        .figure("lost", Figure::Count(lost)))
}

#[cfg(test)]
mod tests {
    use super::{NAMES, run};
    use crate::testing::right;

    #[test]
    fn every_page_is_visited_and_none_is_lost() {
        for kind in ["kind=read", "kind=write", "kind=upgrade"] {
            for outcome in right(run, NAMES, &[kind, "pages=100"]) {
                assert_eq!(outcome.events, 100);
            }
        }
        right(run, NAMES, &["pages=1", "words=1"]);
        assert!(crate::testing::run(run, NAMES, 2, &["kind=look"]).is_err());
    }
}
