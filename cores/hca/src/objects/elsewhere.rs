//! State of a queue pair with a remote peer.

use std::collections::VecDeque;

use crate::saved;
use crate::work::{ReceiveRequest, SendRequest, Status};

/// A request that a transport has.
#[derive(Debug)]
pub(crate) struct Outstanding {
    pub token: u64,
    pub request: SendRequest,
    /// Outcome, while earlier requests are not complete.
    pub outcome: Option<Result<u32, Status>>,
}

/// State that a queue pair has only while its peer is remote.
#[derive(Debug, Default)]
pub(crate) struct Elsewhere {
    pub outstanding: VecDeque<Outstanding>,
    /// Receives that a transport consumed before there was a message for them.
    pub ahead: VecDeque<ReceiveRequest>,
    /// Receives that a transport consumed ahead and returned unused: they come before those in the ring.
    pub returned: VecDeque<ReceiveRequest>,
    pub next_token: u64,
    /// The peer got an RNR NAK, and is to be notified of the next receive.
    pub awaits_receive: bool,
}

impl Elsewhere {
    /// Saves it.
    pub fn save(&self) -> saved::Elsewhere {
        saved::Elsewhere {
            first_token: self.outstanding.front().map_or(self.next_token, |front| front.token),
            outstanding: self.outstanding.iter().map(Outstanding::save).collect(),
            awaits_receive: self.awaits_receive,
        }
    }

    /// Restores it from a saved state that was checked.
    pub fn restore(saved: saved::Elsewhere) -> Self {
        let mut next_token = saved.first_token;
        let outstanding = saved.outstanding.into_iter().map(|saved::Outstanding { request, outcome }| {
            next_token += 1;
            Outstanding { token: next_token - 1, request, outcome }
        });
        let outstanding = outstanding.collect();
        Self { outstanding, next_token, awaits_receive: saved.awaits_receive, ..Self::default() }
    }

    /// Receives that were taken from the ring and not used, oldest first.
    pub fn taken_receives(&self) -> impl Iterator<Item = &ReceiveRequest> {
        self.ahead.iter().chain(&self.returned)
    }

    /// Removes and returns the oldest of them.
    pub fn pop_receive(&mut self) -> Option<ReceiveRequest> {
        self.ahead.pop_front().or_else(|| self.returned.pop_front())
    }

    /// The rest of the state when no transport has requests any more.
    pub fn without_requests(self) -> Option<Box<Self>> {
        (!self.returned.is_empty()).then(|| Box::new(Self { returned: self.returned, ..Self::default() }))
    }

    /// The requests that transports have.
    pub fn requests(&self) -> impl Iterator<Item = &SendRequest> {
        self.outstanding.iter().map(|outstanding| &outstanding.request)
    }

    /// Removes and returns the requests.
    pub fn take_outstanding(&mut self) -> VecDeque<saved::Outstanding> {
        let strip = |Outstanding { request, outcome, .. }| saved::Outstanding { request, outcome };
        std::mem::take(&mut self.outstanding).into_iter().map(strip).collect()
    }
}

impl Outstanding {
    fn save(&self) -> saved::Outstanding {
        saved::Outstanding { request: self.request.clone(), outcome: self.outcome }
    }
}
