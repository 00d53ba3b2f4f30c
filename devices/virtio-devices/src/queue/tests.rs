//! Rings that follow the rules, rings that violate each of them, and rings of random bytes.

#![allow(clippy::cast_possible_truncation)] // Small numbers of the tests' own.

use std::os::fd::AsFd;

use machine::memory::{
    Bitmap, GuestAddress, GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion, map_window,
};
use proptest::prelude::*;
use virtio_devices_testbed::{INDIRECT, MockDriver, NEXT, PLAIN, RINGS, RawDescriptor, WRITE, memory};

use super::*;
use crate::fixtures::active_queue;

const BASE: u64 = 0x1_0000;

fn driver(features: u64) -> MockDriver {
    MockDriver::new(&memory(&[(0, 1 << 20), (1 << 20, 1 << 20)]), 0, 16, BASE, features)
}

fn ring(driver: &MockDriver, features: u64) -> Ring {
    Ring::new(active_queue(driver), features)
}

fn one(descriptors: &[(u16, RawDescriptor)], features: u64) -> Result<Option<Chain>, RingError> {
    let mut driver = driver(features);
    for (index, descriptor) in descriptors {
        driver.set_descriptor(*index, *descriptor);
    }
    driver.push_head(descriptors[0].0);
    let mut ring = ring(&driver, features);
    ring.pop(&driver.space.memory())
}

fn raw(address: u64, len: u32, flags: u16, next: u16) -> RawDescriptor {
    RawDescriptor { address, len, flags, next }
}

#[test]
fn a_chain_is_split_into_what_is_read_and_what_is_written() {
    let mut driver = driver(RINGS);
    let head = driver.push(&[(0x100, 16, false), (0x200, 32, false), (0x300, 64, true)]).unwrap();
    let mut ring = ring(&driver, RINGS);
    let chain = ring.pop(&driver.space.memory()).unwrap().unwrap();
    assert_eq!(chain.head(), head);
    assert_eq!((total_len(chain.readable()), total_len(chain.writable())), (48, 64));
    assert_eq!(ring.pop(&driver.space.memory()).unwrap(), None);
}

#[test]
fn an_indirect_chain_is_the_same_as_a_direct_one() {
    let mut driver = driver(RINGS);
    driver.push_indirect(0x4000, &[(0x100, 16, false), (0x300, 64, true)]).unwrap();
    let chain = ring(&driver, RINGS).pop(&driver.space.memory()).unwrap().unwrap();
    assert_eq!(chain.readable(), [Segment { address: GuestAddress(0x100), len: 16 }]);
    assert_eq!(chain.writable(), [Segment { address: GuestAddress(0x300), len: 64 }]);
}

/// A neighbour's memory, which the guest has mapped read-only. A device may read a buffer there. Neither buffers that it writes nor the
/// ring itself can be there.
#[test]
fn a_window_holds_what_is_read_and_nothing_else() {
    const WINDOW: u64 = 1 << 39;
    let fd = rustix::fs::memfd_create("window", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, 0x3000).unwrap();
    let driver = || {
        let driver = driver(RINGS);
        map_window(&driver.space, WINDOW, fd.as_fd(), 0, 0x3000).unwrap();
        driver
    };
    let pop = |descriptor| {
        let mut driver = driver();
        driver.set_descriptor(0, descriptor);
        driver.push_head(0);
        ring(&driver, RINGS).pop(&driver.space.memory())
    };
    let chain = pop(raw(WINDOW + 0x800, 0x2000, 0, 0)).unwrap().unwrap();
    assert_eq!(chain.readable(), [Segment { address: GuestAddress(WINDOW + 0x800), len: 0x2000 }]);
    for descriptor in [raw(WINDOW + 0x800, 0x2801, 0, 0), raw(WINDOW, 16, WRITE, 0)] {
        assert!(matches!(pop(descriptor), Err(RingError::BufferOutsideRam { .. })), "{descriptor:?}");
    }
    assert!(matches!(pop(raw(WINDOW, 16, INDIRECT, 0)), Err(RingError::Indirect { .. })));
    let space = driver().space;
    let rings = active_queue(&MockDriver::new(&memory(&[(WINDOW, 1 << 20)]), 0, 16, WINDOW, RINGS));
    assert!(matches!(Ring::new(rings, RINGS).check(&space.memory()), Err(RingError::RingOutsideRam { .. })));
}

/// Each violated rule has an error of its own, and invalidates only the ring.
#[test]
fn broken_chains_are_refused_by_name() {
    let data = raw(0x100, 16, 0, 0);
    let far = 2 << 20;
    type Check = fn(&RingError) -> bool;
    type Case = (&'static str, u64, Vec<(u16, RawDescriptor)>, Check);
    let cases: [Case; 15] = [
        ("loop", PLAIN, vec![(0, raw(0x100, 1, NEXT, 1)), (1, raw(0x100, 1, NEXT, 0))], |e| {
            matches!(e, RingError::Loop { .. })
        }),
        ("next", PLAIN, vec![(0, raw(0x100, 1, NEXT, 16))], |e| {
            matches!(e, RingError::DescriptorIndex { index: 16, .. })
        }),
        ("zero", PLAIN, vec![(0, raw(0x100, 0, 0, 0))], |e| matches!(e, RingError::ZeroLength { .. })),
        ("far", PLAIN, vec![(0, raw(far, 1, 0, 0))], |e| matches!(e, RingError::BufferOutsideRam { .. })),
        ("over the end", PLAIN, vec![(0, raw(far - 1, 2, 0, 0))], |e| {
            matches!(e, RingError::BufferOutsideRam { .. })
        }),
        ("wraps", PLAIN, vec![(0, raw(u64::MAX, 2, 0, 0))], |e| {
            matches!(e, RingError::BufferOutsideRam { .. })
        }),
        ("order", PLAIN, vec![(0, raw(0x100, 1, WRITE | NEXT, 1)), (1, data)], |e| {
            matches!(e, RingError::Order { .. })
        }),
        ("not negotiated", PLAIN, vec![(0, raw(0x4000, 16, INDIRECT, 0))], |e| {
            matches!(e, RingError::Indirect { .. })
        }),
        ("table with successor", RINGS, vec![(0, raw(0x4000, 16, INDIRECT | NEXT, 1))], |e| {
            matches!(e, RingError::Indirect { .. })
        }),
        ("table of 0 bytes", RINGS, vec![(0, raw(0x4000, 0, INDIRECT, 0))], |e| {
            matches!(e, RingError::Indirect { .. })
        }),
        ("table of 15 bytes", RINGS, vec![(0, raw(0x4000, 15, INDIRECT, 0))], |e| {
            matches!(e, RingError::Indirect { .. })
        }),
        ("table too long", RINGS, vec![(0, raw(0, 1 << 20, INDIRECT, 0))], |e| {
            matches!(e, RingError::Indirect { .. })
        }),
        ("table outside", RINGS, vec![(0, raw(far - 8, 16, INDIRECT, 0))], |e| {
            matches!(e, RingError::Indirect { .. })
        }),
        // The table is the descriptor table itself: its first entry is indirect again.
        ("table in table", RINGS, vec![(0, raw(BASE, 16, INDIRECT, 0))], |e| {
            matches!(e, RingError::Indirect { .. })
        }),
        ("head", PLAIN, vec![(99, data)], |e| matches!(e, RingError::DescriptorIndex { index: 99, .. })),
    ];
    for (name, features, descriptors, check) in cases {
        let result = if name == "head" {
            let mut driver = driver(features);
            driver.push_head(99);
            ring(&driver, features).pop(&driver.space.memory())
        } else {
            one(&descriptors, features)
        };
        let error = result.expect_err(name);
        assert!(check(&error), "{name}: {error}");
    }
}

#[test]
fn a_chain_of_more_than_4_gib_is_refused() {
    // 16 buffers of 256 MiB at the same address need RAM of that size: reserved, and never accessed.
    let space = memory(&[(0, 512 << 20)]);
    let mut driver = MockDriver::new(&space, 0, 32, BASE, PLAIN);
    let buffers: Vec<_> = (0..17).map(|_| (0x10_0000, 256 << 20, true)).collect();
    driver.push(&buffers).unwrap();
    let error = Ring::new(active_queue(&driver), PLAIN).pop(&space.memory()).unwrap_err();
    assert!(matches!(error, RingError::TooLong { .. }), "{error}");
}

#[test]
fn an_index_that_jumps_is_refused() {
    let driver = driver(PLAIN);
    driver.set_available_index(17);
    let error = ring(&driver, PLAIN).pop(&driver.space.memory()).unwrap_err();
    assert_eq!(error, RingError::AvailableIndex { queue: 0, from: 0, to: 17, size: 16 });
}

/// A driver that makes one descriptor available repeatedly can't make the device hold ever more requests.
#[test]
fn what_is_in_flight_is_bounded_by_the_queue() {
    let mut driver = driver(PLAIN);
    driver.set_descriptor(0, raw(0x100, 16, 0, 0));
    let mut ring = ring(&driver, PLAIN);
    for _ in 0..16 {
        driver.push_head(0);
        assert!(ring.pop(&driver.space.memory()).unwrap().is_some());
    }
    driver.push_head(0);
    let error = ring.pop(&driver.space.memory()).unwrap_err();
    assert_eq!(error, RingError::TooManyInFlight { queue: 0, size: 16 });
}

#[test]
fn suppression_without_event_index_is_the_drivers_flag() {
    let mut driver = driver(PLAIN);
    let mut ring = ring(&driver, PLAIN);
    let space = driver.space.clone();
    let memory = space.memory();
    for off in [false, true, false] {
        driver.set_no_interrupt(off);
        driver.push(&[(0x100, 16, false)]).unwrap();
        let chain = ring.pop(&memory).unwrap().unwrap();
        ring.complete(&memory, chain.head(), 0).unwrap();
        assert_eq!(ring.should_interrupt(&memory).unwrap(), !off);
        assert!(!ring.should_interrupt(&memory).unwrap(), "once per completion");
        driver.pop_used().unwrap();
    }
}

#[test]
fn with_event_index_the_driver_names_the_completion_it_waits_for() {
    let mut driver = driver(RINGS);
    let mut ring = ring(&driver, RINGS);
    let space = driver.space.clone();
    let memory = space.memory();
    driver.set_used_event(2);
    for done in 0..4 {
        driver.push(&[(0x100, 16, false)]).unwrap();
        let chain = ring.pop(&memory).unwrap().unwrap();
        ring.complete(&memory, chain.head(), 0).unwrap();
        assert_eq!(ring.should_interrupt(&memory).unwrap(), done == 2, "completion {done}");
    }
}

#[test]
fn a_ring_that_leaves_ram_is_refused_when_checked() {
    let space = memory(&[(0, 1 << 16)]);
    let outside = MockDriver::new(&space, 3, 256, (1 << 16) - 0x1000, RINGS);
    let error = Ring::new(active_queue(&outside), RINGS).check(&space.memory()).unwrap_err();
    assert!(matches!(error, RingError::RingOutsideRam { queue: 3, .. }), "{error}");
    let inside = MockDriver::new(&space, 0, 256, 0x1000, RINGS);
    Ring::new(active_queue(&inside), RINGS).check(&space.memory()).unwrap();
}

/// A buffer that crosses from one region into the next is one buffer; device writes mark both regions.
#[test]
fn buffers_cross_regions_and_mark_what_is_written() {
    let space = memory(&[(0, 1 << 20), (1 << 20, 1 << 20)]);
    let shared = space.memory().into_inner();
    let border = [Segment { address: GuestAddress((1 << 20) - 10), len: 20 }];
    write(&shared, &border, 5, b"0123456789").unwrap();
    let mut back = [0; 10];
    read(&shared, &border, 5, &mut back).unwrap();
    assert_eq!(&back, b"0123456789");
    let vecs = GuestIoVecs::new(&shared, &border).unwrap();
    assert_eq!((vecs.as_slice().len(), vecs.total()), (2, 20));

    let clean = memory(&[(0, 1 << 20), (1 << 20, 1 << 20)]);
    let shared = clean.memory().into_inner();
    let dirty = |at: u64| {
        let (region, offset) = shared.to_region_addr(GuestAddress(at)).unwrap();
        region.bitmap().dirty_at(usize::try_from(offset.0).unwrap())
    };
    assert!(!dirty((1 << 20) - 1) && !dirty(1 << 20));
    mark_written(&shared, &border, 10);
    assert!(dirty((1 << 20) - 1) && !dirty(1 << 20), "only the first 10 bytes");
    mark_written(&shared, &border, 11);
    assert!(dirty(1 << 20));
}

#[test]
fn a_saved_queue_is_the_same_again_and_a_damaged_one_is_refused() {
    let mut driver = driver(RINGS);
    driver.push(&[(0x100, 16, false)]).unwrap();
    let mut ring = ring(&driver, RINGS);
    let memory = driver.space.memory();
    let chain = ring.pop(&memory).unwrap().unwrap();
    ring.complete(&memory, chain.head(), 0).unwrap();
    let active = ring.into_active();
    let saved = SavedQueue::of(0, &active.queue);
    assert_eq!(SavedQueue::of(0, &saved.restore().unwrap()), saved);
    assert_eq!((saved.next_available, saved.next_used), (1, 1));
    for damaged in [
        SavedQueue { max_size: 3, ..saved },
        SavedQueue { size: 0, ..saved },
        SavedQueue { size: 32, ..saved },
        SavedQueue { descriptors: 8, ..saved },
        SavedQueue { available: 1, ..saved },
        SavedQueue { used: 2, ..saved },
    ] {
        damaged.restore().unwrap_err();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// Whatever a guest writes to its rings, accepted chains are in RAM and bounded, and nothing panics.
    #[test]
    fn random_rings_are_refused_or_safe(
        table in prop::collection::vec((any::<u64>(), any::<u32>(), 0u16..8, 0u16..20), 16),
        near in prop::collection::vec(any::<bool>(), 16),
        heads in prop::collection::vec(0u16..18, 1..16),
        indirect in any::<bool>(),
    ) {
        let features = if indirect { RINGS } else { PLAIN };
        let mut driver = driver(features);
        for (index, ((address, len, flags, next), near)) in (0u16..).zip(table.into_iter().zip(near)) {
            // Half of them point into RAM, some of these at the descriptor table itself.
            let (address, len) = if near { (address % (2 << 20), len % 0x1000) } else { (address, len) };
            let address = if near && address % 3 == 0 { BASE + 16 * (address % 16) } else { address };
            let len = if flags & INDIRECT != 0 { len & !15 } else { len };
            driver.set_descriptor(index, raw(address, len, flags, next));
        }
        for head in heads {
            driver.push_head(head);
        }
        let memory = driver.space.memory().into_inner();
        let mut ring = ring(&driver, features);
        while let Ok(Some(chain)) = ring.pop(&memory) {
            prop_assert!(chain.readable().len() + chain.writable().len() <= MAX_SEGMENTS);
            for segment in chain.readable().iter().chain(chain.writable()) {
                prop_assert!(segment.len > 0);
                prop_assert!(memory.check_range(segment.address, segment.len as usize));
            }
            let vecs = GuestIoVecs::new(&memory, chain.writable()).unwrap();
            prop_assert_eq!(vecs.total() as u64, total_len(chain.writable()));
            ring.complete(&memory, chain.head(), 0).unwrap();
        }
    }

    /// A part of a list of buffers has the same bytes, whatever the boundaries.
    #[test]
    fn parts_are_the_same_bytes(lens in prop::collection::vec(1u32..50, 1..8), offset in 0u64..300, len in 0u64..300) {
        let mut at = 0x100u64;
        let segments: Vec<Segment> = lens.iter().map(|len| {
            let segment = Segment { address: GuestAddress(at), len: *len };
            at += u64::from(*len) + 7;
            segment
        }).collect();
        let bytes: Vec<u64> = segments.iter().flat_map(|s| s.address.0..s.address.0 + u64::from(s.len)).collect();
        match part(&segments, offset, len) {
            Some(cut) => {
                let got: Vec<u64> = cut.iter().flat_map(|s| s.address.0..s.address.0 + u64::from(s.len)).collect();
                prop_assert_eq!(&got[..], &bytes[offset as usize..(offset + len) as usize]);
            }
            None => prop_assert!(offset + len > bytes.len() as u64),
        }
    }

    /// Continuing after any number of short transfers covers each byte once.
    #[test]
    fn advancing_covers_each_byte_once(lens in prop::collection::vec(1u32..50, 1..8), steps in prop::collection::vec(1usize..60, 1..20)) {
        let space = memory(&[(0, 1 << 16)]);
        let memory = space.memory().into_inner();
        let segments: Vec<Segment> = lens.iter().map(|len| Segment { address: GuestAddress(0x100), len: *len }).collect();
        let mut vecs = GuestIoVecs::new(&memory, &segments).unwrap();
        let mut left = vecs.total();
        for step in steps {
            let step = step.min(left);
            vecs.advance(step);
            left -= step;
            prop_assert_eq!(vecs.total(), left);
        }
    }
}
