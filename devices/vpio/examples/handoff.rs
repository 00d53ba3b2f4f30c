//! Hand-offs per second between two guests on a reference device in this process: `cargo run --release -p vpio --example handoff`.
//!
//! Counted are whole hand-offs: freeze, save, reset, restore. The reference devices answer at once; a physical one takes time for each
//! of the accesses, whose number is printed too.

use std::time::{Duration, Instant};

use device_models::devices::ne2000::NE2000;
use device_models::reference::ne2000::Ne2000;
use device_models::{Access, PhysicalDevice};
use vpio::{Answer, FailurePolicy, GuestConfig, GuestId, Monitor, MonitorError, Slots};

/// A ring of 52 pages, the receiver runs: byte, port.
const START: [(u8, u32); 12] = [
    (0x21, 0x00),
    (0x49, 0x0E),
    (0x4C, 0x01),
    (0x80, 0x02),
    (0x7F, 0x03),
    (0x61, 0x00),
    (0x4C, 0x07),
    (0x21, 0x00),
    (0xFF, 0x07),
    (0x3F, 0x0F),
    (0x22, 0x00),
    (0x04, 0x0C),
];

fn accesses<P: PhysicalDevice>(monitor: &Monitor<P>) -> u64 {
    (0..2).map(|number| monitor.counters(GuestId(number)).device_accesses).sum()
}

fn main() -> Result<(), MonitorError> {
    for unread in [0usize, 1, 16] {
        let mut monitor = Monitor::new(&NE2000, Ne2000::new([0, 0xE0, 0x4C, 0, 0, 1]));
        for number in 0..2u8 {
            let id = monitor.add(GuestConfig {
                name: format!("guest{number}"),
                address: [2, 0, 0, 0, 0, number],
                permissions: Vec::new(),
                policy: FailurePolicy::Stop,
                memory: Box::new(Slots::default()),
            });
            monitor.switch(id, false)?;
            for (value, offset) in START {
                let access = Access { bar: 0, offset, size: 1, write: Some(u32::from(value)) };
                assert_eq!(monitor.access(id, access)?, Answer::Done(0), "port {offset:X}");
            }
            for _ in 0..unread {
                assert!(monitor.physical().receive(&[0xFF; 600]), "a frame of 600 bytes is stored");
            }
        }
        let (began, before, mut switches) = (Instant::now(), accesses(&monitor), 0u64);
        while began.elapsed() < Duration::from_secs(2) {
            for number in 0..2 {
                monitor.switch(GuestId(number), false)?;
                switches += 1;
                monitor.physical().take_log();
            }
        }
        let per_second = switches as f64 / began.elapsed().as_secs_f64();
        println!(
            "ne2000, {unread} unread frames of 600 bytes per guest: {per_second:.0} hand-offs per second, {} device accesses each",
            (accesses(&monitor) - before) / switches
        );
    }
    Ok(())
}
