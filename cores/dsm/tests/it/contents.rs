//! Contents of pages: each form of payload reproduces its page, and stores change exactly their bytes.

use dsm::operation::{Change, full_mask};
use dsm::wire::PAGE_SIZE;
use dsm::{Access, Atomic, Operation, Page, Pages, Payload};
use proptest::prelude::*;

struct One(Vec<u8>);

impl Pages for One {
    fn size(&self) -> usize {
        self.0.len()
    }
    fn read(&self, _: Page, into: &mut Vec<u8>) {
        into.clear();
        into.extend_from_slice(&self.0);
    }
    fn write(&mut self, _: Page, offset: usize, bytes: &[u8]) {
        self.0[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
    fn protect(&mut self, _: Page, _: Access) {}
}

fn page() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        Just(vec![0; PAGE_SIZE]),
        any::<[u8; 32]>().prop_map(|some| some.iter().copied().cycle().take(PAGE_SIZE).collect()),
    ]
}

proptest! {
    /// The receiver has the content afterwards, for every form. A difference is used only where it is short.
    #[test]
    fn any_form_gives_the_content(
        base in page(),
        edits in proptest::collection::vec((0..PAGE_SIZE, any::<u8>(), 1usize..80), 0..60),
        known in any::<bool>(),
    ) {
        let mut content = base.clone();
        for (at, byte, len) in edits {
            let end = (at + len).min(PAGE_SIZE);
            content[at..end].fill(byte);
        }
        let payload = Payload::shortest(content.clone(), known.then_some(base.as_slice()));
        let zero = content.iter().all(|byte| *byte == 0);
        prop_assert_eq!(payload == Payload::Zero, zero);
        prop_assert!(payload.wire_len() <= PAGE_SIZE);
        if let Payload::Difference(_) = payload {
            prop_assert!(known && payload.wire_len() < PAGE_SIZE / 2 + 8);
        }
        let mut receiver = One(base);
        prop_assert!(payload.install(0, &mut receiver));
        prop_assert!(receiver.0 == content);
    }

    /// Runs cover exactly the bytes of the mask: stores of two writers to different bytes both stay, in either order.
    #[test]
    fn masked_stores_merge(offset in 0u16..4000, bytes in proptest::collection::vec(any::<u8>(), 1..=64), mask in any::<u64>()) {
        let all = full_mask(bytes.len());
        let change = Change { offset, bytes: bytes.clone(), mask: mask & all };
        let other = Change { offset, bytes: bytes.iter().map(|byte| !byte).collect(), mask: !mask & all };
        let mut results = Vec::new();
        for order in [[&change, &other], [&other, &change]] {
            let mut one = One(vec![7; PAGE_SIZE]);
            for change in order {
                for (at, bytes) in change.runs() {
                    one.write(0, at, bytes);
                }
            }
            results.push(one.0);
        }
        prop_assert!(results[0] == results[1]);
        for (index, byte) in bytes.iter().enumerate() {
            let expected = if mask >> index & 1 == 1 { *byte } else { !byte };
            prop_assert_eq!(results[0][usize::from(offset) + index], expected);
        }
        prop_assert_eq!(results[0].iter().filter(|byte| **byte != 7).count() <= bytes.len(), true);
    }

    /// Atomics compute the same results as the host's CPU.
    #[test]
    fn atomics_compute_as_the_machine_does(old in any::<u64>(), operand in any::<u64>(), equal in any::<bool>(), wide in any::<bool>()) {
        use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
        for kind in Atomic::ALL {
            let expected = if equal { old } else { operand };
            let width = if wide { 8 } else { 4 };
            let operation = Operation::Atomic { offset: 8, width, kind, operand, expected };
            let mut content = vec![0; 64];
            content[8..16].copy_from_slice(&old.to_le_bytes());
            let effect = operation.effect(&content);
            if let Some(change) = &effect.change {
                for (at, bytes) in change.runs() {
                    content[at..at + bytes.len()].copy_from_slice(bytes);
                }
            }
            let now = u64::from_le_bytes(content[8..16].try_into().unwrap());
            let narrow = |value: u64| u32::try_from(value & u64::from(u32::MAX)).unwrap();
            let (value, before) = if wide {
                let cell = AtomicU64::new(old);
                let before = match kind {
                    Atomic::Exchange => cell.swap(operand, SeqCst),
                    Atomic::Add => cell.fetch_add(operand, SeqCst),
                    Atomic::And => cell.fetch_and(operand, SeqCst),
                    Atomic::Or => cell.fetch_or(operand, SeqCst),
                    Atomic::Xor => cell.fetch_xor(operand, SeqCst),
                    Atomic::CompareExchange => cell.compare_exchange(expected, operand, SeqCst, SeqCst).unwrap_or_else(|old| old),
                };
                (cell.into_inner(), before)
            } else {
                let cell = AtomicU32::new(narrow(old));
                let (expected, operand) = (narrow(expected), narrow(operand));
                let before = match kind {
                    Atomic::Exchange => cell.swap(operand, SeqCst),
                    Atomic::Add => cell.fetch_add(operand, SeqCst),
                    Atomic::And => cell.fetch_and(operand, SeqCst),
                    Atomic::Or => cell.fetch_or(operand, SeqCst),
                    Atomic::Xor => cell.fetch_xor(operand, SeqCst),
                    Atomic::CompareExchange => cell.compare_exchange(expected, operand, SeqCst, SeqCst).unwrap_or_else(|old| old),
                };
                (old & !u64::from(u32::MAX) | u64::from(cell.into_inner()), before.into())
            };
            prop_assert_eq!((now, effect.old), (value, before));
        }
    }
}
