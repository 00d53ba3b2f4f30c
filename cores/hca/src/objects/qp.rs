//! A queue pair.

use std::collections::VecDeque;

use crate::attributes::{QpAttributes, QpKind, QpState};
use crate::counters::QpCounters;
use crate::names::{Gid, QpHandle, Qpn};
use crate::provider::Provider;
use crate::saved::Outstanding;
use crate::work::{ReceiveRequest, SendRequest};

use super::{Elsewhere, ObjectRef, QpRef};

/// The path from a connected queue pair to its peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Path {
    /// No peer responds.
    Unreachable,
    /// A queue pair of this engine.
    Local(QpRef),
    /// Over a transport, until the queue pair is reset.
    Elsewhere,
}

/// The reason why a send queue waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// It doesn't wait.
    None,
    /// A receive at the peer.
    Receive,
    /// A peer that responds.
    Peer,
    /// The VM's rate limit.
    Rate,
    /// The limit of writes to its peer's memory.
    Budget,
    /// The completion of all requests that a transport has.
    Outstanding,
    /// The migration of the peer: its address is suspended.
    Held,
    /// Not-present guest memory.
    Memory,
}

/// The progress of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Bytes executed.
    pub offset: u64,
    /// The peer that executed them. For another one the request restarts.
    pub peer: Option<QpRef>,
    /// The responder's incarnation that executed them.
    pub incarnation: u32,
    /// RNR waits without success.
    pub rnr_waits: u8,
    /// Timeouts without a response.
    pub timeouts: u8,
}

/// The current request of a send queue, when one turn could not execute it.
#[derive(Debug)]
pub(crate) struct Current {
    pub request: SendRequest,
    pub progress: Progress,
    /// Requests fetched behind it: a transport had them until the peer came to this engine.
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
    /// Turns in a row without work.
    pub empty_looks: u32,
    pub wait: Wait,
    pub pd: u32,
    pub path: Path,
    /// The engine's topology number when `path` was looked up; a change causes another look-up. 0 always does.
    pub path_at: u64,
    /// The peer's [`Qp::version`] when a local `path` was looked up.
    pub path_version: u64,
    /// Increases with each change of state or attributes that affects which queue pair it responds to.
    pub version: u64,
    /// Since it left RESET, it has had a peer of this engine, or was the peer of one.
    pub was_local: bool,
    pub send_cq: ObjectRef,
    pub receive_cq: ObjectRef,
    pub current: Option<Box<Current>>,
    /// State of requests and receives that a transport has.
    pub elsewhere: Option<Box<Elsewhere>>,
    /// A receive that was taken from the ring and is not complete: partly filled, or left over from a dropped datagram.
    pub stashed: Option<Box<ReceiveRequest>>,
    /// The requester that waits for a receive here.
    pub waiter: Option<QpRef>,
    pub send_queue: P::SendQueue,
    pub receive_queue: Option<P::ReceiveQueue>,
    pub srq: Option<ObjectRef>,

    pub handle: QpHandle,
    pub qpn: Qpn,
    /// Handle of the context of its protection domain.
    pub context: u32,
    /// Its index in [`super::Context::qps`].
    pub context_index: u32,
    /// Number of times that it left RESET.
    pub incarnation: u32,
    pub attributes: QpAttributes,
    /// Own address, copied from the GID table when the path was set.
    pub source_gid: Gid,
    /// The first message in RTR was reported.
    pub established: bool,
    /// Deadline of the timer, if one is running.
    pub deadline: Option<u64>,
    /// The shared receive queue (and its device) whose waiting list contains it.
    pub awaits: Option<(u32, ObjectRef)>,
    pub counters: QpCounters,
}

impl<P: Provider> Qp<P> {
    /// Whether it accepts peers' messages.
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

    /// Records a change that affects its peers: its own path is looked up again, and so are those of its peers.
    pub fn changed(&mut self) {
        self.version += 1;
        self.path_at = 0;
    }

    /// Log2 of the bytes per packet on its path.
    #[inline]
    pub fn path_mtu_shift(&self) -> u32 {
        u32::from(self.attributes.path_mtu.clamp(1, 5)) + 7
    }
}
