//! WRITE, READ and atomics: the responder's guest isn't involved.

use std::ops::Range;

use dma::Dma;
use dma::access::CopyFault;

use crate::attributes::{Access, QpKind};
use crate::engine::Engine;
use crate::memory::Forbidden;
use crate::objects::{Progress, QpRef};
use crate::provider::Provider;
use crate::work::{AsyncEvent, CompletedOperation, Operation, Remote, SendRequest, Status};

use super::receive::Received;
use super::{Step, message_len, total};

/// Bytes of an atomic.
const ATOMIC: u64 = 8;

impl<P: Provider> Engine<P> {
    /// WRITE, with or without immediate data.
    #[inline]
    pub(crate) fn write(
        &mut self,
        at: QpRef,
        request: &SendRequest,
        remote: Remote,
        immediate: Option<[u8; 4]>,
        progress: &mut Progress,
    ) -> Step {
        let length = total(&request.sges);
        let peer = self.peer_for(at, progress);
        let part = self.part(length, progress);
        if self.gather_source(at, &request.sges, length, part.clone()).is_err() {
            return Step::Failed(Status::LocalProtection);
        }
        let Some(peer) = peer else { return self.unanswered(at) };
        if !self.permits(peer, Access::REMOTE_WRITE) {
            return self.refuse(at, peer, Status::RemoteInvalidRequest, Some(AsyncEvent::QpRequestError));
        }
        if self.remote_target(peer, remote, length, part.clone()).is_err() {
            return self.refuse(at, peer, Status::RemoteAccess, Some(AsyncEvent::QpAccessError));
        }
        if self.awaits_memory(at, false, Some(at.device), Some(peer.device)) {
            return Step::NotHere;
        }
        match self.copy(at.device, peer.device) {
            Ok(()) => {}
            Err(CopyFault::Source(_)) => return Step::Failed(Status::LocalProtection),
            Err(CopyFault::Destination(_)) => {
                return self.refuse(at, peer, Status::RemoteOperation, Some(AsyncEvent::QpFatal));
            }
        }
        progress.offset = part.end;
        self.charge(at, part.end - part.start);
        self.was_written(peer.device, part.end - part.start);
        if progress.offset < length {
            progress.timeouts = 0;
            return Step::More;
        }
        if immediate.is_some() {
            // The last packet carries the immediate data, so only now a receive is consumed.
            let receive = match self.receive_for(at, peer) {
                Ok(receive) => receive,
                Err(step) => return step,
            };
            self.account(at, peer, length, 0);
            let received = Received {
                wr_id: receive.wr_id,
                operation: CompletedOperation::ReceiveWriteImmediate,
                byte_len: message_len(length),
                immediate,
                invalidated: None,
                source: None,
                grh: None,
            };
            self.complete_receive(peer, request.solicited, received);
        } else {
            self.account(at, peer, length, 0);
        }
        if let Some(device) = self.device_mut(peer.device) {
            device.counters.rx_write_requests += 1;
        }
        Step::DONE
    }

    /// Executes the next part of a READ: copies it from the peer's memory to the request's buffers.
    #[inline]
    pub(crate) fn read(
        &mut self,
        at: QpRef,
        request: &SendRequest,
        remote: Remote,
        progress: &mut Progress,
    ) -> Step {
        let length = total(&request.sges);
        if !self.may_read(at) {
            return Step::Failed(Status::LocalQpOperation);
        }
        let peer = self.peer_for(at, progress);
        let part = self.part(length, progress);
        if self.gather_target(at, None, &request.sges, length, part.clone()).is_err() {
            return Step::Failed(Status::LocalProtection);
        }
        let Some(peer) = peer else { return Step::NoPeer };
        if !self.permits(peer, Access::REMOTE_READ) || !self.serves_reads(peer) {
            return self.refuse(at, peer, Status::RemoteInvalidRequest, Some(AsyncEvent::QpRequestError));
        }
        if self.remote_source(peer, remote, length, part.clone(), Access::REMOTE_READ).is_err() {
            return self.refuse(at, peer, Status::RemoteAccess, Some(AsyncEvent::QpAccessError));
        }
        if self.awaits_memory(at, false, Some(peer.device), Some(at.device)) {
            return Step::NotHere;
        }
        match self.copy(peer.device, at.device) {
            Ok(()) => {}
            Err(CopyFault::Source(_)) => {
                return self.refuse(at, peer, Status::RemoteOperation, Some(AsyncEvent::QpFatal));
            }
            Err(CopyFault::Destination(_)) => return Step::Failed(Status::LocalProtection),
        }
        progress.offset = part.end;
        self.charge(at, part.end - part.start);
        if progress.offset < length {
            progress.timeouts = 0;
            return Step::More;
        }
        self.account(at, peer, 0, length);
        if let Some(device) = self.device_mut(peer.device) {
            device.counters.rx_read_requests += 1;
        }
        Step::Done { byte_len: message_len(length) }
    }

    /// Compare and swap, fetch and add: by the host CPU's atomics, so atomic against the guest's CPUs as well.
    pub(crate) fn atomic(
        &mut self,
        at: QpRef,
        request: &SendRequest,
        remote: Remote,
        progress: &mut Progress,
    ) -> Step {
        if !self.may_read(at) {
            return Step::Failed(Status::LocalQpOperation);
        }
        if total(&request.sges) < ATOMIC {
            return Step::Failed(Status::LocalLength);
        }
        let peer = self.peer_for(at, progress);
        if self.gather_target(at, None, &request.sges, ATOMIC, 0..ATOMIC).is_err() || !self.target_exists(at)
        {
            return Step::Failed(Status::LocalProtection);
        }
        let Some(peer) = peer else { return Step::NoPeer };
        let aligned = remote.address.is_multiple_of(ATOMIC);
        if !aligned || !self.permits(peer, Access::REMOTE_ATOMIC) || !self.serves_reads(peer) {
            return self.refuse(at, peer, Status::RemoteInvalidRequest, Some(AsyncEvent::QpRequestError));
        }
        if self.remote_source(peer, remote, ATOMIC, 0..ATOMIC, Access::REMOTE_ATOMIC).is_err() {
            return self.refuse(at, peer, Status::RemoteAccess, Some(AsyncEvent::QpAccessError));
        }
        if self.awaits_memory(at, false, Some(peer.device), Some(at.device)) {
            return Step::NotHere;
        }
        let Some(word) = self.pieces().0.first().map(|piece| piece.address) else {
            return self.refuse(at, peer, Status::RemoteOperation, Some(AsyncEvent::QpFatal));
        };
        let Some(device) = self.device(peer.device) else { return Step::NoPeer };
        let before = match request.operation {
            Operation::CompareSwap { compare, swap, .. } => {
                device.memory.compare_exchange_u64(word, compare, swap)
            }
            Operation::FetchAdd { add, .. } => device.memory.fetch_add_u64(word, add),
            _ => return Step::Failed(Status::LocalQpOperation),
        };
        let Ok(before) = before else {
            return self.refuse(at, peer, Status::RemoteOperation, Some(AsyncEvent::QpFatal));
        };
        let Some(own) = self.device(at.device) else { return Step::NoPeer };
        let bytes = before.to_le_bytes();
        let mut done = 0;
        for piece in self.pieces().1 {
            let len = usize::try_from(piece.len).unwrap_or(0);
            if own.memory.write(piece.address, &bytes[done..done + len]).is_err() {
                return Step::Failed(Status::LocalProtection);
            }
            done += len;
        }
        self.charge(at, ATOMIC);
        self.was_written(peer.device, ATOMIC);
        self.account(at, peer, 0, ATOMIC);
        if let Some(device) = self.device_mut(peer.device) {
            device.counters.rx_atomic_requests += 1;
        }
        Step::Done { byte_len: 8 }
    }

    /// Whether a queue pair may have a READ or atomic outstanding.
    fn may_read(&self, at: QpRef) -> bool {
        self.qp(at).is_some_and(|qp| qp.attributes.max_rd_atomic > 0)
    }

    /// Whether a responder accepts READs and atomics.
    pub(crate) fn serves_reads(&self, peer: QpRef) -> bool {
        self.qp(peer).is_some_and(|qp| qp.attributes.max_dest_rd_atomic > 0 && qp.kind == QpKind::Rc)
    }

    /// Whether a responder's queue pair permits a kind of access.
    #[inline]
    pub(crate) fn permits(&self, peer: QpRef, access: Access) -> bool {
        self.qp(peer).is_some_and(|qp| qp.attributes.access.contains(access))
    }

    /// Whether the gathered target is guest memory.
    fn target_exists(&self, at: QpRef) -> bool {
        self.device(at.device).is_some_and(|device| {
            self.pieces().1.iter().all(|piece| device.memory.check(piece.address, piece.len).is_ok())
        })
    }

    #[inline]
    pub(crate) fn remote_target(
        &mut self,
        peer: QpRef,
        remote: Remote,
        length: u64,
        part: Range<u64>,
    ) -> Result<(), Forbidden> {
        let (devices, scratch) = self.split_target();
        let device = devices.get(peer.device as usize).and_then(|d| d.as_deref()).ok_or(Forbidden)?;
        let pd = device.qps.get(peer.handle).ok_or(Forbidden)?.pd;
        device.regions.remote(pd, remote, length, part, Access::REMOTE_WRITE, scratch)
    }

    #[inline]
    pub(crate) fn remote_source(
        &mut self,
        peer: QpRef,
        remote: Remote,
        length: u64,
        part: Range<u64>,
        need: Access,
    ) -> Result<(), Forbidden> {
        let (devices, scratch) = self.split_source();
        let device = devices.get(peer.device as usize).and_then(|d| d.as_deref()).ok_or(Forbidden)?;
        let pd = device.qps.get(peer.handle).ok_or(Forbidden)?.pd;
        device.regions.remote(pd, remote, length, part, need, scratch)
    }
}
