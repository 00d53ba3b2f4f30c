//! The PVRDMA function.
//!
//! ```text
//!            DSR_HIGH (valid region)          CONTROL ACTIVATE
//!  Silent ──────────────────────▶ Described ─────────────────▶ Active
//!    ▲  ▲                          │    ▲                         │
//!    │  └── CONTROL RESET ─────────┴────┼─────────────────────────┤
//!    │                                  └── DSR_HIGH (a new life) ┤
//!    │                                                            │
//!    └── reset(), remove          Failed ◀── announce_fatal ──────┘   until the next DSR_HIGH
//! ```

mod attributes;
mod commands;
mod config;
mod create;
pub mod doorbells;
mod error;
mod events;
mod report;
mod save;
mod shared_region;
mod slices;

use std::collections::{BTreeMap, HashMap};

use dma::Dma;
use hca::Engine;
use hca::Limits;
use hca::VerbsError;
use hca::attributes::QpKind;
use hca::names::{ContextHandle, CqHandle, DeviceId};
use hca::provider::Sink;
use hca::work::AsyncEvent;
use telemetry::guest_log::GuestLog;

pub use config::{Config, ConfigError};
pub use error::{CommandError, FatalError};
pub use report::DeviceReport;
pub use shared_region::RegionError;

use crate::abi::pci::{VECTOR_ASYNC, VECTOR_COMPLETION};
use crate::abi::registers::{self, control};
pub use crate::counters::Counters;
pub use crate::phase::Phase;
use crate::provider::Pvrdma;
use doorbells::{DoorbellMode, LivePage};
use events::Events;
use shared_region::SharedRegion;
use slices::Unfinished;
pub use slices::{PAGE_TABLES_PER_SLICE, TEARDOWN_STEPS_PER_SLICE};

/// Where interrupts go.
pub trait Interrupts {
    /// Raises an MSI-X vector (see [`crate::abi::pci`]).
    fn raise(&self, vector: u16);
}

/// What is remembered of a queue pair besides what the engine holds.
#[derive(Debug, Clone, Copy)]
struct QpRecord {
    pd: u32,
    context: ContextHandle,
    kind: QpKind,
    max_send_wr: u32,
    max_receive_wr: u32,
    max_send_sge: u32,
    max_receive_sge: u32,
}

/// One PVRDMA function. Owned by the engine's thread.
pub struct Device<M: Dma + Clone + 'static> {
    id: DeviceId,
    config: Config,
    memory: M,
    bus_master: bool,
    /// MTU of the paired Ethernet function, bytes; decides the active path MTU that the port reports.
    mtu: u32,
    phase: Phase,
    region_low: u32,
    region_address: Option<u64>,
    region: Option<SharedRegion>,
    error: u32,
    cause: u32,
    masked: bool,
    /// Vectors 1 and 2 that were due while masked.
    suppressed: [bool; 2],
    events: Events<M>,
    mode: DoorbellMode,
    pages: Vec<LivePage>,
    last_full_scan: u64,
    /// When doorbells are looked at again although queue pairs are active, and words that only say that the guest polls exchanged.
    next_look: u64,
    next_polls: u64,
    /// Protection domains and the contexts that they belong to.
    pds: BTreeMap<u32, ContextHandle>,
    qps: HashMap<u32, QpRecord>,
    counters: Counters,
    log: GuestLog,
    /// A register was written whose effect needs memory that is still to come: nothing was done.
    postponed: bool,
    /// A command that goes on in slices.
    unfinished: Option<Unfinished>,
}

impl<M: Dma + Clone + 'static> std::fmt::Debug for Device<M> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Device")
            .field("name", &self.config.name)
            .field("id", &self.id)
            .field("phase", &self.phase)
            .finish_non_exhaustive()
    }
}

impl<M: Dma + Clone + 'static> Device<M> {
    /// Adds a device to the engine, powered on, without bus mastering ([`Device::set_bus_master`]).
    pub fn new(config: Config, memory: M, engine: &mut Engine<Pvrdma<M>>) -> Result<Self, ConfigError> {
        config.check()?;
        let id = engine.add_device(config.for_engine(), memory.clone())?;
        engine.set_enabled(id, false);
        engine.set_arm_exact(id, config.doorbells == DoorbellMode::Trapped);
        engine.set_port_mtu(id, attributes::mtu_bytes(attributes::active_mtu(config.mtu)));
        Ok(Self::powered_on(id, config, memory))
    }

    /// The function of a device of the engine, as it is at power-on.
    fn powered_on(id: DeviceId, config: Config, memory: M) -> Self {
        Self {
            id,
            mtu: config.mtu,
            mode: config.doorbells,
            events: Events::new(id, memory.clone()),
            config,
            memory,
            bus_master: false,
            phase: Phase::Silent,
            region_low: 0,
            region_address: None,
            region: None,
            error: 0,
            cause: 0,
            masked: true,
            suppressed: [false; 2],
            pages: Vec::new(),
            last_full_scan: 0,
            next_look: 0,
            next_polls: 0,
            pds: BTreeMap::new(),
            qps: HashMap::new(),
            counters: Counters::default(),
            log: GuestLog::new(),
            postponed: false,
            unfinished: None,
        }
    }

    /// Takes the device out of the engine.
    pub fn remove(self, engine: &mut Engine<Pvrdma<M>>) {
        engine.remove_device(self.id);
    }

    /// Its identity in the engine.
    #[must_use]
    pub fn id(&self) -> DeviceId {
        self.id
    }

    /// How far the driver has come.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// What it was made with.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Guest address of the shared region that the driver described last. Whoever wants to call [`Device::announce_fatal`] in a
    /// later life of this process keeps it.
    #[must_use]
    pub fn shared_region(&self) -> Option<u64> {
        self.region_address
    }

    /// The guest's memory changed (ranges were mapped or unmapped).
    pub fn set_memory(&mut self, engine: &mut Engine<Pvrdma<M>>, memory: M) {
        engine.set_memory(self.id, memory.clone());
        self.events.memory = memory.clone();
        self.memory = memory;
    }

    /// Bus Master Enable of the function. Without it the device touches no guest memory.
    pub fn set_bus_master(&mut self, engine: &mut Engine<Pvrdma<M>>, enabled: bool) {
        self.bus_master = enabled;
        self.events.enabled = enabled;
        engine.set_enabled(self.id, enabled);
    }

    /// What the VM may use.
    pub fn set_limits(&mut self, engine: &mut Engine<Pvrdma<M>>, limits: Limits) {
        self.config.limits = limits;
        engine.set_limits(self.id, limits);
    }

    /// Function or platform reset: as power-on, except for bus mastering, which configuration space decides.
    pub fn reset(&mut self, engine: &mut Engine<Pvrdma<M>>) {
        self.forget(engine);
        self.region_address = None;
        self.region_low = 0;
        self.error = 0;
        self.cause = 0;
        self.masked = true;
        self.suppressed = [false; 2];
    }

    /// Every object goes, and no guest memory is touched from now on. The capabilities in the guest's memory stay: its interrupt
    /// handlers divide by them.
    fn forget(&mut self, engine: &mut Engine<Pvrdma<M>>) {
        engine.reset_device(self.id);
        self.events.detach();
        self.region = None;
        self.pages.clear();
        self.pds.clear();
        self.qps.clear();
        self.unfinished = None;
        self.phase = Phase::Silent;
    }

    /// A 32-bit read of BAR1 at `offset`.
    #[must_use]
    pub fn register_read(&mut self, offset: u64) -> u32 {
        match offset {
            registers::VERSION => registers::INTERFACE_VERSION,
            registers::ERROR => self.error,
            registers::INTERRUPT_CAUSE => std::mem::take(&mut self.cause),
            registers::MAC_LOW => u32::from_le_bytes(std::array::from_fn(|i| self.config.mac[i])),
            registers::MAC_HIGH => u32::from(self.config.mac[4]) | u32::from(self.config.mac[5]) << 8,
            _ => 0,
        }
    }

    /// A 32-bit write to BAR1 at `offset`. When it returns, whatever it asked for is done: a destroyed object's memory is no longer
    /// touched, a response is written. Unless [`Device::is_unfinished`], or [`Device::is_postponed`]: the write is to be made again then.
    pub fn register_write(
        &mut self,
        engine: &mut Engine<Pvrdma<M>>,
        offset: u64,
        value: u32,
        interrupts: &impl Interrupts,
    ) {
        self.postponed = false;
        match offset {
            registers::DSR_LOW => self.region_low = value,
            registers::DSR_HIGH => {
                let address = u64::from(value) << 32 | u64::from(self.region_low);
                self.describe(engine, address);
            }
            registers::CONTROL => self.control(engine, value),
            registers::REQUEST => self.request(engine, value, interrupts),
            registers::INTERRUPT_MASK => self.set_mask(value != 0, interrupts),
            _ => {}
        }
    }

    /// Whether the last [`Device::register_write`] was to be made again: what it asks for needs memory that is still to come and was asked for, and
    /// nothing was done.
    #[must_use]
    pub fn is_postponed(&self) -> bool {
        self.postponed
    }

    /// A new shared region: the driver begins anew, also where its predecessor never said goodbye.
    fn describe(&mut self, engine: &mut Engine<Pvrdma<M>>, address: u64) {
        self.forget(engine);
        self.error = 0;
        if !self.bus_master {
            telemetry::guest_warn!(
                self.log,
                device = self.config.name.as_str(),
                "The guest describes a shared region at {address:#x}, but has not enabled bus mastering"
            );
            return;
        }
        let absences = self.memory.absences();
        match SharedRegion::accept(&self.memory, address, &self.config) {
            Ok((region, async_ring, completion_ring)) => {
                self.events.attach(async_ring, completion_ring);
                self.region_address = Some(address);
                self.region = Some(region);
                self.phase = Phase::Described;
            }
            Err(_) if self.memory.absences() != absences => self.postponed = true,
            Err(error) => {
                self.region_address = None;
                telemetry::guest_warn!(
                    self.log,
                    device = self.config.name.as_str(),
                    error = &error as &dyn std::error::Error,
                    "The shared region at {address:#x} is refused"
                );
            }
        }
    }

    fn control(&mut self, engine: &mut Engine<Pvrdma<M>>, value: u32) {
        let fine = match (value, self.phase) {
            (control::ACTIVATE, Phase::Described) => {
                self.phase = Phase::Active;
                self.pages.push(LivePage { page: 0, context: ContextHandle(0) });
                true
            }
            (control::ACTIVATE | control::UNQUIESCE, Phase::Active) => true,
            (control::RESET, _) => {
                self.forget(engine);
                true
            }
            _ => false,
        };
        self.error = if fine { 0 } else { error::REFUSED };
    }

    /// Events of other devices that the engine handed to this one while it executed a command; [`crate::Devices`] passes them on.
    pub(crate) fn take_strays(&mut self) -> Vec<(DeviceId, AsyncEvent)> {
        std::mem::take(&mut self.events.strays)
    }

    /// Whether there are such.
    pub(crate) fn has_strays(&self) -> bool {
        !self.events.strays.is_empty()
    }

    fn set_mask(&mut self, masked: bool, interrupts: &impl Interrupts) {
        self.masked = masked;
        if !masked {
            for (due, vector) in self.suppressed.iter_mut().zip([VECTOR_ASYNC, VECTOR_COMPLETION]) {
                if std::mem::take(due) {
                    interrupts.raise(vector);
                }
            }
        }
    }

    /// Publishes what the event rings collected, raises vectors 1 and 2 at most once each. Call after every poll that did something,
    /// and at the time returned (nanoseconds on `now`'s clock), when a guest has events waiting that it has not taken.
    pub fn flush_events(&mut self, now: u64, interrupts: &impl Interrupts) -> Option<u64> {
        let due = self.events.flush(now);
        for (at, (due, vector)) in
            [(due.asynchronous, VECTOR_ASYNC), (due.completion, VECTOR_COMPLETION)].into_iter().enumerate()
        {
            if !due {
                continue;
            }
            if self.masked {
                self.suppressed[at] = true;
            } else {
                interrupts.raise(vector);
                self.counters.count_interrupt(vector);
            }
        }
        due.again_at
    }

    /// Tells a guest whose device died with an earlier process that it has to set the device up anew: posts DEVICE_FATAL in the ring
    /// that the shared region at `address` names, and raises vector 1. From now on commands fail until a new region comes.
    pub fn announce_fatal(
        &mut self,
        engine: &mut Engine<Pvrdma<M>>,
        address: u64,
        interrupts: &impl Interrupts,
    ) -> Result<(), FatalError> {
        self.forget(engine);
        self.phase = Phase::Failed;
        self.error = error::REFUSED;
        shared_region::post_fatal(&self.memory, address)?;
        interrupts.raise(VECTOR_ASYNC);
        self.counters.count_interrupt(VECTOR_ASYNC);
        Ok(())
    }
}

impl<M: Dma + Clone + 'static> Sink for Device<M> {
    #[inline]
    fn completion_event(&mut self, device: DeviceId, cq: CqHandle) -> bool {
        self.events.completion_event(device, cq)
    }

    fn async_event(&mut self, device: DeviceId, event: AsyncEvent) {
        self.events.async_event(device, event);
    }
}

/// The guest-visible code of a verbs error, in the numbers of errno, so that the driver's log says something.
fn verbs_code(error: &VerbsError) -> u32 {
    match error {
        VerbsError::NoSuchDevice(_) => 19,
        VerbsError::NoSuchObject { .. } => 2,
        VerbsError::InUse { .. } => 16,
        VerbsError::OutOfResources { .. } => 12,
        VerbsError::AddressTaken { .. } => 98,
        _ => 22,
    }
}

#[cfg(test)]
mod tests;
