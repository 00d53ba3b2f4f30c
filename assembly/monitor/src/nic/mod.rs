//! Commodity NICs that the guest drives with its own driver: `[[nic]]`, in one of three modes ([`crate::description::NicMode`]).
//!
//! ```text
//! virtual      guest ─▶ reference emulation (device-models) ─▶ tap            accesses exit
//! vpio         guest ─▶ Monitor (vpio) ─▶ card of this host, vfio-pci         accesses exit; DMA to validated windows only
//! passthrough  guest ─▶ card of this host, vfio-pci                           memory BARs mapped, INTx by irqfd; DMA to all of the guest
//!
//! Where accesses exit, writes that may be late don't, but wait for the next access (machine::late, vpio::plan).
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`engine`] | what is behind a NIC: one of the three, behind one lock |
//! | [`function`] | the PCI function: configuration space, BARs, INTx |
//! | [`thread`] | the thread of a NIC: frames of a tap, interrupts of a card |
//! | [`bus`] | guest memory as a bus master of this process sees it |
//!
//! What runs without its guest being paused: a card's DMA and interrupts. `quiesce` takes a card from the guest (its context is saved),
//! `unquiesce` gives it back.

mod bus;
mod engine;
mod function;
mod thread;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use machine::interrupt::InterruptController;
use machine::memory::GuestRam;
use pci::config::InterruptPin;
use pci::function::PciFunction;
use pci::root::{PciRoot, intx_gsi};
use virtio_devices::net::NetError;
use virtio_devices::net::tap::Tap;
use vpio::vfio::{OpenError, Vfio};

use self::function::NicFunction;
use crate::description::{Nic, NicMode};
use crate::vm::ThreadHook;

/// System calls of threads that access a NIC: those of vCPUs, and a NIC's own.
pub const SYSCALLS: &[i64] = &[
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_ioctl,
    libc::SYS_readv,
    libc::SYS_writev,
    // Before a card's BAR is mapped into the guest.
    libc::SYS_fstat,
    libc::SYS_newfstatat,
];

/// System calls of the thread that gives a host's card back: it looks up the card's IOMMU group.
pub const END_SYSCALLS: &[i64] = &[libc::SYS_ioctl, libc::SYS_readlink, libc::SYS_readlinkat];

/// Ends the VM: a request of its guest was refused, and the policy is to stop. Says what was refused.
pub type StopSink = Arc<dyn Fn(String) + Send + Sync>;

/// A NIC can't be set up.
#[derive(Debug, thiserror::Error)]
pub enum NicError {
    /// The card.
    #[error(transparent)]
    Card(#[from] OpenError),
    /// The card, once it was open.
    #[error(transparent)]
    Device(#[from] device_models::physical::DeviceError),
    /// The card under its model.
    #[error(transparent)]
    Monitor(#[from] vpio::MonitorError),
    /// The tap.
    #[error(transparent)]
    Tap(#[from] NetError),
    /// Guest memory can't be pinned.
    #[error(
        "The limit of locked memory can't be raised, and a card's memory is locked: run it with RLIMIT_MEMLOCK unlimited"
    )]
    LockedMemory(#[source] std::io::Error),
    /// Something of the machine.
    #[error("The NIC's {what} can't be made")]
    Machine {
        /// What.
        what: &'static str,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl NicError {
    fn machine(what: &'static str, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Machine { what, source: source.into() }
    }
}

/// A NIC whose card or tap is open, without a machine yet.
pub struct OpenedNic {
    wish: Nic,
    back: Back,
}

/// What was opened.
enum Back {
    Wire(Wire),
    Card(Box<Vfio>),
}

/// Where an emulated card's frames go.
struct Wire {
    /// Name of the interface.
    name: String,
    /// Messages of a header and a frame, not blocking.
    queue: OwnedFd,
    /// Keeps the interface, where it was made here.
    _interface: Option<Tap>,
}

impl OpenedNic {
    /// Opens what is behind a NIC.
    ///
    /// # Errors
    /// When it can't be.
    pub fn open(wish: &Nic) -> Result<Self, NicError> {
        let back = match &wish.mode {
            NicMode::Virtual { tap, .. } => {
                let tap = Tap::open(tap, 1)?;
                let queue = tap.queue().map_err(|error| NicError::machine("tap queue", error))?;
                Back::Wire(Wire { name: tap.ifname().to_owned(), queue, _interface: Some(tap) })
            }
            NicMode::Vpio { device, .. } | NicMode::Passthrough { device } => {
                unlock_memory()?;
                Back::Card(Box::new(Vfio::open(device)?))
            }
        };
        Ok(Self { wish: wish.clone(), back })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.wish.name
    }

    /// Plugs it in and starts its thread; `on_start` runs first on that, `drain` whenever it wakes. `stop` is called at most once, from any
    /// thread.
    ///
    /// # Errors
    /// When memory, interrupts or the thread can't be had.
    pub fn plug(
        self,
        root: &Arc<PciRoot>,
        ram: &GuestRam,
        controller: &dyn InterruptController,
        on_start: ThreadHook,
        drain: impl Fn() + Send + 'static,
        stop: StopSink,
    ) -> Result<(), crate::vm::Error> {
        let name = self.wish.name.clone();
        let failed = |error: NicError| crate::vm::Error::device(&name, error);
        let engine = engine::Engine::new(&self.wish, self.back, ram, stop).map_err(failed)?;
        let function = NicFunction::new(&name, engine).map_err(failed)?;
        let address = root.plug_next(Arc::clone(&function) as Arc<dyn PciFunction>)?;
        let gsi = intx_gsi(address.slot(), InterruptPin::A);
        function.connect(controller, gsi).and_then(|()| function.start(on_start, drain)).map_err(failed)
    }
}

/// What a card may reach stays in memory, and counts as locked: a process without privileges may lock little, and this one gives its up.
fn unlock_memory() -> Result<(), NicError> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    if getrlimit(Resource::Memlock).current.is_none() {
        return Ok(());
    }
    let none = Rlimit { current: None, maximum: None };
    setrlimit(Resource::Memlock, none).map_err(|error| NicError::LockedMemory(error.into()))
}

#[cfg(test)]
mod tests;
