use proptest::prelude::*;

use super::*;
use crate::msix::MsixLayout;

fn bar(index: u8, kind: BarKind, size: u64) -> BarLayout {
    BarLayout { index, kind, prefetchable: kind == BarKind::Memory64, size }
}

fn builder() -> ConfigSpaceBuilder {
    ConfigSpace::builder(Identity {
        vendor_id: 0x15AD,
        device_id: 0x0820,
        revision: 1,
        class: ClassCode::ETHERNET,
        subsystem_vendor_id: 0x15AD,
        subsystem_id: 0x0820,
    })
}

/// A configuration space with one of each feature.
fn full() -> ConfigSpace {
    let mut builder = builder();
    builder.bar(bar(0, BarKind::Memory32, 0x1000)).unwrap();
    builder.bar(bar(1, BarKind::Io, 0x20)).unwrap();
    builder.bar(bar(2, BarKind::Memory64, 1 << 33)).unwrap();
    builder.interrupt_pin(InterruptPin::B);
    builder.capability(CapabilityBuilder::power_management()).unwrap();
    builder.capability(CapabilityBuilder::msix(&MsixLayout::exclusive(0, 3).unwrap())).unwrap();
    builder.capability(CapabilityBuilder::express(ExpressKind::RootComplexIntegratedEndpoint)).unwrap();
    builder
        .capability(
            CapabilityBuilder::vendor_specific(&[1, 2, 3, 4, 5])
                .unwrap()
                .writable(4, &[0xF0])
                .write_1_to_clear(5, &[0x0F])
                .device_owned(6, &[0xFF]),
        )
        .unwrap();
    builder.extended_capability(ExtendedCapabilityBuilder::serial_number(0x1122_3344_5566_7788)).unwrap();
    builder.extended_capability(ExtendedCapabilityBuilder::vendor_specific(7, 1, &[9; 8]).unwrap()).unwrap();
    builder.build()
}

fn write(config: &mut ConfigSpace, offset: u16, value: u32) -> ConfigEffect {
    config.write(offset, &value.to_le_bytes())
}

fn place(config: &ConfigSpace, index: u8) -> Option<u64> {
    config.places().iter().find(|place| place.layout.index == index).unwrap().address
}

#[test]
fn the_header_says_who_the_function_is() {
    let config = full();
    assert_eq!(config.u32(VENDOR_ID), 0x0820_15AD);
    assert_eq!(config.u32(REVISION_ID), 0x0200_0001);
    assert_eq!(config.u32(SUBSYSTEM_VENDOR_ID), 0x0820_15AD);
    assert_eq!(config.u8(INTERRUPT_PIN), 2);
    assert_eq!(config.u16(STATUS), STATUS_CAPABILITY_LIST);
}

#[test]
fn standard_capabilities_form_a_list_in_order() {
    let config = full();
    let mut at = u16::from(config.u8(CAPABILITY_POINTER));
    let mut ids = Vec::new();
    while at != 0 {
        assert_eq!(at % 4, 0);
        ids.push(config.u8(at));
        at = u16::from(config.u8(at + 1));
    }
    assert_eq!(ids, [CAP_POWER_MANAGEMENT, CAP_MSIX, CAP_PCI_EXPRESS, CAP_VENDOR_SPECIFIC]);
    let vendor = config.capability_offset(CAP_VENDOR_SPECIFIC).unwrap();
    assert_eq!(config.u8(vendor + 2), 8);
    let msix = config.capability_offset(CAP_MSIX).unwrap();
    assert_eq!((config.u16(msix + 2), config.u32(msix + 4), config.u32(msix + 8)), (2, 0, 48));
}

#[test]
fn extended_capabilities_form_a_list_from_0x100() {
    let config = full();
    let first = config.u32(0x100);
    assert_eq!(first & 0xFFFFF, 0x1_0003);
    assert_eq!((config.u32(0x104), config.u32(0x108)), (0x5566_7788, 0x1122_3344));
    let second = u16::try_from(first >> 20).unwrap();
    assert_eq!(config.u32(second), 0x0001_000B);
    assert_eq!(config.u32(second + 4), 0x0101_0007);
}

#[test]
fn the_express_capability_has_its_full_length_and_type() {
    let config = full();
    assert_eq!(CapabilityBuilder::express(ExpressKind::Endpoint).len(), 0x3C);
    let at = config.capability_offset(CAP_PCI_EXPRESS).unwrap();
    assert_eq!(config.u16(at + 2), 0x92);
}

#[test]
fn sizing_yields_sizes_and_flags() {
    let mut config = full();
    for offset in (BAR0..BAR0 + 24).step_by(4) {
        write(&mut config, offset, u32::MAX);
    }
    let found: Vec<u32> = (BAR0..BAR0 + 24).step_by(4).map(|offset| config.u32(offset)).collect();
    assert_eq!(found, [0xFFFF_F000, 0xFFFF_FFE1, 0x0000_000C, 0xFFFF_FFFE, 0, 0]);
}

#[test]
fn a_bar_answers_only_while_decoded_at_a_possible_address() {
    let mut config = full();
    assert!(!write(&mut config, BAR0, 0xC000_0ABC).decoding_changed, "decoding is off");
    assert_eq!(place(&config, 0), None);
    assert!(write(&mut config, COMMAND, u32::from(COMMAND_MEMORY)).decoding_changed);
    assert_eq!(place(&config, 0), Some(0xC000_0000));
    assert!(!write(&mut config, BAR0, 0xC000_0000).decoding_changed, "nothing moved");
    assert!(write(&mut config, BAR0, 0xFFFF_FFFF).decoding_changed);
    assert_eq!(place(&config, 0), None, "being sized");
    assert!(write(&mut config, BAR0, 0xD000_0000).decoding_changed);
    assert_eq!(place(&config, 0), Some(0xD000_0000));
    assert_eq!(place(&config, 1), None, "I/O isn't decoded");
    assert!(!config.write(COMMAND, &[0x06]).decoding_changed, "bus master doesn't concern decoding");
}

#[test]
fn wide_bars_take_both_halves() {
    let mut config = full();
    write(&mut config, COMMAND, u32::from(COMMAND_MEMORY | COMMAND_IO));
    write(&mut config, BAR0 + 12, 0x8F);
    assert_eq!(place(&config, 2), Some(0x8E_0000_0000));
    write(&mut config, BAR0 + 12, u32::MAX);
    assert_eq!(place(&config, 2), None, "the end would overflow");
}

#[test]
fn io_bars_end_with_the_port_space() {
    let mut config = full();
    write(&mut config, COMMAND, u32::from(COMMAND_IO));
    write(&mut config, BAR0 + 4, 0xFFE0);
    assert_eq!(place(&config, 1), Some(0xFFE0));
    write(&mut config, BAR0 + 4, 0x1_0000);
    assert_eq!(place(&config, 1), None);
}

#[test]
fn sleeping_functions_do_not_decode_and_unsupported_states_are_refused() {
    let mut config = full();
    let control = config.capability_offset(CAP_POWER_MANAGEMENT).unwrap() + 4;
    write(&mut config, BAR0, 0xC000_0000);
    write(&mut config, COMMAND, u32::from(COMMAND_MEMORY));
    for unsupported in [1, 2] {
        assert!(!config.write(control, &[unsupported]).decoding_changed);
        assert_eq!(config.u8(control) & 3, 0);
    }
    assert!(config.write(control, &[3]).decoding_changed);
    assert_eq!(place(&config, 0), None);
    config.write(control, &[1]);
    assert_eq!(config.u8(control) & 3, 3, "an unsupported state changes nothing");
    config.write(control, &[0]);
    assert_eq!(place(&config, 0), Some(0xC000_0000));
}

#[test]
fn write_1_to_clear_bits_are_set_by_the_device_and_cleared_by_the_guest() {
    let mut config = full();
    let at = config.capability_offset(CAP_VENDOR_SPECIFIC).unwrap() + 5;
    let constant = config.u8(at) & 0xF0;
    config.device_write(at, &[0x0F]);
    assert_eq!(config.u8(at), constant | 0x0F);
    config.write(at, &[0x05]);
    assert_eq!(config.u8(at), constant | 0x0A);
    config.write(at, &[0x00]);
    assert_eq!(config.u8(at), constant | 0x0A);
}

#[test]
fn impossible_bars_are_named() {
    let mut builder = builder();
    builder.bar(bar(4, BarKind::Memory64, 0x1000)).unwrap();
    for (layout, text) in [
        (bar(6, BarKind::Memory32, 0x1000), "There is no BAR register 6"),
        (bar(255, BarKind::Memory64, 0x1000), "There is no BAR register 255"),
        (bar(5, BarKind::Memory64, 0x1000), "There is no BAR register 5"),
        (bar(5, BarKind::Memory32, 0x1000), "BAR 5 needs a register that another BAR has"),
        (bar(0, BarKind::Memory32, 0x1800), "can't have 0x1800 bytes"),
        (bar(0, BarKind::Memory32, 1 << 32), "can't have 0x100000000 bytes"),
        (bar(0, BarKind::Io, 2), "can't have 0x2 bytes"),
        (bar(0, BarKind::Memory32, 0), "can't have 0x0 bytes"),
    ] {
        let error = builder.bar(layout).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
    let prefetchable = BarLayout { prefetchable: true, ..bar(0, BarKind::Io, 4) };
    assert!(builder.bar(prefetchable).is_err());
}

#[test]
fn capability_space_ends() {
    let mut builder = builder();
    for _ in 0..3 {
        builder.capability(CapabilityBuilder::new(0x09).bytes(&[0; 62])).unwrap();
    }
    let error = builder.capability(CapabilityBuilder::new(0x05)).unwrap_err();
    assert_eq!(error, ConfigError::NoRoom { id: 5, len: 2, left: 0 });
    assert!(CapabilityBuilder::vendor_specific(&[0; 253]).is_err());
    builder.extended_capability(ExtendedCapabilityBuilder::new(1, 1).bytes(&[0; 3836])).unwrap();
    assert!(builder.extended_capability(ExtendedCapabilityBuilder::new(1, 1)).is_err());
}

#[test]
fn masks_cannot_make_capability_headers_writable() {
    let mut builder = builder();
    let at = builder.capability(CapabilityBuilder::new(0x09).writable(0, &[0xFF; 4])).unwrap();
    let mut config = builder.build();
    write(&mut config, at, 0xABCD_EF01);
    assert_eq!(config.u32(at), 0xABCD_0009);
}

#[test]
fn registers_lie_behind_the_capabilities() {
    let mut builder = builder();
    builder.capability(CapabilityBuilder::power_management()).unwrap();
    assert!(builder.register(0x44, 0, 0).is_err());
    assert!(builder.register(0x4A, 0, 0).is_err());
    assert!(builder.register(0x1000, 0, 0).is_err());
    builder.register(0x80, 0x1234_5678, 0xFF).unwrap();
    let mut config = builder.build();
    write(&mut config, 0x80, u32::MAX);
    assert_eq!(config.u32(0x80), 0x1234_56FF);
}

#[test]
fn saved_state_refuses_what_does_not_belong() {
    let saved = full().save();
    assert_eq!(saved.registers, []);
    let other = SavedConfig { identity: 1, ..saved.clone() };
    assert!(matches!(full().restore(&other), Err(ConfigError::OtherDevice { found: 1, .. })));
    let newer = SavedConfig { version: 2, ..saved.clone() };
    assert!(matches!(full().restore(&newer), Err(ConfigError::Version { found: 2, .. })));
    let damaged = SavedConfig { registers: vec![(0x1000, 0)], ..saved.clone() };
    assert!(matches!(full().restore(&damaged), Err(ConfigError::Offset { offset: 0x1000 })));
    // BAR 0 would be larger than the device's.
    let grown = SavedConfig { registers: vec![(BAR0, 0xC000_0800)], ..saved };
    assert!(matches!(full().restore(&grown), Err(ConfigError::Constant { offset: BAR0, .. })));
}

#[test]
fn the_interrupt_status_is_published_not_saved() {
    let mut config = full();
    config.set_interrupt_status(true);
    assert_eq!(config.u16(STATUS), STATUS_CAPABILITY_LIST | STATUS_INTERRUPT);
    config.write(STATUS, &[0xFF, 0xFF]);
    assert_eq!(config.u16(STATUS), STATUS_CAPABILITY_LIST | STATUS_INTERRUPT);
    assert_eq!(config.save().registers, []);
}

/// The reference model of a write: bit by bit.
fn model_write(value: &mut [u8], masks: &Masks, offset: u16, data: &[u8]) {
    for (i, byte) in data.iter().enumerate() {
        let at = usize::from(offset) + i;
        if at >= value.len() {
            return;
        }
        for bit in (0..8).map(|bit| 1_u8 << bit) {
            let one = byte & bit != 0;
            if masks.writable[at] & bit != 0 {
                value[at] = if one { value[at] | bit } else { value[at] & !bit };
            } else if masks.clearable[at] & bit != 0 && one {
                value[at] &= !bit;
            }
        }
    }
}

proptest! {
    /// Any sequence of accesses with any offset and size matches the bit-by-bit model.
    #[test]
    fn random_accesses_follow_the_model(
        accesses in prop::collection::vec((any::<u16>(), prop::collection::vec(any::<u8>(), 0..9), any::<bool>()), 0..200),
        near in any::<bool>(),
    ) {
        let mut config = full();
        let control = usize::from(config.capability_offset(CAP_POWER_MANAGEMENT).unwrap() + 4);
        let mut model = config.value.clone();
        for (offset, data, write) in accesses {
            let offset = if near { offset & 0x1FF } else { offset };
            if write {
                let state = model[control] & 3;
                model_write(&mut model, &config.template.masks, offset, &data);
                if matches!(model[control] & 3, 1 | 2) {
                    model[control] = model[control] & !3 | state;
                }
                let before = config.places();
                let effect = config.write(offset, &data);
                prop_assert_eq!(effect.decoding_changed, before != config.places());
            } else {
                let mut found = data.clone();
                config.read(offset, &mut found);
                for (i, byte) in found.iter().enumerate() {
                    prop_assert_eq!(*byte, model.get(usize::from(offset) + i).copied().unwrap_or(0xFF));
                }
            }
            prop_assert_eq!(&config.value, &model);
        }
    }

    /// After any writes, saving and restoring yields the same bytes, also through JSON.
    #[test]
    fn restore_gives_what_was_saved(
        writes in prop::collection::vec((0_u16..0x200, any::<u32>()), 0..100),
    ) {
        let mut config = full();
        for (offset, value) in writes {
            write(&mut config, offset, value);
        }
        let text = serde_json::to_string(&config.save()).unwrap();
        let restored = full().restore(&serde_json::from_str(&text).unwrap()).unwrap();
        prop_assert_eq!(restored.value, config.value);
    }

    /// Restoring never panics on any state.
    #[test]
    fn damaged_state_is_an_error_or_harmless(
        registers in prop::collection::vec((any::<u16>(), any::<u32>()), 0..20),
    ) {
        let saved = SavedConfig { registers, ..full().save() };
        if let Ok(config) = full().restore(&saved) {
            prop_assert_eq!(config.u32(0), full().u32(0));
        }
    }
}
