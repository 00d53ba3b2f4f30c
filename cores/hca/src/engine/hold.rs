//! Queue pairs that wait while the VM that they face moves, and what becomes of their requests when their path changes.
//!
//! Holding is a note per device and address: it costs nothing per queue pair. A queue pair that gets a turn and faces a held address is
//! *parked* before anything is fetched: requests stay in the ring, and one that is under way stops at its quantum. Opening the address
//! wakes those that were parked, and nothing else.
//!
//! **Paths.** A queue pair of this engine whose peer has moved away ([`Engine::moved_away`]) goes on by a transport, from the sequence
//! numbers that both ends had counted; a message that was under way begins anew with the receive that it had. When the peer comes to
//! this engine, whoever held the connection says how far each request came ([`Engine::come_local`]), and the rest goes from RAM to RAM.

use crate::attributes::QpKind;
use crate::names::{DeviceId, Gid, SegmentId};
use crate::objects::{Current, Path, Progress, QpRef, Wait};
use crate::provider::Provider;
use crate::remote::QpId;
use crate::saved::{Kind, Outstanding};
use crate::work::Status;

use super::{Engine, PSN_MASK};

/// How far a request came by its transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The peer has carried it out: so many bytes.
    Done(u32),
    /// The peer has carried out this atomic, and this was the value before.
    Atomic(u64),
    /// It failed.
    Failed(Status),
    /// It is to be carried out, from its beginning: READs, and what the peer hasn't seen the end of.
    Again,
}

impl<P: Provider> Engine<P> {
    /// From now on no queue pair of a device sends to an address, until [`Engine::open`].
    pub fn hold(&mut self, device: DeviceId, peer: Gid) {
        self.held.insert((device.0, peer));
    }

    /// Queue pairs of a device send to an address again.
    pub fn open(&mut self, device: DeviceId, peer: Gid) {
        self.held.remove(&(device.0, peer));
        for at in self.parked.take(usize::MAX) {
            if self.qp(at).is_none_or(|qp| qp.wait != Wait::Held) {
                continue;
            }
            if self.is_held(at) {
                self.parked.push(at);
            } else {
                self.wait(at, Wait::None, None);
                self.activate(at);
            }
        }
    }

    /// How many queue pairs wait since they face a held address.
    #[must_use]
    pub fn parked(&self) -> usize {
        self.parked.len()
    }

    /// Whether a queue pair's peer is held.
    #[must_use]
    pub fn is_peer_held(&self, qp: QpId) -> bool {
        self.is_held(qp.at())
    }

    #[inline]
    pub(crate) fn is_held(&self, at: QpRef) -> bool {
        !self.held.is_empty()
            && self.qp(at).is_some_and(|qp| {
                matches!(qp.kind, QpKind::Rc | QpKind::Uc)
                    && self.held.contains(&(at.device, qp.attributes.address.dgid))
            })
    }

    /// Takes a held queue pair off the turns.
    pub(super) fn park(&mut self, at: QpRef) {
        if self.qp(at).is_some_and(|qp| qp.wait != Wait::Held) {
            self.wait(at, Wait::Held, None);
            self.parked.push(at);
        }
    }

    /// The VM that had an address has moved to another engine: who faced it goes on by a transport.
    pub fn moved_away(&mut self, segment: SegmentId, gid: Gid) {
        self.moved.insert((segment, gid));
        self.topology_changed();
    }

    /// A queue pair that a transport carried has its peer in this engine now, and nothing is under way between them. `verdicts` are how
    /// far its requests came, by their order; what they don't reach begins anew. `sends` and `expects` are the sequence numbers
    /// that both ends go on with.
    pub fn come_local(&mut self, qp: QpId, verdicts: &[Verdict], sends: u32, expects: u32) {
        let at = qp.at();
        let Some(found) = self.qp_mut(at).filter(|found| found.incarnation == qp.incarnation()) else {
            return;
        };
        found.attributes.sq_psn = sends & PSN_MASK;
        found.attributes.rq_psn = expects & PSN_MASK;
        if found.path == Path::Elsewhere {
            found.path = Path::Unreachable;
        }
        found.path_at = 0;
        let mut requests = std::collections::VecDeque::<Outstanding>::new();
        if let Some(mut elsewhere) = found.elsewhere.take() {
            requests = elsewhere.take_outstanding();
            found.elsewhere = elsewhere.without_requests();
        }
        let current = found.current.take();
        // A request that the transport didn't get yet comes behind those that it has.
        let progress = current.as_ref().map_or_else(Progress::default, |current| Progress {
            rnr_waits: current.progress.rnr_waits,
            timeouts: current.progress.timeouts,
            ..Progress::default()
        });
        let mut known = verdicts.iter();
        let mut atomics = Vec::new();
        for request in &mut requests {
            // Local ones take no part in the transport's order.
            if request.outcome.is_some() {
                continue;
            }
            request.outcome = match known.next() {
                Some(Verdict::Done(bytes)) => Some(Ok(*bytes)),
                Some(Verdict::Failed(status)) => Some(Err(*status)),
                Some(Verdict::Atomic(before)) => {
                    atomics.push((request.request.sges.clone(), *before));
                    Some(Ok(8))
                }
                Some(Verdict::Again) | None => None,
            };
        }
        if let Some(current) = current {
            let Current { request, behind, .. } = *current;
            requests.push_back(Outstanding { request, outcome: None });
            requests.extend(behind);
        }
        for (sges, before) in atomics {
            if self.gather_target(at, None, &sges, 8, 0..8).is_ok() {
                // Where its memory is gone the guest has taken it away itself.
                let _ = self.write_target(at.device, &before.to_le_bytes());
            }
        }
        self.complete_known(at, &mut requests);
        let first = requests.pop_front();
        if let Some(found) = self.qp_mut(at) {
            found.current =
                first.map(|first| Box::new(Current { request: first.request, progress, behind: requests }));
        }
        self.touch_qp(qp.device, qp.handle);
        self.topology_changed();
        self.wait(at, Wait::None, None);
        self.activate(at);
    }

    /// Completes the requests at the front whose ends are known.
    pub(crate) fn complete_known(
        &mut self,
        at: QpRef,
        requests: &mut std::collections::VecDeque<Outstanding>,
    ) {
        while let Some(outcome) = requests.front().and_then(|front| front.outcome) {
            let Some(Outstanding { request, .. }) = requests.pop_front() else { return };
            if !self.complete_carried(at, &request, outcome) {
                return;
            }
        }
    }

    /// After the request that a queue pair was at: the next of those that were fetched behind it.
    pub(super) fn follow_up(&mut self, at: QpRef, mut behind: std::collections::VecDeque<Outstanding>) {
        // Behind one that a transport has now, their ends wait for its end.
        if !self.append_known(at, &mut behind) {
            self.complete_known(at, &mut behind);
        }
        let Some(first) = behind.pop_front() else { return };
        if let Some(qp) = self.qp_mut(at) {
            qp.current =
                Some(Box::new(Current { request: first.request, progress: Progress::default(), behind }));
        }
        if let Some(device) = self.device_mut(at.device) {
            device.marks.touch(Kind::QueuePair, at.handle);
        }
    }
}
