//! The devices of a machine: opened before the sandbox is entered, plugged while the machine is assembled.

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
use platform_devices::console::{Console, ConsoleBackend};
use platform_devices::legacy::{self, AbsentTimer, DelayPort, KeyboardReset, ResetControl};
use platform_devices::power::{self, PowerRegisters};
use platform_devices::serial::Serial;
use platform_devices::{EventSink, eventfd_interrupt};
use virtio_devices::block::{Block, BlockConfig, DiskContent, ImageFormat};
use virtio_devices::device::VirtioDevice;
use virtio_devices::net::{self, Net, NetConfig};
use virtio_devices::rng::Rng;
use virtio_devices::transport::VirtioPciFunction;
use virtio_devices::vsock::{Vsock, VsockConfig};

use super::error::Error;
use super::event::{Event, Events};
use super::inherited;
use super::interrupts::ControllerMsi;
use super::placer::MachinePlacer;
use super::served::{self, OpenedSlot};
use super::threads::{self, DeviceThreadMaker};
use crate::description::{self, DiskFormat, NetBackend, VmDescription};
use crate::migration::error::line;
use crate::migration::shape::ShapeDevice;
use crate::migration::state::SavedDevices;
use crate::neighbour::{NeighbourFunction, OpenedNeighbour, OpenedNetwork, RunningNetwork};
use crate::nic::{NicHandle, OpenedNic, Refusals};
use crate::sandbox::{Sandbox, ThreadKind};
use crate::vfio_user::{Arriving, VfioUserFunction};

/// Devices with open files, sockets and interfaces, and without a machine yet.
pub struct OpenedDevices {
    console: Option<Console>,
    virtio: Vec<Box<dyn VirtioDevice>>,
    disks: Vec<DiskContent>,
    nics: Vec<OpenedNic>,
    served: Vec<OpenedSlot>,
    neighbour: Option<OpenedNeighbour>,
    network: Option<OpenedNetwork>,
    sink: EventSink,
    events: Events,
}

impl OpenedDevices {
    /// Opens the files, sockets and interfaces that the description names. With `claim`, locks the disks' images now; otherwise the
    /// incoming VM locks them at its switchover.
    pub fn new(description: &VmDescription, events: &Events, claim: bool) -> Result<Self, Error> {
        let sink: EventSink = {
            let events = events.clone();
            Arc::new(move |event| events.send(Event::Machine(event)))
        };
        let console = match &description.console {
            description::Console::Null => None,
            description::Console::Stdio => Some(ConsoleBackend::Stdio),
            description::Console::Pty => Some(ConsoleBackend::Pty { link: None }),
            description::Console::File(path) => Some(ConsoleBackend::File {
                path: path.clone(),
                limit_bytes: description.console_limit_bytes,
            }),
            description::Console::Socket(path) => Some(ConsoleBackend::Socket { path: path.clone() }),
        };
        let console = Console::open(&console.unwrap_or(ConsoleBackend::Null), Arc::clone(&sink))?;
        if let Some(path) = console.pty_path() {
            tracing::info!(path = %path.display(), "the console is a pseudo-terminal");
        }
        let mut virtio: Vec<Box<dyn VirtioDevice>> = Vec::new();
        let mut disks = Vec::new();
        for (index, disk) in description.disks.iter().enumerate() {
            let disk = open_disk(&format!("disk{index}"), disk, claim)?;
            disks.push(disk.content());
            virtio.push(Box::new(disk));
        }
        let neighbour = description.neighbour.as_ref();
        let mut neighbour =
            neighbour.map(|wish| OpenedNeighbour::open(&description.name, wish)).transpose()?;
        let mut network = None;
        for (index, interface) in description.net.iter().enumerate() {
            let name = format!("net{index}");
            // The network device is the neighbourhood's member, and the guest gets no neighbour function.
            let to_neighbours = interface.backend == NetBackend::Neighbours;
            match neighbour.take_if(|_| to_neighbours) {
                Some(opened) => {
                    let mac = net::MacAddress(interface.mac.octets());
                    let (membership, device) = OpenedNetwork::new(opened, name, mac, interface.mtu)?;
                    network = Some(membership);
                    virtio.push(Box::new(device));
                }
                None => virtio.push(Box::new(open_net(&name, interface)?)),
            }
        }
        if description.rng {
            virtio.push(Box::new(Rng::new("rng0")));
        }
        if let Some(vsock) = &description.vsock {
            let config =
                VsockConfig { name: "vsock0".to_owned(), cid: vsock.cid, socket: vsock.socket.clone() };
            virtio.push(Box::new(Vsock::open(config).map_err(|error| Error::device("vsock0", error))?));
        }
        let open_nic = |nic| OpenedNic::open(nic).map_err(|error| Error::device(&nic.name, error));
        let nics = description.nics.iter().map(open_nic).collect::<Result<Vec<_>, _>>()?;
        let served = served::open(description, !claim)?;
        Ok(Self {
            console: Some(console),
            virtio,
            disks,
            nics,
            served,
            neighbour,
            network,
            sink,
            events: events.clone(),
        })
    }

    /// The contents of the VM's disks.
    pub fn disks(&self) -> Vec<DiskContent> {
        self.disks.clone()
    }

    /// Whether the ACPI tables describe a console.
    pub fn has_console(&self) -> bool {
        self.console.is_some()
    }

    /// The guest-visible shape of the devices that can migrate.
    pub fn shapes(&self) -> Vec<ShapeDevice> {
        let shape = |device: &dyn VirtioDevice| ShapeDevice {
            name: device.name().to_owned(),
            device_id: device.device_id(),
            queues: device.queue_sizes(),
        };
        self.virtio.iter().map(|device| shape(&**device)).chain(served::shapes(&self.served)).collect()
    }

    /// Receivers for the state of served devices of an incoming VM.
    pub fn arriving(&mut self, ram: &GuestRam) -> Result<Vec<Arriving>, Error> {
        served::arriving(&mut self.served, ram)
    }

    /// The neighbour registry's data, if the VM has a neighbourhood.
    pub fn neighbour(&self) -> Option<&OpenedNeighbour> {
        self.neighbour.as_ref()
    }

    /// The membership of a network device, if the VM has one.
    pub fn network(&self) -> Option<&OpenedNetwork> {
        self.network.as_ref()
    }

    /// Plugs all devices into a machine: at power-on state, or with their saved state at their saved places.
    #[allow(clippy::too_many_arguments)]
    pub fn plug(
        self,
        vm: &Arc<Vm>,
        ram: &GuestRam,
        controller: &Arc<dyn InterruptController>,
        ports: &Arc<AddressSpace>,
        memory: &Arc<AddressSpace>,
        map: &MachineMap,
        sandbox: &Sandbox,
        saved: Option<&SavedDevices>,
    ) -> Result<(Devices, Arc<PciRoot>), Error> {
        let edge = |gsi| {
            controller
                .edge_eventfd(gsi)
                .map_err(|source| Error::Monitor { what: "set up an interrupt pin", source })
        };
        let (sink, button) = (Arc::clone(&self.sink), eventfd_interrupt(edge(layout::EVENT_GSI)?));
        let power = Arc::new(match saved {
            None => PowerRegisters::new(sink, button),
            Some(saved) => PowerRegisters::restore(&saved.power, sink, button)?,
        });
        ports.insert(layout::POWER_REGISTERS.into(), power::PORTS, "power", Arc::clone(&power) as _)?;
        let keyboard = Arc::new(KeyboardReset::new(Arc::clone(&self.sink)));
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
        if map.x2apic {
            ports.insert(legacy::TIMER.into(), legacy::TIMER_PORTS, "no-timer", Arc::new(AbsentTimer))?;
        }
        let serial = match self.console {
            Some(mut console) => {
                let filter = sandbox.thread_filter(ThreadKind::Console);
                console.on_thread_start(move || filter.apply_or_end());
                let interrupt = eventfd_interrupt(edge(layout::COM1_GSI)?);
                let serial = Arc::new(match saved.and_then(|saved| saved.serial.as_ref()) {
                    None => Serial::new("com1", console, interrupt)?,
                    Some(saved) => Serial::restore("com1", saved, console, interrupt)?,
                });
                ports.insert(layout::COM1.into(), Serial::PORTS, "com1", Arc::clone(&serial) as _)?;
                Some(serial)
            }
            None => None,
        };

        let placer = Arc::new(MachinePlacer::new(Arc::clone(vm), Arc::clone(ports), Arc::clone(memory)));
        let range = |range: firmware::map::AddressRange| AddressRange { start: range.start, len: range.len };
        let config = RootConfig {
            windows: Windows {
                memory32: range(map.pci.memory32),
                memory64: map.pci.memory64.map(range),
                io: Some(AddressRange {
                    start: layout::PCI_IO_FIRST.into(),
                    len: u64::from(layout::PCI_IO_LAST - layout::PCI_IO_FIRST) + 1,
                }),
            },
            placer,
            intx: Arc::new(IntxPins { controller: Arc::clone(controller) }),
        };
        let root = Arc::new(match saved {
            None => PciRoot::new(config),
            Some(saved) => PciRoot::restore(config, &saved.root)?,
        });
        let maker = Arc::new(
            DeviceThreadMaker::start(sandbox.thread_filter(ThreadKind::DeviceWorker))
                .map_err(|source| Error::Monitor { what: "start the thread that starts devices", source })?,
        );
        let msi = ControllerMsi::new(Arc::clone(controller));
        let watcher = threads::hook(sandbox, ThreadKind::VfioUser);
        let (served_in_place, served_anywhere) = served::by_slot(self.served);
        let mut served = served::plug(served_in_place, &root, ram, &msi, &watcher, saved)?;
        let mut virtio = Vec::new();
        for device in self.virtio {
            let function = match saved {
                None => {
                    let name = device.name().to_owned();
                    let function = VirtioPciFunction::new(device, ram.memory(), &msi)
                        .map_err(|error| Error::device(&name, error))?;
                    root.plug_next(Arc::clone(&function) as Arc<dyn PciFunction>)?;
                    function
                }
                Some(saved) => restore(device, ram, &msi, saved, &root)?,
            };
            function.activate_on(Arc::clone(&maker) as _);
            virtio.push(function);
        }
        let mut nics = Vec::new();
        for nic in self.nics {
            let on_start = threads::hook(sandbox, ThreadKind::DeviceWorker);
            let (events, name) = (self.events.clone(), nic.name().to_owned());
            let stop = Arc::new(move |what| events.send(Event::Refused(name.clone(), what)));
            let events = self.events.clone();
            let check = Box::new(move || events.send(Event::MachineCheck));
            // Weak references: a bus owns its devices, so they must not own the bus.
            let (its_vm, ports, memory) = (Arc::downgrade(vm), Arc::downgrade(ports), Arc::downgrade(memory));
            let drain = move || {
                if let (Some(vm), Some(ports), Some(memory)) =
                    (its_vm.upgrade(), ports.upgrade(), memory.upgrade())
                {
                    vm.late().drain(&ports, &memory);
                }
            };
            nics.push(nic.plug(
                &root,
                ram,
                controller.as_ref(),
                on_start,
                drain,
                Refusals { stop, check },
            )?);
        }
        served.extend(served::plug(served_anywhere, &root, ram, &msi, &watcher, saved)?);
        if let Some(opened) = self.neighbour {
            let function = NeighbourFunction::new(opened, vm, ram, memory, &msi)?;
            let address = root.plug_next(Arc::clone(&function) as Arc<dyn PciFunction>)?;
            let bus = Arc::downgrade(&root);
            let refresh = Box::new(move || {
                if let Some(bus) = bus.upgrade() {
                    bus.refresh(address);
                }
            });
            function.start(refresh, Arc::clone(&watcher))?;
        }
        let network = self.network.map(|opened| opened.join(ram, Arc::clone(&watcher))).transpose()?;
        match saved {
            None => root.assign_bars()?,
            Some(_) => root.place_all(),
        }
        memory.insert(layout::ECAM.start, layout::ECAM.len, "pci-ecam", Arc::new(Ecam(Arc::clone(&root))))?;
        let ports_of_root = Arc::new(ConfigPorts(Arc::clone(&root)));
        let reset_control = Arc::new(ResetControl::new(ports_of_root, Arc::clone(&self.sink)));
        ports.insert(CONFIG_PORTS_START.into(), CONFIG_PORTS_LEN.into(), "pci-config", reset_control)?;
        Ok((Devices { serial, power, virtio, disks: self.disks, served, nics, _network: network }, root))
    }
}

/// Platform devices of a running machine. The root bus lists the PCI functions.
pub struct Devices {
    /// Console.
    pub serial: Option<Arc<Serial>>,
    /// Power, reset and sleep registers with the power button.
    pub power: Arc<PowerRegisters>,
    /// The virtio functions, which can migrate.
    pub virtio: Vec<Arc<VirtioPciFunction>>,
    /// Contents of the disks.
    pub disks: Vec<DiskContent>,
    /// Functions that other processes serve.
    pub served: Vec<Arc<VfioUserFunction>>,
    /// Commodity NICs.
    pub nics: Vec<NicHandle>,
    /// The VM is a member of its neighbourhood while this exists.
    _network: Option<RunningNetwork>,
}

impl Devices {
    /// Machine reset.
    pub fn reset(&self) {
        if let Some(serial) = &self.serial {
            serial.reset();
        }
        self.power.reset();
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

fn open_disk(name: &str, disk: &description::Disk, claim: bool) -> Result<Block, Error> {
    let config = BlockConfig {
        format: match disk.format {
            DiskFormat::Auto => ImageFormat::Auto,
            DiskFormat::Raw => ImageFormat::Raw,
            DiskFormat::Qcow2 => ImageFormat::Qcow2,
        },
        read_only: disk.readonly,
        serial: disk.serial.clone(),
        queues: disk.queues,
        direct: disk.direct,
        logical_block_size: disk.logical_block_size,
        claim,
        ..BlockConfig::new(name, disk.path.clone())
    };
    Block::open(config).map_err(|error| Error::device(name, error))
}

fn open_net(name: &str, interface: &description::Net) -> Result<Net, Error> {
    let config = NetConfig {
        name: name.to_owned(),
        backend: match &interface.backend {
            NetBackend::Tap(ifname) => net::Backend::Tap { ifname: ifname.clone() },
            NetBackend::Fd(number) => {
                let fd = inherited::take(*number)
                    .map_err(|source| Error::InheritedFd { number: *number, source })?;
                net::Backend::TapFd(vec![fd])
            }
            NetBackend::User => net::Backend::User,
            NetBackend::Neighbours => {
                let reason = "it has no neighbourhood; this is a bug";
                return Err(Error::device(name, std::io::Error::other(reason)));
            }
        },
        mac: Some(net::MacAddress(interface.mac.octets())),
        queue_pairs: interface.queues,
        mtu: interface.mtu,
    };
    Net::open(config).map_err(|error| Error::device(name, error))
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
