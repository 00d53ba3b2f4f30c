//! A guest's memory mapped from memfds: which accesses are refused, and that others reach the right bytes.

use std::os::fd::OwnedFd;

use proptest::prelude::*;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::*;
use crate::heap::HeapMemory;

fn memfd(len: u64, seals: SealFlags) -> OwnedFd {
    let fd = memfd_create("dma-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, len).unwrap();
    fcntl_add_seals(&fd, seals).unwrap();
    fd
}

/// Two adjacent regions from 0x1000, and one apart at 0x100000.
fn memory() -> MappedMemory {
    let fd = memfd(4 * PAGE, SealFlags::SHRINK);
    MappedMemory::default()
        .with(MemoryRegion::map(0x1000, PAGE, &fd, 0, true).unwrap())
        .and_then(|m| m.with(MemoryRegion::map(0x2000, 2 * PAGE, &fd, PAGE, true).unwrap()))
        .and_then(|m| m.with(MemoryRegion::map(0x10_0000, PAGE, &fd, 3 * PAGE, false).unwrap()))
        .unwrap()
}

#[test]
fn a_file_that_can_shrink_is_refused() {
    let fd = memfd(PAGE, SealFlags::GROW);
    let error = MemoryRegion::map(0, PAGE, &fd, 0, true).unwrap_err();
    assert!(matches!(error, MapError::NotSealed { .. }), "{error}");
}

#[test]
fn a_range_beyond_the_file_or_off_page_is_refused() {
    let fd = memfd(PAGE, SealFlags::SHRINK);
    assert!(matches!(MemoryRegion::map(0, 2 * PAGE, &fd, 0, true), Err(MapError::TooShort { .. })));
    assert!(matches!(MemoryRegion::map(1, PAGE, &fd, 0, true), Err(MapError::Shape { .. })));
    assert!(matches!(MemoryRegion::map(0, 0, &fd, 0, true), Err(MapError::Shape { .. })));
    assert!(matches!(
        MemoryRegion::map(u64::MAX - PAGE + 1, PAGE, &fd, 0, true),
        Err(MapError::Shape { .. })
    ));
    assert!(matches!(
        MemoryRegion::map(0, PAGE, &fd, u64::MAX - PAGE + 1, true),
        Err(MapError::Shape { .. })
    ));
}

#[test]
fn overlapping_regions_are_refused() {
    let fd = memfd(PAGE, SealFlags::SHRINK);
    let error = memory().with(MemoryRegion::map(0x3000, PAGE, &fd, 0, true).unwrap()).unwrap_err();
    assert!(matches!(error, MapError::Overlap { other: 0x2000, .. }), "{error}");
}

#[test]
fn accesses_straddle_adjacent_regions_and_stop_at_holes() {
    let memory = memory();
    memory.write(0x1FFE, &[1, 2, 3, 4]).unwrap();
    let mut back = [0; 4];
    memory.read(0x1FFE, &mut back).unwrap();
    assert_eq!(back, [1, 2, 3, 4]);
    assert_eq!(memory.write(0x3FFE, &[9; 4]), Err(DmaFault { address: 0x3FFE, len: 4 }));
    memory.read(0x3FFE, &mut back[..2]).unwrap();
    assert_eq!(back[..2], [0, 0], "a write that fails writes nothing");
}

#[test]
fn a_read_only_region_can_be_read_only() {
    let memory = memory();
    memory.load_u32(0x10_0000).unwrap();
    assert!(memory.store_u32(0x10_0000, 1).is_err());
    assert!(memory.write(0x10_0000, &[1]).is_err());
    assert!(memory.copy_to(0x1000, &memory, 0x10_0000, 8).is_err());
    assert!(memory.fetch_add_u64(0x10_0000, 1).is_err());
}

#[test]
fn words_must_be_aligned() {
    let memory = memory();
    assert!(memory.load_u32(0x1002).is_err());
    assert!(memory.fetch_add_u64(0x1004, 1).is_err());
    assert_eq!(memory.fetch_add_u64(0x1008, 5), Ok(0));
    assert_eq!(memory.compare_exchange_u64(0x1008, 5, 7), Ok(5));
    assert_eq!(memory.compare_exchange_u64(0x1008, 5, 9), Ok(7));
    assert_eq!(memory.swap_u32(0x1008, 1), Ok(7));
}

#[test]
fn unmapping_leaves_the_other_regions() {
    let (memory, gone) = memory().without(0x2000, 2 * PAGE);
    assert_eq!(gone, 1);
    assert!(memory.check(0x1000, PAGE).is_ok());
    assert!(memory.check(0x2000, 1).is_err());
    assert_eq!(memory.without(0x1000, 1).1, 0, "a range that cuts a region unmaps nothing");
}

proptest! {
    /// Any access behaves as on plain memory with the same shape.
    #[test]
    fn agrees_with_plain_memory(
        accesses in prop::collection::vec((0x0F00_u64..0x4200, 0_u64..0x1200, any::<u8>(), 0x0F00_u64..0x4200), 1..40)
    ) {
        let mapped = memory();
        // 0x1000 to 0x4000 in one piece.
        let plain = HeapMemory::at(0x1000, 0x3000);
        for (address, len, byte, other) in accesses {
            let data = vec![byte; usize::try_from(len).unwrap()];
            if len > 0 {
                prop_assert_eq!(mapped.write(address, &data).is_ok(), plain.write(address, &data).is_ok());
                prop_assert_eq!(
                    mapped.copy_to(address, &mapped, other, len).is_ok(),
                    plain.copy_to(address, &plain, other, len).is_ok()
                );
            }
            prop_assert_eq!(mapped.load_u32(address).ok(), plain.load_u32(address).ok());
        }
        let mut left = vec![0; 0x3000];
        let mut right = vec![0; 0x3000];
        mapped.read(0x1000, &mut left).unwrap();
        plain.read(0x1000, &mut right).unwrap();
        prop_assert_eq!(left, right);
    }
}

/// Each kind of write marks its pages, in each region that it touches, once. Reads, and writes before the log was enabled, mark nothing.
#[test]
fn the_dirty_log_names_the_pages_that_were_written() {
    let memory = memory();
    memory.write(0x1000, &[1]).unwrap();
    memory.set_dirty_log(true);
    assert_eq!(
        (memory.take_dirty(0x1000, PAGE), memory.take_dirty(0x2000, 2 * PAGE)),
        (Some(vec![0]), Some(vec![0]))
    );
    let mut bytes = [0; 8];
    memory.read(0x1000, &mut bytes).unwrap();
    memory.load_u32(0x2000).unwrap();
    memory.check(0x1000, 3 * PAGE).unwrap();
    assert!(memory.write(0x3FFE, &[9; 4]).is_err());
    assert_eq!(memory.take_dirty(0x2000, 2 * PAGE), Some(vec![0]), "nothing was written");
    // A table cloned before the log was enabled shares the log.
    let other = memory.clone();
    let writes: [(&str, &dyn Fn(u64)); 7] = [
        ("write", &|at| other.write(at, &[7; 5]).unwrap()),
        ("zero", &|at| other.zero(at, 5).unwrap()),
        ("store", &|at| other.store_u32(at, 1).unwrap()),
        ("swap", &|at| {
            other.swap_u32(at, 2).unwrap();
        }),
        ("exchange", &|at| {
            other.compare_exchange_u64(at, 1, 2).unwrap();
        }),
        ("add", &|at| {
            other.fetch_add_u64(at, 1).unwrap();
        }),
        ("copy", &|at| other.copy_to(0x1000, &other, at, 8).unwrap()),
    ];
    for (name, write) in writes {
        write(0x2010);
        assert_eq!(memory.take_dirty(0x2000, 2 * PAGE), Some(vec![0b01]), "{name}");
        write(0x3010);
        assert_eq!(memory.take_dirty(0x2000, 2 * PAGE), Some(vec![0b10]), "{name}");
        assert_eq!(memory.take_dirty(0x2000, 2 * PAGE), Some(vec![0]), "taken once: {name}");
    }
    memory.write(0x1FFE, &[1; 0x1004]).unwrap();
    assert_eq!(
        (memory.take_dirty(0x1000, PAGE), memory.take_dirty(0x2000, 2 * PAGE)),
        (Some(vec![1]), Some(vec![0b11]))
    );
    // Part of a bitmap word, other lengths, and ranges of two regions are refused.
    for (address, len) in
        [(0x2000, PAGE), (0x3000, PAGE), (0x2000, 1), (0x1000, 3 * PAGE), (0x2000, 0), (0x9000, PAGE)]
    {
        assert_eq!(memory.take_dirty(address, len), None, "{address:#x} {len:#x}");
    }
    memory.set_dirty_log(false);
    memory.write(0x1000, &[1]).unwrap();
    assert_eq!(memory.take_dirty(0x1000, PAGE), Some(vec![0]));
}

proptest! {
    /// Repeated passes that copy only the marked pages during random writes end in an exact copy.
    #[test]
    fn copying_marked_pages_makes_a_whole_copy(
        rounds in prop::collection::vec(prop::collection::vec((0..200 * PAGE, 1..3 * PAGE, any::<u8>()), 0..8), 1..6),
    ) {
        let size = 203 * PAGE;
        let fd = memfd(size, SealFlags::SHRINK);
        let memory = MappedMemory::default().with(MemoryRegion::map(0x4000, size, &fd, 0, true).unwrap()).unwrap();
        let bytes = usize::try_from(size).unwrap();
        let mut copy = vec![0; bytes];
        memory.set_dirty_log(true);
        for round in rounds {
            for (at, len, value) in round {
                memory.write(0x4000 + at, &vec![value; usize::try_from(len).unwrap()]).unwrap();
            }
            let words = memory.take_dirty(0x4000, size).unwrap();
            for page in (0..203_u64).filter(|page| words[usize::try_from(page / 64).unwrap()] >> (page % 64) & 1 == 1) {
                let at = usize::try_from(page * PAGE).unwrap();
                memory.read(0x4000 + page * PAGE, &mut copy[at..at + 4096]).unwrap();
            }
            let mut now = vec![0; bytes];
            memory.read(0x4000, &mut now).unwrap();
            prop_assert!(now == copy);
        }
    }
}

/// Not-present pages of a post-copy migration.
mod late {
    use std::fs::File;
    use std::io::Read as _;

    use crate::arriving::{Bitmap, bitmap_size, wished};

    use super::*;

    struct Arrival {
        memory: MappedMemory,
        bitmap: Bitmap,
        wishes: File,
        to: Arc<OwnedFd>,
    }

    fn sealed(size: u64) -> std::os::fd::OwnedFd {
        let fd = rustix::fs::memfd_create("late", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, size).unwrap();
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        fd
    }

    /// 200 pages from 0x10000 on, present but for `missing`.
    fn arrival(missing: &[u64]) -> Arrival {
        let (address, size) = (0x1_0000, 200 * PAGE);
        let region = MemoryRegion::map(address, size, &sealed(size), 0, true).unwrap();
        let memory = MappedMemory::default().with(region).unwrap();
        let file = sealed(bitmap_size(size));
        let (own, theirs) = (Bitmap::map(&file, 0, size).unwrap(), Bitmap::map(&file, 0, size).unwrap());
        (0..200).filter(|page| !missing.contains(page)).for_each(|page| own.set(page));
        let (wishes, to) = std::os::unix::net::UnixStream::pair().unwrap();
        [&wishes, &to].into_iter().for_each(|end| end.set_nonblocking(true).unwrap());
        let (wishes, to) = (OwnedFd::from(wishes), OwnedFd::from(to));
        let to = Arc::new(to);
        memory.set_late((address, size), theirs, Arc::clone(&to)).unwrap();
        Arrival { memory, bitmap: own, wishes: File::from(wishes), to }
    }

    impl Arrival {
        fn wishes(&mut self) -> Vec<(u64, u64)> {
            let mut all = Vec::new();
            let mut one = [0; 8];
            while self.wishes.read_exact(&mut one).is_ok() {
                all.push(wished(one));
            }
            all
        }
    }

    /// A not-present page is neither read nor partly written; a write that covers it wholly succeeds. It is requested once. Once it is
    /// present, it is as all other memory.
    #[test]
    fn missing_pages_are_waited_for() {
        let mut arrival = arrival(&[3, 4, 5, 70]);
        let Arrival { memory, .. } = &arrival;
        let page = |number: u64| 0x1_0000 + number * PAGE;
        assert!(memory.is_late() && !memory.awaits(page(0), 3 * PAGE, false));
        memory.write(page(2), &[1; 4096]).unwrap();
        assert_eq!(memory.absences(), 0);
        assert!(memory.read(page(2) + 4095, &mut [0; 2]).is_err());
        assert!(memory.write(page(3), &[1; 4095]).is_err());
        assert!(memory.store_u32(page(3), 1).is_err() && memory.fetch_add_u64(page(70), 1).is_err());
        assert!(memory.zero(page(70) - 1, 2).is_err());
        assert_eq!(memory.absences(), 5);
        assert_eq!(memory.alias(&[(page(0), PAGE)]).unwrap_err(), AliasError::Late);
        assert!(memory.awaits(page(0), 200 * PAGE, false));
        // The last byte of page 3 isn't covered.
        assert!(memory.awaits(page(3), PAGE - 1, true) && !memory.awaits(page(3), PAGE, true));
        assert_eq!(arrival.wishes(), [(page(3), 1), (page(70), 1), (page(4), 2)]);
        let Arrival { memory, .. } = &arrival;
        // Page 4 becomes present by being overwritten, while the end of 3 is not present.
        let copy = memory.copy_to(page(0), memory, page(4), PAGE);
        assert_eq!((copy, arrival.bitmap.has(4), arrival.bitmap.has(3)), (Ok(()), true, false));
        memory.read(page(4) + 5, &mut [0; 10]).unwrap();
        assert!(memory.write(page(4) + 1, &[7; 4096]).is_err(), "page 5 is written in part");
        let before = memory.arrivals().unwrap();
        arrival.bitmap.set(5);
        arrival.bitmap.came();
        assert_eq!(memory.arrivals(), Some(before + 1));
        memory.write(page(4) + 1, &[7; 4096]).unwrap();
        assert_eq!(arrival.wishes(), []);
        arrival.bitmap.complete();
        let Arrival { memory, .. } = &arrival;
        assert!(!memory.is_late() && memory.arrivals().is_none());
        memory.store_u32(page(3), 1).unwrap();
    }

    /// A request that doesn't fit into the socket is sent again at the next access.
    #[test]
    fn a_full_socket_loses_no_wish() {
        let mut arrival = arrival(&(0..200).collect::<Vec<_>>());
        let page = |number: u64| 0x1_0000 + number * PAGE;
        let ask = |arrival: &Arrival| {
            // Every other page, so that each needs a request of its own.
            (0..200).step_by(2).for_each(|number| assert!(arrival.memory.awaits(page(number), 1, false)));
        };
        let full: Vec<(u64, u64)> = (0..200).step_by(2).map(|number| (page(number), 1)).collect();
        while rustix::io::write(&*arrival.to, &[0; 8]) == Ok(8) {}
        // The other process can make the shared socket blocking. If that mattered, this test would hang.
        let flags = rustix::fs::fcntl_getfl(&*arrival.to).unwrap();
        rustix::fs::fcntl_setfl(&*arrival.to, flags - rustix::fs::OFlags::NONBLOCK).unwrap();
        // Makes room for three requests.
        arrival.wishes.read_exact(&mut [0; 24]).unwrap();
        ask(&arrival);
        let mut said = arrival.wishes();
        said.retain(|(address, _)| *address > 0);
        assert!(said.len() < full.len(), "the socket had room for all");
        ask(&arrival);
        said.extend(arrival.wishes());
        said.sort_unstable();
        assert_eq!(said, full, "each once");
    }

    #[test]
    fn bitmaps_that_could_shrink_or_are_too_short_are_refused() {
        let file = rustix::fs::memfd_create("open", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 1 << 20).unwrap();
        assert!(matches!(Bitmap::map(&file, 0, PAGE), Err(MapError::NotSealed { .. })));
        let file = sealed(bitmap_size(PAGE));
        assert!(Bitmap::map(&file, 0, PAGE).is_ok());
        assert!(matches!(Bitmap::map(&file, 0, PAGE * 64 * 4096), Err(MapError::TooShort { .. })));
        assert!(matches!(Bitmap::map(&file, 1, PAGE), Err(MapError::Shape { .. })));
        let memory = MappedMemory::default();
        let (_, to) = rustix::pipe::pipe().unwrap();
        assert!(memory.set_late((0, PAGE), Bitmap::map(&file, 0, PAGE).unwrap(), Arc::new(to)).is_err());
    }
}

/// All lengths around those at which the copy method changes, at all alignments of both sides within a word.
#[test]
fn what_is_copied_out_is_what_is_there() {
    let lengths = (0..40).chain(STRING_COPY_BYTES - 9..STRING_COPY_BYTES + 9).chain([4096]);
    let source: Vec<u8> = (0..5000_usize).map(|at| u8::try_from(at * 7 % 251).unwrap()).collect();
    for len in lengths {
        for (from, to) in (0..WORD).flat_map(|from| (0..WORD).map(move |to| (from, to))) {
            let mut copy = vec![0xEE; to + len + WORD];
            // SAFETY: both ranges lie within their vectors.
            unsafe { copy_out(source.as_ptr().add(from), copy.as_mut_ptr().add(to), len) };
            assert_eq!(copy[to..to + len], source[from..from + len], "{len} bytes from {from} to {to}");
            assert!(
                copy[..to].iter().chain(&copy[to + len..]).all(|byte| *byte == 0xEE),
                "beside {len} bytes"
            );
        }
    }
}

/// An aligned word that changes concurrently is loaded once and whole.
#[test]
fn a_word_that_changes_meanwhile_is_read_whole() {
    let memory = memory();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut value = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                let next = !value;
                memory.compare_exchange_u64(0x1040, value, next).unwrap();
                value = next;
            }
        });
        for _ in 0..100_000 {
            let mut bytes = [0; 24];
            memory.read(0x1038, &mut bytes).unwrap();
            let word = u64::from_ne_bytes(std::array::from_fn(|at| bytes[8 + at]));
            assert!(word == 0 || word == u64::MAX, "{word:#x}");
        }
        stop.store(true, Ordering::Relaxed);
    });
}
