//! The PVRDMA function.
//!
//! ```text
//!            DSR_HIGH (valid region)          CONTROL ACTIVATE
//!  Silent ──────────────────────▶ Described ─────────────────▶ Active
//!    ▲  ▲                          │    ▲                         │
//!    │  └── CONTROL RESET ─────────┴────┼─────────────────────────┤
//!    │                                  └── DSR_HIGH (new region) ┤
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

/// Sink of interrupts.
pub trait Interrupts {
    /// Raises an MSI-X vector (see [`crate::abi::pci`]).
    fn raise(&self, vector: u16);
}

/// The function's own state of a queue pair, besides the engine's.
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
    /// MTU of the paired Ethernet function, bytes. It determines the port's active path MTU.
    mtu: u32,
    phase: Phase,
    region_low: u32,
    region_address: Option<u64>,
    region: Option<SharedRegion>,
    error: u32,
    cause: u32,
    masked: bool,
    /// Vectors 1 and 2 that were raised while masked.
    suppressed: [bool; 2],
    events: Events<M>,
    mode: DoorbellMode,
    pages: Vec<LivePage>,
    last_full_scan: u64,
    /// When the doorbells are polled again although queue pairs are active, and when words that only report empty polls are exchanged.
    next_look: u64,
    next_polls: u64,
    /// Protection domains and their contexts.
    pds: BTreeMap<u32, ContextHandle>,
    qps: HashMap<u32, QpRecord>,
    counters: Counters,
    log: GuestLog,
    /// The last register write needs not-present memory: it changed nothing.
    postponed: bool,
    /// A command that is executed in slices.
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
    /// Adds a device to the engine in its power-on state, with bus mastering disabled ([`Device::set_bus_master`]).
    pub fn new(config: Config, memory: M, engine: &mut Engine<Pvrdma<M>>) -> Result<Self, ConfigError> {
        config.check()?;
        let id = engine.add_device(config.for_engine(), memory.clone())?;
        engine.set_enabled(id, false);
        engine.set_arm_exact(id, config.doorbells == DoorbellMode::Trapped);
        engine.set_port_mtu(id, attributes::mtu_bytes(attributes::active_mtu(config.mtu)));
        Ok(Self::powered_on(id, config, memory))
    }

    /// The power-on state of a function whose engine device is `id`.
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

    /// Removes the device from the engine.
    pub fn remove(self, engine: &mut Engine<Pvrdma<M>>) {
        engine.remove_device(self.id);
    }

    /// Its identifier in the engine.
    #[must_use]
    pub fn id(&self) -> DeviceId {
        self.id
    }

    /// The driver's progress.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Its configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Guest address of the last shared region that the driver described. A daemon that may restart keeps it for
    /// [`Device::announce_fatal`].
    #[must_use]
    pub fn shared_region(&self) -> Option<u64> {
        self.region_address
    }

    /// Updates the guest's memory after ranges were mapped or unmapped.
    pub fn set_memory(&mut self, engine: &mut Engine<Pvrdma<M>>, memory: M) {
        engine.set_memory(self.id, memory.clone());
        self.events.memory = memory.clone();
        self.memory = memory;
    }

    /// Sets Bus Master Enable of the function. Without it the device accesses no guest memory.
    pub fn set_bus_master(&mut self, engine: &mut Engine<Pvrdma<M>>, enabled: bool) {
        self.bus_master = enabled;
        self.events.enabled = enabled;
        engine.set_enabled(self.id, enabled);
    }

    /// Sets quotas and rates of the VM.
    pub fn set_limits(&mut self, engine: &mut Engine<Pvrdma<M>>, limits: Limits) {
        self.config.limits = limits;
        engine.set_limits(self.id, limits);
    }

    /// Function or platform reset: the power-on state, except for bus mastering, which belongs to configuration space.
    pub fn reset(&mut self, engine: &mut Engine<Pvrdma<M>>) {
        self.forget(engine);
        self.region_address = None;
        self.region_low = 0;
        self.error = 0;
        self.cause = 0;
        self.masked = true;
        self.suppressed = [false; 2];
    }

    /// Destroys every object, and stops accessing guest memory. The capabilities in the guest's memory stay: the driver's interrupt
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

    /// A 32-bit write to BAR1 at `offset`. When it returns, its effect is complete: a destroyed object's memory isn't accessed any more, a
    /// response is written. Exceptions are [`Device::is_unfinished`] and [`Device::is_postponed`]: then the caller must repeat the write.
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

    /// Whether the last [`Device::register_write`] must be repeated: it needs not-present memory, which was requested, and changed nothing.
    #[must_use]
    pub fn is_postponed(&self) -> bool {
        self.postponed
    }

    /// Accepts a new shared region: the driver starts again, even if the previous one didn't reset the device.
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

    /// Events of other devices that the engine passed to this one while it executed a command; [`crate::Devices`] forwards them.
    pub(crate) fn take_strays(&mut self) -> Vec<(DeviceId, AsyncEvent)> {
        std::mem::take(&mut self.events.strays)
    }

    /// Whether there are such events.
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

    /// Publishes the collected events, and raises vectors 1 and 2 at most once each. Call it after every poll that did something, and at
    /// the returned time (nanoseconds of `now`'s clock), when a guest has unconsumed events.
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

    /// Notifies a guest whose device ended with an earlier process, so that its driver sets the device up again. Posts DEVICE_FATAL in the
    /// ring of the shared region at `address`, and raises vector 1. Commands fail until the driver describes a new region.
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

/// The guest-visible code of a verbs error: an errno number, so that the driver's log is meaningful.
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
