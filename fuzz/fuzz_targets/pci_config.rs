//! PCI configuration space under a hostile guest: any sequence of ECAM, 0xCF8 and BAR accesses, with interrupts at any moment.
//!
//! Checked:
//! - There is no panic. The recording placer panics when two BARs overlap, the fake vector when a masked MSI-X interrupt is sent.
//! - Configuration spaces and placements agree, and identities don't change.
//! - No MSI-X interrupt is lost.

#![no_main]

use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use pci::config::InterruptPin;
use pci::function::{BarKind, PciFunction};
use pci::root::{AddressRange, FunctionAddress, PciRoot, RootConfig, Windows};
use pci_testbed::{FakeFunction, FakeIntx, FakeMsi, RecordingPlacer};

#[derive(Debug, arbitrary::Arbitrary)]
enum Op {
    /// Near registers that exist, so that most executions reach deep code.
    Config {
        target: u8,
        register: u8,
        size: u8,
        value: u32,
    },
    /// Sets a BAR register to an address from a small set, so that BARs collide.
    MoveBar {
        target: u8,
        bar: u8,
        page: u8,
    },
    Command {
        target: u8,
        value: u16,
    },
    EcamWrite {
        offset: u64,
        len: u8,
        value: [u8; 8],
    },
    EcamRead {
        offset: u64,
        len: u8,
    },
    PortWrite {
        offset: u8,
        len: u8,
        value: [u8; 8],
    },
    PortRead {
        offset: u8,
        len: u8,
    },
    BarWrite {
        target: u8,
        bar: u8,
        offset: u16,
        len: u8,
        value: [u8; 8],
    },
    BarRead {
        target: u8,
        bar: u8,
        offset: u16,
        len: u8,
    },
    Trigger {
        target: u8,
        vector: u8,
    },
    Intx {
        target: u8,
        pending: bool,
    },
    Reset,
}

/// RAM in the middle of the memory window, where no BAR may be placed.
const RAM: AddressRange = AddressRange { start: 0xC000_4000, len: 0x1000 };
const PLACES: [(u8, u8); 3] = [(1, 0), (1, 5), (31, 0)];

struct Bench {
    root: PciRoot,
    placer: Arc<RecordingPlacer>,
    functions: Vec<Arc<FakeFunction>>,
    msi: Arc<FakeMsi>,
}

fn bench() -> Bench {
    let placer = RecordingPlacer::with_occupied(vec![RAM]);
    let root = PciRoot::new(RootConfig {
        windows: Windows {
            memory32: AddressRange { start: 0xC000_0000, len: 0x10_0000 },
            memory64: Some(AddressRange { start: 1 << 40, len: 1 << 32 }),
            io: Some(AddressRange { start: 0xC000, len: 0x100 }),
        },
        placer: placer.clone(),
        intx: FakeIntx::new(),
    });
    let functions = [
        FakeFunction::builder("wide").bar(0, BarKind::Memory64, 0x2000).bar(2, BarKind::Io, 0x20),
        FakeFunction::builder("plain").bar(0, BarKind::Memory32, 0x1000).bar(5, BarKind::Memory32, 0x10),
        FakeFunction::builder("io").bar(0, BarKind::Io, 4).bar(4, BarKind::Memory64, 0x1000),
    ];
    let msi = FakeMsi::new();
    let functions: Vec<_> = functions
        .into_iter()
        .zip(PLACES)
        .map(|(builder, (slot, function))| {
            let function_pin = if function == 0 { InterruptPin::A } else { InterruptPin::D };
            let built = builder.msix(3, 3, msi.clone()).pin(function_pin).build();
            let at = FunctionAddress::new(slot, function).expect("a possible address");
            root.plug(at, built.clone()).expect("free addresses");
            built
        })
        .collect();
    root.assign_bars().expect("room for small BARs");
    Bench { root, placer, functions, msi }
}

fn ecam(target: u8, register: u16) -> u64 {
    let (slot, function) = PLACES[usize::from(target) % PLACES.len()];
    u64::from(slot) << 15 | u64::from(function) << 12 | u64::from(register)
}

fn bytes(value: &[u8; 8], len: u8) -> &[u8] {
    &value[..usize::from(len) % 9]
}

impl Bench {
    /// Restores the initial state, which also checks a reset.
    fn power_on(&self) {
        self.root.reset().expect("fakes can be reset");
        assert!(self.placer.placed().is_empty(), "a BAR survived a reset");
        for vector in self.msi.vectors() {
            assert_eq!(vector.message(), None, "a vector isn't masked after a reset");
            vector.forget_sent();
        }
    }

    fn function(&self, target: u8) -> &FakeFunction {
        &self.functions[usize::from(target) % self.functions.len()]
    }

    fn apply(&self, op: &Op) {
        let mut scratch = [0; 8];
        match op {
            Op::Config { target, register, size, value } => {
                let value = value.to_le_bytes();
                self.root.ecam_write(ecam(*target, (*register).into()), &value[..1 << (size % 3)]);
            }
            Op::MoveBar { target, bar, page } => {
                let value = match page & 0xF {
                    0 => 0,
                    1 => u32::MAX,
                    2 => 0xC000 + u32::from(page >> 4) * 8,
                    3 => 0x000F_E000 | 0xC000_0000,
                    _ => 0xC000_0000 + u32::from(page & 0xF) * 0x800,
                };
                self.root.ecam_write(ecam(*target, 0x10 + 4 * u16::from(bar % 6)), &value.to_le_bytes());
            }
            Op::Command { target, value } => self.root.ecam_write(ecam(*target, 4), &value.to_le_bytes()),
            Op::EcamWrite { offset, len, value } => self.root.ecam_write(*offset, bytes(value, *len)),
            Op::EcamRead { offset, len } => {
                self.root.ecam_read(*offset, &mut scratch[..usize::from(*len) % 9]);
            }
            Op::PortWrite { offset, len, value } => {
                self.root.ports_write((*offset).into(), bytes(value, *len));
            }
            Op::PortRead { offset, len } => {
                self.root.ports_read((*offset).into(), &mut scratch[..usize::from(*len) % 9]);
            }
            Op::BarWrite { target, bar, offset, len, value } => {
                self.function(*target).bar_write(*bar, (*offset).into(), bytes(value, *len));
            }
            Op::BarRead { target, bar, offset, len } => {
                let data = &mut scratch[..usize::from(*len) % 9];
                self.function(*target).bar_read(*bar, (*offset).into(), data);
            }
            Op::Trigger { target, vector } => {
                let msix = self.function(*target).msix().expect("each has MSI-X");
                msix.trigger((vector % 4).into()).expect("fake vectors don't refuse");
            }
            Op::Intx { target, pending } => {
                self.function(*target).intx().set_pending(*pending).expect("fake lines don't refuse");
            }
            Op::Reset => self.root.reset().expect("fakes can be reset"),
        }
    }

    fn check(&self) {
        for function in &self.functions {
            let mut id = [0; 4];
            function.config_read(0, &mut id);
            assert_eq!(u32::from_le_bytes(id), 0x5678_1234, "the identity changed");
            for place in function.places() {
                let placed = self.placer.address(function.name(), place.layout.index);
                // At the address in its configuration space, or refused; never elsewhere.
                assert!(placed.is_none() || placed == place.address, "{place:?} is at {placed:?}");
            }
            // Once everything is enabled and unmasked, nothing stays pending.
            let msix = function.msix().expect("each has MSI-X");
            msix.set_control(0x8000);
            for vector in 0..3 {
                msix.table_write(vector * 16 + 12, &[0; 4]);
            }
            let mut pending = [0];
            msix.pba_read(0, &mut pending);
            assert_eq!(pending, [0], "an interrupt was lost");
        }
    }
}

thread_local! {
    static BENCH: Bench = bench();
}

fuzz_target!(|ops: Vec<Op>| {
    BENCH.with(|bench| {
        // Creating the functions again would take most of the time.
        bench.power_on();
        for op in &ops {
            bench.apply(op);
        }
        bench.check();
    });
});
