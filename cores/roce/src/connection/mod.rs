//! A connection: requester and responder of one queue pair.
//!
//! ```text
//!   post ───▶ queue ──▶ transmit ──▶ request packets ──────▶ receive ──▶ Memory::write, read, atomic, ..._receive
//!               ▲          ▲                                    │
//!               │          └── una ≤ next ≤ sent                ▼
//!   complete ◀──┴─────────── receive ◀─── responses ◀───── transmit: READ responses and atomics' results by PSN,
//!                                                          then one acknowledgement or NAK for all before it
//! ```
//!
//! Three PSNs are the requester's state. `una` is the oldest unacknowledged PSN, `next` the next to send, and `sent` the first that was
//! never sent. To retransmit, the requester sets `next = una` (go-back-N). Request, offset and opcode of a packet follow from its PSN. So a
//! retransmitted packet is identical to the first, except that a READ request begins at its first missing byte.

mod answers;
mod fates;
mod replies;
mod requester;
mod responder;
mod restore;
#[cfg(test)]
mod tests;
mod unreliable;

use std::collections::VecDeque;

use crate::config::{Config, InvalidConfig, MOST_WINDOW, Plant, Reliability};
use crate::congestion::{Parameters, Sender};
use crate::counters::Counters;
use crate::memory::Memory;
use crate::output::Output;
use crate::packet::{Operation, Packet, Service, Syndrome};
use crate::psn;
use crate::request::{Kind, MOST_MESSAGE, PostError, Request};
use crate::status::{Event, Status, Unmoved};
use crate::timing;

pub use fates::Fate;
use requester::Requester;
use responder::{Responder, Tail};

/// Whether a connection is usable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum State {
    /// Both directions work.
    Ready,
    /// Unreliable only: the send side has failed, the receive side still works.
    SendFailed,
    /// Failed. A reliable connection still repeats the NAK when the peer retransmits.
    Failed,
}

/// Attributes that are set when the queue pair may send (RTR to RTS), or change later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendAttributes {
    /// First PSN to send.
    pub sq_psn: u32,
    /// Local ACK timeout code, 5 bits.
    pub timeout: u8,
    /// Retransmissions without progress.
    pub retry_count: u8,
    /// RNR waits; 7 is no limit.
    pub rnr_retry: u8,
    /// Limit of outstanding READs and atomics.
    pub max_rd_atomic: u8,
}

/// What the network or the receiver reports with a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Arrival {
    /// The network marked it: congestion experienced.
    pub congested: bool,
    /// The receiver asks the sender for a lower rate: its pre-copy can't keep up with the writes to its memory.
    pub too_fast: bool,
}

/// One queue pair's reliable or unreliable connection. About 600 bytes and its queues, which `max_requests` and `max_dest_rd_atomic` bound
/// whatever the peer sends.
#[derive(Debug, Clone, PartialEq)]
pub struct Connection {
    config: Config,
    state: State,
    suspended: bool,
    /// When it was suspended; timers resume with the rest that they had then.
    frozen_at: u64,
    requester: Requester,
    responder: Responder,
    sender: Option<Sender>,
    /// A congestion notification is due.
    notify: bool,
    /// When the next congestion notification may be sent.
    next_notification: u64,
    /// Alternates which of responses and requests are sent first, so that neither side starves.
    replies_first: bool,
    counters: Counters,
}

impl Connection {
    /// A connection that has sent and received nothing.
    ///
    /// # Errors
    /// [`InvalidConfig`] when an attribute is out of range.
    pub fn new(config: Config) -> Result<Self, InvalidConfig> {
        config.check()?;
        Ok(Self {
            state: State::Ready,
            suspended: false,
            frozen_at: 0,
            requester: Requester::new(&config),
            responder: Responder::new(&config),
            sender: config.congestion.as_ref().map(Sender::new),
            notify: false,
            next_notification: 0,
            replies_first: false,
            counters: Counters::default(),
            config,
        })
    }

    /// Appends a request to the send queue.
    ///
    /// # Errors
    /// When the queue is full, the connection has failed, or it can't execute this request.
    #[inline]
    pub fn post(&mut self, request: Request) -> Result<(), PostError> {
        if self.state != State::Ready {
            return Err(PostError::Failed);
        }
        if request.length > MOST_MESSAGE {
            return Err(PostError::TooLong(request.length));
        }
        let reliable = self.config.reliability == Reliability::Reliable;
        match request.kind {
            Kind::Read { .. } | Kind::CompareSwap { .. } | Kind::FetchAdd { .. } if !reliable => {
                return Err(PostError::Unsupported);
            }
            Kind::Send { invalidate: Some(_), immediate } if !reliable || immediate.is_some() => {
                return Err(PostError::Unsupported);
            }
            _ => {}
        }
        self.requester.post(&self.config, request)
    }

    /// How many more requests [`Connection::post`] accepts.
    #[inline]
    #[must_use]
    pub fn room(&self) -> usize {
        (self.config.max_requests as usize).saturating_sub(self.requester.queue.len())
    }

    /// Processes a received packet, from the BTH to the pad, without ICRC. The caller has verified the sender, and that the destination
    /// queue pair is this one. Otherwise the bytes may be hostile.
    #[inline]
    pub fn receive<M: Memory>(&mut self, now: u64, bytes: &[u8], arrival: Arrival, memory: &mut M) {
        let Ok(packet) = Packet::parse(bytes) else {
            self.counters.dropped_packets += 1;
            return;
        };
        self.counters.received_packets += 1;
        self.counters.received_bytes += bytes.len() as u64;
        self.receive_parsed(now, &packet, arrival, memory);
    }

    /// As [`Connection::receive`], for a packet that is parsed already.
    pub fn receive_parsed<M: Memory>(
        &mut self,
        now: u64,
        packet: &Packet<'_>,
        arrival: Arrival,
        memory: &mut M,
    ) {
        let header = &packet.header;
        let service = match self.config.reliability {
            Reliability::Reliable => Service::Rc,
            Reliability::Unreliable => Service::Uc,
        };
        if header.service == Service::Congestion {
            self.notified(now);
            return;
        }
        // Compares all but the membership bit (15): at least one side must be a full member, and on Ethernet all are.
        if header.service != service || (header.pkey ^ self.config.pkey) & 0x7FFF != 0 {
            self.counters.dropped_packets += 1;
            return;
        }
        if arrival.congested {
            self.counters.np_ecn_marked_roce_packets += 1;
            if let Some(parameters) = &self.config.congestion {
                self.notify_by(now, parameters.notification_interval);
            }
        }
        if arrival.too_fast {
            let parameters = self.config.congestion.unwrap_or_default();
            self.notify_by(now, parameters.notification_interval);
        }
        if header.operation.is_response() {
            if self.state == State::Ready {
                self.receive_answer(now, packet, memory);
            } else {
                self.counters.dropped_packets += 1;
            }
        } else if service == Service::Rc {
            self.receive_request(packet, memory);
        } else {
            self.receive_unreliable(packet, memory);
        }
    }

    /// Schedules a congestion notification, unless one was sent within the interval.
    fn notify_by(&mut self, now: u64, interval: u64) {
        if now >= self.next_notification {
            self.next_notification = now.saturating_add(interval);
            self.notify = true;
        }
    }

    /// Handles a congestion notification. Without congestion control no packet is marked, but the receiver may still notify
    /// ([`Arrival::too_fast`]). The first such notification enables the sender's rate control with default parameters.
    fn notified(&mut self, now: u64) {
        if self.sender.is_none() {
            let parameters = *self.config.congestion.get_or_insert_default();
            self.sender = Some(Sender::new(&parameters));
        }
        if let (Some(parameters), Some(sender)) = (&self.config.congestion, &mut self.sender) {
            self.counters.rp_cnp_handled += 1;
            sender.notified(parameters, now);
        }
    }

    /// Writes packets until `out` is full or nothing is left to send now. May also complete requests: unreliable and local ones, and those
    /// whose memory is gone.
    pub fn transmit<M: Memory, O: Output>(&mut self, now: u64, memory: &mut M, out: &mut O) {
        if self.suspended {
            return;
        }
        if let (Some(parameters), Some(sender)) = (&self.config.congestion, &mut self.sender) {
            sender.advance(parameters, now);
        }
        if self.notify && !self.send_notification(out) {
            return;
        }
        let sent = self.counters.sent_packets;
        if self.replies_first {
            let room = self.send_replies(now, memory, out);
            self.replies_first = self.counters.sent_packets == sent;
            if room {
                self.send_requests(now, memory, out);
            }
        } else {
            let room = self.send_requests(now, memory, out);
            self.replies_first = self.counters.sent_packets != sent;
            if room {
                self.send_replies(now, memory, out);
            }
        }
    }

    /// Whether [`Connection::transmit`] would send something now. May be true in vain.
    #[inline]
    #[must_use]
    pub fn wants_transmit(&self, now: u64) -> bool {
        if self.suspended {
            return false;
        }
        let paced = self.sender.as_ref().is_some_and(|sender| !sender.may_send(now));
        self.notify || self.has_replies(paced) || (!paced && self.has_requests(now))
    }

    /// Latest time of the next call of [`Connection::expired`], with [`Connection::transmit`] after it; `None` when no timer runs.
    #[inline]
    #[must_use]
    pub fn timeout(&self) -> Option<u64> {
        if self.suspended {
            return None;
        }
        let requester = &self.requester;
        let mut first = requester.rnr_until.or(requester.deadline).filter(|_| !requester.stalled);
        if let Some(sender) = &self.sender
            && (self.has_replies(false) || (requester.rnr_until.is_none() && self.has_requests(u64::MAX)))
        {
            first = Some(first.map_or(sender.next, |first| first.min(sender.next)));
        }
        first
    }

    /// Acts on timers that expired up to `now`.
    pub fn expired<M: Memory>(&mut self, now: u64, memory: &mut M) {
        if self.suspended || self.state != State::Ready || self.requester.stalled {
            return;
        }
        let requester = &mut self.requester;
        if requester.rnr_until.is_some_and(|until| until <= now) {
            requester.rnr_until = None;
        }
        if requester.deadline.is_some_and(|deadline| deadline <= now) {
            self.timed_out(memory);
        }
    }

    /// Notifies the connection that a receive was posted. If this end sent an RNR NAK, it repeats its last acknowledgement. Causeway's
    /// requester ends its RNR wait then; another requester ignores the repetition and waits its full time. Call `transmit` after it.
    #[inline]
    pub fn receive_posted(&mut self) {
        let responder = &mut self.responder;
        if responder.awaits_receive && responder.tail == Tail::Nothing {
            responder.awaits_receive = false;
            responder.tail = Tail::Ack;
        }
    }

    /// Closes the connection: the queue pair is gone or in the error state. All requests complete as flushed, and no request is executed
    /// any more. Executed requests are still acknowledged.
    pub fn fail<M: Memory>(&mut self, memory: &mut M) {
        self.responder.close();
        if self.state != State::Failed {
            self.state = State::Failed;
            self.flush(Status::Flushed, memory);
            memory.event(Event::Failed);
        }
    }

    /// Continues after not-present memory arrived ([`Unmoved::NotHere`], [`Refusal::NotHere`]). The responder requests the dropped packet
    /// with a NAK, and its READ responses continue. The requester retransmits from its oldest incomplete request; this end counts that as
    /// no retry. Call `transmit` after it.
    pub fn memory_came(&mut self) {
        let responder = &mut self.responder;
        responder.stalled = false;
        let asks = std::mem::take(&mut responder.missed) && self.state == State::Ready;
        if asks && self.config.reliability == Reliability::Reliable && responder.tail == Tail::Nothing {
            responder.nak_sent = true;
            self.counters.seq_nak_sent += 1;
            let psn = responder.expected;
            responder.tail = Tail::Nak { syndrome: Syndrome::SequenceError.encode(), psn };
        }
        if std::mem::take(&mut self.requester.stalled) {
            self.requester.deadline = None;
            self.requester.go_back();
        }
    }

    /// Stops sending until the not-present memory of a request arrives, since responses come in order.
    fn stall(&mut self) {
        self.requester.stalled = true;
        self.requester.deadline = None;
    }

    /// Suspends the connection: it sends nothing, and its timers stop. It still processes received packets.
    pub fn suspend(&mut self, now: u64) {
        if !self.suspended {
            self.suspended = true;
            self.frozen_at = now;
        }
    }

    /// Resumes after [`Connection::suspend`]. Retransmits all unacknowledged packets at once, which counts as no retry: either side may
    /// have lost packets meanwhile.
    pub fn resume(&mut self, now: u64) {
        if !self.suspended {
            return;
        }
        self.suspended = false;
        let shift = now.saturating_sub(self.frozen_at);
        if let Some(until) = &mut self.requester.rnr_until {
            *until = until.saturating_add(shift);
        }
        self.requester.deadline = None;
        self.requester.go_back();
    }

    /// Whether it is suspended.
    #[must_use]
    pub fn is_suspended(&self) -> bool {
        self.suspended
    }

    /// Whether it is usable.
    #[inline]
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// Whether the send queue is empty.
    #[inline]
    #[must_use]
    pub fn is_drained(&self) -> bool {
        self.requester.queue.is_empty()
    }

    /// Number of requests that are not complete.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.requester.queue.len()
    }

    /// Attributes; the PSNs are the initial ones.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The connection's counters.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The next PSN that will be sent for the first time, and the next expected one; 24 bits each.
    #[must_use]
    pub fn psns(&self) -> (u32, u32) {
        (psn::wire(self.requester.sent), psn::wire(self.responder.expected))
    }

    /// The rate that congestion control allows now, bytes per second; `None` while it is off.
    #[must_use]
    pub fn rate(&self) -> Option<f64> {
        self.sender.map(|sender| sender.rate)
    }

    /// Sets the attributes of the transition to RTS. `sq_psn` and `max_rd_atomic` change only while nothing was posted yet; returns whether
    /// they did.
    pub fn set_send(&mut self, attributes: &SendAttributes) -> bool {
        self.config.timeout = attributes.timeout;
        self.config.retry_count = attributes.retry_count;
        self.config.rnr_retry = attributes.rnr_retry;
        let fresh = self.requester.queue.is_empty()
            && self.requester.sent == psn::first(self.config.sq_psn)
            && self.requester.una == self.requester.sent;
        if fresh {
            self.config.sq_psn = attributes.sq_psn;
            self.config.max_rd_atomic = attributes.max_rd_atomic;
            self.requester = Requester::new(&self.config);
        } else if self.requester.queue.is_empty() {
            self.config.max_rd_atomic = attributes.max_rd_atomic;
        }
        fresh
    }

    /// Sets the RNR timer code for this end's NAKs.
    pub fn set_min_rnr_timer(&mut self, code: u8) {
        self.config.min_rnr_timer = code;
    }

    /// Injects a bug, for tests of tests.
    #[doc(hidden)]
    pub fn plant(&mut self, plant: Plant) {
        self.config.plant = plant;
    }

    fn service(&self) -> Service {
        match self.config.reliability {
            Reliability::Reliable => Service::Rc,
            Reliability::Unreliable => Service::Uc,
        }
    }

    /// Counts a packet that was sent, and charges it to the rate.
    #[inline]
    fn account(&mut self, now: u64, bytes: usize) {
        self.counters.sent_packets += 1;
        self.counters.sent_bytes += bytes as u64;
        if let (Some(parameters), Some(sender)) = (&self.config.congestion, &mut self.sender) {
            sender.sent(parameters, now, bytes);
        }
    }

    #[inline]
    fn may_send_data(&self, now: u64) -> bool {
        self.sender.as_ref().is_none_or(|sender| sender.may_send(now))
    }
}

/// Number of packets of a message.
#[inline]
fn packets_of(length: u32, mtu: u32) -> u32 {
    length.div_ceil(mtu).max(1)
}
