//! Kernel loading.
use std::path::PathBuf;
use machine::memory::GuestMemory;
use crate::image::Image;
use crate::map::{AddressRange, RamRange};
use crate::registers::BootRegisters;

/// How control is handed to the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BootProtocol {
    /// What the image offers: PVH for a vmlinux with the note, the Linux 64-bit protocol otherwise.
    #[default]
    Auto,
    /// Linux 64-bit boot protocol.
    Linux64,
    /// PVH.
    Pvh,
}

/// What to boot.
pub struct BootFiles<'a> {
    /// bzImage or vmlinux.
    pub kernel: &'a dyn Image,
    /// Initramfs archives, loaded one after the other.
    pub initrds: &'a [&'a dyn Image],
    /// Kernel command line.
    pub command_line: &'a str,
    /// Protocol.
    pub protocol: BootProtocol,
}

/// What was loaded, and how to start it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedKernel {
    /// Protocol in use.
    pub protocol: BootProtocol,
    /// Memory that the kernel's image takes.
    pub kernel: AddressRange,
    /// Memory that the initrds take.
    pub initrd: Option<AddressRange>,
    /// Registers of the boot CPU.
    pub registers: BootRegisters,
}

/// A kernel can't be loaded.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// Open.
    #[error("The {role} {} can't be opened", path.display())]
    Open {
        /// Role.
        role: &'static str,
        /// Path.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Not a file.
    #[error("The {role} {} is {what}; give a file", path.display())]
    NotAFile {
        /// Role.
        role: &'static str,
        /// Path.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
}

/// Loads.
pub fn load(
    _memory: &GuestMemory,
    _ram: &[RamRange],
    _files: &BootFiles<'_>,
    _rsdp: u64,
) -> Result<LoadedKernel, KernelError> {
    Err(KernelError::NotAFile { role: "kernel", path: "x".into(), what: "x" })
}
