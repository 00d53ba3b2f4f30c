//! The responder: executing requests (IBTA volume 1, 9.7).

mod execution;

use super::*;
use crate::config::Plant;
use crate::memory::{Atomic, Remote};
use crate::packet::Header;
use crate::status::{NoReceive, Refusal};

/// The message in progress.
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
    /// Unreliable: drops the rest of this message.
    Drop,
}

/// A READ or atomic, kept so that its repetition can be answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Resource {
    /// PSN of its first packet.
    pub first: u64,
    /// Number of its PSNs.
    pub packets: u32,
    pub answer: Answer,
    /// Whether the whole response was sent once.
    pub answered: bool,
    /// Whether the response, or a rest of it, is to be sent.
    pub due: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// READ: the next packet, and the first packet of the current run.
    Read { remote: Remote, length: u32, next: u32, start: u32 },
    /// The previous value.
    Atomic { original: u64 },
}

/// The acknowledgement or NAK to send after all READ responses and atomics' results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tail {
    Nothing,
    /// Acknowledges everything accepted so far.
    Ack,
    /// Acknowledges a repeated request, up to this PSN, which lies before an unanswered READ.
    AckUpTo(u64),
    /// A NAK or RNR NAK, by syndrome, for this PSN.
    Nak {
        syndrome: u8,
        psn: u64,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Responder {
    /// Next expected PSN.
    pub expected: u64,
    /// Number of completed requests.
    pub msn: u32,
    pub incoming: Incoming,
    /// READs and atomics by PSN, oldest first.
    pub resources: VecDeque<Resource>,
    /// How many of them are to be sent.
    pub due: usize,
    pub tail: Tail,
    /// A NAK was sent for the expected packet: later packets are dropped without another.
    pub nak_sent: bool,
    /// An RNR NAK was sent for the expected packet.
    pub awaits_receive: bool,
    /// Whether a packet was accepted yet.
    pub established: bool,
    /// Syndrome and PSN of the NAK that ended the connection.
    pub refused: Option<(u8, u64)>,
    /// The expected packet was dropped because its memory is not present.
    pub missed: bool,
    /// A READ response waits for not-present memory, and so do all later responses.
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

    /// Stops executing requests and answering READs. Executed requests are still acknowledged, also when the peer repeats them. The peer
    /// must learn that its last request was executed, even if this end is closed at that moment or an acknowledgement is lost.
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

    /// Cancels the pending responses of READs and atomics, until the peer repeats the requests. Nothing beyond them is acknowledged.
    pub(super) fn withhold_answers(&mut self) {
        let unanswered = self.resources.iter().find(|found| found.due).map(|found| found.first);
        self.tail = match (self.tail, unanswered) {
            (Tail::Ack, Some(first)) if first > 0 => Tail::AckUpTo(first - 1),
            (Tail::AckUpTo(psn), Some(first)) if first > 0 => Tail::AckUpTo(psn.min(first - 1)),
            (tail, _) => tail,
        };
        // The resources stay, since later acknowledgements must not go beyond them either.
        for resource in &mut self.resources {
            resource.due = false;
        }
        self.due = 0;
    }

    fn completed(&mut self) {
        self.msn = (self.msn + 1) & psn::MASK;
    }
}

/// Outcome of executing a packet.
pub(super) enum Done {
    /// The packet is executed.
    Yes,
    /// The request is refused: the responder sends a NAK, fails the connection, and reports the refusal's event at this end.
    Refused(Refusal),
    /// Refused, and the owner has reported the error at this end already.
    RefusedSilently(Refusal),
    /// No receive is posted.
    NotReady,
    /// The queue pair is gone: as if the packet had been lost.
    Gone,
    /// Its memory is not present: as if the packet had been lost. The responder requests it when the memory arrives.
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
    /// Processes a request packet of a reliable connection.
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
                // Nor does a later packet cause a NAK.
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

    /// Refuses the request at `psn`, and fails the connection. The responder repeats the NAK whenever the peer repeats the request: if a
    /// single NAK got lost, the peer would take this end for gone. Does nothing for [`Refusal::Gone`] and [`Refusal::NotHere`].
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

    /// Processes a request packet after a refusal, or after this end was closed.
    fn receive_refused<M: Memory>(&mut self, psn: u64, packet: &Packet<'_>, memory: &mut M) {
        match self.responder.refused {
            Some((syndrome, refused)) if psn >= refused => {
                self.responder.tail = Tail::Nak { syndrome, psn: refused };
            }
            // It repeats a READ or atomic from before the refusal.
            Some(_) if is_answered(packet.header.operation) => self.repeated(psn, packet, memory),
            None if psn < self.responder.expected && !is_answered(packet.header.operation) => {
                self.repeated(psn, packet, memory);
            }
            _ => self.counters.dropped_packets += 1,
        }
    }

    /// Processes a repeated request packet. Nothing is executed twice, except that a READ reads again.
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
                    // Only up to the next READ or atomic: to acknowledge more would make the peer take its response for lost.
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

    /// Processes a repeated READ request, or one for the rest of a READ.
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

    /// Whether the payload's length is valid for the packet's position in its message.
    #[inline]
    fn payload_fits(&self, packet: &Packet<'_>, last: bool) -> bool {
        let mtu = self.config.mtu.bytes() as usize;
        let len = packet.payload.len();
        if last { len <= mtu && (packet.header.operation.begins() || len > 0) } else { len == mtu }
    }
}

/// Whether the response carries data, beyond an acknowledgement.
#[inline]
fn is_answered(operation: Operation) -> bool {
    matches!(operation, Operation::ReadRequest | Operation::CompareSwap | Operation::FetchAdd)
}

/// The remote address and key of a one-sided request.
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
