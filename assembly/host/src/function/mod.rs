//! The PCI side of a function, whatever device it is: configuration space, interrupts, guest memory; and the two
//! functions of a NIC as vfio-user devices.

pub mod ethernet;
pub mod header;
pub mod interrupts;
pub mod memory;
pub mod rdma;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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
    connected: [AtomicBool; FUNCTIONS],
    events: Sender<Event>,
}

impl NicShared {
    /// Of a NIC without clients.
    #[must_use]
    pub fn new(key: NicKey, generation: u64, uid: u32, events: Sender<Event>) -> Self {
        Self { key, generation, uid, wire: Arc::default(), connected: Default::default(), events }
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
