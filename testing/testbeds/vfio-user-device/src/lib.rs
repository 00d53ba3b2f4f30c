//! A small vfio-user device for tests of either side of `vfio-user-protocol`, and of users of its client.
//!
//! | BAR | holds |
//! |---|---|
//! | 0 | 4 KiB of registers, which read back what was written |
//! | 2 | 16 KiB: pages 0 and 2 are memory that may be mapped, pages 1 and 3 are registers |
//! | 4 | 4 KiB: MSI-X table and pending bits |
//!
//! Offset 8 of BAR 0 is an ioeventfd (4 bytes, value 7). Doorbell mode is supported unless disabled. The device can
//! migrate. Its state is the list of register writes, in records of 13 bytes.
#![allow(clippy::missing_panics_doc, clippy::unwrap_used)] // A helper of tests: it may panic.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vfio_user_protocol::device::{
    Device, DmaMapping, INTERRUPT_INTX, INTERRUPT_MSIX, InterruptFlags, Interrupts, Peer, REGION_CONFIG,
    Region, RegionIoFd, RegionMapping, SetInterrupts,
};
use vfio_user_protocol::doorbell_mode::{self, DoorbellMode};
use vfio_user_protocol::migration::{DeviceState, Migration};
use vfio_user_protocol::server::{Ended, serve_stream};

/// Vendor and device ID of [`TestDevice`].
pub const TEST_DEVICE_ID: u32 = 0x5E57_CA5E;
/// Number of MSI-X vectors.
pub const TEST_VECTORS: u32 = 3;
/// Region index of the BAR with mappable pages.
pub const TEST_MEMORY_BAR: u32 = 2;

const PAGE: u64 = 4096;
const CONFIG_SIZE: usize = 256;
/// Offset of the MSI-X capability.
const MSIX_CAPABILITY: usize = 0x40;

/// An event at a [`TestDevice`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TestEvent {
    /// A region was written.
    Write {
        /// Region index.
        region: u32,
        /// Offset in the region, bytes.
        offset: u64,
        /// Bytes that were written.
        data: Vec<u8>,
    },
    /// Memory was mapped: address, size, offset in its file.
    DmaMap(u64, u64, u64),
    /// Memory was unmapped.
    DmaUnmap(u64, u64),
    /// The client reached a doorbell mode.
    Reached(DoorbellMode),
    /// A reset.
    Reset,
    /// The client disconnected.
    Disconnected,
}

struct State {
    config: Vec<u8>,
    registers: BTreeMap<(u32, u64), u8>,
    dma: BTreeMap<u64, (u64, Option<OwnedFd>)>,
    eventfds: BTreeMap<(u32, u32), OwnedFd>,
    wanted: DoorbellMode,
    reached: DoorbellMode,
    intx_masked: bool,
    intx_level: bool,
    events: Vec<TestEvent>,
    /// The migration state.
    device_state: DeviceState,
    /// Registers that were written since they were last read as migration data.
    changed: BTreeSet<(u32, u64)>,
    outgoing: VecDeque<u8>,
    incoming: Vec<u8>,
    /// Dirty pages, while logging is on.
    dirty: Option<BTreeSet<u64>>,
    /// The requested throttling percentages.
    held_back: Vec<u8>,
}

/// The device. Thread-safe.
pub struct TestDevice {
    state: Mutex<State>,
    changed: Condvar,
    memory: Arc<OwnedFd>,
    doorbell: Arc<OwnedFd>,
    authorized: AtomicBool,
    doorbell_mode: bool,
    /// Delay of each region read.
    delay: Mutex<Duration>,
}

fn config() -> Vec<u8> {
    let mut config = vec![0; CONFIG_SIZE];
    config[..4].copy_from_slice(&TEST_DEVICE_ID.to_le_bytes());
    config[6] = 0x10; // Capability list.
    config[8] = 0x03; // Revision.
    config[11] = 0xFF; // Class: fits no other.
    config[0x2C..0x30].copy_from_slice(&0x0002_0001_u32.to_le_bytes());
    config[0x34] = 0x40;
    config[0x3D] = 1; // INTA.
    // MSI-X: table at 0 and pending bits at 0x800 of BAR 4.
    config[MSIX_CAPABILITY] = 0x11;
    config[MSIX_CAPABILITY + 2..MSIX_CAPABILITY + 4].copy_from_slice(&2_u16.to_le_bytes());
    config[MSIX_CAPABILITY + 4..MSIX_CAPABILITY + 8].copy_from_slice(&4_u32.to_le_bytes());
    config[MSIX_CAPABILITY + 8..MSIX_CAPABILITY + 12].copy_from_slice(&0x804_u32.to_le_bytes());
    config
}

impl TestDevice {
    /// Creates a device with doorbell mode.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Self::make(true)
    }

    /// Creates a device without doorbell mode, like those of other projects.
    #[must_use]
    pub fn without_doorbell_mode() -> Arc<Self> {
        Self::make(false)
    }

    fn make(doorbell_mode: bool) -> Arc<Self> {
        let memory = memfd_create("test-device", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, 4 * PAGE).unwrap();
        Arc::new(Self {
            state: Mutex::new(State {
                config: config(),
                registers: BTreeMap::new(),
                dma: BTreeMap::new(),
                eventfds: BTreeMap::new(),
                wanted: DoorbellMode::Trapped,
                reached: DoorbellMode::Trapped,
                intx_masked: false,
                intx_level: false,
                events: Vec::new(),
                device_state: DeviceState::Running,
                changed: BTreeSet::new(),
                outgoing: VecDeque::new(),
                incoming: Vec::new(),
                held_back: Vec::new(),
                dirty: None,
            }),
            changed: Condvar::new(),
            memory: Arc::new(memory),
            doorbell: Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()),
            authorized: AtomicBool::new(true),
            doorbell_mode,
            delay: Mutex::new(Duration::ZERO),
        })
    }

    /// Replaces configuration space (at most 256 bytes) until the next reset.
    pub fn set_config(&self, bytes: &[u8]) {
        self.state().config[..bytes.len()].copy_from_slice(bytes);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, mut state: MutexGuard<'_, State>, event: TestEvent) {
        state.events.push(event);
        drop(state);
        self.changed.notify_all();
    }

    /// Returns the file of BAR 2's memory. Page `n` of the BAR is page `n` of the file.
    #[must_use]
    pub fn memory(&self) -> &OwnedFd {
        &self.memory
    }

    /// Returns the eventfd of BAR 0, offset 8.
    #[must_use]
    pub fn doorbell(&self) -> &OwnedFd {
        &self.doorbell
    }

    /// Sets whether peers may connect from now on.
    pub fn authorize_peers(&self, authorized: bool) {
        self.authorized.store(authorized, Ordering::SeqCst);
    }

    /// Sets the delay of each region read.
    pub fn set_delay(&self, delay: Duration) {
        *self.delay.lock().unwrap() = delay;
    }

    /// Marks a page as if the device had written a byte of guest memory.
    pub fn touch(&self, address: u64) {
        if let Some(dirty) = &mut self.state().dirty {
            dirty.insert(address / PAGE);
        }
    }

    /// Returns all requested throttling percentages.
    #[must_use]
    pub fn held_back(&self) -> Vec<u8> {
        self.state().held_back.clone()
    }

    /// Signals an MSI-X vector. Returns false if no eventfd is set.
    #[must_use]
    pub fn raise(&self, vector: u32) -> bool {
        self.signal(INTERRUPT_MSIX, vector)
    }

    fn signal(&self, index: u32, number: u32) -> bool {
        match self.state().eventfds.get(&(index, number)) {
            Some(fd) => rustix::io::write(fd, &1_u64.to_ne_bytes()).is_ok(),
            None => false,
        }
    }

    /// Sets the INTx level. Fires once per unmasked rise, as an automasked interrupt does.
    pub fn set_intx(&self, level: bool) {
        let mut state = self.state();
        state.intx_level = level;
        if level && !state.intx_masked {
            state.intx_masked = true;
            drop(state);
            let _ = self.signal(INTERRUPT_INTX, 0);
        }
    }

    /// Requests another doorbell mode, and signals the client.
    pub fn want(&self, mode: DoorbellMode) {
        self.state().wanted = mode;
        let _ = self.signal(doorbell_mode::INTERRUPT, 0);
    }

    /// Returns the mode that the client has reached.
    #[must_use]
    pub fn reached(&self) -> DoorbellMode {
        self.state().reached
    }

    /// Returns bytes of configuration space from the device's side.
    #[must_use]
    pub fn config(&self, offset: usize, len: usize) -> Vec<u8> {
        self.state().config[offset..offset + len].to_vec()
    }

    /// Returns all events so far.
    #[must_use]
    pub fn events(&self) -> Vec<TestEvent> {
        self.state().events.clone()
    }

    /// Drops all events.
    pub fn clear_events(&self) {
        self.state().events.clear();
    }

    /// Waits up to ten seconds until `condition` holds for the events.
    pub fn wait_for(&self, what: &str, condition: impl Fn(&[TestEvent]) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut state = self.state();
        while !condition(&state.events) {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "waited in vain for {what}; seen: {:?}", state.events);
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Returns mapped guest memory: address, size, copy of the descriptor.
    #[must_use]
    pub fn dma(&self) -> Vec<(u64, u64, Option<OwnedFd>)> {
        let copy = |fd: &OwnedFd| fd.try_clone().unwrap();
        self.state().dma.iter().map(|(at, (size, fd))| (*at, *size, fd.as_ref().map(copy))).collect()
    }

    /// Serves one client on a new thread over a socket pair. Dropping the server ends it.
    #[must_use]
    pub fn serve_pair(self: &Arc<Self>) -> (UnixStream, TestServer) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let (device, stopped) = (Arc::clone(self), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            use std::os::fd::AsFd;
            serve_stream(ours, device.as_ref(), stopped.as_fd()).unwrap()
        });
        (theirs, TestServer { stop, thread: Some(thread) })
    }
}

/// The thread of [`TestDevice::serve_pair`].
pub struct TestServer {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<Ended>>,
}

impl TestServer {
    /// Waits until the client disconnects; returns the reason.
    #[must_use]
    pub fn join(mut self) -> Ended {
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            rustix::io::write(&self.stop, &1_u64.to_ne_bytes()).unwrap();
            let _ = thread.join();
        }
    }
}

impl Device for TestDevice {
    fn authorize(&self, peer: &Peer) -> bool {
        assert_eq!(peer.uid, rustix::process::geteuid().as_raw());
        self.authorized.load(Ordering::SeqCst)
    }

    fn regions(&self) -> Vec<Region> {
        let region = |index, size| Region {
            index,
            size,
            readable: true,
            writable: true,
            mappings: Vec::new(),
            io_fds: Vec::new(),
        };
        let page = |number: u64| RegionMapping {
            offset: number * PAGE,
            size: PAGE,
            fd: Arc::clone(&self.memory),
            fd_offset: number * PAGE,
        };
        let doorbell = RegionIoFd { offset: 8, size: 4, datamatch: Some(7), fd: Arc::clone(&self.doorbell) };
        let mut regions = vec![
            Region { io_fds: vec![doorbell], ..region(0, PAGE) },
            Region { mappings: vec![page(0), page(2)], ..region(TEST_MEMORY_BAR, 4 * PAGE) },
            region(4, PAGE),
            region(REGION_CONFIG, CONFIG_SIZE.try_into().unwrap()),
        ];
        if self.doorbell_mode {
            regions.push(region(doorbell_mode::REGION, doorbell_mode::REGION_SIZE));
        }
        regions
    }

    fn interrupts(&self) -> Vec<Interrupts> {
        let level = InterruptFlags { eventfd: true, maskable: true, automasked: true, no_resize: false };
        let mut kinds = vec![
            Interrupts { index: INTERRUPT_INTX, count: 1, flags: level },
            Interrupts { index: INTERRUPT_MSIX, count: TEST_VECTORS, flags: InterruptFlags::EVENTFD },
        ];
        if self.doorbell_mode {
            kinds.push(Interrupts {
                index: doorbell_mode::INTERRUPT,
                count: 1,
                flags: InterruptFlags::EVENTFD,
            });
        }
        kinds
    }

    fn region_read(&self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()> {
        std::thread::sleep(*self.delay.lock().unwrap());
        let state = self.state();
        match region {
            REGION_CONFIG => {
                let at = usize::try_from(offset).unwrap();
                data.copy_from_slice(&state.config[at..at + data.len()]);
            }
            doorbell_mode::REGION if offset == doorbell_mode::WANTED_OFFSET && data.len() == 4 => {
                data.copy_from_slice(&state.wanted.to_register().to_le_bytes());
            }
            TEST_MEMORY_BAR if (offset / PAGE).is_multiple_of(2) => {
                rustix::io::pread(&self.memory, data, offset)?;
            }
            _ => {
                for (at, byte) in (offset..).zip(data.iter_mut()) {
                    *byte = state.registers.get(&(region, at)).copied().unwrap_or(0);
                }
            }
        }
        Ok(())
    }

    fn region_write(&self, region: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut state = self.state();
        match region {
            REGION_CONFIG => {
                let at = usize::try_from(offset).unwrap();
                // Only the command register is writable here.
                for (at, byte) in (at..).zip(data).filter(|(at, _)| (4..6).contains(at)) {
                    state.config[at] = *byte;
                }
            }
            doorbell_mode::REGION => {
                let value = <[u8; 4]>::try_from(data).map(u32::from_le_bytes);
                let mode = value.ok().and_then(DoorbellMode::from_register);
                let mode = mode.ok_or(io::ErrorKind::InvalidInput)?;
                if offset != doorbell_mode::REACHED_OFFSET {
                    return Err(io::ErrorKind::PermissionDenied.into());
                }
                state.reached = mode;
                self.note(state, TestEvent::Reached(mode));
                return Ok(());
            }
            _ => {
                for (at, byte) in (offset..).zip(data) {
                    state.registers.insert((region, at), *byte);
                    state.changed.insert((region, at));
                }
            }
        }
        self.note(state, TestEvent::Write { region, offset, data: data.to_vec() });
        Ok(())
    }

    fn dma_map(&self, mapping: DmaMapping) -> io::Result<()> {
        let mut state = self.state();
        state.dma.insert(mapping.address, (mapping.size, mapping.fd));
        self.note(state, TestEvent::DmaMap(mapping.address, mapping.size, mapping.fd_offset));
        Ok(())
    }

    fn dma_unmap(&self, address: u64, size: u64) -> io::Result<()> {
        let mut state = self.state();
        state.dma.remove(&address);
        self.note(state, TestEvent::DmaUnmap(address, size));
        Ok(())
    }

    fn set_interrupts(&self, index: u32, start: u32, count: u32, change: SetInterrupts) -> io::Result<()> {
        let mut state = self.state();
        match change {
            SetInterrupts::Eventfds(fds) => {
                assert_eq!(fds.len(), usize::try_from(count).unwrap());
                for (number, fd) in (start..).zip(fds) {
                    match fd {
                        Some(fd) => state.eventfds.insert((index, number), fd),
                        None => state.eventfds.remove(&(index, number)),
                    };
                }
            }
            SetInterrupts::Disable => state.eventfds.retain(|(of, _), _| *of != index),
            SetInterrupts::Unmask(_) if index == INTERRUPT_INTX => {
                state.intx_masked = state.intx_level;
                if state.intx_level {
                    drop(state);
                    let _ = self.signal(INTERRUPT_INTX, 0);
                }
            }
            SetInterrupts::Mask(_) if index == INTERRUPT_INTX => state.intx_masked = true,
            SetInterrupts::Trigger(which) => {
                drop(state);
                for (number, _) in (start..).zip(which).filter(|(_, wanted)| *wanted) {
                    let _ = self.signal(index, number);
                }
            }
            SetInterrupts::Mask(_) | SetInterrupts::Unmask(_) => {
                return Err(io::ErrorKind::Unsupported.into());
            }
        }
        Ok(())
    }

    fn migration(&self) -> Option<&dyn Migration> {
        Some(self)
    }

    fn reset(&self) -> io::Result<()> {
        let mut state = self.state();
        state.device_state = DeviceState::Running;
        state.config = config();
        state.registers.clear();
        self.note(state, TestEvent::Reset);
        Ok(())
    }

    fn disconnected(&self) {
        let mut state = self.state();
        state.config = config();
        state.registers.clear();
        state.dma.clear();
        state.eventfds.clear();
        state.intx_masked = false;
        state.reached = DoorbellMode::Trapped;
        state.device_state = DeviceState::Running;
        state.dirty = None;
        self.note(state, TestEvent::Disconnected);
    }
}

/// Region, offset, value.
const RECORD: usize = 13;

impl Migration for TestDevice {
    fn set_state(&self, wanted: DeviceState) -> io::Result<()> {
        use DeviceState::{PreCopy, Resuming, Running, Stop, StopCopy};
        let mut state = self.state();
        match (state.device_state, wanted) {
            (Running, PreCopy | StopCopy) => {
                state.outgoing.clear();
                state.changed = state.registers.keys().copied().collect();
            }
            (Running | Stop, Resuming) => state.incoming.clear(),
            (Resuming, Stop) if !state.incoming.is_empty() => return Err(io::ErrorKind::InvalidData.into()),
            (PreCopy, StopCopy) | (PreCopy | StopCopy | Stop, Running) | (Resuming | Running, Stop) => {}
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        }
        state.device_state = wanted;
        Ok(())
    }

    fn state(&self) -> DeviceState {
        TestDevice::state(self).device_state
    }

    fn read_data(&self, most: usize) -> io::Result<Vec<u8>> {
        let mut state = TestDevice::state(self);
        if !matches!(state.device_state, DeviceState::PreCopy | DeviceState::StopCopy) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        for (region, offset) in std::mem::take(&mut state.changed) {
            let value = state.registers[&(region, offset)];
            state
                .outgoing
                .extend(region.to_le_bytes().into_iter().chain(offset.to_le_bytes()).chain([value]));
        }
        let count = most.min(state.outgoing.len());
        Ok(state.outgoing.drain(..count).collect())
    }

    fn write_data(&self, data: &[u8]) -> io::Result<()> {
        let mut state = TestDevice::state(self);
        if state.device_state != DeviceState::Resuming {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        state.incoming.extend_from_slice(data);
        let whole = state.incoming.len() / RECORD * RECORD;
        let records: Vec<u8> = state.incoming.drain(..whole).collect();
        for record in records.chunks(RECORD) {
            let region = u32::from_le_bytes(record[..4].try_into().unwrap());
            let offset = u64::from_le_bytes(record[4..12].try_into().unwrap());
            state.registers.insert((region, offset), record[12]);
        }
        Ok(())
    }

    fn start_logging(&self) -> io::Result<()> {
        TestDevice::state(self).dirty = Some(BTreeSet::new());
        Ok(())
    }

    fn stop_logging(&self) -> io::Result<()> {
        TestDevice::state(self).dirty = None;
        Ok(())
    }

    fn hold_back(&self, percent: u8) -> io::Result<()> {
        let mut state = TestDevice::state(self);
        if state.dirty.is_none() {
            // As a device without throttling responds.
            return Err(rustix::io::Errno::NOTTY.into());
        }
        state.held_back.push(percent);
        Ok(())
    }

    fn take_dirty(&self, address: u64, size: u64) -> io::Result<Vec<u64>> {
        let mut state = TestDevice::state(self);
        let dirty = state.dirty.as_mut().ok_or(io::ErrorKind::InvalidInput)?;
        let first = address / PAGE;
        let mut words = vec![0; usize::try_from(size.div_ceil(64 * PAGE)).unwrap()];
        dirty.retain(|page| {
            let within = (first..first + size / PAGE).contains(page);
            if within {
                words[usize::try_from((page - first) / 64).unwrap()] |= 1 << ((page - first) % 64);
            }
            !within
        });
        Ok(words)
    }
}
