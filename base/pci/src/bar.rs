//! One BAR of one function, as a device on a bus.

use std::sync::Arc;

use crate::function::PciFunction;

/// Passes accesses within a placed BAR to its function. The monitor wraps it into its bus device type.
#[derive(Clone)]
pub struct BarDevice {
    function: Arc<dyn PciFunction>,
    bar: u8,
    size: u64,
}

impl std::fmt::Debug for BarDevice {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "BarDevice({} BAR {})", self.function.name(), self.bar)
    }
}

impl BarDevice {
    /// Creates the device of BAR `layout` of `function`.
    #[must_use]
    pub fn new(function: Arc<dyn PciFunction>, layout: crate::function::BarLayout) -> Self {
        Self { function, bar: layout.index, size: layout.size }
    }

    /// Returns the function.
    #[must_use]
    pub fn function(&self) -> &Arc<dyn PciFunction> {
        &self.function
    }

    /// BAR index.
    #[must_use]
    pub fn bar(&self) -> u8 {
        self.bar
    }

    /// Size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Reads `data.len()` bytes at `offset` of the BAR. Bytes beyond the BAR read as ones.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xFF);
        if self.contains(offset, data.len()) {
            self.function.bar_read(self.bar, offset, data);
        }
    }

    /// Writes `data` at `offset` of the BAR. Bytes beyond the BAR are dropped.
    pub fn write(&self, offset: u64, data: &[u8]) {
        if self.contains(offset, data.len()) {
            self.function.bar_write(self.bar, offset, data);
        }
    }

    fn contains(&self, offset: u64, len: usize) -> bool {
        let Ok(len) = u64::try_from(len) else { return false };
        (1..=8).contains(&len) && offset.checked_add(len).is_some_and(|end| end <= self.size)
    }
}
