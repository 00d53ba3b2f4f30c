//! Commodity NICs with the guest's own driver: `[[nic]]`, in one of three modes ([`crate::description::NicMode`]).
//!
//! ```text
//! virtual      guest ─▶ reference emulation (device-models) ─▶ tap            accesses exit
//! vpio         guest ─▶ Monitor (vpio) ─▶ card of this host, vfio-pci         accesses exit; DMA to validated windows only
//! passthrough  guest ─▶ card of this host, vfio-pci                           memory BARs mapped, INTx by irqfd; DMA to all of the guest
//!
//! If accesses exit, deferred writes wait in KVM's ring for the next access (machine::coalesced, vpio::plan). If drivers poll the device
//! (RTL8139, e1000), the guest reads a shadow register page (vpio::shown), and KVM lowers the line at each end of interrupt: no component
//! may see the guest acknowledge.
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`engine`] | the backend in any mode, behind one lock |
//! | [`guarded`] | a NIC under its model; changes of the backend |
//! | [`page`] | the shadow register page |
//! | [`mapped`] | parts of a card's BARs that the guest accesses without an exit |
//! | [`drain_timer`] | the timer of drains, if deferred writes may start something |
//! | [`backend`] | a model's backend: a card, or its emulation with a tap |
//! | [`wire`] | frames of a tap |
//! | [`function`] | the PCI function: configuration space, BARs, INTx |
//! | [`traces`] | the file that records what a guest was refused |
//! | [`thread`] | the thread of a NIC: frames of a tap, interrupts of a card |
//! | [`bus`] | guest memory as seen by an emulated bus master |
//!
//! With a tap beside its card, a NIC in mode vpio can change from card to emulation while its guest runs ([`NicHandle::change`]): the model
//! keeps the guest's context, which is the same for both. A card of the host also changes between vpio and passthrough (`vpio::open`).
//!
//! A card's DMA and interrupts continue while vCPUs are suspended. So `quiesce` saves the context and takes the card from the guest, and
//! `unquiesce` returns it.

mod backend;
mod bus;
mod drain_timer;
mod engine;
mod function;
mod guarded;
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

/// System calls of threads that access a NIC: those of vCPUs, and the NIC's own.
pub const SYSCALLS: &[i64] = &[
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_ioctl,
    libc::SYS_readv,
    libc::SYS_writev,
    // Deferred writes that may start something are drained after an interval.
    libc::SYS_timerfd_settime,
    // To map a card's BAR into the guest.
    libc::SYS_fstat,
    libc::SYS_newfstatat,
];

/// System calls of the thread that releases a host's card: it looks up the card's IOMMU group.
pub const END_SYSCALLS: &[i64] = &[libc::SYS_ioctl, libc::SYS_readlink, libc::SYS_readlinkat];

/// Ends the VM, with the refused request as the reason. Called if the policy is to stop.
pub type StopSink = Arc<dyn Fn(String) + Send + Sync>;

/// Callbacks for refused requests. Called on any thread.
pub struct Refusals {
    /// The policy is to stop. Called at most once until the machine is reset.
    pub stop: StopSink,
    /// The policy is a machine check, and the refused write was deferred: the vCPU that made it is unknown. Makes any vCPU take the check.
    pub check: Box<dyn Fn() + Send>,
}

/// Why a NIC can't be set up.
#[derive(Debug, thiserror::Error)]
pub enum NicError {
    /// The card can't be opened.
    #[error(transparent)]
    Card(#[from] OpenError),
    /// The open card failed.
    #[error(transparent)]
    Device(#[from] device_models::physical::DeviceError),
    /// The card's model failed.
    #[error(transparent)]
    Monitor(#[from] vpio::MonitorError),
    /// The tap failed.
    #[error(transparent)]
    Tap(#[from] NetError),
    /// The trace file can't be opened.
    #[error("The file {path} for traces of refused requests can't be opened")]
    Traces {
        /// Path of the file.
        path: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The limit of locked memory can't be raised.
    #[error(
        "The limit of locked memory can't be raised, and a card's memory is locked: run it with RLIMIT_MEMLOCK unlimited"
    )]
    LockedMemory(#[source] std::io::Error),
    /// A resource of the machine can't be created.
    #[error("The NIC's {what} can't be made")]
    Machine {
        /// The resource.
        what: &'static str,
        /// The cause.
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
    config: Nic,
    backend: OpenedBackend,
    traces: Option<Traces>,
}

/// The open backend.
enum OpenedBackend {
    Wire(Wire),
    /// A card, and the wire of its emulation, if any.
    Card(Box<Vfio>, Option<Wire>),
}

impl OpenedNic {
    /// Opens the backend of a NIC.
    ///
    /// # Errors
    /// If the card or the tap can't be opened.
    pub fn open(config: &Nic) -> Result<Self, NicError> {
        let backend = match &config.mode {
            NicMode::Virtual { tap, .. } => OpenedBackend::Wire(open_wire(tap)?),
            NicMode::Vpio { device, tap, .. } => {
                unlock_memory()?;
                let card = Box::new(Vfio::open(device)?);
                OpenedBackend::Card(card, tap.as_deref().map(open_wire).transpose()?)
            }
            NicMode::Passthrough { device } => {
                unlock_memory()?;
                OpenedBackend::Card(Box::new(Vfio::open(device)?), None)
            }
        };
        let traces = match &config.mode {
            NicMode::Vpio { violations: Some(path), .. } => {
                let failed = |source| NicError::Traces { path: path.display().to_string(), source };
                Some(Traces::open(path).map_err(failed)?)
            }
            _ => None,
        };
        Ok(Self { config: config.clone(), backend, traces })
    }

    /// Name of the NIC.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// Plugs the NIC in and starts its thread. The thread runs `on_start` first, and `drain` on each wakeup.
    ///
    /// # Errors
    /// If memory, interrupts or the thread can't be set up.
    pub fn plug(
        self,
        root: &Arc<PciRoot>,
        ram: &GuestRam,
        controller: &dyn InterruptController,
        on_start: ThreadHook,
        drain: impl Fn() + Send + 'static,
        refusals: Refusals,
    ) -> Result<NicHandle, crate::vm::Error> {
        let name = self.config.name.clone();
        let failed = |error: NicError| crate::vm::Error::device(&name, error);
        let Refusals { stop, check } = refusals;
        let mut engine = engine::Engine::new(&self.config, self.backend, ram, stop).map_err(failed)?;
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
    /// Name of the NIC.
    pub fn name(&self) -> &str {
        PciFunction::name(&*self.0)
    }

    /// Changes the backend while the guest runs, at a quiescent point: to the emulation, to the card under its model, or to passthrough.
    /// Frames in flight are lost. Blocks for a second at most; the guest's accesses wait meanwhile.
    ///
    /// # Errors
    /// If the NIC has no other backend, reaches no quiescent point, is in a state that the model doesn't permit, or card or tap fails.
    pub fn change(&self, backend: NicBehind) -> Result<(), ChangeError> {
        self.0.change(backend)
    }
}

fn open_wire(tap: &str) -> Result<Wire, NicError> {
    let tap = Tap::open(tap, 1)?;
    let queue = tap.queue().map_err(|error| NicError::machine("tap queue", error))?;
    Ok(Wire { name: tap.ifname().to_owned(), queue, _interface: Some(tap) })
}

/// Raises the limit of locked memory: memory that a card may reach stays pinned and counts as locked. Must run before privileges are
/// dropped.
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
