//! The PCI function of a NIC.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use control_api::types::NicBehind;

use device_models::Access;
use device_models::describe::{Bar, Device};
use machine::interrupt::{InterruptController, LevelLine};
use machine::machine_check;
use pci::config::{ClassCode, ConfigSpace, Identity, InterruptPin};
use pci::function::{
    BarKind, BarLayout, BarMapping, BarPlace, ConfigEffect, Doorbell, FunctionError, LateWrites, PciFunction,
    SavedFunction,
};
use pci::interrupt::{InterruptError, IntxLine};
use pci::intx::IntxPin;
use serde_json::json;
use telemetry::guest_log::GuestLog;

use super::NicError;
use super::drain_timer::DrainTimer;
use super::engine::Engine;
use super::guarded::{ChangeError, QUIESCENT_POINT_TIMEOUT};
use super::thread::{Next, Sources, Thread, WakeCause};
use crate::vm::ThreadHook;

/// Smallest memory BAR, bytes: mappings consist of pages.
const PAGE: u64 = 4096;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The PCI function of a NIC. Locks are taken in the order of the fields.
pub(super) struct NicFunction {
    name: String,
    config: Mutex<ConfigSpace>,
    engine: Mutex<Engine>,
    pin: IntxPin,
    /// The line of a NIC whose guest isn't seen acknowledging.
    level: OnceLock<(LevelLine, Arc<LoweredByGuest>)>,
    thread: OnceLock<Thread>,
    /// Updates the bus to the present mappings.
    refresh: OnceLock<Refresh>,
    /// Wakes the thread soon after an access, if a deferred write may start something.
    drain_timer: OnceLock<DrainTimer>,
    /// Rate-limited, since guests make lines rise and fall.
    log: GuestLog,
}

/// Updates the bus to the present mappings. Called without any lock.
pub(super) type Refresh = Box<dyn Fn() + Send + Sync>;

/// A line that KVM lowers at each end of interrupt, and whether it was raised since the last check.
struct LoweredByGuest(Arc<OwnedFd>, AtomicBool);

impl IntxLine for LoweredByGuest {
    fn set_level(&self, asserted: bool) -> Result<(), InterruptError> {
        if asserted && let Err(error) = rustix::io::write(&self.0, &1_u64.to_ne_bytes()) {
            return Err(InterruptError::Refused {
                what: "raise a NIC's line".to_owned(),
                source: error.into(),
            });
        }
        self.1.fetch_or(asserted, Ordering::SeqCst);
        Ok(())
    }
}

fn config_space(device: &Device) -> Result<ConfigSpace, pci::config::ConfigError> {
    let byte = |shift: u32| (device.pci.class >> shift).to_le_bytes()[0];
    let mut builder = ConfigSpace::builder(Identity {
        vendor_id: device.pci.vendor,
        device_id: device.pci.device,
        revision: device.pci.revision,
        class: ClassCode::new(byte(16), byte(8), byte(0)),
        subsystem_vendor_id: device.pci.vendor,
        subsystem_id: device.pci.device,
    });
    for (index, bar) in (0u8..).zip(device.bars) {
        let (kind, size) = match *bar {
            Bar::Ports(size) => (BarKind::Io, u64::from(size)),
            Bar::Memory(size) => (BarKind::Memory32, u64::from(size).max(PAGE)),
            Bar::Hidden => continue,
        };
        builder.bar(BarLayout { index, kind, prefetchable: false, size })?;
    }
    builder.interrupt_pin(InterruptPin::A);
    Ok(builder.build())
}

impl NicFunction {
    pub(super) fn new(name: &str, engine: Engine) -> Result<Arc<Self>, NicError> {
        let config =
            config_space(engine.device).map_err(|error| NicError::machine("configuration space", error))?;
        Ok(Arc::new(Self {
            name: name.to_owned(),
            config: Mutex::new(config),
            engine: Mutex::new(engine),
            pin: IntxPin::new(),
            level: OnceLock::new(),
            thread: OnceLock::new(),
            refresh: OnceLock::new(),
            drain_timer: OnceLock::new(),
            log: GuestLog::new(),
        }))
    }

    /// Connects the card's interrupt to the guest's line.
    pub(super) fn connect(&self, controller: &dyn InterruptController, gsi: u32) -> Result<(), NicError> {
        let mut engine = lock(&self.engine);
        if engine.has_page() {
            let failed = |error| NicError::machine("interrupt line", error);
            let line = controller.level_eventfds(gsi).map_err(failed)?;
            let wire = Arc::new(LoweredByGuest(Arc::clone(&line.trigger), AtomicBool::new(false)));
            self.pin
                .attach(Arc::clone(&wire) as Arc<dyn IntxLine>)
                .map_err(|error| NicError::machine("interrupt line", error))?;
            // Connected once.
            let _ = self.level.set((line, wire));
        }
        engine.connect(controller, gsi)
    }

    /// Starts the thread, if it has something to wait for. On the thread, `drain` passes deferred writes to this function before each
    /// action, and `check` makes a vCPU take a machine check for a refused one.
    pub(super) fn start(
        self: &Arc<Self>,
        on_start: ThreadHook,
        drain: impl Fn() + Send + 'static,
        check: Box<dyn Fn() + Send>,
    ) -> Result<(), NicError> {
        let (sources, active, mut signaled, delayed_effects) = {
            let engine = lock(&self.engine);
            (engine.sources()?, engine.active(), engine.prompt()?, engine.has_delayed_effects())
        };
        if sources.is_empty() {
            return Ok(());
        }
        if delayed_effects {
            let timer = DrainTimer::new().and_then(|timer| Ok((timer.0.try_clone()?, timer)));
            let (fd, timer) = timer.map_err(|error| NicError::machine("timer", error))?;
            signaled.push(fd);
            // Started once.
            let _ = self.drain_timer.set(timer);
        }
        let lowered = self.level.get().map(|(line, _)| line.resample.try_clone());
        let lowered = lowered.transpose().map_err(|error| NicError::machine("descriptor", error))?;
        let function: Weak<Self> = Arc::downgrade(self);
        let on_wake = move |what| {
            let Some(function) = function.upgrade() else { return Next::End };
            let taken = function.drain_timer.get().map(|timer| (timer, timer.take()));
            lock(&function.engine).collect_signaled();
            drain();
            let mut engine = lock(&function.engine);
            match what {
                WakeCause::Lowered => {
                    function.pin.lowered();
                    engine.lowered();
                }
                WakeCause::Source => engine.readable(),
                WakeCause::Signaled | WakeCause::Time => engine.process_signaled(),
            }
            if engine.has_unseen() {
                // A deferred write may be older than the shadow page's last update, or newer. Unseen causes account for both.
                drop(engine);
                drain();
                engine = lock(&function.engine);
                engine.seen();
            }
            function.drive(&mut engine);
            let (changed, interval) = engine.supervise_page(what == WakeCause::Time);
            drop(engine);
            if machine_check::take() {
                check();
            }
            if changed {
                function.refresh();
            }
            if let Some((timer, empty)) = taken {
                timer.rearm(empty);
            }
            Next::Wait(interval)
        };
        let sources = Sources { all: sources, active, lowered, signaled };
        let thread = Thread::start(&self.name, sources, on_start, on_wake)
            .map_err(|error| NicError::machine("thread", error))?;
        // Started once.
        let _ = self.thread.set(thread);
        Ok(())
    }

    /// Sets the callback that the thread calls when mappings change.
    pub(super) fn set_refresh(&self, refresh: Refresh) {
        // Plugged once.
        let _ = self.refresh.set(refresh);
    }

    fn refresh(&self) {
        if let Some(refresh) = self.refresh.get() {
            refresh();
        }
    }

    /// See [`super::NicHandle::change`].
    pub(super) fn change(self: &Arc<Self>, backend: NicBehind) -> Result<(), ChangeError> {
        let begin = Instant::now();
        loop {
            let done = self.in_thread(move |its| its.step_to(backend))?;
            if done {
                return Ok(());
            }
            if begin.elapsed() >= QUIESCENT_POINT_TIMEOUT {
                self.in_thread(|its| {
                    its.end_trap_all();
                    Ok(())
                })?;
                return Err(ChangeError::Busy { name: self.name.clone() });
            }
            // The guest and the thread continue meanwhile, which leads to a quiescent point.
            std::thread::sleep(Duration::from_micros(300));
        }
    }

    /// Runs `what` on the thread: the caller's sandbox may not permit access to cards.
    fn in_thread<R: Send + 'static>(
        self: &Arc<Self>,
        what: impl FnOnce(&Self) -> Result<R, ChangeError> + Send + 'static,
    ) -> Result<R, ChangeError> {
        let Some(thread) = self.thread.get() else { return what(self) };
        let its = Arc::clone(self);
        let silent = || ChangeError::Silent { name: self.name.clone() };
        thread.call(move || what(&its)).ok_or_else(silent)?
    }

    /// A step of a change of the backend. Returns whether it was the last one.
    fn step_to(&self, backend: NicBehind) -> Result<bool, ChangeError> {
        let open = lock(&self.engine).is_open();
        match backend {
            NicBehind::Passthrough if open => Ok(true),
            NicBehind::Passthrough => {
                // First back to the card, if the emulation is the backend.
                self.change_under_model(false)?;
                self.pass(true)
            }
            NicBehind::Card | NicBehind::Emulation => {
                if open && !self.pass(false)? {
                    return Ok(false);
                }
                self.change_under_model(backend == NicBehind::Emulation)?;
                Ok(true)
            }
        }
    }

    fn change_under_model(&self, emulation: bool) -> Result<(), ChangeError> {
        let mut engine = lock(&self.engine);
        let before = engine.active();
        let result = engine.change(emulation);
        if engine.active() != before || result.is_err() {
            self.changed(engine);
        }
        result
    }

    /// Changes to `passthrough`, or back under the model. Returns `false` if that isn't possible now.
    fn pass(&self, open: bool) -> Result<bool, ChangeError> {
        // From here on every access exits to the engine: none bypasses it during the change, and none is deferred.
        if lock(&self.engine).set_trap_all(true) {
            self.refresh();
        }
        let passed = lock(&self.engine).pass(open);
        match passed {
            Ok(false) => self.drive(&mut lock(&self.engine)),
            Ok(true) | Err(_) => self.end_trap_all(),
        }
        passed
    }

    fn end_trap_all(&self) {
        let mut engine = lock(&self.engine);
        engine.set_trap_all(false);
        self.changed(engine);
    }

    /// The backend has changed.
    fn changed(&self, mut engine: MutexGuard<'_, Engine>) {
        self.drive(&mut engine);
        if let Some(thread) = self.thread.get() {
            thread.activate(engine.active());
        }
        drop(engine);
        self.refresh();
    }

    /// Drives the line to the engine's level. The caller holds the engine's lock, so that levels stay in order.
    fn drive(&self, engine: &mut Engine) {
        if let Err(error) = self.pin.set_pending(engine.line()) {
            telemetry::guest_warn!(self.log, device = %self.name, %error, "An interrupt line can't be driven");
        }
        if self.level.get().is_some_and(|(_, wire)| wire.1.swap(false, Ordering::SeqCst)) {
            engine.raised();
        }
    }

    fn apply_config(&self, config: &ConfigSpace) {
        if let Err(error) = self.pin.follow(config) {
            telemetry::guest_warn!(self.log, device = %self.name, %error, "An interrupt line can't be driven");
        }
        lock(&self.engine).set_bus_master(config.bus_master());
    }

    fn failed(
        &self,
        what: &str,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> FunctionError {
        FunctionError::Failed { name: self.name.clone(), what: what.to_owned(), source: source.into() }
    }

    /// Splits an access into pieces that a device supports: 1, 2 or 4 bytes.
    fn access(&self, bar: u8, offset: u64, len: usize, mut each: impl FnMut(&mut Engine, Access, usize)) {
        let mut engine = lock(&self.engine);
        let mut done = 0;
        while done < len {
            let size = match len - done {
                4.. => 4,
                2 | 3 => 2,
                _ => 1,
            };
            let at = offset.saturating_add(u64::try_from(done).unwrap_or(u64::MAX));
            let Ok(at) = u32::try_from(at) else { return };
            let access = Access { bar, offset: at, size: u8::try_from(size).unwrap_or(1), write: None };
            each(&mut engine, access, done);
            done += size;
        }
        self.drive(&mut engine);
        drop(engine);
        if let Some(timer) = self.drain_timer.get() {
            timer.start();
        }
    }
}

/// Whether an access is inside the device's registers: a BAR may be larger.
fn inside(device: &Device, access: &Access) -> bool {
    let size = match device.bars.get(usize::from(access.bar)) {
        Some(Bar::Ports(size) | Bar::Memory(size)) => *size,
        Some(Bar::Hidden) | None => 0,
    };
    access.offset.checked_add(u32::from(access.size)).is_some_and(|end| end <= size)
}

impl PciFunction for NicFunction {
    fn name(&self) -> &str {
        &self.name
    }

    fn bars(&self) -> Vec<BarLayout> {
        lock(&self.config).bars().to_vec()
    }

    fn config_read(&self, offset: u16, data: &mut [u8]) {
        let mut config = lock(&self.config);
        self.pin.publish(&mut config);
        config.read(offset, data);
    }

    fn config_write(&self, offset: u16, data: &[u8]) -> ConfigEffect {
        let mut config = lock(&self.config);
        let effect = config.write(offset, data);
        self.apply_config(&config);
        effect
    }

    fn places(&self) -> Vec<BarPlace> {
        lock(&self.config).places()
    }

    fn bar_read(&self, bar: u8, offset: u64, data: &mut [u8]) {
        data.fill(0xFF);
        let len = data.len();
        self.access(bar, offset, len, |engine, access, done| {
            if inside(engine.device, &access) {
                let value = engine.access(access).to_le_bytes();
                let size = usize::from(access.size);
                data[done..done + size].copy_from_slice(&value[..size]);
            }
        });
    }

    fn bar_write(&self, bar: u8, offset: u64, data: &[u8]) {
        self.access(bar, offset, data.len(), |engine, access, done| {
            let mut value = [0; 4];
            let size = usize::from(access.size);
            value[..size].copy_from_slice(&data[done..done + size]);
            if inside(engine.device, &access) {
                engine.access(Access { write: Some(u32::from_le_bytes(value)), ..access });
            }
        });
    }

    fn doorbells(&self) -> Vec<Doorbell> {
        lock(&self.engine).doorbells()
    }

    fn late_writes(&self) -> Vec<LateWrites> {
        lock(&self.engine).late_writes()
    }

    fn mappings(&self) -> Vec<BarMapping> {
        lock(&self.engine).mappings()
    }

    fn attach_intx(&self, line: Arc<dyn IntxLine>) {
        if let Err(error) = self.pin.attach(line) {
            telemetry::guest_warn!(self.log, device = %self.name, %error, "An interrupt line can't be driven");
        }
    }

    fn reset(&self) -> Result<(), FunctionError> {
        let mut config = lock(&self.config);
        config.reset();
        let mut engine = lock(&self.engine);
        let result = engine.reset();
        self.drive(&mut engine);
        drop(engine);
        self.apply_config(&config);
        result.map_err(|error| self.failed("be reset", error))
    }

    fn quiesce(&self) -> Result<(), FunctionError> {
        if let Some(thread) = self.thread.get() {
            thread.pause(true);
        }
        lock(&self.engine).quiesce().map_err(|error| self.failed("be taken from the guest", error))
    }

    fn unquiesce(&self) -> Result<(), FunctionError> {
        let result = {
            let mut engine = lock(&self.engine);
            let result = engine.unquiesce();
            self.drive(&mut engine);
            result
        };
        if let Some(thread) = self.thread.get() {
            thread.pause(false);
        }
        result.map_err(|error| self.failed("be given back to the guest", error))
    }

    fn save(&self) -> Result<SavedFunction, FunctionError> {
        Err(FunctionError::NotSaveable {
            name: self.name.clone(),
            reason: "its card or tap is this host's, and its model has no saved form in a VM's state yet"
                .to_owned(),
        })
    }

    fn inspect(&self) -> serde_json::Value {
        let mut tree = lock(&self.engine).inspect();
        if let Some(object) = tree.as_object_mut() {
            object.insert("kind".to_owned(), json!("nic"));
        }
        tree
    }
}
