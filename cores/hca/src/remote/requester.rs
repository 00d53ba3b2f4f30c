//! The requester's side: requests that a transport has, until it reports their outcome.

use std::collections::VecDeque;
use std::ops::Range;

use dma::{Dma, DmaFault};

use crate::attributes::{Access, QpKind, QpState};
use crate::engine::{Engine, completed};
use crate::local::{Step, message_len, total};
use crate::objects::{Elsewhere, Outstanding, Qp, QpRef, Wait};
use crate::provider::Provider;
use crate::saved;
use crate::work::{CompletedOperation, Operation, SendRequest, Sge, Status};

use super::{Action, MOST_OUTSTANDING, Posted, PostedOperation, QpId};

/// Bytes of an atomic.
const ATOMIC: u32 = 8;

/// Why bytes of a request can't be read or placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unmoved {
    /// The request fails with this status.
    Failed(Status),
    /// The memory isn't present: [`Action::MemoryCame`] follows. Until then the transport treats the packet as lost, or doesn't send it.
    NotHere,
}

impl From<Status> for Unmoved {
    fn from(status: Status) -> Self {
        Self::Failed(status)
    }
}

impl<P: Provider> Qp<P> {
    /// Whether the transport accepts another request of this queue pair.
    #[inline]
    pub(crate) fn has_room_elsewhere(&self) -> bool {
        self.elsewhere.as_ref().is_none_or(|elsewhere| elsewhere.outstanding.len() < MOST_OUTSTANDING)
    }
}

impl<P: Provider> Engine<P> {
    fn nothing_outstanding(&self, at: QpRef) -> bool {
        self.qp(at)
            .and_then(|qp| qp.elsewhere.as_ref())
            .is_none_or(|elsewhere| elsewhere.outstanding.is_empty())
    }

    /// Checks a request with a remote peer. [`Step::Handed`]: pass it to the transport.
    pub(crate) fn execute_elsewhere(&mut self, at: QpRef, request: &SendRequest) -> Step {
        let step = self.check_elsewhere(at, request);
        match step {
            // A fast registration was executed: its region was free. It completes in order.
            Step::Done { .. } if self.nothing_outstanding(at) => step,
            Step::Done { .. } | Step::Handed => Step::Handed,
            // A failed request, and one that has to wait for earlier ones, waits until the transport has completed its requests.
            _ if self.nothing_outstanding(at) => step,
            _ => Step::Drain,
        }
    }

    fn check_elsewhere(&mut self, at: QpRef, request: &SendRequest) -> Step {
        let Some(qp) = self.qp(at) else { return Step::Failed(Status::General) };
        let kind = qp.kind;
        let reads = qp.attributes.max_rd_atomic > 0;
        let length = total(&request.sges);
        let sound = match (&request.operation, kind) {
            (Operation::Send { datagram: None, invalidate: None, .. }, QpKind::Rc | QpKind::Uc)
            | (Operation::Send { datagram: None, .. }, QpKind::Rc)
            | (Operation::Write { .. }, QpKind::Rc | QpKind::Uc) => {
                self.gather_source(at, &request.sges, length, 0..0).is_ok()
            }
            (
                Operation::Read { .. } | Operation::CompareSwap { .. } | Operation::FetchAdd { .. },
                QpKind::Rc,
            ) if !reads => return Step::Failed(Status::LocalQpOperation),
            (Operation::Read { .. }, QpKind::Rc) => {
                self.gather_target(at, None, &request.sges, length, 0..0).is_ok()
            }
            (Operation::CompareSwap { .. } | Operation::FetchAdd { .. }, QpKind::Rc) => {
                let bytes = u64::from(ATOMIC);
                if length < bytes {
                    return Step::Failed(Status::LocalLength);
                }
                self.gather_target(at, None, &request.sges, bytes, 0..bytes).is_ok()
            }
            (Operation::LocalInvalidate { rkey }, QpKind::Rc) => {
                // Earlier requests may still read through the region.
                return if self.nothing_outstanding(at) {
                    self.local_invalidate(at, *rkey)
                } else {
                    Step::Drain
                };
            }
            (Operation::FastRegister(registration), QpKind::Rc) => {
                return self.fast_register(at, registration);
            }
            _ => return Step::Failed(Status::LocalQpOperation),
        };
        if sound { Step::Handed } else { Step::Failed(Status::LocalProtection) }
    }

    /// Passes a checked request to the transport.
    pub(crate) fn hand_over(&mut self, at: QpRef, request: SendRequest) {
        let Some(id) = self.qp_id(at) else { return };
        let Some(qp) = self.qp_mut(at) else { return };
        let elsewhere = qp.elsewhere.get_or_insert_with(Box::<Elsewhere>::default);
        let token = elsewhere.next_token;
        elsewhere.next_token += 1;
        let mut length = message_len(total(&request.sges));
        let operation = match &request.operation {
            Operation::Send { immediate, invalidate, .. } => {
                Some(PostedOperation::Send { immediate: *immediate, invalidate: *invalidate })
            }
            Operation::Write { remote, immediate } => {
                Some(PostedOperation::Write { remote: *remote, immediate: *immediate })
            }
            Operation::Read { remote } => Some(PostedOperation::Read { remote: *remote }),
            Operation::CompareSwap { remote, compare, swap } => {
                Some(PostedOperation::CompareSwap { remote: *remote, compare: *compare, swap: *swap })
            }
            Operation::FetchAdd { remote, add } => {
                Some(PostedOperation::FetchAdd { remote: *remote, add: *add })
            }
            Operation::LocalInvalidate { .. } | Operation::FastRegister(_) => None,
        };
        if matches!(operation, Some(PostedOperation::CompareSwap { .. } | PostedOperation::FetchAdd { .. })) {
            length = ATOMIC;
        }
        let (fence, solicited) = (request.fence, request.solicited);
        let outcome = if operation.is_none() { Some(Ok(0)) } else { None };
        elsewhere.outstanding.push_back(Outstanding { token, request, outcome });
        if let Some(operation) = operation {
            self.charge(at, u64::from(length));
            let request = Posted { token, operation, length, fence, solicited };
            self.actions.push(Action::Post { qp: id, request });
        }
    }

    /// An outstanding request of a queue pair of that incarnation.
    pub(super) fn outstanding(&self, qp: QpId, token: u64) -> Option<&Outstanding> {
        let found = self.qp(qp.at()).filter(|found| found.incarnation == qp.incarnation())?;
        let outstanding = &found.elsewhere.as_ref()?.outstanding;
        let index = token.checked_sub(outstanding.front()?.token)?;
        outstanding.get(usize::try_from(index).ok()?)
    }

    /// Reads bytes of a message from the sender's memory, from `offset` on, as many as `into` holds.
    ///
    /// # Errors
    /// The status with which the request fails when its memory may not be read, or is gone.
    pub fn remote_gather(
        &mut self,
        qp: QpId,
        token: u64,
        offset: u32,
        into: &mut [u8],
    ) -> Result<(), Unmoved> {
        let outstanding = self.outstanding(qp, token).ok_or(Status::General)?;
        let sges = outstanding.request.sges.clone();
        let length = total(&sges);
        let part = range(offset, into.len()).filter(|part| part.end <= length).ok_or(Status::General)?;
        self.gather_source(qp.at(), &sges, length, part).map_err(|_| Status::LocalProtection)?;
        if self.awaits_memory(qp.at(), true, Some(qp.device.0), None) {
            self.ask_for_all(qp.at(), &sges, length, Access::empty());
            return Err(Unmoved::NotHere);
        }
        let device = self.device(qp.device.0).filter(|device| device.enabled).ok_or(Status::General)?;
        let mut rest = into;
        for piece in self.pieces().0 {
            let len = usize::try_from(piece.len).unwrap_or(usize::MAX).min(rest.len());
            let (now, later) = rest.split_at_mut(len);
            device.memory.read(piece.address, now).map_err(|_| Status::LocalProtection)?;
            rest = later;
        }
        if rest.is_empty() { Ok(()) } else { Err(Status::LocalProtection.into()) }
    }

    /// Places bytes of a READ response, or an atomic's 8 bytes (little-endian, as the guest's words), from `offset` on.
    ///
    /// # Errors
    /// The status with which the request fails when its memory may not be written, or is gone.
    pub fn remote_place(&mut self, qp: QpId, token: u64, offset: u32, from: &[u8]) -> Result<(), Unmoved> {
        let outstanding = self.outstanding(qp, token).ok_or(Status::General)?;
        let answers = matches!(
            outstanding.request.operation,
            Operation::Read { .. } | Operation::CompareSwap { .. } | Operation::FetchAdd { .. }
        );
        let sges = outstanding.request.sges.clone();
        let length = total(&sges);
        let part = range(offset, from.len())
            .filter(|part| answers && part.end <= length)
            .ok_or(Status::BadResponse)?;
        self.gather_target(qp.at(), None, &sges, length, part).map_err(|_| Status::LocalProtection)?;
        if self.awaits_memory(qp.at(), true, None, Some(qp.device.0)) {
            self.ask_for_all(qp.at(), &sges, length, Access::LOCAL_WRITE);
            return Err(Unmoved::NotHere);
        }
        Ok(self.write_target(qp.device.0, from).map_err(|_| Status::LocalProtection)?)
    }

    /// Requests all not-present pages of a message at once: the packets would request little more than a page each.
    fn ask_for_all(&self, at: QpRef, sges: &[Sge], length: u64, need: Access) {
        let Some(device) = self.device(at.device) else { return };
        let Some(qp) = device.qps.get(at.handle) else { return };
        let mut pieces = Vec::new();
        if device.regions.gather(qp.pd, sges, length, 0..length, need, &mut pieces).is_ok() {
            for piece in pieces {
                device.memory.awaits(piece.address, piece.len, need.contains(Access::LOCAL_WRITE));
            }
        }
    }

    /// Reports the outcome of a request: the length of its message (8 for atomics), or the status it failed with. Completions follow the
    /// order of posting, whatever the order of calls. A failure fails the queue pair.
    pub fn remote_complete(&mut self, qp: QpId, token: u64, outcome: Result<u32, Status>) {
        let at = qp.at();
        self.mark(at);
        let Some(found) = self.qp_mut(at).filter(|found| found.incarnation == qp.incarnation()) else {
            return;
        };
        let Some(elsewhere) = &mut found.elsewhere else { return };
        let Some(first) = elsewhere.outstanding.front().map(|front| front.token) else { return };
        let place = token.checked_sub(first).and_then(|index| usize::try_from(index).ok());
        let Some(ended) = place.and_then(|index| elsewhere.outstanding.get_mut(index)) else { return };
        ended.outcome = Some(outcome);
        self.complete_ended(at);
    }

    /// Completes requests at the front with a known outcome.
    fn complete_ended(&mut self, at: QpRef) {
        loop {
            let Some(found) = self.qp_mut(at) else { return };
            if found.state == QpState::Error {
                // The rest is flushed.
                return;
            }
            let Some(elsewhere) = &mut found.elsewhere else { return };
            let Some(outcome) = elsewhere.outstanding.front().and_then(|front| front.outcome) else { break };
            let Some(Outstanding { request, .. }) = elsewhere.outstanding.pop_front() else { break };
            if !self.complete_carried(at, &request, outcome) {
                return;
            }
        }
        let empty = self.nothing_outstanding(at);
        let Some(found) = self.qp(at) else { return };
        if empty && found.wait == Wait::Outstanding {
            self.wake(at);
        } else if found.wait == Wait::None {
            self.activate(at);
        }
        if empty && self.is_drained(at) {
            self.drained(at);
        }
    }

    /// Appends requests with a known outcome to those that a transport has, if it has any.
    pub(crate) fn append_known(&mut self, at: QpRef, requests: &mut VecDeque<saved::Outstanding>) -> bool {
        let Some(found) = self.qp_mut(at) else { return false };
        let Some(elsewhere) = found.elsewhere.as_mut().filter(|elsewhere| !elsewhere.outstanding.is_empty())
        else {
            return false;
        };
        while let Some(outcome @ Some(_)) = requests.front().map(|front| front.outcome) {
            let Some(saved::Outstanding { request, .. }) = requests.pop_front() else { break };
            let token = elsewhere.next_token;
            elsewhere.next_token += 1;
            elsewhere.outstanding.push_back(Outstanding { token, request, outcome });
        }
        true
    }

    /// Completes a request that a transport executed. `false`: it failed, and its queue pair with it.
    pub(crate) fn complete_carried(
        &mut self,
        at: QpRef,
        request: &SendRequest,
        outcome: Result<u32, Status>,
    ) -> bool {
        let Some(found) = self.qp_mut(at) else { return false };
        let operation = completed(&request.operation);
        if let Ok(bytes) = outcome {
            found.counters.bytes += u64::from(bytes);
        }
        // As for a local peer, a completion counts only returned bytes.
        let outcome = outcome.map(|bytes| match operation {
            CompletedOperation::Read | CompletedOperation::CompareSwap | CompletedOperation::FetchAdd => {
                bytes
            }
            _ => 0,
        });
        match outcome {
            Ok(bytes) => {
                self.complete_send(at, request.wr_id, operation, Status::Success, bytes, request.signaled);
                true
            }
            Err(status) => {
                if status == Status::RetryExceeded
                    && let Some(device) = self.device_mut(at.device)
                {
                    device.counters.req_transport_retries_exceeded += 1;
                }
                if status == Status::RnrRetryExceeded
                    && let Some(device) = self.device_mut(at.device)
                {
                    device.counters.rnr_nak_retry_err += 1;
                }
                self.complete_send(at, request.wr_id, operation, status, 0, true);
                self.fail_sender(at);
                false
            }
        }
    }

    /// Whether a queue pair in SQD has nothing in progress.
    pub(crate) fn is_drained(&self, at: QpRef) -> bool {
        self.qp(at).is_some_and(|qp| qp.state == QpState::SendQueueDrained && qp.current.is_none())
            && self.nothing_outstanding(at)
    }

    /// Writes bytes to the gathered target of a device.
    ///
    /// # Errors
    /// When the device or its memory is gone, or the target is too short.
    pub(crate) fn write_target(&self, device: u32, from: &[u8]) -> Result<(), DmaFault> {
        let targets = self.pieces().1;
        let gone =
            || DmaFault { address: targets.first().map_or(0, |piece| piece.address), len: length_of(from) };
        let device = self.device(device).filter(|device| device.enabled).ok_or_else(gone)?;
        let mut rest = from;
        for piece in targets {
            let len = usize::try_from(piece.len).unwrap_or(usize::MAX).min(rest.len());
            let (now, later) = rest.split_at(len);
            device.memory.write(piece.address, now)?;
            rest = later;
        }
        if rest.is_empty() { Ok(()) } else { Err(gone()) }
    }
}

fn length_of(bytes: &[u8]) -> u64 {
    u64::try_from(bytes.len()).unwrap_or(u64::MAX)
}

/// The range of a message that begins at `offset`.
pub(super) fn range(offset: u32, len: usize) -> Option<Range<u64>> {
    let start = u64::from(offset);
    Some(start..start.checked_add(u64::try_from(len).ok()?)?)
}
