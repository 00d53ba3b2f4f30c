//! A commodity NIC under the monitor with hostile guests: requests of the description's grammar, frames, time, hand-offs.
//!
//! Checked:
//! - There is no panic and no endless loop.
//! - The device's own log has no access outside its packet memory (NE2000) or outside the resident guest's memory (RTL8139).
//! - The replay of a refused request's trace ends with the same refusal.
//! - A saved model is restored identically.

#![no_main]

use arbitrary::{Arbitrary, Unstructured};
use device_models::PhysicalDevice;
use device_models::describe::Device;
use device_models::devices::{ne2000, rtl8139};
use device_models::grammar::{Choices, Grammar};
use device_models::model::Model;
use device_models::physical::Bus;
use device_models::reference::ne2000::Ne2000;
use device_models::reference::rtl8139::Rtl8139;
use libfuzzer_sys::fuzz_target;
use vpio::violation::replay;
use vpio::{FailurePolicy, GuestConfig, GuestId, Monitor, Slot, Slots};

const STEPS: usize = 200;
const MEMORY: u64 = 0x10_0000;

/// The fuzzer's bytes as choices; zeros after their end.
struct Bytes<'a>(Unstructured<'a>);

impl Choices for Bytes<'_> {
    fn below(&mut self, limit: usize) -> usize {
        self.0.choose_index(limit).unwrap_or(0)
    }
    fn any(&mut self) -> u32 {
        u32::arbitrary(&mut self.0).unwrap_or(0)
    }
}

/// A bus on which only the guests' memory may be touched.
struct Guarded;

impl Bus for Guarded {
    fn read(&mut self, address: u64, into: &mut [u8]) {
        self.write(address, into);
        into.fill(0x11);
    }
    fn write(&mut self, address: u64, data: &[u8]) {
        let end = address + data.len() as u64;
        assert!(address >= 2 * MEMORY && end <= 4 * MEMORY, "DMA to {address:X}..{end:X}");
    }
}

fn slots(number: u64) -> Slots {
    Slots(vec![Slot {
        guest_base: MEMORY,
        length: MEMORY,
        device_base: (2 + number) * MEMORY,
        writable: true,
    }])
}

fn run<P: PhysicalDevice>(
    device: &'static Device,
    card: P,
    choices: &mut Bytes<'_>,
    mut outside: impl FnMut(&mut P, u32),
) {
    let mut monitor = Monitor::new(device, card);
    for number in 0..2u8 {
        monitor.add(GuestConfig {
            name: format!("guest{number}"),
            address: [2, 0, 0, 0, 0, number],
            permissions: Vec::new(),
            policy: if number == 0 { FailurePolicy::Ignore } else { FailurePolicy::DeviceError },
            memory: Box::new(slots(u64::from(number))),
        });
    }
    let grammar = Grammar::new(device);
    for _ in 0..STEPS {
        if choices.0.is_empty() {
            break;
        }
        match choices.below(16) {
            0 => {
                let to = GuestId(choices.below(2));
                monitor.switch(to, choices.below(2) == 0).expect("the reference device is there");
            }
            1 => monitor.interrupt().expect("the reference device is there"),
            2 => {
                let choice = choices.any();
                outside(monitor.physical(), choice);
            }
            _ => {
                let id = GuestId(choices.below(2));
                for access in grammar.request(choices) {
                    monitor.access(id, access).expect("the reference device is there");
                }
            }
        }
        outside(monitor.physical(), 0);
    }
    for number in 0..2 {
        let model = monitor.model(GuestId(number));
        let restored = Model::restore(device, &model.save()).expect("what was saved");
        assert_eq!(restored.graph(), model.graph());
        for violation in monitor.violations(GuestId(number)) {
            let refusals = replay(device, violation).expect("what was recorded");
            assert_eq!(refusals.last(), Some(&violation.refusal));
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut choices = Bytes(Unstructured::new(bytes));
    if choices.below(2) == 0 {
        run(&ne2000::NE2000, Ne2000::new([2; 6]), &mut choices, |card, choice| {
            match choice & 3 {
                1 => card.tick(),
                2 | 3 => drop(card.receive(&vec![0xFF; 14 + choice as usize % 1501])),
                _ => {}
            }
            for touch in card.take_log() {
                let (from, to) = (u64::from(ne2000::MEMORY), u64::from(ne2000::MEMORY_END));
                assert!(touch.address >= from && touch.address + touch.length <= to, "{touch:X?}");
            }
        });
    } else {
        // Without scratch memory for frames to itself, the monitor restarts the guests' rings.
        run(
            &rtl8139::RTL8139,
            Rtl8139::new([2; 6], Guarded, false),
            &mut choices,
            |card, choice| match choice & 3 {
                1 => card.tick(),
                2 | 3 => drop(card.receive(&vec![0xFF; 14 + choice as usize % 1501])),
                _ => {}
            },
        );
    }
});
