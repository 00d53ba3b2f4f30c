//! Loads a Linux kernel and its boot parameters into guest memory.
//!
//! ```text
//! detect     first 4 KiB of the file: "HdrS" -> bzImage, "\x7fELF" -> vmlinux
//! plan       headers -> Plan: what goes where; nothing has been written yet
//! place      initrds and command line, checked against the plan
//! write      file pages straight into guest memory, then the parameters of the protocol
//! ```
//!
//! A user may get an image from an untrusted source. So the loader checks sizes for overflow, bounds headers, and
//! writes only to ranges that the plan has checked. It has no threads and no global state, so a fuzzer can call
//! [`load`] directly.

mod bzimage;
mod elf;
mod error;
mod linux;
mod memory_map;
mod place;
mod pvh;
#[cfg(test)]
mod tests;

pub use error::KernelError;

use linux_loader::loader::bootparam::setup_header;
use machine::memory::{Bytes, GuestAddress, GuestMemory};

use crate::image::Image;
use crate::ranges::{AddressRange, RamRange};
use crate::registers::BootRegisters;

/// The boot protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BootProtocol {
    /// The image's best one: PVH for a vmlinux with the note, else the Linux 64-bit protocol.
    #[default]
    Auto,
    /// Linux 64-bit boot protocol (Documentation/arch/x86/boot.rst).
    Linux64,
    /// PVH (Xen's x86/HVM direct boot ABI).
    Pvh,
}

/// The files and the command line to boot.
#[derive(Clone, Copy)]
pub struct BootFiles<'a> {
    /// bzImage or vmlinux.
    pub kernel: &'a dyn Image,
    /// Initramfs archives, loaded one after the other, each aligned to 4 bytes.
    pub initrds: &'a [&'a dyn Image],
    /// Kernel command line.
    pub command_line: &'a str,
    /// The boot protocol.
    pub protocol: BootProtocol,
}

/// Content of guest memory before a kernel is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contents {
    /// Only zeros: a new VM. The loader skips the BSS of an ELF file, which saves time and memory.
    Zeroes,
    /// Anything: a reset.
    Anything,
}

/// Image formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelFormat {
    /// bzImage: compressed, with a setup header.
    BzImage,
    /// vmlinux: uncompressed ELF.
    Elf,
}

/// A loaded kernel, and its start state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedKernel {
    /// The image's format.
    pub format: KernelFormat,
    /// The protocol in use, never [`BootProtocol::Auto`].
    pub protocol: BootProtocol,
    /// Memory of the kernel, from its first to its last byte.
    pub kernel: AddressRange,
    /// Memory of the initrds.
    pub initrd: Option<AddressRange>,
    /// Registers of the boot CPU.
    pub registers: BootRegisters,
}

/// A part of the file and its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Segment {
    file_offset: u64,
    file_len: u64,
    /// `range.len >= file_len`. With `zero_rest` the rest is zeroed.
    range: AddressRange,
    zero_rest: bool,
}

/// The result of a format's parser.
struct Plan {
    format: KernelFormat,
    protocol: BootProtocol,
    segments: Vec<Segment>,
    /// Range from the lowest to the highest byte.
    kernel: AddressRange,
    entry: u64,
    /// bzImage only: the header for `boot_params`.
    header: Option<setup_header>,
    /// Limit of the command line in bytes, without its NUL.
    command_line_max: u64,
    /// Initrds must end at or below this address, unless `initrd_above_4g`.
    initrd_end_max: u64,
    initrd_above_4g: bool,
}

/// Loads kernel, initrds and command line, and writes the boot parameters. `ram` must be RAM of `memory`: ascending,
/// disjoint, from address 0. `rsdp` is the address of the ACPI RSDP.
///
/// # Errors
/// A sentence that names the file and the problem. If a header is invalid or there is no room, guest memory is
/// unchanged. A file that can't be read completely may leave parts in guest memory.
pub fn load(
    memory: &GuestMemory,
    ram: &[RamRange],
    files: &BootFiles<'_>,
    contents: Contents,
    rsdp: u64,
) -> Result<LoadedKernel, KernelError> {
    let ram = place::checked_ram(memory, ram)?;
    let plan = plan(files)?;
    place::check_kernel(files.kernel, &plan, &ram)?;
    let command_line = place::command_line(files.command_line, plan.command_line_max)?;
    let initrd = place::initrds(files.initrds, &plan, &ram)?;

    for segment in &plan.segments {
        write_segment(memory, files.kernel, segment, contents)?;
    }
    if let Some(range) = initrd {
        write_initrds(memory, files.initrds, range)?;
    }
    write(memory, &command_line, crate::layout::COMMAND_LINE, "the command line")?;
    let registers = match plan.protocol {
        BootProtocol::Pvh => pvh::write(memory, &ram, plan.entry, initrd, rsdp)?,
        BootProtocol::Linux64 | BootProtocol::Auto => {
            linux::write(memory, &ram, &plan, initrd, command_line.len(), rsdp)?
        }
    };
    Ok(LoadedKernel { format: plan.format, protocol: plan.protocol, kernel: plan.kernel, initrd, registers })
}

fn plan(files: &BootFiles<'_>) -> Result<Plan, KernelError> {
    let kernel = files.kernel;
    if kernel.is_empty() {
        return Err(KernelError::Empty { role: "kernel", name: kernel.name() });
    }
    // A page contains every header that identifies the format.
    let mut head = [0u8; 4096];
    let len = usize::try_from(kernel.len()).unwrap_or(usize::MAX).min(head.len());
    let head = &mut head[..len];
    read_header(kernel, 0, head)?;
    if head.starts_with(&elf::MAGIC) {
        elf::plan(kernel, head, files.protocol)
    } else if bzimage::matches(head) {
        bzimage::plan(kernel, head, files.protocol)
    } else {
        Err(KernelError::Unrecognised { name: kernel.name(), hint: hint(head) })
    }
}

/// Describes a file that is no kernel, if its format is easy to recognize.
fn hint(head: &[u8]) -> &'static str {
    let at = |offset: usize, magic: &[u8]| head.get(offset..).is_some_and(|rest| rest.starts_with(magic));
    if at(0, &[0x1f, 0x8b]) {
        "it is compressed with gzip: decompress it first"
    } else if at(0, &[0xfd, b'7', b'z', b'X', b'Z']) {
        "it is compressed with xz: decompress it first"
    } else if at(0, &[0x28, 0xb5, 0x2f, 0xfd]) {
        "it is compressed with zstd: decompress it first"
    } else if at(0x38, b"ARM\x64") {
        "it is a kernel for ARM64, and this machine is x86-64"
    } else if at(0x30, b"RISCV\0\0\0") {
        "it is a kernel for RISC-V, and this machine is x86-64"
    } else if at(0, b"070701") || at(0, b"070702") {
        "it is a cpio archive, perhaps the initrd"
    } else if at(0, b"MZ") {
        "it is an EFI program without a Linux setup header"
    } else {
        "give a bzImage or a vmlinux for x86-64"
    }
}

fn read_header(image: &dyn Image, offset: u64, buffer: &mut [u8]) -> Result<(), KernelError> {
    image.read_at(offset, buffer).map_err(|source| KernelError::Read {
        role: "kernel",
        name: image.name(),
        offset,
        source,
    })
}

fn write_segment(
    memory: &GuestMemory,
    kernel: &dyn Image,
    segment: &Segment,
    contents: Contents,
) -> Result<(), KernelError> {
    let (offset, target) = (segment.file_offset, segment.range.start);
    kernel.read_to_guest(offset, memory, target, segment.file_len).map_err(|source| KernelError::Read {
        role: "kernel",
        name: kernel.name(),
        offset,
        source,
    })?;
    if segment.zero_rest && contents == Contents::Anything {
        let zeroes = [0u8; 65536];
        let mut at = segment.range.start + segment.file_len;
        while at < segment.range.end() {
            let part = usize::try_from(segment.range.end() - at).unwrap_or(usize::MAX).min(zeroes.len());
            write(memory, &zeroes[..part], at, "zeroes after a kernel segment")?;
            at += part as u64;
        }
    }
    Ok(())
}

fn write_initrds(
    memory: &GuestMemory,
    initrds: &[&dyn Image],
    range: AddressRange,
) -> Result<(), KernelError> {
    let mut at = range.start;
    for initrd in initrds {
        initrd.read_to_guest(0, memory, at, initrd.len()).map_err(|source| KernelError::Read {
            role: "initrd",
            name: initrd.name(),
            offset: 0,
            source,
        })?;
        at += initrd.len();
        let padding = place::initrd_padding(initrd.len());
        write(memory, &[0u8; 3][..padding], at, "padding after an initrd")?;
        at += padding as u64;
    }
    Ok(())
}

/// Writes a boot structure to an address that the plan has checked.
fn write(memory: &GuestMemory, bytes: &[u8], address: u64, what: &'static str) -> Result<(), KernelError> {
    memory.write_slice(bytes, GuestAddress(address)).map_err(|source| KernelError::Memory {
        what,
        address,
        source,
    })
}
