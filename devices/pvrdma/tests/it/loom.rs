//! The ring and arm protocols under every interleaving that the memory model permits, with the device's own ring code: loom's atomics
//! implement [`dma::Dma`] here.
//!
//! x86 orders more than loom's model. Where the guest relies on that (a plain store, then a plain load), the model's guest has its driver's
//! fence, or the case says so.

use std::collections::BTreeMap;
use std::sync::Arc as Plain;

use dma::access::CopyFault;
use dma::{Alias, AliasError, Dma, DmaFault};
use hca::names::QpHandle;
use hca::provider::{CompletionQueue, Fetched, SendQueue};
use hca::work::{CompletedOperation, Completion, Status};
use loom::sync::atomic::{AtomicU32, Ordering, fence};
use loom::thread;
use pvrdma::abi::doorbells;
use pvrdma::model::{completion_queue, send_queue};
use pvrdma::ring::Indices;

/// Words under test are loom's; the rest of the memory is constant, and writes to it are dropped.
#[derive(Clone)]
struct Memory {
    words: Plain<BTreeMap<u64, AtomicU32>>,
    constant: Plain<BTreeMap<u64, u64>>,
}

impl Memory {
    fn new(words: &[u64], constant: &[(u64, u64)]) -> Self {
        Self {
            words: Plain::new(words.iter().map(|at| (*at, AtomicU32::new(0))).collect()),
            constant: Plain::new(constant.iter().copied().collect()),
        }
    }

    fn word(&self, address: u64) -> &AtomicU32 {
        &self.words[&address]
    }

    fn set(&self, address: u64, value: u32) {
        self.word(address).store(value, Ordering::Relaxed);
    }

    fn fault(address: u64) -> DmaFault {
        DmaFault { address, len: 0 }
    }
}

impl Dma for Memory {
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), DmaFault> {
        for (at, bytes) in (address..).step_by(4).zip(into.chunks_mut(4)) {
            let constant = self.constant.get(&(at & !7)).copied().unwrap_or(0) >> (8 * (at % 8));
            let value = self
                .words
                .get(&at)
                .map_or(u32::try_from(constant & 0xFFFF_FFFF).unwrap(), |word| word.load(Ordering::Relaxed));
            bytes.copy_from_slice(&value.to_le_bytes()[..bytes.len()]);
        }
        Ok(())
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), DmaFault> {
        for (at, bytes) in (address..).step_by(4).zip(from.chunks(4)) {
            if let Some(word) = self.words.get(&at) {
                word.store(u32::from_le_bytes(bytes.try_into().unwrap()), Ordering::Relaxed);
            }
        }
        Ok(())
    }

    fn zero(&self, address: u64, _: u64) -> Result<(), DmaFault> {
        Err(Self::fault(address))
    }

    fn load_u32(&self, address: u64) -> Result<u32, DmaFault> {
        Ok(self.words.get(&address).map_or(0, |word| word.load(Ordering::Acquire)))
    }

    fn store_u32(&self, address: u64, value: u32) -> Result<(), DmaFault> {
        if let Some(word) = self.words.get(&address) {
            word.store(value, Ordering::Release);
        }
        Ok(())
    }

    fn swap_u32(&self, address: u64, value: u32) -> Result<u32, DmaFault> {
        Ok(self.word(address).swap(value, Ordering::SeqCst))
    }

    fn compare_exchange_u64(&self, address: u64, _: u64, _: u64) -> Result<u64, DmaFault> {
        Err(Self::fault(address))
    }

    fn fetch_add_u64(&self, address: u64, _: u64) -> Result<u64, DmaFault> {
        Err(Self::fault(address))
    }

    fn copy_to(&self, from: u64, _: &Self, _: u64, _: u64) -> Result<(), CopyFault> {
        Err(CopyFault::Source(Self::fault(from)))
    }

    fn check(&self, _: u64, _: u64) -> Result<(), DmaFault> {
        Ok(())
    }

    fn alias(&self, _: &[(u64, u64)]) -> Result<Alias, AliasError> {
        Err(AliasError::NotMapped)
    }
}

const STATE: u64 = 0x1000;
const SLOTS: u64 = 0x2000;
const TX_TAIL: u64 = STATE;
const TX_HEAD: u64 = STATE + 4;
const RX_TAIL: u64 = STATE + 8;
const RX_HEAD: u64 = STATE + 12;
/// A UAR page.
const QP_WORD: u64 = 0x9000;
const CQ_WORD: u64 = 0x9004;
/// The notification ring and its interrupt, reduced to a word: the consumer was woken.
const WOKEN: u64 = 0xA000;

fn completion(wr_id: u64) -> Completion {
    Completion {
        wr_id,
        qp: QpHandle(1),
        operation: CompletedOperation::Send,
        status: Status::Success,
        byte_len: 0,
        immediate: None,
        invalidated: None,
        source: None,
        grh: None,
    }
}

fn model(check: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(check);
}

/// A consumer reads completions whole and in order, while the ring wraps and the consumer frees slots.
#[test]
fn completions_are_whole() {
    model(|| {
        let memory = Memory::new(&[RX_TAIL, RX_HEAD, SLOTS, SLOTS + 64], &[]);
        let mut queue = completion_queue(&memory, STATE, &[SLOTS], 2, false).unwrap();
        let device = memory.clone();
        let producer = thread::spawn(move || {
            let mut wr_id = 1;
            for _ in 0..4 {
                if wr_id <= 3 && queue.push(&device, &completion(wr_id)).is_ok() {
                    wr_id += 1;
                    // The first two are published together if the ring has room, as at the end of a turn.
                    if wr_id != 2 {
                        queue.publish(&device).unwrap();
                    }
                }
            }
        });
        let indices = Indices::new(2).unwrap();
        let (mut head, mut expected) = (0, 1);
        for _ in 0..3 {
            let tail = memory.load_u32(RX_TAIL).unwrap();
            if indices.between(tail, head).unwrap() == 0 {
                thread::yield_now();
                continue;
            }
            let slot = SLOTS + 64 * u64::from(indices.slot(head));
            assert_eq!(memory.word(slot).load(Ordering::Relaxed), expected);
            expected += 1;
            head = indices.advance(head, 1);
            memory.store_u32(RX_HEAD, head).unwrap();
        }
        producer.join().unwrap();
    });
}

/// Requests are read whole, and a slot is not read after it was released and filled again.
#[test]
fn requests_are_whole() {
    model(|| {
        let memory = Memory::new(&[TX_TAIL, TX_HEAD, SLOTS], &[(SLOTS + 16, 2)]);
        let mut queue = send_queue(STATE, &[SLOTS], 1, 1).unwrap();
        SendQueue::<Memory>::start(&mut queue, &memory);
        let guest = memory.clone();
        let producer = thread::spawn(move || {
            let mut tail = 0;
            for wr_id in 1..=2 {
                let head = guest.load_u32(TX_HEAD).unwrap();
                if tail == head ^ 1 {
                    return;
                }
                guest.set(SLOTS, wr_id);
                tail = (tail + 1) & 1;
                guest.store_u32(TX_TAIL, tail).unwrap();
            }
        });
        let mut expected = 1;
        for _ in 0..3 {
            match queue.fetch(&memory) {
                Fetched::Request(request) => {
                    assert_eq!(request.wr_id, expected);
                    expected += 1;
                    queue.retire(&memory, 1);
                }
                Fetched::Empty => thread::yield_now(),
                other => panic!("{other:?}"),
            }
        }
        producer.join().unwrap();
    });
}

/// The shared doorbell word. Threads of two processes share it and overwrite each other's values; the device exchanges it and then polls
/// all queues. At the end no request is missed.
#[test]
fn no_request_is_missed() {
    model(|| {
        const OTHER: u64 = 0x3000;
        let memory = Memory::new(&[TX_TAIL, OTHER, QP_WORD], &[(SLOTS + 16, 2)]);
        let threads: Vec<_> = [(TX_TAIL, 1), (OTHER, 2)]
            .into_iter()
            .map(|(tail, handle)| {
                let guest = memory.clone();
                thread::spawn(move || {
                    guest.store_u32(tail, 1).unwrap();
                    // A plain store in the guest. Under x86's total store order, a CPU that loads a store also sees what preceded the
                    // stores that it overwrote. Loom's model guarantees that for exchanges only.
                    guest.word(QP_WORD).swap(doorbells::QP_SEND | handle, Ordering::AcqRel);
                })
            })
            .collect();
        let queue = |state| send_queue(state, &[SLOTS], 2, 1).unwrap();
        let mut queues = [queue(STATE), queue(OTHER)];
        let mut found = [0; 2];
        let mut scan = |device: &Memory| {
            // As in `Device::scan`.
            if device.load_u32(QP_WORD).unwrap() != 0 && device.swap_u32(QP_WORD, 0).unwrap() != 0 {
                for (queue, found) in queues.iter_mut().zip(&mut found) {
                    while let Fetched::Request(_) = queue.fetch(device) {
                        *found += 1;
                    }
                }
            }
        };
        scan(&memory);
        scan(&memory);
        for thread in threads {
            thread.join().unwrap();
        }
        // The daemon scans until the word is 0; the guest does nothing more.
        scan(&memory);
        assert_eq!(found, [1, 1], "a request without anybody looking for it");
        assert_eq!(memory.load_u32(QP_WORD).unwrap(), 0);
    });
}

/// The same when the device leaves the word while it refers to an active queue, and exchanges it once that queue is idle. Scans that the
/// word causes find the doorbells overwritten meanwhile.
#[test]
fn no_request_is_missed_behind_a_word_that_stays() {
    model(|| {
        const OTHER: u64 = 0x3000;
        let memory = Memory::new(&[TX_TAIL, OTHER, QP_WORD], &[(SLOTS + 16, 2)]);
        // The first queue's earlier doorbell is still in the word.
        memory.set(QP_WORD, doorbells::QP_SEND | 1);
        let threads: Vec<_> = [(TX_TAIL, 1), (OTHER, 2)]
            .into_iter()
            .map(|(tail, handle)| {
                let guest = memory.clone();
                thread::spawn(move || {
                    guest.store_u32(tail, 1).unwrap();
                    guest.word(QP_WORD).swap(doorbells::QP_SEND | handle, Ordering::AcqRel);
                })
            })
            .collect();
        let queue = |state| send_queue(state, &[SLOTS], 2, 1).unwrap();
        let mut queues = [queue(STATE), queue(OTHER)];
        let mut found = [0; 2];
        let mut scan = |device: &Memory, first_is_active: bool| {
            let seen = device.load_u32(QP_WORD).unwrap();
            let stays = first_is_active && seen == doorbells::QP_SEND | 1;
            if seen != 0 && (stays || device.swap_u32(QP_WORD, 0).unwrap() != 0) {
                for (queue, found) in queues.iter_mut().zip(&mut found) {
                    while let Fetched::Request(_) = queue.fetch(device) {
                        *found += 1;
                    }
                }
            }
        };
        scan(&memory, true);
        scan(&memory, false);
        for thread in threads {
            thread.join().unwrap();
        }
        scan(&memory, true);
        scan(&memory, false);
        assert_eq!(found, [1, 1], "a request without anybody looking for it");
        assert_eq!(memory.load_u32(QP_WORD).unwrap(), 0);
    });
}

/// The exact arm, delivered asynchronously. The guest arms, polls once more, then sleeps. The device publishes, then checks for an arm; an
/// arm that it receives later makes it compare the indices. No order leaves a sleeper unwoken.
#[test]
fn no_wake_up_is_lost_with_an_arm_that_arrives() {
    model(|| {
        let memory = Memory::new(&[RX_TAIL, RX_HEAD, SLOTS, CQ_WORD, WOKEN], &[]);
        let mut queue = completion_queue(&memory, STATE, &[SLOTS], 4, false).unwrap();
        let guest = memory.clone();
        let consumer = thread::spawn(move || {
            guest.store_u32(CQ_WORD, doorbells::CQ_ARM | 1).unwrap();
            // Between `req_notify_cq` and the poll that follows: an uncached store, then a load.
            fence(Ordering::SeqCst);
            // Whether the guest sleeps.
            guest.load_u32(RX_TAIL).unwrap() == 0
        });
        let mut armed = false;
        let look = |armed: &mut bool, queue: &pvrdma::completion_queue::PvrdmaCompletionQueue| {
            if memory.load_u32(CQ_WORD).unwrap() != 0 && memory.swap_u32(CQ_WORD, 0).unwrap() != 0 {
                *armed = true;
                // The engine compares the indices when an arm arrives.
                if queue.consumer(&memory).is_some_and(|consumer| consumer.unconsumed > 0) {
                    *armed = false;
                    memory.set(WOKEN, 1);
                }
            }
        };
        look(&mut armed, &queue);
        queue.push(&memory, &completion(1)).unwrap();
        queue.publish(&memory).unwrap();
        if armed {
            armed = false;
            memory.set(WOKEN, 1);
        }
        look(&mut armed, &queue);
        let asleep = consumer.join().unwrap();
        // The daemon scans again.
        look(&mut armed, &queue);
        let woken = memory.word(WOKEN).load(Ordering::Relaxed) == 1;
        assert!(!asleep || woken, "asleep with a completion");
    });
}

/// Shared UAR pages: the empty poll overwrites the arm before the device reads it. The engine notifies of completions that lie unconsumed
/// for a while, and never needs the arm.
#[test]
fn no_wake_up_is_lost_with_an_arm_that_does_not_arrive() {
    model(|| {
        let memory = Memory::new(&[RX_TAIL, RX_HEAD, SLOTS, CQ_WORD, WOKEN], &[]);
        let mut queue = completion_queue(&memory, STATE, &[SLOTS], 4, false).unwrap();
        let guest = memory.clone();
        let consumer = thread::spawn(move || {
            guest.store_u32(CQ_WORD, doorbells::CQ_ARM | 1).unwrap();
            guest.store_u32(CQ_WORD, doorbells::CQ_POLL | 1).unwrap();
            fence(Ordering::SeqCst);
            guest.load_u32(RX_TAIL).unwrap() == 0
        });
        let before = queue.consumer(&memory).unwrap().position;
        queue.push(&memory, &completion(1)).unwrap();
        queue.publish(&memory).unwrap();
        let asleep = consumer.join().unwrap();
        // The time has passed: the consumer has not moved, and there is an unconsumed completion.
        let now = queue.consumer(&memory).unwrap();
        let told = now.position == before && now.unconsumed > 0;
        assert!(!asleep || told, "asleep with a completion");
    });
}
