//! Sums over all vCPUs that don't depend on their number.

#![allow(unsafe_code)] // Parts of shared arrays.

use crate::{Heap, PAGE, Refused, Shared, Team};
use core::ops::Range;

/// Number of blocks of a range, independent of the number of vCPUs. Each block has a partial sum, and these are added in order, so
/// the result is the same to the last bit.
const BLOCKS: usize = 64;
/// Distance of vCPUs' partial sums: a page, so that only one vCPU writes it.
const STRIDE: usize = PAGE / size_of::<f64>();

/// The partial sums.
#[derive(Debug, Clone, Copy)]
pub struct Sums {
    partial: [Shared<f64>; 2],
    turn: usize,
}

impl Sums {
    /// Allocates sums for a team of `count`.
    ///
    /// # Errors
    /// There isn't enough memory.
    pub fn new(heap: &mut Heap, count: usize) -> Result<Self, Refused> {
        Ok(Self { partial: [heap.array(count * STRIDE)?, heap.array(count * STRIDE)?], turn: 0 })
    }

    /// Returns the blocks of `0..length` that this vCPU sums. Work by elements must be divided in the same way: see [`Sums::range`].
    fn blocks(team: &Team<'_>) -> Range<usize> {
        team.part(BLOCKS)
    }

    fn block(block: usize, length: usize) -> Range<usize> {
        block * length / BLOCKS..(block + 1) * length / BLOCKS
    }

    /// Returns this vCPU's elements of `0..length` in sums.
    pub fn range(team: &Team<'_>, length: usize) -> Range<usize> {
        let blocks = Self::blocks(team);
        blocks.start * length / BLOCKS..blocks.end * length / BLOCKS
    }

    /// Returns the sum over `0..length`. Each vCPU calls `sum` for ranges within [`Sums::range`], and all get the result. All vCPUs
    /// call this together; it is also a barrier.
    pub fn add(&mut self, team: &Team<'_>, length: usize, mut sum: impl FnMut(Range<usize>) -> f64) -> f64 {
        // Two arrays alternate, so that one may still be read during the next sum. No vCPU is two sums ahead.
        let partial = self.partial[self.turn % 2];
        self.turn += 1;
        let base = team.index() * STRIDE;
        for block in Self::blocks(team) {
            // SAFETY: only this vCPU writes its page. Others read it after the barrier below, and before the one of the next sum.
            let place = unsafe { partial.write(base + block..base + block + 1) };
            place[0] = sum(Self::block(block, length));
        }
        team.wait();
        let mut total = 0.0;
        for vcpu in 0..team.count() {
            for block in team.part_of(vcpu, BLOCKS) {
                let at = vcpu * STRIDE + block;
                // SAFETY: no vCPU writes it before all have reached the barrier of the next sum.
                total += unsafe { partial.read(at..at + 1) }[0];
            }
        }
        total
    }
}
