//! The requester: sending and retransmitting requests (IBTA volume 1, 9.7).

use super::*;
use crate::packet::{AtomicEth, Header, Reth};

/// A request in the send queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pending {
    pub request: Request,
    /// PSN of its first packet.
    pub first: u64,
    /// Number of its PSNs; 0 for local requests.
    pub packets: u32,
    /// Its status once all earlier requests are complete, if it is known to fail.
    pub error: Option<Status>,
    /// A local request was executed.
    pub executed: bool,
}

impl Pending {
    #[inline]
    pub(super) fn end(&self) -> u64 {
        self.first + u64::from(self.packets)
    }

    /// Whether its response carries data.
    #[inline]
    pub(super) fn is_answered(&self) -> bool {
        matches!(self.request.kind, Kind::Read { .. } | Kind::CompareSwap { .. } | Kind::FetchAdd { .. })
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Requester {
    pub queue: VecDeque<Pending>,
    /// Index of the request that `next` lies in.
    pub cursor: usize,
    /// PSN after the last request in the queue.
    pub end: u64,
    /// Oldest PSN without acknowledgement.
    pub una: u64,
    /// Next PSN to be sent.
    pub next: u64,
    /// First PSN that was never sent.
    pub sent: u64,
    /// READ requests and atomics in `una..next`.
    pub reads: u32,
    /// Capacity of the window, packets.
    pub window: u32,
    /// Current limit of unacknowledged packets; losses lower it, acknowledgements raise it.
    pub limit: u32,
    /// Packets acknowledged since the limit was last changed.
    pub grown: u32,
    /// A loss before this PSN belongs to a group of losses for which the limit was lowered already.
    pub cut_at: u64,
    /// Limit of packets of one READ request; boundaries count from the message's start.
    pub chunk: u32,
    /// A packet requests an acknowledgement where its PSN has all these bits.
    pub ack_mask: u64,
    /// `una` when the requester last went back. A second NAK for the same `una` is an echo, and doesn't make it go back again.
    pub went_back: Option<u64>,
    /// Retransmissions without progress.
    pub retries: u32,
    /// Those caused by a timeout.
    pub timeouts: u32,
    /// RNR waits without progress.
    pub rnr_waits: u32,
    /// End of the RNR wait.
    pub rnr_until: Option<u64>,
    /// When the ACK timeout expires.
    pub deadline: Option<u64>,
    /// The memory of a request is not present: nothing is sent, and no timer runs.
    pub stalled: bool,
}

impl Requester {
    pub(super) fn new(config: &Config) -> Self {
        let first = psn::first(config.sq_psn);
        let window = config.window_packets();
        debug_assert!(window <= MOST_WINDOW);
        Self {
            queue: VecDeque::new(),
            cursor: 0,
            end: first,
            una: first,
            next: first,
            sent: first,
            reads: 0,
            window,
            limit: window,
            grown: 0,
            cut_at: first,
            chunk: (window / 2).max(1),
            // An acknowledgement per quarter of the window, so that the window never fills for want of one; for large windows per eighth.
            ack_mask: (1 << (window / 4).clamp(1, 64.max(window / 8)).ilog2()) - 1,
            went_back: None,
            retries: 0,
            timeouts: 0,
            rnr_waits: 0,
            rnr_until: None,
            deadline: None,
            stalled: false,
        }
    }

    #[inline]
    pub(super) fn post(&mut self, config: &Config, mut request: Request) -> Result<(), PostError> {
        if self.queue.len() >= config.max_requests as usize {
            return Err(PostError::Full);
        }
        let mut error = None;
        let packets = match request.kind {
            Kind::Send { .. } | Kind::Write { .. } => packets_of(request.length, config.mtu.bytes()),
            Kind::Read { .. } => packets_of(request.length, config.mtu.bytes()),
            Kind::CompareSwap { .. } | Kind::FetchAdd { .. } => {
                request.length = 8;
                1
            }
            Kind::Local { .. } => 0,
            Kind::Failed(status) => {
                error = Some(status);
                0
            }
        };
        let mut pending = Pending { request, first: self.end, packets, error, executed: false };
        if pending.is_answered() && config.max_rd_atomic == 0 {
            pending.error = Some(Status::LocalQpOperation);
        }
        if packets == 0 {
            pending.request.length = 0;
        }
        self.queue.push_back(pending);
        self.end += u64::from(packets);
        Ok(())
    }

    /// Retransmits all unacknowledged packets.
    pub(super) fn go_back(&mut self) {
        self.next = self.una;
        self.cursor = 0;
        self.reads = 0;
        self.went_back = Some(self.una);
    }

    /// Records that everything before `una` is acknowledged: resets the retry counters and the timer.
    #[inline]
    pub(super) fn progress(&mut self, una: u64) {
        if self.limit < self.window {
            self.grow(una);
        }
        self.una = una;
        self.retries = 0;
        self.timeouts = 0;
        self.rnr_waits = 0;
        self.deadline = None;
    }

    /// Raises the limit by 1/64 of the window whenever `limit` packets were acknowledged.
    #[cold]
    fn grow(&mut self, una: u64) {
        let acknowledged = u32::try_from(una - self.una).unwrap_or(u32::MAX);
        self.grown = self.grown.saturating_add(acknowledged);
        if self.grown >= self.limit {
            self.grown = 0;
            self.limit = (self.limit + (self.window / 64).max(1)).min(self.window);
        }
    }

    /// Halves the limit after a loss, once for all losses among the packets in flight.
    fn shrink(&mut self) {
        if self.una >= self.cut_at {
            self.cut_at = self.sent;
            self.grown = 0;
            self.limit = (self.limit / 2).max(2).min(self.window);
        }
    }

    /// Removes the oldest request from the queue.
    #[inline]
    pub(super) fn pop(&mut self) {
        self.queue.pop_front();
        self.cursor = self.cursor.saturating_sub(1);
    }

    /// Number of response packets of a READ request that begins at packet `index` of `packets`.
    #[inline]
    pub(super) fn chunk_from(&self, index: u32, packets: u32) -> u32 {
        let boundary = (index / self.chunk + 1).saturating_mul(self.chunk);
        boundary.min(packets) - index
    }

    /// Whether this packet of a READ is the last of its READ request.
    #[inline]
    pub(super) fn ends_chunk(&self, index: u32, packets: u32) -> bool {
        index + 1 == packets || (index + 1).is_multiple_of(self.chunk)
    }
}

/// Outcome of an attempt to send a packet.
enum Sent {
    Yes,
    /// The window, a limit or a fence doesn't permit it, or the connection has failed.
    Blocked,
    /// No room in the output.
    Full,
}

impl Connection {
    /// Whether there is a request packet to send, not counting pacing.
    pub(super) fn has_requests(&self, now: u64) -> bool {
        let requester = &self.requester;
        let waits = requester.stalled || requester.rnr_until.is_some_and(|until| until > now);
        if self.state != State::Ready || waits {
            return false;
        }
        let Some(pending) = requester.queue.get(requester.cursor) else { return false };
        pending.error.is_none() && self.may_start(pending)
    }

    /// Whether window, fence and the limit of READs permit the packet at `next`.
    #[inline]
    fn may_start(&self, pending: &Pending) -> bool {
        let requester = &self.requester;
        if pending.request.fence && requester.next <= pending.first && requester.reads > 0 {
            return false;
        }
        let outstanding = requester.next - requester.una;
        let window = u64::from(requester.limit);
        match pending.request.kind {
            Kind::Local { wait } => !wait || requester.cursor == 0,
            Kind::Failed(_) => false,
            Kind::Send { .. } | Kind::Write { .. } => outstanding < window,
            Kind::Read { .. } => {
                let index = self.index_of(pending);
                let packets = u64::from(requester.chunk_from(index, pending.packets));
                requester.reads < u32::from(self.config.max_rd_atomic)
                    && (outstanding == 0 || outstanding + packets <= window)
            }
            Kind::CompareSwap { .. } | Kind::FetchAdd { .. } => {
                requester.reads < u32::from(self.config.max_rd_atomic) && outstanding < window
            }
        }
    }

    /// Which packet of a request `next` is.
    #[inline]
    fn index_of(&self, pending: &Pending) -> u32 {
        // Less than its packets, which are 32 bits.
        u32::try_from(self.requester.next.saturating_sub(pending.first)).unwrap_or(u32::MAX)
    }

    /// Sends what window and pacing permit. `false` when `out` is full.
    pub(super) fn send_requests<M: Memory, O: Output>(
        &mut self,
        now: u64,
        memory: &mut M,
        out: &mut O,
    ) -> bool {
        if self.state != State::Ready {
            return true;
        }
        if let Some(until) = self.requester.rnr_until {
            if until > now {
                return true;
            }
            self.requester.rnr_until = None;
        }
        let mut room = true;
        while let Some(&pending) = self.requester.queue.get(self.requester.cursor) {
            if pending.error.is_some() {
                self.settle(memory);
                break;
            }
            if !self.may_start(&pending) {
                break;
            }
            let sent = match pending.request.kind {
                Kind::Local { .. } => {
                    self.execute_local(&pending, memory);
                    if self.state == State::Ready { continue } else { break }
                }
                // Handled above: its error is set from the start.
                Kind::Failed(_) => Sent::Blocked,
                _ if !self.may_send_data(now) => Sent::Blocked,
                Kind::Send { .. } | Kind::Write { .. } => self.send_data(now, &pending, memory, out),
                Kind::Read { remote } => self.send_read(now, &pending, remote, out),
                Kind::CompareSwap { .. } | Kind::FetchAdd { .. } => self.send_atomic(now, &pending, out),
            };
            match sent {
                Sent::Yes => {}
                Sent::Blocked => break,
                Sent::Full => {
                    room = false;
                    break;
                }
            }
        }
        self.arm(now);
        room
    }

    fn execute_local<M: Memory>(&mut self, pending: &Pending, memory: &mut M) {
        if !pending.executed {
            let status = memory.execute_local(pending.request.token);
            if let Some(found) = self.requester.queue.get_mut(self.requester.cursor) {
                found.executed = true;
                found.error = (status != Status::Success).then_some(status);
            }
            if status != Status::Success {
                self.settle(memory);
                return;
            }
        }
        self.requester.cursor += 1;
        self.settle(memory);
    }

    /// Sends a packet of a SEND or WRITE.
    #[inline]
    fn send_data<M: Memory, O: Output>(
        &mut self,
        now: u64,
        pending: &Pending,
        memory: &mut M,
        out: &mut O,
    ) -> Sent {
        let mtu = self.config.mtu.bytes();
        let index = self.index_of(pending);
        let offset = u64::from(index) * u64::from(mtu);
        let left = u64::from(pending.request.length).saturating_sub(offset);
        let (first, last) = (index == 0, index + 1 == pending.packets);
        let psn = self.requester.next;
        let (operation, immediate) = opcode(&pending.request.kind, first, last);
        let mut header = Header::new(self.service(), operation, self.config.peer_qpn, psn::wire(psn));
        header.pkey = self.config.pkey;
        header.immediate = immediate;
        header.solicited = last && pending.request.solicited;
        let reliable = self.config.reliability == Reliability::Reliable;
        let fills = psn + 1 - self.requester.una >= u64::from(self.requester.limit);
        header.ack_request = reliable && (last || fills || (psn + 1) & self.requester.ack_mask == 0);
        if first && let Kind::Write { remote, .. } = pending.request.kind {
            header.reth = Reth { address: remote.address, rkey: remote.rkey, length: pending.request.length };
        }
        // At most the path MTU.
        let payload = usize::try_from(left.min(u64::from(mtu))).unwrap_or(0);
        let len = header.packet_len(payload);
        let Some(packet) = out.reserve(len) else { return Sent::Full };
        let into = header.write(packet, payload);
        if payload > 0
            && let Err(unmoved) = memory.gather(pending.request.token, offset, into)
        {
            let Unmoved::Failed(status) = unmoved else {
                self.stall();
                return Sent::Blocked;
            };
            if let Some(found) = self.requester.queue.get_mut(self.requester.cursor) {
                found.error = Some(status);
            }
            self.settle(memory);
            return Sent::Blocked;
        }
        out.commit();
        self.account(now, len);
        self.advance(1);
        if last {
            self.requester.cursor += 1;
            if !reliable {
                self.requester.una = self.requester.next;
                self.requester.pop();
                memory.complete(pending.request.token, Status::Success, pending.request.length);
                self.settle(memory);
            }
        } else if !reliable {
            self.requester.una = self.requester.next;
        }
        Sent::Yes
    }

    /// Sends a READ request, from its first missing packet to the end of its chunk.
    fn send_read<O: Output>(
        &mut self,
        now: u64,
        pending: &Pending,
        remote: crate::memory::Remote,
        out: &mut O,
    ) -> Sent {
        let mtu = self.config.mtu.bytes();
        let index = self.index_of(pending);
        let packets = self.requester.chunk_from(index, pending.packets);
        let offset = u64::from(index) * u64::from(mtu);
        let end = (u64::from(index + packets) * u64::from(mtu)).min(u64::from(pending.request.length));
        let psn = self.requester.next;
        let mut header =
            Header::new(Service::Rc, Operation::ReadRequest, self.config.peer_qpn, psn::wire(psn));
        header.pkey = self.config.pkey;
        header.ack_request = true;
        header.reth = Reth {
            address: remote.address.wrapping_add(offset),
            rkey: remote.rkey,
            length: u32::try_from(end.saturating_sub(offset)).unwrap_or(0),
        };
        let len = header.packet_len(0);
        let Some(packet) = out.reserve(len) else { return Sent::Full };
        header.write(packet, 0);
        out.commit();
        self.account(now, len);
        self.requester.reads += 1;
        self.advance(packets);
        if index + packets == pending.packets {
            self.requester.cursor += 1;
        }
        Sent::Yes
    }

    fn send_atomic<O: Output>(&mut self, now: u64, pending: &Pending, out: &mut O) -> Sent {
        let (operation, atomic) = match pending.request.kind {
            Kind::CompareSwap { remote, compare, swap } => (
                Operation::CompareSwap,
                AtomicEth { address: remote.address, rkey: remote.rkey, swap_add: swap, compare },
            ),
            Kind::FetchAdd { remote, add } => (
                Operation::FetchAdd,
                AtomicEth { address: remote.address, rkey: remote.rkey, swap_add: add, compare: 0 },
            ),
            _ => return Sent::Blocked,
        };
        let psn = self.requester.next;
        let mut header = Header::new(Service::Rc, operation, self.config.peer_qpn, psn::wire(psn));
        header.pkey = self.config.pkey;
        header.ack_request = true;
        header.atomic = atomic;
        let len = header.packet_len(0);
        let Some(packet) = out.reserve(len) else { return Sent::Full };
        header.write(packet, 0);
        out.commit();
        self.account(now, len);
        self.requester.reads += 1;
        self.advance(1);
        self.requester.cursor += 1;
        Sent::Yes
    }

    /// Moves `next` forward.
    #[inline]
    fn advance(&mut self, packets: u32) {
        let requester = &mut self.requester;
        if requester.next < requester.sent {
            self.counters.retransmitted_packets += 1;
        }
        requester.next += u64::from(packets);
        requester.sent = requester.sent.max(requester.next);
    }

    /// Starts the ACK timer, if a response is due and the timer doesn't run.
    #[inline]
    pub(super) fn arm(&mut self, now: u64) {
        let requester = &mut self.requester;
        if requester.deadline.is_none() && requester.una < requester.next && requester.rnr_until.is_none() {
            requester.deadline = timing::backed_off(self.config.timeout, requester.timeouts)
                .map(|wait| now.saturating_add(wait));
        }
    }

    /// Handles an expired ACK timeout.
    pub(super) fn timed_out<M: Memory>(&mut self, memory: &mut M) {
        self.requester.deadline = None;
        self.counters.local_ack_timeout_err += 1;
        self.requester.timeouts = self.requester.timeouts.saturating_add(1);
        self.retry(memory);
    }

    /// Retransmits, or fails the oldest request when its retries are used up.
    pub(super) fn retry<M: Memory>(&mut self, memory: &mut M) {
        self.requester.retries += 1;
        if self.requester.retries > u32::from(self.config.retry_count & 7) {
            self.counters.req_transport_retries_exceeded += 1;
            self.fail_requests(Status::RetryExceeded, memory);
            return;
        }
        self.requester.deadline = None;
        if self.config.yields_to_loss {
            self.requester.shrink();
        }
        self.requester.go_back();
    }

    /// Completes requests at the front of the queue that need no response: executed local ones, and those with an error.
    #[inline]
    pub(super) fn settle<M: Memory>(&mut self, memory: &mut M) {
        while let Some(front) = self.requester.queue.front() {
            if let Some(status) = front.error {
                self.fail_requests(status, memory);
                return;
            }
            if !front.executed {
                return;
            }
            let token = front.request.token;
            self.requester.pop();
            memory.complete(token, Status::Success, 0);
        }
    }

    /// Fails the connection: the oldest request completes with `status`, all others as flushed.
    pub(super) fn fail_requests<M: Memory>(&mut self, status: Status, memory: &mut M) {
        let event = match self.config.reliability {
            Reliability::Reliable => {
                self.state = State::Failed;
                self.responder.close();
                Event::Failed
            }
            Reliability::Unreliable => {
                self.state = State::SendFailed;
                Event::SendFailed
            }
        };
        self.flush(status, memory);
        memory.event(event);
    }

    /// Completes all requests: the oldest with `status`, the others as flushed.
    pub(super) fn flush<M: Memory>(&mut self, mut status: Status, memory: &mut M) {
        let requester = &mut self.requester;
        while let Some(pending) = requester.queue.pop_front() {
            memory.complete(pending.request.token, status, 0);
            status = Status::Flushed;
        }
        requester.cursor = 0;
        requester.reads = 0;
        requester.deadline = None;
        requester.rnr_until = None;
        requester.una = requester.sent;
        requester.next = requester.sent;
        requester.end = requester.sent;
    }
}

/// Opcode of a packet of a SEND or WRITE, and its immediate data or key to invalidate.
#[inline]
fn opcode(kind: &Kind, first: bool, last: bool) -> (Operation, [u8; 4]) {
    use Operation::*;
    match kind {
        Kind::Write { immediate, .. } => match (first, last, immediate) {
            (true, false, _) => (WriteFirst, [0; 4]),
            (false, false, _) => (WriteMiddle, [0; 4]),
            (false, true, None) => (WriteLast, [0; 4]),
            (false, true, Some(immediate)) => (WriteLastImmediate, *immediate),
            (true, true, None) => (WriteOnly, [0; 4]),
            (true, true, Some(immediate)) => (WriteOnlyImmediate, *immediate),
        },
        Kind::Send { immediate, invalidate } => {
            let invalidate = invalidate.map(u32::to_be_bytes);
            match (first, last, immediate, invalidate) {
                (true, false, ..) => (SendFirst, [0; 4]),
                (false, false, ..) => (SendMiddle, [0; 4]),
                (false, true, Some(immediate), _) => (SendLastImmediate, *immediate),
                (false, true, None, Some(key)) => (SendLastInvalidate, key),
                (false, true, None, None) => (SendLast, [0; 4]),
                (true, true, Some(immediate), _) => (SendOnlyImmediate, *immediate),
                (true, true, None, Some(key)) => (SendOnlyInvalidate, key),
                (true, true, None, None) => (SendOnly, [0; 4]),
            }
        }
        // Other requests have no data packets.
        _ => (SendOnly, [0; 4]),
    }
}
