//! An RDMA NIC of a host daemon in a measuring VM, with the monitor's own code. Both functions are vfio-user clients
//! (`monitor::vfio_user`) in a PCI root, whose BARs are placed as in every VM. So doorbells are memslots while the daemon polls, and
//! exit otherwise.
//!
//! ```text
//! program in the VM    doorbell ── memslot, or exit ─▶ bus ─▶ VfioUserFunction ─▶ causeway host
//! this process         as the guest's kernel: configuration space, registers of BAR 1, interrupts of commands
//! ```

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use control_api::host::NicRequest;
use monitor::vfio_user::{NicConnector, OpenedFunction, VfioUserFunction};
use pci::function::PciFunction;
use pci::interrupt::{InterruptError, Msi, MsiMessage, MsiVector};
use pci::registers::{
    CAP_MSIX, CAPABILITY_POINTER, COMMAND, COMMAND_BUS_MASTER, COMMAND_MEMORY, FIRST_CAPABILITY,
    LEGACY_CONFIG_SPACE_SIZE, MSIX_ENABLE,
};
use pci::root::{AddressRange, FunctionAddress, PciRoot, RootConfig, Windows};
use pvrdma::abi::pci::{FUNCTION, REGISTER_BAR, UAR_BAR, VECTOR_RESPONSE};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::driver::Registers;
use crate::measuring_vm::MeasuringVm;

/// Slot of the NIC; the host bridge has 0.
const SLOT: u8 = 1;
/// Functions of a NIC: Ethernet and RDMA.
const FUNCTIONS: u8 = 2;
/// Window of 32-bit BARs: below 4 GiB, where a payload machine has neither RAM nor doorbells.
const MEMORY_WINDOW: AddressRange = AddressRange { start: 0xE000_0000, len: 16 << 20 };
/// Time-out of a command, and of a change of the doorbells.
const TIMEOUT: Duration = Duration::from_secs(60);
const LOOK_INTERVAL: Duration = Duration::from_millis(2);

/// Bytes of a measuring VM's room for a NIC's doorbells.
pub const ROOM: u64 = 16 << 20;

/// The NIC. Its connections close when it is dropped.
pub struct Nic {
    root: Arc<PciRoot>,
    rdma: Arc<VfioUserFunction>,
    responses: Arc<OwnedFd>,
    doorbells: u64,
    _ethernet: Arc<VfioUserFunction>,
}

impl Nic {
    /// Requests a NIC of VM `name` from the daemon at `socket`, plugs it into the VM, and enables it as firmware and the guest's
    /// kernel do.
    pub fn attach(vm: &MeasuringVm, socket: &Path, name: &str) -> anyhow::Result<Self> {
        let request = NicRequest {
            vm: name.to_owned(),
            name: "rdma0".to_owned(),
            segment: "bench".to_owned(),
            ..NicRequest::default()
        };
        let nic = monitor::vfio_user::Nic::new(socket, request);
        let root = Arc::new(PciRoot::new(RootConfig {
            windows: Windows {
                memory32: MEMORY_WINDOW,
                memory64: Some(AddressRange { start: vm.room(), len: ROOM }),
                io: None,
            },
            placer: Arc::new(vm.placer()),
            // Payload machines have no interrupt controller.
            intx: Arc::new(|_: u32, _: bool| -> Result<(), InterruptError> { Ok(()) }),
        }));
        let mut functions = Vec::new();
        for number in 0..FUNCTIONS {
            let connector = NicConnector { nic: Arc::clone(&nic), function: number };
            let opened = OpenedFunction::open(&format!("rdma0.{number}"), Box::new(connector))?;
            let vectors = Vectors::default();
            let function = VfioUserFunction::new(opened, vm.ram(), &vectors)?;
            let address = FunctionAddress::new(SLOT, number)?;
            root.plug(address, Arc::clone(&function) as Arc<dyn PciFunction>)?;
            let bus = Arc::downgrade(&root);
            let refresh = move || {
                if let Some(bus) = bus.upgrade() {
                    bus.refresh(address);
                }
            };
            function.start(Box::new(refresh), Arc::new(|| {}))?;
            functions.push((function, vectors));
        }
        let (Some((rdma, vectors)), Some((ethernet, _))) = (functions.pop(), functions.pop()) else {
            bail!("A NIC has two functions");
        };
        let responses = vectors.event(VECTOR_RESPONSE).context("The RDMA device has no interrupt vectors")?;
        root.assign_bars()?;
        let nic = Self { root, rdma, responses, doorbells: 0, _ethernet: ethernet };
        nic.switch_on()?;
        let doorbells = nic.rdma.places().into_iter().find(|place| place.layout.index == UAR_BAR);
        let doorbells = doorbells.and_then(|place| place.address);
        Ok(Self { doorbells: doorbells.context("The RDMA device's doorbells have no address")?, ..nic })
    }

    /// Enables memory decoding, bus mastering and MSI-X.
    fn switch_on(&self) -> anyhow::Result<()> {
        let mut pointer = [0];
        self.config_read(CAPABILITY_POINTER, &mut pointer)?;
        // At most as many as there is room for.
        for _ in 0..LEGACY_CONFIG_SPACE_SIZE / 4 {
            let at = u16::from(pointer[0] & !3);
            if at < FIRST_CAPABILITY {
                break;
            }
            let mut capability = [0; 4];
            self.config_read(at, &mut capability)?;
            let [id, next, low, high] = capability;
            if id == CAP_MSIX {
                let control = u16::from_le_bytes([low, high]) | MSIX_ENABLE;
                self.config_write(at + 2, &control.to_le_bytes())?;
                return self.config_write(COMMAND, &(COMMAND_MEMORY | COMMAND_BUS_MASTER).to_le_bytes());
            }
            pointer = [next];
        }
        bail!("The RDMA device has no MSI-X");
    }

    fn ecam_offset(register: u16) -> anyhow::Result<u64> {
        let at = FunctionAddress::new(SLOT, FUNCTION)?;
        Ok(u64::from(at.slot()) << 15 | u64::from(at.function()) << 12 | u64::from(register))
    }

    fn config_read(&self, register: u16, data: &mut [u8]) -> anyhow::Result<()> {
        self.root.ecam_read(Self::ecam_offset(register)?, data);
        Ok(())
    }

    fn config_write(&self, register: u16, data: &[u8]) -> anyhow::Result<()> {
        self.root.ecam_write(Self::ecam_offset(register)?, data);
        Ok(())
    }

    /// Returns the guest address of the doorbells.
    pub fn doorbells(&self) -> u64 {
        self.doorbells
    }

    /// Returns whether the guest's doorbells are memory and the daemon polls.
    fn is_polled(&self) -> bool {
        !self.rdma.mappings().is_empty()
    }

    /// Waits until the daemon has stopped polling and sleeps, so that it doesn't disturb the next measurement.
    pub fn await_rest(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        while self.is_polled() {
            if !self.rdma.is_connected() {
                bail!("The host daemon has closed the RDMA device's connection");
            }
            if Instant::now() > deadline {
                bail!("The host daemon still polls doorbells {TIMEOUT:?} after the last request");
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
        Ok(())
    }
}

impl Registers for Nic {
    fn read(&self, offset: u64) -> u32 {
        let mut value = [0; 4];
        self.rdma.bar_read(REGISTER_BAR, offset, &mut value);
        u32::from_le_bytes(value)
    }

    fn write(&self, offset: u64, value: u32) {
        self.rdma.bar_write(REGISTER_BAR, offset, &value.to_le_bytes());
    }

    fn await_response(&self) -> anyhow::Result<()> {
        let timeout = Timespec { tv_sec: TIMEOUT.as_secs().try_into()?, tv_nsec: 0 };
        let mut fds = [PollFd::new(&self.responses, PollFlags::IN)];
        poll(&mut fds, Some(&timeout)).context("An interrupt could not be waited for")?;
        if rustix::io::read(&self.responses, &mut [0; 8]).is_err() {
            bail!("No interrupt came with the response to a command within {TIMEOUT:?}");
        }
        Ok(())
    }
}

/// Interrupt vectors that end in this process: eventfds that the daemon signals and the driver reads.
#[derive(Default)]
struct Vectors(Mutex<Vec<Arc<OwnedFd>>>);

struct Vector(Arc<OwnedFd>);

impl Vectors {
    fn event(&self, vector: u16) -> Option<Arc<OwnedFd>> {
        let events = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        events.get(usize::from(vector)).map(Arc::clone)
    }
}

fn refused(what: &str, source: rustix::io::Errno) -> InterruptError {
    InterruptError::Refused { what: what.to_owned(), source: source.into() }
}

impl Msi for Vectors {
    fn allocate(&self, count: u16) -> Result<Vec<Arc<dyn MsiVector>>, InterruptError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let made = (0..count).map(|_| eventfd(0, flags).map(Arc::new)).collect::<Result<Vec<_>, _>>();
        let made = made.map_err(|source| refused("make an eventfd", source))?;
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(made.iter().map(Arc::clone));
        Ok(made.into_iter().map(|event| Arc::new(Vector(event)) as Arc<dyn MsiVector>).collect())
    }
}

impl MsiVector for Vector {
    fn set(&self, _: Option<MsiMessage>) -> Result<(), InterruptError> {
        Ok(())
    }

    fn trigger(&self) -> Result<(), InterruptError> {
        match rustix::io::write(&self.0, &1_u64.to_ne_bytes()) {
            Ok(_) => Ok(()),
            Err(source) => Err(refused("signal an eventfd", source)),
        }
    }

    fn eventfd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }
}
