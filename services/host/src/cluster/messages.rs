//! Messages of the migration protocol: the path that each takes, and checks of those that the service sends.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use control_api::cluster::proto;
use nomad::{HostId, Incarnation, Message, Node};
use tokio::sync::OwnedSemaphorePermit;

use super::ClusterDirectory;
use crate::peer_messages::{Hosts, KnownHost, MessagePath, PathCounts, PeerMessages, PeerMessagesReport};

/// Limit of bytes of the service's messages in the queue of the migration thread: eight of the largest. More are dropped; the protocol
/// repeats them.
pub(super) const MAX_SERVICE_INBOX_BYTES: usize = 8 * nomad::wire::MAX_MESSAGE_BYTES;
/// What a message costs there at least, bytes.
const MIN_MESSAGE_COST: usize = 256;

impl ClusterDirectory {
    /// Sets, or removes, the direct connections with other daemons.
    pub(crate) fn set_peer_messages(&self, peers: Option<PeerMessages>) {
        self.peer_messages.store(peers.map(Arc::new));
    }

    /// Connects directly to hosts to which messages will be sent soon.
    pub(crate) fn want_direct(&self, hosts: impl IntoIterator<Item = HostId>) {
        if let Some(peers) = self.peer_messages.load().as_ref() {
            peers.want(hosts.into_iter().filter(|host| self.host_named(*host).is_some()));
        }
    }

    /// Sends a message to the coordinator or another host. One for a host takes a direct connection if its peer acknowledges promptly, and
    /// otherwise the service. Drops a message that can't be sent now; the protocol repeats it.
    pub(crate) fn send(&self, message: &Message) {
        let mut bytes = Vec::new();
        nomad::wire::encode(message, &mut bytes);
        let mut path = MessagePath::Coordinator;
        if let Node::Host(to) = message.to {
            path = MessagePath::Service;
            let peers = self.peer_messages.load();
            // A number that the directory doesn't have comes from a peer's message.
            let peers = peers.as_ref().filter(|_| self.host_named(to).is_some());
            if peers.is_some_and(|peers| peers.send(to, &bytes)) {
                return self.sent.count(MessagePath::Direct);
            }
        }
        let sent = self
            .outbox()
            .as_ref()
            .is_some_and(|out| out.try_send(proto::Envelope { message: bytes }).is_ok());
        if sent {
            self.sent.count(path);
        } else {
            tracing::debug!(
                body = message.body.name(),
                "A message of the migration protocol can't be sent now"
            );
        }
    }

    /// Takes in a message that the service has sent: the coordinator's, or one that it passes on.
    pub(super) fn receive(&self, bytes: &[u8]) {
        let message = match nomad::wire::parse(bytes) {
            Ok(message) => message,
            Err(error) => {
                return tracing::warn!(%error, "The cluster service sends what is no message of the migration protocol");
            }
        };
        self.received.count(match message.from {
            Node::Coordinator => MessagePath::Coordinator,
            Node::Host(_) => MessagePath::Service,
        });
        let cost = u32::try_from(bytes.len().max(MIN_MESSAGE_COST)).unwrap_or(u32::MAX);
        let room = Arc::clone(&self.service_inbox).try_acquire_many_owned(cost);
        match (room, self.migration_handle()) {
            (Ok(room), Some(migration_handle)) => migration_handle.message(message, Some(room)),
            (Err(_), _) => {
                tracing::debug!(
                    body = message.body.name(),
                    "The migration thread is behind; a message is dropped"
                );
            }
            (Ok(_), None) => {}
        }
    }

    /// Counters of messages, and direct connections.
    pub(super) fn messages_report(&self) -> PeerMessagesReport {
        let (sent, received): (PathCounts, PathCounts) = (self.sent.get(), self.received.get());
        match self.peer_messages.load().as_ref() {
            Some(peers) => peers.report(sent, received),
            None => PeerMessagesReport::without_connections(sent, received),
        }
    }

    fn host_named(&self, host: HostId) -> Option<KnownHost> {
        let view = self.view.load();
        view.contents.hosts.get(&host.0).map(|known| KnownHost {
            name: known.name.clone(),
            address: known.address,
            incarnation: Incarnation(known.incarnation),
        })
    }
}

impl Hosts for ClusterDirectory {
    fn own(&self) -> Option<(HostId, Incarnation)> {
        let (own, incarnation) = (self.view.load().contents.own, self.incarnation.load(Ordering::SeqCst));
        (own != 0 && incarnation != 0).then_some((HostId(own), Incarnation(incarnation)))
    }

    fn host(&self, host: HostId) -> Option<KnownHost> {
        self.host_named(host)
    }

    fn has_host_at(&self, ip: IpAddr) -> bool {
        self.view.load().contents.hosts.values().any(|host| host.address.ip() == ip)
    }

    fn deliver(&self, message: Message, room: OwnedSemaphorePermit) {
        self.received.count(MessagePath::Direct);
        if let Some(migration_handle) = self.migration_handle() {
            migration_handle.message(message, Some(room));
        }
    }
}
