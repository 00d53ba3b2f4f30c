//! Destruction of contexts and protection domains, in slices.

use dma::HeapMemory;
use hca::attributes::{Access, QpKind};
use hca::names::{ContextHandle, PdHandle, QpHandle};
use hca::saved::{Kind, Name};
use hca::{MrInit, QpInit, SrqInit, VerbsError};
use hca_testbed::{CompletionRing, Guest, ReceiveRing, SendRing, World};

/// Queue pairs, and as many regions and shared receive queues, of a protection domain.
const EACH: u32 = 40;

fn context_with_objects(world: &mut World, guest: &Guest) -> (ContextHandle, [PdHandle; 2], Vec<QpHandle>) {
    let device = guest.device;
    let context = world.engine.create_context(device).unwrap();
    let cq = world.engine.create_cq(device, context, 64, CompletionRing::new(64)).unwrap();
    let mut qps = Vec::new();
    let pds = [(); 2].map(|()| world.engine.create_pd(device, context).unwrap());
    for pd in pds {
        for _ in 0..EACH {
            let srq = SrqInit { max_wr: 4, max_sge: 1, limit: 0 };
            let srq = world.engine.create_srq(device, pd, srq, ReceiveRing::default()).unwrap();
            let init = MrInit { start: 0, length: 4096, access: Access::all().bits(), pages: [0].into() };
            world.engine.register_mr(device, pd, init).unwrap();
            let init = QpInit {
                pd,
                kind: QpKind::Rc,
                send_cq: cq,
                receive_cq: cq,
                srq: Some(srq),
                signal_all: false,
                max_send_wr: 4,
                max_receive_wr: 0,
                max_send_sge: 1,
                max_receive_sge: 1,
            };
            qps.push(world.engine.create_qp(device, init, SendRing::default(), None).unwrap().handle);
        }
    }
    (context, pds, qps)
}

/// Number of a guest's objects beyond those of a fresh one.
fn objects(world: &World, guest: &Guest) -> usize {
    let kinds = [
        Kind::Context,
        Kind::ProtectionDomain,
        Kind::MemoryRegion,
        Kind::CompletionQueue,
        Kind::SharedReceiveQueue,
        Kind::QueuePair,
    ];
    let names = kinds.into_iter().flat_map(|kind| (0..400).map(move |handle| Name { kind, handle }));
    // The kernel's context and the guest's own protection domain.
    names.filter(|name| world.engine.has(guest.device, *name)).count() - 2
}

#[test]
fn each_slice_takes_a_bounded_number_of_objects_and_the_last_one_leaves_nothing() {
    let mut world = World::default();
    let guest = world.guest(HeapMemory::new(4096));
    let (context, _, qps) = context_with_objects(&mut world, &guest);
    let mut left = objects(&world, &guest);
    assert_eq!(left, 1 + 1 + 2 + 3 * 2 * EACH as usize);
    let mut teardown = world.engine.begin_destroy_context(guest.device, context).unwrap();
    let (mut gone, mut slices) = (Vec::new(), 0);
    // Four objects, or as many checks.
    while !world.engine.teardown(&mut teardown, 4 * 33, &mut |qp| gone.push(qp)).unwrap() {
        slices += 1;
        let now = objects(&world, &guest);
        assert!(left - now <= 4, "{left} to {now} in a slice");
        left = now;
        // Others are served meanwhile, and the remaining objects are usable.
        world.settle();
    }
    assert!(slices >= 60, "{slices}");
    assert_eq!(objects(&world, &guest), 0);
    gone.sort_unstable();
    assert_eq!(gone, qps);
    let missing = world.engine.begin_destroy_context(guest.device, context);
    assert!(matches!(missing, Err(VerbsError::NoSuchObject { .. })));
}

/// The number of checks grows with the tables, not with the product of protection domains and tables.
#[test]
fn a_context_with_many_protection_domains_is_gone_after_one_pass_of_each_table() {
    let mut world = World::default();
    let guest = world.guest(HeapMemory::new(4096));
    let context = world.engine.create_context(guest.device).unwrap();
    let count = 2000;
    for _ in 0..count {
        let pd = world.engine.create_pd(guest.device, context).unwrap();
        let init = MrInit { start: 0, length: 4096, access: 0, pages: [0].into() };
        world.engine.register_mr(guest.device, pd, init).unwrap();
    }
    let mut teardown = world.engine.begin_destroy_context(guest.device, context).unwrap();
    // A check and a destruction for each region and protection domain, and the first slots of tables. Passes per protection domain would
    // need 2000 times 2000 checks.
    let steps = 2 * count * 33 + 100;
    assert!(world.engine.teardown(&mut teardown, steps, &mut |_| {}).unwrap());
}

#[test]
fn a_protection_domain_takes_its_own_with_it_and_nothing_else() {
    let mut world = World::default();
    let guest = world.guest(HeapMemory::new(4096));
    let (context, pds, qps) = context_with_objects(&mut world, &guest);
    let before = objects(&world, &guest);
    let mut gone = Vec::new();
    let mut teardown = world.engine.begin_destroy_pd(guest.device, pds[0]).unwrap();
    while !world.engine.teardown(&mut teardown, 100, &mut |qp| gone.push(qp)).unwrap() {}
    gone.sort_unstable();
    assert_eq!(gone, qps[..EACH as usize]);
    assert_eq!(before - objects(&world, &guest), 1 + 3 * EACH as usize);
    world.engine.destroy_context(guest.device, context).unwrap();
    assert_eq!(objects(&world, &guest), 0);
}

/// Scans count positions in a context's list of queue pairs. Any order of destruction must leave the others in the list.
#[test]
fn queue_pairs_go_in_any_order() {
    let mut world = World::default();
    let guest = world.guest(HeapMemory::new(4096));
    let (context, _, mut qps) = context_with_objects(&mut world, &guest);
    let mut dice = 7_u64;
    while !qps.is_empty() {
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let at = usize::try_from(dice >> 40).unwrap() % qps.len();
        world.engine.destroy_qp(guest.device, qps.swap_remove(at)).unwrap();
        world.engine.scan_context(guest.device, context);
        world.settle();
    }
    world.engine.destroy_context(guest.device, context).unwrap();
    assert_eq!(objects(&world, &guest), 0);
}
