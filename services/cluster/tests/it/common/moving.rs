//! Hosts' side of the migration protocol, step by step.
#![allow(dead_code, clippy::unwrap_used, clippy::missing_panics_doc)] // Tests' other half; each uses its part.

use std::time::Duration;

use control_api::cluster::Service;
use control_api::cluster::proto::{self, Speaker};
use nomad::{Body, HostId, Incarnation, Message, MigrationId, Node};

/// A host's stream to the coordinator, driven by the test.
pub struct Host {
    runtime: tokio::runtime::Runtime,
    outgoing: tokio::sync::mpsc::Sender<proto::Envelope>,
    incoming: tonic::Streaming<proto::Envelope>,
    speaker: Speaker,
}

impl Host {
    pub fn new(service: &Service, speaker: Speaker) -> Self {
        Self::try_new(service, speaker).unwrap()
    }

    /// Opens the stream; `None`: no instance accepts it now.
    pub fn try_new(service: &Service, speaker: Speaker) -> Option<Self> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (outgoing, messages) = tokio::sync::mpsc::channel(8);
        let host = HostId(speaker.host);
        let hello = envelope(host, speaker.incarnation, Body::Hello);
        let incoming = runtime.block_on(async {
            outgoing.send(hello).await.unwrap();
            let mut client = service.connect().await.ok()?;
            let messages = tonic::codegen::tokio_stream::wrappers::ReceiverStream::new(messages);
            Some(client.coordinate(messages).await.ok()?.into_inner())
        })?;
        let mut host = Self { runtime, outgoing, incoming, speaker };
        // If the first answers don't come soon, the stream is dead.
        for _ in 0..40 {
            if let Some(body) = host.soon_unless_broken()? {
                assert_eq!(body, Body::Welcome);
                return Some(host);
            }
        }
        None
    }

    pub fn say(&self, body: Body) {
        let envelope = envelope(HostId(self.speaker.host), self.speaker.incarnation, body);
        // If the stream has ended, the next receive reports it.
        let _ = self.runtime.block_on(self.outgoing.send(envelope));
    }

    pub fn next(&mut self) -> Body {
        let next = async { tokio::time::timeout(Duration::from_secs(10), self.incoming.message()).await };
        let envelope = self.runtime.block_on(next).unwrap().unwrap().unwrap();
        nomad::wire::parse(&envelope.message).unwrap().body
    }

    /// The next message, if it arrives within 250 ms.
    pub fn soon(&mut self) -> Option<Body> {
        self.soon_unless_broken().unwrap()
    }

    /// As [`Host::soon`]; `None`: the stream has ended.
    pub fn soon_unless_broken(&mut self) -> Option<Option<Body>> {
        let next = async { tokio::time::timeout(Duration::from_millis(250), self.incoming.message()).await };
        let Ok(message) = self.runtime.block_on(next) else { return Some(None) };
        let envelope = message.ok()??;
        Some(Some(nomad::wire::parse(&envelope.message).unwrap().body))
    }

    /// Skips retransmissions of earlier messages until a wanted one arrives.
    pub fn until(&mut self, wanted: impl Fn(&Body) -> bool) -> Body {
        loop {
            let body = self.next();
            if wanted(&body) {
                return body;
            }
        }
    }
}

pub fn envelope(host: HostId, incarnation: u64, body: Body) -> proto::Envelope {
    let from = Node::Host(host);
    let message = Message { from, incarnation: Incarnation(incarnation), to: Node::Coordinator, body };
    let mut bytes = Vec::new();
    nomad::wire::encode(&message, &mut bytes);
    proto::Envelope { message: bytes }
}

/// Number of steps until both hosts have settled.
pub const STEPS: usize = 9;

/// Takes both hosts through the first `count` steps of a migration of one VM. Returns whether a host has received the
/// commit.
pub fn steps(source: &mut Host, destination: &mut Host, migration: u64, count: usize) -> bool {
    let migration = MigrationId(migration);
    let settled = || Body::Settled { migration, lost: Vec::new() };
    for step in 0..count.min(STEPS) {
        match step {
            0 => drop(destination.until(|body| matches!(body, Body::Reserve { .. }))),
            1 => destination.say(Body::Reserved { migration }),
            2 => {
                source.until(|body| matches!(body, Body::Begin { .. }));
                source.say(Body::Converged { migration });
            }
            3 => drop(source.until(|body| matches!(body, Body::Switch { .. }))),
            4 => destination.say(Body::Loaded { migration }),
            5 => source.say(Body::Yield { migration }),
            6 => {
                source.until(|body| matches!(body, Body::Commit { .. }));
                source.say(settled());
            }
            7 => drop(destination.until(|body| matches!(body, Body::Commit { .. }))),
            _ => destination.say(settled()),
        }
    }
    count > 6
}

/// Takes both hosts through all steps.
pub fn moves(source: &mut Host, destination: &mut Host, migration: u64) {
    assert!(steps(source, destination, migration, STEPS));
}

/// After a restart of the coordinator: both hosts receive the decision and settle. Returns whether it is a commit;
/// `None`: the migration has ended, and they receive nothing.
pub fn settle(
    source: &mut Host,
    destination: &mut Host,
    migration: u64,
    over: impl Fn() -> bool,
) -> Option<bool> {
    let migration = MigrationId(migration);
    let mut heard = None;
    while !over() {
        for host in [&mut *source, &mut *destination] {
            let committed = match host.soon() {
                Some(Body::Commit { .. }) => true,
                Some(Body::Abort { .. }) => false,
                _ => continue,
            };
            assert!(heard.is_none_or(|heard| heard == committed), "one is told to commit, one to give it up");
            heard = Some(committed);
            host.say(Body::Settled { migration, lost: Vec::new() });
        }
    }
    heard
}
