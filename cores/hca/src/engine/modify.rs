//! Changing a queue pair's state and attributes.

use crate::attributes::{QpAttributeMask as Mask, QpAttributes, QpKind, QpState};
use crate::error::VerbsError;
use crate::names::{DeviceId, Gid, QpHandle};
use crate::objects::{Path, QpRef, Wait};
use crate::provider::{Provider, ReceiveQueue, SendQueue, Sink};
use crate::work::AsyncEvent;

use super::Engine;
use super::transitions::transition;

/// Packet sequence numbers have 24 bits.
pub(crate) const PSN_MASK: u32 = 0xFF_FFFF;

impl<P: Provider> Engine<P> {
    /// Changes a queue pair's state and attributes by the state table (IBTA volume 1, 10.3.1 and 11.2.5.2). A failure changes nothing. A
    /// transition to RESET drops requests in progress without completions.
    ///
    /// A CURRENT_STATE other than the real one is refused: the queue pair may have failed meanwhile.
    pub fn modify_qp(
        &mut self,
        device: DeviceId,
        qp: QpHandle,
        mask: Mask,
        attributes: &QpAttributes,
        sink: &mut impl Sink,
    ) -> Result<(), VerbsError> {
        self.of(device)?;
        let at = self.qp_ref(device, qp).ok_or(VerbsError::missing("queue pair", qp.0))?;
        let result = self.modify(at, mask, attributes);
        self.run_failed_cqs();
        self.deliver(sink);
        result
    }

    fn modify(&mut self, at: QpRef, mask: Mask, new: &QpAttributes) -> Result<(), VerbsError> {
        let Some(qp) = self.qp(at) else { return Err(VerbsError::missing("queue pair", at.handle)) };
        let (kind, from) = (qp.kind, qp.state);
        let to = if mask.contains(Mask::STATE) { new.state } else { from };
        let refused = VerbsError::Transition { from, to, mask: mask.bits() };
        let (required, optional) = transition(kind, from, to).ok_or(refused.clone())?;
        if !mask.contains(required) || !(required | optional | Mask::STATE).contains(mask) {
            return Err(refused);
        }
        if mask.contains(Mask::CURRENT_STATE) && new.current_state != from {
            return Err(refused);
        }
        let source_gid = self.check_attributes(at, mask, new)?;
        self.mark(at);
        self.apply_attributes(at, mask, new, source_gid);
        self.change_state(at, from, to);
        Ok(())
    }

    /// Checks the attributes in the mask. Returns the own address when a path is set.
    fn check_attributes(&self, at: QpRef, mask: Mask, new: &QpAttributes) -> Result<Option<Gid>, VerbsError> {
        let device = self.device(at.device).ok_or(VerbsError::NoSuchDevice(DeviceId(at.device)))?;
        let most_reads = u32::from(device.capabilities.max_qp_rd_atom);
        // Name, whether the mask has it, value, range.
        let checks: [(&'static str, Mask, u32, std::ops::RangeInclusive<u32>); 10] = [
            ("The P_Key index", Mask::PKEY_INDEX, u32::from(new.pkey_index), 0..=0),
            ("The port", Mask::PORT, u32::from(new.port), 1..=1),
            ("The path MTU code", Mask::PATH_MTU, u32::from(new.path_mtu), 1..=5),
            ("The ACK timeout code", Mask::TIMEOUT, u32::from(new.timeout), 0..=31),
            ("The retry count", Mask::RETRY_COUNT, u32::from(new.retry_count), 0..=7),
            ("The RNR retry count", Mask::RNR_RETRY, u32::from(new.rnr_retry), 0..=7),
            ("The RNR timer code", Mask::MIN_RNR_TIMER, u32::from(new.min_rnr_timer), 0..=31),
            ("The reads outstanding", Mask::MAX_RD_ATOMIC, u32::from(new.max_rd_atomic), 0..=most_reads),
            (
                "The reads outstanding as responder",
                Mask::MAX_DEST_RD_ATOMIC,
                u32::from(new.max_dest_rd_atomic),
                0..=most_reads,
            ),
            ("The peer's queue pair number", Mask::DESTINATION_QPN, new.destination_qpn.0, 0..=PSN_MASK),
        ];
        for (what, bit, value, range) in checks {
            if mask.contains(bit) && !range.contains(&value) {
                return Err(VerbsError::invalid(what, value));
            }
        }
        if !mask.contains(Mask::ADDRESS_VECTOR) {
            return Ok(None);
        }
        let index = new.address.sgid_index;
        let source = device.gid(index).ok_or(VerbsError::invalid("The index of the own GID", index))?;
        Ok(Some(source))
    }

    fn apply_attributes(&mut self, at: QpRef, mask: Mask, new: &QpAttributes, source_gid: Option<Gid>) {
        let Some(qp) = self.qp_mut(at) else { return };
        let kept = &mut qp.attributes;
        macro_rules! take {
            ($($bit:ident $field:ident,)*) => {
                $(if mask.contains(Mask::$bit) { kept.$field = new.$field; })*
            };
        }
        take! {
            ACCESS_FLAGS access,
            PKEY_INDEX pkey_index,
            PORT port,
            QKEY qkey,
            ADDRESS_VECTOR address,
            PATH_MTU path_mtu,
            TIMEOUT timeout,
            RETRY_COUNT retry_count,
            RNR_RETRY rnr_retry,
            MAX_RD_ATOMIC max_rd_atomic,
            MAX_DEST_RD_ATOMIC max_dest_rd_atomic,
            MIN_RNR_TIMER min_rnr_timer,
            DESTINATION_QPN destination_qpn,
            SQD_NOTIFY sqd_notify,
        }
        if mask.contains(Mask::RQ_PSN) {
            kept.rq_psn = new.rq_psn & PSN_MASK;
        }
        if mask.contains(Mask::SQ_PSN) {
            kept.sq_psn = new.sq_psn & PSN_MASK;
        }
        if let Some(source) = source_gid {
            qp.source_gid = source;
        }
        qp.changed();
    }

    fn change_state(&mut self, at: QpRef, from: QpState, to: QpState) {
        if let Some(device) = self.device_mut(at.device) {
            device.quiet.forget(at.handle);
        }
        match (from, to) {
            (_, QpState::Reset) => self.reset_qp(at),
            (_, QpState::Error) => self.enter_error(at),
            (QpState::Reset, QpState::Init) => self.start_qp(at),
            (QpState::ReadyToSend, QpState::SendQueueDrained) => {
                let Some(qp) = self.qp_mut(at) else { return };
                qp.state = to;
                if self.is_drained(at) {
                    self.drained(at);
                }
            }
            _ => {
                if let Some(qp) = self.qp_mut(at) {
                    qp.state = to;
                    qp.changed();
                    if to == QpState::ReadyToSend {
                        qp.attributes.sqd_notify = false;
                    }
                }
                if to != from {
                    self.activate(at);
                    self.wake_waiting_peer(at);
                }
            }
        }
    }

    /// Sends the event SQ_DRAINED, if it was requested.
    pub(crate) fn drained(&mut self, at: QpRef) {
        let Some(qp) = self.qp_mut(at) else { return };
        let handle = qp.handle;
        if std::mem::take(&mut qp.attributes.sqd_notify) {
            self.event(at.device, AsyncEvent::SqDrained(handle));
        }
    }

    fn start_qp(&mut self, at: QpRef) {
        let Some(device) = self.device_mut(at.device) else { return };
        let Some(qp) = device.qps.get_mut(at.handle) else { return };
        qp.state = QpState::Init;
        qp.incarnation = qp.incarnation.wrapping_add(1);
        qp.send_queue.start(&device.memory);
        if let Some(queue) = &mut qp.receive_queue {
            queue.start(&device.memory);
        }
    }

    fn reset_qp(&mut self, at: QpRef) {
        self.wait(at, Wait::None, None);
        self.close_elsewhere(at);
        let Some(qp) = self.qp_mut(at) else { return };
        qp.elsewhere = None;
        qp.state = QpState::Reset;
        qp.attributes = QpAttributes::in_reset();
        qp.current = None;
        qp.stashed = None;
        qp.established = false;
        qp.path = Path::Unreachable;
        qp.was_local = false;
        qp.source_gid = Gid([0; 16]);
        qp.changed();
        let waiter = qp.waiter.take();
        let awaits = qp.awaits.take();
        self.stop_awaiting(at, awaits);
        if let Some(waiter) = waiter {
            self.wake(waiter);
        }
    }

    /// Wakes the peer of a queue pair that became ready, since its requests may be waiting.
    fn wake_waiting_peer(&mut self, at: QpRef) {
        let Some(qp) = self.qp(at) else { return };
        if !matches!(qp.kind, QpKind::Rc) {
            return;
        }
        let (gid, qpn) = (qp.attributes.address.dgid, qp.attributes.destination_qpn);
        let Some(segment) = self.device(at.device).map(|device| device.segment) else { return };
        let Some(&owner) = self.gids.get(&(segment, gid)) else { return };
        let Some(peer) = self.device(owner).and_then(|device| device.qp_by_number(qpn)) else { return };
        if peer.wait == Wait::Peer {
            let peer = QpRef { device: owner, handle: peer.handle.0, stamp: peer.stamp };
            self.wake(peer);
        }
    }
}
