//! Registers that a guest reads without anybody seeing it: a page of the monitor's, mapped read-only where a memory BAR has its registers
//! (spec vpio, 3.1: a read costs nanoseconds then, and not an exit).
//!
//! ```text
//! guest's write ─▶ exit ─▶ Monitor::access ───┐
//! late writes ───▶ ring ─▶ Monitor::access ───┼─▶ Monitor::show ─▶ the page ─▶ guest's reads
//! device's line ─────────▶ Monitor::interrupt ┘
//! ```
//! What changes by itself is asked of the device at each [`Monitor::show`], as the description's [`Polled`] says; the rest when something
//! happened that may have changed it.
//!
//! **Acknowledgements.** A guest that isn't seen reading, and whose acknowledgements wait, may have acknowledged a cause *before* the
//! device reported it anew. So a cause that was taken is *unseen* at first: acknowledgements don't clear it. Whoever owns the monitor shows
//! the page, then takes the late writes (these may be older than the page), then calls [`Monitor::seen`]: what is acknowledged from then on
//! was read from the page. One that comes between is lost, and the driver is told once more: it finds nothing to do.

use device_models::Access;
use device_models::describe::{Bar, Event, Polled, Reg, Register, Store};
use device_models::model::Reads;
use device_models::physical::PhysicalDevice;

use crate::guest::GuestId;
use crate::monitor::{Monitor, MonitorError};

/// What a guest whose reads aren't seen has in its page.
#[derive(Debug)]
pub(crate) struct Page {
    /// Causes that it may not have read yet.
    unseen: u32,
    /// Any register may have changed, as far as the model knows them.
    stale: bool,
    /// Any register of the device may have.
    changed: bool,
}

impl Page {
    pub fn caused(&mut self, causes: u32, polled: &Polled) {
        self.unseen |= causes;
        self.changed |= causes & !polled.causes != 0;
    }

    /// A register was written; `through`: that reached the device.
    pub fn wrote(&mut self, reg: Option<Reg>, through: bool, polled: &Polled) {
        let others = reg.is_some_and(|reg| !polled.written.contains(&reg));
        self.stale |= others;
        self.changed |= others && through;
    }

    pub fn restored(&mut self) {
        self.changed = true;
    }
}

/// A register's bytes in the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shown {
    /// First byte, from the beginning of the BAR.
    pub offset: u32,
    /// Bytes: 1, 2 or 4.
    pub bytes: u8,
    /// Their value.
    pub value: u32,
}

impl<P: PhysicalDevice> Monitor<P> {
    /// From here on the guest reads a page: [`Self::show`] tells what is in it.
    ///
    /// Nothing happens where the description says of no register that drivers look at it all the time.
    pub fn show_from_now(&mut self, id: GuestId) {
        if self.device.polled.any() {
            self.guests[id.0].page = Some(Page { unseen: 0, stale: true, changed: true });
        }
    }

    /// Tells what has changed of the guest's page since the last call, at least.
    ///
    /// Nothing while the guest doesn't have the device, or its use of it is stopped.
    ///
    /// # Errors
    /// The device can't be reached.
    pub fn show(&mut self, id: GuestId, put: &mut dyn FnMut(Shown)) -> Result<(), MonitorError> {
        if self.resident != Some(id.0) || self.guests[id.0].stopped {
            return Ok(());
        }
        let device = self.device;
        let Some(page) = &mut self.guests[id.0].page else { return Ok(()) };
        let changed = std::mem::take(&mut page.changed);
        let all = std::mem::take(&mut page.stale) || changed;
        let polled = &device.polled;
        let interrupts = [device.interrupts.status, device.interrupts.mask];
        for (reg, register) in device.numbered().filter(|(_, register)| register.read.is_some()) {
            let known = [polled.written, polled.read, &interrupts[..]].iter().any(|list| list.contains(&reg));
            if !all && !known {
                continue;
            }
            let Some(offset) = register.offset else { continue };
            let ask = changed || polled.read.contains(&reg) && self.moves(id.0, reg);
            if let Some(value) = self.looked_at(id.0, reg, register, ask)? {
                let places = std::iter::once(offset).chain(register.aliases.iter().copied());
                places.for_each(|offset| put(Shown { offset, bytes: register.width, value }));
            }
        }
        Ok(())
    }

    /// Whether the device may have changed a register since it was asked: of one that it hands back, only while it has it.
    fn moves(&self, at: usize, reg: Reg) -> bool {
        let states = self.guests[at].model.graph().states();
        let mut returns =
            self.device.transitions.iter().filter(|one| one.event == Event::Returned(reg)).peekable();
        returns.peek().is_none()
            || returns.any(|one| device_models::describe::Device::holds(one.states, states))
    }

    fn looked_at(
        &mut self,
        at: usize,
        reg: Reg,
        register: &Register,
        ask: bool,
    ) -> Result<Option<u32>, MonitorError> {
        let piece = device_models::Piece {
            reg: Some(reg),
            offset: register.offset.unwrap_or(0),
            skip: 0,
            bytes: register.width,
        };
        // A read changes nothing here: the description is checked for that.
        match self.vet(at, |model, vetter| model.read(piece, vetter))? {
            Reads::Answer(value, _) => Ok(Some(value)),
            Reads::Ask if ask => {
                let guest = &mut self.guests[at];
                guest.recorder.trim(&guest.model);
                Ok(Some(self.ask(at, reg)?))
            }
            Reads::Ask => Ok(None),
        }
    }

    /// Whether causes were taken that the guest may not have read.
    pub fn has_unseen(&self, id: GuestId) -> bool {
        self.guests[id.0].page.as_ref().is_some_and(|page| page.unseen != 0)
    }

    /// The guest's page has been shown, and late writes that may be older have been taken since.
    pub fn seen(&mut self, id: GuestId) {
        if let Some(page) = &mut self.guests[id.0].page {
            page.unseen = 0;
        }
    }

    /// A guest's access, with what it acknowledges without having read it taken out.
    pub(crate) fn without_unseen(&self, at: usize, access: Access) -> Access {
        let (Some(page), Some(value)) = (&self.guests[at].page, access.write) else { return access };
        let register = self.device.register(self.device.interrupts.status);
        let (Some(from), Store::ClearOnes(_)) = (register.offset, register.store) else { return access };
        // The status' first byte in the access, which may begin before or behind it.
        let distance = i64::from(from) - i64::from(access.offset);
        let unseen = u64::from(page.unseen);
        let covered = match u32::try_from(distance.unsigned_abs()) {
            Ok(bytes @ 0..4) if distance >= 0 => unseen << (8 * bytes),
            Ok(bytes @ 0..4) => unseen >> (8 * bytes),
            _ => 0,
        };
        let covered = u32::try_from(covered & 0xFFFF_FFFF).unwrap_or(0);
        Access { write: Some(value & !covered), ..access }
    }
}

/// Numbers of the memory BARs whose first page a guest can read so.
pub fn bars(device: &device_models::describe::Device) -> impl Iterator<Item = u8> {
    let any = device.polled.any();
    (0u8..)
        .zip(device.bars)
        .filter(move |(_, bar)| any && matches!(bar, Bar::Memory(_)))
        .map(|(number, _)| number)
}
