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
//!
//! **A status that a read clears** (`Polled::read_clears`; the e1000's ICR). Nobody sees the read, so the page goes on showing causes that the
//! guest has read, for a while. Two things tell that it has, and a cause that is told twice costs an interrupt and nothing else:
//! - The guest clears bits of the mask, as its handler does after the read. Causes of frames (`Polled::causes`) that are not unseen are clear
//!   then: the page had shown them before, and the driver looks at its rings after it, whether or not its read came before the page's change.
//! - The line was raised and the interrupt has ended, twice ([`Monitor::raised`], [`Monitor::lowered`]): the second handler began after the end
//!   of the first, so it has read what was shown before the first. The first end alone may be that of a handler which had read already, of
//!   another device's interrupt on the same line for instance. So a change of the link is never lost, and a handler that leaves the mask as it
//!   is gets each interrupt twice, not for ever.
//!
//! A handler that reads until nothing is left would read for ever: whoever owns the monitor has to take the page away from a guest whose
//! interrupt doesn't end. Then its reads are seen, and clear.

use device_models::Access;
use device_models::describe::{Bar, Effect, Event, Polled, Reg, Register, Store};
use device_models::model::Reads;
use device_models::physical::PhysicalDevice;

use crate::guest::GuestId;
use crate::monitor::{Monitor, MonitorError};
use crate::plan::PAGE;

/// How often a register is looked at that isn't done at once: a PHY takes about 64 µs, a read of a card's register one.
const SETTLES: u32 = 1000;

/// What a guest whose reads aren't seen has in its page.
#[derive(Debug)]
pub(crate) struct Page {
    /// Causes that it may not have read yet.
    unseen: u32,
    /// Any register may have changed, as far as the model knows them.
    stale: bool,
    /// Any register of the device may have.
    changed: bool,
    /// A register that the device isn't done with at once was written.
    settling: bool,
    /// The line was raised, and the interrupt hasn't ended.
    in_service: bool,
    /// Causes that were shown before it was raised, and those of them for which that is the second time.
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

    /// Causes that came after what was told before.
    fn anew(&mut self, causes: u32) {
        self.told &= !causes;
        self.told_again &= !causes;
    }

    /// A register was written; `through`: that reached the device.
    pub fn wrote(&mut self, reg: Option<Reg>, through: bool, polled: &Polled) {
        let others = reg.is_some_and(|reg| !polled.written.contains(&reg));
        self.stale |= others;
        self.changed |= others && through;
        self.settling |= through && polled.settles.iter().any(|(settles, _)| reg == Some(*settles));
    }

    pub fn restored(&mut self) {
        self.changed = true;
    }

    /// The guest's machine was reset: nothing was told, and no interrupt is under way.
    pub fn forget(&mut self) {
        *self = Self::new();
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
            self.guests[id.0].page = Some(Page::new());
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

    /// A table at its place in the page: what the guest has written since its device was reset, and zeros.
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

    /// Waits for registers that the device isn't done with at once. One that takes longer is shown as it is; it is asked of again when the
    /// guest next leaves.
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
        if reg == self.device.interrupts.status && self.device.polled.read_clears.is_some() {
            // To look isn't to read.
            return Ok(Some(self.guests[at].model.graph().value(reg)));
        }
        // A read changes nothing here: the description is checked for that.
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

    /// The guest's line was raised: after its page was shown, with nothing between them that the guest could have done for the device.
    pub fn raised(&mut self, id: GuestId) {
        let guest = &mut self.guests[id.0];
        let status = guest.model.graph().value(self.device.interrupts.status);
        let Some(page) = &mut guest.page else { return };
        // Raised within an interrupt: its end is that of a handler that may have read before.
        if !std::mem::replace(&mut page.in_service, true) {
            page.told_again = page.told & status & !page.unseen;
            page.told = status & !page.unseen;
        }
    }

    /// The interrupt has ended, and the line is low. Late writes were taken since.
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

    /// Whether the line was raised and the interrupt hasn't ended.
    pub fn is_in_service(&self, id: GuestId) -> bool {
        self.guests[id.0].page.as_ref().is_some_and(|page| page.in_service)
    }

    /// Whether the device's status is cleared by a read, and a guest with a page isn't seen reading it.
    pub fn clears_by_reads(&self) -> bool {
        self.device.polled.read_clears.is_some()
    }

    /// Whether any cause waits for the guest, masked or not.
    pub fn has_causes(&self, id: GuestId) -> bool {
        self.guests[id.0].model.graph().value(self.device.interrupts.status) != 0
    }

    /// Causes of a status that a read clears are clear now, as after the guest's read that nobody saw.
    fn was_read(&mut self, at: usize, causes: u32) {
        let guest = &mut self.guests[at];
        let status = guest.model.graph().value(self.device.interrupts.status);
        if self.device.polled.read_clears.is_some() && status & causes != 0 {
            guest.model.was_read(causes);
            guest.recorder.was_read(causes);
        }
    }

    /// A guest that reads a page has written a register.
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
