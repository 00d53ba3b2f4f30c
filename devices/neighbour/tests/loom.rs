//! The ring and its sleep protocol in every interleaving and with every value that a load may return in the C11 memory model (loom). The
//! segment's words are loom's atomics. A signal behaves like an eventfd: it stays until it is consumed.

use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::sync::{Arc, Notify};
use loom::thread;
use neighbour::layout::RingPlace;
use neighbour::ring::{Consumer, Producer};
use neighbour::words::Words;

/// The word for the consumer's sleep, then two entries of two words.
const WORDS: usize = 5;
const PLACE: RingPlace = RingPlace { first: 1, sleeps: 0, entries: 2 };
const EPOCH: u32 = 7;

struct Memory([AtomicU64; WORDS]);

impl Memory {
    fn new() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl Words for Memory {
    fn count(&self) -> usize {
        WORDS
    }

    fn load(&self, word: usize) -> u64 {
        self.0[word].load(Ordering::Relaxed)
    }

    fn load_acquire(&self, word: usize) -> u64 {
        self.0[word].load(Ordering::Acquire)
    }

    fn store(&self, word: usize, value: u64) {
        self.0[word].store(value, Ordering::Relaxed);
    }

    fn store_release(&self, word: usize, value: u64) {
        self.0[word].store(value, Ordering::Release);
    }

    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
}

/// No wakeup is lost: a consumer that sleeps whenever it may gets both entries with their contents. (A lost one is a deadlock, which loom
/// reports.)
#[test]
fn a_sleeping_consumer_is_always_woken() {
    loom::model(|| {
        let shared = Arc::new((Memory::new(), Notify::new()));
        let other = Arc::clone(&shared);
        let producer = thread::spawn(move || {
            let (memory, signal) = &*other;
            let mut ring = Producer::<2>::new(PLACE, EPOCH);
            for value in [10, 11] {
                ring.write(memory, 1, |_| [value, 0]);
                if ring.must_signal(memory) {
                    signal.notify();
                }
            }
        });
        let (memory, signal) = &*shared;
        let mut ring = Consumer::<2>::new(PLACE, EPOCH);
        for value in [10, 11] {
            let entry = loop {
                if let Some(entry) = ring.peek(memory, 0) {
                    break entry;
                }
                if ring.arm(memory) {
                    signal.wait();
                }
            };
            assert_eq!(entry[0], value);
            ring.advance(1);
        }
        producer.join().unwrap();
    });
}

/// Entries that are written together become visible together: a consumer that sees the first sees the second with its contents.
#[test]
fn a_list_is_seen_whole() {
    loom::model(|| {
        let shared = Arc::new(Memory::new());
        let other = Arc::clone(&shared);
        let producer = thread::spawn(move || {
            Producer::<2>::new(PLACE, EPOCH).write(&*other, 2, |at| [100 + u64::from(at), 0]);
        });
        let ring = Consumer::<2>::new(PLACE, EPOCH);
        if let Some(first) = ring.peek(&*shared, 0) {
            assert_eq!(first[0], 100);
            assert_eq!(ring.peek(&*shared, 1).map(|entry| entry[0]), Some(101));
        }
        producer.join().unwrap();
    });
}

/// A consumer that sees the first entry of a list sees the second, with any entries of the previous round in the ring.
#[test]
fn a_list_over_an_earlier_round_is_seen_whole() {
    loom::model(|| {
        let shared = Arc::new(Memory::new());
        let mut producer = Producer::<2>::new(PLACE, EPOCH);
        // The previous round.
        producer.write(&*shared, 2, |_| [1, 0]);
        let other = Arc::clone(&shared);
        let writer = thread::spawn(move || producer.write(&*other, 2, |at| [100 + u64::from(at), 0]));
        let mut ring = Consumer::<2>::new(PLACE, EPOCH);
        ring.advance(2);
        if let Some(first) = ring.peek(&*shared, 0) {
            assert_eq!(first[0], 100);
            assert_eq!(ring.peek(&*shared, 1).map(|entry| entry[0]), Some(101));
        }
        writer.join().unwrap();
    });
}

/// A side that is an epoch behind accepts no entry of the next one, whatever words it reads.
#[test]
fn another_epoch_is_never_believed() {
    loom::model(|| {
        let shared = Arc::new(Memory::new());
        let other = Arc::clone(&shared);
        let producer = thread::spawn(move || {
            let mut old = Producer::<2>::new(PLACE, EPOCH);
            old.write(&*other, 1, |_| [1, 0]);
            let mut new = Producer::<2>::new(PLACE, EPOCH + 1);
            new.write(&*other, 1, |_| [2, 0]);
        });
        let ring = Consumer::<2>::new(PLACE, EPOCH + 1);
        if let Some(entry) = ring.peek(&*shared, 0) {
            assert_eq!(entry[0], 2);
        }
        producer.join().unwrap();
    });
}
