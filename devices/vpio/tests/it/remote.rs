//! The monitor over QEMU's models of the three cards, in another process. Linux's driver sequences probe, send and
//! receive as on the reference emulations, with a UDP socket as wire. The card reaches mapped memory only. The tests
//! are skipped without qemu-system-x86_64.

use crate::support;

use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use device_models::Access;
use device_models::describe::Device;
use device_models::devices::{e1000::E1000, ne2000::NE2000, rtl8139::RTL8139};
use device_models::physical::{Mapping, PhysicalDevice as _};
use support::memory::{MEMORY, Memory, memory};
use support::{Ports, address, frame};
use vpio::remote::{RamFile, Remote, RemoteError, memory_file};
use vpio::{Answer, FailurePolicy, GuestConfig, GuestId, Monitor, Slot, Slots, Switched};

const QEMU: &str = "qemu-system-x86_64";
const CARD: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
const HANG_LIMIT: Duration = Duration::from_secs(20);

/// Finds QEMU, or reports that the test is skipped.
fn qemu(test: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&path).map(|folder| folder.join(QEMU)).find(|file| file.exists());
    if found.is_none() {
        facilities::missing(
            facilities::Facility::QemuSystem,
            format!("{test} needs Debian's package qemu-system-x86"),
        );
    }
    found
}

/// A card in a process, under a monitor with one guest, and the other end of its wire.
struct Lab {
    monitor: Monitor<Remote>,
    ram: Arc<std::os::fd::OwnedFd>,
    wire: UdpSocket,
}

const GUEST: GuestId = GuestId(0);

/// Starts a card on a wire of its own.
fn card(qemu: &Path, device: &'static Device) -> (Remote, UdpSocket) {
    let wire = UdpSocket::bind("127.0.0.1:0").unwrap();
    wire.set_read_timeout(Some(HANG_LIMIT)).unwrap();
    let (ours, its) = (wire.local_addr().unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
    let its_address = its.local_addr().unwrap();
    drop(its);
    wire.connect(its_address).unwrap();
    let network = format!("socket,udp={ours},localaddr={its_address}");
    (Remote::start(qemu, device, CARD, &network).unwrap(), wire)
}

fn lab(qemu: &Path, device: &'static Device) -> Lab {
    let (mut card, wire) = card(qemu, device);
    let guest = memory(0);
    let length = guest.end - guest.start;
    let ram = Arc::new(memory_file(length).unwrap());
    card.set_ram(vec![RamFile { guest_base: guest.start, length, file: Arc::clone(&ram), offset: 0 }]);
    let mut monitor = Monitor::new(device, card);
    monitor.add(GuestConfig {
        name: "guest".to_owned(),
        address: address(0),
        permissions: Vec::new(),
        policy: FailurePolicy::DeviceError,
        memory: Box::new(Slots(vec![Slot {
            guest_base: guest.start,
            length,
            device_base: guest.start,
            writable: true,
        }])),
    });
    assert_eq!(monitor.switch(GUEST, false).unwrap(), Switched::Done);
    Lab { monitor, ram, wire }
}

impl Ports for Lab {
    fn read(&mut self, offset: u32, size: u8) -> u32 {
        let bar = self.monitor.physical_ref().description().bar();
        let access = Access { bar, offset, size, write: None };
        match self.monitor.access(GUEST, access).unwrap() {
            Answer::Done(value) => value,
            other => panic!("a read at {offset:X} is answered with {other:?}"),
        }
    }
    fn write(&mut self, offset: u32, size: u8, value: u32) {
        let bar = self.monitor.physical_ref().description().bar();
        let access = Access { bar, offset, size, write: Some(value) };
        assert!(matches!(self.monitor.access(GUEST, access).unwrap(), Answer::Done(_)));
    }
}

impl Memory for Lab {
    fn load(&mut self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let read = rustix::io::pread(&self.ram, &mut bytes, address - MEMORY.start).unwrap();
        assert_eq!(read, length);
        bytes
    }
    fn store(&mut self, address: u64, data: &[u8]) {
        assert_eq!(rustix::io::pwrite(&self.ram, data, address - MEMORY.start).unwrap(), data.len());
    }
}

impl Lab {
    /// Waits for the card's line and harvests its causes as a NIC's thread does. Returns the level of the guest's line.
    fn interrupted(&mut self) -> bool {
        let until = Instant::now() + HANG_LIMIT;
        while !self.monitor.physical().interrupt().unwrap() {
            assert!(Instant::now() < until, "no interrupt comes");
            std::thread::sleep(Duration::from_millis(1));
        }
        self.look();
        self.monitor.line(GUEST)
    }

    fn look(&mut self) {
        self.monitor.interrupt().unwrap();
        self.monitor.physical().unmask().unwrap();
    }

    /// Returns the next frame from the card.
    fn sent(&self) -> Vec<u8> {
        let mut bytes = vec![0; 2048];
        let length = self.wire.recv(&mut bytes).unwrap();
        bytes.truncate(length);
        bytes
    }

    /// Checks that no request was refused and no value of the card rejected.
    fn is_content(&self) {
        let counters = self.monitor.counters(GUEST);
        assert_eq!((counters.refused, counters.disbelieved), (0, 0), "{:?}", self.monitor.violations(GUEST));
    }
}

/// Returns marks and lengths of frames.
fn rounds() -> impl Iterator<Item = (u8, usize)> {
    (1u8..=60).zip([60, 61, 64, 1000, 1514].into_iter().cycle())
}

#[test]
fn an_rtl8139_of_qemu_sends_and_receives() {
    let Some(qemu) = qemu("an_rtl8139_of_qemu_sends_and_receives") else { return };
    let mut lab = lab(&qemu, &RTL8139);
    let mut driver = support::rtl8139::Driver::probe(&mut lab, 0);
    assert_eq!(driver.address, address(0), "the virtual EEPROM's");
    driver.start(&mut lab);
    for (mark, length) in rounds() {
        let out = frame([0xFF; 6], mark, length);
        driver.send(&mut lab, &out);
        assert_eq!(lab.sent(), out);
        lab.wire.send(&frame(address(0), mark, length)).unwrap();
        let (mut frames, mut done) = (Vec::new(), 0);
        let until = Instant::now() + HANG_LIMIT;
        while frames.is_empty() || done == 0 {
            assert!(Instant::now() < until, "{frames:?}, {done} sent");
            lab.look();
            let (more, sent, error) = driver.interrupt(&mut lab);
            assert!(!error);
            frames.extend(more);
            done += sent;
        }
        assert_eq!((frames, done), (vec![frame(address(0), mark, length)], 1));
    }
    lab.is_content();
    let (pinned, _) = lab.monitor.mapped();
    assert!(pinned < MEMORY.end - MEMORY.start, "{pinned}");
}

#[test]
fn an_e1000_of_qemu_sends_and_receives() {
    let Some(qemu) = qemu("an_e1000_of_qemu_sends_and_receives") else { return };
    let mut lab = lab(&qemu, &E1000);
    let mut driver = support::e1000::Driver::probe(&mut lab, 0);
    driver.start(&mut lab);
    for (mark, length) in rounds() {
        let out = frame([0xFF; 6], mark, length);
        driver.send(&mut lab, &out);
        assert_eq!(lab.sent(), out);
        lab.wire.send(&frame([0xFF; 6], mark, length)).unwrap();
        let (mut frames, mut done) = (Vec::new(), 0);
        let until = Instant::now() + HANG_LIMIT;
        while frames.is_empty() || done == 0 {
            assert!(Instant::now() < until, "{frames:?}, {done} sent");
            lab.look();
            let (more, sent) = driver.interrupt(&mut lab);
            frames.extend(more);
            done += sent;
        }
        assert_eq!((frames, done), (vec![frame([0xFF; 6], mark, length)], 1));
    }
    lab.is_content();
}

#[test]
fn an_ne2000_of_qemu_sends_and_receives() {
    let Some(qemu) = qemu("an_ne2000_of_qemu_sends_and_receives") else { return };
    let mut lab = lab(&qemu, &NE2000);
    let mut driver = support::ne2000::Driver::probe(&mut lab);
    driver.start(&mut lab);
    for (mark, length) in rounds() {
        let out = frame([0xFF; 6], mark, length);
        driver.send(&mut lab, &out);
        assert_eq!(lab.sent()[..length], out);
        lab.wire.send(&frame([0xFF; 6], mark, length)).unwrap();
        let (mut frames, mut done) = (Vec::new(), false);
        let until = Instant::now() + HANG_LIMIT;
        while frames.is_empty() || !done {
            assert!(Instant::now() < until, "{frames:?}, {done}");
            lab.look();
            let (more, sent, error) = driver.interrupt(&mut lab);
            assert!(!error);
            frames.extend(more);
            done |= sent;
        }
        assert_eq!(frames, [frame([0xFF; 6], mark, length)]);
    }
    lab.is_content();
}

/// A card's line signals its eventfd, falls after the driver has handled its causes, and rises again.
#[test]
fn the_line_comes_and_goes() {
    let Some(qemu) = qemu("the_line_comes_and_goes") else { return };
    let mut lab = lab(&qemu, &RTL8139);
    let mut driver = support::rtl8139::Driver::probe(&mut lab, 0);
    driver.start(&mut lab);
    assert!(!lab.monitor.line(GUEST));
    for mark in 0..20 {
        driver.send(&mut lab, &frame([0xFF; 6], mark, 100));
        assert!(lab.interrupted());
        assert_eq!(driver.interrupt(&mut lab).1, 1);
        assert!(!lab.monitor.line(GUEST));
    }
}

/// Negative control: the card doesn't reach unmapped memory. It doesn't send the guest's bytes from there. A received
/// frame for an unmapped ring doesn't change the memory.
#[test]
fn what_is_not_mapped_is_not_reached() {
    let Some(qemu) = qemu("what_is_not_mapped_is_not_reached") else { return };
    let (mut card, wire) = card(&qemu, &RTL8139);
    let ram = Arc::new(memory_file(0x10_0000).unwrap());
    rustix::io::pwrite(&ram, &[0x5A; 4096], 0x1000).unwrap();
    card.set_ram(vec![RamFile { guest_base: 0, length: 0x10_0000, file: Arc::clone(&ram), offset: 0 }]);
    card.set_bus_master(true).unwrap();
    let bar = RTL8139.bar();
    let send = |card: &mut Remote| {
        card.write(bar, 0x37, 1, 0x0C).unwrap();
        card.write(bar, 0x20, 4, 0x1000).unwrap();
        card.write(bar, 0x10, 4, 64).unwrap();
        while card.read(bar, 0x10, 4).unwrap() & 0x2000 == 0 {}
        card.write(bar, 0x37, 1, 0x10).unwrap();
        let mut bytes = [0xEE; 256];
        let length = wire.recv(&mut bytes).unwrap();
        bytes[..length].to_vec()
    };
    assert!(!send(&mut card).contains(&0x5A), "nothing is mapped");
    let page = Mapping { device_base: 0x1000, guest_base: 0x1000, length: 0x1000, writable: true };
    card.map(page).unwrap();
    assert_eq!(send(&mut card)[..64], [0x5A; 64]);
    card.unmap(page).unwrap();
    assert!(!send(&mut card).contains(&0x5A), "it was taken back");
    // Memory that isn't whole pages or isn't in a region is refused with a message.
    let error = card.map(Mapping { length: 100, ..page }).unwrap_err();
    assert!(error.to_string().contains("whole pages"), "{error}");
    let error = card.map(Mapping { device_base: 0x20_0000, guest_base: 0x20_0000, ..page }).unwrap_err();
    assert!(error.to_string().contains("isn't memory"), "{error}");
}

/// A missing program, and one that exits at once, are errors.
#[test]
fn a_process_that_does_not_work_is_an_error() {
    let absent = Remote::start("/nonexistent/qemu".as_ref(), &RTL8139, CARD, "user").unwrap_err();
    assert!(matches!(absent, RemoteError::Start { .. }) && absent.to_string().contains("/nonexistent/qemu"));
    let ended = Remote::start("/bin/false".as_ref(), &RTL8139, CARD, "user").unwrap_err();
    let source = std::error::Error::source(&ended).unwrap().to_string();
    assert!(matches!(ended, RemoteError::Broken { .. }) && source.contains("rtl8139"), "{source}");
}
