//! Two locks: a ticket lock, where all waiters poll one word, and a queue lock, where each polls its own.
//!
//! Source of the queue lock: Mellor-Crummey and Scott, *Algorithms for Scalable Synchronization on Shared-Memory Multiprocessors*
//! (1991).

use core::hint::spin_loop;
use core::sync::atomic::{AtomicU32, Ordering};

/// A FIFO lock whose waiters read the same word.
#[derive(Debug, Default)]
pub struct TicketLock {
    next: AtomicU32,
    served: AtomicU32,
}

impl TicketLock {
    /// Creates an unlocked lock.
    pub const fn new() -> Self {
        Self { next: AtomicU32::new(0), served: AtomicU32::new(0) }
    }

    /// Runs `inside` in mutual exclusion.
    pub fn with<R>(&self, inside: impl FnOnce() -> R) -> R {
        self.with_ticket(|_| inside())
    }

    /// Does the same; `inside` gets its ticket: its position in the order of all lock holders, from 0, modulo 2^32.
    pub fn with_ticket<R>(&self, inside: impl FnOnce(u32) -> R) -> R {
        let ticket = self.next.fetch_add(1, Ordering::Relaxed);
        while self.served.load(Ordering::Acquire) != ticket {
            spin_loop();
        }
        let result = inside(ticket);
        self.served.store(ticket.wrapping_add(1), Ordering::Release);
        result
    }

    /// Returns whether another vCPU has requested the lock since the one with this ticket.
    pub fn asked_after(&self, ticket: u32) -> bool {
        self.next.load(Ordering::Relaxed) != ticket.wrapping_add(1)
    }
}

/// A vCPU's node in a queue lock, on a page of its own, as only the predecessor writes there.
#[derive(Debug, Default)]
pub struct QueuePlace {
    /// Index of the successor plus one; 0: none yet.
    next: AtomicU32,
    waits: AtomicU32,
}

impl QueuePlace {
    /// Creates an unused node.
    pub const fn new() -> Self {
        Self { next: AtomicU32::new(0), waits: AtomicU32::new(0) }
    }
}

/// A FIFO lock whose waiters each read a word of their own.
#[derive(Debug, Default)]
pub struct QueueLock {
    /// Index of the last vCPU in the queue plus one; 0: none.
    last: AtomicU32,
}

impl QueueLock {
    /// Creates an unlocked lock.
    pub const fn new() -> Self {
        Self { last: AtomicU32::new(0) }
    }

    /// Runs `inside` on vCPU `index` in mutual exclusion. `place` returns a vCPU's node, the same for all callers.
    pub fn with<'p, R>(
        &self,
        index: usize,
        place: impl Fn(usize) -> &'p QueuePlace,
        inside: impl FnOnce() -> R,
    ) -> R {
        let me = u32::try_from(index).unwrap_or(u32::MAX - 1) + 1;
        let mine = place(index);
        mine.next.store(0, Ordering::Relaxed);
        mine.waits.store(1, Ordering::Relaxed);
        if let Some(before) = self.last.swap(me, Ordering::AcqRel).checked_sub(1) {
            place(before as usize).next.store(me, Ordering::Release);
            while mine.waits.load(Ordering::Acquire) != 0 {
                spin_loop();
            }
        }
        let result = inside();
        if mine.next.load(Ordering::Acquire) == 0 {
            if self.last.compare_exchange(me, 0, Ordering::Release, Ordering::Relaxed).is_ok() {
                return result;
            }
            // A successor has entered the queue but hasn't linked itself yet.
            while mine.next.load(Ordering::Acquire) == 0 {
                spin_loop();
            }
        }
        let next = mine.next.load(Ordering::Acquire);
        place((next - 1) as usize).waits.store(0, Ordering::Release);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::{QueueLock, QueuePlace, TicketLock};
    use std::sync::atomic::{AtomicU64, Ordering};

    /// A counter with separate reads and writes loses nothing under either lock.
    #[test]
    fn one_at_a_time() {
        let (ticket, queue) = (TicketLock::new(), QueueLock::new());
        let places: Vec<QueuePlace> = (0..4).map(|_| QueuePlace::new()).collect();
        let counters = [AtomicU64::new(0), AtomicU64::new(0)];
        let add = |counter: &AtomicU64| {
            let old = counter.load(Ordering::Relaxed);
            counter.store(old + 1, Ordering::Relaxed);
        };
        std::thread::scope(|scope| {
            for index in 0..3 {
                let (ticket, queue, places, counters) = (&ticket, &queue, &places, &counters);
                scope.spawn(move || {
                    for _ in 0..300 {
                        ticket.with(|| add(&counters[0]));
                        queue.with(index, |vcpu| &places[vcpu], || add(&counters[1]));
                    }
                });
            }
        });
        assert_eq!(counters[0].load(Ordering::Relaxed), 900);
        assert_eq!(counters[1].load(Ordering::Relaxed), 900);
    }
}
