//! Transport `verbs`: a guest's queue pair is backed by one of the host's RDMA device, which moves data between the guests' memories.
//!
//! ```text
//!  guest a                                                             guest b
//!    │ work requests, in the guest's numbers                             ▲ completions
//!  daemon: checks; lkey, rkey ─▶ the device's (numbers)                  │ receives, translated, posted ahead
//!    │ post_send                          control (fabric's sockets)     │ post_receive, poll
//!  host's RDMA device ═════════════ RoCEv2 of the hosts ═════════ host's RDMA device
//! ```
//!
//! Numbers of queue pairs, keys and PSNs differ from the guest's and per host; addresses don't. A guest's region is registered with its
//! scattered pages in order and its own start (`dma::Alias`). So a request of the guest is one request of the device, whatever its pages.
//! The device enforces protection: a protection domain of the guest is one of the device, with the same regions and rights.
//!
//! | module | holds |
//! |---|---|
//! | `rnic` | interface of a device; `device`, `library`: libibverbs (crate `ibverbs`) |
//! | `numbers` | keys, in both directions |
//! | `control` | messages between daemons |
//! | `link` | a connection |
//! | `announced` | messages for shared receive queues |
//! | `requests`, `messages` | the guest's requests; processing of daemons' messages |
//! | `moving` | connections of VMs that migrate |

mod announced;
mod control;
mod device;
pub(super) mod library;
mod link;
mod messages;
mod moving;
mod numbers;
mod requests;
pub mod rnic;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;

use hca::engine::Engine;
use hca::names::{DeviceId, PdHandle, Qpn};
use hca::provider::Provider;
use hca::remote::{AheadReceived, NotQueued, Posted, QpId, Refusal};
use hca::work::Status;
use serde::Serialize;
use telemetry::guest_log::GuestLog;

use super::directory::VmId;
use super::header::Header;
use control::Body;
pub(super) use control::Message;
pub(super) use control::Reason;
pub(super) use link::Outgoing;
use link::{Link, takes_receive};
pub use link::{LinkCounters, LinkReport};
use numbers::{OwnKeys, PeerKey};
use requests::remote_of;
use rnic::{End, HostCompletion, HostEvent, HostPd, HostQp, Rnic, RnicError, RnicInfo};

/// Time after the last completion during which the device's queues are polled without sleeping, nanoseconds.
const EAGER_NS: u64 = 200_000;
/// Time to wait for the reason of a failure, nanoseconds.
const REASON_NS: u64 = 50_000_000;
/// Marks the completion of a receive.
const RECEIVE: u64 = 1 << 63;

/// The two ends of a connection, in the guest's and the directory's terms.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ends {
    pub qp: QpId,
    pub qpn: u32,
    pub peer_qpn: u32,
    pub peer_vm: VmId,
    pub host: Option<SocketAddr>,
    pub header: Header,
}

/// Objects created for a connection.
pub(super) struct Made {
    pd: PdHandle,
    host_pd: HostPd,
    pair: HostQp,
    own: End,
    /// Whether the guest's queue pair has a shared receive queue.
    shared: bool,
}

/// Report of the transport.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct VerbsReport {
    /// The device, if there is one.
    pub device: Option<RnicInfo>,
    /// Why there is none.
    pub absent: Option<String>,
    /// Number of connections.
    pub connections: usize,
    /// Number of regions registered with the device.
    pub regions: usize,
    /// Bytes of these regions, which are pinned.
    pub registered_bytes: u64,
    /// Messages from other daemons that were dropped: for no connection, or an earlier one.
    pub dropped_messages: u64,
}

/// Why a connection is refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refused {
    #[error("this host can't offer transport verbs: {0}")]
    Absent(String),
    #[error("{0}")]
    Queued(#[from] NotQueued),
    #[error("{0}")]
    Device(#[from] RnicError),
    #[error("its queue pair isn't connected")]
    Gone,
}

/// A request whose connection another transport must carry.
pub(super) struct Handed {
    pub qp: QpId,
    pub reason: String,
    pub requests: Vec<Posted>,
}

/// The transport of a host.
pub(super) struct Verbs {
    rnic: Option<Box<dyn Rnic>>,
    /// Properties of the device, queried once.
    info: Option<RnicInfo>,
    absent: String,
    links: HashMap<u32, Link>,
    by_handle: HashMap<(DeviceId, u32), u32>,
    by_number: HashMap<(DeviceId, u32), u32>,
    by_pair: HashMap<HostQp, u32>,
    /// Whether connections were created or closed.
    changed: bool,
    pds: HashMap<(DeviceId, PdHandle), (HostPd, u32)>,
    own: OwnKeys,
    last_id: u32,
    /// Messages to other daemons.
    pub outbox: Vec<Outgoing>,
    /// Requests for another transport.
    pub handed: Vec<Handed>,
    completions: Vec<HostCompletion>,
    events: Vec<(HostQp, HostEvent)>,
    touched: Vec<u32>,
    last_activity: u64,
    armed: bool,
    next: Option<u64>,
    dropped: u64,
    log: GuestLog,
}

/// An unpredictable number.
fn random() -> u32 {
    let mut bytes = [0; 4];
    // Can't fail for so few bytes; a failure would make numbers predictable, not wrong.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u32::from_ne_bytes(bytes)
}

impl Verbs {
    /// A transport without a device, and why.
    pub fn absent(why: impl Into<String>) -> Self {
        Self {
            rnic: None,
            info: None,
            absent: why.into(),
            links: HashMap::new(),
            by_handle: HashMap::new(),
            by_number: HashMap::new(),
            by_pair: HashMap::new(),
            changed: false,
            pds: HashMap::new(),
            own: OwnKeys::default(),
            last_id: 0,
            outbox: Vec::new(),
            handed: Vec::new(),
            completions: Vec::new(),
            events: Vec::new(),
            touched: Vec::new(),
            last_activity: 0,
            armed: false,
            next: None,
            dropped: 0,
            log: GuestLog::new(),
        }
    }

    /// A transport with a device.
    pub fn over(rnic: Box<dyn Rnic>) -> Self {
        Self { info: Some(rnic.info()), rnic: Some(rnic), ..Self::absent("") }
    }

    /// A transport with a found device.
    ///
    /// # Errors
    /// When it can't be opened.
    pub fn open(found: &library::Found) -> Result<Self, library::Absent> {
        Ok(Self::over(Box::new(device::Device::open(found)?)))
    }

    pub fn is_there(&self) -> bool {
        self.rnic.is_some()
    }

    /// Why there is no device.
    pub fn why_absent(&self) -> &str {
        &self.absent
    }

    pub fn report(&self) -> VerbsReport {
        VerbsReport {
            device: self.info.clone(),
            absent: self.rnic.is_none().then(|| self.absent.clone()),
            connections: self.links.len(),
            regions: self.own.len(),
            registered_bytes: self.own.bytes(),
            dropped_messages: self.dropped,
        }
    }

    /// Report of a queue pair's connection, with the host at its other end.
    pub fn report_of(&self, device: DeviceId, qpn: Qpn) -> Option<(Option<SocketAddr>, LinkReport)> {
        let link = self.links.get(self.by_number.get(&(device, qpn.0))?)?;
        let name = self.info.as_ref().map_or("", |info| info.device.as_str());
        Some((link.host, link.report(name)))
    }

    /// Whether connections were created or closed since the last call.
    pub fn pairs_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    /// Pairs of connected VMs: a local one and its peer.
    pub fn pairs(&self) -> impl Iterator<Item = (VmId, VmId)> {
        self.links.values().map(|link| (link.header.source, link.header.destination))
    }

    /// Index of a queue pair's connection.
    #[inline]
    pub fn find(&self, qp: QpId) -> Option<u32> {
        if self.links.is_empty() {
            return None;
        }
        let id = *self.by_handle.get(&(qp.device, qp.handle.0))?;
        self.links.get(&id).is_some_and(|link| link.qp == qp).then_some(id)
    }

    /// Descriptors that are readable when [`Verbs::poll`] has work; none without connections.
    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.rnic.as_ref().filter(|_| !self.links.is_empty()).map(|rnic| rnic.fds()).unwrap_or_default()
    }

    pub fn is_busy(&self, now: u64) -> bool {
        !self.links.is_empty() && (!self.armed || now.saturating_sub(self.last_activity) < EAGER_NS)
    }

    pub fn next(&self) -> Option<u64> {
        self.next
    }

    fn due(&mut self, at: Option<u64>) {
        self.next = [self.next, at].into_iter().flatten().min();
    }

    fn active(&mut self, now: u64) {
        self.last_activity = now.max(1);
        self.armed = false;
    }

    /// Connects a queue pair.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn connect<P: Provider>(
        &mut self,
        engine: &mut Engine<P>,
        ends: &Ends,
        now: u64,
    ) -> Result<u32, Refused> {
        if self.rnic.is_none() {
            return Err(Refused::Absent(self.absent.clone()));
        }
        let queued = engine.queued(ends.qp).ok_or(Refused::Gone)??;
        let device = ends.qp.device;
        if let Some(old) = self.by_handle.get(&(device, ends.qp.handle.0)).copied() {
            // The connection of an earlier incarnation.
            self.close_link(old);
        }
        let Some(rnic) = &mut self.rnic else { return Err(Refused::Absent(self.absent.clone())) };
        let host_pd = match self.pds.get_mut(&(device, queued.pd)) {
            Some((host_pd, _)) => *host_pd,
            None => {
                let host_pd = rnic.allocate_pd()?;
                self.pds.insert((device, queued.pd), (host_pd, 0));
                host_pd
            }
        };
        let info = rnic.info();
        let (pair, number) = match rnic.create_qp(host_pd, queued.attributes.access) {
            Ok(made) => made,
            Err(error) => {
                // Unused, if it was created for this connection.
                if self.pds.get(&(device, queued.pd)).is_some_and(|(_, users)| *users == 0) {
                    self.leave_pd(device, queued.pd);
                }
                return Err(error.into());
            }
        };
        let own = End { gid: info.address.octets(), number, psn: random() & 0xFF_FFFF, mtu: info.mtu };
        if let Some((_, users)) = self.pds.get_mut(&(device, queued.pd)) {
            *users += 1;
        }
        self.last_id = (self.last_id + 1) & 0x7FFF_FFFF;
        let id = self.last_id;
        let made = Made { pd: queued.pd, host_pd, pair, own, shared: queued.shared };
        self.links.insert(id, Link::new(id, random() | 1, ends, &made));
        self.changed = true;
        self.by_handle.insert((device, ends.qp.handle.0), id);
        self.by_number.insert((device, ends.qpn), id);
        self.by_pair.insert(pair, id);
        engine.remote_bind(ends.qp);
        self.active(now);
        Ok(id)
    }

    /// Processes a posted request.
    pub fn post<P: Provider>(&mut self, engine: &mut Engine<P>, id: u32, request: Posted, now: u64) {
        if let Some(link) = self.links.get_mut(&id) {
            if takes_receive(&request) {
                link.announcing.post();
            }
            link.waiting.push_back(request);
        }
        self.advance(engine, id, now);
    }

    /// Handles posted receives.
    pub fn receive_posted<P: Provider>(&mut self, engine: &mut Engine<P>, qp: QpId, now: u64) {
        let receives = |links: &HashMap<u32, Link>, id| links.get(&id).map(|link| link.counters.receives);
        if let Some(id) = self.find(qp) {
            let before = receives(&self.links, id);
            self.refill(engine, id, now);
            if receives(&self.links, id) != before {
                return;
            }
        }
        engine.remote_receive_declined(qp);
    }

    /// Closes a connection; the device accesses none of the guest's memory for it when this returns.
    pub fn close(&mut self, qp: QpId) -> bool {
        let Some(id) = self.find(qp) else { return false };
        self.close_link(id);
        true
    }

    fn close_link(&mut self, id: u32) {
        let Some(link) = self.links.remove(&id) else { return };
        self.changed = true;
        if let Some(rnic) = &mut self.rnic {
            rnic.destroy_qp(link.pair);
        }
        let device = link.qp.device;
        self.by_pair.remove(&link.pair);
        if self.by_handle.get(&(device, link.qp.handle.0)) == Some(&id) {
            self.by_handle.remove(&(device, link.qp.handle.0));
        }
        if self.by_number.get(&(device, link.qpn)) == Some(&id) {
            self.by_number.remove(&(device, link.qpn));
        }
        self.leave_pd(device, link.pd);
    }

    fn leave_pd(&mut self, device: DeviceId, pd: PdHandle) {
        let Some((host_pd, users)) = self.pds.get_mut(&(device, pd)) else { return };
        *users = users.saturating_sub(1);
        if *users == 0 {
            let host_pd = *host_pd;
            self.pds.remove(&(device, pd));
            if let Some(rnic) = &mut self.rnic {
                rnic.free_pd(host_pd);
            }
        }
    }

    /// Handles the end of a guest's region; the device can't access its memory when this returns.
    pub fn region_gone(&mut self, device: DeviceId, key: u32, now: u64) {
        let Some((own, told)) = self.own.remove(device, key) else { return };
        if let Some(rnic) = &mut self.rnic {
            rnic.deregister(own.registered.mr);
        }
        self.leave_pd(device, own.pd);
        for id in told {
            let Some(link) = self.links.get_mut(&id) else { continue };
            link.unacknowledged.insert(key);
            link.say(Body::Invalidate { rkey: key }, &mut self.outbox);
            if link.again_at.is_none() {
                link.ask_again(now);
            }
            let next = link.next();
            self.due(next);
        }
    }

    /// Handles the end of a device or of its memory access. Returns the queue pairs that have lost their connections.
    pub fn remove_device(&mut self, device: DeviceId) -> Vec<QpId> {
        let ids: Vec<_> = self
            .links
            .values()
            .filter(|link| link.qp.device == device)
            .map(|link| (link.id, link.qp))
            .collect();
        for (id, _) in &ids {
            self.close_link(*id);
        }
        for own in self.own.remove_device(device) {
            if let Some(rnic) = &mut self.rnic {
                rnic.deregister(own.registered.mr);
            }
            self.leave_pd(device, own.pd);
        }
        ids.into_iter().map(|(_, qp)| qp).collect()
    }

    /// Responds to a daemon's message without a connection.
    pub fn answer(&mut self, to: SocketAddr, header: Header, message: &Message) {
        let pair = (message.own, message.peer);
        self.outbox.push(Outgoing { to, header, pair, bytes: message.encode() });
    }

    /// Processes the device's completions and events.
    pub fn poll<P: Provider>(&mut self, engine: &mut Engine<P>, now: u64) -> bool {
        let Some(rnic) = self.rnic.as_mut().filter(|_| !self.links.is_empty()) else { return false };
        let mut events = std::mem::take(&mut self.events);
        let mut completions = std::mem::take(&mut self.completions);
        rnic.events(&mut events);
        rnic.poll(&mut completions);
        let any = !events.is_empty() || !completions.is_empty();
        for completion in completions.drain(..) {
            self.completed(engine, &completion, now);
        }
        for (pair, event) in events.drain(..) {
            let Some(link) = self.by_pair.get(&pair).and_then(|id| self.links.get(id)) else { continue };
            let refusal = match event {
                HostEvent::Request => Refusal::Invalid,
                HostEvent::Access => Refusal::Access,
                HostEvent::Fatal => Refusal::Operational,
            };
            engine.remote_refused(link.qp, refusal);
        }
        (self.events, self.completions) = (events, completions);
        if any {
            self.active(now);
        }
        let mut touched = std::mem::take(&mut self.touched);
        for id in touched.drain(..) {
            self.refill(engine, id, now);
            self.advance(engine, id, now);
        }
        self.touched = touched;
        any
    }

    fn completed<P: Provider>(&mut self, engine: &mut Engine<P>, completion: &HostCompletion, now: u64) {
        // 31 bits of the link's number, the receive flag, and 32 bits of the request.
        let id = u32::try_from((completion.wr_id & !RECEIVE) >> 32).unwrap_or(0);
        // Destroyed queue pairs leave completions behind.
        let Some(link) = self.links.get_mut(&id) else { return };
        if self.touched.last() != Some(&id) {
            self.touched.push(id);
        }
        let status = completion.status;
        if status == Status::Flushed && link.dies_at.is_none() {
            // Another error has failed it: a message of the peer's daemon, or an event, has the reason.
            link.dies_at = Some(now + REASON_NS);
            let next = link.next();
            self.due(next);
            return;
        }
        if status == Status::Flushed {
            return;
        }
        if completion.wr_id & RECEIVE != 0 {
            link.ahead = link.ahead.saturating_sub(1);
            link.counters.received += 1;
            if !std::mem::replace(&mut link.established, true) {
                engine.remote_established(link.qp);
            }
            let outcome = if status == Status::Success {
                Ok(AheadReceived {
                    length: completion.length,
                    immediate: completion.immediate,
                    write: completion.write,
                    // The device doesn't report whether the sender requested an event. A spurious event does no harm, a missing one does.
                    solicited: true,
                })
            } else {
                Err(status)
            };
            engine.remote_ahead_end(link.qp, outcome);
            return;
        }
        let Some((token, length)) = link.posted.pop_front() else { return };
        link.counters.completed += 1;
        if matches!(status, Status::RemoteAccess | Status::RemoteInvalidRequest | Status::RemoteOperation) {
            link.say(Body::Failed { status: status as u32 }, &mut self.outbox);
        }
        engine.remote_complete(
            link.qp,
            token,
            if status == Status::Success { Ok(length) } else { Err(status) },
        );
    }

    /// Processes expired timers, and arms the device's events once it has been idle for a while.
    pub fn carry<P: Provider>(&mut self, engine: &mut Engine<P>, now: u64) -> bool {
        if self.next.is_some_and(|next| next <= now) {
            self.next = None;
            let due: Vec<u32> = self
                .links
                .values()
                .filter(|link| link.next().is_some_and(|next| next <= now))
                .map(|link| link.id)
                .collect();
            for id in due {
                self.expired(engine, id, now);
            }
            self.next = self.links.values().filter_map(Link::next).min();
        }
        if self.links.is_empty() || self.armed || now.saturating_sub(self.last_activity) < EAGER_NS {
            return false;
        }
        if let Some(rnic) = &mut self.rnic {
            rnic.arm();
            self.armed = true;
        }
        // Earlier completions make no descriptor readable.
        self.poll(engine, now)
    }

    fn expired<P: Provider>(&mut self, engine: &mut Engine<P>, id: u32, now: u64) {
        let Some(link) = self.links.get_mut(&id) else { return };
        if link.dies_at.is_some_and(|at| at <= now) {
            link.dies_at = None;
            engine.remote_fail(link.qp);
            return;
        }
        let attributes = engine.connection(link.qp).map(|info| info.attributes);
        let Some(attributes) = attributes else { return link.answered() };
        if link.is_out_of_patience(now, attributes.timeout, attributes.retry_count) {
            link.answered();
            if let Some(request) = link.waiting.pop_front() {
                engine.remote_complete(link.qp, request.token, Err(Status::RetryExceeded));
            }
            return;
        }
        if link.asking_since.is_some() {
            if !link.settled {
                link.hello(Some(attributes.sq_psn), &mut self.outbox);
            }
            let asked = link.waiting.front().and_then(remote_of);
            if let Some(remote) = asked
                && let Some(PeerKey::Asked(serial)) = link.keys.get(remote.rkey)
            {
                link.say(Body::Resolve { rkey: remote.rkey, serial }, &mut self.outbox);
            }
            if link.waiting.front().is_some_and(|request| link.awaits_ready(request)) {
                link.say(Body::Announce { total: link.announcing.announced() }, &mut self.outbox);
            }
        }
        for rkey in &link.unacknowledged {
            link.say(Body::Invalidate { rkey: *rkey }, &mut self.outbox);
        }
        if link.asking_since.is_some() || !link.unacknowledged.is_empty() {
            link.ask_again(now);
        } else {
            link.again_at = None;
        }
    }
}

/// An error with its causes.
fn chain(error: RnicError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
