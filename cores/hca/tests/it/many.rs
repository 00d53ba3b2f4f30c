//! Many active queue pairs, whose turns share the stores that publish their work: nothing is published too early, nothing stays
//! unpublished.

use crate::common;

use common::{SIZE, sge};
use dma::HeapMemory;
use hca::EngineConfig;
use hca::attributes::{Access, QpKind};
use hca::names::{CqHandle, DeviceId};
use hca::provider::Sink;
use hca::work::{Arm, AsyncEvent};
use hca_testbed::{Connected, World, requests};

const PAIRS: usize = 20;

/// For each event, whether its completion was visible when it came.
#[derive(Default)]
struct Witness {
    rings: Vec<Connected>,
    events: Vec<bool>,
}

impl Sink for Witness {
    fn completion_event(&mut self, _: DeviceId, cq: CqHandle) -> bool {
        let ring = self.rings.iter().find(|at| at.cq == cq).unwrap();
        self.events.push(ring.completions.waiting() > 0 && ring.completions.hidden() == 0);
        true
    }

    fn async_event(&mut self, _: DeviceId, event: AsyncEvent) {
        panic!("{event:?}");
    }
}

/// Pairs of two guests, with a write of 8 bytes posted at each on the left.
fn writes(armed: bool) -> (World, Vec<Connected>) {
    let mut world = World::new(EngineConfig { many_active: 4, ..EngineConfig::default() });
    let memory = || HeapMemory::new(usize::try_from(SIZE).unwrap());
    let (a, b) = (world.guest(memory()), world.guest(memory()));
    let access = Access::all() - Access::ZERO_BASED;
    let (from, to) = (world.register(&a, 0, SIZE, access), world.register(&b, 0, SIZE, access));
    let lefts: Vec<_> = (0..PAIRS).map(|_| world.connect(&a, &b, QpKind::Rc).0).collect();
    // The transition to RTS makes them active; wait until they are idle.
    world.settle();
    for (number, left) in (0u64..).zip(&lefts) {
        if armed {
            world.engine.arm_cq(a.device, left.cq, Arm::Next, &mut world.events);
        }
        let request = requests::write(number, 0x1000, to.rkey, &[sge(0x2000, 8, from.lkey)]);
        left.sends.post(request);
        world.engine.doorbell_send(a.device, left.qp.handle);
    }
    (world, lefts)
}

/// One poll executes the requests of all, publishes every completion, and releases every slot.
#[test]
fn a_poll_ends_with_everything_shown() {
    let (mut world, lefts) = writes(false);
    world.poll();
    for left in &lefts {
        assert_eq!((left.completions.waiting(), left.completions.hidden()), (1, 0));
        assert_eq!((left.sends.retired(), left.sends.in_flight()), (1, 0));
    }
}

/// An event comes only after its completion is visible.
#[test]
fn an_event_comes_after_what_it_is_about() {
    let (mut world, lefts) = writes(true);
    let mut witness = Witness { rings: lefts, events: Vec::new() };
    for now in 0..100u64 {
        world.engine.poll(1_000_000 + now * 1000, &mut witness);
    }
    assert_eq!(witness.events, [true; PAIRS]);
}

/// A request posted without a doorbell, at a queue pair that has left the active list, is found by the scan that another's doorbell causes.
#[test]
fn a_scan_passes_over_active_ones_and_finds_those_that_are_not() {
    let (mut world, lefts) = writes(false);
    world.settle();
    let quiet = &lefts[PAIRS - 1];
    let _ = quiet.completions.drain();
    let request = requests::send(99, &[]);
    quiet.sends.post(request);
    // Another queue pair is active all the time.
    let busy = lefts[0].clone();
    let context = world.engine.context_of_qp(busy.device, busy.qp.handle).unwrap();
    for number in 0..2000 {
        world.send(&busy, requests::write(number, 0x1000, 0, &[]));
        world.engine.scan_context(busy.device, context);
        world.pass(1000);
        if quiet.sends.waiting() == 0 {
            return;
        }
    }
    panic!("the request was never found");
}
