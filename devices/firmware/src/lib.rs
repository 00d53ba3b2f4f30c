//! The work of a PC's firmware for an operating system: the kernel in memory, its boot parameters, and ACPI tables. No
//! firmware code runs: everything is written before the first instruction.
//!
//! The crate uses guest memory but not KVM. It returns registers as plain values ([`registers::BootRegisters`]), which
//! the monitor converts.
//!
//! ```text
//! layout      every fixed guest-physical address and port
//! map         MachineMap: RAM, CPUs, NUMA nodes, PCI windows, interrupt routing
//! kernel      files -> guest memory + registers  (bzImage, vmlinux; Linux 64-bit protocol, PVH)
//! acpi        MachineMap -> tables in guest memory
//! (private)   reset vector, for kernels that reboot by jumping to it
//! ```

pub mod acpi;
pub mod image;
pub mod kernel;
pub mod layout;
pub mod map;
mod ranges;
pub mod registers;
mod reset_vector;

pub use kernel::{BootFiles, BootProtocol, Contents, KernelError, LoadedKernel};
pub use map::MachineMap;
pub use registers::BootRegisters;

use machine::memory::GuestMemory;

/// The boot can't be prepared.
#[derive(Debug, thiserror::Error)]
pub enum FirmwareError {
    /// The kernel, an initrd or the command line is invalid.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The ACPI tables can't be written.
    #[error(transparent)]
    Acpi(#[from] acpi::AcpiError),
}

/// Writes ACPI tables, boot parameters, kernel, initrds and command line into `memory`, whose content is arbitrary, as
/// at a reset. Returns the boot CPU's start state.
pub fn prepare(
    memory: &GuestMemory,
    map: &MachineMap,
    files: &BootFiles<'_>,
) -> Result<LoadedKernel, FirmwareError> {
    load(memory, map, files, Contents::Anything)
}

/// Does the same for a new VM, whose memory is zero. This is faster, and zero pages stay unallocated.
pub fn prepare_fresh(
    memory: &GuestMemory,
    map: &MachineMap,
    files: &BootFiles<'_>,
) -> Result<LoadedKernel, FirmwareError> {
    load(memory, map, files, Contents::Zeroes)
}

fn load(
    memory: &GuestMemory,
    map: &MachineMap,
    files: &BootFiles<'_>,
    contents: Contents,
) -> Result<LoadedKernel, FirmwareError> {
    let rsdp = acpi::write(memory, map)?;
    reset_vector::write(memory, &map.power)?;
    Ok(kernel::load(memory, &map.ram, files, contents, rsdp)?)
}
