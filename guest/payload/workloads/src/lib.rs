//! SPMD workloads. Each has `NAMES` (its arguments) and `run`, which every vCPU calls. vCPU 0 compares the result with a serial
//! computation that isn't measured.
//!
//! | module | work | event |
//! |---|---|---|
//! | [`ep`] | random pairs, no communication | pair |
//! | [`matrix`] | matrix multiplication | multiplication |
//! | [`jacobi`] | relaxation on a grid | step |
//! | [`cg`] | conjugate gradients with a sparse matrix | iteration |
//! | [`integer_sort`] | counting sort | key |
//! | [`search`] | breadth-first search in a random graph | edge |
//! | [`producer_consumer`] | one vCPU writes, others read | message |
//! | [`locks`] | a counter under a ticket or a queue lock | hand-off |
//! | [`false_sharing`] | a word per vCPU in one page | store |
//! | [`pages`] | many pages, each accessed once by a vCPU whose node has no copy | page |
//! | [`storm`] | all vCPUs on the same words, by stores, atomics and instructions with two pages | operation |

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

/// Executes about `times` pause instructions.
pub(crate) fn pause(times: u64) {
    for _ in 0..times {
        spin_loop();
    }
}

/// Returns a checksum of numbers in order: FNV-1a over their bits, 64 at a time.
pub(crate) fn checksum(numbers: impl IntoIterator<Item = u64>) -> u64 {
    numbers
        .into_iter()
        .fold(0xCBF2_9CE4_8422_2325, |sum, number| (sum ^ number).wrapping_mul(0x0000_0100_0000_01B3))
}
