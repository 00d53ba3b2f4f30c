//! Messages of the migration protocol between daemons, by a direct connection of their own.
//!
//! ```text
//!  migration thread ── send ──▶ Table ─▶ Link (queue) ─▶ writer ═══ TCP ═══▶ reader ─▶ checks ─▶ migration thread of the peer
//!                        │ no link, or nothing acknowledged for 100 ms
//!                        └─────────▶ cluster service, which passes the message on
//! ```
//! Each daemon listens on TCP at its first fabric port. Either side opens a connection when it has messages for the other one, or a migration
//! that both take part in is reserved. Two connections between two hosts, one in each direction, do no harm: messages may overtake each
//! other, and repeated ones change nothing.
//!
//! Nothing depends on a direct connection. A message that can't go directly, or whose connection has been silent for a moment, goes through
//! the cluster service, and a connection is attempted with exponential back-off.
//!
//! A peer is hostile until its handshake is complete, and its bytes always are. So sizes, queues, connections and times are bounded. Each
//! message must come from the host that the connection authenticated, in no incarnation older than the directory's. With a cluster key the
//! connection is sealed (`cluster_key::stream`). Without a key it is plain, like packets of the fabric: then only the peer's IP address
//! identifies it.
//!
//! | module | holds |
//! |---|---|
//! | [`frame`] | frames, and the reader of untrusted bytes |
//! | [`hello`] | who both ends are; what is refused |
//! | [`backoff`] | when to connect again |
//! | [`link`] | one connection's queue, acknowledgements and deadlines |
//! | [`table`] | links of all hosts: which one a message takes, and which hosts to connect to |
//! | [`channel`] | the preamble; sealing and opening of a byte stream |
//! | `connection`, `thread` | the shell: sockets and time |
//! | [`counters`] | metrics and the live tree |

mod backoff;
mod channel;
mod connection;
mod counters;
mod frame;
#[doc(hidden)]
pub mod fuzzing;
mod hello;
mod link;
mod table;
mod thread;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use nomad::{HostId, Incarnation, Message};
use tokio::sync::{Notify, OwnedSemaphorePermit};

pub(crate) use counters::{MessagePath, PathCounters};
pub use counters::{PathCounts, PeerMessagesReport, PeerReport};
pub(crate) use thread::{PeerMessagesThread, bind};

use counters::Counters;
use table::Table;

/// Room in the queue of the migration thread; a message takes it until the thread has taken the message.
pub(crate) type InboxPermit = OwnedSemaphorePermit;

/// A host as the directory knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KnownHost {
    pub name: String,
    /// Where its daemon receives packets (UDP) and messages (TCP).
    pub address: SocketAddr,
    /// 0: not known.
    pub incarnation: Incarnation,
}

/// What a daemon knows of its cluster's hosts. Called from several threads; must not block.
pub(crate) trait Hosts: Send + Sync {
    /// This host's number and incarnation; `None`: not registered.
    fn own(&self) -> Option<(HostId, Incarnation)>;
    /// A host of the cluster.
    fn host(&self, host: HostId) -> Option<KnownHost>;
    /// Whether a host of the cluster has this address.
    fn has_host_at(&self, ip: IpAddr) -> bool;
    /// Takes a checked message in. It is dropped at the daemon's end.
    fn deliver(&self, message: Message, permit: InboxPermit);
}

/// What all tasks and threads share.
struct Shared {
    hosts: Arc<dyn Hosts>,
    table: Table,
    counters: Counters,
    /// Something is to be connected.
    wanted: Notify,
}

/// Sends messages to other daemons. Cheap to clone; never blocks.
#[derive(Clone)]
pub(crate) struct PeerMessages(Arc<Shared>);

impl std::fmt::Debug for PeerMessages {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("PeerMessages")
    }
}

impl PeerMessages {
    fn new(hosts: Arc<dyn Hosts>) -> Self {
        let (table, counters) = (Table::default(), Counters::default());
        Self(Arc::new(Shared { hosts, table, counters, wanted: Notify::new() }))
    }

    /// Sends an encoded message to a host directly. Returns `false` if it has to go through the cluster service (as well): there is no
    /// connection, it has no room, or its peer has acknowledged nothing for a moment. Then a connection is attempted.
    pub fn send(&self, to: HostId, message: &[u8]) -> bool {
        let now = Instant::now();
        match self.0.table.send(to, message, now) {
            table::Sent::Prompt => true,
            table::Sent::Late => false,
            table::Sent::No => {
                self.want([to]);
                false
            }
        }
    }

    /// Connects to hosts to which messages will be sent soon.
    pub fn want(&self, hosts: impl IntoIterator<Item = HostId>) {
        let own = self.0.hosts.own().map(|(own, _)| own);
        let now = Instant::now();
        for host in hosts.into_iter().filter(|host| Some(*host) != own) {
            self.0.table.want(host, now);
        }
        self.0.wanted.notify_one();
    }

    /// Counters and connections, with `sent` and `received` by the callers' count.
    pub fn report(&self, sent: PathCounts, received: PathCounts) -> PeerMessagesReport {
        let peers = self.0.table.report(Instant::now());
        let named = peers.into_iter().map(|(host, report)| {
            let name = self.0.hosts.host(host).map_or_else(|| host.to_string(), |host| host.name);
            (name, report)
        });
        self.0.counters.report(sent, received, named.collect())
    }
}
