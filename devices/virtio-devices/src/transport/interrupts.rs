//! Interrupts of the device: MSI-X or INTx, the ISR status, and the reason of a failed device. Shared by the transport and the device's
//! threads. Never locks the transport, so that a device can be stopped while it interrupts.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, Ordering};
use std::sync::{Arc, Mutex};

use pci::config::ConfigSpace;
use pci::interrupt::{InterruptError, IntxLine};
use pci::intx::IntxPin;
use pci::msix::Msix;
use serde_json::json;
use telemetry::guest_log::GuestLog;
use telemetry::{Counter, guest_warn};

use super::lock;
use super::registers::NO_VECTOR;
use crate::device::VirtioInterrupt;

const ISR_QUEUE: u8 = 1;
const ISR_CONFIG: u8 = 2;

/// The interrupt side of a function.
pub(super) struct Interrupts {
    name: String,
    pub msix: Msix,
    pub intx: IntxPin,
    /// Locked while the pin follows it, so that a read of the status and a new interrupt don't race.
    isr: Mutex<u8>,
    config_vector: AtomicU16,
    queue_vectors: Vec<AtomicU16>,
    /// The driver has set DRIVER_OK: interrupts are permitted.
    live: AtomicBool,
    generation: AtomicU8,
    failure: Mutex<Option<String>>,
    failed: AtomicBool,
    pub log: GuestLog,
    queue_interrupts: Counter,
    config_interrupts: Counter,
}

impl Interrupts {
    pub(super) fn new(name: &str, msix: Msix, queues: usize) -> Self {
        Self {
            name: name.to_owned(),
            msix,
            intx: IntxPin::new(),
            isr: Mutex::new(0),
            config_vector: AtomicU16::new(NO_VECTOR),
            queue_vectors: (0..queues).map(|_| AtomicU16::new(NO_VECTOR)).collect(),
            live: AtomicBool::new(false),
            generation: AtomicU8::new(0),
            failure: Mutex::new(None),
            failed: AtomicBool::new(false),
            log: GuestLog::new(),
            queue_interrupts: Counter::new(),
            config_interrupts: Counter::new(),
        }
    }

    pub(super) fn set_live(&self, live: bool) {
        self.live.store(live, Ordering::Release);
    }

    pub(super) fn set_config_vector(&self, vector: u16) {
        self.config_vector.store(vector, Ordering::Release);
    }

    pub(super) fn set_queue_vector(&self, queue: u16, vector: u16) {
        if let Some(slot) = self.queue_vectors.get(usize::from(queue)) {
            slot.store(vector, Ordering::Release);
        }
    }

    pub(super) fn generation(&self) -> u8 {
        self.generation.load(Ordering::Acquire)
    }

    pub(super) fn set_generation(&self, generation: u8) {
        self.generation.store(generation, Ordering::Release);
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    pub(super) fn failure(&self) -> Option<String> {
        lock(&self.failure).clone()
    }

    /// Applies a failure from a saved state.
    pub(super) fn restore_failure(&self, reason: Option<String>) {
        self.failed.store(reason.is_some(), Ordering::Release);
        *lock(&self.failure) = reason;
    }

    pub(super) fn isr(&self) -> u8 {
        *lock(&self.isr)
    }

    pub(super) fn restore_isr(&self, value: u8) {
        let mut isr = lock(&self.isr);
        *isr = value;
        self.drive(value);
    }

    /// Handles the driver's read of the ISR status: clears it, and deasserts the wire (4.1.4.5).
    pub(super) fn read_isr(&self) -> u8 {
        let mut isr = lock(&self.isr);
        let value = std::mem::take(&mut *isr);
        self.drive(0);
        value
    }

    /// Clears the state that a reset clears, apart from MSI-X.
    pub(super) fn reset(&self) {
        self.set_live(false);
        self.set_config_vector(NO_VECTOR);
        for slot in &self.queue_vectors {
            slot.store(NO_VECTOR, Ordering::Release);
        }
        *lock(&self.failure) = None;
        self.failed.store(false, Ordering::Release);
        let _ = self.read_isr();
    }

    /// Updates after each change of configuration space.
    pub(super) fn follow(&self, config: &ConfigSpace) {
        self.msix.follow(config);
        self.report(self.intx.follow(config));
    }

    pub(super) fn attach(&self, line: Arc<dyn IntxLine>) {
        self.report(self.intx.attach(line));
    }

    fn raise(&self, vector: u16, bit: u8) {
        if self.msix.enabled() {
            if vector != NO_VECTOR {
                self.report(self.msix.trigger(vector));
            }
            return;
        }
        let mut isr = lock(&self.isr);
        *isr |= bit;
        self.drive(*isr);
    }

    fn drive(&self, isr: u8) {
        self.report(self.intx.set_pending(isr != 0));
    }

    fn report(&self, result: Result<(), InterruptError>) {
        if let Err(error) = result {
            guest_warn!(
                self.log,
                error = &error as &dyn std::error::Error,
                "Device {} can't interrupt the guest",
                self.name
            );
        }
    }

    pub(super) fn inspect(&self) -> serde_json::Value {
        json!({
            "queue_interrupts": self.queue_interrupts.get(),
            "config_interrupts": self.config_interrupts.get(),
            "isr": self.isr(),
            "msix": self.msix.inspect(),
        })
    }
}

impl VirtioInterrupt for Interrupts {
    fn queue(&self, index: u16) {
        if !self.live.load(Ordering::Acquire) {
            return;
        }
        self.queue_interrupts.increment();
        let vector = self.queue_vectors.get(usize::from(index));
        self.raise(vector.map_or(NO_VECTOR, |vector| vector.load(Ordering::Acquire)), ISR_QUEUE);
    }

    fn config(&self) {
        // The driver compares the generation around a multi-byte read.
        self.generation.fetch_add(1, Ordering::AcqRel);
        if self.live.load(Ordering::Acquire) {
            self.config_interrupts.increment();
            self.raise(self.config_vector.load(Ordering::Acquire), ISR_CONFIG);
        }
    }

    fn failed(&self, reason: &str) {
        guest_warn!(self.log, "Device {} has failed and needs a reset by its driver: {reason}", self.name);
        lock(&self.failure).get_or_insert_with(|| reason.to_owned());
        self.failed.store(true, Ordering::Release);
        self.config();
    }
}
