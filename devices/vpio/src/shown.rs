//! Shadow register pages: registers that a guest reads without an exit. The page belongs to the monitor, and is mapped
//! read-only where a memory BAR has its registers. A read then costs nanoseconds (`docs/design/vpio.md`).
//!
//! ```text
//! guest's write ───▶ exit ─▶ Monitor::access ───┐
//! deferred writes ─▶ ring ─▶ Monitor::access ───┼─▶ Monitor::show ─▶ the page ─▶ guest's reads
//! device's line ───────────▶ Monitor::interrupt ┘
//! ```
//! [`Monitor::show`] reads the registers that change by themselves from the device, as the description's [`Polled`]
//! says. It updates the others after an event that may have changed them.
//!
//! **Acknowledgements.** The monitor doesn't see the guest's reads, and the guest's acknowledgements are deferred. So
//! the guest may have acknowledged a cause *before* the device reported it again. A harvested cause is therefore
//! *unseen* at first: acknowledgements don't clear it. The monitor's owner shows the page, drains the deferred writes
//! (these may be older than the page), and calls [`Monitor::seen`]. A later acknowledgement follows a read of the page.
//! An earlier one is ignored, and the driver gets the interrupt once more and finds nothing to do.
//!
//! **A status that a read clears** (`Polled::read_clears`; the e1000's ICR). The monitor doesn't see the read. For a
//! while the page shows causes that the guest has read. A repeated cause costs one interrupt and nothing else. Two
//! events prove the read:
//! - The guest clears bits of the mask, as its handler does after the read. Then the causes of frames
//!   (`Polled::causes`) that aren't unseen are cleared. The page had shown them before the write. The driver polls its
//!   rings after it, even if its read preceded the page's change.
//! - The monitor raised the line and the interrupt ended, twice ([`Monitor::raised`], [`Monitor::lowered`]). The second
//!   handler began after the first interrupt's end, so it has read what the page showed before the first. The first end
//!   proves nothing: its handler may have read before, for another device on the same line. So no link change is lost.
//!   A handler that leaves the mask alone gets each interrupt twice.
//!
//! A handler that reads until no cause is left would loop forever. If a guest's interrupt doesn't end, the monitor's
//! owner must remove the page. The guest's reads then exit, and clear the status.

use device_models::Access;
use device_models::describe::{Bar, Effect, Event, Polled, Reg, Register, Store};
use device_models::model::Reads;
use device_models::physical::PhysicalDevice;

use crate::guest::GuestId;
use crate::monitor::{Monitor, MonitorError};
use crate::plan::PAGE;

/// Limit of reads of a slow register until it must be done. A PHY takes about 64 µs, and a read of a card's register 1
/// µs.
const SETTLES: u32 = 1000;

/// State of a guest's shadow register page.
#[derive(Debug)]
pub(crate) struct Page {
    /// Causes that the guest may not have read yet.
    unseen: u32,
    /// Any register may have changed in the model.
    stale: bool,
    /// Any register may have changed in the device.
    changed: bool,
    /// The guest wrote a slow register whose operation may not be done.
    settling: bool,
    /// The line was raised, and the interrupt hasn't ended.
    in_service: bool,
    /// Causes that the page showed when the line was raised; and those of them that it showed at the previous
    /// interrupt, too.
    told: u32,
    told_again: u32,
}

impl Page {
    fn new() -> Self {
        Self {
            unseen: 0,
            stale: true,
            changed: true,
            settling: false,
            in_service: false,
            told: 0,
            told_again: 0,
        }
    }

    pub fn caused(&mut self, causes: u32, polled: &Polled) {
        self.unseen |= causes;
        self.changed |= causes & !polled.causes != 0;
        self.anew(causes);
    }

    /// Notes new events of causes that were shown before.
    fn anew(&mut self, causes: u32) {
        self.told &= !causes;
        self.told_again &= !causes;
    }

    /// Notes a write of a register. `through`: the write reached the device.
    pub fn wrote(&mut self, reg: Option<Reg>, through: bool, polled: &Polled) {
        let others = reg.is_some_and(|reg| !polled.written.contains(&reg));
        self.stale |= others;
        self.changed |= others && through;
        self.settling |= through && polled.settles.iter().any(|(settles, _)| reg == Some(*settles));
    }

    pub fn restored(&mut self) {
        self.changed = true;
    }

    /// Resets the state together with the guest's machine: no cause was shown, and no interrupt is in service.
    pub fn forget(&mut self) {
        *self = Self::new();
    }
}

/// A register's bytes in the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shown {
    /// Offset of the first byte in the BAR.
    pub offset: u32,
    /// Length in bytes: 1, 2 or 4.
    pub bytes: u8,
    /// The value.
    pub value: u32,
}

impl<P: PhysicalDevice> Monitor<P> {
    /// Starts a shadow page for a guest. [`Self::show`] returns its contents.
    ///
    /// Does nothing if the description lists no registers that drivers poll.
    pub fn show_from_now(&mut self, id: GuestId) {
        if self.device.polled.any() {
            self.guests[id.0].page = Some(Page::new());
        }
    }

    /// Passes at least all changes of the guest's page since the last call to `put`.
    ///
    /// Does nothing while the guest isn't resident or its use of the device is stopped.
    ///
    /// # Errors
    /// The device is unreachable.
    pub fn show(&mut self, id: GuestId, put: &mut dyn FnMut(Shown)) -> Result<(), MonitorError> {
        if self.resident != Some(id.0) || self.guests[id.0].stopped {
            return Ok(());
        }
        let device = self.device;
        let Some(page) = &mut self.guests[id.0].page else { return Ok(()) };
        let changed = std::mem::take(&mut page.changed);
        let all = std::mem::take(&mut page.stale) || changed;
        if std::mem::take(&mut page.settling) {
            self.settle_registers(id.0)?;
        }
        let polled = &device.polled;
        let interrupts = [device.interrupts.status, device.interrupts.mask];
        for (reg, register) in device.numbered().filter(|(_, register)| register.read.is_some()) {
            let known = [polled.written, polled.read, &interrupts[..]].iter().any(|list| list.contains(&reg));
            if !all && !known {
                continue;
            }
            let places = || register.offset.into_iter().chain(register.aliases.iter().copied());
            let places = || places().filter(|place| *place < PAGE);
            if places().next().is_none() {
                continue;
            }
            if register.table {
                places().for_each(|place| self.show_table(id.0, (reg, register), place, put));
                continue;
            }
            let ask = changed || polled.read.contains(&reg) && self.moves(id.0, reg);
            if let Some(value) = self.looked_at(id.0, reg, register, ask)? {
                places().for_each(|offset| put(Shown { offset, bytes: register.width, value }));
            }
        }
        Ok(())
    }

    /// Passes a table's bytes: what the guest has written since its device was reset, and zeros.
    fn show_table(
        &self,
        at: usize,
        (reg, register): (Reg, &Register),
        place: u32,
        put: &mut dyn FnMut(Shown),
    ) {
        let Some(own) = register.offset else { return };
        for word in (0..register.span).step_by(4) {
            let value = self.guests[at].tables.get(&(reg, own + word)).copied().unwrap_or(0);
            put(Shown { offset: place + word, bytes: 4, value });
        }
    }

    /// Waits until slow registers are done. The page shows one that takes longer as it is. The next exit of the guest
    /// reads it again.
    fn settle_registers(&mut self, at: usize) -> Result<(), MonitorError> {
        for &(reg, done) in self.device.polled.settles {
            let mut looks = 0..SETTLES;
            while self.get(at, reg)? & done == 0 {
                if looks.next().is_none() {
                    if let Some(page) = &mut self.guests[at].page {
                        page.settling = true;
                        page.changed = true;
                    }
                    break;
                }
            }
        }
        Ok(())
    }

    /// Returns whether the device may have changed a register since the last read. Registers of descriptors change only
    /// while the device owns the descriptor.
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
        if reg == self.device.interrupts.status && self.device.polled.read_clears.is_some() {
            // An inspection, without the read's effects.
            return Ok(Some(self.guests[at].model.graph().value(reg)));
        }
        // A read has no effect here: a check of the description ensures it.
        match self.guests[at].model.read(piece) {
            Reads::Answer(value, _) => Ok(Some(value)),
            Reads::Ask if ask => {
                let guest = &mut self.guests[at];
                guest.recorder.trim(&guest.model);
                Ok(Some(self.ask(at, reg)?))
            }
            Reads::Ask => Ok(None),
        }
    }

    /// Returns whether causes were harvested that the guest may not have read.
    pub fn has_unseen(&self, id: GuestId) -> bool {
        self.guests[id.0].page.as_ref().is_some_and(|page| page.unseen != 0)
    }

    /// Notes that the page was shown, and that deferred writes that may be older were drained since.
    pub fn seen(&mut self, id: GuestId) {
        if let Some(page) = &mut self.guests[id.0].page {
            page.unseen = 0;
        }
    }

    /// Notes that the guest's line was raised. The caller showed the page before, and the guest made no access to the
    /// device in between.
    pub fn raised(&mut self, id: GuestId) {
        let guest = &mut self.guests[id.0];
        let status = guest.model.graph().value(self.device.interrupts.status);
        let Some(page) = &mut guest.page else { return };
        // Not for a line that was raised within an interrupt: its handler may have read before.
        if !std::mem::replace(&mut page.in_service, true) {
            page.told_again = page.told & status & !page.unseen;
            page.told = status & !page.unseen;
        }
    }

    /// Notes that the interrupt has ended and the line is low. The caller drained the deferred writes since.
    pub fn lowered(&mut self, id: GuestId) {
        let guest = &mut self.guests[id.0];
        guest.recorder.trim(&guest.model);
        let Some(page) = &mut guest.page else { return };
        if std::mem::take(&mut page.in_service) {
            let read = std::mem::take(&mut page.told_again);
            page.told &= !read;
            self.was_read(id.0, read);
        }
    }

    /// Returns whether the line was raised and the interrupt hasn't ended.
    pub fn is_in_service(&self, id: GuestId) -> bool {
        self.guests[id.0].page.as_ref().is_some_and(|page| page.in_service)
    }

    /// Returns whether a read clears the device's status. The monitor doesn't see such a read of a guest with a page.
    pub fn clears_by_reads(&self) -> bool {
        self.device.polled.read_clears.is_some()
    }

    /// Returns whether any cause is pending for the guest, masked or not.
    pub fn has_causes(&self, id: GuestId) -> bool {
        self.guests[id.0].model.graph().value(self.device.interrupts.status) != 0
    }

    /// Clears causes of a status that a read clears, since the guest has read them from the page.
    fn was_read(&mut self, at: usize, causes: u32) {
        let guest = &mut self.guests[at];
        let status = guest.model.graph().value(self.device.interrupts.status);
        if self.device.polled.read_clears.is_some() && status & causes != 0 {
            guest.model.was_read(causes);
            guest.recorder.was_read(causes);
        }
    }

    /// Notes a register write of a guest with a page.
    pub(crate) fn note_written(&mut self, at: usize, reg: Option<Reg>, value: u32, through: bool) {
        let device = self.device;
        let (Some(page), polled) = (&mut self.guests[at].page, &device.polled) else { return };
        page.wrote(reg, through, polled);
        let Some(reg) = reg else { return };
        let sets =
            |effect: &Effect| matches!(effect, Effect::Store(to, _) if *to == device.interrupts.status);
        let mut ours = device.transitions.iter().filter(|one| one.event == Event::Write(reg));
        if ours.any(|transition| transition.effects.iter().any(sets)) {
            page.anew(value);
        }
        if polled.read_clears == Some(reg) {
            let read = value & polled.causes & !page.unseen;
            page.anew(read);
            self.was_read(at, read);
        }
    }

    /// Removes acknowledgements of causes that the guest can't have read from an access.
    pub(crate) fn without_unseen(&self, at: usize, access: Access) -> Access {
        let (Some(page), Some(value)) = (&self.guests[at].page, access.write) else { return access };
        let register = self.device.register(self.device.interrupts.status);
        let (Some(from), Store::ClearOnes(_)) = (register.offset, register.store) else { return access };
        // Offset of the status' first byte in the access, which may begin before or behind it.
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

/// Returns the memory BARs whose first page can be a shadow page.
pub fn bars(device: &device_models::describe::Device) -> impl Iterator<Item = u8> {
    let any = device.polled.any();
    (0u8..)
        .zip(device.bars)
        .filter(move |(_, bar)| any && matches!(bar, Bar::Memory(_)))
        .map(|(number, _)| number)
}
