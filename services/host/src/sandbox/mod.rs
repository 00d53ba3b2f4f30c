//! Confinement of the daemon: it limits an attacker who controls a device model, or the parser of packets.
//!
//! ```text
//! Sandbox::enter   once directory, key and sockets to other hosts are open, before the first thread is created:
//!                  drops all capabilities but the one for taps and large socket buffers, then Landlock, seccomp
//! ```
//!
//! The threads inherit it. All have the same filter: they share all memory, so each could make the others act for it. A refused system call
//! ends the daemon with [`REFUSED_EXIT_CODE`] and a line that names the call and the thread. A log line reports what could not be put in
//! force (on an old kernel).

mod filesystem;
mod seccomp;

use std::io;
use std::path::{Path, PathBuf};

use rustix::thread::{CapabilitySet, CapabilitySets};

pub use confinement::trap::REFUSED_EXIT_CODE;
pub(crate) use filesystem::TcpUse;

/// Why the sandbox can't be entered.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The seccomp filter is refused.
    #[error("The daemon's seccomp filter can't be put in force; --no-sandbox runs without")]
    Seccomp(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Landlock failed on a kernel that has it.
    #[error("Landlock can't be put in force; --no-sandbox runs without")]
    Landlock(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A path that the daemon needs later can't be opened.
    #[error("The sandbox can't open {} to let the daemon use it", path.display())]
    Path {
        /// The path.
        path: PathBuf,
        /// The error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Capabilities or signals can't be changed.
    #[error("The daemon can't {what}; --no-sandbox runs without")]
    Privileges {
        /// The failed operation.
        what: &'static str,
        /// The error.
        #[source]
        source: io::Error,
    },
}

const ENDING: confinement::trap::Ending = confinement::trap::Ending {
    advice: "the daemon has ended, its VMs run on. This is a bug; --no-sandbox runs without.",
    last: || {},
};

/// Confines the calling thread and threads that it creates later. The service's socket is `socket`, its folder `folder`. `rdma` is an RDMA
/// device's file that is opened afterwards. `tcp` is what the daemon may do by TCP, if anything.
pub(crate) fn enter(
    socket: &Path,
    folder: &Path,
    rdma: Option<&Path>,
    tcp: Option<&TcpUse>,
) -> Result<(), SandboxError> {
    confinement::trap::install(ENDING)
        .map_err(|source| SandboxError::Privileges { what: "handle refused system calls", source })?;
    let kept = drop_capabilities()?;
    let landlock = filesystem::enforce(socket, folder, rdma, tcp)?;
    seccomp::enforce(seccomp::Uses { rdma: rdma.is_some(), service: tcp.is_some(), card: false })?;
    tracing::info!(landlock, capabilities = kept, "Sandbox: seccomp is enforced");
    Ok(())
}

/// Confines the daemon of a card, once the card is open: to its folder, and to the ioctls that a card needs.
pub(crate) fn enter_card(folder: &Path) -> Result<(), SandboxError> {
    confinement::trap::install(ENDING)
        .map_err(|source| SandboxError::Privileges { what: "handle refused system calls", source })?;
    let kept = drop_capabilities()?;
    let landlock = filesystem::enforce(&folder.join(crate::card::STATE), folder, None, None)?;
    seccomp::enforce(seccomp::Uses { card: true, ..seccomp::Uses::default() })?;
    tracing::info!(landlock, capabilities = kept, "Sandbox: seccomp is enforced");
    Ok(())
}

fn failed(what: &'static str) -> impl Fn(rustix::io::Errno) -> SandboxError {
    move |errno| SandboxError::Privileges { what, source: io::Error::from(errno) }
}

/// Drops all capabilities but CAP_NET_ADMIN (other users' taps, buffers beyond the system's limit), for good. Returns a description of what
/// is left.
fn drop_capabilities() -> Result<&'static str, SandboxError> {
    let held = rustix::thread::capabilities(None).map_err(failed("read its capabilities"))?;
    if held.effective.contains(CapabilitySet::SETPCAP) {
        for capability in CapabilitySet::all().difference(CapabilitySet::NET_ADMIN).iter() {
            match rustix::thread::remove_capability_from_bounding_set(capability) {
                // This kernel doesn't have that one.
                Ok(()) | Err(rustix::io::Errno::INVAL) => {}
                Err(errno) => return Err(failed("drop its bounding capabilities")(errno)),
            }
        }
    }
    rustix::thread::clear_ambient_capability_set().map_err(failed("drop its ambient capabilities"))?;
    let kept = held.permitted.intersection(CapabilitySet::NET_ADMIN);
    let left = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    rustix::thread::set_capabilities(None, left).map_err(failed("drop its capabilities"))?;
    Ok(if kept.is_empty() { "none" } else { "CAP_NET_ADMIN" })
}
