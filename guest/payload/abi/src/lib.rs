//! What a payload program and the monitor agree on; `guest/payload/README.md` tells it in prose.
//!
//! Everything is little-endian, and addresses are guest-physical and, as page tables map one to one,
//! virtual as well. Fields are only ever appended: a program checks [`BootInfo::magic`] and
//! [`BootInfo::version`], and reads no further than [`BootInfo::size`].

#![no_std]

use core::mem::{offset_of, size_of};

/// [`BootInfo::magic`]: `CAUSEWAY` in memory order.
pub const MAGIC: u64 = u64::from_le_bytes(*b"CAUSEWAY");
/// [`BootInfo::version`]. Raised only when the meaning of an existing field changes.
pub const VERSION: u32 = 1;

/// Bytes written here go to the console, one or (`rep outsb`) many at a time.
pub const PORT_CONSOLE: u16 = 0xe9;
/// A 32-bit write ends the VM with that exit code; 8- and 16-bit writes are zero-extended.
pub const PORT_EXIT: u16 = 0xf4;
/// Used by the exception stubs that the monitor installs, not by programs.
pub const PORT_EXCEPTION: u16 = 0xf5;
/// Any write ends this vCPU and leaves the others running.
pub const PORT_PARK: u16 = 0xf6;
/// vCPU 0 writes 1 here when the measured part of an SPMD program begins and 0 when it has ended. For a monitor that
/// counts; unserved it does nothing.
pub const PORT_PHASE: u16 = 0xf7;
/// Yield hint: any write yields this vCPU's processor to other threads of the host for a moment, some 100 µs. For programs that
/// wait where vCPUs outnumber processors; a monitor that doesn't know the port does nothing.
pub const PORT_PAUSE: u16 = 0xf8;
/// First of 16 ports that a library user of the monitor may serve; unserved they read as all ones.
pub const PORT_HOST: u16 = 0x100;
/// Ports from [`PORT_HOST`] on that may be served.
pub const PORT_HOST_COUNT: u16 = 16;

/// The lowest address at which a segment may lie: below are the monitor's tables.
pub const LOWEST_LOAD_ADDRESS: u64 = 0x20_0000;
/// RAM ends here at the latest and goes on at [`HIGH_RAM_START`]; devices lie between.
pub const LOW_RAM_END: u64 = 0xc000_0000;
/// Start of the second part of RAM.
pub const HIGH_RAM_START: u64 = 0x1_0000_0000;
/// The doorbell page.
pub const DOORBELL_ADDRESS: u64 = 0xd000_0000;
/// Bytes of the doorbell page.
pub const DOORBELL_SIZE: u64 = 0x1000;
/// Distance between doorbells in the page, bytes.
pub const DOORBELL_STRIDE: u64 = 8;
/// Most doorbells: the upper half of the page is never one, so that an exit can be had there.
pub const MAX_DOORBELLS: u32 = 256;

/// auxv type whose value is the address of the [`BootInfo`] (also in `rdi` at entry).
pub const AT_BOOT_INFO: u64 = 0x4341_5553;

/// Entries of [`BootInfo::ram`].
pub const MAX_RAM_REGIONS: usize = 4;

/// A range of guest-physical addresses.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Region {
    /// First address.
    pub start: u64,
    /// Bytes; 0 means there is none.
    pub size: u64,
}

/// What a vCPU is told at entry. Each vCPU has its own copy.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BootInfo {
    /// [`MAGIC`].
    pub magic: u64,
    /// [`VERSION`].
    pub version: u32,
    /// Bytes of this structure as the monitor knows it.
    pub size: u32,
    /// vCPUs of the whole VM, over all nodes.
    pub vcpu_count: u32,
    /// This vCPU, 0 to `vcpu_count - 1`, unique over all nodes.
    pub vcpu_index: u32,
    /// Hosts that the VM spans.
    pub node_count: u32,
    /// The host that this vCPU runs on.
    pub node_index: u32,
    /// Frequency of the time stamp counter in kHz; 0 when the host can't tell.
    pub tsc_khz: u64,
    /// Valid entries of `ram`.
    pub ram_count: u32,
    /// Doorbells in the page, at multiples of [`DOORBELL_STRIDE`] from its start.
    pub doorbell_count: u32,
    /// RAM, ascending.
    pub ram: [Region; MAX_RAM_REGIONS],
    /// RAM that holds neither the program nor its stacks nor the monitor's tables: the program's to use.
    /// The same for every vCPU.
    pub free: Region,
    /// This vCPU's stack.
    pub stack: Region,
    /// The doorbell page: a 32-bit store to the start of doorbell *i* signals an eventfd without leaving the
    /// kernel. Any other access to the page is an exit to the monitor; loads give 0, stores do nothing.
    pub doorbell: Region,
    /// Memory of the host that can be read here but not written; size 0 when there is none.
    pub window: Region,
}

const _: () = {
    assert!(size_of::<BootInfo>() == 176);
    assert!(offset_of!(BootInfo, vcpu_count) == 16);
    assert!(offset_of!(BootInfo, tsc_khz) == 32);
    assert!(offset_of!(BootInfo, ram) == 48);
    assert!(offset_of!(BootInfo, free) == 112);
    assert!(offset_of!(BootInfo, window) == 160);
};

impl BootInfo {
    /// The bytes as they lie in guest memory.
    pub fn to_bytes(&self) -> [u8; size_of::<Self>()] {
        let mut bytes = [0; size_of::<Self>()];
        let mut at = 0;
        let mut put = |field: &[u8]| {
            bytes[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        };
        put(&self.magic.to_le_bytes());
        for word in
            [self.version, self.size, self.vcpu_count, self.vcpu_index, self.node_count, self.node_index]
        {
            put(&word.to_le_bytes());
        }
        put(&self.tsc_khz.to_le_bytes());
        put(&self.ram_count.to_le_bytes());
        put(&self.doorbell_count.to_le_bytes());
        for region in self.ram.iter().chain([&self.free, &self.stack, &self.doorbell, &self.window]) {
            put(&region.start.to_le_bytes());
            put(&region.size.to_le_bytes());
        }
        bytes
    }
}
