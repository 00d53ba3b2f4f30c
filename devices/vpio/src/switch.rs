//! Hand-off of the device from one guest to another: freeze, save, reset, restore, as the description's context
//! specifies.

use std::collections::BTreeMap;

use device_models::describe::{Cond, Direction, Memory, Pages, Reg, Space, Step};
use device_models::model::{Granted, Model};
use device_models::physical::PhysicalDevice;

use crate::card_memory::CardMemory;
use crate::guest::GuestId;
use crate::monitor::{Monitor, MonitorError};

/// Limit of repeated restores of a device whose state differs from the context.
const MAX_RESTORES: u32 = 3;

/// The outcome of a hand-off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Switched {
    /// The guest is resident.
    Done,
    /// The resident guest isn't at a quiescent point: retry after the device's next interrupt.
    Busy,
    /// A window of the incoming guest can't be granted any more. Its policy was applied, and no guest is resident.
    Refused,
}

impl<P: PhysicalDevice> Monitor<P> {
    /// Hands the device to a guest. `force` revokes it from a guest that isn't at a quiescent point. That guest's
    /// device is reset, and its driver gets the device's error status.
    ///
    /// # Errors
    /// The device is unreachable or doesn't behave as its description says.
    pub fn switch(&mut self, to: GuestId, force: bool) -> Result<Switched, MonitorError> {
        if self.resident == Some(to.0) {
            return Ok(Switched::Done);
        }
        if let Some(from) = self.resident {
            if !self.settle()? && !force {
                return Ok(Switched::Busy);
            }
            self.take_out(from, false)?;
        }
        if self.guests[to.0].stopped {
            return Ok(Switched::Refused);
        }
        self.resident = Some(to.0);
        self.guests[to.0].counters.switches += 1;
        self.bring_in(to.0)?;
        Ok(if self.resident.is_some() { Switched::Done } else { Switched::Refused })
    }

    /// Revokes the device from the resident guest. No guest is resident afterwards.
    ///
    /// # Errors
    /// As [`Self::switch`].
    pub fn release(&mut self) -> Result<(), MonitorError> {
        self.resident.map_or(Ok(()), |from| self.take_out(from, false))
    }

    /// Collects what the device has finished. Returns whether the resident guest is at a quiescent point.
    ///
    /// # Errors
    /// As [`Self::switch`].
    pub fn settle(&mut self) -> Result<bool, MonitorError> {
        let Some(from) = self.resident else { return Ok(true) };
        self.run(from, self.device.context.settle)?;
        Ok(self.guests[from].model.is_reusable())
    }

    /// Resets a guest's device together with its machine. If the guest is resident, the physical device is reset, too.
    ///
    /// # Errors
    /// As [`Self::switch`].
    pub fn power_on(&mut self, id: GuestId) -> Result<(), MonitorError> {
        let resident = self.resident == Some(id.0);
        // The guest's state is reset even if the device fails.
        let stopped = if resident { self.stop(id.0) } else { Ok(()) };
        let guest = &mut self.guests[id.0];
        guest.model = Model::new(self.device, guest.config.address);
        guest.card = CardMemory::default();
        guest.tables.clear();
        guest.asked.clear();
        guest.stopped = false;
        if let Some(page) = &mut guest.page {
            page.forget();
        }
        guest.recorder.restart(&guest.model);
        stopped?;
        if resident { self.bring_in(id.0) } else { Ok(()) }
    }

    /// Resets the device of the resident guest, whose machine is reset, and then releases its windows.
    fn stop(&mut self, at: usize) -> Result<(), MonitorError> {
        // A later guest must find none of this guest's data on the card.
        let card = &self.guests[at].card;
        self.dirty.extend(card.written.iter().chain(&card.rings));
        self.set_bus_master(false)?;
        self.physical.reset()?;
        self.vet(at, |model, vetter| model.forget_all(vetter))
    }

    /// Revokes a device that failed or may have failed, as a forced hand-off does. The guest's driver gets the device's
    /// error status, if there is one. [`Self::recover`] must follow before any guest gets the device.
    pub fn abandon(&mut self) {
        self.harvest_due = false;
        self.open = false;
        self.broken = None;
        if let Some(from) = self.resident.take() {
            self.forget_progress(from);
            let guest = &mut self.guests[from];
            if let Some(page) = &mut guest.page {
                page.forget();
            }
            guest.recorder.restart(&guest.model);
        }
    }

    /// Resets an abandoned device, and unmaps all memory.
    ///
    /// # Errors
    /// The device is unreachable. The caller may retry.
    pub fn recover(&mut self) -> Result<(), MonitorError> {
        // The device may not respond: the reset disables bus mastering as well.
        let quiet = self.set_bus_master(false);
        self.physical.reset()?;
        quiet?;
        Ok(self.mappings.clear(&mut self.physical)?)
    }

    /// Discards a guest's device state, which the device no longer has.
    fn forget_progress(&mut self, at: usize) {
        let guest = &mut self.guests[at];
        guest.model = Model::new(self.device, guest.config.address);
        guest.tables.clear();
        guest.asked.clear();
        // A later guest must find none of this guest's data on the card.
        let card = std::mem::take(&mut guest.card);
        self.dirty.extend(card.written.iter().chain(&card.rings));
        guest.model.raise(self.device.interrupts.error.unwrap_or(0));
    }

    /// Saves the resident guest's context and revokes the device. `learned`: the model was filled from the device's
    /// registers, which don't expose the next transmit descriptor. So the monitor must find it.
    pub(crate) fn take_out(&mut self, from: usize, learned: bool) -> Result<(), MonitorError> {
        self.run(from, self.device.context.freeze)?;
        let reusable = self.guests[from].model.is_reusable();
        if reusable {
            self.run(from, self.device.context.save)?;
            if learned {
                self.find_next(from)?;
            }
        }
        self.set_bus_master(false)?;
        if !reusable {
            self.physical.reset()?;
        }
        // Only now: the engines are idle or reset.
        self.vet(from, |model, vetter| model.forget_all(vetter))?;
        if !reusable {
            self.forget_progress(from);
        }
        self.resident = None;
        Ok(())
    }

    /// Restores a guest's context on the device.
    pub(crate) fn bring_in(&mut self, to: usize) -> Result<(), MonitorError> {
        self.harvest_due = false;
        // The restore begins with a reset. It is repeated if a broadcast frame from the wire moved the ring pointers
        // meanwhile.
        let mut restored = self.run(to, self.device.context.restore);
        for _ in 0..MAX_RESTORES {
            if !matches!(restored, Err(MonitorError::Stuck { .. })) {
                break;
            }
            restored = self.run(to, self.device.context.restore);
        }
        restored?;
        if self.open {
            self.run(to, self.device.context.open)?;
        }
        self.harvested = false;
        self.guests[to].card.rings.clear();
        self.note_card_windows(to, &vec![None; self.device.windows.len()]);
        if let Some(memory) = &self.device.context.memory {
            self.current_at_start = self.guests[to].model.graph().value(memory.current);
        }
        let guest = &mut self.guests[to];
        guest.recorder.restart(&guest.model);
        if let Some(page) = &mut guest.page {
            page.restored();
        }
        self.ask_again(to)
    }

    /// Repeats the guest's pending requests to slow registers: the reset has discarded them.
    fn ask_again(&mut self, at: usize) -> Result<(), MonitorError> {
        if self.resident != Some(at) {
            return Ok(());
        }
        for (reg, value) in self.guests[at].asked.clone() {
            self.put(at, reg, value)?;
        }
        Ok(())
    }

    pub(crate) fn run(&mut self, at: usize, steps: &'static [Step]) -> Result<(), MonitorError> {
        for step in steps {
            if self.resident != Some(at) {
                // A window of this guest can't be granted: the guest doesn't get the device.
                return Ok(());
            }
            match *step {
                Step::Reset => {
                    self.physical.reset()?;
                    self.guests[at].model.device_was_reset();
                }
                Step::Write(reg, ref expr) => {
                    let value = self.guests[at].model.number(expr);
                    self.put(at, reg, u32::try_from(value & 0xFFFF_FFFF).unwrap_or(0))?;
                }
                Step::Table(table) => {
                    let of = self.guests[at].tables.range((table, 0)..=(table, u32::MAX));
                    for ((_, offset), value) in of.map(|(&at, &value)| (at, value)).collect::<Vec<_>>() {
                        self.physical.write(self.device.bar(), offset, 4, value)?;
                        self.guests[at].counters.device_accesses += 1;
                    }
                }
                Step::Read(reg) => self.remember(at, reg)?,
                Step::Learn(reg) => self.learn(at, reg)?,
                Step::LearnTable(table) => self.learn_table(at, table)?,
                Step::Await(reg, mask, value, times) => self.await_bits(at, reg, mask, value, times)?,
                Step::Enter(state) => self.guests[at].model.enter(state),
                Step::FastForward => self.fast_forward(at)?,
                Step::Harvest => self.harvest()?,
                Step::All(steps) => self.run(at, steps)?,
                Step::If(ref condition, steps) => {
                    if holds(condition, &self.guests[at].model) {
                        self.run(at, steps)?;
                    }
                }
                Step::SaveMemory => self.save_memory(at)?,
                Step::RestoreMemory => self.restore_memory(at)?,
                Step::Recheck => {
                    let result = self.vet(at, |model, vetter| model.recheck(vetter))?;
                    if let Err(refusal) = result {
                        self.fail(at, refusal);
                        self.guests[at].stopped = true;
                        self.physical.reset()?;
                        // Release the windows that were granted before this one.
                        self.vet(at, |model, vetter| model.forget_all(vetter))?;
                        self.resident = None;
                    } else {
                        // Before the engines start: a receiver without bus mastering fetches an unreadable descriptor
                        // and skips it.
                        self.set_bus_master(true)?;
                    }
                }
            }
        }
        Ok(())
    }

    pub(crate) fn remember(&mut self, at: usize, reg: Reg) -> Result<(), MonitorError> {
        if self.is_readable(reg) {
            self.ask(at, reg)?;
        }
        Ok(())
    }

    /// Reads a register for the model. Returns the value that the guest gets.
    pub(crate) fn ask(&mut self, at: usize, reg: Reg) -> Result<u32, MonitorError> {
        let raw = self.get(at, reg)?;
        let register = self.device.register(reg);
        let piece = device_models::Piece {
            reg: Some(reg),
            offset: register.offset.unwrap_or(0),
            skip: 0,
            bytes: register.width,
        };
        let guest = &mut self.guests[at];
        guest.recorder.read(piece.offset, piece.bytes, raw);
        let shown = guest.model.returned(piece, raw);
        guest.counters.disbelieved += u64::from(shown.disbelief.is_some());
        Ok(shown.value)
    }

    fn await_bits(
        &mut self,
        at: usize,
        reg: Reg,
        mask: u32,
        value: u32,
        times: u32,
    ) -> Result<(), MonitorError> {
        for _ in 0..times {
            if self.get(at, reg)? & mask == value {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Notes a change of the windows on the card: pages that the guest may write from now on count as dirty.
    pub(crate) fn note_card_windows(&mut self, at: usize, before: &[Option<Granted>]) {
        let Some(memory) = &self.device.context.memory else { return };
        let ring = ring_pages(memory, &self.guests[at].model);
        let guest = &mut self.guests[at];
        for ((window, now), then) in self.device.windows.iter().zip(guest.model.windows()).zip(before) {
            let Some(granted) = now else { continue };
            if now == then
                || !matches!(window.space, Space::Card { .. })
                || window.direction != Direction::DeviceWrites
            {
                continue;
            }
            let Ok(base) = u32::try_from(granted.base) else { continue };
            let Ok(length) = u32::try_from(granted.length) else { continue };
            let pages = base / memory.page..=(base + length - 1) / memory.page;
            if Some((*pages.start(), *pages.end() + 1)) == ring {
                guest.card.rings.extend(pages);
            } else {
                guest.card.written.extend(pages);
            }
        }
    }

    fn save_memory(&mut self, at: usize) -> Result<(), MonitorError> {
        let Some(memory) = &self.device.context.memory else { return Ok(()) };
        if self.physical.keeps_memory() {
            return Ok(());
        }
        let model = &self.guests[at].model;
        let ring = ring_pages(memory, model);
        let moved = model.graph().value(memory.current) != self.current_at_start;
        let in_ring = |page: u32| ring.is_some_and(|(start, stop)| (start..stop).contains(&page));
        let mut live = live_ring(memory, model);
        live.extend(self.guests[at].card.written.iter().copied().filter(|&page| !in_ring(page)));
        // A page inside the ring that the guest itself wrote is dirty, too.
        self.dirty.extend(&self.guests[at].card.written);
        if moved || self.harvested {
            self.dirty.extend(&self.guests[at].card.rings);
        }
        let mut saved = BTreeMap::new();
        for page in live.into_iter().filter(|page| (memory.from..memory.to).contains(&(page * memory.page))) {
            let words = self.transfer(at, memory, page, None)?;
            self.dirty.insert(page);
            saved.insert(page, words);
        }
        self.guests[at].card.saved = saved;
        Ok(())
    }

    fn restore_memory(&mut self, at: usize) -> Result<(), MonitorError> {
        let Some(memory) = &self.device.context.memory else { return Ok(()) };
        if self.physical.keeps_memory() {
            self.dirty.clear();
            return Ok(());
        }
        let saved = std::mem::take(&mut self.guests[at].card.saved);
        let zeroes = vec![0; usize::try_from(memory.page / 4).unwrap_or(0)];
        let dirty: Vec<u32> = std::mem::take(&mut self.dirty).into_iter().collect();
        for page in dirty.into_iter().filter(|page| !saved.contains_key(page)) {
            self.transfer(at, memory, page, Some(&zeroes))?;
        }
        for (page, words) in &saved {
            self.transfer(at, memory, *page, Some(words))?;
        }
        self.dirty.extend(saved.keys());
        Ok(())
    }

    /// Copies one page between the card and the monitor. The device is stopped.
    fn transfer(
        &mut self,
        at: usize,
        memory: &Memory,
        page: u32,
        write: Option<&[u32]>,
    ) -> Result<Vec<u32>, MonitorError> {
        let (command, read_value, write_value, end) = memory.command;
        let base = page * memory.page;
        self.put(at, command, end)?;
        for (reg, byte) in memory.address.into_iter().zip([base & 0xFF, base >> 8]) {
            self.put(at, reg, byte)?;
        }
        for (reg, byte) in memory.count.into_iter().zip([memory.page & 0xFF, memory.page >> 8]) {
            self.put(at, reg, byte)?;
        }
        self.put(at, command, if write.is_some() { write_value } else { read_value })?;
        let mut words = Vec::new();
        match write {
            Some(write) => {
                for word in write {
                    self.put(at, memory.data, *word)?;
                }
            }
            None => {
                for _ in 0..memory.page / 4 {
                    words.push(self.get(at, memory.data)?);
                }
            }
        }
        self.put(at, command, end)?;
        Ok(words)
    }
}

fn holds(condition: &Cond, model: &Model) -> bool {
    condition.holds(model.graph())
}

/// Returns the first page of the ring and the page after its last one.
fn ring_pages(memory: &Memory, model: &Model) -> Option<(u32, u32)> {
    memory.live.iter().find_map(|pages| match pages {
        Pages::Ring { start, stop, .. } => {
            let number = |expr| u32::try_from(model.graph().number(expr)).ok();
            Some((number(start)?, number(stop)?)).filter(|(start, stop)| start < stop)
        }
        Pages::Written => None,
    })
}

/// Returns the pages of the ring that hold frames which the driver hasn't read.
fn live_ring(memory: &Memory, model: &Model) -> Vec<u32> {
    let Some((start, stop)) = ring_pages(memory, model) else { return Vec::new() };
    let mut found = Vec::new();
    for pages in memory.live {
        let Pages::Ring { from, to, .. } = pages else { continue };
        let number = |expr| u32::try_from(model.graph().number(expr)).unwrap_or(0);
        let (mut page, to) = (number(from), number(to));
        if page == stop {
            page = start;
        }
        while page != to
            && (start..stop).contains(&page)
            && found.len() < usize::try_from(stop - start).unwrap_or(0)
        {
            found.push(page);
            page = if page + 1 == stop { start } else { page + 1 };
        }
    }
    found
}
