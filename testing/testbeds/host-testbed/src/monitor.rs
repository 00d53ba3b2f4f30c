//! A monitor: attaches a NIC at a daemon, provides RAM and eventfds, follows the doorbell mode.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, RwLock};
use std::thread::JoinHandle;
use std::time::Duration;

use control_api::host::{NicRequest, attach_nic};
use dma::{Dma, MappedMemory, MemoryRegion};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vfio_user_protocol::client::Client;
use vfio_user_protocol::device::{INTERRUPT_MSIX, REGION_CONFIG};
use vfio_user_protocol::doorbell_mode::{self, DoorbellMode};

/// Bytes of guest RAM, at address 0, unless a machine has another size.
pub const RAM: u64 = 8 << 20;
const REGISTERS: u32 = 1;
const UAR: u32 = 2;
const TIMEOUT: Duration = Duration::from_secs(10);

/// RAM and other state of a VM that outlives its connections.
pub struct Machine {
    pub vm: String,
    pub segment: String,
    pub ram: MappedMemory,
    /// Size of the RAM, bytes.
    pub size: u64,
    file: OwnedFd,
}

impl Machine {
    pub fn new(vm: &str, segment: &str) -> Self {
        Self::with_ram(vm, segment, RAM)
    }

    /// A machine with `size` bytes of RAM.
    pub fn with_ram(vm: &str, segment: &str, size: u64) -> Self {
        let file = memfd_create("ram", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, size).unwrap();
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        let ram = MappedMemory::default().with(MemoryRegion::map(0, size, &file, 0, true).unwrap()).unwrap();
        Self { vm: vm.to_owned(), segment: segment.to_owned(), ram, size, file }
    }

    /// Discards all pages of the RAM, whatever their contents.
    pub fn empty(&self) {
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.file, flags, 0, self.size).unwrap();
    }

    pub fn request(&self) -> NicRequest {
        NicRequest {
            vm: self.vm.clone(),
            name: "rdma0".to_owned(),
            segment: self.segment.clone(),
            ..NicRequest::default()
        }
    }

    /// Attaches the NIC at the daemon.
    pub fn attach(&self, daemon: &Path) -> Vec<PathBuf> {
        attach_nic(daemon, &self.request()).unwrap().functions
    }

    /// Attaches and connects both functions of a NIC whose VM is to arrive here.
    pub fn await_vm(&self, daemon: &Path) -> Monitor {
        let request = NicRequest { incoming: true, ..self.request() };
        Monitor::new(self, &attach_nic(daemon, &request).unwrap().functions, true)
    }

    /// Attaches and connects both functions.
    pub fn connect(&self, daemon: &Path, doorbell_mode: bool) -> Monitor {
        Monitor::new(self, &self.attach(daemon), doorbell_mode)
    }
}

/// A connection to a NIC. Dropping it looks like a crash to the daemon: sockets close, whatever is in progress.
pub struct Monitor {
    pub ethernet: Client,
    pub rdma: Arc<Client>,
    pub vectors: Vec<OwnedFd>,
    pub doorbells: Arc<Doorbells>,
    /// Ends with the monitor.
    _follower: Option<Follower>,
}

/// The doorbell pages from the guest's view.
pub struct Doorbells {
    client: Arc<Client>,
    pages: MappedMemory,
    /// Whether they are memory. Locked for reading during a store, for writing during a change.
    mapped: RwLock<bool>,
    pub switches: AtomicU64,
    pub exits: AtomicU64,
    /// Makes changes fail, as in a monitor without memslots.
    pub broken: AtomicBool,
}

impl Doorbells {
    /// A guest's store.
    pub fn ring(&self, offset: u64, value: u32) {
        let mapped = self.mapped.read().unwrap();
        if *mapped {
            self.pages.store_u32(offset, value).unwrap();
        } else {
            self.exits.fetch_add(1, Ordering::Relaxed);
            // The daemon may be dead.
            let _ = self.client.region_write(UAR, offset, &value.to_le_bytes());
        }
    }

    pub fn is_mapped(&self) -> bool {
        *self.mapped.read().unwrap()
    }

    /// Handles a signal of the daemon.
    fn follow(&self) {
        let mut wanted = [0; 4];
        if self.client.region_read(doorbell_mode::REGION, doorbell_mode::WANTED_OFFSET, &mut wanted).is_err()
        {
            return;
        }
        let wanted = DoorbellMode::from_register(u32::from_le_bytes(wanted)).unwrap();
        let mut mapped = self.mapped.write().unwrap();
        let now = wanted == DoorbellMode::Mapped;
        if *mapped != now && !self.broken.load(Ordering::SeqCst) {
            *mapped = now;
            self.switches.fetch_add(1, Ordering::SeqCst);
        }
        let reached = if *mapped { DoorbellMode::Mapped } else { DoorbellMode::Trapped };
        drop(mapped);
        self.report(reached);
    }

    fn report(&self, mode: DoorbellMode) {
        let value = mode.to_register().to_le_bytes();
        // The daemon may be dead.
        let _ = self.client.region_write(doorbell_mode::REGION, doorbell_mode::REACHED_OFFSET, &value);
    }
}

struct Follower {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

impl Monitor {
    fn new(machine: &Machine, sockets: &[PathBuf], doorbell_mode: bool) -> Self {
        let ethernet = Client::connect(&sockets[0], TIMEOUT).unwrap();
        let rdma = Arc::new(Client::connect(&sockets[1], TIMEOUT).unwrap());
        for client in [&ethernet, &*rdma] {
            client.dma_map(machine.file.as_fd(), 0, 0, machine.size, true).unwrap();
            client.region_write(REGION_CONFIG, 4, &6_u16.to_le_bytes()).unwrap();
        }
        let vectors: Vec<OwnedFd> = (0..3).map(|_| event()).collect();
        let fds: Vec<_> = vectors.iter().map(|fd| Some(fd.as_fd())).collect();
        rdma.set_eventfds(INTERRUPT_MSIX, 0, &fds).unwrap();
        let region = rdma.region(UAR).unwrap();
        let mapping = &region.mappings[0];
        let pages = MemoryRegion::map(0, mapping.size, &mapping.fd, mapping.fd_offset, true).unwrap();
        let doorbells = Arc::new(Doorbells {
            client: Arc::clone(&rdma),
            pages: MappedMemory::default().with(pages).unwrap(),
            mapped: RwLock::new(!doorbell_mode),
            switches: AtomicU64::new(0),
            exits: AtomicU64::new(0),
            broken: AtomicBool::new(false),
        });
        let follower = doorbell_mode.then(|| Follower::start(&rdma, &doorbells));
        Self { ethernet, rdma, vectors, doorbells, _follower: follower }
    }

    pub fn read(&self, offset: u64) -> u32 {
        let mut value = [0; 4];
        self.rdma.region_read(REGISTERS, offset, &mut value).unwrap();
        u32::from_le_bytes(value)
    }

    pub fn write(&self, offset: u64, value: u32) {
        self.rdma.region_write(REGISTERS, offset, &value.to_le_bytes()).unwrap();
    }

    /// Consumes the interrupts of a vector; returns whether there were any.
    pub fn take(&self, vector: usize) -> bool {
        rustix::io::read(&self.vectors[vector], &mut [0; 8]).is_ok()
    }

    /// Sleeps until a vector was raised; `false` after ten seconds.
    pub fn await_interrupt(&self, vector: usize) -> bool {
        let fd = &self.vectors[vector];
        let timeout = rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 };
        let mut fds = [PollFd::new(fd, PollFlags::IN)];
        poll(&mut fds, Some(&timeout)).unwrap();
        self.take(vector)
    }
}

impl Follower {
    fn start(client: &Client, doorbells: &Arc<Doorbells>) -> Self {
        let signal = event();
        client.set_eventfds(doorbell_mode::INTERRUPT, 0, &[Some(signal.as_fd())]).unwrap();
        doorbells.report(DoorbellMode::Trapped);
        doorbells.follow();
        let stop = Arc::new(event());
        let (stopped, doorbells) = (Arc::clone(&stop), Arc::clone(doorbells));
        let thread = std::thread::spawn(move || {
            loop {
                let mut fds = [PollFd::new(&stopped, PollFlags::IN), PollFd::new(&signal, PollFlags::IN)];
                poll(&mut fds, None).unwrap();
                if !fds[0].revents().is_empty() {
                    return;
                }
                let _ = rustix::io::read(&signal, &mut [0; 8]);
                doorbells.follow();
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        rustix::io::write(&self.stop, &1_u64.to_ne_bytes()).unwrap();
        self.thread.take().unwrap().join().unwrap();
    }
}
