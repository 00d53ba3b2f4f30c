//! The progress of requests of a suspended connection. Both VMs are on one host now, so the queue pairs continue without the wire protocol.

use super::requester::Pending;
use super::responder::Answer;
use super::*;

/// How far the peer has executed a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// Executed, with this length in bytes.
    Done(u32),
    /// The atomic was executed; the previous value.
    Atomic(u64),
    /// Fails with a status of the requester's own side.
    Failed(Status),
    /// Not received completely, or a READ, which may be executed again.
    Again,
}

impl Connection {
    /// The progress at `peer` of each request that isn't complete here, in order. If the peer has no connection of its own, it expects
    /// `psn`. Both ends must be suspended, with no packet in flight between them.
    #[must_use]
    pub fn fates(&self, peer: Option<&Self>, psn: u32) -> Vec<Fate> {
        let expected = peer.map_or(psn & psn::MASK, |peer| psn::wire(peer.responder.expected));
        self.requester.queue.iter().map(|pending| fate(pending, peer, expected)).collect()
    }

    /// The next expected PSN, 24 bits.
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
            // The responder keeps the results of as many atomics as may be outstanding, so this one is there.
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
