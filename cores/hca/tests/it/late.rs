//! Post-copy: with pages that arrive in any order, guests observe the same as when all memory is present from the beginning.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)] // For tests only.

use crate::common;

use std::collections::BTreeMap;

use common::sge;
use dma::{Dma, HeapMemory};
use hca::MrInfo;
use hca::attributes::{Access, QpKind, QpState};
use hca::engine::EngineConfig;
use hca::names::DeviceId;
use hca::work::{Completion, Status};
use hca_testbed::{Connected, Guest, World, requests};
use proptest::prelude::*;

const PAGE: u64 = 4096;
/// RAM of a guest, bytes.
const SIZE: u64 = 32 * PAGE;

/// A request of the left guest, with memory of both.
#[derive(Debug, Clone, Copy)]
enum Step {
    Send { from: u64, to: u64, length: u32 },
    Write { from: u64, to: u64, length: u32 },
    Read { from: u64, to: u64, length: u32 },
    Add { word: u64, to: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    let place = || 0u64..SIZE - 3 * PAGE;
    // Some cover whole pages, which needn't be present before they are overwritten.
    let aligned = |address: u64, whole: bool| if whole { address & !(PAGE - 1) } else { address };
    let length = prop_oneof![1u32..100, Just(4096u32), Just(8192u32), 1u32..9000];
    (place(), place(), length, any::<bool>(), 0..4u8).prop_map(move |(from, to, length, whole, kind)| {
        let to = aligned(to, whole);
        match kind {
            0 => Step::Send { from, to, length },
            1 => Step::Write { from, to, length },
            2 => Step::Read { from, to, length },
            _ => Step::Add { word: from & !7, to },
        }
    })
}

struct Both {
    world: World,
    left: Guest,
    right: Guest,
    qps: (Connected, Connected),
    mrs: (MrInfo, MrInfo),
}

impl Both {
    fn new(kind: QpKind) -> Self {
        // Small quanta: pages are not present in the middle of messages.
        let config =
            EngineConfig { quantum_bytes: 2048, quantum_alone_bytes: 3000, ..EngineConfig::default() };
        let mut world = World::new(config);
        let memory = |seed: u64| {
            let memory = HeapMemory::new(usize::try_from(SIZE).unwrap());
            let bytes: Vec<u8> = (0..SIZE).map(|at| (at.wrapping_mul(seed) >> 3) as u8).collect();
            memory.write(0, &bytes).unwrap();
            memory
        };
        let (left, right) = (world.guest(memory(0x9E37)), world.guest(memory(0x79B9)));
        let mrs =
            [&left, &right].map(|guest| world.register(guest, 0, SIZE, Access::all() - Access::ZERO_BASED));
        let qps = world.connect(&left, &right, kind);
        Self { world, left, right, qps, mrs: (mrs[0], mrs[1]) }
    }

    fn post(&mut self, number: u64, step: Step) {
        let (own, other) = (self.mrs.0.lkey, self.mrs.1);
        let (left, right) = self.qps.clone();
        let request = match step {
            Step::Send { from, to, length } => {
                self.world.receive(&right, number, &[sge(to, length, other.lkey)]);
                requests::send(number, &[sge(from, length, own)])
            }
            Step::Write { from, to, length } => {
                requests::write(number, to, other.rkey, &[sge(from, length, own)])
            }
            Step::Read { from, to, length } => {
                requests::read(number, from, other.rkey, &[sge(to, length, own)])
            }
            Step::Add { word, to } => {
                requests::fetch_add(number, word, other.rkey, number, &[sge(to, 8, own)])
            }
        };
        self.world.send(&left, request);
    }

    fn result(&self) -> (Vec<u8>, Vec<u8>, Vec<Completion>, Vec<Completion>) {
        let bytes = |guest: &Guest| {
            let mut bytes = vec![0; usize::try_from(SIZE).unwrap()];
            guest.memory.read(0, &mut bytes).unwrap();
            bytes
        };
        let (left, right) = &self.qps;
        (bytes(&self.left), bytes(&self.right), left.completions.drain(), right.completions.drain())
    }
}

/// A guest's memory that arrives page by page.
struct Arriving {
    memory: HeapMemory,
    device: DeviceId,
    pages: BTreeMap<u64, Vec<u8>>,
}

impl Arriving {
    fn begin(world: &mut World, guest: &Guest, missing: impl Iterator<Item = u64>) -> Self {
        let page = |number: u64| {
            let mut bytes = vec![0; PAGE as usize];
            guest.memory.read(number * PAGE, &mut bytes).unwrap();
            (number * PAGE, bytes)
        };
        let pages: BTreeMap<u64, Vec<u8>> = missing.map(page).collect();
        guest.memory.set_missing(pages.keys().copied());
        world.engine.set_late(guest.device, true);
        Self { memory: guest.memory.clone(), device: guest.device, pages }
    }

    fn come(&mut self, world: &mut World, page: u64) {
        let contents = self.pages.remove(&page);
        self.memory.come(page, &contents.unwrap_or_default());
        world.engine.memory_came(self.device);
    }
}

proptest! {
    /// Requests in any order, with not-present pages of either guest or of both. Memory and completions are the same as with all pages
    /// present. No not-present page is read, and only requested pages have to arrive.
    #[test]
    fn late_pages_change_nothing_but_the_time(
        steps in prop::collection::vec(step(), 1..12),
        missing in prop::collection::vec((any::<bool>(), 0..SIZE / PAGE), 0..30),
        order in any::<u64>(),
        write_only in any::<bool>(),
    ) {
        let steps: Vec<Step> = steps.into_iter().map(|step| match step {
            Step::Read { from, to, length } | Step::Send { from, to, length } if write_only => Step::Write { from, to, length },
            step => step,
        }).collect();
        let mut expected = Both::new(QpKind::Rc);
        let mut both = Both::new(QpKind::Rc);
        let numbers = |left: bool| missing.iter().filter(move |(side, _)| *side == left).map(|(_, page)| *page);
        let (left, right) = (both.left.clone(), both.right.clone());
        let mut late = [Arriving::begin(&mut both.world, &left, numbers(true)), Arriving::begin(&mut both.world, &right, numbers(false))];
        for (number, step) in (1..).zip(&steps) {
            expected.post(number, *step);
            both.post(number, *step);
        }
        expected.world.settle();
        let mut dice = order | 1;
        let mut rounds = 0;
        loop {
            both.world.settle();
            rounds += 1;
            prop_assert!(rounds < 2000, "it doesn't end");
            let mut came = false;
            for side in &mut late {
                for page in side.memory.take_asked() {
                    dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    // Some arrive at once, others when they are requested again.
                    if dice >> 62 != 0 {
                        side.come(&mut both.world, page);
                        came = true;
                    } else {
                        both.world.pass(10_000_000);
                        came = true;
                    }
                }
            }
            if !came {
                break;
            }
        }
        prop_assert_eq!(both.world.state(&both.qps.0), QpState::ReadyToSend);
        for side in &mut late {
            for page in side.pages.keys().copied().collect::<Vec<_>>() {
                side.come(&mut both.world, page);
            }
            both.world.engine.memory_came(side.device);
            prop_assert!(!both.world.engine.is_late(side.device));
        }
        let (wanted, got) = (expected.result(), both.result());
        prop_assert_eq!(got.2.len(), steps.len());
        prop_assert!(got.2.iter().all(|done| done.status == Status::Success));
        prop_assert_eq!(&wanted.2, &got.2);
        prop_assert_eq!(&wanted.3, &got.3);
        prop_assert!(wanted.0 == got.0 && wanted.1 == got.1, "memory differs");
    }
}

/// Only the queue pair that needs a not-present page waits. Another one of the same guest continues, and so does the first after a reset.
#[test]
fn nobody_waits_but_who_needs_the_page() {
    let mut both = Both::new(QpKind::Rc);
    let (left, right) = (both.left.clone(), both.right.clone());
    let (second, _) = both.world.connect(&left, &right, QpKind::Rc);
    let mut late = Arriving::begin(&mut both.world, &right, 2..4);
    both.post(1, Step::Write { from: 0, to: 2 * PAGE + 5, length: 10 });
    let (own, other) = (both.mrs.0.lkey, both.mrs.1.rkey);
    both.world.send(&second, requests::write(7, PAGE, other, &[sge(0, 10, own)]));
    both.world.settle();
    assert_eq!(second.completions.drain().len(), 1);
    assert!(both.qps.0.completions.drain().is_empty());
    assert_eq!(both.world.engine.memory_waits(right.device), 1);
    late.come(&mut both.world, 3 * PAGE);
    both.world.settle();
    assert!(both.qps.0.completions.drain().is_empty());
    late.come(&mut both.world, 2 * PAGE);
    both.world.settle();
    assert_eq!(both.qps.0.completions.drain().len(), 1);
    assert!(!both.world.engine.is_late(right.device));
}

/// A queue pair that is destroyed or reset while it waits for a page leaves the waiting list.
#[test]
fn who_is_destroyed_waits_no_more() {
    let mut both = Both::new(QpKind::Rc);
    let (left, right) = (both.left.clone(), both.right.clone());
    let (second, _) = both.world.connect(&left, &right, QpKind::Rc);
    let mut late = Arriving::begin(&mut both.world, &right, 2..4);
    both.post(1, Step::Write { from: 0, to: 2 * PAGE + 5, length: 10 });
    let (own, other) = (both.mrs.0.lkey, both.mrs.1.rkey);
    both.world.send(&second, requests::write(7, 3 * PAGE + 5, other, &[sge(0, 10, own)]));
    both.world.settle();
    assert_eq!(both.world.engine.waiting_for_memory(right.device), 2);
    let first = both.qps.0.clone();
    both.world.engine.destroy_qp(left.device, first.qp.handle).unwrap();
    assert_eq!(both.world.engine.waiting_for_memory(right.device), 1);
    let mut reset = World::<HeapMemory>::attributes(right.gid, second.qp.qpn);
    reset.state = QpState::Reset;
    let mask = hca::attributes::QpAttributeMask::empty();
    both.world.modify(left.device, second.qp.handle, mask, &reset).unwrap();
    assert_eq!(both.world.engine.waiting_for_memory(right.device), 0);
    for page in [2, 3] {
        late.come(&mut both.world, page * PAGE);
    }
    both.world.settle();
    assert!(first.completions.drain().is_empty() && second.completions.drain().is_empty());
}

/// A requester that waits for memory of a guest that vanishes gets the same error as for any vanished peer.
#[test]
fn a_guest_that_vanishes_leaves_nobody_waiting() {
    let mut both = Both::new(QpKind::Rc);
    let right = both.right.clone();
    let _late = Arriving::begin(&mut both.world, &right, 2..3);
    both.post(1, Step::Write { from: 0, to: 2 * PAGE + 5, length: 10 });
    both.world.settle();
    both.world.engine.remove_device(right.device);
    both.world.pass(1_000_000_000);
    let done = both.qps.0.completions.drain();
    assert_eq!(done.iter().map(|done| done.status).collect::<Vec<_>>(), [Status::RetryExceeded]);
}
