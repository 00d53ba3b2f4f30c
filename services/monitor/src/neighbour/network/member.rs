//! The membership of the virtio network device.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use machine::memory::GuestRam;
use rustix::event::{EventfdFlags, eventfd};
use telemetry::guest_log::GuestLog;

use super::super::lock;
use super::super::mappings::Offer;
use super::super::opened::Terms;
use super::super::thread::{Counters, End, Member};
use super::peer::Peer;
use super::switch::Switch;

/// A membership for a network device.
pub(super) struct Network {
    switch: Arc<Mutex<Switch>>,
    /// Eventfd that peers signal.
    event: OwnedFd,
    wake: OwnedFd,
    log: GuestLog,
    counters: Counters,
    /// Guest-physical start and size of each range of this VM's RAM.
    ram: Mutex<Vec<(u64, u64)>>,
    slot: AtomicU32,
    /// Whether a driver uses the device.
    used: AtomicBool,
    beats: AtomicU64,
    /// Slots and epochs that the device has released.
    released: Mutex<Vec<(u32, u32)>>,
}

impl Network {
    pub(super) fn new(switch: Arc<Mutex<Switch>>) -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self {
            switch,
            event: eventfd(0, flags)?,
            wake: eventfd(0, flags)?,
            log: GuestLog::new(),
            counters: Counters::default(),
            ram: Mutex::default(),
            slot: AtomicU32::new(0),
            used: AtomicBool::new(false),
            beats: AtomicU64::new(0),
            released: Mutex::default(),
        })
    }

    /// A clone of the eventfd that peers signal, for the device's thread.
    pub(super) fn event(&self) -> io::Result<OwnedFd> {
        self.event.try_clone()
    }

    pub(super) fn own_ram(&self, ram: &GuestRam) {
        *lock(&self.ram) =
            ram.regions().iter().map(|region| (region.range.start, region.range.size)).collect();
    }

    pub(super) fn begin_use(&self) {
        self.used.store(true, Ordering::Relaxed);
    }

    pub(super) fn end_use(&self) {
        self.used.store(false, Ordering::Relaxed);
    }

    /// Records that the device has released a peer.
    pub(super) fn release(&self, slot: u32, epoch: u32) {
        lock(&self.released).push((slot, epoch));
        signal_event(&self.wake);
    }
}

fn signal_event(event: &OwnedFd) {
    // A full counter wakes as well, and no other failure is possible.
    let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
}

impl Member for Network {
    fn log(&self) -> &GuestLog {
        &self.log
    }

    fn counters(&self) -> &Counters {
        &self.counters
    }

    fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    fn signals(&self, slots: u32) -> Option<Vec<BorrowedFd<'_>>> {
        // One eventfd for all peers: the device's thread polls the rings of all.
        Some((0..slots).map(|_| self.event.as_fd()).collect())
    }

    fn joined(&self, slot: u32) {
        self.slot.store(slot, Ordering::Relaxed);
    }

    fn mapped_peers(&self) -> Vec<(u32, u32)> {
        lock(&self.switch).peers().map(|(slot, peer)| (slot, peer.epoch)).collect()
    }

    fn map(&self, terms: &Terms, offer: Offer) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let own = terms.geometry.window(self.slot.load(Ordering::Relaxed), &lock(&self.ram))?;
        let slot = offer.slot;
        let peer = Peer::map(terms, own, offer)?;
        let mut switch = lock(&self.switch);
        switch.set_own(own);
        switch.add(slot, peer);
        Ok(())
    }

    fn publish(&self, _slot: u32, _epoch: u32) -> bool {
        // The device's thread makes the connection live when the peer is ready.
        signal_event(&self.event);
        true
    }

    fn common(&self, _slot: u32, _slots: u64) {
        // Only frames in their sender's own memory are accepted.
    }

    fn connection_ended(&self, slot: u32, epoch: u32, _reason: u32) -> End {
        let known = self.mapped_peers().contains(&(slot, epoch));
        // Between two calls of the device's thread, nothing of the peer is in use.
        if known { End::Unused } else { End::Unknown }
    }

    fn unmap(&self, slot: u32, epoch: u32) -> bool {
        let was_released = {
            let mut released = lock(&self.released);
            let before = released.len();
            released.retain(|gone| *gone != (slot, epoch));
            released.len() < before
        };
        let peer = lock(&self.switch).remove(slot, epoch);
        // Frames that the peer was reading are the guest's again.
        signal_event(&self.event);
        peer.is_some() || was_released
    }

    fn release_requests(&self) -> Vec<(u32, u32)> {
        let mut requests = lock(&self.released).clone();
        requests.extend(lock(&self.switch).ended());
        requests
    }

    fn heartbeat(&self) -> u64 {
        let (poll, ended) = {
            let switch = lock(&self.switch);
            let waits = switch.peers().any(|(_, peer)| !peer.live);
            (waits || switch.has_lent(), !switch.ended().is_empty())
        };
        if ended {
            signal_event(&self.wake);
        }
        if poll {
            signal_event(&self.event);
        }
        // The count of a stopped device doesn't change, as that of a hung guest: peers then reclaim frames that they
        // lent it. 0: the device never started.
        let more = u64::from(self.used.load(Ordering::Relaxed));
        self.beats.fetch_add(more, Ordering::Relaxed) + more
    }

    fn refresh(&self) {
        // The guest has no mapping of a peer.
    }
}
