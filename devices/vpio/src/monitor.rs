//! The monitor: guests' accesses come in, device accesses go out, and a model decides between them.

use std::collections::BTreeMap;

use device_models::Access;
use device_models::describe::{BusMaster, Device, Reg, Returns, Store};
use device_models::graph::{Piece, truncated};
use device_models::model::{Granted, Model, Reads, Refusal};
use device_models::physical::{DeviceError, PhysicalDevice};
use thiserror::Error;

use crate::card_memory::CardMemory;
use crate::counters::Counters;
use crate::dma::{Mappings, Vetter};
use crate::guest::{FailurePolicy, GuestConfig, GuestId};
use crate::scratch::Scratch;
use crate::violation::{Recorder, Violation};

/// Limit of reads of the interrupt status until it must stay clear.
const HARVESTS: u32 = 8;
/// Limit of violations that are kept per guest.
const VIOLATIONS: usize = 16;

/// The outcome of an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The access is complete. The value is what a read returned, and 0 for a write.
    Done(u32),
    /// Another guest is resident: retry after the hand-off. No state has changed.
    Wait,
    /// The caller must inject a machine check into the guest.
    MachineCheck,
    /// The policy stopped the guest's use of the device.
    Stopped,
}

/// An error that ends a monitor's use of a device.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum MonitorError {
    /// A register access failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The device doesn't behave as its description says.
    #[error(
        "The device's {register} didn't become {value:X}h (of the bits {mask:X}h) in {times} reads: reset it"
    )]
    Stuck {
        /// The register.
        register: &'static str,
        /// The bits that were checked.
        mask: u32,
        /// The expected value of these bits.
        value: u32,
        /// The number of reads.
        times: u32,
    },
}

pub(crate) struct Guest {
    pub config: GuestConfig,
    pub model: Model,
    pub card: CardMemory,
    /// Table words that the guest wrote since its device was reset, by register and offset.
    pub tables: BTreeMap<(Reg, u32), u32>,
    /// Requests to slow registers (such as a PHY) whose completion the guest hasn't read yet.
    pub asked: BTreeMap<Reg, u32>,
    pub counters: Counters,
    pub recorder: Recorder,
    pub violations: Vec<Violation>,
    pub stopped: bool,
    pub resets: u64,
    /// The guest's shadow register page, if it uses one.
    pub page: Option<crate::shown::Page>,
}

/// A device and its guests.
pub struct Monitor<P> {
    pub(crate) device: &'static Device,
    pub(crate) physical: P,
    pub(crate) guests: Vec<Guest>,
    pub(crate) resident: Option<usize>,
    pub(crate) mappings: Mappings,
    /// Pages of card memory that may hold guest data.
    pub(crate) dirty: std::collections::BTreeSet<u32>,
    /// Interrupt causes stay in the device because reading them now would disturb it.
    pub(crate) harvest_due: bool,
    /// The monitor harvested causes since the resident guest got the device.
    pub(crate) harvested: bool,
    pub(crate) current_at_start: u32,
    pub(crate) scratch: Option<Box<dyn Scratch + Send>>,
    /// The resident guest uses the device without its model.
    pub(crate) open: bool,
    /// The first access of such a guest that its model doesn't permit.
    pub(crate) broken: Option<Box<Refusal>>,
    /// The windows before the current request. A field, so that a request allocates nothing.
    before: Vec<Option<Granted>>,
}

impl<P: PhysicalDevice> Monitor<P> {
    /// Creates a monitor of `physical`, which must match the description `device`. No guest is resident.
    pub fn new(device: &'static Device, physical: P) -> Self {
        Self {
            device,
            physical,
            guests: Vec::new(),
            resident: None,
            mappings: Mappings::default(),
            dirty: std::collections::BTreeSet::new(),
            harvest_due: false,
            harvested: false,
            current_at_start: 0,
            scratch: None,
            open: false,
            broken: None,
            before: Vec::new(),
        }
    }

    /// Adds a guest, which isn't resident yet.
    pub fn add(&mut self, config: GuestConfig) -> GuestId {
        let model = Model::new(self.device, config.address);
        let recorder = Recorder::new(&model);
        self.guests.push(Guest {
            config,
            recorder,
            model,
            card: CardMemory::default(),
            tables: BTreeMap::new(),
            asked: BTreeMap::new(),
            counters: Counters::default(),
            violations: Vec::new(),
            stopped: false,
            resets: 0,
            page: None,
        });
        GuestId(self.guests.len() - 1)
    }

    /// The physical device.
    pub fn physical(&mut self) -> &mut P {
        &mut self.physical
    }

    /// Returns the physical device for inspection.
    pub fn physical_ref(&self) -> &P {
        &self.physical
    }

    /// Returns the resident guest.
    pub fn resident(&self) -> Option<GuestId> {
        self.resident.map(GuestId)
    }

    /// Returns a guest's model.
    pub fn model(&self, guest: GuestId) -> &Model {
        &self.guests[guest.0].model
    }

    /// Returns a guest's counters.
    pub fn counters(&self, guest: GuestId) -> &Counters {
        &self.guests[guest.0].counters
    }

    /// Returns how often a guest reset its device.
    pub fn resets(&self, guest: GuestId) -> u64 {
        self.guests[guest.0].resets
    }

    /// Returns a guest's refused requests, oldest first. Only the first 16 are kept.
    pub fn violations(&self, guest: GuestId) -> &[Violation] {
        &self.guests[guest.0].violations
    }

    /// Returns the bytes of the resident guest's memory that are mapped for the device, and the peak.
    pub fn mapped(&self) -> (u64, u64) {
        (self.mappings.bytes(), self.mappings.peak)
    }

    /// Returns the level of a guest's virtual interrupt line.
    pub fn line(&self, guest: GuestId) -> bool {
        let guest = &self.guests[guest.0];
        !self.open && !guest.stopped && guest.model.line()
    }

    /// Executes a guest's BAR access.
    ///
    /// # Errors
    /// The device is unreachable or doesn't behave as its description says.
    pub fn access(&mut self, id: GuestId, access: Access) -> Result<Answer, MonitorError> {
        let resident = self.resident == Some(id.0);
        let guest = &mut self.guests[id.0];
        if guest.stopped {
            return Ok(Answer::Stopped);
        }
        if !matches!(access.size, 1 | 2 | 4) {
            return Ok(Answer::Done(0));
        }
        if !resident && !guest.model.is_virtual(&access) {
            guest.counters.waits += 1;
            return Ok(Answer::Wait);
        }
        guest.recorder.trim(&guest.model);
        let access = self.without_unseen(id.0, access);
        self.guests[id.0].recorder.access(access);
        let (mut done, mut value) = (0u8, 0u32);
        while done < access.size {
            let offset = access.offset.saturating_add(u32::from(done));
            let model = &self.guests[id.0].model;
            let piece = model.graph().piece(self.device, offset, access.size - done, access.write.is_some());
            self.guests[id.0].counters.requests += 1;
            match access.write {
                Some(write) => {
                    // Skip the rest of an access of which a part was refused.
                    if let Some(refused) =
                        self.write(id.0, access.bar, piece, truncated(write >> (8 * done), piece.bytes))?
                    {
                        return Ok(refused);
                    }
                }
                None => value |= self.read(id.0, access.bar, piece)? << (8 * done),
            }
            done += piece.bytes;
        }
        if resident && self.harvest_due {
            self.harvest()?;
        }
        Ok(Answer::Done(value))
    }

    /// Handles an asserted interrupt line of the device: moves its causes to the resident guest's virtual status.
    ///
    /// # Errors
    /// The device is unreachable.
    pub fn interrupt(&mut self) -> Result<(), MonitorError> {
        if self.resident.is_some() && self.physical.interrupt()? {
            self.harvest()?;
        }
        Ok(())
    }

    /// Returns whether causes stay in the device because reading them now would disturb it. A later access of the guest
    /// harvests them.
    pub fn causes_wait(&self) -> bool {
        self.harvest_due
    }

    fn write(
        &mut self,
        at: usize,
        bar: u8,
        piece: Piece,
        value: u32,
    ) -> Result<Option<Answer>, MonitorError> {
        // Take the buffer out of `self`, so that a request allocates nothing.
        let mut before = std::mem::take(&mut self.before);
        before.clear();
        before.extend_from_slice(self.guests[at].model.windows());
        let result = self.vet(at, |model, vetter| model.write(piece, value, vetter))?;
        let guest = &mut self.guests[at];
        let writes = match result {
            Ok(writes) => writes,
            Err(refusal) => {
                guest.counters.decisions += 1;
                return Ok(Some(self.fail(at, refusal)));
            }
        };
        guest.counters.decisions += u64::from(writes.decided);
        guest.counters.denied += u64::from(writes.denied);
        guest.counters.virtual_requests += u64::from(writes.forward.is_none() && !writes.denied);
        if guest.model.windows() != before {
            self.note_card_windows(at, &before);
        }
        self.before = before;
        let through = writes.forward.is_some() || !writes.before.is_empty();
        for (reg, value) in writes.before {
            self.put(at, reg, value)?;
        }
        if let Some(value) = writes.forward {
            self.guests[at].counters.forwarded += 1;
            self.forward(at, bar, piece, value)?;
        }
        if !writes.released.is_empty() {
            // Release only now: the device may use these windows until it has the write.
            self.vet(at, |model, vetter| model.give_back(&writes.released, vetter))?;
        }
        for reg in writes.looks {
            self.remember(at, reg)?;
        }
        if writes.reset {
            self.guests[at].tables.clear();
            self.guests[at].asked.clear();
            self.guests[at].resets += 1;
            self.bring_in(at)?;
        }
        self.note_written(at, piece.reg, value, through);
        Ok(None)
    }

    fn read(&mut self, at: usize, bar: u8, piece: Piece) -> Result<u32, MonitorError> {
        match self.guests[at].model.read(piece) {
            Reads::Answer(value, reset) => {
                self.guests[at].counters.virtual_requests += 1;
                if reset {
                    self.guests[at].tables.clear();
                    self.guests[at].asked.clear();
                    self.guests[at].resets += 1;
                    self.bring_in(at)?;
                }
                Ok(value)
            }
            Reads::Ask => {
                self.select(at, piece.reg)?;
                let raw = self.physical.read(bar, piece.offset, piece.bytes)?;
                let guest = &mut self.guests[at];
                guest.counters.forwarded += 1;
                guest.counters.device_accesses += 1;
                guest.recorder.returned(raw);
                let shown = guest.model.returned(piece, raw);
                guest.counters.disbelieved += u64::from(shown.disbelief.is_some());
                self.has_seen(at, piece, shown.value);
                Ok(shown.value)
            }
        }
    }

    /// Calls a guest's model together with the grants of that guest.
    pub(crate) fn vet<T>(
        &mut self,
        at: usize,
        ask: impl FnOnce(&mut Model, &mut Vetter<'_, P>) -> T,
    ) -> Result<T, MonitorError> {
        let guest = &mut self.guests[at];
        let mut vetter = Vetter {
            physical: &mut self.physical,
            mappings: &mut self.mappings,
            memory: guest.config.memory.as_ref(),
            permissions: &guest.config.permissions,
            recorder: &mut guest.recorder,
            failure: None,
        };
        let result = ask(&mut guest.model, &mut vetter);
        vetter.failure.map_or(Ok(result), |error| Err(error.into()))
    }

    /// Applies the guest's policy to a refused request.
    pub(crate) fn fail(&mut self, at: usize, refusal: Refusal) -> Answer {
        let guest = &mut self.guests[at];
        guest.counters.refused += 1;
        guest.recorder.refused();
        if guest.violations.len() < VIOLATIONS {
            let violation = guest.recorder.violation(&guest.config.name, &guest.config.permissions, refusal);
            guest.violations.push(violation);
        }
        match (guest.config.policy, self.device.interrupts.error) {
            (FailurePolicy::Ignore, _) => Answer::Done(0),
            (FailurePolicy::DeviceError, Some(bits)) => {
                guest.model.raise(bits);
                guest.recorder.restart(&guest.model);
                Answer::Done(0)
            }
            (FailurePolicy::MachineCheck, _) => Answer::MachineCheck,
            (FailurePolicy::Stop, _) | (FailurePolicy::DeviceError, None) => {
                guest.stopped = true;
                Answer::Stopped
            }
        }
    }

    /// Passes a guest's write to the device.
    fn forward(&mut self, at: usize, bar: u8, piece: Piece, value: u32) -> Result<(), MonitorError> {
        self.select(at, piece.reg)?;
        self.physical.write(bar, piece.offset, piece.bytes, value)?;
        let guest = &mut self.guests[at];
        guest.counters.device_accesses += 1;
        if let Some(reg) = piece.reg {
            if let Some(word) = self.device.register(reg).word_of_table(piece.offset) {
                let kept = guest.tables.entry((reg, word)).or_default();
                let shift = 8 * (piece.offset & 3);
                let mask = truncated(u32::MAX, piece.bytes) << shift;
                *kept = *kept & !mask | value << shift & mask;
            }
            self.wrote(at, reg, piece, value);
            if self.device.polled.settles.iter().any(|(settles, _)| *settles == reg) {
                let guest = &mut self.guests[at];
                guest.asked.insert(reg, guest.model.physical_value(reg));
            }
        }
        Ok(())
    }

    /// Notes a guest's write of a register, or of a part of one, after the device has it.
    pub(crate) fn wrote(&mut self, at: usize, reg: Reg, piece: Piece, value: u32) {
        let model = &mut self.guests[at].model;
        let whole = if piece.is_whole(self.device.register(reg)) { value } else { model.graph().value(reg) };
        model.wrote_device(reg, whole);
    }

    /// Notes a guest's read of a register: a slow register may have completed.
    fn has_seen(&mut self, at: usize, piece: Piece, value: u32) {
        let settles = self.device.polled.settles.iter().find(|(reg, _)| piece.reg == Some(*reg));
        if let Some((reg, done)) = settles
            && piece.is_whole(self.device.register(*reg))
            && value & done != 0
        {
            self.guests[at].asked.remove(reg);
        }
    }

    /// Selects the guest's register bank on the device, if the register is banked and the monitor selected another
    /// bank.
    fn select(&mut self, at: usize, reg: Option<Reg>) -> Result<(), MonitorError> {
        let (Some(reg), Some(_)) = (reg, &self.device.bank) else { return Ok(()) };
        let model = &self.guests[at].model;
        let wanted = model.graph().bank(self.device);
        if self.device.register(reg).banks != 0xFF && model.physical_bank() != wanted {
            self.select_bank(at, wanted)?;
        }
        Ok(())
    }

    fn select_bank(&mut self, at: usize, bank: u8) -> Result<(), MonitorError> {
        let Some(select) = &self.device.bank else { return Ok(()) };
        let now = self.guests[at].model.physical_value(select.register);
        let value = now & select.keep | select.set | u32::from(bank) << select.shift;
        self.put_raw(at, select.register, value)
    }

    fn reach(&mut self, at: usize, reg: Reg) -> Result<(), MonitorError> {
        let banks = self.device.register(reg).banks;
        if self.device.bank.is_some() && banks >> self.guests[at].model.physical_bank() & 1 == 0 {
            self.select_bank(at, u8::try_from(banks.trailing_zeros()).unwrap_or(0))?;
        }
        Ok(())
    }

    fn put_raw(&mut self, at: usize, reg: Reg, value: u32) -> Result<(), MonitorError> {
        let register = self.device.register(reg);
        let Some(offset) = register.offset else { return Ok(()) };
        self.physical.write(self.device.bar(), offset, register.width, value)?;
        let guest = &mut self.guests[at];
        guest.counters.device_accesses += 1;
        guest.model.wrote_device(reg, value);
        Ok(())
    }

    /// Writes a device register in any bank.
    pub(crate) fn put(&mut self, at: usize, reg: Reg, value: u32) -> Result<(), MonitorError> {
        self.reach(at, reg)?;
        self.put_raw(at, reg, value)
    }

    /// Reads a device register in any bank.
    pub(crate) fn get(&mut self, at: usize, reg: Reg) -> Result<u32, MonitorError> {
        self.reach(at, reg)?;
        let register = self.device.register(reg);
        let Some(offset) = register.offset else { return Ok(0) };
        self.guests[at].counters.device_accesses += 1;
        Ok(self.physical.read(self.device.bar(), offset, register.width)?)
    }

    /// Moves the device's causes to the resident guest's virtual status and acknowledges them, unless that would
    /// disturb the device now.
    pub(crate) fn harvest(&mut self) -> Result<(), MonitorError> {
        let Some(at) = self.resident.filter(|_| !self.open) else { return Ok(()) };
        self.harvest_due = false;
        let interrupts = &self.device.interrupts;
        let status = self.device.register(interrupts.status);
        let model = &self.guests[at].model;
        if let Some(bank) = &self.device.bank {
            let away = status.banks >> model.physical_bank() & 1 == 0;
            if away && bank.busy.iter().any(|&state| model.graph().is(state)) {
                self.harvest_due = true;
                return Ok(());
            }
        }
        for _ in 0..HARVESTS {
            let causes = self.get(at, interrupts.status)? & interrupts.physical_mask;
            if causes == 0 {
                break;
            }
            if matches!(status.store, Store::ClearOnes(_)) {
                self.put(at, interrupts.status, causes)?;
            }
            self.harvested = true;
            // Read only the registers that belong to these causes. A cause that the guest hasn't read keeps its values,
            // which a hand-off may have erased in the device.
            for &(reg, _) in interrupts.latched.iter().filter(|(_, with)| causes & with != 0) {
                let value = self.get(at, reg)?;
                self.guests[at].model.latch(reg, value);
            }
            let guest = &mut self.guests[at];
            guest.recorder.cause(causes);
            if let Some(page) = &mut guest.page {
                page.caused(causes, &self.device.polled);
            }
            for reg in guest.model.cause(causes) {
                self.remember(at, reg)?;
            }
        }
        Ok(())
    }

    /// Enables or disables bus mastering, for a device that needs it.
    pub(crate) fn set_bus_master(&mut self, on: bool) -> Result<(), MonitorError> {
        if self.device.pci.bus_master == BusMaster::WhileValidated {
            self.physical.set_bus_master(on)?;
        }
        Ok(())
    }

    /// Returns whether a guest's read of the register goes to the device.
    pub(crate) fn is_readable(&self, reg: Reg) -> bool {
        let register = self.device.register(reg);
        register.read.is_some() && !matches!(register.returns, Returns::Shadow)
    }
}
