//! The source's page states: which pages it still has to send, and which is next.

use super::set::{NoSuchPage, PageSet};
use crate::migration::pages::PAGE;

/// Pages to send. Each is sent once: requested pages at once, the others in ascending order, starting behind the last requested page. A
/// guest's next access is often near its last one.
#[derive(Debug)]
pub struct Outgoing {
    left: PageSet,
    /// Address where the next push starts to search.
    at: u64,
    requested: u64,
    pushed: u64,
}

impl Outgoing {
    /// With all pages of `left` to send.
    pub fn new(left: PageSet) -> Self {
        Self { left, at: 0, requested: 0, pushed: 0 }
    }

    /// The destination requests a page. `true`: the caller must send it now. `false`: it was sent already, or was never missing, and the
    /// destination handles that.
    ///
    /// # Errors
    /// When the VM has no such page.
    pub fn request(&mut self, address: u64) -> Result<bool, NoSuchPage> {
        let send = self.left.remove(address)?;
        if send {
            self.requested += 1;
            self.at = address.saturating_add(PAGE as u64);
        }
        Ok(send)
    }

    /// Selects up to `max_pages` pages to push: address of the first, and their number. `None` when all pages were sent.
    pub fn push(&mut self, max_pages: usize) -> Option<(u64, usize)> {
        let (start, pages) = self.left.run(self.at, max_pages)?;
        for page in 0..pages as u64 {
            // `run` found the page in the set.
            let _ = self.left.remove(start + page * PAGE as u64);
        }
        self.pushed += pages as u64;
        self.at = start.saturating_add((pages * PAGE) as u64);
        Some((start, pages))
    }

    /// Pages that weren't sent yet.
    pub fn left(&self) -> u64 {
        self.left.count()
    }

    /// Numbers of requested pages and of pushed pages that were sent.
    pub fn sent(&self) -> (u64, u64) {
        (self.requested, self.pushed)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const STEP: u64 = PAGE as u64;

    fn set(pages: impl IntoIterator<Item = u64>) -> PageSet {
        let mut set = PageSet::empty(&[(0, 200 * STEP)]);
        pages.into_iter().for_each(|page| assert!(set.insert(page * STEP).unwrap()));
        set
    }

    /// A requested page is sent at once; the push then continues behind it, and later from the start.
    #[test]
    fn requested_pages_are_sent_first_and_pushes_continue_behind_them() {
        let mut outgoing = Outgoing::new(set([1, 2, 3, 50, 51, 52, 53, 90]));
        assert_eq!(outgoing.push(2), Some((STEP, 2)));
        assert_eq!(outgoing.request(51 * STEP), Ok(true));
        assert_eq!(outgoing.request(51 * STEP), Ok(false), "it is on its way");
        assert_eq!(outgoing.request(70 * STEP), Ok(false), "it never was here");
        assert_eq!(outgoing.request(STEP + 1), Err(NoSuchPage(STEP + 1)));
        assert_eq!(outgoing.request(200 * STEP), Err(NoSuchPage(200 * STEP)));
        let pushed: Vec<_> = std::iter::from_fn(|| outgoing.push(64)).collect();
        assert_eq!(pushed, [(52 * STEP, 2), (90 * STEP, 1), (3 * STEP, 1), (50 * STEP, 1)]);
        assert_eq!((outgoing.left(), outgoing.sent()), (0, (1, 7)));
    }

    proptest! {
        /// For any requests and pushes in any order, each page is sent exactly once.
        #[test]
        fn each_page_is_sent_once(pages in prop::collection::btree_set(0u64..200, 0..200), steps in prop::collection::vec((0u64..210, 1usize..70), 0..300)) {
            let mut outgoing = Outgoing::new(set(pages.iter().copied()));
            let mut left = BTreeSet::new();
            let mut take = |start: u64, count: usize| (start / STEP..).take(count).all(|page| left.insert(page));
            for (page, max_pages) in steps {
                match outgoing.request(page * STEP) {
                    Ok(true) => prop_assert!(take(page * STEP, 1)),
                    Ok(false) => {}
                    Err(_) => prop_assert!(page >= 200),
                }
                if let Some((start, count)) = outgoing.push(max_pages % 5 + 1) {
                    prop_assert!(count <= max_pages % 5 + 1 && take(start, count));
                }
            }
            while let Some((start, count)) = outgoing.push(64) {
                prop_assert!(take(start, count));
            }
            prop_assert_eq!(left, pages);
        }
    }
}
