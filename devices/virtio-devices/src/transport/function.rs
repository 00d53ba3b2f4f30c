//! The PCI function of a virtio device.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, OnceLock};

use machine::memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemorySpace};
use pci::config::ConfigSpace;
use pci::function::{
    BarLayout, BarMapping, BarPlace, ConfigEffect, Doorbell, FunctionError, PciFunction, SavedFunction,
};
use pci::interrupt::{IntxLine, Msi};
use pci::msix::{Msix, SavedMsix};
use serde_json::json;
use telemetry::guest_log::GuestLog;
use telemetry::{Counter, guest_error, guest_warn};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;

use super::error::TransportError;
use super::interrupts::Interrupts;
use super::layout::{self, BAR, BAR_SIZE, MAX_QUEUES, NOTIFY, NOTIFY_STEP, Region};
use super::lock;
use super::registers::{Action, DRIVER_OK, Registers};
use super::saved::{self, SavedTransport, VERSION};
use super::threads::{self, DeviceThreads, SharedDevice};
use crate::device::{Activation, ActiveQueue, DeviceError, SavedDevice, VirtioDevice, VirtioInterrupt};
use crate::worker::{new_event, signal, take};

/// A virtio device as a PCI function. Calls lock it; the device's threads don't.
pub struct VirtioPciFunction {
    name: String,
    device_id: u16,
    memory: GuestMemorySpace,
    kicks: Vec<Arc<OwnedFd>>,
    interrupts: Arc<Interrupts>,
    /// Offset of the PCI configuration access capability.
    window: u16,
    config: Mutex<ConfigSpace>,
    state: Mutex<State>,
    /// Notifications that caused an exit instead of signalling an ioeventfd.
    exits: Counter,
    /// Rate-limited log: a driver can start and reset a device that fails to start any number of times.
    log: GuestLog,
    /// Where devices are activated; the calling thread until it is set.
    threads: OnceLock<Arc<dyn DeviceThreads>>,
}

struct State {
    registers: Registers,
    device: SharedDevice,
    /// Whether the device has been activated and not stopped since.
    running: bool,
    quiesced: bool,
    /// Whether it was restored and not started since.
    restored: bool,
}

impl VirtioPciFunction {
    /// Creates a function of `device`: one 64-bit memory BAR of 32 KiB, a vector per queue and one for configuration changes, and INTA for
    /// drivers without MSI-X.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        memory: GuestMemorySpace,
        msi: &dyn Msi,
    ) -> Result<Arc<Self>, TransportError> {
        Self::build(device, memory, msi, None).map(Arc::new)
    }

    /// Makes `threads` activate the device from now on. Can be set once.
    pub fn activate_on(&self, threads: Arc<dyn DeviceThreads>) {
        self.threads.get_or_init(|| threads);
    }

    /// Restores a function. `device` was restored by its own constructor from [`VirtioPciFunction::saved_device`]. The function is
    /// quiesced, like the saved one; [`PciFunction::unquiesce`] starts it.
    pub fn restore(
        device: Box<dyn VirtioDevice>,
        memory: GuestMemorySpace,
        msi: &dyn Msi,
        saved: &SavedFunction,
    ) -> Result<Arc<Self>, TransportError> {
        let name = device.name().to_owned();
        let bad = |reason| TransportError::Saved { name: name.clone(), reason };
        let state = parse(saved).map_err(bad)?;
        if state.device_id != device.device_id() {
            return Err(bad(format!(
                "it is of virtio device {}, not {}",
                state.device_id,
                device.device_id()
            )));
        }
        let function = Self::build(device, memory, msi, Some(&state.msix))?;
        {
            let mut own = lock(&function.state);
            let sizes = |registers: &Registers| {
                registers.queues.iter().map(|queue| queue.max_size).collect::<Vec<_>>()
            };
            if sizes(&state.registers) != sizes(&own.registers) {
                return Err(bad("it has other queues".to_owned()));
            }
            // The driver may continue only with features that both sides still offer.
            let missing = state.registers.driver_features & !own.registers.offered;
            if missing != 0 {
                return Err(bad(format!(
                    "its driver uses features {missing:#x}, which this device doesn't offer"
                )));
            }
            let mut config = lock(&function.config);
            let fresh = config.clone();
            *config = fresh
                .restore(&state.config)
                .map_err(|source| TransportError::Config { name: name.clone(), source })?;
            let interrupts = &function.interrupts;
            interrupts.set_config_vector(state.registers.config_vector);
            for (index, queue) in (0u16..).zip(&state.registers.queues) {
                interrupts.set_queue_vector(index, queue.vector);
            }
            interrupts.set_generation(state.generation);
            interrupts.restore_failure(state.failure.clone());
            interrupts.set_live(state.registers.status & DRIVER_OK != 0);
            interrupts.restore_isr(state.isr);
            interrupts.follow(&config);
            own.registers = state.registers;
            own.quiesced = true;
            own.restored = true;
        }
        Ok(Arc::new(function))
    }

    /// [`VirtioDevice::settle`] of the device. Register accesses wait meanwhile.
    ///
    /// # Errors
    /// As for the device.
    pub fn settle(&self) -> Result<(), DeviceError> {
        let device = Arc::clone(&lock(&self.state).device);
        let device = lock(&device);
        device.settle()
    }

    /// [`VirtioDevice::hand_over`] of the quiesced device.
    ///
    /// # Errors
    /// As for the device.
    pub fn hand_over(&self) -> Result<(), DeviceError> {
        lock(&lock(&self.state).device).hand_over()
    }

    /// [`VirtioDevice::take_over`] of the device, before it starts.
    ///
    /// # Errors
    /// As for the device.
    pub fn take_over(&self) -> Result<(), DeviceError> {
        lock(&lock(&self.state).device).take_over()
    }

    /// [`VirtioDevice::announce`] of the device.
    ///
    /// # Errors
    /// As for the device.
    pub fn announce(&self) -> Result<(), DeviceError> {
        lock(&lock(&self.state).device).announce()
    }

    /// The device's part of a saved function, for the constructor of its type.
    pub fn saved_device(saved: &SavedFunction) -> Result<SavedDevice, TransportError> {
        let bad = |reason| TransportError::Saved { name: saved.kind.clone(), reason };
        Ok(parse(saved).map_err(bad)?.device)
    }

    fn build(
        device: Box<dyn VirtioDevice>,
        memory: GuestMemorySpace,
        msi: &dyn Msi,
        saved_msix: Option<&SavedMsix>,
    ) -> Result<Self, TransportError> {
        let name = device.name().to_owned();
        let device_id = device.device_id();
        let sizes = device.queue_sizes();
        let count = sizes.len();
        let vectors = match u16::try_from(count + 1) {
            Ok(vectors) if (1..=MAX_QUEUES).contains(&count) => vectors,
            _ => return Err(TransportError::Queues { name, queues: count }),
        };
        let msix_error = |source| TransportError::Msix { name: name.clone(), source };
        let layout = layout::msix(vectors).map_err(msix_error)?;
        let outputs = msi.allocate(vectors).map_err(|source| TransportError::Vectors {
            name: name.clone(),
            vectors,
            source,
        })?;
        let msix = match saved_msix {
            Some(saved) => Msix::restore(layout, outputs, saved),
            None => Msix::new(layout, outputs),
        }
        .map_err(msix_error)?;
        let (config, window) = layout::config_space(device_id, &layout)
            .map_err(|source| TransportError::Config { name: name.clone(), source })?;
        let kicks = (0..count)
            .map(|_| new_event().map(Arc::new))
            .collect::<io::Result<Vec<_>>>()
            .map_err(|source| TransportError::Event { name: name.clone(), source })?;
        let offered = device.features() | 1 << VIRTIO_F_VERSION_1;
        let registers = Registers::new(offered, &sizes, vectors);
        Ok(Self {
            interrupts: Arc::new(Interrupts::new(&name, msix, count)),
            name,
            device_id,
            memory,
            kicks,
            window,
            config: Mutex::new(config),
            state: Mutex::new(State {
                registers,
                device: Arc::new(Mutex::new(device)),
                running: false,
                quiesced: false,
                restored: false,
            }),
            exits: Counter::new(),
            log: GuestLog::new(),
            threads: OnceLock::new(),
        })
    }

    /// Executes the action of a register write.
    fn act(&self, state: &mut State, action: Action) {
        match action {
            Action::None => {}
            Action::ConfigVector(vector) => self.interrupts.set_config_vector(vector),
            Action::QueueVector(queue, vector) => self.interrupts.set_queue_vector(queue, vector),
            Action::Broken(reason) => self.interrupts.failed(&reason),
            Action::Reset => self.reset_device(state),
            Action::Start => {
                self.interrupts.set_live(true);
                self.start(state);
            }
        }
    }

    /// Activates the device, if the driver has set DRIVER_OK and nothing prevents it. A failure leaves a device that needs a reset.
    fn start(&self, state: &mut State) {
        let wanted = state.registers.status & DRIVER_OK != 0;
        if !wanted || state.running || state.quiesced || self.interrupts.has_failed() {
            return;
        }
        let event_index = state.registers.event_index();
        let mut queues = Vec::new();
        for (index, (registers, kick)) in (0u16..).zip(state.registers.queues.iter().zip(&self.kicks)) {
            if !registers.enabled {
                continue;
            }
            match registers.queue(event_index) {
                Ok(queue) => queues.push(ActiveQueue { index, queue, kick: Arc::clone(kick) }),
                Err(mistake) => return self.interrupts.failed(&format!("queue {index}: {mistake}")),
            }
        }
        let active: Vec<u16> = queues.iter().map(|queue| queue.index).collect();
        let activation = Activation {
            memory: self.memory.clone(),
            features: state.registers.driver_features,
            queues,
            interrupt: Arc::clone(&self.interrupts) as Arc<dyn VirtioInterrupt>,
        };
        state.running = true;
        let threads = self.threads.get().map(|threads| &**threads);
        if let Err(error) = threads::activate(threads, &state.device, activation) {
            guest_error!(
                self.log,
                error = &error as &dyn std::error::Error,
                "Device {} did not start",
                self.name
            );
            self.interrupts.failed(&chain(&error));
            self.stop(state);
            return;
        }
        // Serve chains that were made available before, or during a pause.
        for index in &active {
            self.kick(usize::from(*index));
        }
        if std::mem::take(&mut state.restored) {
            // An interrupt that KVM had not delivered when the vCPUs were saved is lost; a spurious one does no harm.
            for index in active {
                self.interrupts.queue(index);
            }
        }
    }

    /// Stops the device and saves the positions of its queues.
    fn stop(&self, state: &mut State) {
        if !std::mem::take(&mut state.running) {
            return;
        }
        match lock(&state.device).stop() {
            Ok(queues) => {
                for active in queues {
                    use virtio_queue::QueueT;
                    if let Some(registers) = state.registers.queues.get_mut(usize::from(active.index)) {
                        registers.next_available = active.queue.next_avail();
                        registers.next_used = active.queue.next_used();
                    }
                }
            }
            Err(error) => {
                guest_error!(
                    self.log,
                    error = &error as &dyn std::error::Error,
                    "Device {} did not stop",
                    self.name
                );
                self.interrupts.failed(&chain(&error));
            }
        }
    }

    /// Resets the device, for the driver or the machine.
    fn reset_device(&self, state: &mut State) {
        self.stop(state);
        lock(&state.device).reset();
        state.registers.reset();
        self.interrupts.reset();
        for kick in &self.kicks {
            take(&**kick);
        }
    }

    fn kick(&self, queue: usize) {
        if let Some(kick) = self.kicks.get(queue) {
            signal(&**kick);
        }
    }

    /// BAR, offset and length that the driver set in the PCI configuration access capability, if they are valid (4.1.4.9).
    fn window_target(&self, config: &ConfigSpace) -> Option<(u64, usize)> {
        let (bar, offset, len) =
            (config.u8(self.window + 4), config.u32(self.window + 8), config.u32(self.window + 12));
        let len = usize::try_from(len).ok().filter(|len| matches!(len, 1 | 2 | 4))?;
        let offset = u64::from(offset);
        let inside = offset + u64::from(u8::try_from(len).ok()?) <= BAR_SIZE;
        (bar == BAR && inside && offset.is_multiple_of(u64::try_from(len).ok()?)).then_some((offset, len))
    }

    /// Whether an access to configuration space overlaps the window's data.
    fn touches_window(&self, offset: u16, len: usize) -> bool {
        let data = usize::from(self.window) + 16;
        let start = usize::from(offset);
        start < data + 4 && start.saturating_add(len) > data
    }

    fn failed(
        &self,
        what: &str,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> FunctionError {
        FunctionError::Failed { name: self.name.clone(), what: what.to_owned(), source: source.into() }
    }

    /// Index of a ring in guest memory.
    fn ring_index(&self, ring: u64) -> Option<u16> {
        let mut index = [0; 2];
        self.memory.memory().read_slice(&mut index, GuestAddress(ring.checked_add(2)?)).ok()?;
        Some(u16::from_le_bytes(index))
    }
}

fn parse(saved: &SavedFunction) -> Result<SavedTransport, String> {
    if saved.version != VERSION {
        return Err(format!("version {} is not {VERSION}", saved.version));
    }
    crate::saved::decode(&saved.state).map_err(|error| format!("it is damaged: {error}"))
}

/// An error with all its causes, on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}

impl Drop for VirtioPciFunction {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        if std::mem::take(&mut state.running)
            && let Err(error) = lock(&state.device).stop()
        {
            tracing::error!(error = &error as &dyn std::error::Error, "Device {} did not stop", self.name);
        }
    }
}

impl PciFunction for VirtioPciFunction {
    fn name(&self) -> &str {
        &self.name
    }

    fn bars(&self) -> Vec<BarLayout> {
        lock(&self.config).bars().to_vec()
    }

    fn config_read(&self, offset: u16, data: &mut [u8]) {
        if self.touches_window(offset, data.len()) {
            let target = self.window_target(&lock(&self.config));
            if let Some((at, len)) = target {
                let mut value = [0u8; 4];
                self.bar_read(BAR, at, &mut value[..len]);
                lock(&self.config).device_write(self.window + 16, &value);
            }
        }
        let mut config = lock(&self.config);
        self.interrupts.intx.publish(&mut config);
        config.read(offset, data);
    }

    fn config_write(&self, offset: u16, data: &[u8]) -> ConfigEffect {
        let (effect, target) = {
            let mut config = lock(&self.config);
            let effect = config.write(offset, data);
            self.interrupts.follow(&config);
            let target =
                if self.touches_window(offset, data.len()) { self.window_target(&config) } else { None };
            (effect, target.map(|(at, len)| (at, len, config.u32(self.window + 16).to_le_bytes())))
        };
        if let Some((at, len, value)) = target {
            self.bar_write(BAR, at, &value[..len]);
        }
        effect
    }

    fn places(&self) -> Vec<BarPlace> {
        lock(&self.config).places()
    }

    fn bar_read(&self, bar: u8, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if bar != BAR || self.interrupts.msix.bar_read(bar, offset, data) {
            return;
        }
        match Region::of(offset) {
            Region::Common(at) => {
                let generation = self.interrupts.generation();
                let failed = self.interrupts.has_failed();
                lock(&self.state).registers.read(at, data, generation, failed);
            }
            Region::Isr => {
                if let Some(first) = data.first_mut() {
                    *first = self.interrupts.read_isr();
                }
            }
            Region::Device(at) => lock(&lock(&self.state).device).config_read(at, data),
            Region::Notify(_) | Region::Nothing => {}
        }
    }

    fn bar_write(&self, bar: u8, offset: u64, data: &[u8]) {
        if bar != BAR || self.interrupts.msix.bar_write(bar, offset, data) {
            return;
        }
        match Region::of(offset) {
            Region::Common(at) => {
                let mut state = lock(&self.state);
                let action = state.registers.write(at, data);
                self.act(&mut state, action);
            }
            Region::Device(at) => lock(&lock(&self.state).device).config_write(at, data),
            Region::Notify(queue) => {
                self.exits.increment();
                self.kick(usize::try_from(queue).unwrap_or(usize::MAX));
            }
            Region::Isr | Region::Nothing => {
                guest_warn!(
                    self.interrupts.log,
                    "Device {}: a write of {} bytes at {offset:#x} of BAR {bar}, where nothing can be written",
                    self.name,
                    data.len()
                );
            }
        }
    }

    fn doorbells(&self) -> Vec<Doorbell> {
        (0u64..)
            .zip(&self.kicks)
            .map(|(index, kick)| Doorbell {
                bar: BAR,
                offset: NOTIFY + NOTIFY_STEP * index,
                width: 0,
                datamatch: None,
                fd: Arc::clone(kick),
            })
            .collect()
    }

    fn mappings(&self) -> Vec<BarMapping> {
        Vec::new()
    }

    fn attach_intx(&self, line: Arc<dyn IntxLine>) {
        self.interrupts.attach(line);
    }

    fn reset(&self) -> Result<(), FunctionError> {
        let mut state = lock(&self.state);
        self.reset_device(&mut state);
        self.interrupts.set_generation(0);
        let mut config = lock(&self.config);
        config.reset();
        self.interrupts.msix.reset();
        self.interrupts.follow(&config);
        Ok(())
    }

    fn quiesce(&self) -> Result<(), FunctionError> {
        let mut state = lock(&self.state);
        state.quiesced = true;
        self.stop(&mut state);
        Ok(())
    }

    fn unquiesce(&self) -> Result<(), FunctionError> {
        let mut state = lock(&self.state);
        state.quiesced = false;
        self.start(&mut state);
        Ok(())
    }

    fn save(&self) -> Result<SavedFunction, FunctionError> {
        let state = lock(&self.state);
        if !state.quiesced {
            return Err(self.failed("save its state", "it is running; quiesce it first"));
        }
        let device = lock(&state.device).save().map_err(|error| match error {
            crate::device::DeviceError::NotSaveable { name, reason } => {
                FunctionError::NotSaveable { name, reason }
            }
            error => self.failed("save its state", error),
        })?;
        let saved = SavedTransport {
            device_id: self.device_id,
            registers: state.registers.clone(),
            isr: self.interrupts.isr(),
            generation: self.interrupts.generation(),
            failure: self.interrupts.failure(),
            config: lock(&self.config).save(),
            msix: self.interrupts.msix.save(),
            device,
        };
        let bytes =
            crate::saved::encode(&saved).map_err(|error| self.failed("serialise its state", error))?;
        Ok(SavedFunction { kind: saved::kind(self.device_id), version: VERSION, state: bytes })
    }

    fn inspect(&self) -> serde_json::Value {
        let state = lock(&self.state);
        let registers = &state.registers;
        let queues: Vec<_> = registers
            .queues
            .iter()
            .enumerate()
            .map(|(index, queue)| {
                let (available, used) = if queue.enabled {
                    (self.ring_index(queue.available), self.ring_index(queue.used))
                } else {
                    (None, None)
                };
                json!({
                    "index": index,
                    "size": queue.size,
                    "enabled": queue.enabled,
                    "vector": queue.vector,
                    "available_index": available,
                    "used_index": used,
                })
            })
            .collect();
        json!({
            "kind": saved::kind(self.device_id),
            "status": format!("{:#04x}", registers.status),
            "running": state.running,
            "failure": self.interrupts.failure(),
            "features_offered": format!("{:#x}", registers.offered),
            "features_negotiated": format!("{:#x}", registers.driver_features),
            "queues": queues,
            "notify_exits": self.exits.get(),
            "interrupts": self.interrupts.inspect(),
            "pci": lock(&self.config).inspect(),
            "device": lock(&state.device).inspect(),
        })
    }
}
