//! Counters of messages between daemons, for metrics and the live tree.

use std::collections::BTreeMap;

use telemetry::Counter;

use super::hello::Refusal;

/// How a message travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MessagePath {
    /// Between hosts, by a direct connection.
    Direct,
    /// Between hosts, passed on by the cluster service.
    Service,
    /// To or from the coordinator.
    Coordinator,
}

/// Messages by path.
#[derive(Debug, Default)]
pub(crate) struct PathCounters {
    direct: Counter,
    service: Counter,
    coordinator: Counter,
}

impl PathCounters {
    pub fn count(&self, path: MessagePath) {
        match path {
            MessagePath::Direct => self.direct.increment(),
            MessagePath::Service => self.service.increment(),
            MessagePath::Coordinator => self.coordinator.increment(),
        }
    }

    pub fn get(&self) -> PathCounts {
        PathCounts {
            direct: self.direct.get(),
            service: self.service.get(),
            coordinator: self.coordinator.get(),
        }
    }
}

/// Numbers of messages of the migration protocol since the daemon's start. One that goes both ways counts twice.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct PathCounts {
    /// Between hosts, by a direct connection.
    pub direct: u64,
    /// Between hosts, passed on by the cluster service.
    pub service: u64,
    /// To or from the coordinator.
    pub coordinator: u64,
}

impl PathCounts {
    /// Each path's name and count.
    pub fn list(&self) -> [(&'static str, u64); 3] {
        [("direct", self.direct), ("service", self.service), ("coordinator", self.coordinator)]
    }
}

/// Why a peer's message was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dropped {
    /// It isn't a message of the protocol.
    Malformed,
    /// It says that another host sent it, or is for another one.
    WrongHost,
    /// An earlier start of its host sent it.
    OldIncarnation,
    /// The migration thread has too many messages of that host already; the protocol repeats it.
    QueueFull,
}

impl Dropped {
    const ALL: [Self; 4] = [Self::Malformed, Self::WrongHost, Self::OldIncarnation, Self::QueueFull];

    fn label(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::WrongHost => "wrong_host",
            Self::OldIncarnation => "old_incarnation",
            Self::QueueFull => "queue_full",
        }
    }
}

/// Counters of direct connections.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub established: Counter,
    pub failed_attempts: Counter,
    pub bytes_sent: Counter,
    pub bytes_received: Counter,
    refused: [Counter; Refusal::ALL.len()],
    dropped: [Counter; Dropped::ALL.len()],
}

impl PeerMessagesReport {
    /// Of a daemon that has no direct connections.
    pub(crate) fn without_connections(sent: PathCounts, received: PathCounts) -> Self {
        Counters::default().report(sent, received, BTreeMap::new())
    }
}

impl Counters {
    pub fn refused(&self, why: Refusal) {
        if let Some(at) = Refusal::ALL.iter().position(|other| *other == why)
            && let Some(counter) = self.refused.get(at)
        {
            counter.increment();
        }
    }

    pub fn dropped(&self, why: Dropped) {
        if let Some(at) = Dropped::ALL.iter().position(|other| *other == why)
            && let Some(counter) = self.dropped.get(at)
        {
            counter.increment();
        }
    }

    pub fn report(
        &self,
        sent: PathCounts,
        received: PathCounts,
        peers: BTreeMap<String, PeerReport>,
    ) -> PeerMessagesReport {
        let refused = Refusal::ALL.iter().zip(&self.refused);
        let dropped = Dropped::ALL.iter().zip(&self.dropped);
        PeerMessagesReport {
            sent,
            received,
            connections: peers.values().map(|peer| peer.connections).sum(),
            connections_established: self.established.get(),
            connection_attempts_failed: self.failed_attempts.get(),
            connections_refused: refused.map(|(why, count)| (why.label(), count.get())).collect(),
            messages_dropped: dropped.map(|(why, count)| (why.label(), count.get())).collect(),
            bytes_sent: self.bytes_sent.get(),
            bytes_received: self.bytes_received.get(),
            peers,
        }
    }
}

/// How messages reach a host at present.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct PeerReport {
    /// `direct` or `service`.
    pub path: &'static str,
    /// Direct connections with it: 2 if both sides have connected.
    pub connections: usize,
}

/// Messages of the migration protocol, and direct connections with other daemons. Counters are of the time since the daemon's start.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct PeerMessagesReport {
    /// Messages sent.
    pub sent: PathCounts,
    /// Messages received.
    pub received: PathCounts,
    /// Direct connections at present.
    pub connections: usize,
    /// Direct connections that were established.
    pub connections_established: u64,
    /// Own attempts to connect that failed.
    pub connection_attempts_failed: u64,
    /// Connections of peers that were refused, by reason.
    pub connections_refused: BTreeMap<&'static str, u64>,
    /// Messages of peers that were dropped, by reason.
    pub messages_dropped: BTreeMap<&'static str, u64>,
    /// Bytes sent by direct connections, without TCP's headers.
    pub bytes_sent: u64,
    /// Bytes received by direct connections, without TCP's headers.
    pub bytes_received: u64,
    /// Hosts to which there are, or were lately to be, direct connections, by name.
    pub peers: BTreeMap<String, PeerReport>,
}
