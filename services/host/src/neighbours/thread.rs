//! The thread: sockets and time are its input, [`Action`]s its output.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use neighbour::device;
use neighbour::layout::{
    HEADER_BASE, HEADER_EPOCH, HEADER_SIZE, HEADER_SLOTS, HEADER_STRIDE, HEADER_VERSION_ENTRIES,
};
use neighbour::layout::{MAGIC, VERSION as LAYOUT_VERSION};
use neighbour::registry::{Action, Applicant, Neighbourhood, Permit};
use neighbour_protocol::{FromDaemon, FromMonitor, Listener, Permitted, Piece, Socket, SocketError, VERSION};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, SealFlags};
use serde_json::{Value, json};
use telemetry::guest_log::GuestLog;
use vfio_user_protocol::device::Peer;

use super::NeighboursConfig;
use super::member::{Member, check};
use crate::access::Access;

/// Limit of neighbourhoods of a host.
const MOST_GROUPS: usize = 64;
/// Limit of connections that haven't joined yet; more wait in the kernel.
const MOST_GUESTS: usize = 32;
/// Pause after a failure to accept a connection; short beside the heartbeat's timeout.
const ACCEPT_AGAIN: Duration = Duration::from_millis(10);
/// Number of messages of one member that are processed before the others' turn.
const BATCH: usize = 16;

/// A member by group and slot.
type Key = (String, u32);

struct Group {
    core: Neighbourhood,
    members: BTreeMap<u32, Member>,
}

/// A connection that hasn't joined yet.
struct Guest {
    socket: Socket,
    peer: Peer,
    since: Instant,
}

/// State of the thread.
pub(super) struct Host {
    listener: Listener,
    access: Access,
    config: NeighboursConfig,
    started: Instant,
    groups: BTreeMap<String, Group>,
    guests: Vec<Guest>,
    view: Arc<Mutex<Value>>,
    /// Rate-limited log for messages that members can cause.
    log: GuestLog,
}

impl Host {
    pub(super) fn new(
        listener: Listener,
        access: Access,
        config: NeighboursConfig,
        view: Arc<Mutex<Value>>,
    ) -> Self {
        Self {
            listener,
            access,
            config,
            started: Instant::now(),
            groups: BTreeMap::new(),
            guests: Vec::new(),
            view,
            log: GuestLog::new(),
        }
    }

    /// Serves until `stop` is readable.
    pub(super) fn serve(mut self, stop: BorrowedFd<'_>) {
        let mut next_tick = Instant::now();
        self.show();
        loop {
            let woken = match self.wait(stop, next_tick) {
                Ok(woken) => woken,
                Err(error) => {
                    tracing::error!(%error, "The neighbours' thread can't wait; it ends, and nobody can join any more");
                    return;
                }
            };
            if woken.stop {
                return;
            }
            if woken.listener {
                self.accept();
            }
            for key in woken.members {
                self.serve_member(&key);
            }
            self.serve_guests();
            if Instant::now() >= next_tick {
                next_tick = Instant::now() + self.config.heartbeat.interval;
                let now = self.started.elapsed();
                for name in self.groups.keys().cloned().collect::<Vec<_>>() {
                    let actions = self.groups.get_mut(&name).map(|group| group.core.tick(now));
                    self.act(&name, actions.unwrap_or_default());
                }
            }
            self.groups.retain(|_, group| !group.core.is_empty());
        }
    }

    fn wait(&self, stop: BorrowedFd<'_>, tick: Instant) -> io::Result<Woken> {
        let mut fds = vec![PollFd::from_borrowed_fd(stop, PollFlags::IN)];
        let room = self.guests.len() < MOST_GUESTS;
        let listen = if room { PollFlags::IN } else { PollFlags::empty() };
        fds.push(PollFd::from_borrowed_fd(self.listener.as_fd(), listen));
        for guest in &self.guests {
            fds.push(PollFd::from_borrowed_fd(guest.socket.as_fd(), PollFlags::IN));
        }
        let first = fds.len();
        let mut keys = Vec::new();
        for (name, group) in &self.groups {
            for (slot, member) in &group.members {
                fds.push(PollFd::from_borrowed_fd(member.socket.as_fd(), PollFlags::IN));
                keys.push((name.clone(), *slot));
            }
        }
        // Without members, nothing is due.
        let timeout = (!keys.is_empty() || !self.guests.is_empty()).then(|| {
            let left = tick.saturating_duration_since(Instant::now());
            Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 0, tv_nsec: 100_000_000 })
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
        Ok(Woken {
            stop: ready(0),
            listener: ready(1),
            members: keys
                .into_iter()
                .enumerate()
                .filter(|(at, _)| ready(first + at))
                .map(|(_, key)| key)
                .collect(),
        })
    }

    fn accept(&mut self) {
        let (socket, caller) = match self.listener.accept() {
            Ok(Some(connection)) => connection,
            Ok(None) => return,
            Err(error) => {
                telemetry::guest_warn!(self.log, %error, "A member can't be accepted");
                // The connection still waits, for lack of descriptors for instance. An immediate retry would keep this thread busy.
                std::thread::sleep(ACCEPT_AGAIN);
                return;
            }
        };
        let peer = Peer { uid: caller.uid, gid: caller.gid, pid: caller.pid };
        if let Err(denied) = self.access.check(&peer) {
            // If this isn't delivered, the client finds its socket closed.
            let _ = socket.send(&FromDaemon::Refused { reason: denied.to_string() }, &[]);
            return;
        }
        let geometry = &self.config.geometry;
        let hello = FromDaemon::Hello {
            version: VERSION,
            base: geometry.base(),
            stride: geometry.stride(),
            slots: geometry.slots(),
            entries: self.config.layout.entries(),
            heartbeat_ms: u32::try_from(self.config.heartbeat.interval.as_millis()).unwrap_or(u32::MAX),
        };
        if socket.send(&hello, &[]).is_ok() {
            self.guests.push(Guest { socket, peer, since: Instant::now() });
        }
    }

    /// Processes messages of connections that haven't joined.
    fn serve_guests(&mut self) {
        for guest in std::mem::take(&mut self.guests) {
            match guest.socket.receive::<FromMonitor>() {
                Ok(None) if guest.since.elapsed() < self.config.joining => self.guests.push(guest),
                Ok(None) => {
                    let seconds = self.config.joining.as_secs_f32();
                    let reason = format!(
                        "A member joins within {seconds} s of having connected, and this one didn't; start the VM again"
                    );
                    telemetry::guest_warn!(
                        self.log,
                        pid = guest.peer.pid,
                        uid = guest.peer.uid,
                        reason,
                        "A VM is refused by its neighbourhood"
                    );
                    let _ = guest.socket.send(&FromDaemon::Refused { reason }, &[]);
                }
                Ok(Some((FromMonitor::Join { vm, group, permits, ram, slot, epoch }, fds))) => {
                    let wish = Wish { vm, permits, ram, slot, epoch };
                    if let Err((socket, reason)) = self.join(guest, &group, wish, fds) {
                        telemetry::guest_warn!(
                            self.log,
                            group,
                            reason,
                            "A VM is refused by its neighbourhood"
                        );
                        let _ = socket.send(&FromDaemon::Refused { reason }, &[]);
                    }
                }
                Ok(Some(_)) => {
                    let reason = "A member joins before it says anything else".to_owned();
                    let _ = guest.socket.send(&FromDaemon::Refused { reason }, &[]);
                }
                Err(_) => {}
            }
        }
    }

    fn join(
        &mut self,
        guest: Guest,
        name: &str,
        wish: Wish,
        fds: Vec<OwnedFd>,
    ) -> Result<(), (Socket, String)> {
        let Wish { vm, permits, ram, slot, epoch } = wish;
        let Guest { socket, peer, .. } = guest;
        let permits: Vec<Permit> = permits
            .into_iter()
            .map(|permit| Permit { vm: permit.vm, uid: permit.uid.unwrap_or(peer.uid) })
            .collect();
        let checked = check((&vm, peer.uid), name, &permits, &ram, fds, &self.config.geometry);
        let (files, signals, protection) = match checked {
            Ok(parts) => parts,
            Err(unfit) => return Err((socket, unfit.to_string())),
        };
        if self.groups.len() >= MOST_GROUPS && !self.groups.contains_key(name) {
            return Err((socket, format!("There are {MOST_GROUPS} neighbourhoods already; use one of them")));
        }
        let now = self.started.elapsed();
        let config = self.config;
        let group = self.groups.entry(name.to_owned()).or_insert_with(|| Group {
            core: Neighbourhood::new(config.geometry, config.heartbeat),
            members: BTreeMap::new(),
        });
        let applicant = Applicant { vm: vm.clone(), uid: peer.uid, permits, slot, epoch };
        let slot = match group.core.join(now, applicant) {
            Ok(slot) => slot,
            Err(error) => return Err((socket, error.to_string())),
        };
        telemetry::guest_info!(
            self.log,
            vm,
            group = name,
            slot,
            uid = peer.uid,
            "VM joined its neighbourhood"
        );
        let told = socket.send(&FromDaemon::Joined { slot }, &[]);
        group.members.insert(slot, Member { socket, vm, uid: peer.uid, ram, protection, files, signals });
        if told.is_err() {
            self.leave(&(name.to_owned(), slot), "it can't be told its slot");
        } else {
            self.act(name, Vec::new());
        }
        Ok(())
    }

    /// Processes messages of a member.
    fn serve_member(&mut self, key: &Key) {
        let (name, slot) = key;
        for _ in 0..BATCH {
            let now = self.started.elapsed();
            let Some(group) = self.groups.get_mut(name) else { return };
            let Some(member) = group.members.get(slot) else { return };
            match member.socket.receive::<FromMonitor>() {
                Ok(None) => return,
                Ok(Some((FromMonitor::Alive { count }, _))) => group.core.report(now, *slot, count),
                Ok(Some((FromMonitor::Release { slot: peer, epoch }, _))) => {
                    let actions = group.core.release(*slot, peer, epoch);
                    self.act(name, actions);
                }
                Ok(Some((FromMonitor::Join { .. }, _))) => return self.leave(key, "it joined twice"),
                Err(SocketError::Closed) => return self.leave(key, "its monitor has gone"),
                Err(error) => return self.leave(key, &error.to_string()),
            }
        }
    }

    /// Removes a member.
    fn leave(&mut self, key: &Key, why: &str) {
        let (name, slot) = key;
        let Some(group) = self.groups.get_mut(name) else { return };
        if let Some(member) = group.members.remove(slot) {
            telemetry::guest_info!(
                self.log,
                vm = member.vm,
                group = name,
                slot,
                why,
                "VM left its neighbourhood"
            );
        }
        let actions = group.core.leave(*slot);
        self.act(name, actions);
    }

    /// Executes actions, and connects permitted pairs. A member that can't be notified is removed, which causes more actions.
    fn act(&mut self, name: &str, actions: Vec<Action>) {
        let mut todo = actions;
        loop {
            let Some(group) = self.groups.get_mut(name) else { return };
            todo.extend(group.core.settle(self.started.elapsed()));
            if todo.is_empty() {
                break;
            }
            let mut lost: Vec<(u32, String)> = Vec::new();
            for action in std::mem::take(&mut todo) {
                match action {
                    Action::Gone { to, peer, epoch, reason } => {
                        telemetry::guest_info!(self.log, group = name, slot = to, peer, epoch, %reason, "Neighbours are parted");
                        let message = FromDaemon::Gone { slot: peer, epoch, reason: device::reason(reason) };
                        let told = group.members.get(&to).map(|member| member.socket.send(&message, &[]));
                        if let Some(Err(error)) = told {
                            lost.push((to, error.to_string()));
                        }
                    }
                    Action::Common { to, peer, slots } => {
                        let message = FromDaemon::Common { slot: peer, slots };
                        let told = group.members.get(&to).map(|member| member.socket.send(&message, &[]));
                        if let Some(Err(error)) = told {
                            lost.push((to, error.to_string()));
                        }
                    }
                    Action::Connect { slots, epoch } => {
                        telemetry::guest_info!(
                            self.log,
                            group = name,
                            ?slots,
                            epoch,
                            "Neighbours are connected"
                        );
                        lost.extend(group.connect(slots, epoch, &self.config));
                    }
                }
            }
            for (slot, why) in lost {
                if let Some(member) = group.members.remove(&slot) {
                    telemetry::guest_warn!(
                        self.log,
                        vm = member.vm,
                        group = name,
                        slot,
                        why,
                        "VM can't be told about its neighbours; it leaves"
                    );
                    todo.extend(group.core.leave(slot));
                }
            }
        }
        self.show();
    }

    /// Publishes the state for `inspect`.
    fn show(&self) {
        let groups: serde_json::Map<String, Value> = self
            .groups
            .iter()
            .map(|(name, group)| {
                let members: Vec<Value> = group
                    .core
                    .describe()
                    .into_iter()
                    .map(|(slot, vm, verdict)| {
                        let peers: BTreeMap<String, u32> = group
                            .members
                            .iter()
                            .filter_map(|(peer, member)| {
                                Some((member.vm.clone(), group.core.connected(slot, *peer)?))
                            })
                            .collect();
                        let member = group.members.get(&slot);
                        json!({
                            "slot": slot,
                            "vm": vm,
                            "uid": member.map(|member| member.uid),
                            "state": verdict,
                            "memory": member.map(|member| member.protection.name()),
                            "epoch_by_peer": peers,
                        })
                    })
                    .collect();
                (name.clone(), Value::Array(members))
            })
            .collect();
        *self.view.lock().unwrap_or_else(PoisonError::into_inner) = Value::Object(groups);
    }
}

struct Woken {
    stop: bool,
    listener: bool,
    members: Vec<Key>,
}

/// The contents of a `Join`.
struct Wish {
    vm: String,
    permits: Vec<Permitted>,
    ram: Vec<Piece>,
    slot: Option<u32>,
    epoch: u32,
}

impl Group {
    /// Sends both members the other's RAM and a new segment. Returns members that could not be notified, and why.
    fn connect(
        &self,
        [first, second]: [u32; 2],
        epoch: u32,
        config: &NeighboursConfig,
    ) -> Vec<(u32, String)> {
        let segment = match segment([first, second], epoch, config) {
            Ok(segment) => segment,
            // Neither got the connection, so neither may believe that it exists.
            Err(error) => return [first, second].map(|slot| (slot, format!("no segment: {error}"))).to_vec(),
        };
        let mut lost = Vec::new();
        for (to, of) in [(first, second), (second, first)] {
            let (Some(reader), Some(owner)) = (self.members.get(&to), self.members.get(&of)) else {
                continue;
            };
            // The owner's signal for messages of the reader.
            let signal = usize::try_from(to).ok().and_then(|to| owner.signals.get(to));
            let Some(signal) = signal else { continue };
            let mut fds: Vec<BorrowedFd<'_>> = owner.files.iter().map(AsFd::as_fd).collect();
            fds.push(segment.as_fd());
            fds.push(signal.as_fd());
            let message = FromDaemon::Connect {
                slot: of,
                epoch,
                vm: owner.vm.clone(),
                ram: owner.ram.clone(),
                segment: config.layout.size() as u64,
            };
            if let Err(error) = reader.socket.send(&message, &fds) {
                lost.push((to, error.to_string()));
            }
        }
        lost
    }
}

/// A new segment: zeros after the header. It is written with `write`, so that nothing is mapped here.
fn segment(slots: [u32; 2], epoch: u32, config: &NeighboursConfig) -> io::Result<OwnedFd> {
    let fd =
        rustix::fs::memfd_create("causeway:neighbours", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let size = config.layout.size() as u64;
    rustix::fs::ftruncate(&fd, size)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let pair = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
    let words: [(usize, u64); 7] = [
        (HEADER_VERSION_ENTRIES, pair(LAYOUT_VERSION, config.layout.entries())),
        (HEADER_EPOCH, u64::from(epoch)),
        (HEADER_BASE, config.geometry.base()),
        (HEADER_STRIDE, config.geometry.stride()),
        (HEADER_SLOTS, pair(slots[0], slots[1])),
        (HEADER_SIZE, size),
        (0, MAGIC),
    ];
    let mut header = [0; HEADER_SIZE + 8];
    for (offset, word) in words {
        if let Some(place) = header.get_mut(offset..offset + 8) {
            place.copy_from_slice(&word.to_le_bytes());
        }
    }
    let file = std::fs::File::from(fd);
    std::io::Write::write_all(&mut &file, &header)?;
    Ok(file.into())
}
