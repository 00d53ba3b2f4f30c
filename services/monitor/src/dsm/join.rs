//! Connection of the nodes: each connects to nodes with lower numbers, and accepts connections of nodes with higher numbers.

mod greeting;

use std::net::{TcpListener, TcpStream, ToSocketAddrs as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use cluster_key::ClusterKey;
use telemetry::guest_log::GuestLog;

pub(super) use self::greeting::Hello;
#[cfg(test)]
pub(super) use self::greeting::NODES;
use self::greeting::{GREETING, Greeting, Sealed, greet};
use super::link::{Link, Stream, Way};
use super::rdma::{self, Device};
use super::{DsmError, NoDevice, NodeAddress, RdmaDevice};

/// Time in which all nodes must have connected.
const LAST_NODE_TIMEOUT: Duration = Duration::from_secs(15);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(10);
/// Limit of connections whose greeting is incomplete. A new one replaces the oldest.
const STRANGERS: usize = 64;

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

/// Logs a dropped connection: an operator whose VM doesn't start must learn which connection came instead of the node.
fn stranger(problem: &str) {
    static LOG: LazyLock<GuestLog> = LazyLock::new(GuestLog::new);
    telemetry::guest_warn!(LOG, "A connection to this node's address is dropped: {problem}");
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
    let Some(own) = addresses.get(me) else {
        return Err(DsmError::Settings(format!("there is no address for node {me}")));
    };
    let awaits = me + 1 < addresses.len();
    let listener = awaits.then(|| Listener::open(own)).transpose();
    let listener =
        listener.map_err(|source| DsmError::Listen { node: hello.node, address: own.to_string(), source })?;
    let deadline = Instant::now() + LAST_NODE_TIMEOUT;
    let links = addresses.iter().map(|_| None).collect();
    let mut joining = Joining { hello, addresses, device, key, deadline, links };
    for (peer, place) in addresses.iter().enumerate().take(me) {
        joining.connect(peer, place)?;
    }
    if let Some(listener) = &listener {
        joining.accept_all(listener)?;
    }
    if let NodeAddress::Unix(path) = own
        && awaits
    {
        // All nodes have connected. A socket file that stays would be in the way of the next VM.
        let _ = std::fs::remove_file(path);
    }
    Ok(joining.links)
}

/// The connection of this node with all others, in progress.
struct Joining<'a> {
    hello: Hello,
    addresses: &'a [NodeAddress],
    device: Option<&'a Arc<Device>>,
    key: Option<&'a ClusterKey>,
    deadline: Instant,
    /// By node. `None` for this one and for nodes that haven't connected.
    links: Vec<Option<Link>>,
}

impl Joining<'_> {
    fn failed(&self, peer: usize, problem: String) -> DsmError {
        let address = self.addresses.get(peer).map(ToString::to_string).unwrap_or_default();
        DsmError::Join { peer: u8::try_from(peer).unwrap_or(u8::MAX), address, problem }
    }

    /// Makes the link with a node.
    fn add(
        &mut self,
        peer: usize,
        place: &NodeAddress,
        parts: (Stream, Option<Sealed>),
    ) -> Result<(), DsmError> {
        let made = link(u8::try_from(peer).unwrap_or(u8::MAX), place, parts, self.device);
        let made = made.map_err(|problem| self.failed(peer, problem))?;
        if let Some(link) = self.links.get_mut(peer) {
            *link = Some(made);
        }
        Ok(())
    }

    /// Connects to a node with a lower number.
    fn connect(&mut self, peer: usize, place: &NodeAddress) -> Result<(), DsmError> {
        let stream = loop {
            match connect(place, self.deadline) {
                Ok(stream) => break stream,
                Err(_) if Instant::now() < self.deadline => std::thread::sleep(PAUSE),
                Err(error) => {
                    let seconds = LAST_NODE_TIMEOUT.as_secs();
                    let problem = format!("nobody listens there for {seconds} s ({error}); start it");
                    return Err(self.failed(peer, problem));
                }
            }
        };
        let failed = |problem| self.failed(peer, problem);
        let (other, sealed) = greet(&stream, &self.hello, self.key).map_err(failed)?;
        self.hello.accepts(other, |node| usize::from(node) == peer).map_err(failed)?;
        self.add(peer, place, (stream, sealed))
    }

    /// Accepts connections until all nodes with higher numbers have connected.
    fn accept_all(&mut self, listener: &Listener) -> Result<(), DsmError> {
        let mut greetings: Vec<Greeting> = Vec::new();
        while let Some(next) = self.missing() {
            // Checked in each iteration: an endless stream of strangers must not prevent the timeout.
            if Instant::now() >= self.deadline {
                let problem = format!("it hasn't come within {} s; start it", LAST_NODE_TIMEOUT.as_secs());
                return Err(self.failed(next, problem));
            }
            self.accept(listener, &mut greetings, next)?;
            for greeting in std::mem::take(&mut greetings) {
                greetings.extend(self.advance(greeting, next)?);
            }
        }
        Ok(())
    }

    /// The lowest of the higher nodes that hasn't connected.
    fn missing(&self) -> Option<usize> {
        let mut above = usize::from(self.hello.node) + 1..self.links.len();
        above.find(|node| self.links.get(*node).is_some_and(Option::is_none))
    }

    /// Accepts one connection, if there is one, and begins its greeting. `next` is the node that errors name.
    fn accept(
        &self,
        listener: &Listener,
        greetings: &mut Vec<Greeting>,
        next: usize,
    ) -> Result<(), DsmError> {
        match listener.accept() {
            Ok(stream) => match Greeting::begin(stream, &self.hello, self.key) {
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
            Err(error) => return Err(self.failed(next, format!("its connection can't be taken: {error}"))),
        }
        Ok(())
    }

    /// Advances a greeting, and makes the link once it is complete. Returns an incomplete one.
    fn advance(&mut self, mut greeting: Greeting, next: usize) -> Result<Option<Greeting>, DsmError> {
        let other = match greeting.look(&self.hello) {
            Ok(Some(other)) => other,
            Ok(None) => return Ok(Some(greeting)),
            Err(problem) => {
                stranger(&problem);
                return Ok(None);
            }
        };
        let free = |node: u8| {
            node > self.hello.node && self.links.get(usize::from(node)).is_some_and(Option::is_none)
        };
        let peer = self.hello.accepts(Some(other), free).map_err(|problem| self.failed(next, problem))?;
        let peer = usize::from(peer);
        let parts = greeting.into_parts();
        let parts = parts.map_err(|error| self.failed(peer, format!("its connection is gone: {error}")))?;
        let Some(place) = self.addresses.get(peer) else { return Ok(None) };
        self.add(peer, place, parts)?;
        Ok(None)
    }
}

#[cfg(test)]
mod tests;
