//! Rights, faults and contents of shared pages, with real userfaultfds.

use super::*;
use crate::memory::{RamLayout, RamOptions};

/// 4 MiB, of which the upper half is shared; `None` where this machine has no userfaultfd.
fn shared() -> Option<(GuestRam, SharedRam)> {
    let ram = GuestRam::allocate(&RamLayout::new(&[4 << 20]).unwrap(), &RamOptions::default()).unwrap();
    match SharedRam::new(&ram, 2 << 20) {
        Ok(shared) => Some((ram, shared)),
        Err(SharedRamError::Userfault(UserfaultError::Open(error))) => {
            facilities::missing(facilities::Facility::Userfaultfd, error);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn touch(shared: &SharedRam, page: u64, write: bool) -> std::thread::JoinHandle<u8> {
    let guest = shared.addresses(page).unwrap().0;
    std::thread::spawn(move || {
        // SAFETY: a byte of the guest's mapping, which the test keeps.
        let byte = unsafe { AtomicU8::from_ptr(guest as *mut u8) };
        if write { byte.fetch_add(1, Ordering::SeqCst) } else { byte.load(Ordering::SeqCst) }
    })
}

fn next(shared: &SharedRam) -> PageFault {
    let mut faults = Vec::new();
    while faults.is_empty() {
        let mut fds = [rustix::event::PollFd::from_borrowed_fd(shared.fd(), rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut fds, None).unwrap();
        shared.faults(&mut faults).unwrap();
    }
    assert_eq!(faults.len(), 1, "{faults:?}");
    faults[0]
}

/// Each type of access to a page in each state causes one fault with page and type, and completes when the page has the rights. The
/// guest reads what the monitor has written. The content of a page survives its removal.
#[test]
fn faults_are_reported_and_rights_take_effect() {
    use PageRights::{None, Read, Write};
    let Some((_ram, shared)) = shared() else { return };
    let page = 0x2a3;
    shared.write(page, 0, &[41, 7]).unwrap();
    let reader = touch(&shared, page, false);
    let fault = next(&shared);
    assert_eq!((fault.page, fault.offset, fault.write), (page, 0, false));
    shared.set(page, None, Read).unwrap();
    shared.wake(page).unwrap();
    assert_eq!(reader.join().unwrap(), 41);

    let writer = touch(&shared, page, true);
    assert!(next(&shared).write);
    shared.set(page, Read, Write).unwrap();
    shared.wake(page).unwrap();
    assert_eq!(writer.join().unwrap(), 41);
    assert_eq!(touch(&shared, page, true).join().unwrap(), 42, "writable pages don't fault");

    shared.set(page, Write, Read).unwrap();
    let writer = touch(&shared, page, true);
    assert!(next(&shared).write);
    shared.set(page, Read, None).unwrap();
    shared.wake(page).unwrap();
    let fault = next(&shared);
    assert!(fault.write, "the same store again, which now finds no page");
    let mut content = Vec::new();
    shared.read(page, &mut content).unwrap();
    assert_eq!((content.len(), &content[..2]), (PAGE, &[43, 7][..]));
    shared.set(page, None, Write).unwrap();
    shared.wake(page).unwrap();
    assert_eq!(writer.join().unwrap(), 43);
}

#[test]
fn a_page_that_nobody_has_touched_is_zero_and_release_lets_all_go() {
    let Some((_ram, shared)) = shared() else { return };
    let reader = touch(&shared, 0x3ff, false);
    assert_eq!(next(&shared).page, 0x3ff);
    shared.set(0x3ff, PageRights::None, PageRights::Read).unwrap();
    shared.wake(0x3ff).unwrap();
    assert_eq!(reader.join().unwrap(), 0);
    let waits = touch(&shared, 0x200, true);
    assert_eq!(next(&shared).page, 0x200);
    shared.release();
    assert_eq!(waits.join().unwrap(), 0);
    assert!(shared.set(0x1ff, PageRights::None, PageRights::Read).is_err(), "below what is shared");
    assert!(shared.wake(0x400).is_err(), "beyond the end");
}

fn minor_faults() -> i64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the structure that the call fills, which is all zero otherwise.
    let usage = unsafe {
        assert_eq!(libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()), 0);
        usage.assume_init()
    };
    usage.ru_minflt
}

/// Pages in a row change together, also where one of them is mapped already. Writable pages are writable in the host's page table at
/// once, so that KVM can map them with their neighbours: a write to them causes no fault, not even a minor one of the host.
#[test]
fn pages_in_a_row_change_together() {
    use PageRights::{None, Read, Write};
    let Some((_ram, shared)) = shared() else { return };
    let all = 0x210..0x218;
    let write = |page| {
        let guest = shared.addresses(page).unwrap().0;
        // SAFETY: a byte of the guest's mapping, which the test keeps.
        unsafe { AtomicU8::from_ptr(guest as *mut u8) }.fetch_add(1, Ordering::SeqCst)
    };
    let faults = |pages: Range<u64>| {
        let before = minor_faults();
        pages.for_each(|page| _ = write(page));
        minor_faults() - before
    };
    shared.set_all(all.clone(), None, Write).unwrap();
    assert_eq!(faults(all.clone()), 0);
    shared.set_all(all.clone(), Write, Read).unwrap();
    shared.set_all(all.clone(), Read, Write).unwrap();
    assert_eq!(faults(all.clone()), 0, "mapped anew, they are writable");
    shared.set_all(all.clone(), Write, Read).unwrap();
    for page in all.clone() {
        let writer = touch(&shared, page, true);
        let fault = next(&shared);
        assert_eq!((fault.page, fault.write), (page, true));
        shared.set(page, Read, Write).unwrap();
        shared.wake(page).unwrap();
        assert_eq!(writer.join().unwrap(), 2);
    }
    shared.set_all(all.clone(), Write, None).unwrap();
    shared.set(0x213, None, Read).unwrap();
    shared.set_all(all.clone(), None, Write).unwrap();
    all.clone().for_each(|page| assert_eq!(write(page), 3));
    assert!(shared.set_all(0x3ff..0x401, None, Write).is_err());
    shared.set_all(all.clone(), Write, None).unwrap();
    let reader = touch(&shared, all.end - 1, false);
    assert_eq!(next(&shared).page, all.end - 1);
    shared.set_all(all.end - 1..all.end, None, Read).unwrap();
    shared.wake(all.end - 1).unwrap();
    assert_eq!(reader.join().unwrap(), 4);
}

/// Words of each width are loaded and changed atomically; `None` leaves them. Unaligned and other words are refused.
#[test]
fn words_are_loaded_and_changed_as_one() {
    let Some((_ram, shared)) = shared() else { return };
    let page = 0x202;
    shared.write(page, 8, &0x1122_3344_5566_7788_u64.to_le_bytes()).unwrap();
    for (offset, width, value) in
        [(8, 1, 0x88), (9, 1, 0x77), (10, 2, 0x5566), (12, 4, 0x1122_3344), (8, 8, 0x1122_3344_5566_7788)]
    {
        assert_eq!(shared.load(page, offset, width).unwrap(), value);
        assert_eq!(shared.update(page, offset, width, &mut |_| None).unwrap(), value);
    }
    assert_eq!(shared.update(page, 8, 1, &mut |old| Some(old + 0x1_00ff)).unwrap(), 0x88);
    assert_eq!(shared.load(page, 8, 8).unwrap(), 0x1122_3344_5566_7787, "neighbours stay as they are");
    for (offset, width) in [(9, 2), (12, 8), (8, 3), (8, 16), (PAGE, 1), (0, 0)] {
        assert!(shared.load(page, offset, width).is_err());
        assert!(shared.update(page, offset, width, &mut Some).is_err());
    }
    assert!(shared.load(0x400, 0, 8).is_err());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..10_000 {
                    shared.update(page, 64, 4, &mut |old| Some(old + 1)).unwrap();
                }
            });
        }
    });
    assert_eq!(shared.load(page, 64, 8).unwrap(), 40_000);
}

#[test]
fn writes_are_whole_at_any_offset_and_end_with_the_page() {
    let Some((_ram, shared)) = shared() else { return };
    let bytes: Vec<u8> = (1..=40).collect();
    for offset in [0, 1, 3, 4, 7, PAGE - 40, PAGE - 5] {
        shared.write(0x201, 0, &[0; PAGE]).unwrap();
        shared.write(0x201, offset, &bytes).unwrap();
        let mut content = Vec::new();
        shared.read(0x201, &mut content).unwrap();
        let len = bytes.len().min(PAGE - offset);
        assert_eq!(content[offset..offset + len], bytes[..len]);
        assert!(content[..offset].iter().all(|byte| *byte == 0));
        let mut some = [0; 8];
        assert_eq!(shared.read_at(0x201, offset, &mut some).unwrap(), len.min(8));
        assert_eq!(some[..len.min(8)], bytes[..len.min(8)]);
    }
}
