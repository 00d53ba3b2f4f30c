//! Registers, commands, activation and interrupts, with the driver model on plain memory.

use dma::HeapMemory;
use proptest::prelude::*;
use vmxnet3_testbed::{CountedInterrupts, Driver, DriverOptions, Registers as _};

use super::*;
use crate::descriptors::DESCRIPTOR;
use crate::pci::{BAR_COMMAND, BAR_DOORBELL};
use crate::registers::{self as r, command};

const MAC: MacAddress = MacAddress([2, 0, 0, 0, 0, 1]);

fn config() -> Vmxnet3Config {
    Vmxnet3Config { name: "nic0".to_owned(), mac: MAC, link_mbps: 10_000 }
}

fn device() -> (Vmxnet3<HeapMemory>, Driver<HeapMemory>, CountedInterrupts, HeapMemory) {
    let options = DriverOptions { tx_size: 16, rx_sizes: [16, 8], ..DriverOptions::default() };
    let memory = HeapMemory::new(0x1000 + options.memory_needed());
    let interrupts = CountedInterrupts::default();
    let mut device = Vmxnet3::new(config(), Box::new(interrupts.clone()));
    device.set_memory(Some(memory.clone()));
    let driver = Driver::new(memory.clone(), 0x1000, options);
    (device, driver, interrupts, memory)
}

#[test]
fn probe_and_open_go_as_the_driver_expects() {
    let (mut device, mut driver, ..) = device();
    assert_eq!(driver.open(&mut device), 0);
    assert!(device.is_active());
    assert_eq!(device.driver_revision(), 7);
    assert_eq!(driver.command(&mut device, command::GET_LINK), 10_000 << 16 | 1);
    assert_eq!(driver.command(&mut device, command::GET_PERM_MAC_LO), 0x0000_0002);
    assert_eq!(driver.command(&mut device, command::GET_PERM_MAC_HI), 0x0100);
    assert_eq!(driver.command(&mut device, command::GET_DID_LO), 0x07B0);
    assert_eq!(driver.command(&mut device, 0xF00D_0012), 0, "no capabilities");
    assert_eq!(driver.command(&mut device, 0xDEAD_BEEF), 0, "unknown commands do nothing");
    driver.command(&mut device, command::QUIESCE_DEV);
    assert!(!device.is_active());
    driver.command(&mut device, command::RESET_DEV);
    assert_eq!(driver.open(&mut device), 0);
}

#[test]
fn a_link_change_is_an_event_on_its_own_vector_that_masks_itself() {
    let (mut device, mut driver, interrupts, _) = device();
    assert_eq!(driver.open(&mut device), 0);
    device.set_link(false);
    device.set_link(false);
    assert_eq!(interrupts.take(), [1]);
    assert_eq!(driver.events(), event::LINK);
    assert_eq!(driver.command(&mut device, command::GET_LINK), 0);
    device.store(BAR_COMMAND, r::ECR, event::LINK);
    assert_eq!(driver.events(), 0);
    assert_eq!(device.load(BAR_DOORBELL, r::IMR + 8), 1, "masked itself");
    device.set_link(true);
    assert_eq!(interrupts.take(), [] as [u16; 0]);
    device.store(BAR_DOORBELL, r::IMR + 8, 0);
    assert_eq!(interrupts.take(), [1], "what was pending comes with the unmask");
}

#[test]
fn interrupts_wait_while_the_driver_has_all_disabled() {
    let (mut device, mut driver, interrupts, memory) = device();
    assert_eq!(driver.open(&mut device), 0);
    memory.store_u32(driver.shared_area() + offset::INTERRUPT_CONTROL, 1).unwrap();
    device.set_link(false);
    assert_eq!(interrupts.take(), [] as [u16; 0]);
    driver.unmask(&mut device);
    assert_eq!(interrupts.take(), [1]);
}

#[test]
fn an_activation_from_nonsense_fails_and_says_why() {
    let (mut device, mut driver, ..) = device();
    driver.write_tables();
    device.shared_area = 0x3000;
    assert!(matches!(device.activate(), Err(ActivationError::Magic { magic: 0, .. })));
    device.shared_area = u64::MAX - 7;
    assert!(matches!(device.activate(), Err(ActivationError::Memory { .. })));
    device.shared_area = 3;
    assert!(matches!(device.activate(), Err(ActivationError::Alignment { .. })));
    assert_ne!(driver.command(&mut device, command::ACTIVATE_DEV), 0);
    device.shared_area = driver.shared_area();
    device.set_bus_master(false);
    assert_eq!(device.activate(), Err(ActivationError::NoMemory));
    device.set_bus_master(true);
    assert_eq!(device.activate(), Ok(()));
}

#[test]
fn group_addresses_and_vlans_are_read_when_the_command_comes() {
    let (mut device, mut driver, ..) = device();
    assert_eq!(driver.open(&mut device), 0);
    let group = MacAddress([1, 0, 0x5E, 0, 0, 7]);
    let mut frame = [group.0.as_slice(), &[2, 0, 0, 0, 0, 9], &[0x81, 0, 0, 5, 8, 0]].concat();
    frame.resize(60, 0);
    assert!(!device.wants(&frame));
    // The driver model's addresses are of the crate built without tests.
    driver.options.groups = vec![group.to_string().parse().unwrap()];
    driver.options.vlans = vec![5];
    driver.write_filters();
    assert!(!device.wants(&frame), "not before the command");
    driver.command(&mut device, command::UPDATE_MAC_FILTERS);
    assert!(!device.wants(&frame), "not the VLAN");
    driver.command(&mut device, command::UPDATE_VLAN_FILTERS);
    assert!(device.wants(&frame));
    // The driver may reuse the table's memory afterwards.
    driver.options.groups.clear();
    driver.write_filters();
    assert!(device.wants(&frame));
}

#[test]
fn a_queue_that_stops_tells_status_event_and_interrupt() {
    let (mut device, mut driver, interrupts, memory) = device();
    assert_eq!(driver.open(&mut device), 0);
    let [tx, ..] = driver.rings();
    // A packet without an end: the device owns all descriptors, and none is the last.
    for index in 0..16 {
        memory.store_u32(tx + index * DESCRIPTOR + 8, 64 | 1 << 14).unwrap();
    }
    let mut pieces = Vec::new();
    assert_eq!(device.fetch(&mut pieces), None);
    assert_eq!(driver.status(), [(true, QueueError::NoEop.code()), (false, 0)]);
    assert_eq!(driver.events(), event::TQ_ERROR);
    assert_eq!(interrupts.take(), [1]);
    assert_eq!(device.fetch(&mut pieces), None, "it stays stopped");
    assert!(!device.has_packets());
    driver.command(&mut device, command::QUIESCE_DEV);
    driver.command(&mut device, command::RESET_DEV);
    assert_eq!(driver.open(&mut device), 0);
    assert_eq!(driver.status(), [(false, 0); 2]);
}

#[test]
fn without_memory_the_device_stands_still_and_goes_on_later() {
    let (mut device, mut driver, interrupts, memory) = device();
    assert_eq!(driver.open(&mut device), 0);
    device.set_memory(None);
    device.set_link(false);
    assert_eq!(device.fetch(&mut Vec::new()), None);
    assert_eq!(driver.status(), [(false, 0); 2]);
    assert_eq!(interrupts.take(), [] as [u16; 0]);
    device.set_memory(Some(memory));
    device.set_link(true);
    assert_eq!(interrupts.take(), [1]);
}

#[derive(Debug, Clone)]
enum Access {
    Load(u8, u64, usize),
    Store(u8, u64, Vec<u8>),
    Command(u32),
    Poke(u64, u32),
    Serve,
}

fn access() -> impl Strategy<Value = Access> {
    let codes: Vec<u32> = (0xCAFE_0000..0xCAFE_0014).chain(0xF00D_0000..0xF00D_0016).collect();
    prop_oneof![
        1 => (0..4_u8, 0..0x1010_u64, 1..9_usize).prop_map(|(b, o, l)| Access::Load(b, o, l)),
        1 => (0..4_u8, 0..0x1010_u64, prop::collection::vec(any::<u8>(), 1..9))
            .prop_map(|(b, o, d)| Access::Store(b, o, d)),
        1 => (0..9_u64, any::<u32>()).prop_map(|(r, v)| Access::Store(1, 8 * r, v.to_le_bytes().to_vec())),
        3 => prop::sample::select(codes).prop_map(Access::Command),
        // The shared area, the queue table, the groups and the five rings each start at a page.
        6 => (1..9_u64, 0..0xC8_u64, any::<u32>()).prop_map(|(p, w, v)| Access::Poke(0x1000 * p + 4 * w, v)),
        3 => Just(Access::Serve),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// No register access, table or ring of a guest causes a panic, an endless loop, or an access beyond its memory. Each call's work is
    /// bounded.
    #[test]
    fn a_hostile_driver_only_harms_itself(accesses in prop::collection::vec(access(), 0..80)) {
        let (mut device, mut driver, _, memory) = device();
        prop_assert_eq!(driver.open(&mut device), 0);
        let mut pieces = Vec::new();
        let frame = [&MAC.0[..], &[2, 0, 0, 0, 0, 9], &[0x88, 0xB5], &[7; 1400]].concat();
        for access in accesses {
            match access {
                Access::Load(bar, offset, len) => device.bar_read(bar, offset, &mut [0; 9][..len]),
                Access::Store(bar, offset, data) => device.bar_write(bar, offset, &data),
                Access::Command(code) => device.bar_write(1, r::CMD, &code.to_le_bytes()),
                Access::Poke(address, value) => memory.store_u32(address, value).unwrap(),
                Access::Serve => {
                    for _ in 0..4 {
                        if let Some(packet) = device.fetch(&mut pieces) {
                            prop_assert!(pieces.len() <= 24);
                            let mut bytes = [0; 64];
                            if device.read(&packet, &pieces, 0, &mut bytes[..packet.len.min(64)]) {
                                device.complete(&packet, TxOutcome::Discarded);
                            }
                        }
                        device.deliver(FrameBytes::whole(&frame), true);
                        device.fire();
                    }
                }
            }
        }
        device.reset();
        prop_assert!(!device.is_active());
    }
}
