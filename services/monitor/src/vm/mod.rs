//! A VM from its description to its end.
//!
//! ```text
//! description -> Opened (files, sockets, /dev/kvm) -> sandbox entered -> Chassis (memory, empty buses)
//!   -> Machine (devices, vCPUs, and a kernel or a guest from a source monitor)
//!   -> running <-> paused ;  reset -> running ;  power off | stop | failure -> ended
//!   -> handing over -> moved | running again
//! ```

mod boot;
mod clock;
mod control;
mod devices;
mod error;
mod event;
mod incoming;
mod inherited;
mod interrupts;
mod irqchip;
mod machine;
mod metrics;
mod migration;
mod monitor_irqchip;
mod placer;
mod reset_backoff;
mod served;
mod threads;
mod vcpus;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use ::machine::memory::Userfault;
use ::machine::vcpu::VcpuEvent;
use platform_devices::MachineEvent;
use telemetry::guest_log::GuestLog;
use telemetry::{guest_info, guest_warn};

pub use error::Error;
pub use incoming::Incoming;
pub use monitor_irqchip::MonitorIrqchip;
pub(crate) use monitor_irqchip::{LISTENER_SYSCALLS, SYSCALLS as IRQCHIP_SYSCALLS};
pub use placer::MachinePlacer;
pub use threads::ThreadHook;

use self::control::Control;
use self::event::{Event, Events};
use self::incoming::{Doubt, PostCopyMemory, ReceivedVm, ServedDevices, SwitchableControl, WaitingControl};
use self::machine::{Chassis, Machine, Opened, ResetBy};
use self::migration::MigratingMachine;
use self::reset_backoff::ResetBackoff;
use crate::api::ApiListener;
use crate::description::{OnReboot, VmDescription};
use crate::migration::connection::Stop;
use crate::migration::postcopy::fetching::Fetching;
use crate::migration::progress::ProgressReporter;
use crate::migration::service::RequestListener;
use crate::sandbox::{END_SIGNALS, Sandbox, ThreadFilter, ThreadKind};

/// How a VM ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The guest powered off.
    PowerOff,
    /// The guest rebooted, and the description requests an end at reboots.
    Reboot,
    /// The API, the console's user or a signal ended it.
    Stopped,
    /// The VM runs at its destination.
    Moved,
}

/// Runs a VM to its end. `api_socket` is the path of its API's socket; the file is removed afterwards. With an address `incoming` the
/// monitor doesn't boot a guest. It waits there for a VM of the same shape from a source monitor.
///
/// # Errors
/// When the VM can't be started as described, the incoming migration fails, or the guest can't run further.
pub fn run(
    description: VmDescription,
    api_socket: PathBuf,
    incoming: Option<Incoming>,
) -> Result<Outcome, Error> {
    let started = Instant::now();
    raise_descriptor_limit();
    let (sender, receiver) = mpsc::channel();
    let events = Events::new(sender);

    let listener = ApiListener::bind(&api_socket)?;
    let requests = RequestListener::bind(&control_api::migration::socket_of(&api_socket))?;
    // The sandbox removes the privileges that a userfaultfd needs.
    let source = incoming.map(|incoming| incoming::listen(&description, incoming)).transpose()?;
    let source = source.map(|listener| (listener, Userfault::for_postcopy()));
    let opened = Opened::new(&description, &events, source.is_none())?;
    let sandbox = Sandbox::prepare(&description)?;
    let confinement = sandbox.enter_process()?;

    // From here on threads are started, and no file is opened.
    let signals = signals(&events, sandbox.thread_filter(ThreadKind::Signals))?;
    let guest = machine::linux(&description)?.kernel.display().to_string();
    let mut chassis = Chassis::assemble(description, opened, events.clone(), started, &sandbox)?;
    let api_filter = sandbox.thread_filter(ThreadKind::Api);
    let prepare = move || api_filter.apply_or_end();
    let reporter = Arc::new(ProgressReporter::default());
    let (machine, server, fetching) = match source {
        None => {
            let machine = Arc::new(chassis.boot(&sandbox)?);
            let control = Control::new(Arc::clone(&machine), confinement, Arc::clone(&reporter), None);
            let server = listener.serve(Arc::new(control), prepare)?;
            machine.start()?;
            (machine, server, None)
        }
        Some((source, uffd)) => {
            let (stop, doubt) = (Stop::default(), Arc::new(Doubt::default()));
            let waiting = WaitingControl::new(&chassis, guest, events.clone(), started, Arc::clone(&doubt));
            let control = Arc::new(SwitchableControl::new(waiting));
            let server = listener.serve(Arc::clone(&control) as _, prepare)?;
            let (shape, memory) = (chassis.shape().clone(), chassis.ram().memory());
            let filter = sandbox.thread_filter(ThreadKind::Migration);
            let postcopy = PostCopyMemory::new(uffd, &chassis);
            let daemon = migration::daemon_of(chassis.description());
            let devices = ServedDevices::new(chassis.connect_incoming()?, chassis.disks(), daemon, postcopy);
            incoming::await_vm(source, shape, memory, devices, events.clone(), stop, filter)?;
            let Some(received) = wait_for_vm(&receiver)? else { return Ok(Outcome::Stopped) };
            let (machine, fetching) =
                incoming::restore_and_run(chassis, received, &sandbox, &receiver, &doubt)?;
            let received = Arc::clone(&machine);
            control.set(Arc::new(Control::new(
                received,
                confinement,
                Arc::clone(&reporter),
                fetching.clone(),
            )));
            (machine, server, fetching)
        }
    };
    let filter = sandbox.thread_filter(ThreadKind::Migration);
    let migration = Arc::new(MigratingMachine::new(Arc::clone(&machine), fetching.clone()));
    let service = requests
        .serve(migration, reporter, move || filter.apply_or_end())
        .map_err(|source| Error::Monitor { what: "start the thread that moves the VM", source })?;
    sandbox.thread_filter(ThreadKind::Main).apply()?;

    let outcome = run_to_end(&machine, &receiver, fetching);
    drop(service);
    server.stop();
    signals.close();
    outcome
}

/// Waits for the VM's end, then ends its threads.
fn run_to_end(
    machine: &Machine,
    receiver: &mpsc::Receiver<Event>,
    fetching: Option<Fetching>,
) -> Result<Outcome, Error> {
    let result = wait(machine, receiver);
    let ended = machine.end();
    if let Some(fetching) = fetching {
        fetching.end();
    }
    let outcome = result?;
    ended?;
    Ok(outcome)
}

/// Whether one of the pending events ends this monitor. For waits for something other than events.
fn is_ended(events: &mpsc::Receiver<Event>) -> bool {
    events.try_iter().any(|event| {
        matches!(event, Event::Stop | Event::Signal(_) | Event::Machine(MachineEvent::ConsoleQuit))
    })
}

/// Waits until a VM has been received; `None` when this monitor is ended before.
fn wait_for_vm(events: &mpsc::Receiver<Event>) -> Result<Option<ReceivedVm>, Error> {
    loop {
        match events.recv() {
            Ok(Event::Received(received)) => return received.map(Some).map_err(Error::IncomingFailed),
            Ok(Event::Stop | Event::Signal(_) | Event::Machine(MachineEvent::ConsoleQuit)) | Err(_) => {
                return Ok(None);
            }
            Ok(other) => tracing::debug!(?other, "dropped: the VM isn't here yet"),
        }
    }
}

/// Raises the soft limit of open files to the hard one. Each vCPU and each interrupt vector needs descriptors, and a machine with many of
/// both needs more than the usual 1024.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })
    {
        tracing::warn!(%error, ?limit, "the limit of open files can't be raised; many vCPUs or queues may not fit");
    }
}

/// Handles events until one of them ends the VM.
fn wait(machine: &Machine, events: &mpsc::Receiver<Event>) -> Result<Outcome, Error> {
    let mut backoff = ResetBackoff::new(Instant::now());
    let log = GuestLog::new();
    loop {
        // `machine` holds a sender, so the channel can't close.
        let Ok(event) = events.recv() else { return Ok(Outcome::Stopped) };
        if event.request().is_some()
            && !matches!(event, Event::Reset { .. })
            && machine.is_stopped_by_migration()
        {
            // The saved state includes the request. After a rollback the source sends its event again.
            tracing::info!(?event, "the guest's request is part of the migrated state");
            continue;
        }
        match event {
            Event::Machine(MachineEvent::PowerOff) => {
                tracing::info!("the guest powered off");
                return Ok(Outcome::PowerOff);
            }
            Event::Stop | Event::Machine(MachineEvent::ConsoleQuit) => return Ok(Outcome::Stopped),
            Event::Moved => return Ok(Outcome::Moved),
            Event::Lost(error) => return Err(Error::Lost(error)),
            Event::Received(_) => tracing::debug!("a VM came twice"),
            Event::MachineCheck => {
                if let Err(error) = machine.vcpus.machine_check() {
                    tracing::warn!(%error, "a device's machine check reaches no vCPU");
                }
            }
            Event::Signal(signal) => {
                tracing::info!(signal, "ended by a signal");
                return Ok(Outcome::Stopped);
            }
            Event::Machine(MachineEvent::Reset(_)) | Event::Vcpu(VcpuEvent::Shutdown { .. })
                if machine.description.on_reboot == OnReboot::Stop =>
            {
                tracing::info!(?event, "the guest rebooted");
                return Ok(Outcome::Reboot);
            }
            Event::Reset { forced } => {
                tracing::info!(forced, "the API resets the machine");
                let by = if forced { ResetBy::UserWithForce } else { ResetBy::User };
                if let Some(outcome) = reset(machine, events, Duration::ZERO, by)? {
                    return Ok(outcome);
                }
                backoff.restarted(Instant::now());
            }
            Event::Machine(MachineEvent::Reset(_)) | Event::Vcpu(VcpuEvent::Shutdown { .. }) => {
                let delay = backoff.delay(Instant::now());
                let delay_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
                if let Event::Vcpu(VcpuEvent::Shutdown { vcpu, .. }) = &event {
                    // No guest with ACPI reboots by a triple fault, and the reset discards its registers.
                    guest_warn!(log, vcpu, delay_ms, "a triple fault of a vCPU resets the machine");
                } else {
                    guest_info!(log, ?event, delay_ms, "resetting the machine");
                }
                if let Some(outcome) = reset(machine, events, delay, ResetBy::Guest)? {
                    return Ok(outcome);
                }
                backoff.restarted(Instant::now());
            }
            Event::Vcpu(event) => return Err(Error::GuestFailed(describe(&event))),
            Event::Refused(device, what) => return Err(Error::Refused { device, what }),
        }
    }
}

/// Resets the machine after `delay`, during which its vCPUs don't run. Returns an outcome if an event ended the VM meanwhile.
fn reset(
    machine: &Machine,
    events: &mpsc::Receiver<Event>,
    delay: Duration,
    by: ResetBy,
) -> Result<Option<Outcome>, Error> {
    if !delay.is_zero() {
        machine.pause_vcpus_for_reset()?;
        if let Some(outcome) = drop_events(machine, events, delay)? {
            return Ok(Some(outcome));
        }
    }
    // Drops requests of the old guest: each of its vCPUs may have made one. The new guest may request the next reset with its first
    // instruction.
    machine.reset(by, || drop_events(machine, events, Duration::ZERO))
}

/// Drops events of a guest that is being reset, for the time `wait`. Returns early when the VM ends, or when the API requests a reset.
fn drop_events(
    machine: &Machine,
    events: &mpsc::Receiver<Event>,
    wait: Duration,
) -> Result<Option<Outcome>, Error> {
    let until = Instant::now() + wait;
    loop {
        match events.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Err(_) => return Ok(None),
            Ok(event @ Event::Reset { .. }) if !wait.is_zero() => {
                // A paused machine executes this event as its user's reset. Otherwise the reset in progress drops it.
                machine.events.send(event);
                return Ok(None);
            }
            Ok(Event::Stop | Event::Machine(MachineEvent::ConsoleQuit) | Event::Signal(_)) => {
                return Ok(Some(Outcome::Stopped));
            }
            Ok(Event::Moved) => return Ok(Some(Outcome::Moved)),
            Ok(Event::Lost(error)) => return Err(Error::Lost(error)),
            Ok(Event::Refused(device, what)) => return Err(Error::Refused { device, what }),
            Ok(other) => tracing::debug!(?other, "dropped with the reset"),
        }
    }
}

fn describe(event: &VcpuEvent) -> String {
    match event {
        VcpuEvent::Failed { vcpu, what } => format!("vCPU {vcpu}: {what}"),
        VcpuEvent::Panicked { vcpu, what } => format!("the monitor's thread of vCPU {vcpu} panicked: {what}"),
        VcpuEvent::Halted { vcpu } => {
            format!("vCPU {vcpu} halted without a local APIC to wake it")
        }
        VcpuEvent::SystemEvent { vcpu, kind } => format!("vCPU {vcpu} reported system event {kind}"),
        VcpuEvent::Shutdown { vcpu, .. } => format!("vCPU {vcpu} shut down"),
        VcpuEvent::Stopped { vcpu } => format!("vCPU {vcpu} stopped"),
    }
}

/// SIGINT, SIGTERM and SIGHUP end the VM cleanly.
fn signals(events: &Events, filter: ThreadFilter) -> Result<signal_hook::iterator::Handle, Error> {
    let failed = |source| Error::Monitor { what: "listen to signals", source };
    let mut signals = signal_hook::iterator::Signals::new(END_SIGNALS).map_err(failed)?;
    let handle = signals.handle();
    let events = events.clone();
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            filter.apply_or_end();
            for signal in signals.forever() {
                events.send(Event::Signal(signal));
            }
        })
        .map_err(failed)?;
    Ok(handle)
}
