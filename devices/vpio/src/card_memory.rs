//! What of a guest lies in memory on a shared card, while the guest has the card and while another one does.

use std::collections::{BTreeMap, BTreeSet};

/// What of a guest lies in memory on the card.
#[derive(Debug, Default)]
pub(crate) struct CardMemory {
    /// Pages that it wrote, as far as they aren't all of its receive ring.
    pub(crate) written: BTreeSet<u32>,
    /// Pages of receive rings that were granted since it got the device.
    pub(crate) rings: BTreeSet<u32>,
    /// Contents, while the device is with another guest.
    pub(crate) saved: BTreeMap<u32, Vec<u32>>,
}
