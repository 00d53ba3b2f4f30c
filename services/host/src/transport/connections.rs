//! The protocol's connections: by queue pair, ordered by pending packets, and by timeout.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::net::SocketAddr;

use hca::attributes::QpKind;
use hca::engine::Engine;
use hca::names::{DeviceId, QpHandle};
use hca::provider::Provider;
use hca::remote::{ConnectionInfo, QpId};
use roce::{Config, Connection, Counters, Mtu, Reliability, SendAttributes};

use super::NOBODY;
use super::directory::VmId;
use super::header::Header;
use super::local::Pair;
use super::wire::Line;

/// A queue pair's connection.
#[derive(Debug)]
pub(super) struct Entry {
    pub qp: QpId,
    pub qpn: u32,
    pub peer_qpn: u32,
    pub peer_vm: VmId,
    /// The peer's host. With an unknown one, packets are dropped and requests time out.
    pub host: Option<SocketAddr>,
    pub header: Header,
    /// Whether the peer is outside of the cluster, reached by `wire`.
    pub outside: bool,
    /// The frames of a `wire` connection. `None` until its VM, which has migrated here, runs.
    pub line: Option<Line>,
    pub connection: Connection,
    /// Time at which the failed connection is removed.
    pub remove_at: Option<u64>,
    sends: bool,
    ready: bool,
    timer: Option<u64>,
}

impl Entry {
    /// The protocol's attributes for a queue pair.
    pub fn config(info: &ConnectionInfo, mtu: Mtu) -> Config {
        let attributes = &info.attributes;
        Config {
            reliability: if info.kind == QpKind::Rc {
                Reliability::Reliable
            } else {
                Reliability::Unreliable
            },
            mtu,
            timeout: attributes.timeout,
            retry_count: attributes.retry_count,
            rnr_retry: attributes.rnr_retry,
            min_rnr_timer: attributes.min_rnr_timer,
            max_rd_atomic: attributes.max_rd_atomic,
            max_dest_rd_atomic: attributes.max_dest_rd_atomic,
            ..Config::new(info.qpn.0, attributes.destination_qpn.0, attributes.sq_psn, attributes.rq_psn)
        }
    }

    pub fn new(
        info: &ConnectionInfo,
        config: Config,
        peer_vm: VmId,
        host: Option<SocketAddr>,
        header: Header,
    ) -> Option<Self> {
        // The validated values aren't the guest's.
        let connection = Connection::new(config).ok()?;
        Some(Self {
            qp: info.qp,
            qpn: info.qpn.0,
            peer_qpn: info.attributes.destination_qpn.0,
            peer_vm,
            host,
            header,
            outside: false,
            line: None,
            connection,
            remove_at: None,
            sends: info.sends,
            ready: false,
            timer: None,
        })
    }

    /// Saves the connection for a migration; its timers stop from then on.
    pub fn save(&self, now: u64) -> SavedConnection {
        SavedConnection {
            peer_vm: self.peer_vm,
            sends: self.sends,
            remove_in: self.remove_at.map(|at| at.saturating_sub(now)),
            connection: self.connection.save(now),
        }
    }

    /// Restores a connection, suspended.
    ///
    /// # Errors
    /// When the state is invalid.
    pub fn restore(
        qp: QpId,
        qpn: u32,
        header: Header,
        saved: &SavedConnection,
        now: u64,
    ) -> Result<Self, roce::saved::InvalidState> {
        let mut connection = Connection::restore(&saved.connection, now)?;
        if connection.config().qpn != qpn {
            return Err(roce::saved::InvalidState::Field("queue pair number"));
        }
        connection.suspend(now);
        Ok(Self {
            qp,
            qpn,
            peer_qpn: connection.config().peer_qpn,
            peer_vm: saved.peer_vm,
            host: None,
            header,
            outside: saved.peer_vm == NOBODY,
            line: None,
            connection,
            remove_at: saved.remove_in.map(|wait| now.saturating_add(wait)),
            sends: saved.sends,
            ready: false,
            timer: None,
        })
    }

    /// The VMs that it connects; `None` when the peer is outside of the cluster.
    fn pair(&self) -> Option<Pair> {
        (!self.outside).then_some((self.header.source, self.peer_vm))
    }

    /// Applies attributes for sending, which the queue pair got after it could receive.
    pub fn may_send<P: Provider>(&mut self, engine: &Engine<P>) {
        if self.sends {
            return;
        }
        if let Some(info) = engine.connection(self.qp) {
            let attributes = &info.attributes;
            self.connection.set_send(&SendAttributes {
                sq_psn: attributes.sq_psn,
                timeout: attributes.timeout,
                retry_count: attributes.retry_count,
                rnr_retry: attributes.rnr_retry,
                max_rd_atomic: attributes.max_rd_atomic,
            });
            self.sends = info.sends;
        }
    }
}

/// A saved connection by `fabric` or `wire`, which migrates with its queue pair.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct SavedConnection {
    /// Number of the peer's VM; 0 for a connection by `wire`.
    pub peer_vm: VmId,
    /// Whether the queue pair's attributes for sending are applied.
    pub sends: bool,
    /// Nanoseconds until the failed connection is removed.
    pub remove_in: Option<u64>,
    /// The protocol's state.
    pub connection: roce::saved::Connection,
}

/// All connections.
#[derive(Debug, Default)]
pub(super) struct Connections {
    entries: Vec<Option<Box<Entry>>>,
    free: Vec<usize>,
    /// By device and queue pair number: index of the newest.
    numbers: HashMap<(DeviceId, u32), usize>,
    /// By device and handle: index of the newest.
    handles: HashMap<(DeviceId, QpHandle), usize>,
    ready: VecDeque<usize>,
    timers: BTreeSet<(u64, usize)>,
    /// Counters of removed connections.
    past: HashMap<DeviceId, Counters>,
    /// Pairs of VMs connected by `fabric`, with the number of connections.
    pairs: BTreeMap<Pair, usize>,
    pairs_changed: bool,
}

impl Connections {
    /// Counters of a device's connections, removed ones included.
    pub fn counters(&self, device: DeviceId) -> Counters {
        let mut sum = self.past.get(&device).copied().unwrap_or_default();
        for entry in self.entries.iter().flatten() {
            if entry.qp.device == device {
                sum.add(entry.connection.counters());
            }
        }
        sum
    }

    pub fn any(&self) -> bool {
        !self.numbers.is_empty()
    }

    pub fn any_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    pub fn next(&self) -> Option<u64> {
        self.timers.first().map(|(time, _)| *time)
    }

    pub fn get(&self, index: usize) -> Option<&Entry> {
        self.entries.get(index)?.as_deref()
    }

    pub fn get_mut(&mut self, index: usize) -> Option<&mut Entry> {
        self.entries.get_mut(index)?.as_deref_mut()
    }

    pub fn index_of(&self, device: DeviceId, qpn: u32) -> Option<usize> {
        self.numbers.get(&(device, qpn)).copied()
    }

    pub fn by_number(&self, device: DeviceId, qpn: u32) -> Option<&Entry> {
        self.get(self.index_of(device, qpn)?)
    }

    /// Index of a queue pair's connection, if any.
    pub fn find(&self, qp: QpId) -> Option<usize> {
        let index = *self.handles.get(&(qp.device, qp.handle))?;
        self.get(index).is_some_and(|entry| entry.qp == qp).then_some(index)
    }

    /// Index of a queue pair's connection, created if needed.
    pub fn of(&mut self, qp: QpId, make: impl FnOnce() -> Option<Entry>) -> Option<usize> {
        if let Some(&index) = self.handles.get(&(qp.device, qp.handle)) {
            if self.get(index).is_some_and(|entry| entry.qp == qp) {
                return Some(index);
            }
            // The connection of an earlier incarnation.
            self.remove(index);
        }
        let new = Box::new(make()?);
        let number = (qp.device, new.qpn);
        let index = match self.free.pop() {
            Some(index) => {
                self.entries[index] = Some(new);
                index
            }
            None => {
                self.entries.push(Some(new));
                self.entries.len() - 1
            }
        };
        self.numbers.insert(number, index);
        self.handles.insert((qp.device, qp.handle), index);
        if let Some(pair) = self.get(index).and_then(Entry::pair) {
            let count = self.pairs.entry(pair).or_default();
            self.pairs_changed |= *count == 0;
            *count += 1;
        }
        Some(index)
    }

    /// Whether the pairs of connected VMs have changed since the last call.
    pub fn pairs_changed(&mut self) -> bool {
        std::mem::take(&mut self.pairs_changed)
    }

    /// Pairs of VMs connected by `fabric`.
    pub fn pairs(&self) -> impl Iterator<Item = Pair> {
        self.pairs.keys().copied()
    }

    /// Updates the peers' hosts.
    pub fn locate(&mut self, host: impl Fn(VmId) -> Option<SocketAddr>) {
        for entry in self.entries.iter_mut().flatten().filter(|entry| !entry.outside) {
            entry.host = host(entry.peer_vm);
        }
    }

    /// The newest connection of a queue pair, of any of its incarnations.
    pub fn of_handle(&self, device: DeviceId, handle: QpHandle) -> Option<usize> {
        self.handles.get(&(device, handle)).copied()
    }

    /// Connections of a device, or only those with one peer.
    pub fn facing(&self, device: DeviceId, peer: Option<VmId>) -> Vec<usize> {
        let all = self.entries.iter().enumerate();
        let wanted = |entry: &Entry| {
            entry.qp.device == device && peer.is_none_or(|peer| entry.peer_vm == peer && !entry.outside)
        };
        all.filter(|(_, entry)| entry.as_deref().is_some_and(wanted)).map(|(index, _)| index).collect()
    }

    /// Connections of a device with peers outside of the cluster.
    pub fn outside(&self, device: DeviceId) -> Vec<usize> {
        let all = self.entries.iter().enumerate();
        let wanted = |entry: &Entry| entry.qp.device == device && entry.outside;
        all.filter(|(_, entry)| entry.as_deref().is_some_and(wanted)).map(|(index, _)| index).collect()
    }

    /// Removes a connection and its counters: a newer state replaces it, or the queue pair continues without one.
    pub fn replace(&mut self, index: usize) {
        if let Some(entry) = self.get(index) {
            let (device, past) = (entry.qp.device, self.past.get(&entry.qp.device).copied());
            self.remove(index);
            match past {
                Some(past) => drop(self.past.insert(device, past)),
                None => drop(self.past.remove(&device)),
            }
        }
    }

    pub fn remove(&mut self, index: usize) {
        let Some(entry) = self.entries.get_mut(index).and_then(Option::take) else { return };
        self.past.entry(entry.qp.device).or_default().add(entry.connection.counters());
        if let Some(pair) = entry.pair()
            && let Some(count) = self.pairs.get_mut(&pair)
        {
            *count -= 1;
            if *count == 0 {
                self.pairs.remove(&pair);
                self.pairs_changed = true;
            }
        }
        if let Some(timer) = entry.timer {
            self.timers.remove(&(timer, index));
        }
        if entry.ready {
            self.ready.retain(|other| *other != index);
        }
        let number = (entry.qp.device, entry.qpn);
        if self.numbers.get(&number) == Some(&index) {
            self.numbers.remove(&number);
        }
        let handle = (entry.qp.device, entry.qp.handle);
        if self.handles.get(&handle) == Some(&index) {
            self.handles.remove(&handle);
        }
        self.free.push(index);
    }

    pub fn remove_device(&mut self, device: DeviceId) {
        for index in 0..self.entries.len() {
            if self.get(index).is_some_and(|entry| entry.qp.device == device) {
                self.remove(index);
            }
        }
        self.past.remove(&device);
    }

    /// Records that a connection may have packets to send.
    pub fn ready(&mut self, index: usize) {
        if let Some(entry) = self.get_mut(index)
            && !std::mem::replace(&mut entry.ready, true)
        {
            self.ready.push_back(index);
        }
    }

    pub fn ready_count(&self) -> usize {
        self.ready.len()
    }

    pub fn next_ready(&mut self) -> Option<usize> {
        let index = self.ready.pop_front()?;
        if let Some(entry) = self.get_mut(index) {
            entry.ready = false;
        }
        Some(index)
    }

    /// Sets the next timer and turn of a connection that has sent what it could.
    pub fn follow(&mut self, index: usize, more: bool) {
        let Some(entry) = self.get(index) else { return };
        let due = match (entry.connection.timeout(), entry.remove_at) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        self.set_timer(index, due);
        if more {
            self.ready(index);
        }
    }

    fn set_timer(&mut self, index: usize, time: Option<u64>) {
        let Some(entry) = self.entries.get_mut(index).and_then(|entry| entry.as_deref_mut()) else { return };
        if entry.timer == time {
            return;
        }
        if let Some(old) = std::mem::replace(&mut entry.timer, time) {
            self.timers.remove(&(old, index));
        }
        if let Some(time) = time {
            self.timers.insert((time, index));
        }
    }

    /// The next connection with an expired timer.
    pub fn expired(&mut self, now: u64) -> Option<usize> {
        let &(time, index) = self.timers.first()?;
        if time > now {
            return None;
        }
        self.timers.pop_first();
        if let Some(entry) = self.get_mut(index) {
            entry.timer = None;
        }
        Some(index)
    }
}
