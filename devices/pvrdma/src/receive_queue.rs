//! Receive queues, of a queue pair or shared. A slot is released to the guest as soon as it is copied, so always before the completion.

use dma::Dma;
use hca::provider::{Fetched, ReceiveQueue};
use hca::work::ReceiveRequest;

use crate::abi::rings::state;
use crate::abi::work::receive_slot;
use crate::decode::read_receive;
use crate::ring::{RingError, RingMemory};
use crate::saved;

/// A receive queue.
#[derive(Debug)]
pub struct PvrdmaReceiveQueue {
    ring: RingMemory,
    max_sge: u32,
    /// The last loaded producer index of the guest.
    tail: u32,
    /// Index of the next request to consume.
    head: u32,
}

impl PvrdmaReceiveQueue {
    pub(crate) fn new(
        state: u64,
        pages: &[u64],
        slots: u32,
        slot_size: u64,
        max_sge: u32,
    ) -> Result<Self, RingError> {
        let ring = RingMemory::new(state, pages, slots, slot_size)?;
        Ok(Self { ring, max_sge, tail: 0, head: 0 })
    }

    pub(crate) fn from_ring(ring: RingMemory, max_sge: u32) -> Self {
        Self { ring, max_sge, tail: 0, head: 0 }
    }
}

impl<M: Dma> ReceiveQueue<M> for PvrdmaReceiveQueue {
    type Saved = saved::ReceiveQueue;

    fn save(&self) -> saved::ReceiveQueue {
        let Self { max_sge, tail, head, .. } = *self;
        saved::ReceiveQueue { ring: self.ring.save(), max_sge, tail, head }
    }

    fn memory(&self, each: &mut dyn FnMut(u64, u64)) {
        self.ring.memory(each);
    }

    fn restore(saved: saved::ReceiveQueue) -> Result<Self, &'static str> {
        let ring = saved.ring.restore()?;
        ring.indices().between(saved.tail, saved.head).ok_or("index of a receive queue")?;
        if saved.max_sge as usize > hca::work::MAX_SGE || receive_slot(saved.max_sge) > ring.slot_size() {
            return Err("number of elements of a receive request");
        }
        Ok(Self { ring, max_sge: saved.max_sge, tail: saved.tail, head: saved.head })
    }

    fn start(&mut self, memory: &M) {
        self.head = self.ring.load(memory, state::RX_HEAD);
        self.tail = self.head;
    }

    #[inline]
    fn available(&self, memory: &M) -> u32 {
        let tail = self.ring.load(memory, state::RX_TAIL);
        self.ring.indices().between(tail, self.head).unwrap_or(0)
    }

    #[inline]
    fn take(&mut self, memory: &M) -> Fetched<ReceiveRequest> {
        if self.tail == self.head {
            let tail = self.ring.load(memory, state::RX_TAIL);
            match self.ring.indices().between(tail, self.head) {
                None => return Fetched::Broken,
                Some(0) => return Fetched::Empty,
                Some(_) => self.tail = tail,
            }
        }
        let address = self.ring.slot_address(self.head);
        let fetched = read_receive(memory, address, self.max_sge);
        self.head = self.ring.indices().advance(self.head, 1);
        match self.ring.store(memory, state::RX_HEAD, self.head) {
            Ok(()) => fetched,
            Err(_) => Fetched::Broken,
        }
    }
}
