//! Interrupt controllers in the monitor: crate `apic` behind the interrupt traits of crate `machine`.
//!
//! ```text
//! vCPU threads ──LocalApics──▶ Shared ◀──InterruptController── devices: lines, MSIs that they send themselves
//!                                │ ▲
//!    kicks, timers, resampling ◀─┘ └── thread `interrupts`: eventfds of MSIs and pins, timers
//! ```
//!
//! For KVM's controllers, irqfds and timers in the kernel do the work of thread `interrupts`. Only this thread polls eventfds, so each
//! signal causes one interrupt. While an MSI's route is masked, the thread doesn't read its eventfd; the thread that unmasks the route
//! reads it.
//!
//! Time is CLOCK_MONOTONIC. It runs on while the VM is paused, as for KVM's APIC timers.

mod listener;
mod metrics;
mod routes;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use apic::{Action, Config, Controllers, IO_APIC_PINS, IoApicLocation, SavedControllers};
use firmware::layout;
use machine::bus::{AddressSpace, BusDevice, BusError};
use machine::interrupt::{InterruptController, IrqchipKind, LevelLine, MsiMessage, MsiRoute};
use machine::local_apic::{ApicEvent, LocalApics};
use machine::state::SavedInterruptController;
use machine::vcpu::VcpuKicks;
use rustix::event::{EventfdFlags, eventfd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use self::listener::{Listener, Source};
use self::metrics::Counters;
pub use self::metrics::InterruptCounts;
use self::routes::RouteCount;
use crate::sandbox::ThreadFilter;

/// Bytes of the IOAPIC's page.
const IO_APIC_BYTES: u64 = 0x1000;
/// Nanoseconds per tick of the APIC timers, as in KVM and as CPUID reports.
const TIMER_TICK_NS: u32 = 1;
/// No timer is set.
const NEVER: u64 = u64::MAX;

/// System calls of vCPU threads, and of threads that reset, pause and save a VM with such controllers.
pub const SYSCALLS: &[i64] = &[libc::SYS_timerfd_settime, libc::SYS_epoll_ctl];
/// System calls of thread `interrupts`.
pub use self::listener::SYSCALLS as LISTENER_SYSCALLS;

/// The interrupt controllers of one VM. Thread-safe.
pub struct MonitorIrqchip {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// State that the thread and routes share; they may outlive the controllers' owner.
struct Shared {
    controllers: Controllers,
    /// In the order of [`Controllers::apic_ids`].
    vcpus: Vec<VcpuTimer>,
    kicks: OnceLock<VcpuKicks>,
    listener: Listener,
    routes: RouteCount,
    edges: Mutex<BTreeMap<u32, Arc<OwnedFd>>>,
    /// Eventfds by pin, to be signaled when the pin's level-triggered interrupt has ended.
    resamplers: Mutex<BTreeMap<u8, Vec<Arc<OwnedFd>>>>,
    counters: Counters,
}

/// The timer of a local APIC while its vCPU is in the guest. In HLT the vCPU's thread waits for the time itself.
struct VcpuTimer {
    fd: OwnedFd,
    due_ns: AtomicU64,
}

fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let part = |value: i64| u64::try_from(value).unwrap_or(0);
    part(now.tv_sec).saturating_mul(1_000_000_000).saturating_add(part(now.tv_nsec))
}

fn new_eventfd() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

fn other(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error)
}

impl MonitorIrqchip {
    /// Creates controllers at power-on state for vCPUs with these APIC ids, and their thread, which `filter` confines. The first id is
    /// the bootstrap processor's.
    pub fn create(apic_ids: &[u32], filter: ThreadFilter) -> io::Result<Self> {
        let controllers = Controllers::new(Config {
            local_apic_ids: apic_ids.to_vec(),
            remote_apics: Vec::new(),
            bootstrap_apic_id: apic_ids.first().copied().unwrap_or(0),
            io_apic: IoApicLocation::Here,
            timer_tick_ns: TIMER_TICK_NS,
            extended_destination_ids: false,
        })
        .map_err(other)?;
        let listener = Listener::new()?;
        let mut vcpus = Vec::with_capacity(apic_ids.len());
        for (index, _) in controllers.apic_ids().iter().enumerate() {
            let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
            let timer = VcpuTimer {
                fd: timerfd_create(TimerfdClockId::Monotonic, flags)?,
                due_ns: AtomicU64::new(NEVER),
            };
            listener.add(&timer.fd, Source::Timer { index })?;
            vcpus.push(timer);
        }
        let counters = Counters::new(vcpus.len());
        let shared = Arc::new(Shared {
            controllers,
            vcpus,
            kicks: OnceLock::new(),
            listener,
            routes: RouteCount::default(),
            edges: Mutex::new(BTreeMap::new()),
            resamplers: Mutex::new(BTreeMap::new()),
            counters,
        });
        let thread = listener::start(Arc::clone(&shared), filter)?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Puts the IOAPIC on the bus.
    pub fn plug(&self, memory: &AddressSpace) -> Result<(), BusError> {
        let device = Arc::new(IoApicPage(Arc::clone(&self.shared)));
        memory.insert(layout::IO_APIC, IO_APIC_BYTES, "io-apic", device)
    }

    /// Counts of interrupts so far. May be called at any time.
    pub fn counts(&self) -> InterruptCounts {
        self.shared.counters.read(self.shared.controllers.apic_ids())
    }

    /// All registers, for the device tree, while all vCPUs are paused.
    pub fn inspect(&self) -> serde_json::Value {
        let saved = self.shared.controllers.save(now_ns());
        serde_json::to_value(saved).unwrap_or_else(|error| error.to_string().into())
    }
}

impl Drop for MonitorIrqchip {
    fn drop(&mut self) {
        self.shared.listener.stop();
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("The thread that delivers interrupts panicked");
        }
    }
}

impl Shared {
    fn index(&self, apic_id: u32) -> Option<usize> {
        self.controllers.apic_ids().binary_search(&apic_id).ok()
    }

    /// Runs `work` on the controllers, and executes the actions that it returns.
    fn with<R>(&self, work: impl FnOnce(&Controllers, &mut Vec<Action>) -> R) -> R {
        let mut actions = Vec::new();
        let result = work(&self.controllers, &mut actions);
        for action in actions {
            match action {
                Action::Kick { apic_id } => self.kick(apic_id),
                Action::SetTimer { apic_id, due_ns } => self.set_timer(apic_id, due_ns),
                Action::Resample { pin } => self.resample(pin),
                Action::Send { node, .. } => {
                    tracing::error!(node, "An interrupt for another node, of which this VM has none");
                }
            }
        }
        result
    }

    fn kick(&self, apic_id: u32) {
        if let Some(kicks) = self.kicks.get() {
            kicks.kick(apic_id);
        }
    }

    /// Sets a vCPU's timer. To be called on the vCPU's own thread.
    fn set_timer(&self, apic_id: u32, due_ns: Option<u64>) {
        let Some(timer) = self.index(apic_id).map(|index| &self.vcpus[index]) else { return };
        timer.due_ns.store(due_ns.unwrap_or(NEVER), Ordering::Release);
        // A cancelled timer may still expire; `due_ns` shows then that nothing is due.
        let Some(due_ns) = due_ns else { return };
        let part = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        let due_ns = due_ns.max(1);
        let due = Timespec { tv_sec: part(due_ns / 1_000_000_000), tv_nsec: part(due_ns % 1_000_000_000) };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: due };
        if let Err(error) = timerfd_settime(&timer.fd, TimerfdTimerFlags::ABSTIME, &once) {
            tracing::error!(%error, due_ns, apic_id, "The timer of a vCPU can't be set");
        }
    }

    /// Handles an expired timer. The expiry may belong to an older setting.
    fn timer_expired(&self, index: usize) {
        let (Some(timer), Some(apic_id)) = (self.vcpus.get(index), self.controllers.apic_ids().get(index))
        else {
            return;
        };
        if timer.due_ns.load(Ordering::Acquire) <= now_ns() {
            self.counters.timer_kick(index);
            self.kick(*apic_id);
        }
    }

    /// Signals the devices of the pin; those that still need service assert it again.
    fn resample(&self, pin: u8) {
        let resamplers = self.resamplers.lock().unwrap_or_else(PoisonError::into_inner);
        for fd in resamplers.get(&pin).into_iter().flatten() {
            signal(fd);
        }
    }

    /// Drops a message that is no interrupt, like a device's write to an unmapped address.
    fn signal_msi(&self, message: MsiMessage) {
        let MsiMessage { address, data } = message;
        let sent = self.with(|controllers, actions| controllers.signal_msi(address, data, actions));
        self.counters.msi(sent.is_ok());
        if let Err(error) = sent {
            tracing::debug!(%error, "dropped");
        }
    }

    /// Pulses a pin, which must exist.
    fn pulse(&self, pin: u32) {
        self.counters.edge();
        let done = self.with(|controllers, actions| {
            controllers.set_line(pin, true, actions)?;
            controllers.set_line(pin, false, actions)
        });
        if let Err(error) = done {
            tracing::error!(%error, "An edge is lost");
        }
    }

    /// Asserts a pin, which must exist, until its interrupt ends.
    fn assert_until_end(&self, pin: u32) {
        self.counters.level();
        let done = self.with(|controllers, actions| controllers.assert_until_end(pin, actions));
        if let Err(error) = done {
            tracing::error!(%error, "A level-triggered interrupt is lost");
        }
    }
}

/// Signals an eventfd. If its counter is full, a signal is pending already.
fn signal(fd: &OwnedFd) {
    match rustix::io::write(fd, &1u64.to_ne_bytes()) {
        Ok(_) | Err(rustix::io::Errno::AGAIN) => {}
        Err(error) => tracing::error!(%error, "An interrupt's end can't be reported"),
    }
}

/// Whether an eventfd or timer has been signaled since the last read.
fn take_signal(fd: &OwnedFd) -> bool {
    let mut count = [0; 8];
    rustix::io::read(fd, &mut count) == Ok(count.len())
}

fn check_pin(gsi: u32) -> io::Result<u8> {
    u8::try_from(gsi).ok().filter(|pin| *pin < IO_APIC_PINS).ok_or_else(|| {
        let text =
            format!("Interrupt pin {gsi} doesn't exist; the IOAPIC has pins 0 to {}", IO_APIC_PINS - 1);
        io::Error::new(io::ErrorKind::InvalidInput, text)
    })
}

impl InterruptController for MonitorIrqchip {
    fn set_line(&self, gsi: u32, asserted: bool) -> io::Result<()> {
        check_pin(gsi)?;
        self.shared.with(|controllers, actions| controllers.set_line(gsi, asserted, actions)).map_err(other)
    }

    fn edge_eventfd(&self, gsi: u32) -> io::Result<Arc<OwnedFd>> {
        check_pin(gsi)?;
        let mut edges = self.shared.edges.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(fd) = edges.get(&gsi) {
            return Ok(Arc::clone(fd));
        }
        let fd = Arc::new(new_eventfd()?);
        self.shared.listener.add(&fd, Source::Edge { pin: gsi, fd: Arc::clone(&fd) })?;
        edges.insert(gsi, Arc::clone(&fd));
        Ok(fd)
    }

    fn level_eventfds(&self, gsi: u32) -> io::Result<LevelLine> {
        let pin = check_pin(gsi)?;
        let line = LevelLine { trigger: Arc::new(new_eventfd()?), resample: Arc::new(new_eventfd()?) };
        self.shared.listener.add(&line.trigger, Source::Level { pin: gsi, fd: Arc::clone(&line.trigger) })?;
        let mut resamplers = self.shared.resamplers.lock().unwrap_or_else(PoisonError::into_inner);
        resamplers.entry(pin).or_default().push(Arc::clone(&line.resample));
        Ok(line)
    }

    fn signal_msi(&self, message: MsiMessage) -> io::Result<()> {
        self.shared.signal_msi(message);
        Ok(())
    }

    fn allocate_msi(&self, count: u16) -> io::Result<Vec<Arc<dyn MsiRoute>>> {
        routes::allocate(&self.shared, count)
    }

    fn reset(&self) -> io::Result<()> {
        self.shared.controllers.reset();
        Ok(())
    }

    fn save(&self) -> io::Result<SavedInterruptController> {
        // Pending signals belong to the state.
        listener::drain(&self.shared);
        let saved = self.shared.controllers.save(now_ns());
        let mut bytes = Vec::new();
        ciborium::into_writer(&saved, &mut bytes).map_err(io::Error::other)?;
        Ok(SavedInterruptController::Monitor(bytes))
    }

    fn restore(&self, saved: &SavedInterruptController) -> io::Result<()> {
        let SavedInterruptController::Monitor(bytes) = saved else {
            return Err(saved.elsewhere(IrqchipKind::Monitor));
        };
        let damaged = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
        let saved: SavedControllers = ciborium::from_reader(&bytes[..])
            .map_err(|error| damaged(format!("Saved interrupt controllers are damaged: {error}")))?;
        self.shared.controllers.load(&saved, now_ns()).map_err(|error| damaged(error.to_string()))?;
        for timer in &self.shared.vcpus {
            // Each vCPU sets its timer before it runs.
            timer.due_ns.store(NEVER, Ordering::Release);
        }
        Ok(())
    }
}

impl LocalApics for MonitorIrqchip {
    fn connect(&self, kicks: VcpuKicks) {
        if self.shared.kicks.set(kicks).is_err() {
            tracing::error!("Interrupt controllers were connected twice");
        }
    }

    fn cr8(&self, vcpu: u32) -> u8 {
        self.shared.controllers.vcpu(vcpu).map_or(0, |port| port.cr8())
    }

    fn left_guest(&self, vcpu: u32, cr8: u8) {
        if let Some(port) = self.shared.controllers.vcpu(vcpu) {
            port.set_cr8(cr8);
        }
    }

    fn next_event(&self, vcpu: u32, interruptible: bool) -> ApicEvent {
        self.shared.with(|controllers, actions| {
            let Some(port) = controllers.vcpu(vcpu) else { return ApicEvent::WaitForStartup };
            loop {
                let event = port.next_event(interruptible, now_ns(), actions);
                self.shared.counters.event(self.shared.index(vcpu), event);
                return match event {
                    apic::VcpuEvent::Init => ApicEvent::Init,
                    apic::VcpuEvent::Startup { vector } => ApicEvent::Startup { vector },
                    apic::VcpuEvent::WaitForStartup => ApicEvent::WaitForStartup,
                    apic::VcpuEvent::Nmi => ApicEvent::Nmi,
                    apic::VcpuEvent::Interrupt { vector } => ApicEvent::Interrupt { vector },
                    apic::VcpuEvent::AwaitInterruptWindow => ApicEvent::AwaitInterruptWindow,
                    apic::VcpuEvent::None => ApicEvent::None,
                    // There is no 8259 that would provide a vector.
                    apic::VcpuEvent::ExternalInterrupt => continue,
                };
            }
        })
    }

    fn has_event(&self, vcpu: u32, interruptible: bool) -> bool {
        self.shared.with(|controllers, actions| {
            controllers.vcpu(vcpu).is_some_and(|port| port.has_event(interruptible, now_ns(), actions))
        })
    }

    fn time_to_timer(&self, vcpu: u32) -> Option<Duration> {
        let timer = &self.shared.vcpus[self.shared.index(vcpu)?];
        let due_ns = timer.due_ns.load(Ordering::Acquire);
        (due_ns != NEVER).then(|| Duration::from_nanos(due_ns.saturating_sub(now_ns())))
    }

    fn read_msr(&self, vcpu: u32, msr: u32) -> Option<u64> {
        if !Controllers::owns_msr(msr) {
            return None;
        }
        self.shared.with(|controllers, actions| {
            let port = controllers.vcpu(vcpu)?;
            port.read_msr(msr, now_ns(), actions).ok()
        })
    }

    fn write_msr(&self, vcpu: u32, msr: u32, value: u64) -> bool {
        if !Controllers::owns_msr(msr) {
            return false;
        }
        self.shared.counters.write(self.shared.index(vcpu), msr);
        self.shared.with(|controllers, actions| {
            let Some(port) = controllers.vcpu(vcpu) else { return false };
            port.write_msr(msr, value, now_ns(), actions).is_ok()
        })
    }
}

/// The IOAPIC's page on the bus.
struct IoApicPage(Arc<Shared>);

impl BusDevice for IoApicPage {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.0.controllers.read_io_apic(offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.0.with(|controllers, actions| controllers.write_io_apic(offset, data, actions));
    }
}

#[cfg(test)]
mod tests;
