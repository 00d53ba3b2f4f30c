//! PVH: 32-bit protected mode without paging, EBX points to `hvm_start_info`
//! (Xen docs/misc/pvh.pandoc, xen/include/public/arch-x86/hvm/start_info.h).

use linux_loader::loader::elf::start_info::{
    XEN_HVM_START_MAGIC_VALUE, hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use machine::memory::{ByteValued, GuestMemory};

use super::KernelError;
use super::linux::write_gdt;
use super::memory_map::memory_map;
use crate::layout;
use crate::ranges::AddressRange;
use crate::registers::{self, BootRegisters};

/// Version of `hvm_start_info` that has the memory map.
const VERSION: u32 = 1;
/// Protection enabled, and the bit that always reads as 1.
const CR0: u64 = 1 << 0 | 1 << 4;

/// Capacity of the memory map in entries.
const ENTRIES_MAX: u64 =
    (layout::ZERO_PAGE - layout::PVH_MEMORY_MAP) / size_of::<hvm_memmap_table_entry>() as u64;

/// Writes start info, module list and memory map; returns the registers.
pub(super) fn write(
    memory: &GuestMemory,
    ram: &[AddressRange],
    entry: u64,
    initrd: Option<AddressRange>,
    rsdp: u64,
) -> Result<BootRegisters, KernelError> {
    let map = memory_map(ram);
    if map.len() as u64 > ENTRIES_MAX {
        return Err(KernelError::Ram {
            what: format!("RAM is in {} pieces; {ENTRIES_MAX} are possible", map.len()),
        });
    }
    let mut bytes = Vec::with_capacity(map.len() * size_of::<hvm_memmap_table_entry>());
    for entry in &map {
        let entry = hvm_memmap_table_entry {
            addr: entry.range.start,
            size: entry.range.len,
            type_: entry.kind as u32,
            reserved: 0,
        };
        bytes.extend_from_slice(entry.as_slice());
    }
    super::write(memory, &bytes, layout::PVH_MEMORY_MAP, "the memory map")?;

    let mut info = hvm_start_info {
        magic: XEN_HVM_START_MAGIC_VALUE,
        version: VERSION,
        cmdline_paddr: layout::COMMAND_LINE,
        rsdp_paddr: rsdp,
        memmap_paddr: layout::PVH_MEMORY_MAP,
        memmap_entries: u32::try_from(map.len()).unwrap_or(u32::MAX),
        ..hvm_start_info::default()
    };
    if let Some(initrd) = initrd {
        let module =
            hvm_modlist_entry { paddr: initrd.start, size: initrd.len, ..hvm_modlist_entry::default() };
        super::write(memory, module.as_slice(), layout::PVH_MODULES, "the module list")?;
        info.nr_modules = 1;
        info.modlist_paddr = layout::PVH_MODULES;
    }
    super::write(memory, info.as_slice(), layout::PVH_START_INFO, "the start info")?;

    let code = registers::code32();
    let data = registers::data();
    let task = registers::task();
    write_gdt(memory, [code, data, task])?;
    Ok(BootRegisters {
        rip: entry,
        rbx: layout::PVH_START_INFO,
        rflags: registers::RFLAGS_RESERVED,
        cr0: CR0,
        code,
        data,
        task,
        gdt: registers::gdt(),
        ..BootRegisters::default()
    })
}
