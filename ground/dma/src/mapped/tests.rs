//! A guest's memory mapped from memfds: what is checked, and that accesses land where they should.

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
