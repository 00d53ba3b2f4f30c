//! Rings over page lists, and their index arithmetic (Linux `pvrdma_ring.h`).
//!
//! An index of a ring with N slots (N a power of two) runs from 0 to 2N-1; its slot is `index & (N-1)`. The ring is empty when both indices
//! are equal, and full when they differ in bit N only. Any distance other than 0 to N elements means that the guest corrupted the ring.

use dma::{Dma, DmaFault};
use smallvec::SmallVec;

use crate::abi::PAGE;
use crate::page_list::{PageListError, read_page_list};

/// Index arithmetic of a ring with a power of two of slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Indices {
    slots: u32,
}

impl Indices {
    /// `slots` must be a power of two below 2^31.
    #[must_use]
    pub const fn new(slots: u32) -> Option<Self> {
        if slots.is_power_of_two() && slots < 1 << 31 { Some(Self { slots }) } else { None }
    }

    /// Number of slots.
    #[must_use]
    pub const fn slots(self) -> u32 {
        self.slots
    }

    /// The slot of an index.
    #[inline]
    #[must_use]
    pub const fn slot(self, index: u32) -> u32 {
        index & (self.slots - 1)
    }

    /// The index `count` slots later.
    #[inline]
    #[must_use]
    pub const fn advance(self, index: u32, count: u32) -> u32 {
        index.wrapping_add(count) & (2 * self.slots - 1)
    }

    /// Number of elements between two indices; `None` if an index or the number is out of range.
    #[inline]
    #[must_use]
    pub const fn between(self, tail: u32, head: u32) -> Option<u32> {
        let span = 2 * self.slots;
        if tail >= span || head >= span {
            return None;
        }
        let count = tail.wrapping_sub(head) & (span - 1);
        if count <= self.slots { Some(count) } else { None }
    }
}

/// A ring in guest memory: one page of indices, slots in the others. A slot is a power of two of at most a page, so none crosses a page
/// boundary.
#[derive(Debug)]
pub(crate) struct RingMemory {
    /// Guest address of the indices.
    state: u64,
    /// Guest addresses of the pages with slots. Two are stored inline, which saves a cache miss in each turn of many queue pairs.
    pages: SmallVec<[u64; 2]>,
    indices: Indices,
    slot_shift: u32,
}

/// Why a ring can't be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// Not a power of two, or more than the device's limit.
    #[error("A ring can't have {0} slots")]
    Slots(u32),
    /// Slots larger than a page.
    #[error("A ring's slots can't have {0} bytes")]
    SlotSize(u64),
    /// Fewer pages than the slots need.
    #[error("The ring has {given} pages of slots, it needs {needed}")]
    TooFewPages {
        /// Number given.
        given: u32,
        /// Number needed.
        needed: u32,
    },
    /// The indices are invalid.
    #[error("The ring's indices are {tail:#x} and {head:#x}, which {slots} slots can't have")]
    State {
        /// Producer index.
        tail: u32,
        /// Consumer index.
        head: u32,
        /// Number of slots.
        slots: u32,
    },
    /// The page directory is unusable.
    #[error("The ring's pages can't be found")]
    Pages(
        #[from]
        #[source]
        PageListError,
    ),
    /// The memory of the indices is gone.
    #[error("The ring's indices can't be read")]
    Memory(
        #[from]
        #[source]
        DmaFault,
    ),
}

/// Number of pages that `slots` slots of `slot_size` bytes need.
pub(crate) fn pages_needed(slots: u32, slot_size: u64) -> Result<u32, RingError> {
    if slot_size == 0 || !slot_size.is_power_of_two() || slot_size > PAGE {
        return Err(RingError::SlotSize(slot_size));
    }
    u32::try_from((u64::from(slots) * slot_size).div_ceil(PAGE)).map_err(|_| RingError::Slots(slots))
}

impl RingMemory {
    /// A ring of `slots` slots of `slot_size` bytes on `pages`, which must be enough.
    pub fn new(state: u64, pages: &[u64], slots: u32, slot_size: u64) -> Result<Self, RingError> {
        let indices = Indices::new(slots).ok_or(RingError::Slots(slots))?;
        let needed = pages_needed(slots, slot_size)?;
        let given = u32::try_from(pages.len()).unwrap_or(u32::MAX);
        let pages = pages.get(..needed as usize).ok_or(RingError::TooFewPages { given, needed })?;
        Ok(Self {
            state,
            pages: SmallVec::from_slice(pages),
            indices,
            slot_shift: slot_size.trailing_zeros(),
        })
    }

    /// Reads the directory of a ring whose slots begin with the second page; it has `given` pages in all.
    pub fn read(
        memory: &impl Dma,
        directory: u64,
        given: u32,
        slots: u32,
        slot_size: u64,
    ) -> Result<Self, RingError> {
        let needed = pages_needed(slots, slot_size)?;
        if given == 0 || given - 1 < needed {
            return Err(RingError::TooFewPages { given: given.saturating_sub(1), needed });
        }
        let pages = read_page_list(memory, directory, needed + 1)?;
        if memory.is_late() {
            // The engine requires that all of a ring is present.
            let missing = pages.iter().fold(None, |found, page| {
                if memory.awaits(*page, PAGE, false) { found.or(Some(*page)) } else { found }
            });
            if let Some(page) = missing {
                memory.read(page, &mut [0])?;
            }
        }
        Self::new(pages[0], &pages[1..], slots, slot_size)
    }

    /// Calls `each` with its indices and its slots: addresses and lengths.
    pub fn memory(&self, each: &mut dyn FnMut(u64, u64)) {
        each(self.state, PAGE);
        self.pages.iter().for_each(|page| each(*page, PAGE));
    }

    /// Its saved state.
    pub fn save(&self) -> crate::saved::Ring {
        crate::saved::Ring::new(self.state, &self.pages, self.indices.slots, self.slot_shift)
    }

    #[inline]
    pub fn indices(&self) -> Indices {
        self.indices
    }

    /// Bytes of a slot.
    pub fn slot_size(&self) -> u64 {
        1 << self.slot_shift
    }

    /// Guest address of the slot of `index`.
    #[inline]
    pub fn slot_address(&self, index: u32) -> u64 {
        let byte = u64::from(self.indices.slot(index)) << self.slot_shift;
        // `new` ensured that the pages hold all slots.
        let page = usize::try_from(byte / PAGE).ok().and_then(|page| self.pages.get(page));
        debug_assert!(page.is_some());
        page.map_or(u64::MAX, |page| page + byte % PAGE)
    }

    /// Guest address of an index.
    #[inline]
    pub fn state_address(&self, offset: u64) -> u64 {
        self.state + offset
    }

    /// Loads an index; if its memory is gone, the result is out of range.
    #[inline]
    pub fn load(&self, memory: &impl Dma, offset: u64) -> u32 {
        memory.load_u32(self.state + offset).unwrap_or(u32::MAX)
    }

    /// Publishes an index.
    #[inline]
    pub fn store(&self, memory: &impl Dma, offset: u64, index: u32) -> Result<(), DmaFault> {
        memory.store_u32(self.state + offset, index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// The arithmetic agrees with a model that counts without wrapping.
        #[test]
        fn arithmetic_against_a_model(order in 0u32..12, steps in prop::collection::vec((any::<bool>(), 1u32..50), 0..200)) {
            let slots = 1u32 << order;
            let ring = Indices::new(slots).unwrap();
            let (mut produced, mut consumed) = (0u64, 0u64);
            let (mut tail, mut head) = (0, 0);
            for (produce, count) in steps {
                let filled = u32::try_from(produced - consumed).unwrap();
                if produce {
                    let count = count.min(slots - filled);
                    produced += u64::from(count);
                    tail = ring.advance(tail, count);
                } else {
                    let count = count.min(filled);
                    consumed += u64::from(count);
                    head = ring.advance(head, count);
                }
                let filled = u32::try_from(produced - consumed).unwrap();
                prop_assert_eq!(ring.between(tail, head), Some(filled));
                prop_assert_eq!(u64::from(ring.slot(tail)), produced % u64::from(slots));
                // As the guest's driver computes it.
                prop_assert_eq!(filled == slots, tail == head ^ slots);
                prop_assert_eq!(filled == 0, tail == head);
            }
        }

        /// For any index from the guest, the result is within the ring, or none.
        #[test]
        fn random_indices(order in 0u32..31, tail: u32, head: u32) {
            let ring = Indices::new(1 << order).unwrap();
            if let Some(count) = ring.between(tail, head) {
                prop_assert!(count <= ring.slots());
                prop_assert_eq!(ring.advance(head, count), tail);
            }
        }

        /// Slots never cross pages, never overlap, and are where the driver computes them.
        #[test]
        fn slots_lie_within_pages(order in 0u32..10, shift in 2u32..13) {
            let (slots, size) = (1u32 << order, 1u64 << shift);
            let needed = pages_needed(slots, size).unwrap();
            let pages: Vec<u64> = (0..u64::from(needed)).map(|i| 0x10_0000 + i * 3 * PAGE).collect();
            let ring = RingMemory::new(0, &pages, slots, size).unwrap();
            for index in 0..2 * slots {
                let address = ring.slot_address(index);
                let byte = u64::from(index % slots) * size;
                prop_assert_eq!(address, 0x10_0000 + byte / PAGE * 3 * PAGE + byte % PAGE);
                prop_assert!(address % PAGE + size <= PAGE);
            }
        }
    }

    #[test]
    fn misdescribed_rings_are_refused() {
        assert!(matches!(RingMemory::new(0, &[0], 3, 64), Err(RingError::Slots(3))));
        assert!(matches!(RingMemory::new(0, &[0], 0, 64), Err(RingError::Slots(0))));
        assert!(matches!(RingMemory::new(0, &[0], 1, 8192), Err(RingError::SlotSize(8192))));
        assert!(matches!(
            RingMemory::new(0, &[0], 128, 64),
            Err(RingError::TooFewPages { given: 1, needed: 2 })
        ));
    }
}
