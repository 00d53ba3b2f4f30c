//! The responder's side: executes received packets, through the same checks as for a local peer.

use dma::Dma;

use crate::attributes::{Access, QpKind, QpState};
use crate::engine::Engine;
use crate::local::receive::{Received, Taken};
use crate::local::{message_len, total};
use crate::names::QpHandle;
use crate::objects::{Path, QpRef};
use crate::provider::Provider;
use crate::work::{AsyncEvent, CompletedOperation, Remote, Status};

use super::QpId;
use super::requester::range;

/// Why a request isn't executed. When the transport gets `Invalid`, `Access` or `Operational`, a reliable responder has failed already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// No receive is posted: RNR NAK with this timer code, 0 to 31.
    NotReady {
        /// RNR timer code.
        timer: u8,
    },
    /// NAK invalid request.
    Invalid,
    /// NAK remote access error.
    Access,
    /// NAK remote operational error.
    Operational,
    /// The queue pair accepts no messages (any more): the packet is dropped.
    Gone,
    /// The guest memory of the request isn't present. The packet is dropped; the transport may request it again after
    /// [`super::Action::MemoryCame`].
    NotHere,
}

/// An atomic, in the guest's byte order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AtomicOperation {
    /// Compare and swap.
    CompareSwap {
        /// Expected value.
        compare: u64,
        /// New value.
        swap: u64,
    },
    /// Fetch and add.
    FetchAdd {
        /// The addend.
        add: u64,
    },
}

impl<P: Provider> Engine<P> {
    /// Records the first accepted packet of the peer: the connection is established, and stays with the transport.
    pub fn remote_established(&mut self, qp: QpId) {
        let Ok(at) = self.served(qp) else { return };
        let Some(found) = self.qp_mut(at) else { return };
        found.path = Path::Elsewhere;
        let handle = found.handle;
        if found.state == QpState::ReadyToReceive && !found.established {
            found.established = true;
            self.event(at.device, AsyncEvent::CommunicationEstablished(handle));
        }
    }

    /// Consumes a receive for the first packet of a SEND, or for a WRITE with immediate data. Returns its capacity in bytes. A repetition,
    /// or a call after an aborted message, changes nothing.
    ///
    /// # Errors
    /// [`Refusal::NotReady`] without a posted receive; others when the receive is malformed.
    pub fn remote_receive_begin(&mut self, qp: QpId) -> Result<u64, Refusal> {
        let at = self.served(qp)?;
        let taken = self.take_receive(at);
        match taken {
            Taken::Request(receive) => {
                let fits = total(&receive.sges);
                self.stash_receive(at, receive);
                Ok(fits)
            }
            Taken::Empty => {
                let found = self.qp(at).ok_or(Refusal::Gone)?;
                let (kind, timer) = (found.kind, found.attributes.min_rnr_timer);
                if let Some(device) = self.device_mut(at.device) {
                    device.counters.out_of_buffer += 1;
                    device.counters.rnr_nak_sent += u64::from(kind == QpKind::Rc);
                }
                if kind == QpKind::Rc
                    && let Some(found) = self.qp_mut(at)
                {
                    found.elsewhere.get_or_insert_with(Box::default).awaits_receive = true;
                    self.await_receive(at, at);
                }
                Err(Refusal::NotReady { timer })
            }
            Taken::Malformed(wr_id) => {
                self.complete_receive_error(at, wr_id, Status::LocalQpOperation);
                self.own_failure(at);
                Err(self.refused(at, Refusal::Operational, None))
            }
            Taken::Broken => {
                self.own_failure(at);
                Err(self.refused(at, Refusal::Operational, Some(AsyncEvent::QpFatal)))
            }
        }
    }

    /// Places bytes of a SEND in progress, from `offset` on.
    ///
    /// # Errors
    /// When they don't fit the receive, or its memory can't be written.
    pub fn remote_receive_data(&mut self, qp: QpId, offset: u32, data: &[u8]) -> Result<(), Refusal> {
        let at = self.served(qp)?;
        let part = range(offset, data.len()).ok_or(Refusal::Invalid)?;
        let receive = self.qp_mut(at).and_then(|found| found.stashed.take()).ok_or(Refusal::Invalid)?;
        if part.end > total(&receive.sges) {
            if self.qp(at).is_some_and(|found| found.kind == QpKind::Rc) {
                self.complete_receive_error(at, receive.wr_id, Status::LocalLength);
            } else {
                self.stash_receive(at, *receive);
            }
            return Err(self.refused(at, Refusal::Invalid, Some(AsyncEvent::QpRequestError)));
        }
        let shared = self.shared_queue(at);
        let mut placed = part.is_empty();
        if !placed && self.gather_target(at, shared, &receive.sges, part.end, part).is_ok() {
            if self.awaits_memory(at, true, None, Some(at.device)) {
                self.stash_receive(at, *receive);
                return Err(Refusal::NotHere);
            }
            placed = self.write_target(at.device, data).is_ok();
        }
        if !placed {
            self.complete_receive_error(at, receive.wr_id, Status::LocalProtection);
            self.own_failure(at);
            return Err(self.refused(at, Refusal::Operational, None));
        }
        self.was_written(at.device, u64::try_from(data.len()).unwrap_or(u64::MAX));
        if let Some(found) = self.qp_mut(at) {
            found.stashed = Some(receive);
        }
        Ok(())
    }

    /// Invalidates a key for the SEND in progress.
    ///
    /// # Errors
    /// When the peer may not invalidate it. The receive has completed with that error.
    pub fn remote_invalidate(&mut self, qp: QpId, key: u32) -> Result<(), Refusal> {
        let at = self.served(qp)?;
        if self.may_invalidate(at, key).is_err() {
            self.remote_receive_fail(qp, Status::RemoteInvalidRequest);
            return Err(self.refused(at, Refusal::Access, Some(AsyncEvent::QpAccessError)));
        }
        self.invalidate_remote(at, key);
        Ok(())
    }

    /// Completes the receive in use, if any, with an error.
    pub fn remote_receive_fail(&mut self, qp: QpId, status: Status) {
        let Ok(at) = self.served(qp) else { return };
        if let Some(receive) = self.qp_mut(at).and_then(|found| found.stashed.take()) {
            self.complete_receive_error(at, receive.wr_id, status);
        }
    }

    /// Completes a SEND of `length` bytes; `invalidated` is the key that it invalidated.
    ///
    /// # Errors
    /// When no receive was consumed for it.
    pub fn remote_receive_end(
        &mut self,
        qp: QpId,
        length: u32,
        immediate: Option<[u8; 4]>,
        invalidated: Option<u32>,
        solicited: bool,
    ) -> Result<(), Refusal> {
        let at = self.served(qp)?;
        let receive = self.qp_mut(at).and_then(|found| found.stashed.take()).ok_or(Refusal::Invalid)?;
        self.count_served(at, length, |counters| &mut counters.rx_send_requests);
        let received = Received {
            wr_id: receive.wr_id,
            operation: CompletedOperation::Receive,
            byte_len: length,
            immediate,
            invalidated,
            source: None,
            grh: None,
        };
        self.complete_receive(at, solicited, received);
        Ok(())
    }

    /// Writes bytes of a WRITE of `length` bytes in all, from `offset` on. Without bytes, only checks whether the WRITE is permitted.
    ///
    /// # Errors
    /// When the queue pair or the region doesn't permit it, or the memory is gone.
    pub fn remote_write(
        &mut self,
        qp: QpId,
        remote: Remote,
        length: u32,
        offset: u32,
        data: &[u8],
    ) -> Result<(), Refusal> {
        let at = self.served(qp)?;
        if !self.permits(at, Access::REMOTE_WRITE) {
            return Err(self.refused(at, Refusal::Invalid, Some(AsyncEvent::QpRequestError)));
        }
        let length = u64::from(length);
        let part = range(offset, data.len()).filter(|part| part.end <= length).ok_or(Refusal::Invalid)?;
        let last = part.end == length;
        if self.remote_target(at, remote, length, part).is_err() {
            return Err(self.refused(at, Refusal::Access, Some(AsyncEvent::QpAccessError)));
        }
        if self.awaits_memory(at, true, None, Some(at.device)) {
            return Err(Refusal::NotHere);
        }
        if self.write_target(at.device, data).is_err() {
            return Err(self.refused(at, Refusal::Operational, Some(AsyncEvent::QpFatal)));
        }
        self.was_written(at.device, u64::try_from(data.len()).unwrap_or(u64::MAX));
        if last {
            let bytes = message_len(length);
            self.count_served(at, bytes, |counters| &mut counters.rx_write_requests);
        }
        Ok(())
    }

    /// Completes a WRITE of `length` bytes with immediate data, and the receive consumed for it.
    ///
    /// # Errors
    /// When none was consumed.
    pub fn remote_write_end(
        &mut self,
        qp: QpId,
        length: u32,
        immediate: [u8; 4],
        solicited: bool,
    ) -> Result<(), Refusal> {
        let at = self.served(qp)?;
        let receive = self.qp_mut(at).and_then(|found| found.stashed.take()).ok_or(Refusal::Invalid)?;
        let received = Received {
            wr_id: receive.wr_id,
            operation: CompletedOperation::ReceiveWriteImmediate,
            byte_len: length,
            immediate: Some(immediate),
            invalidated: None,
            source: None,
            grh: None,
        };
        self.complete_receive(at, solicited, received);
        Ok(())
    }

    /// Reads bytes for a READ of `length` bytes in all, from `offset` on, as many as `into` holds.
    ///
    /// # Errors
    /// When the queue pair or the region doesn't permit it, or the memory is gone.
    pub fn remote_read(
        &mut self,
        qp: QpId,
        remote: Remote,
        length: u32,
        offset: u32,
        into: &mut [u8],
    ) -> Result<(), Refusal> {
        let at = self.served(qp)?;
        if !self.permits(at, Access::REMOTE_READ) || !self.serves_reads(at) {
            return Err(self.refused(at, Refusal::Invalid, Some(AsyncEvent::QpRequestError)));
        }
        let total = u64::from(length);
        let mut part = range(offset, into.len()).filter(|part| part.end <= total).ok_or(Refusal::Invalid)?;
        let last = part.end == total;
        if into.is_empty() && self.is_late(qp.device) {
            // A READ begins when all its memory is present.
            part = 0..total;
        }
        if self.remote_source(at, remote, total, part, Access::REMOTE_READ).is_err() {
            return Err(self.refused(at, Refusal::Access, Some(AsyncEvent::QpAccessError)));
        }
        if self.awaits_memory(at, true, Some(at.device), None) {
            return Err(Refusal::NotHere);
        }
        let device = self.device(at.device).ok_or(Refusal::Gone)?;
        let mut rest = into;
        let mut sound = true;
        for piece in self.pieces().0 {
            let len = usize::try_from(piece.len).unwrap_or(usize::MAX).min(rest.len());
            let (now, later) = rest.split_at_mut(len);
            sound &= device.memory.read(piece.address, now).is_ok();
            rest = later;
        }
        sound &= rest.is_empty();
        if !sound {
            return Err(self.refused(at, Refusal::Operational, Some(AsyncEvent::QpFatal)));
        }
        if last {
            self.count_served(at, length, |counters| &mut counters.rx_read_requests);
        }
        Ok(())
    }

    /// Executes an atomic once, and returns the previous value. It uses the host CPU's atomics, so it is atomic against the guest's CPUs.
    ///
    /// # Errors
    /// When the word isn't aligned, the queue pair or the region doesn't permit it, or the memory is gone.
    pub fn remote_atomic(
        &mut self,
        qp: QpId,
        remote: Remote,
        operation: AtomicOperation,
    ) -> Result<u64, Refusal> {
        let at = self.served(qp)?;
        let aligned = remote.address.is_multiple_of(8);
        if !aligned || !self.permits(at, Access::REMOTE_ATOMIC) || !self.serves_reads(at) {
            return Err(self.refused(at, Refusal::Invalid, Some(AsyncEvent::QpRequestError)));
        }
        if self.remote_source(at, remote, 8, 0..8, Access::REMOTE_ATOMIC).is_err() {
            return Err(self.refused(at, Refusal::Access, Some(AsyncEvent::QpAccessError)));
        }
        if self.awaits_memory(at, true, Some(at.device), None) {
            return Err(Refusal::NotHere);
        }
        let Some(word) = self.pieces().0.first().map(|piece| piece.address) else {
            return Err(self.refused(at, Refusal::Operational, Some(AsyncEvent::QpFatal)));
        };
        let device = self.device(at.device).ok_or(Refusal::Gone)?;
        let before = match operation {
            AtomicOperation::CompareSwap { compare, swap } => {
                device.memory.compare_exchange_u64(word, compare, swap)
            }
            AtomicOperation::FetchAdd { add } => device.memory.fetch_add_u64(word, add),
        };
        let Ok(before) = before else {
            return Err(self.refused(at, Refusal::Operational, Some(AsyncEvent::QpFatal)));
        };
        self.was_written(at.device, 8);
        self.count_served(at, 8, |counters| &mut counters.rx_atomic_requests);
        Ok(before)
    }

    /// Handles an invalid request that the transport found: a wrong sequence of opcodes, a wrong length, too many READs. A reliable
    /// responder fails; the requester gets a NAK invalid request.
    pub fn remote_violation(&mut self, qp: QpId) {
        if let Ok(at) = self.served(qp) {
            self.refused(at, Refusal::Invalid, Some(AsyncEvent::QpRequestError));
        }
    }

    /// Handles a failure of the transport's whole connection.
    pub fn remote_fail(&mut self, qp: QpId) {
        if let Ok(at) = self.served(qp) {
            self.enter_error(at);
        }
    }

    /// Refuses a request: a reliable responder fails with the event, an unreliable one continues.
    pub(super) fn refused(
        &mut self,
        at: QpRef,
        refusal: Refusal,
        event: Option<fn(QpHandle) -> AsyncEvent>,
    ) -> Refusal {
        let Some(found) = self.qp(at).filter(|found| found.kind == QpKind::Rc) else { return refusal };
        let handle = found.handle;
        if refusal == Refusal::Access
            && let Some(device) = self.device_mut(at.device)
        {
            device.counters.resp_remote_access_errors += 1;
        }
        if let Some(event) = event {
            self.event(at.device, event(handle));
        }
        self.enter_error(at);
        refusal
    }

    pub(super) fn count_served(
        &mut self,
        at: QpRef,
        bytes: u32,
        which: impl FnOnce(&mut crate::counters::DeviceCounters) -> &mut u64,
    ) {
        if let Some(found) = self.qp_mut(at) {
            found.counters.served_bytes += u64::from(bytes);
        }
        if let Some(device) = self.device_mut(at.device) {
            *which(&mut device.counters) += 1;
        }
    }
}

/// The length of a message as packets encode it.
pub(super) fn bytes(len: usize) -> u32 {
    u64::try_from(len).map_or(u32::MAX, message_len)
}
