//! Tests of the entropy device with a mock driver as the guest.

use std::sync::Arc;

use machine::memory::GuestMemorySpace;
use proptest::prelude::*;
use virtio_devices_testbed::{self as testbed, MockDriver, MockInterrupt};

use super::{REQUEST_MAX, Rng};
use crate::device::VirtioDevice;
use crate::fixtures;

const BUFFER: u64 = 0x10_0000;

fn guest() -> (Rng, GuestMemorySpace, MockDriver, Arc<MockInterrupt>) {
    let space = testbed::memory(&[(0, 4 << 20)]);
    let driver = MockDriver::new(&space, 0, 16, 0x1000, testbed::RINGS);
    let interrupt = MockInterrupt::new();
    let mut rng = Rng::new("rng0");
    rng.activate(fixtures::activation(&space, testbed::RINGS, &[&driver], &interrupt)).unwrap();
    (rng, space, driver, interrupt)
}

#[test]
fn a_request_is_filled_over_all_its_buffers() {
    let (mut rng, _space, mut driver, interrupt) = guest();
    driver.push(&[(BUFFER, 100, true), (BUFFER + 0x1000, 5, true)]).unwrap();
    driver.kick();
    assert_eq!(driver.wait_used().1, 105);
    let first = driver.get(BUFFER, 100);
    assert!(first.iter().collect::<std::collections::HashSet<_>>().len() > 20, "not random: {first:?}");
    assert_ne!(driver.get(BUFFER + 0x1000, 5), [0; 5]);
    driver.push(&[(BUFFER, 100, true)]).unwrap();
    driver.kick();
    driver.wait_used();
    assert_ne!(driver.get(BUFFER, 100), first, "each request gets its own bytes");
    rng.stop().unwrap();
    assert!(interrupt.queues() >= 1);
}

#[test]
fn a_request_gets_at_most_its_limit() {
    let (_rng, _space, mut driver, _interrupt) = guest();
    driver.push(&[(BUFFER, 0x10_0000, true)]).unwrap();
    driver.kick();
    assert_eq!(driver.wait_used().1 as usize, REQUEST_MAX);
    assert_eq!(driver.get(BUFFER + REQUEST_MAX as u64, 64), [0; 64]);
}

#[test]
fn a_request_without_a_writable_buffer_gets_nothing_and_harms_nobody() {
    let (rng, _space, mut driver, interrupt) = guest();
    driver.push(&[(BUFFER, 100, false)]).unwrap();
    driver.push(&[(BUFFER, 10, true)]).unwrap();
    driver.kick();
    assert_eq!(driver.wait_used().1, 0);
    assert_eq!(driver.wait_used().1, 10);
    assert_eq!(rng.inspect()["counters"]["errors"], 1);
    assert_eq!(interrupt.failure(), None);
}

#[test]
fn a_broken_ring_stops_the_device_and_a_pause_keeps_its_position() {
    let (mut rng, space, mut driver, interrupt) = guest();
    driver.push(&[(BUFFER, 10, true)]).unwrap();
    driver.kick();
    driver.wait_used();
    let queues = rng.stop().unwrap();
    let features = testbed::RINGS;
    rng.activate(crate::device::Activation { memory: space, features, queues, interrupt: interrupt.clone() })
        .unwrap();
    driver.push(&[(BUFFER, 10, true)]).unwrap();
    driver.kick();
    driver.wait_used();
    driver.set_available_index(900);
    driver.kick();
    assert!(interrupt.wait_failure().expect("a failure").contains("available index"));
    assert_eq!(rng.stop().unwrap().len(), 1);
}

#[test]
fn saved_state_of_another_version_is_refused() {
    let (rng, ..) = guest();
    let mut saved = rng.save().unwrap();
    assert!(Rng::restore("rng0", &saved).is_ok());
    saved.version = 9;
    assert!(Rng::restore("rng0", &saved).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(50))]
    #[test]
    fn any_chain_is_served_or_stops_the_device(
        chain in prop::collection::vec((0u64..0x41_0000, 0u32..100_000, any::<bool>()), 1..6)
    ) {
        let (mut rng, _space, mut driver, interrupt) = guest();
        driver.push(&chain).unwrap();
        driver.kick();
        let start = std::time::Instant::now();
        while driver.pop_used().is_none() && interrupt.failure().is_none() {
            prop_assert!(start.elapsed().as_secs() < 10);
            std::thread::yield_now();
        }
        rng.stop().unwrap();
    }
}
