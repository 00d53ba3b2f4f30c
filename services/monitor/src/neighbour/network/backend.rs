//! The backend of the virtio network device.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use virtio_devices::net::backend::{NetBackend, NetChannel, Received, Sent};
use virtio_devices::net::header::{FEATURE_CSUM, FEATURE_GUEST_CSUM, VnetHeader};
use virtio_devices::net::{FrameSink, FrameSource, MacAddress};

use super::super::lock;
use super::member::Network;
use super::switch::Switch;

/// Time that a stopping device waits for peers to complete frames. Connections with peers that don't complete them then end.
const RECALL_TIMEOUT: Duration = Duration::from_millis(500);
/// Interval of checks during that time.
const RECALL_POLL_INTERVAL: Duration = Duration::from_micros(200);

/// The backend of one device.
pub(super) struct Backend {
    group: String,
    switch: Arc<Mutex<Switch>>,
    network: Arc<Network>,
}

impl Backend {
    pub(super) fn new(group: String, switch: Arc<Mutex<Switch>>, network: Arc<Network>) -> Self {
        Self { group, switch, network }
    }
}

impl NetBackend for Backend {
    fn description(&self) -> String {
        let switch = lock(&self.switch);
        let names: Vec<&str> =
            switch.peers().filter(|(_, peer)| peer.live).map(|(_, peer)| peer.vm.as_str()).collect();
        let counts = switch.counts();
        format!(
            "neighbours of {} ({}); {} frames found no room at one, {} of theirs were none, {} connections ended for broken rules",
            self.group,
            if names.is_empty() { "nobody connected".to_owned() } else { names.join(", ") },
            counts.full,
            counts.malformed,
            counts.broken
        )
    }

    fn offload_features(&self) -> u64 {
        // A large MTU replaces segmentation offload; see `super::MTU`.
        FEATURE_CSUM | FEATURE_GUEST_CSUM
    }

    fn set_guest_offloads(&self, features: u64) -> io::Result<()> {
        lock(&self.switch).set_open_checksums(features & FEATURE_GUEST_CSUM != 0);
        self.network.begin_use();
        Ok(())
    }

    fn set_active_pairs(&self, _pairs: u16) -> io::Result<()> {
        // There is only one pair.
        Ok(())
    }

    fn set_carrier(&self, _up: bool) -> io::Result<()> {
        Ok(())
    }

    fn announce(&self, _mac: MacAddress) -> io::Result<()> {
        // A VM with neighbours isn't migrated.
        Ok(())
    }

    fn end_reason(&self) -> Option<String> {
        None
    }
}

/// The channel of the one queue pair.
pub(super) struct Channel {
    switch: Arc<Mutex<Switch>>,
    event: OwnedFd,
    network: Arc<Network>,
}

impl Channel {
    pub(super) fn new(switch: Arc<Mutex<Switch>>, event: OwnedFd, network: Arc<Network>) -> Self {
        Self { switch, event, network }
    }

    /// Calls `act` on the switch. If the switch has left messages, signals this channel's own event, so that its thread returns soon.
    fn with<R>(&self, act: impl FnOnce(&mut Switch) -> R) -> R {
        let (result, left) = {
            let mut switch = lock(&self.switch);
            (act(&mut switch), switch.take_messages_left())
        };
        if left {
            // A full counter wakes as well, and no other failure is possible.
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
        result
    }
}

impl NetChannel for Channel {
    fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    fn is_event(&self) -> bool {
        true
    }

    fn drain(&mut self) {
        // EAGAIN means that no peer has signaled. No other failure is possible.
        let _ = rustix::io::read(&self.event, &mut [0_u8; 8]);
        lock(&self.switch).poll_peers();
    }

    fn waiting(&mut self) -> Option<usize> {
        self.with(Switch::waiting)
    }

    fn receive(&mut self, sink: &mut FrameSink<'_>) -> io::Result<Received> {
        self.with(|switch| switch.receive(sink))
    }

    fn send(&mut self, header: &VnetHeader, frame: &FrameSource<'_>) -> io::Result<Sent> {
        lock(&self.switch).send(*header, frame)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn returned(&mut self) -> Option<u32> {
        lock(&self.switch).returned()
    }

    fn recall(&mut self) {
        let begun = Instant::now();
        // Kept, since `returned` reports each frame once.
        let mut returned = Vec::new();
        loop {
            let mut switch = lock(&self.switch);
            while let Some(number) = switch.returned() {
                returned.push(number);
            }
            if !switch.has_lent() {
                break;
            }
            if begun.elapsed() >= RECALL_TIMEOUT {
                for (slot, epoch) in switch.end_readers() {
                    // The peer's mapping of this memory stays until it has released it. It must not trust what it reads from now on.
                    switch.remove(slot, epoch);
                    self.network.release(slot, epoch);
                }
                break;
            }
            drop(switch);
            std::thread::sleep(RECALL_POLL_INTERVAL);
        }
        lock(&self.switch).requeue_returned(returned);
        self.network.end_use();
    }
}
