//! A guest's queue pair that is backed by one of the host's device.
//!
//! ```text
//!            Hello arrives                     the peer has confirmed that it knows ours
//!   new ──────────────────▶ receives ────────────────────────────────▶ settled ── first request ──▶ sends
//!    │ Hello, repeated         receives of the guest are posted
//!    └─ no response in the guest's own time: retry exceeded
//! ```

use std::collections::{BTreeSet, VecDeque};
use std::net::SocketAddr;

use hca::names::PdHandle;
use hca::remote::{Posted, PostedOperation, QpId};
use serde::Serialize;

use super::super::header::Header;
use super::announced::{Announced, Announcing};
use super::control::{Body, Hello, Message};
use super::numbers::PeerKeys;
use super::rnic::{End, HostPd, HostQp};

/// First interval before a request to the peer's daemon is repeated, nanoseconds; doubled each time (exponential back-off).
const AGAIN_NS: u64 = 10_000_000;
/// Limit of doublings.
const DOUBLINGS: u32 = 4;
/// Lower bound of the timeout for a peer's first response, nanoseconds, whatever the guest's timers: its daemon may be busy.
const LEAST_PATIENCE_NS: u64 = 2_000_000_000;

/// Counters of a connection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct LinkCounters {
    /// Requests posted to the device.
    pub requests: u64,
    /// Requests that the device has completed.
    pub completed: u64,
    /// Receives posted to the device.
    pub receives: u64,
    /// Receives that the device has completed.
    pub received: u64,
    /// Keys of requests translated: of own regions and the peer's.
    pub translations: u64,
    /// Requests sent for keys of the peer.
    pub keys_asked: u64,
    /// Keys of the peer that its guest invalidated.
    pub keys_invalidated: u64,
    /// Announcements of messages for the peer's shared receive queue.
    pub announcements: u64,
}

impl LinkCounters {
    /// Names and values.
    #[must_use]
    pub fn list(&self) -> [(&'static str, u64); 8] {
        [
            ("requests", self.requests),
            ("completed", self.completed),
            ("receives", self.receives),
            ("received", self.received),
            ("translations", self.translations),
            ("keys_asked", self.keys_asked),
            ("keys_invalidated", self.keys_invalidated),
            ("announcements", self.announcements),
        ]
    }
}

/// Report of a connection; its numbers in the guest are the queue pair's.
#[derive(Debug, Clone, Serialize)]
pub struct LinkReport {
    /// Name of the device.
    pub device: String,
    /// Number of the queue pair at the device.
    pub number: u32,
    /// Number of its peer at the peer's device, once known.
    pub peer_number: Option<u32>,
    /// Address of the peer's device.
    pub peer_address: Option<std::net::Ipv6Addr>,
    /// State: `asking`, `receives`, `settled` or `sends`.
    pub state: &'static str,
    /// Number of known keys of the peer.
    pub peer_keys: usize,
    /// Counters of the connection.
    pub counters: LinkCounters,
}

/// The connection.
pub(super) struct Link {
    pub id: u32,
    pub qp: QpId,
    pub qpn: u32,
    pub peer_qpn: u32,
    pub host: Option<SocketAddr>,
    pub header: Header,
    pub pd: PdHandle,
    pub host_pd: HostPd,
    pub pair: HostQp,
    /// This end, for the peer's daemon.
    pub own: End,
    /// Identifies this incarnation.
    pub nonce: u32,
    /// The other end, and its incarnation.
    pub peer: Option<(u32, End)>,
    /// Whether the peer has confirmed that it knows this end.
    pub settled: bool,
    /// Whether the device's queue pair sends.
    pub sends: bool,
    /// Requests that the guest has posted and the device doesn't have.
    pub waiting: VecDeque<Posted>,
    /// Tokens and lengths of requests that the device has.
    pub posted: VecDeque<(u64, u32)>,
    /// Number of receives that the device has.
    pub ahead: u32,
    /// Announced messages, if the guest's queue pair has a shared receive queue.
    pub announced: Option<Announced>,
    /// Whether the peer has a shared receive queue, and the messages announced to it.
    pub peer_shared: bool,
    pub announcing: Announcing,
    pub keys: PeerKeys,
    /// Invalidated keys that the peer has not acknowledged.
    pub unacknowledged: BTreeSet<u32>,
    /// Since when a response is awaited.
    pub asking_since: Option<u64>,
    asks: u32,
    /// When a message is to be repeated.
    pub again_at: Option<u64>,
    /// When the link fails: the device's queue pair has failed, and the reason may still arrive until then.
    pub dies_at: Option<u64>,
    pub established: bool,
    pub counters: LinkCounters,
}

/// A message for another daemon.
#[derive(Debug, Clone)]
pub(in super::super) struct Outgoing {
    pub to: SocketAddr,
    pub header: Header,
    /// Both queue pairs' numbers, which select the socket.
    pub pair: (u32, u32),
    pub bytes: Vec<u8>,
}

impl Link {
    pub fn new(id: u32, nonce: u32, ends: &super::Ends, made: &super::Made) -> Self {
        Self {
            id,
            qp: ends.qp,
            qpn: ends.qpn,
            peer_qpn: ends.peer_qpn,
            host: ends.host,
            header: ends.header,
            pd: made.pd,
            host_pd: made.host_pd,
            pair: made.pair,
            own: made.own,
            nonce,
            peer: None,
            settled: false,
            sends: false,
            waiting: VecDeque::new(),
            posted: VecDeque::new(),
            ahead: 0,
            announced: made.shared.then(Announced::default),
            peer_shared: false,
            announcing: Announcing::default(),
            keys: PeerKeys::default(),
            unacknowledged: BTreeSet::new(),
            asking_since: None,
            asks: 0,
            again_at: None,
            dies_at: None,
            established: false,
            counters: LinkCounters::default(),
        }
    }

    /// Queues a message to the peer's daemon.
    pub fn say(&self, body: Body, outbox: &mut Vec<Outgoing>) {
        let Some(to) = self.host else { return };
        let message = Message {
            own: self.qpn,
            peer: self.peer_qpn,
            from: self.nonce,
            to: self.peer.map_or(0, |(nonce, _)| nonce),
            body,
        };
        outbox.push(Outgoing {
            to,
            header: self.header,
            pair: (self.qpn, self.peer_qpn),
            bytes: message.encode(),
        });
    }

    pub fn hello(&self, sq_psn: Option<u32>, outbox: &mut Vec<Outgoing>) {
        let hello = Hello {
            gid: self.own.gid,
            number: self.own.number,
            psn: self.own.psn,
            mtu: self.own.mtu,
            sends: sq_psn.is_some(),
            settled: self.settled,
            shared: self.announced.is_some(),
            sq_psn: sq_psn.unwrap_or(0),
        };
        self.say(Body::Hello(hello), outbox);
    }

    /// Announces new messages to a peer with a shared receive queue.
    pub fn announce(&mut self, outbox: &mut Vec<Outgoing>) {
        if self.peer_shared
            && let Some(total) = self.announcing.news()
        {
            self.counters.announcements += 1;
            self.say(Body::Announce { total }, outbox);
        }
    }

    /// Whether a request waits until its receiver has a receive of its shared queue.
    pub fn awaits_ready(&self, request: &Posted) -> bool {
        self.peer_shared && takes_receive(request) && !self.announcing.may_send()
    }

    /// Starts to await a response.
    pub fn expect(&mut self, now: u64) {
        if self.asking_since.is_none() {
            self.asking_since = Some(now);
            self.asks = 0;
        }
        if self.again_at.is_none() {
            self.again_at = Some(now + AGAIN_NS);
        }
    }

    /// Records the awaited response.
    pub fn answered(&mut self) {
        self.asking_since = None;
        self.asks = 0;
        if self.unacknowledged.is_empty() {
            self.again_at = None;
        }
    }

    /// Records a repetition, and sets the time of the next.
    pub fn ask_again(&mut self, now: u64) {
        self.asks = self.asks.saturating_add(1);
        self.again_at = Some(now + (AGAIN_NS << self.asks.min(DOUBLINGS)));
    }

    /// Whether the peer's daemon has exceeded its timeout, by the guest's own timers; a timeout code of 0 is no timeout. As many requests
    /// as fit into that time must be unanswered: while this daemon doesn't run, it sends none.
    pub fn is_out_of_patience(&self, now: u64, timeout: u8, retries: u8) -> bool {
        let Some(since) = self.asking_since else { return false };
        if timeout == 0 {
            return false;
        }
        let each = 4096u64 << timeout.min(31);
        let patience = each.saturating_mul(u64::from(retries) + 1).max(LEAST_PATIENCE_NS);
        let asks = patience / (AGAIN_NS << DOUBLINGS);
        now.saturating_sub(since) >= patience && u64::from(self.asks) >= asks
    }

    pub fn next(&self) -> Option<u64> {
        [self.again_at, self.dies_at].into_iter().flatten().min()
    }

    pub fn report(&self, device: &str) -> LinkReport {
        let end = self.peer.map(|(_, end)| end);
        LinkReport {
            device: device.to_owned(),
            number: self.own.number,
            peer_number: end.map(|end| end.number),
            peer_address: end.map(|end| end.gid.into()),
            state: match () {
                () if self.sends => "sends",
                () if self.settled => "settled",
                () if self.peer.is_some() => "receives",
                () => "asking",
            },
            peer_keys: self.keys.len(),
            counters: self.counters,
        }
    }
}

/// Whether a request consumes a receive at the peer.
pub(super) fn takes_receive(request: &Posted) -> bool {
    matches!(
        request.operation,
        PostedOperation::Send { .. } | PostedOperation::Write { immediate: Some(_), .. }
    )
}
