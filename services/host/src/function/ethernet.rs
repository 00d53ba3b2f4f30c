//! Function 0: vmxnet3, as a vfio-user device. The device itself belongs to its segment's thread.

mod moving;

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dma::MappedMemory;
use pci::config::Identity;
use pci::function::{BarKind, BarLayout};
use pci::msix::MsixLayout;
use rustix::io::Errno;
use vfio_user_protocol::device::{
    Device, DmaMapping, INTERRUPT_MSIX, InterruptFlags, Interrupts, Peer, REGION_CONFIG, Region, RegionIoFd,
    SetInterrupts,
};
use vfio_user_protocol::migration::{DeviceState, Migration};
use vmxnet3::pci as ids;
use vmxnet3::registers::{RXPROD, RXPROD2, TXPROD};
use vmxnet3::runner::{NicEvents, NicHandle};
use vmxnet3::{PortRules, Vmxnet3Config};

use super::header::{Appearance, Header, HeaderError, class_code};
use super::interrupts::EventFds;
use super::memory::ClientMemory;
use super::stream::Stream;
use super::{NicShared, registers};
use crate::segments::Network;
use moving::Coming;

/// Number of the function in the slot.
const FUNCTION: usize = 0;

/// Configuration space of the function.
fn appearance() -> Result<Appearance, HeaderError> {
    let bar = |index, size| BarLayout { index, kind: BarKind::Memory32, prefetchable: false, size };
    Ok(Appearance {
        identity: Identity {
            vendor_id: ids::VENDOR_ID,
            device_id: ids::DEVICE_ID,
            revision: ids::REVISION_ID,
            class: class_code(ids::CLASS_CODE),
            subsystem_vendor_id: ids::SUBSYSTEM_VENDOR_ID,
            subsystem_id: ids::SUBSYSTEM_ID,
        },
        multifunction: true,
        bars: vec![
            bar(ids::BAR_DOORBELL, ids::BAR_SIZE),
            bar(ids::BAR_COMMAND, ids::BAR_SIZE),
            bar(ids::BAR_MSIX, ids::BAR_MSIX_SIZE),
        ],
        msix: MsixLayout::new(
            ids::VECTORS,
            (ids::BAR_MSIX, ids::MSIX_TABLE_OFFSET),
            (ids::BAR_MSIX, ids::MSIX_PBA_OFFSET),
        )?,
    })
}

/// The function.
pub struct EthernetFunction {
    nic: Arc<NicShared>,
    config: Vmxnet3Config,
    network: Arc<Network>,
    header: Header,
    msix: Arc<EventFds>,
    memory: ClientMemory,
    /// The device, while there is a client.
    device: Mutex<Option<Arc<NicHandle<MappedMemory>>>>,
    /// Eventfds of a device whose VM arrives: clients get them before the device exists.
    events: Option<NicEvents>,
    /// Its state, as the client reads or writes it. Locked first.
    stream: Mutex<Stream>,
    coming: Mutex<Coming>,
}

impl std::fmt::Debug for EthernetFunction {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("EthernetFunction").field("config", &self.config).finish_non_exhaustive()
    }
}

/// The device's interrupts.
struct Vectors(Arc<EventFds>);

impl vmxnet3::Interrupts for Vectors {
    fn raise(&self, vector: u16) {
        self.0.raise(vector.into());
    }
}

/// Why the function can't be created.
#[derive(Debug, thiserror::Error)]
pub enum EthernetError {
    /// Configuration space.
    #[error("The Ethernet function's configuration space can't be built")]
    Header(#[from] HeaderError),
    /// The eventfds of an arriving VM's device can't be created.
    #[error("The Ethernet function's eventfds can't be made")]
    Events(#[source] io::Error),
}

/// Rules of its port. Guests may be routers, which forward frames to stations that can't know of a partial checksum.
fn rules() -> PortRules {
    PortRules { any_source: false, partial_checksums: false }
}

impl EthernetFunction {
    /// The function without a client; its device isn't in the segment yet.
    ///
    /// # Errors
    /// When configuration space can't be built, which is a bug, or the kernel has no descriptors.
    pub fn new(
        nic: Arc<NicShared>,
        config: Vmxnet3Config,
        network: Arc<Network>,
    ) -> Result<Self, EthernetError> {
        let events = nic.is_incoming().then(NicEvents::new).transpose().map_err(EthernetError::Events)?;
        Ok(Self {
            header: Header::new(&appearance()?)?,
            msix: Arc::new(EventFds::new(ids::VECTORS)),
            memory: ClientMemory::default(),
            device: Mutex::new(None),
            events,
            stream: Mutex::new(Stream::new(DeviceState::Running)),
            coming: Mutex::default(),
            nic,
            config,
            network,
        })
    }

    fn place(&self) -> MutexGuard<'_, Option<Arc<NicHandle<MappedMemory>>>> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the device is in its segment.
    fn plugged(&self, device: NicHandle<MappedMemory>) {
        device.set_companion(Some(self.nic.wire.end()));
        self.nic.wire.connect(device.waker());
        *self.place() = Some(Arc::new(device));
    }

    /// Whether its VM has not arrived yet.
    fn is_absent(&self) -> bool {
        self.events.is_some() && self.place().is_none()
    }

    fn device(&self) -> io::Result<Arc<NicHandle<MappedMemory>>> {
        Ok(Arc::clone(self.place().as_ref().ok_or(Errno::NODEV)?))
    }

    /// State for `inspect`.
    #[must_use]
    pub fn inspect(&self) -> serde_json::Value {
        let (ranges, bytes) = self.memory.size();
        let (sent, missed) = self.msix.counts();
        serde_json::json!({
            "connected": self.nic.is_connected(FUNCTION),
            "segment": self.network.name(),
            "guest_memory": { "ranges": ranges, "bytes": bytes },
            "interrupts": { "sent": sent, "nobody_listened": missed },
            "config": self.header.inspect(),
        })
    }
}

impl Device for EthernetFunction {
    fn authorize(&self, peer: &Peer) -> bool {
        if !self.nic.authorizes(peer) {
            return false;
        }
        if self.nic.is_incoming() {
            // The device joins its segment when its VM runs here.
            *self.stream() = Stream::new(DeviceState::Stop);
            self.nic.set_connected(FUNCTION, true);
            return true;
        }
        *self.stream() = Stream::new(DeviceState::Running);
        let interrupts = Box::new(Vectors(Arc::clone(&self.msix)));
        match self.network.ethernet().attach(self.config.clone(), rules(), interrupts) {
            Ok(device) => {
                device.set_bus_master(false);
                self.plugged(device);
            }
            Err(error) => {
                let key = &self.nic.key;
                tracing::error!(
                    vm = key.vm,
                    nic = key.name,
                    error = &error as &dyn std::error::Error,
                    "An Ethernet device can't be added"
                );
                return false;
            }
        }
        self.nic.set_connected(FUNCTION, true);
        true
    }

    fn regions(&self) -> Vec<Region> {
        let there = self.device().ok().map(|device| device.doorbell());
        let doorbell = there.or_else(|| self.events.as_ref().map(NicEvents::doorbell));
        let io_fds = doorbell.map(|fd| {
            // The doorbells of the first queues: Linux's revision has no others.
            let doorbell = |offset| RegionIoFd { offset, size: 4, datamatch: None, fd: Arc::clone(&fd) };
            [TXPROD, RXPROD, RXPROD2].map(doorbell).to_vec()
        });
        vec![
            Region {
                io_fds: io_fds.unwrap_or_default(),
                ..registers(ids::BAR_DOORBELL.into(), ids::BAR_SIZE)
            },
            registers(ids::BAR_COMMAND.into(), ids::BAR_SIZE),
            registers(ids::BAR_MSIX.into(), ids::BAR_MSIX_SIZE),
            registers(REGION_CONFIG, Header::size()),
        ]
    }

    fn interrupts(&self) -> Vec<Interrupts> {
        vec![Interrupts { index: INTERRUPT_MSIX, count: self.msix.count(), flags: InterruptFlags::EVENTFD }]
    }

    fn region_read(&self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()> {
        data.fill(0);
        match u8::try_from(region) {
            Ok(bar @ (ids::BAR_DOORBELL | ids::BAR_COMMAND)) if data.len() <= 8 => {
                self.device()?.bar_read(bar, offset, data);
            }
            _ if region == REGION_CONFIG => self.header.read(offset, data),
            // The client has MSI-X table and pending bits.
            _ => {}
        }
        Ok(())
    }

    fn region_write(&self, region: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        match u8::try_from(region) {
            Ok(bar @ (ids::BAR_DOORBELL | ids::BAR_COMMAND)) if data.len() <= 8 => {
                self.device()?.bar_write(bar, offset, data);
            }
            _ if region == REGION_CONFIG => {
                if let Some(enabled) = self.header.write(offset, data)
                    && !self.is_absent()
                {
                    self.device()?.set_bus_master(enabled);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn dma_map(&self, mapping: DmaMapping) -> io::Result<()> {
        let device = if self.is_absent() { None } else { Some(self.device()?) };
        self.memory.map(&mapping, |table| {
            if let Some(device) = device {
                device.set_memory(Some(table));
            }
            Ok(())
        })
    }

    fn dma_unmap(&self, address: u64, size: u64) -> io::Result<()> {
        let device = if self.is_absent() { None } else { Some(self.device()?) };
        self.memory.unmap(address, size, |table| {
            if let Some(device) = device {
                device.set_memory(Some(table));
            }
            Ok(())
        })
    }

    fn set_interrupts(&self, index: u32, start: u32, _: u32, change: SetInterrupts) -> io::Result<()> {
        match index {
            INTERRUPT_MSIX => self.msix.change(start, change),
            _ => Err(Errno::INVAL.into()),
        }
    }

    fn migration(&self) -> Option<&dyn Migration> {
        Some(self)
    }

    fn reset(&self) -> io::Result<()> {
        if self.is_absent() {
            return Err(Errno::BUSY.into());
        }
        self.header.reset();
        let device = self.device()?;
        device.set_bus_master(false);
        device.reset();
        Ok(())
    }

    fn disconnected(&self) {
        self.nic.wire.disconnect();
        // The last reference: the device leaves its segment, and its memory isn't accessed any more.
        drop(self.place().take());
        self.memory.clear();
        self.msix.disconnect();
        self.header.reset();
        self.nic.set_connected(FUNCTION, false);
    }
}
