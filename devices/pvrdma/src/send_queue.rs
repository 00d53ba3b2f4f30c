//! Send queues: requests are fetched in the order in which the guest posted them; slots are released when the engine retires them.

use dma::Dma;
use hca::provider::{Fetched, SendQueue};
use hca::work::SendRequest;

use crate::abi::rings::state;
use crate::abi::work::send_slot;
use crate::decode::{SendRules, read_send};
use crate::ring::{RingError, RingMemory};
use crate::saved;

/// Number of requests that are prefetched: two cache lines each, and CPUs have about ten such misses in flight at once.
const PREFETCHED: u32 = 6;
/// Bytes of each request that are prefetched.
const SLOT_PREFETCHED: u64 = 128;

/// The send queue of one queue pair.
#[derive(Debug)]
pub struct PvrdmaSendQueue {
    ring: RingMemory,
    rules: SendRules,
    /// The last loaded producer index of the guest: requests up to it are fetched without another load.
    tail: u32,
    /// Index of the next request to fetch.
    next: u32,
    /// Index of the next request to prefetch.
    ahead: u32,
    /// Index of the oldest slot that is not released to the guest.
    head: u32,
}

impl PvrdmaSendQueue {
    pub(crate) fn new(
        state: u64,
        pages: &[u64],
        slots: u32,
        slot_size: u64,
        rules: SendRules,
    ) -> Result<Self, RingError> {
        let ring = RingMemory::new(state, pages, slots, slot_size)?;
        Ok(Self { ring, rules, tail: 0, next: 0, ahead: 0, head: 0 })
    }

    /// Prefetches the slots of the next few requests: the guest's CPU has just written them, and each cache line must be transferred from
    /// its cache.
    #[inline]
    fn prefetch(&mut self, memory: &impl Dma) {
        let indices = self.ring.indices();
        if indices.between(self.next, self.ahead).is_some_and(|behind| behind > 0) {
            self.ahead = self.next;
        }
        while self.ahead != self.tail
            && indices.between(self.ahead, self.next).is_some_and(|ahead| ahead < PREFETCHED)
        {
            memory.prefetch(self.ring.slot_address(self.ahead), SLOT_PREFETCHED);
            self.ahead = indices.advance(self.ahead, 1);
        }
    }

    /// Number of requests beyond the fetched ones, if the guest's index is `tail`.
    #[inline]
    fn waiting(&self, tail: u32) -> Option<u32> {
        let indices = self.ring.indices();
        let outstanding = indices.between(tail, self.head)?;
        let waiting = indices.between(tail, self.next)?;
        (waiting <= outstanding).then_some(waiting)
    }
}

impl<M: Dma> SendQueue<M> for PvrdmaSendQueue {
    type Saved = saved::SendQueue;

    fn save(&self) -> saved::SendQueue {
        let SendRules { kind, kernel, max_sge } = self.rules;
        let Self { tail, next, head, .. } = *self;
        saved::SendQueue { ring: self.ring.save(), kind, kernel, max_sge, tail, next, head }
    }

    fn memory(&self, each: &mut dyn FnMut(u64, u64)) {
        self.ring.memory(each);
    }

    fn restore(saved: saved::SendQueue) -> Result<Self, &'static str> {
        let ring = saved.ring.restore()?;
        let indices = ring.indices();
        let (tail, next, head) = (saved.tail, saved.next, saved.head);
        let filled = indices.between(tail, head).ok_or("index of a send queue")?;
        let fetched = indices.between(next, head).filter(|fetched| *fetched <= filled);
        fetched.ok_or("index of a send queue")?;
        if saved.max_sge as usize > hca::work::MAX_SGE || send_slot(saved.max_sge) > ring.slot_size() {
            return Err("number of elements of a send request");
        }
        Ok(Self { ring, rules: saved.rules(), tail, next, ahead: next, head })
    }

    fn start(&mut self, memory: &M) {
        self.head = self.ring.load(memory, state::TX_HEAD);
        self.next = self.head;
        self.tail = self.head;
        self.ahead = self.head;
    }

    #[inline]
    fn pending(&self, memory: &M) -> bool {
        self.tail != self.next || self.ring.load(memory, state::TX_TAIL) != self.next
    }

    fn watch(&self) -> Option<(u64, u32)> {
        (self.tail == self.next).then(|| (self.ring.state_address(state::TX_TAIL), self.next))
    }

    #[inline]
    fn prefetch_next(&self, memory: &M) {
        memory.prefetch(self.ring.state_address(state::TX_TAIL), 4);
        memory.prefetch(self.ring.slot_address(self.next), SLOT_PREFETCHED);
    }

    #[inline]
    fn fetch(&mut self, memory: &M) -> Fetched<SendRequest> {
        if self.tail == self.next {
            let tail = self.ring.load(memory, state::TX_TAIL);
            match self.waiting(tail) {
                None => return Fetched::Broken,
                Some(0) => return Fetched::Empty,
                Some(_) => {
                    self.tail = tail;
                    self.ahead = self.next;
                    // The head index on the same cache line is stored soon.
                    memory.prefetch_write(self.ring.state_address(state::TX_HEAD), 4);
                }
            }
        }
        let address = self.ring.slot_address(self.next);
        self.next = self.ring.indices().advance(self.next, 1);
        self.prefetch(memory);
        read_send(memory, address, self.rules)
    }

    #[inline]
    fn retire(&mut self, memory: &M, count: u32) {
        self.head = self.ring.indices().advance(self.head, count);
        // If the memory is gone, the next fetch reports it.
        let _ = self.ring.store(memory, state::TX_HEAD, self.head);
    }
}

#[cfg(test)]
mod tests;
