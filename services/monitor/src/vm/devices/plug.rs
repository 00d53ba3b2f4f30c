//! Devices are plugged into a machine.

use std::sync::Arc;

use firmware::{MachineMap, layout};
use machine::bus::{AddressSpace, BusDevice};
use machine::interrupt::InterruptController;
use machine::memory::GuestRam;
use machine::vm::Vm;
use pci::function::PciFunction;
use pci::root::{
    AddressRange, CONFIG_PORTS_LEN, CONFIG_PORTS_START, FunctionAddress, PciRoot, RootConfig, Windows,
};
use platform_devices::console::Console;
use platform_devices::legacy::{self, AbsentTimer, DelayPort, KeyboardReset, ResetControl};
use platform_devices::power::{self, PowerRegisters};
use platform_devices::serial::Serial;
use platform_devices::{EventSink, Interrupt, eventfd_interrupt};
use virtio_devices::device::VirtioDevice;
use virtio_devices::transport::VirtioPciFunction;

use super::{Devices, OpenedDevices};
use crate::migration::error::line;
use crate::migration::state::SavedDevices;
use crate::neighbour::{NeighbourFunction, OpenedNeighbour};
use crate::nic::{NicHandle, OpenedNic, Refusals};
use crate::sandbox::{Sandbox, ThreadKind};
use crate::vm::error::Error;
use crate::vm::event::{Event, Events};
use crate::vm::interrupts::ControllerMsi;
use crate::vm::placer::MachinePlacer;
use crate::vm::served;
use crate::vm::threads::{self, DeviceThreadMaker, ThreadHook};

/// The parts of a machine that devices are plugged into.
pub struct MachineParts<'a> {
    /// KVM's VM.
    pub vm: &'a Arc<Vm>,
    /// Guest RAM.
    pub ram: &'a GuestRam,
    /// Interrupt controllers.
    pub controller: &'a Arc<dyn InterruptController>,
    /// Bus of ports.
    pub ports: &'a Arc<AddressSpace>,
    /// Bus of memory.
    pub memory: &'a Arc<AddressSpace>,
    /// Addresses that the firmware tables describe.
    pub map: &'a MachineMap,
    /// Confinement of the devices' threads.
    pub sandbox: &'a Sandbox,
    /// The devices' saved state, in an incoming VM.
    pub saved: Option<&'a SavedDevices>,
}

impl OpenedDevices {
    /// Plugs all devices into a machine: at power-on state, or with their saved state at their saved places.
    pub fn plug(self, machine: &MachineParts<'_>) -> Result<(Devices, Arc<PciRoot>), Error> {
        let MachineParts { ram, saved, .. } = *machine;
        let power = machine.plug_platform(&self.sink)?;
        let serial = self.console.map(|console| machine.plug_serial(console)).transpose()?;
        let root = machine.root_bus()?;
        let maker = Arc::new(
            DeviceThreadMaker::start(machine.sandbox.thread_filter(ThreadKind::DeviceWorker))
                .map_err(|source| Error::Monitor { what: "start the thread that starts devices", source })?,
        );
        let msi = ControllerMsi::new(Arc::clone(machine.controller));
        let watcher = threads::hook(machine.sandbox, ThreadKind::VfioUser);
        let (served_in_place, served_anywhere) = served::by_slot(self.served);
        let mut served = served::plug(served_in_place, &root, ram, &msi, &watcher, saved)?;
        let mut virtio = Vec::new();
        for device in self.virtio {
            let function = machine.plug_virtio(device, &root, &msi)?;
            function.activate_on(Arc::clone(&maker) as _);
            virtio.push(function);
        }
        let mut nics = Vec::new();
        for nic in self.nics {
            nics.push(machine.plug_nic(nic, &root, &self.events)?);
        }
        served.extend(served::plug(served_anywhere, &root, ram, &msi, &watcher, saved)?);
        if let Some(opened) = self.neighbour {
            machine.plug_neighbour(opened, &root, &msi, &watcher)?;
        }
        let network = self.network.map(|opened| opened.join(ram, Arc::clone(&watcher))).transpose()?;
        match saved {
            None => root.assign_bars()?,
            Some(_) => root.place_all(),
        }
        machine.plug_config_space(&root, &self.sink)?;
        Ok((Devices { serial, power, virtio, disks: self.disks, served, nics, _network: network }, root))
    }
}

impl MachineParts<'_> {
    /// An edge-triggered interrupt at a pin.
    fn edge_interrupt(&self, gsi: u32) -> Result<Interrupt, Error> {
        let eventfd = self.controller.edge_eventfd(gsi);
        let failed = |source| Error::Monitor { what: "set up an interrupt pin", source };
        eventfd.map(eventfd_interrupt).map_err(failed)
    }

    /// Plugs the power registers and what PCs have at fixed ports, without the console.
    fn plug_platform(&self, sink: &EventSink) -> Result<Arc<PowerRegisters>, Error> {
        let (power_sink, button) = (Arc::clone(sink), self.edge_interrupt(layout::EVENT_GSI)?);
        let power = Arc::new(match self.saved {
            None => PowerRegisters::new(power_sink, button),
            Some(saved) => PowerRegisters::restore(&saved.power, power_sink, button)?,
        });
        let ports = self.ports;
        ports.insert(layout::POWER_REGISTERS.into(), power::PORTS, "power", Arc::clone(&power) as _)?;
        let keyboard = Arc::new(KeyboardReset::new(Arc::clone(sink)));
        ports.insert(
            legacy::KEYBOARD_CONTROLLER.into(),
            legacy::KEYBOARD_CONTROLLER_PORTS,
            "keyboard-controller",
            keyboard,
        )?;
        for port in [legacy::POST_PORT, legacy::DELAY_PORT] {
            ports.insert(port.into(), 1, "delay", Arc::new(DelayPort))?;
        }
        // Only guests with interrupt controllers in the monitor lack KVM's clock, and then probe for an 8254 timer.
        if self.map.x2apic {
            ports.insert(legacy::TIMER.into(), legacy::TIMER_PORTS, "no-timer", Arc::new(AbsentTimer))?;
        }
        Ok(power)
    }

    fn plug_serial(&self, mut console: Console) -> Result<Arc<Serial>, Error> {
        let filter = self.sandbox.thread_filter(ThreadKind::Console);
        console.on_thread_start(move || filter.apply_or_end());
        let interrupt = self.edge_interrupt(layout::COM1_GSI)?;
        let serial = Arc::new(match self.saved.and_then(|saved| saved.serial.as_ref()) {
            None => Serial::new("com1", console, interrupt)?,
            Some(saved) => Serial::restore("com1", saved, console, interrupt)?,
        });
        self.ports.insert(layout::COM1.into(), Serial::PORTS, "com1", Arc::clone(&serial) as _)?;
        Ok(serial)
    }

    fn root_bus(&self) -> Result<Arc<PciRoot>, Error> {
        let placer = MachinePlacer::new(Arc::clone(self.vm), Arc::clone(self.ports), Arc::clone(self.memory));
        let range = |range: firmware::map::AddressRange| AddressRange { start: range.start, len: range.len };
        let config = RootConfig {
            windows: Windows {
                memory32: range(self.map.pci.memory32),
                memory64: self.map.pci.memory64.map(range),
                io: Some(AddressRange {
                    start: layout::PCI_IO_FIRST.into(),
                    len: u64::from(layout::PCI_IO_LAST - layout::PCI_IO_FIRST) + 1,
                }),
            },
            placer: Arc::new(placer),
            intx: Arc::new(IntxPins { controller: Arc::clone(self.controller) }),
        };
        Ok(Arc::new(match self.saved {
            None => PciRoot::new(config),
            Some(saved) => PciRoot::restore(config, &saved.root)?,
        }))
    }

    fn plug_virtio(
        &self,
        device: Box<dyn VirtioDevice>,
        root: &PciRoot,
        msi: &ControllerMsi,
    ) -> Result<Arc<VirtioPciFunction>, Error> {
        if let Some(saved) = self.saved {
            return restore(device, self.ram, msi, saved, root);
        }
        let name = device.name().to_owned();
        let function = VirtioPciFunction::new(device, self.ram.memory(), msi)
            .map_err(|error| Error::device(&name, error))?;
        root.plug_next(Arc::clone(&function) as Arc<dyn PciFunction>)?;
        Ok(function)
    }

    fn plug_nic(&self, nic: OpenedNic, root: &Arc<PciRoot>, events: &Events) -> Result<NicHandle, Error> {
        let on_start = threads::hook(self.sandbox, ThreadKind::DeviceWorker);
        let (refused, name) = (events.clone(), nic.name().to_owned());
        let stop = Arc::new(move |what| refused.send(Event::Refused(name.clone(), what)));
        let events = events.clone();
        let check = Box::new(move || events.send(Event::MachineCheck));
        // Weak references: a bus owns its devices, so they must not own the bus.
        let (vm, ports, memory) =
            (Arc::downgrade(self.vm), Arc::downgrade(self.ports), Arc::downgrade(self.memory));
        let drain = move || {
            if let (Some(vm), Some(ports), Some(memory)) = (vm.upgrade(), ports.upgrade(), memory.upgrade()) {
                vm.coalesced().drain(&ports, &memory);
            }
        };
        nic.plug(root, self.ram, self.controller.as_ref(), on_start, drain, Refusals { stop, check })
    }

    fn plug_neighbour(
        &self,
        opened: OpenedNeighbour,
        root: &Arc<PciRoot>,
        msi: &ControllerMsi,
        watcher: &ThreadHook,
    ) -> Result<(), Error> {
        let function = NeighbourFunction::new(opened, self.vm, self.ram, self.memory, msi)?;
        let address = root.plug_next(Arc::clone(&function) as Arc<dyn PciFunction>)?;
        let bus = Arc::downgrade(root);
        let refresh = Box::new(move || {
            if let Some(bus) = bus.upgrade() {
                bus.refresh(address);
            }
        });
        Ok(function.start(refresh, Arc::clone(watcher))?)
    }

    /// Plugs the two ways to configuration space: the ECAM window, and ports, with the reset control register among them.
    fn plug_config_space(&self, root: &Arc<PciRoot>, sink: &EventSink) -> Result<(), Error> {
        let ecam = Arc::new(Ecam(Arc::clone(root)));
        self.memory.insert(layout::ECAM.start, layout::ECAM.len, "pci-ecam", ecam)?;
        let ports_of_root = Arc::new(ConfigPorts(Arc::clone(root)));
        let reset_control = Arc::new(ResetControl::new(ports_of_root, Arc::clone(sink)));
        self.ports.insert(CONFIG_PORTS_START.into(), CONFIG_PORTS_LEN.into(), "pci-config", reset_control)?;
        Ok(())
    }
}

/// Plugs a function with its saved state at its saved place.
fn restore(
    device: Box<dyn VirtioDevice>,
    ram: &GuestRam,
    msi: &ControllerMsi,
    saved: &SavedDevices,
    root: &PciRoot,
) -> Result<Arc<VirtioPciFunction>, Error> {
    let name = device.name().to_owned();
    let place = saved.functions.iter().find(|place| place.name == name);
    let place = place.ok_or_else(|| Error::NoSavedDevice(name.clone()))?;
    let failed = |error: &dyn std::error::Error| Error::BadSavedDevice(name.clone(), line(error));
    let part = VirtioPciFunction::saved_device(&place.function).map_err(|error| failed(&error))?;
    let device = device.restored(&part).map_err(|error| failed(&error))?;
    let function = VirtioPciFunction::restore(device, ram.memory(), msi, &place.function)
        .map_err(|error| failed(&error))?;
    root.plug(FunctionAddress::from_devfn(place.devfn), Arc::clone(&function) as Arc<dyn PciFunction>)?;
    Ok(function)
}

/// INTx wires of the root bus end at IOAPIC pins.
struct IntxPins {
    controller: Arc<dyn InterruptController>,
}

impl pci::root::IntxSink for IntxPins {
    fn set_gsi(&self, gsi: u32, asserted: bool) -> Result<(), pci::interrupt::InterruptError> {
        self.controller.set_line(gsi, asserted).map_err(|source| pci::interrupt::InterruptError::Refused {
            what: format!("drive interrupt pin {gsi} to {}", u8::from(asserted)),
            source,
        })
    }
}

/// The ECAM window.
struct Ecam(Arc<PciRoot>);

impl BusDevice for Ecam {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.0.ecam_read(offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.0.ecam_write(offset, data);
    }
}

/// Ports 0xCF8 to 0xCFF.
struct ConfigPorts(Arc<PciRoot>);

impl BusDevice for ConfigPorts {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.0.ports_read(offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.0.ports_write(offset, data);
    }
}
