//! Disks with threads and many requests in flight: batches, several queues, pauses, resets during I/O.

use std::sync::Arc;

use pci::function::PciFunction;
use pci_testbed::FakeMsi;
use virtio_devices_testbed::PciDriver;

use super::*;
use crate::device::VirtioDevice;
use crate::fixtures::activation;
use crate::transport::VirtioPciFunction;

fn engines() -> Vec<EngineChoice> {
    let mut config = BlockConfig::new("probe", "(memory)");
    config.engine = EngineChoice::Uring;
    match Block::from_file(image(MIB), config) {
        Ok(_) => vec![EngineChoice::Uring, EngineChoice::Synchronous],
        Err(error) => {
            facilities::missing(facilities::Facility::IoUring, error);
            vec![EngineChoice::Synchronous]
        }
    }
}

/// Request `number` of a batch: header, 4 KiB of data, status, each at addresses of its own.
fn push(driver: &mut MockDriver, number: u64, kind: u32, sector: u64) {
    let header = 0x1000 + 64 * number;
    let mut bytes = [0u8; 16];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..].copy_from_slice(&sector.to_le_bytes());
    driver.put(header, &bytes);
    driver.put(header + 32, &[0xAA]);
    let data = DATA + 4096 * number;
    driver.push(&[(header, 16, false), (data, 4096, kind == IN), (header + 32, 1, true)]).unwrap();
}

fn status(driver: &MockDriver, number: u64) -> u8 {
    driver.get(0x1000 + 64 * number + 32, 1)[0]
}

#[test]
fn many_requests_in_flight_complete_each_once() {
    for engine in engines() {
        let mut block = disk(16 * MIB, |config| config.engine = engine);
        let space = memory(&[(0, 8 << 20)]);
        let mut driver = MockDriver::new(&space, 0, 256, 0x8_0000, RINGS);
        let interrupt = MockInterrupt::new();
        block.activate(activation(&space, block.features(), &[&driver], &interrupt)).unwrap();
        for round in 0..20u64 {
            for kind in [OUT, IN] {
                for number in 0..80 {
                    let data = DATA + 4096 * number;
                    let fill = if kind == OUT { (round + number) as u8 } else { 0 };
                    driver.put(data, &vec![fill; 4096]);
                    push(&mut driver, number, kind, 8 * number);
                }
                driver.kick();
                for _ in 0..80 {
                    driver.wait_used();
                }
                assert_eq!(driver.pop_used(), None);
                for number in 0..80 {
                    assert_eq!(status(&driver, number), OK);
                    let data = driver.get(DATA + 4096 * number, 4096);
                    assert!(
                        data.iter().all(|byte| *byte == (round + number) as u8),
                        "{engine:?} {round} {number}"
                    );
                }
            }
        }
        let counters = block.counters();
        assert_eq!((counters.reads_completed.get(), counters.writes_completed.get()), (1600, 1600));
        assert!(interrupt.queues() > 0);
        block.stop().unwrap();
    }
}

#[test]
fn several_queues_work_side_by_side() {
    let mut block = disk(4 * MIB, |config| {
        config.queues = 4;
        config.engine = EngineChoice::Auto;
    });
    assert_eq!(block.queue_sizes(), [256; 4]);
    let space = memory(&[(0, 8 << 20)]);
    let mut drivers: Vec<_> = (0..4u16)
        .map(|index| MockDriver::new(&space, index, 16, 0x8_0000 + u64::from(index) * 0x1_0000, RINGS))
        .collect();
    let interrupt = MockInterrupt::new();
    let list: Vec<_> = drivers.iter().collect();
    block.activate(activation(&space, block.features(), &list, &interrupt)).unwrap();
    for (number, driver) in (0u64..).zip(&mut drivers) {
        driver.put(DATA + 4096 * number, &[number as u8 + 1; 4096]);
        push(driver, number, OUT, 8 * number);
        driver.kick();
    }
    for driver in &mut drivers {
        driver.wait_used();
    }
    for (number, driver) in (0u64..).zip(&mut drivers) {
        // Each queue reads the neighbouring queue's data.
        push(driver, number, IN, 8 * ((number + 1) % 4));
        driver.kick();
        driver.wait_used();
        assert_eq!(driver.get(DATA + 4096 * number, 4096), vec![((number + 1) % 4) as u8 + 1; 4096]);
    }
    let queues = block.stop().unwrap();
    assert_eq!(queues.iter().map(|queue| queue.index).collect::<Vec<_>>(), [0, 1, 2, 3]);
}

/// A stop completes requests in flight, and leaves the rest for the next start.
#[test]
fn stopping_answers_what_was_taken_and_keeps_the_rest() {
    for engine in engines() {
        let mut block = disk(16 * MIB, |config| config.engine = engine);
        let space = memory(&[(0, 8 << 20)]);
        let mut driver = MockDriver::new(&space, 0, 256, 0x8_0000, RINGS);
        let interrupt = MockInterrupt::new();
        let mut queues = vec![active_queue(&driver)];
        let mut sent = 0;
        let mut received = 0;
        let mut stops = 0;
        while received < 1000 {
            let number = sent % 80;
            if sent - received < 80 {
                push(&mut driver, number, OUT, 8 * number);
                driver.kick();
                sent += 1;
            }
            if sent % 16 == 0 || sent - received == 80 {
                let mut start = activation(&space, block.features(), &[], &interrupt);
                start.queues = queues;
                block.activate(start).unwrap();
                // Sometimes before the thread has polled the ring, sometimes during its work, sometimes after.
                std::thread::sleep(std::time::Duration::from_micros(stops % 5 * 200));
                stops += 1;
                queues = block.stop().unwrap();
                assert_eq!(block.counters().in_flight(), 0);
                // Requests in the used ring are complete; no other one was popped.
                use virtio_queue::QueueT;
                assert_eq!(queues[0].queue.next_avail(), queues[0].queue.next_used());
            }
            while driver.pop_used().is_some() {
                received += 1;
            }
        }
        assert_eq!(interrupt.failure(), None);
    }
}

/// The driver resets the device repeatedly with requests in flight. No request writes to guest memory after a reset, and the next driver
/// works.
#[test]
fn resets_in_the_middle_of_io() {
    for engine in engines() {
        let block = disk(16 * MIB, |config| config.engine = engine);
        let space = memory(&[(0, 8 << 20)]);
        let msi = FakeMsi::new();
        let function = VirtioPciFunction::new(Box::new(block), space.clone(), &*msi).unwrap();
        let pci = PciDriver::new(Arc::clone(&function), msi);
        pci.enable_msix();
        for round in 0..60u64 {
            let mut driver = MockDriver::new(&space, 0, 256, 0x8_0000, RINGS);
            driver.put(driver.available_ring(), &[0; 4]);
            driver.put(driver.used_ring(), &[0; 4]);
            assert!(pci.start(u64::MAX, &[&driver]), "round {round}");
            for number in 0..80 {
                push(&mut driver, number, IN, 8 * number);
            }
            pci.notify(0);
            for _ in 0..round % 5 {
                std::thread::yield_now();
            }
            pci.set_status(0);
            assert_eq!(pci.status(), 0);
            driver.put(DATA, &vec![0xC3; 80 * 4096]);
            std::thread::yield_now();
            assert_eq!(driver.get(DATA, 80 * 4096), vec![0xC3; 80 * 4096], "memory changed after a reset");
        }
        assert_eq!(function.inspect()["failure"], serde_json::Value::Null);
        assert_eq!(function.inspect()["device"]["counters"]["in_flight"], 0);
    }
}

/// A hostile ring stops this disk with a reason; the process and other disks continue.
#[test]
fn a_broken_driver_stops_only_its_disk() {
    for engine in engines() {
        let mut block = disk(MIB, |config| config.engine = engine);
        let space = memory(&[(0, 8 << 20)]);
        let mut driver = MockDriver::new(&space, 0, 16, 0x8_0000, RINGS);
        let interrupt = MockInterrupt::new();
        block.activate(activation(&space, block.features(), &[&driver], &interrupt)).unwrap();
        // Valid requests in flight, then a chain without a status byte.
        for number in 0..4 {
            push(&mut driver, number, IN, 0);
        }
        driver.push(&[(0x1000, 16, false)]).unwrap();
        driver.kick();
        let reason = interrupt.wait_failure().unwrap();
        assert!(reason.contains("ends after"), "{reason}");
        assert_eq!(block.stop().unwrap().len(), 1);
        assert_eq!(block.counters().in_flight(), 0);
        // After the reset, the disk works for a new driver.
        block.reset();
        let mut driver = MockDriver::new(&space, 0, 16, 0x9_0000, RINGS);
        block.activate(activation(&space, block.features(), &[&driver], &MockInterrupt::new())).unwrap();
        push(&mut driver, 0, IN, 0);
        driver.kick();
        driver.wait_used();
        assert_eq!(status(&driver, 0), OK);
        block.stop().unwrap();
    }
}
