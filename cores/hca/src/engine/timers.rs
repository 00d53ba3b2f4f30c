//! The active list, waits and their timers.
//!
//! A queue pair is on the active list (it gets turns), waits with or without a timer, or is idle. A wait ends by its timer or by
//! [`Engine::wake`]. A doorbell doesn't end it, since the queue is polled after the wait anyway.

use crate::names::{DeviceId, QpHandle, SrqHandle};
use crate::objects::{ObjectRef, QpRef, Wait};
use crate::provider::{Provider, ReceiveQueue, SendQueue};

use super::{Engine, Timer};
use crate::attributes::QpState;
use crate::saved::Kind;

/// RNR timer codes in units of 10 microseconds (IBTA table 45); code 0 is the longest.
const RNR_TIMERS: [u32; 32] = [
    65_536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
    3072, 4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768, 49_152,
];

/// Duration of an RNR timer code, nanoseconds.
pub(crate) fn rnr_timer_ns(code: u8) -> u64 {
    u64::from(RNR_TIMERS[usize::from(code % 32)]) * 10_000
}

/// Duration of a local ACK timeout code, nanoseconds; `None` is no timeout.
pub(crate) fn ack_timeout_ns(code: u8) -> Option<u64> {
    match code % 32 {
        0 => None,
        code => Some(4096u64 << code),
    }
}

/// How many turns ahead guest memory is prefetched.
const TURNS_AHEAD: usize = 6;

impl<P: Provider> Engine<P> {
    /// Puts a queue pair on the active list, unless it is there already.
    #[inline]
    pub(crate) fn activate(&mut self, at: QpRef) {
        if let Some(qp) = self.qp_mut(at) {
            qp.empty_looks = 0;
            if !qp.active {
                self.mark(at);
                self.enlist(at);
            }
        }
    }

    /// Marks a queue pair as touched, for a migration.
    #[inline]
    pub(crate) fn mark(&mut self, at: QpRef) {
        if let Some(device) = self.device_mut(at.device) {
            device.marks.touch(Kind::QueuePair, at.handle);
        }
    }

    /// Appends a queue pair to its device's active list.
    #[inline]
    pub(super) fn enlist(&mut self, at: QpRef) {
        let Some(device) = self.device_mut(at.device) else { return };
        let Some(qp) = device.qps.get_mut(at.handle) else { return };
        qp.active = true;
        if qp.waiter.is_none() {
            device.quiet.active(at.handle);
        } else {
            device.quiet.forget(at.handle);
        }
        device.active.push_back(at);
        if !std::mem::replace(&mut device.scheduled, true) {
            self.active.push_back(at.device);
        }
        self.active_qps += 1;
    }

    /// Removes and returns the queue pair that gets the next turn.
    #[inline]
    pub(super) fn next_active(&mut self) -> Option<QpRef> {
        loop {
            let index = self.active.pop_front()?;
            let Some(device) = self.device_mut(index) else { continue };
            let Some(at) = device.active.pop_front() else {
                device.scheduled = false;
                continue;
            };
            // Among thousands, each has left the caches since its last turn, and so have its pages' translations.
            if let Some(later) = device.active.get(2 * TURNS_AHEAD)
                && let Some(qp) = device.qps.get(later.handle)
            {
                dma::prefetch_object(qp.as_ref());
            }
            if let Some(soon) = device.active.get(TURNS_AHEAD)
                && let Some(qp) = device.qps.get(soon.handle)
            {
                qp.send_queue.prefetch_next(&device.memory);
            }
            self.active.push_back(index);
            self.active_qps -= 1;
            return Some(at);
        }
    }

    /// Removes a queue pair from a shared receive queue's list of waiting ones.
    pub(crate) fn stop_awaiting(&mut self, at: QpRef, awaits: Option<(u32, ObjectRef)>) {
        let Some((device, shared)) = awaits else { return };
        if let Some(srq) = self.device_mut(device).and_then(|device| device.srqs.get_mut(shared.handle))
            && srq.stamp == shared.stamp
        {
            srq.waiters.remove(at);
        }
    }

    /// Makes a send queue wait, until `deadline` at the latest if there is one.
    pub(crate) fn wait(&mut self, at: QpRef, wait: Wait, deadline: Option<u64>) {
        self.end_wait(at);
        if let Some(qp) = self.qp_mut(at) {
            qp.wait = wait;
            qp.deadline = deadline;
            if let Some(deadline) = deadline {
                self.timers.insert((deadline, Timer::Qp(at)));
            }
        }
    }

    fn end_wait(&mut self, at: QpRef) {
        let Some(qp) = self.qp_mut(at) else { return };
        let (wait, deadline) = (std::mem::replace(&mut qp.wait, Wait::None), qp.deadline.take());
        if let Some(deadline) = deadline {
            self.timers.remove(&(deadline, Timer::Qp(at)));
        }
        self.leave_lists(at, wait);
    }

    /// Removes a queue pair from the lists of its wait.
    pub(super) fn leave_lists(&mut self, at: QpRef, wait: Wait) {
        match wait {
            Wait::Budget => self.leave_inbound(at),
            Wait::Memory => self.leave_late(at, false),
            Wait::Rate => {
                if let Some(device) = self.device_mut(at.device) {
                    device.throttled.remove(at);
                }
            }
            Wait::Held => {
                self.parked.remove(at);
            }
            Wait::None | Wait::Receive | Wait::Peer | Wait::Outstanding => {}
        }
    }

    /// Starts a device's timer, in place of a running one of its kind.
    pub(super) fn start_device_timer(&mut self, timer: Timer, deadline: u64) {
        self.stop_device_timer(timer);
        self.device_timers.insert(timer, deadline);
        self.timers.insert((deadline, timer));
    }

    /// Stops a device's timer, if it is running.
    pub(super) fn stop_device_timer(&mut self, timer: Timer) {
        if let Some(deadline) = self.device_timers.remove(&timer) {
            self.timers.remove(&(deadline, timer));
        }
    }

    /// Ends a wait before its timer expires.
    pub(crate) fn wake(&mut self, at: QpRef) {
        self.receive_came(at);
        self.end_wait(at);
        self.activate(at);
    }

    /// Processes expired timers.
    pub(super) fn run_timers(&mut self) -> bool {
        let mut worked = false;
        for _ in 0..self.config.timers_per_poll {
            let Some(&(deadline, timer)) = self.timers.first() else { break };
            if deadline > self.now {
                break;
            }
            self.timers.pop_first();
            if !matches!(timer, Timer::Qp(_)) {
                self.device_timers.remove(&timer);
            }
            worked = true;
            match timer {
                Timer::Device(device) => self.release_throttled(device, RELEASED_AT_ONCE),
                Timer::Inbound(device) => self.release_inbound(device, 1),
                Timer::Late(device) => self.memory_came(crate::names::DeviceId(device)),
                Timer::Qp(at) => self.timer_expired(at),
            }
        }
        worked
    }

    fn timer_expired(&mut self, at: QpRef) {
        let Some(qp) = self.qp_mut(at) else { return };
        qp.deadline = None;
        if let Some(current) = &mut qp.current {
            match qp.wait {
                Wait::Receive => current.progress.rnr_waits = current.progress.rnr_waits.saturating_add(1),
                Wait::Peer => current.progress.timeouts = current.progress.timeouts.saturating_add(1),
                Wait::None | Wait::Rate | Wait::Budget | Wait::Outstanding | Wait::Held | Wait::Memory => {}
            }
        }
        let timed_out = qp.wait == Wait::Peer;
        qp.wait = Wait::None;
        if timed_out && let Some(device) = self.device_mut(at.device) {
            device.counters.local_ack_timeout_err += 1;
        }
        self.activate(at);
    }

    /// Makes a queue pair wait for its VM's rate limit.
    pub(super) fn throttle(&mut self, at: QpRef, until: u64) {
        self.wait(at, Wait::Rate, None);
        let Some(device) = self.device_mut(at.device) else { return };
        device.counters.throttled += 1;
        let first = device.throttled.is_empty();
        device.throttled.push(at);
        if first {
            self.start_device_timer(Timer::Device(at.device), until);
        }
    }

    /// Releases at most `most` queue pairs that wait for the rate limit, in order of arrival.
    pub(super) fn release_throttled(&mut self, device: u32, most: usize) {
        let now = self.now;
        let Some(found) = self.device_mut(device) else { return };
        let until = found.throttled_until(now);
        let released = found.throttled.take(if until.is_some() { 0 } else { most });
        if found.throttled.is_empty() {
            self.stop_device_timer(Timer::Device(device));
        } else {
            self.start_device_timer(Timer::Device(device), until.unwrap_or(now + 1));
        }
        for at in released {
            if let Some(qp) = self.qp_mut(at).filter(|qp| qp.wait == Wait::Rate) {
                qp.wait = Wait::None;
                self.activate(at);
            }
        }
    }

    /// Doorbell: a send request was posted. A hint: unknown handles are ignored.
    #[inline]
    pub fn doorbell_send(&mut self, device: DeviceId, qp: QpHandle) {
        if let Some(at) = self.qp_ref(device, qp) {
            self.activate(at);
        }
    }

    /// Whether a queue pair gets turns, so that each poll checks its send queue anyway.
    #[inline]
    #[must_use]
    pub fn is_active(&self, device: DeviceId, qp: QpHandle) -> bool {
        self.device(device.0).and_then(|found| found.qps.get(qp.0)).is_some_and(|qp| qp.active)
    }

    /// Whether any queue pair of a device gets turns.
    #[inline]
    #[must_use]
    pub fn has_active(&self, device: DeviceId) -> bool {
        self.device(device.0).is_some_and(|found| !found.active.is_empty())
    }

    /// Doorbell: a receive request was posted. A hint: unknown handles are ignored.
    #[inline]
    pub fn doorbell_receive(&mut self, device: DeviceId, qp: QpHandle) {
        if let Some(at) = self.qp_ref(device, qp) {
            self.look_at_receives(at);
        }
    }

    /// Doorbell: a receive request was posted to a shared queue. A hint: unknown handles are ignored.
    pub fn doorbell_srq(&mut self, device: DeviceId, srq: SrqHandle) {
        let Some(found) = self.device_mut(device.0) else { return };
        if !found.enabled {
            return;
        }
        let Some(srq) = found.srqs.get_mut(srq.0) else { return };
        if srq.waiters.is_empty() {
            return;
        }
        let available = srq.ring.available(&found.memory) as usize;
        for waiter in srq.waiters.take(available) {
            if let Some(qp) = self.qp_mut(waiter) {
                qp.awaits = None;
            }
            self.wake(waiter);
        }
    }

    /// Handles posted receives: wakes requesters that wait for them, and flushes them in the error state.
    pub(super) fn look_at_receives(&mut self, at: QpRef) {
        let Some(device) = self.device(at.device) else { return };
        let Some(qp) = device.qps.get(at.handle) else { return };
        if !device.enabled || (qp.waiter.is_none() && qp.state != QpState::Error) {
            return;
        }
        let posted = qp.receive_queue.as_ref().is_some_and(|queue| queue.available(&device.memory) > 0);
        if !posted {
            return;
        }
        let (flush, waiter) = (qp.state == QpState::Error, qp.waiter);
        if flush {
            self.activate(at);
        }
        if let Some(waiter) = waiter {
            if let Some(qp) = self.qp_mut(at) {
                qp.waiter = None;
            }
            self.wake(waiter);
        }
    }
}

/// Number of queue pairs that a device's rate timer releases at once. One: if it uses up the budget, the others keep their order and it
/// queues behind them. Otherwise the timer releases the next at once.
const RELEASED_AT_ONCE: usize = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timer_codes_are_those_of_the_specification() {
        assert_eq!(rnr_timer_ns(0), 655_360_000);
        assert_eq!(rnr_timer_ns(1), 10_000);
        assert_eq!(rnr_timer_ns(14), 1_280_000);
        assert_eq!(rnr_timer_ns(25), 61_440_000);
        assert_eq!(rnr_timer_ns(31), 491_520_000);
        assert_eq!(ack_timeout_ns(0), None);
        assert_eq!(ack_timeout_ns(14), Some(67_108_864));
    }
}
