//! The requester's side of responses: acknowledgements, NAKs, READ responses and atomics' results (IBTA volume 1, 9.7).

use super::*;

/// How far a response acknowledges.
enum Reach {
    /// Everything before it is acknowledged.
    All,
    /// The response of an earlier READ or atomic is missing.
    Missing,
}

impl Connection {
    pub(super) fn receive_answer<M: Memory>(&mut self, now: u64, packet: &Packet<'_>, memory: &mut M) {
        let requester = &self.requester;
        let psn = psn::extend(packet.header.psn, requester.una);
        if psn < requester.una || psn >= requester.sent {
            if psn + 1 == requester.una && requester.rnr_until.is_some() {
                self.woken(packet);
                return;
            }
            // A ghost: acknowledged already, or from before the queue pair was reset.
            self.counters.dropped_packets += 1;
            return;
        }
        match packet.header.operation {
            Operation::Acknowledge => self.acknowledged(now, psn, packet, memory),
            Operation::AtomicAcknowledge => self.atomic_answered(psn, packet.header.original, memory),
            _ => self.read_answered(psn, packet, memory),
        }
        if self.state != State::Ready {
            return;
        }
        let requester = &mut self.requester;
        if requester.next < requester.una {
            // An acknowledgement overtook the retransmission.
            requester.next = requester.una;
            requester.cursor = 0;
            requester.reads = 0;
        }
        self.settle(memory);
        if self.state == State::Ready {
            self.arm(now);
        }
    }

    /// During an RNR wait the peer repeats its last acknowledgement when a receive is posted ([`Connection::receive_posted`]): the request
    /// is sent at once. If the packet was a duplicate of the network, the peer answers with another RNR NAK. That wait isn't counted as a
    /// retry.
    fn woken(&mut self, packet: &Packet<'_>) {
        let acknowledges = packet.header.operation == Operation::Acknowledge
            && Syndrome::decode(packet.header.aeth.syndrome) == Syndrome::Ack;
        if acknowledges {
            self.requester.rnr_until = None;
            self.requester.rnr_waits = self.requester.rnr_waits.saturating_sub(1);
        }
    }

    fn acknowledged<M: Memory>(&mut self, now: u64, psn: u64, packet: &Packet<'_>, memory: &mut M) {
        let syndrome = Syndrome::decode(packet.header.aeth.syndrome);
        if syndrome == Syndrome::Ack {
            if let Reach::Missing = self.acknowledge(psn + 1, memory) {
                self.answer_missing(memory);
            }
            return;
        }
        if let Reach::Missing = self.acknowledge(psn, memory) {
            self.answer_missing(memory);
            return;
        }
        if self.requester.una != psn || self.state != State::Ready {
            return;
        }
        match syndrome {
            Syndrome::Rnr(code) => self.not_ready(now, code, memory),
            Syndrome::SequenceError => {
                self.counters.packet_seq_err += 1;
                if self.requester.went_back != Some(psn) {
                    self.retry(memory);
                }
            }
            Syndrome::InvalidRequest => {
                self.counters.req_remote_invalid_request += 1;
                self.fail_requests(Status::RemoteInvalidRequest, memory);
            }
            Syndrome::AccessError => {
                self.counters.req_remote_access_errors += 1;
                self.fail_requests(Status::RemoteAccess, memory);
            }
            Syndrome::OperationalError => self.fail_requests(Status::RemoteOperation, memory),
            Syndrome::Ack | Syndrome::Unknown(_) => self.counters.dropped_packets += 1,
        }
    }

    /// The peer has no receive for the request at `una`.
    fn not_ready<M: Memory>(&mut self, now: u64, code: u8, memory: &mut M) {
        self.counters.rnr_nak_retry_err += 1;
        let retries = self.config.rnr_retry & 7;
        let requester = &mut self.requester;
        if requester.rnr_until.is_some() {
            // A duplicate of the RNR NAK whose wait is in progress.
            return;
        }
        if retries != 7 {
            requester.rnr_waits += 1;
        }
        if retries != 7 && requester.rnr_waits > u32::from(retries) {
            self.counters.req_rnr_retries_exceeded += 1;
            self.fail_requests(Status::RnrRetryExceeded, memory);
            return;
        }
        // The peer responds, so the transport retries begin anew.
        requester.retries = 0;
        requester.timeouts = 0;
        requester.deadline = None;
        requester.rnr_until = Some(now.saturating_add(timing::rnr_wait(code)));
        requester.go_back();
    }

    /// A response arrived while that of an earlier READ or atomic is missing (implied NAK).
    fn answer_missing<M: Memory>(&mut self, memory: &mut M) {
        if self.state != State::Ready {
            return;
        }
        self.counters.implied_nak_seq_err += 1;
        if self.requester.went_back != Some(self.requester.una) {
            self.retry(memory);
        }
    }

    /// Acknowledges everything before `upto`, up to the first READ or atomic without its response.
    #[inline]
    fn acknowledge<M: Memory>(&mut self, upto: u64, memory: &mut M) -> Reach {
        while self.requester.una < upto {
            let Some(front) = self.requester.queue.front() else { return Reach::All };
            if front.is_answered() {
                return Reach::Missing;
            }
            let end = front.end();
            if upto < end {
                self.requester.progress(upto);
                return Reach::All;
            }
            let Request { token, length, .. } = front.request;
            self.requester.progress(end);
            self.requester.pop();
            memory.complete(token, Status::Success, length);
            // Removes local requests first, so that the response isn't taken for theirs.
            self.settle(memory);
        }
        Reach::All
    }

    /// Places a packet of a READ's response.
    fn read_answered<M: Memory>(&mut self, psn: u64, packet: &Packet<'_>, memory: &mut M) {
        if let Reach::Missing = self.acknowledge(psn, memory) {
            self.answer_missing(memory);
            return;
        }
        let requester = &self.requester;
        let Some(&front) = requester.queue.front() else { return };
        if requester.una != psn || !matches!(front.request.kind, Kind::Read { .. }) || psn < front.first {
            self.counters.dropped_packets += 1;
            return;
        }
        // `una` lies in the front request.
        let index = u32::try_from(psn - front.first).unwrap_or(u32::MAX);
        let mtu = u64::from(self.config.mtu.bytes());
        let offset = u64::from(index) * mtu;
        let expected = u64::from(front.request.length).saturating_sub(offset).min(mtu);
        let ends = requester.ends_chunk(index, front.packets);
        let is_last =
            matches!(packet.header.operation, Operation::ReadResponseLast | Operation::ReadResponseOnly);
        if packet.payload.len() as u64 != expected || is_last != ends {
            self.fail_requests(Status::BadResponse, memory);
            return;
        }
        if !packet.payload.is_empty()
            && let Err(unmoved) = memory.place(front.request.token, offset, packet.payload)
        {
            let Unmoved::Failed(status) = unmoved else {
                self.counters.dropped_packets += 1;
                self.stall();
                return;
            };
            self.fail_requests(status, memory);
            return;
        }
        let requester = &mut self.requester;
        if ends && psn < requester.next {
            requester.reads = requester.reads.saturating_sub(1);
        }
        requester.progress(psn + 1);
        if index + 1 == front.packets {
            requester.pop();
            memory.complete(front.request.token, Status::Success, front.request.length);
        }
    }

    /// Places an atomic's result.
    fn atomic_answered<M: Memory>(&mut self, psn: u64, original: u64, memory: &mut M) {
        if let Reach::Missing = self.acknowledge(psn, memory) {
            self.answer_missing(memory);
            return;
        }
        let Some(&front) = self.requester.queue.front() else { return };
        let atomic = matches!(front.request.kind, Kind::CompareSwap { .. } | Kind::FetchAdd { .. });
        if self.requester.una != psn || !atomic {
            self.counters.dropped_packets += 1;
            return;
        }
        if let Err(unmoved) = memory.place(front.request.token, 0, &original.to_ne_bytes()) {
            let Unmoved::Failed(status) = unmoved else {
                self.counters.dropped_packets += 1;
                self.stall();
                return;
            };
            self.fail_requests(status, memory);
            return;
        }
        let requester = &mut self.requester;
        if psn < requester.next {
            requester.reads = requester.reads.saturating_sub(1);
        }
        requester.progress(psn + 1);
        requester.pop();
        memory.complete(front.request.token, Status::Success, 8);
    }
}
