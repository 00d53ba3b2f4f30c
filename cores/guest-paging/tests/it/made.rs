//! Page walks of tables that are built for one rule each.

use guest_paging::state::{
    CR0_PE, CR0_PG, CR0_WP, CR4_LA57, CR4_PAE, CR4_PKE, CR4_PSE, CR4_SMAP, CR4_SMEP, EFER_LMA, EFER_NXE,
    RFLAGS_AC,
};
use guest_paging::{Access, GuestPhysical, GuestVirtual, PageSize, PagingState, WalkError, walk};

use crate::memory::{Kind, Memory};

const P: u64 = 1;
const W: u64 = 2;
const U: u64 = 4;
const A: u64 = 1 << 5;
const D: u64 = 1 << 6;
const NX: u64 = 1 << 63;
const ALL: u64 = P | W | U | A | D;
const LINEAR: u64 = 0xffff_8880_1234_5678;
const PHYSICAL: u64 = 0x7654_3000;

pub fn state(kind: Kind, memory: &Memory, root: u64) -> PagingState {
    let protected = PagingState {
        cr0: CR0_PE | CR0_PG | CR0_WP,
        cr3: root,
        physical_bits: 46,
        has_1g_pages: true,
        ..PagingState::default()
    };
    match kind {
        Kind::Two => PagingState { cr4: CR4_PSE, ..protected },
        Kind::Pae => {
            PagingState { cr4: CR4_PAE, efer: EFER_NXE, pdptes: Some(memory.pointers(root)), ..protected }
        }
        Kind::Four => PagingState { cr4: CR4_PAE, efer: EFER_LMA | EFER_NXE, ..protected },
        Kind::Five => PagingState { cr4: CR4_PAE | CR4_LA57, efer: EFER_LMA | EFER_NXE, ..protected },
    }
}

/// Address of the entry for [`LINEAR`] in a table.
fn entry(table: u64, shift: u32) -> u64 {
    table + (LINEAR >> shift & 511) * 8
}

/// Maps one page of 4 KiB at [`LINEAR`] by 4-level paging.
fn one(tables: u64, leaf: u64) -> (Memory, PagingState) {
    let mut memory = Memory::default();
    let root = memory.root();
    memory
        .map(Kind::Four, root, (LINEAR, PHYSICAL), PageSize::Size4K, (tables, leaf))
        .expect("nothing is mapped yet");
    let state = state(Kind::Four, &memory, root);
    (memory, state)
}

fn physical(memory: &Memory, state: &PagingState, access: Access) -> Result<GuestPhysical, WalkError> {
    walk(memory, state, GuestVirtual(LINEAR), access).map(|found| found.physical)
}

fn error_code(memory: &Memory, state: &PagingState, access: Access) -> u32 {
    match physical(memory, state, access) {
        Err(WalkError::Fault { error_code }) => error_code,
        other => panic!("{other:?}"),
    }
}

#[test]
fn without_paging_addresses_are_equal() {
    let state = PagingState::default();
    let found = walk(&Memory::default(), &state, GuestVirtual(0x1_0000_1234), Access::Write).unwrap();
    assert_eq!(found.physical, GuestPhysical(0x1234));
    assert!(found.entries.is_empty());
}

#[test]
fn a_walk_names_its_entries() {
    let (memory, state) = one(ALL, ALL);
    let found = walk(&memory, &state, GuestVirtual(LINEAR), Access::Read).unwrap();
    assert_eq!(found.physical, GuestPhysical(PHYSICAL | 0x678));
    assert_eq!(found.entries.len(), 4);
    assert_eq!(found.entries[0].0, entry(state.cr3, 39));
    assert!(found.flags_are_set);
    assert_eq!(memory.reads.get(), 4);
}

#[test]
fn accessed_and_dirty_bits_that_the_processor_would_set_are_said() {
    for (tables, leaf, read, write) in [
        (ALL, ALL, true, true),
        (ALL & !A, ALL, false, false),
        (ALL, ALL & !A, false, false),
        (ALL, ALL & !D, true, false),
    ] {
        let (memory, state) = one(tables, leaf);
        for (access, set) in [(Access::Read, read), (Access::Write, write)] {
            let found = walk(&memory, &state, GuestVirtual(LINEAR), access).unwrap();
            assert_eq!(found.flags_are_set, set, "{tables:#x} {leaf:#x} {access:?}");
        }
    }
}

#[test]
fn absent_entries_fault_and_absent_tables_are_named() {
    let (mut memory, state) = one(ALL, 0);
    assert_eq!(error_code(&memory, &state, Access::Read), 0);
    assert_eq!(error_code(&memory, &PagingState { cpl: 3, ..state }, Access::Write), 0b110);
    assert_eq!(error_code(&memory, &state, Access::Execute), 0b1_0000);
    let second = memory.entries[&entry(state.cr3, 39)] & !0xfff;
    memory.absent_page = Some(second / 4096);
    let at = GuestPhysical(entry(second, 30));
    assert_eq!(physical(&memory, &state, Access::Read), Err(WalkError::Absent(at)));
}

#[test]
fn rights_of_all_levels_count() {
    let user = |state| PagingState { cpl: 3, ..state };
    for (tables, leaf) in [(ALL & !U, ALL), (ALL, ALL & !U)] {
        let (memory, state) = one(tables, leaf);
        assert!(physical(&memory, &state, Access::Read).is_ok());
        assert_eq!(error_code(&memory, &user(state), Access::Read), 0b101);
    }
    for (tables, leaf) in [(ALL & !W, ALL), (ALL, ALL & !W)] {
        let (memory, state) = one(tables, leaf);
        assert_eq!(error_code(&memory, &state, Access::Write), 0b11);
        assert_eq!(error_code(&memory, &user(state), Access::Write), 0b111);
        let unprotected = PagingState { cr0: state.cr0 & !CR0_WP, ..state };
        assert!(physical(&memory, &unprotected, Access::Write).is_ok());
        assert!(physical(&memory, &user(unprotected), Access::Write).is_err());
    }
    for (tables, leaf) in [(ALL | NX, ALL), (ALL, ALL | NX)] {
        let (memory, state) = one(tables, leaf);
        assert!(physical(&memory, &state, Access::Read).is_ok());
        assert_eq!(error_code(&memory, &state, Access::Execute), 0b1_0001);
    }
}

#[test]
fn the_supervisor_is_kept_from_user_pages() {
    let (memory, state) = one(ALL, ALL);
    let smep = PagingState { cr4: state.cr4 | CR4_SMEP, ..state };
    assert_eq!(error_code(&memory, &smep, Access::Execute), 0b1_0001);
    assert!(physical(&memory, &smep, Access::Write).is_ok());
    let smap = PagingState { cr4: state.cr4 | CR4_SMAP, ..state };
    assert_eq!(error_code(&memory, &smap, Access::Read), 0b1);
    assert!(physical(&memory, &PagingState { rflags: RFLAGS_AC, ..smap }, Access::Read).is_ok());
    assert!(physical(&memory, &PagingState { cpl: 3, ..smap }, Access::Read).is_ok());
}

#[test]
fn reserved_bits_fault() {
    let reserved = |tables, leaf| {
        let (memory, state) = one(tables, leaf);
        error_code(&memory, &state, Access::Read)
    };
    assert_eq!(reserved(ALL, ALL | 1 << 46), 0b1001);
    assert_eq!(reserved(ALL | 1 << 46, ALL), 0b1001);
    let (memory, state) = one(ALL, ALL | NX);
    assert_eq!(error_code(&memory, &PagingState { efer: EFER_LMA, ..state }, Access::Read), 0b1001);
    // The size bit of the root's entries.
    let (mut memory, state) = one(ALL, ALL);
    *memory.entries.get_mut(&entry(state.cr3, 39)).unwrap() |= 1 << 7;
    assert_eq!(error_code(&memory, &state, Access::Read), 0b1001);
}

#[test]
fn reserved_bits_follow_the_processor() {
    let mut memory = Memory::default();
    let root = memory.root();
    memory
        .map(Kind::Four, root, (LINEAR, 0x4000_0000), PageSize::Size1G, (ALL | 1 << 8, ALL))
        .expect("nothing is mapped yet");
    let state = state(Kind::Four, &memory, root);
    assert!(physical(&memory, &state, Access::Read).is_ok());
    assert_eq!(error_code(&memory, &PagingState { has_1g_pages: false, ..state }, Access::Read), 0b1001);
    assert_eq!(error_code(&memory, &PagingState { is_amd: true, ..state }, Access::Read), 0b1001);
}

#[test]
fn a_large_page_has_reserved_bits_below_its_address() {
    let mut memory = Memory::default();
    let root = memory.root();
    let leaf =
        memory.map(Kind::Four, root, (LINEAR, 0x4000_0000), PageSize::Size2M, (ALL, ALL | 1 << 12)).unwrap();
    let state = state(Kind::Four, &memory, root);
    assert_eq!(physical(&memory, &state, Access::Read), Ok(GuestPhysical(0x4000_0000 | LINEAR & 0x1f_ffff)));
    *memory.entries.get_mut(&leaf).unwrap() |= 1 << 13;
    assert_eq!(error_code(&memory, &state, Access::Read), 0b1001);
}

#[test]
fn pages_of_4_mib_reach_beyond_4_gib() {
    let mut memory = Memory::default();
    let root = memory.root();
    let leaf =
        memory.map(Kind::Two, root, (0x1234_5678, 0x12_3440_0000), PageSize::Size4M, (ALL, ALL)).unwrap();
    let state = state(Kind::Two, &memory, root);
    let at =
        |state: &PagingState, memory: &Memory| walk(memory, state, GuestVirtual(0x1234_5678), Access::Read);
    assert_eq!(at(&state, &memory).unwrap().physical, GuestPhysical(0x12_3440_0000 | 0x34_5678 & 0x3f_ffff));
    assert_eq!(
        at(&PagingState { physical_bits: 36, ..state }, &memory),
        Err(WalkError::Fault { error_code: 0b1001 })
    );
    *memory.entries.get_mut(&leaf).unwrap() |= 1 << 21;
    assert_eq!(at(&state, &memory), Err(WalkError::Fault { error_code: 0b1001 }));
    // Without PSE the size bit is ignored, and the entry refers to a table.
    assert_eq!(at(&PagingState { cr4: 0, ..state }, &memory), Err(WalkError::Fault { error_code: 0 }));
}

#[test]
fn what_isnt_known_is_said() {
    let (memory, state) = one(ALL, ALL | 3 << 59);
    let keys = PagingState { cr4: state.cr4 | CR4_PKE, ..state };
    assert!(physical(&memory, &state, Access::Read).is_ok());
    assert!(matches!(physical(&memory, &keys, Access::Read), Err(WalkError::Unsupported(_))));
    assert!(physical(&memory, &keys, Access::Execute).is_ok(), "keys don't guard fetches");
    let pae = PagingState { cr0: CR0_PE | CR0_PG, cr4: CR4_PAE, ..PagingState::default() };
    assert!(matches!(physical(&memory, &pae, Access::Read), Err(WalkError::Unsupported(_))));
    let hole = GuestVirtual(0x8000_0000_0000);
    assert_eq!(walk(&memory, &state, hole, Access::Read), Err(WalkError::NotCanonical(hole)));
}
