//! SEND between connected queue pairs.

use dma::access::CopyFault;

use crate::engine::Engine;
use crate::objects::{Progress, QpRef};
use crate::provider::Provider;
use crate::work::{AsyncEvent, CompletedOperation, ReceiveRequest, SendRequest, Status};

use super::receive::Received;
use super::{Step, message_len, total};

impl<P: Provider> Engine<P> {
    /// SEND, with immediate data, or with invalidate.
    #[inline]
    pub(super) fn send(
        &mut self,
        at: QpRef,
        request: &SendRequest,
        immediate: Option<[u8; 4]>,
        invalidate: Option<u32>,
        progress: &mut Progress,
    ) -> Step {
        let length = total(&request.sges);
        let peer = self.peer_for(at, progress);
        let part = self.part(length, progress);
        // The requester's own memory first: it finds its errors before it sends anything.
        if self.gather_source(at, &request.sges, length, part.clone()).is_err() {
            return Step::Failed(Status::LocalProtection);
        }
        let Some(peer) = peer else { return self.unanswered(at) };
        let receive = match self.receive_for(at, peer) {
            Ok(receive) => receive,
            Err(step) => return step,
        };
        if length > total(&receive.sges) {
            return self.too_long(at, peer, receive);
        }
        if let Some(key) = invalidate
            && self.may_invalidate(peer, key).is_err()
        {
            self.complete_receive_error(peer, receive.wr_id, Status::RemoteInvalidRequest);
            return self.refuse(at, peer, Status::RemoteAccess, Some(AsyncEvent::QpAccessError));
        }
        let shared = self.shared_queue(peer);
        if self.gather_target(peer, shared, &receive.sges, length, part.clone()).is_err() {
            return self.receive_failed(at, peer, &receive);
        }
        if self.awaits_memory(at, false, Some(at.device), Some(peer.device)) {
            self.stash_receive(peer, receive);
            return Step::NotHere;
        }
        match self.copy(at.device, peer.device) {
            Ok(()) => {}
            Err(CopyFault::Source(_)) => {
                self.stash_receive(peer, receive);
                return Step::Failed(Status::LocalProtection);
            }
            Err(CopyFault::Destination(_)) => return self.receive_failed(at, peer, &receive),
        }
        progress.offset = part.end;
        self.charge(at, part.end - part.start);
        self.was_written(peer.device, part.end - part.start);
        progress.rnr_waits = 0;
        progress.timeouts = 0;
        if progress.offset < length {
            self.stash_receive(peer, receive);
            return Step::More;
        }
        self.account(at, peer, length, 0);
        if let Some(device) = self.device_mut(peer.device) {
            device.counters.rx_send_requests += 1;
        }
        self.complete_message(peer, &receive, length, request.solicited, immediate, invalidate);
        Step::DONE
    }

    /// Completes the receive of a whole message.
    #[inline]
    fn complete_message(
        &mut self,
        peer: QpRef,
        receive: &ReceiveRequest,
        length: u64,
        solicited: bool,
        immediate: Option<[u8; 4]>,
        invalidated: Option<u32>,
    ) {
        if let Some(key) = invalidated {
            self.invalidate_remote(peer, key);
        }
        let received = Received {
            wr_id: receive.wr_id,
            operation: CompletedOperation::Receive,
            byte_len: message_len(length),
            immediate,
            invalidated,
            source: None,
            grh: None,
        };
        self.complete_receive(peer, solicited, received);
    }

    /// Handles a message that is longer than the receive.
    fn too_long(&mut self, at: QpRef, peer: QpRef, receive: ReceiveRequest) -> Step {
        if self.qp(peer).is_some_and(|qp| qp.kind == crate::attributes::QpKind::Rc) {
            self.complete_receive_error(peer, receive.wr_id, Status::LocalLength);
        } else {
            // An unreliable message is dropped, and the next one uses the receive.
            self.stash_receive(peer, receive);
        }
        self.refuse(at, peer, Status::RemoteInvalidRequest, Some(AsyncEvent::QpRequestError))
    }

    /// Handles a receive whose memory the responder itself may not write.
    fn receive_failed(&mut self, at: QpRef, peer: QpRef, receive: &ReceiveRequest) -> Step {
        self.complete_receive_error(peer, receive.wr_id, Status::LocalProtection);
        self.own_failure(peer);
        self.refuse(at, peer, Status::RemoteOperation, None)
    }
}
