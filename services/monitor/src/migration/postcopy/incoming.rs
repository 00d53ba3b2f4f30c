//! The destination's page states: which pages are missing, and since when threads wait for them.

use std::collections::{HashMap, HashSet};

use super::set::{NoSuchPage, PageSet};

/// The action that a fault needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The page is at the source: request it.
    Request,
    /// The page was never used: it is zero.
    Zero,
    /// The page was requested, or is being placed.
    Wait,
}

/// Page states at the destination. Time is in nanoseconds from any start.
#[derive(Debug)]
pub struct Incoming {
    /// Pages at the source, or in flight.
    missing: PageSet,
    /// Received pages that aren't in memory yet.
    placing: HashSet<u64>,
    /// Start of the wait, by page.
    waiting: HashMap<u64, u64>,
    /// Durations of finished waits in microseconds, one for each page that threads waited for.
    waited: Vec<u32>,
    zero: u64,
    dropped: u64,
}

/// Statistics of waits for pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WaitStats {
    /// Pages that a thread waited for.
    pub count: u64,
    /// Median wait in microseconds.
    pub median_us: u32,
    /// Longest wait in microseconds.
    pub worst_us: u32,
}

impl Incoming {
    /// With all pages of `missing` missing.
    pub fn new(missing: PageSet) -> Self {
        Self {
            missing,
            placing: HashSet::new(),
            waiting: HashMap::new(),
            waited: Vec::new(),
            zero: 0,
            dropped: 0,
        }
    }

    /// A thread accessed a page that isn't in memory.
    ///
    /// # Errors
    /// When the VM has no such page.
    pub fn fault(&mut self, address: u64, now: u64) -> Result<Fault, NoSuchPage> {
        if self.placing.contains(&address) {
            self.waiting.entry(address).or_insert(now);
            return Ok(Fault::Wait);
        }
        if !self.missing.contains(address)? {
            self.zero += 1;
            return Ok(Fault::Zero);
        }
        match self.waiting.entry(address) {
            std::collections::hash_map::Entry::Occupied(_) => Ok(Fault::Wait),
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(now);
                Ok(Fault::Request)
            }
        }
    }

    /// A page was received. `true`: the caller must place it in memory, and then call [`Incoming::placed`]. `false`: it isn't missing,
    /// and memory has newer contents.
    ///
    /// # Errors
    /// When the VM has no such page.
    pub fn receive(&mut self, address: u64) -> Result<bool, NoSuchPage> {
        let wanted = self.missing.remove(address)?;
        if wanted {
            self.placing.insert(address);
        } else {
            self.dropped += 1;
        }
        Ok(wanted)
    }

    /// A received page is in memory, and the threads that waited for it resume.
    pub fn placed(&mut self, address: u64, now: u64) {
        if self.placing.remove(&address)
            && let Some(since) = self.waiting.remove(&address)
        {
            self.waited.push(u32::try_from(now.saturating_sub(since) / 1000).unwrap_or(u32::MAX));
        }
    }

    /// Pages that aren't in memory yet.
    pub fn left(&self) -> u64 {
        self.missing.count() + self.placing.len() as u64
    }

    /// Faults for pages that were never used, and received pages that weren't missing.
    pub fn others(&self) -> (u64, u64) {
        (self.zero, self.dropped)
    }

    /// Statistics of the waits so far. The time for this call grows with their number.
    pub fn wait_stats(&self) -> WaitStats {
        let mut waited = self.waited.clone();
        let middle = waited.len() / 2;
        let median_us = if waited.is_empty() { 0 } else { *waited.select_nth_unstable(middle).1 };
        let worst_us = self.waited.iter().copied().max().unwrap_or(0);
        WaitStats { count: self.waited.len() as u64, median_us, worst_us }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const STEP: u64 = 4096;

    fn set(pages: impl IntoIterator<Item = u64>) -> PageSet {
        let mut set = PageSet::empty(&[(0, 100 * STEP)]);
        pages.into_iter().for_each(|page| assert!(set.insert(page * STEP).unwrap()));
        set
    }

    #[test]
    fn a_page_is_requested_once_and_its_wait_is_measured() {
        let mut incoming = Incoming::new(set([3, 4, 5]));
        assert_eq!(incoming.fault(3 * STEP, 1_000), Ok(Fault::Request));
        assert_eq!(incoming.fault(3 * STEP, 2_000), Ok(Fault::Wait));
        assert_eq!(incoming.fault(9 * STEP, 2_000), Ok(Fault::Zero));
        assert_eq!(incoming.receive(3 * STEP), Ok(true));
        assert_eq!(incoming.fault(3 * STEP, 3_000), Ok(Fault::Wait), "it must not become a zero page now");
        assert_eq!(incoming.left(), 3);
        incoming.placed(3 * STEP, 71_000);
        assert_eq!(incoming.fault(3 * STEP, 80_000), Ok(Fault::Zero), "placing it again finds it there");
        assert_eq!(incoming.receive(4 * STEP), Ok(true));
        assert_eq!(incoming.fault(4 * STEP, 100_000), Ok(Fault::Wait));
        incoming.placed(4 * STEP, 110_000);
        assert_eq!(incoming.receive(5 * STEP), Ok(true));
        incoming.placed(5 * STEP, 120_000);
        assert_eq!(incoming.wait_stats(), WaitStats { count: 2, median_us: 70, worst_us: 70 });
        assert_eq!((incoming.left(), incoming.others()), (0, (2, 0)));
    }

    /// Pages that are received twice, that aren't missing, and that don't exist.
    #[test]
    fn pages_that_are_not_missing_are_dropped() {
        let mut incoming = Incoming::new(set([3]));
        assert_eq!(incoming.receive(3 * STEP), Ok(true));
        assert_eq!(incoming.receive(3 * STEP), Ok(false));
        assert_eq!(incoming.receive(7 * STEP), Ok(false));
        assert_eq!(incoming.receive(100 * STEP), Err(NoSuchPage(100 * STEP)));
        assert_eq!(incoming.receive(3 * STEP + 1), Err(NoSuchPage(3 * STEP + 1)));
        assert_eq!((incoming.left(), incoming.others()), (1, (0, 2)));
    }

    #[derive(Debug, Clone)]
    enum Step {
        Access(u64),
        Receive(u64),
    }

    proptest! {
        /// A guest that accesses pages, and a source that sends any: each missing page is requested at most once, placed at most once,
        /// and never becomes zero. When the source has sent all of them, no thread waits.
        #[test]
        fn each_missing_page_is_placed_once(
            pages in prop::collection::btree_set(0u64..100, 0..100),
            steps in prop::collection::vec(prop_oneof![(0u64..100).prop_map(Step::Access), (0u64..104).prop_map(Step::Receive)], 0..400),
        ) {
            let mut incoming = Incoming::new(set(pages.iter().copied()));
            let (mut placed, mut requested) = (BTreeSet::new(), BTreeSet::new());
            let rest = pages.iter().copied().map(Step::Receive);
            for (now, step) in steps.into_iter().chain(rest).enumerate() {
                let now = now as u64 * 1000;
                match step {
                    Step::Access(page) => match incoming.fault(page * STEP, now) {
                        Ok(Fault::Request) => prop_assert!(pages.contains(&page) && !placed.contains(&page) && requested.insert(page)),
                        Ok(Fault::Zero) => prop_assert!(!pages.contains(&page) || placed.contains(&page)),
                        Ok(Fault::Wait) => prop_assert!(requested.contains(&page) && !placed.contains(&page)),
                        Err(error) => prop_assert!(false, "{}", error),
                    },
                    Step::Receive(page) => match incoming.receive(page * STEP) {
                        Ok(true) => {
                            prop_assert!(pages.contains(&page) && placed.insert(page));
                            incoming.placed(page * STEP, now);
                        }
                        Ok(false) => prop_assert!(!pages.contains(&page) || placed.contains(&page)),
                        Err(_) => prop_assert!(page >= 100),
                    },
                }
                prop_assert_eq!(incoming.left(), (pages.len() - placed.len()) as u64);
            }
            prop_assert_eq!(placed, pages);
            prop_assert_eq!(incoming.wait_stats().count, requested.len() as u64);
            prop_assert!(incoming.waiting.is_empty());
        }
    }
}
