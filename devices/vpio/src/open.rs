//! The device without its model, for a guest that is trusted with it (mode `passthrough`), begun and ended while the guest runs.
//!
//! ```text
//! open    settle ─▶ save ─▶ all of the guest's memory mapped ─▶ restore ─▶ the guest's own interrupt mask
//! close   learn ─▶ settle ─▶ save ─▶ nothing mapped ─▶ restore, windows validated and mapped
//! ```
//!
//! Saving and restoring are those of a hand-off. What differs is where the model's knowledge comes from: a guest that had the device so far has
//! told the model everything; one that drove it by itself has left it in the device's registers. These are read, and taken as if the guest had written
//! them, checks included: a guest that does what its model doesn't allow stays without it. A device of which no access comes past the monitor
//! is watched instead, since not every such device lets its registers be read back.
//!
//! Both need a moment in which nothing is handed over that isn't sent. Causes that the guest hasn't been told of are in the model: they are set in the device where it
//! has a register for that (e1000); with others [`Monitor::open`] waits until there are none.

use device_models::Access;
use device_models::describe::{BusMaster, Reg};
use device_models::graph::{Piece, truncated};
use device_models::model::{Model, Reads, Refusal};
use device_models::physical::{DeviceError, PhysicalDevice};

use crate::dma::Unmapped;
use crate::guest::GuestId;
use crate::monitor::{Monitor, MonitorError};
use crate::switch::Switched;

/// How the device was given to a guest without its model, or taken under it again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Passed {
    /// As it was asked for.
    Done,
    /// Not now: try again after the guest's next access, or the device's next interrupt. Nothing has changed.
    Busy,
    /// What the guest does with the device is not allowed by its model. Nothing has changed.
    Refused(Refusal),
    /// The guest's memory can't be mapped. It has the device as before.
    NotMapped(DeviceError),
    /// The guest has no device: its policy has stopped it.
    Stopped,
}

impl<P: PhysicalDevice> Monitor<P> {
    /// Whether the guest that has the device drives it without its model.
    pub const fn is_open(&self) -> bool {
        self.open
    }

    /// Whether all that such a guest does has to come by [`Self::watched`].
    pub const fn is_watched(&self) -> bool {
        self.device.context.learn.is_empty()
    }

    /// The device's line goes to the guest now, which may have been up before: it falls and rises, since an interrupt controller that was asked in between may
    /// wait for that (QEMU's does).
    ///
    /// # Errors
    /// The device can't be reached.
    pub fn connected(&mut self) -> Result<(), MonitorError> {
        match self.resident.filter(|_| self.open) {
            Some(at) => self.run(at, self.device.context.open),
            None => Ok(()),
        }
    }

    fn reaches_memory(&self) -> bool {
        self.device.pci.bus_master == BusMaster::WhileValidated
    }

    /// Gives the guest that has the device all of it: its memory is mapped, its interrupts are its own.
    ///
    /// # Errors
    /// The device can't be reached.
    pub fn open(&mut self) -> Result<Passed, MonitorError> {
        let Some(at) = self.resident else { return Ok(Passed::Stopped) };
        if self.open {
            return Ok(Passed::Done);
        }
        if self.guests[at].stopped {
            return Ok(Passed::Stopped);
        }
        let reusable = self.settle()?;
        let interrupts = &self.device.interrupts;
        let untold = self.guests[at].model.graph().value(interrupts.status) & interrupts.line;
        if !reusable || self.harvest_due || untold != 0 && interrupts.set.is_none() {
            return Ok(Passed::Busy);
        }
        self.take_out(at, false)?;
        // A card that does no DMA needs none of it.
        let memory = if self.reaches_memory() { self.guests[at].config.memory.all() } else { Vec::new() };
        let mapped = match self.mappings.add_all(&mut self.physical, &memory) {
            Ok(()) => Ok(()),
            Err(Unmapped::Refused(error)) => Err(error),
            Err(Unmapped::Failed(error)) => return Err(error.into()),
        };
        self.open = mapped.is_ok();
        self.resident = Some(at);
        self.broken = None;
        self.bring_in(at)?;
        if let Err(error) = mapped {
            return Ok(Passed::NotMapped(error));
        }
        if self.resident.is_none() {
            self.open = false;
            self.mappings.remove_all(&mut self.physical)?;
            return Ok(Passed::Stopped);
        }
        if let Some(set) = interrupts.set.filter(|_| untold != 0) {
            self.put(at, set, untold)?;
        }
        Ok(Passed::Done)
    }

    /// Takes the device under its model again. The guest's accesses have to wait meanwhile.
    ///
    /// # Errors
    /// The device can't be reached, or doesn't do what the description says.
    pub fn close(&mut self) -> Result<Passed, MonitorError> {
        let Some(at) = self.resident.filter(|_| self.open) else { return Ok(Passed::Done) };
        if !self.is_watched() {
            self.vet(at, |model, vetter| model.forget_all(vetter))?;
            let guest = &mut self.guests[at];
            guest.model = Model::new(self.device, guest.config.address);
            guest.tables.clear();
            guest.asked.clear();
            self.broken = None;
            self.run(at, self.device.context.learn)?;
        }
        if let Some(refusal) = self.broken.clone() {
            return Ok(Passed::Refused(*refusal));
        }
        if !self.settle()? {
            return Ok(Passed::Busy);
        }
        self.open = false;
        let taken = self.take_out(at, true);
        // Whatever came of that: under its model a card reaches windows only.
        self.mappings.remove_all(&mut self.physical)?;
        taken?;
        Ok(match self.switch(GuestId(at), false)? {
            Switched::Done => Passed::Done,
            Switched::Busy | Switched::Refused => Passed::Stopped,
        })
    }

    /// A guest that drives the device without its model accesses a BAR: the device does it, and the model is kept up to date. A read's value.
    ///
    /// # Errors
    /// The device can't be reached.
    pub fn watched(&mut self, id: GuestId, access: Access) -> Result<u32, MonitorError> {
        if !matches!(access.size, 1 | 2 | 4) {
            return Ok(0);
        }
        let mut asked = Vec::new();
        let mut done = 0u8;
        while done < access.size && self.is_watched() {
            let offset = access.offset.saturating_add(u32::from(done));
            let model = &self.guests[id.0].model;
            let piece = model.graph().piece(self.device, offset, access.size - done, access.write.is_some());
            match access.write {
                Some(value) => self.watch_write(id.0, piece, truncated(value >> (8 * done), piece.bytes))?,
                None => match self.guests[id.0].model.read(piece) {
                    Reads::Ask => asked.push((piece, done)),
                    // The reset port: what was done before is over. What is watched has its windows on the card.
                    Reads::Answer(_, true) => {
                        self.broken = None;
                        self.vet(id.0, |model, vetter| model.forget_all(vetter))?;
                    }
                    Reads::Answer(_, false) => {}
                },
            }
            done += piece.bytes;
        }
        self.guests[id.0].counters.device_accesses += 1;
        match access.write {
            Some(value) => {
                self.physical.write(access.bar, access.offset, access.size, value)?;
                Ok(0)
            }
            None => {
                let raw = self.physical.read(access.bar, access.offset, access.size)?;
                for (piece, skip) in asked {
                    self.guests[id.0].model.returned(piece, truncated(raw >> (8 * skip), piece.bytes));
                }
                Ok(raw)
            }
        }
    }

    fn watch_write(&mut self, at: usize, piece: Piece, value: u32) -> Result<(), MonitorError> {
        let before = self.guests[at].model.windows().to_vec();
        let written = self.vet(at, |model, vetter| {
            let written = model.write(piece, value, vetter);
            // What is watched has its windows on the card: there is nothing to unmap.
            match &written {
                Ok(writes) if writes.reset => model.forget_all(vetter),
                Ok(writes) => model.give_back(&writes.released, vetter),
                Err(_) => {}
            }
            written
        })?;
        match written {
            Ok(writes) if writes.reset => self.broken = None,
            Ok(_) => {}
            Err(refusal) => self.broken = Some(Box::new(refusal)),
        }
        self.note_card_windows(at, &before);
        if let Some(reg) = piece.reg {
            self.wrote(at, reg, piece, value);
        }
        Ok(())
    }

    /// Reads a register; the model takes it as if the guest had written it.
    pub(crate) fn learn(&mut self, at: usize, reg: Reg) -> Result<(), MonitorError> {
        let register = self.device.register(reg);
        let Some(offset) = register.offset else { return Ok(()) };
        let value = self.get(at, reg)?;
        self.learn_piece(at, Piece { reg: Some(reg), offset, skip: 0, bytes: register.width }, value)
    }

    /// The same for the words of a table that aren't zero.
    pub(crate) fn learn_table(&mut self, at: usize, table: Reg) -> Result<(), MonitorError> {
        let register = self.device.register(table);
        let Some(base) = register.offset else { return Ok(()) };
        for offset in (base..base.saturating_add(register.span)).step_by(4) {
            self.guests[at].counters.device_accesses += 1;
            let value = self.physical.read(self.device.bar(), offset, 4)?;
            if value != 0 {
                self.guests[at].tables.insert((table, offset), value);
                self.learn_piece(at, Piece { reg: Some(table), offset, skip: 0, bytes: 4 }, value)?;
            }
        }
        Ok(())
    }

    fn learn_piece(&mut self, at: usize, piece: Piece, value: u32) -> Result<(), MonitorError> {
        if self.broken.is_some() {
            return Ok(());
        }
        let learned = self.vet(at, |model, vetter| {
            // The device has the value already.
            model.write(piece, value, vetter).map(|writes| model.give_back(&writes.released, vetter))
        })?;
        if let Err(refusal) = learned {
            self.broken = Some(Box::new(refusal));
        }
        Ok(())
    }
}
