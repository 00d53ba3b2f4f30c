//! Memory and queues of a connection's end, which verify each call.

use roce::config::Reliability;
use roce::memory::{Atomic, Memory, Received, ReceivedOperation, Remote};
use roce::request::Kind;
use roce::status::{Event, NoReceive, Refusal, Status, Unmoved};

use super::program::{KEY, Op, RECEIVE, WORDS, byte, index_of};
use super::world::MOST_LATE;
use facilities::rng::SplitMix64;

/// One direction of a connection: the requests of one end, their completions there, and their execution at the other end.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(super) struct Flow {
    pub number: u32,
    pub program: Vec<Op>,
    pub unreliable: bool,
    pub posted: usize,
    pub completed: usize,
    /// A request has failed.
    pub failed: bool,
    /// Bytes of the oldest incomplete READ that were placed.
    pub placed: u64,
    /// Index of the next request that the other end executes.
    pub executing: usize,
    /// Bytes of that request that have arrived.
    pub arrived: u64,
    /// Previous values, by request.
    pub originals: Vec<Option<u64>>,
    /// The other end refused a request.
    pub refused: bool,
    /// Receives posted at the other end.
    pub receives: u32,
    pub in_use: bool,
    /// The receive in use is placed again: its memory was not present.
    pub again: bool,
    /// Unreliable: the bytes that have arrived.
    pub bytes: Vec<u8>,
    /// Packets lost, repeated or delayed, in either direction, since the last completion.
    pub faults: u32,
    /// Time of the last completion.
    pub completed_at: u64,
    pub locals: usize,
}

impl Flow {
    pub(super) fn new(number: u32, program: Vec<Op>, reliability: Reliability) -> Self {
        Self {
            number,
            originals: vec![None; program.len()],
            program,
            unreliable: reliability == Reliability::Unreliable,
            ..Self::default()
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.completed == self.program.len()
    }

    /// The next request for the responder.
    fn current(&mut self) -> Option<(usize, Op)> {
        while self.program.get(self.executing).is_some_and(|op| !op.is_remote()) {
            self.executing += 1;
        }
        Some((self.executing, *self.program.get(self.executing)?))
    }

    fn executed(&mut self) {
        self.executing += 1;
        self.arrived = 0;
    }
}

/// The first error found.
pub(super) type Verdict = Option<String>;

/// An end of a connection, while one of the connection's functions runs.
pub(super) struct End<'a> {
    /// Requests of this end.
    pub out: &'a mut Flow,
    /// Requests of the other end.
    pub back: &'a mut Flow,
    /// This endpoint's shared words.
    pub words: &'a mut [u64; WORDS],
    pub now: u64,
    pub retry_count: u32,
    /// Whether the other end is gone or has failed.
    pub peer_gone: bool,
    pub finite_rnr: bool,
    pub own_failed: &'a mut bool,
    pub verdict: &'a mut Verdict,
    /// Not-present memory of this end.
    pub late: Option<Late<'a>>,
}

/// Not-present memory, and until when.
pub(super) struct Late<'a> {
    pub until: &'a mut u64,
    pub rng: &'a mut SplitMix64,
    /// Probability that an access finds it not present, in parts of 1000.
    pub chance: u32,
}

impl End<'_> {
    /// Whether this access finds its memory not present.
    fn is_late(&mut self) -> bool {
        let Some(late) = &mut self.late else { return false };
        if *late.until <= self.now && late.rng.chance(late.chance) {
            *late.until = self.now + 1 + u64::from(late.rng.below(MOST_LATE));
        }
        let is_late = *late.until > self.now;
        if is_late {
            // As a lost packet: it uses up one of the peer's tries.
            self.out.faults += 1;
            self.back.faults += 1;
        }
        is_late
    }
}

macro_rules! wrong {
    ($self:expr, $($text:tt)*) => {
        if $self.verdict.is_none() {
            *$self.verdict = Some(format!("at {} ns, flow {}: {}", $self.now, $self.out.number, format!($($text)*)));
        }
    };
}

impl Memory for End<'_> {
    fn gather(&mut self, token: u64, offset: u64, into: &mut [u8]) -> Result<(), Unmoved> {
        if self.is_late() {
            return Err(Unmoved::NotHere);
        }
        let index = usize::try_from(token).unwrap_or(usize::MAX);
        let Some(op) = self.out.program.get(index) else {
            wrong!(self, "unknown token {token}");
            return Err(Status::General.into());
        };
        if offset + into.len() as u64 > u64::from(op.request.length) {
            wrong!(self, "gathers beyond the end of request {index}");
        }
        let answered = |op: &Op| {
            matches!(op.request.kind, Kind::Read { .. } | Kind::CompareSwap { .. } | Kind::FetchAdd { .. })
        };
        let open = self.out.program.get(self.out.completed..index).unwrap_or_default();
        if op.request.fence && open.iter().any(answered) {
            wrong!(self, "request {index} doesn't wait for those before it");
        }
        if op.lost_from.is_some_and(|from| offset + into.len() as u64 > u64::from(from)) {
            return Err(Status::LocalProtection.into());
        }
        for (position, place) in (offset..).zip(into) {
            *place = byte(self.out.number, index, position);
        }
        Ok(())
    }

    fn place(&mut self, token: u64, offset: u64, data: &[u8]) -> Result<(), Unmoved> {
        if self.is_late() {
            return Err(Unmoved::NotHere);
        }
        let index = self.out.completed;
        let Some(op) = self.out.program.get(index).filter(|op| op.request.token == token) else {
            wrong!(self, "an answer for request {token} while {index} is the oldest");
            return Ok(());
        };
        if let Kind::Read { .. } = op.request.kind {
            if offset != self.out.placed {
                wrong!(self, "request {index}: answer at {offset} instead of {}", self.out.placed);
            }
            self.out.placed += data.len() as u64;
            for (position, got) in (offset..).zip(data) {
                if *got != byte(self.out.number, index, position) {
                    wrong!(self, "request {index}: byte {position} of the answer is {got}");
                    break;
                }
            }
        } else {
            let got = data.try_into().map(u64::from_ne_bytes).ok();
            if got.is_none() || self.out.originals.get(index) != Some(&got) {
                wrong!(self, "request {index}: value {got:?} instead of {:?}", self.out.originals.get(index));
            }
        }
        Ok(())
    }

    fn execute_local(&mut self, token: u64) -> Status {
        if usize::try_from(token).unwrap_or(0) < self.out.locals {
            wrong!(self, "local request {token} is done twice, or too late");
        }
        self.out.locals = usize::try_from(token).unwrap_or(0) + 1;
        Status::Success
    }

    fn complete(&mut self, token: u64, status: Status, length: u32) {
        let index = self.out.completed;
        let Some(op) = self.out.program.get(index).copied().filter(|op| op.request.token == token) else {
            wrong!(self, "request {token} completes while {index} is the oldest");
            return;
        };
        if index >= self.out.posted {
            wrong!(self, "request {index} completes before it was posted");
        }
        self.out.completed += 1;
        if status == Status::Success {
            self.check_success(index, &op, length);
            self.out.faults = 0;
        } else if self.out.failed {
            if status != Status::Flushed {
                wrong!(self, "request {index} behind a failed one ends with {status:?}");
            }
        } else {
            self.out.failed = true;
            let allowed = match status {
                Status::Flushed => self.back.refused,
                // Each try needs a fault. The fault of the first try may date from before the previous request completed.
                Status::RetryExceeded => self.peer_gone || self.out.faults >= self.retry_count,
                Status::RnrRetryExceeded => self.finite_rnr,
                _ => status == op.expected,
            };
            if !allowed {
                wrong!(
                    self,
                    "request {index} ({:?}) ends with {status:?} instead of {:?} after {} faults",
                    op.request.kind,
                    op.expected,
                    self.out.faults
                );
            }
        }
        self.out.placed = 0;
        self.out.completed_at = self.now;
    }

    fn take_receive(&mut self) -> Result<u64, NoReceive> {
        let Some((_, op)) = self.back.current() else {
            wrong!(self, "a receive is taken though nothing was asked for");
            return Err(NoReceive::NotPosted);
        };
        if std::mem::take(&mut self.back.again) && self.back.in_use {
            return Ok(u64::from(RECEIVE));
        }
        if !self.back.unreliable {
            let consumes =
                matches!(op.request.kind, Kind::Send { .. } | Kind::Write { immediate: Some(_), .. });
            if !consumes || self.back.in_use {
                wrong!(self, "{:?} takes a receive", op.request.kind);
            }
        }
        if self.back.receives == 0 {
            return Err(NoReceive::NotPosted);
        }
        self.back.receives -= 1;
        self.back.in_use = true;
        self.back.bytes.clear();
        Ok(u64::from(RECEIVE))
    }

    fn place_receive(&mut self, offset: u64, data: &[u8]) -> Result<(), Unmoved> {
        if self.is_late() {
            self.back.again = offset == 0;
            return Err(Unmoved::NotHere);
        }
        if self.back.unreliable {
            if offset != self.back.bytes.len() as u64 {
                wrong!(self, "unreliable: bytes at {offset} after {}", self.back.bytes.len());
            }
            self.back.bytes.extend_from_slice(data);
            return Ok(());
        }
        self.arrive(offset, data);
        Ok(())
    }

    fn complete_receive(&mut self, received: &Received) {
        if !std::mem::take(&mut self.back.in_use) {
            wrong!(self, "a receive completes that is not in use");
        }
        if self.back.unreliable {
            self.check_unreliable(received);
            return;
        }
        let Some((index, op)) = self.back.current() else { return };
        let (operation, immediate, invalidated) = match op.request.kind {
            Kind::Send { immediate, invalidate } => (ReceivedOperation::Send, immediate, invalidate),
            Kind::Write { immediate, .. } => (ReceivedOperation::WriteImmediate, immediate, None),
            _ => {
                wrong!(self, "{:?} completes a receive", op.request.kind);
                return;
            }
        };
        let expected = Received {
            operation,
            length: op.request.length,
            immediate,
            invalidated,
            solicited: op.request.solicited,
        };
        if *received != expected || self.back.arrived != u64::from(op.request.length) {
            wrong!(self, "received {received:?} and {} bytes instead of {expected:?}", self.back.arrived);
        }
        if op.refused {
            wrong!(self, "request {index} was to be refused");
        }
        self.back.executed();
    }

    fn fail_receive(&mut self, status: Status) {
        self.back.in_use = false;
        let Some((index, op)) = self.back.current() else { return };
        if status != Status::LocalLength || op.request.length <= RECEIVE {
            wrong!(self, "the receive of request {index} ends with {status:?}");
        }
        self.back.refused = true;
    }

    fn keep_receive(&mut self) {
        self.back.in_use = false;
        self.back.receives += 1;
    }

    fn write(&mut self, remote: Remote, length: u64, offset: u64, data: &[u8]) -> Result<(), Refusal> {
        if remote.rkey == KEY && self.is_late() {
            return Err(Refusal::NotHere);
        }
        if remote.rkey != KEY {
            self.back.refused = true;
            return Err(Refusal::Access);
        }
        if self.back.unreliable {
            self.check_unreliable_write(remote, length, offset, data);
            return Ok(());
        }
        let Some((index, op)) = self.back.current() else {
            wrong!(self, "a WRITE that nobody asked for");
            return Ok(());
        };
        let Kind::Write { immediate, .. } = op.request.kind else {
            wrong!(self, "a WRITE instead of {:?}", op.request.kind);
            return Ok(());
        };
        if index_of(remote.address) != Some(index) || length != u64::from(op.request.length) {
            wrong!(self, "a WRITE to {:#x} of {length} bytes instead of request {index}", remote.address);
        }
        if immediate.is_some() && self.back.arrived == length && length > 0 {
            // The last packet again, after it found no receive posted.
            self.back.arrived = offset;
        }
        self.arrive(offset, data);
        if immediate.is_none() && self.back.arrived == length {
            self.back.executed();
        }
        Ok(())
    }

    fn read(&mut self, remote: Remote, length: u64, offset: u64, into: &mut [u8]) -> Result<(), Refusal> {
        let index = index_of(remote.address).unwrap_or(usize::MAX);
        if remote.rkey != KEY {
            self.back.refused = true;
            return Err(Refusal::Access);
        }
        if self.is_late() {
            return Err(Refusal::NotHere);
        }
        let expected = self.back.current();
        if into.is_empty() {
            // A long READ is sent as several requests.
            match expected {
                Some((next, op)) if next == index => {
                    self.back.arrived += length;
                    if self.back.arrived == u64::from(op.request.length) {
                        self.back.executed();
                    }
                }
                _ => wrong!(self, "a READ of request {index} out of order: {expected:?}"),
            }
            return Ok(());
        }
        // A long READ is sent as several requests, each with its own address.
        let base = (remote.address & 0xFFFF_FFFF) + offset;
        for (position, place) in (base..).zip(into) {
            *place = byte(self.back.number, index, position);
        }
        Ok(())
    }

    fn atomic(&mut self, remote: Remote, operation: Atomic) -> Result<u64, Refusal> {
        if remote.rkey != KEY {
            self.back.refused = true;
            return Err(Refusal::Access);
        }
        if self.is_late() {
            return Err(Refusal::NotHere);
        }
        let index = index_of(remote.address).unwrap_or(usize::MAX);
        let current = self.back.current();
        if current.is_none_or(|(next, _)| next != index) {
            wrong!(self, "an atomic of request {index} is executed out of order, or again: {current:?}");
        }
        let word = usize::try_from((remote.address & 0xFFFF_FFFF) / 8).unwrap_or(0);
        let Some(word) = self.words.get_mut(word) else { return Err(Refusal::Access) };
        let before = *word;
        match operation {
            Atomic::FetchAdd { add } => *word = before.wrapping_add(add),
            Atomic::CompareSwap { compare, swap } if before == compare => *word = swap,
            Atomic::CompareSwap { .. } => {}
        }
        if let Some(slot) = self.back.originals.get_mut(index) {
            *slot = Some(before);
        }
        self.back.executed();
        Ok(before)
    }

    fn invalidate(&mut self, rkey: u32) -> Result<(), Refusal> {
        let expected = self.back.current().map(|(_, op)| op.request.kind);
        if !matches!(expected, Some(Kind::Send { invalidate: Some(key), .. }) if key == rkey) {
            wrong!(self, "key {rkey} is invalidated by {expected:?}");
        }
        Ok(())
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Failed => {
                if std::mem::replace(self.own_failed, true) {
                    wrong!(self, "the connection fails twice");
                }
                if self.out.completed != self.out.posted {
                    wrong!(
                        self,
                        "the connection fails with {} requests open",
                        self.out.posted - self.out.completed
                    );
                }
                self.back.in_use = false;
            }
            Event::RequestError => self.back.refused = true,
            Event::SendFailed | Event::Fatal => wrong!(self, "event {event:?}"),
            Event::AccessError | Event::Established => {}
        }
    }
}

impl End<'_> {
    /// Checks bytes of the request that is executed.
    fn arrive(&mut self, offset: u64, data: &[u8]) {
        let Some((index, op)) = self.back.current() else { return };
        if offset != self.back.arrived {
            wrong!(self, "request {index}: bytes at {offset} instead of {}", self.back.arrived);
        }
        for (position, got) in (offset..).zip(data) {
            if *got != byte(self.back.number, index, position) {
                wrong!(self, "request {index} ({:?}): byte {position} is {got}", op.request.kind);
                break;
            }
        }
        self.back.arrived = offset + data.len() as u64;
    }

    fn check_success(&mut self, index: usize, op: &Op, length: u32) {
        if self.out.failed {
            wrong!(self, "request {index} succeeds behind a failed one");
        }
        let expected = match op.request.kind {
            Kind::Local { .. } | Kind::Failed(_) => 0,
            Kind::FetchAdd { .. } | Kind::CompareSwap { .. } => 8,
            _ => op.request.length,
        };
        if op.expected != Status::Success || length != expected {
            wrong!(self, "request {index} succeeds with {length} bytes; {:?} was due", op.expected);
        }
        if self.out.unreliable {
            return;
        }
        if op.is_remote() && self.out.executing <= index {
            wrong!(self, "request {index} ({:?}) succeeds before the other end has it", op.request.kind);
        }
        if matches!(op.request.kind, Kind::Read { .. }) && self.out.placed != u64::from(length) {
            wrong!(self, "request {index} succeeds with {} of {length} bytes", self.out.placed);
        }
    }

    /// An unreliable message must equal one of those sent, whole.
    fn check_unreliable(&mut self, received: &Received) {
        let mark = received.immediate.map(u32::from_be_bytes);
        let index = mark.and_then(|mark| usize::try_from(mark).ok()).unwrap_or(usize::MAX);
        let Some(op) = self.back.program.get(index) else {
            wrong!(self, "unreliable: a message that nobody sent");
            return;
        };
        let length = u64::from(received.length);
        let number = self.back.number;
        if let Kind::Send { .. } = op.request.kind {
            let whole = self.back.bytes.len() as u64 == length
                && (0..length).zip(&self.back.bytes).all(|(at, got)| *got == byte(number, index, at));
            if !whole || received.length != op.request.length {
                wrong!(self, "unreliable: message {index} of {length} bytes is not what was sent");
            }
        } else if received.operation != ReceivedOperation::WriteImmediate {
            wrong!(self, "unreliable: {:?} completes a receive", op.request.kind);
        }
    }

    fn check_unreliable_write(&mut self, remote: Remote, length: u64, offset: u64, data: &[u8]) {
        let index = index_of(remote.address).unwrap_or(usize::MAX);
        let number = self.back.number;
        let known = self.back.program.get(index).is_some_and(|op| u64::from(op.request.length) == length);
        if !known || (offset..).zip(data).any(|(at, got)| *got != byte(number, index, at)) {
            wrong!(self, "unreliable: a WRITE of {length} bytes that nobody sent, to {:#x}", remote.address);
        }
    }
}
