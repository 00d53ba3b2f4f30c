//! The Linux 64-bit boot protocol: `boot_params`, an identity map, a GDT
//! (Linux Documentation/arch/x86/boot.rst, "64-bit Boot Protocol").

use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use machine::memory::{ByteValued, GuestMemory};

use super::memory_map::memory_map;
use super::{KernelError, Plan};
use crate::layout::{self, PAGE_SIZE};
use crate::ranges::AddressRange;
use crate::registers::{self, BootRegisters};

/// `type_of_loader`: no registered boot loader.
const LOADER_UNDEFINED: u8 = 0xff;
/// `vid_mode`: "normal", keep what is there.
const VIDEO_MODE_NORMAL: u16 = 0xffff;
const BOOT_FLAG: u16 = 0xaa55;
const HEADER_MAGIC: u32 = u32::from_le_bytes(*b"HdrS");
/// Protocol 2.15, for a vmlinux, which has no header of its own.
const PROTOCOL: u16 = 0x020f;
const KERNEL_ALIGNMENT: u32 = 0x0100_0000;

/// Page-table entry bits: present and writable.
const PRESENT_WRITABLE: u64 = 0b11;
/// Page-directory entry bit: a 2 MiB page.
const BIG_PAGE: u64 = 1 << 7;
const ENTRIES: u64 = 512;

const CR0_PROTECTED: u64 = 1 << 0;
const CR0_EXTENSION_TYPE: u64 = 1 << 4;
const CR0_NUMERIC_ERROR: u64 = 1 << 5;
const CR0_PAGING: u64 = 1 << 31;
const CR4_PHYSICAL_ADDRESS_EXTENSION: u64 = 1 << 5;
const EFER_LONG_MODE_ENABLE: u64 = 1 << 8;
const EFER_LONG_MODE_ACTIVE: u64 = 1 << 10;

const _: () = assert!(size_of::<boot_params>() as u64 == PAGE_SIZE);

/// Writes everything except kernel, initrd and command line; returns the registers.
pub(super) fn write(
    memory: &GuestMemory,
    ram: &[AddressRange],
    plan: &Plan,
    initrd: Option<AddressRange>,
    command_line_len: usize,
    rsdp: u64,
) -> Result<BootRegisters, KernelError> {
    let mut params = boot_params::default();
    match plan.header {
        Some(header) => params.hdr = header,
        None => {
            params.hdr.boot_flag = BOOT_FLAG;
            params.hdr.header = HEADER_MAGIC;
            params.hdr.version = PROTOCOL;
            params.hdr.kernel_alignment = KERNEL_ALIGNMENT;
        }
    }
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.vid_mode = VIDEO_MODE_NORMAL;
    params.acpi_rsdp_addr = rsdp;
    let (low, high) = split(layout::COMMAND_LINE);
    params.hdr.cmd_line_ptr = low;
    params.ext_cmd_line_ptr = high;
    if plan.header.is_none() {
        params.hdr.cmdline_size = u32::try_from(command_line_len).unwrap_or(u32::MAX);
    }
    let initrd = initrd.unwrap_or(AddressRange { start: 0, len: 0 });
    (params.hdr.ramdisk_image, params.ext_ramdisk_image) = split(initrd.start);
    (params.hdr.ramdisk_size, params.ext_ramdisk_size) = split(initrd.len);

    let map = memory_map(ram);
    let mut table = params.e820_table;
    if map.len() > table.len() {
        return Err(KernelError::Ram { what: format!("RAM is in {} pieces; 128 are possible", map.len()) });
    }
    for (slot, entry) in table.iter_mut().zip(&map) {
        *slot = boot_e820_entry { addr: entry.range.start, size: entry.range.len, r#type: entry.kind as u32 };
    }
    params.e820_table = table;
    params.e820_entries = u8::try_from(map.len()).unwrap_or(u8::MAX);
    super::write(memory, params.as_slice(), layout::ZERO_PAGE, "the boot parameters")?;
    write_identity_map(memory)?;

    let code = registers::code64();
    let data = registers::data();
    let task = registers::task();
    write_gdt(memory, [code, data, task])?;
    Ok(BootRegisters {
        rip: plan.entry,
        rsp: layout::BOOT_STACK_TOP,
        rsi: layout::ZERO_PAGE,
        rflags: registers::RFLAGS_RESERVED,
        cr0: CR0_PROTECTED | CR0_EXTENSION_TYPE | CR0_NUMERIC_ERROR | CR0_PAGING,
        cr3: layout::PML4,
        cr4: CR4_PHYSICAL_ADDRESS_EXTENSION,
        efer: EFER_LONG_MODE_ENABLE | EFER_LONG_MODE_ACTIVE,
        code,
        data,
        task,
        gdt: registers::gdt(),
        ..BootRegisters::default()
    })
}

/// Low and high half.
fn split(value: u64) -> (u32, u32) {
    let bytes = value.to_le_bytes();
    let half = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    (half(0), half(4))
}

/// Maps the first 4 GiB one to one with pages of 2 MiB.
fn write_identity_map(memory: &GuestMemory) -> Result<(), KernelError> {
    const WHAT: &str = "page tables";
    let mut page = [0u8; 4096];
    page[..8].copy_from_slice(&(layout::PDPT | PRESENT_WRITABLE).to_le_bytes());
    super::write(memory, &page, layout::PML4, WHAT)?;
    for directory in 0..4u64 {
        let at = usize::from(u8::try_from(directory * 8).unwrap_or(0));
        let entry = (layout::PAGE_DIRECTORIES + directory * PAGE_SIZE) | PRESENT_WRITABLE;
        page[at..at + 8].copy_from_slice(&entry.to_le_bytes());
    }
    super::write(memory, &page, layout::PDPT, WHAT)?;
    for directory in 0..4u64 {
        for (slot, index) in page.chunks_exact_mut(8).zip(0u64..) {
            let address = (directory * ENTRIES + index) << 21;
            slot.copy_from_slice(&(address | PRESENT_WRITABLE | BIG_PAGE).to_le_bytes());
        }
        super::write(memory, &page, layout::PAGE_DIRECTORIES + directory * PAGE_SIZE, WHAT)?;
    }
    Ok(())
}

/// Writes the GDT: two unused entries, then code, data and task state at the selectors that Linux expects.
pub(super) fn write_gdt(memory: &GuestMemory, segments: [registers::Segment; 3]) -> Result<(), KernelError> {
    let mut table = [0u8; registers::GDT_BYTES];
    for segment in segments {
        let at = usize::from(segment.selector);
        table[at..at + 8].copy_from_slice(&segment.descriptor().to_le_bytes());
    }
    super::write(memory, &table, layout::GDT, "the GDT")
}
