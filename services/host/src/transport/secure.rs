//! Encryption and authentication of packets between daemons that share a cluster key.
//!
//! Two hosts establish a session by the handshake `NNpsk0` of the Noise protocol framework (revision 34, chapters 7 and 9). It uses
//! ephemeral X25519 keys, so a key that is stolen later opens no earlier packet. It also uses the cluster key, so only its holders can take
//! part.
//!
//! ```text
//! initiator                                                            responder
//!   Hello   version 2 · 3 · 0 (2) │ e, {own session number, time} ──────▶  key right? time newer than the last one?
//!   ◀────────── Answer  version 2 · 4 · 0 (2) │ initiator's session │ e, {own session number}     session waits (`next`)
//!   session in use (`current`)
//!   Alive   kind 5, sealed, empty ──────────────────────────────────────▶  it opens: session in use (`current`)
//!   packets, kinds 1 and 2, sealed ◀──────────────────────────────────▶
//! ```
//!
//! The prologue binds both hosts' addresses in the directory, initiator first, so no message can be replayed to its sender. A replayed
//! Hello is older than the last one of its host; right after a restart it leads to a session that stays unused. State is bounded: per host
//! of the directory one handshake as initiator, and three sessions (previous, current, next). A session is replaced after two minutes or
//! 2^26 packets, and removed a while later. With its keys goes what could open its packets.
//!
//! A restarted daemon has no session: it responds with a Hello to a packet that it can't open (once a second at most). A host that sends
//! for three seconds without receiving an authentic packet also begins a handshake.
//!
//! Sans-IO: messages to send are left in an outbox, and the caller passes the time in.

mod handshake;
mod replay;
mod session;

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;

use super::counters::SessionCounters;
use super::header::{HEADER, Header, SEALED};
pub use cluster_key::{ClusterKey, KeyError};
use handshake::Attempt;
use session::{LANES, MOST_PACKETS, REKEY_AFTER_PACKETS, Session};

/// Bytes before the sealed part: the header, the session and the counter.
pub(super) const DATA_HEADER: usize = HEADER + 12;
/// Bytes of the tag after it.
pub(super) const TAG: usize = 16;
/// The protocol's name; packets use its cipher, too.
const PROTOCOL: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";
const HELLO: u8 = 3;
const ANSWER: u8 = 4;
const ALIVE: u8 = 5;

const SECOND: u64 = 1_000_000_000;
/// Age at which its initiator replaces a session, nanoseconds. The other side does so somewhat later if the initiator didn't.
const REKEY_AFTER: u64 = 120 * SECOND;
const REKEY_AFTER_RESPONDER: u64 = 150 * SECOND;
/// Age at which a session seals nothing any more, nanoseconds.
const SEAL_UNTIL: u64 = 180 * SECOND;
/// Age at which a session opens nothing any more, and its keys are removed, nanoseconds.
const OPEN_UNTIL: u64 = 200 * SECOND;
/// Time of sending without receiving an authentic packet after which a host begins a handshake, nanoseconds.
const SILENCE: u64 = 3 * SECOND;
/// First and longest interval between handshakes with one host (exponential back-off), nanoseconds.
const FIRST_RETRY: u64 = SECOND / 4;
const LAST_RETRY: u64 = 4 * SECOND;
/// Interval between two Hellos caused by packets without a session, nanoseconds.
const PROVOKED: u64 = SECOND;
/// Limits of packets that wait for a session with one host: bytes, and time in nanoseconds.
const MOST_HELD: usize = 256 << 10;
const HELD_FOR: u64 = SECOND;

/// Why a packet was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dropped {
    /// Too short, or of an unknown kind.
    Malformed,
    /// For a VM that isn't on this host.
    NoVm,
    /// For a queue pair that doesn't exist, or isn't connected.
    NoQueuePair,
    /// From a host other than that of the VM that it claims to be from.
    NotItsHost,
    /// Not encrypted, and this daemon encrypts.
    Plain,
    /// Encrypted, and this daemon has no key.
    Encrypted,
    /// Of an unknown session.
    NoSession,
    /// Its counter was received before, or is too old.
    Replayed,
    /// It doesn't open: changed on the way, or forged.
    Forged,
    /// A handshake message that doesn't open: made with another cluster key, or changed on the way.
    Handshake,
    /// A handshake message that isn't newer than the last one.
    OldHandshake,
    /// A handshake message from an address outside of the directory.
    Stranger,
    /// The directory pins the VMs to another transport.
    Pinned,
}

/// A host with which this one has, or attempts, a session.
#[derive(Debug, Clone, serde::Serialize)]
pub struct PeerReport {
    /// Its address in the directory.
    pub host: SocketAddr,
    /// `established`, `answered` (no packet received since), `asked` or `none`.
    pub session: &'static str,
    /// Packets sealed in the current session.
    pub sealed_packets: u64,
}

/// Packets that wait for a session.
pub(super) struct Held {
    pub to: SocketAddr,
    pub lane: usize,
    pub packets: Vec<u8>,
    pub stride: usize,
    pub ecn: bool,
    since: u64,
}

struct Peer {
    address: SocketAddr,
    attempt: Option<Attempt>,
    /// Own numbers of the sessions.
    next: Option<u32>,
    current: Option<u32>,
    previous: Option<u32>,
    /// Time in its newest Hello.
    newest_hello: u64,
    retry_at: u64,
    retry: u64,
    provoked_at: Option<u64>,
    unanswered_since: Option<u64>,
    held: VecDeque<Held>,
    held_bytes: usize,
}

impl Peer {
    fn new(address: SocketAddr) -> Self {
        Self {
            address,
            attempt: None,
            next: None,
            current: None,
            previous: None,
            newest_hello: 0,
            retry_at: 0,
            retry: FIRST_RETRY,
            provoked_at: None,
            unanswered_since: None,
            held: VecDeque::new(),
            held_bytes: 0,
        }
    }
}

/// A received packet.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Arrived<'a> {
    /// A packet of a host, for its VM.
    Data { host: SocketAddr, header: Header, packet: &'a [u8] },
    /// A message between the daemons.
    Handshake,
}

/// Result of sealing packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sealing {
    /// They are sealed.
    Done,
    /// There is no session: hold them.
    NoSession,
}

/// Sessions of a host; see the module.
pub(super) struct Secure {
    key: ClusterKey,
    own: SocketAddr,
    params: snow::params::NoiseParams,
    peers: Vec<Peer>,
    by_address: HashMap<SocketAddr, usize>,
    /// Sessions by own number, with their peers. There are few, and each packet needs a look-up: faster in a tree than hashed.
    sessions: BTreeMap<u32, (usize, Session)>,
    outbox: Vec<(SocketAddr, Vec<u8>)>,
    counters: SessionCounters,
    last_hello: u64,
    clock: fn() -> u64,
    /// Cached result of [`Secure::next`], which each pass of the engine reads.
    due: Cell<Option<Option<u64>>>,
}

/// Nanoseconds since 1970.
fn unix_time() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.ok().and_then(|since| u64::try_from(since.as_nanos()).ok()).unwrap_or(0)
}

impl Secure {
    /// The state for the host with address `own` in the directory.
    pub fn new(key: ClusterKey, own: SocketAddr) -> Result<Self, snow::Error> {
        Ok(Self {
            key,
            own,
            params: PROTOCOL.parse()?,
            peers: Vec::new(),
            by_address: HashMap::new(),
            sessions: BTreeMap::new(),
            outbox: Vec::new(),
            counters: SessionCounters::default(),
            last_hello: 0,
            clock: unix_time,
            due: Cell::new(None),
        })
    }

    pub fn counters(&self) -> SessionCounters {
        self.counters
    }

    /// Number of sessions.
    pub fn session_count(&self) -> usize {
        self.sessions.len()
    }

    pub fn report(&self) -> Vec<PeerReport> {
        let report = |peer: &Peer| {
            let current = peer.current.and_then(|number| self.sessions.get(&number));
            let session = match () {
                () if current.is_some() => "established",
                () if peer.next.is_some() => "answered",
                () if peer.attempt.is_some() => "asked",
                () => "none",
            };
            let sealed_packets = current.map_or(0, |(_, session)| session.sealed());
            PeerReport { host: peer.address, session, sealed_packets }
        };
        self.peers.iter().map(report).collect()
    }

    /// Index of a host, created if needed. Hosts come only from the directory, which bounds their number.
    fn peer(&mut self, address: SocketAddr) -> usize {
        let peers = &mut self.peers;
        *self.by_address.entry(address).or_insert_with(|| {
            peers.push(Peer::new(address));
            peers.len() - 1
        })
    }

    /// Seals packets of `stride` bytes (the last may be shorter), each with a header, for a host.
    pub fn seal(
        &mut self,
        to: SocketAddr,
        lane: usize,
        packets: &mut [u8],
        stride: usize,
        now: u64,
    ) -> Sealing {
        let index = self.peer(to);
        let count = packets.len().div_ceil(stride.max(1)) as u64;
        let Some(peer) = self.peers.get_mut(index) else { return Sealing::NoSession };
        let session = peer.current.and_then(|number| self.sessions.get_mut(&number));
        let usable = session.filter(|(_, session)| {
            now.saturating_sub(session.born) < SEAL_UNTIL && session.sealed() + count <= MOST_PACKETS
        });
        let Some((_, session)) = usable else {
            self.begin_if_due(index, now);
            return Sealing::NoSession;
        };
        for packet in packets.chunks_mut(stride.max(1)) {
            if session.seal(lane, packet).is_none() {
                return Sealing::NoSession;
            }
        }
        let age = now.saturating_sub(session.born);
        let due = if session.initiator { REKEY_AFTER } else { REKEY_AFTER_RESPONDER };
        let silent = *peer.unanswered_since.get_or_insert(now);
        if age >= due || session.sealed() >= REKEY_AFTER_PACKETS || now.saturating_sub(silent) >= SILENCE {
            self.begin_if_due(index, now);
        }
        Sealing::Done
    }

    /// Keeps unsealed packets until there is a session, within `MOST_HELD` bytes and a time limit.
    pub fn hold(&mut self, to: SocketAddr, lane: usize, packets: &[u8], stride: usize, ecn: bool, now: u64) {
        let index = self.peer(to);
        let count = packets.len().div_ceil(stride.max(1)) as u64;
        let Some(peer) = self.peers.get_mut(index) else { return };
        if peer.held_bytes + packets.len() > MOST_HELD {
            self.counters.packets_unsent += count;
            return;
        }
        self.due.set(None);
        self.counters.packets_held += count;
        peer.held_bytes += packets.len();
        peer.held.push_back(Held { to, lane, packets: packets.to_vec(), stride, ecn, since: now });
    }

    /// Packets whose session was established.
    pub fn take_held(&mut self) -> Option<Held> {
        let with_session = |peer: &&mut Peer| peer.current.is_some() && !peer.held.is_empty();
        let peer = self.peers.iter_mut().find(with_session)?;
        let held = peer.held.pop_front()?;
        self.due.set(None);
        peer.held_bytes = peer.held_bytes.saturating_sub(held.packets.len());
        Some(held)
    }

    /// Messages between the daemons to send, from the first socket of this host to the first of the other.
    pub fn take_outbox(&mut self) -> Vec<(SocketAddr, Vec<u8>)> {
        std::mem::take(&mut self.outbox)
    }

    /// Time of the next [`Secure::expire`].
    pub fn next(&self) -> Option<u64> {
        if let Some(next) = self.due.get() {
            return next;
        }
        let next = self.find_next();
        self.due.set(Some(next));
        next
    }

    fn find_next(&self) -> Option<u64> {
        let held = self.peers.iter().filter_map(|peer| {
            let oldest = peer.held.front()?;
            Some((oldest.since + HELD_FOR).min(peer.retry_at.max(oldest.since)))
        });
        let sessions = self.sessions.values().map(|(_, session)| session.born + OPEN_UNTIL);
        held.chain(sessions).min()
    }

    /// Removes what has expired, and repeats handshakes.
    pub fn expire(&mut self, now: u64) {
        if self.next().is_none_or(|next| next > now) {
            return;
        }
        self.due.set(None);
        for index in 0..self.peers.len() {
            let Some(peer) = self.peers.get_mut(index) else { continue };
            while peer.held.front().is_some_and(|held| held.since + HELD_FOR <= now) {
                let Some(held) = peer.held.pop_front() else { break };
                peer.held_bytes = peer.held_bytes.saturating_sub(held.packets.len());
                self.counters.packets_unsent += held.packets.len().div_ceil(held.stride.max(1)) as u64;
            }
            if !peer.held.is_empty() {
                self.begin_if_due(index, now);
            }
        }
        let dead: Vec<u32> = self
            .sessions
            .iter()
            .filter(|(_, (_, session))| session.born + OPEN_UNTIL <= now)
            .map(|(number, _)| *number)
            .collect();
        for number in dead {
            if let Some((index, _)) = self.sessions.remove(&number)
                && let Some(peer) = self.peers.get_mut(index)
            {
                for place in [&mut peer.next, &mut peer.current, &mut peer.previous] {
                    if *place == Some(number) {
                        *place = None;
                    }
                }
            }
        }
    }

    fn begin_if_due(&mut self, index: usize, now: u64) {
        let Some(peer) = self.peers.get_mut(index).filter(|peer| peer.retry_at <= now) else { return };
        self.due.set(None);
        peer.retry_at = now + peer.retry;
        peer.retry = (peer.retry * 2).min(LAST_RETRY);
        let address = peer.address;
        match self.hello(address) {
            Ok((attempt, message)) => {
                self.counters.handshakes_started += 1;
                if let Some(peer) = self.peers.get_mut(index) {
                    peer.attempt = Some(attempt);
                }
                self.outbox.push((address, message));
            }
            Err(error) => tracing::error!(%error, host = %address, "No handshake can be begun"),
        }
    }

    /// Processes a packet of version 2. `known` maps an address to a host of the directory.
    pub fn arrive<'a>(
        &mut self,
        from: SocketAddr,
        packet: &'a mut [u8],
        now: u64,
        known: &dyn Fn(SocketAddr) -> Option<SocketAddr>,
    ) -> Result<Arrived<'a>, Dropped> {
        let [SEALED, kind, 0, 0, ..] = *packet else { return Err(Dropped::Malformed) };
        match kind {
            HELLO | ANSWER => {
                // Handshakes are sent between first sockets.
                let host = known(from).filter(|host| *host == from).ok_or(Dropped::Stranger)?;
                let index = self.peer(host);
                if kind == HELLO {
                    self.take_hello(index, packet, now)?;
                } else {
                    self.take_answer(index, packet, now)?;
                }
                Ok(Arrived::Handshake)
            }
            _ => self.take_data(from, kind, packet, now, known),
        }
    }

    /// Makes this session the current one for sealing.
    fn put_to_use(&mut self, index: usize, number: u32, now: u64) {
        self.due.set(None);
        let Some(peer) = self.peers.get_mut(index) else { return };
        if peer.next == Some(number) {
            peer.next = None;
        }
        let gone = std::mem::replace(&mut peer.previous, peer.current.replace(number));
        gone.map(|gone| self.sessions.remove(&gone));
        peer.retry = FIRST_RETRY;
        peer.retry_at = now + FIRST_RETRY;
        peer.unanswered_since = None;
        self.counters.sessions_established += 1;
    }

    fn take_data<'a>(
        &mut self,
        from: SocketAddr,
        kind: u8,
        packet: &'a mut [u8],
        now: u64,
        known: &dyn Fn(SocketAddr) -> Option<SocketAddr>,
    ) -> Result<Arrived<'a>, Dropped> {
        let place = packet.get(HEADER..HEADER + 4).filter(|_| packet.len() >= DATA_HEADER + TAG);
        let number = place.and_then(|bytes| bytes.try_into().ok()).map(u32::from_be_bytes);
        let number = number.ok_or(Dropped::Malformed)?;
        let header = if kind == ALIVE && packet.get(..HEADER) == Some(&Header::between_daemons(ALIVE)[..]) {
            None
        } else {
            Some(Header::decode(packet, SEALED).ok_or(Dropped::Malformed)?.0)
        };
        let Some((index, session)) = self.sessions.get_mut(&number) else {
            self.provoked(from, now, known);
            return Err(Dropped::NoSession);
        };
        let index = *index;
        let body = session.open(packet)?;
        let peer = self.peers.get_mut(index).ok_or(Dropped::NoSession)?;
        let host = peer.address;
        peer.unanswered_since = None;
        if peer.next == Some(number) {
            self.put_to_use(index, number, now);
        }
        Ok(match header {
            Some(header) => Arrived::Data { host, header, packet: body },
            None => Arrived::Handshake,
        })
    }

    /// A host uses a session unknown here, so this daemon was restarted. Any host can cause this, hence the rate limit.
    fn provoked(&mut self, from: SocketAddr, now: u64, known: &dyn Fn(SocketAddr) -> Option<SocketAddr>) {
        let Some(host) = known(from) else { return };
        let index = self.peer(host);
        let Some(peer) = self.peers.get_mut(index) else { return };
        let lately = peer.provoked_at.is_some_and(|at| now.saturating_sub(at) < PROVOKED);
        if peer.current.is_none() && !lately {
            peer.provoked_at = Some(now);
            self.begin_if_due(index, now);
        }
    }
}

/// The host that has the socket from which a packet came.
pub(super) fn host_of(hosts: &[SocketAddr], from: SocketAddr) -> Option<SocketAddr> {
    let mut found = hosts.iter().filter(|host| {
        let offset = from.port().checked_sub(host.port()).map(usize::from);
        host.ip() == from.ip() && offset.is_some_and(|offset| offset < LANES)
    });
    // Where hosts share an address, their ports may be close together: the nearest below.
    let first = found.next()?;
    Some(found.fold(*first, |best, host| if host.port() > best.port() { *host } else { best }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // For tests only.
mod tests;
