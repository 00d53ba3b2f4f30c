//! Not-present guest memory: the guest runs here already, and its pages arrive from the source (post-copy).
//!
//! A request that needs a not-present page waits; no other request does. A local queue pair waits until the page arrives
//! ([`Engine::memory_came`]). A message of a transport waits until [`Action::MemoryCame`]. A page that is overwritten as a whole needn't be
//! present. Datagrams whose buffer isn't present are dropped. The guest's rings are always present: the caller that starts a device has
//! ensured it ([`Engine::control_memory`]).

use std::collections::BTreeMap;

use dma::Dma;

use crate::attributes::Access;
use crate::memory::Piece;
use crate::names::DeviceId;
use crate::objects::{QpRef, Wait};
use crate::provider::{CompletionQueue, Provider, ReceiveQueue, SendQueue};
use crate::transport::Action;
use crate::work::Operation;

use super::{Engine, Timer};

/// Interval at which waiting requests are retried, nanoseconds, besides each arrival of pages: a page request may have found the socket
/// full.
const LOOK_EVERY: u64 = 10_000_000;
/// Bytes of an atomic.
const ATOMIC: u64 = 8;

/// Requests that wait for pages of a device's guest.
#[derive(Debug, Default)]
pub(crate) struct Late {
    /// Waiting send queue, whether its transport waits instead, and the pieces that it needs: each with whether it is written.
    waiting: BTreeMap<(QpRef, bool), Vec<(Piece, bool)>>,
}

impl<P: Provider> Engine<P> {
    /// Begins or ends post-copy for a device's guest. At the end all of its memory is present.
    pub fn set_late(&mut self, device: DeviceId, late: bool) {
        let Some(found) = self.device_mut(device.0) else { return };
        if found.late.is_some() == late {
            return;
        }
        let before = std::mem::replace(&mut found.late, late.then(Box::default));
        self.stop_device_timer(Timer::Late(device.0));
        self.late_devices = self.devices.iter().flatten().filter(|device| device.late.is_some()).count();
        for (at, remote) in before.into_iter().flat_map(|late| late.waiting.into_keys()) {
            self.end_memory_wait(at, remote);
        }
    }

    /// Whether a device's guest has not-present memory.
    #[must_use]
    pub fn is_late(&self, device: DeviceId) -> bool {
        self.device(device.0).is_some_and(|found| found.late.is_some())
    }

    /// How often a request has waited for memory of a device's guest.
    #[must_use]
    pub fn memory_waits(&self, device: DeviceId) -> u64 {
        self.device(device.0).map_or(0, |found| found.memory_waits)
    }

    /// Continues requests that waited for pages of a device's guest, after pages arrived.
    pub fn memory_came(&mut self, device: DeviceId) {
        let Some(found) = self.device_mut(device.0) else { return };
        let Some(late) = &mut found.late else { return };
        let mut here = Vec::new();
        let memory = &found.memory;
        late.waiting.retain(|key, pieces| {
            // Evaluated for all pieces, so that all their pages are requested.
            pieces.retain(|(piece, write)| memory.awaits(piece.address, piece.len, *write));
            if pieces.is_empty() {
                here.push(*key);
            }
            !pieces.is_empty()
        });
        let (waits, complete) = (!late.waiting.is_empty(), !memory.is_late());
        if complete {
            self.set_late(device, false);
        } else if waits {
            self.start_device_timer(Timer::Late(device.0), self.now.saturating_add(LOOK_EVERY));
        } else {
            self.stop_device_timer(Timer::Late(device.0));
        }
        for (at, remote) in here {
            self.end_memory_wait(at, remote);
        }
    }

    fn end_memory_wait(&mut self, at: QpRef, remote: bool) {
        if remote {
            if let Some(qp) = self.qp_id(at) {
                self.actions.push(Action::MemoryCame { qp });
            }
        } else if let Some(qp) = self.qp_mut(at).filter(|qp| qp.wait == Wait::Memory) {
            qp.wait = Wait::None;
            self.activate(at);
        }
    }

    /// Whether the pieces gathered last include not-present pages: the source in the guest of device `from`, the target in that of `to`. A
    /// local queue pair then enters [`Wait::Memory`]; a transport (`remote`) gets [`Action::MemoryCame`] later.
    #[inline]
    pub(crate) fn awaits_memory(
        &mut self,
        at: QpRef,
        remote: bool,
        from: Option<u32>,
        to: Option<u32>,
    ) -> bool {
        self.late_devices > 0 && self.look_for_memory(at, remote, from, to)
    }

    #[cold]
    fn look_for_memory(&mut self, at: QpRef, remote: bool, from: Option<u32>, to: Option<u32>) -> bool {
        let mut whose = None;
        let mut missing = Vec::new();
        let (sources, targets) = self.pieces();
        for (device, pieces, write) in [(from, sources, false), (to, targets, true)] {
            let found = device.and_then(|device| Some((device, self.device(device)?)));
            let Some((device, found)) = found.filter(|(_, found)| found.late.is_some()) else { continue };
            let awaits = |piece: &&Piece| found.memory.awaits(piece.address, piece.len, write);
            let awaited: Vec<_> = pieces.iter().filter(awaits).map(|piece| (*piece, write)).collect();
            if whose.is_none() && !awaited.is_empty() {
                // Where pages of both guests are missing, the other's are checked after the first have arrived.
                whose = Some(device);
                missing = awaited;
            }
        }
        let Some(device) = whose else { return false };
        let now = self.now;
        let Some(late) = self.device_mut(device).and_then(|found| found.late.as_mut()) else { return false };
        let first = late.waiting.is_empty();
        late.waiting.insert((at, remote), missing);
        if first {
            self.start_device_timer(Timer::Late(device), now.saturating_add(LOOK_EVERY));
        }
        if let Some(found) = self.device_mut(device) {
            found.memory_waits += 1;
        }
        true
    }

    /// Removes a send queue, or its transport (`remote`), from the lists of waiting requests.
    pub(crate) fn leave_late(&mut self, at: QpRef, remote: bool) {
        if self.late_devices == 0 {
            return;
        }
        for late in self.devices.iter_mut().flatten().filter_map(|found| found.late.as_mut()) {
            late.waiting.remove(&(at, remote));
        }
    }

    /// As [`Engine::leave_late`], for all send queues of a device; returns their handles.
    pub(super) fn device_leaves_late(&mut self, device: u32) -> Vec<u32> {
        let mut left = Vec::new();
        for late in self.devices.iter_mut().flatten().filter_map(|found| found.late.as_mut()) {
            late.waiting.retain(|&(at, remote), _| {
                let leaves = !remote && at.device == device;
                if leaves {
                    left.push(at.handle);
                }
                !leaves
            });
        }
        left
    }

    /// Number of send queues and messages of transports that wait for memory of a device's guest.
    #[must_use]
    pub fn waiting_for_memory(&self, device: DeviceId) -> usize {
        self.device(device.0).and_then(|found| found.late.as_ref()).map_or(0, |late| late.waiting.len())
    }

    /// Passes `each` the memory that has to be present before the device continues, as addresses and lengths. That is its objects' rings,
    /// and the targets of atomics that a transport has.
    pub fn control_memory(&mut self, device: DeviceId, each: &mut dyn FnMut(u64, u64)) {
        let Some(found) = self.device(device.0) else { return };
        found.cqs.iter().for_each(|(_, cq)| cq.ring.memory(each));
        found.srqs.iter().for_each(|(_, srq)| srq.ring.memory(each));
        let mut pieces = Vec::new();
        for (_, qp) in found.qps.iter() {
            qp.send_queue.memory(each);
            qp.receive_queue.iter().for_each(|queue| queue.memory(each));
            for request in qp.elsewhere.iter().flat_map(|elsewhere| elsewhere.requests()) {
                let atomic =
                    matches!(request.operation, Operation::CompareSwap { .. } | Operation::FetchAdd { .. });
                let need = Access::LOCAL_WRITE;
                let regions = &found.regions;
                // An atomic without permission fails when its result arrives.
                if atomic
                    && regions.gather(qp.pd, &request.sges, ATOMIC, 0..ATOMIC, need, &mut pieces).is_ok()
                {
                    pieces.iter().for_each(|piece| each(piece.address, piece.len));
                }
            }
        }
    }
}
