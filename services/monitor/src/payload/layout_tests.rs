//! Walks the written tables as the CPU does.

use super::*;

fn written(layout: &Layout) -> GuestMemory {
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 4 << 20)]).unwrap();
    layout.write(&memory).unwrap();
    memory
}

fn read(memory: &GuestMemory, address: u64) -> u64 {
    memory.read_obj(GuestAddress(address)).unwrap()
}

/// Translates `address`. Returns the physical address and the flags of the last entry. Asserts user, present and accessed at each level.
fn walk(memory: &GuestMemory, top: u64, address: u64) -> Option<(u64, u64)> {
    let mut table = top;
    for shift in [39, 30, 21, 12] {
        let entry = read(memory, table + (address >> shift & 511) * 8);
        if entry & PRESENT == 0 {
            return None;
        }
        assert_eq!(entry & (USER | ACCESSED), USER | ACCESSED);
        let target = entry & 0x000f_ffff_ffff_f000;
        if shift == 12 || entry & LARGE != 0 {
            return Some((target + (address & ((1 << shift) - 1)), entry & 0xfff));
        }
        table = target;
    }
    None
}

#[test]
fn addresses_map_one_to_one_and_only_where_something_is() {
    let layout = Layout::new((3 << 30) + (64 << 20), 1 << 20, 2, 0x1_0000).unwrap();
    let memory = written(&layout);
    let top = layout.page_tables();
    let high_end = HIGH_RAM_START + (64 << 20);
    for address in
        [0x20_0000, 0x1234_5678, LOW_RAM_END - 1, HIGH_RAM_START, high_end - 1, DOORBELL_ADDRESS + 8]
    {
        let (target, flags) = walk(&memory, top, address).unwrap_or_else(|| panic!("{address:#x}"));
        assert_eq!(target, address);
        assert_eq!(flags & (WRITABLE | DIRTY), WRITABLE | DIRTY, "{address:#x}");
    }
    let (target, flags) = walk(&memory, top, layout.window.start).unwrap();
    assert_eq!((target, flags & WRITABLE), (layout.window.start, 0));
    assert_eq!(layout.window.start, 5 << 30);
    for address in [GDT, IDT, STUBS, layout.tss(1), layout.boot_info(1)] {
        assert_eq!(walk(&memory, top, address).unwrap().1 & WRITABLE, 0, "{address:#x}");
    }
    assert_eq!(walk(&memory, top, layout.exception_stack_top(1) - 8).unwrap().1 & WRITABLE, WRITABLE);
    for address in
        [0, 0xfff, top, 0x1f_f000, LOW_RAM_END, DOORBELL_ADDRESS + 0x1000, high_end, 1 << 38, 1 << 40]
    {
        assert_eq!(walk(&memory, top, address), None, "{address:#x}");
    }
}

#[test]
fn gates_lead_to_stubs_in_ring_3_on_a_stack_of_their_own() {
    let layout = Layout::new(64 << 20, 0, 1, 0x1_0000).unwrap();
    let memory = written(&layout);
    for vector in [0_u64, 14, 255] {
        let gate = u128::from(read(&memory, IDT + vector * 16))
            | u128::from(read(&memory, IDT + vector * 16 + 8)) << 64;
        let handler = (gate & 0xffff) | (gate >> 48 & 0xffff) << 16 | (gate >> 64 & 0xffff_ffff) << 32;
        assert_eq!(u64::try_from(handler).unwrap(), STUBS + vector * STUB_SIZE);
        assert!(Layout::is_stub(STUBS + vector * STUB_SIZE));
        assert_eq!(gate >> 16 & 0xffff, CODE_SELECTOR.into());
        assert_eq!(gate >> 32 & 7, 1);
        assert_eq!(gate >> 40 & 0xff, 0xee);
    }
    assert_eq!(&stub_code(6)[..9], &[0x6a, 0, 0x68, 6, 0, 0, 0, 0xe6, 0xf5]);
    assert_eq!(&stub_code(14)[..7], &[0x68, 14, 0, 0, 0, 0xe6, 0xf5]);
    assert_eq!(read(&memory, layout.tss(0) + 0x24), layout.exception_stack_top(0));
    assert_eq!(read(&memory, GDT + 0x30), CODE_DESCRIPTOR);
}

#[test]
fn every_port_is_allowed_on_every_vcpu() {
    let layout = Layout::new(64 << 20, 0, MAX_VCPUS, 0x1_0000).unwrap();
    let memory = written(&layout);
    for index in [0, 1, MAX_VCPUS - 1] {
        let tss = layout.tss(index);
        let offset: u16 = memory.read_obj(GuestAddress(tss + 0x66)).unwrap();
        assert_eq!(u64::from(layout.tss_limit(index)), u64::from(offset) + 0x2000);
        let mut map = [1; 0x2000];
        memory.read_slice(&mut map, GuestAddress(tss + u64::from(offset))).unwrap();
        assert_eq!(map, [0; 0x2000]);
        let last: u8 = memory.read_obj(GuestAddress(tss + u64::from(layout.tss_limit(index)))).unwrap();
        assert_eq!(last, 0xff);
        let end = tss + u64::from(layout.tss_limit(index));
        assert!(end < layout.boot_info(0));
    }
}

#[test]
fn the_largest_machine_fits_and_larger_ones_are_refused() {
    let layout = Layout::new(ADDRESS_LIMIT - (1 << 30), 0, MAX_VCPUS, 0x1_0000).unwrap();
    let memory = written(&layout);
    assert!(walk(&memory, layout.page_tables(), ADDRESS_LIMIT - 1).is_some());
    let directories = layout.page_tables() + 4 * PAGE;
    assert!(directories + ADDRESS_LIMIT / (1 << 30) * PAGE <= LOWEST_LOAD_ADDRESS);
    assert!(Layout::new(ADDRESS_LIMIT, 0, 1, 0x1_0000).is_err());
    assert!(Layout::new(1 << 30, ADDRESS_LIMIT, 1, 0x1_0000).is_err());
    assert!(Layout::new(u64::MAX, u64::MAX, 1, 0x1_0000).is_err());
}

#[test]
fn stacks_lie_below_the_end_of_low_ram_and_must_fit() {
    let layout = Layout::new(4 << 20, 0, 3, 0x1_0000).unwrap();
    assert_eq!(layout.stack(0), Region { start: (4 << 20) - 0x1_0000, size: 0x1_0000 });
    assert_eq!(layout.stacks_start(), Some(layout.stack(2).start));
    assert_eq!(Layout::new(4 << 20, 0, 3, 1 << 20).unwrap().stacks_start(), None);
    assert_eq!(Layout::new(4 << 20, 0, 3, u64::MAX).unwrap().stacks_start(), None);
}
