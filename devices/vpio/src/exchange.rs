//! Exchange of a device for another one of the same kind: a card for its emulation, or the reverse. The guests'
//! contexts stay in the monitor. On-device contents and scratch memory stay with their device.

use std::collections::BTreeSet;

use device_models::physical::PhysicalDevice;

use crate::fast_forward::Scratch;
use crate::monitor::Monitor;

/// A device that isn't in use by a monitor.
pub struct Aside<P> {
    physical: P,
    /// Pages of card memory that may hold guest data.
    dirty: BTreeSet<u32>,
    scratch: Option<Box<dyn Scratch + Send>>,
}

impl<P> Aside<P> {
    /// Wraps a device that no guest has used. A device with hidden ring pointers needs `scratch`
    /// ([`Monitor::set_scratch`]).
    pub fn new(physical: P, scratch: Option<Box<dyn Scratch + Send>>) -> Self {
        Self { physical, dirty: BTreeSet::new(), scratch }
    }

    /// Returns the device for inspection.
    pub fn physical_ref(&self) -> &P {
        &self.physical
    }

    /// The device.
    pub fn physical(&mut self) -> &mut P {
        &mut self.physical
    }
}

impl<P: PhysicalDevice> Monitor<P> {
    /// Replaces the monitor's device by `other`, which has the same description, and returns the previous device. The
    /// next resident guest finds its context restored on the new device.
    ///
    /// # Errors
    /// Returns `other` while a guest is resident. Call [`Monitor::release`] first.
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
