//! Two locks: a ticket lock, where all wait for one word, and a queue lock, where each waits for its own.
//!
//! Source of the queue lock: Mellor-Crummey and Scott, *Algorithms for Scalable Synchronization on Shared-Memory Multiprocessors* (1991).

use core::hint::spin_loop;
use core::sync::atomic::{AtomicU32, Ordering};

/// First come, first served; all that wait read the same word.
#[derive(Debug, Default)]
pub struct TicketLock {
    next: AtomicU32,
    served: AtomicU32,
}

impl TicketLock {
    /// A lock that nobody has.
    pub const fn new() -> Self {
        Self { next: AtomicU32::new(0), served: AtomicU32::new(0) }
    }

    /// Runs `inside` while nobody else does.
    pub fn with<R>(&self, inside: impl FnOnce() -> R) -> R {
        self.with_ticket(|_| inside())
    }

    /// The same; `inside` is told its place in the order of all who had the lock, from 0 on, modulo 2^32.
    pub fn with_ticket<R>(&self, inside: impl FnOnce(u32) -> R) -> R {
        let ticket = self.next.fetch_add(1, Ordering::Relaxed);
        while self.served.load(Ordering::Acquire) != ticket {
            spin_loop();
        }
        let result = inside(ticket);
        self.served.store(ticket.wrapping_add(1), Ordering::Release);
        result
    }

    /// Whether somebody has asked for the lock since who had this ticket did.
    pub fn asked_after(&self, ticket: u32) -> bool {
        self.next.load(Ordering::Relaxed) != ticket.wrapping_add(1)
    }
}

/// Where one vCPU waits for a queue lock; on a page of its own, as only the one before it writes there.
#[derive(Debug, Default)]
pub struct QueuePlace {
    /// One more than the vCPU that comes next; 0: nobody yet.
    next: AtomicU32,
    waits: AtomicU32,
}

impl QueuePlace {
    /// A place where nobody waits.
    pub const fn new() -> Self {
        Self { next: AtomicU32::new(0), waits: AtomicU32::new(0) }
    }
}

/// First come, first served; each that waits reads a word of its own.
#[derive(Debug, Default)]
pub struct QueueLock {
    /// One more than the vCPU that came last; 0: nobody.
    last: AtomicU32,
}

impl QueueLock {
    /// A lock that nobody has.
    pub const fn new() -> Self {
        Self { last: AtomicU32::new(0) }
    }

    /// Runs `inside` on vCPU `index` while no other vCPU does. `place` gives the place of a vCPU, the same for all.
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
            // Somebody is between taking its turn and saying so.
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

    /// A counter that is read and written apart loses nothing under either lock.
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
