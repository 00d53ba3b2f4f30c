//! Random steps for both sides, and the comparison after each.

mod registers;
mod sources;

use std::collections::{BTreeMap, VecDeque};

use apic::VcpuEvent;
use apic::registers::*;

use super::kernel::Kernel;
use super::ours::Ours;

/// Bits of LVT entries that software can't change: delivery status and remote IRR.
const LVT_READ_ONLY: u32 = 1 << 12 | 1 << 14;
/// Vectors 0 to 15 in the lowest word of a register.
const ILLEGAL_VECTORS: u32 = 0xFFFF;
const LVT_MASKED: u32 = 1 << 16;
/// Bits of a redirection entry that both sides have.
const IO_APIC_BITS: u64 = 0xFF00_0000_0001_EFFF;
/// Number of last steps in a failure's message.
const SHOWN_STEPS: usize = 20;
/// Local vector table, divide configuration and initial count.
const PLAIN_REGISTERS: [u32; 8] = [
    LVT_TIMER,
    LVT_THERMAL,
    LVT_PERFORMANCE,
    LVT_LINT0,
    LVT_LINT1,
    LVT_ERROR,
    DIVIDE_CONFIGURATION,
    INITIAL_COUNT,
];

/// xorshift64*: the same seed gives the same steps.
pub struct Random(u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 11) % limit
    }

    /// True once in `times`.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.index(choices.len())]
    }

    pub fn index(&mut self, count: usize) -> usize {
        usize::try_from(self.below(count as u64)).unwrap()
    }

    pub fn bits32(&mut self) -> u32 {
        u32::try_from(self.next() >> 32).unwrap()
    }

    pub fn byte(&mut self) -> u8 {
        self.next().to_le_bytes()[7]
    }
}

/// Counts of steps and deviations.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    pub steps: BTreeMap<&'static str, u64>,
    pub deviations: BTreeMap<&'static str, u64>,
}

pub struct Comparison {
    ours: Ours,
    kernel: Kernel,
    random: Random,
    tally: Tally,
    lines: [bool; 24],
    recent: VecDeque<String>,
}

impl Comparison {
    pub fn new(seed: u64) -> Self {
        let deviations = ["RESERVED_BITS", "READ_ONLY_LVT_BITS", "ILLEGAL_VECTORS", "NO_ERRORS"];
        let more = ["LINT0_AFTER_RESET", "IO_APIC_RESERVED_BITS", "IO_APIC_VERSION", "ENDED_WHEN_TAKEN"];
        let names = deviations.into_iter().chain(more);
        let tally = Tally { deviations: names.map(|name| (name, 0)).collect(), ..Tally::default() };
        let random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        let (ours, kernel) = (Ours::new(), Kernel::new());
        let recent = VecDeque::new();
        let mut comparison = Self { ours, kernel, random, tally, lines: [false; 24], recent };
        comparison.begin();
        comparison
    }

    /// Checks and removes the differences after a reset.
    fn begin(&mut self) {
        assert_eq!(self.kernel.page(0).register(LVT_LINT0), 0x700);
        self.deviate("LINT0_AFTER_RESET");
        assert!(self.kernel.write(0, LVT_LINT0, LVT_MASKED.into()));
        // Crate `apic` has 0x20, as its own tests check.
        assert_eq!(self.kernel.read_io_apic(1), 0x17_0011);
        self.deviate("IO_APIC_VERSION");
        self.compare();
    }

    pub fn tally(&self) -> Tally {
        self.tally.clone()
    }

    fn deviate(&mut self, name: &'static str) {
        *self.tally.deviations.get_mut(name).unwrap() += 1;
    }

    fn note(&mut self, name: &'static str, what: String) {
        *self.tally.steps.entry(name).or_default() += 1;
        if self.recent.len() == SHOWN_STEPS {
            self.recent.pop_front();
        }
        self.recent.push_back(what);
    }

    /// Fails with the last steps.
    fn check(&self, equal: bool, what: impl FnOnce() -> String) {
        assert!(equal, "{}, after\n{}", what(), self.recent.iter().cloned().collect::<Vec<_>>().join("\n"));
    }

    pub fn step(&mut self) {
        let vcpu = self.random.index(2);
        match self.random.below(10_000) {
            0..4000 => self.write_register(vcpu),
            4000..6000 => self.read_register(vcpu),
            6000..7400 => self.send_ipi(vcpu),
            7400..8000 => self.send_msi(),
            8000..9000 => self.take(vcpu),
            9000..9500 => self.end(vcpu),
            9500..9700 => self.change_line(),
            9700..9800 => self.change_entry(),
            9800..9960 => self.enable(vcpu),
            9960..9985 => self.one_shot(vcpu),
            9985..9989 => self.count_down(vcpu),
            9989..9994 => self.periodic(vcpu),
            _ => self.init(),
        }
        self.take_nmis();
        self.compare();
    }

    fn is_enabled(&self, vcpu: usize) -> bool {
        self.ours.local(vcpu).spurious & 0x100 != 0
    }

    fn take(&mut self, vcpu: usize) {
        self.note("take", format!("vCPU {vcpu} takes an interrupt"));
        let (kernel, ours) = (self.kernel.take(vcpu), self.ours.take(vcpu));
        if kernel.is_some() && self.kernel.ends_interrupts {
            self.deviate("ENDED_WHEN_TAKEN");
        }
        self.check(kernel == ours, || format!("vCPU {vcpu} takes {kernel:02x?} of KVM, {ours:02x?} of ours"));
    }

    fn end(&mut self, vcpu: usize) {
        self.note("end", format!("vCPU {vcpu} ends an interrupt"));
        assert!(self.kernel.write(vcpu, END_OF_INTERRUPT, 0));
        self.ours.end(vcpu);
    }

    fn take_nmis(&mut self) {
        for vcpu in 0..2 {
            let (kernel, ours) = (self.kernel.take_nmi(vcpu), self.ours.take_nmi(vcpu));
            self.check(kernel == ours, || format!("vCPU {vcpu}: NMI of KVM {kernel}, of ours {ours}"));
        }
    }

    /// INIT and start-up of vCPU 1.
    fn init(&mut self) {
        let vector = self.random.byte();
        let level = self.random.of(&[0x0500, 0x4500, 0xC500]);
        self.note("init", format!("INIT {level:#x} and start-up {vector:#x}"));
        let to = 1u64 << 32;
        let both = |comparison: &mut Self, command| {
            assert!(comparison.kernel.write(0, INTERRUPT_COMMAND, to | command));
            assert!(comparison.ours.write(0, INTERRUPT_COMMAND, to | command));
        };
        both(self, level);
        if self.random.once_in(2) {
            both(self, 0x4041); // A second one, before the vCPU has processed INIT.
        }
        self.check(self.kernel.waits_for_startup(1), || "KVM's vCPU doesn't wait".into());
        assert_eq!([self.ours.next(1), self.ours.next(1)], [VcpuEvent::Init, VcpuEvent::WaitForStartup]);
        both(self, 0x4042);
        self.compare();
        both(self, 0x4600 | u64::from(vector));
        self.check(!self.kernel.waits_for_startup(1), || "KVM's vCPU waits".into());
        assert_eq!(self.kernel.startup_vector(1), u64::from(vector));
        assert_eq!(self.ours.next(1), VcpuEvent::Startup { vector });
        both(self, 0x4600 | u64::from(!vector));
        assert_eq!((self.ours.next(1), self.kernel.waits_for_startup(1)), (VcpuEvent::None, false));
        self.kernel.enter_long_mode(1);
    }

    /// Compares all registers of both sides.
    fn compare(&mut self) {
        let saved = self.ours.save();
        for vcpu in 0..2 {
            let (ours, page) = (&saved.local[vcpu], self.kernel.page(vcpu));
            let same = |msr: u32, bits: u32, ours: u32| {
                let kernel = page.register(msr);
                let text = || format!("vCPU {vcpu}, MSR {msr:#x}: {kernel:#x} of KVM, {ours:#x} of ours");
                self.check(kernel & bits == ours & bits, text);
                kernel != ours
            };
            same(TASK_PRIORITY, u32::MAX, ours.task_priority.into());
            same(SPURIOUS_VECTOR, u32::MAX, ours.spurious);
            same(ERROR_STATUS, u32::MAX, 0);
            let mut illegal = false;
            for (index, first) in (0..8).zip(0..) {
                let bits = if index == 0 { !ILLEGAL_VECTORS } else { u32::MAX };
                same(IN_SERVICE + first, u32::MAX, ours.in_service.word(index));
                illegal |= same(TRIGGER_MODE + first, bits, ours.trigger.word(index));
                illegal |= same(INTERRUPT_REQUEST + first, bits, ours.requested.word(index));
            }
            let mut values = ours.lvt.to_vec();
            values.extend([ours.divide_configuration, ours.initial_count]);
            let mut read_only = false;
            for (msr, value) in PLAIN_REGISTERS.into_iter().zip(values) {
                let bits = if msr <= LVT_ERROR { !LVT_READ_ONLY } else { u32::MAX };
                read_only |= same(msr, bits, value);
            }
            let command = self.kernel.read(vcpu, INTERRUPT_COMMAND);
            self.check(command == Some(ours.command), || {
                format!("vCPU {vcpu}: ICR {command:x?} of KVM, {:#x} of ours", ours.command)
            });
            for (differs, name) in [(illegal, "ILLEGAL_VECTORS"), (read_only, "READ_ONLY_LVT_BITS")] {
                if differs {
                    self.deviate(name);
                }
            }
        }
        self.compare_io_apic(saved.io_apic.unwrap().entries);
    }

    fn compare_io_apic(&mut self, ours: [u64; 24]) {
        let entries = self.kernel.io_apic_entries();
        for (pin, (kernel, ours)) in entries.into_iter().zip(ours).enumerate() {
            self.check(kernel & IO_APIC_BITS == ours & IO_APIC_BITS, || {
                format!("pin {pin}: {kernel:#x} of KVM, {ours:#x} of ours")
            });
        }
        if entries != ours {
            self.deviate("IO_APIC_RESERVED_BITS");
        }
    }
}
