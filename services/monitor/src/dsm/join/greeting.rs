//! Greetings of nodes: both sides of a link prove that they belong to one VM, and with a cluster key that they have it.

use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use cluster_key::ClusterKey;

use crate::dsm::link::Stream;
use cluster_key::stream::{
    HANDSHAKE_BYTES, Handshake, Mismatch, Opening, Purpose, RECORD_OVERHEAD_BYTES, Sealing,
};

/// Timeout of a peer's greeting.
pub(super) const GREETING: Duration = Duration::from_secs(2);
/// Magic of a greeting.
pub(super) const MAGIC: &[u8; 7] = b"CWNODES";
/// Magic of a greeting for a link by RDMA. Nodes refuse links of another kind by it.
pub(super) const MAGIC_RDMA: &[u8; 7] = b"CWNODER";
/// Version of the greeting and of the control frames that follow it: the byte after the magic.
const GREETING_VERSION: u8 = b'2';

/// Purpose of sealed links, in [`cluster_key::stream`]. A plain link begins with another magic. Sealed bytes begin with the greeting, whose
/// version covers all that follows.
pub(in crate::dsm) const NODES: Purpose =
    Purpose { magic: *b"CWnd", version: 1, prologue: b"causeway nodes 1" };
/// Advice for nodes that have different keys, or of which only some have one.
const SAME_KEY: &str = "give all nodes the same --cluster-key, or none of them one";

/// Keys of a link for both directions.
pub(super) type Sealed = (Sealing, Opening);

/// Greeting of both sides of a link. All fields except `node` must be equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::dsm) struct Hello {
    pub(in crate::dsm) node: u8,
    pub(in crate::dsm) nodes: u8,
    /// Hash of program, arguments, memory, vCPUs and policy. It detects mistakes, not attacks.
    pub(in crate::dsm) digest: u64,
    /// Links use RDMA. The same on all nodes.
    pub(in crate::dsm) rdma: bool,
}

/// Size of a greeting, bytes.
pub(super) const LEN: usize = 18;

/// A received greeting. If its version isn't [`GREETING_VERSION`], no other field is valid.
#[derive(Debug, Clone, Copy)]
pub(super) struct PeerHello {
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
    pub(super) fn to_bytes(self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        bytes[..7].copy_from_slice(if self.rdma { MAGIC_RDMA } else { MAGIC });
        bytes[7] = GREETING_VERSION;
        bytes[8] = self.node;
        bytes[9] = self.nodes;
        bytes[10..].copy_from_slice(&self.digest.to_le_bytes());
        bytes
    }

    /// Checks that `other` belongs to the same VM, and that its node is `expected`. Returns the node's number, or the reason for a refusal.
    pub(super) fn accepts(
        &self,
        other: Option<PeerHello>,
        expected: impl Fn(u8) -> bool,
    ) -> Result<u8, String> {
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

/// A connection whose greeting is incomplete. Any host can connect to a node's address, so the node waits for none of them.
pub(super) struct Greeting {
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
    pub(super) fn begin(stream: Stream, hello: &Hello, key: Option<&ClusterKey>) -> std::io::Result<Self> {
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
    pub(super) fn look(&mut self, hello: &Hello) -> Result<Option<PeerHello>, String> {
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
    pub(super) fn into_parts(self) -> std::io::Result<(Stream, Option<Sealed>)> {
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

/// Exchanges greetings. Returns the peer's greeting, and the link's keys if this node has a cluster key.
pub(super) fn greet(
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

pub(super) fn write(stream: &Stream, bytes: &[u8]) -> std::io::Result<()> {
    match stream {
        Stream::Unix(stream) => (&mut &*stream).write_all(bytes),
        Stream::Tcp(stream) => (&mut &*stream).write_all(bytes),
    }
}
