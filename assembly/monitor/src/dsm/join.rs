//! Connection of the nodes: each connects to nodes with lower numbers, and accepts connections of nodes with higher numbers.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream, ToSocketAddrs as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use cluster_key::ClusterKey;
use telemetry::guest_log::GuestLog;

use super::link::{Link, Stream, Way};
use super::rdma::{self, Device};
use super::{DsmError, NoDevice, NodeAddress, RdmaDevice};
use cluster_key::stream::{
    HANDSHAKE_BYTES, Handshake, Mismatch, Opening, Purpose, RECORD_OVERHEAD_BYTES, Sealing,
};

/// Time in which all nodes must have connected.
const LAST_NODE_TIMEOUT: Duration = Duration::from_secs(15);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(10);
/// Timeout of a peer's greeting.
const GREETING: Duration = Duration::from_secs(2);
/// Limit of connections whose greeting is incomplete. A new one replaces the oldest.
const STRANGERS: usize = 64;
const MAGIC: &[u8; 7] = b"CWNODES";
/// Magic of a greeting for a link by RDMA. Nodes refuse links of another kind by it.
const MAGIC_RDMA: &[u8; 7] = b"CWNODER";
/// Version of the greeting and of the control frames that follow it: the byte after the magic.
const GREETING_VERSION: u8 = b'2';

/// Purpose of sealed links, in [`cluster_key::stream`]. A plain link begins with another magic. Sealed bytes begin with the greeting, whose
/// version
/// covers all that follows.
pub(super) const NODES: Purpose = Purpose { magic: *b"CWnd", version: 1, prologue: b"causeway nodes 1" };
/// Advice for nodes that have different keys, or of which only some have one.
const SAME_KEY: &str = "give all nodes the same --cluster-key, or none of them one";

type Sealed = (Sealing, Opening);

/// Greeting of both sides of a link. All fields except `node` must be equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) node: u8,
    pub(super) nodes: u8,
    /// Hash of program, arguments, memory, vCPUs and policy. It detects mistakes, not attacks.
    pub(super) digest: u64,
    /// Links use RDMA. The same on all nodes.
    pub(super) rdma: bool,
}

const LEN: usize = 18;

/// A received greeting. If its version isn't [`GREETING_VERSION`], no other field is valid.
#[derive(Debug, Clone, Copy)]
struct PeerHello {
    version: u8,
    hello: Hello,
}

impl PeerHello {
    /// `None` if the bytes aren't a greeting of any version.
    fn parse(bytes: [u8; LEN]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk::<7>()?;
        let rdma = magic == MAGIC_RDMA;
        let &[version, node, nodes, ref digest @ ..] = rest else { return None };
        let digest = u64::from_le_bytes(digest.try_into().ok()?);
        (rdma || magic == MAGIC).then_some(Self { version, hello: Hello { node, nodes, digest, rdma } })
    }
}

impl Hello {
    fn to_bytes(self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        bytes[..7].copy_from_slice(if self.rdma { MAGIC_RDMA } else { MAGIC });
        bytes[7] = GREETING_VERSION;
        bytes[8] = self.node;
        bytes[9] = self.nodes;
        bytes[10..].copy_from_slice(&self.digest.to_le_bytes());
        bytes
    }

    /// Checks that `other` belongs to the same VM, and that its node is `expected`. Returns the node's number, or the reason for a refusal.
    fn accepts(&self, other: Option<PeerHello>, expected: impl Fn(u8) -> bool) -> Result<u8, String> {
        let Some(PeerHello { version, hello: other }) = other else {
            return Err("what answers there is no node of a VM; look at the address".to_owned());
        };
        if version != GREETING_VERSION {
            return Err(format!(
                "it speaks version {} of the nodes' protocol, this one version {}; use the same release on all nodes",
                version.escape_ascii(),
                GREETING_VERSION.escape_ascii()
            ));
        }
        if other.rdma != self.rdma {
            let (there, here) = if self.rdma { ("tcp", "rdma") } else { ("rdma", "tcp") };
            return Err(format!(
                "its links go by {there}, this one's by {here}; give all nodes the same --peers"
            ));
        }
        if other.nodes != self.nodes {
            return Err(format!(
                "it is of a VM of {} nodes, this one has {}; start all with the same --nodes or --peers",
                other.nodes, self.nodes
            ));
        }
        if other.digest != self.digest {
            return Err(
                "it runs another program or other settings; start all nodes with the same program, arguments, --cpus, --memory, --coherence, and all or none with --checkpoint and --restart"
                    .to_owned(),
            );
        }
        if expected(other.node) {
            Ok(other.node)
        } else {
            Err(format!(
                "it says that it is node {}, which isn't expected there; give each node its own --node",
                other.node
            ))
        }
    }
}

enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Listener {
    fn open(address: &NodeAddress) -> std::io::Result<Self> {
        let listener = match address {
            NodeAddress::Unix(path) => Self::Unix(UnixListener::bind(path)?),
            NodeAddress::Tcp(place) | NodeAddress::Rdma(place) => Self::Tcp(TcpListener::bind(place)?),
        };
        match &listener {
            Self::Unix(listener) => listener.set_nonblocking(true)?,
            Self::Tcp(listener) => listener.set_nonblocking(true)?,
        }
        Ok(listener)
    }

    /// The next connection, or `WouldBlock`.
    fn accept(&self) -> std::io::Result<Stream> {
        Ok(match self {
            Self::Unix(listener) => Stream::Unix(listener.accept()?.0),
            Self::Tcp(listener) => Stream::Tcp(listener.accept()?.0),
        })
    }
}

/// A connection whose greeting is incomplete. Any host can connect to a node's address, so the node waits for none of them.
struct Greeting {
    stream: Stream,
    heard: Vec<u8>,
    stage: Stage,
    until: Instant,
}

/// The part of the greeting that the peer sends next.
enum Stage {
    /// The greeting, in plain text.
    Plain,
    /// The handshake: the peer must prove that it has the key before this node sends anything.
    Shakes(Box<Handshake>),
    /// The greeting, sealed.
    Sealed(Box<Sealed>),
}

impl Stage {
    /// Bytes of this part.
    fn bytes(&self) -> usize {
        match self {
            Self::Plain => LEN,
            Self::Shakes(_) => HANDSHAKE_BYTES,
            Self::Sealed(_) => LEN + RECORD_OVERHEAD_BYTES,
        }
    }
}

impl Greeting {
    fn begin(stream: Stream, hello: &Hello, key: Option<&ClusterKey>) -> std::io::Result<Self> {
        rustix::io::ioctl_fionbio(stream.as_fd(), true)?;
        let stage = match key {
            None => {
                write(&stream, &hello.to_bytes())?;
                Stage::Plain
            }
            Some(key) => {
                let failed = |error: snow::Error| std::io::Error::other(error.to_string());
                Stage::Shakes(Box::new(Handshake::responder(NODES, key).map_err(failed)?))
            }
        };
        Ok(Self { stream, heard: Vec::new(), stage, until: Instant::now() + GREETING })
    }

    /// The peer's greeting, once complete. An error if it can't become complete, or isn't a greeting.
    fn look(&mut self, hello: &Hello) -> Result<Option<PeerHello>, String> {
        loop {
            if !self.hear()? {
                return Ok(None);
            }
            let heard = std::mem::take(&mut self.heard);
            match std::mem::replace(&mut self.stage, Stage::Plain) {
                Stage::Plain => return identify(&heard).map(Some),
                Stage::Shakes(handshake) => self.stage = self.answer(*handshake, &heard, hello)?,
                Stage::Sealed(mut sealed) => {
                    let other = opened_hello(&mut sealed.1, &mut heard.as_slice())
                        .map_err(|error| error.to_string())?;
                    self.stage = Stage::Sealed(sealed);
                    return identify(&other).map(Some);
                }
            }
        }
    }

    /// Receives. Returns whether this part is complete.
    fn hear(&mut self) -> Result<bool, String> {
        let wanted = self.stage.bytes();
        while self.heard.len() < wanted {
            let mut part = [0; HANDSHAKE_BYTES];
            let free = wanted - self.heard.len();
            match (&mut &self.stream).read(&mut part[..free]) {
                Ok(0) => return Err("it closed the connection".to_owned()),
                Ok(read) => {
                    self.heard.extend_from_slice(&part[..read]);
                    self.look_at_magic()?;
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    let late = Instant::now() >= self.until;
                    return if late { Err("it doesn't say who it is".to_owned()) } else { Ok(false) };
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(true)
    }

    // Another magic than the handshake's may begin a shorter message, so this doesn't wait for the rest.
    fn look_at_magic(&self) -> Result<(), String> {
        let magic = self.heard.first_chunk::<4>();
        match (&self.stage, magic) {
            (Stage::Shakes(_), Some(magic)) if *magic != NODES.magic => Err(mismatch(Mismatch::Foreign)),
            _ => Ok(()),
        }
    }

    /// Checks the peer's handshake. Answers only if the peer has the key.
    fn answer(&self, mut handshake: Handshake, heard: &[u8], hello: &Hello) -> Result<Stage, String> {
        let bytes: &[u8; HANDSHAKE_BYTES] = heard.try_into().map_err(|_| "it says too little".to_owned())?;
        handshake.take(bytes).map_err(mismatch)?;
        let failed = |error: snow::Error| format!("its link can't be encrypted: {error}");
        let answer = handshake.put().map_err(failed)?;
        let mut sealed = handshake.finish().map_err(failed)?;
        let mut bytes = answer.to_vec();
        sealed.0.write(&hello.to_bytes(), &mut bytes).map_err(|error| error.to_string())?;
        write(&self.stream, &bytes).map_err(|error| error.to_string())?;
        Ok(Stage::Sealed(Box::new(sealed)))
    }

    /// The connection, reset to a link's settings, and its keys.
    fn into_parts(self) -> std::io::Result<(Stream, Option<Sealed>)> {
        rustix::io::ioctl_fionbio(self.stream.as_fd(), false)?;
        // Clears the timeouts of the greeting.
        self.stream.set_timeout(None)?;
        let sealed = if let Stage::Sealed(sealed) = self.stage { Some(*sealed) } else { None };
        Ok((self.stream, sealed))
    }
}

fn identify(heard: &[u8]) -> Result<PeerHello, String> {
    if heard.starts_with(&NODES.magic) {
        return Err(format!("it encrypts its links, and this node doesn't; {SAME_KEY}"));
    }
    let hello = heard.try_into().ok().and_then(PeerHello::parse);
    hello.ok_or_else(|| "it is no node of a VM".to_owned())
}

fn mismatch(mismatch: Mismatch) -> String {
    match mismatch {
        Mismatch::Foreign => format!("it doesn't encrypt its links, or is no node of a VM; {SAME_KEY}"),
        Mismatch::Version(version) => format!(
            "it encrypts by version {version}, this one by {}; use the same release on all nodes",
            NODES.version
        ),
        Mismatch::Key => format!("it has another key; {SAME_KEY}"),
    }
}

/// Opens the peer's sealed greeting.
fn opened_hello(opening: &mut Opening, from: &mut impl std::io::Read) -> std::io::Result<[u8; LEN]> {
    let mut bytes = [0; LEN];
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match opening.read(rest, from)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            count => filled += count,
        }
    }
    Ok(bytes)
}

/// Connects until `deadline`. Without it, a host that drops packets would block for two minutes in Linux.
fn connect(address: &NodeAddress, deadline: Instant) -> std::io::Result<Stream> {
    Ok(match address {
        NodeAddress::Unix(path) => Stream::Unix(UnixStream::connect(path)?),
        NodeAddress::Tcp(place) | NodeAddress::Rdma(place) => {
            let mut last = std::io::Error::new(std::io::ErrorKind::NotFound, "the name has no address");
            for one in place.to_socket_addrs()? {
                let left = deadline.saturating_duration_since(Instant::now()).max(PAUSE);
                match TcpStream::connect_timeout(&one, left) {
                    Ok(stream) => return Ok(Stream::Tcp(stream)),
                    Err(error) => last = error,
                }
            }
            return Err(last);
        }
    })
}

fn write(stream: &Stream, bytes: &[u8]) -> std::io::Result<()> {
    match stream {
        Stream::Unix(stream) => (&mut &*stream).write_all(bytes),
        Stream::Tcp(stream) => (&mut &*stream).write_all(bytes),
    }
}

/// Logs a dropped connection: an operator whose VM doesn't start must learn which connection came instead of the node.
fn stranger(problem: &str) {
    static LOG: LazyLock<GuestLog> = LazyLock::new(GuestLog::new);
    telemetry::guest_warn!(LOG, "A connection to this node's address is dropped: {problem}");
}

/// Exchanges greetings. Returns the peer's greeting, and the link's keys if this node has a cluster key.
fn greet(
    stream: &Stream,
    hello: &Hello,
    key: Option<&ClusterKey>,
) -> Result<(Option<PeerHello>, Option<Sealed>), String> {
    let silent = |error: std::io::Error| match key {
        Some(_) => format!("it doesn't answer: {error}; does it have another key, or none? {SAME_KEY}"),
        None => format!("it doesn't answer: {error}; does it have a key? {SAME_KEY}"),
    };
    stream.set_timeout(Some(GREETING)).map_err(silent)?;
    let other = match key {
        None => {
            write(stream, &hello.to_bytes()).map_err(silent)?;
            let mut answer = [0; LEN];
            (&mut &*stream).read_exact(&mut answer).map_err(silent)?;
            (PeerHello::parse(answer), None)
        }
        Some(key) => {
            let failed = |error: snow::Error| format!("its link can't be encrypted: {error}");
            let mut handshake = Handshake::initiator(NODES, key).map_err(failed)?;
            write(stream, &handshake.put().map_err(failed)?).map_err(silent)?;
            let mut answer = [0; HANDSHAKE_BYTES];
            let (magic, rest) = answer.split_at_mut(NODES.magic.len());
            (&mut &*stream).read_exact(magic).map_err(silent)?;
            // A node without a key sends a plain greeting, which is shorter.
            if *magic == NODES.magic {
                (&mut &*stream).read_exact(rest).map_err(silent)?;
            }
            handshake.take(&answer).map_err(mismatch)?;
            let (mut sealing, mut opening) = handshake.finish().map_err(failed)?;
            let mut bytes = Vec::new();
            sealing.write(&hello.to_bytes(), &mut bytes).map_err(silent)?;
            write(stream, &bytes).map_err(silent)?;
            let other = opened_hello(&mut opening, &mut &*stream).map_err(silent)?;
            (PeerHello::parse(other), Some((sealing, opening)))
        }
    };
    stream.set_timeout(None).map_err(silent)?;
    Ok(other)
}

/// The RDMA device of this node's links; `None` if no address is by RDMA. Either all addresses are, or none.
pub(super) fn device_of(
    node: u8,
    addresses: &[NodeAddress],
    found: Option<&RdmaDevice>,
) -> Result<Option<Arc<Device>>, DsmError> {
    let place = |address: &NodeAddress| match address {
        NodeAddress::Rdma(place) => Some(place.clone()),
        _ => None,
    };
    let places: Vec<String> = addresses.iter().filter_map(place).collect();
    if places.is_empty() {
        return Ok(None);
    }
    let Some(own) = places.get(usize::from(node)).filter(|_| places.len() == addresses.len()) else {
        return Err(DsmError::Settings(
            "some nodes are at rdma:HOST:PORT and some are not; give all nodes such an address, or none"
                .to_owned(),
        ));
    };
    let failed = |source: NoDevice| DsmError::Rdma { node, address: format!("rdma:{own}"), source };
    let own = rdma::address_of(own).map_err(failed)?.ip();
    let device = match found {
        Some(found) => Device::open(found),
        None => RdmaDevice::look(own).and_then(|found| Device::open(&found)),
    };
    let device = device.map_err(|absent| failed(absent.into()))?;
    if device.is_at(own) {
        Ok(Some(device))
    } else {
        Err(DsmError::Settings(format!(
            "the RDMA device that was found isn't the one with the address {own}"
        )))
    }
}

/// Makes a link of a connection after both sides' greetings.
fn link(
    peer: u8,
    place: &NodeAddress,
    (stream, sealed): (Stream, Option<Sealed>),
    device: Option<&Arc<Device>>,
) -> Result<Link, String> {
    let way = match (place, stream, device) {
        (NodeAddress::Rdma(place), Stream::Tcp(stream), Some(device)) => {
            let expected = rdma::address_of(place).map_err(|error| error.to_string())?.ip();
            let expected = match expected {
                std::net::IpAddr::V4(address) => address.to_ipv6_mapped(),
                std::net::IpAddr::V6(address) => address,
            };
            let timed = |stream: &TcpStream, timeout| {
                stream.set_read_timeout(timeout).and_then(|()| stream.set_write_timeout(timeout))
            };
            let gone = |error: std::io::Error| format!("its connection is gone: {error}");
            timed(&stream, Some(GREETING)).map_err(gone)?;
            let watched = stream.try_clone().map_err(gone)?;
            let pair = rdma::connect(device, stream, expected)?;
            timed(&watched, None).map_err(gone)?;
            Way::Pair(Box::new(pair))
        }
        (_, stream, _) => Way::Socket(stream),
    };
    Ok(Link::new(peer, place.to_string(), way, sealed))
}

/// Connects to all other nodes. `addresses` has one per node, in order, and `device` is for links by RDMA. With `key` the links are sealed,
/// and connections without the same key are dropped. Returns the links by node, with `None` for this one.
pub(super) fn join(
    hello: Hello,
    addresses: &[NodeAddress],
    device: Option<&Arc<Device>>,
    key: Option<&ClusterKey>,
) -> Result<Vec<Option<Link>>, DsmError> {
    let me = usize::from(hello.node);
    let address = |node: usize| addresses.get(node).map(ToString::to_string).unwrap_or_default();
    let failed = |peer: usize, problem: String| DsmError::Join {
        peer: u8::try_from(peer).unwrap_or(u8::MAX),
        address: address(peer),
        problem,
    };
    let mut links: Vec<Option<Link>> = addresses.iter().map(|_| None).collect();
    let Some(own) = addresses.get(me) else {
        return Err(DsmError::Settings(format!("there is no address for node {me}")));
    };
    let awaits = me + 1 < addresses.len();
    let listener = awaits.then(|| Listener::open(own)).transpose();
    let listener =
        listener.map_err(|source| DsmError::Listen { node: hello.node, address: address(me), source })?;
    let deadline = Instant::now() + LAST_NODE_TIMEOUT;
    for (peer, place) in addresses.iter().enumerate().take(me) {
        let stream = loop {
            match connect(place, deadline) {
                Ok(stream) => break stream,
                Err(_) if Instant::now() < deadline => std::thread::sleep(PAUSE),
                Err(error) => {
                    let seconds = LAST_NODE_TIMEOUT.as_secs();
                    return Err(failed(
                        peer,
                        format!("nobody listens there for {seconds} s ({error}); start it"),
                    ));
                }
            }
        };
        let (other, sealed) = greet(&stream, &hello, key).map_err(|problem| failed(peer, problem))?;
        hello.accepts(other, |node| usize::from(node) == peer).map_err(|problem| failed(peer, problem))?;
        let made = link(u8::try_from(peer).unwrap_or(u8::MAX), place, (stream, sealed), device);
        let made = made.map_err(|problem| failed(peer, problem))?;
        if let Some(link) = links.get_mut(peer) {
            *link = Some(made);
        }
    }
    let missing = |links: &[Option<Link>]| {
        (me + 1..links.len()).find(|node| links.get(*node).is_some_and(Option::is_none))
    };
    let mut greetings: Vec<Greeting> = Vec::new();
    while let (Some(listener), Some(next)) = (&listener, missing(&links)) {
        // Checked in each iteration: an endless stream of strangers must not prevent the timeout.
        if Instant::now() >= deadline {
            let problem = format!("it hasn't come within {} s; start it", LAST_NODE_TIMEOUT.as_secs());
            return Err(failed(next, problem));
        }
        match listener.accept() {
            Ok(stream) => match Greeting::begin(stream, &hello, key) {
                Ok(greeting) => {
                    if greetings.len() == STRANGERS {
                        greetings.remove(0);
                    }
                    greetings.push(greeting);
                }
                Err(error) => stranger(&error.to_string()),
            },
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                std::thread::sleep(PAUSE);
            }
            // The connection was closed before it was accepted.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionAborted => {}
            Err(error) => return Err(failed(next, format!("its connection can't be taken: {error}"))),
        }
        for mut greeting in std::mem::take(&mut greetings) {
            let other = match greeting.look(&hello) {
                Ok(Some(other)) => other,
                Ok(None) => {
                    greetings.push(greeting);
                    continue;
                }
                Err(problem) => {
                    stranger(&problem);
                    continue;
                }
            };
            let free = |node: u8| {
                usize::from(node) > me && links.get(usize::from(node)).is_some_and(Option::is_none)
            };
            let peer = hello.accepts(Some(other), free).map_err(|problem| failed(next, problem))?;
            let parts = greeting.into_parts();
            let parts = parts
                .map_err(|error| failed(usize::from(peer), format!("its connection is gone: {error}")))?;
            let Some(place) = addresses.get(usize::from(peer)) else { continue };
            let made = link(peer, place, parts, device);
            let made = made.map_err(|problem| failed(usize::from(peer), problem))?;
            if let Some(link) = links.get_mut(usize::from(peer)) {
                *link = Some(made);
            }
        }
    }
    if let NodeAddress::Unix(path) = own
        && awaits
    {
        // All nodes have connected. A socket file that stays would be in the way of the next VM.
        let _ = std::fs::remove_file(path);
    }
    Ok(links)
}

#[cfg(test)]
mod tests;
