//! One card of this host for several VMs (`causeway card`). Their monitors connect by vfio-user, each guest uses the card with its own
//! driver, and the card is handed from one guest to the next at quiescent points.
//!
//! ```text
//! monitor of VM a ── vfio-user ──▶ its thread ─┐
//! monitor of VM b ── vfio-user ──▶ its thread ─┼─▶ desk: one lock ─▶ vpio::Monitor ─▶ SharedCard ─▶ vfio-pci
//!                        card's interrupt ─▶ thread of the card ─┘     accesses, time slices
//! ```
//!
//! | module | holds |
//! |---|---|
//! | `desk` | scheduling of the card; accesses, interrupts, hand-offs |
//! | `guest` | the PCI function of a guest |
//! | `memory` | a guest's memory |
//!
//! Each card has a process of its own, so the host daemon needs no right to access hardware.

mod desk;
mod guest;
mod memory;

use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use device_models::describe::{BusMaster, Device as Description};
use device_models::physical::{DeviceError, PhysicalDevice as _, station_address};
use dma::MappedMemory;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use tokio::sync::oneshot;
use vfio_user_protocol::device::Device;
use vfio_user_protocol::server::{Server, ServerError};
use vpio::MonitorError;
use vpio::sharing::{self, OwnRing};
use vpio::vfio::{OpenError, Ram, Vfio};

pub use desk::Card;
use desk::Desk;
use guest::GuestSide;
pub use vpio::FailurePolicy;

use crate::access::may_use;
use crate::function::descriptors::signal;
use crate::hardening;
use crate::identity::{BadName, check_name, is_unicast, mac_of, mac_text};
use crate::listener::{ListenError, SocketFile, listen};
use crate::metrics_server::Readers;
use crate::sandbox::{self, SandboxError};

/// Name of the socket that reports the state.
pub const STATE: &str = "state";
/// Name of the socket that serves metrics by HTTP.
pub const METRICS: &str = "metrics";

/// A guest that may connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Guest {
    /// Name of the guest, and of its socket.
    pub name: String,
    /// Its Ethernet address; default: derived from its name.
    pub address: Option<[u8; 6]>,
    /// User whose monitor may connect, besides root; default: this process's own.
    pub uid: Option<u32>,
}

/// Settings of the time slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Time slice: how long a guest has the card at least while others wait.
    pub slice: Duration,
    /// Time after which the card is taken from a guest that doesn't reach a quiescent point; its driver then reads the card's error status.
    pub limit: Duration,
    /// Policy when a device model refuses an access.
    pub policy: FailurePolicy,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            slice: Duration::from_millis(2),
            limit: Duration::from_millis(500),
            policy: FailurePolicy::DeviceError,
        }
    }
}

/// Configuration of a daemon.
#[derive(Debug, Clone)]
pub struct CardConfig {
    /// PCI address of a card that is bound to vfio-pci.
    pub device: String,
    /// Folder of the sockets, which is created if it doesn't exist.
    pub folder: PathBuf,
    /// Guests, at most [`MOST_GUESTS`].
    pub guests: Vec<Guest>,
    /// Settings of the time slices.
    pub settings: Settings,
    /// Whether to enter the sandbox.
    pub sandbox: bool,
}

/// Limit of guests of a card.
pub const MOST_GUESTS: usize = 16;

/// Why the daemon can't be started.
#[derive(Debug, thiserror::Error)]
pub enum CardError {
    /// The card can't be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The device isn't a card that can be shared.
    #[error(
        "PCI device {address} is {title}, which can't be shared by VMs ({known} can): give it to one VM by --nic vpio:{address}"
    )]
    NotShareable {
        /// PCI address.
        address: String,
        /// Name of the device.
        title: &'static str,
        /// Names of devices that can be shared.
        known: String,
    },
    /// The open card reports an error.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The device model reports an error.
    #[error(transparent)]
    Monitor(#[from] MonitorError),
    /// Invalid number of guests.
    #[error("{count} guests can't share a card; 1 to {MOST_GUESTS} can: --guest NAME for each")]
    Count {
        /// Number of guests.
        count: usize,
    },
    /// Invalid name.
    #[error(transparent)]
    Name(#[from] BadName),
    /// Two guests have the same name or address.
    #[error("Guest {name} has the same {what} as another, {value}: give each its own")]
    Twice {
        /// Name of the guest.
        name: String,
        /// Name or address.
        what: &'static str,
        /// The value.
        value: String,
    },
    /// Invalid address.
    #[error("Guest {name} can't have the address {address}: it isn't that of one station")]
    Address {
        /// Name of the guest.
        name: String,
        /// The address.
        address: String,
    },
    /// A guest has the name of one of the daemon's own sockets.
    #[error("A guest can't be called {name}: that is the daemon's own socket")]
    Reserved {
        /// The name.
        name: String,
    },
    /// A socket can't be opened.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The sockets' folder can't be created.
    #[error("The folder {} can't be made", path.display())]
    Folder {
        /// Path of the folder.
        path: PathBuf,
        /// The error.
        #[source]
        source: io::Error,
    },
    /// A socket's server can't be started.
    #[error(transparent)]
    Serve(#[from] ServerError),
    /// The limit of locked memory can't be raised.
    #[error(
        "The limit of locked memory can't be raised, and a card's memory is locked: run it with RLIMIT_MEMLOCK unlimited"
    )]
    LockedMemory(#[source] io::Error),
    /// The sandbox can't be entered.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// A thread or descriptor can't be created.
    #[error("The card's {what} can't be made")]
    Start {
        /// Name of the part.
        what: &'static str,
        /// The error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl CardError {
    fn start(what: &'static str, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self::Start { what, source: source.into() }
    }
}

/// A guest with its address.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Wish {
    name: String,
    address: [u8; 6],
    uid: u32,
}

/// Validates the guests: each name and address is unique.
fn wishes(card: &str, guests: &[Guest]) -> Result<Vec<Wish>, CardError> {
    if guests.is_empty() || guests.len() > MOST_GUESTS {
        return Err(CardError::Count { count: guests.len() });
    }
    let own = rustix::process::geteuid().as_raw();
    let mut all: Vec<Wish> = Vec::new();
    for guest in guests {
        let name = guest.name.clone();
        check_name("guest", &name)?;
        if name == STATE || name == METRICS {
            return Err(CardError::Reserved { name });
        }
        let address = guest.address.unwrap_or_else(|| mac_of(&name, card));
        if !is_unicast(address) {
            return Err(CardError::Address { name, address: mac_text(address) });
        }
        if all.iter().any(|other| other.name == name) {
            return Err(CardError::Twice { value: name.clone(), name, what: "name" });
        }
        if all.iter().any(|other| other.address == address) {
            return Err(CardError::Twice { name, what: "address", value: mac_text(address) });
        }
        all.push(Wish { name, address, uid: guest.uid.unwrap_or(own) });
    }
    Ok(all)
}

impl Card for Vfio {
    fn give(&mut self, memory: &MappedMemory) {
        let piece = |region: &Arc<dma::MemoryRegion>| Ram {
            guest_base: region.address(),
            length: region.size(),
            host_address: region.host_address(),
        };
        self.set_ram(memory.regions().iter().map(piece).collect(), Box::new(memory.clone()));
    }

    fn signalled(&mut self) {
        Self::signalled(self);
    }

    fn unmask(&mut self) -> Result<(), DeviceError> {
        Self::unmask(self)
    }
}

/// A running daemon of a card. Dropping it ends it in order: guests' accesses fail, and the card is reset.
pub struct CardDaemon {
    folder: PathBuf,
    stop: Arc<OwnedFd>,
    /// Ends the thread for metrics when it is dropped.
    readers: Option<oneshot::Sender<()>>,
    threads: Vec<JoinHandle<()>>,
    _files: Vec<SocketFile>,
}

impl CardDaemon {
    /// Opens the card and starts the daemon; guests can connect when this returns.
    ///
    /// # Errors
    /// When the card can't be opened, or the configuration is invalid.
    pub fn start(config: &CardConfig) -> Result<Self, CardError> {
        hardening::prepare();
        let wishes = wishes(&config.device, &config.guests)?;
        unlock_memory()?;
        let mut card = Vfio::open(&config.device)?;
        let device = card.description();
        let Some(bytes) = sharing::own_bytes(device) else {
            return Err(CardError::NotShareable {
                address: config.device.clone(),
                title: device.title,
                known: sharing::known(),
            });
        };
        let station = station_address(device, &mut card)?;
        let own = card.scratch_of(bytes)?;
        if device.pci.bus_master != BusMaster::Never {
            // Maps the daemon's own rings, as long as it runs.
            card.map(own.mapping())?;
            card.set_guest_bus_master(true)?;
        }
        card.enable_interrupt()?;
        let interrupt =
            card.interrupt_fd().map_err(|source| CardError::start("interrupt's descriptor", source))?;
        std::fs::create_dir_all(&config.folder)
            .map_err(|source| CardError::Folder { path: config.folder.clone(), source })?;
        if config.sandbox {
            sandbox::enter_card(&config.folder)?;
        } else {
            tracing::warn!("The card's daemon runs without a sandbox: no seccomp, no Landlock");
        }
        for wish in &wishes {
            tracing::info!(guest = wish.name, address = mac_text(wish.address), "A seat at the card");
        }
        tracing::info!(card = config.device, own_address = mac_text(station), "The card is open");
        Self::serve(device, card, own, interrupt, &config.folder, &wishes, config.settings)
    }

    fn serve<P: Card, O: OwnRing + Send + 'static>(
        device: &'static Description,
        card: P,
        own: O,
        interrupt: OwnedFd,
        folder: &Path,
        wishes: &[Wish],
        settings: Settings,
    ) -> Result<Self, CardError> {
        let desk = Arc::new(Desk::new(device, card, own, wishes, settings)?);
        Self::serve_desk(&desk, interrupt, folder, wishes)
    }

    fn serve_desk<P: Card, O: OwnRing + Send + 'static>(
        desk: &Arc<Desk<P, O>>,
        interrupt: OwnedFd,
        folder: &Path,
        wishes: &[Wish],
    ) -> Result<Self, CardError> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let stop = Arc::new(stop.map_err(|error| CardError::start("eventfd", io::Error::from(error)))?);
        let mut daemon = Self {
            folder: folder.to_owned(),
            stop: Arc::clone(&stop),
            readers: None,
            threads: Vec::new(),
            _files: Vec::new(),
        };
        let (its, ends) = (Arc::clone(desk), Arc::clone(&stop));
        daemon.spawn("card", move || its.run(&interrupt, &ends))?;
        for (seat, wish) in wishes.iter().enumerate() {
            let (listener, file) = listen(&folder.join(&wish.name))?.into_parts();
            let server = Server::from_listener(listener)?;
            daemon._files.push(file);
            let side = GuestSide::new(Arc::clone(desk), seat, wish.uid)
                .map_err(|error| CardError::start("configuration space", error))?;
            let (side, ends) = (Arc::new(side) as Arc<dyn Device>, Arc::clone(&stop));
            daemon.spawn(&wish.name, move || {
                use std::os::fd::AsFd as _;
                if let Err(error) = server.serve(&side, ends.as_fd()) {
                    tracing::error!(
                        error = &error as &dyn std::error::Error,
                        "A guest's socket isn't served any more"
                    );
                }
            })?;
        }
        let (listener, file) = listen(&folder.join(STATE))?.into_parts();
        daemon._files.push(file);
        let its = Arc::clone(desk);
        daemon.spawn(STATE, move || tell(&listener, &stop, || its.inspect()))?;
        daemon.serve_metrics(desk)?;
        Ok(daemon)
    }

    fn serve_metrics<P: Card, O: OwnRing + Send + 'static>(
        &mut self,
        desk: &Arc<Desk<P, O>>,
    ) -> Result<(), CardError> {
        let (listener, file) = listen(&self.folder.join(METRICS))?.into_parts();
        self._files.push(file);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|source| CardError::start("runtime", source))?;
        let listener = {
            let _inside = runtime.enter();
            tokio::net::UnixListener::from_std(listener)
                .map_err(|source| CardError::start("socket for metrics", source))?
        };
        let (sender, ends) = oneshot::channel();
        self.readers = Some(sender);
        let its = Arc::clone(desk);
        self.spawn(METRICS, move || {
            runtime.block_on(async {
                tokio::select! {
                    () = Readers::new(move || its.metrics()).serve_unix(listener) => {}
                    // An error: the sender was dropped.
                    _ = ends => {}
                }
            });
        })
    }

    fn spawn(&mut self, name: &str, act: impl FnOnce() + Send + 'static) -> Result<(), CardError> {
        // Linux displays 15 bytes.
        let thread = std::thread::Builder::new().name(name.chars().take(15).collect());
        self.threads.push(thread.spawn(act).map_err(|source| CardError::start("thread", source))?);
        Ok(())
    }

    /// Folder of the sockets.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Drop for CardDaemon {
    fn drop(&mut self) {
        use std::os::fd::AsFd as _;
        signal(self.stop.as_fd());
        self.readers = None;
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("A thread of a shared card panicked; this is a bug");
            }
        }
    }
}

/// Writes the state to each authorized connection, until `stop` is readable.
fn tell(listener: &UnixListener, stop: &OwnedFd, state: impl Fn() -> serde_json::Value) {
    let own = rustix::process::geteuid().as_raw();
    loop {
        let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
        if poll(&mut fds, None).is_err() {
            continue;
        }
        if !fds[1].revents().is_empty() {
            return;
        }
        let Ok((mut stream, _)) = listener.accept() else { continue };
        let known = rustix::net::sockopt::socket_peercred(&stream);
        if known.is_ok_and(|peer| may_use(peer.uid.as_raw(), own)) {
            // Drops a connection that doesn't read.
            let _ = stream.set_write_timeout(Some(Duration::from_secs(1)));
            let _ = stream.write_all(format!("{}\n", state()).as_bytes());
        }
    }
}

/// The state of the daemon with this folder.
///
/// # Errors
/// When it can't be reached, doesn't respond to this user, or its response isn't JSON.
pub fn state_of(folder: &Path) -> io::Result<serde_json::Value> {
    let text = io::read_to_string(std::os::unix::net::UnixStream::connect(folder.join(STATE))?)?;
    if text.is_empty() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    serde_json::from_str(&text).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Raises the limit of locked memory: memory that a card may access stays pinned, and counts as locked.
fn unlock_memory() -> Result<(), CardError> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    if getrlimit(Resource::Memlock).current.is_none() {
        return Ok(());
    }
    let none = Rlimit { current: None, maximum: None };
    setrlimit(Resource::Memlock, none).map_err(|error| CardError::LockedMemory(error.into()))
}

#[cfg(test)]
mod tests;
