//! The memory map for kernels: e820 for the Linux protocol, and the same entries for PVH.

use crate::layout;
use crate::ranges::AddressRange;

/// Type of an entry. The values are those of e820 and of PVH (ACPI 6.5, 15).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Ram = 1,
    Reserved = 2,
}

/// One entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub range: AddressRange,
    pub kind: Kind,
}

/// Returns the map of a machine with this RAM: ascending, merged, and the first range starts at 0 and has at least 16
/// MiB.
pub(super) fn memory_map(ram: &[AddressRange]) -> Vec<Entry> {
    let between = |start: u64, end: u64| AddressRange { start, len: end - start };
    let mut map = vec![
        Entry { range: between(0, layout::CONVENTIONAL_END), kind: Kind::Ram },
        // ROM area with the ACPI tables.
        Entry { range: between(layout::CONVENTIONAL_END, layout::KERNEL_MINIMUM), kind: Kind::Reserved },
    ];
    for range in ram {
        let start = range.start.max(layout::KERNEL_MINIMUM);
        if range.end() > start {
            map.push(Entry { range: between(start, range.end()), kind: Kind::Ram });
        }
    }
    // Linux uses the ECAM window early only if the map reserves it.
    map.push(Entry { range: layout::ECAM, kind: Kind::Reserved });
    map.push(Entry {
        range: between(layout::KVM_IDENTITY_MAP, layout::KVM_TSS + 3 * layout::PAGE_SIZE),
        kind: Kind::Reserved,
    });
    map.sort_by_key(|entry| entry.range.start);
    map
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{GIB, HIGH_RAM_START, LOW_RAM_END};

    #[test]
    fn entries_ascend_never_overlap_and_cover_all_ram_but_the_rom_area() {
        let ram = [
            AddressRange { start: 0, len: LOW_RAM_END },
            AddressRange { start: HIGH_RAM_START, len: 5 * GIB },
        ];
        let map = memory_map(&ram);
        for pair in map.windows(2) {
            assert!(pair[0].range.end() <= pair[1].range.start, "{pair:?}");
        }
        let total: u64 = map.iter().filter(|e| e.kind == Kind::Ram).map(|e| e.range.len).sum();
        assert_eq!(total, 8 * GIB - (layout::KERNEL_MINIMUM - layout::CONVENTIONAL_END));
    }
}
