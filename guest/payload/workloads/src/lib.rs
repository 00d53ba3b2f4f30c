//! SPMD workloads. Each has `NAMES` (its arguments) and `run`, which every vCPU calls, and compares its result with a serial computation by
//! vCPU 0 that isn't measured.
//!
//! | module | does | event |
//! |---|---|---|
//! | [`ep`] | random pairs, no communication | pair |
//! | [`matrix`] | matrix multiplication | multiplication |
//! | [`jacobi`] | relaxation on a grid | step |
//! | [`cg`] | conjugate gradients with a sparse matrix | iteration |
//! | [`integer_sort`] | counting sort | key |
//! | [`search`] | breadth-first search in a random graph | edge |
//! | [`producer_consumer`] | one writes, others read | message |
//! | [`locks`] | a counter under a ticket or a queue lock | hand-off |
//! | [`false_sharing`] | each its own word of one page | store |
//! | [`pages`] | many pages, each touched once by who does not have it | page |
//! | [`storm`] | all at the same words, by stores, atomics and instructions with two pages | operation |

#![cfg_attr(not(test), no_std)]

pub mod cg;
pub mod ep;
pub mod false_sharing;
pub mod integer_sort;
pub mod jacobi;
pub mod locks;
pub mod matrix;
pub mod pages;
pub mod producer_consumer;
pub mod search;
pub mod storm;
#[cfg(test)]
mod testing;

use core::hint::spin_loop;

/// Passes about `times` pauses of the processor.
pub(crate) fn pause(times: u64) {
    for _ in 0..times {
        spin_loop();
    }
}

/// A checksum of numbers in order: FNV-1a over their bits, 64 at a time.
pub(crate) fn checksum(numbers: impl IntoIterator<Item = u64>) -> u64 {
    numbers
        .into_iter()
        .fold(0xCBF2_9CE4_8422_2325, |sum, number| (sum ^ number).wrapping_mul(0x0000_0100_0000_01B3))
}
