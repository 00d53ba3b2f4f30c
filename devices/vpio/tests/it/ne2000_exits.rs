//! Counts the exits per frame of Linux's ne2k-pci under KVM's rules (`docs/reference/vpio.md`). Deferred writes fill a
//! ring of 169 entries. Each exit drains it, and so does the NIC's thread. A repeated read exits once per 1024 bytes.

use crate::support;

use device_models::Access;
use device_models::devices::ne2000::NE2000;
use device_models::reference::ne2000::Ne2000;
use support::ne2000::Driver;
use support::{Ports, address, config, frame, switch};
use vpio::plan::{Zone, late};
use vpio::{Answer, FailurePolicy, GuestId, Monitor, Slots};

const ID: GuestId = GuestId(0);
const DATA: u32 = 0x10;
/// Capacity of KVM's ring in entries.
const PLACES: usize = 169;
/// Bytes of a repeated read per exit.
const BATCH: u32 = 1024;

struct Kvm {
    monitor: Monitor<Ne2000>,
    zones: Vec<Zone>,
    ring: Vec<Access>,
    exits: u32,
    /// Bytes of the current repeated read.
    batched: Option<u32>,
}

impl Kvm {
    fn new(zones: Vec<Zone>) -> Self {
        let mut monitor = Monitor::new(&NE2000, Ne2000::new([0x00, 0xE0, 0x4C, 1, 2, 3]));
        monitor.add(config(0, FailurePolicy::Stop, &[], Slots::default()));
        switch(&mut monitor, ID);
        Self { monitor, zones, ring: Vec::new(), exits: 0, batched: None }
    }

    fn drain(&mut self) {
        for access in std::mem::take(&mut self.ring) {
            assert_eq!(self.monitor.access(ID, access).unwrap(), Answer::Done(0), "{access:?}");
        }
    }

    /// The NIC's thread: deferred writes, the card's work, its causes.
    fn thread(&mut self) {
        self.drain();
        self.monitor.physical().tick();
        self.monitor.interrupt().unwrap();
    }
}

impl Ports for Kvm {
    fn read(&mut self, offset: u32, size: u8) -> u32 {
        // Consecutive words belong to one instruction.
        let before = self.batched.filter(|_| offset == DATA && size == 4);
        let bytes = before.map_or(u32::from(size), |bytes| bytes + u32::from(size));
        self.exits += u32::from(before.is_none() || bytes > BATCH);
        self.batched = (offset == DATA && size == 4).then_some(if bytes > BATCH { 4 } else { bytes });
        self.drain();
        let access = Access { bar: 0, offset, size, write: None };
        let Answer::Done(value) = self.monitor.access(ID, access).unwrap() else { panic!("{access:?}") };
        value
    }

    fn write(&mut self, offset: u32, size: u8, value: u32) {
        self.batched = None;
        let access = Access { bar: 0, offset, size, write: Some(value) };
        let mut zones = self.zones.iter();
        if zones.any(|zone| (zone.offset..zone.offset + zone.length).contains(&offset))
            && self.ring.len() < PLACES
        {
            self.ring.push(access);
            return;
        }
        self.exits += 1;
        self.drain();
        assert_eq!(self.monitor.access(ID, access).unwrap(), Answer::Done(0), "{access:?}");
    }
}

/// Returns the exits per frame sent and per frame received, for frames of `length` bytes that arrive in groups of
/// `group`.
fn exits(zones: Vec<Zone>, length: usize, group: u32) -> (f64, f64) {
    const ROUNDS: u32 = 20;
    let mut kvm = Kvm::new(zones);
    let mut driver = Driver::probe(&mut kvm);
    driver.start(&mut kvm);
    kvm.thread();
    kvm.exits = 0;
    for _ in 0..ROUNDS * group {
        driver.send(&mut kvm, &frame([0xFF; 6], 0x22, length));
        kvm.thread();
        assert!(kvm.monitor.line(ID), "it was sent, and the driver is told");
        let (_, sent, _) = driver.interrupt(&mut kvm);
        assert!(sent);
        kvm.thread();
    }
    let sent = kvm.exits;
    kvm.exits = 0;
    for _ in 0..ROUNDS {
        for _ in 0..group {
            assert!(kvm.monitor.physical().receive(&frame(address(0), 0x11, length)));
        }
        kvm.thread();
        assert!(kvm.monitor.line(ID));
        assert_eq!(driver.interrupt(&mut kvm).0.len(), group as usize);
        kvm.thread();
    }
    let each = |exits: u32| f64::from(exits) / f64::from(ROUNDS * group);
    (each(sent), each(kvm.exits))
}

#[test]
fn frames_cost_few_exits() {
    for (length, group, aim) in [(1514, 1, (8.0, 10.0)), (1514, 8, (8.0, 6.0)), (60, 1, (6.0, 10.0))] {
        let (sent, received) = exits(late(&NE2000, true), length, group);
        let unwatched = exits(late(&NE2000, false), length, group);
        println!(
            "{length} bytes, {group} at a time: {sent:.2} exits to send (aim {}), {received:.2} to receive (aim {}); with a prompt command register {unwatched:.2?}",
            aim.0, aim.1
        );
        assert!(sent <= aim.0 * 1.1 && received <= aim.1 * 1.1, "{sent} {received}");
        assert!(unwatched.0 > sent + 7.0 && unwatched.1 > received + 4.0, "{unwatched:?}");
    }
}
