//! The ABI between a payload program and the monitor; `guest/payload/README.md` describes it.
//!
//! Everything is little-endian. Addresses are guest-physical and, as page tables map one to one, also virtual. Fields are only ever
//! appended. A program checks [`BootInfo::magic`] and [`BootInfo::version`], and reads no further than [`BootInfo::size`].

#![no_std]

use core::mem::{offset_of, size_of};

/// [`BootInfo::magic`]: `CAUSEWAY` in memory order.
pub const MAGIC: u64 = u64::from_le_bytes(*b"CAUSEWAY");
/// [`BootInfo::version`]. Incremented only when the meaning of an existing field changes.
pub const VERSION: u32 = 1;

/// Bytes written here go to the console, one or (`rep outsb`) many at a time.
pub const PORT_CONSOLE: u16 = 0xe9;
/// A 32-bit write ends the VM with that exit code; 8- and 16-bit writes are zero-extended.
pub const PORT_EXIT: u16 = 0xf4;
/// Used by the exception stubs that the monitor installs, not by programs.
pub const PORT_EXCEPTION: u16 = 0xf5;
/// Any write ends this vCPU; the others continue.
pub const PORT_PARK: u16 = 0xf6;
/// vCPU 0 writes 1 here when the measured part of an SPMD program begins, and 0 when it has ended. For a monitor that counts; others
/// ignore it.
pub const PORT_PHASE: u16 = 0xf7;
/// Yield hint: any write yields this vCPU's processor to other host threads for about 100 µs. For programs that wait while vCPUs
/// outnumber processors. A monitor without the port ignores it.
pub const PORT_PAUSE: u16 = 0xf8;
/// First of 16 ports that a library user of the monitor may serve. Unserved ones read as all ones.
pub const PORT_HOST: u16 = 0x100;
/// Number of ports from [`PORT_HOST`] on that may be served.
pub const PORT_HOST_COUNT: u16 = 16;

/// Lowest address of a segment; the monitor's tables are below.
pub const LOWEST_LOAD_ADDRESS: u64 = 0x20_0000;
/// Limit of the first part of RAM, which continues at [`HIGH_RAM_START`]. Devices are in between.
pub const LOW_RAM_END: u64 = 0xc000_0000;
/// Start of the second part of RAM.
pub const HIGH_RAM_START: u64 = 0x1_0000_0000;
/// The doorbell page.
pub const DOORBELL_ADDRESS: u64 = 0xd000_0000;
/// Size of the doorbell page in bytes.
pub const DOORBELL_SIZE: u64 = 0x1000;
/// Distance between doorbells in the page, in bytes.
pub const DOORBELL_STRIDE: u64 = 8;
/// Limit of doorbells. The upper half of the page never contains one, so that a program can cause an exit there.
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
    /// Length in bytes; 0 if the range doesn't exist.
    pub size: u64,
}

/// Parameters of a vCPU at entry. Each vCPU has its own copy.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BootInfo {
    /// Always [`MAGIC`], by which a program recognizes the structure.
    pub magic: u64,
    /// The monitor's [`VERSION`]; a program refuses another one.
    pub version: u32,
    /// Size of this structure in bytes, as the monitor defines it.
    pub size: u32,
    /// Number of vCPUs of the whole VM, over all nodes.
    pub vcpu_count: u32,
    /// Index of this vCPU, 0 to `vcpu_count - 1`, unique over all nodes.
    pub vcpu_index: u32,
    /// Number of nodes that the VM spans.
    pub node_count: u32,
    /// Index of this vCPU's node.
    pub node_index: u32,
    /// Frequency of the time stamp counter in kHz; 0 if unknown.
    pub tsc_khz: u64,
    /// Number of valid entries of `ram`.
    pub ram_count: u32,
    /// Number of doorbells in the page, at multiples of [`DOORBELL_STRIDE`] from its start.
    pub doorbell_count: u32,
    /// RAM regions in ascending order.
    pub ram: [Region; MAX_RAM_REGIONS],
    /// RAM for the program's use: without the program, its stacks and the monitor's tables. The same for every vCPU.
    pub free: Region,
    /// This vCPU's stack.
    pub stack: Region,
    /// The doorbell page. A 32-bit store to the start of doorbell *i* signals an eventfd within the kernel. Any other access to the
    /// page exits to the monitor; loads return 0, and stores have no effect.
    pub doorbell: Region,
    /// Host memory that is readable but not writable here; size 0 if there is none.
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
    /// Returns the bytes in guest memory's format.
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
