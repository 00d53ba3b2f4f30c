//! RDMA to other hosts: connections of queue pairs with remote peers, and the transports of their packets.
//!
//! ```text
//! hca::Engine ── Action::Post ──▶ Transports ── roce::Connection::transmit ──▶ fabric ──▶ UDP
//!      ▲                            │    ▲                                     wire ──▶ frames on the NIC's segment
//!      └── remote_* (Carrier) ◀─────┘    └── fabric ◀── UDP, wire ◀── frames
//!                                   └── verbs ──▶ the host's RDMA device, which implements the protocol itself
//! ```
//!
//! All of it runs on the engine's thread, between its polls. A connection of the protocol is created when its queue pair first posts a
//! request, or when the first packet for it arrives. It ends with the queue pair's reset.
//!
//! | module | holds |
//! |---|---|
//! | `directory` | hosts of VMs |
//! | `local` | this host's devices: notifications to the directory, and their numbers in it |
//! | `fabric`, `header`, `counters` | packets between daemons |
//! | `secure` | their encryption and authentication |
//! | `wire` | plain RoCEv2 on a NIC's segment, for peers that no daemon knows |
//! | `verbs`, `carried` | queue pairs backed by those of the host's RDMA device |
//! | `pin` | which transport a connection must use |
//! | `arrivals` | packets from other daemons |
//! | `carrier` | the protocol's view of the engine |
//! | `connections` | the protocol's connections |
//! | `moving` | connections of migrating VMs, and of their peers |
//! | `reports` | reports of connections |

mod arrivals;
mod carried;
mod carrier;
mod connections;
mod counters;
mod directory;
mod fabric;
#[doc(hidden)]
pub mod fuzzing;
mod header;
mod local;
mod moving;
mod pin;
mod reports;
mod secure;
mod verbs;
mod wire;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use hca::engine::Engine;
use hca::names::{DeviceId, Gid, SegmentId};
use hca::provider::Provider;
use hca::remote::{Action, OutgoingDatagram, Posted, PostedOperation, QpId};
use hca::work::Status;
use roce::datagram::Datagram;
use telemetry::guest_log::GuestLog;

use roce::{Batch, Kind as RequestKind, PostError, Remote, Request};

use arrivals::Arrivals;
use carrier::Carrier;
use connections::{Connections, Entry};
pub use counters::{ENCRYPTED, FabricCounters, FabricReport, SessionCounters};
use directory::NoDirectory;
pub use directory::{Directory, DirectoryError, DirectoryReport, FileDirectory, News, VmId};
pub use fabric::FabricError;
use fabric::{Fabric, Run};
use header::{ADDRESSES, Addresses, Header, Kind};
use local::Local;
pub use local::Pair;
pub use moving::{Immovable, SavedConnection};
use pin::Refused;
pub use pin::TransportKind;
pub use reports::ConnectionReport;
pub use secure::{ClusterKey, KeyError, PeerReport};
pub use verbs::library::{Absent, Found, devices};
pub use verbs::rnic;
pub use verbs::{LinkCounters, LinkReport, VerbsReport};
use verbs::{Message, Verbs};
use wire::Wire;
pub use wire::WirePort;

/// The number for peers outside of the directory; VMs are numbered from 1.
const NOBODY: VmId = VmId(0);
/// Transport in reports of a connection that its pin forbids.
const REFUSED: &str = "refused";
/// Time after the last packet during which the thread polls its sockets without sleeping, nanoseconds.
const EAGER_NS: u64 = 200_000;
/// Limit of the time between two polls of the sockets while the thread is awake, nanoseconds.
const LOOK_NS: u64 = 20_000;
/// Limit of passes between two polls of the sockets while nothing is in flight.
const IDLE_ROUNDS: u32 = 16;
/// Limit of the packets of one `transmit`, bytes.
const BURST: usize = 60 << 10;
/// Limit of unacknowledged packets of a connection between daemons. The protocol's limit in bytes applies as well: from an MTU of 1024 on
/// it is the smaller one.
const WINDOW: u32 = 1024;
/// Time during which a failed connection repeats its NAK to a peer that missed it, nanoseconds.
const LINGER_NS: u64 = 2_000_000_000;

/// A device of the engine, as other hosts address it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Nic {
    vm: VmId,
    segment: String,
    segment_id: SegmentId,
    tag: u32,
}

/// The transports of an engine.
pub struct Transports {
    directory: Arc<dyn Directory>,
    fabric: Fabric,
    wire: Wire,
    verbs: Verbs,
    /// Why queue pairs that are pinned to `verbs` can't use it.
    instead: HashMap<QpId, String>,
    /// Messages of other daemons about `verbs`, to be processed.
    control: Vec<(DeviceId, VmId, Message)>,
    /// Devices of this host, whether or not the directory knows their VMs.
    local: HashMap<DeviceId, Local>,
    /// The engine's topology number at the last notification of the directory.
    topology: u64,
    nics: HashMap<DeviceId, Nic>,
    /// Devices by VM and segment.
    devices: HashMap<(VmId, u32), DeviceId>,
    connections: Connections,
    buffer: Vec<u8>,
    lengths: Vec<u32>,
    last_packet: u64,
    last_look: u64,
    rounds: u32,
    psn: u32,
    refusals: GuestLog,
}

impl std::fmt::Debug for Transports {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Transports").field("directory", &self.directory).finish_non_exhaustive()
    }
}

impl Transports {
    /// Opens the sockets on `address`. With a cluster key all packets are encrypted, without one none is.
    ///
    /// # Errors
    /// When a port can't be bound.
    pub fn open(
        directory: Arc<dyn Directory>,
        address: SocketAddr,
        key: Option<&ClusterKey>,
    ) -> Result<Self, FabricError> {
        let fabric = Fabric::open(address, directory.sockets(), key)?;
        let wire = Wire::new().map_err(|source| FabricError::Port { address, source })?;
        Ok(Self::with(directory, fabric, wire))
    }

    /// Transports of a host without a directory: remote peers are reached by `wire`.
    ///
    /// # Errors
    /// When the kernel has no descriptor left.
    pub fn without_directory() -> std::io::Result<Self> {
        Ok(Self::with(Arc::new(NoDirectory), Fabric::closed(), Wire::new()?))
    }

    fn with(directory: Arc<dyn Directory>, fabric: Fabric, wire: Wire) -> Self {
        Self {
            directory,
            fabric,
            wire,
            verbs: Verbs::absent("its daemon isn't told to use an RDMA device; start it with --verbs"),
            instead: HashMap::new(),
            control: Vec::new(),
            local: HashMap::new(),
            topology: 0,
            nics: HashMap::new(),
            devices: HashMap::new(),
            connections: Connections::default(),
            buffer: vec![0; BURST],
            lengths: Vec::new(),
            last_packet: 0,
            last_look: 0,
            rounds: 0,
            psn: 0,
            refusals: GuestLog::new(),
        }
    }

    /// Sets the port of a device in the engine to its NIC's segment.
    pub fn attach_wire<P: Provider>(
        &mut self,
        engine: &mut Engine<P>,
        device: DeviceId,
        segment: SegmentId,
        port: Arc<WirePort>,
    ) {
        self.wire.attach(device, segment, port);
        engine.set_uplink(segment, true);
    }

    /// Descriptors that are readable when there is something to receive.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.fabric.fds().chain(std::iter::once(self.wire.fd())).chain(self.verbs.fds())
    }

    /// Whether the thread should poll again at once instead of sleeping.
    #[must_use]
    pub fn is_busy(&self, now: u64) -> bool {
        self.connections.any_ready()
            || self.fabric.is_blocked()
            || self.verbs.is_busy(now)
            || (self.last_packet > 0 && now.saturating_sub(self.last_packet) < EAGER_NS)
    }

    /// Whether queue pairs are connected with remote peers.
    #[must_use]
    pub fn has_remote_peers(&self) -> bool {
        self.connections.any()
    }

    /// Latest time of the next call.
    #[must_use]
    pub fn next(&self) -> Option<u64> {
        [self.connections.next(), self.fabric.next(), self.verbs.next()].into_iter().flatten().min()
    }

    /// Whether there are sockets.
    #[must_use]
    pub fn has_fabric(&self) -> bool {
        self.fabric.is_open()
    }

    /// Counters of the sockets.
    #[must_use]
    pub fn counters(&self) -> FabricCounters {
        self.fabric.counters()
    }

    /// Report of sockets and sessions.
    #[must_use]
    pub fn fabric(&self) -> FabricReport {
        self.fabric.report()
    }

    /// The VM of the directory that has an address, in a device's segment.
    pub(crate) fn owner(&self, device: DeviceId, peer: Gid) -> Option<VmId> {
        self.directory.owner(&self.nics.get(&device)?.segment, peer)
    }

    /// Processes received packets. Call it before the engine's poll.
    pub fn receive<P: Provider>(&mut self, engine: &mut Engine<P>, now: u64) -> bool {
        self.rounds = self.rounds.wrapping_add(1);
        let by_wire = self.receive_wire(engine, now) | self.verbs.poll(engine, now);
        if by_wire {
            self.last_packet = now;
        }
        if !self.fabric.is_open() {
            return by_wire;
        }
        let eager = self.connections.any() && now.saturating_sub(self.last_packet) < EAGER_NS;
        // A pass may be long. Requests' timers run meanwhile, so responses must not stay unread.
        let looked_lately = now.saturating_sub(self.last_look) < LOOK_NS;
        if !eager && looked_lately && !self.rounds.is_multiple_of(IDLE_ROUNDS) {
            return by_wire;
        }
        self.last_look = now;
        let Self { fabric, wire, directory, nics, devices, connections, control, .. } = self;
        let last = &mut None;
        let any = fabric.receive(now, &|| directory.hosts(), |from, header, bytes, congested| {
            let mut arrivals = Arrivals {
                directory: directory.as_ref(),
                nics,
                devices,
                connections,
                wire,
                engine,
                now,
                last,
                control,
            };
            arrivals.take(from, header, bytes, congested)
        });
        if any {
            self.last_packet = now;
        }
        self.take_control(engine, now);
        any || by_wire
    }

    /// Processes the engine's posted requests and expired timers, and sends. Call it after the engine's poll. Returns whether anything was
    /// done.
    pub fn carry<P: Provider>(&mut self, engine: &mut Engine<P>, now: u64) -> bool {
        let mut worked = self.take_over(engine, now);
        while let Some(index) = self.connections.expired(now) {
            worked = true;
            if let Some(entry) = self.connections.get_mut(index) {
                if entry.remove_at.is_some_and(|at| at <= now) {
                    self.connections.remove(index);
                    continue;
                }
                // The VM may have moved.
                entry.host = self.directory.host(entry.peer_vm);
                engine.touch_qp(entry.qp.device, entry.qp.handle);
                entry.connection.expired(now, &mut Carrier { engine, qp: entry.qp });
            }
            self.connections.ready(index);
        }
        worked |= self.verbs.carry(engine, now);
        self.send_control(engine, now);
        self.fabric.expire(now);
        for _ in 0..self.connections.ready_count() {
            let Some(index) = self.connections.next_ready() else { break };
            worked |= self.transmit(engine, index, now);
        }
        self.tell(engine);
        worked
    }

    /// How current the directory is.
    #[must_use]
    pub fn directory(&self) -> Option<DirectoryReport> {
        self.directory.report()
    }

    fn act<P: Provider>(&mut self, engine: &mut Engine<P>, action: Action, now: u64) {
        match action {
            Action::Post { qp, request } => self.post(engine, qp, request, now),
            Action::ReceivePosted { qp } => {
                self.verbs.receive_posted(engine, qp, now);
                if let Some(index) = self.connections.find(qp) {
                    if let Some(entry) = self.connections.get_mut(index) {
                        entry.connection.receive_posted();
                    }
                    self.connections.ready(index);
                }
            }
            Action::MemoryCame { qp } => {
                if let Some(index) = self.connections.find(qp) {
                    if let Some(entry) = self.connections.get_mut(index) {
                        entry.connection.memory_came();
                    }
                    self.connections.ready(index);
                }
            }
            Action::RegionGone { device, key } => self.verbs.region_gone(device, key, now),
            Action::Closed { qp } => {
                self.instead.remove(&qp);
                if self.verbs.close(qp) {
                    return;
                }
                if let Some(index) = self.connections.find(qp) {
                    if let Some(entry) = self.connections.get_mut(index) {
                        // A connection that failed by itself still repeats its NAK.
                        if entry.connection.state() == roce::State::Ready {
                            entry.connection.fail(&mut Carrier { engine, qp });
                        }
                        entry.remove_at = Some(now + LINGER_NS);
                    }
                    self.connections.ready(index);
                }
            }
            Action::Datagram(datagram) => self.send_datagram(&datagram, now),
        }
    }

    /// Passes a request to the transport of its queue pair.
    fn post<P: Provider>(&mut self, engine: &mut Engine<P>, qp: QpId, request: Posted, now: u64) {
        match self.way_by_verbs(engine, qp, now) {
            Some(Ok(link)) => return self.verbs.post(engine, link, request, now),
            Some(Err(refused)) => {
                telemetry::guest_warn!(self.refusals, "A connection is refused: {refused}");
                engine.remote_complete(qp, request.token, Err(Status::LocalQpOperation));
                return;
            }
            None => {}
        }
        if let Some(refused) = self.refusal(engine, qp) {
            telemetry::guest_warn!(self.refusals, "A connection is refused: {refused}");
            engine.remote_complete(qp, request.token, Err(Status::LocalQpOperation));
            return;
        }
        let Some(index) = self.connection_of(engine, qp) else {
            // Its segment has no uplink any more, or it is gone.
            engine.remote_complete(qp, request.token, Err(Status::RetryExceeded));
            return;
        };
        let Some(entry) = self.connections.get_mut(index) else { return };
        entry.may_send(engine);
        // The engine passes no more requests than there is room for, and only what a connection supports. A refused request must
        // still complete, or its program would wait without end.
        let refused = entry.connection.post(posted(&request)).err();
        if let Some(error) = refused {
            let status = match error {
                PostError::Failed => Status::Flushed,
                PostError::Full | PostError::TooLong(_) | PostError::Unsupported => Status::LocalQpOperation,
            };
            engine.remote_complete(qp, request.token, Err(status));
        }
        self.connections.ready(index);
    }

    /// Whether a device may communicate with peers outside of the directory.
    fn by_wire(&self, device: DeviceId) -> Result<(), Refused> {
        self.nics
            .get(&device)
            .map_or(Ok(()), |nic| pin::check(self.directory.as_ref(), nic.vm, NOBODY, TransportKind::Wire))
    }

    /// Why a queue pair without a connection can't have one.
    fn refusal<P: Provider>(&self, engine: &Engine<P>, qp: QpId) -> Option<Refused> {
        if self.connections.find(qp).is_some() {
            return None;
        }
        refusal(engine, qp, &self.nics, self.directory.as_ref())
    }

    /// Sends a connection's packets while there is room.
    fn transmit<P: Provider>(&mut self, engine: &mut Engine<P>, index: usize, now: u64) -> bool {
        let Self { fabric, connections, buffer, lengths, .. } = self;
        let Some(entry) = connections.get_mut(index) else { return false };
        engine.touch_qp(entry.qp.device, entry.qp.handle);
        if entry.outside {
            return self.transmit_wire(engine, index, now);
        }
        let socket = fabric.index(entry.qpn, entry.peer_qpn);
        if !fabric.has_room(socket) {
            connections.ready(index);
            return false;
        }
        let most = fabric.most_segments().max(1);
        let (before, behind) = (fabric.before(), fabric.behind());
        let mut batch = Batch::new(buffer, lengths, before, behind, most);
        entry.connection.transmit(now, &mut Carrier { engine, qp: entry.qp }, &mut batch);
        let more = entry.connection.wants_transmit(now);
        let sent = !lengths.is_empty();
        let ecn = entry.connection.config().congestion.is_some();
        if let Some(host) = entry.host {
            let mut position: usize = 0;
            let mut start = 0;
            let mut stride = 0;
            for &length in lengths.iter() {
                let length = before + usize::try_from(length).unwrap_or(0) + behind;
                // A run ends before a longer packet, and after a shorter one.
                let in_run = position - start;
                let shorter_before = stride > 0 && !in_run.is_multiple_of(stride);
                if in_run > 0 && (length > stride || shorter_before) {
                    let bytes = buffer.get_mut(start..position).unwrap_or_default();
                    fabric.send(host, &entry.header, Run { index: socket, bytes, stride, ecn }, now);
                    start = position;
                }
                if start == position {
                    stride = length;
                }
                position += length;
            }
            if position > start {
                let bytes = buffer.get_mut(start..position).unwrap_or_default();
                fabric.send(host, &entry.header, Run { index: socket, bytes, stride, ecn }, now);
            }
        }
        connections.follow(index, more);
        sent
    }

    fn send_datagram(&mut self, datagram: &OutgoingDatagram, now: u64) {
        let Some(vm) = self.owner(datagram.qp.device, datagram.to.dgid) else {
            if let Err(refused) = self.by_wire(datagram.qp.device) {
                telemetry::guest_warn!(self.refusals, "A datagram is dropped: {refused}");
                return;
            }
            return self.send_datagram_by_wire(datagram);
        };
        let Some(nic) = self.nics.get(&datagram.qp.device) else { return };
        let Some(host) = self.directory.host(vm) else { return };
        if let Err(refused) = pin::check(self.directory.as_ref(), nic.vm, vm, TransportKind::Fabric) {
            telemetry::guest_warn!(self.refusals, "A datagram is dropped: {refused}");
            return;
        }
        let header = Header { kind: Kind::Datagram, source: nic.vm, destination: vm, segment: nic.tag };
        let addresses = Addresses {
            source: datagram.source_gid,
            destination: datagram.to.dgid,
            traffic_class: datagram.to.traffic_class,
            hop_limit: if datagram.to.hop_limit == 0 { 64 } else { datagram.to.hop_limit },
            flow_label: datagram.to.flow_label,
        };
        self.psn = (self.psn + 1) & 0xFF_FFFF;
        let sent = Datagram {
            destination: datagram.to.qpn.0,
            source: datagram.source_qpn.0,
            qkey: datagram.to.qkey,
            pkey: 0xFFFF,
            psn: self.psn,
            solicited: datagram.solicited,
            immediate: datagram.immediate,
        };
        let header_len = self.fabric.before();
        let before = header_len + ADDRESSES;
        let mut batch = Batch::new(&mut self.buffer, &mut self.lengths, before, self.fabric.behind(), 1);
        let fill = |into: &mut [u8]| -> Result<(), ()> {
            into.copy_from_slice(datagram.payload.get(..into.len()).ok_or(())?);
            Ok(())
        };
        if sent.send(datagram.payload.len(), &mut batch, fill) != Ok(true) {
            return;
        }
        let len = batch.len();
        let socket = self.fabric.index(datagram.source_qpn.0, datagram.to.qpn.0);
        // Nothing waits for a datagram: without room it is dropped.
        if !self.fabric.has_room(socket) {
            return;
        }
        let Some(packet) = self.buffer.get_mut(..len) else { return };
        packet[header_len..before].copy_from_slice(&addresses.encode());
        self.fabric.send(host, &header, Run { index: socket, bytes: packet, stride: len, ecn: false }, now);
    }
}

fn posted(request: &Posted) -> Request {
    let to = |remote: hca::work::Remote| Remote { address: remote.address, rkey: remote.rkey };
    let kind = match request.operation {
        PostedOperation::Send { immediate, invalidate } => RequestKind::Send { immediate, invalidate },
        PostedOperation::Write { remote, immediate } => RequestKind::Write { remote: to(remote), immediate },
        PostedOperation::Read { remote } => RequestKind::Read { remote: to(remote) },
        PostedOperation::CompareSwap { remote, compare, swap } => {
            RequestKind::CompareSwap { remote: to(remote), compare, swap }
        }
        PostedOperation::FetchAdd { remote, add } => RequestKind::FetchAdd { remote: to(remote), add },
    };
    Request {
        token: request.token,
        kind,
        length: request.length,
        solicited: request.solicited,
        fence: request.fence,
    }
}

/// Why this daemon may not connect a queue pair with its peer.
fn refusal<P: Provider>(
    engine: &Engine<P>,
    qp: QpId,
    nics: &HashMap<DeviceId, Nic>,
    directory: &dyn Directory,
) -> Option<Refused> {
    let info = engine.connection(qp)?;
    let nic = nics.get(&qp.device)?;
    let peer = directory.owner(&nic.segment, info.attributes.address.dgid);
    let way = if peer.is_some() { TransportKind::Fabric } else { TransportKind::Wire };
    pin::check(directory, nic.vm, peer.unwrap_or(NOBODY), way).err()
}

/// Creates the entry of a queue pair from its attributes: to a VM of the directory by `fabric`, to other peers by `wire`.
fn entry<P: Provider>(
    engine: &Engine<P>,
    qp: QpId,
    nics: &HashMap<DeviceId, Nic>,
    directory: &dyn Directory,
    wire: &Wire,
) -> Option<Entry> {
    let info = engine.connection(qp)?;
    // A packet from the network for a local pair was sent before one of the two moved.
    let beside = engine.is_beside(qp.device, info.segment, info.attributes.address.dgid);
    if beside || engine.was_local(qp.device, info.qpn) {
        return None;
    }
    let found = nics.get(&qp.device).and_then(|nic| {
        let peer_vm = directory.owner(&nic.segment, info.attributes.address.dgid)?;
        Some((nic, peer_vm))
    });
    let Some((nic, peer_vm)) = found else { return wire.entry(&info) };
    let header = Header { kind: Kind::Connected, source: nic.vm, destination: peer_vm, segment: nic.tag };
    let config = roce::Config { window: WINDOW, ..Entry::config(&info, directory.mtu()) };
    let mut entry = Entry::new(&info, config, peer_vm, directory.host(peer_vm), header)?;
    if engine.is_peer_held(qp) {
        // Suspended until the moving peer is at its destination.
        entry.connection.suspend(0);
    }
    Some(entry)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // For tests only.
mod tests;

#[cfg(test)]
#[allow(clippy::unwrap_used)] // For tests only.
mod pin_tests;
