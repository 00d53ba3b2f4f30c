//! Windows: a neighbour's memory at `base + slot * stride`, the same address in every VM.
//!
//! An offset in a window is the owner's guest-physical address. The owner translates a buffer once, by adding its window's start
//! ([`Window::global`]). No other VM translates it again. A window contains only RAM of the owner, not the hole below 4 GiB.

use core::fmt;

/// Size of a page in bytes.
pub const PAGE: u64 = 4096;
/// Limit of members of one neighbourhood.
pub const MAX_SLOTS: u32 = 64;
/// Limit of separate RAM extents of one VM: below and above the hole, and some more.
pub const MAX_EXTENTS: usize = 4;
/// End of the architecture's physical address space.
const HIGHEST_ADDRESS: u64 = 1 << 52;
/// Smallest distance: windows are aligned to large pages, which KVM can then use.
const LEAST_STRIDE: u64 = 2 << 20;

/// Addresses of a neighbourhood's windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    base: u64,
    stride: u64,
    slots: u32,
}

/// Why a geometry, or a VM's RAM in it, is invalid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WindowError {
    /// The geometry is invalid.
    Geometry {
        /// Start of the first window.
        base: u64,
        /// Distance between windows, bytes.
        stride: u64,
        /// Number of windows.
        slots: u32,
        /// The problem, and what to choose.
        reason: &'static str,
    },
    /// The slot doesn't exist.
    Slot {
        /// The slot.
        slot: u32,
        /// Number of slots.
        slots: u32,
    },
    /// A RAM extent is invalid.
    Extent {
        /// Guest-physical address of the extent.
        start: u64,
        /// Size, bytes.
        size: u64,
        /// The problem, and what to choose.
        reason: &'static str,
    },
}

impl fmt::Display for WindowError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Geometry { base, stride, slots, reason } => write!(
                f,
                "{slots} neighbour windows of {stride:#x} bytes from {base:#x} on are not possible: {reason}"
            ),
            Self::Slot { slot, slots } => write!(f, "There is no neighbour slot {slot}; there are {slots}"),
            Self::Extent { start, size, reason } => {
                write!(f, "RAM at {start:#x} with {size:#x} bytes can't be shown in a window: {reason}")
            }
        }
    }
}

impl core::error::Error for WindowError {}

impl Geometry {
    /// `slots` windows at a distance of `stride` bytes (a power of two, 2 MiB or more), from `base` (a multiple of `stride`, not 0) on.
    ///
    /// # Errors
    /// If a value isn't so, there are no slots or more than [`MAX_SLOTS`], or they exceed 52-bit addresses.
    pub fn new(base: u64, stride: u64, slots: u32) -> Result<Self, WindowError> {
        let bad = |reason| Err(WindowError::Geometry { base, stride, slots, reason });
        if !stride.is_power_of_two() || stride < LEAST_STRIDE {
            return bad("the distance between windows is a power of two of at least 2 MiB");
        }
        if !base.is_multiple_of(stride) || base == 0 {
            return bad("they begin at a multiple of their distance other than 0");
        }
        if slots == 0 || slots > MAX_SLOTS {
            return bad("there are 1 to 64 of them");
        }
        let end = stride.checked_mul(u64::from(slots)).and_then(|all| base.checked_add(all));
        if end.is_none_or(|end| end > HIGHEST_ADDRESS) {
            return bad("they end beyond the 52-bit physical address space");
        }
        Ok(Self { base, stride, slots })
    }

    /// Start of the first window.
    #[must_use]
    pub const fn base(&self) -> u64 {
        self.base
    }

    /// Distance between windows, bytes. A member's RAM ends below it.
    #[must_use]
    pub const fn stride(&self) -> u64 {
        self.stride
    }

    /// Number of windows.
    #[must_use]
    pub const fn slots(&self) -> u32 {
        self.slots
    }

    /// First address above all windows.
    #[must_use]
    pub const fn end(&self) -> u64 {
        // `new` has computed it without overflow.
        self.base + self.stride * self.slots as u64
    }

    /// Start of the window of `slot`.
    ///
    /// # Errors
    /// If the slot doesn't exist.
    pub const fn start(&self, slot: u32) -> Result<u64, WindowError> {
        if slot >= self.slots {
            return Err(WindowError::Slot { slot, slots: self.slots });
        }
        Ok(self.base + self.stride * slot as u64)
    }

    /// The slot whose window contains `address`, RAM or not.
    #[must_use]
    pub const fn slot_of(&self, address: u64) -> Option<u32> {
        if address < self.base || address >= self.end() {
            return None;
        }
        // Less than `slots`, which has 32 bits.
        #[expect(clippy::cast_possible_truncation, reason = "less than slots")]
        let slot = ((address - self.base) / self.stride) as u32;
        Some(slot)
    }

    /// The window of `slot` with these RAM extents (guest-physical start and size). Adjacent extents are joined.
    ///
    /// # Errors
    /// If the slot doesn't exist, or the RAM doesn't fit into a window.
    pub fn window(&self, slot: u32, ram: &[(u64, u64)]) -> Result<Window, WindowError> {
        let start = self.start(slot)?;
        let mut extents = [(0, 0); MAX_EXTENTS];
        let mut count = 0;
        let mut end_before = 0;
        for &(at, size) in ram {
            let bad = |reason| WindowError::Extent { start: at, size, reason };
            if size == 0 || !at.is_multiple_of(PAGE) || !size.is_multiple_of(PAGE) {
                return Err(bad("it is whole pages of 4096 bytes, and not empty"));
            }
            if at < end_before {
                return Err(bad("pieces ascend and don't overlap"));
            }
            let end = at.checked_add(size).filter(|end| *end <= self.stride);
            let end = end
                .ok_or_else(|| bad("it ends beyond the window; give the VM less, or make windows larger"))?;
            let touches = count > 0 && end_before == at;
            let place = if touches { count - 1 } else { count };
            let Some(extent) = extents.get_mut(place) else { return Err(bad("it is in too many pieces")) };
            if touches {
                extent.1 += size;
            } else {
                *extent = (at, size);
                count += 1;
            }
            end_before = end;
        }
        Ok(Window { slot, start, geometry: *self, extents, count })
    }
}

/// The window of one member, with its RAM extents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    slot: u32,
    start: u64,
    /// Geometry of all windows.
    geometry: Geometry,
    /// Guest-physical start and size. The first `count` are valid, ascending and separate.
    extents: [(u64, u64); MAX_EXTENTS],
    count: usize,
}

impl Window {
    /// The owner's slot.
    #[must_use]
    pub const fn slot(&self) -> u32 {
        self.slot
    }

    /// First address.
    #[must_use]
    pub const fn start(&self) -> u64 {
        self.start
    }

    /// RAM extents: guest-physical start and size.
    #[must_use]
    pub fn extents(&self) -> &[(u64, u64)] {
        self.extents.get(..self.count).unwrap_or_default()
    }

    /// The owner's guest-physical address of the `length` bytes at the global `address`, if all are RAM of the owner. `None` if any byte
    /// isn't, or `length` is 0. Never overflows.
    #[must_use]
    #[inline]
    pub fn local(&self, address: u64, length: u32) -> Option<u64> {
        let at = address.checked_sub(self.start)?;
        let length = u64::from(length);
        if length == 0 {
            return None;
        }
        self.extents()
            .iter()
            .any(|&(start, size)| {
                at.checked_sub(start).and_then(|from| from.checked_add(length)).is_some_and(|end| end <= size)
            })
            .then_some(at)
    }

    /// Whether the `length` bytes (not 0) at the global `address` are all in the window of one other slot, mapped or not.
    #[must_use]
    pub fn could_be_of_another(&self, address: u64, length: u32) -> bool {
        let Some(last) = u64::from(length).checked_sub(1).and_then(|more| address.checked_add(more)) else {
            return false;
        };
        let slot = self.geometry.slot_of(address);
        slot.is_some_and(|slot| slot != self.slot) && self.geometry.slot_of(last) == slot
    }

    /// The global address of the `length` bytes at the owner's guest-physical address `at`, if all are RAM.
    #[must_use]
    #[inline]
    pub fn global(&self, at: u64, length: u32) -> Option<u64> {
        let address = self.start.checked_add(at)?;
        self.local(address, length).map(|_| address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn impossible_geometries_say_why() {
        for (base, stride, slots, word) in [
            (GIB, 3 << 20, 4, "power of two"),
            (GIB, 1 << 20, 4, "2 MiB"),
            (0, GIB, 4, "multiple"),
            (GIB + 1, GIB, 4, "multiple"),
            (GIB, GIB, 0, "1 to 64"),
            (GIB, GIB, 65, "1 to 64"),
            (1 << 51, 1 << 50, 3, "52-bit"),
            (1 << 63, 1 << 63, 2, "52-bit"),
        ] {
            let text = Geometry::new(base, stride, slots).unwrap_err().to_string();
            assert!(text.contains(word), "{text}");
        }
        let geometry = Geometry::new(1 << 39, 32 * GIB, 16).unwrap();
        assert_eq!(geometry.end(), 1 << 40);
        assert!(geometry.start(16).is_err());
    }

    #[test]
    fn ram_that_does_not_fit_is_refused() {
        let geometry = Geometry::new(GIB, GIB, 2).unwrap();
        for ram in [
            &[(0, GIB + PAGE)][..],
            &[(GIB, PAGE)],
            &[(0, 0)],
            &[(1, PAGE)],
            &[(0, 2 * PAGE), (PAGE, PAGE)],
            &[(0, PAGE), (u64::MAX - PAGE + 1, PAGE)],
            &[(0, PAGE), (2 * PAGE, PAGE), (4 * PAGE, PAGE), (6 * PAGE, PAGE), (8 * PAGE, PAGE)],
        ] {
            assert!(geometry.window(0, ram).is_err(), "{ram:?}");
        }
        // Adjacent extents are joined.
        let window = geometry.window(1, &[(0, PAGE), (PAGE, PAGE), (4 * PAGE, PAGE)]).unwrap();
        assert_eq!(window.extents(), [(0, 2 * PAGE), (4 * PAGE, PAGE)]);
        assert_eq!(window.local(2 * GIB + PAGE - 1, 2), Some(PAGE - 1));
    }

    fn windows() -> impl Strategy<Value = (Geometry, Vec<(u64, u64)>)> {
        (1u64..100, 21u32..40, 1u32..65, prop::collection::vec((0u64..20, 1u64..40), 0..=MAX_EXTENTS))
            .prop_map(|(multiple, bits, slots, pieces)| {
                let stride = 1 << bits;
                let geometry = Geometry::new(multiple * stride, stride, slots).unwrap();
                let mut at = 0;
                let mut ram = Vec::new();
                for (gap, pages) in pieces {
                    at += gap * PAGE;
                    ram.push((at, pages * PAGE));
                    at += pages * PAGE;
                }
                (geometry, ram)
            })
    }

    proptest! {
        /// Compared with a list of all bytes, as 128-bit numbers that can't overflow. An address and length are accepted exactly if each
        /// byte is RAM of the owner, in one extent.
        #[test]
        fn a_check_agrees_with_arithmetic_that_cannot_overflow(
            (geometry, ram) in windows(),
            slot in any::<prop::sample::Index>(),
            near in 0u64..(1 << 20),
            wild in any::<u64>(),
            is_wild in any::<bool>(),
            length in prop_oneof![Just(0u32), 1u32..100_000, any::<u32>()],
        ) {
            let slot = u32::try_from(slot.index(usize::try_from(geometry.slots()).unwrap())).unwrap();
            let window = geometry.window(slot, &ram).unwrap();
            let address = if is_wild { wild } else { window.start().wrapping_sub(1 << 18).wrapping_add(near) };
            let (from, to) = (u128::from(address), u128::from(address) + u128::from(length));
            let start = u128::from(geometry.base()) + u128::from(slot) * u128::from(geometry.stride());
            let mut merged: Vec<(u128, u128)> = Vec::new();
            for &(at, size) in &ram {
                let (low, high) = (start + u128::from(at), start + u128::from(at) + u128::from(size));
                match merged.last_mut() {
                    Some(last) if last.1 == low => last.1 = high,
                    _ => merged.push((low, high)),
                }
            }
            let inside = length > 0 && merged.iter().any(|(low, high)| from >= *low && to <= *high);
            let local = window.local(address, length);
            prop_assert_eq!(local.is_some(), inside);
            if let Some(at) = local {
                prop_assert_eq!(window.global(at, length), Some(address));
                prop_assert_eq!(geometry.slot_of(address), Some(slot));
            }
        }

        /// No address is in the windows of two slots.
        #[test]
        fn windows_never_overlap((geometry, ram) in windows(), address in any::<u64>()) {
            let owners = (0..geometry.slots())
                .filter(|slot| geometry.window(*slot, &ram).unwrap().local(address, 1).is_some())
                .collect::<Vec<_>>();
            prop_assert!(owners.len() <= 1);
            if let Some(owner) = owners.first() {
                prop_assert_eq!(geometry.slot_of(address), Some(*owner));
            }
        }
    }
}
