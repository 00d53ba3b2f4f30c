//! A hostile guest: frames are dropped, or the device stops with a reason; nothing else happens.

use super::*;
use crate::device::ActiveQueue;
use crate::fixtures::active_queue;
use crate::net::QueuePair;
use crate::net::counters::Counters;
use proptest::prelude::*;

#[test]
fn malformed_frames_are_counted_and_the_next_one_passes() {
    let (mut guest, others) = Guest::paired(1, 0);
    guest.activate();
    // Checksum offload that wasn't negotiated; too short; a header alone.
    guest.send(VnetHeader { flags: 1, ..Default::default() }, &frame(1, 100));
    guest.send(VnetHeader::default(), &frame(1, 13));
    let driver = &mut guest.transmit[0];
    driver.push(&[(BUFFERS, 12, false)]).unwrap();
    driver.push(&[(BUFFERS, 3, false)]).unwrap();
    // A writable buffer in a transmit chain.
    driver.push(&[(BUFFERS, 100, false), (BUFFERS + 100, 100, true)]).unwrap();
    driver.kick();
    for _ in 0..3 {
        driver.wait_used();
    }
    assert_eq!(guest.counter("transmit_errs"), 5);
    guest.send(VnetHeader::default(), &frame(2, 100));
    assert_eq!(other_receive(&others[0]).unwrap().1, frame(2, 100));
    assert_eq!(guest.interrupt.failure(), None);
}

#[test]
fn a_frame_longer_than_ethernet_is_dropped() {
    let (mut guest, _others) = Guest::paired(1, OFFLOADS);
    guest.activate();
    let driver = &mut guest.transmit[0];
    driver.put(BUFFERS, &[0; 12]);
    driver.push(&[(BUFFERS, 12, false), (BUFFERS + 12, 0x40_0000, false)]).unwrap();
    driver.kick();
    driver.wait_used();
    assert_eq!(guest.counter("transmit_errs"), 1);
}

#[test]
fn receive_buffers_that_can_not_be_used_stop_the_device_with_a_reason() {
    for buffers in
        [&[(BUFFERS, 11, true)][..], &[(BUFFERS, 100, false)], &[(BUFFERS, 9, false), (BUFFERS, 99, true)]]
    {
        let (mut guest, _others) = Guest::paired(1, MERGEABLE);
        guest.activate();
        guest.receive[0].push(buffers).unwrap();
        guest.receive[0].kick();
        let reason = guest.interrupt.wait_failure().expect("a failure");
        assert!(reason.starts_with("Queue 0: a receive buffer has"), "{reason}");
        guest.net.stop().unwrap();
    }
}

#[test]
fn a_broken_ring_stops_the_device_and_a_reset_revives_it() {
    let (mut guest, others) = Guest::paired(1, MERGEABLE);
    guest.activate();
    guest.transmit[0].set_available_index(1000);
    guest.transmit[0].kick();
    assert!(guest.interrupt.wait_failure().expect("a failure").contains("the available index moved"));
    guest.net.stop().unwrap();
    guest.net.reset();
    let net = std::mem::replace(&mut guest.net, pair_device(1).0);
    let mut again = Guest::new(net, 1, testbed::RINGS | MERGEABLE);
    again.activate();
    again.send(VnetHeader::default(), &frame(1, 100));
    assert_eq!(other_receive(&others[0]).unwrap().1, frame(1, 100));
}

#[test]
fn rings_outside_memory_fail_the_device_at_its_start() {
    let (mut guest, _others) = Guest::paired(1, MERGEABLE);
    guest.transmit[0] = MockDriver::new(&guest.space, 1, 256, 0xff00_0000, guest.features);
    guest.activate();
    assert!(guest.interrupt.wait_failure().expect("a failure").contains("lies outside guest RAM"));
    assert_eq!(guest.net.stop().unwrap().len(), 2);
}

fn bare_pair(features: u64) -> (QueuePair, MockDriver, MockDriver, OwnedFd, Arc<Counters>) {
    let space = testbed::memory(&[(0, 0x10_0000)]);
    let receive = MockDriver::new(&space, 0, 16, 0x1000, features);
    let transmit = MockDriver::new(&space, 1, 16, 0x8000, features);
    let (backend, mut others) = PairBackend::new(1, u64::MAX).unwrap();
    let channel = backend.channels().unwrap().remove(0);
    let counters = Arc::new(Counters::default());
    let queues: [ActiveQueue; 2] = [active_queue(&receive), active_queue(&transmit)];
    let [r, t] = queues;
    let pair = QueuePair::new(r, t, channel, features, space, Arc::clone(&counters), Arc::default());
    (pair, receive, transmit, others.remove(0), counters)
}

/// Buffers anywhere, even outside of memory.
fn buffer() -> impl Strategy<Value = (u64, u32, bool)> {
    (0u64..0x11_0000, prop_oneof![0u32..40, 0u32..70_000], any::<bool>())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_header_and_length_is_sent_or_counted(
        features: u64, header: [u8; HEADER_LEN], length in 1u32..70_000, split in 1u32..2000
    ) {
        let features = features | testbed::PLAIN;
        let (mut pair, _receive, mut transmit, other, counters) = bare_pair(features);
        pair.check().unwrap();
        let whole = length + 12;
        let split = split.min(whole - 1);
        transmit.put(0x20000, &header);
        transmit.push(&[(0x20000, split, false), (0x20000 + u64::from(split), whole - split, false)]).unwrap();
        pair.transmit().unwrap();
        prop_assert!(transmit.pop_used().is_some());
        let sent = counters.transmit_packets.get();
        prop_assert_eq!(sent + counters.transmit_errs.get() + counters.transmit_drop.get(), 1);
        if sent == 1 {
            let (got, bytes) = other_receive(&other).unwrap();
            prop_assert_eq!(bytes.len(), length as usize);
            prop_assert_eq!(got.sanitize(features, bytes.len()), Ok(got));
        }
    }

    #[test]
    fn any_chains_are_served_or_stop_the_device(
        features: u64,
        receive_chains in prop::collection::vec(prop::collection::vec(buffer(), 1..4), 0..6),
        transmit_chains in prop::collection::vec(prop::collection::vec(buffer(), 1..4), 0..6),
        frames in prop::collection::vec(1usize..66_000, 0..4),
    ) {
        let features = features | testbed::PLAIN;
        let (mut pair, mut receive, mut transmit, other, counters) = bare_pair(features);
        pair.check().unwrap();
        for length in &frames {
            let mut message = vec![0; HEADER_LEN + length];
            message[..2].copy_from_slice(&[0xff, 0xff]);
            let _ = rustix::io::write(&other, &message);
        }
        for chain in &receive_chains {
            receive.push(chain);
        }
        for chain in &transmit_chains {
            transmit.push(chain);
        }
        let interrupt = MockInterrupt::new();
        for _ in 0..3 {
            if pair.transmit().is_err() || pair.receive().is_err() || pair.interrupt(&*interrupt).is_err() {
                break;
            }
        }
        let mut used = 0;
        while receive.pop_used().is_some() {
            used += 1;
        }
        prop_assert!(used >= counters.receive_packets.get());
        pair.into_parts();
    }
}
