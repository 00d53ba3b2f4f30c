//! Polling: turns of the active queue pairs.

use std::collections::VecDeque;

use crate::attributes::QpState;
use crate::objects::{Current, Path, Progress as Done, QpRef, Wait};
use crate::provider::{Fetched, Provider, SendQueue, Sink};
use crate::saved::Kind;
use crate::work::{AsyncEvent, CompletedOperation, Malformed, Status};

use super::failure::completed;
use super::timers::{ack_timeout_ns, rnr_timer_ns};
use super::{Engine, Progress};
use crate::local::Step;

/// Bytes after which a turn publishes its completions before it continues. With so many bytes one store more doesn't matter, and the guest
/// would wait longer than for a few small messages.
const SETTLED_BYTES: u64 = 4096;

/// Lower bound of turns without work for a queue pair among many.
const LEAST_EMPTY_LOOKS: u32 = 2;
/// Limit of turns that share the stores which publish their work, where many queue pairs are active. A round of all queue pairs takes
/// longer than this delay.
const TURNS_SHARING: u32 = 8;

/// Result of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Turn {
    /// Requests executed or flushed, and quanta.
    requests: u32,
    /// Bytes moved.
    bytes: u64,
    /// There may be more work: the queue pair stays on the active list.
    stay: bool,
}

impl<P: Provider> Engine<P> {
    /// Does a bounded amount of work. Call it after verbs and doorbells, since it delivers their events, and again at [`Progress::next`] at
    /// the latest. `now`, in nanoseconds, must not decrease.
    pub fn poll(&mut self, now: u64, sink: &mut impl Sink) -> Progress {
        let elapsed = now.saturating_sub(self.now);
        self.now = self.now.max(now);
        let mut worked = self.run_timers();
        self.run_watches();
        self.retry_events();
        self.run_scans(elapsed, self.idle);
        let mut requests = 0;
        let mut bytes = 0;
        for _ in 0..self.active_qps.min(self.config.turns_per_poll) {
            let Some(at) = self.next_active() else { break };
            // Its own turn may activate it again: by a failure, or as the peer of another.
            if let Some(device) = self.device_mut(at.device) {
                device.quiet.forget(at.handle);
                device.marks.touch(Kind::QueuePair, at.handle);
            }
            if let Some(qp) = self.qp_mut(at) {
                qp.active = false;
            }
            self.turn_of = Some(at);
            let turn = self.turn(at);
            self.turn_of = None;
            self.unsettled_turns += 1;
            if !self.may_keep_back(turn) {
                self.settle();
            }
            requests += turn.requests;
            bytes += turn.bytes;
            if !self.failed_cqs.is_empty() {
                self.settle();
                self.run_failed_cqs();
            }
            self.deliver(sink);
            self.after_turn(at, turn);
            if bytes >= self.config.bytes_per_poll {
                break;
            }
        }
        self.settle();
        if !self.failed_cqs.is_empty() {
            self.run_failed_cqs();
        }
        self.deliver(sink);
        self.idle = requests == 0;
        worked |= requests > 0;
        Progress { worked, next: self.next(), requests }
    }

    /// Whether the work of a turn may be published together with that of the next one. An event is delivered only after its completion is
    /// published.
    #[inline]
    fn may_keep_back(&self, turn: Turn) -> bool {
        self.active_qps >= self.config.many_active
            && self.unsettled_turns < TURNS_SHARING
            && turn.bytes < SETTLED_BYTES
            && self.events.is_empty()
            && self.notifications.is_empty()
    }

    /// Latest time of the next poll.
    fn next(&self) -> Option<u64> {
        if self.active_qps > 0 || !self.scans.is_empty() {
            return Some(self.now);
        }
        let timer = self.timers.first().map(|(deadline, _)| *deadline);
        let watch = self.watched.front().map(|(due, _)| *due);
        let retry = (!self.undelivered.is_empty()).then_some(self.retry_at);
        [timer, watch, retry].into_iter().flatten().min()
    }

    /// Keeps the queue pair on the active list while turns find work, and for a few turns beyond.
    #[inline]
    fn after_turn(&mut self, at: QpRef, turn: Turn) {
        // Among many queue pairs a round is long. Thousands of turns without work would delay those that have some.
        let most = (self.config.empty_looks / (1 + self.active_qps / self.config.many_active.max(1)))
            .max(LEAST_EMPTY_LOOKS);
        let Some(qp) = self.qp_mut(at) else { return };
        if qp.active {
            return;
        }
        qp.empty_looks = if turn.requests > 0 { 0 } else { qp.empty_looks + 1 };
        if turn.stay && qp.empty_looks <= most {
            self.enlist(at);
        }
    }

    fn turn(&mut self, at: QpRef) -> Turn {
        let off = Turn { requests: 0, bytes: 0, stay: false };
        let Some(device) = self.device(at.device) else { return off };
        if !device.enabled {
            return off;
        }
        let Some(qp) = self.qp(at) else { return off };
        match qp.state {
            QpState::Reset | QpState::Init | QpState::ReadyToReceive => off,
            QpState::Error | QpState::SendQueueError => {
                let requests = self.flush_turn(at);
                Turn { requests, bytes: 0, stay: requests > 0 }
            }
            QpState::ReadyToSend | QpState::SendQueueDrained => self.send_turn(at),
        }
    }

    /// Executes requests of a send queue: several small ones, or a quantum of a large one.
    fn send_turn(&mut self, at: QpRef) -> Turn {
        let mut turn = Turn { requests: 0, bytes: 0, stay: true };
        let mut settled = 0;
        if self.is_held(at) {
            self.park(at);
            turn.stay = false;
            return turn;
        }
        while turn.requests < self.config.requests_per_turn && turn.bytes < self.quantum_bytes() {
            if turn.bytes - settled >= SETTLED_BYTES {
                settled = turn.bytes;
                self.settle();
            }
            let now = self.now;
            if self.inbound_watched > 0 && self.awaits_budget(at) {
                turn.stay = false;
                break;
            }
            let Some(device) = self.devices.get_mut(at.device as usize).and_then(|d| d.as_deref_mut()) else {
                break;
            };
            let Some(qp) = device.qps.get_mut(at.handle).filter(|qp| qp.stamp == at.stamp) else { break };
            let sending = match qp.state {
                QpState::ReadyToSend => true,
                QpState::SendQueueDrained => qp.current.is_some(),
                // It failed; the next turn flushes the rest.
                _ => return turn,
            };
            if !sending || qp.wait != Wait::None {
                turn.stay = false;
                break;
            }
            if qp.path == Path::Elsewhere && !qp.has_room_elsewhere() {
                // Continues when a transport has completed a request.
                turn.stay = false;
                break;
            }
            if let Some(until) = device.messages.blocked_until(now).max(device.bytes.blocked_until(now)) {
                if qp.current.is_some() || qp.send_queue.pending(&device.memory) {
                    self.throttle(at, until);
                    turn.stay = false;
                }
                break;
            }
            if let Some(mut current) = qp.current.take() {
                let before = current.progress.offset;
                let step = self.execute(at, &current.request, &mut current.progress);
                turn.bytes += current.progress.offset.saturating_sub(before);
                turn.requests += 1;
                if let Some(kept) = self.finish(at, step, current) {
                    turn.stay = kept;
                    break;
                }
                continue;
            }
            match qp.send_queue.fetch(&device.memory) {
                Fetched::Empty => break,
                Fetched::Request(request) => {
                    device.messages.spend(now, 1);
                    turn.requests += 1;
                    let mut progress = Done::default();
                    let step = self.execute(at, &request, &mut progress);
                    turn.bytes += progress.offset;
                    if let Step::Done { byte_len } = step {
                        let operation = completed(&request.operation);
                        self.complete_send(
                            at,
                            request.wr_id,
                            operation,
                            Status::Success,
                            byte_len,
                            request.signaled,
                        );
                        continue;
                    }
                    if step == Step::Handed {
                        self.hand_over(at, request);
                        continue;
                    }
                    let current = Box::new(Current { request, progress, behind: VecDeque::new() });
                    if let Some(kept) = self.finish(at, step, current) {
                        turn.stay = kept;
                        break;
                    }
                }
                Fetched::Malformed { wr_id, reason } => {
                    turn.requests += 1;
                    device.counters.req_inline_refused += u64::from(matches!(reason, Malformed::Inline(_)));
                    let status = Status::LocalQpOperation;
                    self.complete_send(at, wr_id, CompletedOperation::Send, status, 0, true);
                    self.fail_sender(at);
                }
                Fetched::Broken => {
                    let handle = qp.handle;
                    self.event(at.device, AsyncEvent::QpFatal(handle));
                    self.enter_error(at);
                }
            }
        }
        turn
    }

    /// Handles the result of a step of a request. `Some` ends the turn, and is whether the queue pair stays on the active list.
    fn finish(&mut self, at: QpRef, step: Step, current: Box<Current>) -> Option<bool> {
        let operation = completed(&current.request.operation);
        let (wr_id, signaled) = (current.request.wr_id, current.request.signaled);
        match step {
            Step::Done { byte_len } => {
                self.complete_send(at, wr_id, operation, Status::Success, byte_len, signaled);
                if !current.behind.is_empty() {
                    self.follow_up(at, current.behind);
                }
                if self.is_drained(at) {
                    self.drained(at);
                }
                None
            }
            Step::Failed(status) => {
                self.complete_send(at, wr_id, operation, status, 0, true);
                self.fail_sender(at);
                None
            }
            Step::More => {
                self.qp_mut(at)?.current = Some(current);
                Some(true)
            }
            Step::NoReceive { timer, at: responder } => self.no_receive(at, current, timer, responder),
            Step::NoPeer => self.no_peer(at, current),
            Step::Handed => {
                self.hand_over(at, current.request);
                if !current.behind.is_empty() {
                    self.follow_up(at, current.behind);
                }
                None
            }
            Step::Drain => {
                self.qp_mut(at)?.current = Some(current);
                self.wait(at, Wait::Outstanding, None);
                Some(false)
            }
            Step::NotHere => {
                self.qp_mut(at)?.current = Some(current);
                self.wait(at, Wait::Memory, None);
                Some(false)
            }
        }
    }

    /// Starts an RNR wait, unless the RNR retries are used up.
    fn no_receive(&mut self, at: QpRef, current: Box<Current>, timer: u8, responder: QpRef) -> Option<bool> {
        let retries = self.qp(at)?.attributes.rnr_retry;
        if retries < 7 && current.progress.rnr_waits > retries {
            if let Some(device) = self.device_mut(at.device) {
                device.counters.rnr_nak_retry_err += 1;
            }
            return self.finish(at, Step::Failed(Status::RnrRetryExceeded), current);
        }
        let qp = self.qp_mut(at)?;
        qp.current = Some(current);
        qp.counters.rnr_waits += 1;
        self.await_receive(at, responder);
        let deadline = self.now.saturating_add(rnr_timer_ns(timer));
        self.wait(at, Wait::Receive, Some(deadline));
        Some(false)
    }

    /// Starts a retry after the ACK timeout, unless the retries are used up.
    fn no_peer(&mut self, at: QpRef, current: Box<Current>) -> Option<bool> {
        let attributes = self.qp(at)?.attributes;
        if current.progress.timeouts > attributes.retry_count {
            if let Some(device) = self.device_mut(at.device) {
                device.counters.req_transport_retries_exceeded += 1;
            }
            return self.finish(at, Step::Failed(Status::RetryExceeded), current);
        }
        self.qp_mut(at)?.current = Some(current);
        let deadline = ack_timeout_ns(attributes.timeout).map(|timeout| self.now.saturating_add(timeout));
        self.wait(at, Wait::Peer, deadline);
        Some(false)
    }
}
