//! The machine as something that moves: saved whole, stopped and let go on.

use std::sync::Arc;
use std::time::{Duration, Instant};

use control_api::migration::MigrationTimeline;
use control_api::types::VmState;
use machine::memory::GuestMemorySpace;
use machine::slots::DirtyPages;
use pci::function::PciFunction as _;
use pci::root::FunctionAddress;

use super::error::Error;
use super::event::Event;
use super::machine::Machine;
use crate::migration::MigrationError;
use crate::migration::error::line;
use crate::migration::service::Movable;
use crate::migration::shape::{self, Shape};
use crate::migration::source::Departing;
use crate::migration::state::{MACHINE_STATE_VERSION, SavedDevices, SavedMachine, SavedPlace};

/// How long a destination that gave up may take to let go of the disks.
const LETTING_GO: Duration = Duration::from_secs(10);

/// A machine and what it was doing before it was handed over.
pub struct MovingMachine {
    machine: Arc<Machine>,
    was_running: std::sync::atomic::AtomicBool,
}

impl MovingMachine {
    /// To be moved, perhaps.
    pub fn new(machine: Arc<Machine>) -> Self {
        Self { machine, was_running: false.into() }
    }

    /// vCPUs, then devices; nothing else may let them go on from here. Then the state, then the disks.
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
            for (_, function) in machine.root.functions() {
                function.quiesce()?;
            }
        }
        let saved = save(machine, running)?;
        for function in &machine.devices.virtio {
            function.hand_over().map_err(|error| Error::device(function.name(), error))?;
        }
        Ok(saved)
    }

    fn take_back(&self) -> Result<(), Error> {
        let machine = &self.machine;
        if *machine.state() != VmState::HandingOver {
            return Ok(());
        }
        let until = Instant::now() + LETTING_GO;
        while let Err(error) = machine.take_disks() {
            if Instant::now() >= until {
                // Its user may try again with `resume`.
                *machine.state() = VmState::Paused;
                return Err(error);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        *machine.state() = VmState::Paused;
        if self.was_running.load(std::sync::atomic::Ordering::SeqCst) { machine.resume() } else { Ok(()) }
    }
}

/// Everything of a machine whose vCPUs and devices stand still.
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
    Ok(SavedMachine {
        version: MACHINE_STATE_VERSION,
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
    })
}

impl Departing for MovingMachine {
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
        logging.map_err(MigrationError::machine("set to log writes"))
    }

    fn stop_logging(&self) {
        if let Err(error) = self.machine.vm.slots().set_dirty_logging_all(false) {
            tracing::warn!(
                error = line(&error),
                "The log of the guest's writes stays on, which costs it time"
            );
        }
    }

    fn take_dirty(&self) -> Result<Vec<DirtyPages>, MigrationError> {
        self.machine.vm.slots().take_dirty_all().map_err(MigrationError::machine("asked what it wrote"))
    }

    fn settle(&self) -> Result<(), MigrationError> {
        let settled = self.machine.devices.virtio.iter().try_for_each(|function| function.settle());
        settled.map_err(MigrationError::machine("made durable"))
    }

    fn hold_back(&self, time: Duration) {
        // Held, so that a pause or reset of somebody else waits and isn't undone.
        let state = self.machine.state();
        if *state != VmState::Running {
            return;
        }
        let held = self.machine.vcpus.pause().and_then(|()| {
            std::thread::sleep(time);
            self.machine.vcpus.resume()
        });
        if let Err(error) = held {
            tracing::warn!(error = line(&error), "The vCPUs can't be held back");
        }
    }

    fn stop(&self) -> Result<Vec<u8>, MigrationError> {
        let saved = self.hand_over().map_err(MigrationError::machine("stopped and saved"))?;
        let encoded = saved.encode().map_err(std::io::Error::other);
        encoded.map_err(MigrationError::machine("written down"))
    }

    fn go_on(&self) -> Result<(), MigrationError> {
        self.take_back().map_err(MigrationError::machine("let go on"))
    }

    fn stay_in_doubt(&self) {
        let mut state = self.machine.state();
        if *state == VmState::HandingOver {
            *state = VmState::Paused;
        }
    }
}

impl Movable for MovingMachine {
    fn immovable(&self) -> Option<String> {
        shape::immovable(&self.machine.description)
    }

    fn moved(&self, timeline: &MigrationTimeline) {
        tracing::info!(destination = timeline.destination, pause_ms = timeline.pause_ms, "The VM has moved");
        self.machine.events.send(Event::Moved);
    }
}
