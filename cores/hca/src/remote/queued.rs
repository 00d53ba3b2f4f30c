//! Interface to transports with queues of their own: a host's RDMA device. It consumes receives before there is a message for them, and
//! accesses memory by its own keys, without calling the engine.
//!
//! ```text
//! receive queue ─ remote_receive_ahead ─▶ transport's queue … message … ─ remote_ahead_end ─▶ completion
//! region of a key ─ remote_region ─▶ transport's own registration … Action::RegionGone ─▶ its end
//! ```

use dma::{Alias, AliasError, Dma};
use smallvec::SmallVec;

use crate::attributes::{Access, QpAttributes, QpKind};
use crate::engine::Engine;
use crate::local::receive::{Received, Taken};
use crate::memory::Kind;
use crate::names::{DeviceId, PdHandle, SrqHandle};
use crate::objects::{Elsewhere, ObjectRef, Path, QpRef};
use crate::provider::{Provider, ReceiveQueue};
use crate::work::{AsyncEvent, CompletedOperation, Sge, SgeList, Status};

use super::{QpId, Refusal};

/// Why a transport with queues of its own can't serve a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotQueued {
    /// It isn't a reliable connection.
    #[error("it is no reliable connection")]
    Kind,
    /// Its receive queue is shared, and is in another protection domain than the queue pair.
    #[error("its shared receive queue has another protection domain")]
    Shared,
    /// It is the guest kernel's: its regions are all of memory, or change with each request.
    #[error("it is the guest kernel's")]
    Kernel,
}

/// A queue pair's properties for such a transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Queued {
    /// Its protection domain.
    pub pd: PdHandle,
    /// Its current attributes.
    pub attributes: QpAttributes,
    /// It has a shared receive queue: a receive may be consumed for it only when there is a message.
    pub shared: bool,
}

/// A memory region, for a registration of the transport's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegionInfo {
    /// First address in requests' terms.
    pub start: u64,
    /// Length in bytes.
    pub length: u64,
    /// Access rights.
    pub access: Access,
    /// Its guest addresses and lengths, in order.
    pub pieces: Vec<(u64, u64)>,
}

/// Result of a receive that was consumed ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AheadReceived {
    /// Length of the message, bytes.
    pub length: u32,
    /// Immediate data, as wire bytes.
    pub immediate: Option<[u8; 4]>,
    /// Whether it was consumed by a WRITE with immediate data.
    pub write: bool,
    /// Raises a solicited event.
    pub solicited: bool,
}

impl<P: Provider> Engine<P> {
    /// Whether a transport with queues of its own can serve a connected queue pair. `None` when `qp` is of an older incarnation, or not
    /// connected.
    ///
    /// # Errors
    /// The reason why it can't.
    pub fn queued(&self, qp: QpId) -> Option<Result<Queued, NotQueued>> {
        let found = self.qp(self.served(qp).ok()?)?;
        let of_its_domain = |shared: ObjectRef| {
            let srq = self.device(qp.device.0).and_then(|device| device.srqs.get(shared.handle));
            srq.is_some_and(|srq| srq.stamp == shared.stamp && srq.pd == found.pd)
        };
        Some(match () {
            () if found.kind != QpKind::Rc => Err(NotQueued::Kind),
            () if found.context == 0 => Err(NotQueued::Kernel),
            () if found.srq.is_some_and(|shared| !of_its_domain(shared)) => Err(NotQueued::Shared),
            () => Ok(Queued {
                pd: PdHandle(found.pd),
                attributes: found.attributes,
                shared: found.srq.is_some(),
            }),
        })
    }

    /// Binds the connection to the transport, although no packet of its peer has come yet.
    pub fn remote_bind(&mut self, qp: QpId) {
        if let Ok(at) = self.served(qp)
            && let Some(found) = self.qp_mut(at)
        {
            found.path = Path::Elsewhere;
        }
    }

    /// Ends the binding to a transport with queues of its own, which has nothing of the connection in flight. The receives that it consumed
    /// and didn't use come next, whatever the path then is.
    pub fn remote_unbind(&mut self, qp: QpId) {
        let at = qp.at();
        self.touch_qp(qp.device, qp.handle);
        let Some(found) = self.qp_mut(at).filter(|found| found.incarnation == qp.incarnation()) else {
            return;
        };
        let Some(elsewhere) = &mut found.elsewhere else { return };
        // The ones returned earlier were consumed later.
        elsewhere.ahead.append(&mut elsewhere.returned);
        std::mem::swap(&mut elsewhere.ahead, &mut elsewhere.returned);
        elsewhere.awaits_receive = false;
    }

    /// Whether a transport has requests of a queue pair.
    #[must_use]
    pub fn remote_has_requests(&self, qp: QpId) -> bool {
        let found = self.qp(qp.at()).filter(|found| found.incarnation == qp.incarnation());
        found
            .and_then(|found| found.elsewhere.as_ref())
            .is_some_and(|elsewhere| !elsewhere.outstanding.is_empty())
    }

    /// Consumes the next receive, of its own queue or the shared one, before there is a message for it. If there is none,
    /// [`super::Action::ReceivePosted`] announces the next.
    ///
    /// # Errors
    /// [`Refusal::NotReady`] if none is posted; others when the queue pair is gone, or fails because its receive is malformed.
    pub fn remote_receive_ahead(&mut self, qp: QpId) -> Result<SgeList, Refusal> {
        let at = self.served(qp)?;
        let mut taken = self.take_receive(at);
        if matches!(taken, Taken::Empty) {
            let found = self.qp_mut(at).ok_or(Refusal::Gone)?;
            found.elsewhere.get_or_insert_with(Box::default).awaits_receive = true;
            self.await_receive(at, at);
            // A receive posted between the first check and the line above causes no other doorbell.
            if self.has_receive(at) {
                taken = self.take_receive(at);
                self.await_no_receive(at);
            }
        }
        match taken {
            Taken::Empty => {
                let timer = self.qp(at).map_or(0, |found| found.attributes.min_rnr_timer);
                Err(Refusal::NotReady { timer })
            }
            Taken::Request(receive) => {
                let sges = receive.sges.clone();
                let found = self.qp_mut(at).ok_or(Refusal::Gone)?;
                found.elsewhere.get_or_insert_with(Box::<Elsewhere>::default).ahead.push_back(receive);
                Ok(sges)
            }
            Taken::Malformed(wr_id) => {
                self.complete_receive_error(at, wr_id, Status::LocalQpOperation);
                self.enter_error(at);
                Err(Refusal::Operational)
            }
            Taken::Broken => Err(self.refused(at, Refusal::Operational, Some(AsyncEvent::QpFatal))),
        }
    }

    /// Removes the queue pair from the waiting list: it has its receive, and would be woken in another's place.
    fn await_no_receive(&mut self, at: QpRef) {
        let Some(found) = self.qp_mut(at) else { return };
        let awaits = found.awaits.take();
        if let Some(elsewhere) = &mut found.elsewhere {
            elsewhere.awaits_receive = false;
        }
        self.stop_awaiting(at, awaits);
    }

    /// Declines a receive that [`super::Action::ReceivePosted`] announced: the next queue pair that waits for the shared queue is notified.
    pub fn remote_receive_declined(&mut self, qp: QpId) {
        if let Some(shared) = self.qp(qp.at()).and_then(|found| found.srq) {
            self.doorbell_srq(qp.device, SrqHandle(shared.handle));
        }
    }

    /// Whether the queue from which a queue pair consumes receives has one.
    fn has_receive(&self, at: QpRef) -> bool {
        let Some(device) = self.device(at.device) else { return false };
        let Some(found) = device.qps.get(at.handle) else { return false };
        let ring = match found.srq {
            None => found.receive_queue.as_ref(),
            Some(shared) => {
                let srq = device.srqs.get(shared.handle).filter(|srq| srq.stamp == shared.stamp);
                srq.map(|srq| &srq.ring)
            }
        };
        ring.is_some_and(|ring| ring.available(&device.memory) > 0)
    }

    /// Completes the oldest receive that was consumed ahead. An error fails the queue pair.
    pub fn remote_ahead_end(&mut self, qp: QpId, outcome: Result<AheadReceived, Status>) {
        let Ok(at) = self.served(qp) else { return };
        let ahead = self.qp_mut(at).and_then(|found| found.elsewhere.as_mut()?.ahead.pop_front());
        let Some(receive) = ahead else { return };
        self.touch_qp(qp.device, qp.handle);
        match outcome {
            Ok(got) => {
                self.count_served(at, got.length, |counters| &mut counters.rx_send_requests);
                let operation = if got.write {
                    CompletedOperation::ReceiveWriteImmediate
                } else {
                    CompletedOperation::Receive
                };
                let received = Received {
                    wr_id: receive.wr_id,
                    operation,
                    byte_len: got.length,
                    immediate: got.immediate,
                    invalidated: None,
                    source: None,
                    grh: None,
                };
                self.complete_receive(at, got.solicited, received);
            }
            Err(status) => {
                self.complete_receive_error(at, receive.wr_id, status);
                self.enter_error(at);
            }
        }
    }

    /// The scatter-gather elements of an outstanding request.
    #[must_use]
    pub fn remote_sges(&self, qp: QpId, token: u64) -> Option<&[Sge]> {
        self.outstanding(qp, token).map(|outstanding| outstanding.request.sges.as_slice())
    }

    /// The registered memory of a key in a protection domain. From now on [`super::Action::RegionGone`] announces its end. `None` when the
    /// key is unknown, or isn't of user memory.
    pub fn remote_region(&mut self, device: DeviceId, pd: PdHandle, key: u32) -> Option<RegionInfo> {
        let region = self.device_mut(device.0)?.regions.of_key_mut(key)?;
        let fits = region.key == key && region.pd == pd.0 && region.valid && region.kind == Kind::User;
        if !fits {
            return None;
        }
        region.exported = true;
        let mut pieces = Vec::new();
        region.pieces(0, region.length, &mut pieces);
        Some(RegionInfo {
            start: region.start,
            length: region.length,
            access: region.access,
            pieces: pieces.into_iter().map(|piece| (piece.address, piece.len)).collect(),
        })
    }

    /// A second view of a device's guest memory, for a registration of a region's pieces.
    ///
    /// # Errors
    /// When the device is gone or may not access memory, or the memory can't be mapped twice.
    pub fn remote_alias(&self, device: DeviceId, pieces: &[(u64, u64)]) -> Result<Alias, AliasError> {
        let found = self.device(device.0).filter(|device| device.enabled).ok_or(AliasError::NotMapped)?;
        found.memory.alias(pieces)
    }

    /// Handles a request of the peer that the transport's device has refused: the responder fails, with the matching event.
    pub fn remote_refused(&mut self, qp: QpId, refusal: Refusal) {
        let Ok(at) = self.served(qp) else { return };
        let event: fn(crate::names::QpHandle) -> AsyncEvent = match refusal {
            Refusal::Access => AsyncEvent::QpAccessError,
            Refusal::Invalid => AsyncEvent::QpRequestError,
            _ => AsyncEvent::QpFatal,
        };
        self.refused(at, refusal, Some(event));
    }
}

/// The elements of the first `length` bytes.
#[must_use]
pub fn first_bytes(sges: &[Sge], length: u64) -> SgeList {
    let mut left = length;
    let mut kept = SmallVec::new();
    for sge in sges {
        let now = u64::from(sge.length).min(left);
        if let Ok(length @ 1..) = u32::try_from(now) {
            kept.push(Sge { length, ..*sge });
        }
        left -= now;
    }
    kept
}
