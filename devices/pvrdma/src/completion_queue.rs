//! Completion queues. The guest's driver may rewrite unconsumed entries: it compacts the ring when a queue pair is destroyed. So the device
//! never reads published entries, and only appends new ones.

use dma::Dma;
use hca::provider::{CompletionQueue, CompletionQueueFailed, Consumer};
use hca::work::{Completion, NetworkHeader};
use zerocopy::IntoBytes;

use crate::abi::completion::{Entry, SIZE, flags, network};
use crate::abi::rings::state;
use crate::ring::{RingError, RingMemory};
use crate::saved;

/// Number of entries that are prefetched: stores wait for their cache lines in order, prefetches don't.
const PREFETCHED: u32 = 3;

/// A completion queue.
#[derive(Debug)]
pub struct PvrdmaCompletionQueue {
    ring: RingMemory,
    /// Whether the guest's kernel owns it: a user process's entries have fewer flags.
    kernel: bool,
    /// The device's producer index; the guest's copy follows with each publication.
    tail: u32,
    /// The last loaded consumer index of the guest; loaded again only when the ring seems full.
    head: u32,
}

impl PvrdmaCompletionQueue {
    /// Reads the ring of a CREATE_CQ command.
    pub(crate) fn read(
        memory: &impl Dma,
        directory: u64,
        pages: u32,
        entries: u32,
        kernel: bool,
    ) -> Result<Self, RingError> {
        Self::begin(memory, RingMemory::read(memory, directory, pages, entries, SIZE)?, kernel)
    }

    /// Starts at the indices in memory.
    pub(crate) fn begin(memory: &impl Dma, ring: RingMemory, kernel: bool) -> Result<Self, RingError> {
        let entries = ring.indices().slots();
        let tail = ring.load(memory, state::RX_TAIL);
        let head = ring.load(memory, state::RX_HEAD);
        if ring.indices().between(tail, head).is_none() {
            return Err(RingError::State { tail, head, slots: entries });
        }
        Ok(Self { ring, kernel, tail, head })
    }
}

impl<M: Dma> CompletionQueue<M> for PvrdmaCompletionQueue {
    type Saved = saved::CompletionQueue;

    fn save(&self) -> saved::CompletionQueue {
        let Self { kernel, tail, head, .. } = *self;
        saved::CompletionQueue { ring: self.ring.save(), kernel, tail, head }
    }

    fn memory(&self, each: &mut dyn FnMut(u64, u64)) {
        self.ring.memory(each);
    }

    fn restore(saved: saved::CompletionQueue) -> Result<Self, &'static str> {
        let ring = saved.ring.restore()?;
        ring.indices().between(saved.tail, saved.head).ok_or("index of a completion queue")?;
        if ring.slot_size() != SIZE {
            return Err("size of a completion queue's slots");
        }
        Ok(Self { ring, kernel: saved.kernel, tail: saved.tail, head: saved.head })
    }

    #[inline]
    fn push(&mut self, memory: &M, completion: &Completion) -> Result<(), CompletionQueueFailed> {
        let indices = self.ring.indices();
        if self.tail == self.head ^ indices.slots() {
            let head = self.ring.load(memory, state::RX_HEAD);
            match indices.between(self.tail, head) {
                None => return Err(CompletionQueueFailed::Broken),
                Some(filled) if filled == indices.slots() => return Err(CompletionQueueFailed::Overrun),
                Some(_) => self.head = head,
            }
        }
        let entry = encode(completion, self.kernel);
        memory
            .write(self.ring.slot_address(self.tail), entry.as_bytes())
            .map_err(|_| CompletionQueueFailed::Broken)?;
        self.tail = indices.advance(self.tail, 1);
        // The guest's CPU read that entry one round of the ring ago, and doesn't read it before it is published.
        memory.prefetch_write(self.ring.slot_address(indices.advance(self.tail, PREFETCHED)), SIZE);
        Ok(())
    }

    #[inline]
    fn publish(&mut self, memory: &M) -> Result<(), CompletionQueueFailed> {
        self.ring.store(memory, state::RX_TAIL, self.tail).map_err(|_| CompletionQueueFailed::Broken)
    }

    #[inline]
    fn consumer(&self, memory: &M) -> Option<Consumer> {
        let position = self.ring.load(memory, state::RX_HEAD);
        let unconsumed = self.ring.indices().between(self.tail, position)?;
        Some(Consumer { position, unconsumed })
    }
}

/// Encodes a completion. Completion queues of user processes get only the two flags that verbs number alike.
#[inline]
pub(crate) fn encode(completion: &Completion, kernel: bool) -> Entry {
    let mut flag_bits = 0;
    let mut immediate = [0; 4];
    if let Some(wire) = completion.immediate {
        flag_bits |= flags::IMMEDIATE;
        immediate = wire;
    } else if let Some(key) = completion.invalidated {
        if kernel {
            flag_bits |= flags::INVALIDATE;
        }
        immediate = key.0.to_le_bytes();
    }
    let mut network_header = 0;
    if let Some(header) = completion.grh {
        flag_bits |= flags::GRH;
        if kernel {
            flag_bits |= flags::NETWORK_HEADER;
        }
        network_header = match header {
            NetworkHeader::Ipv4 => network::IPV4,
            NetworkHeader::Ipv6 => network::IPV6,
        };
    }
    Entry {
        wr_id: completion.wr_id.into(),
        qp: u64::from(completion.qp.0).into(),
        opcode: (completion.operation as u32).into(),
        status: (completion.status as u32).into(),
        byte_len: completion.byte_len.into(),
        immediate,
        source_qp: completion.source.map_or(0, |qpn| qpn.0).into(),
        flags: flag_bits.into(),
        vendor_error: 0.into(),
        pkey_index: 0.into(),
        slid: 0.into(),
        service_level: 0,
        dlid_path_bits: 0,
        port: 1,
        smac: [0; 6],
        network_header,
        reserved: [0; 6],
    }
}

#[cfg(test)]
mod tests;
