use std::fs::File;
use std::os::unix::fs::FileExt;

use machine::memory::shared::{SharedRam, SharedRamError};
use machine::memory::{GuestRam, RamLayout, RamOptions, UserfaultError};

use super::*;

/// Pages of RAM, and the number of the first shared one.
const PAGES: u64 = 1024;
const FIRST: u64 = 512;

/// `None` if this host offers no userfaultfd.
fn live() -> Option<(GuestRam, LivePages)> {
    let layout = RamLayout::new(&[PAGES * 4096]).unwrap();
    let ram = GuestRam::allocate(&layout, &RamOptions::default()).unwrap();
    match SharedRam::new(&ram, FIRST * 4096) {
        Ok(shared) => {
            let pages = LivePages::new(Arc::new(shared), usize::try_from(PAGES).unwrap(), false);
            Some((ram, pages))
        }
        Err(SharedRamError::Userfault(UserfaultError::Open(error))) => {
            facilities::missing(facilities::Facility::Userfaultfd, error);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// The guest's rights by the host's page table. `pagemap` has bit 63 for present pages, and bit 57 for pages that userfaultfd
/// write-protects.
fn so(pages: &LivePages, page: Page) -> PageRights {
    let (start, mapping) = pages.ram.mappings().next().unwrap();
    let address = mapping.as_ptr().addr() as u64 + page * 4096 - start;
    let mut entry = [0; 8];
    File::open("/proc/self/pagemap").unwrap().read_exact_at(&mut entry, address / 4096 * 8).unwrap();
    let entry = u64::from_le_bytes(entry);
    match (entry >> 63 & 1, entry >> 57 & 1) {
        (0, _) => PageRights::None,
        (_, 1) => PageRights::Read,
        _ => PageRights::Write,
    }
}

/// With any sequence of changes, a page is never writable without the protocol's permission. A write to a page that is about to be dropped
/// first drops it. After `apply_changes` all rights are those of the protocol.
#[test]
fn write_rights_are_never_exceeded_and_reach_the_target() {
    let Some((_ram, mut pages)) = live() else { return };
    let mut random = 1_u64;
    let mut below = |most: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) % most
    };
    let some = FIRST + 30..FIRST + 50;
    for turn in 0..4000_u32 {
        let page = some.start + below(20);
        match below(16) {
            0 => {
                pages.apply_changes();
                for page in some.clone() {
                    assert_eq!(so(&pages, page), pages.target(page), "page {page:#x}, turn {turn}");
                }
            }
            1 => pages.set_requested(some.clone().filter(|_| below(4) > 0)),
            2 => pages.wake(page),
            3 => {
                pages.write(page, 8, &turn.to_le_bytes());
                assert!(so(&pages, page) <= pages.target(page), "what is to be gone isn't seen to change");
            }
            4 => {
                let mut content = Vec::new();
                pages.read(page, &mut content);
                assert_eq!(content.len(), 4096);
            }
            what => {
                let to = [Access::None, Access::Read, Access::Write][usize::try_from(what % 3).unwrap()];
                // Several consecutive pages, as in batches.
                for page in page..(page + 1 + below(6)).min(some.end) {
                    pages.protect(page, to);
                }
            }
        }
        for page in some.clone() {
            let writable = so(&pages, page) == PageRights::Write;
            assert!(!writable || pages.target(page) == PageRights::Write, "page {page:#x}, turn {turn}");
        }
        assert_eq!(pages.refused, None);
    }
}

/// Pages that other nodes request become read-only together. One that isn't granted is writable again afterwards.
#[test]
fn requested_pages_are_write_protected_together() {
    let Some((_ram, mut pages)) = live() else { return };
    let all = FIRST..FIRST + 8;
    all.clone().for_each(|page| pages.protect(page, Access::Write));
    assert!(all.clone().all(|page| so(&pages, page) == PageRights::None), "not before it is carried out");
    pages.apply_changes();
    assert!(all.clone().all(|page| so(&pages, page) == PageRights::Write));
    let requested_copies = || (FIRST + 1..FIRST + 4).chain(FIRST + 5..FIRST + 7);
    pages.set_requested(requested_copies());
    pages.protect(FIRST + 2, Access::Read);
    let closed = |pages: &LivePages| -> Vec<Page> {
        all.clone().filter(|page| so(pages, *page) == PageRights::Read).map(|page| page - FIRST).collect()
    };
    assert_eq!(closed(&pages), [1, 2, 3]);
    pages.protect(FIRST + 1, Access::Read);
    pages.apply_changes();
    assert_eq!(closed(&pages), [1, 2], "the third wasn't given away");
    assert!(all.clone().all(|page| so(&pages, page) == pages.target(page)));
    // A page that no node requests changes alone.
    pages.set_requested(std::iter::empty());
    pages.protect(FIRST + 6, Access::Read);
    assert_eq!(closed(&pages), [1, 2, 6]);
}
