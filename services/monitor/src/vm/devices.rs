//! The devices of a machine: opened before the sandbox is entered, plugged while the machine is assembled.

mod plug;

use std::sync::Arc;

use machine::memory::GuestRam;
use platform_devices::EventSink;
use platform_devices::console::{Console, ConsoleBackend};
use platform_devices::power::PowerRegisters;
use platform_devices::serial::Serial;
use virtio_devices::block::{Block, BlockConfig, DiskContent, ImageFormat};
use virtio_devices::device::VirtioDevice;
use virtio_devices::net::{self, Net, NetConfig};
use virtio_devices::rng::Rng;
use virtio_devices::transport::VirtioPciFunction;
use virtio_devices::vsock::{Vsock, VsockConfig};

use super::error::Error;
use super::event::{Event, Events};
use super::inherited;
use super::served::{self, OpenedSlot};
use crate::description::{self, DiskFormat, NetBackend, VmDescription};
use crate::migration::shape::ShapeDevice;
use crate::neighbour::{OpenedNeighbour, OpenedNetwork, RunningNetwork};
use crate::nic::{NicHandle, OpenedNic};
use crate::vfio_user::{IncomingFunction, VfioUserFunction};

pub use self::plug::MachineParts;

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
    pub fn connect_incoming(&mut self, ram: &GuestRam) -> Result<Vec<IncomingFunction>, Error> {
        served::connect_incoming(&mut self.served, ram)
    }

    /// The neighbour registry's data, if the VM has a neighbourhood.
    pub fn neighbour(&self) -> Option<&OpenedNeighbour> {
        self.neighbour.as_ref()
    }

    /// The membership of a network device, if the VM has one.
    pub fn network(&self) -> Option<&OpenedNetwork> {
        self.network.as_ref()
    }
}

/// Platform devices of a running machine. The root bus lists the PCI functions.
pub struct Devices {
    /// COM1, if the VM has a console.
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
