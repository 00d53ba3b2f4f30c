//! Counting and limiting peers' writes to a guest's memory. Pre-copy has to copy the memory faster than it changes, and vCPUs aren't the
//! only ones that change it.
//!
//! A requester of this engine waits before its next request or quantum, in order of arrival. For a remote requester, the transport asks
//! [`Engine::is_written_too_fast`] at each packet, and notifies it. Nothing is refused or lost; requests only take longer. Datagrams, and
//! responses to the VM's own READs, are neither counted nor limited.

use crate::limits::Bucket;
use crate::names::DeviceId;
use crate::objects::{Path, QpRef, Wait, WaitList};
use crate::provider::{Provider, SendQueue};

use super::{Engine, Timer};

/// Count and limit of peers' writes to a guest's memory.
#[derive(Debug, Default)]
pub(crate) struct Inbound {
    /// Bytes since counting began.
    bytes: u64,
    budget: Bucket,
    /// Waiting requesters of this engine, in order of arrival. While there are any, the device has a timer.
    waiting: WaitList,
}

impl<P: Provider> Engine<P> {
    /// Starts counting peers' writes to a guest's memory, from 0; or stops, which also removes the limit. Counting costs a look-up per
    /// request.
    pub fn watch_inbound(&mut self, device: DeviceId, on: bool) {
        self.release_inbound(device.0, usize::MAX);
        if let Some(found) = self.device_mut(device.0) {
            found.inbound = on.then(Box::default);
        }
        self.count_watched();
    }

    /// Recounts the watched devices.
    pub(super) fn count_watched(&mut self) {
        self.inbound_watched =
            self.devices.iter().flatten().filter(|device| device.inbound.is_some()).count();
    }

    /// Bytes that peers have written since counting began; `None` when the device isn't watched.
    #[must_use]
    pub fn inbound_bytes(&self, device: DeviceId) -> Option<u64> {
        self.device(device.0)?.inbound.as_ref().map(|inbound| inbound.bytes)
    }

    /// Sets or removes the limit of peers' writes, in bytes per second, while the device is watched.
    pub fn limit_inbound(&mut self, device: DeviceId, bytes_per_second: Option<u64>) {
        if let Some(inbound) = self.device_mut(device.0).and_then(|found| found.inbound.as_mut()) {
            inbound.budget.set_rate(bytes_per_second);
        }
        self.release_inbound(device.0, usize::MAX);
    }

    /// Whether peers have exceeded the limit: transports then notify remote requesters to send slower.
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

    /// Whether a send queue has to wait because writes to its peer's memory exceed the limit. If so, it waits.
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

    /// Releases at most `most` waiting requesters when the limit permits writes again. One at a time, since the first may use up the
    /// budget.
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
            // Its wait may have ended for another reason.
            if let Some(qp) = self.qp_mut(at).filter(|qp| qp.wait == Wait::Budget) {
                qp.wait = Wait::None;
                self.activate(at);
            }
        }
    }

    /// Removes a send queue that no longer waits from the lists.
    pub(super) fn leave_inbound(&mut self, at: QpRef) {
        if self.inbound_watched == 0 {
            return;
        }
        for inbound in self.devices.iter_mut().flatten().filter_map(|found| found.inbound.as_mut()) {
            inbound.waiting.remove(at);
        }
    }

    /// As [`Engine::leave_inbound`], for all of a device; returns their handles.
    pub(super) fn device_leaves_inbound(&mut self, device: u32) -> Vec<u32> {
        let watched = self.devices.iter_mut().flatten().filter_map(|found| found.inbound.as_mut());
        watched.flat_map(|inbound| inbound.waiting.take_device(device)).map(|at| at.handle).collect()
    }
}
