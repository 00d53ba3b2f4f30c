//! Function 1: PVRDMA, as a vfio-user device. The engine's thread executes everything that matters.

mod moving;

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hca::limits::Limits;
use hca::names::DeviceId;
use nomad::objects::Total;
use pci::config::{ClassCode, Identity};
use pci::function::{BarKind, BarLayout};
use pci::msix::MsixLayout;
use pvrdma::Config;
use pvrdma::abi::pci as ids;
use rustix::io::Errno;
use vfio_user_protocol::device::{
    Device, DmaMapping, INTERRUPT_MSIX, InterruptFlags, Interrupts, Peer, REGION_CONFIG, Region,
    RegionMapping, SetInterrupts,
};
use vfio_user_protocol::doorbell_mode::{self, DoorbellMode};
use vfio_user_protocol::migration::{DeviceState, Migration};

use super::header::{Appearance, Header, HeaderError};
use super::interrupts::EventFds;
use super::memory::ClientMemory;
use super::stream::Stream;
use super::{NicShared, registers};
use crate::engine::{DeviceSetup, EngineHandle, EngineStopped, Worker, Written, is_arm};
use crate::nic::Event;
use crate::remembered::Remembered;
use crate::uar::UarPages;

/// Timeout of a command that waits for not-present memory, and interval of retries.
const POSTPONED: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// Number of the function in the slot.
const FUNCTION: usize = 1;

/// Configuration space of the function.
fn appearance(config: &Config) -> Result<Appearance, HeaderError> {
    let bar = |index, kind, size| BarLayout { index, kind, prefetchable: false, size };
    let [base, sub, interface] = ids::CLASS;
    Ok(Appearance {
        identity: Identity {
            vendor_id: ids::VENDOR,
            device_id: ids::DEVICE,
            revision: 1,
            class: ClassCode::new(base, sub, interface),
            subsystem_vendor_id: ids::VENDOR,
            subsystem_id: ids::DEVICE,
        },
        multifunction: false,
        bars: vec![
            bar(ids::MSIX_BAR, BarKind::Memory32, ids::MSIX_BAR_SIZE),
            bar(ids::REGISTER_BAR, BarKind::Memory32, ids::REGISTER_BAR_SIZE),
            bar(ids::UAR_BAR, BarKind::Memory64, config.uar_bar_size()),
        ],
        msix: MsixLayout::new(
            ids::VECTORS,
            (ids::MSIX_BAR, ids::MSIX_TABLE),
            (ids::MSIX_BAR, ids::MSIX_PENDING),
        )?,
    })
}

/// The function.
#[derive(Debug)]
pub struct RdmaFunction {
    nic: Arc<NicShared>,
    engine: EngineHandle,
    config: Config,
    /// Name of its network.
    segment: String,
    header: Header,
    msix: Arc<EventFds>,
    mode: Arc<EventFds>,
    pages: Arc<UarPages>,
    memory: ClientMemory,
    remembered: Arc<Remembered>,
    /// The VM's quotas.
    limits: Mutex<Limits>,
    state: Mutex<State>,
    /// Its state, as the client reads or writes it. Locked before `state`.
    stream: Mutex<Stream>,
}

#[derive(Debug, Default)]
struct State {
    /// The engine's device, while there is a client.
    device: Option<DeviceId>,
    /// Guest address of the shared region of a driver from before this connection, while that driver may not know yet that its device
    /// failed.
    orphan: Option<u64>,
    /// Of an arriving device: its beginning was read, with the totals for its end.
    begun: bool,
    /// Of a leaving device: the destination was notified of connections with peers outside of the cluster.
    said_outside: bool,
    expected: Option<Total>,
}

/// Why the function can't be created.
#[derive(Debug, thiserror::Error)]
pub enum RdmaError {
    /// Configuration space.
    #[error("The RDMA function's configuration space can't be built")]
    Header(#[from] HeaderError),
    /// Doorbell pages can't be allocated.
    #[error("The RDMA function's doorbell pages can't be made")]
    Pages(#[source] io::Error),
}

impl RdmaFunction {
    /// The function without a client; its device isn't in the engine yet.
    ///
    /// # Errors
    /// When the kernel has no memory for doorbell pages.
    pub fn new(
        nic: Arc<NicShared>,
        engine: EngineHandle,
        config: Config,
        segment: String,
        remembered: Arc<Remembered>,
    ) -> Result<Self, RdmaError> {
        Ok(Self {
            header: Header::new(&appearance(&config)?)?,
            msix: Arc::new(EventFds::new(ids::VECTORS)),
            mode: Arc::new(EventFds::new(1)),
            pages: Arc::new(UarPages::new(config.uar_bar_size()).map_err(RdmaError::Pages)?),
            memory: ClientMemory::default(),
            limits: Mutex::new(config.limits),
            state: Mutex::default(),
            stream: Mutex::new(Stream::new(DeviceState::Running)),
            nic,
            engine,
            config,
            segment,
            remembered,
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device in the engine, while there is a client.
    #[must_use]
    pub fn device(&self) -> Option<DeviceId> {
        self.state().device
    }

    /// Sets quotas and rates, now and for later clients.
    pub fn set_limits(&self, limits: Limits) {
        *self.limits.lock().unwrap_or_else(PoisonError::into_inner) = limits;
        if let Some(device) = self.device() {
            // The engine is gone when the daemon ends.
            let _ = self.engine.call(move |worker| worker.set_limits(device, limits));
        }
    }

    /// Quotas and rates.
    #[must_use]
    pub fn limits(&self) -> Limits {
        *self.limits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The part of the report that isn't the engine's.
    #[must_use]
    pub fn inspect(&self) -> serde_json::Value {
        let (ranges, bytes) = self.memory.size();
        serde_json::json!({
            "connected": self.nic.is_connected(FUNCTION),
            "guest_memory": { "ranges": ranges, "bytes": bytes },
            "config": self.header.inspect(),
            "wire": self.nic.wire.inspect(),
        })
    }

    /// Counters of transport `wire` for the NIC.
    pub(crate) fn wire_counters(&self) -> [(&'static str, u64); 11] {
        self.nic.wire.counters.values()
    }

    /// Executes a job on the engine's thread with the device.
    fn with<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Worker, DeviceId) -> R + Send + 'static,
    ) -> io::Result<R> {
        let device = self.device().ok_or(Errno::NODEV)?;
        self.engine.call(move |worker| job(worker, device)).map_err(|EngineStopped| Errno::NODEV.into())
    }

    /// As [`RdmaFunction::with`]; does nothing if the device's VM has not arrived.
    fn with_if_there<R: Send + 'static>(
        &self,
        absent: R,
        job: impl FnOnce(&mut Worker, DeviceId) -> R + Send + 'static,
    ) -> io::Result<R> {
        if self.nic.is_incoming() && self.device().is_none() { Ok(absent) } else { self.with(job) }
    }

    fn register_write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        // The driver's registers are 32 bits wide; other accesses have no effect.
        let Some(value) = word(offset, data) else { return Ok(()) };
        let began = Instant::now();
        let region = loop {
            match self.with(move |worker, device| worker.register_write(device, offset, value))? {
                Written::Done(region) => break region,
                // The engine has served others meanwhile.
                Written::Unfinished => {}
                Written::Postponed if began.elapsed() > POSTPONED => return Err(Errno::TIMEDOUT.into()),
                // Its vCPU waits, as it would for the page itself.
                Written::Postponed => std::thread::sleep(LOOK_EVERY),
            }
        };
        if matches!(offset, pvrdma::abi::registers::DSR_HIGH | pvrdma::abi::registers::CONTROL) {
            // A driver of this connection: an earlier one is gone.
            self.state().orphan = None;
            self.remember(region);
        }
        Ok(())
    }

    fn remember(&self, region: Option<u64>) {
        let key = &self.nic.key;
        if self.remembered.set(&key.vm, &key.name, self.nic.uid, region) {
            self.nic.tell(Event::Changed);
        }
    }

    /// Notifies a driver from before this connection that its device failed, once that is possible: its memory is mapped, its interrupts
    /// are connected, and the device may master the bus.
    fn announce(&self) -> io::Result<()> {
        let orphan = self.state().orphan;
        let Some(address) = orphan else { return Ok(()) };
        let hears = self.msix.is_connected(ids::VECTOR_ASYNC.into());
        if !hears || !self.header.bus_master() || !self.memory.contains(address) {
            return Ok(());
        }
        self.state().orphan = None;
        let told = self.with(move |worker, device| worker.announce_fatal(device, address))?;
        let key = &self.nic.key;
        match told {
            Ok(()) => tracing::info!(
                vm = key.vm,
                nic = key.name,
                "The guest's RDMA driver is told that its device failed"
            ),
            Err(error) => tracing::warn!(
                vm = key.vm,
                nic = key.name,
                error = &error as &dyn std::error::Error,
                "The guest's RDMA driver can't be told that its device failed; reload it"
            ),
        }
        Ok(())
    }

    fn set_bus_master(&self, enabled: bool) -> io::Result<()> {
        if self.nic.is_incoming() {
            // The header records it, and the device gets it when it resumes.
            return Ok(());
        }
        self.with(move |worker, device| worker.set_bus_master(device, enabled))?;
        self.announce()
    }
}

/// The value of an aligned 32-bit write.
fn word(offset: u64, data: &[u8]) -> Option<u32> {
    let bytes = <[u8; 4]>::try_from(data).ok()?;
    offset.is_multiple_of(4).then(|| u32::from_le_bytes(bytes))
}

impl Device for RdmaFunction {
    fn authorize(&self, peer: &Peer) -> bool {
        if !self.nic.authorizes(peer) {
            return false;
        }
        if self.nic.is_incoming() {
            // The device is added when its state begins to arrive.
            *self.state() = State::default();
            *self.stream() = Stream::new(DeviceState::Stop);
            self.nic.set_connected(FUNCTION, true);
            return true;
        }
        *self.stream() = Stream::new(DeviceState::Running);
        let config = Config { limits: self.limits(), ..self.config.clone() };
        let (pages, msix, mode) = (Arc::clone(&self.pages), Arc::clone(&self.msix), Arc::clone(&self.mode));
        let (vm, segment) = (self.nic.key.vm.clone(), self.segment.clone());
        let wire = Arc::clone(&self.nic.wire);
        let setup = DeviceSetup { vm, segment, config, pages, msix, mode, wire };
        let attached = self.engine.call(move |worker| worker.attach(setup));
        let key = &self.nic.key;
        let device = match attached {
            Ok(Ok(device)) => device,
            Ok(Err(error)) => {
                tracing::error!(
                    vm = key.vm,
                    nic = key.name,
                    error = &error as &dyn std::error::Error,
                    "An RDMA device can't be added"
                );
                return false;
            }
            Err(EngineStopped) => return false,
        };
        let orphan = self.remembered.shared_region(&key.vm, &key.name, self.nic.uid);
        *self.state() = State { device: Some(device), orphan, ..State::default() };
        self.nic.set_connected(FUNCTION, true);
        true
    }

    fn regions(&self) -> Vec<Region> {
        let size = self.pages.size();
        let pages = RegionMapping { offset: 0, size, fd: Arc::clone(self.pages.fd()), fd_offset: 0 };
        vec![
            registers(ids::MSIX_BAR.into(), ids::MSIX_BAR_SIZE),
            registers(ids::REGISTER_BAR.into(), ids::REGISTER_BAR_SIZE),
            Region { mappings: vec![pages], ..registers(ids::UAR_BAR.into(), size) },
            registers(REGION_CONFIG, Header::size()),
            registers(doorbell_mode::REGION, doorbell_mode::REGION_SIZE),
        ]
    }

    fn interrupts(&self) -> Vec<Interrupts> {
        vec![
            Interrupts { index: INTERRUPT_MSIX, count: self.msix.count(), flags: InterruptFlags::EVENTFD },
            Interrupts { index: doorbell_mode::INTERRUPT, count: 1, flags: InterruptFlags::EVENTFD },
        ]
    }

    fn region_read(&self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()> {
        // The client has MSI-X table and pending bits; doorbells can't be read.
        data.fill(0);
        if region == u32::from(ids::REGISTER_BAR) {
            if data.len() == 4 && offset.is_multiple_of(4) {
                let value = self.with(move |worker, device| worker.register_read(device, offset))?;
                data.copy_from_slice(&value.to_le_bytes());
            }
        } else if region == REGION_CONFIG {
            self.header.read(offset, data);
        } else if region == doorbell_mode::REGION && offset == doorbell_mode::WANTED_OFFSET && data.len() == 4
        {
            let value = self.with_if_there(0, Worker::read_wanted)?;
            data.copy_from_slice(&value.to_le_bytes());
        }
        Ok(())
    }

    fn region_write(&self, region: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        if region == u32::from(ids::REGISTER_BAR) {
            return self.register_write(offset, data);
        }
        if region == u32::from(ids::UAR_BAR) {
            let Some(value) = word(offset, data) else { return Ok(()) };
            if is_arm(offset, value) {
                // Exact arm: later completions raise an event, and the consumer finds earlier ones by polling now. So the vCPU may continue
                // (if the client makes it wait) when the engine has the arm.
                return self.with(move |worker, device| worker.doorbell(device, offset, value));
            }
            let device = self.device().ok_or(Errno::NODEV)?;
            return self.engine.doorbell(device, offset, value).map_err(|EngineStopped| Errno::NODEV.into());
        }
        if region == REGION_CONFIG {
            return match self.header.write(offset, data) {
                Some(enabled) => self.set_bus_master(enabled),
                None => Ok(()),
            };
        }
        if region == doorbell_mode::REGION {
            if offset != doorbell_mode::REACHED_OFFSET {
                return Err(Errno::INVAL.into());
            }
            let mode = word(offset, data).and_then(DoorbellMode::from_register).ok_or(Errno::INVAL)?;
            return self.with_if_there((), move |worker, device| worker.reach(device, mode));
        }
        Ok(())
    }

    fn dma_map(&self, mapping: DmaMapping) -> io::Result<()> {
        self.memory.map(&mapping, |table| {
            self.with_if_there((), move |worker, device| worker.set_memory(device, table))
        })?;
        self.announce()
    }

    fn dma_unmap(&self, address: u64, size: u64) -> io::Result<()> {
        self.memory.unmap(address, size, |table| {
            self.with_if_there((), move |worker, device| worker.set_memory(device, table))
        })
    }

    fn set_interrupts(&self, index: u32, start: u32, _: u32, change: SetInterrupts) -> io::Result<()> {
        match index {
            INTERRUPT_MSIX => {
                self.msix.change(start, change)?;
                self.announce()
            }
            doorbell_mode::INTERRUPT => {
                self.mode.change(start, change)?;
                let offered = self.mode.is_connected(0);
                self.with_if_there((), move |worker, device| worker.set_mode_offered(device, offered))
            }
            _ => Err(Errno::INVAL.into()),
        }
    }

    fn migration(&self) -> Option<&dyn Migration> {
        Some(self)
    }

    fn reset(&self) -> io::Result<()> {
        if self.nic.is_incoming() {
            return Err(Errno::BUSY.into());
        }
        self.header.reset();
        self.state().orphan = None;
        self.with(|worker, device| {
            worker.set_bus_master(device, false);
            worker.reset(device);
        })?;
        self.remember(None);
        Ok(())
    }

    fn disconnected(&self) {
        if let Some(device) = self.state().device.take() {
            // When the daemon ends, the engine is gone, and with it the device.
            let _ = self.engine.call(move |worker| worker.detach(device));
        }
        self.memory.clear();
        self.msix.disconnect();
        self.mode.disconnect();
        self.header.reset();
        self.nic.set_connected(FUNCTION, false);
    }
}
