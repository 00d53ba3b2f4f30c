//! The root complex: its two configuration mechanisms, placement of BARs, INTx routing, reset and saved state.

use std::sync::Arc;

use pci::config::InterruptPin;
use pci::function::{BarKind, BarLayout, PciFunction};
use pci::registers::*;
use pci::root::{
    AddressRange, FunctionAddress, PciRoot, RootConfig, RootError, SavedRoot, Windows, intx_gsi,
};
use pci_testbed::{FakeFunction, FakeFunctionBuilder, FakeIntx, FakeMsi, RecordingPlacer};
use proptest::prelude::*;

const WINDOWS: Windows = Windows {
    memory32: AddressRange { start: 0xC000_0000, len: 0x1000_0000 },
    memory64: Some(AddressRange { start: 1 << 40, len: 1 << 36 }),
    io: Some(AddressRange { start: 0xC000, len: 0x1000 }),
};

struct Bench {
    root: PciRoot,
    placer: Arc<RecordingPlacer>,
    intx: Arc<FakeIntx>,
}

impl Bench {
    fn new() -> Self {
        Self::with(RecordingPlacer::new())
    }

    fn with(placer: Arc<RecordingPlacer>) -> Self {
        let intx = FakeIntx::new();
        let root = PciRoot::new(Self::config(&placer, &intx));
        Self { root, placer, intx }
    }

    fn config(placer: &Arc<RecordingPlacer>, intx: &Arc<FakeIntx>) -> RootConfig {
        RootConfig { windows: WINDOWS, placer: placer.clone(), intx: intx.clone() }
    }

    fn plug(&self, slot: u8, function: u8, what: FakeFunctionBuilder) -> Arc<FakeFunction> {
        let what = what.build();
        self.root.plug(address(slot, function), what.clone()).unwrap();
        what
    }

    fn read(&self, slot: u8, function: u8, register: u16) -> u32 {
        let mut data = [0; 4];
        self.root.ecam_read(ecam(slot, function, register), &mut data);
        u32::from_le_bytes(data)
    }

    fn write(&self, slot: u8, function: u8, register: u16, value: u32) {
        self.root.ecam_write(ecam(slot, function, register), &value.to_le_bytes());
    }

    fn command(&self, slot: u8, value: u16) {
        self.root.ecam_write(ecam(slot, 0, COMMAND), &value.to_le_bytes());
    }
}

fn address(slot: u8, function: u8) -> FunctionAddress {
    FunctionAddress::new(slot, function).unwrap()
}

fn ecam(slot: u8, function: u8, register: u16) -> u64 {
    u64::from(slot) << 15 | u64::from(function) << 12 | u64::from(register)
}

fn fake(name: &str) -> FakeFunctionBuilder {
    FakeFunction::builder(name)
}

#[test]
fn a_new_root_shows_its_host_bridge_and_nothing_else() {
    let bench = Bench::new();
    assert_eq!(bench.read(0, 0, 0), 0x0008_1B36);
    assert_eq!(bench.read(0, 0, 8), 0x0600_0000);
    for devfn in 1..=255_u8 {
        let at = FunctionAddress::from_devfn(devfn);
        assert_eq!(bench.read(at.slot(), at.function(), 0), u32::MAX);
    }
}

#[test]
fn multi_function_slots_may_have_holes_and_say_so_in_the_header_type() {
    let bench = Bench::new();
    bench.plug(3, 0, fake("a"));
    assert_eq!(bench.read(3, 0, 0x0C) >> 16, 0);
    bench.plug(3, 5, fake("b"));
    assert_eq!(bench.read(3, 0, 0x0C) >> 16, 0x80);
    let mut byte = [0];
    bench.root.ecam_read(ecam(3, 5, HEADER_TYPE), &mut byte);
    assert_eq!(byte, [0x80]);
    assert_eq!(bench.read(3, 1, 0), u32::MAX);
    bench.write(3, 1, 4, 7);
}

#[test]
fn plugging_refuses_what_a_guest_could_not_use() {
    let bench = Bench::new();
    bench.plug(1, 0, fake("a"));
    let plug = |slot, function, name: &str| bench.root.plug(address(slot, function), fake(name).build());
    assert!(matches!(plug(1, 0, "b"), Err(RootError::Taken { .. })));
    assert!(matches!(plug(2, 1, "b"), Err(RootError::NoFunctionZero { .. })));
    assert!(matches!(plug(2, 0, "a"), Err(RootError::SameName { .. })));
    assert!(FunctionAddress::new(32, 0).is_err() && FunctionAddress::new(0, 8).is_err());
    for slot in 2..32 {
        let at = bench.root.plug_next(fake(&format!("f{slot}")).build()).unwrap();
        assert_eq!(at, address(slot, 0));
    }
    assert!(matches!(bench.root.plug_next(fake("last").build()), Err(RootError::NoFreeSlot { .. })));
}

#[test]
fn the_port_pair_reaches_the_first_256_bytes() {
    let bench = Bench::new();
    bench.plug(2, 0, fake("a").bar(0, BarKind::Memory32, 0x1000));
    let root = &bench.root;
    let mut dword = [0; 4];
    root.ports_write(0, &0x8000_1010_u32.to_le_bytes());
    root.ports_read(0, &mut dword);
    assert_eq!(u32::from_le_bytes(dword), 0x8000_1010);
    root.ports_write(4, &0xC123_4567_u32.to_le_bytes());
    assert_eq!(bench.read(2, 0, 0x10), 0xC123_4000);
    let mut word = [0; 2];
    root.ports_read(6, &mut word);
    assert_eq!(word, [0x23, 0xC1]);
    root.ports_write(7, &[0xC2]);
    assert_eq!(bench.read(2, 0, 0x10), 0xC223_4000);
    // Across the end of the ports: only the part before it.
    root.ports_read(6, &mut dword);
    assert_eq!(dword, [0x23, 0xC2, 0xFF, 0xFF]);
}

#[test]
fn the_latch_answers_to_dwords_only() {
    let bench = Bench::new();
    let root = &bench.root;
    root.ports_write(0, &0x8000_0000_u32.to_le_bytes());
    // Linux does this first when it probes for configuration mechanism 1.
    root.ports_write(3, &[0x01]);
    root.ports_write(0, &[0; 2]);
    root.ports_write(1, &[0x0E]);
    let mut dword = [0; 4];
    root.ports_read(0, &mut dword);
    assert_eq!(u32::from_le_bytes(dword), 0x8000_0000);
    let mut byte = [0];
    root.ports_read(0, &mut byte);
    assert_eq!(byte, [0xFF]);
    root.ports_write(0, &0x0000_0000_u32.to_le_bytes());
    root.ports_read(4, &mut dword);
    assert_eq!(dword, [0xFF; 4], "not enabled");
    root.ports_write(0, &0x8001_0000_u32.to_le_bytes());
    root.ports_read(4, &mut dword);
    assert_eq!(dword, [0xFF; 4], "bus 1");
}

#[test]
fn bars_are_assigned_in_their_windows_and_answer_once_enabled() {
    let bench = Bench::new();
    let msi = FakeMsi::new();
    bench.plug(1, 0, fake("a").bar(0, BarKind::Memory64, 1 << 20).bar(2, BarKind::Io, 0x20).msix(3, 4, msi));
    bench.plug(2, 0, fake("b").bar(1, BarKind::Memory32, 1 << 24).pin(InterruptPin::A));
    bench.root.assign_bars().unwrap();
    assert_eq!(bench.placer.placed(), []);
    assert_eq!(bench.read(2, 0, 0x3C) & 0xFF, 18);
    bench.command(1, COMMAND_IO | COMMAND_MEMORY);
    bench.command(2, COMMAND_MEMORY);
    assert_eq!(bench.placer.address("a", 0), Some(1 << 40));
    assert_eq!(bench.placer.address("a", 2), Some(0xC000));
    assert_eq!(bench.placer.address("b", 1), Some(0xC000_0000));
    assert_eq!(bench.placer.address("a", 3), Some(0xC100_0000));
    bench.command(1, COMMAND_MEMORY);
    assert_eq!(bench.placer.address("a", 2), None);
}

#[test]
fn windows_that_are_too_small_are_reported() {
    let bench = Bench::new();
    bench.plug(1, 0, fake("big").bar(0, BarKind::Memory32, 1 << 30));
    let error = bench.root.assign_bars().unwrap_err().to_string();
    assert!(error.contains("BAR 0 of big"), "{error}");
}

#[test]
fn the_sizing_sequence_of_linux_leaves_the_bar_where_it_was() {
    let bench = Bench::new();
    bench.plug(1, 0, fake("a").bar(0, BarKind::Memory64, 0x4000));
    bench.root.assign_bars().unwrap();
    bench.command(1, COMMAND_MEMORY);
    let before = bench.placer.placed();
    // Disable decoding, size both halves, restore, enable.
    bench.command(1, 0);
    let halves = [bench.read(1, 0, 0x10), bench.read(1, 0, 0x14)];
    for (register, half) in [(0x10, halves[0]), (0x14, halves[1])] {
        bench.write(1, 0, register, u32::MAX);
        bench.read(1, 0, register);
        bench.write(1, 0, register, half);
    }
    bench.command(1, COMMAND_MEMORY);
    assert_eq!(bench.placer.placed(), before);
    // The same with decoding on, as some guests do.
    for (register, half) in [(0x10, halves[0]), (0x14, halves[1])] {
        bench.write(1, 0, register, u32::MAX);
        bench.write(1, 0, register, half);
    }
    assert_eq!(bench.placer.placed(), before);
}

#[test]
fn both_halves_of_a_wide_bar_move_at_once_with_a_64_bit_write() {
    let bench = Bench::new();
    bench.plug(1, 0, fake("a").bar(0, BarKind::Memory64, 0x4000));
    bench.root.assign_bars().unwrap();
    bench.command(1, COMMAND_MEMORY);
    let calls = bench.placer.calls();
    let target: u64 = (1 << 40) + 0x8_0000_4000;
    bench.root.ecam_write(ecam(1, 0, 0x10), &target.to_le_bytes());
    assert_eq!(bench.placer.address("a", 0), Some(target));
    assert_eq!(bench.placer.calls(), calls + 2);
}

#[test]
fn bars_of_two_functions_can_swap_addresses_while_decoding() {
    let bench = Bench::new();
    for (slot, name) in [(1, "a"), (2, "b")] {
        bench.plug(slot, 0, fake(name).bar(0, BarKind::Memory32, 0x1000));
    }
    bench.root.assign_bars().unwrap();
    bench.command(1, COMMAND_MEMORY);
    bench.command(2, COMMAND_MEMORY);
    let (a, b) = (bench.read(1, 0, 0x10), bench.read(2, 0, 0x10));
    bench.write(1, 0, 0x10, b);
    assert_eq!(bench.placer.address("a", 0), None, "refused: b is there");
    let tree = bench.root.inspect();
    assert_eq!(tree["functions"]["00:01.0"]["bars"][0]["state"], "refused");
    assert_eq!(tree["functions"]["00:01.0"]["bars"][0]["reason"], "BAR 0 of 00:02.0 is there");
    bench.write(2, 0, 0x10, a);
    assert_eq!(bench.placer.address("a", 0), Some(b.into()));
    assert_eq!(bench.placer.address("b", 0), Some(a.into()));
}

#[test]
fn bars_of_one_function_can_swap_by_disabling_decode() {
    let bench = Bench::new();
    bench.plug(1, 0, fake("a").bar(0, BarKind::Memory32, 0x1000).bar(1, BarKind::Memory32, 0x1000));
    bench.root.assign_bars().unwrap();
    bench.command(1, COMMAND_MEMORY);
    let both = bench.read(1, 0, 0x10).to_le_bytes().into_iter().chain(bench.read(1, 0, 0x14).to_le_bytes());
    let mut swapped: Vec<u8> = both.collect();
    swapped.rotate_left(4);
    // One 64-bit write swaps both at once, even while decoding.
    bench.root.ecam_write(ecam(1, 0, 0x10), &swapped);
    assert_eq!(bench.placer.address("a", 0), Some(0xC000_1000));
    assert_eq!(bench.placer.address("a", 1), Some(0xC000_0000));
}

#[test]
fn a_bar_on_ram_or_outside_the_windows_is_refused_until_it_moves() {
    let ram = AddressRange { start: 0xC800_0000, len: 0x1000 };
    let bench = Bench::with(RecordingPlacer::with_occupied(vec![ram]));
    bench.plug(1, 0, fake("a").bar(0, BarKind::Memory32, 0x1000).bar(1, BarKind::Io, 8));
    bench.command(1, COMMAND_MEMORY | COMMAND_IO);
    for bad in [0xC800_0000, 0x1000, 0xFEE0_0000, 0xD000_0000, 0xFFFF_F000] {
        bench.write(1, 0, 0x10, bad);
        assert_eq!(bench.placer.address("a", 0), None, "at {bad:#x}");
    }
    bench.write(1, 0, 0x10, 0xC800_1000);
    assert_eq!(bench.placer.address("a", 0), Some(0xC800_1000));
    bench.write(1, 0, 0x14, 0x3F8);
    assert_eq!(bench.placer.address("a", 1), None);
    bench.write(1, 0, 0x14, 0xC010);
    assert_eq!(bench.placer.address("a", 1), Some(0xC010));
}

#[test]
fn intx_is_a_wired_or_over_the_swizzle() {
    let bench = Bench::new();
    let functions: Vec<_> = [(1, "a", InterruptPin::A), (5, "b", InterruptPin::A), (4, "c", InterruptPin::B)]
        .map(|(slot, name, pin)| bench.plug(slot, 0, fake(name).pin(pin)))
        .into();
    // All three are on GSI 17.
    let routes: Vec<_> = bench.root.routing_table().iter().map(|route| (route.slot, route.gsi)).collect();
    assert_eq!(routes, [(1, 17), (4, 17), (5, 17)]);
    functions[0].intx().set_pending(true).unwrap();
    functions[1].intx().set_pending(true).unwrap();
    functions[1].intx().set_pending(true).unwrap();
    functions[0].intx().set_pending(false).unwrap();
    assert!(bench.intx.asserted(17));
    assert_eq!(bench.read(5, 0, 4) >> 16 & 8, 8, "the status bit");
    bench.command(5, COMMAND_INTX_DISABLE);
    assert!(!bench.intx.asserted(17));
    assert_eq!(bench.read(5, 0, 4) >> 16 & 8, 8, "pending all the same");
    functions[2].intx().set_pending(true).unwrap();
    bench.command(5, 0);
    functions[2].intx().set_pending(false).unwrap();
    assert!(bench.intx.asserted(17));
    functions[1].intx().set_pending(false).unwrap();
    assert!(!bench.intx.asserted(17));
}

#[test]
fn the_swizzle_covers_four_gsis() {
    let gsis: Vec<_> = (0..5).map(|slot| intx_gsi(slot, InterruptPin::A)).collect();
    assert_eq!(gsis, [16, 17, 18, 19, 16]);
    assert_eq!(intx_gsi(31, InterruptPin::D), 18);
}

#[test]
fn reset_returns_to_the_state_after_assignment() {
    let bench = Bench::new();
    let a = bench.plug(1, 0, fake("a").bar(0, BarKind::Memory32, 0x1000).pin(InterruptPin::A));
    bench.root.assign_bars().unwrap();
    let before = bench.read(1, 0, 0x10);
    bench.root.ports_write(0, &0x8000_0804_u32.to_le_bytes());
    bench.write(1, 0, 0x10, 0xC800_0000);
    bench.command(1, COMMAND_MEMORY);
    a.intx().set_pending(true).unwrap();
    bench.root.reset().unwrap();
    assert_eq!(bench.placer.placed(), []);
    assert_eq!(bench.read(1, 0, 0x10), before);
    assert!(!bench.intx.asserted(17));
    assert_eq!(bench.root.save().config_address, 0);
}

#[test]
fn a_restored_root_has_latch_and_bridge_and_places_restored_functions() {
    let bench = Bench::new();
    bench.plug(1, 0, fake("a").bar(0, BarKind::Memory32, 0x1000));
    bench.root.assign_bars().unwrap();
    bench.root.ports_write(0, &0x8000_0810_u32.to_le_bytes());
    bench.command(0, COMMAND_BUS_MASTER);
    bench.command(1, COMMAND_MEMORY);
    let text = serde_json::to_string(&bench.root.save()).unwrap();
    let saved: SavedRoot = serde_json::from_str(&text).unwrap();

    let (placer, intx) = (RecordingPlacer::new(), FakeIntx::new());
    let root = PciRoot::restore(Bench::config(&placer, &intx), &saved).unwrap();
    root.plug(address(1, 0), bench.root.function(address(1, 0)).unwrap()).unwrap();
    root.place_all();
    assert_eq!(placer.placed(), bench.placer.placed());
    assert_eq!(root.save(), saved);
    let newer = SavedRoot { version: 2, ..saved };
    assert!(matches!(
        PciRoot::restore(Bench::config(&placer, &intx), &newer),
        Err(RootError::Version { found: 2, .. })
    ));
}

#[test]
fn the_device_tree_names_addresses_bars_and_msix() {
    let bench = Bench::new();
    bench.plug(1, 0, fake("disk0").msix(1, 3, FakeMsi::new()).pin(InterruptPin::A));
    bench.root.assign_bars().unwrap();
    bench.command(1, COMMAND_MEMORY);
    let tree = bench.root.inspect();
    let disk = &tree["functions"]["00:01.0"];
    assert_eq!(disk["name"], "disk0");
    assert_eq!(disk["bars"][0]["state"], "placed");
    assert_eq!(disk["bars"][0]["address"], "0xc0000000");
    assert_eq!(disk["msix"], serde_json::json!({ "vectors": 3, "enabled": false, "masked": false }));
    assert_eq!(disk["intx"], serde_json::json!({ "pin": "INTA", "gsi": 17 }));
    assert_eq!(tree["functions"]["00:00.0"]["name"], "host-bridge");
    assert_eq!(tree["intx"][1]["functions_asserting"], 0);
}

fn new_fake() -> Arc<dyn PciFunction> {
    fake("fake")
        .bar(0, BarKind::Memory64, 0x2_0000)
        .bar(2, BarKind::Io, 0x40)
        .msix(3, 130, FakeMsi::new())
        .pin(InterruptPin::C)
        .build()
}

pci_testbed::pci_function_contract!(fake_function_contract, new_fake);

/// Returns whether a window that may hold this kind of BAR contains the BAR at `address`.
fn within_windows(layout: &BarLayout, address: u64) -> bool {
    let windows = match layout.kind {
        BarKind::Io => [WINDOWS.io, None],
        BarKind::Memory32 => [Some(WINDOWS.memory32), None],
        BarKind::Memory64 => [WINDOWS.memory64, Some(WINDOWS.memory32)],
    };
    let end = u128::from(address) + u128::from(layout.size);
    windows
        .into_iter()
        .flatten()
        .any(|window| address >= window.start && end <= u128::from(window.start) + u128::from(window.len))
}

/// BAR values at the boundaries: adjacent addresses, window edges, other BARs, and random ones.
fn bar_value() -> impl Strategy<Value = u32> {
    prop_oneof![
        (0_u32..8).prop_map(|page| 0xC000_0000 + page * 0x800),
        (0_u32..4).prop_map(|page| 0xCFFF_E000 + page * 0x1000),
        (0_u32..8).prop_map(|port| 0xC000 + port * 8),
        Just(0),
        Just(u32::MAX),
        Just(0x100),
        any::<u32>(),
    ]
}

proptest! {
    /// For any BAR moves, no two placed BARs overlap (the placer panics) and none is placed on RAM. A decoded BAR at a
    /// free address responds there.
    #[test]
    fn random_bar_moves_never_overlap(
        moves in prop::collection::vec((1_u8..4, 0_u16..8, bar_value()), 1..120),
    ) {
        let ram = AddressRange { start: 0xC000_2000, len: 0x1000 };
        let bench = Bench::with(RecordingPlacer::with_occupied(vec![ram]));
        for slot in 1..4 {
            let function = fake(&format!("f{slot}"))
                .bar(0, BarKind::Memory32, 0x1000)
                .bar(1, BarKind::Memory64, 0x2000)
                .bar(3, BarKind::Io, 0x10)
                .bar(4, BarKind::Memory32, 0x10);
            bench.plug(slot, 0, function);
        }
        for (slot, register, value) in moves {
            match register {
                6 => bench.command(slot, COMMAND_MEMORY | COMMAND_IO),
                7 => bench.command(slot, value.to_le_bytes()[0].into()),
                _ => bench.write(slot, 0, 0x10 + register * 4, value),
            }
        }
        let placed = bench.placer.placed();
        let tree = bench.root.inspect();
        for (at, function) in bench.root.functions() {
            let bars = &tree["functions"][at.to_string()]["bars"];
            for (index, place) in function.places().into_iter().enumerate() {
                let answers = bench.placer.address(function.name(), place.layout.index);
                let status = &bars[index];
                prop_assert_eq!(&status["index"], place.layout.index);
                let address = status["address"].as_str();
                let expected = place.address.map(|address| format!("{address:#x}"));
                prop_assert_eq!(address, expected.as_deref());
                match (place.address, status["state"].as_str()) {
                    (None, state) => {
                        prop_assert_eq!(state, Some("off"));
                        prop_assert_eq!(answers, None);
                    }
                    (Some(wanted), Some("placed")) => prop_assert_eq!(answers, Some(wanted)),
                    (Some(wanted), Some("refused")) => {
                        prop_assert_eq!(answers, None);
                        let end = wanted + place.layout.size;
                        let taken = placed.iter().any(|other| {
                            other.address < end && wanted < other.address + other.layout.size
                        });
                        let on_ram = wanted < ram.start + ram.len && ram.start < end;
                        let fits = within_windows(&place.layout, wanted);
                        prop_assert!(taken || on_ram || !fits, "{}", status["reason"]);
                    }
                    (Some(wanted), _) => prop_assert!(false, "{wanted:#x} was forgotten"),
                }
            }
        }
    }

    /// Accesses of any offset and length through both mechanisms never panic, and their reads agree.
    #[test]
    fn random_accesses_are_safe(
        accesses in prop::collection::vec(
            (any::<bool>(), any::<bool>(), any::<u64>(), prop::collection::vec(any::<u8>(), 0..9)), 0..100,
        ),
    ) {
        let bench = Bench::new();
        bench.plug(1, 0, fake("a").bar(0, BarKind::Memory64, 0x1000).pin(InterruptPin::A));
        bench.plug(1, 3, fake("b").msix(0, 2, FakeMsi::new()));
        for (ports, write, offset, mut data) in accesses {
            match (ports, write) {
                (true, true) => bench.root.ports_write(offset % 16, &data),
                (true, false) => bench.root.ports_read(offset % 16, &mut data),
                (false, true) => bench.root.ecam_write(offset % 0x11_0000, &data),
                (false, false) => {
                    bench.root.ecam_read(offset, &mut data);
                    let offset = offset % 0x11_0000;
                    bench.root.ecam_read(offset, &mut data);
                    for (at, byte) in (offset..).zip(&data) {
                        let mut single = [0];
                        bench.root.ecam_read(at, &mut single);
                        prop_assert_eq!(single[0], *byte);
                    }
                }
            }
        }
        prop_assert_eq!(bench.read(1, 0, 0), 0x5678_1234);
    }
}
