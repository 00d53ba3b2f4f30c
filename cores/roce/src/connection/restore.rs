//! Saving and restoring (see [`crate::saved`]).

use super::requester::Pending;
use super::responder::{Answer, Incoming, Resource, Tail};
use super::*;
use crate::config::MOST_REQUESTS;
use crate::saved::{self, InvalidState};

impl Connection {
    /// Saves the whole state. Suspend the connection first, and feed nothing in afterwards.
    #[must_use]
    pub fn save(&self, now: u64) -> saved::Connection {
        // Timers don't advance while suspended.
        let now = if self.suspended { self.frozen_at } else { now };
        let requester = &self.requester;
        saved::Connection {
            version: saved::VERSION,
            config: self.config,
            state: self.state,
            suspended: self.suspended,
            requester: saved::Requester {
                queue: requester
                    .queue
                    .iter()
                    .map(|pending| saved::Pending {
                        request: pending.request,
                        error: pending.error,
                        executed: pending.executed,
                    })
                    .collect(),
                first: requester.queue.front().map_or(requester.end, |front| front.first),
                una: requester.una,
                next: requester.next,
                sent: requester.sent,
                cursor: u32::try_from(requester.cursor).unwrap_or(u32::MAX),
                limit: requester.limit,
                grown: requester.grown,
                cut_at: requester.cut_at,
                went_back: requester.went_back,
                retries: requester.retries,
                timeouts: requester.timeouts,
                rnr_waits: requester.rnr_waits,
                rnr_wait: requester.rnr_until.map(|until| until.saturating_sub(now)),
                deadline: requester.deadline.map(|deadline| deadline.saturating_sub(now)),
            },
            responder: self.responder.save(),
            sender: self.sender.map(|sender| saved::Sender {
                rate: sender.rate,
                target: sender.target,
                alpha: sender.alpha,
                estimated: now.saturating_sub(sender.estimated),
                increased: now.saturating_sub(sender.increased),
                bytes: sender.bytes,
                time_steps: sender.time_steps,
                byte_steps: sender.byte_steps,
                next: sender.next.saturating_sub(now),
            }),
            notify: self.notify,
            next_notification: self.next_notification.saturating_sub(now),
            counters: self.counters,
        }
    }

    /// Restores a connection.
    ///
    /// # Errors
    /// When the state is invalid: it may come from a damaged file, or from a peer.
    pub fn restore(saved: &saved::Connection, now: u64) -> Result<Self, InvalidState> {
        if saved.version != saved::VERSION {
            return Err(InvalidState::Version(saved.version));
        }
        let mut connection = Self::new(saved.config)?;
        connection.state = saved.state;
        connection.suspended = saved.suspended;
        connection.frozen_at = now;
        connection.restore_requester(&saved.requester, now)?;
        connection.responder = Responder::restore(&saved.responder, &saved.config)?;
        connection.sender = match (&saved.config.congestion, &saved.sender) {
            (None, None) => None,
            (Some(parameters), Some(sender)) => Some(restore_sender(parameters, sender, now)?),
            _ => return Err(InvalidState::Field("congestion control")),
        };
        connection.notify = saved.notify;
        connection.next_notification = now.saturating_add(saved.next_notification);
        connection.counters = saved.counters;
        Ok(connection)
    }

    fn restore_requester(&mut self, saved: &saved::Requester, now: u64) -> Result<(), InvalidState> {
        let config = self.config;
        if saved.queue.len() > config.max_requests.min(MOST_REQUESTS) as usize {
            return Err(InvalidState::Field("number of requests"));
        }
        let low = psn::first(0);
        let sane = saved.first >= low
            && saved.una >= saved.first
            && saved.next >= saved.una
            && saved.sent >= saved.next
            && saved.sent < u64::MAX / 2
            && saved.sent - saved.una <= u64::from(MOST_WINDOW).max(u64::from(self.requester.window))
            && saved.cursor as usize <= saved.queue.len();
        if !sane {
            return Err(InvalidState::Field("PSN of the requester"));
        }
        let requester = &mut self.requester;
        requester.end = saved.first;
        for pending in &saved.queue {
            if pending.request.length > MOST_MESSAGE {
                return Err(InvalidState::Field("length of a request"));
            }
            if requester.post(&config, pending.request).is_err() {
                return Err(InvalidState::Field("request"));
            }
            if let Some(last) = requester.queue.back_mut() {
                *last = Pending { error: pending.error, executed: pending.executed, ..*last };
            }
        }
        requester.una = saved.una;
        requester.next = saved.next;
        requester.sent = saved.sent;
        requester.cursor = saved.cursor as usize;
        requester.limit = saved.limit.clamp(1, requester.window);
        requester.grown = saved.grown;
        requester.cut_at = saved.cut_at;
        requester.went_back = saved.went_back;
        requester.retries = saved.retries;
        requester.timeouts = saved.timeouts;
        requester.rnr_waits = saved.rnr_waits;
        requester.rnr_until = saved.rnr_wait.map(|wait| now.saturating_add(wait));
        requester.deadline = saved.deadline.map(|wait| now.saturating_add(wait));
        let within =
            |position: u64, pending: &Pending| position >= pending.first && position <= pending.end();
        let front_fits = requester.queue.front().is_none_or(|front| within(saved.una, front));
        let cursor_fits = match requester.queue.get(requester.cursor) {
            Some(at) => within(saved.next, at),
            None => saved.next == requester.end,
        };
        let all_fits =
            saved.sent <= requester.end && (!requester.queue.is_empty() || saved.una == requester.end);
        if !front_fits || !cursor_fits || !all_fits {
            return Err(InvalidState::Field("position in the queue"));
        }
        requester.reads = requester.count_reads();
        Ok(())
    }
}

impl Requester {
    /// READ requests and atomics in `una..next`.
    pub(super) fn count_reads(&self) -> u32 {
        let mut reads = 0;
        for pending in self.queue.iter().filter(|pending| pending.is_answered()) {
            let (from, to) = (self.una.max(pending.first), self.next.min(pending.end()));
            if from >= to {
                continue;
            }
            let chunk = u64::from(self.chunk);
            let parts = (to - pending.first).div_ceil(chunk) - (from - pending.first) / chunk;
            reads += u32::try_from(parts).unwrap_or(0);
        }
        reads
    }
}

impl Responder {
    fn save(&self) -> saved::Responder {
        saved::Responder {
            expected: self.expected,
            msn: self.msn,
            incoming: match self.incoming {
                Incoming::None => saved::Incoming::None,
                Incoming::Send { offset, capacity } => saved::Incoming::Send { offset, capacity },
                Incoming::Write { remote, length, offset } => {
                    saved::Incoming::Write { remote, length, offset }
                }
                Incoming::Drop => saved::Incoming::Drop,
            },
            resources: self
                .resources
                .iter()
                .map(|resource| saved::Resource {
                    first: resource.first,
                    packets: resource.packets,
                    answer: match resource.answer {
                        Answer::Read { remote, length, next, start } => {
                            saved::Answer::Read { remote, length, next, start }
                        }
                        Answer::Atomic { original } => saved::Answer::Atomic { original },
                    },
                    answered: resource.answered,
                    due: resource.due,
                })
                .collect(),
            tail: match self.tail {
                Tail::Nothing => saved::Tail::Nothing,
                Tail::Ack => saved::Tail::Ack,
                Tail::AckUpTo(psn) => saved::Tail::AckUpTo(psn),
                Tail::Nak { syndrome, psn } => saved::Tail::Nak { syndrome, psn },
            },
            nak_sent: self.nak_sent,
            awaits_receive: self.awaits_receive,
            established: self.established,
            refused: self.refused,
        }
    }

    fn restore(saved: &saved::Responder, config: &Config) -> Result<Self, InvalidState> {
        let range = psn::first(0)..u64::MAX / 2;
        if !range.contains(&saved.expected) {
            return Err(InvalidState::Field("expected PSN"));
        }
        if saved.resources.len() > usize::from(config.max_dest_rd_atomic) {
            return Err(InvalidState::Field("number of READs and atomics"));
        }
        let incoming = match saved.incoming {
            saved::Incoming::None => Incoming::None,
            saved::Incoming::Drop => Incoming::Drop,
            saved::Incoming::Send { offset, capacity } => {
                if offset > capacity || offset > u64::from(MOST_MESSAGE) {
                    return Err(InvalidState::Field("incoming SEND"));
                }
                Incoming::Send { offset, capacity }
            }
            saved::Incoming::Write { remote, length, offset } => {
                if offset > u64::from(length) || length > MOST_MESSAGE {
                    return Err(InvalidState::Field("incoming WRITE"));
                }
                Incoming::Write { remote, length, offset }
            }
        };
        let mut responder = Self { expected: saved.expected, incoming, ..Self::new(config) };
        let mut end = 0;
        for resource in &saved.resources {
            let answer = match resource.answer {
                saved::Answer::Atomic { original } => Answer::Atomic { original },
                saved::Answer::Read { remote, length, next, start } => {
                    let packets = packets_of(length.min(MOST_MESSAGE), config.mtu.bytes());
                    if length > MOST_MESSAGE || packets != resource.packets || next > packets || start > next
                    {
                        return Err(InvalidState::Field("READ"));
                    }
                    Answer::Read { remote, length, next, start }
                }
            };
            let atomic = matches!(answer, Answer::Atomic { .. });
            let fits = resource.first >= end
                && resource.first <= saved.expected
                && u64::from(resource.packets) <= saved.expected - resource.first
                && (!atomic || resource.packets == 1);
            if !fits {
                return Err(InvalidState::Field("PSN of a READ or atomic"));
            }
            end = resource.first + u64::from(resource.packets);
            responder.due += usize::from(resource.due);
            responder.resources.push_back(Resource {
                first: resource.first,
                packets: resource.packets,
                answer,
                answered: resource.answered,
                due: resource.due,
            });
        }
        responder.msn = saved.msn & psn::MASK;
        responder.tail = match saved.tail {
            saved::Tail::Nothing => Tail::Nothing,
            saved::Tail::Ack => Tail::Ack,
            saved::Tail::AckUpTo(psn) => Tail::AckUpTo(psn),
            saved::Tail::Nak { syndrome, psn } => Tail::Nak { syndrome, psn },
        };
        responder.nak_sent = saved.nak_sent;
        responder.awaits_receive = saved.awaits_receive;
        responder.established = saved.established;
        responder.refused = saved.refused;
        Ok(responder)
    }
}

fn restore_sender(parameters: &Parameters, saved: &saved::Sender, now: u64) -> Result<Sender, InvalidState> {
    let rate = |rate: f64| rate.is_finite() && rate > 0.0 && rate <= parameters.line_rate;
    if !rate(saved.rate) || !rate(saved.target) || !(0.0..=1.0).contains(&saved.alpha) {
        return Err(InvalidState::Field("rate"));
    }
    Ok(Sender {
        rate: saved.rate,
        target: saved.target,
        alpha: saved.alpha,
        estimated: now.saturating_sub(saved.estimated),
        increased: now.saturating_sub(saved.increased),
        bytes: saved.bytes.min(parameters.increase_bytes),
        time_steps: saved.time_steps,
        byte_steps: saved.byte_steps,
        next: now.saturating_add(saved.next),
    })
}
