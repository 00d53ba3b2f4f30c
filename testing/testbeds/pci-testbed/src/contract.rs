//! The contract of every [`PciFunction`], as checks that panic with the violation. Use them through
//! [`crate::pci_function_contract!`].

use std::sync::Arc;

use pci::config::ConfigSpace;
use pci::function::{BarKind, BarLayout, FunctionError, PciFunction};
use pci::registers::*;

/// Creates a module `$module` with one test per check of the contract. `$make` is a function or closure without
/// arguments that returns a new `Arc<dyn PciFunction>`.
#[macro_export]
macro_rules! pci_function_contract {
    ($module:ident, $make:expr) => {
        mod $module {
            #[allow(unused_imports)]
            use super::*;

            #[test]
            fn resources_lie_within_bars() {
                $crate::contract::resources_lie_within_bars(&$make);
            }

            #[test]
            fn config_reads_are_safe_and_consistent() {
                $crate::contract::config_reads_are_safe_and_consistent(&$make);
            }

            #[test]
            fn bars_can_be_sized_and_moved() {
                $crate::contract::bars_can_be_sized_and_moved(&$make);
            }

            #[test]
            fn hostile_config_writes_keep_the_identity() {
                $crate::contract::hostile_config_writes_keep_the_identity(&$make);
            }

            #[test]
            fn hostile_bar_accesses_are_safe() {
                $crate::contract::hostile_bar_accesses_are_safe(&$make);
            }

            #[test]
            fn reset_restores_power_on_state() {
                $crate::contract::reset_restores_power_on_state(&$make);
            }

            #[test]
            fn quiesce_and_unquiesce_can_be_repeated() {
                $crate::contract::quiesce_and_unquiesce_can_be_repeated(&$make);
            }

            #[test]
            fn saving_changes_nothing() {
                $crate::contract::saving_changes_nothing(&$make);
            }

            #[test]
            fn accesses_from_several_threads_are_safe() {
                $crate::contract::accesses_from_several_threads_are_safe(&$make);
            }
        }
    };
}

/// Creates the function under test.
pub type Make<'a> = &'a dyn Fn() -> Arc<dyn PciFunction>;

/// Returns the offsets of all dwords of configuration space.
fn dwords() -> impl Iterator<Item = u16> {
    (0..=u16::MAX).step_by(4).take(CONFIG_SPACE_SIZE / 4)
}

fn read_u32(function: &dyn PciFunction, offset: u16) -> u32 {
    let mut data = [0; 4];
    function.config_read(offset, &mut data);
    u32::from_le_bytes(data)
}

fn write_u32(function: &dyn PciFunction, offset: u16, value: u32) {
    function.config_write(offset, &value.to_le_bytes());
}

fn set_decoding(function: &dyn PciFunction, on: bool) {
    let bits = COMMAND_IO | COMMAND_MEMORY;
    let mut data = [0; 2];
    function.config_read(COMMAND, &mut data);
    let command = u16::from_le_bytes(data);
    let command = if on { command | bits } else { command & !bits };
    function.config_write(COMMAND, &command.to_le_bytes());
}

/// xorshift64, so that the checks need no crate for tests.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// Returns the accesses of all sizes that the bus makes within the dword at `offset`.
fn accesses(offset: u16) -> [(u16, usize); 9] {
    [(0, 4), (0, 2), (1, 2), (2, 2), (0, 1), (1, 1), (2, 1), (3, 1), (0, 4)]
        .map(|(at, len)| (offset + at, len))
}

/// BARs are valid. Doorbells and mappings are within them, mappings in whole pages.
pub fn resources_lie_within_bars(make: Make<'_>) {
    const PAGE: u64 = 4096;
    let function = make();
    assert!(!function.name().is_empty(), "a function has a name");
    let bars = function.bars();
    let mut builder = ConfigSpace::builder(Default::default());
    for bar in &bars {
        if let Err(error) = builder.bar(*bar) {
            panic!("{}: {error}", function.name());
        }
    }
    let size = |index: u8| bars.iter().find(|bar| bar.index == index).map(|bar| bar.size);
    for doorbell in function.doorbells() {
        assert!([0, 1, 2, 4, 8].contains(&doorbell.width), "width of {doorbell:?}");
        let end = doorbell.offset + u64::from(doorbell.width.max(1));
        assert!(size(doorbell.bar).is_some_and(|size| end <= size), "{doorbell:?} isn't within its BAR");
    }
    for mapping in function.mappings() {
        let end = mapping.offset + mapping.len;
        assert!(size(mapping.bar).is_some_and(|size| end <= size), "{mapping:?} isn't within its BAR");
        let aligned = (mapping.offset | mapping.len | mapping.fd_offset) % PAGE == 0 && mapping.len != 0;
        assert!(aligned, "{mapping:?} isn't whole pages");
    }
    let places = function.places();
    let placed: Vec<_> = places.iter().map(|place| place.layout).collect();
    assert_eq!(placed, bars, "places and BARs are the same, in the same order");
}

/// Every read that the bus can make returns the same bytes by byte, word and dword.
pub fn config_reads_are_safe_and_consistent(make: Make<'_>) {
    let function = make();
    for offset in dwords() {
        let whole = read_u32(function.as_ref(), offset).to_le_bytes();
        for (at, len) in accesses(offset) {
            let mut data = vec![0; len];
            function.config_read(at, &mut data);
            let from = usize::from(at - offset);
            assert_eq!(data, whole[from..from + len], "{len} bytes at {at:#x} differ from the dword");
        }
    }
    assert_eq!(read_u32(function.as_ref(), HEADER_TYPE & !3) >> 16 & 0x7F, 0, "header type 0");
}

/// The sizing protocol (PCI Local Bus 3.0, 6.2.5.1) yields each BAR's size and kind. A BAR responds at its address
/// while its decoding is on, and nowhere while it is off, unassigned or being sized.
pub fn bars_can_be_sized_and_moved(make: Make<'_>) {
    let function = make();
    let function = function.as_ref();
    for bar in function.bars() {
        let register = BAR0 + 4 * u16::from(bar.index);
        assert_eq!(sized(function, &bar), bar.size, "size of {bar:?}");
        set_decoding(function, true);
        assert_eq!(place(function, &bar), None, "{bar:?} answers while it is being sized");
        let address = bar.size.max(0x1000);
        let [low, high] = halves(address);
        write_u32(function, register, low);
        if bar.kind == BarKind::Memory64 {
            write_u32(function, register + 4, high);
        }
        assert_eq!(place(function, &bar), Some(address), "{bar:?} answers where it was put");
        set_decoding(function, false);
        assert_eq!(place(function, &bar), None, "{bar:?} answers with decoding off");
        write_u32(function, register, 0);
        if bar.kind == BarKind::Memory64 {
            write_u32(function, register + 4, 0);
        }
        set_decoding(function, true);
        assert_eq!(place(function, &bar), None, "{bar:?} answers at address 0");
        set_decoding(function, false);
    }
    let taken: Vec<u8> = function
        .bars()
        .iter()
        .flat_map(|bar| bar.index..=bar.index + u8::from(bar.kind == BarKind::Memory64))
        .collect();
    for index in (0..6).filter(|index| !taken.contains(index)) {
        let register = BAR0 + 4 * u16::from(index);
        write_u32(function, register, u32::MAX);
        assert_eq!(read_u32(function, register), 0, "BAR register {index}, which isn't there");
    }
}

fn halves(address: u64) -> [u32; 2] {
    let bytes = address.to_le_bytes();
    [0, 4].map(|at| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i])))
}

fn place(function: &dyn PciFunction, bar: &BarLayout) -> Option<u64> {
    function.places().iter().find(|place| place.layout.index == bar.index).and_then(|place| place.address)
}

/// Sizes a BAR as a guest does, and leaves all ones in it.
fn sized(function: &dyn PciFunction, bar: &BarLayout) -> u64 {
    let register = BAR0 + 4 * u16::from(bar.index);
    set_decoding(function, false);
    write_u32(function, register, u32::MAX);
    let low = read_u32(function, register);
    let flags = match bar.kind {
        BarKind::Io => BAR_IO,
        BarKind::Memory32 => 0,
        BarKind::Memory64 => BAR_MEMORY_64,
    };
    let prefetchable = if bar.prefetchable { BAR_PREFETCHABLE } else { 0 };
    let flag_mask = if bar.kind == BarKind::Io { BAR_IO_FLAGS } else { BAR_MEMORY_FLAGS };
    assert_eq!(low & flag_mask, flags | prefetchable, "flags of {bar:?}");
    let high = if bar.kind == BarKind::Memory64 {
        write_u32(function, register + 4, u32::MAX);
        read_u32(function, register + 4)
    } else {
        u32::MAX
    };
    let mask = u64::from(high) << 32 | u64::from(low & !flag_mask);
    (!mask).wrapping_add(1)
}

/// No guest write changes the function's identity, header or capability list.
pub fn hostile_config_writes_keep_the_identity(make: Make<'_>) {
    let function = make();
    let function = function.as_ref();
    let identity = identity(function);
    let mut noise = Noise(0x9E37_79B9_7F4A_7C15);
    for round in 0..4_u8 {
        for offset in dwords() {
            for (at, len) in accesses(offset) {
                let data = match round {
                    0 => [0xFF; 8],
                    1 => [0; 8],
                    _ => noise.next().to_le_bytes(),
                };
                function.config_write(at, &data[..len]);
            }
        }
        assert_eq!(self::identity(function), identity, "identity after hostile writes, round {round}");
        let mut byte = [0];
        for offset in 0..=0xFFF {
            function.config_read(offset, &mut byte);
        }
    }
    drop(function.inspect());
}

/// Returns vendor, device, class, header type, subsystem, interrupt pin, and the ID of each capability.
fn identity(function: &dyn PciFunction) -> Vec<u32> {
    let mut identity = vec![
        read_u32(function, VENDOR_ID),
        read_u32(function, REVISION_ID),
        read_u32(function, HEADER_TYPE & !3) & 0x00FF_0000,
        read_u32(function, SUBSYSTEM_VENDOR_ID),
        read_u32(function, CAPABILITY_POINTER) & 0xFF,
        read_u32(function, INTERRUPT_LINE) & 0xFF00,
    ];
    for id in 0..=u8::MAX {
        identity.extend(pci::root::find_capability(function, id).map(u32::from));
    }
    identity
}

/// Any access to any BAR, including missing BARs and beyond their ends, is harmless.
pub fn hostile_bar_accesses_are_safe(make: Make<'_>) {
    let function = make();
    let function = function.as_ref();
    let mut noise = Noise(0xD1B5_4A32_D192_ED03);
    let scan = |function: &dyn PciFunction, bar: u8, offset: u64, noise: &mut Noise| {
        for len in 1..=8_usize {
            let mut data = [0; 8];
            function.bar_read(bar, offset, &mut data[..len]);
            function.bar_write(bar, offset, &noise.next().to_le_bytes()[..len]);
        }
    };
    for bar in function.bars() {
        for offset in 0..bar.size.min(0x2000) {
            scan(function, bar.index, offset, &mut noise);
        }
        for _ in 0..0x1000 {
            let offset = noise.next() % bar.size;
            scan(function, bar.index, offset, &mut noise);
        }
        for offset in [bar.size - 1, bar.size, u64::MAX - 8, u64::MAX] {
            scan(function, bar.index, offset, &mut noise);
        }
    }
    for bar in 0..8 {
        scan(function, bar, 0, &mut noise);
    }
    scan(function, u8::MAX, 0, &mut noise);
    drop(function.inspect());
}

/// After a reset, configuration space equals that at power-on, and no BAR responds.
pub fn reset_restores_power_on_state(make: Make<'_>) {
    let function = make();
    let function = function.as_ref();
    let power_on: Vec<u32> = dwords().map(|offset| read_u32(function, offset)).collect();
    for _ in 0..2 {
        for offset in dwords() {
            write_u32(function, offset, u32::MAX);
        }
        expect(function.reset());
        for (offset, expected) in dwords().zip(&power_on) {
            assert_eq!(read_u32(function, offset), *expected, "register {offset:#x} after a reset");
        }
        assert!(function.places().iter().all(|place| place.address.is_none()), "a BAR answers after a reset");
    }
}

/// Both calls may be repeated, in any order.
pub fn quiesce_and_unquiesce_can_be_repeated(make: Make<'_>) {
    let function = make();
    expect(function.unquiesce());
    for _ in 0..2 {
        expect(function.quiesce());
        expect(function.quiesce());
        drop(function.inspect());
        expect(function.unquiesce());
        expect(function.unquiesce());
    }
    expect(function.quiesce());
    expect(function.reset());
    expect(function.unquiesce());
}

/// Saving twice yields the same state. A function that can't be saved returns an error with its own name.
pub fn saving_changes_nothing(make: Make<'_>) {
    let function = make();
    expect(function.quiesce());
    match (function.save(), function.save()) {
        (Ok(first), Ok(second)) => {
            assert_eq!(first, second, "two saves of a quiesced function differ");
            assert!(!first.kind.is_empty(), "saved state names its kind");
        }
        (Err(FunctionError::NotSaveable { name, reason }), Err(_)) => {
            assert_eq!(name, function.name(), "the error names the function");
            assert!(!reason.is_empty(), "the error says why");
        }
        (first, second) => panic!("saving answers {first:?}, then {second:?}"),
    }
    expect(function.unquiesce());
}

/// Several vCPUs may access configuration space and BARs at once.
pub fn accesses_from_several_threads_are_safe(make: Make<'_>) {
    let function = make();
    let bars = function.bars();
    std::thread::scope(|scope| {
        for seed in [1, 2, 3] {
            let (function, bars) = (&function, &bars);
            scope.spawn(move || {
                let mut noise = Noise(seed);
                for _ in 0..2000 {
                    let [a, b, ..] = noise.next().to_le_bytes();
                    let offset = u16::from_le_bytes([a, b & 0xF]) & !3;
                    let [value, _] = halves(noise.next());
                    write_u32(function.as_ref(), offset, value);
                    read_u32(function.as_ref(), offset);
                    function.places();
                    for bar in bars {
                        let offset = (noise.next() % bar.size) & !7;
                        let mut data = noise.next().to_le_bytes();
                        function.bar_write(bar.index, offset, &data[..4]);
                        function.bar_read(bar.index, offset, &mut data[..4]);
                    }
                }
            });
        }
    });
}

fn expect(result: Result<(), FunctionError>) {
    if let Err(error) = result {
        panic!("{error}: {:?}", std::error::Error::source(&error));
    }
}
