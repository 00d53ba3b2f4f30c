//! What a migration copies of a device: the set of touched objects, and an object's state.
//!
//! A device is *tracked* from before its first object is saved. Each round takes the marks and saves those objects. After the device is
//! stopped ([`Engine::stop`]), the objects touched since the last round are left, and [`crate::saved::Device`].

use crate::attributes::QpKind;
use crate::names::{DeviceId, QpHandle, Qpn};
use crate::objects::{NOT_NOTIFIED, Path, QpRef, Wait};
use crate::provider::{CompletionQueue, Provider, ReceiveQueue, SendQueue, Sink};
use crate::saved::{self, Kind, Name};

use super::{Engine, Timer};

/// A saved queue pair of a provider.
pub type SavedQp<P> = saved::Qp<
    <<P as Provider>::SendQueue as SendQueue<<P as Provider>::Memory>>::Saved,
    <<P as Provider>::ReceiveQueue as ReceiveQueue<<P as Provider>::Memory>>::Saved,
>;
/// A saved completion queue of a provider.
pub type SavedCq<P> =
    saved::Cq<<<P as Provider>::CompletionQueue as CompletionQueue<<P as Provider>::Memory>>::Saved>;
/// A saved shared receive queue of a provider.
pub type SavedSrq<P> =
    saved::Srq<<<P as Provider>::ReceiveQueue as ReceiveQueue<<P as Provider>::Memory>>::Saved>;

impl<P: Provider> Engine<P> {
    /// Begins or ends tracking of touched objects. At the beginning all existing objects count as touched.
    pub fn track(&mut self, device: DeviceId, on: bool) {
        let Some(found) = self.device_mut(device.0) else { return };
        found.marks.set(on);
        if !on {
            return;
        }
        let touched = [
            (Kind::Device, vec![0]),
            (Kind::Context, found.contexts.handles(|_| true)),
            (Kind::ProtectionDomain, found.pds.handles(|_| true)),
            (Kind::MemoryRegion, found.regions.table().handles(|_| true)),
            (Kind::CompletionQueue, found.cqs.handles(|_| true)),
            (Kind::SharedReceiveQueue, found.srqs.handles(|_| true)),
            (Kind::QueuePair, found.qps.handles(|_| true)),
        ];
        for (kind, handles) in touched {
            for handle in handles {
                found.marks.touch(kind, handle);
            }
        }
    }

    /// Whether touched objects are tracked.
    #[must_use]
    pub fn is_tracked(&self, device: DeviceId) -> bool {
        self.device(device.0).is_some_and(|found| found.marks.on())
    }

    /// Number of objects touched since [`Engine::take_touched`].
    #[must_use]
    pub fn touched(&self, device: DeviceId) -> usize {
        self.device(device.0).map_or(0, |found| found.marks.count())
    }

    /// Returns at most `most` touched objects and clears their marks: objects that were created, changed or destroyed, each after those
    /// that it refers to.
    pub fn take_touched(&mut self, device: DeviceId, most: usize, each: impl FnMut(Name)) {
        if let Some(found) = self.device_mut(device.0) {
            found.marks.take(most, each);
        }
    }

    /// Marks a queue pair as touched, after a transport changed the state that it has of it.
    #[inline]
    pub fn touch_qp(&mut self, device: DeviceId, qp: QpHandle) {
        if let Some(found) = self.device_mut(device.0) {
            found.marks.touch(Kind::QueuePair, qp.0);
        }
    }

    /// Stops a device between two requests or quanta, until [`Engine::start`]. It gets no turns, accesses no guest memory, and answers no
    /// peer. Posted requests stay in the rings. Call it between polls; transports then process the remaining actions, and suspend their
    /// connections.
    pub fn stop(&mut self, device: DeviceId, sink: &mut impl Sink) {
        self.run_failed_cqs();
        self.deliver(sink);
        let index = device.0;
        let Some(found) = self.device_mut(index) else { return };
        if found.stopped.is_some() {
            return;
        }
        let mut stopped: Vec<u32> = found.active.drain(..).map(|at| at.handle).collect();
        let active = u32::try_from(stopped.len()).unwrap_or(0);
        stopped.extend(found.throttled.take(usize::MAX).into_iter().map(|at| at.handle));
        found.enabled = false;
        let (segment, gids) = (found.segment, found.gids.clone());
        self.active_qps -= active;
        for entry in gids.iter().flatten() {
            self.gids.remove(&(segment, entry.gid));
        }
        let waiting: Vec<QpRef> = self
            .timers
            .iter()
            .filter_map(|(_, timer)| match timer {
                Timer::Qp(at) => Some(*at),
                Timer::Device(_) | Timer::Inbound(_) | Timer::Late(_) => None,
            })
            .collect();
        self.stop_device_timer(Timer::Device(index));
        stopped.extend(self.device_leaves_inbound(index));
        stopped.extend(self.device_leaves_late(index));
        // At their next turn they find its address suspended.
        self.release_inbound(index, usize::MAX);
        self.topology_changed();
        for at in waiting {
            if at.device == index {
                stopped.push(at.handle);
                continue;
            }
            // A peer that waits for this device's responses or receives gets a turn, and finds the address suspended.
            let waits = self.qp(at).is_some_and(|qp| matches!(qp.wait, Wait::Receive | Wait::Peer));
            if waits && self.is_held(at) {
                self.wake(at);
            }
        }
        stopped.extend(self.parked.take_device(index).into_iter().map(|at| at.handle));
        stopped.sort_unstable();
        stopped.dedup();
        for &handle in &stopped {
            let Some(at) = self.qp_ref(device, QpHandle(handle)) else { continue };
            let Some(qp) = self.qp_mut(at) else { continue };
            qp.active = false;
            let awaits = qp.awaits.take();
            self.stop_awaiting(at, awaits);
            self.wait(at, Wait::None, None);
            if let Some(found) = self.device_mut(index) {
                found.quiet.forget(handle);
                found.marks.touch(Kind::QueuePair, handle);
            }
        }
        if let Some(found) = self.device_mut(index) {
            found.marks.touch(Kind::Device, 0);
            found.stopped = Some(stopped);
        }
    }

    /// Whether a device is stopped, or dormant.
    #[must_use]
    pub fn is_stopped(&self, device: DeviceId) -> bool {
        self.device(device.0).is_some_and(|found| found.stopped.is_some())
    }

    /// Saves a stopped device; `None` when it isn't stopped.
    #[must_use]
    pub fn save_device(&self, device: DeviceId) -> Option<saved::Device> {
        let found = self.device(device.0)?;
        let active = found.stopped.clone()?;
        let index = device.0;
        let watched = self.watched.iter().filter(|(_, cq)| cq.device == index).map(|(_, cq)| cq.handle);
        let late = self.undelivered.iter().chain(&self.notifications);
        Some(saved::Device {
            gids: self.gid_table(device),
            counters: found.counters,
            exact: found.exact,
            active,
            watched: watched.collect(),
            notifying: late.filter(|cq| cq.device == index).map(|cq| cq.handle).collect(),
        })
    }

    /// Whether an object exists.
    #[must_use]
    pub fn has(&self, device: DeviceId, name: Name) -> bool {
        let Some(found) = self.device(device.0) else { return false };
        let handle = name.handle;
        match name.kind {
            Kind::Device => true,
            Kind::Context => found.contexts.get(handle).is_some(),
            Kind::ProtectionDomain => found.pds.get(handle).is_some(),
            Kind::MemoryRegion => found.regions.table().get(handle).is_some(),
            Kind::CompletionQueue => found.cqs.get(handle).is_some(),
            Kind::SharedReceiveQueue => found.srqs.get(handle).is_some(),
            Kind::QueuePair => found.qps.get(handle).is_some(),
        }
    }

    /// Saves a context; `None` when it doesn't exist.
    #[must_use]
    pub fn save_context(&self, device: DeviceId, handle: u32) -> Option<saved::Context> {
        let found = self.device(device.0)?.contexts.get(handle)?;
        Some(saved::Context { stamp: found.stamp, exact: found.exact })
    }

    /// Saves a protection domain; `None` when it doesn't exist.
    #[must_use]
    pub fn save_pd(&self, device: DeviceId, handle: u32) -> Option<saved::Pd> {
        Some(saved::Pd { context: self.device(device.0)?.pds.get(handle)?.context })
    }

    /// Saves a memory region; `None` when it doesn't exist.
    #[must_use]
    pub fn save_region(&self, device: DeviceId, handle: u32) -> Option<saved::Region> {
        let found = self.device(device.0)?.regions.table().get(handle)?;
        Some(saved::Region {
            key: found.key,
            pd: found.pd,
            access: found.access,
            valid: found.valid,
            kind: found.kind,
            start: found.start,
            length: found.length,
            extent: found.extent.clone(),
        })
    }

    /// Saves a completion queue; `None` when it doesn't exist.
    #[must_use]
    pub fn save_cq(&self, device: DeviceId, handle: u32) -> Option<SavedCq<P>> {
        let found = self.device(device.0)?.cqs.get(handle)?;
        Some(saved::Cq {
            stamp: found.stamp,
            context: found.context,
            failed: found.failed,
            exact: found.exact,
            arm: found.arm,
            pushed: found.pushed,
            solicited: found.solicited,
            notified_at: (found.notified_at != NOT_NOTIFIED).then_some(found.notified_at),
            ring: found.ring.save(),
        })
    }

    /// Saves a shared receive queue; `None` when it doesn't exist.
    #[must_use]
    pub fn save_srq(&self, device: DeviceId, handle: u32) -> Option<SavedSrq<P>> {
        let found = self.device(device.0)?.srqs.get(handle)?;
        Some(saved::Srq {
            stamp: found.stamp,
            pd: found.pd,
            context: found.context,
            max_wr: found.max_wr,
            max_sge: found.max_sge,
            limit: found.limit,
            ring: found.ring.save(),
        })
    }

    /// Saves a queue pair; `None` when it doesn't exist.
    #[must_use]
    pub fn save_qp(&self, device: DeviceId, handle: u32) -> Option<SavedQp<P>> {
        let found = self.device(device.0)?.qps.get(handle)?;
        let reference = |at: crate::objects::ObjectRef| (at.handle, at.stamp);
        let elsewhere = found.elsewhere.as_deref();
        let unused = elsewhere.into_iter().flat_map(|elsewhere| elsewhere.taken_receives());
        Some(saved::Qp {
            stamp: found.stamp,
            state: found.state,
            kind: found.kind,
            signal_all: found.signal_all,
            pd: found.pd,
            context: found.context,
            send_cq: reference(found.send_cq),
            receive_cq: reference(found.receive_cq),
            srq: found.srq.map(reference),
            qpn: found.qpn,
            incarnation: found.incarnation,
            attributes: found.attributes,
            source_gid: found.source_gid,
            established: found.established,
            carried: found.path == Path::Elsewhere,
            counters: found.counters,
            elsewhere: elsewhere.map(|elsewhere| elsewhere.save()),
            current: found.current.as_ref().map(|current| saved::Current {
                request: current.request.clone(),
                rnr_waits: current.progress.rnr_waits,
                timeouts: current.progress.timeouts,
                behind: current.behind.iter().cloned().collect(),
            }),
            taken: found.stashed.as_deref().into_iter().chain(unused).cloned().collect(),
            send: found.send_queue.save(),
            receive: found.receive_queue.as_ref().map(ReceiveQueue::save),
        })
    }

    /// Connected queue pairs of a device: handle, number, and the peer's number.
    #[must_use]
    pub fn connections(&self, device: DeviceId) -> Vec<(QpHandle, Qpn, Qpn)> {
        let qps = self.device(device.0).into_iter().flat_map(|found| found.qps.iter());
        qps.filter(|(_, qp)| matches!(qp.kind, QpKind::Rc | QpKind::Uc) && qp.receives())
            .map(|(_, qp)| (qp.handle, qp.qpn, qp.attributes.destination_qpn))
            .collect()
    }
}
