//! A hostile guest's driver and processes against the RDMA function. The input chooses every register, command, request and ring
//! index, and the engine's steps in between.
//!
//! Checked:
//! - There is no panic and no endless loop.
//! - The device accesses only pages that are granted and not revoked (the oracle of `pvrdma_testbed::watched`).
//! - A peer's memory changes only where the peer has granted the right.
//! - Messages of two other guests arrive intact.

#![no_main]

use std::os::fd::OwnedFd;

use dma::{MappedMemory, MemoryRegion};
use libfuzzer_sys::fuzz_target;
use pvrdma_testbed::hostile::dice::Bytes;
use pvrdma_testbed::hostile::{BASE, Hostile, PAGES};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

/// Limit of acts per input.
const STEPS: usize = 400;

fn memory() -> MappedMemory {
    let size = PAGES as u64 * 4096;
    let file: OwnedFd = memfd_create("pvrdma", MemfdFlags::ALLOW_SEALING).expect("a memfd");
    ftruncate(&file, size).expect("its size");
    fcntl_add_seals(&file, SealFlags::SHRINK).expect("its seal");
    let region = MemoryRegion::map(BASE, size, &file, 0, true).expect("its mapping");
    MappedMemory::default().with(region).expect("the only region")
}

fuzz_target!(|input: &[u8]| {
    let mut hostile = Hostile::new(memory, Bytes(input));
    for _ in 0..STEPS {
        if hostile.over() {
            break;
        }
        hostile.step();
    }
});
