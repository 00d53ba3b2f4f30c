//! The address windows of the root bus, and the first assignment of BARs in them.

use crate::function::{BarKind, BarLayout};

/// A BAR that is smaller than a page gets a page of its own, so that it can be mapped separately.
const PAGE: u64 = 4096;

/// A range of guest-physical addresses or ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct AddressRange {
    /// First address.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
}

impl AddressRange {
    fn contains(&self, start: u64, len: u64) -> bool {
        let end = start.checked_add(len);
        let own_end = self.start.checked_add(self.len);
        start >= self.start && end.is_some_and(|end| own_end.is_some_and(|own| end <= own))
    }
}

/// The windows that the root bus decodes (`_CRS` of the host bridge). BARs respond only inside them, independent of the
/// guest's settings. No window may contain RAM or other devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Windows {
    /// Memory below 4 GiB.
    pub memory32: AddressRange,
    /// Memory above 4 GiB, for 64-bit BARs.
    pub memory64: Option<AddressRange>,
    /// I/O ports.
    pub io: Option<AddressRange>,
}

impl Windows {
    /// Returns whether a BAR at `address` is within one window.
    pub(super) fn contain(&self, layout: &BarLayout, address: u64) -> bool {
        self.candidates(layout.kind).into_iter().flatten().any(|window| window.contains(address, layout.size))
    }

    /// Returns the windows for a kind of BAR, the preferred one first.
    fn candidates(&self, kind: BarKind) -> [Option<AddressRange>; 2] {
        match kind {
            BarKind::Io => [self.io, None],
            BarKind::Memory32 => [Some(self.memory32), None],
            BarKind::Memory64 => [self.memory64, Some(self.memory32)],
        }
    }
}

/// First-fit allocation at natural alignment.
pub(super) struct Allocator<'a> {
    windows: &'a Windows,
    memory: Vec<AddressRange>,
    io: Vec<AddressRange>,
}

impl<'a> Allocator<'a> {
    pub(super) fn new(windows: &'a Windows) -> Self {
        Self { windows, memory: Vec::new(), io: Vec::new() }
    }

    /// Allocates the lowest free address for a BAR.
    pub(super) fn allocate(&mut self, layout: &BarLayout) -> Option<u64> {
        let (taken, len) = match layout.kind {
            BarKind::Io => (&mut self.io, layout.size),
            BarKind::Memory32 | BarKind::Memory64 => (&mut self.memory, layout.size.max(PAGE)),
        };
        let start = self
            .windows
            .candidates(layout.kind)
            .into_iter()
            .flatten()
            .find_map(|window| first_fit(taken, window, len))?;
        let at = taken.partition_point(|range| range.start < start);
        taken.insert(at, AddressRange { start, len });
        Some(start)
    }
}

/// `taken` is sorted, and `len` is a power of two. Address 0 means "not assigned" and is never allocated.
fn first_fit(taken: &[AddressRange], window: AddressRange, len: u64) -> Option<u64> {
    let mut candidate = window.start.max(1).checked_next_multiple_of(len)?;
    for range in taken {
        let (end, range_end) = (candidate.checked_add(len)?, range.start.checked_add(range.len)?);
        if range_end <= candidate {
            continue;
        }
        if end <= range.start {
            break;
        }
        candidate = range_end.checked_next_multiple_of(len)?;
    }
    window.contains(candidate, len).then_some(candidate)
}

#[cfg(test)]
mod tests {
    use super::{AddressRange, Allocator, Windows};
    use crate::function::{BarKind, BarLayout};

    fn windows() -> Windows {
        Windows {
            memory32: AddressRange { start: 0xC000_1000, len: 0x10_0000 },
            memory64: Some(AddressRange { start: 1 << 40, len: 1 << 30 }),
            io: Some(AddressRange { start: 0, len: 0x100 }),
        }
    }

    fn bar(kind: BarKind, size: u64) -> BarLayout {
        BarLayout { index: 0, kind, prefetchable: false, size }
    }

    #[test]
    fn gaps_before_aligned_bars_are_used_and_small_bars_do_not_share_pages() {
        let windows = windows();
        let mut allocator = Allocator::new(&windows);
        assert_eq!(allocator.allocate(&bar(BarKind::Memory32, 0x8000)), Some(0xC000_8000));
        assert_eq!(allocator.allocate(&bar(BarKind::Memory32, 0x20)), Some(0xC000_1000));
        assert_eq!(allocator.allocate(&bar(BarKind::Memory32, 0x20)), Some(0xC000_2000));
    }

    #[test]
    fn wide_bars_prefer_the_high_window_and_fall_back_to_the_low_one() {
        let windows = windows();
        let mut allocator = Allocator::new(&windows);
        assert_eq!(allocator.allocate(&bar(BarKind::Memory64, 1 << 30)), Some(1 << 40));
        assert_eq!(allocator.allocate(&bar(BarKind::Memory64, 0x1000)), Some(0xC000_1000));
        assert_eq!(allocator.allocate(&bar(BarKind::Memory64, 1 << 31)), None);
    }

    #[test]
    fn address_0_is_never_given_and_a_full_window_says_so() {
        let windows = windows();
        let mut allocator = Allocator::new(&windows);
        for expected in [Some(0x40), Some(0x80), Some(0xC0), None] {
            assert_eq!(allocator.allocate(&bar(BarKind::Io, 0x40)), expected);
        }
    }
}
