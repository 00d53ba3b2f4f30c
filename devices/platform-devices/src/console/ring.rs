//! The buffer between vCPUs that write and the console thread.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use telemetry::Counter;

/// Capacity in bytes.
pub(super) const CAPACITY: usize = 64 * 1024;
/// Limit of a vCPU's wait for room, once per stall. After it, output is dropped until the reader reads again.
const LONGEST_WAIT: Duration = Duration::from_millis(250);

/// The policy for a full buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Full {
    /// The vCPU waits a bounded time, then the oldest byte is dropped.
    WaitThenDrop,
    /// The oldest byte is dropped.
    Drop,
    /// Nothing is ever buffered.
    Discard,
}

/// Monotonic counters of one console.
#[derive(Default)]
pub(super) struct Counters {
    pub output: Counter,
    pub dropped: Counter,
    pub input: Counter,
    pub waits: Counter,
    pub wakes: Counter,
    pub clients: Counter,
    pub errors: Counter,
}

/// State that vCPUs and the console thread share.
pub(super) struct Shared {
    full: Full,
    ring: Mutex<Ring>,
    /// Signalled when bytes were removed and a thread waits for room.
    taken: Condvar,
    wake: OwnedFd,
    /// The thread holds input for which the guest had no room.
    input_waits: AtomicBool,
    pub counters: Counters,
}

#[derive(Default)]
struct Ring {
    bytes: VecDeque<u8>,
    /// The thread sleeps until it is woken.
    parked: bool,
    /// Number of threads that wait on `taken`.
    waiters: u32,
    /// A wait for room timed out. Cleared when bytes are removed.
    stalled: bool,
    /// Bytes that the thread has removed but not written.
    in_flight: usize,
    stop: bool,
}

/// The thread's next action.
pub(super) enum Next {
    /// There is output, or more may follow soon.
    Busy,
    /// Nothing to do. `Shared::wake_fd` becomes readable when there is.
    Parked,
    /// The console is being closed.
    Stop,
}

impl Shared {
    pub(super) fn new(full: Full) -> io::Result<Self> {
        Ok(Self {
            full,
            ring: Mutex::new(Ring::default()),
            taken: Condvar::new(),
            wake: super::eventfd()?,
            input_waits: AtomicBool::new(false),
            counters: Counters::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends one byte. Waits at most [`LONGEST_WAIT`], once per stall.
    fn push(&self, byte: u8) {
        self.counters.output.increment();
        if self.full == Full::Discard {
            return;
        }
        let mut ring = self.lock();
        if ring.bytes.len() >= CAPACITY && self.full == Full::WaitThenDrop && !ring.stalled {
            ring = self.wait_for_room(ring);
        }
        if ring.bytes.len() >= CAPACITY {
            ring.bytes.pop_front();
            self.counters.dropped.increment();
        }
        ring.bytes.push_back(byte);
        let parked = std::mem::take(&mut ring.parked);
        drop(ring);
        if parked {
            self.wake();
        }
    }

    fn wait_for_room<'a>(&'a self, mut ring: MutexGuard<'a, Ring>) -> MutexGuard<'a, Ring> {
        self.counters.waits.increment();
        ring.waiters += 1;
        let full = |ring: &mut Ring| ring.bytes.len() >= CAPACITY && !ring.stop;
        let (mut ring, _) =
            self.taken.wait_timeout_while(ring, LONGEST_WAIT, full).unwrap_or_else(PoisonError::into_inner);
        ring.waiters -= 1;
        ring.stalled = ring.bytes.len() >= CAPACITY;
        ring
    }

    fn wake(&self) {
        self.counters.wakes.increment();
        // Fails only after 2^64 writes without a read.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Returns a descriptor that becomes readable when the parked thread must run.
    pub(super) fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Makes [`Shared::wake_fd`] unreadable again.
    pub(super) fn acknowledge_wake(&self) {
        let mut count = [0u8; 8];
        let _ = rustix::io::read(&self.wake, &mut count);
    }

    /// Moves up to `limit` bytes to `target`. They count as buffered until [`Shared::written`].
    pub(super) fn take(&self, target: &mut Vec<u8>, limit: usize) {
        let mut ring = self.lock();
        let count = ring.bytes.len().min(limit);
        target.extend(ring.bytes.drain(..count));
        ring.in_flight += count;
        if count > 0 {
            ring.stalled = false;
        }
        if ring.waiters > 0 {
            self.taken.notify_all();
        }
    }

    /// Notes that `count` of the removed bytes are written or lost.
    pub(super) fn written(&self, count: usize) {
        let mut ring = self.lock();
        ring.in_flight = ring.in_flight.saturating_sub(count);
        if ring.waiters > 0 {
            self.taken.notify_all();
        }
    }

    /// Returns the next action. Parks if `may_park` and there is no output.
    pub(super) fn next(&self, may_park: bool) -> Next {
        let mut ring = self.lock();
        if ring.stop {
            Next::Stop
        } else if ring.bytes.is_empty() && may_park {
            ring.parked = true;
            Next::Parked
        } else {
            Next::Busy
        }
    }

    pub(super) fn stop(&self) {
        let mut ring = self.lock();
        ring.stop = true;
        ring.parked = false;
        self.taken.notify_all();
        drop(ring);
        self.wake();
    }

    pub(super) fn buffered(&self) -> usize {
        let ring = self.lock();
        ring.bytes.len() + ring.in_flight
    }

    pub(super) fn wait_drained(&self, deadline: Instant) -> bool {
        let mut ring = self.lock();
        ring.waiters += 1;
        let limit = deadline.saturating_duration_since(Instant::now());
        let (mut ring, _) = self
            .taken
            .wait_timeout_while(ring, limit, |ring| !ring.bytes.is_empty() || ring.in_flight > 0)
            .unwrap_or_else(PoisonError::into_inner);
        ring.waiters -= 1;
        ring.bytes.is_empty() && ring.in_flight == 0
    }

    /// Requests a notification when the guest has room for input.
    pub(super) fn wait_for_input_room(&self) {
        self.input_waits.store(true, Ordering::SeqCst);
    }

    /// Notes that all input fitted.
    pub(super) fn input_fits(&self) {
        self.input_waits.store(false, Ordering::SeqCst);
    }

    /// Notes that the guest has room.
    pub(super) fn input_wanted(&self) {
        if self.input_waits.swap(false, Ordering::SeqCst) {
            self.wake();
        }
    }
}

/// The guest's end of the buffer, as a writer.
pub(crate) struct Output(Arc<Shared>);

impl Output {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self(shared)
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        bytes.iter().for_each(|&byte| self.0.push(byte));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(shared: &Shared, limit: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        shared.take(&mut bytes, limit);
        bytes
    }

    #[test]
    fn a_reader_that_does_not_read_loses_the_oldest_bytes_and_they_are_counted() {
        let shared = Arc::new(Shared::new(Full::Drop).unwrap());
        let mut output = Output::new(Arc::clone(&shared));
        output.write_all(&[b'a'; CAPACITY]).unwrap();
        output.write_all(b"tail").unwrap();
        assert_eq!(shared.counters.dropped.get(), 4);
        let bytes = taken(&shared, usize::MAX);
        assert_eq!((bytes.len(), &bytes[CAPACITY - 4..]), (CAPACITY, b"tail".as_slice()));
    }

    #[test]
    fn a_vcpu_waits_for_a_full_buffer_once_and_not_for_ever() {
        let shared = Arc::new(Shared::new(Full::WaitThenDrop).unwrap());
        let mut output = Output::new(Arc::clone(&shared));
        output.write_all(&[b'a'; CAPACITY]).unwrap();
        let begin = Instant::now();
        output.write_all(&[b'b'; 1000]).unwrap();
        assert!(begin.elapsed() >= LONGEST_WAIT);
        assert_eq!((shared.counters.waits.get(), shared.counters.dropped.get()), (1, 1000));
        // After bytes are removed, a full buffer is waited for again.
        taken(&shared, 10);
        output.write_all(&[b'c'; 11]).unwrap();
        assert_eq!(shared.counters.waits.get(), 2);
    }

    #[test]
    fn room_ends_a_wait() {
        let shared = Arc::new(Shared::new(Full::WaitThenDrop).unwrap());
        let mut output = Output::new(Arc::clone(&shared));
        output.write_all(&[b'a'; CAPACITY]).unwrap();
        let reader = {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || {
                while shared.counters.waits.get() == 0 {
                    std::thread::yield_now();
                }
                taken(&shared, CAPACITY / 2).len()
            })
        };
        output.write_all(b"b").unwrap();
        assert_eq!(reader.join().unwrap(), CAPACITY / 2);
        assert_eq!(shared.counters.dropped.get(), 0);
    }

    #[test]
    fn only_a_parked_thread_is_woken() {
        let shared = Arc::new(Shared::new(Full::Drop).unwrap());
        let mut output = Output::new(Arc::clone(&shared));
        output.write_all(b"not parked").unwrap();
        assert_eq!(shared.counters.wakes.get(), 0);
        taken(&shared, usize::MAX);
        assert!(matches!(shared.next(true), Next::Parked));
        output.write_all(b"parked").unwrap();
        assert_eq!(shared.counters.wakes.get(), 1);
        assert!(matches!(shared.next(true), Next::Busy));
    }

    #[test]
    fn drained_means_written_and_not_only_taken() {
        let shared = Arc::new(Shared::new(Full::Drop).unwrap());
        Output::new(Arc::clone(&shared)).write_all(b"xyz").unwrap();
        taken(&shared, 2);
        assert_eq!(shared.buffered(), 3);
        assert!(!shared.wait_drained(Instant::now()));
        taken(&shared, 2);
        shared.written(3);
        assert!(shared.wait_drained(Instant::now()));
    }
}
