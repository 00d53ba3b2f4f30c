//! Hosts' ends of the migration protocol, by hand.
#![allow(dead_code, clippy::unwrap_used, clippy::missing_panics_doc)] // Tests' other half; each uses its part.

use std::time::Duration;

use control_api::cluster::Service;
use control_api::cluster::proto::{self, Speaker};
use nomad::{Body, HostId, Incarnation, Message, MigrationId, Node};

/// A host's end of the migration protocol, by hand.
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

    /// `None`: nobody takes it now.
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
        // What it doesn't hear soon it doesn't hear.
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
        // Where the stream has ended, whoever waits for an answer sees that.
        let _ = self.runtime.block_on(self.outgoing.send(envelope));
    }

    pub fn next(&mut self) -> Body {
        let next = async { tokio::time::timeout(Duration::from_secs(10), self.incoming.message()).await };
        let envelope = self.runtime.block_on(next).unwrap().unwrap().unwrap();
        nomad::wire::parse(&envelope.message).unwrap().body
    }

    /// The next message, if it comes in a quarter of a second.
    pub fn soon(&mut self) -> Option<Body> {
        self.soon_unless_broken().unwrap()
    }

    /// The same; `None`: the stream has ended.
    pub fn soon_unless_broken(&mut self) -> Option<Option<Body>> {
        let next = async { tokio::time::timeout(Duration::from_millis(250), self.incoming.message()).await };
        let Ok(message) = self.runtime.block_on(next) else { return Some(None) };
        let envelope = message.ok()??;
        Some(Some(nomad::wire::parse(&envelope.message).unwrap().body))
    }

    /// The next message of another kind than those before, which are said again until they are answered.
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

/// Steps of a migration until both hosts have settled.
pub const STEPS: usize = 9;

/// Takes both hosts through so many steps of a migration of one VM, over the network. Whether one has heard of the commit.
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

/// Takes both hosts to the end.
pub fn moves(source: &mut Host, destination: &mut Host, migration: u64) {
    assert!(steps(source, destination, migration, STEPS));
}

/// After another start of the coordinator: each host hears how the migration ends, and settles. Whether that is the commit; `None`: they hear
/// nothing of it, because it has ended.
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
