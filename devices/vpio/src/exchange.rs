//! Another device of the same kind in the place of one: a card for its emulation, an emulation for a card. Guests' contexts stay with the
//! monitor; what lies on the device itself, and the memory that it may use, stays with the device.

use std::collections::BTreeSet;

use device_models::physical::PhysicalDevice;

use crate::fast_forward::Scratch;
use crate::monitor::Monitor;

/// A device that waits beside a monitor's own.
pub struct Aside<P> {
    physical: P,
    /// Pages of card memory in which something of a guest may lie.
    dirty: BTreeSet<u32>,
    scratch: Option<Box<dyn Scratch + Send>>,
}

impl<P> Aside<P> {
    /// A device that no guest has had, with memory for frames to itself where it needs that ([`Monitor::set_scratch`]).
    pub fn new(physical: P, scratch: Option<Box<dyn Scratch + Send>>) -> Self {
        Self { physical, dirty: BTreeSet::new(), scratch }
    }

    /// The device, to look at.
    pub fn physical_ref(&self) -> &P {
        &self.physical
    }

    /// The device.
    pub fn physical(&mut self) -> &mut P {
        &mut self.physical
    }
}

impl<P: PhysicalDevice> Monitor<P> {
    /// Takes another device of the same description, and gives its own back. The guest that is given the device next finds its context
    /// there.
    ///
    /// # Errors
    /// The device that came, while a guest has this monitor's own: [`Monitor::release`] takes it.
    pub fn exchange(&mut self, other: Aside<P>) -> Result<Aside<P>, Aside<P>> {
        if self.resident.is_some() {
            return Err(other);
        }
        Ok(Aside {
            physical: std::mem::replace(&mut self.physical, other.physical),
            dirty: std::mem::replace(&mut self.dirty, other.dirty),
            scratch: std::mem::replace(&mut self.scratch, other.scratch),
        })
    }
}
