//! How nodes find each other: each connects to those with lower numbers and waits for those with higher ones.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream, ToSocketAddrs as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use telemetry::guest_log::GuestLog;

use super::link::{Link, Stream, Way};
use super::rdma::{self, Device};
use super::{DsmError, NoDevice, NodeAddress, RdmaDevice};

/// How long the last node may come after the first.
const PATIENCE: Duration = Duration::from_secs(15);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(10);
/// How long the other side of a connection may take to say who it is.
const GREETING: Duration = Duration::from_secs(2);
/// Connections that may be silent at one time. Whoever comes then takes the place of the oldest.
const STRANGERS: usize = 64;
const MAGIC: &[u8; 8] = b"CWNODES1";
/// Where the link is to go by RDMA: whoever means another kind of link is told so.
const MAGIC_RDMA: &[u8; 8] = b"CWNODER1";

/// What both sides of a link say first. All fields but `node` must be the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) node: u8,
    pub(super) nodes: u8,
    /// Of program, arguments, memory, vCPUs and policy. Against mistakes, not against attacks.
    pub(super) digest: u64,
    /// Links go by RDMA; the same on all nodes.
    pub(super) rdma: bool,
}

const LEN: usize = 18;

impl Hello {
    fn to_bytes(self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        bytes[..8].copy_from_slice(if self.rdma { MAGIC_RDMA } else { MAGIC });
        bytes[8] = self.node;
        bytes[9] = self.nodes;
        bytes[10..].copy_from_slice(&self.digest.to_le_bytes());
        bytes
    }

    fn parse(bytes: [u8; LEN]) -> Option<Self> {
        let (magic, rest) = bytes.split_at(8);
        let digest = u64::from_le_bytes(rest.get(2..)?.try_into().ok()?);
        let rdma = magic == MAGIC_RDMA;
        (rdma || magic == MAGIC).then_some(Self { node: rest[0], nodes: rest[1], digest, rdma })
    }

    /// Whether `other`, who should be node `expected`, or any that is still missing, can be in the same VM.
    fn accepts(&self, other: Option<Self>, expected: impl Fn(u8) -> bool) -> Result<u8, String> {
        let Some(other) = other else {
            return Err("what answers there is no node of a VM; look at the address".to_owned());
        };
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
                "it runs another program or other settings; start all nodes with the same program, arguments, --cpus, --memory, --coherence, --gather, and all or none with --checkpoint and --restart"
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

    /// The next connection, if there is one.
    fn accept(&self) -> std::io::Result<Stream> {
        Ok(match self {
            Self::Unix(listener) => Stream::Unix(listener.accept()?.0),
            Self::Tcp(listener) => Stream::Tcp(listener.accept()?.0),
        })
    }
}

/// A connection that has come, and has not yet said all of who it is. Anybody can reach a node's address, so none of them is waited for.
struct Greeting {
    stream: Stream,
    heard: [u8; LEN],
    len: usize,
    until: Instant,
}

impl Greeting {
    fn begin(stream: Stream, hello: &Hello) -> std::io::Result<Self> {
        rustix::io::ioctl_fionbio(stream.as_fd(), true)?;
        write(&stream, &hello.to_bytes())?;
        Ok(Self { stream, heard: [0; LEN], len: 0, until: Instant::now() + GREETING })
    }

    /// Who it is, once it has said so; an error when that won't happen any more, or it is no node.
    fn look(&mut self) -> Result<Option<Hello>, String> {
        while let Some(rest) = self.heard.get_mut(self.len..).filter(|rest| !rest.is_empty()) {
            match (&mut &self.stream).read(rest) {
                Ok(0) => return Err("it closed the connection".to_owned()),
                Ok(read) => self.len += read,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    let late = Instant::now() >= self.until;
                    return if late { Err("it doesn't say who it is".to_owned()) } else { Ok(None) };
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        Hello::parse(self.heard).map(Some).ok_or_else(|| "it is no node of a VM".to_owned())
    }

    /// The connection as its link needs it.
    fn stream(self) -> std::io::Result<Stream> {
        rustix::io::ioctl_fionbio(self.stream.as_fd(), false)?;
        // Its settings are those of a link.
        self.stream.set_timeout(None)?;
        Ok(self.stream)
    }
}

/// Connects, or gives up at `deadline`: a host that drops what comes would hold Linux up for two minutes.
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

/// Says so: whoever can't start a VM wants to know who came in its place.
fn stranger(problem: &str) {
    static LOG: LazyLock<GuestLog> = LazyLock::new(GuestLog::new);
    telemetry::guest_warn!(LOG, "A connection to this node's address is dropped: {problem}");
}

/// Says who this is, and hears who the other is.
fn greet(stream: &Stream, hello: &Hello) -> std::io::Result<Option<Hello>> {
    stream.set_timeout(Some(GREETING))?;
    write(stream, &hello.to_bytes())?;
    let mut answer = [0; LEN];
    (&mut &*stream).read_exact(&mut answer)?;
    stream.set_timeout(None)?;
    Ok(Hello::parse(answer))
}

/// The device that this node's links go by, where they go by RDMA: all of them, or none.
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

/// Makes a link of a connection whose both ends have said who they are.
fn link(peer: u8, place: &NodeAddress, stream: Stream, device: Option<&Arc<Device>>) -> Result<Link, String> {
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
    Ok(Link::new(peer, place.to_string(), way))
}

/// Connects to all other nodes. `addresses` has one of each node, in order; `device` is what links go by, where they go by RDMA. The links, by node; `None` for
/// this one.
pub(super) fn join(
    hello: Hello,
    addresses: &[NodeAddress],
    device: Option<&Arc<Device>>,
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
        let made = link(u8::try_from(peer).unwrap_or(u8::MAX), place, stream, device);
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
        // Looked at in each round: strangers that come without end must not keep it from ending.
        if Instant::now() >= deadline {
            let problem = format!("it hasn't come within {} s; start it", PATIENCE.as_secs());
            return Err(failed(next, problem));
        }
        match listener.accept() {
            Ok(stream) => match Greeting::begin(stream, &hello) {
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
            // It was gone before it was taken.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionAborted => {}
            Err(error) => return Err(failed(next, format!("its connection can't be taken: {error}"))),
        }
        for mut greeting in std::mem::take(&mut greetings) {
            let other = match greeting.look() {
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
            let stream = greeting.stream();
            let stream = stream
                .map_err(|error| failed(usize::from(peer), format!("its connection is gone: {error}")))?;
            let Some(place) = addresses.get(usize::from(peer)) else { continue };
            let made = link(peer, place, stream, device);
            let made = made.map_err(|problem| failed(usize::from(peer), problem))?;
            if let Some(link) = links.get_mut(usize::from(peer)) {
                *link = Some(made);
            }
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
                std::thread::spawn(move || {
                    join(Hello { node, nodes: 4, digest: 5, rdma: false }, &all, None).unwrap()
                })
            })
            .into();
        for (thread, me) in threads.into_iter().zip([2, 0, 3, 1]) {
            let links = thread.join().unwrap();
            let peers: Vec<_> = links.iter().map(|link| link.as_ref().map(|link| link.peer)).collect();
            assert_eq!(peers, (0..4).map(|node| (node != me).then_some(node)).collect::<Vec<_>>());
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "no sockets are left");
    }

    /// All links go by RDMA or none; without a device there is one sentence with address and advice. (A documentation address is no host's.)
    #[test]
    fn links_by_rdma_need_a_device_and_all_nodes() {
        let at =
            |texts: &[&str]| -> Vec<NodeAddress> { texts.iter().map(|text| text.parse().unwrap()).collect() };
        assert!(device_of(0, &at(&["tcp:a:1", "unix:/b"]), None).unwrap().is_none());
        for mixed in
            [&["rdma:203.0.113.1:7000", "tcp:203.0.113.2:7000"], &["unix:/a", "rdma:203.0.113.2:7000"]]
        {
            let error = device_of(0, &at(mixed), None).unwrap_err().to_string();
            assert!(error.contains("all nodes"), "{error}");
        }
        let absent =
            device_of(0, &at(&["rdma:203.0.113.1:7000", "rdma:203.0.113.2:7000"]), None).unwrap_err();
        let text = super::super::spanning::chain(&absent);
        assert!(text.contains("rdma:203.0.113.1:7000") && text.contains("Node 0"), "{text}");
        assert!(
            ["install", "rdma link add", "Name one"].iter().any(|advice| text.contains(advice)),
            "{text}"
        );
    }

    /// Connects to a node that is about to listen.
    fn visit(place: &NodeAddress) -> Stream {
        loop {
            if let Ok(stream) = connect(place, Instant::now() + PATIENCE) {
                return stream;
            }
            std::thread::sleep(PAUSE);
        }
    }

    #[test]
    fn strangers_at_a_nodes_address_are_dropped_and_hold_nobody_up() {
        let folder = tempfile::tempdir().unwrap();
        let all = addresses(&folder, 2);
        let listening = all.clone();
        let first = std::thread::spawn(move || {
            join(Hello { node: 0, nodes: 2, digest: 5, rdma: false }, &listening, None)
        });
        // One that says nothing, one that goes at once, one that speaks something else, and one that stops in the middle.
        let silent = visit(&all[0]);
        drop(visit(&all[0]));
        let other = visit(&all[0]);
        write(&other, b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let slow = visit(&all[0]);
        write(&slow, &MAGIC[..4]).unwrap();
        let second = join(Hello { node: 1, nodes: 2, digest: 5, rdma: false }, &all, None).unwrap();
        assert!(second[0].is_some());
        assert!(first.join().unwrap().unwrap()[1].is_some());
        drop((silent, slow));
    }

    #[test]
    fn more_strangers_than_there_is_room_for_do_not_keep_a_node_out() {
        let folder = tempfile::tempdir().unwrap();
        let all = addresses(&folder, 2);
        let listening = all.clone();
        let first = std::thread::spawn(move || {
            join(Hello { node: 0, nodes: 2, digest: 5, rdma: false }, &listening, None)
        });
        let strangers: Vec<_> = (0..2 * STRANGERS).map(|_| visit(&all[0])).collect();
        join(Hello { node: 1, nodes: 2, digest: 5, rdma: false }, &all, None).unwrap();
        assert!(first.join().unwrap().unwrap()[1].is_some());
        drop(strangers);
    }

    #[test]
    fn a_node_of_another_program_or_another_number_of_nodes_is_refused_by_name() {
        for (other, expected) in [
            (Hello { node: 1, nodes: 2, digest: 6, rdma: false }, "another program"),
            (Hello { node: 1, nodes: 3, digest: 5, rdma: false }, "a VM of 3 nodes"),
            (Hello { node: 0, nodes: 2, digest: 5, rdma: false }, "says that it is node 0"),
            (Hello { node: 1, nodes: 2, digest: 5, rdma: true }, "go by rdma, this one's by tcp"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let all = addresses(&folder, 2);
            let listening = all.clone();
            let first = std::thread::spawn(move || {
                join(Hello { node: 0, nodes: 2, digest: 5, rdma: false }, &listening, None)
            });
            let stream = visit(&all[0]);
            write(&stream, &other.to_bytes()).unwrap();
            let error = first.join().unwrap().map(drop).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("Node 1"), "{error}");
        }
    }
}
