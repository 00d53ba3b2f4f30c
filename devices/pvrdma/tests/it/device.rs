//! The function outside of the data path: phases, region, registers, events.

use dma::{Dma, HeapMemory};
use hca::names::{CqHandle, DeviceId, QpHandle, SegmentId};
use hca::provider::Sink;
use hca::work::AsyncEvent;
use pvrdma::abi::commands::{Handle, QueryPort, number};
use pvrdma::abi::pci::{VECTOR_ASYNC, VECTOR_COMPLETION, VECTOR_RESPONSE};
use pvrdma::abi::registers::{self, control};
use pvrdma::abi::shared_region::CAPABILITIES;
use pvrdma::{Config, ConfigError, Phase};
use pvrdma_testbed::{Guest, Host};

const SIZE: usize = 2 << 20;

fn config() -> Config {
    let mut config = Config::new("test", SegmentId(1), [2, 0, 0, 0, 0, 9]);
    config.max_uar = 8;
    config
}

fn guest(host: &mut Host<HeapMemory>) -> Guest<HeapMemory> {
    Guest::new(host, config(), HeapMemory::new(SIZE), SIZE as u64)
}

fn probed() -> (Host<HeapMemory>, Guest<HeapMemory>) {
    let mut host = Host::default();
    let mut guest = guest(&mut host);
    guest.probe(&mut host);
    (host, guest)
}

fn flush(host: &mut Host<HeapMemory>, id: DeviceId) -> Option<u64> {
    let now = host.now;
    host.devices.get_mut(id).unwrap().flush_events(now, &host.lines[&id])
}

const PORT: QueryPort = QueryPort { port: 1, index: 0 };

#[test]
fn capabilities_that_no_driver_could_live_with_are_refused() {
    let mut host = Host::<HeapMemory>::default();
    let mut refused = |change: &dyn Fn(&mut Config)| {
        let mut config = config();
        change(&mut config);
        let made = pvrdma::Device::new(config, HeapMemory::new(4096), &mut host.engine);
        made.is_err_and(|error| !matches!(error, ConfigError::Engine(_)))
    };
    assert!(refused(&|c| c.max_uar = 12));
    assert!(refused(&|c| c.capabilities.max_qp = 32_769));
    assert!(refused(&|c| c.capabilities.gid_table_len = 257));
    assert!(refused(&|c| c.capabilities.max_sge = 17));
    assert!(refused(&|c| c.capabilities.max_cqe = 640));
    assert!(!refused(&|_| ()));
}

#[test]
fn capabilities_are_there_when_the_region_is_described_and_stay_after_reset() {
    let (mut host, mut guest) = probed();
    let caps = guest.capabilities;
    assert_eq!(caps.node_guid.get(), 0x0000_00FF_FE00_0009);
    assert_eq!((caps.max_qp.get(), caps.max_uar.get(), caps.gid_types), (32_768, 8, 2));
    guest.pd(&mut host, 0);
    host.write(guest.id, registers::CONTROL, control::RESET);
    let mut after = [0; 208];
    guest.memory.read(guest.region + CAPABILITIES, &mut after).unwrap();
    assert_eq!(after, zerocopy::IntoBytes::as_bytes(&caps));
    // The device accesses no guest memory, and refuses everything until a new region comes.
    guest.memory.record();
    host.turn([(guest.id, &guest.uar)]);
    assert!(guest.memory.take_record().is_empty());
    assert!(guest.fire(&mut host, number::QUERY_PORT, &PORT).is_err());
    guest.probe(&mut host);
}

#[test]
fn a_new_region_is_an_implicit_reset() {
    let (mut host, mut guest) = probed();
    let pd = guest.pd(&mut host, 0);
    let (_, context) = guest.context(&mut host);
    // After a kexec: no RESET was written.
    guest.probe(&mut host);
    assert!(guest.destroy(&mut host, number::DESTROY_PD, pd).is_err());
    assert!(guest.destroy(&mut host, number::DESTROY_UC, context).is_err());
    guest.pd(&mut host, 0);
}

#[test]
fn what_the_guest_rewrites_in_the_region_has_no_effect() {
    let (mut host, mut guest) = probed();
    guest.memory.write(guest.region, &[0xFF; 280]).unwrap();
    guest.pd(&mut host, 0);
    let _: pvrdma::abi::attributes::Port = guest.command(&mut host, number::QUERY_PORT, &PORT).unwrap();
}

#[test]
fn regions_that_make_no_sense_get_no_capabilities() {
    let mut host = Host::default();
    let mut guest = guest(&mut host);
    // Offset of a field, and a value that makes it invalid.
    let broken: [(u64, u64); 9] = [
        (0, 17),
        (16, SIZE as u64),
        (16, 0x1001),
        (24, u64::MAX - 7),
        (32, 5),
        (40, 0x1008),
        (40, 1 << 40),
        (48, 0),
        (56, u64::MAX),
    ];
    guest.describe(&mut host);
    assert_eq!(host.devices.get(guest.id).unwrap().phase(), Phase::Described);
    for (offset, value) in broken {
        let mut part = [0; 72];
        guest.memory.read(guest.region, &mut part).unwrap();
        let mut bad = part;
        let width = if matches!(offset, 0 | 32 | 48) { 4 } else { 8 };
        let at = usize::try_from(offset).unwrap();
        bad[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
        let region = guest.page();
        guest.memory.write(region, &bad).unwrap();
        host.write(guest.id, registers::DSR_LOW, u32::try_from(region).unwrap());
        host.write(guest.id, registers::DSR_HIGH, 0);
        let mut caps = [0; 208];
        guest.memory.read(region + CAPABILITIES, &mut caps).unwrap();
        assert_eq!(caps, [0; 208], "{offset} {value:#x}");
        host.write(guest.id, registers::CONTROL, control::ACTIVATE);
        assert_ne!(host.read(guest.id, registers::ERROR), 0);
    }
    // Not memory; and all ones.
    for address in [SIZE as u64 - 8, u64::MAX] {
        host.write(guest.id, registers::DSR_LOW, u32::try_from(address & 0xFFFF_FFFF).unwrap());
        host.write(guest.id, registers::DSR_HIGH, u32::try_from(address >> 32).unwrap());
        assert_eq!(host.devices.get(guest.id).unwrap().phase(), Phase::Silent);
    }
    guest.probe(&mut host);
}

#[test]
fn without_bus_mastering_no_memory_is_touched() {
    let (mut host, mut guest) = probed();
    let device = host.devices.get_mut(guest.id).unwrap();
    device.set_bus_master(&mut host.engine, false);
    guest.memory.record();
    host.write(guest.id, registers::REQUEST, 0);
    assert_ne!(host.read(guest.id, registers::ERROR), 0);
    host.devices.async_event(guest.id, AsyncEvent::QpFatal(QpHandle(3)));
    host.turn([(guest.id, &guest.uar)]);
    host.write(guest.id, registers::DSR_HIGH, 0);
    assert!(guest.memory.take_record().is_empty());
    let device = host.devices.get_mut(guest.id).unwrap();
    device.set_bus_master(&mut host.engine, true);
    guest.probe(&mut host);
}

#[test]
fn commands_need_activation_and_must_exist() {
    let mut host = Host::default();
    let mut guest = guest(&mut host);
    guest.describe(&mut host);
    host.write(guest.id, registers::INTERRUPT_MASK, 0);
    assert_eq!(guest.fire(&mut host, number::QUERY_PORT, &PORT), Err(19));
    guest.probe(&mut host);
    for code in [number::RESIZE_CQ, number::COUNT, u32::MAX] {
        assert_eq!(guest.fire(&mut host, code, &PORT), Err(38));
    }
    host.write(guest.id, registers::REQUEST, 1);
    assert_ne!(host.read(guest.id, registers::ERROR), 0);
    host.write(guest.id, registers::CONTROL, 3);
    assert_ne!(host.read(guest.id, registers::ERROR), 0);
    host.write(guest.id, registers::CONTROL, control::UNQUIESCE);
    assert_eq!(host.read(guest.id, registers::ERROR), 0);
    let pkey: [u8; 2] =
        guest.command(&mut host, number::QUERY_PKEY, &QueryPort { port: 1, index: 0 }).unwrap();
    assert_eq!(pkey, [0xFF; 2]);
    assert!(guest.fire(&mut host, number::QUERY_PKEY, &QueryPort { port: 1, index: 1 }).is_err());
    assert!(guest.fire(&mut host, number::QUERY_PORT, &QueryPort { port: 2, index: 0 }).is_err());
    for code in [
        number::DESTROY_PD,
        number::DESTROY_MR,
        number::DESTROY_CQ,
        number::DESTROY_QP,
        number::DESTROY_UC,
        number::DESTROY_SRQ,
        number::QUERY_QP,
        number::QUERY_SRQ,
        number::CREATE_PD,
    ] {
        for handle in [77u32, u32::MAX] {
            assert_eq!(
                guest.fire(&mut host, code, &Handle { handle: handle.into() }),
                Err(2),
                "command {code}"
            );
        }
    }
    assert_ne!(guest.destroy(&mut host, number::DESTROY_UC, 0), Ok(()), "the kernel's context stays");
    // Only MODIFY_QP's response has an error code.
    assert_eq!(guest.modify(&mut host, 5, 1, |to| to.state = 1.into()), Err(1022));
    assert_eq!(guest.modify(&mut host, 5, 1 << 25, |_| ()), Err(1022));
}

/// The port's active MTU is the engine's limit of datagrams.
#[test]
fn the_active_mtu_is_that_of_the_ethernet_function() {
    for (mtu, code, bytes) in
        [(1500, 3, 1024), (9000, 5, 4096), (4192, 5, 4096), (4191, 4, 2048), (1119, 2, 512), (68, 1, 256)]
    {
        let mut host = Host::default();
        let config = Config { mtu, ..config() };
        let mut guest = Guest::new(&mut host, config, HeapMemory::new(SIZE), SIZE as u64);
        guest.probe(&mut host);
        assert_eq!(host.engine.port_mtu(guest.id), Some(bytes));
        let port: pvrdma::abi::attributes::Port =
            guest.command(&mut host, number::QUERY_PORT, &PORT).unwrap();
        assert_eq!((port.active_mtu.get(), port.state.get()), (code, 4), "{mtu}");
    }
}

#[test]
fn a_leaked_contexts_page_is_used_again() {
    let (mut host, mut guest) = probed();
    let first = guest.context_at(&mut host, 3).unwrap();
    let pd = guest.pd(&mut host, first);
    let second = guest.context_at(&mut host, 3).unwrap();
    assert!(guest.destroy(&mut host, number::DESTROY_PD, pd).is_err(), "it went with its context");
    guest.destroy(&mut host, number::DESTROY_UC, second).unwrap();
    assert!(guest.context_at(&mut host, 0).is_err(), "the kernel's page");
    assert!(guest.context_at(&mut host, 8).is_err(), "no such page");
    for page in 1..8 {
        guest.context_at(&mut host, page).unwrap();
    }
}

#[test]
fn event_rings_wrap_where_the_driver_wraps_and_are_signalled_once_per_batch() {
    let (mut host, guest) = probed();
    let id = guest.id;
    for batch in 0..40u32 {
        for i in 0..100 {
            host.devices.async_event(id, AsyncEvent::QpFatal(QpHandle(batch * 100 + i)));
            assert!(host.devices.completion_event(id, CqHandle(batch * 100 + i)));
        }
        // Nothing is visible before it is published.
        assert!(guest.events().is_empty());
        flush(&mut host, id);
        let events = guest.events();
        let expected: Vec<_> = (0..100).map(|i| (1, batch * 100 + i)).collect();
        assert_eq!(events, expected);
        assert_eq!(guest.notifications(), (0..100).map(|i| batch * 100 + i).collect::<Vec<_>>());
        assert_eq!(host.lines[&id].raised(VECTOR_ASYNC), u64::from(batch) + 1);
        assert_eq!(host.lines[&id].raised(VECTOR_COMPLETION), u64::from(batch) + 1);
    }
    flush(&mut host, id);
    assert_eq!(host.lines[&id].raised(VECTOR_COMPLETION), 40, "nothing new, no interrupt");
    assert_eq!(host.lines[&id].raised(VECTOR_RESPONSE), 1, "the probe's");
}

#[test]
fn full_event_rings_lose_nothing_that_is_not_repeated() {
    let (mut host, guest) = probed();
    let id = guest.id;
    // 512 and 1024 slots, although the pages have room for more.
    let taken = (0..2000).take_while(|i| host.devices.completion_event(id, CqHandle(*i))).count();
    assert_eq!(taken, 1024);
    for round in 0..3 {
        for i in 0..700u32 {
            host.devices.async_event(id, AsyncEvent::QpAccessError(QpHandle(i)));
        }
        assert_eq!(host.devices.get(id).unwrap().report().waiting_events, [188, 700, 700][round]);
    }
    flush(&mut host, id);
    assert_eq!(guest.notifications().len(), 1024);
    assert!(host.devices.completion_event(id, CqHandle(5)));
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..4 {
        seen.extend(guest.events());
        flush(&mut host, id);
    }
    assert_eq!(seen.len(), 700);
    assert_eq!(host.devices.get(id).unwrap().report().waiting_events, 0);
    // Many more objects than may wait: their events are dropped and counted, so that memory stays bounded.
    for i in 0..10_000u32 {
        host.devices.async_event(id, AsyncEvent::QpFatal(QpHandle(i)));
    }
    let report = host.devices.get(id).unwrap().report();
    assert_eq!((report.waiting_events, report.dropped_events), (4096, 10_000 - 4096 - 512));
}

#[test]
fn broken_event_rings_do_no_harm() {
    let (mut host, guest) = probed();
    let id = guest.id;
    for head in [0xFFFF_FFFF, 1024, 4096] {
        guest.memory.store_u32(guest.async_ring.0 + 12, head).unwrap();
        guest.memory.store_u32(guest.completion_ring.0 + 12, head | 2048).unwrap();
        for i in 0..3000 {
            host.devices.async_event(id, AsyncEvent::QpFatal(QpHandle(i)));
            host.devices.completion_event(id, CqHandle(i));
        }
        flush(&mut host, id);
    }
    assert!(!host.devices.completion_event(id, CqHandle(1)));
}

#[test]
fn a_guest_that_was_not_listening_is_reminded_and_not_for_ever() {
    let (mut host, guest) = probed();
    let id = guest.id;
    host.devices.async_event(id, AsyncEvent::PortActive);
    let mut due = flush(&mut host, id);
    for round in 0..5u64 {
        assert_eq!(host.lines[&id].raised(VECTOR_ASYNC), round + 1);
        host.now = due.expect("a reminder");
        due = flush(&mut host, id);
    }
    assert_eq!(guest.events(), [(9, 1)]);
    let before = host.lines[&id].raised(VECTOR_ASYNC);
    host.now = due.unwrap();
    assert_eq!(flush(&mut host, id), None);
    assert_eq!(host.lines[&id].raised(VECTOR_ASYNC), before);

    host.devices.async_event(id, AsyncEvent::PortActive);
    let mut due = flush(&mut host, id);
    let mut reminders = 0;
    while let Some(at) = due {
        host.now = at;
        due = flush(&mut host, id);
        reminders += 1;
        assert!(reminders < 50);
    }
}

#[test]
fn masked_interrupts_come_when_unmasked_except_responses() {
    let (mut host, mut guest) = probed();
    let id = guest.id;
    host.write(id, registers::INTERRUPT_MASK, u32::MAX);
    host.devices.async_event(id, AsyncEvent::PortActive);
    flush(&mut host, id);
    assert_eq!(guest.request(&mut host, number::QUERY_PORT, &[1]), 0);
    assert_eq!(host.lines[&id].raised(VECTOR_ASYNC), 0);
    assert_eq!(host.lines[&id].raised(VECTOR_RESPONSE), 1);
    host.write(id, registers::INTERRUPT_MASK, 0);
    assert_eq!(host.lines[&id].raised(VECTOR_ASYNC), 1);
    assert_eq!(host.lines[&id].raised(VECTOR_RESPONSE), 1, "it would complete the next command");
    assert_eq!(host.read(id, registers::INTERRUPT_CAUSE), 1);
    assert_eq!(host.read(id, registers::INTERRUPT_CAUSE), 0);
}

#[test]
fn a_new_process_announces_that_the_device_failed() {
    let (mut old, mut guest) = probed();
    // Some events in the ring from an earlier process, of which the new one has no state.
    for i in 0..700u32 {
        old.devices.async_event(guest.id, AsyncEvent::QpFatal(QpHandle(i)));
        flush(&mut old, guest.id);
        assert_eq!(guest.events(), [(1, i)]);
    }
    let address = old.devices.get(guest.id).unwrap().shared_region().unwrap();
    drop(old);

    let mut host = Host::default();
    guest.id = host.add(config(), guest.memory.clone());
    let device = host.devices.get_mut(guest.id).unwrap();
    device.announce_fatal(&mut host.engine, address, &host.lines[&guest.id]).unwrap();
    assert_eq!(guest.events(), [(8, 1)]);
    assert_eq!(host.lines[&guest.id].raised(VECTOR_ASYNC), 1);
    assert!(guest.fire(&mut host, number::QUERY_PORT, &PORT).is_err());
    host.write(guest.id, registers::CONTROL, control::ACTIVATE);
    assert_ne!(host.read(guest.id, registers::ERROR), 0);
    // The guest loads its driver again.
    host.write(guest.id, registers::CONTROL, control::RESET);
    guest.probe(&mut host);

    // An invalid address is an error, not a crash.
    let device = host.devices.get_mut(guest.id).unwrap();
    for address in [0, 3, SIZE as u64, u64::MAX - 7] {
        assert!(device.announce_fatal(&mut host.engine, address, &host.lines[&guest.id]).is_err());
    }
}

#[test]
fn events_of_a_destroyed_object_dont_reach_its_successor() {
    let (mut host, mut guest) = probed();
    let pd = guest.pd(&mut host, 0);
    let cq = guest.cq(&mut host, (0, 0), 64);
    let qp = guest.qp(&mut host, 0, pd, (&cq, &cq), None, Default::default()).unwrap();
    for i in 1000..1512 {
        host.devices.async_event(guest.id, AsyncEvent::QpFatal(QpHandle(i)));
    }
    host.devices.async_event(guest.id, AsyncEvent::QpFatal(QpHandle(qp.handle)));
    host.devices.async_event(guest.id, AsyncEvent::CqError(CqHandle(cq.handle)));
    assert_eq!(host.devices.get(guest.id).unwrap().report().waiting_events, 2);
    guest.destroy(&mut host, number::DESTROY_QP, qp.handle).unwrap();
    assert_eq!(host.devices.get(guest.id).unwrap().report().waiting_events, 1);
    guest.destroy(&mut host, number::DESTROY_CQ, cq.handle).unwrap();
    assert_eq!(host.devices.get(guest.id).unwrap().report().waiting_events, 0);
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(40))]

    /// Random bytes in the command slot give an error, or a response to that command; never a panic, and the device stays usable.
    #[test]
    fn random_commands(
        commands in proptest::collection::vec((0u32..24, proptest::collection::vec(0u8.., 168), 0u8..4), 1..40),
    ) {
        let (mut host, mut guest) = probed();
        for (code, mut body, small) in commands {
            if small > 0 {
                // Numbers that may be handles, counts, or addresses of pages.
                for word in body.as_chunks_mut::<4>().0 {
                    let value = u32::from_le_bytes(*word);
                    let value = match (small, value % 3) {
                        (1, _) => value % 4,
                        (_, 0) => (value % 0x20_0000) & !0xFFF,
                        (_, 1) => value % 70,
                        _ => 0,
                    };
                    *word = value.to_le_bytes();
                }
            }
            let before = host.lines[&guest.id].raised(VECTOR_RESPONSE);
            let error = guest.request(&mut host, code, &body);
            let interrupts = host.lines[&guest.id].raised(VECTOR_RESPONSE) - before;
            let silent = [3, 5, 8, 12, 14, 15, 16, 18, 20].contains(&code);
            proptest::prop_assert_eq!(interrupts, u64::from(error == 0 && !silent));
            proptest::prop_assert!(code < 21 || error != 0);
        }
        let _: pvrdma::abi::attributes::Port = guest.command(&mut host, number::QUERY_PORT, &PORT).unwrap();
    }
}
