//! The machine in a migration: quiesced and saved as a whole, and resumed after a rollback.

use std::sync::Arc;
use std::time::{Duration, Instant};

use control_api::migration::MigrationTimeline;
use control_api::types::VmState;
use machine::memory::GuestMemorySpace;
use machine::slots::DirtyPages;
use pci::function::PciFunction as _;
use pci::root::FunctionAddress;
use vfio_user_protocol::migration::DeviceState;
use virtio_devices::block::DiskContent;

use super::error::Error;
use super::event::Event;
use super::machine::Machine;
use crate::description::VmDescription;
use crate::migration::MigrationError;
use crate::migration::daemon::Daemon;
use crate::migration::error::line;
use crate::migration::postcopy::fetching::Fetching;
use crate::migration::service::Migratable;
use crate::migration::shape::{self, Shape};
use crate::migration::source::SourceMachine;
use crate::migration::state::{SavedDevices, SavedMachine, SavedPlace};

/// How long the source waits, after an abort, for the destination to unlock the disks.
const DISK_UNLOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// The host daemon that serves a VM's RDMA NICs.
pub fn daemon_of(description: &VmDescription) -> Option<Daemon> {
    let nic = description.rdma.first()?;
    Some(Daemon::new(nic.host.clone(), description.name.clone()))
}

/// A machine, and its run state before the hand-over.
pub struct MigratingMachine {
    machine: Arc<Machine>,
    was_running: std::sync::atomic::AtomicBool,
    /// The daemon of the VM's RDMA NICs.
    daemon: Option<Daemon>,
    /// The post-copy by which the VM arrived here, finished or not.
    fetching: Option<Fetching>,
}

impl MigratingMachine {
    /// For a machine that may migrate.
    pub fn new(machine: Arc<Machine>, fetching: Option<Fetching>) -> Self {
        let daemon = daemon_of(&machine.description);
        Self { machine, was_running: false.into(), daemon, fetching }
    }

    /// Quiesces vCPUs, then devices; from here on only the migration resumes them. Then saves the state, and unlocks the disks.
    fn hand_over(&self) -> Result<SavedMachine, Error> {
        let machine = &self.machine;
        let running = {
            let mut state = machine.state();
            let running = match *state {
                VmState::Running => true,
                VmState::Paused => false,
                other => return Err(Error::NotNow(other)),
            };
            machine.vcpus.pause()?;
            self.was_running.store(running, std::sync::atomic::Ordering::SeqCst);
            *state = VmState::HandingOver;
            running
        };
        if running {
            for (_, function) in machine
                .root
                .functions()
                .into_iter()
                .filter(|(_, function)| !is_served(machine, function.name()))
            {
                function.quiesce()?;
            }
        }
        for function in &machine.devices.served {
            function.set_device_state(DeviceState::StopCopy)?;
        }
        let saved = save(machine, running)?;
        for function in &machine.devices.virtio {
            function.hand_over().map_err(|error| Error::device(function.name(), error))?;
        }
        Ok(saved)
    }

    fn roll_back(&self) -> Result<(), Error> {
        let machine = &self.machine;
        if !self.is_stopped() {
            return Ok(());
        }
        for function in &machine.devices.served {
            if let Err(error) = function.set_device_state(DeviceState::Running) {
                // The device's server has ended, and its state is lost. The guest runs without the device until the server is back.
                tracing::warn!(error = line(&error), "A device could not be resumed with the VM");
            }
        }
        let until = Instant::now() + DISK_UNLOCK_TIMEOUT;
        while let Err(error) = machine.lock_disks() {
            if Instant::now() >= until {
                // The user may retry with `resume`.
                *machine.state() = VmState::Paused;
                return Err(error);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        *machine.state() = VmState::Paused;
        if self.was_running.load(std::sync::atomic::Ordering::SeqCst) { machine.resume() } else { Ok(()) }
    }
}

/// Whether another process serves the function: its device stops as a whole.
fn is_served(machine: &Machine, name: &str) -> bool {
    machine.devices.served.iter().any(|function| function.name() == name)
}

/// Saves the whole machine. Its vCPUs and devices must be quiesced.
fn save(machine: &Machine, running: bool) -> Result<SavedMachine, Error> {
    let mut functions = Vec::new();
    for (at, function) in machine.root.functions() {
        if at != FunctionAddress::HOST_BRIDGE {
            functions.push(SavedPlace {
                devfn: at.slot() << 3 | at.function(),
                name: function.name().to_owned(),
                function: function.save()?,
            });
        }
    }
    // The vCPUs are paused and make no more requests.
    let asked = machine.events.pending_request();
    Ok(SavedMachine {
        version: SavedMachine::version_for(asked),
        running,
        vcpus: machine.vcpus.save()?,
        controller: machine
            .controller
            .save()
            .map_err(|source| Error::Monitor { what: "save the interrupt controllers", source })?,
        clock: machine.vm.save_clock()?,
        devices: SavedDevices {
            root: machine.root.save(),
            functions,
            serial: machine.devices.serial.as_ref().map(|serial| serial.save()),
            power: machine.devices.power.save(),
        },
        asked,
    })
}

/// Merges sets of pages. Sets of the same memory may be divided into different ranges.
fn merge(all: &mut Vec<DirtyPages>, more: DirtyPages) {
    match all.iter_mut().find(|set| set.start == more.start && set.bitmap.len() == more.bitmap.len()) {
        Some(set) => set.bitmap.iter_mut().zip(&more.bitmap).for_each(|(to, word)| *to |= word),
        None => all.push(more),
    }
}

impl SourceMachine for MigratingMachine {
    fn shape(&self) -> Shape {
        self.machine.shape.clone()
    }

    fn memory(&self) -> GuestMemorySpace {
        self.machine.ram().memory()
    }

    fn present(&self) -> Result<Vec<DirtyPages>, MigrationError> {
        self.machine.ram().present().map_err(MigrationError::machine("asked for the pages that it uses"))
    }

    fn start_logging(&self) -> Result<(), MigrationError> {
        let logging = self.machine.vm.slots().set_dirty_logging_all(true);
        logging.map_err(MigrationError::machine("set to log writes"))?;
        let served = self.machine.devices.served.iter().try_for_each(|function| function.log_writes(true));
        served.map_err(MigrationError::machine("set to log writes"))
    }

    fn stop_logging(&self) {
        if let Err(error) = self.machine.vm.slots().set_dirty_logging_all(false) {
            tracing::warn!(error = line(&error), "Dirty logging could not be stopped, which slows the guest");
        }
        for function in &self.machine.devices.served {
            let ended = function.log_writes(false).and_then(|()| match &self.daemon {
                // A device that left the logging state, and serves a running VM.
                Some(_) if *self.machine.state() == VmState::Running => {
                    function.set_device_state(DeviceState::Running)
                }
                _ => Ok(()),
            });
            if let Err(error) = ended {
                tracing::warn!(error = line(&error), "A device's server still logs its writes");
            }
        }
    }

    fn take_dirty(&self) -> Result<Vec<DirtyPages>, MigrationError> {
        let dirty = self.machine.vm.slots().take_dirty_all();
        let mut dirty = dirty.map_err(MigrationError::machine("asked what it wrote"))?;
        // Memory of devices that guests have mapped, such as doorbells, isn't part of the machine's RAM.
        let ram = self.machine.ram().layout();
        dirty.retain(|set| ram.ranges().iter().any(|range| set.start.wrapping_sub(range.start) < range.size));
        for function in &self.machine.devices.served {
            for (start, bitmap) in
                function.take_written().map_err(MigrationError::machine("asked what it wrote"))?
            {
                merge(&mut dirty, DirtyPages { start, bitmap });
            }
        }
        Ok(dirty)
    }

    fn settle(&self) -> Result<(), MigrationError> {
        let settled = self.machine.devices.virtio.iter().try_for_each(|function| function.settle());
        settled.map_err(MigrationError::machine("made durable"))
    }

    fn throttle(&self, time: Duration) {
        // The lock stays held, so that a concurrent pause or reset waits and isn't undone.
        let state = self.machine.state();
        if *state != VmState::Running {
            return;
        }
        let throttled = self.machine.vcpus.pause().and_then(|()| {
            std::thread::sleep(time);
            // A guest with a pending reset must not run before it.
            if self.machine.events.pending_request().is_some() { Ok(()) } else { self.machine.vcpus.resume() }
        });
        if let Err(error) = throttled {
            tracing::warn!(error = line(&error), "The vCPUs could not be throttled");
        }
    }

    fn throttle_peers(&self, percent: u8) -> Result<(), MigrationError> {
        for function in self.machine.devices.served.iter().filter(|_| self.daemon.is_some()) {
            let throttled = function.throttle_peers(percent);
            throttled.map_err(MigrationError::machine("kept from being written by peers"))?;
        }
        Ok(())
    }

    fn stop(&self) -> Result<Vec<u8>, MigrationError> {
        let saved = self.hand_over().map_err(MigrationError::machine("stopped and saved"))?;
        let encoded = saved.encode().map_err(std::io::Error::other);
        encoded.map_err(MigrationError::machine("written down"))
    }

    fn rollback(&self) -> Result<(), MigrationError> {
        self.roll_back().map_err(MigrationError::machine("resumed"))
    }

    fn daemon(&self) -> Option<&Daemon> {
        self.daemon.as_ref()
    }

    fn begin_devices(&self) -> Result<(), MigrationError> {
        let begun = self
            .machine
            .devices
            .served
            .iter()
            .try_for_each(|function| function.set_device_state(DeviceState::PreCopy));
        begun.map_err(MigrationError::machine("read from the processes that serve its devices"))
    }

    fn read_devices(&self) -> Result<Vec<Vec<u8>>, MigrationError> {
        let read = self
            .machine
            .devices
            .served
            .iter()
            .map(|function| function.read_device_state())
            .collect::<Result<_, _>>();
        read.map_err(MigrationError::machine("read from the processes that serve its devices"))
    }

    fn disks(&self) -> &[DiskContent] {
        &self.machine.devices.disks
    }

    fn set_in_doubt(&self) {
        let mut state = self.machine.state();
        if *state == VmState::HandingOver {
            *state = VmState::InDoubt;
        }
    }

    fn is_stopped(&self) -> bool {
        matches!(*self.machine.state(), VmState::HandingOver | VmState::InDoubt)
    }
}

impl Migratable for MigratingMachine {
    fn migration_blockers(&self) -> Option<String> {
        let state = *self.machine.state();
        if self.daemon.is_some() && state != VmState::Running {
            return Some(format!(
                "its state, {state:?}: a VM with RDMA NICs moves while it runs; resume it with `causeway resume`"
            ));
        }
        if let Some(left) = self.fetching.as_ref().map(Fetching::left).filter(|left| *left > 0) {
            return Some(format!(
                "its memory, of which {left} pages have yet to come from where it was before; try again then"
            ));
        }
        shape::migration_blockers(&self.machine.description)
    }

    fn lost(&self, error: MigrationError) {
        self.machine.events.send(Event::Lost(error));
    }

    fn moved(&self, timeline: &MigrationTimeline) {
        tracing::info!(destination = timeline.destination, pause_ms = timeline.pause_ms, "The VM has moved");
        self.machine.events.send(Event::Moved);
    }
}
