//! The device without its model, for a trusted guest (mode `passthrough`). The mode may change while the guest runs.
//!
//! ```text
//! open    settle ─▶ save ─▶ all of the guest's memory mapped ─▶ restore ─▶ the guest's own interrupt mask
//! close   learn ─▶ settle ─▶ save ─▶ nothing mapped ─▶ restore, windows validated and mapped
//! ```
//!
//! Saving and restoring are those of a hand-off. The difference is the source of the model's knowledge. Under its model
//! a guest's accesses keep the model up to date. A guest without its model leaves its state in the device's registers.
//! [`Monitor::close`] reads these and feeds them to the model as if the guest had written them, checks included. It
//! refuses the change if the model doesn't permit the state. Some devices don't let all registers be read back. For
//! these, the monitor sees every access ([`Monitor::watched`]).
//!
//! Both changes need a moment at which all frames that were handed over have been sent. The model may hold causes that
//! the guest hasn't read. The monitor sets them in the device if that has a register for it (e1000). Otherwise
//! [`Monitor::open`] waits until there are none.

use device_models::Access;
use device_models::describe::{BusMaster, Reg};
use device_models::graph::{Piece, truncated};
use device_models::model::{Model, Reads, Refusal};
use device_models::physical::{DeviceError, PhysicalDevice};

use crate::dma::Unmapped;
use crate::guest::GuestId;
use crate::monitor::{Monitor, MonitorError};
use crate::switch::Switched;

/// The outcome of [`Monitor::open`] or [`Monitor::close`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Passed {
    /// The mode has changed.
    Done,
    /// Not at a quiescent point: retry after the guest's next access or the device's next interrupt. Nothing has
    /// changed.
    Busy,
    /// The model doesn't permit the guest's use of the device. Nothing has changed.
    Refused(Refusal),
    /// The guest's memory can't be mapped. The mode hasn't changed.
    NotMapped(DeviceError),
    /// The guest's policy has stopped its use of the device.
    Stopped,
}

impl<P: PhysicalDevice> Monitor<P> {
    /// Returns whether the resident guest uses the device without its model.
    pub const fn is_open(&self) -> bool {
        self.open
    }

    /// Returns whether all accesses of such a guest must go through [`Self::watched`].
    pub const fn is_watched(&self) -> bool {
        self.device.context.learn.is_empty()
    }

    /// Raises the interrupt line again after it was connected to the guest. The line may have been high before. It
    /// falls and rises, since an interrupt controller that was read in between may need an edge (QEMU's does).
    ///
    /// # Errors
    /// The device is unreachable.
    pub fn connected(&mut self) -> Result<(), MonitorError> {
        match self.resident.filter(|_| self.open) {
            Some(at) => self.run(at, self.device.context.open),
            None => Ok(()),
        }
    }

    fn reaches_memory(&self) -> bool {
        self.device.pci.bus_master == BusMaster::WhileValidated
    }

    /// Gives the resident guest direct use of the device: maps all of its memory and unmasks its own interrupts.
    ///
    /// # Errors
    /// The device is unreachable.
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
        // A card without DMA needs no memory.
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

    /// Puts the device under the guest's model again. The caller blocks the guest's accesses meanwhile.
    ///
    /// # Errors
    /// The device is unreachable or doesn't behave as its description says.
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
        // Even after a failure: under its model a card reaches validated windows only.
        self.mappings.remove_all(&mut self.physical)?;
        taken?;
        Ok(match self.switch(GuestId(at), false)? {
            Switched::Done => Passed::Done,
            Switched::Busy | Switched::Refused => Passed::Stopped,
        })
    }

    /// Executes a BAR access of a guest without its model, and keeps the model up to date. Returns a read's value.
    ///
    /// # Errors
    /// The device is unreachable.
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
                    // The reset port discards the earlier state. A watched device has its windows on the card, so there
                    // is nothing to unmap.
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
            // A watched device has its windows on the card, so there is nothing to unmap.
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

    /// Reads a register and feeds it to the model as if the guest had written it.
    pub(crate) fn learn(&mut self, at: usize, reg: Reg) -> Result<(), MonitorError> {
        let register = self.device.register(reg);
        let Some(offset) = register.offset else { return Ok(()) };
        let value = self.get(at, reg)?;
        self.learn_piece(at, Piece { reg: Some(reg), offset, skip: 0, bytes: register.width }, value)
    }

    /// Does the same for the nonzero words of a table.
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
