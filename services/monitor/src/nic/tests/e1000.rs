//! An e1000 under its model, whose first page the guest reads. A signaled mask doesn't overtake older writes, and a reset discards it. A
//! guest whose interrupt doesn't end loses its page for that time.

use std::time::{Duration, Instant};

use device_models::Access;
use device_models::devices::e1000::{E1000, RST};
use device_models::physical::PhysicalDevice;
use device_models::reference::e1000::E1000Card;
use machine::memory::{GuestRam, RamLayout, RamOptions};
use pci::function::Doorbell;
use vpio::{FailurePolicy, GuestConfig, Monitor, Slot, Slots};

use super::super::backend::Backend;
use super::super::bus::RamBus;
use super::super::guarded::{Guarded, PageSupervision};
use super::super::page::RegisterPage;
use super::{ADDRESS, Plugged};

const ICR: u32 = 0xC0;
const ICS: u32 = 0xC8;
const IMS: u32 = 0xD0;
const IMC: u32 = 0xD8;
const LINK: u32 = 4;

struct Machine {
    guarded: Guarded<Plugged<E1000Card<RamBus>>>,
    opens: Doorbell,
}

impl Machine {
    fn new() -> Self {
        let layout = RamLayout::new(&[2 << 20]).unwrap();
        let options = RamOptions { name: "nic".into(), ..RamOptions::default() };
        let ram = GuestRam::allocate(&layout, &options).unwrap();
        let card = Plugged(E1000Card::new(ADDRESS, RamBus::new(ram.memory()), true));
        let mut monitor = Monitor::new(&E1000, Backend::Card(Box::new(card)));
        let slot = Slot { guest_base: 0, length: 2 << 20, device_base: 0, writable: true };
        let guest = monitor.add(GuestConfig {
            name: "nic0".to_owned(),
            address: ADDRESS,
            permissions: Vec::new(),
            policy: FailurePolicy::Stop,
            memory: Box::new(Slots(vec![slot])),
        });
        monitor.switch(guest, false).unwrap();
        monitor.show_from_now(guest);
        let page = RegisterPage::of("nic0", &E1000).unwrap();
        let opens = page.as_ref().unwrap().doorbells().remove(0);
        let mut guarded = Guarded {
            monitor: Box::new(monitor),
            guest,
            stop: None,
            traces: None,
            masked: false,
            aside: None,
            guest_master: false,
            changes: 0,
            page,
            supervision: PageSupervision::default(),
            free_pages: Vec::new(),
            whole: Vec::new(),
            line: None,
            trap_all: false,
            paused: false,
        };
        guarded.update_page().unwrap();
        Self { guarded, opens }
    }

    fn write(&mut self, offset: u32, value: u32) {
        self.guarded.access(Access { bar: 0, offset, size: 4, write: Some(value) }).unwrap();
    }

    fn page(&self, offset: u32) -> u32 {
        self.guarded.page.as_ref().unwrap().load(offset, 4)
    }

    /// The guest opens its mask, which only signals an eventfd.
    fn open(&self) {
        rustix::io::write(&self.opens.fd, &1u64.to_ne_bytes()).unwrap();
    }

    /// The card reports causes. The thread takes them, with deferred writes that come in between.
    fn cause(&mut self, causes: u32, late: &[(u32, u32)]) {
        self.guarded.collect_signaled();
        self.guarded.monitor.physical().card().unwrap().write(0, ICS, 4, causes).unwrap();
        late.iter().for_each(|(offset, value)| self.write(*offset, *value));
        self.guarded.readable().unwrap();
        self.guarded.seen();
    }

    fn line(&self) -> bool {
        self.guarded.monitor.line(self.guarded.guest)
    }
}

#[test]
fn a_signaled_mask_write_is_applied_after_older_deferred_writes() {
    let mut machine = Machine::new();
    assert_eq!((machine.opens.offset, machine.opens.datamatch), (u64::from(IMS), Some(0x9D)));
    machine.open();
    // An access doesn't apply it, since older deferred writes may wait.
    machine.write(ICS, LINK);
    assert_eq!((machine.page(IMS), machine.page(ICR)), (0, LINK));
    machine.cause(0x80, &[(IMC, u32::MAX)]);
    assert_eq!((machine.page(IMS), machine.page(ICR)), (0x9D, 0x84));
    assert!(machine.line());
    // The handler's write clears the shown causes of frames, but not the link's.
    machine.write(IMC, u32::MAX);
    assert_eq!((machine.page(IMS), machine.page(ICR)), (0, LINK));
    assert!(!machine.line());
    // A reset discards what was signaled before it.
    machine.open();
    machine.guarded.collect_signaled();
    machine.open();
    machine.write(0, RST);
    machine.guarded.collect_signaled();
    machine.guarded.process_signaled().unwrap();
    assert_eq!(machine.page(IMS), 0);
}

/// The time of a pause doesn't count as the handler's, since the guest doesn't run in it.
#[test]
fn a_pause_in_an_interrupt_withdraws_no_page() {
    let mut machine = Machine::new();
    machine.write(IMS, 0x9D);
    machine.cause(LINK, &[]);
    machine.guarded.raised();
    machine.guarded.quiesce().unwrap();
    let paused = Instant::now();
    while paused.elapsed() < Duration::from_millis(150) {
        std::thread::sleep(Duration::from_millis(50));
    }
    machine.guarded.unquiesce().unwrap();
    let resumed = Instant::now();
    assert!(!machine.guarded.supervise_page(resumed) && !machine.guarded.supervision.withdrawn);
    assert!(
        machine.guarded.supervise_page(resumed + Duration::from_secs(1)),
        "but it is watched from there on"
    );
}

#[test]
fn an_endless_interrupt_withdraws_the_page() {
    let mut machine = Machine::new();
    machine.write(IMS, 0x9D);
    machine.cause(LINK, &[]);
    assert!(machine.line());
    let begin = Instant::now();
    machine.guarded.raised();
    assert!(!machine.guarded.supervise_page(begin), "it may take its time");
    assert_eq!(machine.guarded.next_drain(false), Some(Duration::from_millis(1)));
    assert_eq!(machine.guarded.next_drain(true), Some(Duration::from_millis(2)));
    assert!(machine.guarded.supervise_page(begin + Duration::from_secs(1)));
    assert!(
        machine.guarded.supervision.withdrawn
            && !machine.guarded.supervise_page(begin + Duration::from_secs(2))
    );
    // Its reads exit now, and clear causes.
    let read = Access { bar: 0, offset: ICR, size: 4, write: None };
    assert_eq!(machine.guarded.access(read).unwrap(), LINK);
    assert_eq!(machine.guarded.access(read).unwrap(), 0);
    assert!(!machine.line());
    machine.guarded.lowered().unwrap();
    assert!(machine.guarded.supervise_page(begin + Duration::from_secs(3)), "it comes back");
    assert_eq!((machine.guarded.next_drain(false), machine.page(ICR)), (None, 0));
    // An interrupt that ends: the guest was slow once.
    machine.guarded.raised();
    assert!(!machine.guarded.supervise_page(Instant::now()));
    machine.guarded.lowered().unwrap();
    // A guest whose interrupts stay slow loses the page.
    for time in 0..8 {
        machine.guarded.raised();
        machine.guarded.supervise_page(begin + Duration::from_secs(10 + time));
        machine.guarded.lowered().unwrap();
        machine.guarded.supervise_page(begin + Duration::from_secs(10 + time));
        assert_eq!(machine.guarded.supervision.withdrawn, time >= 4, "{time}");
    }
    assert_eq!(machine.guarded.supervision.times, 6);
    machine.guarded.reset().unwrap();
    assert!(machine.guarded.supervise_page(begin) && !machine.guarded.supervision.withdrawn, "until a reset");
}
