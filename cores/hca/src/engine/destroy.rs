//! Verbs that destroy. Each is complete when it returns: no memory of the object is touched any more. What belongs to a
//! destroyed protection domain or context goes with it, since a guest may have forgotten objects whose creation it did
//! not wait for (spec pvrdma 6.3).

use crate::attributes::QpState;
use crate::error::VerbsError;
use crate::names::{ContextHandle, CqHandle, DeviceId, MrHandle, PdHandle, QpHandle, SrqHandle};
use crate::objects::{QpRef, Wait};
use crate::provider::Provider;
use crate::remote::Action;
use crate::work::AsyncEvent;

use crate::saved::Kind;

use super::{Engine, Timer};

impl<P: Provider> Engine<P> {
    /// Closes a context. The kernel's can't be closed.
    pub fn destroy_context(&mut self, device: DeviceId, context: ContextHandle) -> Result<(), VerbsError> {
        let found = self.of(device)?;
        let owned = match found.contexts.get(context.0) {
            Some(found) if context.0 != 0 => found.owned,
            _ => return Err(VerbsError::missing("context", context.0)),
        };
        if owned > 0 {
            for pd in found.pds.handles(|pd| pd.context == context.0) {
                self.destroy_pd(device, PdHandle(pd))?;
            }
            for cq in self.of(device)?.cqs.handles(|cq| cq.context == context.0) {
                self.destroy_cq(device, CqHandle(cq))?;
            }
        }
        let found = self.of(device)?;
        found.contexts.remove(context.0);
        found.marks.touch(Kind::Context, context.0);
        Ok(())
    }

    /// Destroys a protection domain with its queue pairs, shared receive queues and memory regions.
    pub fn destroy_pd(&mut self, device: DeviceId, pd: PdHandle) -> Result<(), VerbsError> {
        let found = self.of(device)?;
        let missing = VerbsError::missing("protection domain", pd.0);
        if found.pds.get(pd.0).ok_or(missing.clone())?.owned > 0 {
            // The newest first: lists of owners are in the order of creation as a rule.
            for qp in found.qps.handles(|qp| qp.pd == pd.0).into_iter().rev() {
                self.destroy_qp(device, QpHandle(qp))?;
            }
            for srq in self.of(device)?.srqs.handles(|srq| srq.pd == pd.0) {
                self.destroy_srq(device, SrqHandle(srq))?;
            }
            for region in self.of(device)?.regions.table().handles(|region| region.pd == pd.0) {
                self.deregister_mr(device, MrHandle(region))?;
            }
        }
        let found = self.of(device)?;
        found.marks.touch(Kind::ProtectionDomain, pd.0);
        let pd = found.pds.remove(pd.0).ok_or(missing)?;
        if let Some(context) = found.contexts.get_mut(pd.context) {
            context.owned -= 1;
        }
        Ok(())
    }

    /// Ends a memory region. Messages under way through it fail at their next quantum.
    pub fn deregister_mr(&mut self, device: DeviceId, mr: MrHandle) -> Result<(), VerbsError> {
        let found = self.of(device)?;
        let region = found.regions.remove(mr.0).ok_or(VerbsError::missing("memory region", mr.0))?;
        found.marks.touch(Kind::MemoryRegion, mr.0);
        if region.kind == crate::memory::Kind::User {
            found.registered_bytes = found.registered_bytes.saturating_sub(region.length);
        }
        if let Some(pd) = found.pds.get_mut(region.pd) {
            pd.owned -= 1;
        }
        if region.exported {
            self.actions.push(Action::RegionGone { device, key: region.key });
        }
        Ok(())
    }

    /// Destroys a completion queue. Queue pairs that still complete there, which a correct guest doesn't have, go to the error
    /// state and complete nowhere.
    pub fn destroy_cq(&mut self, device: DeviceId, cq: CqHandle) -> Result<(), VerbsError> {
        let found = self.of(device)?;
        let gone = found.cqs.remove(cq.0).ok_or(VerbsError::missing("completion queue", cq.0))?;
        found.marks.touch(Kind::CompletionQueue, cq.0);
        if let Some(context) = found.contexts.get_mut(gone.context) {
            context.owned -= 1;
        }
        self.events.retain(|(of, event)| *of != device.0 || *event != AsyncEvent::CqError(cq));
        self.orphan(device.0, &gone.users);
        Ok(())
    }

    /// Destroys a shared receive queue; as [`Engine::destroy_cq`] for queue pairs that still use it.
    pub fn destroy_srq(&mut self, device: DeviceId, srq: SrqHandle) -> Result<(), VerbsError> {
        let found = self.of(device)?;
        let gone = found.srqs.remove(srq.0).ok_or(VerbsError::missing("shared receive queue", srq.0))?;
        if let Some(pd) = found.pds.get_mut(gone.pd) {
            pd.owned -= 1;
        }
        found.marks.touch(Kind::SharedReceiveQueue, srq.0);
        if let Some(context) = found.contexts.get_mut(gone.context) {
            remove_first(&mut context.srqs, srq.0);
        }
        self.events.retain(|(of, event)| {
            *of != device.0
                || !matches!(event, AsyncEvent::SrqError(of) | AsyncEvent::SrqLimitReached(of) if *of == srq)
        });
        for waiter in gone.waiters {
            self.wake(waiter);
        }
        self.orphan(device.0, &gone.users);
        Ok(())
    }

    /// Queue pairs whose completion or receive queue is gone.
    fn orphan(&mut self, device: u32, users: &[u32]) {
        for &handle in users {
            let qp = self.qp_ref(DeviceId(device), QpHandle(handle));
            if let Some(qp) = qp
                && self.qp(qp).is_some_and(|qp| qp.state != QpState::Reset)
            {
                self.enter_error(qp);
            }
        }
    }

    /// Destroys a queue pair. Nothing of it completes any more.
    pub fn destroy_qp(&mut self, device: DeviceId, qp: QpHandle) -> Result<(), VerbsError> {
        if let Some(at) = self.qp_ref(device, qp) {
            self.close_elsewhere(at);
        }
        let found = self.of(device)?;
        let gone = found.qps.remove(qp.0).ok_or(VerbsError::missing("queue pair", qp.0))?;
        found.quiet.forget(qp.0);
        found.marks.touch(Kind::QueuePair, qp.0);
        if found.gsi == qp.0 {
            found.gsi = 0;
        }
        if let Some(pd) = found.pds.get_mut(gone.pd) {
            pd.owned -= 1;
        }
        if let Some(context) = found.contexts.get_mut(gone.context) {
            remove_first(&mut context.qps, qp.0);
            // A scan under way goes by position, which has just changed.
            context.scan_again |= context.scanning;
        }
        for cq in [gone.send_cq, gone.receive_cq] {
            if let Some(cq) = found.cqs.get_mut(cq.handle).filter(|found| found.stamp == cq.stamp) {
                remove_first(&mut cq.users, qp.0);
            }
        }
        if let Some(srq) = gone.srq
            && let Some(srq) = found.srqs.get_mut(srq.handle).filter(|found| found.stamp == srq.stamp)
        {
            remove_first(&mut srq.users, qp.0);
        }
        let at = QpRef { device: device.0, handle: qp.0, stamp: gone.stamp };
        if let Some(deadline) = gone.deadline {
            self.timers.remove(&(deadline, Timer::Qp(at)));
        }
        if gone.wait == Wait::Budget {
            self.leave_inbound(|waiting| waiting == at);
            self.leave_late(|waiting| waiting == at);
        }
        if gone.wait == Wait::Rate
            && let Some(found) = self.device_mut(device.0)
        {
            found.throttled.retain(|waiting| *waiting != at);
        }
        self.stop_awaiting(at, gone.awaits);
        self.events.retain(|(of, event)| *of != device.0 || qp_of(event) != Some(qp));
        self.topology += 1;
        if let Some(waiter) = gone.waiter {
            self.wake(waiter);
        }
        Ok(())
    }
}

/// The queue pair that an event names.
fn qp_of(event: &AsyncEvent) -> Option<QpHandle> {
    match *event {
        AsyncEvent::QpFatal(qp)
        | AsyncEvent::QpRequestError(qp)
        | AsyncEvent::QpAccessError(qp)
        | AsyncEvent::CommunicationEstablished(qp)
        | AsyncEvent::SqDrained(qp)
        | AsyncEvent::LastWqeReached(qp) => Some(qp),
        _ => None,
    }
}

fn remove_first(list: &mut Vec<u32>, handle: u32) {
    // From the end: what was made last goes first as a rule.
    if let Some(position) = list.iter().rposition(|other| *other == handle) {
        list.swap_remove(position);
    }
}
