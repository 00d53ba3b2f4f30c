//! Suspension of queue pairs while their peer's VM moves, and their requests when the path changes.
//!
//! A suspension is an entry per device and address: it costs nothing per queue pair. A queue pair that gets a turn and whose peer has a
//! suspended address is *parked* before anything is fetched. Its requests stay in the ring, and one in progress stops at its quantum.
//! Opening the address wakes the parked queue pairs, and no others.
//!
//! **Paths.** When the peer of a local queue pair has moved away ([`Engine::moved_away`]), the queue pair continues over a transport, from
//! the sequence numbers that both ends have counted. A message in progress restarts, with the receive that it had. When the peer comes to
//! this engine, the transport reports the progress of each request ([`Engine::come_local`]). The rest is copied from RAM to RAM.

use crate::attributes::QpKind;
use crate::names::{DeviceId, Gid, SegmentId};
use crate::objects::{Current, Path, Progress, QpRef, Wait};
use crate::provider::Provider;
use crate::saved::{Kind, Outstanding};
use crate::transport::QpId;
use crate::work::Status;

use super::{Engine, PSN_MASK};

/// The progress of a request that a transport had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The peer has executed it, with this length in bytes.
    Done(u32),
    /// The peer has executed this atomic; the previous value.
    Atomic(u64),
    /// It has failed with this status.
    Failed(Status),
    /// It must be executed from its beginning: a READ, or a request that the peer didn't receive completely.
    Again,
}

impl<P: Provider> Engine<P> {
    /// Suspends an address for a device: none of its queue pairs sends there until [`Engine::open`].
    pub fn hold(&mut self, device: DeviceId, peer: Gid) {
        self.held.insert((device.0, peer));
    }

    /// Ends the suspension of an address, and wakes the queue pairs that it parked.
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

    /// Number of parked queue pairs.
    #[must_use]
    pub fn parked(&self) -> usize {
        self.parked.len()
    }

    /// Whether the address of a queue pair's peer is suspended.
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

    /// Parks a queue pair: it gets no turns until its peer's address is opened.
    pub(super) fn park(&mut self, at: QpRef) {
        if self.qp(at).is_some_and(|qp| qp.wait != Wait::Held) {
            self.wait(at, Wait::Held, None);
            self.parked.push(at);
        }
    }

    /// Records that the VM with an address has moved to another engine. Queue pairs that it was the peer of continue over a transport.
    pub fn moved_away(&mut self, segment: SegmentId, gid: Gid) {
        self.moved.insert((segment, gid));
        self.topology_changed();
    }

    /// Switches a queue pair from a transport to the local path, with nothing in flight between both ends. `verdicts` is the progress of
    /// its requests, in order; requests beyond them restart. `sends` and `expects` are the PSNs with which both ends continue.
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
        // A request that the transport didn't accept yet follows those that it has.
        let progress = current.as_ref().map_or_else(Progress::default, |current| Progress {
            rnr_waits: current.progress.rnr_waits,
            timeouts: current.progress.timeouts,
            ..Progress::default()
        });
        let mut known = verdicts.iter();
        let mut atomics = Vec::new();
        for request in &mut requests {
            // Local requests aren't part of the transport's order.
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
                // If the memory is gone, the guest itself has deregistered it.
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

    /// Completes the requests at the front whose outcome is known.
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

    /// Continues with the next of the requests that were fetched behind the completed one.
    pub(super) fn follow_up(&mut self, at: QpRef, mut behind: std::collections::VecDeque<Outstanding>) {
        // Behind a request that a transport has now, their outcomes wait for its completion.
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
