//! Completions against a model consumer, and against guests that corrupt the ring.

use dma::HeapMemory;
use dma::access::read_array;
use hca::names::{Key, QpHandle, Qpn};
use hca::work::{CompletedOperation, Status};
use proptest::prelude::*;
use zerocopy::transmute;

use super::*;

fn completion(wr_id: u64) -> Completion {
    Completion {
        wr_id,
        qp: QpHandle(77),
        operation: CompletedOperation::Receive,
        status: Status::Success,
        byte_len: 5,
        immediate: None,
        invalidated: None,
        source: None,
        grh: None,
    }
}

fn ring(memory: &HeapMemory, entries: u32) -> PvrdmaCompletionQueue {
    let count = 1 + (entries * 64).div_ceil(4096);
    memory.write(0x1000, &0x2000u64.to_le_bytes()).unwrap();
    for i in 0..u64::from(count) {
        memory.write(0x2000 + 8 * i, &(0x4000 + i * 0x1000).to_le_bytes()).unwrap();
    }
    PvrdmaCompletionQueue::read(memory, 0x1000, count, entries, true).unwrap()
}

proptest! {
    /// Any interleaving of pushes, publications and consumption. Each published completion arrives once, in order, and nothing else; a full
    /// ring refuses.
    #[test]
    fn delivers_in_order(order in 0u32..8, steps in prop::collection::vec(0u8..3, 1..400)) {
        let memory = HeapMemory::new(0x1_0000);
        let entries = 1 << order;
        let mut queue = ring(&memory, entries);
        let indices = crate::ring::Indices::new(entries).unwrap();
        let (mut pushed, mut published, mut consumed, mut head) = (0u64, 0u64, 0u64, 0u32);
        for step in steps {
            if step == 0 {
                let result = queue.push(&memory, &completion(pushed));
                if pushed - consumed == u64::from(entries) {
                    prop_assert_eq!(result, Err(CompletionQueueFailed::Overrun));
                } else {
                    prop_assert_eq!(result, Ok(()));
                    pushed += 1;
                }
            } else if step == 1 {
                prop_assert_eq!(queue.publish(&memory), Ok(()));
                published = pushed;
            } else if consumed < published {
                let at = 0x5000 + u64::from(indices.slot(head)) * 64;
                let entry: Entry = transmute!(read_array::<64>(&memory, at).unwrap());
                prop_assert_eq!(entry.wr_id.get(), consumed);
                head = indices.advance(head, 1);
                memory.store_u32(0x4000 + 12, head).unwrap();
                consumed += 1;
            }
            let tail = memory.load_u32(0x4000 + 8).unwrap();
            prop_assert_eq!(indices.between(tail, head).map(u64::from), Some(published - consumed));
            let consumer = queue.consumer(&memory).unwrap();
            prop_assert_eq!((consumer.position, u64::from(consumer.unconsumed)), (head, pushed - consumed));
        }
    }

    /// With an invalid consumer index, pushes use the slots known to be free and then fail. Nothing outside the ring is written.
    #[test]
    fn broken_consumers(heads in prop::collection::vec(any::<u32>(), 1..50)) {
        let memory = HeapMemory::new(0x1_0000);
        let mut queue = ring(&memory, 4);
        memory.record();
        for head in heads {
            memory.store_u32(0x400C, head).unwrap();
            for _ in 0..5 {
                let _ = queue.push(&memory, &completion(1));
                let _ = queue.publish(&memory);
                let _ = queue.consumer(&memory);
            }
        }
        for access in memory.take_record() {
            let within = |from: u64, to: u64| access.address >= from && access.address + access.len <= to;
            prop_assert!(within(0x4000, 0x4010) || within(0x5000, 0x5100), "{:?}", access);
        }
    }
}

#[test]
fn entries_have_their_fields_where_the_driver_reads_them() {
    let full = Completion {
        wr_id: 0x0102_0304_0506_0708,
        qp: QpHandle(0x1234),
        operation: CompletedOperation::ReceiveWriteImmediate,
        status: Status::RemoteAccess,
        byte_len: 0xA0B0_C0D0,
        immediate: Some([1, 2, 3, 4]),
        invalidated: None,
        source: Some(Qpn(0x0055_6677)),
        grh: Some(NetworkHeader::Ipv6),
    };
    let kernel: [u8; 64] = transmute!(encode(&full, true));
    let word = |bytes: &[u8; 64], at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
    assert_eq!(kernel[..8], [8, 7, 6, 5, 4, 3, 2, 1]);
    assert_eq!((word(&kernel, 8), word(&kernel, 12)), (0x1234, 0));
    assert_eq!((word(&kernel, 16), word(&kernel, 20), word(&kernel, 24)), (129, 10, 0xA0B0_C0D0));
    assert_eq!(kernel[28..32], [1, 2, 3, 4]);
    assert_eq!((word(&kernel, 32), word(&kernel, 36)), (0x0055_6677, 1 | 2 | 64));
    assert_eq!((kernel[50], kernel[57]), (1, 2));
    let user: [u8; 64] = transmute!(encode(&full, false));
    assert_eq!(word(&user, 36), 3, "a process would take other flags for something else");

    let invalidated = Completion { immediate: None, invalidated: Some(Key(0x8765_4321)), grh: None, ..full };
    let kernel: [u8; 64] = transmute!(encode(&invalidated, true));
    assert_eq!((word(&kernel, 36), word(&kernel, 28)), (4, 0x8765_4321));
    assert_eq!(encode(&invalidated, false).flags.get(), 0);
}

#[test]
fn rings_that_start_broken_are_refused() {
    let memory = HeapMemory::new(0x1_0000);
    drop(ring(&memory, 64));
    memory.store_u32(0x4008, 128).unwrap();
    let refused = PvrdmaCompletionQueue::read(&memory, 0x1000, 2, 64, true);
    assert!(matches!(refused, Err(RingError::State { .. })));
    memory.store_u32(0x4008, 0).unwrap();
    assert!(matches!(
        PvrdmaCompletionQueue::read(&memory, 0x1000, 2, 128, true),
        Err(RingError::TooFewPages { given: 1, needed: 2 })
    ));
    assert!(PvrdmaCompletionQueue::read(&memory, 0x1000, 2, 48, true).is_err());
}
