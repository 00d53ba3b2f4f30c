//! The thread that accepts connections of other daemons, and connects to them.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener as StdTcpListener};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cluster_key::ClusterKey;
use nomad::HostId;
use telemetry::guest_log::GuestLog;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::oneshot;

use super::connection::{establish, random, run};
use super::hello::Refusal;
use super::{Hosts, PeerMessages, Shared};
use crate::metrics_server::no_more;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Limit of connections of others that are in their handshake, in all and of one address.
const MAX_HANDSHAKES: usize = 64;
const MAX_HANDSHAKES_PER_ADDRESS: usize = 4;

/// Listens for other daemons.
///
/// # Errors
/// When the port is taken, or the address isn't this host's.
pub(crate) fn bind(address: SocketAddr) -> io::Result<StdTcpListener> {
    let listener = StdTcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// The running thread. Dropping it closes all connections.
#[derive(Debug)]
pub(crate) struct PeerMessagesThread {
    handle: PeerMessages,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl PeerMessagesThread {
    /// Starts the thread. With a key, connections are sealed, and only such are accepted.
    ///
    /// # Errors
    /// When the kernel has no thread or descriptor left.
    pub fn start(
        hosts: Arc<dyn Hosts>,
        listener: StdTcpListener,
        key: Option<ClusterKey>,
    ) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        let own_ip = listener.local_addr()?.ip();
        let handle = PeerMessages::new(hosts);
        let (stop, stopped) = oneshot::channel();
        let shared = Arc::clone(&handle.0);
        let thread = std::thread::Builder::new().name("peer-messages".to_owned()).spawn(move || {
            let server = Arc::new(Server { shared, key, own_ip, handshakes: Handshakes::default() });
            runtime.block_on(async {
                tokio::select! {
                    result = server.serve(listener) => {
                        if let Err(error) = result {
                            tracing::error!(%error, "Direct connections of other daemons can't be accepted");
                        }
                    }
                    // A dropped daemon stops as well.
                    _ = stopped => {}
                }
            });
        })?;
        Ok(Self { handle, stop: Some(stop), thread: Some(thread) })
    }

    /// For other threads.
    pub fn handle(&self) -> PeerMessages {
        self.handle.clone()
    }
}

impl Drop for PeerMessagesThread {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            // A thread that has failed doesn't receive this.
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("The thread for other daemons' messages panicked; this is a bug");
        }
    }
}

struct Server {
    shared: Arc<Shared>,
    key: Option<ClusterKey>,
    own_ip: IpAddr,
    handshakes: Handshakes,
}

impl Server {
    async fn serve(self: Arc<Self>, listener: StdTcpListener) -> io::Result<()> {
        let listener = TcpListener::from_std(listener)?;
        loop {
            let (due, next) = self.shared.table.due(Instant::now());
            for host in due {
                tokio::spawn(Arc::clone(&self).connect(host));
            }
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, from)) => self.admit(stream, from.ip()),
                    Err(error) => no_more(&error).await,
                },
                () = self.shared.wanted.notified() => {}
                () = until(next) => {}
            }
        }
    }

    /// Begins the handshake of a connection that has come, if there is room for it.
    fn admit(self: &Arc<Self>, stream: TcpStream, ip: IpAddr) {
        // The kernel may map IPv4 addresses.
        let ip = ip.to_canonical();
        if !self.shared.hosts.has_host_at(ip) {
            return self.refuse(ip, Refusal::Stranger);
        }
        let Some(ticket) = self.handshakes.enter(ip) else { return self.refuse(ip, Refusal::Busy) };
        let server = Arc::clone(self);
        tokio::spawn(async move {
            let mut stream = stream;
            let established = establish(&server.shared, &mut stream, ip, server.key.as_ref(), None).await;
            drop(ticket);
            match established {
                Ok(established) => {
                    // A message waits for nothing.
                    let _ = stream.set_nodelay(true);
                    run(&server.shared, stream, established).await;
                }
                Err(why) => server.refuse(ip, why),
            }
        });
    }

    fn refuse(&self, ip: IpAddr, why: Refusal) {
        static LOG: LazyLock<GuestLog> = LazyLock::new(GuestLog::new);
        self.shared.counters.refused(why);
        telemetry::guest_warn!(LOG, "A direct connection from {ip} for migrations is refused: {why}");
    }

    /// Connects to a host, and exchanges messages until the connection ends.
    async fn connect(self: Arc<Self>, host: HostId) {
        static LOG: LazyLock<GuestLog> = LazyLock::new(GuestLog::new);
        match self.try_connect(host).await {
            Ok((stream, established)) => run(&self.shared, stream, established).await,
            Err(why) => {
                self.shared.counters.failed_attempts.increment();
                self.shared.table.failed(host, Instant::now(), random());
                let name = self.shared.hosts.host(host).map_or_else(|| host.to_string(), |host| host.name);
                telemetry::guest_info!(
                    LOG,
                    "Host {name} can't be connected directly, its messages for migrations go through the cluster service: {why}"
                );
            }
        }
        // Another host may have room now.
        self.shared.wanted.notify_one();
    }

    async fn try_connect(&self, host: HostId) -> Result<(TcpStream, super::connection::Established), String> {
        let known = self.shared.hosts.host(host).ok_or("the directory doesn't have it")?;
        let address = known.address;
        let failed = |what: &str, error: &io::Error| format!("{what} TCP {address}: {error}");
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
        let socket = socket.map_err(|error| failed("no socket for", &error))?;
        // The peer compares the address with this host's in the directory.
        socket
            .bind(SocketAddr::new(self.own_ip, 0))
            .map_err(|error| failed("no port at this host's address for", &error))?;
        let connecting = tokio::time::timeout(CONNECT_TIMEOUT, socket.connect(address)).await;
        let late = || format!("TCP {address} doesn't answer; is the port open to this host?");
        let mut stream =
            connecting.map_err(|_| late())?.map_err(|error| failed("no connection to", &error))?;
        let _ = stream.set_nodelay(true);
        let established =
            establish(&self.shared, &mut stream, address.ip(), self.key.as_ref(), Some(host)).await;
        let established = established.map_err(|why| format!("the handshake with {address} failed: {why}"))?;
        Ok((stream, established))
    }
}

/// Completes at a time, or never.
async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

/// Connections in their handshake, by address.
#[derive(Debug, Default)]
struct Handshakes(Arc<Mutex<HashMap<IpAddr, usize>>>);

/// A place among the handshakes, until it is dropped.
#[derive(Debug)]
struct Ticket {
    of: Arc<Mutex<HashMap<IpAddr, usize>>>,
    ip: IpAddr,
}

impl Handshakes {
    /// `None`: there is no room.
    fn enter(&self, ip: IpAddr) -> Option<Ticket> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.values().sum::<usize>() >= MAX_HANDSHAKES {
            return None;
        }
        let of_one = all.entry(ip).or_default();
        if *of_one >= MAX_HANDSHAKES_PER_ADDRESS {
            return None;
        }
        *of_one += 1;
        Some(Ticket { of: Arc::clone(&self.0), ip })
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut all = self.of.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = all.get_mut(&self.ip) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.ip);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One address can't keep others from their handshakes, and all together are bounded.
    #[test]
    fn handshakes_are_bounded_by_address_and_in_all() {
        let handshakes = Handshakes::default();
        let ip = |last: u8| IpAddr::from([127, 0, 0, last]);
        let mut tickets: Vec<_> = (0..100).filter_map(|_| handshakes.enter(ip(1))).collect();
        assert_eq!(tickets.len(), MAX_HANDSHAKES_PER_ADDRESS);
        tickets.extend((2..100).flat_map(|last| [ip(last); 9]).filter_map(|ip| handshakes.enter(ip)));
        assert_eq!(tickets.len(), MAX_HANDSHAKES);
        drop(tickets);
        assert!(handshakes.enter(ip(1)).is_some());
        assert!(handshakes.0.lock().expect("not poisoned").is_empty(), "nothing is left behind");
    }
}
