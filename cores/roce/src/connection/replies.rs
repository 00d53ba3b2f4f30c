//! The responder's packets: READ responses and atomics' results in PSN order, then one acknowledgement or NAK.

use super::responder::{Answer, Resource, Tail};
use super::*;
use crate::memory::Remote;
use crate::packet::{Aeth, Header};
use crate::status::Refusal;

/// Outcome of an attempt to send a READ response.
enum Response {
    Sent,
    Full,
    /// The memory is gone; the request was refused.
    Refused,
}

impl Connection {
    /// Whether a response, acknowledgement or NAK is due. With `paced`, data don't count, since congestion control delays them.
    #[inline]
    pub(super) fn has_replies(&self, paced: bool) -> bool {
        let responder = &self.responder;
        if responder.stalled {
            return false;
        }
        if responder.due > 0 { !paced } else { responder.tail != Tail::Nothing }
    }

    /// Sends a congestion notification. `false` when `out` is full.
    pub(super) fn send_notification<O: Output>(&mut self, out: &mut O) -> bool {
        let mut header = Header::new(Service::Congestion, Operation::Notification, self.config.peer_qpn, 0);
        header.becn = true;
        header.pkey = self.config.pkey;
        let len = header.packet_len(0);
        let Some(packet) = out.reserve(len) else { return false };
        header.write(packet, 0);
        out.commit();
        self.notify = false;
        self.counters.np_cnp_sent += 1;
        self.counters.sent_packets += 1;
        self.counters.sent_bytes += len as u64;
        true
    }

    /// Sends responses. `false` when `out` is full.
    pub(super) fn send_replies<M: Memory, O: Output>(
        &mut self,
        now: u64,
        memory: &mut M,
        out: &mut O,
    ) -> bool {
        while self.responder.due > 0 {
            if self.responder.stalled {
                // Later responses must not be sent before this one.
                return true;
            }
            let found = self.responder.resources.iter().position(|resource| resource.due);
            let Some(index) = found else {
                self.responder.due = 0;
                break;
            };
            let Some(&resource) = self.responder.resources.get(index) else { break };
            match resource.answer {
                Answer::Atomic { original } => {
                    if !self.send_original(now, &resource, original, out) {
                        return false;
                    }
                    self.answered(index);
                }
                Answer::Read { remote, length, next, start } => {
                    let mut next = next;
                    while next < resource.packets {
                        if !self.may_send_data(now) {
                            return true;
                        }
                        match self.send_response(now, &resource, (remote, length, next, start), memory, out) {
                            Response::Sent => {}
                            Response::Full => return false,
                            Response::Refused => break,
                        }
                        next += 1;
                        if let Some(Resource { answer: Answer::Read { next: stored, .. }, .. }) =
                            self.responder.resources.get_mut(index)
                        {
                            *stored = next;
                        }
                    }
                    if next == resource.packets {
                        self.answered(index);
                    }
                }
            }
        }
        self.send_tail(now, out)
    }

    fn answered(&mut self, index: usize) {
        if let Some(resource) = self.responder.resources.get_mut(index) {
            resource.due = false;
            resource.answered = true;
            self.responder.due -= 1;
        }
    }

    fn send_original<O: Output>(
        &mut self,
        now: u64,
        resource: &Resource,
        original: u64,
        out: &mut O,
    ) -> bool {
        let mut header = self.answer(Operation::AtomicAcknowledge, resource.first, Syndrome::Ack.encode());
        header.original = original;
        self.emit(now, &header, out)
    }

    #[inline]
    fn send_response<M: Memory, O: Output>(
        &mut self,
        now: u64,
        resource: &Resource,
        (remote, length, next, start): (Remote, u32, u32, u32),
        memory: &mut M,
        out: &mut O,
    ) -> Response {
        let mtu = self.config.mtu.bytes();
        let (first, last) = (next == start, next + 1 == resource.packets);
        let operation = match (first, last) {
            (true, true) => Operation::ReadResponseOnly,
            (true, false) => Operation::ReadResponseFirst,
            (false, false) => Operation::ReadResponseMiddle,
            (false, true) => Operation::ReadResponseLast,
        };
        let psn = resource.first + u64::from(next);
        let header = self.answer(operation, psn, Syndrome::Ack.encode());
        let offset = u64::from(next) * u64::from(mtu);
        let left = u64::from(length).saturating_sub(offset);
        // At most the path MTU.
        let payload = usize::try_from(left.min(u64::from(mtu))).unwrap_or(0);
        let len = header.packet_len(payload);
        let Some(packet) = out.reserve(len) else { return Response::Full };
        let into = header.write(packet, payload);
        if payload > 0
            && let Err(refusal) = memory.read(remote, u64::from(length), offset, into)
        {
            if refusal == Refusal::NotHere {
                self.responder.stalled = true;
                return Response::Refused;
            }
            if refusal == Refusal::Gone {
                self.responder.withhold_answers();
                return Response::Refused;
            }
            if self.state == State::Ready {
                self.refuse(refusal, psn, refusal.event(), memory);
            }
            self.drop_from(resource.first);
            return Response::Refused;
        }
        out.commit();
        self.account(now, len);
        Response::Sent
    }

    /// Cancels the responses from `psn` on.
    fn drop_from(&mut self, psn: u64) {
        let responder = &mut self.responder;
        for resource in &mut responder.resources {
            if resource.due && resource.first >= psn {
                resource.due = false;
                responder.due -= 1;
            }
        }
    }

    /// Sends the acknowledgement or NAK. `false` when `out` is full.
    fn send_tail<O: Output>(&mut self, now: u64, out: &mut O) -> bool {
        let (syndrome, psn) = match self.responder.tail {
            Tail::Nothing => return true,
            Tail::Ack => (Syndrome::Ack.encode(), self.responder.expected - 1),
            Tail::AckUpTo(psn) => (Syndrome::Ack.encode(), psn),
            Tail::Nak { syndrome, psn } => (syndrome, psn),
        };
        let header = self.answer(Operation::Acknowledge, psn, syndrome);
        if !self.emit(now, &header, out) {
            return false;
        }
        self.responder.tail = Tail::Nothing;
        true
    }

    #[inline]
    fn answer(&self, operation: Operation, psn: u64, syndrome: u8) -> Header {
        let mut header = Header::new(Service::Rc, operation, self.config.peer_qpn, psn::wire(psn));
        header.pkey = self.config.pkey;
        header.aeth = Aeth { syndrome, msn: self.responder.msn };
        header
    }

    /// A packet without payload; not subject to pacing.
    fn emit<O: Output>(&mut self, now: u64, header: &Header, out: &mut O) -> bool {
        let len = header.packet_len(0);
        let Some(packet) = out.reserve(len) else { return false };
        header.write(packet, 0);
        out.commit();
        self.account(now, len);
        true
    }
}
