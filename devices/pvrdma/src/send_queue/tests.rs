//! Send and receive queues against models, and against guests that store any indices.

use dma::HeapMemory;
use hca::attributes::QpKind;
use hca::provider::ReceiveQueue;
use proptest::prelude::*;

use super::*;
use crate::receive_queue::PvrdmaReceiveQueue;

const STATE: u64 = 0x1000;
const SLOTS: [u64; 2] = [0x3000, 0x2000];

fn rules() -> SendRules {
    SendRules { kind: QpKind::Rc, kernel: false, max_sge: 1 }
}

fn send_queue(slots: u32) -> PvrdmaSendQueue {
    PvrdmaSendQueue::new(STATE, &SLOTS, slots, 128, rules()).unwrap()
}

fn slot(index: u32, slots: u32, size: u64) -> u64 {
    let byte = u64::from(index % slots) * size;
    SLOTS[usize::try_from(byte / 4096).unwrap()] + byte % 4096
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Post,
    Fetch,
    Retire(u32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![Just(Step::Post), Just(Step::Fetch), (1u32..4).prop_map(Step::Retire)];
    prop::collection::vec(step, 1..300)
}

proptest! {
    /// Requests are fetched once, in order; slots are released only when they retire.
    #[test]
    fn sends_against_a_model(order in 0u32..7, start in 0u32..128, steps in steps()) {
        let memory = HeapMemory::new(0x4000);
        let slots = 1u32 << order;
        let span = 2 * slots;
        let first = start % span;
        memory.store_u32(STATE, first).unwrap();
        memory.store_u32(STATE + 4, first).unwrap();
        let mut queue = send_queue(slots);
        SendQueue::<HeapMemory>::start(&mut queue, &memory);
        let (mut posted, mut fetched, mut retired) = (0u32, 0u32, 0u32);
        for step in steps {
            match step {
                Step::Post if posted - retired < slots => {
                    let at = slot(first + posted, slots, 128);
                    memory.write(at, &[0; 128]).unwrap();
                    memory.write(at, &posted.to_le_bytes()).unwrap();
                    memory.write(at + 16, &[2]).unwrap();
                    posted += 1;
                    memory.store_u32(STATE, (first + posted) % span).unwrap();
                }
                Step::Post => {}
                Step::Fetch => {
                    prop_assert_eq!(queue.pending(&memory), posted != fetched);
                    match queue.fetch(&memory) {
                        Fetched::Request(request) => {
                            prop_assert_eq!(request.wr_id, u64::from(fetched));
                            fetched += 1;
                        }
                        Fetched::Empty => prop_assert_eq!(posted, fetched),
                        other => prop_assert!(false, "{:?}", other),
                    }
                }
                Step::Retire(count) => {
                    let count = count.min(fetched - retired);
                    queue.retire(&memory, count);
                    retired += count;
                }
            }
            prop_assert_eq!(memory.load_u32(STATE + 4).unwrap(), (first + retired) % span);
        }
    }

    /// With any index from the guest: never more requests than slots without retiring, and no read outside the ring.
    #[test]
    fn hostile_indices(order in 0u32..7, values in prop::collection::vec((any::<u32>(), any::<bool>(), 0u32..200), 1..60)) {
        let memory = HeapMemory::new(0x4000);
        let slots = 1u32 << order;
        let mut queue = send_queue(slots);
        let mut receive = PvrdmaReceiveQueue::new(STATE, &SLOTS, slots, 64, 2).unwrap();
        SendQueue::<HeapMemory>::start(&mut queue, &memory);
        ReceiveQueue::<HeapMemory>::start(&mut receive, &memory);
        memory.record();
        let mut outstanding = 0;
        for (value, near, tries) in values {
            let value = if near { value % (2 * slots + 2) } else { value };
            for word in [0, 8] {
                memory.store_u32(STATE + word, value).unwrap();
            }
            prop_assert!(receive.available(&memory) <= slots);
            for _ in 0..tries {
                match queue.fetch(&memory) {
                    Fetched::Request(_) | Fetched::Malformed { .. } => outstanding += 1,
                    Fetched::Empty | Fetched::Broken => break,
                }
                prop_assert!(outstanding <= slots);
            }
            for _ in 0..tries {
                if matches!(receive.take(&memory), Fetched::Empty | Fetched::Broken) {
                    break;
                }
            }
            if tries % 3 == 0 {
                queue.retire(&memory, outstanding);
                outstanding = 0;
            }
        }
        for access in memory.take_record() {
            let within = |from: u64, to: u64| access.address >= from && access.address + access.len <= to;
            prop_assert!(within(STATE, STATE + 16) || within(0x2000, 0x4000), "{:?}", access);
            prop_assert!(!access.write || access.address < STATE + 16);
        }
    }

    /// Receives are consumed once, in order, and each releases its slot.
    #[test]
    fn receives_against_a_model(order in 0u32..7, steps in prop::collection::vec(any::<bool>(), 1..300)) {
        let memory = HeapMemory::new(0x4000);
        let slots = 1u32 << order;
        let mut queue = PvrdmaReceiveQueue::new(STATE, &SLOTS, slots, 32, 1).unwrap();
        ReceiveQueue::<HeapMemory>::start(&mut queue, &memory);
        let (mut posted, mut taken) = (0u32, 0u32);
        for post in steps {
            if post && posted - taken < slots {
                memory.write(slot(posted, slots, 32), &posted.to_le_bytes()).unwrap();
                posted += 1;
                memory.store_u32(STATE + 8, posted % (2 * slots)).unwrap();
            } else if !post {
                match queue.take(&memory) {
                    Fetched::Request(request) => {
                        prop_assert_eq!(request.wr_id, u64::from(taken));
                        taken += 1;
                    }
                    other => {
                        prop_assert_eq!(other, Fetched::Empty);
                        prop_assert_eq!(posted, taken);
                    }
                }
            }
            prop_assert_eq!(queue.available(&memory), posted - taken);
            prop_assert_eq!(memory.load_u32(STATE + 12).unwrap(), taken % (2 * slots));
        }
    }
}

/// A ring whose memory disappears is a broken ring, not an endless one.
#[test]
fn memory_that_is_gone() {
    let mut queue = send_queue(4);
    let nothing = HeapMemory::new(0x800);
    SendQueue::<HeapMemory>::start(&mut queue, &nothing);
    assert!(queue.pending(&nothing) || queue.fetch(&nothing) == Fetched::Broken);
    assert_eq!(queue.fetch(&nothing), Fetched::Broken);
    let mut receive = PvrdmaReceiveQueue::new(STATE, &SLOTS, 4, 32, 1).unwrap();
    ReceiveQueue::<HeapMemory>::start(&mut receive, &nothing);
    assert_eq!(receive.available(&nothing), 0);
    assert_eq!(receive.take(&nothing), Fetched::Broken);
}
