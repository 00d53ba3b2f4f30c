//! Verbs that destroy one object. Each is complete when it returns: the engine no longer accesses memory of the object. Owners of many
//! objects are destroyed in slices ([`super::Teardown`]).

use std::collections::BTreeSet;

use crate::attributes::QpState;
use crate::error::VerbsError;
use crate::names::{CqHandle, DeviceId, MrHandle, QpHandle, SrqHandle};
use crate::objects::QpRef;
use crate::provider::Provider;
use crate::transport::Action;
use crate::work::AsyncEvent;

use crate::saved::Kind;

use super::{Engine, Timer};

impl<P: Provider> Engine<P> {
    /// Deregisters a memory region. Messages in flight that use it fail at their next quantum.
    pub fn deregister_mr(&mut self, device: DeviceId, mr: MrHandle) -> Result<(), VerbsError> {
        let found = self.of(device)?;
        let region = found.regions.remove(mr.0).ok_or(VerbsError::missing("memory region", mr.0))?;
        found.marks.touch(Kind::MemoryRegion, mr.0);
        if region.kind == crate::memory::Kind::User {
            found.registered_bytes = found.registered_bytes.saturating_sub(region.length);
        }
        if let Some(pd) = found.pds.get_mut(region.pd) {
            pd.owned = pd.owned.saturating_sub(1);
        }
        if region.exported {
            self.actions.push(Action::RegionGone { device, key: region.key });
        }
        Ok(())
    }

    /// Destroys a completion queue. Queue pairs that still use it, which a correct guest doesn't have, enter the error state without
    /// completions.
    pub fn destroy_cq(&mut self, device: DeviceId, cq: CqHandle) -> Result<(), VerbsError> {
        let found = self.of(device)?;
        let gone = found.cqs.remove(cq.0).ok_or(VerbsError::missing("completion queue", cq.0))?;
        found.marks.touch(Kind::CompletionQueue, cq.0);
        if let Some(context) = found.contexts.get_mut(gone.context) {
            context.owned = context.owned.saturating_sub(1);
        }
        self.events.retain(|(of, event)| *of != device.0 || *event != AsyncEvent::CqError(cq));
        self.orphan(device.0, gone.users);
        Ok(())
    }

    /// Destroys a shared receive queue; as [`Engine::destroy_cq`] for queue pairs that still use it.
    pub fn destroy_srq(&mut self, device: DeviceId, srq: SrqHandle) -> Result<(), VerbsError> {
        let found = self.of(device)?;
        let mut gone = found.srqs.remove(srq.0).ok_or(VerbsError::missing("shared receive queue", srq.0))?;
        if let Some(pd) = found.pds.get_mut(gone.pd) {
            pd.owned = pd.owned.saturating_sub(1);
        }
        found.marks.touch(Kind::SharedReceiveQueue, srq.0);
        if let Some(context) = found.contexts.get_mut(gone.context) {
            context.srqs.retain(|other| *other != srq.0);
        }
        self.events.retain(|(of, event)| {
            *of != device.0
                || !matches!(event, AsyncEvent::SrqError(of) | AsyncEvent::SrqLimitReached(of) if *of == srq)
        });
        for waiter in gone.waiters.take(usize::MAX) {
            self.wake(waiter);
        }
        self.orphan(device.0, gone.users);
        Ok(())
    }

    /// Fails queue pairs whose completion or receive queue is gone.
    fn orphan(&mut self, device: u32, users: BTreeSet<u32>) {
        for handle in users {
            let qp = self.qp_ref(DeviceId(device), QpHandle(handle));
            if let Some(qp) = qp
                && self.qp(qp).is_some_and(|qp| qp.state != QpState::Reset)
            {
                self.enter_error(qp);
            }
        }
    }

    /// Destroys a queue pair. None of its requests completes any more.
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
            pd.owned = pd.owned.saturating_sub(1);
        }
        found.remove_from_context(gone.context, &gone);
        for cq in [gone.send_cq, gone.receive_cq] {
            if let Some(cq) = found.cqs.get_mut(cq.handle).filter(|found| found.stamp == cq.stamp) {
                cq.users.remove(&qp.0);
            }
        }
        if let Some(srq) = gone.srq
            && let Some(srq) = found.srqs.get_mut(srq.handle).filter(|found| found.stamp == srq.stamp)
        {
            srq.users.remove(&qp.0);
        }
        let at = QpRef { device: device.0, handle: qp.0, stamp: gone.stamp };
        if let Some(deadline) = gone.deadline {
            self.timers.remove(&(deadline, Timer::Qp(at)));
        }
        self.leave_lists(at, gone.wait);
        self.stop_awaiting(at, gone.awaits);
        self.events.retain(|(of, event)| *of != device.0 || qp_of(event) != Some(qp));
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
