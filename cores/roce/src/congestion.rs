//! Congestion control after DCQCN (Zhu et al., SIGCOMM 2015). A receiver of marked packets notifies the sender, at most once per interval.
//! The sender cuts its rate at a notification. It recovers by time and by bytes sent, in three stages.
//!
//! The sender evaluates its clocks when it next sends, so an idle connection needs no timer.

use serde::{Deserialize, Serialize};

/// Parameters; the defaults are those of the paper (section 5) and of common hardware. Rates are bytes per second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Parameters {
    /// Limit of the rate: that of an uncongested connection.
    pub line_rate: f64,
    /// Lower bound of the rate.
    pub minimum_rate: f64,
    /// Interval of a receiver's notifications, nanoseconds.
    pub notification_interval: u64,
    /// Weight of a notification in the estimate of congestion (the paper's g).
    pub gain: f64,
    /// Nanoseconds without a notification after which the estimate decays.
    pub estimate_interval: u64,
    /// Nanoseconds per recovery step by time.
    pub increase_interval: u64,
    /// Bytes per recovery step by bytes.
    pub increase_bytes: u64,
    /// Steps of fast recovery, before the target rate is raised as well.
    pub fast_recovery: u32,
    /// Raise of the target rate per step of additive increase, bytes per second.
    pub additive: f64,
    /// Raise of the target rate per step of hyper increase, when time and bytes are both past fast recovery; bytes per second.
    pub hyper: f64,
    /// Nanoseconds of sending that may be caught up at once, since the caller's calls are that coarse.
    pub burst: u64,
}

impl Default for Parameters {
    fn default() -> Self {
        Self {
            line_rate: 5e9,
            minimum_rate: 1.25e6,
            notification_interval: 50_000,
            gain: 1.0 / 256.0,
            estimate_interval: 55_000,
            increase_interval: 300_000,
            increase_bytes: 10 << 20,
            fast_recovery: 5,
            additive: 5e6,
            hyper: 5e7,
            burst: 20_000,
        }
    }
}

impl Parameters {
    /// Whether the numbers are valid: positive, finite, and no interval of 0.
    #[must_use]
    pub fn are_valid(&self) -> bool {
        let positive = |rate: f64| rate.is_finite() && rate > 0.0;
        positive(self.line_rate)
            && positive(self.minimum_rate)
            && positive(self.additive)
            && positive(self.hyper)
            && self.minimum_rate <= self.line_rate
            // Bounds the steps of recovery, and those that a restored state catches up on.
            && self.line_rate / self.additive <= 1e6
            && self.gain > 0.0
            && self.gain < 1.0
            && self.estimate_interval > 0
            && self.increase_interval > 0
            && self.increase_bytes > 0
    }
}

/// The sender's side: rate, and when the next packet may be sent. `Serialize` is for [`crate::saved`]; times are then relative.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sender {
    /// Current rate, bytes per second.
    pub rate: f64,
    /// Target rate of recovery, bytes per second.
    pub target: f64,
    /// Estimate of congestion, 0 to 1 (the paper's alpha).
    pub alpha: f64,
    /// When the estimate was last updated.
    pub estimated: u64,
    /// Time of the last step by time.
    pub increased: u64,
    /// Bytes since the last step by bytes.
    pub bytes: u64,
    /// Steps by time since the last cut.
    pub time_steps: u32,
    /// Steps by bytes since the last cut.
    pub byte_steps: u32,
    /// When the next packet may be sent.
    pub next: u64,
}

impl Sender {
    pub(crate) fn new(parameters: &Parameters) -> Self {
        Self {
            rate: parameters.line_rate,
            target: parameters.line_rate,
            alpha: 1.0,
            estimated: 0,
            increased: 0,
            bytes: 0,
            time_steps: 0,
            byte_steps: 0,
            next: 0,
        }
    }

    /// Cuts the rate after a notification.
    pub(crate) fn notified(&mut self, parameters: &Parameters, now: u64) {
        self.advance(parameters, now);
        self.target = self.rate;
        self.rate = (self.rate * (1.0 - self.alpha / 2.0)).max(parameters.minimum_rate);
        self.alpha = (1.0 - parameters.gain) * self.alpha + parameters.gain;
        self.estimated = now;
        self.increased = now;
        self.bytes = 0;
        self.time_steps = 0;
        self.byte_steps = 0;
    }

    /// Updates estimate and rate to `now`.
    pub(crate) fn advance(&mut self, parameters: &Parameters, now: u64) {
        if self.rate >= parameters.line_rate {
            // The rate isn't limited: the next notification counts as the first, and halves it.
            self.alpha = 1.0;
            self.estimated = now;
            self.increased = now;
            return;
        }
        let intervals = now.saturating_sub(self.estimated) / parameters.estimate_interval;
        if intervals > 0 {
            let power = i32::try_from(intervals).unwrap_or(i32::MAX);
            self.alpha *= (1.0 - parameters.gain).powi(power);
            self.estimated += intervals * parameters.estimate_interval;
        }
        while self.rate < parameters.line_rate
            && now.saturating_sub(self.increased) >= parameters.increase_interval
        {
            self.increased += parameters.increase_interval;
            self.time_steps = self.time_steps.saturating_add(1);
            self.step(parameters);
        }
    }

    fn step(&mut self, parameters: &Parameters) {
        let fast = parameters.fast_recovery;
        if self.time_steps > fast && self.byte_steps > fast {
            self.target += parameters.hyper;
        } else if self.time_steps > fast || self.byte_steps > fast {
            self.target += parameters.additive;
        }
        self.target = self.target.min(parameters.line_rate);
        self.rate = f64::midpoint(self.target, self.rate);
        // The mean alone would approach the target without reaching it.
        if self.target - self.rate < parameters.additive / 16.0 {
            self.rate = self.target;
        }
    }

    /// Whether a packet may be sent now.
    #[inline]
    pub(crate) fn may_send(&self, now: u64) -> bool {
        self.next <= now
    }

    /// Charges a packet of `bytes` to the rate.
    #[inline]
    pub(crate) fn sent(&mut self, parameters: &Parameters, now: u64, bytes: usize) {
        let bytes = bytes as u64;
        // 4 KiB at 1 byte per second at most: far below the limits of either type.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        let took = (bytes as f64 * 1e9 / self.rate) as u64;
        self.next = self.next.max(now.saturating_sub(parameters.burst)).saturating_add(took);
        if self.rate >= parameters.line_rate {
            return;
        }
        self.bytes += bytes;
        while self.bytes >= parameters.increase_bytes {
            self.bytes -= parameters.increase_bytes;
            self.byte_steps = self.byte_steps.saturating_add(1);
            self.step(parameters);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(parameters: &Parameters, sender: &mut Sender, from: u64, nanoseconds: u64) -> u64 {
        let mut sent = 0;
        let mut now = from;
        while now < from + nanoseconds {
            sender.advance(parameters, now);
            while sender.may_send(now) {
                sender.sent(parameters, now, 4096);
                sent += 4096;
            }
            now += 1000;
        }
        sent
    }

    #[test]
    fn an_uncongested_sender_keeps_the_line_rate() {
        let parameters = Parameters { line_rate: 1e9, ..Parameters::default() };
        let mut sender = Sender::new(&parameters);
        let sent = seconds(&parameters, &mut sender, 1_000_000, 100_000_000);
        assert!((99_000_000..101_500_000).contains(&sent), "{sent} bytes in 0.1 s at 1 GB/s");
    }

    #[test]
    fn the_first_notification_halves_the_rate_and_it_recovers() {
        let parameters = Parameters { line_rate: 1e9, ..Parameters::default() };
        let mut sender = Sender::new(&parameters);
        sender.notified(&parameters, 1_000_000);
        assert!((sender.rate - 0.5e9).abs() < 1.0);
        sender.advance(&parameters, 1_000_000 + 5 * parameters.increase_interval);
        assert!(sender.rate > 0.98e9 && sender.rate < 1e9, "fast recovery: {}", sender.rate);
        sender.advance(&parameters, 1_000_000 + 50 * parameters.increase_interval);
        assert!((sender.rate - 1e9).abs() < 1.0, "{}", sender.rate);
    }

    #[test]
    fn many_notifications_end_at_the_minimum_and_a_long_pause_costs_little() {
        let parameters = Parameters::default();
        let mut sender = Sender::new(&parameters);
        for round in 0..1000 {
            sender.notified(&parameters, round * parameters.notification_interval);
        }
        assert!((sender.rate - parameters.minimum_rate).abs() < 1.0);
        assert!(sender.alpha > 0.9);
        sender.advance(&parameters, u64::MAX / 2);
        assert!((sender.rate - parameters.line_rate).abs() < 1.0);
        assert!(sender.alpha < 1e-6);
        sender.notified(&parameters, u64::MAX / 2 + 1);
        assert!(
            (sender.rate / parameters.line_rate - 0.5).abs() < 1e-6,
            "a new congestion is a new beginning"
        );
    }

    #[test]
    fn the_estimate_follows_the_notifications() {
        let parameters = Parameters::default();
        let mut sender = Sender::new(&parameters);
        // One in four intervals: after a long time the estimate nears the balance of growth and decay.
        for round in 0..20_000u64 {
            sender.notified(&parameters, round * 4 * parameters.estimate_interval);
        }
        assert!((0.2..0.3).contains(&sender.alpha), "{}", sender.alpha);
    }

    #[test]
    fn a_lowered_rate_is_kept_to() {
        let parameters =
            Parameters { line_rate: 1e9, increase_interval: u64::MAX / 4, ..Parameters::default() };
        let mut sender = Sender::new(&parameters);
        sender.notified(&parameters, 1_000_000);
        let rate = sender.rate;
        sender.bytes = 0;
        let sent = seconds(&parameters, &mut sender, 1_000_000, 10_000_000);
        #[allow(clippy::cast_precision_loss)]
        let got = sent as f64 / 0.01;
        assert!((got / rate - 1.0).abs() < 0.03, "{got} instead of {rate}");
    }
}
