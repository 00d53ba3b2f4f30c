//! Guest memory by its physical addresses: page tables map the first 4 GiB one to one.

#![allow(unsafe_code)] // Devices and rings are addresses.

use core::sync::atomic::{Ordering, compiler_fence};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Bytes of a page.
pub const PAGE: u64 = 4096;

unsafe extern "C" {
    /// The linker script's symbol behind the program.
    static end_of_image: u8;
}

fn pointer<T>(address: u64) -> *mut T {
    #[expect(clippy::cast_possible_truncation, reason = "x86-64 has 64-bit pointers")]
    core::ptr::with_exposed_provenance_mut(address as usize)
}

/// Loads a word that a device may change. Later accesses aren't moved before it.
pub fn load(address: u64) -> u32 {
    // SAFETY: an aligned word in RAM that this program allocated, or in a device's BAR.
    let value = unsafe { pointer::<u32>(address).read_volatile() };
    compiler_fence(Ordering::Acquire);
    value
}

/// Stores a word that a device may read. Earlier accesses aren't moved behind it.
pub fn store(address: u64, value: u32) {
    compiler_fence(Ordering::Release);
    // SAFETY: as for `load`.
    unsafe { pointer::<u32>(address).write_volatile(value) };
}

/// Returns an address or size as 32 bits: this program's memory is below 4 GiB.
pub fn word(address: u64) -> u32 {
    u32::try_from(address).unwrap_or_else(|_| crate::fail("an address is beyond 4 GiB"))
}

/// Writes a structure.
pub fn write<T: IntoBytes + Immutable>(address: u64, value: T) {
    // SAFETY: RAM that this program allocated.
    unsafe { pointer::<T>(address).write_unaligned(value) };
}

/// Reads a structure.
pub fn read<T: FromBytes>(address: u64) -> T {
    compiler_fence(Ordering::Acquire);
    // SAFETY: RAM that this program allocated; any bytes are a value.
    unsafe { pointer::<T>(address).read_unaligned() }
}

/// Allocates pages in ascending order, and never frees them.
pub struct Pages {
    next: u64,
}

impl Pages {
    /// Starts behind the program.
    pub fn new() -> Self {
        Self { next: (&raw const end_of_image).addr() as u64 }
    }

    /// Allocates `count` consecutive pages of zeros, as the monitor leaves them.
    pub fn take(&mut self, count: u64) -> u64 {
        let first = self.next;
        self.next += count * PAGE;
        first
    }

    /// Writes numbers to all memory from the next page on, up to `end`. So no page is equal to another or zero.
    pub fn fill(&mut self, end: u64) {
        while self.next + PAGE <= end {
            let page = self.take(1);
            for at in (page..page + PAGE).step_by(8) {
                write(at, at.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            }
        }
    }

    /// Writes a page directory of `count` consecutive pages from `first` on.
    pub fn directory(&mut self, first: u64, count: u64) -> u64 {
        let (directory, table) = (self.take(1), self.take(count.div_ceil(512)));
        for index in 0..count.div_ceil(512) {
            write(directory + index * 8, table + index * PAGE);
        }
        for index in 0..count {
            write(table + index * 8, first + index * PAGE);
        }
        directory
    }
}
