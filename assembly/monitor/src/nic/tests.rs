//! A NIC in mode `virtual` as a driver sees it: registers through the BARs, frames through the tap's end, the line.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use device_models::Access;
use device_models::devices::rtl8139::RTL8139;
use device_models::reference::rtl8139::Rtl8139;
use machine::memory::{Bytes as _, GuestAddress, GuestAddressSpace as _, GuestRam, RamLayout, RamOptions};
use pci::function::PciFunction;
use pci::testing::FakeLine;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use vpio::{FailurePolicy, GuestConfig, Monitor, Slot, Slots};

use super::bus::RamBus;
use super::engine::{Engine, Guarded};
use super::function::NicFunction;
use super::{Back, Wire};
use crate::description::{MacAddress, Nic, NicMode};

const COMMAND: u16 = 4;
const ADDRESS: [u8; 6] = [0x02, 0, 0, 0, 0, 7];

struct Machine {
    function: Arc<NicFunction>,
    ram: GuestRam,
    line: Arc<FakeLine>,
    wire: OwnedFd,
}

/// A machine with one emulated card; the other end of its wire is a socket that keeps messages apart.
fn machine(model: &str) -> Machine {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let (queue, wire) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let layout = RamLayout::new(&[2 << 20]).unwrap();
    let ram =
        GuestRam::allocate(&layout, &RamOptions { name: "nic".into(), ..RamOptions::default() }).unwrap();
    let wish = Nic {
        name: "nic0".to_owned(),
        mode: NicMode::Virtual { model: model.to_owned(), tap: "t".to_owned(), mac: MacAddress(ADDRESS) },
    };
    let back = Back::Wire(Wire { name: "t".to_owned(), queue, _interface: None });
    let function =
        NicFunction::new("nic0", Engine::new(&wish, back, &ram, Arc::new(|_| {})).unwrap()).unwrap();
    let line = FakeLine::new();
    function.attach_intx(line.clone());
    function.start(Arc::new(|| {}), || {}).unwrap();
    Machine { function, ram, line, wire }
}

impl Machine {
    fn write(&self, bar: u8, offset: u64, size: usize, value: u32) {
        self.function.bar_write(bar, offset, &value.to_le_bytes()[..size]);
    }

    fn read(&self, bar: u8, offset: u64, size: usize) -> u32 {
        let mut data = [0; 4];
        self.function.bar_read(bar, offset, &mut data[..size]);
        u32::from_le_bytes(data)
    }

    fn message(&self) -> Option<Vec<u8>> {
        let mut buffer = vec![0; 4096];
        let length = rustix::io::read(&self.wire, &mut buffer).ok()?;
        buffer.truncate(length);
        Some(buffer)
    }

    fn send(&self, frame: &[u8]) {
        let mut message = vec![0; 12];
        message.extend_from_slice(frame);
        rustix::io::write(&self.wire, &message).unwrap();
    }

    fn wait_for_line(&self) {
        let begin = Instant::now();
        while !self.line.asserted() {
            assert!(begin.elapsed() < Duration::from_secs(20), "the line stays down");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Both cards tell the address that the VM gives them, by the way in which Linux's drivers read it.
#[test]
fn cards_have_the_address_that_they_are_given() {
    let rtl = machine("rtl8139");
    assert_eq!((rtl.read(0, 0, 4), rtl.read(1, 4, 2)), (0x0000_0002, 0x0700));
    // 8139too clocks a 93C46: chip select, a start bit, two bits of a command, six of an address, sixteen of an answer.
    let word = |at: u32| {
        rtl.write(0, 0x50, 1, 0x80);
        for bit in (0..9).rev() {
            let data = (0x180 | at) >> bit & 1;
            rtl.write(0, 0x50, 1, 0x88 | data << 1);
            rtl.write(0, 0x50, 1, 0x88 | data << 1 | 4);
        }
        rtl.write(0, 0x50, 1, 0x88);
        let word = (0..16).fold(0, |word, _| {
            rtl.write(0, 0x50, 1, 0x8C);
            let bit = rtl.read(0, 0x50, 1) & 1;
            rtl.write(0, 0x50, 1, 0x88);
            word << 1 | bit
        });
        rtl.write(0, 0x50, 1, 0);
        word
    };
    assert_eq!([word(0), word(7), word(8), word(9)], [0x8129, 0x0002, 0, 0x0700]);

    let ne = machine("ne2000");
    for (offset, value) in [(0x0, 0x21), (0xE, 0x49), (0xA, 32), (0xB, 0), (0x8, 0), (0x9, 0), (0x0, 0x0A)] {
        ne.write(0, offset, 1, value);
    }
    let prom: Vec<u32> = (0..6).map(|_| ne.read(0, 0x10, 1)).collect();
    assert_eq!(prom, [2, 0, 0, 0, 0, 7], "a byte per word, as in word mode");
}

/// A frame goes out of guest memory, one comes into the ring, and the line follows status and mask.
#[test]
fn frames_go_both_ways_and_the_line_follows() {
    let machine = machine("rtl8139");
    machine.function.config_write(COMMAND, &0x0007u16.to_le_bytes());
    let memory = machine.ram.memory().memory();
    let frame: Vec<u8> = (0..100u8).collect();
    memory.write_slice(&frame, GuestAddress(0x1_0000)).unwrap();
    machine.write(1, 0x30, 4, 0x8000);
    machine.write(1, 0x37, 1, 0x0C);
    machine.write(1, 0x44, 4, 0x0000_000F);
    machine.write(1, 0x3C, 2, 0x0005);
    machine.write(1, 0x20, 4, 0x1_0000);
    machine.write(1, 0x10, 4, 100);
    assert_eq!(machine.message().unwrap()[12..], frame, "behind a header of twelve bytes");
    assert!(machine.line.asserted());
    machine.write(1, 0x3E, 2, 0x0004);
    assert!(!machine.line.asserted(), "the cause was acknowledged");

    let mut arriving = ADDRESS.to_vec();
    arriving.extend([9; 30]);
    machine.send(&arriving);
    machine.wait_for_line();
    let mut stored = [0; 40];
    memory.read_slice(&mut stored, GuestAddress(0x8000)).unwrap();
    assert_eq!(u16::from_le_bytes([stored[2], stored[3]]), 64, "padded to 60, and the CRC");
    assert_eq!(stored[4..40], arriving[..36]);
    machine.write(1, 0x3C, 2, 0);
    assert!(!machine.line.asserted(), "masked");
}

/// Without the guest's leave to be a bus master the card touches no memory.
#[test]
fn a_card_without_bus_mastering_sends_nothing_of_memory() {
    let machine = machine("rtl8139");
    machine.ram.memory().memory().write_slice(&[7; 64], GuestAddress(0x1_0000)).unwrap();
    machine.write(1, 0x37, 1, 0x04);
    machine.write(1, 0x20, 4, 0x1_0000);
    machine.write(1, 0x10, 4, 64);
    assert_eq!(machine.message().unwrap()[12..], [0; 64]);
}

/// Frames wait while the machine is paused.
#[test]
fn a_paused_nic_takes_no_frames() {
    let machine = machine("ne2000");
    for (offset, value) in [(0x0, 0x21), (0x1, 0x4C), (0x3, 0x4C), (0x2, 0x80), (0xC, 0x04), (0xF, 0x01)] {
        machine.write(0, offset, 1, value);
    }
    machine.write(0, 0x0, 1, 0x61);
    machine.write(0, 0x7, 1, 0x4D);
    machine.write(0, 0x0, 1, 0x22);
    machine.function.quiesce().unwrap();
    machine.send(&[0xFF; 60]);
    std::thread::sleep(Duration::from_millis(50));
    assert!(!machine.line.asserted());
    machine.function.unquiesce().unwrap();
    machine.wait_for_line();
}

/// A guest whose policy is `stop` ends with the first request that is refused, and is told of once; its device is gone from then on.
#[test]
fn policy_stop_ends_the_guest_once() {
    let memory = machine("rtl8139").ram.memory();
    let card = Rtl8139::new(ADDRESS, RamBus::new(memory), false);
    let mut monitor = Monitor::new(&RTL8139, card);
    let slot = Slot { guest_base: 0, length: 2 << 20, device_base: 0, writable: true };
    let guest = monitor.add(GuestConfig {
        name: "nic0".to_owned(),
        address: ADDRESS,
        permissions: Vec::new(),
        policy: FailurePolicy::Stop,
        memory: Box::new(Slots(vec![slot])),
    });
    monitor.switch(guest, false).unwrap();
    let (sender, told) = std::sync::mpsc::channel();
    let sender = std::sync::Mutex::new(sender);
    let stop = Arc::new(move |why| sender.lock().unwrap().send(why).unwrap());
    let mut guarded = Guarded { monitor: Box::new(monitor), guest, stop: Some(stop), masked: false };
    let mut write = |offset, size, value| {
        guarded.access(Access { bar: 1, offset, size, write: Some(value) }).unwrap();
    };
    write(0x37, 1, 0x04);
    write(0x20, 4, 0x1_0000);
    write(0x10, 4, 100);
    assert!(told.try_recv().is_err(), "what a driver does");
    // The transmitter runs; a frame without an address.
    write(0x14, 4, 100);
    let why = told.try_recv().unwrap();
    assert!(why.contains("TSD1") && why.contains("the frame has no address yet"), "{why}");
    write(0x18, 4, 100);
    assert!(told.try_recv().is_err(), "once");
    let read = Access { bar: 1, offset: 0x37, size: 1, write: None };
    assert_eq!(guarded.access(read).unwrap(), u32::MAX);
}

pci::pci_function_contract!(rtl8139_contract, || machine("rtl8139").function as Arc<dyn PciFunction>);
pci::pci_function_contract!(ne2000_contract, || machine("ne2000").function as Arc<dyn PciFunction>);
