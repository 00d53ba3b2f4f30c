//! MSI-X of one function: masking, pending bits, saved state, and a model that random accesses follow.

use std::sync::Arc;

use pci::interrupt::{MsiMessage, MsiVector};
use pci::msix::{Msix, MsixError, MsixLayout, SavedMsix};
use pci::registers::{MSIX_ENABLE, MSIX_FUNCTION_MASK};
use pci_testbed::FakeVector;
use proptest::prelude::*;

fn msix(count: u16) -> (Msix, Vec<Arc<FakeVector>>) {
    let fakes: Vec<_> = (0..count).map(|_| FakeVector::new()).collect();
    let msix = Msix::new(MsixLayout::exclusive(1, count).unwrap(), outputs(&fakes)).unwrap();
    (msix, fakes)
}

fn outputs(fakes: &[Arc<FakeVector>]) -> Vec<Arc<dyn MsiVector>> {
    fakes.iter().map(|fake| fake.clone() as Arc<dyn MsiVector>).collect()
}

/// Writes a table entry dword by dword, as Linux does.
fn program(msix: &Msix, vector: u64, address: u64, data: u32, masked: bool) {
    let at = vector * 16;
    msix.table_write(at, &address.to_le_bytes()[..4]);
    msix.table_write(at + 4, &address.to_le_bytes()[4..]);
    msix.table_write(at + 8, &data.to_le_bytes());
    msix.table_write(at + 12, &u32::from(masked).to_le_bytes());
}

fn pending(msix: &Msix, vector: u64) -> bool {
    let mut byte = [0];
    msix.pba_read(vector / 8, &mut byte);
    byte[0] >> (vector % 8) & 1 != 0
}

const ENABLED: u16 = MSIX_ENABLE;
const FUNCTION_MASKED: u16 = MSIX_ENABLE | MSIX_FUNCTION_MASK;

#[test]
fn an_enabled_unmasked_vector_sends_its_message() {
    let (msix, fakes) = msix(3);
    program(&msix, 1, 0xFEE0_1000, 0x41, false);
    msix.set_control(ENABLED);
    msix.trigger(1).unwrap();
    assert_eq!(fakes[1].sent(), [MsiMessage { address: 0xFEE0_1000, data: 0x41 }]);
    assert!(!pending(&msix, 1));
    assert_eq!(fakes[0].message(), None, "vectors are masked at power-on");
}

#[test]
fn each_way_of_masking_keeps_the_interrupt_for_later() {
    for (masked, control) in [(true, ENABLED), (false, FUNCTION_MASKED), (false, 0)] {
        let (msix, fakes) = msix(70);
        program(&msix, 69, 0xFEE0_0000, 0x41, masked);
        msix.set_control(control);
        msix.trigger(69).unwrap();
        msix.trigger(69).unwrap();
        assert_eq!(fakes[69].count(), 0);
        assert!(pending(&msix, 69));
        program(&msix, 69, 0xFEE0_0000, 0x42, false);
        msix.set_control(ENABLED);
        assert_eq!(fakes[69].sent(), [MsiMessage { address: 0xFEE0_0000, data: 0x42 }]);
        assert!(!pending(&msix, 69));
    }
}

#[test]
fn vectors_that_do_not_exist_send_nothing() {
    let (msix, fakes) = msix(2);
    msix.set_control(ENABLED);
    msix.trigger(2).unwrap();
    msix.trigger(u16::MAX).unwrap();
    assert!(fakes.iter().all(|fake| fake.count() == 0));
}

#[test]
fn a_refused_interrupt_stays_pending_and_goes_out_later() {
    let (msix, fakes) = msix(1);
    program(&msix, 0, 0xFEE0_0000, 1, false);
    msix.set_control(ENABLED);
    fakes[0].refuse(true);
    assert!(msix.trigger(0).is_err());
    assert!(pending(&msix, 0));
    fakes[0].refuse(false);
    msix.set_control(FUNCTION_MASKED);
    msix.set_control(ENABLED);
    assert_eq!(fakes[0].count(), 1);
}

#[test]
fn reserved_bits_stay_zero() {
    let (msix, _) = msix(1);
    msix.table_write(0, &[0xFF; 16]);
    let mut entry = [0; 16];
    msix.table_read(0, &mut entry);
    assert_eq!(entry[0], 0xFC);
    assert_eq!(entry[12..], [1, 0, 0, 0]);
}

#[test]
fn accesses_across_entries_and_ends_are_safe() {
    let (msix, _) = msix(2);
    msix.table_write(12, &[0; 8]);
    msix.table_write(28, &[0; 8]);
    msix.table_write(u64::MAX - 3, &[0xFF; 8]);
    let mut data = [0xAA; 8];
    msix.table_read(28, &mut data);
    assert_eq!(data, [0; 8]);
    msix.table_read(u64::MAX - 3, &mut data);
    msix.pba_read(u64::MAX - 3, &mut data);
    assert_eq!(data, [0; 8]);
    let mut mask = [0; 4];
    msix.table_read(12, &mut mask);
    assert_eq!(mask, [0; 4]);
}

#[test]
fn the_bar_serves_table_and_pending_bits_and_nothing_else() {
    let (msix, _) = msix(4);
    let mut data = [0; 4];
    assert!(msix.bar_read(1, 60, &mut data));
    assert!(msix.bar_write(1, 60, &[0; 4]));
    msix.trigger(0).unwrap();
    assert!(msix.bar_write(1, 64, &[0; 4]), "pending bits are read-only");
    assert!(msix.bar_read(1, 64, &mut data));
    assert_eq!(data, [1, 0, 0, 0]);
    assert!(!msix.bar_read(1, 72, &mut data));
    assert!(!msix.bar_write(2, 0, &data));
}

#[test]
fn layouts_are_checked() {
    assert_eq!(MsixLayout::exclusive(0, 2048).unwrap().bar_size(), 0x1_0000);
    assert_eq!(MsixLayout::exclusive(0, 1).unwrap().bar_size(), 4096);
    assert!(matches!(MsixLayout::exclusive(0, 0), Err(MsixError::Count { .. })));
    assert!(matches!(MsixLayout::exclusive(0, 2049), Err(MsixError::Count { .. })));
    assert!(matches!(MsixLayout::new(4, (6, 0), (0, 0)), Err(MsixError::Place { .. })));
    assert!(matches!(MsixLayout::new(4, (0, 4), (1, 0)), Err(MsixError::Place { .. })));
    assert!(matches!(MsixLayout::new(4, (0, 0), (0, 56)), Err(MsixError::Overlap { .. })));
    assert!(matches!(MsixLayout::new(4, (0, 0), (0, 0)), Err(MsixError::Overlap { .. })));
    assert!(MsixLayout::new(4, (0, 8), (0, 0)).is_ok());
    let layout = MsixLayout::exclusive(0, 2).unwrap();
    assert!(matches!(Msix::new(layout, Vec::new()), Err(MsixError::VectorCount { wanted: 2, given: 0 })));
}

#[test]
fn restoring_sends_what_was_pending() {
    let (msix, _) = msix(2);
    program(&msix, 0, 0xFEE0_0000, 0x30, false);
    program(&msix, 1, 0xFEE0_0000, 0x31, true);
    msix.set_control(FUNCTION_MASKED);
    msix.trigger(0).unwrap();
    msix.trigger(1).unwrap();
    let text = serde_json::to_string(&msix.save()).unwrap();
    let mut saved: SavedMsix = serde_json::from_str(&text).unwrap();
    assert_eq!(saved, msix.save());
    saved.masked = false;
    let fakes: Vec<_> = (0..2).map(|_| FakeVector::new()).collect();
    let restored = Msix::restore(*msix.layout(), outputs(&fakes), &saved).unwrap();
    assert_eq!((fakes[0].count(), fakes[1].count()), (1, 0));
    assert!(pending(&restored, 1));
    program(&restored, 1, 0xFEE0_0000, 0x31, false);
    assert_eq!(fakes[1].count(), 1);
    saved.vectors.pop();
    assert!(Msix::restore(*msix.layout(), outputs(&fakes), &saved).is_err());
    saved.version = 2;
    assert!(matches!(Msix::restore(*msix.layout(), outputs(&fakes), &saved), Err(MsixError::Version { .. })));
}

#[test]
fn reset_masks_and_forgets() {
    let (msix, fakes) = msix(1);
    program(&msix, 0, 0xFEE0_0000, 0x30, false);
    msix.set_control(ENABLED);
    msix.set_control(FUNCTION_MASKED);
    msix.trigger(0).unwrap();
    msix.reset();
    assert_eq!(fakes[0].message(), None);
    assert!(!pending(&msix, 0) && !msix.enabled());
    msix.set_control(ENABLED);
    assert_eq!(fakes[0].count(), 0);
}

#[derive(Debug, Clone)]
enum Step {
    Trigger(u16),
    Mask(u16),
    Unmask(u16),
    Control(bool, bool),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (0_u16..4).prop_map(Step::Trigger),
        (0_u16..4).prop_map(Step::Mask),
        (0_u16..4).prop_map(Step::Unmask),
        any::<(bool, bool)>().prop_map(|(enabled, masked)| Step::Control(enabled, masked)),
    ]
}

proptest! {
    /// No interrupt is lost or invented: after each step, sent and pending interrupts match a model of one vector.
    #[test]
    fn random_masking_loses_no_interrupt(steps in prop::collection::vec(step(), 0..100)) {
        let (msix, fakes) = msix(4);
        let (mut sent, mut waiting, mut masked) = ([0_usize; 4], [false; 4], [true; 4]);
        let mut delivers = false;
        for step in steps {
            match step {
                Step::Trigger(vector) => {
                    waiting[usize::from(vector)] = true;
                    msix.trigger(vector).unwrap();
                }
                Step::Mask(vector) | Step::Unmask(vector) => {
                    masked[usize::from(vector)] = matches!(step, Step::Mask(_));
                    program(&msix, vector.into(), 0xFEE0_0000, vector.into(), masked[usize::from(vector)]);
                }
                Step::Control(enabled, function_masked) => {
                    delivers = enabled && !function_masked;
                    let mask = if function_masked { MSIX_FUNCTION_MASK } else { 0 };
                    msix.set_control(if enabled { MSIX_ENABLE | mask } else { mask });
                }
            }
            for vector in 0..4 {
                if waiting[vector] && delivers && !masked[vector] {
                    waiting[vector] = false;
                    sent[vector] += 1;
                }
                prop_assert_eq!(fakes[vector].count(), sent[vector]);
                prop_assert_eq!(pending(&msix, u64::try_from(vector).unwrap()), waiting[vector]);
            }
        }
    }

    /// Table accesses of any offset and length never panic. Reads match a byte array of the table with its reserved
    /// bits.
    #[test]
    fn random_table_accesses_follow_the_model(
        accesses in prop::collection::vec((0_u64..80, prop::collection::vec(any::<u8>(), 0..24)), 0..50),
    ) {
        let (msix, _) = msix(4);
        let mut model = vec![0_u8; 64];
        for entry in model.chunks_mut(16) {
            entry[12] = 1;
        }
        for (offset, data) in accesses {
            msix.table_write(offset, &data);
            for (at, byte) in (usize::try_from(offset).unwrap()..64).zip(&data) {
                model[at] = match at % 16 {
                    0 => byte & !3,
                    12 => byte & 1,
                    13..=15 => 0,
                    _ => *byte,
                };
            }
            let mut found = vec![0xAA; 64];
            msix.table_read(0, &mut found);
            prop_assert_eq!(&found, &model);
        }
    }
}

#[test]
fn threads_that_trigger_while_another_masks_lose_nothing() {
    let (msix, fakes) = msix(1);
    program(&msix, 0, 0xFEE0_0000, 1, false);
    msix.set_control(ENABLED);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| (0..1000).for_each(|_| msix.trigger(0).unwrap()));
        }
        scope.spawn(|| {
            for round in 0..1000 {
                msix.table_write(12, &[u8::from(round % 2 == 0), 0, 0, 0]);
                msix.set_control(if round % 3 == 0 { FUNCTION_MASKED } else { ENABLED });
            }
        });
    });
    let before = fakes[0].count();
    let owed = pending(&msix, 0);
    program(&msix, 0, 0xFEE0_0000, 1, false);
    msix.set_control(ENABLED);
    assert_eq!(fakes[0].count(), before + usize::from(owed));
    assert!(before + usize::from(owed) > 0);
    msix.trigger(0).unwrap();
    assert_eq!(fakes[0].count(), before + usize::from(owed) + 1);
}
