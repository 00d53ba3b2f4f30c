//! Tests of the controllers without KVM: the tests act as vCPUs and devices.

use std::os::fd::AsFd;
use std::time::Instant;

use apic::registers::{
    DIVIDE_CONFIGURATION, END_OF_INTERRUPT, INITIAL_COUNT, INTERRUPT_COMMAND, LVT_TIMER, SPURIOUS_VECTOR,
};
use machine::exits::RangeNames;
use machine::state::SavedKernelIrqchip;

use super::*;
use crate::description;
use crate::sandbox::{Sandbox, ThreadKind};

/// Time limit, after which a step counts as hung.
const HANG_LIMIT: Duration = Duration::from_secs(60);

fn filter() -> ThreadFilter {
    let text = "kernel = \"k\"\ninterrupts = \"monitor\"\nsandbox = \"off\"";
    let (written, _) = description::parse(text, "/x/a.toml".as_ref()).unwrap();
    let description = description::validate(&written).unwrap();
    Sandbox::prepare(&description).unwrap().thread_filter(ThreadKind::Interrupts)
}

/// Controllers with vCPUs 0 and 1, whose APICs software has enabled.
fn irqchip() -> MonitorIrqchip {
    let irqchip = MonitorIrqchip::create(&[0, 1], filter()).unwrap();
    assert!(irqchip.write_msr(0, INTERRUPT_COMMAND, 0x1_0000_4601));
    assert_eq!(irqchip.next_event(1, true), ApicEvent::Startup { vector: 1 });
    for vcpu in 0..2 {
        assert!(irqchip.write_msr(vcpu, SPURIOUS_VECTOR, 0x1FF));
    }
    irqchip
}

/// Waits for the vCPU's next interrupt, and ends it at once.
fn take(irqchip: &MonitorIrqchip, vcpu: u32) -> u8 {
    let begin = Instant::now();
    loop {
        match irqchip.next_event(vcpu, true) {
            ApicEvent::Interrupt { vector } => {
                assert!(irqchip.write_msr(vcpu, END_OF_INTERRUPT, 0));
                return vector;
            }
            ApicEvent::None => assert!(begin.elapsed() < HANG_LIMIT, "no interrupt comes"),
            other => panic!("{other:?}"),
        }
        std::thread::yield_now();
    }
}

fn write_eventfd(fd: impl AsFd) {
    assert_eq!(rustix::io::write(fd, &1u64.to_ne_bytes()), Ok(8));
}

/// Writes a pin's entry through the bus, as a guest does.
fn set_pin(irqchip: &MonitorIrqchip, pin: u8, entry: u32) {
    let bus = AddressSpace::memory(RangeNames::new());
    irqchip.plug(&bus).unwrap();
    bus.write(layout::IO_APIC, &u32::from(0x10 + 2 * pin).to_le_bytes());
    bus.write(layout::IO_APIC + 0x10, &entry.to_le_bytes());
    let mut back = [0; 4];
    bus.read(layout::IO_APIC + 0x10, &mut back);
    assert_eq!(u32::from_le_bytes(back), entry);
}

fn message(vector: u32) -> Option<MsiMessage> {
    Some(MsiMessage { address: 0xFEE0_0000, data: vector })
}

#[test]
fn messages_wait_while_their_route_is_masked() {
    let irqchip = irqchip();
    let routes = irqchip.allocate_msi(2).unwrap();
    routes[0].trigger().unwrap();
    write_eventfd(routes[1].eventfd().unwrap());
    routes[0].set(message(0x41)).unwrap();
    assert_eq!(irqchip.next_event(0, true), ApicEvent::None, "a masked route sends nothing");
    routes[1].set(message(0x51)).unwrap();
    assert_eq!(take(&irqchip, 0), 0x51, "what another process signalled meanwhile");
    routes[0].trigger().unwrap();
    assert_eq!(irqchip.next_event(0, true), ApicEvent::Interrupt { vector: 0x41 });
    assert!(irqchip.write_msr(0, END_OF_INTERRUPT, 0));
    write_eventfd(routes[1].eventfd().unwrap());
    assert_eq!(take(&irqchip, 0), 0x51);
    routes[1].set(None).unwrap();
    write_eventfd(routes[1].eventfd().unwrap());
    listener::drain(&irqchip.shared);
    assert_eq!(irqchip.next_event(0, true), ApicEvent::None);
    // A message that is no interrupt is ignored.
    routes[0].set(Some(MsiMessage { address: 0x1234_5678, data: u32::MAX })).unwrap();
    routes[0].trigger().unwrap();
    assert_eq!(irqchip.next_event(0, true), ApicEvent::None);
}

#[test]
fn routes_have_a_limit_and_come_back() {
    let irqchip = irqchip();
    let error = irqchip.allocate_msi(u16::MAX).err().unwrap();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull, "{error}");
    for _ in 0..3 {
        let routes = irqchip.allocate_msi(64).unwrap();
        assert_eq!(irqchip.allocate_msi(4096).err().unwrap().kind(), io::ErrorKind::StorageFull);
        drop(routes);
    }
}

#[test]
fn pins_interrupt_by_edges_and_levels_and_report_ends() {
    let irqchip = irqchip();
    set_pin(&irqchip, 4, 0x44);
    set_pin(&irqchip, 9, 0x8049);
    let edge = irqchip.edge_eventfd(4).unwrap();
    assert!(Arc::ptr_eq(&edge, &irqchip.edge_eventfd(4).unwrap()));
    for _ in 0..3 {
        write_eventfd(&edge);
        assert_eq!(take(&irqchip, 0), 0x44);
    }
    let lines = [irqchip.level_eventfds(9).unwrap(), irqchip.level_eventfds(9).unwrap()];
    for line in &lines {
        write_eventfd(&line.trigger);
        assert_eq!(take(&irqchip, 0), 0x49);
        // Each device on the shared pin gets the signal to check whether it still needs service.
        for line in &lines {
            assert!(take_signal(&line.resample), "the end is reported to all");
        }
        assert_eq!(irqchip.next_event(0, true), ApicEvent::None);
    }
    irqchip.set_line(9, true).unwrap();
    assert_eq!((take(&irqchip, 0), take(&irqchip, 0)), (0x49, 0x49), "as long as it is asserted");
    irqchip.set_line(9, false).unwrap();
    assert_eq!(take(&irqchip, 0), 0x49, "sent while it was");
    assert_eq!(irqchip.next_event(0, true), ApicEvent::None);
    for refused in [irqchip.set_line(24, true).err(), irqchip.edge_eventfd(24).err()] {
        assert!(refused.unwrap().to_string().contains("Interrupt pin 24 doesn't exist"));
    }
}

#[test]
fn timers_are_due_and_over() {
    let irqchip = irqchip();
    assert_eq!(irqchip.time_to_timer(1), None);
    for (msr, value) in [(DIVIDE_CONFIGURATION, 0xB), (LVT_TIMER, 0xEC), (INITIAL_COUNT, 1_000_000)] {
        assert!(irqchip.write_msr(1, msr, value));
    }
    assert!(irqchip.time_to_timer(1).is_some_and(|time| time <= Duration::from_millis(1)));
    assert_eq!(take(&irqchip, 1), 0xEC);
    assert_eq!((irqchip.time_to_timer(1), irqchip.time_to_timer(0)), (None, None));
    assert!(irqchip.write_msr(1, INITIAL_COUNT, u64::from(u32::MAX)));
    assert!(irqchip.time_to_timer(1).is_some());
    irqchip.reset().unwrap();
    assert_eq!(irqchip.next_event(1, true), ApicEvent::WaitForStartup);
    assert_eq!(irqchip.time_to_timer(1), None, "none is due after a reset");
}

#[test]
fn what_was_signalled_belongs_to_the_saved_state() {
    let source = irqchip();
    set_pin(&source, 4, 0x44);
    let edge = source.edge_eventfd(4).unwrap();
    let route = source.allocate_msi(1).unwrap().remove(0);
    route.set(message(0x61)).unwrap();
    for round in 0..200 {
        write_eventfd(&edge);
        write_eventfd(route.eventfd().unwrap());
        let saved = source.save().unwrap();
        let destination = MonitorIrqchip::create(&[0, 1], filter()).unwrap();
        destination.restore(&saved).unwrap();
        for irqchip in [&source, &destination] {
            assert_eq!((take(irqchip, 0), take(irqchip, 0)), (0x61, 0x44), "round {round}");
            assert_eq!(irqchip.next_event(0, true), ApicEvent::None);
        }
    }
}

#[test]
fn state_of_another_kind_or_machine_is_refused_by_name() {
    let irqchip = irqchip();
    let saved = irqchip.save().unwrap();
    let refused = |irqchip: &MonitorIrqchip, saved: &SavedInterruptController| {
        irqchip.restore(saved).unwrap_err().to_string()
    };
    let kernel = SavedInterruptController::KernelIrqchip(Box::new(SavedKernelIrqchip {
        version: 1,
        pic_master: Default::default(),
        pic_slave: Default::default(),
        ioapic: Default::default(),
        pit: None,
    }));
    let text = refused(&irqchip, &kernel);
    assert!(text.contains("were in the kernel") && text.contains("interrupts = \"kernel\""), "{text}");
    let one = MonitorIrqchip::create(&[0], filter()).unwrap();
    assert!(refused(&one, &saved).contains("APIC ids"), "{}", refused(&one, &saved));
    let SavedInterruptController::Monitor(bytes) = &saved else { panic!() };
    for cut in (0..bytes.len()).step_by(97) {
        let cut = SavedInterruptController::Monitor(bytes[..cut].to_vec());
        assert!(refused(&irqchip, &cut).contains("damaged"));
    }
    irqchip.restore(&saved).unwrap();
}

/// Random guest writes, and messages of devices besides: nothing panics, and afterwards a start-up IPI starts each vCPU.
#[test]
fn registers_written_at_random_leave_vcpus_that_start_again() {
    let irqchip = irqchip();
    let mut random = 0x1234_5678_9ABC_DEF1_u64;
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    for _ in 0..200_000 {
        let (vcpu, value) = (u32::from(next() & 1 != 0), next());
        let msr = 0x800 + u32::try_from(next() % 0x48).unwrap();
        let small = next() & 1 != 0;
        let value = if small { value & 0x1_0003_FFFF } else { value };
        match next() % 8 {
            0..4 => {
                irqchip.write_msr(vcpu, msr, value);
            }
            4 => drop(irqchip.read_msr(vcpu, msr)),
            5 => irqchip.signal_msi(MsiMessage { address: value, data: msr << 4 }).unwrap(),
            6 => irqchip.left_guest(vcpu, value.to_le_bytes()[0] & 0xF),
            _ => drop(irqchip.next_event(vcpu, small)),
        }
        assert!(irqchip.cr8(vcpu) <= 15);
    }
    assert!(!irqchip.write_msr(0, 0x6E0, 1) && irqchip.read_msr(0, 0x10).is_none());
    assert!(irqchip.write_msr(0, INTERRUPT_COMMAND, 0x1_0000_4500));
    assert_eq!(irqchip.next_event(1, true), ApicEvent::Init);
    assert_eq!(irqchip.next_event(1, true), ApicEvent::WaitForStartup);
    assert!(irqchip.write_msr(0, INTERRUPT_COMMAND, 0x1_0000_4699));
    assert_eq!(irqchip.next_event(1, true), ApicEvent::Startup { vector: 0x99 });
    assert_eq!(irqchip.next_event(1, true), ApicEvent::None);
    // The state can be saved and restored.
    irqchip.restore(&irqchip.save().unwrap()).unwrap();
}
