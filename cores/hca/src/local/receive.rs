//! The responder's receives.

use crate::attributes::QpKind;
use crate::engine::Engine;
use crate::objects::{ObjectRef, QpRef};
use crate::provider::{Fetched, Provider, ReceiveQueue};
use crate::saved::Kind;
use crate::work::{AsyncEvent, CompletedOperation, Completion, ReceiveRequest, Status};

use super::Step;

/// Result of consuming a receive.
pub(crate) enum Taken {
    /// The receive.
    Request(ReceiveRequest),
    /// None is posted.
    Empty,
    /// The receive is malformed.
    Malformed(u64),
    /// The ring is unusable.
    Broken,
}

impl<P: Provider> Engine<P> {
    /// Consumes the next receive of a queue pair: a stashed one, or one from its ring or shared queue.
    #[inline]
    pub(crate) fn take_receive(&mut self, at: QpRef) -> Taken {
        let Some(device) = self.device_mut(at.device) else { return Taken::Empty };
        device.marks.touch(Kind::QueuePair, at.handle);
        let Some(qp) = device.qps.get_mut(at.handle) else { return Taken::Empty };
        if let Some(stashed) = qp.stashed.take() {
            return Taken::Request(*stashed);
        }
        if let Some(returned) = qp.elsewhere.as_mut().and_then(|elsewhere| elsewhere.returned.pop_front()) {
            return Taken::Request(returned);
        }
        let mut event = None;
        let fetched = if let Some(queue) = &mut qp.receive_queue {
            queue.take(&device.memory)
        } else {
            let Some(shared) = qp.srq else { return Taken::Empty };
            let Some(srq) = device.srqs.get_mut(shared.handle).filter(|srq| srq.stamp == shared.stamp) else {
                return Taken::Broken;
            };
            device.marks.touch(Kind::SharedReceiveQueue, shared.handle);
            let fetched = srq.ring.take(&device.memory);
            let handle = crate::names::SrqHandle(shared.handle);
            if matches!(fetched, Fetched::Broken) {
                event = Some(AsyncEvent::SrqError(handle));
            } else if srq.limit > 0 && srq.ring.available(&device.memory) < srq.limit {
                srq.limit = 0;
                event = Some(AsyncEvent::SrqLimitReached(handle));
            }
            fetched
        };
        if let Some(event) = event {
            self.event(at.device, event);
        }
        match fetched {
            Fetched::Request(request) => Taken::Request(request),
            Fetched::Empty => Taken::Empty,
            Fetched::Malformed { wr_id, .. } => Taken::Malformed(wr_id),
            Fetched::Broken => Taken::Broken,
        }
    }

    /// Stashes a receive for the next message, or for the rest of this one.
    pub(crate) fn stash_receive(&mut self, at: QpRef, request: ReceiveRequest) {
        if let Some(qp) = self.qp_mut(at) {
            qp.stashed = Some(Box::new(request));
        }
    }

    /// Consumes a receive for a message of a connected requester. Without one, returns the requester's next step.
    #[inline]
    pub(crate) fn receive_for(&mut self, at: QpRef, peer: QpRef) -> Result<ReceiveRequest, Step> {
        match self.take_receive(peer) {
            Taken::Request(request) => Ok(request),
            Taken::Empty => Err(self.no_receive_posted(at, peer)),
            Taken::Malformed(wr_id) => {
                self.complete_receive_error(peer, wr_id, Status::LocalQpOperation);
                self.own_failure(peer);
                Err(self.refuse(at, peer, Status::RemoteOperation, None))
            }
            Taken::Broken => {
                self.own_failure(peer);
                Err(self.refuse(at, peer, Status::RemoteOperation, Some(AsyncEvent::QpFatal)))
            }
        }
    }

    /// Fails a responder by an error of its own; an unreliable one fails as well.
    pub(crate) fn own_failure(&mut self, peer: QpRef) {
        if self.qp(peer).is_some_and(|qp| qp.kind != QpKind::Rc) {
            self.enter_error(peer);
        }
    }

    fn no_receive_posted(&mut self, at: QpRef, peer: QpRef) -> Step {
        let Some(responder) = self.qp(peer) else { return Step::NoPeer };
        let (kind, timer) = (responder.kind, responder.attributes.min_rnr_timer);
        if let Some(device) = self.device_mut(peer.device) {
            device.counters.out_of_buffer += 1;
            device.counters.rnr_nak_sent += u64::from(kind == QpKind::Rc);
        }
        if kind == QpKind::Rc { Step::NoReceive { timer, at: peer } } else { self.unanswered(at) }
    }

    /// Registers a requester that is woken when the responder has a receive.
    pub(crate) fn await_receive(&mut self, at: QpRef, responder: QpRef) {
        let Some(qp) = self.qp_mut(responder) else { return };
        let Some(shared) = qp.srq else {
            qp.waiter = Some(at);
            if let Some(device) = self.device_mut(responder.device) {
                device.quiet.forget(responder.handle);
            }
            return;
        };
        if self.qp(at).is_some_and(|qp| qp.awaits == Some((responder.device, shared))) {
            return;
        }
        let before = self.qp_mut(at).and_then(|qp| qp.awaits.take());
        self.stop_awaiting(at, before);
        let Some(device) = self.device_mut(responder.device) else { return };
        let Some(srq) = device.srqs.get_mut(shared.handle).filter(|srq| srq.stamp == shared.stamp) else {
            return;
        };
        srq.waiters.push(at);
        if let Some(qp) = self.qp_mut(at) {
            qp.awaits = Some((responder.device, shared));
        }
    }

    /// The shared receive queue of a queue pair, if any. Its protection domain applies to the receives.
    pub(crate) fn shared_queue(&self, at: QpRef) -> Option<ObjectRef> {
        self.qp(at)?.srq
    }

    /// Completes a receive successfully.
    #[inline]
    pub(crate) fn complete_receive(&mut self, at: QpRef, solicited: bool, received: Received) {
        let Some(device) = self.device_mut(at.device) else { return };
        let Some(qp) = device.qps.get_mut(at.handle).filter(|qp| qp.stamp == at.stamp) else { return };
        qp.counters.receives += 1;
        let completion = Completion {
            wr_id: received.wr_id,
            qp: qp.handle,
            operation: received.operation,
            status: Status::Success,
            byte_len: received.byte_len,
            immediate: received.immediate,
            invalidated: received.invalidated.map(crate::names::Key),
            source: received.source,
            grh: received.grh,
        };
        let cq = qp.receive_cq;
        self.push(at.device, cq, &completion, solicited);
    }

    /// Completes a receive with an error.
    pub(crate) fn complete_receive_error(&mut self, at: QpRef, wr_id: u64, status: Status) {
        let Some(device) = self.device_mut(at.device) else { return };
        let Some(qp) = device.qps.get_mut(at.handle).filter(|qp| qp.stamp == at.stamp) else { return };
        match status {
            Status::Flushed => device.counters.resp_cqe_flush_error += 1,
            _ => {
                device.counters.resp_cqe_error += 1;
                qp.counters.errors += 1;
                device.counters.resp_local_length_error += u64::from(status == Status::LocalLength);
            }
        }
        let completion = Completion {
            wr_id,
            qp: qp.handle,
            operation: CompletedOperation::Receive,
            status,
            byte_len: 0,
            immediate: None,
            invalidated: None,
            source: None,
            grh: None,
        };
        let cq = qp.receive_cq;
        self.push(at.device, cq, &completion, true);
    }
}

/// Result of a successful receive.
pub(crate) struct Received {
    pub wr_id: u64,
    pub operation: CompletedOperation,
    pub byte_len: u32,
    pub immediate: Option<[u8; 4]>,
    pub invalidated: Option<u32>,
    pub source: Option<crate::names::Qpn>,
    pub grh: Option<crate::work::NetworkHeader>,
}
