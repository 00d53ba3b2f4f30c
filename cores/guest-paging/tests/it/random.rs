//! Random tables: walks find the mappings as built, and end with hostile entries.

use std::collections::BTreeMap;

use guest_paging::{Access, EntryWidth, GuestPhysical, GuestVirtual, PageSize, PagingState, walk};
use proptest::prelude::*;

use crate::made::state;
use crate::memory::{Kind, Memory};

const ALL: u64 = 0b110_0111;
/// No larger physical address is mapped: below it, and above it by bit 39 for pages of 4 MiB.
const PHYSICAL_BITS: u32 = 38;

fn kinds() -> impl Strategy<Value = Kind> {
    prop::sample::select(vec![Kind::Two, Kind::Pae, Kind::Four, Kind::Five])
}

fn size(kind: Kind, choice: u8) -> PageSize {
    match (kind, choice % 3) {
        (_, 0) => PageSize::Size4K,
        (Kind::Two, _) => PageSize::Size4M,
        (Kind::Pae, _) | (_, 1) => PageSize::Size2M,
        _ => PageSize::Size1G,
    }
}

/// Makes a linear address of the mode from random bits. There are few regions, so that mappings share tables.
fn linear(kind: Kind, bits: u64) -> u64 {
    let bits = bits & 0x0000_00c0_c1ff_f000 | bits >> 40 & 0xfff;
    match kind {
        Kind::Two | Kind::Pae => bits & 0xffff_ffff,
        Kind::Four => bits | if bits & 1 << 39 != 0 { 0xffff_8000_0000_0000 } else { 0 },
        Kind::Five => bits | if bits & 1 << 39 != 0 { 0xff00_0000_0000_0000 } else { 0 },
    }
}

proptest! {
    #[test]
    fn mappings_come_out_as_they_were_made(
        kind in kinds(),
        pages in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u8>()), 1..24),
        probes in prop::collection::vec(any::<u64>(), 1..24),
    ) {
        let mut memory = Memory::default();
        let root = memory.root();
        let mut made: Vec<(u64, u64, u64)> = Vec::new();
        for (address, to, choice) in pages {
            let size = size(kind, choice);
            let mask = size.bytes() - 1;
            let from = linear(kind, address) & !mask;
            let to = to & ((1 << PHYSICAL_BITS) - 1) & !mask;
            if memory.map(kind, root, (from, to), size, (ALL, ALL)).is_some() {
                made.push((from, to, size.bytes()));
            }
        }
        let state = state(kind, &memory, root);
        let inside = made.iter().map(|(from, _, bytes)| from + (bytes - 1));
        let any = probes.into_iter().map(|probe| linear(kind, probe));
        for address in inside.chain(any).collect::<Vec<_>>() {
            let expected = made
                .iter()
                .find(|(from, _, bytes)| address >= *from && address - from < *bytes)
                .map(|(from, to, _)| GuestPhysical(to + (address - from)));
            let found = walk(&memory, &state, GuestVirtual(address), Access::Write);
            prop_assert_eq!(found.ok().map(|found| found.physical), expected, "{:#x}", address);
        }
    }

    /// With any table contents a walk makes at most five reads, all below the guest's highest address, and its result is below it, too.
    #[test]
    fn hostile_tables_end_each_walk(
        entries in prop::collection::btree_map(0u64..64, any::<u64>(), 0..64),
        registers in any::<[u64; 5]>(),
        pdptes in any::<Option<[u64; 4]>>(),
        cpl in 0u8..4,
        physical_bits in any::<u32>(),
        (has_1g_pages, is_amd) in any::<(bool, bool)>(),
        address in any::<u64>(),
    ) {
        let [cr0, cr3, cr4, efer, rflags] = registers;
        let state = PagingState { cr0, cr3, cr4, efer, rflags, cpl, pdptes, physical_bits, has_1g_pages, is_amd };
        let reads = std::cell::Cell::new(0);
        let by_hash: BTreeMap<u64, u64> = entries;
        let tables = |at: GuestPhysical, width: EntryWidth| {
            reads.set(reads.get() + 1);
            assert!(at.0 < 1 << 52, "{at}");
            let entry = *by_hash.get(&(at.0 >> 3 & 63))?;
            Some(if width == EntryWidth::Four { entry & 0xffff_ffff } else { entry })
        };
        for access in [Access::Read, Access::Write, Access::Execute] {
            reads.set(0);
            if let Ok(found) = walk(&tables, &state, GuestVirtual(address), access) {
                prop_assert!(found.physical.0 < 1 << 52);
                prop_assert_eq!(found.entries.len(), reads.get());
            }
            prop_assert!(reads.get() <= 5);
        }
    }
}
