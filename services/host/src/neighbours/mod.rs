//! The registry of neighbours: which VMs read each other's memory ([`neighbour::registry`] decides), and the exchange of their descriptors.
//!
//! One thread owns all of it. It holds the read-only RAM descriptors of members and passes them to permitted peers; it maps none. When a
//! member's socket closes, its peers are notified at once; when it only stops reporting, within a second.
//!
//! | file | holds |
//! |---|---|
//! | `member` | validation of a member's descriptors |
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

/// Global address of the first window. With 16 windows of 32 GiB all are below 1 TiB, which processors with 40 address bits reach.
const BASE: u64 = 512 << 30;
/// Limit of a member's RAM, with the hole below 4 GiB, bytes.
const STRIDE: u64 = 32 << 30;
/// Number of members of a neighbourhood.
const SLOTS: u32 = 16;
/// Number of entries of each ring.
const ENTRIES: u32 = 1024;

/// Settings of all neighbourhoods of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NeighboursConfig {
    /// Location of the windows.
    pub geometry: Geometry,
    /// Layout of the rings.
    pub layout: Layout,
    /// Heartbeat intervals and timeouts.
    pub heartbeat: Heartbeat,
    /// Timeout from connecting to joining. A monitor allocates its VM's RAM meanwhile, which takes minutes if it is large and filled at
    /// once.
    pub joining: Duration,
}

/// Default of [`NeighboursConfig::joining`]. A user who opens all connections can make others wait this long, but also with a shorter
/// timeout.
const JOINING: Duration = Duration::from_secs(300);

impl Default for NeighboursConfig {
    fn default() -> Self {
        // Constants; a test verifies them.
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

/// The running registry. Dropping it ends it, with all members' connections.
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
        // The folder is this daemon's, so an earlier listener is dead.
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = neighbour_protocol::Listener::bind(path)?;
        // Any process may connect; each connection's credentials are checked.
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

    /// Reports all neighbourhoods, for `causeway inspect`.
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
        // The folder is this daemon's, so no other process listens there.
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(%error, "The socket {} could not be removed", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests;
