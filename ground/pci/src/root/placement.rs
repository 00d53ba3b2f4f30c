//! Which BARs answer where: keeps what the monitor has placed in step with what configuration spaces say.
//!
//! The guest can put a BAR anywhere, also on top of another one, and Linux does so for a moment while it
//! finds out sizes or swaps addresses. Rule: a BAR is placed only inside the windows of the bus and where no
//! other BAR of the bus lies; otherwise it is refused, answers nowhere, and is tried again when another
//! BAR leaves.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::FunctionAddress;
use super::windows::Windows;
use crate::function::{BarKind, BarLayout, BarPlacer, PciFunction};
use crate::log_limit::LogLimit;

/// A BAR of a function.
type Key = (FunctionAddress, u8);

pub(super) struct Placement {
    windows: Windows,
    placer: Arc<dyn BarPlacer>,
    placed: BTreeMap<Key, Placed>,
    refused: BTreeMap<Key, Refused>,
    log: LogLimit,
}

struct Placed {
    function: Arc<dyn PciFunction>,
    layout: BarLayout,
    address: u64,
}

struct Refused {
    wanted: Placed,
    reason: String,
}

/// What became of a BAR, for `inspect`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum BarStatus {
    /// Its decoding is off.
    Off,
    /// It answers here.
    Placed(u64),
    /// It should answer here, but doesn't.
    Refused(u64, String),
}

impl Placement {
    pub(super) fn new(windows: Windows, placer: Arc<dyn BarPlacer>) -> Self {
        Self { windows, placer, placed: BTreeMap::new(), refused: BTreeMap::new(), log: LogLimit::new() }
    }

    /// Makes the BARs of one function answer where its configuration space says. With `refresh`, also
    /// those that stay where they are are attached anew, because their doorbells or mappings changed.
    pub(super) fn settle(&mut self, at: FunctionAddress, function: &Arc<dyn PciFunction>, refresh: bool) {
        let places = function.places();
        let mut freed = false;
        // All leave before any moves in, so that BARs of one function can swap.
        for place in &places {
            let key = (at, place.layout.index);
            self.refused.remove(&key);
            if self.placed.get(&key).is_some_and(|placed| Some(placed.address) != place.address) {
                freed |= self.unplace(key);
            }
        }
        for place in &places {
            let key = (at, place.layout.index);
            match (place.address, self.placed.get(&key)) {
                (Some(address), None) => {
                    self.place(key, Placed { function: Arc::clone(function), layout: place.layout, address });
                }
                (Some(address), Some(placed)) if placed.address == address && refresh => self.refresh(key),
                // A BAR that couldn't leave its old address: tried again with the next change.
                (Some(_) | None, _) => {}
            }
        }
        if freed {
            self.retry_refused();
        }
    }

    /// What became of the BAR.
    pub(super) fn status(&self, at: FunctionAddress, bar: u8) -> BarStatus {
        let key = (at, bar);
        if let Some(placed) = self.placed.get(&key) {
            BarStatus::Placed(placed.address)
        } else if let Some(refused) = self.refused.get(&key) {
            BarStatus::Refused(refused.wanted.address, refused.reason.clone())
        } else {
            BarStatus::Off
        }
    }

    fn place(&mut self, key: Key, wanted: Placed) {
        match self.try_place(&wanted) {
            Ok(()) => {
                self.placed.insert(key, wanted);
            }
            Err(reason) => {
                if let Some(suppressed) = self.log.admit() {
                    tracing::warn!(
                        suppressed,
                        "BAR {} of {} ({}) doesn't answer at {:#x}: {reason}",
                        key.1,
                        wanted.function.name(),
                        key.0,
                        wanted.address
                    );
                }
                self.refused.insert(key, Refused { wanted, reason });
            }
        }
    }

    fn try_place(&self, wanted: &Placed) -> Result<(), String> {
        if !self.windows.contain(&wanted.layout, wanted.address) {
            return Err("it isn't within a window of the PCI root".to_owned());
        }
        if let Some(((at, bar), _)) = self.placed.iter().find(|(_, placed)| overlap(placed, wanted)) {
            return Err(format!("BAR {bar} of {at} is there"));
        }
        self.placer.place(&wanted.function, wanted.layout, wanted.address).map_err(|error| error.reason)
    }

    /// Whether the address is free now. When the monitor can't take a BAR away, it counts as placed, so that
    /// nothing else is put there.
    fn unplace(&mut self, key: Key) -> bool {
        let Some(placed) = self.placed.get(&key) else { return false };
        match self.placer.unplace(&placed.function, placed.layout, placed.address) {
            Ok(()) => {
                self.placed.remove(&key);
                true
            }
            Err(error) => {
                if let Some(suppressed) = self.log.admit() {
                    tracing::error!(
                        suppressed,
                        error = &error as &dyn std::error::Error,
                        "A BAR stays behind"
                    );
                }
                false
            }
        }
    }

    fn refresh(&mut self, key: Key) {
        let Some(placed) = self.placed.get(&key) else { return };
        let Err(error) = self.placer.refresh(&placed.function, placed.layout, placed.address) else { return };
        if let Some(suppressed) = self.log.admit() {
            tracing::error!(suppressed, error = &error as &dyn std::error::Error, "A BAR must go away");
        }
        let wanted =
            Placed { function: Arc::clone(&placed.function), layout: placed.layout, address: placed.address };
        if self.unplace(key) {
            self.refused.insert(key, Refused { wanted, reason: error.reason });
        }
    }

    fn retry_refused(&mut self) {
        for (key, refused) in std::mem::take(&mut self.refused) {
            match self.try_place(&refused.wanted) {
                Ok(()) => {
                    self.placed.insert(key, refused.wanted);
                }
                Err(reason) => {
                    self.refused.insert(key, Refused { reason, ..refused });
                }
            }
        }
    }
}

fn overlap(a: &Placed, b: &Placed) -> bool {
    let same_space = (a.layout.kind == BarKind::Io) == (b.layout.kind == BarKind::Io);
    // Both lie within windows, so that the ends don't overflow.
    same_space
        && a.address < b.address.saturating_add(b.layout.size)
        && b.address < a.address.saturating_add(a.layout.size)
}
