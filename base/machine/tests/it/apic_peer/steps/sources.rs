//! Steps that cause interrupts: IPIs, MSIs, pins and timers.

use std::time::{Duration, Instant};

use apic::registers::*;

use super::{Comparison, LVT_MASKED};

/// Pins without an input of the 8259s.
const PINS: [u8; 8] = [16, 17, 18, 19, 20, 21, 22, 23];
const LVT_PERIODIC: u64 = 1 << 17;
/// A timer that hasn't interrupted after this time never will.
const HANG_LIMIT: Duration = Duration::from_secs(60);

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap()
}

impl Comparison {
    fn all_enabled(&self) -> bool {
        self.is_enabled(0) && self.is_enabled(1)
    }

    fn any_enabled(&self) -> bool {
        self.is_enabled(0) || self.is_enabled(1)
    }

    pub(super) fn send_ipi(&mut self, vcpu: usize) {
        let mut mode = self.random.of(&[0u64, 0, 0, 0, 1, 1, 3, 4, 5, 6, 7]);
        if mode == 1 && !self.all_enabled() {
            mode = 0;
        }
        // Of INIT only the ignored form; the step `init` has the rest.
        let level = if mode == 5 { 1 << 15 } else { self.random.below(2) << 14 };
        let is_logical = self.random.once_in(2) && (mode < 2 || self.any_enabled());
        let to = match self.random.below(8) {
            // Only APICs that exist.
            _ if is_logical && mode == 1 => self.random.of(&[1, 2, 3, u32::MAX]),
            0 => self.random.bits32(),
            1 => u32::MAX,
            2 if is_logical => 0x1_0003,
            _ if is_logical => self.random.of(&[1, 2, 3, 0xFFFF, 0]),
            _ => self.random.of(&[0, 1, 1, 2]),
        };
        let shorthand = if self.random.once_in(3) { self.random.below(4) } else { 0 };
        let reserved = if self.random.once_in(16) { self.random.of(&[13u64, 16, 17, 20, 31]) } else { 12 };
        let command = u64::from(to) << 32
            | shorthand << 18
            | level
            | u64::from(is_logical) << 11
            | mode << 8
            | u64::from(self.random.byte())
            | self.random.below(2) << reserved;
        // An NMI to itself would end the guest's program.
        let by_guest = mode != 4 && self.random.once_in(50);
        self.note("ipi", format!("vCPU {vcpu} writes {command:#x} to ICR, by guest: {by_guest}"));
        self.write(vcpu, INTERRUPT_COMMAND, command, by_guest);
    }

    pub(super) fn send_msi(&mut self) {
        let is_logical = self.random.once_in(2) && self.any_enabled();
        let lowest = self.all_enabled() && self.random.once_in(4);
        let to: u32 = match self.random.below(8) {
            0 if !lowest => self.random.byte().into(),
            1 if is_logical || !lowest => 0xFF,
            _ if is_logical => self.random.of(&[1, 2, 3]),
            _ => self.random.of(&[0, 1]),
        };
        let mode = if lowest { 1 } else { self.random.of(&[0u32, 0, 0, 4]) };
        // Vectors that pins don't use, so that only a pin's own interrupts end its state.
        let is_level = mode != 4 && self.random.once_in(4);
        let vector = if is_level { 0x20 + self.random.byte() % 0x30 } else { self.random.byte() };
        let hint = u32::from(is_logical && lowest) << 3;
        let address = 0xFEE0_0000 | to << 12 | hint | u32::from(is_logical) << 2;
        let asserted = u32::from(self.random.once_in(2)) << 14;
        let data = u32::from(is_level) << 15 | asserted | mode << 8 | u32::from(vector);
        self.note("msi", format!("MSI {address:#x}, {data:#x}"));
        self.kernel.signal_msi(address, data);
        self.ours.signal_msi(address, data);
    }

    pub(super) fn change_line(&mut self) {
        let pin = self.random.of(&PINS);
        let asserted = !self.lines[usize::from(pin)] || self.random.once_in(4);
        self.note("line", format!("line {pin} is asserted: {asserted}"));
        self.lines[usize::from(pin)] = asserted;
        self.kernel.set_line(pin.into(), asserted);
        self.ours.set_line(pin.into(), asserted);
    }

    /// Masks the entry, then changes the destination, then the rest. No intermediate entry may be one that the steps avoid.
    pub(super) fn change_entry(&mut self) {
        let pin = self.random.of(&PINS);
        let mode = self.random.of(&[0u32, 0, 1, 4]);
        let is_level = mode != 4 && self.random.once_in(2);
        let is_logical = mode != 4 && self.random.once_in(2);
        let to: u32 = match (is_logical, mode) {
            (true, 1) => self.random.of(&[1, 2]),
            (true, _) => self.random.of(&[1, 2, 3, 0xFF]),
            (false, 1) => self.random.of(&[0, 1]),
            (false, _) => self.random.of(&[0, 1, 0xFF]),
        };
        // Even vectors for level-triggered entries.
        let vector = (0x50 + u32::from(self.random.byte()) % 0xB0) & !1 | u32::from(!is_level);
        let reserved = if self.random.once_in(4) { self.random.bits32() & 0xFFFE_0000 } else { 0 };
        let low = reserved
            | u32::from(self.random.once_in(4)) << 16
            | u32::from(is_level) << 15
            | u32::from(self.random.once_in(2)) << 13
            | u32::from(is_logical) << 11
            | mode << 8
            | vector;
        self.note("entry", format!("pin {pin} becomes {low:#x} to {to:#x}"));
        let index = 0x10 + 2 * pin;
        for (index, value) in [(index, low | LVT_MASKED), (index + 1, to << 24), (index, low)] {
            self.kernel.write_io_apic(index, value);
            self.ours.write_io_apic(index, value);
        }
        // Handles an NMI that the entry has caused, before the guest is entered.
        self.take_nmis();
        // At entries into the guest KVM learns which vectors end a pin's interrupt.
        self.kernel.enter(0);
        self.kernel.enter(1);
    }

    /// Enters the guest until KVM has put its timer's edge-triggered interrupt into IRR, as crate `apic` has.
    fn await_request(&mut self, vcpu: usize, vector: u8) {
        let word = u32::from(vector >> 5);
        let bits = if word == 0 { !super::ILLEGAL_VECTORS } else { u32::MAX };
        let ours = self.ours.local(vcpu);
        let ours = [&ours.requested, &ours.trigger].map(|set| set.word(usize::from(vector >> 5)) & bits);
        let began = Instant::now();
        loop {
            self.kernel.enter(vcpu);
            let page = self.kernel.page(vcpu);
            let kernel = [INTERRUPT_REQUEST, TRIGGER_MODE].map(|first| page.register(first + word) & bits);
            if kernel == ours {
                return;
            }
            self.check(began.elapsed() < HANG_LIMIT, || {
                format!("vCPU {vcpu}'s timer with vector {vector:#x}: IRR and TMR {kernel:x?} of KVM, {ours:x?} of ours")
            });
        }
    }

    fn write_both(&mut self, vcpu: usize, msr: u32, value: u64) {
        assert!(self.kernel.write(vcpu, msr, value) && self.ours.write(vcpu, msr, value));
    }

    /// Nanoseconds in which the timer counts from `count` to 0.
    fn period_ns(&self, vcpu: usize, count: u64) -> u64 {
        count * self.divisor(vcpu)
    }

    fn divisor(&self, vcpu: usize) -> u64 {
        let divide = self.ours.local(vcpu).divide_configuration;
        [2, 4, 8, 16, 32, 64, 128, 1][usize::try_from(divide >> 1 & 4 | divide & 3).unwrap()]
    }

    pub(super) fn one_shot(&mut self, vcpu: usize) {
        let (count, vector) = (1 + self.random.below(1000), 16 + self.random.byte() % 240);
        let mask = if self.random.once_in(4) { LVT_MASKED } else { 0 };
        self.note(
            "one_shot",
            format!("vCPU {vcpu}'s timer interrupts with {vector:#x} after {count}, mask {mask}"),
        );
        self.write_both(vcpu, LVT_TIMER, u64::from(mask | u32::from(vector)));
        self.write_both(vcpu, INITIAL_COUNT, count);
        self.ours.now_ns += self.period_ns(vcpu, count);
        let began = Instant::now();
        while self.kernel.read(vcpu, CURRENT_COUNT) != Some(0) {
            self.check(began.elapsed() < HANG_LIMIT, || format!("KVM's timer of vCPU {vcpu} doesn't end"));
        }
        assert_eq!(self.ours.read(vcpu, CURRENT_COUNT), Some(0));
        self.await_request(vcpu, vector);
        self.write_both(vcpu, INITIAL_COUNT, 0);
    }

    /// Reads KVM's current count between two readings of the host's clock. It must lie between the counts of crate `apic` for these
    /// times.
    pub(super) fn count_down(&mut self, vcpu: usize) {
        let count = 1 << 31 | self.random.bits32() as u64;
        self.note("count_down", format!("vCPU {vcpu}'s timer counts down from {count:#x}"));
        self.write_both(vcpu, LVT_TIMER, LVT_MASKED.into());
        let before = Instant::now();
        self.write_both(vcpu, INITIAL_COUNT, count);
        let after = Instant::now();
        let start_ns = self.ours.now_ns;
        for _ in 0..10 {
            let at_least = after.elapsed();
            let kernel = self.kernel.read(vcpu, CURRENT_COUNT).unwrap();
            let at_most = before.elapsed();
            self.ours.now_ns = start_ns + nanoseconds(at_least);
            let highest = self.ours.read(vcpu, CURRENT_COUNT).unwrap();
            self.ours.now_ns = start_ns + nanoseconds(at_most);
            let lowest = self.ours.read(vcpu, CURRENT_COUNT).unwrap();
            // KVM rounds down; crate `apic` rounds up, as a counter does.
            self.check((lowest.saturating_sub(1)..=highest).contains(&kernel), || {
                format!("vCPU {vcpu} counts {kernel:#x} of KVM, {lowest:#x} to {highest:#x} of ours")
            });
        }
        self.write_both(vcpu, INITIAL_COUNT, 0);
    }

    /// Three periods of about 5 ms. Both sides drop a tick that occurs while another is pending.
    pub(super) fn periodic(&mut self, vcpu: usize) {
        let vector = 16 + self.random.byte() % 240;
        let count = 5_000_000 / self.divisor(vcpu);
        self.note("periodic", format!("vCPU {vcpu}'s timer interrupts with {vector:#x} each {count}"));
        self.write_both(vcpu, SPURIOUS_VECTOR, 0x1FF);
        self.write_both(vcpu, LVT_TIMER, LVT_PERIODIC | u64::from(vector));
        self.write_both(vcpu, INITIAL_COUNT, count);
        for _ in 0..3 {
            self.ours.now_ns += self.period_ns(vcpu, count);
            self.await_request(vcpu, vector);
            if self.ours.local(vcpu).requested.highest() == Some(vector) {
                self.take(vcpu);
                self.end(vcpu);
            }
        }
        self.ours.now_ns += self.period_ns(vcpu, count);
        self.await_request(vcpu, vector);
        self.write_both(vcpu, INITIAL_COUNT, 0);
    }
}
