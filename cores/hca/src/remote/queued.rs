//! For transports that have queues of their own: a host's RDMA device. It takes receives before there is a message for them, and
//! reaches memory by keys without asking anybody here.
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
use crate::objects::{ObjectRef, Path, QpRef};
use crate::provider::{Provider, ReceiveQueue};
use crate::work::{AsyncEvent, CompletedOperation, Sge, SgeList, Status};

use super::{Elsewhere, QpId, Refusal};

/// Why a queue pair can't be carried by a transport with queues of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotQueued {
    /// It isn't a reliable connection.
    #[error("it is no reliable connection")]
    Kind,
    /// Its receives are shared, and their memory is in another protection domain than its own.
    #[error("its shared receive queue has another protection domain")]
    Shared,
    /// The guest kernel's: its regions are all of memory, or change with each request.
    #[error("it is the guest kernel's")]
    Kernel,
}

/// A queue pair as such a transport needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Queued {
    /// Its protection domain.
    pub pd: PdHandle,
    /// Its attributes now.
    pub attributes: QpAttributes,
    /// It has a shared receive queue: a receive may be taken for it only when there is a message.
    pub shared: bool,
}

/// A memory region, for a registration elsewhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegionInfo {
    /// First address as requests name it.
    pub start: u64,
    /// Bytes.
    pub length: u64,
    /// What may be done with it.
    pub access: Access,
    /// Where its bytes are: guest addresses and lengths, in order.
    pub pieces: Vec<(u64, u64)>,
}

/// How a receive that was taken ahead ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AheadReceived {
    /// Bytes of the message.
    pub length: u32,
    /// Immediate data, as wire bytes.
    pub immediate: Option<[u8; 4]>,
    /// It was a WRITE's with immediate data.
    pub write: bool,
    /// Raises a solicited event.
    pub solicited: bool,
}

impl<P: Provider> Engine<P> {
    /// Whether a connected queue pair can be carried by a transport with queues of its own.
    ///
    /// # Errors
    /// Why it can't. `None`: it isn't that queue pair any more, or not connected.
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

    /// The connection stays with the transport, although no packet of its peer has come yet.
    pub fn remote_bind(&mut self, qp: QpId) {
        if let Ok(at) = self.served(qp)
            && let Some(found) = self.qp_mut(at)
        {
            found.path = Path::Elsewhere;
        }
    }

    /// The transport with queues of its own carries the connection no longer, and has nothing of it under way: the receives that it took and
    /// didn't use are the next ones, whatever carries it then.
    pub fn remote_unbind(&mut self, qp: QpId) {
        let at = qp.at();
        self.touch_qp(qp.device, qp.handle);
        let Some(found) = self.qp_mut(at).filter(|found| found.incarnation == qp.incarnation) else { return };
        let Some(elsewhere) = &mut found.elsewhere else { return };
        // Those that came back before were taken later.
        elsewhere.ahead.append(&mut elsewhere.returned);
        std::mem::swap(&mut elsewhere.ahead, &mut elsewhere.returned);
        elsewhere.awaits_receive = false;
    }

    /// Whether a transport has requests of a queue pair.
    #[must_use]
    pub fn remote_has_requests(&self, qp: QpId) -> bool {
        let found = self.qp(qp.at()).filter(|found| found.incarnation == qp.incarnation);
        found
            .and_then(|found| found.elsewhere.as_ref())
            .is_some_and(|elsewhere| !elsewhere.outstanding.is_empty())
    }

    /// Takes the next receive, of its own queue or the shared one, before there is a message for it. Without one, [`super::Action::ReceivePosted`] tells of the next.
    ///
    /// # Errors
    /// [`Refusal::NotReady`] without one; others when the queue pair is gone, or fails since its receive can't be used.
    pub fn remote_receive_ahead(&mut self, qp: QpId) -> Result<SgeList, Refusal> {
        let at = self.served(qp)?;
        let mut taken = self.take_receive(at);
        if matches!(taken, Taken::Empty) {
            let found = self.qp_mut(at).ok_or(Refusal::Gone)?;
            found.elsewhere.get_or_insert_with(Box::default).awaits_receive = true;
            self.await_receive(at, at);
            // What was posted before the line above, and after the look before it, rings no doorbell again.
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

    /// A queue pair that waits where others do, and needn't, would be woken in another's place.
    fn await_no_receive(&mut self, at: QpRef) {
        let Some(found) = self.qp_mut(at) else { return };
        let awaits = found.awaits.take();
        if let Some(elsewhere) = &mut found.elsewhere {
            elsewhere.awaits_receive = false;
        }
        self.stop_awaiting(at, awaits);
    }

    /// A queue pair was told of a receive ([`super::Action::ReceivePosted`]) and has no use for it: whoever else waits for the shared queue is told.
    pub fn remote_receive_declined(&mut self, qp: QpId) {
        if let Some(shared) = self.qp(qp.at()).and_then(|found| found.srq) {
            self.doorbell_srq(qp.device, SrqHandle(shared.handle));
        }
    }

    /// Whether the ring that a queue pair takes receives from has one.
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

    /// Completes the oldest receive that was taken ahead. An error fails the queue pair.
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

    /// The scatter-gather elements of a posted request that still is outstanding.
    #[must_use]
    pub fn remote_sges(&self, qp: QpId, token: u64) -> Option<&[Sge]> {
        self.outstanding(qp, token).map(|outstanding| outstanding.request.sges.as_slice())
    }

    /// The registered memory that a key of a protection domain names; from now on its end is told by
    /// [`super::Action::RegionGone`]. `None`: there is none, or it isn't user memory.
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
    /// When the device is gone or may not access memory, or they aren't memory that can be mapped twice.
    pub fn remote_alias(&self, device: DeviceId, pieces: &[(u64, u64)]) -> Result<Alias, AliasError> {
        let found = self.device(device.0).filter(|device| device.enabled).ok_or(AliasError::NotMapped)?;
        found.memory.alias(pieces)
    }

    /// The transport's device has refused a request of the peer: the responder fails, with the event that belongs to it.
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

/// The elements that hold the first `length` bytes.
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
