//! One connection to a peer: what waits to be written, what the peer has acknowledged, and when the connection counts as silent.
//!
//! A connection may be dead although TCP hasn't noticed: its peer lost power, or a firewall forgot it. So every message and probe is
//! acknowledged. While the oldest one has waited for [`LATE_AFTER`], messages go through the cluster service as well; after
//! [`SILENCE_TIMEOUT`] the connection is closed.
//!
//! No I/O: the caller passes the time in and writes what [`Link::poll`] returns.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::frame::{Frame, encode_message};

/// An acknowledgement that takes longer is late: five retries of the protocol.
pub(super) const LATE_AFTER: Duration = Duration::from_millis(100);
/// A connection whose peer acknowledges nothing for so long, or takes no bytes, is closed.
pub(super) const SILENCE_TIMEOUT: Duration = Duration::from_secs(3);
/// A peer is probed when it wasn't asked for an acknowledgement for so long: a dead connection is noticed before a switchover needs it.
pub(super) const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// A connection without a message in either direction for so long is closed.
pub(super) const IDLE_TIMEOUT: Duration = Duration::from_secs(120);
/// Limit of messages and probes that are queued or not acknowledged.
const MAX_UNACKNOWLEDGED: usize = 1024;
/// Limit of queued bytes.
const MAX_QUEUED_BYTES: usize = 8 << 20;
/// Bytes after which a batch is written.
const BATCH_BYTES: usize = 64 << 10;

/// What became of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sent {
    /// It is queued, and the peer acknowledges promptly.
    Prompt,
    /// It is queued, unless there is no room, and the peer is late.
    Late,
    /// There is no connection.
    No,
}

/// Why a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Closed {
    #[error("another connection takes its place, or the daemon ends")]
    Replaced,
    #[error("its peer acknowledged nothing for {} s", SILENCE_TIMEOUT.as_secs())]
    Silent,
    #[error("no message came or went for {} s", IDLE_TIMEOUT.as_secs())]
    Idle,
}

#[derive(Debug)]
struct State {
    queue: VecDeque<Vec<u8>>,
    queued_bytes: usize,
    /// When messages and probes that aren't acknowledged were queued, oldest first.
    unacknowledged: VecDeque<Instant>,
    /// Messages and probes that the peer has acknowledged.
    acknowledged: u64,
    /// Messages and probes that have come, and those of them that were acknowledged.
    received: u64,
    reported: u64,
    last_asked: Instant,
    last_message: Instant,
    closed: bool,
}

/// A connection's state, which the sending thread and the connection's task share.
#[derive(Debug)]
pub(super) struct Link {
    /// Whether this side has connected.
    pub initiated: bool,
    /// When it was established.
    pub since: Instant,
    state: Mutex<State>,
    /// Something is to be written.
    pub ready: Notify,
}

impl Link {
    pub fn new(initiated: bool, now: Instant) -> Self {
        let state = State {
            queue: VecDeque::new(),
            queued_bytes: 0,
            unacknowledged: VecDeque::new(),
            acknowledged: 0,
            received: 0,
            reported: 0,
            last_asked: now,
            last_message: now,
            closed: false,
        };
        Self { initiated, since: now, state: Mutex::new(state), ready: Notify::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a message.
    pub fn send(&self, message: &[u8], now: Instant) -> Sent {
        let mut state = self.state();
        if state.closed {
            return Sent::No;
        }
        let late = state.is_late(now);
        state.last_message = now;
        let room = state.unacknowledged.len() < MAX_UNACKNOWLEDGED
            && state.queued_bytes.saturating_add(message.len()) <= MAX_QUEUED_BYTES;
        if !room {
            return Sent::Late;
        }
        let mut frame = Vec::with_capacity(super::frame::HEADER_BYTES + message.len());
        encode_message(message, &mut frame);
        state.ask(frame, now);
        drop(state);
        self.ready.notify_one();
        if late { Sent::Late } else { Sent::Prompt }
    }

    /// Whether the peer acknowledges promptly.
    pub fn is_prompt(&self, now: Instant) -> bool {
        let state = self.state();
        !state.closed && !state.is_late(now)
    }

    /// A message or a probe has come.
    pub fn received(&self, message: bool, now: Instant) {
        let mut state = self.state();
        state.received += 1;
        if message {
            state.last_message = now;
        }
        drop(state);
        self.ready.notify_one();
    }

    /// The peer acknowledges so many messages and probes. Returns `false` if there can't be so many.
    pub fn acknowledged(&self, count: u64) -> bool {
        let mut state = self.state();
        let new = count.checked_sub(state.acknowledged).and_then(|new| usize::try_from(new).ok());
        let Some(new) = new.filter(|new| *new <= state.unacknowledged.len()) else { return false };
        state.acknowledged = count;
        state.unacknowledged.drain(..new);
        true
    }

    /// Ends the connection.
    pub fn close(&self) {
        self.state().closed = true;
        self.ready.notify_one();
    }

    /// Appends what is to be written now. Returns when to call again if nothing else happens, or why the connection ends.
    pub fn poll(&self, now: Instant, batch: &mut Vec<u8>) -> Result<Instant, Closed> {
        let mut state = self.state();
        if state.closed {
            return Err(Closed::Replaced);
        }
        if state.waits_for(now).is_some_and(|waited| waited >= SILENCE_TIMEOUT) {
            return Err(Closed::Silent);
        }
        if now.saturating_duration_since(state.last_message) >= IDLE_TIMEOUT {
            return Err(Closed::Idle);
        }
        if now.saturating_duration_since(state.last_asked) >= PROBE_INTERVAL
            && state.unacknowledged.len() < MAX_UNACKNOWLEDGED
        {
            let mut frame = Vec::new();
            Frame::Probe.encode(&mut frame);
            state.ask(frame, now);
        }
        if state.reported < state.received {
            state.reported = state.received;
            Frame::Received(state.reported).encode(batch);
        }
        while batch.len() < BATCH_BYTES
            && let Some(frame) = state.queue.pop_front()
        {
            state.queued_bytes -= frame.len();
            batch.extend_from_slice(&frame);
        }
        let silent = state.unacknowledged.front().map(|since| *since + SILENCE_TIMEOUT);
        let times =
            [Some(state.last_asked + PROBE_INTERVAL), Some(state.last_message + IDLE_TIMEOUT), silent];
        Ok(times.into_iter().flatten().min().unwrap_or(now))
    }
}

impl State {
    /// Queues a frame that the peer is to acknowledge.
    fn ask(&mut self, frame: Vec<u8>, now: Instant) {
        self.queued_bytes += frame.len();
        self.queue.push_back(frame);
        self.unacknowledged.push_back(now);
        self.last_asked = now;
    }

    /// How long the oldest message or probe hasn't been acknowledged.
    fn waits_for(&self, now: Instant) -> Option<Duration> {
        self.unacknowledged.front().map(|since| now.saturating_duration_since(*since))
    }

    fn is_late(&self, now: Instant) -> bool {
        self.waits_for(now).is_some_and(|waited| waited >= LATE_AFTER)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // For tests only.
mod tests {
    use super::super::frame::FrameReader;
    use super::*;

    const MESSAGE: [u8; nomad::wire::HEADER_BYTES] = [7; nomad::wire::HEADER_BYTES];

    fn frames(link: &Link, now: Instant) -> Vec<Frame> {
        let mut batch = Vec::new();
        link.poll(now, &mut batch).unwrap();
        let mut reader = FrameReader::default();
        reader.push(&batch);
        std::iter::from_fn(|| reader.next().unwrap()).collect()
    }

    #[test]
    fn a_peer_that_acknowledges_nothing_is_late_and_then_silent() {
        let start = Instant::now();
        let link = Link::new(true, start);
        assert_eq!(link.send(&MESSAGE, start), Sent::Prompt);
        assert_eq!(frames(&link, start), [Frame::Message(MESSAGE.to_vec())]);
        let late = start + LATE_AFTER;
        assert_eq!(link.send(&MESSAGE, late), Sent::Late, "it is sent by the service as well");
        assert!(!link.is_prompt(late));
        assert!(link.acknowledged(1));
        assert!(link.is_prompt(late), "the second one has just been sent");
        assert_eq!(link.poll(late + SILENCE_TIMEOUT, &mut Vec::new()), Err(Closed::Silent));
        // More than was sent, or fewer than before.
        assert!(!link.acknowledged(3) && !link.acknowledged(0));
        assert!(link.acknowledged(2));
    }

    #[test]
    fn quiet_connections_are_probed_and_idle_ones_closed() {
        let start = Instant::now();
        let link = Link::new(false, start);
        let mut now = start;
        let mut probes = 0;
        let ended = loop {
            let mut batch = Vec::new();
            match link.poll(now, &mut batch) {
                Ok(next) => {
                    if !batch.is_empty() {
                        probes += 1;
                        assert!(link.acknowledged(probes));
                    }
                    assert!(next > now);
                    now = next;
                }
                Err(ended) => break ended,
            }
        };
        assert_eq!((ended, now), (Closed::Idle, start + IDLE_TIMEOUT));
        assert_eq!(u128::from(probes), (IDLE_TIMEOUT - PROBE_INTERVAL).as_secs().into());
    }

    #[test]
    fn what_comes_is_acknowledged_once() {
        let now = Instant::now();
        let link = Link::new(false, now);
        (0..3).for_each(|_| link.received(true, now));
        assert_eq!(frames(&link, now), [Frame::Received(3)]);
        assert_eq!(frames(&link, now), []);
    }

    /// A peer that takes nothing costs a bounded queue.
    #[test]
    fn the_queue_is_bounded() {
        let now = Instant::now();
        let link = Link::new(true, now);
        let large = vec![7; nomad::wire::MAX_MESSAGE_BYTES];
        let queued = (0..100).filter(|_| link.send(&large, now) == Sent::Prompt).count();
        assert!(queued * large.len() <= MAX_QUEUED_BYTES && queued > 5, "{queued}");
        let link = Link::new(true, now);
        let queued = (0..5_000).filter(|_| link.send(&MESSAGE, now) == Sent::Prompt).count();
        assert_eq!(queued, MAX_UNACKNOWLEDGED);
    }

    #[test]
    fn a_closed_connection_takes_nothing() {
        let now = Instant::now();
        let link = Link::new(true, now);
        link.close();
        assert_eq!(link.send(&MESSAGE, now), Sent::No);
        assert_eq!(link.poll(now, &mut Vec::new()), Err(Closed::Replaced));
    }
}
