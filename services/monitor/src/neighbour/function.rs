//! The PCI function of a neighbour device.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use machine::bus::AddressSpace;
use machine::memory::{GuestMemorySpace, GuestRam};
use machine::slots::HostMapping;
use machine::vm::Vm;
use neighbour::device::{Device, Effect};
use neighbour::registers as reg;
use pci::config::{CapabilityBuilder, ClassCode, ConfigSpace, ExpressKind, Identity};
use pci::function::{
    BarKind, BarLayout, BarMapping, BarPlace, ConfigEffect, Doorbell, FunctionError, PciFunction,
    SavedFunction,
};
use pci::interrupt::{IntxLine, Msi};
use pci::msix::{Msix, MsixLayout};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags};
use serde_json::json;
use telemetry::guest_log::GuestLog;

use super::mappings::{Offer, PeerMapping, PeerMappings};
use super::opened::Terms;
use super::thread::{Counters, End, Member, Registry, Thread};
use super::windows::Windows;
use super::{NeighbourError, OpenedNeighbour, lock};
use crate::description::MacAddress;
use crate::vm::ThreadHook;

/// The function's name.
const NAME: &str = "neighbour0";

/// Requests of the guest to the thread. Bounded by the slots.
#[derive(Debug, Default)]
pub(super) struct ReleaseRequests {
    /// Slots and epochs to release.
    pub release: std::collections::BTreeSet<(u32, u32)>,
    /// The machine was reset: release all.
    pub release_all: bool,
}

/// State shared by the function and its thread. Locks are taken in the order of the fields.
pub(super) struct Inner {
    vm: Arc<Vm>,
    /// The memory that this VM's devices access, windows included.
    memory: GuestMemorySpace,
    config: Mutex<ConfigSpace>,
    msix: Msix,
    device: Arc<Mutex<Device>>,
    mapped_peers: Mutex<PeerMappings>,
    requests: Mutex<ReleaseRequests>,
    /// Wakes the thread.
    wake: OwnedFd,
    counters: Counters,
    log: GuestLog,
    /// Name of this VM and its neighbourhood, from which the addresses of its devices are derived.
    vm_name: String,
    group: String,
    status: Arc<OwnedFd>,
    beat: Arc<HostMapping>,
    refresh: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl Inner {
    /// Raises the interrupt for a changed block.
    fn notify(&self) {
        if let Err(error) = self.msix.trigger(0) {
            telemetry::guest_warn!(self.log, device = NAME, %error, "An interrupt can't be sent");
        }
    }

    fn request(&self, add: impl FnOnce(&mut ReleaseRequests)) {
        add(&mut lock(&self.requests));
        // A full counter wakes the thread as well.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }
}

impl Member for Inner {
    fn log(&self) -> &GuestLog {
        &self.log
    }

    fn counters(&self) -> &Counters {
        &self.counters
    }

    fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    fn signals(&self, slots: u32) -> Option<Vec<BorrowedFd<'_>>> {
        let signal = |peer: u32| self.msix.vector(u16::try_from(peer + 1).ok()?)?.eventfd();
        (0..slots).map(signal).collect()
    }

    fn joined(&self, slot: u32) {
        lock(&self.device).joined(slot);
    }

    fn mapped_peers(&self) -> Vec<(u32, u32)> {
        lock(&self.mapped_peers).0.iter().map(|(slot, peer)| (*slot, peer.epoch)).collect()
    }

    fn map(&self, terms: &Terms, offer: Offer) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let slot = offer.slot;
        let peer = PeerMapping::map(&self.vm, &self.memory, &terms.geometry, offer)?;
        lock(&self.mapped_peers).0.insert(slot, peer);
        Ok(())
    }

    fn publish(&self, slot: u32, epoch: u32) -> bool {
        let mapped = lock(&self.mapped_peers).0.get(&slot).map(|peer| (peer.window, peer.vm.clone()));
        let published = mapped.is_some_and(|(window, name)| {
            let mac = MacAddress::to_neighbour(&self.group, &self.vm_name, &name).octets();
            lock(&self.device).offer(window, epoch, &name, mac)
        });
        if published {
            self.notify();
        }
        published
    }

    fn common(&self, slot: u32, slots: u64) {
        let changed = lock(&self.device).common(slot, slots);
        if changed {
            self.notify();
        }
    }

    fn connection_ended(&self, slot: u32, epoch: u32, reason: u32) -> End {
        let (known, driver, kept) = {
            let mut device = lock(&self.device);
            (device.gone(slot, epoch, reason), device.driver(), device.is_kept(slot, epoch))
        };
        match (known, driver || kept) {
            (false, _) => End::Unknown,
            (true, false) => End::Unused,
            (true, true) => {
                self.notify();
                End::Notified
            }
        }
    }

    fn unmap(&self, slot: u32, epoch: u32) -> bool {
        let peer = {
            let mut mapped_peers = lock(&self.mapped_peers);
            match mapped_peers.0.get(&slot) {
                Some(peer) if peer.epoch == epoch => mapped_peers.0.remove(&slot),
                _ => None,
            }
        };
        let Some(mut peer) = peer else { return false };
        lock(&self.device).forget(slot, epoch);
        // Segment and doorbell leave the BARs before the window goes.
        self.refresh();
        peer.unmap(&self.vm, &self.memory);
        self.notify();
        true
    }

    fn release_requests(&self) -> Vec<(u32, u32)> {
        let requests = std::mem::take(&mut *lock(&self.requests));
        let mut release: Vec<(u32, u32)> = requests.release.into_iter().collect();
        if requests.release_all {
            release.extend(self.mapped_peers());
        }
        release
    }

    /// The driver's heartbeat count; 0 without a driver.
    fn heartbeat(&self) -> u64 {
        if !lock(&self.device).driver() {
            return 0;
        }
        read_word(&self.beat).max(1)
    }

    /// Updates the bus to the present mappings.
    fn refresh(&self) {
        if let Some(refresh) = self.refresh.get() {
            refresh();
        }
    }
}

/// The first word of a mapping.
#[allow(unsafe_code)] // One aligned word of memory that the guest writes.
fn read_word(mapping: &HostMapping) -> u64 {
    let word = mapping.as_ptr().cast::<u64>();
    // SAFETY: the mapping is at least a page, aligned to one, and lives as long as the reference. The guest may write the word at any time,
    // so the read is atomic.
    unsafe { AtomicU64::from_ptr(word) }.load(Ordering::Relaxed)
}

/// The PCI function; see the module.
pub struct NeighbourFunction {
    inner: Arc<Inner>,
    registry: Mutex<Option<Registry>>,
    thread: OnceLock<Thread>,
}

impl NeighbourFunction {
    /// Creates the function, claims the windows' addresses on the memory bus, and joins the neighbourhood.
    ///
    /// # Errors
    /// If the registry refuses, or the machine has no room.
    pub fn new(
        opened: OpenedNeighbour,
        vm: &Arc<Vm>,
        ram: &GuestRam,
        memory: &AddressSpace,
        msi: &dyn Msi,
    ) -> Result<Arc<Self>, NeighbourError> {
        let terms = opened.terms;
        let device = Arc::new(Mutex::new(Device::new(terms.geometry, terms.layout, terms.heartbeat_ms)));
        let vectors = u16::try_from(reg::vectors(terms.geometry.slots())).unwrap_or(u16::MAX);
        let layout = MsixLayout::exclusive(reg::BAR_MSIX, vectors)
            .map_err(|error| NeighbourError::monitor("lay out interrupts", error))?;
        let config = config_space(&layout, lock(&device).segments_size())
            .map_err(|error| NeighbourError::monitor("make configuration space", error))?;
        let vectors =
            msi.allocate(vectors).map_err(|error| NeighbourError::monitor("get interrupt vectors", error))?;
        let msix = Msix::new(layout, vectors)
            .map_err(|error| NeighbourError::monitor("set up interrupts", error))?;
        let (status, beat) = status_page(lock(&device).segment_place(0).1)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| NeighbourError::monitor("make an eventfd", std::io::Error::from(error)))?;
        let (vm_name, group) = (opened.vm.clone(), opened.config.group.clone());
        let geometry = terms.geometry;
        let windows = Windows {
            name: NAME.to_owned(),
            base: geometry.base(),
            device: Arc::clone(&device),
            log: GuestLog::new(),
        };
        let len = geometry.end() - geometry.base();
        memory
            .insert(geometry.base(), len, "neighbour windows", Arc::new(windows))
            .map_err(|error| NeighbourError::monitor("claim the windows' addresses", error))?;
        let inner = Arc::new(Inner {
            vm: Arc::clone(vm),
            memory: ram.memory(),
            config: Mutex::new(config),
            msix,
            device,
            mapped_peers: Mutex::default(),
            requests: Mutex::default(),
            wake,
            counters: Counters::default(),
            log: GuestLog::new(),
            vm_name,
            group,
            status,
            beat,
            refresh: OnceLock::new(),
        });
        let registry = Registry::join(opened, ram, &*inner)?;
        Ok(Arc::new(Self { inner, registry: Mutex::new(Some(registry)), thread: OnceLock::new() }))
    }

    /// Starts the function's thread. `refresh` updates mappings and doorbells on the bus ([`pci::root::PciRoot::refresh`]). The thread runs
    /// `on_start` first.
    ///
    /// # Errors
    /// If the thread can't be created.
    pub fn start(
        &self,
        refresh: Box<dyn Fn() + Send + Sync>,
        on_start: ThreadHook,
    ) -> Result<(), NeighbourError> {
        let Some(registry) = lock(&self.registry).take() else { return Ok(()) };
        // Set once, since the registry was still there.
        let _ = self.inner.refresh.set(refresh);
        let thread = Thread::start(Arc::clone(&self.inner) as Arc<dyn Member>, registry, on_start)
            .map_err(|error| NeighbourError::monitor("start a thread", error))?;
        let _ = self.thread.set(thread);
        Ok(())
    }

    /// Number of the guest's stores to windows, which were discarded.
    #[must_use]
    pub fn discarded(&self) -> u64 {
        lock(&self.inner.device).discarded_count()
    }
}

fn config_space(layout: &MsixLayout, segments: u64) -> Result<ConfigSpace, pci::config::ConfigError> {
    let mut builder = ConfigSpace::builder(Identity {
        vendor_id: reg::VENDOR,
        device_id: reg::DEVICE,
        revision: reg::REVISION,
        class: ClassCode::COMMUNICATION_OTHER,
        subsystem_vendor_id: reg::SUBSYSTEM.0,
        subsystem_id: reg::SUBSYSTEM.1,
    });
    let bar = |index, kind, prefetchable, size| BarLayout { index, kind, prefetchable, size };
    builder.bar(bar(reg::BAR_REGISTERS, BarKind::Memory32, false, reg::BAR_REGISTERS_SIZE))?;
    builder.bar(bar(reg::BAR_SEGMENTS, BarKind::Memory64, true, segments))?;
    builder.bar(bar(reg::BAR_MSIX, BarKind::Memory32, false, layout.bar_size()))?;
    builder.capability(CapabilityBuilder::msix(layout))?;
    builder.capability(CapabilityBuilder::express(ExpressKind::RootComplexIntegratedEndpoint))?;
    Ok(builder.build())
}

/// The page with the driver's heartbeat count. It has the size of a segment, since it takes a segment's place.
fn status_page(size: u64) -> Result<(Arc<OwnedFd>, Arc<HostMapping>), NeighbourError> {
    let failed = |error: rustix::io::Errno| {
        NeighbourError::monitor("make the status page", std::io::Error::from(error))
    };
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("causeway:neighbour-status", flags).map_err(failed)?;
    rustix::fs::ftruncate(&fd, size).map_err(failed)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .map_err(failed)?;
    let mapping = HostMapping::new("neighbour status", fd.as_fd(), 0, size, false)
        .map_err(|error| NeighbourError::monitor("map the status page", error))?;
    Ok((Arc::new(fd), mapping))
}

impl PciFunction for NeighbourFunction {
    fn name(&self) -> &str {
        NAME
    }

    fn bars(&self) -> Vec<BarLayout> {
        lock(&self.inner.config).bars().to_vec()
    }

    fn config_read(&self, offset: u16, data: &mut [u8]) {
        lock(&self.inner.config).read(offset, data);
    }

    fn config_write(&self, offset: u16, data: &[u8]) -> ConfigEffect {
        let mut config = lock(&self.inner.config);
        let effect = config.write(offset, data);
        self.inner.msix.follow(&config);
        effect
    }

    fn places(&self) -> Vec<BarPlace> {
        lock(&self.inner.config).places()
    }

    fn bar_read(&self, bar: u8, offset: u64, data: &mut [u8]) {
        data.fill(0xFF);
        if self.inner.msix.bar_read(bar, offset, data) {
            return;
        }
        if bar == reg::BAR_REGISTERS {
            lock(&self.inner.device).read(offset, data);
        }
    }

    fn bar_write(&self, bar: u8, offset: u64, data: &[u8]) {
        if self.inner.msix.bar_write(bar, offset, data) || bar != reg::BAR_REGISTERS {
            return;
        }
        let effect = lock(&self.inner.device).write(offset, data);
        match effect {
            Some(Effect::Release { slot, epoch }) => {
                self.inner.request(|requests| {
                    requests.release.insert((slot, epoch));
                });
            }
            Some(Effect::Driver(false)) => {
                let left: Vec<(u32, u32)> = lock(&self.inner.device).unkept().collect();
                self.inner.request(|requests| requests.release.extend(left));
            }
            Some(Effect::Driver(true)) | None => {}
        }
    }

    fn doorbells(&self) -> Vec<Doorbell> {
        let mapped_peers = lock(&self.inner.mapped_peers);
        let doorbell = |(slot, peer): (&u32, &super::mappings::PeerMapping)| Doorbell {
            bar: reg::BAR_REGISTERS,
            offset: reg::DOORBELLS + reg::DOORBELL_STRIDE * u64::from(*slot),
            width: 4,
            datamatch: None,
            fd: Arc::clone(&peer.signal),
        };
        mapped_peers.0.iter().map(doorbell).collect()
    }

    fn mappings(&self) -> Vec<BarMapping> {
        let mut mapped: Vec<(u32, Arc<OwnedFd>)> = lock(&self.inner.mapped_peers)
            .0
            .iter()
            .map(|(slot, peer)| (*slot, Arc::clone(&peer.segment)))
            .collect();
        let device = lock(&self.inner.device);
        if let Some(own) = device.own() {
            // After a daemon's restart the own slot may be one that a peer had, whose segment isn't used any more.
            mapped.retain(|(slot, _)| *slot != own);
            mapped.push((own, Arc::clone(&self.inner.status)));
        }
        let mapping = |(slot, fd): (u32, Arc<OwnedFd>)| {
            let (offset, len) = device.segment_place(slot);
            BarMapping { bar: reg::BAR_SEGMENTS, offset, len, fd, fd_offset: 0, read_only: false }
        };
        mapped.into_iter().map(mapping).collect()
    }

    fn attach_intx(&self, _line: Arc<dyn IntxLine>) {
        // The function has no pin.
    }

    fn reset(&self) -> Result<(), FunctionError> {
        lock(&self.inner.config).reset();
        self.inner.msix.reset();
        // The driver is gone with its machine. The thread removes the mappings.
        lock(&self.inner.device).write(reg::DRIVER, &0_u32.to_le_bytes());
        self.inner.request(|requests| requests.release_all = true);
        Ok(())
    }

    fn quiesce(&self) -> Result<(), FunctionError> {
        // Peers detect that the driver's count doesn't change. No component here acts for the guest.
        Ok(())
    }

    fn unquiesce(&self) -> Result<(), FunctionError> {
        Ok(())
    }

    fn save(&self) -> Result<SavedFunction, FunctionError> {
        Err(FunctionError::NotSaveable {
            name: NAME.to_owned(),
            reason: "neighbours' memory is on this host; leave the neighbourhood first".to_owned(),
        })
    }

    fn inspect(&self) -> serde_json::Value {
        let inner = &self.inner;
        let (own, driver, discarded) = {
            let device = lock(&inner.device);
            (device.own(), device.driver(), device.discarded_count())
        };
        let peers: Vec<_> = lock(&inner.mapped_peers)
            .0
            .iter()
            .map(|(slot, peer)| {
                json!({
                    "slot": slot,
                    "vm": peer.vm,
                    "epoch": peer.epoch,
                    "window": format!("{:#x}", peer.window.start()),
                })
            })
            .collect();
        json!({
            "kind": "neighbour",
            "slot": own,
            "driver": driver,
            "peers": peers,
            "discarded_stores": discarded,
            "connections": inner.counters.connections.get(),
            "ends": inner.counters.ends.get(),
            "registry_losses": inner.counters.losses.get(),
            "msix": inner.msix.inspect(),
        })
    }
}
