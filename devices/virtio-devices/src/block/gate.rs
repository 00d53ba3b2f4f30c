//! Range locks of a disk for `O_DIRECT`, so that a read-modify-write has its blocks exclusively.
//!
//! | held | a shared claim of the same range | an exclusive one |
//! |---|---|---|
//! | shared: an aligned write, a discard, zeroes | is granted | waits |
//! | exclusive: a read-modify-write | waits | waits |
//!
//! A queue's thread that waits holds no ticket and has no request in the kernel, and a thread that ends first waits for its own requests.
//! So every ticket that a thread waits for is released in time, without deadlock.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A range, and whether the claim is exclusive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Claim {
    /// First byte.
    pub begin: u64,
    /// Byte after the last one.
    pub end: u64,
    /// Whether no other claim may overlap it.
    pub exclusive: bool,
}

impl Claim {
    fn conflicts(&self, other: &Self) -> bool {
        (self.exclusive || other.exclusive) && self.begin < other.end && other.begin < self.end
    }
}

/// The range locks of one disk. Usable from any thread.
#[derive(Debug, Default)]
pub(super) struct Gate {
    state: Mutex<State>,
    left: Condvar,
}

#[derive(Debug, Default)]
struct State {
    held: Vec<(u64, Claim)>,
    next: u64,
}

/// A granted claim, until it is dropped.
#[derive(Debug)]
pub(super) struct Ticket {
    gate: Arc<Gate>,
    number: u64,
}

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Grants the claim if nothing conflicts with it.
    pub(super) fn try_enter(self: &Arc<Self>, claim: Claim) -> Option<Ticket> {
        let mut state = self.state();
        if state.held.iter().any(|(_, held)| held.conflicts(&claim)) {
            return None;
        }
        Some(self.admit(&mut state, claim))
    }

    /// Waits until nothing conflicts with the claim, and grants it. The calling thread must hold no ticket.
    pub(super) fn enter(self: &Arc<Self>, claim: Claim) -> Ticket {
        let blocked = |state: &mut State| state.held.iter().any(|(_, held)| held.conflicts(&claim));
        let mut state = self.left.wait_while(self.state(), blocked).unwrap_or_else(PoisonError::into_inner);
        self.admit(&mut state, claim)
    }

    fn admit(self: &Arc<Self>, state: &mut State, claim: Claim) -> Ticket {
        let number = state.next;
        state.next = state.next.wrapping_add(1);
        state.held.push((number, claim));
        Ticket { gate: Arc::clone(self), number }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.gate.state().held.retain(|(number, _)| *number != self.number);
        self.gate.left.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(begin: u64, end: u64, exclusive: bool) -> Claim {
        Claim { begin, end, exclusive }
    }

    #[test]
    fn exclusive_claims_keep_others_from_their_range_only() {
        let gate = Arc::new(Gate::default());
        let shared = gate.try_enter(claim(0, 4096, false)).unwrap();
        let _also = gate.try_enter(claim(0, 512, false)).unwrap();
        assert!(gate.try_enter(claim(4095, 8192, true)).is_none());
        let exclusive = gate.try_enter(claim(4096, 8192, true)).unwrap();
        assert!(gate.try_enter(claim(0, 4097, false)).is_none());
        assert!(gate.try_enter(claim(8191, 8192, true)).is_none());
        let _beside = gate.try_enter(claim(8192, 9000, true)).unwrap();
        drop(exclusive);
        drop(shared);
        assert!(gate.try_enter(claim(4096, 8192, false)).is_some());
    }

    #[test]
    fn whoever_waits_enters_when_the_last_in_the_way_leaves() {
        let gate = Arc::new(Gate::default());
        let first = gate.try_enter(claim(0, 512, false)).unwrap();
        let second = gate.try_enter(claim(512, 1024, false)).unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        let waiting = {
            let gate = Arc::clone(&gate);
            std::thread::spawn(move || {
                let ticket = gate.enter(claim(0, 4096, true));
                sender.send(()).unwrap();
                drop(ticket);
            })
        };
        drop(first);
        assert!(receiver.try_recv().is_err(), "one is still in the way");
        drop(second);
        receiver.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
        waiting.join().unwrap();
        assert!(gate.try_enter(claim(0, 4096, true)).is_some());
    }
}
