//! A shared card that QEMU emulates in another process: two guests with the accesses of Linux's drivers, and a UDP
//! socket as wire. The tests are skipped without qemu-system-x86_64.

use crate::support;

use std::net::UdpSocket;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use device_models::Access;
use device_models::describe::{BusMaster, Device};
use device_models::devices::{e1000::E1000, ne2000::NE2000, rtl8139::RTL8139};
use device_models::physical::{Bus, Mapping, PhysicalDevice as _};
use support::memory::{Memory, SCRATCH, memory, slots};
use support::nic::Driver;
use support::{Ports, address, config, frame};
use vpio::fast_forward::Scratch;
use vpio::remote::{RamFile, Remote, memory_file};
use vpio::sharing::{OwnRing, SharedCard, own_bytes};
use vpio::{Answer, FailurePolicy, GuestId, Monitor, Switched};

const QEMU: &str = "qemu-system-x86_64";
const STATION: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 0x56];
const OUTSIDE: [u8; 6] = [0x52, 0x54, 0, 0, 0, 0x99];
const HANG_LIMIT: Duration = Duration::from_secs(20);

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

/// A file of memory, and its base address.
#[derive(Clone)]
struct Ram(Arc<OwnedFd>, u64);

impl Bus for Ram {
    fn read(&mut self, address: u64, into: &mut [u8]) {
        let wanted = into.len();
        assert_eq!(rustix::io::pread(&self.0, into, address - self.1).unwrap(), wanted);
    }
    fn write(&mut self, address: u64, data: &[u8]) {
        assert_eq!(rustix::io::pwrite(&self.0, data, address - self.1).unwrap(), data.len());
    }
}

/// The owner's memory.
struct Own(Ram);

impl Scratch for Own {
    fn device_base(&self) -> u64 {
        SCRATCH
    }
    fn write(&mut self, offset: u64, data: &[u8]) {
        self.0.write(SCRATCH + offset, data);
    }
}

impl OwnRing for Own {
    fn read(&mut self, offset: u64, into: &mut [u8]) {
        self.0.read(SCRATCH + offset, into);
    }
}

struct Table {
    device: &'static Device,
    monitor: Monitor<SharedCard<Remote, Ram, Own>>,
    guests: [Ram; 2],
    wire: UdpSocket,
    now: u8,
    handoffs: u32,
}

impl Table {
    fn new(qemu: &std::path::Path, device: &'static Device) -> Self {
        let wire = UdpSocket::bind("127.0.0.1:0").unwrap();
        wire.set_read_timeout(Some(HANG_LIMIT)).unwrap();
        let (ours, its) = (wire.local_addr().unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        let its_address = its.local_addr().unwrap();
        drop(its);
        wire.connect(its_address).unwrap();
        let network = format!("socket,udp={ours},localaddr={its_address}");
        let mut card = Remote::start(qemu, device, STATION, &network).unwrap();
        let of = |base: u64, length: u64| Ram(Arc::new(memory_file(length).unwrap()), base);
        let guests = [0, 1].map(|number| of(memory(number).start, memory(number).end - memory(number).start));
        let bytes = own_bytes(device).unwrap().next_multiple_of(4096);
        let own = of(SCRATCH, bytes.max(4096));
        let piece =
            |ram: &Ram, length| RamFile { guest_base: ram.1, length, file: Arc::clone(&ram.0), offset: 0 };
        let mut ram: Vec<RamFile> = guests.iter().map(|ram| piece(ram, 0x10_0000)).collect();
        ram.push(piece(&own, bytes.max(4096)));
        card.set_ram(ram);
        if device.pci.bus_master != BusMaster::Never {
            let all = Mapping { device_base: SCRATCH, guest_base: SCRATCH, length: bytes, writable: true };
            card.map(all).unwrap();
        }
        let mut shared = SharedCard::new(device, card, Own(own)).unwrap();
        let pad = shared.pad();
        (0..2).for_each(|number| shared.add_seat(address(number)));
        let mut monitor = Monitor::new(device, shared);
        monitor.set_scratch(Box::new(pad));
        for number in 0..2 {
            monitor.add(config(number, FailurePolicy::DeviceError, &[], slots(number)));
        }
        Self { device, monitor, guests, wire, now: 0, handoffs: 0 }
    }

    /// Does the work of the owner's thread.
    fn look(&mut self) {
        if self.monitor.physical().card().interrupt().unwrap() {
            while self.monitor.physical().poll().unwrap() {}
            self.monitor.physical().card().unmask().unwrap();
        }
        self.monitor.physical().feed();
        self.monitor.interrupt().unwrap();
    }

    fn turn(&mut self, to: u8) {
        let id = GuestId(to.into());
        if self.monitor.resident() == Some(id) {
            return;
        }
        let until = Instant::now() + HANG_LIMIT;
        loop {
            while self.monitor.physical().poll().unwrap() {}
            self.monitor.interrupt().unwrap();
            if self.monitor.settle().unwrap() {
                break;
            }
            assert!(Instant::now() < until, "the holder becomes reusable");
        }
        self.monitor.physical().park();
        self.monitor.release().unwrap();
        let ram = self.guests[usize::from(to)].clone();
        self.monitor.physical().seat(Some((to.into(), ram, true)));
        assert_eq!(self.monitor.switch(id, false).unwrap(), Switched::Done);
        self.handoffs += 1;
        self.monitor.physical().feed();
        self.monitor.interrupt().unwrap();
    }

    fn access(&mut self, access: Access) -> u32 {
        loop {
            match self.monitor.access(GuestId(self.now.into()), access).unwrap() {
                Answer::Done(value) => return value,
                Answer::Wait => self.turn(self.now),
                other => panic!("{access:?} is answered with {other:?}"),
            }
        }
    }
}

impl Ports for Table {
    fn read(&mut self, offset: u32, size: u8) -> u32 {
        self.access(Access { bar: self.device.bar(), offset, size, write: None })
    }
    fn write(&mut self, offset: u32, size: u8, value: u32) {
        self.access(Access { bar: self.device.bar(), offset, size, write: Some(value) });
        self.monitor.physical().feed();
    }
}

impl Memory for Table {
    fn load(&mut self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.guests[usize::from(self.now)].read(address, &mut bytes);
        bytes
    }
    fn store(&mut self, address: u64, data: &[u8]) {
        self.guests[usize::from(self.now)].write(address, data);
    }
}

/// The guests alternate. Each sends a frame, which QEMU's card puts onto the wire. Each receives one, independent of the
/// card, and sends one to the other guest. Each frame arrives once, in order and intact, and the card isn't reset.
fn share(test: &str, device: &'static Device) {
    let Some(qemu) = qemu(test) else { return };
    let mut table = Table::new(&qemu, device);
    let mut drivers = Vec::new();
    for number in 0..2 {
        table.now = number;
        table.turn(number);
        let mut driver = Driver::probe(device, &mut table, number);
        assert_eq!(driver.address(), address(number));
        driver.start(&mut table);
        drivers.push(driver);
    }
    let (mut expected, mut got) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    for (round, length) in (0u8..60).zip([60, 61, 64, 1000, 1514].into_iter().cycle()) {
        let number = round % 2;
        for to in 0..2 {
            let into = frame(address(to), round, length);
            table.wire.send(&into).unwrap();
            expected[usize::from(to)].push(into);
        }
        table.now = number;
        let to = if round % 3 == 0 { address(1 - number) } else { OUTSIDE };
        let out = frame(to, 0x80 | round, length);
        drivers[usize::from(number)].send(&mut table, &out);
        let mut bytes = vec![0; 2048];
        let sent = table.wire.recv(&mut bytes).unwrap();
        assert_eq!(bytes[..length.min(sent)], out, "{} on the wire", device.name);
        if to != OUTSIDE {
            expected[usize::from(1 - number)].push(out);
        }
        let (mut done, until) = (0, Instant::now() + HANG_LIMIT);
        while done == 0 || [0, 1].iter().any(|&at| got[at].len() < expected[at].len()) {
            assert!(
                Instant::now() < until,
                "{} round {round}: {done} sent, {:?} of {:?} came",
                device.name,
                got.each_ref().map(Vec::len),
                expected.each_ref().map(Vec::len)
            );
            for at in [number, 1 - number] {
                table.now = at;
                table.turn(at);
                table.look();
                let (frames, more, error) = drivers[usize::from(at)].interrupt(&mut table);
                assert!(!error, "{}", device.name);
                got[usize::from(at)].extend(frames);
                done += more;
            }
        }
        for frames in expected.iter_mut().chain(&mut got) {
            // Frames from the wire and from the other guest take two paths.
            frames.sort_by_key(|frame| (frame[6] & 0x80, frame[6] & 0x7F));
        }
        assert!(got == expected, "{} round {round}", device.name);
    }
    let totals = table.monitor.physical().totals();
    assert_eq!((totals.resets, totals.overruns), (0, 0), "{}", device.name);
    for number in [0, 1] {
        let counters = table.monitor.counters(GuestId(number));
        assert_eq!((counters.refused, counters.disbelieved), (0, 0));
        assert_eq!(table.monitor.physical_ref().fed(number).dropped, 0);
    }
    eprintln!("{}: {} hand-offs", device.name, table.handoffs);
}

#[test]
fn an_rtl8139_of_qemu_is_shared() {
    share("an_rtl8139_of_qemu_is_shared", &RTL8139);
}

#[test]
fn an_e1000_of_qemu_is_shared() {
    share("an_e1000_of_qemu_is_shared", &E1000);
}

#[test]
fn an_ne2000_of_qemu_is_shared() {
    share("an_ne2000_of_qemu_is_shared", &NE2000);
}
