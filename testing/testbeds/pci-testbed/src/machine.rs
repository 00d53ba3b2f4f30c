//! Stand-ins for the monitor's implementations. They panic if the code under test violates an interface.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use crate::lock;
use pci::function::{BarKind, BarLayout, BarPlacer, PciFunction, PlaceError};
use pci::interrupt::{InterruptError, IntxLine, Msi, MsiMessage, MsiVector};
use pci::root::{AddressRange, FIRST_INTX_GSI, IntxSink};

/// Counts sent interrupts. Panics on a trigger while masked.
#[derive(Debug, Default)]
pub struct FakeVector {
    state: Mutex<VectorState>,
}

#[derive(Debug, Default)]
struct VectorState {
    message: Option<MsiMessage>,
    sent: Vec<MsiMessage>,
    refusing: bool,
}

impl FakeVector {
    /// Creates a masked vector.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// Returns the sent messages, oldest first.
    #[must_use]
    pub fn sent(&self) -> Vec<MsiMessage> {
        lock(&self.state).sent.clone()
    }

    /// Returns the number of sent messages.
    #[must_use]
    pub fn count(&self) -> usize {
        lock(&self.state).sent.len()
    }

    /// Resets the count.
    pub fn forget_sent(&self) {
        lock(&self.state).sent.clear();
    }

    /// Returns the current message; `None` while masked.
    #[must_use]
    pub fn message(&self) -> Option<MsiMessage> {
        lock(&self.state).message
    }

    /// Makes every call fail from now on, or succeed again.
    pub fn refuse(&self, refusing: bool) {
        lock(&self.state).refusing = refusing;
    }
}

fn refusal(what: &str) -> InterruptError {
    InterruptError::Refused { what: what.to_owned(), source: std::io::Error::other("a test wants it") }
}

impl MsiVector for FakeVector {
    fn set(&self, message: Option<MsiMessage>) -> Result<(), InterruptError> {
        let mut state = lock(&self.state);
        if state.refusing {
            return Err(refusal("set a message"));
        }
        state.message = message;
        Ok(())
    }

    fn trigger(&self) -> Result<(), InterruptError> {
        let mut state = lock(&self.state);
        if state.refusing {
            return Err(refusal("send a message"));
        }
        let message = state.message;
        assert!(message.is_some(), "a masked vector was triggered");
        state.sent.extend(message);
        Ok(())
    }

    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Allocates [`FakeVector`]s and keeps them.
#[derive(Debug, Default)]
pub struct FakeMsi {
    vectors: Mutex<Vec<Arc<FakeVector>>>,
}

impl FakeMsi {
    /// Creates an allocator.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// Returns all allocated vectors in order.
    #[must_use]
    pub fn vectors(&self) -> Vec<Arc<FakeVector>> {
        lock(&self.vectors).clone()
    }
}

impl Msi for FakeMsi {
    fn allocate(&self, count: u16) -> Result<Vec<Arc<dyn MsiVector>>, InterruptError> {
        let new: Vec<_> = (0..count).map(|_| FakeVector::new()).collect();
        lock(&self.vectors).extend(new.iter().cloned());
        Ok(new.into_iter().map(|vector| -> Arc<dyn MsiVector> { vector }).collect())
    }
}

/// Records its level.
#[derive(Debug, Default)]
pub struct FakeLine {
    asserted: Mutex<bool>,
}

impl FakeLine {
    /// Creates a deasserted line.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// Returns its level.
    #[must_use]
    pub fn asserted(&self) -> bool {
        *lock(&self.asserted)
    }
}

impl IntxLine for FakeLine {
    fn set_level(&self, asserted: bool) -> Result<(), InterruptError> {
        *lock(&self.asserted) = asserted;
        Ok(())
    }
}

/// Records the level of each GSI. Panics on a level that the GSI already has, and on a GSI that isn't INTx's.
#[derive(Debug, Default)]
pub struct FakeIntx {
    levels: Mutex<[bool; 4]>,
}

impl FakeIntx {
    /// Creates a controller with no asserted GSI.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// Returns whether a GSI from 16 to 19 is asserted.
    #[must_use]
    pub fn asserted(&self, gsi: u32) -> bool {
        lock(&self.levels)[Self::index(gsi)]
    }

    fn index(gsi: u32) -> usize {
        gsi.checked_sub(FIRST_INTX_GSI)
            .and_then(|index| usize::try_from(index).ok())
            .filter(|index| *index < 4)
            .unwrap_or_else(|| panic!("GSI {gsi} isn't one of INTx's"))
    }
}

impl IntxSink for FakeIntx {
    fn set_gsi(&self, gsi: u32, asserted: bool) -> Result<(), InterruptError> {
        let level = &mut lock(&self.levels)[Self::index(gsi)];
        assert_ne!(*level, asserted, "GSI {gsi} was set to the level it has");
        *level = asserted;
        Ok(())
    }
}

/// A placed BAR.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacedBar {
    /// Function name.
    pub name: String,
    /// The BAR.
    pub layout: BarLayout,
    /// Address or port.
    pub address: u64,
}

impl PlacedBar {
    fn overlaps(&self, kind: BarKind, address: u64, size: u64) -> bool {
        (self.layout.kind == BarKind::Io) == (kind == BarKind::Io)
            && self.address < address + size
            && address < self.address + self.layout.size
    }
}

/// Records placements. Panics if two BARs overlap, if one is placed twice, or if a BAR is unplaced at an address where
/// it isn't. Refuses memory in the test's occupied ranges.
#[derive(Debug, Default)]
pub struct RecordingPlacer {
    placed: Mutex<Vec<PlacedBar>>,
    calls: Mutex<u64>,
    occupied: Vec<AddressRange>,
}

impl RecordingPlacer {
    /// Creates a placer without placements and occupied ranges.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// Creates a placer with memory ranges that RAM or other devices occupy.
    #[must_use]
    pub fn with_occupied(occupied: Vec<AddressRange>) -> Arc<Self> {
        Arc::new(Self { occupied, ..Self::default() })
    }

    /// Returns the current placements in order.
    #[must_use]
    pub fn placed(&self) -> Vec<PlacedBar> {
        lock(&self.placed).clone()
    }

    /// Returns a BAR's current address.
    #[must_use]
    pub fn address(&self, name: &str, bar: u8) -> Option<u64> {
        lock(&self.placed)
            .iter()
            .find(|placed| placed.name == name && placed.layout.index == bar)
            .map(|placed| placed.address)
    }

    /// Returns the number of place and unplace calls.
    #[must_use]
    pub fn calls(&self) -> u64 {
        *lock(&self.calls)
    }
}

impl BarPlacer for RecordingPlacer {
    fn place(&self, function: &Arc<dyn PciFunction>, bar: BarLayout, address: u64) -> Result<(), PlaceError> {
        *lock(&self.calls) += 1;
        let new = PlacedBar { name: function.name().to_owned(), layout: bar, address };
        let mut placed = lock(&self.placed);
        for other in placed.iter() {
            assert!(!other.overlaps(bar.kind, address, bar.size), "{new:?} overlaps {other:?}");
            assert!(other.name != new.name || other.layout.index != bar.index, "{new:?} is placed twice");
        }
        let occupied = self.occupied.iter().any(|range| {
            bar.kind != BarKind::Io && range.start < address + bar.size && address < range.start + range.len
        });
        if occupied {
            let reason = "RAM is there".to_owned();
            return Err(PlaceError { name: new.name, bar: bar.index, address, reason });
        }
        placed.push(new);
        Ok(())
    }

    fn unplace(
        &self,
        function: &Arc<dyn PciFunction>,
        bar: BarLayout,
        address: u64,
    ) -> Result<(), PlaceError> {
        *lock(&self.calls) += 1;
        let gone = PlacedBar { name: function.name().to_owned(), layout: bar, address };
        let mut placed = lock(&self.placed);
        let before = placed.len();
        placed.retain(|other| *other != gone);
        assert_eq!(placed.len() + 1, before, "{gone:?} isn't placed");
        Ok(())
    }
}
