//! Measures hand-offs per second between two guests on the reference devices of this process: `cargo run --release -p
//! vpio --example handoff`.
//!
//! A hand-off is freeze, save, reset and restore. It includes the validation and mapping of the incoming guest's
//! memory. The reference devices answer at once, but a physical device takes time for each register access. So the
//! example prints the number of accesses, too.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use device_models::describe::Device;
use device_models::devices::{e1000::E1000, ne2000::NE2000, rtl8139::RTL8139};
use device_models::physical::{Bus, PhysicalDevice};
use device_models::reference::{Card, e1000::E1000Card, ne2000::Ne2000, rtl8139::Rtl8139};
use device_models::{Access, describe};
use vpio::fast_forward::Scratch;
use vpio::{Answer, FailurePolicy, GuestConfig, GuestId, Monitor, MonitorError, Slot, Slots};

const STATION: [u8; 6] = [0, 0xE0, 0x4C, 0, 0, 1];
/// Size in bytes of each region: one region per guest, then the monitor's scratch region.
const BYTES: u32 = 0x10_0000;
const SCRATCH: u32 = 2 * BYTES;

/// Offset, bytes, value.
type Write = (u32, u8, u32);

/// Returns the writes that start a receiver with a ring of 52 pages.
fn ne2000(_: u32) -> Vec<Write> {
    let bytes = [
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
    bytes.into_iter().map(|(value, offset)| (offset, 1, value)).collect()
}

/// Returns the writes that start both engines, with a receive ring of 32 KiB and four transmit buffers.
fn rtl8139(memory: u32) -> Vec<Write> {
    let frames = (0..4).map(|n| (0x20 + 4 * n, 4, memory + 0x1_0000 + 0x800 * n));
    let start = [(0x30, 4, memory), (0x37, 1, 0x0C), (0x44, 4, 0xF78A), (0x40, 4, 0x0300_0680)];
    start.into_iter().chain(frames).collect()
}

/// Returns the writes that start both engines, with rings of 64 descriptors.
fn e1000(memory: u32) -> Vec<Write> {
    let transmit = [(0x3800, memory + 0x2000), (0x3804, 0), (0x3808, 0x400), (0x400, 2)];
    let receive = [(0x2800, memory + 0x1000), (0x2804, 0), (0x2808, 0x400), (0x100, 0x8002), (0x2818, 63)];
    transmit.into_iter().chain(receive).map(|(offset, value)| (offset, 4, value)).collect()
}

/// The memory of both guests and of the monitor.
#[derive(Debug, Clone)]
struct Ram(Arc<Mutex<Vec<u8>>>);

impl Ram {
    /// Allocates the memory and writes receive descriptors for an e1000.
    fn new() -> Self {
        let mut bytes = vec![0; usize::try_from(SCRATCH + BYTES).unwrap_or(0)];
        for memory in [0, BYTES] {
            for at in 0..64 {
                let place = usize::try_from(memory + 0x1000 + 16 * at).unwrap_or(0);
                bytes[place..place + 8]
                    .copy_from_slice(&u64::from(memory + 0x2_0000 + 2048 * at).to_le_bytes());
            }
        }
        Self(Arc::new(Mutex::new(bytes)))
    }

    fn with(&self, address: u64, length: usize, act: impl FnOnce(&mut [u8])) {
        let mut bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = usize::try_from(address).unwrap_or(usize::MAX);
        if let Some(part) = at.checked_add(length).and_then(|end| bytes.get_mut(at..end)) {
            act(part);
        }
    }
}

impl Bus for Ram {
    fn read(&mut self, address: u64, into: &mut [u8]) {
        self.with(address, into.len(), |part| into.copy_from_slice(part));
    }
    fn write(&mut self, address: u64, data: &[u8]) {
        self.with(address, data.len(), |part| part.copy_from_slice(data));
    }
}

impl Scratch for Ram {
    fn device_base(&self) -> u64 {
        SCRATCH.into()
    }
    fn write(&mut self, offset: u64, data: &[u8]) {
        Bus::write(self, u64::from(SCRATCH) + offset, data);
    }
}

fn accesses<P: PhysicalDevice>(monitor: &Monitor<P>) -> u64 {
    (0..2).map(|number| monitor.counters(GuestId(number)).device_accesses).sum()
}

fn measure<P: Card>(
    device: &'static Device,
    make: impl Fn(Ram) -> P,
    start: impl Fn(u32) -> Vec<Write>,
) -> Result<(), MonitorError> {
    for unread in [0usize, 1, 16] {
        let ram = Ram::new();
        let mut monitor = Monitor::new(device, make(ram.clone()));
        monitor.set_scratch(Box::new(ram));
        for number in 0..2u8 {
            let memory = u32::from(number) * BYTES;
            let slot = Slot {
                guest_base: memory.into(),
                length: BYTES.into(),
                device_base: memory.into(),
                writable: true,
            };
            let id = monitor.add(GuestConfig {
                name: format!("guest{number}"),
                address: [2, 0, 0, 0, 0, number],
                permissions: vec![describe::Permission::AnyAddress],
                policy: FailurePolicy::Stop,
                memory: Box::new(Slots(vec![slot])),
            });
            monitor.switch(id, false)?;
            for (offset, size, value) in start(memory) {
                let access = Access { bar: device.bar(), offset, size, write: Some(value) };
                assert_eq!(monitor.access(id, access)?, Answer::Done(0), "{} {offset:X}", device.name);
            }
            for _ in 0..unread {
                assert!(monitor.physical().receive(&[0xFF; 600]), "a frame of 600 bytes is stored");
            }
        }
        let (began, before, mut switches) = (Instant::now(), accesses(&monitor), 0u64);
        while began.elapsed() < Duration::from_secs(2) {
            for number in 0..2 {
                let done = monitor.switch(GuestId(number), false)?;
                assert_eq!(done, vpio::Switched::Done, "{} is reusable", device.name);
                switches += 1;
                // Drops the frames that the card sent to itself to move its pointers, so that they don't accumulate.
                monitor.physical().take_sent();
            }
        }
        let per_second = switches as f64 / began.elapsed().as_secs_f64();
        println!(
            "{}, {unread} unread frames of 600 bytes per guest: {per_second:.0} hand-offs per second, {} device accesses each",
            device.name,
            (accesses(&monitor) - before) / switches
        );
    }
    Ok(())
}

fn main() -> Result<(), MonitorError> {
    measure(&NE2000, |_| Ne2000::new(STATION), ne2000)?;
    measure(&RTL8139, |ram| Rtl8139::new(STATION, ram, true), rtl8139)?;
    measure(&E1000, |ram| E1000Card::new(STATION, ram, true), e1000)
}
