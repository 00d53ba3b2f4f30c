//! A member's thread: messages of the registry, requests of the member, and heartbeats. The member is the PCI function or a network device
//! ([`Member`]).

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use machine::memory::GuestRam;
use neighbour::registers::reason;
use neighbour_protocol::{FromDaemon, FromMonitor, Permitted, Piece, Socket, SocketError};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use telemetry::Counter;
use telemetry::guest_log::GuestLog;

use super::mappings::Offer;
use super::opened::{Terms, connect};
use super::{NeighbourError, OpenedNeighbour};
use crate::description::Neighbour;
use crate::vm::ThreadHook;

/// First back-off before the thread tries to reach the daemon again. It doubles with each attempt.
const FIRST_BACKOFF: Duration = Duration::from_millis(50);
const MAX_BACKOFF: Duration = Duration::from_secs(2);
/// Timeout of the daemon's answer to `Join`.
const JOIN_TIMEOUT: Duration = Duration::from_secs(5);
/// Messages per call, before the guest's requests are served.
const BATCH: usize = 16;

/// Result of a connection's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// The connection was unknown.
    Unknown,
    /// The guest was notified, and will request the release.
    Notified,
    /// Nothing uses the mappings, so they are released now.
    Unused,
}

/// The user of a membership. All methods may be called from the membership's thread.
pub(super) trait Member: Send + Sync + 'static {
    /// The rate-limited log for problems that peers and guests cause.
    fn log(&self) -> &GuestLog;
    /// Counters of the membership.
    fn counters(&self) -> &Counters;
    /// Readable when [`Member::asked`] may have requests. The thread empties it.
    fn wake(&self) -> BorrowedFd<'_>;
    /// An eventfd per slot, which the peer in that slot signals; `None` if they can't be created.
    fn signals(&self, slots: u32) -> Option<Vec<BorrowedFd<'_>>>;
    /// The member has got this slot.
    fn joined(&self, slot: u32);
    /// Slots and epochs of mapped peers.
    fn mapped_peers(&self) -> Vec<(u32, u32)>;
    /// Maps a peer. After an error nothing is mapped.
    fn map(&self, terms: &Terms, offer: Offer) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;
    /// Makes a mapped peer visible to the user. Returns false if it can't be used now.
    fn publish(&self, slot: u32, epoch: u32) -> bool;
    /// Reports the slots that a peer and this member both may reach, as a bit set.
    fn common(&self, slot: u32, slots: u64);
    /// A connection has ended.
    fn connection_ended(&self, slot: u32, epoch: u32, reason: u32) -> End;
    /// Unmaps a peer. Returns false if it isn't mapped, or has another epoch.
    fn unmap(&self, slot: u32, epoch: u32) -> bool;
    /// Slots and epochs that the user requests to release.
    fn release_requests(&self) -> Vec<(u32, u32)>;
    /// The user's heartbeat count; 0 without a user. Called once per heartbeat.
    fn heartbeat(&self) -> u64;
    /// Updates the bus to the present mappings.
    fn refresh(&self);
}

/// Counters for `causeway inspect`.
#[derive(Default)]
pub(super) struct Counters {
    pub connections: Counter,
    pub ends: Counter,
    pub losses: Counter,
}

/// The connection to the registry, with all that is needed to reconnect.
pub(super) struct Registry {
    config: Neighbour,
    vm: String,
    path: PathBuf,
    terms: Terms,
    ram: Vec<Piece>,
    files: Vec<Arc<File>>,
    /// `None` while the daemon is away.
    socket: Option<Socket>,
    slot: u32,
    /// The highest epoch received.
    epoch: u32,
    /// Offers that wait until the guest has released the previous connection of their slot.
    pending: BTreeMap<u32, Offer>,
}

impl Registry {
    /// Joins the neighbourhood.
    pub(super) fn join(
        opened: OpenedNeighbour,
        ram: &GuestRam,
        inner: &dyn Member,
    ) -> Result<Self, NeighbourError> {
        let OpenedNeighbour { config, vm, path, socket, terms } = opened;
        let mut files: Vec<Arc<File>> = Vec::new();
        let mut pieces = Vec::new();
        for region in ram.regions() {
            let Some(reader) = &region.read_only else {
                let error = io::Error::other("RAM was not allocated for readers; this is a bug");
                return Err(NeighbourError::monitor("hand over RAM", error));
            };
            let at = files.iter().position(|file| Arc::ptr_eq(file, reader)).unwrap_or_else(|| {
                files.push(Arc::clone(reader));
                files.len() - 1
            });
            pieces.push(Piece {
                address: region.range.start,
                size: region.range.size,
                file: u32::try_from(at).unwrap_or(u32::MAX),
                offset: region.file_offset,
            });
        }
        let mut registry = Self {
            config,
            vm,
            path,
            terms,
            ram: pieces,
            files,
            socket: None,
            slot: 0,
            epoch: 0,
            pending: BTreeMap::new(),
        };
        registry.send_join(socket, None, inner)?;
        Ok(registry)
    }

    /// Sends `Join` and waits for the answer.
    fn send_join(
        &mut self,
        socket: Socket,
        slot: Option<u32>,
        inner: &dyn Member,
    ) -> Result<(), NeighbourError> {
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| NeighbourError::Registry {
            path: self.path.clone(),
            source,
        };
        let permits = self.config.permit.iter();
        let join = FromMonitor::Join {
            vm: self.vm.clone(),
            group: self.config.group.clone(),
            permits: permits.map(|peer| Permitted { vm: peer.vm.clone(), uid: peer.uid }).collect(),
            ram: self.ram.clone(),
            slot,
            epoch: self.epoch,
        };
        let mut fds: Vec<BorrowedFd<'_>> = self.files.iter().map(|file| file.as_fd()).collect();
        let signals = inner.signals(self.terms.geometry.slots());
        fds.extend(signals.ok_or_else(|| failed("this machine's interrupts don't come by eventfd".into()))?);
        let sent = socket.send(&join, &fds);
        if !matches!(sent, Ok(()) | Err(SocketError::Closed)) {
            sent.map_err(|error| failed(error.into()))?;
        }
        // A registry that has closed the connection sent its reason before, unless it has ended.
        match socket.wait::<FromDaemon>(JOIN_TIMEOUT).map_err(|error| failed(error.into()))?.0 {
            FromDaemon::Joined { slot } if slot < self.terms.geometry.slots() => {
                self.slot = slot;
                inner.joined(slot);
                self.socket = Some(socket);
                Ok(())
            }
            FromDaemon::Refused { reason } => {
                Err(NeighbourError::Refused { path: self.path.clone(), reason })
            }
            other => Err(failed(format!("it answers {other:?}").into())),
        }
    }

    /// Processes messages of the registry. Returns false if the connection is lost.
    fn receive_messages(&mut self, inner: &dyn Member) -> bool {
        for _ in 0..BATCH {
            let Some(socket) = &self.socket else { return false };
            match socket.receive::<FromDaemon>() {
                Ok(None) => return true,
                Ok(Some((FromDaemon::Connect { slot, epoch, vm, ram, .. }, fds))) => {
                    self.epoch = self.epoch.max(epoch);
                    let offer = Offer { slot, epoch, vm, ram, fds };
                    if inner.mapped_peers().iter().any(|(mapped, _)| *mapped == slot) {
                        self.pending.insert(slot, offer);
                    } else {
                        self.connect_peer(offer, inner);
                    }
                }
                Ok(Some((FromDaemon::Common { slot, slots }, _))) => {
                    inner.common(slot, slots);
                }
                Ok(Some((FromDaemon::Gone { slot, epoch, reason }, _))) => {
                    if self.pending.get(&slot).is_some_and(|offer| offer.epoch == epoch) {
                        self.pending.remove(&slot);
                        self.send_release(slot, epoch);
                    } else {
                        self.connection_ended(slot, epoch, reason, inner);
                    }
                }
                Ok(Some((other, _))) => {
                    tracing::warn!(message = ?other, "The registry of neighbours sent an unexpected message");
                    return false;
                }
                Err(error) => {
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "The registry of neighbours is lost"
                    );
                    return false;
                }
            }
        }
        true
    }

    /// Maps a peer and makes it visible to the member's user.
    fn connect_peer(&mut self, offer: Offer, inner: &dyn Member) {
        let (slot, epoch, vm) = (offer.slot, offer.epoch, offer.vm.clone());
        if let Err(error) = inner.map(&self.terms, offer) {
            telemetry::guest_warn!(
                inner.log(),
                error = &*error as &dyn std::error::Error,
                slot,
                "A neighbour can't be mapped; it is released, and mapped again after a delay"
            );
            return self.send_release(slot, epoch);
        }
        telemetry::guest_info!(inner.log(), slot, epoch, vm, "Neighbour connected");
        inner.refresh();
        // Visible only after it is mapped.
        if inner.publish(slot, epoch) {
            inner.counters().connections.increment();
        } else {
            self.release(slot, epoch, inner);
        }
    }

    /// A connection has ended. Without a driver, releases it at once.
    fn connection_ended(&mut self, slot: u32, epoch: u32, reason: u32, inner: &dyn Member) {
        let end = inner.connection_ended(slot, epoch, reason);
        if end == End::Unknown {
            return;
        }
        telemetry::guest_info!(inner.log(), slot, epoch, reason, "Neighbour gone");
        inner.counters().ends.increment();
        if end == End::Unused {
            self.release(slot, epoch, inner);
        }
    }

    /// Unmaps a peer, and accepts the next offer for its slot.
    fn release(&mut self, slot: u32, epoch: u32, inner: &dyn Member) {
        if !inner.unmap(slot, epoch) {
            return;
        }
        self.send_release(slot, epoch);
        if let Some(offer) = self.pending.remove(&slot) {
            self.connect_peer(offer, inner);
        }
    }

    fn send_release(&self, slot: u32, epoch: u32) {
        self.send(&FromMonitor::Release { slot, epoch });
    }

    /// Sends a message. A lost connection is detected by the next receive.
    fn send(&self, message: &FromMonitor) {
        if let Some(socket) = &self.socket
            && let Err(error) = socket.send(message, &[])
        {
            tracing::debug!(
                error = &error as &dyn std::error::Error,
                "The registry of neighbours could not be notified"
            );
        }
    }

    /// Serves the requests of the member's user.
    fn serve(&mut self, inner: &dyn Member) {
        for (slot, epoch) in inner.release_requests() {
            self.release(slot, epoch, inner);
        }
    }

    /// The connection to the daemon is lost. Connections to peers continue without heartbeats.
    fn disconnect(&mut self, inner: &dyn Member) {
        telemetry::guest_warn!(inner.log(), path = %self.path.display(), "The host daemon has ended; neighbours stay connected, and no new ones connect until it is back");
        self.socket = None;
        self.pending.clear();
        inner.counters().losses.increment();
    }

    /// Tries once to reconnect to the daemon. Connections of the old daemon's time end.
    fn reconnect(&mut self, inner: &dyn Member) -> Result<(), NeighbourError> {
        let (socket, terms) = connect(&self.path)?;
        if terms != self.terms {
            let source = "its windows or rings are others than before; restart the VM to use them".into();
            return Err(NeighbourError::Registry { path: self.path.clone(), source });
        }
        self.send_join(socket, Some(self.slot), inner)?;
        for (slot, epoch) in inner.mapped_peers() {
            self.connection_ended(slot, epoch, reason::REGISTRY, inner);
        }
        inner.refresh();
        Ok(())
    }
}

/// The membership's thread. Dropping it ends the thread and leaves the neighbourhood.
pub(super) struct Thread {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Thread {
    pub(super) fn start(
        inner: Arc<dyn Member>,
        registry: Registry,
        on_start: ThreadHook,
    ) -> io::Result<Self> {
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("neighbour0".to_owned()).spawn(move || {
            on_start();
            run(&*inner, registry, stopped.as_fd());
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        // A full counter would mean that the thread is signaled already.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take()
            // The thread itself may briefly hold the last reference to the bus.
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("The thread of neighbours panicked; this is a bug");
        }
    }
}

fn run(inner: &dyn Member, mut registry: Registry, stop: BorrowedFd<'_>) {
    let interval = Duration::from_millis(registry.terms.heartbeat_ms.into());
    let mut due = Instant::now();
    let mut backoff = FIRST_BACKOFF;
    inner.refresh();
    loop {
        let [stopped, has_requests, has_message] = match wait(inner, &registry, stop, due) {
            Ok(ready) => ready,
            Err(error) => {
                tracing::error!(%error, "The thread of neighbours can't wait; it ends, and peers will see this VM as dead");
                return;
            }
        };
        if stopped {
            return;
        }
        if has_requests {
            let _ = rustix::io::read(inner.wake(), &mut [0; 8]);
            registry.serve(inner);
        }
        if has_message && !registry.receive_messages(inner) {
            registry.disconnect(inner);
            backoff = FIRST_BACKOFF;
            due = Instant::now() + backoff;
        }
        if Instant::now() < due {
            continue;
        }
        if registry.socket.is_some() {
            registry.send(&FromMonitor::Alive { count: inner.heartbeat() });
            due = Instant::now() + interval;
            continue;
        }
        match registry.reconnect(inner) {
            Ok(()) => {
                telemetry::guest_info!(inner.log(), "The host daemon is back; neighbours connect anew");
                due = Instant::now();
            }
            Err(error) => {
                if backoff == FIRST_BACKOFF || !matches!(error, NeighbourError::Registry { .. }) {
                    telemetry::guest_warn!(
                        inner.log(),
                        error = &error as &dyn std::error::Error,
                        "The host daemon isn't back yet"
                    );
                }
                backoff = (backoff * 2).min(MAX_BACKOFF);
                due = Instant::now() + backoff;
            }
        }
    }
}

/// Waits for the stop signal, requests of the guest, messages of the registry, or `due`.
fn wait(
    inner: &dyn Member,
    registry: &Registry,
    stop: BorrowedFd<'_>,
    due: Instant,
) -> io::Result<[bool; 3]> {
    let mut fds = vec![
        PollFd::from_borrowed_fd(stop, PollFlags::IN),
        PollFd::from_borrowed_fd(inner.wake(), PollFlags::IN),
    ];
    if let Some(socket) = &registry.socket {
        fds.push(PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN));
    }
    let left = due.saturating_duration_since(Instant::now());
    let timeout = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
    match poll(&mut fds, Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    let ready = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
    Ok([ready(0), ready(1), ready(2)])
}
