//! The connection to the registry, made before the sandbox closes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use machine::memory::RamLayout;
use neighbour::layout::Layout;
use neighbour::window::Geometry;
use neighbour_protocol::{FromDaemon, SOCKET_NAME, Socket, VERSION};

use super::NeighbourError;
use crate::description::Neighbour;

/// Timeout of the daemon's greeting.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);

/// Properties of the registry's neighbourhoods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Terms {
    pub geometry: Geometry,
    pub layout: Layout,
    pub heartbeat_ms: u32,
}

/// A connection to the registry that hasn't joined a neighbourhood yet.
#[derive(Debug)]
pub struct OpenedNeighbour {
    pub(super) config: Neighbour,
    pub(super) vm: String,
    pub(super) path: PathBuf,
    pub(super) socket: Socket,
    pub(super) terms: Terms,
}

impl OpenedNeighbour {
    /// Connects, and receives the windows' geometry.
    ///
    /// # Errors
    /// If no daemon listens, or it refuses or has another version.
    pub fn open(vm: &str, config: &Neighbour) -> Result<Self, NeighbourError> {
        let path = socket_path(&config.host);
        let (socket, terms) = connect(&path)?;
        Ok(Self { config: config.clone(), vm: vm.to_owned(), path, socket, terms })
    }

    /// Addresses of the windows. The machine must not use them for anything else.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.terms.geometry
    }

    /// Checks that the windows fit into a machine with this RAM, whose CPUs have `physical_bits` address bits.
    ///
    /// # Errors
    /// If they don't fit.
    pub fn check(&self, ram: &RamLayout, physical_bits: u8) -> Result<(), NeighbourError> {
        self.check_ram(ram)?;
        let geometry = &self.terms.geometry;
        let windows = |reason| self.no_room(reason);
        if ram.high_end() > geometry.base() {
            return Err(windows(format!(
                "RAM and devices reach up to {:#x}; start the daemon with windows that lie higher",
                ram.high_end()
            )));
        }
        if 1_u64.checked_shl(physical_bits.into()).is_some_and(|limit| geometry.end() > limit) {
            return Err(windows(format!(
                "its CPUs have {physical_bits} address bits; start the daemon with windows that lie lower"
            )));
        }
        Ok(())
    }

    /// Checks that RAM fits into a window, wherever the windows are.
    ///
    /// # Errors
    /// If it doesn't fit.
    pub fn check_ram(&self, ram: &RamLayout) -> Result<(), NeighbourError> {
        let stride = self.terms.geometry.stride();
        let end = ram.ranges().iter().map(|range| range.start + range.size).max().unwrap_or(0);
        if end > stride {
            return Err(self.no_room(format!(
                "the VM's RAM ends at {end:#x}, and a window has {stride:#x} bytes; give the VM less"
            )));
        }
        Ok(())
    }

    fn no_room(&self, reason: String) -> NeighbourError {
        let geometry = &self.terms.geometry;
        NeighbourError::Windows { base: geometry.base(), end: geometry.end(), reason }
    }
}

/// Path of the registry's socket for the daemon with socket `host`.
fn socket_path(host: &Path) -> PathBuf {
    host.with_extension("d").join(SOCKET_NAME)
}

/// Connects and receives the daemon's greeting.
pub(super) fn connect(path: &Path) -> Result<(Socket, Terms), NeighbourError> {
    let registry = |source: Box<dyn std::error::Error + Send + Sync>| NeighbourError::Registry {
        path: path.to_owned(),
        source,
    };
    let socket = Socket::connect(path).map_err(|error| registry(error.into()))?;
    let (hello, _) = socket.wait::<FromDaemon>(GREETING_TIMEOUT).map_err(|error| registry(error.into()))?;
    match hello {
        FromDaemon::Hello { version, base, stride, slots, entries, heartbeat_ms } => {
            if version != VERSION {
                let path = path.to_owned();
                return Err(NeighbourError::Version { path, found: version, known: VERSION });
            }
            let geometry = Geometry::new(base, stride, slots).map_err(|error| registry(error.into()))?;
            let layout = Layout::new(entries).map_err(|error| registry(error.into()))?;
            Ok((socket, Terms { geometry, layout, heartbeat_ms: heartbeat_ms.clamp(10, 10_000) }))
        }
        FromDaemon::Refused { reason } => Err(NeighbourError::Refused { path: path.to_owned(), reason }),
        other => Err(registry(format!("its first words are {other:?}").into())),
    }
}
