//! The PCI side of a function, whatever device it is: configuration space, interrupts, guest memory; and the two
//! functions of a NIC as vfio-user devices.

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
use crate::registry::{Event, NicKey};
use crate::transport::WirePort;

/// Number of functions of a NIC.
pub const FUNCTIONS: usize = 2;

/// What both functions of a NIC share.
#[derive(Debug)]
pub struct NicShared {
    /// Which NIC.
    pub key: NicKey,
    /// Distinguishes it from earlier ones of the same name.
    pub generation: u64,
    /// To whom it belongs.
    pub uid: u32,
    /// Between the functions, for RDMA in frames of the NIC's own.
    pub wire: Arc<WirePort>,
    /// Its segment is connected with a tap, for this NIC.
    pub tap: bool,
    connected: [AtomicBool; FUNCTIONS],
    events: Sender<Event>,
    /// Its VM comes from another host, and isn't here yet.
    incoming: AtomicBool,
    /// The VM that comes; 0: it isn't known yet.
    arriving_vm: AtomicU32,
    /// A migration of its VM is under way: only whoever decides on that lets the NIC's functions go on.
    locked: AtomicBool,
}

impl NicShared {
    /// Of a NIC without clients; whether its VM is to come, and whether it has a tap.
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

    /// Whether its VM comes from another host, and isn't here yet.
    #[must_use]
    pub fn is_incoming(&self) -> bool {
        self.incoming.load(Ordering::SeqCst)
    }

    /// Its VM is here.
    pub(crate) fn has_arrived(&self) {
        self.incoming.store(false, Ordering::SeqCst);
    }

    /// The number of the VM that comes, once it is known.
    #[must_use]
    pub fn arriving_vm(&self) -> Option<u32> {
        Some(self.arriving_vm.load(Ordering::SeqCst)).filter(|vm| *vm != 0)
    }

    /// A VM comes.
    pub(crate) fn set_arriving_vm(&self, vm: u32) {
        self.arriving_vm.store(vm, Ordering::SeqCst);
    }

    /// Whether a migration decides when the functions go on.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        self.locked.load(Ordering::SeqCst)
    }

    /// A migration decides from now on when the functions go on; or their client again.
    pub(crate) fn set_locked(&self, locked: bool) {
        self.locked.store(locked, Ordering::SeqCst);
    }

    /// Whether a peer may have a function.
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

    /// A client came or went.
    pub(crate) fn set_connected(&self, function: usize, connected: bool) {
        if let Some(place) = self.connected.get(function) {
            place.store(connected, Ordering::SeqCst);
        }
        if !connected && !self.in_use() {
            self.tell(Event::Unused { key: self.key.clone(), generation: self.generation });
        }
    }

    /// Tells the keeper; at the daemon's end there is none.
    pub(crate) fn tell(&self, event: Event) {
        let _ = self.events.send(event);
    }
}

/// A region that is all registers.
fn registers(index: u32, size: u64) -> Region {
    Region { index, size, readable: true, writable: true, mappings: Vec::new(), io_fds: Vec::new() }
}
