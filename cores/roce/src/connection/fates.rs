//! How far requests came, when both ends of a connection are at rest and go on without it: their VMs are on one host now.

use super::requester::Pending;
use super::responder::Answer;
use super::*;

/// How far the peer came with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It has carried it out, so many bytes.
    Done(u32),
    /// It has carried this atomic out, and this was the value before.
    Atomic(u64),
    /// It fails for a reason of its own end.
    Failed(Status),
    /// It hasn't seen its end, or it is a READ, whose answer may be asked for again.
    Again,
}

impl Connection {
    /// How far `peer` came with each request that isn't complete here, in order. Without a connection of its own the peer expects
    /// `psn`. Both must be held, and nothing be under way between them.
    #[must_use]
    pub fn fates(&self, peer: Option<&Self>, psn: u32) -> Vec<Fate> {
        let expected = peer.map_or(psn & psn::MASK, |peer| psn::wire(peer.responder.expected));
        self.requester.queue.iter().map(|pending| fate(pending, peer, expected)).collect()
    }

    /// The PSN that is expected next.
    #[must_use]
    pub fn expected(&self) -> u32 {
        psn::wire(self.responder.expected)
    }
}

fn fate(pending: &Pending, peer: Option<&Connection>, expected: u32) -> Fate {
    if let Some(status) = pending.error {
        return Fate::Failed(status);
    }
    let came = psn::extend(expected, pending.first);
    if pending.packets == 0 || came < pending.end() {
        return Fate::Again;
    }
    match pending.request.kind {
        Kind::Read { .. } => Fate::Again,
        Kind::CompareSwap { .. } | Kind::FetchAdd { .. } => {
            // The results of as many atomics as may be outstanding are kept, so it is there.
            let resources = peer.into_iter().flat_map(|peer| &peer.responder.resources);
            let first = psn::wire(pending.first);
            let original = resources.rev().find_map(|resource| match resource.answer {
                Answer::Atomic { original } if psn::wire(resource.first) == first => Some(original),
                _ => None,
            });
            original.map_or(Fate::Failed(Status::BadResponse), Fate::Atomic)
        }
        _ => Fate::Done(pending.request.length),
    }
}
