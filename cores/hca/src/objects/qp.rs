//! A queue pair.

use std::collections::VecDeque;

use crate::attributes::{QpAttributes, QpKind, QpState};
use crate::counters::QpCounters;
use crate::names::{Gid, QpHandle, Qpn};
use crate::provider::Provider;
use crate::remote::Elsewhere;
use crate::saved::Outstanding;
use crate::work::{ReceiveRequest, SendRequest};

use super::{ObjectRef, QpRef};

/// How a connected queue pair reaches its peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Path {
    /// Nobody answers there, or not to us.
    Unreachable,
    /// A queue pair of this engine.
    Local(QpRef),
    /// A transport carries it, until the queue pair is reset.
    Elsewhere,
}

/// What a send queue waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Nothing.
    None,
    /// A receive at the peer.
    Receive,
    /// A peer that answers.
    Peer,
    /// The VM's rate limit.
    Rate,
    /// What may be written into its peer's memory.
    Budget,
    /// The end of all requests that a transport has.
    Outstanding,
    /// The peer's move.
    Held,
    /// Guest memory that is still to come.
    Memory,
}

/// How far a request has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Bytes done.
    pub offset: u64,
    /// Who got them. Another one starts from the beginning.
    pub peer: Option<QpRef>,
    /// The responder's incarnation that got them.
    pub incarnation: u32,
    /// Waits for a receive without success.
    pub rnr_waits: u8,
    /// Timeouts without an answer.
    pub timeouts: u8,
}

/// The request that a send queue is at, when it could not be done in one go.
#[derive(Debug)]
pub(crate) struct Current {
    pub request: SendRequest,
    pub progress: Progress,
    /// Requests that were fetched behind it: a transport had them until the peer came here.
    pub behind: VecDeque<Outstanding>,
}

/// A queue pair.
pub(crate) struct Qp<P: Provider> {
    pub stamp: u64,
    pub state: QpState,
    pub kind: QpKind,
    /// It is on the active list.
    pub active: bool,
    pub signal_all: bool,
    /// Looks in a row that found nothing to do.
    pub empty_looks: u32,
    pub wait: Wait,
    pub pd: u32,
    pub path: Path,
    /// Engine's topology at which `path` was found; any change asks for another look. 0 asks for one in any case.
    pub path_at: u64,
    /// The peer's [`Qp::version`] when a local `path` was found.
    pub path_version: u64,
    /// Grows with each change of state or attributes that decides whom this queue pair answers.
    pub version: u64,
    /// Since it left RESET it has had a peer of this engine, or was one's.
    pub was_local: bool,
    pub send_cq: ObjectRef,
    pub receive_cq: ObjectRef,
    pub current: Option<Box<Current>>,
    /// What it has when its peer is elsewhere.
    pub elsewhere: Option<Box<Elsewhere>>,
    /// A receive that was taken from the ring and is not completed: partly filled, or left over from a dropped datagram.
    pub stashed: Option<Box<ReceiveRequest>>,
    /// The requester that waits for a receive here.
    pub waiter: Option<QpRef>,
    pub send_queue: P::SendQueue,
    pub receive_queue: Option<P::ReceiveQueue>,
    pub srq: Option<ObjectRef>,

    pub handle: QpHandle,
    pub qpn: Qpn,
    /// The context of its protection domain.
    pub context: u32,
    /// Its index in [`super::Context::qps`].
    pub context_index: u32,
    /// Times that it left RESET.
    pub incarnation: u32,
    pub attributes: QpAttributes,
    /// Own address, copied from the GID table when the path was set.
    pub source_gid: Gid,
    /// The first message in RTR was reported.
    pub established: bool,
    /// When the timer runs out, if one runs.
    pub deadline: Option<u64>,
    /// The shared receive queue (and its device) at which it is listed as waiting.
    pub awaits: Option<(u32, ObjectRef)>,
    pub counters: QpCounters,
}

impl<P: Provider> Qp<P> {
    /// Whether peers' messages are taken.
    #[inline]
    pub fn receives(&self) -> bool {
        matches!(
            self.state,
            QpState::ReadyToReceive
                | QpState::ReadyToSend
                | QpState::SendQueueDrained
                | QpState::SendQueueError
        )
    }

    /// What decides whom it faces or answers has changed: its own path is looked up anew, and those of its peers.
    pub fn changed(&mut self) {
        self.version += 1;
        self.path_at = 0;
    }

    /// Bytes per packet on its path.
    #[inline]
    pub fn path_mtu_shift(&self) -> u32 {
        u32::from(self.attributes.path_mtu.clamp(1, 5)) + 7
    }
}
