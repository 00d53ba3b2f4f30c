//! A NIC in mode `virtual`, as its driver sees it: registers through the BARs, frames through the tap, the line.

mod e1000;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use device_models::Access;
use device_models::devices::rtl8139::RTL8139;
use device_models::physical::{DeviceError, Mapping, PhysicalDevice};
use device_models::reference::rtl8139::Rtl8139;
use machine::interrupt::LevelLine;
use machine::memory::{Bytes as _, GuestAddress, GuestAddressSpace as _, GuestRam, RamLayout, RamOptions};
use pci::function::PciFunction;
use pci_testbed::FakeLine;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use vpio::pad::{Inlet, Pad};
use vpio::vfio::OpenError;
use vpio::{FailurePolicy, GuestConfig, Monitor, Slot, Slots};

use super::OpenedBackend;
use super::backend::{Backend, HostCard};
use super::bus::RamBus;
use super::engine::{self, Engine};
use super::function::NicFunction;
use super::guarded::{Guarded, PageSupervision};
use super::page::RegisterPage;
use super::wire::Wire;
use crate::description::{MacAddress, Nic, NicMode};

const COMMAND: u16 = 4;
const ADDRESS: [u8; 6] = [0x02, 0, 0, 0, 0, 7];

struct Machine {
    function: Arc<NicFunction>,
    ram: GuestRam,
    line: Arc<FakeLine>,
    wire: OwnedFd,
}

/// A machine with one emulated card. The other end of its wire is a socket that keeps message boundaries.
fn machine(model: &str) -> Machine {
    machine_with(model, |_| {})
}

/// The same with a callback that delivers deferred writes.
fn machine_with(model: &str, drain: impl Fn(&NicFunction) + Send + 'static) -> Machine {
    machine_checked(model, drain, || panic!("nothing was refused"))
}

/// The same with a callback for machine checks of deferred writes.
fn machine_checked(
    model: &str,
    drain: impl Fn(&NicFunction) + Send + 'static,
    check: impl Fn() + Send + 'static,
) -> Machine {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let (queue, wire) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let layout = RamLayout::new(&[2 << 20]).unwrap();
    let ram =
        GuestRam::allocate(&layout, &RamOptions { name: "nic".into(), ..RamOptions::default() }).unwrap();
    let config = Nic {
        name: "nic0".to_owned(),
        mode: NicMode::Virtual { model: model.to_owned(), tap: "t".to_owned(), mac: MacAddress(ADDRESS) },
    };
    let backend = OpenedBackend::Wire(Wire { name: "t".to_owned(), queue, _interface: None });
    let function =
        NicFunction::new("nic0", Engine::new(&config, backend, &ram, Arc::new(|_| {})).unwrap()).unwrap();
    let line = FakeLine::new();
    function.attach_intx(line.clone());
    let its = Arc::downgrade(&function);
    let drain = move || {
        if let Some(function) = its.upgrade() {
            drain(&function);
        }
    };
    function.start(Arc::new(|| {}), drain, Box::new(check)).unwrap();
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

/// Both cards return the address that the VM gives them, read as Linux's drivers do.
#[test]
fn cards_have_the_address_that_they_are_given() {
    let rtl = machine("rtl8139");
    assert_eq!((rtl.read(0, 0, 4), rtl.read(1, 4, 2)), (0x0000_0002, 0x0700));
    // 8139too clocks a 93C46: chip select, a start bit, two bits of command, six of address, sixteen of data.
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

/// A frame leaves guest memory, another enters the ring, and the line follows status and mask.
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

/// Unless the guest enables bus mastering, the card accesses no memory.
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

/// A frame is sent although the write that starts it waits in KVM's ring, and the guest makes no further access.
#[test]
fn a_deferred_write_that_sends_is_drained_soon() {
    let ring: Arc<std::sync::Mutex<Vec<(u64, u8)>>> = Arc::default();
    let its = Arc::clone(&ring);
    let machine = machine_with("ne2000", move |function| {
        for (offset, value) in std::mem::take(&mut *its.lock().unwrap()) {
            function.bar_write(0, offset, &[value]);
        }
    });
    let late = machine.function.late_writes();
    assert!(late.iter().any(|zone| zone.offset == 0), "its command register is late: {late:?}");
    for (offset, value) in [(0x0, 0x22), (0xE, 0x49), (0xD, 0), (0xA, 60), (0xB, 0), (0x8, 0), (0x9, 0x40)] {
        machine.write(0, offset, 1, value);
    }
    machine.write(0, 0x0, 1, 0x12);
    (0..15).for_each(|word| machine.write(0, 0x10, 4, 0x0101_0101 * word));
    for (offset, value) in [(0x0, 0x22), (0x4, 0x40), (0x5, 60), (0x6, 0)] {
        machine.write(0, offset, 1, value);
    }
    assert_eq!(machine.read(0, 0x7, 1) & 0x40, 0x40, "the frame is on the card");
    ring.lock().unwrap().push((0x0, 0x26));
    let begin = Instant::now();
    let sent = std::iter::repeat_with(|| machine.message()).find_map(|message| {
        assert!(begin.elapsed() < Duration::from_secs(20), "it stays on the card");
        std::thread::sleep(Duration::from_micros(100));
        message
    });
    assert_eq!(sent.map(|message| message.len()), Some(12 + 60));
}

/// A host's card that this process emulates. Only tests take its frames.
struct Plugged<C>(C);

impl<C: PhysicalDevice> PhysicalDevice for Plugged<C> {
    fn read(&mut self, bar: u8, offset: u32, size: u8) -> Result<u32, DeviceError> {
        self.0.read(bar, offset, size)
    }
    fn write(&mut self, bar: u8, offset: u32, size: u8, value: u32) -> Result<(), DeviceError> {
        self.0.write(bar, offset, size, value)
    }
    fn interrupt(&mut self) -> Result<bool, DeviceError> {
        self.0.interrupt()
    }
    fn reset(&mut self) -> Result<(), DeviceError> {
        self.0.reset()
    }
    fn set_bus_master(&mut self, on: bool) -> Result<(), DeviceError> {
        self.0.set_bus_master(on)
    }
    fn has_iommu(&self) -> bool {
        self.0.has_iommu()
    }
    fn map(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        self.0.map(mapping)
    }
    fn unmap(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        self.0.unmap(mapping)
    }
}

impl<C: PhysicalDevice + Send> HostCard for Plugged<C> {
    /// Only the monitor's setting counts here.
    fn set_guest_bus_master(&mut self, _on: bool) -> Result<(), DeviceError> {
        Ok(())
    }
    fn interrupt_fd(&self) -> std::io::Result<OwnedFd> {
        Ok(rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?)
    }
    fn signalled(&mut self) {}
    fn unmask(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
    fn enable_interrupt(&self) -> Result<(), OpenError> {
        Ok(())
    }
    fn connect_interrupt(&self, _line: &LevelLine) -> Result<(), OpenError> {
        Ok(())
    }
}

/// A guest with a card of the host, and with an idle emulation if there is a wire.
fn guarded(
    ram: &GuestRam,
    policy: FailurePolicy,
    stop: super::StopSink,
    wire: Option<OwnedFd>,
) -> Guarded<Plugged<Rtl8139<Inlet<RamBus>>>> {
    let pad = Pad::new();
    let inlet = Inlet::new(Some(RamBus::new(ram.memory())), pad.clone());
    let card = Plugged(Rtl8139::new(ADDRESS, inlet, true));
    let mut monitor = Monitor::new(&RTL8139, Backend::Card(Box::new(card)));
    monitor.set_scratch(Box::new(pad));
    let slot = Slot { guest_base: 0, length: 2 << 20, device_base: 0, writable: true };
    let guest = monitor.add(GuestConfig {
        name: "nic0".to_owned(),
        address: ADDRESS,
        permissions: Vec::new(),
        policy,
        memory: Box::new(Slots(vec![slot])),
    });
    monitor.switch(guest, false).unwrap();
    let aside = wire.map(|queue| {
        let wire = Wire { name: "t".to_owned(), queue, _interface: None };
        engine::emulated(&RTL8139, ADDRESS, wire, ram).unwrap()
    });
    let monitor = Box::new(monitor);
    Guarded {
        monitor,
        guest,
        stop: Some(stop),
        traces: None,
        masked: false,
        aside,
        guest_master: false,
        changes: 0,
        page: None,
        supervision: PageSupervision::default(),
        free_pages: Vec::new(),
        whole: Vec::new(),
        line: None,
        trap_all: false,
        paused: false,
    }
}

/// A driver that sends and receives without pause moves from its card to the emulation and back repeatedly. Descriptors and ring continue
/// where they were, frames leave by the present backend, and each cause is reported.
#[test]
fn a_guest_changes_from_its_card_to_the_emulation_and_back_under_traffic() {
    const RING: u64 = 0x8000;
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let (queue, wire) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let ram = machine("rtl8139").ram;
    let mut guarded = guarded(&ram, FailurePolicy::Stop, Arc::new(|why| panic!("{why}")), Some(queue));
    let memory = ram.memory().memory();
    let write = |guarded: &mut Guarded<Plugged<Rtl8139<Inlet<RamBus>>>>, offset, size, value| {
        guarded.access(Access { bar: 1, offset, size, write: Some(value) }).unwrap();
    };
    let read = |guarded: &mut Guarded<Plugged<Rtl8139<Inlet<RamBus>>>>, offset, size| {
        guarded.access(Access { bar: 1, offset, size, write: None }).unwrap()
    };
    guarded.set_guest_bus_master(true).unwrap();
    for (offset, size, value) in [
        (0x30, 4, 0x8000),
        (0x37, 1, 0x0C),
        (0x44, 4, 0xF78A),
        (0x40, 4, 0x0300_0680),
        (0x20, 4, 0x2_0000),
        (0x24, 4, 0x2_1000),
        (0x28, 4, 0x2_2000),
        (0x2C, 4, 0x2_3000),
        (0x3C, 2, 0xC07F),
    ] {
        write(&mut guarded, offset, size, value);
    }
    let mut at = 0u64;
    for round in 0..200u32 {
        let emulation = round / 3 % 2 == 1;
        guarded.change("nic0", emulation).unwrap();
        assert_eq!(guarded.monitor.physical_ref().is_emulation(), emulation);

        // Sends a frame from the next descriptor.
        let descriptor = round % 4;
        let frame: Vec<u8> = (0..100 + round).map(|byte| (byte ^ round).to_le_bytes()[0]).collect();
        memory.write_slice(&frame, GuestAddress(0x2_0000 + u64::from(descriptor) * 0x1000)).unwrap();
        write(&mut guarded, 0x10 + 4 * descriptor, 4, 100 + round);
        let card = guarded.monitor.physical().card();
        let sent = match card {
            Some(card) => {
                card.0.tick();
                card.0.take_sent().pop()
            }
            None => {
                let mut message = vec![0; 2048];
                let length = rustix::io::read(&wire, &mut message).unwrap();
                Some(message[12..length].to_vec())
            }
        };
        assert_eq!(sent, Some(frame), "round {round}");
        guarded.readable().unwrap();
        assert_eq!(read(&mut guarded, 0x3E, 2) & 0x0004, 0x0004, "round {round}: it was sent");
        assert_eq!(read(&mut guarded, 0x10 + 4 * descriptor, 4) & 0xA000, 0xA000);
        write(&mut guarded, 0x3E, 2, 0x0004);

        // Receives a frame into the ring.
        let mut arriving = ADDRESS.to_vec();
        arriving.extend((0..90 + round).map(|byte| (byte ^ round).to_le_bytes()[0]));
        match guarded.monitor.physical().card() {
            Some(card) => assert!(card.0.receive(&arriving)),
            None => {
                rustix::io::write(&wire, &[vec![0; 12], arriving.clone()].concat()).unwrap();
            }
        }
        guarded.readable().unwrap();
        assert_eq!(read(&mut guarded, 0x3E, 2) & 1, 1, "round {round}: it was received");
        write(&mut guarded, 0x3E, 2, 1);
        let mut header = [0; 4];
        memory.read_slice(&mut header, GuestAddress(RING + at)).unwrap();
        let length = usize::from(u16::from_le_bytes([header[2], header[3]]));
        assert_eq!(length, arriving.len() + 4, "round {round}");
        let mut stored = vec![0; arriving.len()];
        memory.read_slice(&mut stored, GuestAddress(RING + at + 4)).unwrap();
        assert_eq!(stored, arriving, "round {round}");
        at = (at + u64::try_from(length).unwrap() + 4).next_multiple_of(4) % 0x8000;
        write(&mut guarded, 0x38, 2, u32::try_from(at).unwrap().wrapping_sub(16) & 0xFFFF);
        assert!(!guarded.monitor.line(guarded.guest), "round {round}: all was acknowledged");
    }
    assert_eq!(guarded.changes, 66);
}

/// Without a tap there is no other backend, and the error says so.
#[test]
fn a_card_without_a_tap_is_not_changed_to_its_emulation() {
    let ram = machine("rtl8139").ram;
    let mut guarded = guarded(&ram, FailurePolicy::Ignore, Arc::new(|_| {}), None);
    guarded.change("nic0", false).unwrap();
    let error = guarded.change("nic0", true).unwrap_err().to_string();
    assert!(error.contains("without a tap"), "{error}");
}

/// With policy `stop`, the first refused request ends the guest and is reported once. Its device is gone from then on.
#[test]
fn policy_stop_ends_the_guest_once() {
    let ram = machine("rtl8139").ram;
    let (sender, reports) = std::sync::mpsc::channel();
    let sender = std::sync::Mutex::new(sender);
    let stop = Arc::new(move |why| sender.lock().unwrap().send(why).unwrap());
    let mut guarded = guarded(&ram, FailurePolicy::Stop, stop, None);
    let mut write = |offset, size, value| {
        guarded.access(Access { bar: 1, offset, size, write: Some(value) }).unwrap();
    };
    write(0x37, 1, 0x04);
    write(0x20, 4, 0x1_0000);
    write(0x10, 4, 100);
    assert!(reports.try_recv().is_err(), "what a driver does");
    // The transmitter runs; a frame has no address.
    write(0x14, 4, 100);
    let why = reports.try_recv().unwrap();
    assert!(why.contains("TSD1") && why.contains("the frame has no address yet"), "{why}");
    write(0x18, 4, 100);
    assert!(reports.try_recv().is_err(), "once");
    let read = Access { bar: 1, offset: 0x37, size: 1, write: None };
    assert_eq!(guarded.access(read).unwrap(), u32::MAX);
}

/// The guest's page has the values that accesses would return: after its writes, the card's causes, a change to the emulation, and a reset.
/// Ones if its device is gone. A signaled mask takes effect before later accesses.
#[test]
fn registers_are_read_in_a_page() {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let (queue, _wire) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let ram = machine("rtl8139").ram;
    let mut guarded = guarded(&ram, FailurePolicy::Stop, Arc::new(|_| {}), Some(queue));
    guarded.page = RegisterPage::of("nic0", &RTL8139).unwrap();
    guarded.monitor.show_from_now(guarded.guest);
    guarded.update_page().unwrap();
    let doorbell = guarded.page.as_ref().unwrap().doorbells().remove(0);
    assert_eq!((doorbell.bar, doorbell.offset, doorbell.datamatch), (1, 0x3C, Some(0xC02E)));
    let mapping = guarded.page.as_ref().unwrap().mappings().remove(0);
    assert!(mapping.read_only && (mapping.bar, mapping.offset, mapping.len) == (1, 0, 4096));
    let write = |guarded: &mut Guarded<Plugged<Rtl8139<Inlet<RamBus>>>>, offset, size, value| {
        guarded.access(Access { bar: 1, offset, size, write: Some(value) }).unwrap();
    };
    let page = |guarded: &Guarded<Plugged<Rtl8139<Inlet<RamBus>>>>, offset, bytes| {
        let shown = guarded.page.as_ref().unwrap().load(offset, bytes);
        shown & u32::MAX >> (32 - 8 * u32::from(bytes))
    };
    let same = |guarded: &mut Guarded<Plugged<Rtl8139<Inlet<RamBus>>>>, when: &str| {
        for (offset, size) in [
            (0x0, 4),
            (0x10, 4),
            (0x14, 4),
            (0x20, 4),
            (0x37, 1),
            (0x3C, 2),
            (0x3E, 2),
            (0x40, 4),
            (0x44, 4),
            (0x58, 1),
        ] {
            let shown = page(guarded, offset, size);
            let asked = guarded.access(Access { bar: 1, offset, size, write: None }).unwrap();
            assert_eq!(shown, asked, "{offset:#x} {when}");
        }
    };
    same(&mut guarded, "at first");
    assert_eq!(page(&guarded, 0x100, 4), u32::MAX, "behind the device's registers");
    guarded.set_guest_bus_master(true).unwrap();
    for (offset, size, value) in
        [(0x30, 4, 0x8000), (0x37, 1, 0x0C), (0x44, 4, 0xF78A), (0x20, 4, 0x2_0000), (0x3C, 2, 0xC07F)]
    {
        write(&mut guarded, offset, size, value);
        same(&mut guarded, "while it starts");
    }
    write(&mut guarded, 0x10, 4, 100);
    guarded.monitor.physical().card().unwrap().0.tick();
    guarded.readable().unwrap();
    assert_eq!((page(&guarded, 0x10, 4) & 0xA000, page(&guarded, 0x3E, 2)), (0xA000, 4), "sent, and told");
    assert!(guarded.has_unseen());
    write(&mut guarded, 0x3E, 2, 4);
    assert_eq!(page(&guarded, 0x3E, 2), 4, "an acknowledgement that may be older than the cause");
    guarded.seen();
    write(&mut guarded, 0x3E, 2, 4);
    assert_eq!(page(&guarded, 0x3E, 2), 0);
    let mut arriving = ADDRESS.to_vec();
    arriving.extend([9; 60]);
    assert!(guarded.monitor.physical().card().unwrap().0.receive(&arriving));
    guarded.readable().unwrap();
    assert_eq!((page(&guarded, 0x37, 1) & 1, page(&guarded, 0x3E, 2)), (0, 1), "a frame is in the ring");
    assert!(guarded.monitor.line(guarded.guest));
    rustix::io::write(&doorbell.fd, &1u64.to_ne_bytes()).unwrap();
    guarded.lowered().unwrap();
    assert!(!guarded.monitor.line(guarded.guest), "put off");
    assert_eq!(page(&guarded, 0x3C, 2), 0xC02E);
    same(&mut guarded, "with a frame");
    guarded.change("nic0", true).unwrap();
    same(&mut guarded, "on the emulation");
    guarded.reset().unwrap();
    same(&mut guarded, "after a reset");
    write(&mut guarded, 0x37, 1, 0x04);
    write(&mut guarded, 0x14, 4, 100);
    assert_eq!((page(&guarded, 0x37, 1), page(&guarded, 0x60, 4)), (0xFF, u32::MAX), "stopped");
    guarded.reset().unwrap();
    same(&mut guarded, "after another reset");
    assert_eq!(page(&guarded, 0x60, 2), 0);
}

/// With policy `machine-check`, the vCPU that made the refused request takes one, and nothing else changes.
#[test]
fn policy_machine_check_tells_the_vcpu_that_asked() {
    let ram = machine("rtl8139").ram;
    let mut guarded = guarded(&ram, FailurePolicy::MachineCheck, Arc::new(|why| panic!("{why}")), None);
    let mut write = |offset, size, value| {
        guarded.access(Access { bar: 1, offset, size, write: Some(value) }).unwrap();
        machine::machine_check::is_wanted()
    };
    let honest = [write(0x37, 1, 0x04), write(0x20, 4, 0x1_0000), write(0x10, 4, 100)];
    assert_eq!(honest, [false; 3], "what a driver does");
    assert!(write(0x14, 4, 100), "the transmitter runs; a frame without an address");
}

/// If the NIC's thread processes a deferred write that is refused, some vCPU takes the machine check, once, since that thread is no vCPU's.
#[test]
fn a_refused_deferred_write_raises_a_machine_check_in_a_vcpu() {
    let (refused, checks) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicU32::new(0)));
    let reports = Arc::clone(&checks);
    let drain = move |_: &NicFunction| {
        if refused.swap(false, Ordering::SeqCst) {
            machine::machine_check::raise();
        }
    };
    let machine = machine_checked("ne2000", drain, move || {
        reports.fetch_add(1, Ordering::SeqCst);
    });
    let begin = Instant::now();
    while checks.load(Ordering::SeqCst) == 0 {
        assert!(begin.elapsed() < Duration::from_secs(20), "no vCPU is told");
        machine.read(0, 0, 1);
        std::thread::sleep(Duration::from_millis(1));
    }
    let checks_of_reads = (0..5).map(|_| {
        machine.read(0, 0, 1);
        std::thread::sleep(Duration::from_millis(5));
        checks.load(Ordering::SeqCst)
    });
    assert_eq!(checks_of_reads.collect::<Vec<_>>(), [1; 5]);
}

/// Two violations of a guest whose NIC ignores what it refuses.
pub(super) fn violations() -> Vec<vpio::Violation> {
    let ram = machine("rtl8139").ram;
    let mut guarded = guarded(&ram, FailurePolicy::Ignore, Arc::new(|why| panic!("{why}")), None);
    for (offset, size, value) in [(0x37, 1, 0x04), (0x14, 4, 100), (0x22, 2, 0x4000)] {
        guarded.access(Access { bar: 1, offset, size, write: Some(value) }).unwrap();
    }
    guarded.monitor.violations(guarded.guest).to_vec()
}

pci_testbed::pci_function_contract!(rtl8139_contract, || machine("rtl8139").function as Arc<dyn PciFunction>);
pci_testbed::pci_function_contract!(ne2000_contract, || machine("ne2000").function as Arc<dyn PciFunction>);
