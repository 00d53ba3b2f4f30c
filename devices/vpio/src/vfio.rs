//! A card of this host that is bound to `vfio-pci`, behind an IOMMU (Linux, `Documentation/driver-api/vfio.rst`). It is
//! opened through a container and the card's group, or through iommufd if the kernel has no containers.
//!
//! Register accesses use the device's file. INTx arrives on an eventfd: VFIO masks the line when it signals, and
//! [`Vfio::unmask`] unmasks it. The card reaches only what is mapped in its address space.
#![allow(unsafe_code)] // Mapping for DMA, and descriptors that are handed to the crate's own eventfd type.

use std::any::Any;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use device_models::describe::Device;
use device_models::physical::{DeviceError, Mapping, PhysicalDevice, poke};
use iommufd_ioctls::IommuFd;
use thiserror::Error;
use vfio_bindings::bindings::vfio::{VFIO_PCI_CONFIG_REGION_INDEX, VFIO_PCI_INTX_IRQ_INDEX};
use vfio_ioctls::{VfioContainer, VfioDevice, VfioError, VfioIommufd, VfioOps};
use vmm_sys_util::eventfd::EventFd;

use crate::fast_forward::{FRAME, RING, Scratch};
use crate::sharing::OwnRing;

/// System calls of threads that use an opened device.
pub const SYSCALLS: &[i64] = &[libc::SYS_pread64, libc::SYS_pwrite64, libc::SYS_ioctl];

/// The host's directory of PCI devices.
const DEVICES: &str = "/sys/bus/pci/devices";
/// Configuration space: offset of the command register, and its bits for ports, memory and bus mastering.
const COMMAND: u64 = 4;
const DECODE: u16 = 0x3;
const BUS_MASTER: u16 = 0x4;
/// Base address of the monitor's own memory for the device: between RAM below 3 GiB and the range that the host
/// reserves for interrupts.
const SCRATCH_BASE: u64 = 0xE000_0000;

/// Device addresses at which a guest of a shared card can't have memory: those of the owner's and the monitor's memory.
pub const RESERVED: std::ops::Range<u64> = SCRATCH_BASE..SCRATCH_BASE + 0x20_0000;

/// A region of guest memory in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ram {
    /// Guest-physical base.
    pub guest_base: u64,
    /// Length in bytes.
    pub length: u64,
    /// Address of the mapping in this process.
    pub host_address: usize,
}

/// A card can't be opened.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The device doesn't exist.
    #[error("There is no PCI device {address} on this host ({} can't be read); lspci -D lists them", path.display())]
    Absent {
        /// The requested address.
        address: String,
        /// The path that was read.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The device is bound to another driver.
    #[error(
        "PCI device {address} belongs to {driver}, not to vfio-pci; bind it: echo vfio-pci > {DEVICES}/{address}/driver_override, then unbind and probe it"
    )]
    Driver {
        /// The device's address.
        address: String,
        /// The driver's name.
        driver: String,
    },
    /// This program has no description of the device.
    #[error(
        "PCI device {address} is {vendor:04x}:{device:04x}, of which there is no description; there are: {known}"
    )]
    Unknown {
        /// The device's address.
        address: String,
        /// Its vendor ID.
        vendor: u16,
        /// Its device ID.
        device: u16,
        /// The described devices.
        known: String,
    },
    /// VFIO refused an operation.
    #[error("VFIO refused to {what} for PCI device {address}")]
    Vfio {
        /// The device's address.
        address: String,
        /// The operation.
        what: &'static str,
        /// The cause.
        #[source]
        source: VfioError,
    },
    /// The card failed.
    #[error("PCI device {address} can't be set up")]
    Device {
        /// The device's address.
        address: String,
        /// The cause.
        #[source]
        source: DeviceError,
    },
    /// No eventfd could be created.
    #[error("An eventfd for PCI device {address} can't be made")]
    Event {
        /// The device's address.
        address: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

/// The kernel interface by which a process gets a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// The device's own file, bound to an address space of `/dev/iommu`.
    Iommufd,
    /// The device's group, in a container.
    Group,
}

impl Way {
    fn of(device: &Path) -> Self {
        let is = |path: &str| Path::new(path).exists();
        Self::choose(is("/dev/vfio/vfio"), is("/dev/iommu") && device.join("vfio-dev").is_dir())
    }

    /// Prefers the group, since tests run it. Chooses iommufd on kernels without containers: no Debian kernel has
    /// iommufd.
    const fn choose(containers: bool, iommufd: bool) -> Self {
        if iommufd && !containers { Self::Iommufd } else { Self::Group }
    }

    /// Returns the name that `causeway inspect` prints.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Iommufd => "iommufd",
            Self::Group => "group",
        }
    }
}

/// An opened card. Dropping it removes all its mappings.
pub struct Vfio {
    address: String,
    description: &'static Device,
    // Before the container and the memory, so that it is dropped first.
    device: VfioDevice,
    space: Arc<dyn VfioOps>,
    by: Way,
    ram: Vec<Ram>,
    /// The monitor's own memory that may be mapped for the device.
    scratch: Option<Ram>,
    /// Keeps the guest's memory mapped.
    keep: Option<Box<dyn Any + Send>>,
    interrupt: EventFd,
    signalled: bool,
    /// INTx is connected to an eventfd.
    connected: AtomicBool,
    /// Bus mastering as the guest requests it, and as the monitor does.
    guest_master: bool,
    monitor_master: bool,
}

fn read_word(address: &str, file: &str) -> Result<u16, OpenError> {
    let path = Path::new(DEVICES).join(address).join(file);
    let absent = |source| OpenError::Absent { address: address.to_owned(), path: path.clone(), source };
    let text = std::fs::read_to_string(&path).map_err(absent)?;
    let digits = text.trim().trim_start_matches("0x");
    u16::from_str_radix(digits, 16).map_err(|error| absent(io::Error::new(io::ErrorKind::InvalidData, error)))
}

impl Vfio {
    /// Opens the card at a PCI address (`0000:03:00.0`), resets it, and leaves bus mastering off.
    ///
    /// # Errors
    /// The card doesn't exist, isn't bound to vfio-pci or isn't described, or VFIO refuses.
    pub fn open(address: &str) -> Result<Self, OpenError> {
        let (vendor, device) = (read_word(address, "vendor")?, read_word(address, "device")?);
        let path = Path::new(DEVICES).join(address);
        let driver = std::fs::read_link(path.join("driver"));
        let driver = driver.ok().and_then(|link| Some(link.file_name()?.to_string_lossy().into_owned()));
        if driver.as_deref() != Some("vfio-pci") {
            let driver = driver.unwrap_or_else(|| "no driver".to_owned());
            return Err(OpenError::Driver { address: address.to_owned(), driver });
        }
        let all = device_models::devices::ALL;
        let description = all.iter().find(|known| (known.pci.vendor, known.pci.device) == (vendor, device));
        let Some(description) = description else {
            let name = |known: &&&Device| {
                format!("{} ({:04x}:{:04x})", known.name, known.pci.vendor, known.pci.device)
            };
            let known = all.iter().map(|known| name(&known)).collect::<Vec<_>>().join(", ");
            return Err(OpenError::Unknown { address: address.to_owned(), vendor, device, known });
        };
        let refused = |what| move |source| OpenError::Vfio { address: address.to_owned(), what, source };
        let by = Way::of(&path);
        let space: Arc<dyn VfioOps> = match by {
            Way::Iommufd => {
                let made = IommuFd::new().map_err(VfioError::NewVfioIommufd);
                let made = made.and_then(|iommufd| VfioIommufd::new(Arc::new(iommufd), None, None));
                Arc::new(made.map_err(refused("make an address space (/dev/iommu)"))?)
            }
            Way::Group => {
                Arc::new(VfioContainer::new(None).map_err(refused("make a container (/dev/vfio/vfio)"))?)
            }
        };
        let vfio = VfioDevice::new(&path, Arc::clone(&space), true).map_err(refused(match by {
            Way::Iommufd => "bind the device to an address space (/dev/vfio/devices)",
            Way::Group => "open the device's group (are other devices of the group bound to vfio-pci too?)",
        }))?;
        let interrupt = EventFd::new(vmm_sys_util::eventfd::EFD_NONBLOCK)
            .map_err(|source| OpenError::Event { address: address.to_owned(), source })?;
        let mut opened = Self {
            address: address.to_owned(),
            description,
            device: vfio,
            space,
            by,
            ram: Vec::new(),
            scratch: None,
            keep: None,
            interrupt,
            signalled: false,
            connected: AtomicBool::new(false),
            guest_master: false,
            monitor_master: false,
        };
        let failed = |source| OpenError::Device { address: address.to_owned(), source };
        opened.reset().map_err(failed)?;
        // A previous user may have started something that the reset doesn't end.
        poke(description, &mut opened, description.power_on).map_err(failed)?;
        Ok(opened)
    }

    /// Returns the PCI address.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Returns the kernel interface of this card.
    pub const fn way(&self) -> Way {
        self.by
    }

    /// Returns the card's description.
    pub fn description(&self) -> &'static Device {
        self.description
    }

    /// Sets the guest's memory regions. `keep` keeps them mapped in this process.
    pub fn set_ram(&mut self, ram: Vec<Ram>, keep: Box<dyn Any + Send>) {
        self.ram = ram;
        self.keep = Some(keep);
    }

    /// Connects the INTx line to the eventfd of [`Self::interrupt_fd`].
    ///
    /// # Errors
    /// VFIO refuses.
    pub fn enable_interrupt(&self) -> Result<(), OpenError> {
        let refused = |source| OpenError::Vfio { address: self.address.clone(), what: "signal INTx", source };
        self.disconnect()?;
        self.device.enable_irq(VFIO_PCI_INTX_IRQ_INDEX, vec![&self.interrupt]).map_err(refused)
    }

    /// Connects the INTx line to `trigger`, and its unmasking to `resample`, without this process: KVM's
    /// level-triggered irqfd.
    ///
    /// # Errors
    /// VFIO refuses.
    pub fn connect_interrupt(
        &self,
        trigger: BorrowedFd<'_>,
        resample: BorrowedFd<'_>,
    ) -> Result<(), OpenError> {
        let failed = |source| OpenError::Event { address: self.address.clone(), source };
        let event = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().map(event_fd).map_err(failed);
        let (trigger, resample) = (event(trigger)?, event(resample)?);
        let refused =
            |source| OpenError::Vfio { address: self.address.clone(), what: "connect INTx to KVM", source };
        self.disconnect()?;
        self.device.enable_irq(VFIO_PCI_INTX_IRQ_INDEX, vec![&trigger]).map_err(refused)?;
        self.device.set_irq_resample_fd(VFIO_PCI_INTX_IRQ_INDEX, vec![&resample]).map_err(refused)
    }

    /// Disconnects INTx, so that it can be connected elsewhere. An asserted line then signals there at once.
    fn disconnect(&self) -> Result<(), OpenError> {
        if !self.connected.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        let refused =
            |source| OpenError::Vfio { address: self.address.clone(), what: "disconnect INTx", source };
        self.device.disable_irq(VFIO_PCI_INTX_IRQ_INDEX).map_err(refused)
    }

    /// Duplicates the eventfd of the line.
    ///
    /// # Errors
    /// The process has no free descriptor.
    pub fn interrupt_fd(&self) -> io::Result<OwnedFd> {
        // SAFETY: the eventfd is open during the lifetime of `self`.
        unsafe { BorrowedFd::borrow_raw(self.interrupt.as_raw_fd()) }.try_clone_to_owned()
    }

    /// Notes that the eventfd was signalled. The line counts as asserted until [`Self::unmask`].
    pub fn signalled(&mut self) {
        // Reset the eventfd's count. It may be zero if another reader came first: then the caller polls the causes
        // needlessly.
        let _ = self.interrupt.read();
        self.signalled = true;
    }

    /// Unmasks the line after its causes were read. VFIO signals again if the line is asserted.
    ///
    /// # Errors
    /// VFIO refuses.
    pub fn unmask(&mut self) -> Result<(), DeviceError> {
        self.signalled = false;
        let refused = |error: VfioError| self.failed(0, 0, &format!("INTx can't be unmasked: {error}"));
        self.device.unmask_irq(VFIO_PCI_INTX_IRQ_INDEX).map_err(refused)
    }

    /// Sets bus mastering as the guest requests it. It is on while both the guest and the monitor request it.
    ///
    /// # Errors
    /// The device is unreachable.
    pub fn set_guest_bus_master(&mut self, on: bool) -> Result<(), DeviceError> {
        self.guest_master = on;
        self.write_command()
    }

    /// Returns offset and length in bytes (whole pages) of a BAR in the device's file ([`AsFd`]), if VFIO permits its
    /// mapping.
    pub fn mappable(&self, bar: u8) -> Option<(u64, u64)> {
        const MMAP: u32 = vfio_bindings::bindings::vfio::VFIO_REGION_INFO_FLAG_MMAP;
        let index = u32::from(bar);
        if self.device.get_region_flags(index) & MMAP == 0 {
            return None;
        }
        let bytes = self.device.get_region_size(index).next_multiple_of(4096);
        Some((self.device.get_region_offset(index), bytes))
    }

    /// Allocates the monitor's own memory, which can be mapped for the device like the guest's
    /// ([`MappedScratch::mapping`]). It isn't mapped yet.
    ///
    /// # Errors
    /// The guest has memory at these addresses.
    pub fn scratch(&mut self) -> Result<MappedScratch, DeviceError> {
        self.scratch_of(RING + FRAME)
    }

    /// Does the same with `length` bytes, at most 1 MiB, for the owner of a shared card.
    ///
    /// # Errors
    /// The guest has memory at these addresses.
    pub fn scratch_of(&mut self, length: u64) -> Result<MappedScratch, DeviceError> {
        let length = length.next_multiple_of(4096);
        let bytes = usize::try_from(length).unwrap_or(0);
        let failed = |why: String| DeviceError { bar: 0, offset: 0, why };
        let memory = vec![0u8; bytes + 4096];
        let start = memory.as_ptr().addr().next_multiple_of(4096);
        let skip = start - memory.as_ptr().addr();
        let scratch = MappedScratch { memory: memory.into_boxed_slice(), skip, length };
        let inside = Ram { guest_base: SCRATCH_BASE, length, host_address: start };
        let taken =
            |ram: &Ram| ram.guest_base < SCRATCH_BASE + length && SCRATCH_BASE < ram.guest_base + ram.length;
        if self.ram.iter().any(taken) {
            return Err(failed(format!(
                "the guest has memory at {SCRATCH_BASE:#x}, where the monitor's own would be"
            )));
        }
        self.scratch = Some(inside);
        Ok(scratch)
    }

    fn map_host(&mut self, device_base: u64, host: usize, length: u64) -> Result<(), DeviceError> {
        let size = usize::try_from(length).map_err(|_| self.failed(0, 0, "a mapping is too large"))?;
        let at = std::ptr::with_exposed_provenance_mut::<u8>(host);
        // SAFETY: the memory is the guest's or the monitor's scratch; both stay mapped longer than the address space (`keep`, and
        // `MappedScratch` is held by the monitor that holds this), and are accessed through volatile or atomic copies and raw
        // system calls only.
        let mapped = unsafe { self.space.vfio_dma_map(device_base, size, at) };
        mapped.map_err(|error| {
            let why = format!("{length:#x} bytes at {device_base:#x} can't be mapped for it: {error} (is RLIMIT_MEMLOCK large enough?)");
            self.failed(0, 0, &why)
        })
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the device's, which lives as long as `self`.
        unsafe { BorrowedFd::borrow_raw(self.device.as_raw_fd()) }
    }

    fn failed(&self, bar: u8, offset: u32, why: &str) -> DeviceError {
        DeviceError { bar, offset, why: format!("{} (PCI device {})", why, self.address) }
    }

    fn region(&self, index: u32, bar: u8, offset: u32, size: u8) -> Result<u64, DeviceError> {
        let end = u64::from(offset) + u64::from(size);
        if end > self.device.get_region_size(index) {
            return Err(self.failed(bar, offset, "its BAR ends before that"));
        }
        Ok(self.device.get_region_offset(index) + u64::from(offset))
    }

    fn write_command(&self) -> Result<(), DeviceError> {
        let master = self.guest_master && self.monitor_master;
        let value = DECODE | if master { BUS_MASTER } else { 0 };
        let at = self.device.get_region_offset(VFIO_PCI_CONFIG_REGION_INDEX) + COMMAND;
        rustix::io::pwrite(self.fd(), &value.to_le_bytes(), at)
            .map(drop)
            .map_err(|error| self.failed(0, 0, &format!("its command register can't be written: {error}")))
    }
}

/// Wraps a descriptor in the crate's eventfd type.
fn event_fd(fd: OwnedFd) -> EventFd {
    // SAFETY: the descriptor is an eventfd with no other owner.
    unsafe { EventFd::from_raw_fd(fd.into_raw_fd()) }
}

impl PhysicalDevice for Vfio {
    fn read(&mut self, bar: u8, offset: u32, size: u8) -> Result<u32, DeviceError> {
        let at = self.region(u32::from(bar), bar, offset, size)?;
        let mut data = [0; 4];
        let part = &mut data[..usize::from(size.min(4))];
        match rustix::io::pread(self.fd(), part, at) {
            Ok(got) if got == usize::from(size) => Ok(u32::from_le_bytes(data)),
            Ok(got) => Err(self.failed(bar, offset, &format!("a read gave {got} bytes of {size}"))),
            Err(error) => Err(self.failed(bar, offset, &error.to_string())),
        }
    }

    fn write(&mut self, bar: u8, offset: u32, size: u8, value: u32) -> Result<(), DeviceError> {
        let at = self.region(u32::from(bar), bar, offset, size)?;
        let data = value.to_le_bytes();
        match rustix::io::pwrite(self.fd(), &data[..usize::from(size.min(4))], at) {
            Ok(put) if put == usize::from(size) => Ok(()),
            Ok(put) => Err(self.failed(bar, offset, &format!("a write took {put} bytes of {size}"))),
            Err(error) => Err(self.failed(bar, offset, &error.to_string())),
        }
    }

    fn interrupt(&mut self) -> Result<bool, DeviceError> {
        Ok(self.signalled)
    }

    /// Resets by VFIO if the function supports it, and by the card's registers in any case.
    fn reset(&mut self) -> Result<(), DeviceError> {
        self.monitor_master = false;
        self.device.reset();
        self.write_command()?;
        let description = self.description;
        poke(description, self, description.reset)
    }

    fn set_bus_master(&mut self, on: bool) -> Result<(), DeviceError> {
        self.monitor_master = on;
        self.write_command()
    }

    fn has_iommu(&self) -> bool {
        true
    }

    /// VFIO's type 1 through this crate maps for reading and writing, even if [`Mapping::writable`] is false.
    fn map(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        let end = mapping.guest_base.saturating_add(mapping.length);
        let ram = self
            .ram
            .iter()
            .chain(&self.scratch)
            .find(|ram| mapping.guest_base >= ram.guest_base && end <= ram.guest_base + ram.length);
        let Some(ram) = ram else {
            return Err(self.failed(0, 0, &format!("{:#x} isn't the guest's memory", mapping.guest_base)));
        };
        let within = usize::try_from(mapping.guest_base - ram.guest_base)
            .map_err(|_| self.failed(0, 0, "an address is too large"))?;
        let host = ram.host_address + within;
        self.map_host(mapping.device_base, host, mapping.length)
    }

    fn unmap(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        let size =
            usize::try_from(mapping.length).map_err(|_| self.failed(0, 0, "a mapping is too large"))?;
        self.space.vfio_dma_unmap(mapping.device_base, size).map_err(|error| {
            self.failed(0, 0, &format!("{:#x} can't be unmapped: {error}", mapping.device_base))
        })
    }
}

impl AsFd for Vfio {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd()
    }
}

/// Memory for frames that the device sends to itself.
#[derive(Debug)]
pub struct MappedScratch {
    memory: Box<[u8]>,
    skip: usize,
    length: u64,
}

impl MappedScratch {
    /// Returns a mapping of all of it at its device address.
    #[must_use]
    pub const fn mapping(&self) -> Mapping {
        Mapping { device_base: SCRATCH_BASE, guest_base: SCRATCH_BASE, length: self.length, writable: true }
    }
}

impl Scratch for MappedScratch {
    fn device_base(&self) -> u64 {
        SCRATCH_BASE
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let Ok(offset) = usize::try_from(offset) else { return };
        let base = self.memory.as_mut_ptr();
        for (at, byte) in data.iter().enumerate() {
            if self.skip + offset + at < self.memory.len() {
                // SAFETY: within the allocation, which the device may read at the same time: a volatile store.
                unsafe { base.add(self.skip + offset + at).write_volatile(*byte) };
            }
        }
    }
}

impl OwnRing for MappedScratch {
    fn read(&mut self, offset: u64, into: &mut [u8]) {
        into.fill(0);
        let Ok(offset) = usize::try_from(offset) else { return };
        let base = self.memory.as_ptr();
        for (at, byte) in into.iter_mut().enumerate() {
            if self.skip + offset + at < self.memory.len() {
                // SAFETY: within the allocation, which the device may write at the same time: a volatile load.
                *byte = unsafe { base.add(self.skip + offset + at).read_volatile() };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Way;

    /// A container is the first choice. On a kernel with neither interface, the error names the container's device.
    #[test]
    fn iommufd_is_for_kernels_without_containers() {
        let ways =
            [(true, true), (true, false), (false, false), (false, true)].map(|(c, i)| Way::choose(c, i));
        assert_eq!(ways, [Way::Group, Way::Group, Way::Group, Way::Iommufd]);
        assert_eq!((Way::Group.name(), Way::Iommufd.name()), ("group", "iommufd"));
    }
}
