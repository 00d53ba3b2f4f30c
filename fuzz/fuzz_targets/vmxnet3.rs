//! A vmxnet3 device with a hostile driver, in a segment with a neighbour whose driver is Linux's.
//!
//! Checked:
//! - There is no panic, no endless loop and no access beyond the guest's memory, and a turn's work is bounded.
//! - The neighbour never finds a state that is a `BUG_ON` in its driver.
//! - The neighbour's packets complete independently of the hostile driver.

#![no_main]

use std::time::Duration;

use dma::{Dma, HeapMemory};
use libfuzzer_sys::fuzz_target;
use vmxnet3::{MacAddress, PortRules, Segment, SegmentConfig, Vmxnet3, Vmxnet3Config};
use vmxnet3_testbed::{CountedInterrupts, Driver, DriverOptions, TransmitRequest, ethernet};

const HOSTILE: MacAddress = MacAddress([2, 0, 0, 0, 0, 1]);
const TAME: MacAddress = MacAddress([2, 0, 0, 0, 0, 2]);
const PAGE: u64 = 4096;
const STEPS: usize = 48;

#[derive(Debug, arbitrary::Arbitrary)]
enum Step {
    Register {
        bar: u8,
        offset: u16,
        value: u32,
    },
    Command {
        get: bool,
        code: u8,
    },
    /// A word in the shared area, the queue table, the group table, or a ring, each at the start of a page.
    Poke {
        page: u8,
        word: u8,
        value: u32,
    },
    /// A TX descriptor that is mostly valid, and handed over.
    Packet {
        index: u8,
        address: u16,
        len: u16,
        mode: u8,
        header: u16,
        mss: u16,
        eop: bool,
        vlan: Option<u16>,
        frame: u8,
    },
    /// An RX descriptor that is mostly valid.
    Buffer {
        ring: bool,
        index: u8,
        address: u16,
        len: u16,
        body: bool,
        owned: bool,
    },
    /// A frame from the neighbour.
    Neighbour {
        len: u16,
        broadcast: bool,
    },
    Memory(bool),
    Link(bool),
    Save,
    Serve,
}

struct Guest {
    memory: HeapMemory,
    size: usize,
}

impl Guest {
    fn new() -> Self {
        let size = options().memory_needed();
        Self { memory: HeapMemory::new(size), size }
    }
}

fn options() -> DriverOptions {
    DriverOptions { tx_size: 8, rx_sizes: [8, 8], ..DriverOptions::default() }
}

thread_local! {
    static GUESTS: [Guest; 2] = [Guest::new(), Guest::new()];
}

fn device(mac: MacAddress, guest: &Guest) -> Vmxnet3<HeapMemory> {
    guest.memory.zero(0, guest.size as u64).expect("own memory");
    let config = Vmxnet3Config { name: mac.to_string(), mac, link_mbps: 10_000 };
    let mut device = Vmxnet3::new(config, Box::new(CountedInterrupts::default()));
    device.set_memory(Some(guest.memory.clone()));
    device
}

fuzz_target!(|steps: Vec<Step>| {
    GUESTS.with(|guests| run(guests, &steps));
});

fn run([hostile, tame]: &[Guest; 2], steps: &[Step]) {
    let mut segment = Segment::new(SegmentConfig::new("fuzz"));
    let (mut a, mut b) = (device(HOSTILE, hostile), device(TAME, tame));
    let mut template = Driver::new(hostile.memory.clone(), 0, options());
    let mut driver = Driver::new(tame.memory.clone(), 0, options());
    assert_eq!(template.open(&mut a), 0);
    assert_eq!(driver.open(&mut b), 0);
    let [tx, rx0, rx1, ..] = template.rings();
    let mut a = segment.attach_device(a, PortRules::default()).expect("room");
    let b = segment
        .attach_device(b, PortRules { partial_checksums: true, ..PortRules::default() })
        .expect("room");
    let frames = template.end() - 8 * PAGE;
    for step in steps.iter().take(STEPS).chain([&Step::Serve]) {
        let memory = &hostile.memory;
        let nic = segment.device(a).expect("it is plugged in");
        match *step {
            Step::Register { bar, offset, value } => {
                nic.bar_write(bar % 3, u64::from(offset % 0x1004), &value.to_le_bytes());
                nic.bar_read(bar % 3, u64::from(offset), &mut [0; 8]);
            }
            Step::Command { get, code } => {
                let base: u32 = if get { 0xF00D_0000 } else { 0xCAFE_0000 };
                nic.bar_write(1, 0x20, &(base + u32::from(code % 0x18)).to_le_bytes());
            }
            Step::Poke { page, word, value } => {
                let at = u64::from(page % 8) * PAGE + 4 * u64::from(word);
                memory.store_u32(at, value).expect("own memory");
            }
            Step::Packet { index, address, len, mode, header, mss, eop, vlan, frame } => {
                // The start of a plausible frame is at the address.
                let at = frames + u64::from(address % 0x4000);
                let ip: &[u8] = if frame & 1 == 0 {
                    &[8, 0, 0x45, 0, 0, 100, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]
                } else {
                    &[0x86, 0xDD, 0x60, 0, 0, 0, 0, 100, 6, 64]
                };
                let to = [TAME.0, [0xFF; 6], HOSTILE.0, [2, 9, 9, 9, 9, 9]][usize::from(frame >> 1 & 3)];
                let start = [&to[..], &HOSTILE.0, ip].concat();
                memory.write(at, &start).expect("own memory");
                memory.write(at + 46, &[frame]).expect("own memory");
                let descriptor = tx + 16 * u64::from(index % 8);
                memory.write(descriptor, &at.to_le_bytes()).expect("own memory");
                let word2 = u32::from(len & 0x3FFF) | 1 << 14 | u32::from(mss & 0x3FFF) << 18;
                let tag = vlan.map_or(0, |tag| 1 << 15 | u32::from(tag) << 16);
                let word3 =
                    u32::from(header & 0x3FF) | u32::from(mode & 3) << 10 | u32::from(eop) << 12 | tag;
                memory.store_u32(descriptor + 12, word3).expect("own memory");
                memory.store_u32(descriptor + 8, word2).expect("own memory");
                nic.kick();
            }
            Step::Buffer { ring, index, address, len, body, owned } => {
                let descriptor = if ring { rx1 } else { rx0 } + 16 * u64::from(index % 8);
                memory.write(descriptor, &u64::from(address).to_le_bytes()).expect("own memory");
                let word2 = u32::from(len & 0x3FFF) | u32::from(body) << 14 | u32::from(owned) << 31;
                memory.store_u32(descriptor + 8, word2).expect("own memory");
            }
            Step::Neighbour { len, broadcast } => {
                let to = if broadcast { [0xFF; 6] } else { HOSTILE.0 };
                let frame = ethernet(to, TAME.0, &vec![7; usize::from(len % 1500)]);
                let nic = segment.device(b).expect("it is plugged in");
                assert!(driver.send(nic, &frame, &TransmitRequest::default()), "its ring is empty");
                serve(&mut segment);
                assert_eq!(driver.reap(), 1, "the neighbour's packet is gone");
            }
            Step::Memory(there) => nic.set_memory(there.then(|| memory.clone())),
            Step::Link(up) => nic.set_link(up),
            Step::Save => {
                let old = segment.detach(a).expect("it is plugged in");
                let state = old.save();
                let interrupts = Box::new(CountedInterrupts::default());
                let mut new = Vmxnet3::restore(old.config().clone(), interrupts, state.clone())
                    .expect("a state that a device was in");
                assert_eq!(new.save(), state);
                new.set_memory(Some(memory.clone()));
                a = segment.attach_device(new, PortRules::default()).expect("its place is free");
            }
            Step::Serve => serve(&mut segment),
        }
        let nic = segment.device(b).expect("it is plugged in");
        // Asserts Linux's `BUG_ON` conditions.
        driver.receive(nic);
        assert_eq!(driver.status(), [(false, 0); 2]);
    }
}

fn serve(segment: &mut Segment<HeapMemory>) {
    for _ in 0..200 {
        if !segment.serve(Duration::ZERO) {
            return;
        }
    }
    // Even a ring whose entries are all handed over repeatedly would be processed completely.
    panic!("serving doesn't end");
}
