//! Injects each violation beside a running driver. The driver recovers by its usual handling of a card error, or the
//! policy stops the guest (`docs/reference/vpio.md`). The card sends nothing of the violation, and each violation can
//! be replayed.

use crate::support;

use device_models::Access;
use device_models::describe::Device;
use device_models::devices::{e1000::E1000, ne2000::NE2000, rtl8139::RTL8139};
use device_models::physical::PhysicalDevice;
use device_models::reference::{e1000::E1000Card, ne2000::Ne2000, rtl8139::Rtl8139};
use support::memory::{MEMORY, OnBus, Shared, scratch, slots};
use support::nic::Driver;
use support::{Guest, Timed, config, frame, switch};
use vpio::violation::{Told, TraceError, decides_as_before, read, replay};
use vpio::{Answer, FailurePolicy, GuestId, Monitor, Violation};

const CARD: [u8; 6] = [0x00, 0x1B, 0x21, 1, 2, 3];
const ID: GuestId = GuestId(0);
/// Marks the frames that the card would send because of a violation.
const STRAY: u8 = 0x66;

/// Offset, bytes, value.
type Write = (u32, u8, u32);

const OF_RTL8139: &[(&str, &[Write])] = &[
    ("the ring is moved while the receiver runs", &[(0x30, 4, 0x4000_0000)]),
    ("a frame out of foreign memory", &[(0x20, 4, 0x4000_0000), (0x10, 4, 100)]),
    ("a frame through the end of memory", &[(0x20, 4, 0x20_0000 - 64), (0x10, 4, 100)]),
    ("a part of an address", &[(0x22, 2, 0x4000)]),
];

const OF_E1000: &[(&str, &[Write])] = &[
    ("the ring is moved while the receiver runs", &[(0x2800, 4, 0x4000_0000)]),
    ("the ring is grown while the transmitter runs", &[(0x3808, 4, 0x1_0000)]),
    ("a tail beyond the ring", &[(0x3818, 4, 0xFFFF)]),
    ("a tail beyond the ring, at its old place", &[(0x438, 4, 0xFFFF)]),
    ("a tail beyond the ring that receives", &[(0x2818, 4, 0xFFFF)]),
    ("the card's place in the ring", &[(0x3810, 4, 0x40)]),
];

const OF_NE2000: &[(&str, &[Write])] = &[
    ("a frame out of the PROM", &[(0x04, 1, 0), (0x05, 1, 0x40), (0x06, 1, 0), (0x00, 1, 0x26)]),
    ("the ring is grown while the receiver runs", &[(0x02, 1, 0xFF), (0x03, 1, 0xFE)]),
];

const POLICIES: [FailurePolicy; 4] =
    [FailurePolicy::Ignore, FailurePolicy::DeviceError, FailurePolicy::MachineCheck, FailurePolicy::Stop];

/// The wire side of a card.
trait Wired: PhysicalDevice + Timed + OnBus {
    fn arrives(&mut self, frame: &[u8]);
    fn left(&mut self) -> Vec<Vec<u8>>;
}

macro_rules! wired {
    ($($card:ty),*) => { $(impl Wired for $card {
        fn arrives(&mut self, frame: &[u8]) {
            self.receive(frame);
        }
        fn left(&mut self) -> Vec<Vec<u8>> {
            self.take_sent()
        }
    })* };
}

wired!(Rtl8139<Shared>, E1000Card<Shared>, Ne2000);

impl OnBus for Ne2000 {
    fn bus(&mut self) -> &mut Shared {
        unreachable!("an NE2000 has no DMA, and its driver no memory that it reaches")
    }
}

/// Sends a frame and receives one.
fn works<C: Wired>(monitor: &mut Monitor<C>, driver: &mut Driver) -> bool {
    let (out, into) = (frame([0xFF; 6], 0x22, 200), frame(driver.address(), 0x33, 300));
    monitor.physical().left();
    driver.send(&mut Guest::new(monitor, ID), &out);
    let mut received = Vec::new();
    for turn in 0..4 {
        monitor.physical().tick();
        if turn == 1 {
            monitor.physical().arrives(&into);
        }
        monitor.interrupt().unwrap();
        if monitor.line(ID) {
            received.extend(driver.interrupt(&mut Guest::new(monitor, ID)).0);
        }
    }
    monitor.physical().left() == [out] && received == [into]
}

/// A violation survives the file format, with the same decision. A cut line and an altered trace are errors.
fn in_a_file(violation: &Violation) {
    let line = violation.line().unwrap();
    assert_eq!(read(&format!("{line}{line}")).unwrap(), [violation.clone(), violation.clone()]);
    let cut = format!("{line}{}", &line[..line.len() - 10]);
    assert!(matches!(read(&cut), Err(TraceError::Line { number: 2, .. })));
    decides_as_before(violation).unwrap();
    let otherwise = |change: &dyn Fn(&mut Violation)| {
        let mut other = violation.clone();
        change(&mut other);
        decides_as_before(&other).unwrap_err()
    };
    let last = violation.told.iter().rposition(|told| matches!(told, Told::Access(_))).unwrap();
    assert!(matches!(otherwise(&|other| other.told.truncate(last)), TraceError::Otherwise { .. }));
    assert!(matches!(otherwise(&|other| other.refusal.why.push('.')), TraceError::Otherwise { .. }));
    assert!(matches!(otherwise(&|other| other.earlier += 1), TraceError::Otherwise { .. }));
    assert!(matches!(otherwise(&|other| other.start.device.push('x')), TraceError::Device(_)));
    assert!(matches!(otherwise(&|other| drop(other.start.states.pop())), TraceError::State(_)));
}

/// Injects a violation under a policy, and checks that the guest recovers as the policy says.
fn injected<C: Wired>(
    device: &'static Device,
    mut monitor: Monitor<C>,
    policy: FailurePolicy,
    (name, writes): (&str, &[Write]),
) {
    let what = format!("{}, {policy:?}: {name}", device.name);
    switch(&mut monitor, ID);
    let mut driver = Driver::probe(device, &mut Guest::new(&mut monitor, ID), 0);
    driver.start(&mut Guest::new(&mut monitor, ID));
    assert!(works(&mut monitor, &mut driver), "{what}: before it");
    let refused = |monitor: &Monitor<C>| monitor.counters(ID).refused;
    let before = refused(&monitor);
    let mut last = Answer::Wait;
    for &(offset, size, value) in writes {
        last = Guest::new(&mut monitor, ID).access(Access { bar: 0, offset, size, write: Some(value) });
        if refused(&monitor) > before {
            break;
        }
    }
    assert!(refused(&monitor) > before, "{what}: it isn't refused");
    for violation in monitor.violations(ID) {
        assert_eq!(replay(device, violation).unwrap().last(), Some(&violation.refusal), "{what}");
        in_a_file(violation);
    }
    monitor.physical().tick();
    let stray = monitor.physical().left();
    assert!(stray.iter().all(|frame| !frame.contains(&STRAY)), "{what}: it is sent");

    let stops = policy == FailurePolicy::Stop
        || policy == FailurePolicy::DeviceError && device.interrupts.error.is_none();
    if stops {
        // The stop lasts until the guest's machine is reset.
        assert_eq!(last, Answer::Stopped, "{what}");
        let read = Access { bar: 0, offset: 0, size: 1, write: None };
        assert_eq!(Guest::new(&mut monitor, ID).access(read), Answer::Stopped, "{what}");
        assert!(!monitor.line(ID), "{what}");
    }
    match policy {
        FailurePolicy::Ignore => assert_eq!(last, Answer::Done(0), "{what}"),
        FailurePolicy::DeviceError if !stops => {
            assert_eq!(last, Answer::Done(0), "{what}");
            assert!(monitor.line(ID), "{what}: the driver isn't told");
            let (.., error) = driver.interrupt(&mut Guest::new(&mut monitor, ID));
            assert!(error, "{what}: it is told something else");
        }
        FailurePolicy::MachineCheck => assert_eq!(last, Answer::MachineCheck, "{what}"),
        FailurePolicy::DeviceError | FailurePolicy::Stop => {}
    }
    if stops || policy == FailurePolicy::MachineCheck {
        // The guest's kernel crashed or its VM ended.
        monitor.power_on(ID).unwrap();
        driver = Driver::probe(device, &mut Guest::new(&mut monitor, ID), 0);
    }
    // As drivers do after a watchdog time-out and when they start.
    driver.start(&mut Guest::new(&mut monitor, ID));
    for round in 0..3 {
        assert!(works(&mut monitor, &mut driver), "{what}: frame {round} after it");
    }
}

#[test]
fn an_rtl8139_s_driver_goes_on_or_is_stopped() {
    for policy in POLICIES {
        for &violation in OF_RTL8139 {
            let ram = Shared::new(vec![MEMORY, scratch()]);
            ram.store(0x4000_0000, &[STRAY; 2048]);
            let mut monitor = Monitor::new(&RTL8139, Rtl8139::new(CARD, ram.clone(), true));
            monitor.set_scratch(Box::new(ram.clone()));
            monitor.add(config(0, policy, &[], slots(0)));
            injected(&RTL8139, monitor, policy, violation);
            assert_eq!(ram.log().1, 0, "{violation:?}");
        }
    }
}

#[test]
fn an_e1000_s_driver_goes_on_or_is_stopped() {
    for policy in POLICIES {
        for &violation in OF_E1000 {
            let ram = Shared::new(vec![MEMORY]);
            ram.store(0x4000_0000, &[STRAY; 2048]);
            let mut monitor = Monitor::new(&E1000, E1000Card::new(CARD, ram.clone(), true));
            monitor.add(config(0, policy, &[], slots(0)));
            injected(&E1000, monitor, policy, violation);
            assert_eq!(ram.log().1, 0, "{violation:?}");
        }
    }
}

#[test]
fn an_ne2000_s_driver_goes_on_or_is_stopped() {
    for policy in POLICIES {
        for &violation in OF_NE2000 {
            let mut monitor = Monitor::new(&NE2000, Ne2000::new(CARD));
            monitor.add(config(0, policy, &[], vpio::Slots::default()));
            injected(&NE2000, monitor, policy, violation);
        }
    }
}

/// Files that monitors wrote beside Linux's drivers in the lab (`vpio-recovery`): this program refuses each request for
/// the same reason.
#[test]
fn what_was_refused_beside_linux_drivers_is_refused_still() {
    for (name, registers) in [
        ("rtl8139", &["RBSTART", "TSD0", "TSD0", "TSAD0"][..]),
        ("e1000", &["RDBAL", "TDLEN", "TDT", "TDT", "RDT", "TDH"]),
        ("ne2000", &["CR", "PSTOP", "BNRY"]),
    ] {
        let file = format!("{}/tests/traces/{name}.jsonl", env!("CARGO_MANIFEST_DIR"));
        let violations = read(&std::fs::read_to_string(&file).unwrap()).unwrap();
        let refused: Vec<_> = violations.iter().map(|one| one.refusal.register.as_str()).collect();
        assert_eq!(refused, registers, "{file}");
        for violation in &violations {
            assert_eq!(violation.start.device, name);
            in_a_file(violation);
        }
    }
}
