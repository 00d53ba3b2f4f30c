//! Interface of the fuzz targets: the parts of `fabric` that process hostile bytes, without sockets. Not part of the public interface.

use std::net::SocketAddr;

use super::directory::VmId;
use super::header::{Addresses, Header, Kind, PLAIN, SEALED};
use super::secure::{Arrived, ClusterKey, DATA_HEADER, Sealing, Secure, TAG, host_of};
use super::verbs::Message;

/// Decodes the headers of a plain packet, and encodes them again.
pub fn headers(bytes: &[u8]) {
    let Some((header, rest)) = Header::decode(bytes, PLAIN) else { return };
    assert_eq!(header.encode(PLAIN).as_slice(), &bytes[..bytes.len() - rest.len()]);
    if header.kind == Kind::Datagram
        && let Some((addresses, payload)) = Addresses::decode(rest)
    {
        assert_eq!(Addresses::decode(&addresses.encode()), Some((addresses, &[][..])));
        assert!(payload.len() < rest.len());
    }
    if header.kind == Kind::Control
        && let Some(message) = Message::decode(rest)
    {
        assert_eq!(Message::decode(&message.encode()), Some(message));
    }
}

/// Two hosts with one key; the caller is the network between them.
pub struct TwoHosts {
    hosts: [Secure; 2],
    key: ClusterKey,
    now: u64,
}

fn address(side: usize) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, if side == 0 { 1 } else { 2 }], 4792))
}

fn secure(key: &ClusterKey, side: usize) -> Option<Secure> {
    Secure::new(key.clone(), address(side)).ok()
}

impl std::fmt::Debug for TwoHosts {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("TwoHosts").finish_non_exhaustive()
    }
}

impl TwoHosts {
    /// Two hosts without a session. `None`: the key is invalid.
    #[must_use]
    pub fn new(key: [u8; 32]) -> Option<Self> {
        let key = ClusterKey::new(key)?;
        Some(Self { hosts: [secure(&key, 0)?, secure(&key, 1)?], key, now: 1 << 40 })
    }

    /// Seals a packet for the other side; `None`: it has to wait for a session.
    pub fn seal(&mut self, side: usize, lane: usize, body: &[u8]) -> Option<Vec<u8>> {
        let header = Header { kind: Kind::Connected, source: VmId(1), destination: VmId(2), segment: 3 };
        let mut packet = header.encode(SEALED).to_vec();
        packet.resize(DATA_HEADER, 0);
        packet.extend_from_slice(body);
        packet.resize(packet.len() + TAG, 0);
        let len = packet.len();
        let sealing = self.hosts[side].seal(address(1 - side), lane, &mut packet, len, self.now);
        (sealing == Sealing::Done).then_some(packet)
    }

    /// Messages of a side for the other.
    pub fn messages(&mut self, side: usize) -> Vec<Vec<u8>> {
        self.hosts[side].take_outbox().into_iter().map(|(_, message)| message).collect()
    }

    /// Passes bytes to a side as if from the other, from the socket with this number. Returns an accepted packet.
    pub fn deliver(&mut self, side: usize, socket: u16, bytes: &[u8]) -> Option<Vec<u8>> {
        let mut bytes = bytes.to_vec();
        let mut from = address(1 - side);
        from.set_port(from.port().wrapping_add(socket));
        let known = |from| host_of(&[address(0), address(1)], from);
        match self.hosts[side].arrive(from, &mut bytes, self.now, &known) {
            Ok(Arrived::Data { packet, .. }) => Some(packet.to_vec()),
            Ok(Arrived::Handshake) | Err(_) => None,
        }
    }

    /// Advances the time, nanoseconds.
    pub fn pass(&mut self, nanoseconds: u64) {
        self.now += nanoseconds;
        for host in &mut self.hosts {
            host.expire(self.now);
        }
    }

    /// Restarts a daemon.
    pub fn restart(&mut self, side: usize) {
        if let Some(new) = secure(&self.key, side) {
            self.hosts[side] = new;
        }
    }

    /// Number of sessions that a side keeps.
    #[must_use]
    pub fn sessions(&self, side: usize) -> usize {
        self.hosts[side].session_count()
    }
}
