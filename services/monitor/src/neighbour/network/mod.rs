//! A virtio network device whose frames go to neighbours: from VM to VM with one copy, without a tap or a module in the guest.
//!
//! ```text
//!  guest a                  monitor of a                segment                  monitor of b                  guest b
//!  transmit ring ─▶ descriptors: addresses in a's window ─▶ message ─▶ finds a's RAM in its own mapping,
//!                                                                      copies into a receive buffer ───────▶ receive ring
//!  used ring ◀───── buffers are the guest's again ◀──── completion ◀───┘
//! ```
//!
//! The sender lends its guest's buffers. The receiver's monitor makes the one copy, from the sender's RAM, which it maps read-only, to its
//! own guest's. Messages are mmnet's (`guest/mmnet`), so the peer may be a guest with that module. All members that permit each other are
//! one Ethernet: the switch learns addresses, and sends frames for unknown ones to all peers.
//!
//! | file | contents |
//! |---|---|
//! | `peer` | the mappings of a peer, and the rings of the pair |
//! | `switch` | routing of frames between peers and the guest; lent frames |
//! | `backend` | the device's backend: [`virtio_devices::net::backend`] |
//! | `member` | the membership: [`super::thread::Member`] |

mod backend;
mod member;
mod peer;
mod switch;

use std::sync::{Arc, Mutex};

use machine::memory::{GuestRam, RamLayout};
use virtio_devices::net::{MacAddress, Net};

use self::backend::{Backend, Channel};
use self::member::Network;
use self::switch::Switch;
use super::thread::{Registry, Thread};
use super::{NeighbourError, OpenedNeighbour};
use crate::vm::ThreadHook;

/// System calls of such a device's threads, besides those of all network devices: to signal, to wait for lent frames, and to unmap a peer
/// that didn't return any.
pub const SYSCALLS: &[i64] =
    &[libc::SYS_read, libc::SYS_write, libc::SYS_clock_nanosleep, libc::SYS_munmap, libc::SYS_close];

/// Default MTU, bytes: mmnet's. Long packets cost no more than their bytes here.
pub const MTU: u16 = 65_520;

/// The membership of a network device, before there is a machine.
pub struct OpenedNetwork {
    opened: OpenedNeighbour,
    network: Arc<Network>,
}

impl OpenedNetwork {
    /// A device in the neighbourhood of `opened`, and the membership to join once there is RAM.
    ///
    /// # Errors
    /// If the process has no descriptors left.
    pub fn new(
        opened: OpenedNeighbour,
        name: String,
        mac: MacAddress,
        mtu: Option<u16>,
    ) -> Result<(Self, Net), NeighbourError> {
        let failed = |error| NeighbourError::monitor("make an eventfd", error);
        let switch = Arc::new(Mutex::new(Switch::new()));
        let network = Arc::new(Network::new(Arc::clone(&switch)).map_err(failed)?);
        let group = opened.config.group.clone();
        let backend = Backend::new(group, Arc::clone(&switch), Arc::clone(&network));
        let channel = Channel::new(switch, network.event().map_err(failed)?, Arc::clone(&network));
        let net = Net::with_backend(
            name,
            Box::new(backend),
            vec![Box::new(channel)],
            mac,
            Some(mtu.unwrap_or(MTU)),
        );
        Ok((Self { opened, network }, net))
    }

    /// Checks that RAM fits into a window.
    ///
    /// # Errors
    /// If it doesn't fit.
    pub fn check(&self, ram: &RamLayout) -> Result<(), NeighbourError> {
        self.opened.check_ram(ram)
    }

    /// Joins the neighbourhood, and starts a thread that ends when the result is dropped.
    ///
    /// # Errors
    /// If the registry refuses, or a thread can't be created.
    pub fn join(self, ram: &GuestRam, on_start: ThreadHook) -> Result<RunningNetwork, NeighbourError> {
        let Self { opened, network } = self;
        network.own_ram(ram);
        let registry = Registry::join(opened, ram, &*network)?;
        let thread = Thread::start(network, registry, on_start)
            .map_err(|error| NeighbourError::monitor("start a thread", error))?;
        Ok(RunningNetwork { _thread: thread })
    }
}

/// A running membership. Dropping it leaves the neighbourhood.
pub struct RunningNetwork {
    _thread: Thread,
}
