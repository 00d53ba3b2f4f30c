//! Loads synthetic kernels and checks the placement. 16,000 damaged images must do no harm.

mod damaged;
mod refused;

use linux_loader::loader::bootparam::boot_params;
use linux_loader::loader::elf::start_info::{hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info};
use machine::memory::{Bytes, GuestAddress, GuestMemory};

use super::{BootFiles, BootProtocol, Contents, KernelError, KernelFormat, LoadedKernel, load};
use crate::image::{Image, ImageBytes};
use crate::layout::{self, MIB};
use crate::ranges::{AddressRange, RamRange};

const RSDP: u64 = layout::ACPI_TABLES;
const RAM: u64 = 64 * MIB;
const KERNEL_AT: u64 = 16 * MIB;

/// A bzImage of protocol 2.15 with four setup sectors and 4 KiB of code, all of it 0x90.
fn bzimage() -> Vec<u8> {
    let mut file = vec![0u8; 5 * 512];
    let mut set = |offset: usize, bytes: &[u8]| file[offset..offset + bytes.len()].copy_from_slice(bytes);
    set(0x1f1, &[4]);
    set(0x1f4, &(4096u32 / 16).to_le_bytes());
    set(0x1fe, &0xaa55u16.to_le_bytes());
    set(0x202, b"HdrS");
    set(0x206, &0x020fu16.to_le_bytes());
    set(0x211, &[1]);
    set(0x22c, &0x7fff_ffffu32.to_le_bytes());
    set(0x230, &0x20_0000u32.to_le_bytes());
    set(0x234, &[1, 21]);
    set(0x236, &0x3fu16.to_le_bytes());
    set(0x238, &2047u32.to_le_bytes());
    set(0x258, &KERNEL_AT.to_le_bytes());
    set(0x260, &0x10_0000u32.to_le_bytes());
    file.resize(5 * 512 + 4096, 0x90);
    file
}

struct ElfSegment {
    kind: u32,
    address: u64,
    bytes: Vec<u8>,
    memory: u64,
}

/// An x86-64 executable; the entry is the first segment's address.
fn elf(segments: &[ElfSegment]) -> Vec<u8> {
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    file.extend(2u16.to_le_bytes());
    file.extend(62u16.to_le_bytes());
    file.extend(1u32.to_le_bytes());
    file.extend(segments.first().map_or(0, |s| s.address).to_le_bytes());
    file.extend(64u64.to_le_bytes());
    file.extend(0u64.to_le_bytes());
    file.extend(0u32.to_le_bytes());
    for half in [64, 56, u16::try_from(segments.len()).unwrap(), 64, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    let mut offset = 64 + 56 * segments.len() as u64;
    for segment in segments {
        file.extend(segment.kind.to_le_bytes());
        file.extend(5u32.to_le_bytes());
        for word in [
            offset,
            segment.address | 0xffff_ffff_8000_0000,
            segment.address,
            segment.bytes.len() as u64,
            segment.memory,
            4,
        ] {
            file.extend(word.to_le_bytes());
        }
        offset += segment.bytes.len() as u64;
    }
    for segment in segments {
        file.extend(&segment.bytes);
    }
    file
}

/// Two notes, the second with the PVH entry.
fn notes(entry: u64) -> Vec<u8> {
    let mut notes = Vec::new();
    for (kind, description) in [(6u32, b"2.6\0".to_vec()), (18, entry.to_le_bytes().to_vec())] {
        notes.extend(4u32.to_le_bytes());
        notes.extend(u32::try_from(description.len()).unwrap().to_le_bytes());
        notes.extend(kind.to_le_bytes());
        notes.extend(b"Xen\0");
        notes.extend(description);
    }
    notes
}

/// Code, data with a BSS, and notes.
fn vmlinux() -> Vec<u8> {
    elf(&[
        ElfSegment { kind: 1, address: KERNEL_AT, bytes: vec![0x90; 3000], memory: 3000 },
        ElfSegment { kind: 1, address: KERNEL_AT + 0x2000, bytes: vec![0x55; 100], memory: 0x3000 },
        ElfSegment { kind: 4, address: 0, bytes: notes(KERNEL_AT + 0x10), memory: 0 },
    ])
}

fn memory(size: u64) -> GuestMemory {
    GuestMemory::from_ranges(&[(GuestAddress(0), usize::try_from(size).unwrap())]).unwrap()
}

fn ram(size: u64) -> Vec<RamRange> {
    layout::place_ram(&[size])
}

fn boot(
    memory: &GuestMemory,
    kernel: &[u8],
    initrds: &[&[u8]],
    command_line: &str,
    protocol: BootProtocol,
) -> Result<LoadedKernel, KernelError> {
    let kernel = ImageBytes(kernel);
    let initrds: Vec<_> = initrds.iter().map(|bytes| ImageBytes(bytes)).collect();
    let initrds: Vec<_> = initrds.iter().map(|image| image as &dyn Image).collect();
    let files = BootFiles { kernel: &kernel, initrds: &initrds, command_line, protocol };
    load(memory, &ram(RAM), &files, Contents::Zeroes, RSDP)
}

fn bytes_at(memory: &GuestMemory, address: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    memory.read_slice(&mut bytes, GuestAddress(address)).unwrap();
    bytes
}

#[test]
fn a_bzimage_starts_at_its_64_bit_entry_with_parameters_that_say_where_things_are() {
    let memory = memory(RAM);
    let loaded = boot(&memory, &bzimage(), &[b"abcde", b"xyz"], "console=ttyS0", BootProtocol::Auto).unwrap();
    assert_eq!((loaded.format, loaded.protocol), (KernelFormat::BzImage, BootProtocol::Linux64));
    assert_eq!(loaded.kernel, AddressRange { start: KERNEL_AT, len: 0x10_0000 });
    assert_eq!(loaded.registers.rip, KERNEL_AT + 0x200);
    assert_eq!(loaded.registers.rsi, layout::ZERO_PAGE);
    assert!(loaded.registers.code.long && !loaded.registers.code.default_32);
    assert_eq!(bytes_at(&memory, KERNEL_AT, 4096), vec![0x90; 4096]);
    assert_eq!(bytes_at(&memory, layout::COMMAND_LINE, 14), b"console=ttyS0\0");

    let params: boot_params = memory.read_obj(GuestAddress(layout::ZERO_PAGE)).unwrap();
    let initrd = loaded.initrd.unwrap();
    assert_eq!(initrd, AddressRange { start: RAM - 4096, len: 12 });
    // The second archive begins at a multiple of four.
    assert_eq!(bytes_at(&memory, initrd.start, 12), b"abcde\0\0\0xyz\0");
    let (image, size) = (params.hdr.ramdisk_image, params.hdr.ramdisk_size);
    assert_eq!((u64::from(image), u64::from(size)), (initrd.start, initrd.len));
    let (line, rsdp, loader) = (params.hdr.cmd_line_ptr, params.acpi_rsdp_addr, params.hdr.type_of_loader);
    assert_eq!((u64::from(line), rsdp, loader), (layout::COMMAND_LINE, RSDP, 0xff));
    let table = params.e820_table;
    let first = table[0];
    let (start, size, kind) = (first.addr, first.size, first.r#type);
    assert_eq!((start, size, kind), (0, layout::CONVENTIONAL_END, 1));
    assert_eq!(params.e820_entries, 5);
}

#[test]
fn the_identity_map_covers_four_gib() {
    let memory = memory(RAM);
    let loaded = boot(&memory, &bzimage(), &[], "", BootProtocol::Auto).unwrap();
    let entry = |table: u64, index: u64| -> u64 {
        memory.read_obj(GuestAddress((table & !0xfff) + index * 8)).unwrap()
    };
    for address in [0u64, 0x20_0000, 0x3fff_ffff, 0x4000_0000, 0xfee0_0000, 0xffff_ffff] {
        let pdpt = entry(loaded.registers.cr3, address >> 39);
        let directory = entry(pdpt, address >> 30 & 511);
        let page = entry(directory, address >> 21 & 511);
        assert_eq!(page & 0b1000_0011, 0b1000_0011, "{address:#x}");
        assert_eq!(page & !0x1f_ffff, address & !0x1f_ffff);
    }
    assert_eq!(entry(loaded.registers.cr3, 1), 0);
}

#[test]
fn a_vmlinux_with_the_note_starts_by_pvh() {
    let memory = memory(RAM);
    let loaded = boot(&memory, &vmlinux(), &[b"initrd"], "quiet", BootProtocol::Auto).unwrap();
    assert_eq!((loaded.format, loaded.protocol), (KernelFormat::Elf, BootProtocol::Pvh));
    assert_eq!(loaded.kernel, AddressRange { start: KERNEL_AT, len: 0x5000 });
    let registers = loaded.registers;
    assert_eq!((registers.rip, registers.rbx), (KERNEL_AT + 0x10, layout::PVH_START_INFO));
    assert_eq!((registers.cr0 & 1, registers.cr0 >> 31, registers.efer, registers.cr4), (1, 0, 0, 0));
    assert!(registers.code.default_32 && !registers.code.long);
    assert_eq!(bytes_at(&memory, KERNEL_AT + 0x2000, 102)[99..], [0x55, 0, 0]);

    let info: hvm_start_info = memory.read_obj(GuestAddress(layout::PVH_START_INFO)).unwrap();
    assert_eq!((info.magic, info.version, info.rsdp_paddr), (0x336e_c578, 1, RSDP));
    assert_eq!(bytes_at(&memory, info.cmdline_paddr, 6), b"quiet\0");
    let module: hvm_modlist_entry = memory.read_obj(GuestAddress(info.modlist_paddr)).unwrap();
    assert_eq!((module.size, info.nr_modules), (8, 1));
    assert_eq!(bytes_at(&memory, module.paddr, 8), b"initrd\0\0");
    let first: hvm_memmap_table_entry = memory.read_obj(GuestAddress(info.memmap_paddr)).unwrap();
    assert_eq!((first.addr, first.size, first.type_), (0, layout::CONVENTIONAL_END, 1));
}

#[test]
fn a_vmlinux_starts_by_the_linux_protocol_when_asked_or_without_the_note() {
    let memory = memory(RAM);
    let asked = boot(&memory, &vmlinux(), &[], "", BootProtocol::Linux64).unwrap();
    let plain = elf(&[ElfSegment { kind: 1, address: KERNEL_AT, bytes: vec![0x90; 64], memory: 64 }]);
    let auto = boot(&memory, &plain, &[], "", BootProtocol::Auto).unwrap();
    for loaded in [asked, auto] {
        assert_eq!(loaded.protocol, BootProtocol::Linux64);
        assert_eq!((loaded.registers.rip, loaded.registers.rsi), (KERNEL_AT, layout::ZERO_PAGE));
    }
    let params: boot_params = memory.read_obj(GuestAddress(layout::ZERO_PAGE)).unwrap();
    let (header, flag) = (params.hdr.header, params.hdr.boot_flag);
    assert_eq!((header.to_le_bytes(), flag), (*b"HdrS", 0xaa55));
}

#[test]
fn a_reset_zeroes_what_the_file_says_is_zero() {
    let memory = memory(RAM);
    memory.write_slice(&[0xee; 0x3000], GuestAddress(KERNEL_AT + 0x2000)).unwrap();
    let kernel = vmlinux();
    let kernel = ImageBytes(&kernel);
    let files = BootFiles { kernel: &kernel, initrds: &[], command_line: "", protocol: BootProtocol::Auto };
    load(&memory, &ram(RAM), &files, Contents::Anything, RSDP).unwrap();
    let bss = bytes_at(&memory, KERNEL_AT + 0x2000 + 100, 0x3000 - 100);
    assert!(bss.iter().all(|&byte| byte == 0));
}

#[test]
fn an_initrd_goes_above_4_gib_only_when_the_kernel_can_take_it_there() {
    // 3 GiB below the hole, 16 MiB above. Only the written pages are touched.
    let sizes = [(GuestAddress(0), 3usize << 30), (GuestAddress(4 << 30), 16 << 20)];
    let memory = GuestMemory::from_ranges(&sizes).unwrap();
    let ram = layout::place_ram(&[(3 << 30) + (16 << 20)]);
    // The kernel permits initrds only below its own end.
    let mut kernel = bzimage();
    kernel[0x22c..0x230].copy_from_slice(&0x0100_ffffu32.to_le_bytes());
    let attempt = |kernel: &[u8]| {
        let (kernel, initrd) = (ImageBytes(kernel), ImageBytes(&[7; 5000]));
        let files = BootFiles {
            kernel: &kernel,
            initrds: &[&initrd],
            command_line: "",
            protocol: BootProtocol::Auto,
        };
        load(&memory, &ram, &files, Contents::Zeroes, RSDP)
    };
    let initrd = attempt(&kernel).unwrap().initrd.unwrap();
    assert_eq!(initrd.start, (4 << 30) + (16 << 20) - 8192);
    let params: boot_params = memory.read_obj(GuestAddress(layout::ZERO_PAGE)).unwrap();
    let (low, high) = (params.hdr.ramdisk_image, params.ext_ramdisk_image);
    assert_eq!(u64::from(high) << 32 | u64::from(low), initrd.start);
    // Without XLF_CAN_BE_LOADED_ABOVE_4G there is no room.
    kernel[0x236] = 1;
    let error = attempt(&kernel).unwrap_err().to_string();
    assert!(error.contains("don't fit between the kernel's end"), "{error}");
}
