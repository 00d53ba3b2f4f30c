//! The registry of neighbours: which VMs read each other's memory ([`neighbour::registry`] decides), and the descriptors that
//! make it so.
//!
//! One thread owns it all. It holds the read-only RAM descriptors of members, and gives them to those who are permitted; it maps
//! none. When a member's socket closes, its peers are told at once; when it only stops reporting, within a second.
//!
//! | file | holds |
//! |---|---|
//! | `member` | what a member hands over, and what of it is believed |
//! | `thread` | sockets, time, actions |

mod member;
mod thread;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

pub use neighbour::heartbeat::Heartbeat;
use neighbour::layout::Layout;
pub use neighbour::window::{Geometry, WindowError};
use rustix::event::{EventfdFlags, eventfd};
use serde_json::Value;

use crate::access::Access;
use crate::function::descriptors::signal;
use crate::listener::LONGEST_PATH;

/// Start of the first window: with 16 windows of 32 GiB all lie below 1 TiB, which processors with 40 address bits reach.
const BASE: u64 = 512 << 30;
/// Largest RAM of a member, with the hole below 4 GiB.
const STRIDE: u64 = 32 << 30;
/// Members of a neighbourhood.
const SLOTS: u32 = 16;
/// Entries of each ring.
const ENTRIES: u32 = 1024;

/// What all neighbourhoods of a host have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NeighboursConfig {
    /// Where windows lie.
    pub geometry: Geometry,
    /// Rings.
    pub layout: Layout,
    /// Who is alive.
    pub heartbeat: Heartbeat,
    /// How long who has connected may take to join: a monitor allocates its VM's RAM meanwhile, which takes minutes where that is much and filled at once.
    pub joining: Duration,
}

/// [`NeighboursConfig::joining`] by default. A user may have so many connections open that others wait for so long, with a shorter one as well.
const JOINING: Duration = Duration::from_secs(300);

impl Default for NeighboursConfig {
    fn default() -> Self {
        // Constants: that they are possible is tested.
        let geometry = Geometry::new(BASE, STRIDE, SLOTS);
        let layout = Layout::new(ENTRIES);
        match (geometry, layout) {
            (Ok(geometry), Ok(layout)) => {
                Self { geometry, layout, heartbeat: Heartbeat::DEFAULT, joining: JOINING }
            }
            _ => unreachable!("the default windows and rings are possible"),
        }
    }
}

/// The running registry; it ends when this is dropped, and with it all members' connections to it.
#[derive(Debug)]
pub struct Neighbours {
    stop: OwnedFd,
    path: PathBuf,
    thread: Option<JoinHandle<()>>,
    view: Arc<Mutex<Value>>,
}

impl Neighbours {
    /// Listens at `path` and starts the thread.
    ///
    /// # Errors
    /// When the path is too long, or the host refuses.
    pub fn start(path: &Path, access: Access, config: NeighboursConfig) -> io::Result<Self> {
        if path.as_os_str().len() > LONGEST_PATH {
            return Err(io::ErrorKind::InvalidFilename.into());
        }
        // The folder is this daemon's: whoever listened here is dead.
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = neighbour_protocol::Listener::bind(path)?;
        // Everybody may connect, and is judged by credentials then.
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o666))?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let stopped = stop.try_clone()?;
        let view = Arc::new(Mutex::new(Value::Null));
        let shown = Arc::clone(&view);
        let thread = std::thread::Builder::new().name("neighbours".to_owned()).spawn(move || {
            thread::Host::new(listener, access, config, shown).serve(stopped.as_fd());
        })?;
        Ok(Self { stop, path: path.to_owned(), thread: Some(thread), view })
    }

    /// All neighbourhoods, for `causeway inspect`.
    #[must_use]
    pub fn inspect(&self) -> Value {
        self.view.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Neighbours {
    fn drop(&mut self) {
        signal(self.stop.as_fd());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("The neighbours' thread panicked; this is a bug");
        }
        // Its folder is this daemon's, so nobody else listens there.
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(%error, "The socket {} could not be removed", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests;
