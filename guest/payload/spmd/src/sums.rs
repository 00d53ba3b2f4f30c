//! Sums of all vCPUs that don't depend on how many there are.

#![allow(unsafe_code)] // Parts of shared arrays.

use crate::{Heap, PAGE, Refused, Shared, Team};
use core::ops::Range;

/// Blocks that a range is cut into, however many vCPUs there are: partial sums are made per block, and added in the order of blocks, so the result is
/// the same to the last bit.
const BLOCKS: usize = 64;
/// Partial sums per vCPU: a page, so that only one vCPU writes it.
const STRIDE: usize = PAGE / size_of::<f64>();

/// Where partial sums lie.
#[derive(Debug, Clone, Copy)]
pub struct Sums {
    partial: [Shared<f64>; 2],
    turn: usize,
}

impl Sums {
    /// For a team of `count`.
    ///
    /// # Errors
    /// When memory is short.
    pub fn new(heap: &mut Heap, count: usize) -> Result<Self, Refused> {
        Ok(Self { partial: [heap.array(count * STRIDE)?, heap.array(count * STRIDE)?], turn: 0 })
    }

    /// Blocks of `0..length` that this vCPU sums. A range of elements worked on by block has to be cut in the same way: see [`Sums::range`].
    fn blocks(team: &Team<'_>) -> Range<usize> {
        team.part(BLOCKS)
    }

    fn block(block: usize, length: usize) -> Range<usize> {
        block * length / BLOCKS..(block + 1) * length / BLOCKS
    }

    /// The elements of `0..length` that are this vCPU's when sums are to be made of them.
    pub fn range(team: &Team<'_>, length: usize) -> Range<usize> {
        let blocks = Self::blocks(team);
        blocks.start * length / BLOCKS..blocks.end * length / BLOCKS
    }

    /// The sum over `0..length` of what `sum` gives for ranges of it: each vCPU calls it for ranges within [`Sums::range`], all get the result.
    /// All call this together. What was written before is seen by all after it.
    pub fn add(&mut self, team: &Team<'_>, length: usize, mut sum: impl FnMut(Range<usize>) -> f64) -> f64 {
        // Two arrays in turn, so that one may still be read while the next sum is made: nobody is two sums ahead.
        let partial = self.partial[self.turn % 2];
        self.turn += 1;
        let base = team.index() * STRIDE;
        for block in Self::blocks(team) {
            // SAFETY: only this vCPU writes its page, and others read it after the barrier below, before the one of the next sum.
            let place = unsafe { partial.write(base + block..base + block + 1) };
            place[0] = sum(Self::block(block, length));
        }
        team.wait();
        let mut total = 0.0;
        for vcpu in 0..team.count() {
            for block in team.part_of(vcpu, BLOCKS) {
                let at = vcpu * STRIDE + block;
                // SAFETY: nobody writes it before all have been to the barrier of the next sum.
                total += unsafe { partial.read(at..at + 1) }[0];
            }
        }
        total
    }
}
