//! Links of all hosts: which one a message takes, and which hosts to connect to.
//!
//! No I/O: the caller passes the time in.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nomad::HostId;
use tokio::sync::Semaphore;

use super::PeerReport;
use super::backoff::Backoff;
use super::link::Link;
pub(super) use super::link::Sent;

/// For how long connections are attempted after a host was last wanted.
const WANTED_FOR: Duration = Duration::from_secs(30);
/// A connection that ends earlier counts as a failed attempt.
const STABLE_AFTER: Duration = Duration::from_secs(10);
/// Limit of concurrent attempts.
const MAX_CONNECTING: usize = 64;
/// Limit of bytes of one host's messages in the queue of the migration thread: two of the largest.
pub(super) const MAX_INBOX_BYTES: usize = 2 * nomad::wire::MAX_MESSAGE_BYTES;

#[derive(Debug)]
struct Peer {
    /// At most one that this side has initiated, and one of the other side; the newest last.
    links: Vec<Arc<Link>>,
    connecting: bool,
    wanted_until: Option<Instant>,
    backoff: Backoff,
    not_before: Option<Instant>,
    inbox: Arc<Semaphore>,
}

impl Default for Peer {
    fn default() -> Self {
        Self {
            links: Vec::new(),
            connecting: false,
            wanted_until: None,
            backoff: Backoff::default(),
            not_before: None,
            inbox: Arc::new(Semaphore::new(MAX_INBOX_BYTES)),
        }
    }
}

impl Peer {
    /// When a connection is to be attempted; `None`: it isn't.
    fn due(&self, now: Instant) -> Option<Instant> {
        let until = self.wanted_until.filter(|_| self.links.is_empty() && !self.connecting)?;
        let at = self.not_before.unwrap_or(now).max(now);
        (at < until).then_some(at)
    }

    fn is_forgotten(&self, now: Instant) -> bool {
        let unwanted = self.wanted_until.is_none_or(|until| until <= now);
        let waits = self.not_before.is_some_and(|at| at > now);
        // Messages that wait to be taken keep their room: a host that connects anew gets no more.
        let taken = self.inbox.available_permits() == MAX_INBOX_BYTES;
        unwanted && !waits && taken && self.links.is_empty() && !self.connecting
    }

    fn failed(&mut self, now: Instant, random: u32) {
        self.not_before = Some(now + self.backoff.next(random));
    }
}

/// See the module. Callers pass hosts of the directory only, which bounds the table.
#[derive(Debug, Default)]
pub(super) struct Table(Mutex<BTreeMap<HostId, Peer>>);

impl Table {
    fn peers(&self) -> MutexGuard<'_, BTreeMap<HostId, Peer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a message for a host, on a link whose peer acknowledges promptly if there is one.
    pub fn send(&self, to: HostId, message: &[u8], now: Instant) -> Sent {
        let peers = self.peers();
        let links = peers.get(&to).map(|peer| peer.links.as_slice()).unwrap_or_default();
        let link = links.iter().rev().find(|link| link.is_prompt(now)).or(links.last());
        link.map_or(Sent::No, |link| link.send(message, now))
    }

    /// A host will be sent messages.
    pub fn want(&self, host: HostId, now: Instant) {
        self.peers().entry(host).or_default().wanted_until = Some(now + WANTED_FOR);
    }

    /// Hosts to connect to now, each of which is then [`Table::established`] or [`Table::failed`], and when the next ones are due.
    pub fn due(&self, now: Instant) -> (Vec<HostId>, Option<Instant>) {
        let mut peers = self.peers();
        peers.retain(|_, peer| !peer.is_forgotten(now));
        let mut room = MAX_CONNECTING.saturating_sub(peers.values().filter(|peer| peer.connecting).count());
        let (mut hosts, mut next) = (Vec::new(), None::<Instant>);
        for (host, peer) in peers.iter_mut() {
            match peer.due(now) {
                Some(at) if at <= now && room > 0 => {
                    room -= 1;
                    peer.connecting = true;
                    hosts.push(*host);
                }
                // One that has no room is due when an attempt ends.
                Some(at) if at > now => next = Some(next.map_or(at, |next| next.min(at))),
                _ => {}
            }
        }
        (hosts, next)
    }

    /// An attempt to connect to a host has failed.
    pub fn failed(&self, host: HostId, now: Instant, random: u32) {
        if let Some(peer) = self.peers().get_mut(&host) {
            peer.connecting = false;
            peer.failed(now, random);
        }
    }

    /// A connection with a host is established. It takes the place of an earlier one in its direction.
    pub fn established(&self, host: HostId, link: &Arc<Link>) {
        let mut peers = self.peers();
        let peer = peers.entry(host).or_default();
        peer.connecting &= !link.initiated;
        peer.links.retain(|other| {
            let stays = other.initiated != link.initiated;
            if !stays {
                other.close();
            }
            stays
        });
        peer.links.push(Arc::clone(link));
    }

    /// A connection with a host has ended.
    pub fn closed(&self, host: HostId, link: &Arc<Link>, now: Instant, random: u32) {
        link.close();
        let mut peers = self.peers();
        let Some(peer) = peers.get_mut(&host) else { return };
        peer.links.retain(|other| !Arc::ptr_eq(other, link));
        if now.saturating_duration_since(link.since) < STABLE_AFTER {
            peer.failed(now, random);
        } else {
            peer.backoff.reset();
        }
    }

    /// Room for a host's messages in the queue of the migration thread, in bytes.
    pub fn inbox(&self, host: HostId) -> Arc<Semaphore> {
        Arc::clone(&self.peers().entry(host).or_default().inbox)
    }

    /// Hosts to which there are, or were lately to be, connections.
    pub fn report(&self, now: Instant) -> BTreeMap<HostId, PeerReport> {
        let report = |peer: &Peer| {
            let direct = peer.links.iter().any(|link| link.is_prompt(now));
            PeerReport { path: if direct { "direct" } else { "service" }, connections: peer.links.len() }
        };
        self.peers().iter().map(|(host, peer)| (*host, report(peer))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::link::LATE_AFTER;
    use super::*;

    const TWO: HostId = HostId(2);
    const MESSAGE: [u8; nomad::wire::HEADER_BYTES] = [7; nomad::wire::HEADER_BYTES];

    /// Attempts of a host that never answers become rare, and end when nobody wants it any more.
    #[test]
    fn a_host_that_cannot_be_reached_is_tried_less_and_less() {
        let table = Table::default();
        let start = Instant::now();
        let mut now = start;
        table.want(TWO, now);
        assert_eq!(table.due(now).0, [TWO]);
        assert_eq!(table.due(now).0, [], "one attempt at a time");
        let mut attempts = 1;
        table.failed(TWO, now, u32::MAX / 2);
        while let (_, Some(next)) = table.due(now) {
            now = next;
            let (hosts, _) = table.due(now);
            attempts += hosts.len();
            hosts.into_iter().for_each(|host| table.failed(host, now, u32::MAX / 2));
        }
        assert!((8..12).contains(&attempts), "{attempts}");
        assert!(now - start < WANTED_FOR);
        table.due(now + WANTED_FOR);
        assert!(table.peers().is_empty(), "it is forgotten");
    }

    /// A peer that connects again and again has one connection in its direction.
    #[test]
    fn a_new_connection_replaces_the_one_before() {
        let table = Table::default();
        let now = Instant::now();
        let links: Vec<_> = (0..100).map(|_| Arc::new(Link::new(false, now))).collect();
        links.iter().for_each(|link| table.established(TWO, link));
        assert_eq!(table.report(now)[&TWO].connections, 1);
        assert!(links[..99].iter().all(|link| !link.is_prompt(now)) && links[99].is_prompt(now));
        let own = Arc::new(Link::new(true, now));
        table.established(TWO, &own);
        assert_eq!(table.report(now)[&TWO].connections, 2);
        table.closed(TWO, &links[98], now, 0);
        assert_eq!(table.report(now)[&TWO].connections, 2, "one that was replaced changes nothing");
    }

    /// A message takes the connection whose peer answers.
    #[test]
    fn a_silent_connection_is_passed_over() {
        let table = Table::default();
        let start = Instant::now();
        assert_eq!(table.send(TWO, &MESSAGE, start), Sent::No);
        let (one, other) = (Arc::new(Link::new(false, start)), Arc::new(Link::new(true, start)));
        table.established(TWO, &one);
        table.established(TWO, &other);
        assert_eq!(table.send(TWO, &MESSAGE, start), Sent::Prompt);
        let late = start + LATE_AFTER;
        assert!(one.is_prompt(late) && !other.is_prompt(late));
        assert_eq!(table.send(TWO, &MESSAGE, late), Sent::Prompt, "by the other one");
        assert_eq!(table.send(TWO, &MESSAGE, late + LATE_AFTER), Sent::Late);
        table.closed(TWO, &one, late, 0);
        table.closed(TWO, &other, late, 0);
        assert_eq!(table.send(TWO, &MESSAGE, late), Sent::No);
    }

    /// A host whose messages wait to be taken has no more room when it connects again.
    #[test]
    fn a_host_that_comes_back_has_the_room_that_it_left() {
        let table = Table::default();
        let now = Instant::now();
        let room = table.inbox(TWO).try_acquire_many_owned(u32::try_from(MAX_INBOX_BYTES).expect("fits"));
        table.due(now);
        assert!(table.inbox(TWO).try_acquire_owned().is_err());
        drop(room);
        table.due(now);
        assert!(table.peers().is_empty(), "it is forgotten");
    }

    /// A connection that breaks at once is a failed attempt.
    #[test]
    fn a_connection_that_does_not_last_is_not_made_anew_at_once() {
        let table = Table::default();
        let now = Instant::now();
        table.want(TWO, now);
        assert_eq!(table.due(now).0, [TWO]);
        let link = Arc::new(Link::new(true, now));
        table.established(TWO, &link);
        table.closed(TWO, &link, now, 0);
        let (hosts, next) = table.due(now);
        assert!(hosts.is_empty() && next.is_some_and(|next| next > now));
    }
}
