//! The backend of a NIC: an emulated card with a tap, or a card of the host, with or without its device model.

mod inspect;

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use device_models::describe::Device;
use device_models::physical::DeviceError;
use device_models::{Access, PhysicalDevice, reference};
use machine::interrupt::InterruptController;
use machine::memory::GuestRam;
use pci::function::{BarMapping, Doorbell, LateWrites};
use telemetry::guest_log::GuestLog;
use vpio::exchange::Aside;
use vpio::fast_forward::Scratch;
use vpio::pad::{Inlet, Pad};
use vpio::plan::Zone;
use vpio::vfio::{Ram, Vfio};
use vpio::{FailurePolicy, GuestConfig, Monitor, MonitorError, Passed, Slot, Slots};

use super::backend::{Backend, Emulation};
use super::bus::RamBus;
use super::guarded::{ChangeError, Guarded, PageSupervision};
use super::mapped::{free_pages, mapped};
use super::page::RegisterPage;
use super::traces::Traces;
use super::wire::Wire;
use super::{NicError, OpenedBackend, StopSink};
use crate::description::{Nic, NicMode, NicPermission, NicPolicy};

/// The backend of a NIC.
pub(super) struct Engine {
    mode: Mode,
    /// Description of the NIC.
    pub(super) device: &'static Device,
    counters: Counters,
    log: GuestLog,
    name: String,
    /// The card or its model failed: accesses read ones.
    failed: bool,
}

enum Mode {
    Virtual(Box<Emulation>),
    /// A card of the host. In mode `passthrough` its model is idle, for a later change of the mode.
    Guarded(Box<Guarded<Vfio>>),
}

/// Counters for `causeway inspect`.
#[derive(Debug, Default, Clone, Copy)]
struct Counters {
    accesses: u64,
    nanoseconds: u64,
    interrupts: u64,
    interrupt_nanoseconds: u64,
}

fn nanoseconds(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

fn pieces(ram: &GuestRam) -> Vec<Ram> {
    ram.regions()
        .iter()
        .map(|region| Ram {
            guest_base: region.range.start,
            length: region.range.size,
            host_address: region.host_address,
        })
        .collect()
}

impl Engine {
    pub(super) fn new(
        config: &Nic,
        backend: OpenedBackend,
        ram: &GuestRam,
        stop: StopSink,
    ) -> Result<Self, NicError> {
        let (device, mode) = match (&config.mode, backend) {
            (NicMode::Virtual { model, mac, .. }, OpenedBackend::Wire(wire)) => {
                let none = || NicError::machine("emulation", format!("there is none of {model}"));
                let device = device_models::devices::named(model).ok_or_else(none)?;
                let bus = RamBus::new(ram.memory());
                let card = reference::card(device, mac.octets(), bus, false).ok_or_else(none)?;
                (device, Mode::Virtual(Box::new(Emulation::alone(card, wire))))
            }
            (NicMode::Vpio { policy, allow, .. }, OpenedBackend::Card(mut card, wire)) => {
                card.set_ram(pieces(ram), Box::new(ram.memory()));
                let rules = Rules { policy: *policy, allow, stop };
                (card.description(), Mode::Guarded(Box::new(guarded(&config.name, *card, wire, rules, ram)?)))
            }
            (NicMode::Passthrough { .. }, OpenedBackend::Card(mut card, None)) => {
                card.set_ram(pieces(ram), Box::new(ram.memory()));
                let rules = Rules { policy: NicPolicy::DeviceError, allow: &[], stop };
                let device = card.description();
                let mut guarded = guarded(&config.name, *card, None, rules, ram)?;
                if guarded.monitor.open()? != Passed::Done {
                    return Err(NicError::machine("passthrough", "its card isn't as after a reset"));
                }
                (device, Mode::Guarded(Box::new(guarded)))
            }
            (NicMode::Virtual { .. } | NicMode::Passthrough { .. }, OpenedBackend::Card(..))
            | (_, OpenedBackend::Wire(_)) => {
                return Err(NicError::machine("back end", "it is another mode's"));
            }
        };
        Ok(Self {
            mode,
            device,
            counters: Counters::default(),
            log: GuestLog::new(),
            name: config.name.clone(),
            failed: false,
        })
    }

    /// Sets the file that records what the guest is refused.
    pub(super) fn set_traces(&mut self, traces: Traces) {
        if let Mode::Guarded(guarded) = &mut self.mode {
            guarded.traces = Some(traces);
        }
    }

    /// Descriptors for the NIC's thread: a card's interrupt, frames of a tap. One is active at a time ([`Self::active`]). Empty if KVM
    /// delivers interrupts by itself.
    pub(super) fn sources(&self) -> Result<Vec<OwnedFd>, NicError> {
        let failed = |error| NicError::machine("descriptor", error);
        match &self.mode {
            Mode::Virtual(emulation) => Ok(vec![emulation.wire.queue.try_clone().map_err(failed)?]),
            Mode::Guarded(guarded) => guarded.sources().map_err(failed),
        }
    }

    /// Index of the active descriptor in [`Self::sources`].
    pub(super) fn active(&self) -> usize {
        match &self.mode {
            Mode::Guarded(guarded) => usize::from(guarded.monitor.physical_ref().is_emulation()),
            Mode::Virtual(_) => 0,
        }
    }

    /// Changes the backend while the guest runs: to the card under the model, or to the emulation.
    pub(super) fn change(&mut self, emulation: bool) -> Result<(), ChangeError> {
        let name = self.name.clone();
        match &mut self.mode {
            Mode::Guarded(guarded) => {
                let result = guarded.change(&name, emulation);
                self.note(&result);
                result
            }
            Mode::Virtual(_) if emulation => Ok(()),
            Mode::Virtual(_) => Err(self.no_card()),
        }
    }

    fn no_card(&self) -> ChangeError {
        ChangeError::One { name: self.name.clone(), reason: "it is emulated, and was started without a card" }
    }

    /// Whether the guest has its card without the model.
    pub(super) fn is_open(&self) -> bool {
        matches!(&self.mode, Mode::Guarded(guarded) if guarded.monitor.is_open())
    }

    /// Passes the card through without the model, or puts it under the model again. Returns `false` if that isn't possible now.
    pub(super) fn pass(&mut self, open: bool) -> Result<bool, ChangeError> {
        let name = self.name.clone();
        let Mode::Guarded(guarded) = &mut self.mode else { return Err(self.no_card()) };
        let result = if open { guarded.open(&name) } else { guarded.close(&name) };
        self.note(&result);
        result
    }

    /// Makes every access exit for a while, or ends that. Returns whether this changes the mappings.
    pub(super) fn set_trap_all(&mut self, trap_all: bool) -> bool {
        match &mut self.mode {
            Mode::Guarded(guarded) => std::mem::replace(&mut guarded.trap_all, trap_all) != trap_all,
            Mode::Virtual(_) => false,
        }
    }

    /// A change that failed halfway leaves the NIC unusable.
    fn note<T>(&mut self, result: &Result<T, ChangeError>) {
        self.failed |= matches!(result, Err(ChangeError::Failed { .. } | ChangeError::Interrupt { .. }));
    }

    /// Connects the card's interrupt to the guest's line.
    pub(super) fn connect(&mut self, controller: &dyn InterruptController, gsi: u32) -> Result<(), NicError> {
        match &mut self.mode {
            Mode::Virtual(_) => Ok(()),
            Mode::Guarded(guarded) => {
                let line = controller
                    .level_eventfds(gsi)
                    .map_err(|error| NicError::machine("interrupt line", error))?;
                guarded.line = Some(line);
                guarded.connect(&self.name).map_err(|error| NicError::machine("interrupt line", error))?;
                // KVM may never signal a line that was up before (an e1000 reports its link), so its causes are taken now.
                guarded.readable().map_err(|error| NicError::machine("pending interrupt", error))
            }
        }
    }

    /// An access of the guest to a BAR. Returns the value of a read.
    pub(super) fn access(&mut self, access: Access) -> u32 {
        let begin = Instant::now();
        self.counters.accesses += 1;
        let ones = u32::MAX;
        let value = if self.failed {
            ones
        } else {
            match self.try_access(access) {
                Ok(value) => value,
                Err(error) => {
                    self.fail(&error);
                    ones
                }
            }
        };
        self.counters.nanoseconds += nanoseconds(begin);
        value
    }

    fn try_access(&mut self, access: Access) -> Result<u32, MonitorError> {
        match &mut self.mode {
            Mode::Virtual(card) => {
                let value = direct(card.card.as_mut(), access)?;
                card.take_sent();
                Ok(value)
            }
            Mode::Guarded(guarded) => {
                let value = guarded.access(access)?;
                if guarded.masked {
                    guarded.unmask()?;
                }
                Ok(value)
            }
        }
    }

    /// The active one of [`Self::sources`] is readable.
    pub(super) fn readable(&mut self) {
        if self.failed {
            return;
        }
        let begin = Instant::now();
        self.counters.interrupts += 1;
        match &mut self.mode {
            Mode::Virtual(card) => card.feed(),
            Mode::Guarded(guarded) => {
                if let Err(error) = guarded.readable() {
                    self.fail(&error);
                }
            }
        }
        self.counters.interrupt_nanoseconds += nanoseconds(begin);
    }

    /// See [`Guarded::collect_signaled`].
    pub(super) fn collect_signaled(&mut self) {
        if let Mode::Guarded(guarded) = &mut self.mode {
            guarded.collect_signaled();
        }
    }

    /// The guest has signaled a write, or the thread drains deferred writes.
    pub(super) fn process_signaled(&mut self) {
        if let Mode::Guarded(guarded) = &mut self.mode
            && !self.failed
            && let Err(error) = guarded.process_signaled()
        {
            self.fail(&error);
        }
    }

    /// The guest's line was raised.
    pub(super) fn raised(&mut self) {
        if let Mode::Guarded(guarded) = &mut self.mode {
            guarded.raised();
        }
    }

    /// Supervises the page after each action of the thread. Returns whether mappings changed, and the interval until the next drain.
    pub(super) fn supervise_page(&mut self, idle: bool) -> (bool, Option<Duration>) {
        match &mut self.mode {
            Mode::Guarded(guarded) if !self.failed => {
                let changed = guarded.supervise_page(Instant::now());
                (changed, guarded.next_drain(idle))
            }
            _ => (false, None),
        }
    }

    /// Eventfds of writes that the thread must process at once.
    pub(super) fn prompt(&self) -> Result<Vec<OwnedFd>, NicError> {
        let signaled = self.page().map(RegisterPage::prompt).unwrap_or_default();
        let clones = signaled.iter().map(|(_, fd)| fd.try_clone());
        clones.collect::<Result<_, _>>().map_err(|error| NicError::machine("descriptor", error))
    }

    /// The guest's line was lowered.
    pub(super) fn lowered(&mut self) {
        if let Mode::Guarded(guarded) = &mut self.mode
            && !self.failed
            && let Err(error) = guarded.lowered()
        {
            self.fail(&error);
        }
    }

    fn fail(&mut self, error: &MonitorError) {
        self.failed = true;
        if let Mode::Guarded(guarded) = &self.mode {
            guarded.fail_page();
        }
        tracing::error!(device = %self.name, %error, "A NIC failed; the guest's accesses read ones from now on");
    }

    /// Level of the guest's line, as far as this process drives it.
    pub(super) fn line(&mut self) -> bool {
        if self.failed {
            return false;
        }
        match &mut self.mode {
            Mode::Virtual(card) => card.card.interrupt().unwrap_or(false),
            Mode::Guarded(guarded) => guarded.monitor.line(guarded.guest),
        }
    }

    /// Sets bus mastering as the guest's command register has it.
    pub(super) fn set_bus_master(&mut self, on: bool) {
        let result = match &mut self.mode {
            Mode::Virtual(card) => card.set_guest_bus_master(on).map_err(MonitorError::from),
            Mode::Guarded(guarded) => guarded.set_guest_bus_master(on),
        };
        if let Err(error) = result {
            telemetry::guest_warn!(self.log, device = %self.name, %error, "Bus mastering can't be switched");
        }
    }

    /// Resets to the power-on state.
    pub(super) fn reset(&mut self) -> Result<(), MonitorError> {
        self.failed = false;
        match &mut self.mode {
            Mode::Virtual(card) => {
                card.set_guest_bus_master(false)?;
                Ok(card.card.reset()?)
            }
            Mode::Guarded(guarded) => guarded.reset(),
        }
    }

    /// Saves the card's context and takes the card from the guest, whose vCPUs are suspended.
    pub(super) fn quiesce(&mut self) -> Result<(), MonitorError> {
        if self.failed {
            return Ok(());
        }
        match &mut self.mode {
            Mode::Virtual(_) => Ok(()),
            Mode::Guarded(guarded) => guarded.quiesce(),
        }
    }

    /// Gives the card back to the guest.
    pub(super) fn unquiesce(&mut self) -> Result<(), MonitorError> {
        if self.failed {
            return Ok(());
        }
        match &mut self.mode {
            Mode::Virtual(_) => Ok(()),
            Mode::Guarded(guarded) => guarded.unquiesce(),
        }
    }

    fn page(&self) -> Option<&RegisterPage> {
        if let Mode::Guarded(guarded) = &self.mode { guarded.page.as_ref() } else { None }
    }

    /// Whether the guest reads a shadow register page. No component then sees it acknowledge causes, so KVM lowers the line at each end of
    /// interrupt.
    pub(super) fn has_page(&self) -> bool {
        self.page().is_some()
    }

    /// See [`Guarded::has_unseen`].
    pub(super) fn has_unseen(&self) -> bool {
        if let Mode::Guarded(guarded) = &self.mode { guarded.has_unseen() } else { false }
    }

    /// See [`Guarded::seen`].
    pub(super) fn seen(&mut self) {
        if let Mode::Guarded(guarded) = &mut self.mode {
            guarded.seen();
        }
    }

    /// The shadow register page, if the guest reads it now.
    fn readable_page(&self) -> Option<&RegisterPage> {
        match &self.mode {
            Mode::Guarded(guarded) if !guarded.trap_all && !guarded.monitor.is_open() => {
                guarded.page.as_ref()
            }
            _ => None,
        }
    }

    /// Writes that signal an eventfd instead of exiting.
    pub(super) fn doorbells(&self) -> Vec<Doorbell> {
        self.readable_page().map(RegisterPage::doorbells).unwrap_or_default()
    }

    /// Parts of BARs that the guest accesses without an exit.
    pub(super) fn mappings(&self) -> Vec<BarMapping> {
        match &self.mode {
            Mode::Virtual(_) => Vec::new(),
            Mode::Guarded(guarded) if guarded.trap_all => Vec::new(),
            Mode::Guarded(guarded) if guarded.monitor.is_open() => {
                guarded.whole.iter().map(|mapped| mapped.mapping(false)).collect()
            }
            Mode::Guarded(guarded) => {
                let shown = self.readable_page().filter(|_| !guarded.supervision.withdrawn);
                let mut mappings = shown.map(RegisterPage::mappings).unwrap_or_default();
                if !guarded.monitor.physical_ref().is_emulation() {
                    mappings.extend(guarded.free_pages.iter().map(|page| page.mapping(true)));
                }
                mappings
            }
        }
    }

    /// Whether the NIC's thread must drain deferred writes soon after an access.
    pub(super) fn has_delayed_effects(&self) -> bool {
        self.device.registers.iter().any(|register| register.starts) && !self.is_open()
    }

    /// Ranges of deferred writes, if accesses exit.
    pub(super) fn late_writes(&self) -> Vec<LateWrites> {
        if matches!(&self.mode, Mode::Guarded(guarded) if guarded.trap_all) {
            return Vec::new();
        }
        let mapped = self.mappings();
        let deferred = |Zone { bar, offset, length }| LateWrites { bar, offset, len: length };
        let zones = vpio::plan::late(self.device, self.has_delayed_effects()).into_iter();
        let exits = |zone: &Zone| mapped.iter().all(|mapping| mapping.bar != zone.bar || mapping.read_only);
        zones.filter(exits).map(deferred).collect()
    }
}

/// Rules of a NIC in mode `vpio`.
struct Rules<'a> {
    policy: NicPolicy,
    allow: &'a [NicPermission],
    stop: StopSink,
}

/// A card under its model. With a wire, also its emulation, which is idle.
fn guarded(
    name: &str,
    mut card: Vfio,
    wire: Option<Wire>,
    rules: Rules<'_>,
    ram: &GuestRam,
) -> Result<Guarded<Vfio>, NicError> {
    let device = card.description();
    card.reset()?;
    let address = device_models::physical::station_address(device, &mut card)?;
    let scratch = match device.context.pointers {
        Some(_) => Some(Box::new(card.scratch()?) as Box<dyn Scratch + Send>),
        None => None,
    };
    let aside = match wire {
        None => None,
        Some(wire) => Some(emulated(device, address, wire, ram)?),
    };
    let (whole, free_pages) = (mapped(&card)?, free_pages(device, &card)?);
    let mut monitor = Monitor::new(device, Backend::Card(Box::new(card)));
    if let Some(scratch) = scratch {
        monitor.set_scratch(scratch);
    }
    let policy = match rules.policy {
        NicPolicy::Ignore => FailurePolicy::Ignore,
        NicPolicy::DeviceError => FailurePolicy::DeviceError,
        NicPolicy::MachineCheck => FailurePolicy::MachineCheck,
        NicPolicy::Stop => FailurePolicy::Stop,
    };
    let slots = ram.regions().iter().map(|region| Slot {
        guest_base: region.range.start,
        length: region.range.size,
        device_base: region.range.start,
        writable: true,
    });
    let guest = monitor.add(GuestConfig {
        name: name.to_owned(),
        address,
        permissions: rules.allow.iter().map(|permission| (*permission).into()).collect(),
        policy,
        memory: Box::new(Slots(slots.collect())),
    });
    monitor.switch(guest, false)?;
    let page = RegisterPage::of(name, device)?;
    if page.is_some() {
        monitor.show_from_now(guest);
    }
    let mut guarded = Guarded {
        monitor: Box::new(monitor),
        guest,
        stop: Some(rules.stop),
        traces: None,
        masked: false,
        aside,
        guest_master: false,
        changes: 0,
        page,
        supervision: PageSupervision::default(),
        free_pages,
        whole,
        line: None,
        trap_all: false,
        paused: false,
    };
    guarded.update_page()?;
    Ok(guarded)
}

/// The emulation of a card, with the card's address, for its model. It reaches only validated windows, as behind an IOMMU.
pub(super) fn emulated<C>(
    device: &'static Device,
    address: [u8; 6],
    wire: Wire,
    ram: &GuestRam,
) -> Result<Aside<Backend<C>>, NicError> {
    let pad = Pad::new();
    let bus = Inlet::new(Some(RamBus::new(ram.memory())), pad.clone());
    let none = || NicError::machine("emulation", format!("there is none of {}", device.name));
    let card = reference::card(device, address, bus, true).ok_or_else(none)?;
    let scratch = device.context.pointers.is_some().then(|| Box::new(pad) as Box<dyn Scratch + Send>);
    Ok(Aside::new(Backend::Emulation(Box::new(Emulation::new(card, wire))), scratch))
}

/// An access without a model.
fn direct(card: &mut (impl PhysicalDevice + ?Sized), access: Access) -> Result<u32, DeviceError> {
    match access.write {
        Some(value) => card.write(access.bar, access.offset, access.size, value).map(|()| 0),
        None => card.read(access.bar, access.offset, access.size),
    }
}
