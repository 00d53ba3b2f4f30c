//! The rings alone, for model checkers and benchmarks: without the commands that create them in a guest.

use dma::Dma;
use hca::attributes::QpKind;

use crate::abi::completion::SIZE;
use crate::abi::work::send_slot;
use crate::completion_queue::PvrdmaCompletionQueue;
use crate::decode::SendRules;
use crate::ring::{RingError, RingMemory};
use crate::send_queue::PvrdmaSendQueue;

/// A user process's send queue of a connection.
pub fn send_queue(state: u64, pages: &[u64], slots: u32, max_sge: u32) -> Result<PvrdmaSendQueue, RingError> {
    let rules = SendRules { kind: QpKind::Rc, kernel: false, max_sge };
    PvrdmaSendQueue::new(state, pages, slots, send_slot(max_sge), rules)
}

/// A completion queue that starts at the indices in memory.
pub fn completion_queue(
    memory: &impl Dma,
    state: u64,
    pages: &[u64],
    entries: u32,
    kernel: bool,
) -> Result<PvrdmaCompletionQueue, RingError> {
    PvrdmaCompletionQueue::begin(memory, RingMemory::new(state, pages, entries, SIZE)?, kernel)
}
