//! A KVM machine without vCPUs, whose guest is played by the test, with a real registry.
#![allow(clippy::unwrap_used, dead_code, unreachable_pub, missing_docs)] // Helpers of several tests, of which none uses all.

pub mod connection;
pub mod member;

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use host::access::Access;
use host::neighbours::{Neighbours, NeighboursConfig};
use machine::bus::AddressSpace;
use machine::exits::RangeNames;
use machine::interrupt::{InterruptController, MsiRoute};
use machine::irqchip::{IrqchipOptions, KernelIrqchip};
use machine::kvm::Host;
use machine::memory::{GuestRam, RamLayout, RamOptions, Readers};
use machine::vm::Vm;
use monitor::description::{Neighbour, NeighbourPeer};
use monitor::neighbour::{NeighbourFunction, OpenedNeighbour};
use monitor::vm::ThreadHook;
use neighbour::heartbeat::Heartbeat;
use neighbour::registers as reg;
use pci::function::PciFunction;
use pci::interrupt::{InterruptError, Msi, MsiMessage, MsiVector};

pub const RAM: u64 = 4 << 20;
pub const HANG_LIMIT: Duration = Duration::from_secs(120);

/// Vectors of a machine's controller, kept so that a test can read their eventfds.
pub struct Vectors {
    controller: Arc<dyn InterruptController>,
    pub made: Mutex<Vec<Arc<dyn MsiRoute>>>,
}

pub struct Vector(Arc<dyn MsiRoute>);

pub fn refused(source: std::io::Error) -> InterruptError {
    InterruptError::Refused { what: "do what a test asks".to_owned(), source }
}

impl Msi for Vectors {
    fn allocate(&self, count: u16) -> Result<Vec<Arc<dyn MsiVector>>, InterruptError> {
        let routes = self.controller.allocate_msi(count).map_err(refused)?;
        self.made.lock().unwrap().extend(routes.iter().map(Arc::clone));
        Ok(routes.into_iter().map(|route| Arc::new(Vector(route)) as Arc<dyn MsiVector>).collect())
    }
}

impl MsiVector for Vector {
    fn set(&self, message: Option<MsiMessage>) -> Result<(), InterruptError> {
        let message = message
            .map(|message| machine::interrupt::MsiMessage { address: message.address, data: message.data });
        self.0.set(message).map_err(refused)
    }

    fn trigger(&self) -> Result<(), InterruptError> {
        self.0.trigger().map_err(refused)
    }

    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        self.0.eventfd()
    }
}

/// A driver that only counts.
pub struct Driver {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// A machine whose guest is played by the test.
pub struct Machine {
    pub vm: Arc<Vm>,
    pub memory: AddressSpace,
    pub function: Arc<NeighbourFunction>,
    pub vectors: Vectors,
    pub ram: GuestRam,
}

/// Timeouts of a registry that are longer than any delay of a busy machine.
pub fn patient() -> Heartbeat {
    Heartbeat { patience: Duration::from_secs(60), ..Heartbeat::DEFAULT }
}

pub fn registry(directory: &Path, heartbeat: Heartbeat) -> Neighbours {
    let folder = directory.join("host.d");
    std::fs::create_dir_all(&folder).unwrap();
    let config = NeighboursConfig { heartbeat, ..NeighboursConfig::default() };
    Neighbours::start(&folder.join("neighbours"), Access::default(), config).unwrap()
}

pub fn has_kvm(test: &str) -> bool {
    let there = Path::new("/dev/kvm").exists();
    if !there {
        facilities::missing(facilities::Facility::Kvm, format!("{test} needs /dev/kvm"));
    }
    there
}

/// Numbers of descriptors and mappings of `name`'s memory in this process.
pub fn held(name: &str) -> (usize, usize) {
    let name = format!("causeway:{name}:ram");
    let links = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| {
        // Other threads may close descriptors meanwhile.
        std::fs::read_link(entry.ok()?.path()).ok()
    });
    let open = links.filter(|link| link.to_string_lossy().contains(&name)).count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (open, maps.lines().filter(|line| line.contains(&name)).count())
}

pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + HANG_LIMIT;
    while !done() {
        assert!(Instant::now() < deadline, "never happened: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

impl Machine {
    pub fn start(directory: &Path, name: &str, permits: &[&str]) -> Self {
        Self::start_confined(directory, name, permits, Arc::new(|| {}))
    }

    /// The same, with a function whose thread runs `on_start` first.
    pub fn start_confined(directory: &Path, name: &str, permits: &[&str], on_start: ThreadHook) -> Self {
        let permit = permits.iter().map(|vm| NeighbourPeer { vm: (*vm).to_owned(), uid: None }).collect();
        Self::start_with(directory, name, permit, Readers::Anybody, on_start)
    }

    /// The same, with RAM for `readers`.
    pub fn start_with(
        directory: &Path,
        name: &str,
        permit: Vec<NeighbourPeer>,
        readers: Readers,
        on_start: ThreadHook,
    ) -> Self {
        let wish = Neighbour { group: "nas".to_owned(), permit, host: directory.join("host.sock") };
        let opened = OpenedNeighbour::open(name, &wish).unwrap();
        let vm = Host::open().unwrap().create_vm().unwrap();
        let options = RamOptions { name: name.to_owned(), readers, ..RamOptions::default() };
        let ram = GuestRam::allocate(&RamLayout::new(&[RAM]).unwrap(), &options).unwrap();
        vm.slots().add_ram(&ram).unwrap();
        let controller = KernelIrqchip::create(&vm, IrqchipOptions { pit: false }).unwrap();
        let vectors = Vectors { controller, made: Mutex::default() };
        let memory = AddressSpace::memory(RangeNames::new());
        let function = NeighbourFunction::new(opened, &vm, &ram, &memory, &vectors).unwrap();
        function.start(Box::new(|| {}), on_start).unwrap();
        Self { vm, memory, function, vectors, ram }
    }

    pub fn read(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.function.bar_read(reg::BAR_REGISTERS, offset, &mut data);
        u32::from_le_bytes(data)
    }

    pub fn write(&self, offset: u64, value: u32) {
        self.function.bar_write(reg::BAR_REGISTERS, offset, &value.to_le_bytes());
    }

    /// Starts a driver that only counts.
    pub fn drive(&self) -> Driver {
        let at = u64::from(self.slot()) * u64::from(self.read(reg::SEGMENT_STRIDE));
        let status = self.function.mappings().into_iter().find(|mapping| mapping.offset == at).unwrap().fd;
        self.write(reg::DRIVER, 1);
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            for count in 1_u64.. {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                rustix::io::pwrite(&status, &count.to_le_bytes(), 0).unwrap();
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        Driver { stop, thread: Some(thread) }
    }

    pub fn slot(&self) -> u32 {
        self.read(reg::OWN_SLOT)
    }

    pub fn peer(&self, slot: u32, register: u64) -> u32 {
        self.read(reg::PEERS + u64::from(slot) * reg::PEER_STRIDE + register)
    }

    pub fn release(&self, slot: u32, epoch: u32) {
        self.write(reg::PEERS + u64::from(slot) * reg::PEER_STRIDE + reg::PEER_RELEASE, epoch);
    }

    pub fn window(slot: u32) -> u64 {
        NeighboursConfig::default().geometry.start(slot).unwrap()
    }

    /// Whether KVM has a window of `slot` here. Asserts that it is read-only.
    pub fn sees(&self, slot: u32) -> bool {
        let found = self.vm.slots().lookup(Self::window(slot) + RAM - 1);
        assert!(found.as_ref().is_none_or(|memslot| memslot.read_only));
        found.is_some()
    }

    /// Waits until the block of `slot` has `state`. Returns its epoch.
    pub fn wait_for(&self, slot: u32, state: u32) -> u32 {
        wait_until(&format!("peer {slot} in state {state}"), || self.peer(slot, reg::PEER_STATE) == state);
        self.peer(slot, reg::PEER_EPOCH)
    }
}
