//! A virtio network device whose frames go to neighbours: VM to VM with one copy, no tap, no module in the guest.
//!
//! ```text
//!  guest a                  monitor of a                segment                  monitor of b                  guest b
//!  transmit ring ─▶ descriptors: addresses in a's window ─▶ message ─▶ looks a's RAM up in its own mapping,
//!                                                                      copies into a receive buffer ───────▶ receive ring
//!  used ring ◀───── buffers are the guest's again ◀──── completion ◀───┘
//! ```
//!
//! The sender lends its guest's buffers; the receiver's monitor makes the one copy, from the sender's RAM, which it has mapped for reading
//! only, to its own guest's. Messages are mmnet's (`guest/mmnet`), so that a guest with that module may be at the other end. All members that
//! permit each other are one Ethernet: addresses are learned, what isn't known goes to all.
//!
//! | file | holds |
//! |---|---|
//! | `peer` | what is mapped of a peer, and the rings of the pair |
//! | `switch` | which peer a frame goes to and comes from; frames that are lent |
//! | `backend` | the device's side: [`virtio_devices::net::backend`] |
//! | `member` | the registry's side: [`super::thread::Member`] |

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

/// System calls of such a device's threads, besides those of all network devices: to signal, to wait for frames that are lent, and to unmap what
/// a peer that gave none back had.
pub const SYSCALLS: &[i64] =
    &[libc::SYS_read, libc::SYS_write, libc::SYS_clock_nanosleep, libc::SYS_munmap, libc::SYS_close];

/// MTU where the description says none, bytes: mmnet's. Longer packets than Ethernet's cost no more than their bytes here.
pub const MTU: u16 = 65_520;

/// A network device's membership, before there is a machine.
pub struct OpenedNetwork {
    opened: OpenedNeighbour,
    network: Arc<Network>,
}

impl OpenedNetwork {
    /// A device over the neighbourhood that `opened` leads to, and the membership that is to be joined when there is RAM.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn new(
        opened: OpenedNeighbour,
        name: String,
        mac: MacAddress,
        mtu: Option<u16>,
    ) -> Result<(Self, Net), NeighbourError> {
        let failed = |error| NeighbourError::monitor("make an eventfd", error);
        let switch = Arc::new(Mutex::new(Switch::new()));
        let network = Arc::new(Network::new(Arc::clone(&switch)).map_err(failed)?);
        let group = opened.wish.group.clone();
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

    /// Whether RAM has room in a window.
    ///
    /// # Errors
    /// When it hasn't.
    pub fn check(&self, ram: &RamLayout) -> Result<(), NeighbourError> {
        self.opened.check_ram(ram)
    }

    /// Joins the neighbourhood; the thread that this starts ends with what is returned.
    ///
    /// # Errors
    /// When the registry refuses, or a thread can't be made.
    pub fn join(self, ram: &GuestRam, on_start: ThreadHook) -> Result<RunningNetwork, NeighbourError> {
        let Self { opened, network } = self;
        network.own_ram(ram);
        let registry = Registry::join(opened, ram, &*network)?;
        let thread = Thread::start(network, registry, on_start)
            .map_err(|error| NeighbourError::monitor("start a thread", error))?;
        Ok(RunningNetwork { _thread: thread })
    }
}

/// A membership; the VM leaves its neighbourhood when this is dropped.
pub struct RunningNetwork {
    _thread: Thread,
}
