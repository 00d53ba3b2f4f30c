//! The responder: what requests do (spec rocev2 sections 8 and 12).

use super::*;
use crate::config::Plant;
use crate::memory::{Atomic, Received, ReceivedOperation, Remote};
use crate::packet::Header;
use crate::status::{NoReceive, Refusal, Unmoved};

/// The message that is coming in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Incoming {
    None,
    /// A SEND, with the receive in use.
    Send {
        offset: u64,
        capacity: u64,
    },
    /// A WRITE.
    Write {
        remote: Remote,
        length: u32,
        offset: u64,
    },
    /// Unreliable: the rest of this message is dropped.
    Drop,
}

/// What a READ or atomic left behind, for repetition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Resource {
    /// Its PSN.
    pub first: u64,
    /// How many PSNs it has.
    pub packets: u32,
    pub answer: Answer,
    /// Whether the whole answer has left once.
    pub answered: bool,
    /// Whether the answer, or a rest of it, is to be sent.
    pub due: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// READ: the packet that is next, and where the present run of packets began.
    Read { remote: Remote, length: u32, next: u32, start: u32 },
    /// The value before.
    Atomic { original: u64 },
}

/// What is said behind all READ responses and atomics' results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tail {
    Nothing,
    /// Everything accepted so far.
    Ack,
    /// A repeated request, up to this PSN: nothing of an unanswered READ.
    AckUpTo(u64),
    /// A NAK or RNR NAK, by syndrome, for this PSN.
    Nak {
        syndrome: u8,
        psn: u64,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Responder {
    /// PSN that is expected next.
    pub expected: u64,
    /// Completed requests.
    pub msn: u32,
    pub incoming: Incoming,
    /// READs and atomics by PSN, oldest first.
    pub resources: VecDeque<Resource>,
    /// How many of them are due.
    pub due: usize,
    pub tail: Tail,
    /// A NAK was sent for the expected packet: what comes behind it is dropped in silence.
    pub nak_sent: bool,
    /// An RNR NAK was sent for the expected packet.
    pub awaits_receive: bool,
    /// Whether a packet was accepted yet.
    pub established: bool,
    /// The NAK that ended it.
    pub refused: Option<(u8, u64)>,
    /// The expected packet was dropped since its memory is still to come.
    pub missed: bool,
    /// A READ's answer waits for memory that is still to come, and all that is said after it.
    pub stalled: bool,
}

impl Responder {
    pub(super) fn new(config: &Config) -> Self {
        Self {
            expected: psn::first(config.rq_psn),
            msn: 0,
            incoming: Incoming::None,
            resources: VecDeque::new(),
            due: 0,
            tail: Tail::Nothing,
            nak_sent: false,
            awaits_receive: false,
            established: false,
            refused: None,
            missed: false,
            stalled: false,
        }
    }

    /// Executes nothing any more, and answers no READ. What was executed is still acknowledged, and again when the peer repeats it: its
    /// last request has completed here, and the peer must learn so even if this end is closed in that moment or an acknowledgement is lost.
    pub(super) fn close(&mut self) {
        self.incoming = Incoming::None;
        if matches!(self.tail, Tail::Nak { .. }) {
            self.tail = Tail::Nothing;
        }
        self.withhold_answers();
        self.refused = None;
        self.awaits_receive = false;
        self.missed = false;
        self.stalled = false;
    }

    /// READs and atomics that wait for their answers go without, unless the peer asks again; nothing is acknowledged beyond them.
    pub(super) fn withhold_answers(&mut self) {
        let unanswered = self.resources.iter().find(|found| found.due).map(|found| found.first);
        self.tail = match (self.tail, unanswered) {
            (Tail::Ack, Some(first)) if first > 0 => Tail::AckUpTo(first - 1),
            (Tail::AckUpTo(psn), Some(first)) if first > 0 => Tail::AckUpTo(psn.min(first - 1)),
            (tail, _) => tail,
        };
        // They stay, since what comes later must not be acknowledged beyond them either.
        for resource in &mut self.resources {
            resource.due = false;
        }
        self.due = 0;
    }

    fn completed(&mut self) {
        self.msn = (self.msn + 1) & psn::MASK;
    }
}

/// How far a packet got.
pub(super) enum Done {
    /// Executed.
    Yes,
    /// Refused.
    Refused(Refusal),
    /// Refused, and whoever it concerns at this end was told already.
    RefusedSilently(Refusal),
    /// No receive is posted.
    NotReady,
    /// Nobody takes it: as if it had not come.
    Gone,
    /// Its memory is still to come: as if it had not come, and it is asked for later.
    NotHere,
}

impl From<Refusal> for Done {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Gone => Self::Gone,
            Refusal::NotHere => Self::NotHere,
            refusal => Self::Refused(refusal),
        }
    }
}

impl From<NoReceive> for Done {
    fn from(why: NoReceive) -> Self {
        match why {
            NoReceive::NotPosted => Self::NotReady,
            NoReceive::Unusable => Self::RefusedSilently(Refusal::Operation),
            NoReceive::Gone => Self::Gone,
        }
    }
}

impl Connection {
    /// A request packet of a reliable connection.
    pub(super) fn receive_request<M: Memory>(&mut self, packet: &Packet<'_>, memory: &mut M) {
        let expected = self.responder.expected;
        let mut psn = psn::extend(packet.header.psn, expected);
        if self.state != State::Ready {
            self.receive_refused(psn, packet, memory);
            return;
        }
        if psn > expected {
            match self.config.plant {
                Plant::SkipPsn if psn == expected + 1 => psn = expected,
                Plant::EarlyAck => {
                    self.responder.tail = Tail::AckUpTo(psn);
                    return;
                }
                _ => {}
            }
        }
        if psn > expected {
            self.counters.out_of_sequence += 1;
            if !self.responder.nak_sent {
                self.responder.nak_sent = true;
                self.counters.seq_nak_sent += 1;
                self.responder.tail = Tail::Nak { syndrome: Syndrome::SequenceError.encode(), psn: expected };
            }
            return;
        }
        if psn < expected {
            self.repeated(psn, packet, memory);
            return;
        }
        self.establish(memory);
        match self.execute(packet, memory) {
            Done::Yes => {
                let responder = &mut self.responder;
                responder.nak_sent = false;
                responder.missed = false;
                responder.awaits_receive = false;
                if matches!(responder.tail, Tail::Nak { .. }) {
                    responder.tail = Tail::Nothing;
                }
                if packet.header.ack_request && !is_answered(packet.header.operation) {
                    responder.tail = Tail::Ack;
                }
            }
            Done::NotReady => {
                self.counters.out_of_buffer += 1;
                self.counters.rnr_nak_sent += 1;
                let syndrome = Syndrome::Rnr(self.config.min_rnr_timer).encode();
                self.responder.nak_sent = true;
                self.responder.awaits_receive = true;
                self.responder.tail = Tail::Nak { syndrome, psn: expected };
            }
            Done::Refused(refusal) => self.refuse(refusal, expected, refusal.event(), memory),
            Done::RefusedSilently(refusal) => self.refuse(refusal, expected, None, memory),
            Done::Gone => {
                self.counters.dropped_packets += 1;
                // Nor is what comes behind it asked for again.
                self.responder.nak_sent = true;
            }
            Done::NotHere => {
                self.counters.dropped_packets += 1;
                self.responder.nak_sent = true;
                self.responder.missed = true;
            }
        }
    }

    pub(super) fn establish<M: Memory>(&mut self, memory: &mut M) {
        if !self.responder.established {
            self.responder.established = true;
            memory.event(Event::Established);
        }
    }

    /// The responder refuses the request at `psn`, and the connection fails. The NAK is said again whenever the peer asks again,
    /// since otherwise a lost one would look like a peer that is gone. Nothing happens for [`Refusal::Gone`].
    pub(super) fn refuse<M: Memory>(
        &mut self,
        refusal: Refusal,
        psn: u64,
        event: Option<Event>,
        memory: &mut M,
    ) {
        let Some(syndrome) = refusal.syndrome().map(Syndrome::encode) else { return };
        if matches!(self.responder.incoming, Incoming::Send { .. }) && refusal == Refusal::InvalidRequest {
            memory.fail_receive(Status::RemoteInvalidRequest);
        }
        self.counters.resp_remote_access_errors += u64::from(refusal == Refusal::Access);
        let responder = &mut self.responder;
        responder.incoming = Incoming::None;
        responder.tail = Tail::Nak { syndrome, psn };
        responder.refused = Some((syndrome, psn));
        for resource in &mut responder.resources {
            if resource.due && resource.first >= psn {
                resource.due = false;
                responder.due -= 1;
            }
        }
        self.state = State::Failed;
        if let Some(event) = event {
            memory.event(event);
        }
        self.flush(Status::Flushed, memory);
        memory.event(Event::Failed);
    }

    /// A request came after one was refused, or after this end was closed.
    fn receive_refused<M: Memory>(&mut self, psn: u64, packet: &Packet<'_>, memory: &mut M) {
        match self.responder.refused {
            Some((syndrome, refused)) if psn >= refused => {
                self.responder.tail = Tail::Nak { syndrome, psn: refused };
            }
            // It asks for an answer from before.
            Some(_) if is_answered(packet.header.operation) => self.repeated(psn, packet, memory),
            None if psn < self.responder.expected && !is_answered(packet.header.operation) => {
                self.repeated(psn, packet, memory);
            }
            _ => self.counters.dropped_packets += 1,
        }
    }

    /// A request packet that was executed already: nothing is executed again, except that a READ reads again.
    fn repeated<M: Memory>(&mut self, psn: u64, packet: &Packet<'_>, memory: &mut M) {
        self.counters.duplicate_request += 1;
        let header = &packet.header;
        match header.operation {
            Operation::ReadRequest => self.repeat_read(psn, header),
            Operation::CompareSwap | Operation::FetchAdd => {
                if self.config.plant == Plant::ForgetReplay
                    && let Ok(original) = memory.atomic(remote_of(header), atomic_of(header))
                    && let Some(found) = self.responder.resources.iter_mut().find(|r| r.first == psn)
                {
                    found.answer = Answer::Atomic { original };
                }
                let responder = &mut self.responder;
                let found = responder
                    .resources
                    .iter_mut()
                    .find(|found| found.first == psn && matches!(found.answer, Answer::Atomic { .. }));
                if let Some(found) = found
                    && !found.due
                {
                    found.due = true;
                    responder.due += 1;
                }
            }
            _ => {
                let responder = &mut self.responder;
                if responder.tail != Tail::Ack && !matches!(responder.tail, Tail::Nak { .. }) {
                    // Up to the next READ or atomic only: to acknowledge more would tell the peer that its answer was lost.
                    let next = responder.resources.iter().find(|resource| resource.first > psn);
                    let upto = next.map_or(responder.expected, |resource| resource.first) - 1;
                    let upto = match responder.tail {
                        Tail::AckUpTo(before) => upto.max(before),
                        _ => upto,
                    };
                    responder.tail = Tail::AckUpTo(upto);
                }
            }
        }
    }

    /// A READ that was answered already, or a rest of it, is asked for again.
    fn repeat_read(&mut self, psn: u64, header: &Header) {
        let mtu = u64::from(self.config.mtu.bytes());
        let responder = &mut self.responder;
        let found = responder
            .resources
            .iter_mut()
            .find(|found| psn >= found.first && psn < found.first + u64::from(found.packets));
        let Some(found) = found else { return };
        let Answer::Read { remote, length, next, start } = &mut found.answer else { return };
        let index = psn - found.first;
        let offset = index * mtu;
        let same = header.reth.rkey == remote.rkey
            && header.reth.address == remote.address.wrapping_add(offset)
            && u64::from(header.reth.length) + offset == u64::from(*length);
        if !same {
            return;
        }
        self.counters.rx_read_requests += 1;
        let index = u32::try_from(index).unwrap_or(0);
        *next = index;
        *start = index;
        if !found.due {
            found.due = true;
            responder.due += 1;
        }
    }

    /// Executes the expected packet.
    #[inline]
    pub(super) fn execute<M: Memory>(&mut self, packet: &Packet<'_>, memory: &mut M) -> Done {
        use Operation::*;
        let operation = packet.header.operation;
        match operation {
            SendFirst | SendMiddle | SendLast | SendLastImmediate | SendOnly | SendOnlyImmediate
            | SendLastInvalidate | SendOnlyInvalidate => self.execute_send(packet, memory),
            WriteFirst | WriteMiddle | WriteLast | WriteLastImmediate | WriteOnly | WriteOnlyImmediate => {
                self.execute_write(packet, memory)
            }
            ReadRequest => self.execute_read(&packet.header, memory),
            CompareSwap | FetchAdd => self.execute_atomic(&packet.header, memory),
            // Answers don't come here.
            _ => Done::Refused(Refusal::InvalidRequest),
        }
    }

    fn execute_send<M: Memory>(&mut self, packet: &Packet<'_>, memory: &mut M) -> Done {
        let header = &packet.header;
        let operation = header.operation;
        let last = !matches!(operation, Operation::SendFirst | Operation::SendMiddle);
        let (begun, mut offset) = match self.responder.incoming {
            Incoming::None => (None, 0),
            Incoming::Send { offset, capacity } => (Some(capacity), offset),
            Incoming::Write { .. } | Incoming::Drop => return Done::Refused(Refusal::InvalidRequest),
        };
        let fits = self.payload_fits(packet, last);
        if begun.is_some() == operation.begins() || !fits {
            return Done::Refused(Refusal::InvalidRequest);
        }
        let capacity = match begun {
            Some(capacity) => capacity,
            None => match memory.take_receive() {
                Ok(capacity) => capacity,
                Err(why) => return why.into(),
            },
        };
        let before = std::mem::replace(&mut self.responder.incoming, Incoming::None);
        let end = offset + packet.payload.len() as u64;
        if end > capacity {
            self.counters.resp_local_length_error += 1;
            if self.config.reliability == Reliability::Reliable {
                memory.fail_receive(Status::LocalLength);
            } else {
                // The message is dropped, and the receive waits for the next.
                memory.keep_receive();
            }
            return Done::Refused(Refusal::InvalidRequest);
        }
        if !packet.payload.is_empty()
            && let Err(unmoved) = memory.place_receive(offset, packet.payload)
        {
            let Unmoved::Failed(status) = unmoved else {
                self.responder.incoming = before;
                return Done::NotHere;
            };
            if status == Status::Flushed {
                self.responder.incoming = before;
                return Done::Gone;
            }
            memory.fail_receive(status);
            return Done::RefusedSilently(Refusal::Operation);
        }
        offset = end;
        self.responder.expected += 1;
        if !last {
            self.responder.incoming = Incoming::Send { offset, capacity };
            return Done::Yes;
        }
        let mut received = Received {
            operation: ReceivedOperation::Send,
            length: u32::try_from(offset).unwrap_or(u32::MAX),
            immediate: None,
            invalidated: None,
            solicited: header.solicited,
        };
        match operation {
            Operation::SendLastImmediate | Operation::SendOnlyImmediate => {
                received.immediate = Some(header.immediate);
            }
            Operation::SendLastInvalidate | Operation::SendOnlyInvalidate => {
                let key = u32::from_be_bytes(header.immediate);
                if let Err(refusal) = memory.invalidate(key) {
                    self.responder.expected -= 1;
                    if refusal == Refusal::Gone {
                        self.responder.incoming = before;
                        return Done::Gone;
                    }
                    memory.fail_receive(Status::RemoteInvalidRequest);
                    return Done::Refused(refusal);
                }
                received.invalidated = Some(key);
            }
            _ => {}
        }
        self.responder.completed();
        self.counters.rx_send_requests += 1;
        memory.complete_receive(&received);
        Done::Yes
    }

    fn execute_write<M: Memory>(&mut self, packet: &Packet<'_>, memory: &mut M) -> Done {
        use Operation::{WriteFirst, WriteLastImmediate, WriteMiddle, WriteOnlyImmediate};
        let header = &packet.header;
        let operation = header.operation;
        let last = !matches!(operation, WriteFirst | WriteMiddle);
        let (remote, length, offset) = match self.responder.incoming {
            Incoming::None if operation.begins() => (remote_of(header), header.reth.length, 0),
            Incoming::Write { remote, length, offset } if !operation.begins() => (remote, length, offset),
            _ => return Done::Refused(Refusal::InvalidRequest),
        };
        let end = offset + packet.payload.len() as u64;
        let whole = if last { end == u64::from(length) } else { end < u64::from(length) };
        if !self.payload_fits(packet, last) || !whole || length > MOST_MESSAGE {
            return Done::Refused(Refusal::InvalidRequest);
        }
        if let Err(refusal) = memory.write(remote, u64::from(length), offset, packet.payload) {
            return refusal.into();
        }
        let immediate = matches!(operation, WriteLastImmediate | WriteOnlyImmediate);
        if immediate {
            // Only now a receive is needed. Without one, the packet comes again and is written again.
            if let Err(why) = memory.take_receive() {
                return why.into();
            }
        }
        let responder = &mut self.responder;
        responder.expected += 1;
        if !last {
            responder.incoming = Incoming::Write { remote, length, offset: end };
            return Done::Yes;
        }
        responder.incoming = Incoming::None;
        responder.completed();
        self.counters.rx_write_requests += 1;
        if immediate {
            memory.complete_receive(&Received {
                operation: ReceivedOperation::WriteImmediate,
                length,
                immediate: Some(header.immediate),
                invalidated: None,
                solicited: header.solicited,
            });
        }
        Done::Yes
    }

    fn execute_read<M: Memory>(&mut self, header: &Header, memory: &mut M) -> Done {
        let length = header.reth.length;
        let remote = remote_of(header);
        if self.responder.incoming != Incoming::None || length > MOST_MESSAGE || !self.make_room() {
            return Done::Refused(Refusal::InvalidRequest);
        }
        if let Err(refusal) = memory.read(remote, u64::from(length), 0, &mut []) {
            return refusal.into();
        }
        self.counters.rx_read_requests += 1;
        let packets = packets_of(length, self.config.mtu.bytes());
        self.remember(packets, Answer::Read { remote, length, next: 0, start: 0 });
        Done::Yes
    }

    fn execute_atomic<M: Memory>(&mut self, header: &Header, memory: &mut M) -> Done {
        let remote = remote_of(header);
        let aligned = remote.address.is_multiple_of(8);
        if self.responder.incoming != Incoming::None || !aligned || !self.make_room() {
            return Done::Refused(Refusal::InvalidRequest);
        }
        match memory.atomic(remote, atomic_of(header)) {
            Ok(original) => {
                self.counters.rx_atomic_requests += 1;
                self.remember(1, Answer::Atomic { original });
                Done::Yes
            }
            Err(refusal) => refusal.into(),
        }
    }

    /// Whether there is room for one more READ or atomic. The oldest makes room once its answer has left: a peer that has more
    /// outstanding than was agreed on is at fault.
    fn make_room(&mut self) -> bool {
        let responder = &mut self.responder;
        let room = usize::from(self.config.max_dest_rd_atomic);
        if responder.resources.len() < room {
            return true;
        }
        match responder.resources.front() {
            Some(oldest) if oldest.answered => {
                responder.due -= usize::from(oldest.due);
                responder.resources.pop_front();
                true
            }
            _ => false,
        }
    }

    fn remember(&mut self, packets: u32, answer: Answer) {
        let responder = &mut self.responder;
        let first = responder.expected;
        responder.resources.push_back(Resource { first, packets, answer, answered: false, due: true });
        responder.due += 1;
        responder.expected += u64::from(packets);
        responder.completed();
        // The answer acknowledges everything before it.
        responder.tail = Tail::Nothing;
    }

    /// Whether a payload has a length that its place in the message allows.
    #[inline]
    fn payload_fits(&self, packet: &Packet<'_>, last: bool) -> bool {
        let mtu = self.config.mtu.bytes() as usize;
        let len = packet.payload.len();
        if last { len <= mtu && (packet.header.operation.begins() || len > 0) } else { len == mtu }
    }
}

/// Whether the answer is more than an acknowledgement.
#[inline]
fn is_answered(operation: Operation) -> bool {
    matches!(operation, Operation::ReadRequest | Operation::CompareSwap | Operation::FetchAdd)
}

/// Where a one-sided request goes.
#[inline]
fn remote_of(header: &Header) -> Remote {
    if matches!(header.operation, Operation::CompareSwap | Operation::FetchAdd) {
        Remote { address: header.atomic.address, rkey: header.atomic.rkey }
    } else {
        Remote { address: header.reth.address, rkey: header.reth.rkey }
    }
}

fn atomic_of(header: &Header) -> Atomic {
    match header.operation {
        Operation::CompareSwap => {
            Atomic::CompareSwap { compare: header.atomic.compare, swap: header.atomic.swap_add }
        }
        _ => Atomic::FetchAdd { add: header.atomic.swap_add },
    }
}
