//! The APIC timer, in one-shot and periodic mode. There is no TSC-deadline mode.

/// Minimum interval between two interrupts of a periodic timer, in nanoseconds: KVM's default. The count of a timer with a shorter period
/// runs as the guest set it, and several periods share one interrupt.
pub const MIN_PERIODIC_INTERRUPT_NS: u64 = 200_000;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Timer {
    /// Nanoseconds per tick before division.
    tick_ns: u64,
    initial: u32,
    /// Divide configuration register.
    divide: u32,
    /// Time at which the count reaches 0, in nanoseconds; `None` while it is 0.
    deadline_ns: Option<u64>,
    /// Earliest time of a periodic timer's next interrupt, in nanoseconds.
    rest_until_ns: u64,
}

impl Timer {
    pub(crate) fn new(tick_ns: u32) -> Self {
        Self { tick_ns: tick_ns.into(), initial: 0, divide: 0, deadline_ns: None, rest_until_ns: 0 }
    }

    pub(crate) fn reset(&mut self) {
        (self.initial, self.divide, self.deadline_ns, self.rest_until_ns) = (0, 0, None, 0);
    }

    pub(crate) fn initial(&self) -> u32 {
        self.initial
    }

    pub(crate) fn divide(&self) -> u32 {
        self.divide
    }

    /// Nanoseconds per decrement.
    fn step_ns(&self) -> u64 {
        let code = (self.divide & 0b1000) >> 1 | self.divide & 0b11;
        self.tick_ns << ((code + 1) & 7)
    }

    /// Nanoseconds from the initial count to 0: at most 2^32 times 128,000.
    pub(crate) fn period_ns(&self) -> u64 {
        u64::from(self.initial) * self.step_ns()
    }

    /// Sets the initial count register: the count starts at `now_ns`, or stops if `initial` is 0.
    pub(crate) fn start(&mut self, initial: u32, now_ns: u64) {
        self.initial = initial;
        self.rest_until_ns = 0;
        self.deadline_ns = (initial != 0).then(|| now_ns.saturating_add(self.period_ns()));
    }

    /// Sets the divide configuration register: the count continues from its current value, at the new rate.
    pub(crate) fn set_divide(&mut self, divide: u32, now_ns: u64) {
        let current = self.current(now_ns);
        self.divide = divide;
        if self.deadline_ns.is_some() {
            self.deadline_ns = Some(now_ns.saturating_add(u64::from(current) * self.step_ns()));
        }
    }

    /// The current count. A periodic timer has restarted its count even if its interrupt is delayed.
    pub(crate) fn current(&self, now_ns: u64) -> u32 {
        let Some(deadline_ns) = self.deadline_ns else { return 0 };
        let remaining_ns = match deadline_ns.checked_sub(now_ns) {
            Some(remaining_ns) => remaining_ns,
            None => self.period_ns() - (now_ns - deadline_ns) % self.period_ns().max(1),
        };
        u32::try_from(remaining_ns.div_ceil(self.step_ns())).unwrap_or(u32::MAX).min(self.initial)
    }

    /// Time of the next interrupt, in nanoseconds; `None` while the count is 0.
    pub(crate) fn due_ns(&self) -> Option<u64> {
        self.deadline_ns.map(|deadline_ns| deadline_ns.max(self.rest_until_ns))
    }

    /// Nanoseconds until the count reaches 0, for saving.
    pub(crate) fn remaining_ns(&self, now_ns: u64) -> Option<u64> {
        self.deadline_ns.map(|deadline_ns| deadline_ns.saturating_sub(now_ns))
    }

    /// Restores saved values, which the caller has checked.
    pub(crate) fn restore(&mut self, initial: u32, divide: u32, remaining_ns: Option<u64>, now_ns: u64) {
        (self.initial, self.divide) = (initial, divide);
        self.deadline_ns = remaining_ns.map(|remaining_ns| now_ns.saturating_add(remaining_ns));
    }

    /// Whether an interrupt is due by `now_ns`. Starts the next period of a periodic timer; missed periods share one interrupt.
    pub(crate) fn expire(&mut self, periodic: bool, now_ns: u64) -> bool {
        let Some(deadline_ns) = self.deadline_ns.filter(|_| self.due_ns().is_some_and(|due| due <= now_ns))
        else {
            return false;
        };
        let period_ns = self.period_ns();
        if !periodic || period_ns == 0 {
            self.deadline_ns = None;
            return true;
        }
        let periods = (now_ns - deadline_ns) / period_ns + 1;
        self.deadline_ns = Some(deadline_ns.saturating_add(periods.saturating_mul(period_ns)));
        self.rest_until_ns = now_ns.saturating_add(MIN_PERIODIC_INTERRUPT_NS);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_goes_down_to_zero_once() {
        let mut timer = Timer::new(10);
        timer.set_divide(0b1011, 0); // By 1.
        timer.start(5, 1000);
        assert_eq!(timer.due_ns(), Some(1050));
        assert_eq!([1000, 1009, 1010, 1049].map(|now| timer.current(now)), [5, 5, 4, 1]);
        assert!(!timer.expire(false, 1049));
        assert!(timer.expire(false, 1050) && !timer.expire(false, 5000));
        assert_eq!((timer.current(5000), timer.due_ns()), (0, None));
    }

    #[test]
    fn every_divisor_has_its_code() {
        for (code, divisor) in
            [(0, 2), (1, 4), (2, 8), (3, 16), (0b1000, 32), (0b1001, 64), (0b1010, 128), (0b1011, 1)]
        {
            let mut timer = Timer::new(1);
            timer.set_divide(code, 0);
            timer.start(3, 0);
            assert_eq!(timer.due_ns(), Some(3 * divisor));
        }
    }

    #[test]
    fn another_divisor_keeps_the_count() {
        let mut timer = Timer::new(1);
        timer.start(1000, 0);
        assert_eq!(timer.current(500), 750);
        timer.set_divide(0b1010, 500);
        assert_eq!((timer.current(500), timer.due_ns()), (750, Some(500 + 750 * 128)));
    }

    #[test]
    fn missed_periods_are_one_interrupt_and_keep_the_phase() {
        let mut timer = Timer::new(1);
        timer.start(500_000, 0); // A period of 1 ms.
        assert!(timer.expire(true, 3_400_000) && !timer.expire(true, 3_400_000));
        assert_eq!(timer.due_ns(), Some(4_000_000));
        assert_eq!(timer.current(3_500_000), 250_000);
    }

    #[test]
    fn a_tiny_period_is_counted_but_interrupts_seldom() {
        let mut timer = Timer::new(1);
        timer.start(1, 0);
        assert!(timer.expire(true, 2));
        assert_eq!(timer.due_ns(), Some(2 + MIN_PERIODIC_INTERRUPT_NS));
        assert!(!timer.expire(true, 1000) && timer.current(1001) == 1);
        assert!(timer.expire(true, 2 + MIN_PERIODIC_INTERRUPT_NS));
    }

    #[test]
    fn the_end_of_time_is_no_overflow() {
        let mut timer = Timer::new(1000);
        timer.set_divide(0b1010, 0);
        timer.start(u32::MAX, u64::MAX - 1);
        assert_eq!(timer.due_ns(), Some(u64::MAX));
        assert!(timer.expire(true, u64::MAX));
        timer.start(u32::MAX, 0);
        assert_eq!(timer.current(0), u32::MAX);
    }
}
