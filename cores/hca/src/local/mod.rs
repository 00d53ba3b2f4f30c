//! The local transport, between two queue pairs of this engine. Data is copied exactly once, from the sender's memory into the receiver's.
//! Requests of a queue pair execute in order, one at a time, so fences and the order of completions need nothing more.
//!
//! The rules of a wire apply: who may communicate (addresses, numbers, states, PSNs), which errors either end gets (IBTA volume 1, 9.7 and
//! 9.9), and how often a requester retries.
//!
//! **Packet sequence numbers.** There are no packets, but both ends count PSNs as packets of the path MTU would. If the PSNs of a pair
//! don't agree when it connects, the peer counts as unresponsive. On a wire the requester's packets would be out of sequence, or would even
//! be taken for duplicates. So the local transport detects a wrong exchange of PSNs as well.

mod connected;
pub(crate) mod datagram;
mod management;
mod one_sided;
pub(crate) mod receive;

use std::cmp::Ordering;
use std::ops::Range;

use dma::access::CopyFault;
use dma::{Dma, DmaFault};

use crate::attributes::{Access, QpKind, QpState};
use crate::engine::{Engine, PSN_MASK};
use crate::memory::{Forbidden, Piece};
use crate::objects::{ObjectRef, Path, Progress, QpRef};
use crate::provider::{Provider, SendQueue};
use crate::saved::Kind;
use crate::work::{AsyncEvent, CompletedOperation, Completion, Operation, SendRequest, Sge, Status};

/// Result of a step of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// The request is complete.
    Done {
        /// `byte_len` of the completion.
        byte_len: u32,
    },
    /// The request failed.
    Failed(Status),
    /// A quantum of the request is executed.
    More,
    /// The responder has no receive posted.
    NoReceive {
        /// The responder's RNR timer code.
        timer: u8,
        /// The responder.
        at: QpRef,
    },
    /// The peer doesn't respond.
    NoPeer,
    /// A transport executes the request.
    Handed,
    /// The request waits until transports have completed all earlier ones.
    Drain,
    /// The request waits for not-present guest memory.
    NotHere,
}

impl Step {
    const DONE: Self = Self::Done { byte_len: 0 };
}

/// Total length of a scatter-gather list, bytes.
#[inline]
pub(crate) fn total(sges: &[Sge]) -> u64 {
    // At most 16 elements of 32 bits.
    sges.iter().map(|sge| u64::from(sge.length)).sum()
}

/// The fault of a whole gathered list: its first address, and its total length.
fn whole(pieces: &[Piece]) -> DmaFault {
    let address = pieces.first().map_or(0, |piece| piece.address);
    DmaFault { address, len: pieces.iter().fold(0, |sum, piece| sum.saturating_add(piece.len)) }
}

/// Converts a length that is known to be valid for a message.
#[inline]
pub(crate) fn message_len(total: u64) -> u32 {
    u32::try_from(total).unwrap_or(u32::MAX)
}

impl<P: Provider> Engine<P> {
    /// Executes a request, or a quantum of it.
    #[inline]
    pub(crate) fn execute(&mut self, at: QpRef, request: &SendRequest, progress: &mut Progress) -> Step {
        let Some(qp) = self.qp(at) else { return Step::Failed(Status::General) };
        let kind = qp.kind;
        let Some(device) = self.device(at.device) else { return Step::Failed(Status::General) };
        if total(&request.sges) > u64::from(device.capabilities.max_message_bytes) {
            return Step::Failed(Status::LocalLength);
        }
        if matches!(kind, QpKind::Rc | QpKind::Uc) && self.path(at) == Path::Elsewhere {
            return self.execute_elsewhere(at, request);
        }
        match (&request.operation, kind) {
            (Operation::Send { datagram: None, invalidate: None, immediate }, QpKind::Rc | QpKind::Uc) => {
                self.send(at, request, *immediate, None, progress)
            }
            (Operation::Send { datagram: None, invalidate, immediate }, QpKind::Rc) => {
                self.send(at, request, *immediate, *invalidate, progress)
            }
            (Operation::Write { remote, immediate }, QpKind::Rc | QpKind::Uc) => {
                self.write(at, request, *remote, *immediate, progress)
            }
            (Operation::Read { remote }, QpKind::Rc) => self.read(at, request, *remote, progress),
            (Operation::CompareSwap { remote, .. } | Operation::FetchAdd { remote, .. }, QpKind::Rc) => {
                self.atomic(at, request, *remote, progress)
            }
            (
                Operation::Send { datagram: Some(to), invalidate: None, immediate },
                QpKind::Ud | QpKind::Gsi,
            ) => self.datagram(at, request, to, *immediate),
            (Operation::LocalInvalidate { rkey }, QpKind::Rc) => self.local_invalidate(at, *rkey),
            (Operation::FastRegister(registration), QpKind::Rc) => self.fast_register(at, registration),
            _ => Step::Failed(Status::LocalQpOperation),
        }
    }

    /// Releases a send request's slot, and pushes its completion if it needs one: at the end of the turn, or earlier ([`Engine::settle`]).
    #[inline]
    pub(crate) fn complete_send(
        &mut self,
        at: QpRef,
        wr_id: u64,
        operation: CompletedOperation,
        status: Status,
        byte_len: u32,
        signaled: bool,
    ) {
        let own_turn = self.retire_later(at);
        let Some(device) = self.device_mut(at.device) else { return };
        let Some(qp) = device.qps.get_mut(at.handle).filter(|qp| qp.stamp == at.stamp) else { return };
        if !own_turn {
            qp.send_queue.retire(&device.memory, 1);
        }
        match status {
            Status::Success => {
                qp.counters.requests += 1;
                device.counters.requests += 1;
                if !signaled && !qp.signal_all {
                    return;
                }
            }
            Status::Flushed => device.counters.req_cqe_flush_error += 1,
            _ => {
                device.counters.req_cqe_error += 1;
                qp.counters.errors += 1;
                match status {
                    Status::RemoteAccess => device.counters.req_remote_access_errors += 1,
                    Status::RemoteInvalidRequest => device.counters.req_remote_invalid_request += 1,
                    _ => {}
                }
            }
        }
        let completion = Completion {
            wr_id,
            qp: qp.handle,
            operation,
            status,
            byte_len,
            immediate: None,
            invalidated: None,
            source: None,
            grh: None,
        };
        let cq = qp.send_cq;
        self.push(at.device, cq, &completion, false);
    }

    /// The peer of a connected queue pair, if it would respond. Looked up again only after a change in the engine that could matter.
    #[inline]
    fn peer(&mut self, at: QpRef) -> Option<QpRef> {
        match self.path(at) {
            Path::Local(peer) => Some(peer),
            Path::Unreachable | Path::Elsewhere => None,
        }
    }

    /// Finds the queue pair that would accept this one's packets. It has the destination address and number, is of the same kind, in a
    /// state to receive, and expects packets from this address, number and PSN.
    pub(crate) fn find_peer(&self, at: QpRef) -> Option<QpRef> {
        let device = self.device(at.device)?;
        let qp = self.qp(at)?;
        let dgid = qp.attributes.address.dgid;
        // Responses must find their way, and both addresses must be of one family.
        if self.owner_of(device.segment, qp.source_gid)? != at.device
            || dgid.ipv4().is_some() != qp.source_gid.ipv4().is_some()
        {
            return None;
        }
        let owner = self.owner_of(device.segment, dgid)?;
        if self.detours(at.device, owner) {
            return None;
        }
        let there = self.device(owner).filter(|there| there.enabled)?;
        let peer = there.qp_by_number(qp.attributes.destination_qpn)?;
        let answers = peer.kind == qp.kind
            && peer.receives()
            && peer.state != QpState::SendQueueError
            && peer.source_gid == dgid
            && peer.attributes.address.dgid == qp.source_gid
            && peer.attributes.destination_qpn == qp.qpn
            // Unreliable responders accept whatever PSN the next message begins with.
            && (qp.kind == QpKind::Uc || peer.attributes.rq_psn == qp.attributes.sq_psn);
        answers.then_some(QpRef { device: owner, handle: peer.handle.0, stamp: peer.stamp })
    }

    /// The responsive peer, for a request that may have begun with another one.
    #[inline]
    fn peer_for(&mut self, at: QpRef, progress: &mut Progress) -> Option<QpRef> {
        let peer = self.peer(at)?;
        let incarnation = self.qp(peer)?.incarnation;
        if progress.peer != Some(peer) || progress.incarnation != incarnation {
            *progress = Progress { peer: Some(peer), incarnation, ..*progress };
            progress.offset = 0;
        }
        Some(peer)
    }

    /// The result of a missing peer: a reliable requester retries, an unreliable one never learns of it.
    #[inline]
    fn unanswered(&self, at: QpRef) -> Step {
        if self.qp(at).is_some_and(|qp| qp.kind == QpKind::Rc) { Step::NoPeer } else { Step::DONE }
    }

    /// Translates a part of the requester's scatter-gather list into the copy's source.
    #[inline]
    pub(crate) fn gather_source(
        &mut self,
        at: QpRef,
        sges: &[Sge],
        total: u64,
        part: Range<u64>,
    ) -> Result<(), Forbidden> {
        let (devices, scratch) = self.split_source();
        let device = devices.get(at.device as usize).and_then(|d| d.as_deref()).ok_or(Forbidden)?;
        let pd = device.qps.get(at.handle).ok_or(Forbidden)?.pd;
        device.regions.gather(pd, sges, total, part, Access::empty(), scratch)
    }

    /// Translates a part of a scatter-gather list that is written into the copy's target. For receives from a shared queue, `srq`
    /// identifies the protection domain.
    #[inline]
    pub(crate) fn gather_target(
        &mut self,
        at: QpRef,
        srq: Option<ObjectRef>,
        sges: &[Sge],
        total: u64,
        part: Range<u64>,
    ) -> Result<(), Forbidden> {
        let (devices, scratch) = self.split_target();
        let device = devices.get(at.device as usize).and_then(|d| d.as_deref()).ok_or(Forbidden)?;
        let pd = match srq {
            Some(srq) => device.srqs.get(srq.handle).ok_or(Forbidden)?.pd,
            None => device.qps.get(at.handle).ok_or(Forbidden)?.pd,
        };
        device.regions.gather(pd, sges, total, part, Access::LOCAL_WRITE, scratch)
    }

    /// Copies the gathered source to the gathered target, exactly once.
    ///
    /// # Errors
    /// When memory of either side is invalid, its device is gone, or one side is shorter than the other. The request must not succeed then,
    /// and in the last two cases no byte was copied.
    #[inline]
    fn copy(&self, from: u32, to: u32) -> Result<(), CopyFault> {
        let (sources, targets) = self.pieces();
        let from = self.device(from).ok_or(CopyFault::Source(whole(sources)))?;
        let to = self.device(to).ok_or(CopyFault::Destination(whole(targets)))?;
        if let ([source], [target]) = (sources, targets)
            && source.len == target.len
        {
            return from.memory.copy_to(source.address, &to.memory, target.address, source.len);
        }
        match whole(sources).len.cmp(&whole(targets).len) {
            Ordering::Less => return Err(CopyFault::Source(whole(sources))),
            Ordering::Greater => return Err(CopyFault::Destination(whole(targets))),
            Ordering::Equal => {}
        }
        let mut targets = targets.iter().copied();
        let mut target = Piece { address: 0, len: 0 };
        for source in sources {
            let mut source = *source;
            while source.len > 0 {
                if target.len == 0 {
                    // Both sides have the same number of bytes.
                    target = targets.next().ok_or(CopyFault::Destination(whole(self.pieces().1)))?;
                    continue;
                }
                let len = source.len.min(target.len);
                from.memory.copy_to(source.address, &to.memory, target.address, len)?;
                source.address += len;
                source.len -= len;
                target.address += len;
                target.len -= len;
            }
        }
        Ok(())
    }

    /// Counts a message between connected queue pairs: `forward` bytes to the responder, `back` bytes from it.
    #[inline]
    fn account(&mut self, at: QpRef, peer: QpRef, forward: u64, back: u64) {
        let Some(qp) = self.qp_mut(at) else { return };
        let shift = qp.path_mtu_shift();
        let bytes = forward + back;
        let packets = (bytes.saturating_sub(1) >> shift) + 1;
        let step = u32::try_from(packets).unwrap_or(0);
        qp.attributes.sq_psn = qp.attributes.sq_psn.wrapping_add(step) & PSN_MASK;
        qp.counters.bytes += bytes;
        let (sent, received) = if back > 0 { (1, packets) } else { (packets, 1) };
        if let Some(device) = self.device_mut(at.device) {
            device.counters.port_xmit_data += forward.div_ceil(4);
            device.counters.port_rcv_data += back.div_ceil(4);
            device.counters.port_xmit_packets += sent;
            device.counters.port_rcv_packets += received;
        }
        let Some(responder) = self.qp_mut(peer) else { return };
        responder.attributes.rq_psn = responder.attributes.rq_psn.wrapping_add(step) & PSN_MASK;
        responder.counters.served_bytes += bytes;
        let handle = responder.handle;
        if responder.state == QpState::ReadyToReceive && !responder.established {
            responder.established = true;
            self.event(peer.device, AsyncEvent::CommunicationEstablished(handle));
        }
        if let Some(device) = self.device_mut(peer.device) {
            device.marks.touch(Kind::QueuePair, peer.handle);
            device.counters.port_rcv_data += forward.div_ceil(4);
            device.counters.port_xmit_data += back.div_ceil(4);
            device.counters.port_rcv_packets += sent;
            device.counters.port_xmit_packets += received;
        }
    }

    /// The range of bytes, of a message of `total`, that this step moves.
    #[inline]
    fn part(&self, total: u64, progress: &Progress) -> Range<u64> {
        progress.offset..total.min(progress.offset.saturating_add(self.quantum_bytes()))
    }

    /// Charges moved bytes to the VM's rate limit.
    #[inline]
    pub(crate) fn charge(&mut self, at: QpRef, bytes: u64) {
        let now = self.now();
        if let Some(device) = self.device_mut(at.device) {
            device.bytes.spend(now, bytes);
        }
    }

    /// Refuses a request: the responder fails with the event, the requester with the status. Unreliable requesters learn nothing, and
    /// unreliable responders continue.
    fn refuse(
        &mut self,
        at: QpRef,
        peer: QpRef,
        status: Status,
        event: Option<fn(crate::names::QpHandle) -> AsyncEvent>,
    ) -> Step {
        let Some(responder) = self.qp(peer) else { return Step::NoPeer };
        if responder.kind != QpKind::Rc {
            return Step::DONE;
        }
        let handle = responder.handle;
        if status == Status::RemoteAccess
            && let Some(device) = self.device_mut(peer.device)
        {
            device.counters.resp_remote_access_errors += 1;
        }
        if let Some(event) = event {
            self.event(peer.device, event(handle));
        }
        if peer != at {
            self.enter_error(peer);
        }
        Step::Failed(status)
    }
}

#[cfg(test)]
mod tests;
