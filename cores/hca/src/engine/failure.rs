//! Failed queue pairs: the error states, and flushing.

use crate::attributes::{QpKind, QpState};
use crate::names::{DeviceId, QpHandle};
use crate::objects::{Current, Progress, QpRef, Wait};
use crate::provider::{Fetched, Provider, ReceiveQueue, SendQueue};
use crate::saved::Kind;
use crate::work::{AsyncEvent, CompletedOperation, Operation, Status};

use super::Engine;

/// Limit of requests per queue that a turn in the error state flushes.
const FLUSHED_PER_TURN: u32 = 64;

impl<P: Provider> Engine<P> {
    /// Moves a queue pair to ERR. Its next turns flush posted requests, and those posted later.
    pub(crate) fn enter_error(&mut self, at: QpRef) {
        if self.qp(at).is_none_or(|qp| qp.state == QpState::Error) {
            return;
        }
        self.close_elsewhere(at);
        let Some(device) = self.device_mut(at.device) else { return };
        let Some(qp) = device.qps.get_mut(at.handle) else { return };
        let never_started = qp.state == QpState::Reset;
        qp.state = QpState::Error;
        qp.changed();
        device.quiet.forget(at.handle);
        device.marks.touch(Kind::QueuePair, at.handle);
        let waiter = qp.waiter.take();
        let stashed = qp.stashed.take();
        let (handle, shared) = (qp.handle, qp.srq.is_some());
        // Before the event below, which states that no receive will complete any more.
        let mut taken = Vec::new();
        if shared && let Some(elsewhere) = &mut qp.elsewhere {
            taken.extend(std::iter::from_fn(|| elsewhere.pop_receive()));
        }
        self.wait(at, Wait::None, None);
        if let Some(stashed) = stashed {
            self.complete_receive_error(at, stashed.wr_id, Status::Flushed);
        }
        for receive in taken {
            self.complete_receive_error(at, receive.wr_id, Status::Flushed);
        }
        if shared && !never_started {
            self.event(at.device, AsyncEvent::LastWqeReached(handle));
        }
        if let Some(waiter) = waiter {
            self.wake(waiter);
        }
        self.activate(at);
    }

    /// Handles a failed send request: the queue pair enters ERR, or SQE if it carries datagrams.
    pub(crate) fn fail_sender(&mut self, at: QpRef) {
        let Some(qp) = self.qp_mut(at) else { return };
        match (qp.kind, qp.state) {
            (_, QpState::Error) => {}
            (QpKind::Rc, _) => self.enter_error(at),
            (QpKind::Uc | QpKind::Ud | QpKind::Gsi, _) => {
                qp.state = QpState::SendQueueError;
                qp.changed();
                self.activate(at);
            }
        }
    }

    /// Fails the queue pairs of failed completion queues.
    pub(super) fn run_failed_cqs(&mut self) {
        while let Some(failed) = self.failed_cqs.pop() {
            let users = match self.device(failed.device).and_then(|found| found.cqs.get(failed.handle)) {
                Some(cq) if cq.stamp == failed.stamp => cq.users.clone(),
                _ => continue,
            };
            for handle in users {
                let at = self.qp_ref(DeviceId(failed.device), QpHandle(handle));
                if let Some(at) = at
                    && self.qp(at).is_some_and(|qp| !matches!(qp.state, QpState::Reset | QpState::Error))
                {
                    self.enter_error(at);
                }
            }
        }
    }

    /// A turn in ERR, or in SQE for the send queue alone. Returns the number of flushed requests.
    pub(super) fn flush_turn(&mut self, at: QpRef) -> u32 {
        let mut flushed = self.flush_sends(at);
        if self.qp(at).is_some_and(|qp| qp.state == QpState::Error) {
            flushed += self.flush_receives(at);
        }
        flushed
    }

    fn flush_sends(&mut self, at: QpRef) -> u32 {
        let mut flushed = 0;
        while flushed < FLUSHED_PER_TURN {
            let Some(device) = self.device_mut(at.device) else { break };
            let Some(qp) = device.qps.get_mut(at.handle) else { break };
            let handed = qp.elsewhere.as_mut().and_then(|elsewhere| elsewhere.outstanding.pop_front());
            let (wr_id, operation) = if let Some(outstanding) = handed {
                (outstanding.request.wr_id, completed(&outstanding.request.operation))
            } else if let Some(current) = qp.current.take() {
                let mut behind = current.behind;
                qp.current = behind.pop_front().map(|next| {
                    Box::new(Current { request: next.request, progress: Progress::default(), behind })
                });
                (current.request.wr_id, completed(&current.request.operation))
            } else {
                match qp.send_queue.fetch(&device.memory) {
                    Fetched::Empty | Fetched::Broken => break,
                    Fetched::Request(request) => (request.wr_id, completed(&request.operation)),
                    Fetched::Malformed { wr_id, .. } => (wr_id, CompletedOperation::Send),
                }
            };
            self.complete_send(at, wr_id, operation, Status::Flushed, 0, true);
            flushed += 1;
        }
        flushed
    }

    fn flush_receives(&mut self, at: QpRef) -> u32 {
        let mut flushed = 0;
        while flushed < FLUSHED_PER_TURN {
            let Some(device) = self.device_mut(at.device) else { break };
            let Some(qp) = device.qps.get_mut(at.handle) else { break };
            let taken = qp.elsewhere.as_mut().and_then(|elsewhere| elsewhere.pop_receive());
            if let Some(receive) = taken {
                self.complete_receive_error(at, receive.wr_id, Status::Flushed);
                flushed += 1;
                continue;
            }
            let Some(queue) = &mut qp.receive_queue else { break };
            let wr_id = match queue.take(&device.memory) {
                Fetched::Empty | Fetched::Broken => break,
                Fetched::Request(request) => request.wr_id,
                Fetched::Malformed { wr_id, .. } => wr_id,
            };
            self.complete_receive_error(at, wr_id, Status::Flushed);
            flushed += 1;
        }
        flushed
    }
}

/// The opcode of a request's completion.
#[inline]
pub(crate) fn completed(operation: &Operation) -> CompletedOperation {
    match operation {
        Operation::Send { .. } => CompletedOperation::Send,
        Operation::Write { .. } => CompletedOperation::Write,
        Operation::Read { .. } => CompletedOperation::Read,
        Operation::CompareSwap { .. } => CompletedOperation::CompareSwap,
        Operation::FetchAdd { .. } => CompletedOperation::FetchAdd,
        Operation::LocalInvalidate { .. } => CompletedOperation::LocalInvalidate,
        Operation::FastRegister(_) => CompletedOperation::FastRegister,
    }
}
