//! A guest's data in the memory on a shared card, while the guest is resident and while it isn't.

use std::collections::{BTreeMap, BTreeSet};

/// One guest's data in the card's memory.
#[derive(Debug, Default)]
pub(crate) struct CardMemory {
    /// Pages that the guest wrote and that aren't entirely part of its receive ring.
    pub(crate) written: BTreeSet<u32>,
    /// Pages of the receive rings that were granted since the guest became resident.
    pub(crate) rings: BTreeSet<u32>,
    /// Contents of the pages, by page number, while another guest has the device.
    pub(crate) saved: BTreeMap<u32, Vec<u32>>,
}
