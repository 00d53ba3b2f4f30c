//! Commodity NICs that the guest drives with its own driver: `[[nic]]`, in one of three modes ([`crate::description::NicMode`]).
//!
//! ```text
//! virtual      guest ─▶ reference emulation (device-models) ─▶ tap            accesses exit
//! vpio         guest ─▶ Monitor (vpio) ─▶ card of this host, vfio-pci         accesses exit; DMA to validated windows only
//! passthrough  guest ─▶ card of this host, vfio-pci                           memory BARs mapped, INTx by irqfd; DMA to all of the guest
//!
//! Where accesses exit, writes that may be late don't, but wait for the next access (machine::late, vpio::plan). Where the model's device is one that
//! drivers look at all the time (RTL8139, e1000), its registers are a page that the guest reads (vpio::shown), and its line is lowered by KVM at each end
//! of interrupt: nobody may see the guest acknowledge.
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`engine`] | one of the three, behind one lock |
//! | [`guarded`] | a NIC under its model; changes from its card to the emulation and back |
//! | [`page`] | the page in which a guest reads registers of a card under its model without an exit |
//! | [`mapped`] | parts of a card's BARs that the guest accesses by itself |
//! | [`look`] | the timer after which late writes are looked at, where they may start something |
//! | [`behind`] | what is behind a model: a card, or its emulation with a tap |
//! | [`wire`] | frames of a tap |
//! | [`function`] | the PCI function: configuration space, BARs, INTx |
//! | [`traces`] | the file of what a guest was refused |
//! | [`thread`] | the thread of a NIC: frames of a tap, interrupts of a card |
//! | [`bus`] | guest memory as a bus master of this process sees it |
//!
//! A NIC in mode vpio with a tap beside its card can be taken from card to emulation while its guest runs ([`NicHandle::change`]): the monitor
//! keeps the guest's context, which is the same for both. A card of the host goes from vpio to passthrough and back likewise (`vpio::open`).
//!
//! What runs without its guest being paused: a card's DMA and interrupts. `quiesce` takes a card from the guest (its context is saved),
//! `unquiesce` gives it back.

mod behind;
mod bus;
mod engine;
mod function;
mod guarded;
mod look;
mod mapped;
mod page;
mod thread;
mod traces;
mod wire;

use std::sync::Arc;

use control_api::types::NicBehind;
use machine::interrupt::InterruptController;
use machine::memory::GuestRam;
use pci::config::InterruptPin;
use pci::function::PciFunction;
use pci::root::{PciRoot, intx_gsi};
use virtio_devices::net::NetError;
use virtio_devices::net::tap::Tap;
use vpio::vfio::{OpenError, Vfio};

use self::function::NicFunction;
pub use self::guarded::ChangeError;
use self::traces::Traces;
use self::wire::Wire;
use crate::description::{Nic, NicMode};
use crate::vm::ThreadHook;

/// System calls of threads that access a NIC: those of vCPUs, and a NIC's own.
pub const SYSCALLS: &[i64] = &[
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_ioctl,
    libc::SYS_readv,
    libc::SYS_writev,
    // Late writes that may start something are looked at after a while.
    libc::SYS_timerfd_settime,
    // Before a card's BAR is mapped into the guest.
    libc::SYS_fstat,
    libc::SYS_newfstatat,
];

/// System calls of the thread that gives a host's card back: it looks up the card's IOMMU group.
pub const END_SYSCALLS: &[i64] = &[libc::SYS_ioctl, libc::SYS_readlink, libc::SYS_readlinkat];

/// Ends the VM: a request of its guest was refused, and the policy is to stop. Says what was refused.
pub type StopSink = Arc<dyn Fn(String) + Send + Sync>;

/// Whom a NIC tells of requests that were refused. Called from any thread.
pub struct Refusals {
    /// The policy is to stop; called at most once until the machine is reset.
    pub stop: StopSink,
    /// The policy is a machine check, and what was refused came late: the vCPU that wrote it isn't known any more. A vCPU is to have one.
    pub check: Box<dyn Fn() + Send>,
}

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
    /// The file for traces.
    #[error("The file {path} for traces of refused requests can't be opened")]
    Traces {
        /// Which.
        path: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
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
    traces: Option<Traces>,
}

/// What was opened.
enum Back {
    Wire(Wire),
    /// A card, and where frames of its emulation go.
    Card(Box<Vfio>, Option<Wire>),
}

impl OpenedNic {
    /// Opens what is behind a NIC.
    ///
    /// # Errors
    /// When it can't be.
    pub fn open(wish: &Nic) -> Result<Self, NicError> {
        let back = match &wish.mode {
            NicMode::Virtual { tap, .. } => Back::Wire(open_wire(tap)?),
            NicMode::Vpio { device, tap, .. } => {
                unlock_memory()?;
                let card = Box::new(Vfio::open(device)?);
                Back::Card(card, tap.as_deref().map(open_wire).transpose()?)
            }
            NicMode::Passthrough { device } => {
                unlock_memory()?;
                Back::Card(Box::new(Vfio::open(device)?), None)
            }
        };
        let traces = match &wish.mode {
            NicMode::Vpio { violations: Some(path), .. } => {
                let failed = |source| NicError::Traces { path: path.display().to_string(), source };
                Some(Traces::open(path).map_err(failed)?)
            }
            _ => None,
        };
        Ok(Self { wish: wish.clone(), back, traces })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.wish.name
    }

    /// Plugs it in and starts its thread; `on_start` runs first on that, `drain` whenever it wakes.
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
        refusals: Refusals,
    ) -> Result<NicHandle, crate::vm::Error> {
        let name = self.wish.name.clone();
        let failed = |error: NicError| crate::vm::Error::device(&name, error);
        let Refusals { stop, check } = refusals;
        let mut engine = engine::Engine::new(&self.wish, self.back, ram, stop).map_err(failed)?;
        if let Some(traces) = self.traces {
            engine.set_traces(traces);
        }
        let function = NicFunction::new(&name, engine).map_err(failed)?;
        let address = root.plug_next(Arc::clone(&function) as Arc<dyn PciFunction>)?;
        let bus = Arc::downgrade(root);
        function.set_refresh(Box::new(move || {
            if let Some(bus) = bus.upgrade() {
                bus.refresh(address);
            }
        }));
        let gsi = intx_gsi(address.slot(), InterruptPin::A);
        function
            .connect(controller, gsi)
            .and_then(|()| function.start(on_start, drain, check))
            .map_err(failed)?;
        Ok(NicHandle(function))
    }
}

/// A NIC of a running machine.
pub struct NicHandle(Arc<NicFunction>);

impl NicHandle {
    /// Its name.
    pub fn name(&self) -> &str {
        PciFunction::name(&*self.0)
    }

    /// Takes the guest to the emulation, to its card under the model, or to its card without, while it runs, at a point at which the card can be taken.
    /// Frames on their way are lost. The guest's accesses wait meanwhile, for a second at the most.
    ///
    /// # Errors
    /// When there is nothing else behind the NIC, the guest never lets go of it or does what the model doesn't allow, or card or tap fails.
    pub fn change(&self, behind: NicBehind) -> Result<(), ChangeError> {
        self.0.change(behind)
    }
}

fn open_wire(tap: &str) -> Result<Wire, NicError> {
    let tap = Tap::open(tap, 1)?;
    let queue = tap.queue().map_err(|error| NicError::machine("tap queue", error))?;
    Ok(Wire { name: tap.ifname().to_owned(), queue, _interface: Some(tap) })
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
