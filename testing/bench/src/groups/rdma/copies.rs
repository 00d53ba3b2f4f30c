//! Cost of copies out of and into a guest's memory (`dma`), compared with `memcpy` of the same pages. Devices check what they copy
//! out, so each byte is loaded once, by loads that the compiler can't repeat. Bulk copies between guests are `memcpy` itself.

#![allow(unsafe_code)] // The peer copies a mapping by pointer.

use std::hint::black_box;
use std::os::fd::OwnedFd;

use anyhow::{Context, bail};
use dma::{Dma, MappedMemory, MemoryRegion};
use payload_loops::tsc;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use crate::peers::pin;

/// Bytes of a copy, copies per sample, and description: descriptors and requests, pages, messages.
pub const SIZES: [(u64, u64, &str); 6] = [
    (64, 200_000, "64B"),
    (256, 200_000, "256B"),
    (1 << 10, 100_000, "1KiB"),
    (4 << 10, 50_000, "4KiB"),
    (64 << 10, 3_000, "64KiB"),
    (1 << 20, 150, "1MiB"),
];
/// Copies from this size on must be at least half as fast as `memcpy`.
pub const LARGE_BYTES: u64 = 4 << 10;

/// Size in bytes of the guest memory, and of the buffer.
const MEMORY: u64 = 1 << 20;
/// Guest address of the memory.
const ADDRESS: u64 = 1 << 20;

/// Direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Out of guest memory ([`Dma::read`]).
    Out,
    /// Into guest memory ([`Dma::write`]).
    In,
}

/// Guest memory, and a buffer of this process.
pub struct Copies {
    memory: MappedMemory,
    buffer: Vec<u8>,
}

impl Copies {
    /// Allocates both with all pages present.
    pub fn new() -> anyhow::Result<Self> {
        let file: OwnedFd =
            memfd_create("causeway:bench:copies", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
                .context("Memory for copies could not be had")?;
        ftruncate(&file, MEMORY).context("Memory for copies could not be sized")?;
        fcntl_add_seals(&file, SealFlags::SHRINK).context("Memory for copies could not be sealed")?;
        let memory = MappedMemory::default().with(MemoryRegion::map(ADDRESS, MEMORY, &file, 0, true)?)?;
        let buffer: Vec<u8> = (0..MEMORY).map(|at| u8::try_from(at * 7 % 251)).collect::<Result<_, _>>()?;
        memory.write(ADDRESS, &buffer)?;
        Ok(Self { memory, buffer })
    }

    /// Returns ticks of `repeats` copies of `len_bytes` by `dma`, on `cpu`.
    pub fn by_dma(
        &mut self,
        cpu: usize,
        direction: Direction,
        len_bytes: u64,
        repeats: u64,
    ) -> anyhow::Result<u64> {
        let Self { memory, buffer } = self;
        let buffer =
            buffer.get_mut(..usize::try_from(len_bytes)?).context("A copy is longer than its buffer")?;
        on(cpu, move || {
            let started = tsc::start();
            for _ in 0..repeats {
                match direction {
                    Direction::Out => memory.read(black_box(ADDRESS), buffer)?,
                    Direction::In => memory.write(black_box(ADDRESS), buffer)?,
                }
                black_box(&mut *buffer);
            }
            Ok(tsc::end().wrapping_sub(started))
        })
    }

    /// Does the same by `memcpy`.
    pub fn by_memcpy(
        &mut self,
        cpu: usize,
        direction: Direction,
        len_bytes: u64,
        repeats: u64,
    ) -> anyhow::Result<u64> {
        let region = self.memory.regions().first().context("Memory for copies has no region")?;
        let guest = region.host_address();
        let len = usize::try_from(len_bytes)?;
        let buffer = self.buffer.get_mut(..len).filter(|_| len_bytes <= MEMORY);
        let buffer = buffer.context("A copy is longer than its buffer")?;
        on(cpu, move || {
            let guest = std::ptr::with_exposed_provenance_mut::<u8>(guest);
            let started = tsc::start();
            for _ in 0..repeats {
                // SAFETY: both have `len` bytes and don't overlap. No other code uses the mapping, which lives as long as `self`.
                unsafe {
                    match direction {
                        Direction::Out => std::ptr::copy_nonoverlapping(
                            black_box(guest),
                            buffer.as_mut_ptr(),
                            black_box(len),
                        ),
                        Direction::In => {
                            std::ptr::copy_nonoverlapping(buffer.as_ptr(), black_box(guest), black_box(len))
                        }
                    }
                }
                black_box(&mut *buffer);
            }
            Ok(tsc::end().wrapping_sub(started))
        })
    }
}

/// Runs a function on a thread of its own on `cpu`.
fn on(cpu: usize, work: impl FnOnce() -> anyhow::Result<u64> + Send) -> anyhow::Result<u64> {
    let pinned = || {
        pin(cpu)?;
        work()
    };
    match std::thread::scope(|scope| scope.spawn(pinned).join()) {
        Ok(ticks) => ticks,
        Err(_) => bail!("The copying thread panicked"),
    }
}

#[cfg(test)]
mod tests {
    use super::{Copies, Direction};

    #[test]
    fn copies_of_all_sizes_take_time_and_longer_ones_are_refused() {
        let mut copies = Copies::new().unwrap();
        let cpu = core_affinity::get_core_ids().unwrap().first().unwrap().id;
        for direction in [Direction::Out, Direction::In] {
            for (length, ..) in super::SIZES {
                assert!(copies.by_dma(cpu, direction, length, 2).unwrap() > 0);
                assert!(copies.by_memcpy(cpu, direction, length, 2).unwrap() > 0);
            }
            assert!(copies.by_dma(cpu, direction, super::MEMORY + 1, 1).is_err());
            assert!(copies.by_memcpy(cpu, direction, super::MEMORY + 1, 1).is_err());
        }
    }
}
