//! A connection's life: preamble, Hello, then frames in both directions until it ends.

use std::io;
use std::net::IpAddr;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use cluster_key::ClusterKey;
use nomad::{HostId, Node};
use telemetry::guest_log::GuestLog;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::time::timeout;

use super::Shared;
use super::channel::{HEAD_BYTES, Opener, Preamble, Sealer};
use super::counters::Dropped;
use super::frame::{Frame, FrameReader};
use super::hello::{Hello, Refusal};
use super::link::{Link, SILENCE_TIMEOUT};

/// Limit of the time from the first byte to the peer's Hello.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes that are read at once.
const READ_BYTES: usize = 16 << 10;
/// What a message costs at least in its host's room at the migration thread, bytes.
const MIN_MESSAGE_COST: usize = 256;

/// A peer that has shown who it is.
pub(super) struct Established {
    pub host: HostId,
    initiated: bool,
    sealer: Sealer,
    input: Input,
}

/// Bytes that have come.
struct Input {
    opener: Opener,
    frames: FrameReader,
    plain: Vec<u8>,
}

impl Input {
    /// Reads once. `false`: the peer has closed the connection.
    async fn read(&mut self, from: &mut ReadHalf<'_>, shared: &Shared) -> io::Result<bool> {
        let mut bytes = [0; READ_BYTES];
        let count = from.read(&mut bytes).await?;
        shared.counters.bytes_received.add(u64::try_from(count).unwrap_or(0));
        self.plain.clear();
        self.opener.open(bytes.get(..count).unwrap_or_default(), &mut self.plain)?;
        self.frames.push(&self.plain);
        Ok(count > 0)
    }
}

/// Exchanges preambles and Hellos. `expected`: the host that this daemon has connected to.
pub(super) async fn establish(
    shared: &Shared,
    stream: &mut TcpStream,
    ip: IpAddr,
    key: Option<&ClusterKey>,
    expected: Option<HostId>,
) -> Result<Established, Refusal> {
    let exchange = exchange(shared, stream, ip, key, expected);
    timeout(HANDSHAKE_TIMEOUT, exchange).await.unwrap_or(Err(Refusal::Timeout))
}

async fn exchange(
    shared: &Shared,
    stream: &mut TcpStream,
    ip: IpAddr,
    key: Option<&ClusterKey>,
    expected: Option<HostId>,
) -> Result<Established, Refusal> {
    let broken = |_: io::Error| Refusal::Closed;
    let hosts = &*shared.hosts;
    let initiated = expected.is_some();
    let preamble = if initiated { Preamble::initiator(key) } else { Preamble::responder(key) };
    let mut preamble = preamble.map_err(broken)?;
    if initiated {
        write(stream, &preamble.put().map_err(broken)?, shared).await.map_err(broken)?;
    }
    let mut bytes = vec![0; HEAD_BYTES];
    stream.read_exact(&mut bytes).await.map_err(broken)?;
    let head = bytes.first_chunk::<HEAD_BYTES>().ok_or(Refusal::Malformed)?;
    let more = preamble.check_head(head)?;
    bytes.resize(HEAD_BYTES + more, 0);
    stream.read_exact(bytes.get_mut(HEAD_BYTES..).unwrap_or_default()).await.map_err(broken)?;
    preamble.take(&bytes)?;
    shared.counters.bytes_received.add(u64::try_from(bytes.len()).unwrap_or(0));
    if !initiated {
        // Only a holder of the key gets an answer.
        write(stream, &preamble.put().map_err(broken)?, shared).await.map_err(broken)?;
    }
    let (mut sealer, opener) = preamble.finish().map_err(broken)?;
    let mut input = Input { opener, frames: FrameReader::default(), plain: Vec::new() };
    if let Some(to) = expected {
        say_hello(shared, stream, &mut sealer, to).await?;
    }
    let hello = loop {
        match input.frames.next() {
            Ok(Some(Frame::Hello(payload))) => break Hello::parse(&payload)?,
            Ok(None) => {}
            Ok(Some(_)) | Err(_) => return Err(Refusal::Malformed),
        }
        let (mut read, _) = stream.split();
        match input.read(&mut read, shared).await {
            Ok(true) => {}
            Ok(false) => return Err(Refusal::Closed),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => return Err(Refusal::Malformed),
            Err(error) => return Err(broken(error)),
        }
    };
    hello.check(hosts, ip, expected)?;
    if !initiated {
        say_hello(shared, stream, &mut sealer, hello.from).await?;
    }
    Ok(Established { host: hello.from, initiated, sealer, input })
}

async fn say_hello(
    shared: &Shared,
    stream: &mut TcpStream,
    sealer: &mut Sealer,
    to: HostId,
) -> Result<(), Refusal> {
    let hello = Hello::to(&*shared.hosts, to).ok_or(Refusal::NotRegistered)?;
    let (mut plain, mut wire) = (Vec::new(), Vec::new());
    Frame::Hello(hello.encode()).encode(&mut plain);
    sealer.seal(&plain, &mut wire).map_err(|_| Refusal::Closed)?;
    write(stream, &wire, shared).await.map_err(|_| Refusal::Closed)
}

async fn write(stream: &mut TcpStream, bytes: &[u8], shared: &Shared) -> io::Result<()> {
    shared.counters.bytes_sent.add(u64::try_from(bytes.len()).unwrap_or(0));
    stream.write_all(bytes).await
}

/// Exchanges messages until the connection ends.
pub(super) async fn run(shared: &Shared, mut stream: TcpStream, established: Established) {
    let Established { host, initiated, sealer, input } = established;
    let link = Arc::new(Link::new(initiated, Instant::now()));
    shared.table.established(host, &link);
    shared.counters.established.increment();
    tracing::debug!(host = host.0, initiated, "A direct connection with another daemon is established");
    let (read, write) = stream.split();
    let why = tokio::select! {
        why = read_frames(shared, read, input, host, &link) => why,
        why = write_frames(shared, write, sealer, &link) => why,
    };
    tracing::debug!(host = host.0, initiated, "A direct connection with another daemon has ended: {why}");
    shared.table.closed(host, &link, Instant::now(), random());
    // It may be wanted still.
    shared.wanted.notify_one();
}

/// Reads frames until the connection ends. Returns why.
async fn read_frames(
    shared: &Shared,
    mut from: ReadHalf<'_>,
    mut input: Input,
    host: HostId,
    link: &Link,
) -> String {
    static LOG: LazyLock<GuestLog> = LazyLock::new(GuestLog::new);
    let violation = |what: &str| {
        telemetry::guest_warn!(LOG, "{host}, which is connected directly, breaks the protocol: {what}");
        what.to_owned()
    };
    loop {
        loop {
            match input.frames.next() {
                Ok(Some(Frame::Message(payload))) => {
                    link.received(true, Instant::now());
                    if let Err(why) = take(shared, host, &payload) {
                        shared.counters.dropped(why);
                        if why == Dropped::Malformed {
                            return violation("it sent what is no message");
                        }
                    }
                }
                Ok(Some(Frame::Probe)) => link.received(false, Instant::now()),
                Ok(Some(Frame::Received(count))) => {
                    if !link.acknowledged(count) {
                        return violation("it acknowledges what wasn't sent");
                    }
                }
                Ok(Some(Frame::Hello(_))) => return violation("a second Hello"),
                Ok(None) => break,
                Err(error) => return violation(&error.to_string()),
            }
        }
        match input.read(&mut from, shared).await {
            Ok(true) => {}
            Ok(false) => return "its peer has closed it".to_owned(),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => return violation(&error.to_string()),
            Err(error) => return error.to_string(),
        }
    }
}

/// Checks a message, and passes it to the migration thread.
fn take(shared: &Shared, host: HostId, payload: &[u8]) -> Result<(), Dropped> {
    let message = nomad::wire::parse(payload).map_err(|_| Dropped::Malformed)?;
    let own = shared.hosts.own().map(|(own, _)| Node::Host(own));
    if message.from != Node::Host(host) || Some(message.to) != own {
        return Err(Dropped::WrongHost);
    }
    // A host that was forgotten meanwhile is none.
    let known = shared.hosts.host(host).ok_or(Dropped::WrongHost)?;
    if message.incarnation < known.incarnation {
        return Err(Dropped::OldIncarnation);
    }
    let cost = u32::try_from(payload.len().max(MIN_MESSAGE_COST)).map_err(|_| Dropped::QueueFull)?;
    let permit = shared.table.inbox(host).try_acquire_many_owned(cost).map_err(|_| Dropped::QueueFull)?;
    shared.hosts.deliver(message, permit);
    Ok(())
}

/// Writes what is queued, until the connection ends. Returns why.
async fn write_frames(shared: &Shared, mut to: WriteHalf<'_>, mut sealer: Sealer, link: &Link) -> String {
    let (mut batch, mut wire) = (Vec::new(), Vec::new());
    loop {
        batch.clear();
        let next = match link.poll(Instant::now(), &mut batch) {
            Ok(next) => next,
            Err(closed) => return closed.to_string(),
        };
        if batch.is_empty() {
            let _ = tokio::time::timeout_at(next.into(), link.ready.notified()).await;
            continue;
        }
        wire.clear();
        if let Err(error) = sealer.seal(&batch, &mut wire) {
            return error.to_string();
        }
        shared.counters.bytes_sent.add(u64::try_from(wire.len()).unwrap_or(0));
        match timeout(SILENCE_TIMEOUT, to.write_all(&wire)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return error.to_string(),
            Err(_) => return "its peer takes no bytes".to_owned(),
        }
    }
}

/// For jitter; 0 if the kernel has none.
pub(super) fn random() -> u32 {
    let mut bytes = [0; 4];
    cluster_key::fill_random(&mut bytes).map_or(0, |()| u32::from_ne_bytes(bytes))
}
