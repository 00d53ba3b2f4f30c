//! The PCI side of any function (configuration space, interrupts, guest memory), and the two functions of a NIC as vfio-user devices.

pub(crate) mod descriptors;
pub mod ethernet;
mod eventfd_signals;
pub mod header;
pub mod interrupts;
pub mod memory;
pub mod rdma;
mod stream;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::Sender;

use vfio_user_protocol::device::{Peer, Region};

use crate::access::may_use;
use crate::nic::{Event, NicKey};
use crate::transport::WirePort;

/// Number of functions of a NIC.
pub const FUNCTIONS: usize = 2;

/// State shared by both functions of a NIC.
#[derive(Debug)]
pub struct NicShared {
    /// Identity of the NIC.
    pub key: NicKey,
    /// Distinguishes it from earlier NICs with the same name.
    pub generation: u64,
    /// User that owns it.
    pub uid: u32,
    /// Port between the functions, for RDMA in frames of the NIC's own.
    pub wire: Arc<WirePort>,
    /// Whether its segment is connected with a tap for this NIC.
    pub tap: bool,
    connected: [AtomicBool; FUNCTIONS],
    events: Sender<Event>,
    /// Whether its VM migrates here and has not arrived yet.
    incoming: AtomicBool,
    /// Number of the VM that arrives; 0: unknown yet.
    arriving_vm: AtomicU32,
    /// Whether a migration of its VM is in progress: then only the migration resumes the NIC's functions.
    locked: AtomicBool,
}

impl NicShared {
    /// State of a NIC without clients; whether its VM is to arrive, and whether it has a tap.
    #[must_use]
    pub fn new(
        key: NicKey,
        generation: u64,
        uid: u32,
        (incoming, tap): (bool, bool),
        events: Sender<Event>,
    ) -> Self {
        Self {
            key,
            generation,
            uid,
            wire: Arc::default(),
            tap,
            connected: Default::default(),
            events,
            incoming: incoming.into(),
            arriving_vm: AtomicU32::new(0),
            locked: AtomicBool::new(false),
        }
    }

    /// Whether its VM migrates here and has not arrived yet.
    #[must_use]
    pub fn is_incoming(&self) -> bool {
        self.incoming.load(Ordering::SeqCst)
    }

    /// Records that its VM has arrived.
    pub(crate) fn has_arrived(&self) {
        self.incoming.store(false, Ordering::SeqCst);
    }

    /// Number of the VM that arrives, once it is known.
    #[must_use]
    pub fn arriving_vm(&self) -> Option<u32> {
        Some(self.arriving_vm.load(Ordering::SeqCst)).filter(|vm| *vm != 0)
    }

    /// Sets the number of the VM that arrives.
    pub(crate) fn set_arriving_vm(&self, vm: u32) {
        self.arriving_vm.store(vm, Ordering::SeqCst);
    }

    /// Whether a migration decides when the functions resume.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        self.locked.load(Ordering::SeqCst)
    }

    /// Sets whether a migration or the client decides when the functions resume.
    pub(crate) fn set_locked(&self, locked: bool) {
        self.locked.store(locked, Ordering::SeqCst);
    }

    /// Whether a peer may use a function.
    #[must_use]
    pub fn authorizes(&self, peer: &Peer) -> bool {
        may_use(peer.uid, self.uid)
    }

    /// Whether a function has a client.
    #[must_use]
    pub fn is_connected(&self, function: usize) -> bool {
        self.connected.get(function).is_some_and(|connected| connected.load(Ordering::SeqCst))
    }

    /// Whether any function has a client.
    #[must_use]
    pub fn in_use(&self) -> bool {
        (0..FUNCTIONS).any(|function| self.is_connected(function))
    }

    /// Records that a client connected or disconnected.
    pub(crate) fn set_connected(&self, function: usize, connected: bool) {
        if let Some(place) = self.connected.get(function) {
            place.store(connected, Ordering::SeqCst);
        }
        if !connected && !self.in_use() {
            self.tell(Event::Unused { key: self.key.clone(), generation: self.generation });
        }
    }

    /// Sends an event to the keeper, which is gone when the daemon ends.
    pub(crate) fn tell(&self, event: Event) {
        let _ = self.events.send(event);
    }
}

/// A region of registers only.
fn registers(index: u32, size: u64) -> Region {
    Region { index, size, readable: true, writable: true, mappings: Vec::new(), io_fds: Vec::new() }
}
