//! Address layout of the payload machine, and the tables that the CPU reads.
//!
//! ```text
//! 0            not mapped: a null pointer faults
//! 0x1000       GDT, IDT, one stub per vector                   read-only
//!              TSSs and boot information, one per vCPU         read-only
//!              exception stacks, one per vCPU
//!              page tables                                     not mapped
//! 0x20_0000    the program's segments, from where it was linked
//!              free RAM
//!              stacks, one per vCPU, up to the end of RAM below 3 GiB
//! 0xd000_0000  the doorbell page
//! 4 GiB        the rest of RAM
//! next GiB     the read-only window
//! next GiB     room for memslots that are added while the program runs
//! ```
//!
//! All code runs in ring 3, exception handlers included. A gate whose code segment has the privilege of the interrupted code doesn't change
//! rings, and IST 1 still gives it a stack of its own. This works with PVM, whose guests have no hardware ring 0, and with SVM and VMX.
//! Accessed and dirty bits are set from the start, so no table is written at run time.
//!
//! Source: AMD APM volume 2, chapters 4, 5, 8 and 12.

use machine::memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryError};
use payload_abi::{
    DOORBELL_ADDRESS, DOORBELL_SIZE, HIGH_RAM_START, LOW_RAM_END, LOWEST_LOAD_ADDRESS, Region,
};

pub(super) const PAGE: u64 = 0x1000;
const LARGE_PAGE: u64 = 0x20_0000;
const GIB: u64 = 1 << 30;

pub(super) const GDT: u64 = 0x1000;
/// Limit of the GDT: seven descriptors.
pub(super) const GDT_LIMIT: u16 = 7 * 8 - 1;
pub(super) const IDT: u64 = 0x2000;
/// Limit of the IDT: 256 gates.
pub(super) const IDT_LIMIT: u16 = 256 * 16 - 1;
const STUBS: u64 = 0x3000;
const STUB_SIZE: u64 = 16;
const PER_VCPU: u64 = 0x4000;
const TSS_STRIDE: u64 = 128;
const BOOT_INFO_STRIDE: u64 = 256;
const EXCEPTION_STACK_SIZE: u64 = 256;
/// The I/O permission map: a bit per port, and the terminating byte of ones. All zero: every port is allowed. All TSSs share one, and lie
/// within 64 KiB below it.
const IO_MAP_SIZE: u64 = 0x1_0000 / 8 + 1;

/// Selectors as in Linux. PVM requires these two.
pub(super) const CODE_SELECTOR: u16 = 0x33;
pub(super) const DATA_SELECTOR: u16 = 0x2b;
const CODE_DESCRIPTOR: u64 = 0x00af_fb00_0000_ffff;
const DATA_DESCRIPTOR: u64 = 0x00cf_f300_0000_ffff;

/// Limit of vCPUs per VM.
pub const MAX_VCPUS: u32 = 254;
/// End of the addresses that page tables below 2 MiB can map.
pub const ADDRESS_LIMIT: u64 = 256 * GIB;

const _: () = {
    assert!(size_of::<payload_abi::BootInfo>() as u64 <= BOOT_INFO_STRIDE);
    let per_vcpu =
        (TSS_STRIDE + BOOT_INFO_STRIDE + EXCEPTION_STACK_SIZE) * MAX_VCPUS as u64 + 3 * PAGE + IO_MAP_SIZE;
    assert!(TSS_STRIDE * MAX_VCPUS as u64 + IO_MAP_SIZE <= 0xffff);
    // Two upper tables, two of 4 KiB pages, one per GiB.
    assert!(PER_VCPU + per_vcpu + (4 + ADDRESS_LIMIT / GIB) * PAGE <= LOWEST_LOAD_ADDRESS);
};

const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const LARGE: u64 = 1 << 7;
const TABLE: u64 = PRESENT | WRITABLE | USER | ACCESSED;
const READ_ONLY: u64 = PRESENT | USER | ACCESSED | DIRTY;

/// Memory, window and room exceed [`ADDRESS_LIMIT`].
#[derive(Debug, Clone, Copy, thiserror::Error, PartialEq, Eq)]
#[error(
    "Memory of {memory:#x} bytes with a window of {window:#x} bytes reaches beyond {ADDRESS_LIMIT:#x}, the end of what a payload machine maps; choose less"
)]
pub struct TooLarge {
    memory: u64,
    window: u64,
}

/// Addresses of one payload machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layout {
    vcpus: u64,
    /// RAM, ascending: below 3 GiB, and the rest from 4 GiB on.
    pub(super) ram: Vec<Region>,
    /// The read-only window. If there is none, empty at its address.
    pub(super) window: Region,
    /// Address space for memslots, mapped writable by page tables. If there is none, empty at its address.
    pub(super) room: Region,
    stack_size: u64,
}

impl Layout {
    /// A layout for `memory` bytes of RAM, a window of `window` bytes, and `vcpus` vCPUs with stacks of `stack_size` bytes.
    ///
    /// `memory` is a multiple of 2 MiB, `window` and `stack_size` are multiples of 4 KiB, and `vcpus` is at most [`MAX_VCPUS`].
    ///
    /// # Errors
    /// When RAM and window need addresses above [`ADDRESS_LIMIT`].
    pub(super) fn new(memory: u64, window: u64, vcpus: u32, stack_size: u64) -> Result<Self, TooLarge> {
        let too_large = TooLarge { memory, window };
        let low = memory.min(LOW_RAM_END);
        let mut ram = vec![Region { start: 0, size: low }];
        if memory > low {
            ram.push(Region { start: HIGH_RAM_START, size: memory - low });
        }
        let ram_end = HIGH_RAM_START.checked_add(memory - low).ok_or(too_large)?;
        let Some(start) = ram_end.checked_next_multiple_of(GIB) else { return Err(too_large) };
        if start.checked_add(window).is_none_or(|end| end > ADDRESS_LIMIT) {
            return Err(too_large);
        }
        let room = Region { start: (start + window).next_multiple_of(GIB), size: 0 };
        Ok(Self { vcpus: vcpus.into(), ram, window: Region { start, size: window }, room, stack_size })
    }

    /// Adds `room` bytes of address space above everything else.
    pub(super) fn with_room(mut self, room: u64) -> Result<Self, TooLarge> {
        let end = self.room.start.checked_add(room);
        if end.is_none_or(|end| end > ADDRESS_LIMIT) {
            let memory = self.ram.iter().map(|region| region.size).sum();
            return Err(TooLarge { memory, window: self.window.size.saturating_add(room) });
        }
        self.room.size = room;
        Ok(self)
    }

    /// First address above the RAM below 3 GiB.
    pub(super) fn low_end(&self) -> u64 {
        self.ram.first().map_or(0, |region| region.size)
    }

    /// Start of all stacks, which ends the program's memory. `None` if the stacks don't fit.
    pub(super) fn stacks_start(&self) -> Option<u64> {
        let stacks = self.stack_size.checked_mul(self.vcpus)?;
        self.low_end().checked_sub(stacks).filter(|start| *start >= LOWEST_LOAD_ADDRESS)
    }

    /// The stack of vCPU `index`.
    pub(super) fn stack(&self, index: u32) -> Region {
        let above = (u64::from(index) + 1).saturating_mul(self.stack_size);
        Region { start: self.low_end().saturating_sub(above), size: self.stack_size }
    }

    /// The task state segment of vCPU `index`.
    pub(super) fn tss(&self, index: u32) -> u64 {
        PER_VCPU + u64::from(index) * TSS_STRIDE
    }

    /// The boot information of vCPU `index`.
    pub(super) fn boot_info(&self, index: u32) -> u64 {
        self.boot_infos() + u64::from(index) * BOOT_INFO_STRIDE
    }

    /// Limit of the task state segment of vCPU `index`: up to the byte after the I/O permission map.
    pub(super) fn tss_limit(&self, index: u32) -> u32 {
        u32::from(self.io_map_offset(index)) + u32::try_from(IO_MAP_SIZE).unwrap_or(0) - 1
    }

    fn io_map(&self) -> u64 {
        PER_VCPU + self.vcpus * TSS_STRIDE
    }

    fn io_map_offset(&self, index: u32) -> u16 {
        // At most 254 * 128.
        u16::try_from(self.io_map() - self.tss(index)).unwrap_or(u16::MAX)
    }

    fn boot_infos(&self) -> u64 {
        (self.io_map() + IO_MAP_SIZE).next_multiple_of(PAGE)
    }

    fn exception_stacks(&self) -> u64 {
        (self.boot_infos() + self.vcpus * BOOT_INFO_STRIDE).next_multiple_of(PAGE)
    }

    /// Top of the exception stack of vCPU `index`.
    pub(super) fn exception_stack_top(&self, index: u32) -> u64 {
        self.exception_stacks() + (u64::from(index) + 1) * EXCEPTION_STACK_SIZE
    }

    /// Address of the top-level page table.
    pub(super) fn page_tables(&self) -> u64 {
        (self.exception_stacks() + self.vcpus * EXCEPTION_STACK_SIZE).next_multiple_of(PAGE)
    }

    /// Whether `rip` is in an exception stub, so that the vCPU was reporting an exception.
    pub(super) fn is_stub(rip: u64) -> bool {
        (STUBS..STUBS + 256 * STUB_SIZE).contains(&rip)
    }

    /// Writes descriptors, gates, stubs, task state segments and page tables into fresh memory.
    pub(super) fn write(&self, memory: &GuestMemory) -> Result<(), GuestMemoryError> {
        let put = |address: u64, bytes: &[u8]| memory.write_slice(bytes, GuestAddress(address));
        put(GDT + u64::from(DATA_SELECTOR & !7), &DATA_DESCRIPTOR.to_le_bytes())?;
        put(GDT + u64::from(CODE_SELECTOR & !7), &CODE_DESCRIPTOR.to_le_bytes())?;
        for vector in 0..=255_u8 {
            let stub = STUBS + u64::from(vector) * STUB_SIZE;
            put(stub, &stub_code(vector))?;
            put(IDT + u64::from(vector) * 16, &gate(stub).to_le_bytes())?;
        }
        for index in 0..u32::try_from(self.vcpus).unwrap_or(MAX_VCPUS) {
            put(self.tss(index), &task_state(self.exception_stack_top(index), self.io_map_offset(index)))?;
        }
        put(self.io_map() + IO_MAP_SIZE - 1, &[0xff])?;
        self.write_page_tables(memory)
    }

    fn write_page_tables(&self, memory: &GuestMemory) -> Result<(), GuestMemoryError> {
        let entry = |table: u64, index: u64, value: u64| {
            memory.write_slice(&value.to_le_bytes(), GuestAddress(table + index * 8))
        };
        let top = self.page_tables();
        let upper = top + PAGE;
        let lowest = upper + PAGE;
        let doorbell = lowest + PAGE;
        let directories = doorbell + PAGE;
        entry(top, 0, upper | TABLE)?;
        let end = (self.room.start + self.room.size).next_multiple_of(GIB);
        for gib in 0..end / GIB {
            entry(upper, gib, (directories + gib * PAGE) | TABLE)?;
        }
        // Directories are consecutive, so one index counts all entries.
        let ram = self.ram.iter().map(|region| (region, WRITABLE));
        for (region, writable) in ram.chain([(&self.window, 0), (&self.room, WRITABLE)]) {
            let large = region.start / LARGE_PAGE..(region.start + region.size).div_ceil(LARGE_PAGE);
            for page in large {
                entry(directories, page, (page * LARGE_PAGE) | READ_ONLY | LARGE | writable)?;
            }
        }
        // The first 2 MiB in 4 KiB pages, without page 0 and the page tables.
        entry(directories, 0, lowest | TABLE)?;
        for page in GDT / PAGE..self.page_tables() / PAGE {
            let writable = if page * PAGE >= self.exception_stacks() { WRITABLE } else { 0 };
            entry(lowest, page, (page * PAGE) | READ_ONLY | writable)?;
        }
        entry(directories, DOORBELL_ADDRESS / LARGE_PAGE, doorbell | TABLE)?;
        for page in 0..DOORBELL_SIZE / PAGE {
            let address = DOORBELL_ADDRESS + page * PAGE;
            entry(doorbell, address / PAGE % 512, address | READ_ONLY | WRITABLE)?;
        }
        Ok(())
    }
}

/// Code that pushes the error code, unless the CPU has, then the vector, and exits to the monitor.
fn stub_code(vector: u8) -> [u8; 16] {
    const PUSH_ZERO: [u8; 2] = [0x6a, 0];
    let has_error_code = matches!(vector, 8 | 10..=14 | 17 | 21 | 29 | 30);
    let mut code = Vec::with_capacity(16);
    if !has_error_code {
        code.extend(PUSH_ZERO);
    }
    code.extend([0x68, vector, 0, 0, 0]); // push imm32
    code.extend([0xe6, payload_abi::PORT_EXCEPTION.to_le_bytes()[0]]); // out imm8, al
    code.extend([0xeb, 0xfe]); // unreachable: jmp to itself
    code.resize(16, 0xcc);
    let mut stub = [0; 16];
    stub.copy_from_slice(&code);
    stub
}

/// A 64-bit interrupt gate to ring 3, with IST 1.
fn gate(handler: u64) -> u128 {
    const IST_1: u64 = 1 << 32;
    const PRESENT_RING_3_INTERRUPT: u64 = 0xee << 40;
    let low = (handler & 0xffff)
        | (u64::from(CODE_SELECTOR) << 16)
        | IST_1
        | PRESENT_RING_3_INTERRUPT
        | ((handler >> 16 & 0xffff) << 48);
    u128::from(low) | (u128::from(handler >> 32) << 64)
}

/// A TSS. Only IST 1 and the I/O permission map are used, and RSP 0 is set for completeness. PVM loses IOPL and consults the map.
fn task_state(stack_top: u64, io_map_offset: u16) -> [u8; 0x68] {
    let mut tss = [0; 0x68];
    tss[0x04..0x0c].copy_from_slice(&stack_top.to_le_bytes());
    tss[0x24..0x2c].copy_from_slice(&stack_top.to_le_bytes());
    tss[0x66..0x68].copy_from_slice(&io_map_offset.to_le_bytes());
    tss
}

#[cfg(test)]
#[path = "layout_tests.rs"]
mod tests;
