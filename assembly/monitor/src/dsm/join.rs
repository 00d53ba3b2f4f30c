//! How nodes find each other: each connects to those with lower numbers and waits for those with higher ones.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream, ToSocketAddrs as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use super::link::{Link, Stream};
use super::{DsmError, NodeAddress};

/// How long the last node may come after the first.
const PATIENCE: Duration = Duration::from_secs(15);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(10);
const MAGIC: &[u8; 8] = b"CWNODES1";

/// What both sides of a link say first. All fields but `node` must be the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) node: u8,
    pub(super) nodes: u8,
    /// Of program, arguments, memory, vCPUs and policy. Against mistakes, not against attacks.
    pub(super) digest: u64,
}

const LEN: usize = 18;

impl Hello {
    fn to_bytes(self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8] = self.node;
        bytes[9] = self.nodes;
        bytes[10..].copy_from_slice(&self.digest.to_le_bytes());
        bytes
    }

    fn parse(bytes: [u8; LEN]) -> Option<Self> {
        let (magic, rest) = bytes.split_at(8);
        let digest = u64::from_le_bytes(rest.get(2..)?.try_into().ok()?);
        (magic == MAGIC).then_some(Self { node: rest[0], nodes: rest[1], digest })
    }

    /// Whether `other`, who should be node `expected`, or any that is still missing, can be in the same VM.
    fn accepts(&self, other: Option<Self>, expected: impl Fn(u8) -> bool) -> Result<u8, String> {
        let Some(other) = other else {
            return Err("what answers there is no node of a VM; look at the address".to_owned());
        };
        if other.nodes != self.nodes {
            return Err(format!(
                "it is of a VM of {} nodes, this one has {}; start all with the same --nodes or --peers",
                other.nodes, self.nodes
            ));
        }
        if other.digest != self.digest {
            return Err(
                "it runs another program or other settings; start all nodes with the same program, arguments, --cpus, --memory and --coherence"
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
            NodeAddress::Tcp(place) => Self::Tcp(TcpListener::bind(place)?),
        };
        match &listener {
            Self::Unix(listener) => listener.set_nonblocking(true)?,
            Self::Tcp(listener) => listener.set_nonblocking(true)?,
        }
        Ok(listener)
    }

    /// The next connection, if there is one.
    fn accept(&self) -> std::io::Result<Stream> {
        Ok(match self {
            Self::Unix(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(false)?;
                Stream::Unix(stream)
            }
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(false)?;
                Stream::Tcp(stream)
            }
        })
    }
}

/// Connects, or gives up at `deadline`: a host that drops what comes would hold Linux up for two minutes.
fn connect(address: &NodeAddress, deadline: Instant) -> std::io::Result<Stream> {
    Ok(match address {
        NodeAddress::Unix(path) => Stream::Unix(UnixStream::connect(path)?),
        NodeAddress::Tcp(place) => {
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

/// Says who this is, and hears who the other is.
fn greet(stream: &Stream, hello: &Hello) -> std::io::Result<Option<Hello>> {
    stream.set_timeout(Some(Duration::from_secs(2)))?;
    write(stream, &hello.to_bytes())?;
    let mut answer = [0; LEN];
    (&mut &*stream).read_exact(&mut answer)?;
    stream.set_timeout(None)?;
    Ok(Hello::parse(answer))
}

/// Connects to all other nodes. `addresses` has one of each node, in order. The links, by node; `None` for this one.
pub(super) fn join(hello: Hello, addresses: &[NodeAddress]) -> Result<Vec<Option<Link>>, DsmError> {
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
    let deadline = Instant::now() + PATIENCE;
    for (peer, place) in addresses.iter().enumerate().take(me) {
        let stream = loop {
            match connect(place, deadline) {
                Ok(stream) => break stream,
                Err(_) if Instant::now() < deadline => std::thread::sleep(PAUSE),
                Err(error) => {
                    let seconds = PATIENCE.as_secs();
                    return Err(failed(
                        peer,
                        format!("nobody listens there for {seconds} s ({error}); start it"),
                    ));
                }
            }
        };
        let other =
            greet(&stream, &hello).map_err(|error| failed(peer, format!("it doesn't answer: {error}")))?;
        hello.accepts(other, |node| usize::from(node) == peer).map_err(|problem| failed(peer, problem))?;
        if let Some(link) = links.get_mut(peer) {
            *link = Some(Link::new(u8::try_from(peer).unwrap_or(u8::MAX), address(peer), stream));
        }
    }
    let missing = |links: &[Option<Link>]| {
        (me + 1..links.len()).find(|node| links.get(*node).is_some_and(Option::is_none))
    };
    while let (Some(listener), Some(next)) = (&listener, missing(&links)) {
        let stream = match listener.accept() {
            Ok(stream) => stream,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                std::thread::sleep(PAUSE);
                continue;
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                let problem = format!("it hasn't come within {} s; start it", PATIENCE.as_secs());
                return Err(failed(next, problem));
            }
            Err(error) => return Err(failed(next, format!("its connection can't be taken: {error}"))),
        };
        let other =
            greet(&stream, &hello).map_err(|error| failed(next, format!("it doesn't answer: {error}")))?;
        let free =
            |node: u8| usize::from(node) > me && links.get(usize::from(node)).is_some_and(Option::is_none);
        let peer = hello.accepts(other, free).map_err(|problem| failed(next, problem))?;
        if let Some(link) = links.get_mut(usize::from(peer)) {
            *link = Some(Link::new(peer, address(usize::from(peer)), stream));
        }
    }
    if let NodeAddress::Unix(path) = own
        && awaits
    {
        // All are there. What stays would only be in the way of the next VM.
        let _ = std::fs::remove_file(path);
    }
    Ok(links)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(folder: &tempfile::TempDir, nodes: u8) -> Vec<NodeAddress> {
        (0..nodes).map(|node| NodeAddress::Unix(folder.path().join(node.to_string()))).collect()
    }

    #[test]
    fn four_nodes_find_each_other_in_whatever_order_they_come() {
        let folder = tempfile::tempdir().unwrap();
        let all = addresses(&folder, 4);
        let threads: Vec<_> = [2, 0, 3, 1]
            .map(|node| {
                let all = all.clone();
                std::thread::spawn(move || join(Hello { node, nodes: 4, digest: 5 }, &all).unwrap())
            })
            .into();
        for (thread, me) in threads.into_iter().zip([2, 0, 3, 1]) {
            let links = thread.join().unwrap();
            let peers: Vec<_> = links.iter().map(|link| link.as_ref().map(|link| link.peer)).collect();
            assert_eq!(peers, (0..4).map(|node| (node != me).then_some(node)).collect::<Vec<_>>());
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "no sockets are left");
    }

    #[test]
    fn a_node_of_another_program_or_another_number_of_nodes_is_refused_by_name() {
        for (other, expected) in [
            (Hello { node: 1, nodes: 2, digest: 6 }, "another program"),
            (Hello { node: 1, nodes: 3, digest: 5 }, "a VM of 3 nodes"),
            (Hello { node: 0, nodes: 2, digest: 5 }, "says that it is node 0"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let all = addresses(&folder, 2);
            let listening = all.clone();
            let first = std::thread::spawn(move || join(Hello { node: 0, nodes: 2, digest: 5 }, &listening));
            let stream = loop {
                if let Ok(stream) = connect(&all[0], Instant::now() + PATIENCE) {
                    break stream;
                }
                std::thread::sleep(PAUSE);
            };
            write(&stream, &other.to_bytes()).unwrap();
            let error = first.join().unwrap().map(drop).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("Node 1"), "{error}");
        }
    }
}
