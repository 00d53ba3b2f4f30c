//! How much peers write into a guest's memory, and how much they may: a VM that is being copied elsewhere has to change more slowly than it can
//! be copied, and its vCPUs aren't the only ones that change it.
//!
//! A requester of this engine waits before its next request or quantum, in the order of arrival. One elsewhere is told by its transport, which
//! asks [`Engine::is_written_too_fast`] at each packet. Nothing is refused or lost, and no queue pair notices but by the time that it takes.
//! Datagrams, and what a VM's own READs bring it, are neither counted nor held back.

use crate::limits::Bucket;
use crate::names::DeviceId;
use crate::objects::{Path, QpRef, Wait, WaitList};
use crate::provider::{Provider, SendQueue};

use super::{Engine, Timer};

/// What peers write into a guest's memory.
#[derive(Debug, Default)]
pub(crate) struct Inbound {
    /// Since somebody wants to know.
    bytes: u64,
    budget: Bucket,
    /// Requesters of this engine that wait, in the order in which they came. The device has a timer while there are any.
    waiting: WaitList,
}

impl<P: Provider> Engine<P> {
    /// Counts what peers write into a guest's memory from now on, from 0; or no more, without any limit then. Counting costs a look-up per
    /// request.
    pub fn watch_inbound(&mut self, device: DeviceId, on: bool) {
        self.release_inbound(device.0, usize::MAX);
        if let Some(found) = self.device_mut(device.0) {
            found.inbound = on.then(Box::default);
        }
        self.count_watched();
    }

    /// Recounts, since a device came to be watched, or ceased to be.
    pub(super) fn count_watched(&mut self) {
        self.inbound_watched =
            self.devices.iter().flatten().filter(|device| device.inbound.is_some()).count();
    }

    /// Bytes that peers have written since it is watched; `None` when it isn't.
    #[must_use]
    pub fn inbound_bytes(&self, device: DeviceId) -> Option<u64> {
        self.device(device.0)?.inbound.as_ref().map(|inbound| inbound.bytes)
    }

    /// Peers may write so many bytes per second, or as many as they like, while the device is watched.
    pub fn limit_inbound(&mut self, device: DeviceId, bytes_per_second: Option<u64>) {
        if let Some(inbound) = self.device_mut(device.0).and_then(|found| found.inbound.as_mut()) {
            inbound.budget.set_rate(bytes_per_second);
        }
        self.release_inbound(device.0, usize::MAX);
    }

    /// Whether peers have written more than they may: whoever does so from elsewhere is to be told.
    #[inline]
    #[must_use]
    pub fn is_written_too_fast(&self, device: DeviceId) -> bool {
        self.inbound_watched > 0 && self.inbound_blocked_until(device.0).is_some()
    }

    fn inbound_blocked_until(&self, device: u32) -> Option<u64> {
        self.device(device)?.inbound.as_ref()?.budget.blocked_until(self.now)
    }

    #[inline]
    pub(crate) fn was_written(&mut self, device: u32, bytes: u64) {
        if self.inbound_watched == 0 {
            return;
        }
        let now = self.now;
        if let Some(inbound) = self.device_mut(device).and_then(|found| found.inbound.as_mut()) {
            inbound.bytes = inbound.bytes.saturating_add(bytes);
            inbound.budget.spend(now, bytes);
        }
    }

    /// Whether a send queue has to wait since its peer's device has been written too fast; it waits then.
    pub(super) fn awaits_budget(&mut self, at: QpRef) -> bool {
        let Some((device, qp)) = self.device(at.device).zip(self.qp(at)) else { return false };
        let Path::Local(peer) = qp.path else { return false };
        if qp.wait != Wait::None || (qp.current.is_none() && !qp.send_queue.pending(&device.memory)) {
            return false;
        }
        let Some(until) = self.inbound_blocked_until(peer.device) else { return false };
        if let Some(device) = self.device_mut(at.device) {
            device.counters.throttled += 1;
        }
        self.wait(at, Wait::Budget, None);
        if let Some(inbound) = self.device_mut(peer.device).and_then(|found| found.inbound.as_mut()) {
            inbound.waiting.push(at);
            if inbound.waiting.len() == 1 {
                self.start_device_timer(Timer::Inbound(peer.device), until);
            }
        }
        true
    }

    /// Peers may write again: at most so many of those that wait go on. One at a time, as the first may spend all that there is.
    pub(super) fn release_inbound(&mut self, device: u32, most: usize) {
        let all = most == usize::MAX;
        let until = if all { None } else { self.inbound_blocked_until(device) };
        let now = self.now;
        let Some(inbound) = self.device_mut(device).and_then(|found| found.inbound.as_mut()) else { return };
        let released = inbound.waiting.take(if until.is_some() { 0 } else { most });
        if inbound.waiting.is_empty() {
            self.stop_device_timer(Timer::Inbound(device));
        } else {
            self.start_device_timer(Timer::Inbound(device), until.unwrap_or(now + 1));
        }
        for at in released {
            // It may have ended its wait for another reason.
            if let Some(qp) = self.qp_mut(at).filter(|qp| qp.wait == Wait::Budget) {
                qp.wait = Wait::None;
                self.activate(at);
            }
        }
    }

    /// Takes a send queue that doesn't wait any more out of the list where it did.
    pub(super) fn leave_inbound(&mut self, at: QpRef) {
        if self.inbound_watched == 0 {
            return;
        }
        for inbound in self.devices.iter_mut().flatten().filter_map(|found| found.inbound.as_mut()) {
            inbound.waiting.remove(at);
        }
    }

    /// As [`Engine::leave_inbound`], for all of a device; gives their handles.
    pub(super) fn device_leaves_inbound(&mut self, device: u32) -> Vec<u32> {
        let watched = self.devices.iter_mut().flatten().filter_map(|found| found.inbound.as_mut());
        watched.flat_map(|inbound| inbound.waiting.take_device(device)).map(|at| at.handle).collect()
    }
}
