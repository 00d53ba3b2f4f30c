//! Places BARs: keeps the monitor's placements consistent with the configuration spaces.
//!
//! The guest can set a BAR to any address, also on top of another one. Linux does so for a moment during sizing or when
//! it swaps addresses. A BAR is placed only inside the windows of the bus and where no other BAR is. Otherwise it is
//! refused and responds nowhere. It is retried when another BAR is removed.

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

/// State of a BAR, for `inspect`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum BarStatus {
    /// Its decoding is off.
    Off,
    /// It responds at this address.
    Placed(u64),
    /// It should respond at this address, but doesn't, for this reason.
    Refused(u64, String),
}

impl Placement {
    pub(super) fn new(windows: Windows, placer: Arc<dyn BarPlacer>) -> Self {
        Self { windows, placer, placed: BTreeMap::new(), refused: BTreeMap::new(), log: LogLimit::new() }
    }

    /// Places the BARs of one function at the addresses in its configuration space. With `refresh`, unchanged BARs are
    /// attached again, because their doorbells or mappings changed.
    pub(super) fn settle(&mut self, at: FunctionAddress, function: &Arc<dyn PciFunction>, refresh: bool) {
        let places = function.places();
        let mut freed = false;
        // Remove all before placing any, so that BARs of one function can swap.
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
                // A BAR that couldn't be removed from its old address: retry at the next change.
                (Some(_) | None, _) => {}
            }
        }
        if freed {
            self.retry_refused();
        }
    }

    /// Returns the BAR's state.
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

    /// Removes a BAR. Returns whether its address is free. A BAR that the monitor can't remove stays placed, so that
    /// nothing else gets its address.
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
    // Both are within windows, so their ends don't overflow.
    same_space
        && a.address < b.address.saturating_add(b.layout.size)
        && b.address < a.address.saturating_add(a.layout.size)
}
