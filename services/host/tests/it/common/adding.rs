//! Guests that add to each other's words by fetch-and-add without pause: if a count isn't exact, an operation was lost, repeated or
//! reordered.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use host::Daemon;

use super::cluster::{Cluster, guest, wait_to_know};
use super::vm::{Vm, connect};
use super::wait_until;

/// Offsets in a buffer: words for peers' additions, and own results.
const COUNTED: u64 = 64;
const RESULT: u32 = 128;

/// A guest that adds to a word of its peer's, and checks the results.
pub struct Adder {
    /// Address and key of the peer's buffer.
    to: (u64, u32),
    /// Number of operations posted, and complete.
    pub posted: u64,
    pub done: u64,
}

impl Adder {
    pub fn new(to: &Vm) -> Self {
        Self { to: (to.endpoint.buffer.address + COUNTED, to.endpoint.buffer.rkey), posted: 0, done: 0 }
    }

    /// Keeps up to `depth` operations in flight, and consumes completions.
    pub fn work(&mut self, vm: &Vm, depth: u64) {
        while self.posted - self.done < depth {
            let at = RESULT + u32::try_from(self.posted % 16 * 8).unwrap();
            assert!(vm.guest.post_fetch_add(&vm.monitor, &vm.endpoint, self.posted, at, self.to));
            self.posted += 1;
        }
        self.take(vm);
    }

    pub fn take(&mut self, vm: &Vm) {
        while let Some(entry) = vm.guest.poll(&vm.monitor, &vm.endpoint) {
            assert_eq!((entry.wr_id.get(), entry.status.get()), (self.done, 0), "in order, without an error");
            let before = vm.guest.word(&vm.endpoint.buffer, u64::from(RESULT) + self.done % 16 * 8);
            assert_eq!(u64::from(before), self.done, "each operation once");
            self.done += 1;
        }
    }

    pub fn finish(&mut self, vm: &Vm) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.done < self.posted {
            self.take(vm);
            assert!(Instant::now() < deadline, "{} of {} operations end", self.done, self.posted);
        }
    }
}

/// A peer that runs on its own thread.
pub struct Peer {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    thread: JoinHandle<(Vm, Adder)>,
}

impl Peer {
    pub fn start(vm: Vm, mut adder: Adder) -> Self {
        let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, count) = (Arc::clone(&stop), Arc::clone(&done));
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::SeqCst) {
                adder.work(&vm, 8);
                count.store(adder.done, Ordering::SeqCst);
                std::thread::yield_now();
            }
            adder.finish(&vm);
            (vm, adder)
        });
        Self { stop, done, thread }
    }

    /// Waits until more operations are complete.
    pub fn wait_for_more(&self) {
        let before = self.done.load(Ordering::SeqCst);
        wait_until("the peer's operations", || self.done.load(Ordering::SeqCst) > before + 20);
    }

    pub fn end(self) -> (Vm, Adder) {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.join().unwrap()
    }
}

pub fn pair(cluster: &Cluster, one: &Daemon, two: &Daemon) -> (Vm, Vm) {
    pair_at(cluster, [(one, 1), (two, 2)])
}

/// The same, on hosts with these numbers, which may be the same.
pub fn pair_at(cluster: &Cluster, [(one, first), (two, second)]: [(&Daemon, u32); 2]) -> (Vm, Vm) {
    let (a, b) = (guest(one, "a", 1), guest(two, "b", 2));
    cluster.wait_for("a", first);
    cluster.wait_for("b", second);
    wait_to_know(cluster, &[one, two]);
    a.guest.put(&a.endpoint.buffer, COUNTED, &[0; 8]);
    b.guest.put(&b.endpoint.buffer, COUNTED, &[0; 8]);
    connect(&a, &b);
    (a, b)
}

/// Checks that each word was increased as often as its peer has completed additions.
pub fn check(a: &Vm, of_a: &Adder, b: &Vm, of_b: &Adder) {
    let counts = [a, b].map(|vm| u64::from(vm.guest.word(&vm.endpoint.buffer, COUNTED)));
    assert_eq!(counts, [of_b.done, of_a.done]);
}
