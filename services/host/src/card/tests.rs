//! Two guests of one reference card, over vfio-user, each with the accesses of Linux's own driver.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use device_models::describe::{Bar, Device};
use device_models::devices::{e1000::E1000, ne2000::NE2000, rtl8139::RTL8139};
use device_models::physical::{Bus, DeviceError, Mapping, PhysicalDevice};
use device_models::reference;
use dma::{Dma as _, MappedMemory, MemoryRegion};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vfio_user_protocol::client::Client;
use vfio_user_protocol::device::{INTERRUPT_INTX, REGION_CONFIG};
use vpio::fast_forward::Scratch;
use vpio::sharing::{OwnRing, own_bytes};

use super::desk::{Card, Desk};
use super::{CardDaemon, CardError, Guest, Settings, Wish, wishes};

#[path = "../../../../devices/vpio/tests/it/support/mod.rs"]
mod support;

use support::Ports;
use support::memory::Memory;
use support::nic::{CARDS, Driver};

const OWN: u64 = 0xE000_0000;
const RAM: u64 = 0x40_0000;
const OUTSIDE: [u8; 6] = [0x52, 0x54, 0, 0, 0, 0x99];

fn address(seat: u8) -> [u8; 6] {
    [0x52, 0x54, 0, 0, 0, seat]
}

/// The memory that the card reaches: its owner's, and guests' mapped memory, as of its mapping.
#[derive(Clone, Default)]
struct HostBus(Arc<Mutex<Reach>>);

#[derive(Default)]
struct Reach {
    own: Vec<u8>,
    mapped: Vec<(Mapping, MappedMemory)>,
    given: MappedMemory,
}

impl Reach {
    fn within(&self, base: u64, length: usize) -> Option<std::ops::Range<usize>> {
        let at = usize::try_from(base.checked_sub(OWN)?).unwrap();
        (at + length <= self.own.len()).then_some(at..at + length)
    }
}

impl Bus for HostBus {
    fn read(&mut self, address: u64, into: &mut [u8]) {
        let reach = &*self.0.lock().unwrap();
        if let Some(part) = reach.within(address, into.len()) {
            return into.copy_from_slice(&reach.own[part]);
        }
        for (at, byte) in (address..).zip(into) {
            let is = |(map, _): &&(Mapping, MappedMemory)| {
                (map.device_base..map.device_base + map.length).contains(&at)
            };
            let (map, memory) = reach.mapped.iter().find(is).expect("it is mapped");
            memory.read(at - map.device_base + map.guest_base, std::slice::from_mut(byte)).unwrap();
        }
    }

    fn write(&mut self, address: u64, data: &[u8]) {
        let reach = &mut *self.0.lock().unwrap();
        // A shared card must write nowhere else.
        let part = reach.within(address, data.len()).unwrap();
        reach.own[part].copy_from_slice(data);
    }
}

impl Scratch for HostBus {
    fn device_base(&self) -> u64 {
        OWN
    }
    fn write(&mut self, offset: u64, data: &[u8]) {
        Bus::write(self, OWN + offset, data);
    }
}

impl OwnRing for HostBus {
    fn read(&mut self, offset: u64, into: &mut [u8]) {
        Bus::read(self, OWN + offset, into);
    }
}

/// A reference card behind an IOMMU, with an interrupt like VFIO's.
struct TestCard {
    card: Box<dyn reference::Card + Send>,
    bus: HostBus,
    interrupt: OwnedFd,
    masked: bool,
    /// No memory can be mapped, as with VFIO and read-only memory.
    maps_nothing: bool,
    /// Number of accesses that fail from now on.
    failures: u32,
}

impl TestCard {
    fn new(device: &'static Device) -> (Self, HostBus, OwnedFd) {
        let bus = HostBus::default();
        let bytes = own_bytes(device).unwrap();
        bus.0.lock().unwrap().own = vec![0; usize::try_from(bytes).unwrap()];
        let station = [0, 0xE0, 0x4C, 1, 2, 3];
        let mut card = reference::card(device, station, bus.clone(), bytes > 0).unwrap();
        if bytes > 0 {
            card.map(Mapping { device_base: OWN, guest_base: OWN, length: bytes, writable: true }).unwrap();
        }
        let interrupt = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let copy = interrupt.try_clone().unwrap();
        let card =
            Self { card, bus: bus.clone(), interrupt, masked: false, maps_nothing: false, failures: 0 };
        (card, bus, copy)
    }

    /// Receives a frame from the wire.
    fn receive(&mut self, frame: &[u8]) -> bool {
        let stored = self.card.receive(frame);
        self.check();
        stored
    }

    /// Number of mappings of guests' memory.
    fn mapped(&self) -> usize {
        self.bus.0.lock().unwrap().mapped.len()
    }

    fn reached(&mut self, offset: u32) -> Result<(), DeviceError> {
        let Some(left) = self.failures.checked_sub(1) else { return Ok(()) };
        self.failures = left;
        Err(DeviceError { bar: 0, offset, why: "it is gone for a moment".to_owned() })
    }

    fn check(&mut self) {
        if !self.masked && self.card.interrupt().unwrap() {
            self.masked = true;
            rustix::io::write(&self.interrupt, &1_u64.to_ne_bytes()).unwrap();
        }
    }
}

impl PhysicalDevice for TestCard {
    fn read(&mut self, bar: u8, offset: u32, size: u8) -> Result<u32, DeviceError> {
        self.reached(offset)?;
        self.card.read(bar, offset, size)
    }
    fn write(&mut self, bar: u8, offset: u32, size: u8, value: u32) -> Result<(), DeviceError> {
        self.reached(offset)?;
        self.card.write(bar, offset, size, value)?;
        self.card.tick();
        self.check();
        Ok(())
    }
    fn interrupt(&mut self) -> Result<bool, DeviceError> {
        self.card.interrupt()
    }
    fn reset(&mut self) -> Result<(), DeviceError> {
        self.card.reset()
    }
    fn set_bus_master(&mut self, on: bool) -> Result<(), DeviceError> {
        self.card.set_bus_master(on)
    }
    fn has_iommu(&self) -> bool {
        true
    }
    fn map(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        if self.maps_nothing {
            let why = format!("{:#x} can't be mapped for it", mapping.guest_base);
            return Err(DeviceError { bar: 0, offset: 0, why });
        }
        let reach = &mut *self.bus.0.lock().unwrap();
        reach.mapped.push((mapping, reach.given.clone()));
        self.card.map(mapping)
    }
    fn unmap(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        self.bus.0.lock().unwrap().mapped.retain(|(known, _)| *known != mapping);
        self.card.unmap(mapping)
    }
}

impl Card for TestCard {
    fn give(&mut self, memory: &MappedMemory) {
        self.bus.0.lock().unwrap().given = memory.clone();
    }
    fn signalled(&mut self) {
        let _ = rustix::io::read(&self.interrupt, &mut [0; 8]);
    }
    fn unmask(&mut self) -> Result<(), DeviceError> {
        self.masked = false;
        self.check();
        Ok(())
    }
}

/// A guest: its memory, and its monitor's connection.
struct Member {
    client: Client,
    ram: MappedMemory,
    line: OwnedFd,
}

impl Member {
    fn connect(device: &Device, folder: &std::path::Path, name: &str) -> Self {
        let file = memfd_create("ram", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, RAM).unwrap();
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        let ram = MappedMemory::default().with(MemoryRegion::map(0, RAM, &file, 0, true).unwrap()).unwrap();
        let client = Client::connect(&folder.join(name), Duration::from_secs(10)).unwrap();
        client.dma_map(file.as_fd(), 0, 0, RAM, true).unwrap();
        let line = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        client.set_eventfds(INTERRUPT_INTX, 0, &[Some(line.as_fd())]).unwrap();
        // As Linux's drivers: an NE2000 never masters the bus.
        let command: u16 = if matches!(device.bars[0], Bar::Ports(32)) { 1 } else { 7 };
        client.region_write(REGION_CONFIG, 4, &command.to_le_bytes()).unwrap();
        Self { client, ram, line }
    }

    /// Waits for the line; false: it didn't come up.
    fn interrupted(&self, wait: Duration) -> bool {
        let wait = Timespec { tv_sec: 0, tv_nsec: wait.subsec_nanos().into() };
        poll(&mut [PollFd::new(&self.line, PollFlags::IN)], Some(&wait)).unwrap();
        rustix::io::read(&self.line, &mut [0; 8]).is_ok()
    }

    fn unmask(&self) {
        self.client.mask_interrupt(INTERRUPT_INTX, 0, false).unwrap();
    }
}

impl Ports for Member {
    fn read(&mut self, offset: u32, size: u8) -> u32 {
        let mut value = [0; 4];
        self.client.region_read(0, offset.into(), &mut value[..usize::from(size)]).unwrap();
        u32::from_le_bytes(value)
    }
    fn write(&mut self, offset: u32, size: u8, value: u32) {
        self.client.region_write(0, offset.into(), &value.to_le_bytes()[..usize::from(size)]).unwrap();
    }
}

impl Memory for Member {
    fn load(&mut self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.ram.read(address, &mut bytes).unwrap();
        bytes
    }
    fn store(&mut self, address: u64, data: &[u8]) {
        self.ram.write(address, data).unwrap();
    }
}

/// A frame whose bytes encode its number and sender.
fn frame(to: [u8; 6], from: [u8; 6], number: u32) -> Vec<u8> {
    let length = 60 + usize::try_from(number * 37 % 1455).unwrap();
    let mut frame: Vec<u8> =
        (0u8..=255).cycle().skip(usize::try_from(number % 251).unwrap()).take(length).collect();
    frame[..6].copy_from_slice(&to);
    frame[6..12].copy_from_slice(&from);
    frame[12..16].copy_from_slice(&number.to_be_bytes());
    frame
}

type TestDesk = Arc<Desk<TestCard, HostBus>>;

fn daemon(device: &'static Device) -> (CardDaemon, TestDesk, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let uid = rustix::process::geteuid().as_raw();
    let wish = |seat: u8| Wish { name: format!("guest{seat}"), address: address(seat), uid };
    let seats = [wish(0), wish(1)];
    let (card, own, interrupt) = TestCard::new(device);
    let settings = Settings { slice: Duration::from_millis(1), ..Settings::default() };
    let desk = Arc::new(Desk::new(device, card, own, &seats, settings).unwrap());
    let daemon = CardDaemon::serve_desk(&desk, interrupt, folder.path(), &seats).unwrap();
    (daemon, desk, folder)
}

/// A guest's driver until the end: alternately sends frames to the outside and to the other guest, and receives. Returns the received
/// frames, and the number sent.
fn drive(
    device: &Device,
    folder: &std::path::Path,
    seat: u8,
    ready: &Ready,
    end: &AtomicBool,
    taken: &AtomicU32,
) -> (Vec<Vec<u8>>, u32) {
    let mut guest = Member::connect(device, folder, &format!("guest{seat}"));
    let mut driver = Driver::probe(device, &mut guest, 0);
    assert_eq!(driver.address(), address(seat), "its own");
    driver.start(&mut guest);
    ready.wait();
    let (mut frames, mut handed, mut sent, mut due) = (Vec::new(), 0, 0, Instant::now());
    let (mut quiet, mut ended) = (0, None);
    while quiet < 50 {
        let ending = end.load(Ordering::SeqCst);
        if ending {
            let since = ended.get_or_insert_with(Instant::now).elapsed();
            assert!(since < HANG_LIMIT, "guest {seat}: {sent} of {handed} frames were reported as sent");
        }
        quiet = if ending && handed == sent { quiet + 1 } else { 0 };
        if !ending && due <= Instant::now() && driver.has_room() {
            let to = if handed % 4 == 3 { address(1 - seat) } else { OUTSIDE };
            driver.send(&mut guest, &frame(to, address(seat), handed));
            handed += 1;
            due += Duration::from_millis(2);
        }
        if guest.interrupted(Duration::from_millis(1)) {
            let (came, done, error) = driver.interrupt(&mut guest);
            assert!(!error, "the driver saw an error");
            quiet = if came.is_empty() { quiet } else { 0 };
            let wires = came.iter().filter(|frame| frame[6..12] == OUTSIDE).count();
            taken.fetch_add(u32::try_from(wires).unwrap(), Ordering::SeqCst);
            frames.extend(came);
            sent += done;
            guest.unmask();
        }
    }
    assert_eq!(handed, sent, "every frame was reported as sent");
    (frames, sent)
}

/// Timeout for steps that take moments.
const HANG_LIMIT: Duration = Duration::from_secs(60);

/// Both guests and the wire start at once. If one fails before, the others fail too; with a barrier they would wait without end.
#[derive(Default)]
struct Ready(AtomicU32);

impl Ready {
    fn wait(&self) {
        let begin = Instant::now();
        self.0.fetch_add(1, Ordering::SeqCst);
        while self.0.load(Ordering::SeqCst) < 3 {
            assert!(begin.elapsed() < HANG_LIMIT, "not all have begun");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Ends the guests, whatever the outcome of the test.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Two concurrent drivers, through some hundred hand-offs. Every frame from the wire and from the other guest arrives once, in order and
/// whole, and every sent frame is on the wire. No request is refused, and the card never accesses unmapped memory. The load is low: the
/// frames in flight (`under_way` for each) fit the card's ring and the queues. The printed rate depends on the machine.
fn take_turns(device: &'static Device, handoffs_wanted: u64, under_way: u32) {
    let (_daemon, desk, folder) = daemon(device);
    let (ready, end) = (Ready::default(), AtomicBool::new(false));
    let taken = [AtomicU32::new(0), AtomicU32::new(0)];
    let (mut wire, mut injected) = (Vec::new(), 0u32);
    let results = std::thread::scope(|scope| {
        let ends = End(&end);
        let guests: Vec<_> = (0u8..2)
            .zip(&taken)
            .map(|(seat, taken)| {
                let (folder, ready, end) = (folder.path(), &ready, &end);
                scope.spawn(move || drive(device, folder, seat, ready, end, taken))
            })
            .collect();
        ready.wait();
        let handoffs = || desk.inspect()["handoffs"].as_u64().unwrap();
        let (begin, before) = (Instant::now(), handoffs());
        while handoffs() < before + handoffs_wanted {
            assert!(begin.elapsed() < Duration::from_secs(120), "{} hand-offs", handoffs() - before);
            std::thread::sleep(Duration::from_millis(1));
            let came = taken.iter().map(|taken| taken.load(Ordering::SeqCst)).min().unwrap();
            if injected > came + under_way {
                continue;
            }
            let each = [0, 1].map(|seat| frame(address(seat), OUTSIDE, injected));
            injected += 1;
            wire.extend(desk.with_card(|card| {
                assert!(each.iter().all(|frame| card.receive(frame)), "the card takes every frame");
                card.card.take_sent()
            }));
        }
        let rate = (handoffs() - before) as f64 / begin.elapsed().as_secs_f64();
        eprintln!("{}: {rate:.0} hand-offs per second, {injected} frames for each guest", device.name);
        drop(ends);
        guests.into_iter().map(|guest| guest.join().unwrap()).collect::<Vec<_>>()
    });
    wire.extend(desk.with_card(|card| card.card.take_sent()));
    let tree = desk.inspect();
    for (seat, (frames, sent)) in (0u8..).zip(&results) {
        let from = |who: [u8; 6]| frames.iter().filter(move |frame| frame[6..12] == who);
        let expected: Vec<_> = (0..injected).map(|number| frame(address(seat), OUTSIDE, number)).collect();
        assert!(from(OUTSIDE).eq(&expected), "guest {seat} has the wire's frames, in order, {tree}");
        let (other, others) = (1 - seat, results[usize::from(1 - seat)].1);
        let expected = (0..others).filter(|number| number % 4 == 3);
        let expected: Vec<_> = expected.map(|number| frame(address(seat), address(other), number)).collect();
        assert!(from(address(other)).eq(&expected), "guest {seat} has the other's frames, in order, {tree}");
        assert_eq!(frames.len(), usize::try_from(injected).unwrap() + expected.len());
        let to = |number: u32| if number % 4 == 3 { address(other) } else { OUTSIDE };
        let expected: Vec<_> = (0..*sent).map(|number| frame(to(number), address(seat), number)).collect();
        assert!(
            wire.iter().filter(|frame| frame[6..12] == address(seat)).eq(&expected),
            "the wire has guest {seat}'s frames"
        );
        let guest = &tree["guests"][format!("guest{seat}")];
        assert_eq!(guest["violations"], serde_json::json!([]));
        assert_eq!((&guest["frames"]["dropped"], &guest["decisions"]["refused"]), (&0.into(), &0.into()));
    }
    assert_eq!(
        (&tree["forced"], &tree["card"]["resets"], &tree["failed"]),
        (&0.into(), &0.into(), &serde_json::Value::Null)
    );
    assert_eq!(desk.with_card(|card| card.card.blocked()), 0);
}

#[test]
fn two_guests_take_turns_with_an_rtl8139_and_nothing_is_lost() {
    take_turns(&RTL8139, 500, 16);
}

#[test]
fn two_guests_take_turns_with_an_e1000_and_nothing_is_lost() {
    take_turns(&E1000, 500, 16);
}

/// Its ring holds nine long frames for both.
#[test]
fn two_guests_take_turns_with_an_ne2000_and_nothing_is_lost() {
    take_turns(&NE2000, 500, 3);
}

/// When a guest's monitor dies during its work, the guest loses the card and its windows are unmapped. The other guest continues, and a new
/// monitor can connect. No second monitor can connect to a seat in use.
#[test]
fn a_guest_that_dies_leaves_the_card() {
    CARDS.into_iter().for_each(dies);
}

fn dies(device: &'static Device) {
    let (_daemon, desk, folder) = daemon(device);
    for round in 0..3 {
        let mut first = Member::connect(device, folder.path(), "guest0");
        let mut driver = Driver::probe(device, &mut first, 0);
        driver.start(&mut first);
        driver.send(&mut first, &frame(OUTSIDE, address(0), round));
        let maps = device.name != "ne2000";
        assert_eq!(desk.with_card(|card| card.mapped() > 0), maps, "what it sends is mapped");
        drop(first);
        let begin = Instant::now();
        while desk.inspect()["guests"]["guest0"]["connected"] == true {
            assert!(begin.elapsed() < Duration::from_secs(10));
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(desk.with_card(|card| card.mapped() == 0), "nothing of it is mapped");
        assert_eq!(desk.inspect()["holder"], serde_json::Value::Null);
        assert!(
            desk.with_card(|card| card.bus.0.lock().unwrap().given.regions().is_empty()),
            "its memory is gone"
        );
        let mut second = Member::connect(device, folder.path(), "guest1");
        let mut driver = Driver::probe(device, &mut second, 0);
        driver.start(&mut second);
        let into = frame(address(1), OUTSIDE, round);
        desk.with_card(|card| assert!(card.receive(&into)));
        assert!(second.interrupted(Duration::from_millis(900)));
        assert_eq!(driver.interrupt(&mut second).0, vec![into]);
        drop(second);
        while desk.inspect()["guests"]["guest1"]["connected"] == true {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A guest whose memory can't be mapped for the card gets its access refused; the card and the other guest continue.
#[test]
fn memory_that_cannot_be_mapped_is_refused_to_its_guest_alone() {
    for device in [&RTL8139, &E1000] {
        let (_daemon, desk, folder) = daemon(device);
        let mut first = Member::connect(device, folder.path(), "guest0");
        let mut driver = Driver::probe(device, &mut first, 0);
        driver.start(&mut first);
        desk.with_card(|card| card.maps_nothing = true);
        if device.name == "rtl8139" {
            // Its driver's buffers are mapped when it starts: a frame elsewhere.
            first.write(0x20, 4, 0x30_0000);
            first.write(0x10, 4, 0x0008_0064);
        } else {
            driver.send(&mut first, &frame(OUTSIDE, address(0), 1));
        }
        desk.with_card(|card| card.maps_nothing = false);
        let tree = desk.inspect();
        assert_eq!((&tree["failed"], &tree["failures"]), (&serde_json::Value::Null, &0.into()), "{tree}");
        assert!(desk.with_card(|card| card.card.take_sent()).is_empty(), "the frame isn't sent");
        let guest = &tree["guests"]["guest0"];
        let refused =
            guest["frames"]["refused"].as_u64().unwrap() + guest["decisions"]["refused"].as_u64().unwrap();
        assert_eq!(refused, 1, "{tree}");
        serves(device, &desk, folder.path());
    }
}

/// The other guest starts its driver, and receives and sends a frame.
fn serves(device: &Device, desk: &TestDesk, folder: &std::path::Path) {
    let mut second = Member::connect(device, folder, "guest1");
    let mut driver = Driver::probe(device, &mut second, 0);
    driver.start(&mut second);
    let (into, out) = (frame(address(1), OUTSIDE, 7), frame(OUTSIDE, address(1), 8));
    desk.with_card(|card| assert!(card.receive(&into)));
    driver.send(&mut second, &out);
    let (begin, mut came) = (Instant::now(), Vec::new());
    while came.is_empty() || !driver.has_room() {
        assert!(begin.elapsed() < HANG_LIMIT, "{}", desk.inspect());
        if second.interrupted(Duration::from_millis(1)) {
            came.extend(driver.interrupt(&mut second).0);
            second.unmask();
        }
    }
    assert_eq!(came, [into]);
    assert!(desk.with_card(|card| card.card.take_sent()).contains(&out));
}

/// A card that fails during a guest's work is reset. Nothing of the guest stays mapped, and both guests use the card again, the first with
/// its driver restarted. If the reset fails at first, it is retried.
#[test]
fn a_card_that_fails_is_reset_and_serves_its_guests_again() {
    for device in CARDS {
        for failures in [1, 3] {
            let (_daemon, desk, folder) = daemon(device);
            let mut first = Member::connect(device, folder.path(), "guest0");
            let mut driver = Driver::probe(device, &mut first, 0);
            driver.start(&mut first);
            driver.send(&mut first, &frame(OUTSIDE, address(0), 1));
            desk.with_card(|card| card.failures = failures);
            // The card's thread or the next access detects it.
            let begin = Instant::now();
            let tree = loop {
                let tree = desk.inspect();
                if tree["failures"] != 0 && tree["failed"].is_null() {
                    break tree;
                }
                assert!(begin.elapsed() < HANG_LIMIT, "{tree}");
                std::thread::sleep(Duration::from_millis(1));
            };
            assert_eq!(tree["holder"], serde_json::Value::Null, "{tree}");
            assert_eq!(desk.with_card(|card| (card.failures, card.mapped())), (0, 0), "{}", device.name);
            serves(device, &desk, folder.path());
            let mut driver = Driver::probe(device, &mut first, 0);
            driver.start(&mut first);
            driver.send(&mut first, &frame(OUTSIDE, address(0), 2));
            assert!(
                metrics(folder.path()).contains("causeway_card_failed{device="),
                "the metrics have no such gauge"
            );
            let counted = format!("causeway_card_failures_total{{device=\"{}\"}} ", device.name);
            assert!(metrics(folder.path()).contains(&counted), "{}", metrics(folder.path()));
        }
    }
}

/// The response to a reader of metrics.
fn metrics(folder: &std::path::Path) -> String {
    use std::io::{Read as _, Write as _};
    let mut stream = std::os::unix::net::UnixStream::connect(folder.join(super::METRICS)).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: card\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    text
}

/// Names and addresses must be unique.
#[test]
fn guests_that_cannot_be_told_apart_are_refused() {
    let guest = |name: &str, address| Guest { name: name.to_owned(), address, uid: None };
    let of = |guests: &[Guest]| wishes("0000:03:00.0", guests);
    let mac = Some([2, 0, 0, 0, 0, 1]);
    assert!(matches!(of(&[]), Err(CardError::Count { count: 0 })));
    assert!(matches!(of(&[guest("a", None), guest("a", None)]), Err(CardError::Twice { what: "name", .. })));
    assert!(matches!(of(&[guest("a", mac), guest("b", mac)]), Err(CardError::Twice { what: "address", .. })));
    assert!(matches!(of(&[guest("a", Some([1; 6]))]), Err(CardError::Address { .. })));
    for name in ["state", "metrics"] {
        assert!(matches!(of(&[guest(name, None)]), Err(CardError::Reserved { .. })));
    }
    assert!(matches!(of(&[guest("../a", None)]), Err(CardError::Name(_))));
    let two = of(&[guest("a", None), guest("b", mac)]).unwrap();
    assert_ne!(two[0].address, two[1].address);
}
