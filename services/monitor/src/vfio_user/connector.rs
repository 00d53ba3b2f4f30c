//! Sources of connections to device servers.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use control_api::host::{NicRequest, attach_nic};
use vfio_user_protocol::client::{Client, ClientError, DEFAULT_TIMEOUT};

use super::{VfioUserError, lock};

/// Makes connections to one device's server: at start, and again after each loss. May block for some seconds.
pub trait Connector: Send + Sync {
    /// Makes a new connection.
    ///
    /// # Errors
    ///
    /// If the server can't be reached now.
    fn connect(&self) -> Result<Client, VfioUserError>;

    /// Address of the server, for messages.
    fn target(&self) -> String;

    /// The incoming VM has arrived.
    fn migration_committed(&self);
}

/// A server that listens on a fixed path.
#[derive(Debug)]
pub struct SocketConnector {
    /// Path of its socket.
    pub path: PathBuf,
}

impl Connector for SocketConnector {
    fn connect(&self) -> Result<Client, VfioUserError> {
        Client::connect(&self.path, DEFAULT_TIMEOUT)
            .map_err(|source| VfioUserError::Server { target: self.target(), source: source.into() })
    }

    fn target(&self) -> String {
        self.path.display().to_string()
    }

    fn migration_committed(&self) {}
}

/// An RDMA NIC of the host daemon. The daemon creates its sockets on request, and again after a restart. The NIC's functions share this, so
/// that one request serves all.
#[derive(Debug)]
pub struct Nic {
    host: PathBuf,
    request: NicRequest,
    /// The functions' sockets as the daemon last reported them; empty before the first request.
    sockets: Mutex<Vec<PathBuf>>,
    /// The VM is migrating to this host and hasn't arrived.
    incoming: AtomicBool,
}

impl Nic {
    /// A NIC of the daemon at `host`. Sends no request yet.
    pub fn new(host: &Path, request: NicRequest) -> Arc<Self> {
        let incoming = AtomicBool::new(request.incoming);
        Arc::new(Self { host: host.to_owned(), request, sockets: Mutex::default(), incoming })
    }
}

/// One function of a [`Nic`].
#[derive(Debug)]
pub struct NicConnector {
    /// The NIC.
    pub nic: Arc<Nic>,
    /// Number of the function.
    pub function: u8,
}

impl NicConnector {
    fn failed(&self, source: impl std::error::Error + Send + Sync + 'static) -> VfioUserError {
        VfioUserError::Server { target: self.target(), source: source.into() }
    }
}

impl Connector for NicConnector {
    fn connect(&self) -> Result<Client, VfioUserError> {
        // Held during the request, so that the other function finds the answer.
        let mut sockets = lock(&self.nic.sockets);
        let number = usize::from(self.function);
        if let Some(path) = sockets.get(number) {
            match Client::connect(path, DEFAULT_TIMEOUT) {
                // No process listens there any more: the daemon has restarted, or removed the NIC.
                Err(ClientError::Connect { .. }) => {}
                result => return result.map_err(|error| self.failed(error)),
            }
        }
        let incoming = self.nic.incoming.load(Ordering::Acquire);
        let request = NicRequest { incoming, ..self.nic.request.clone() };
        *sockets = attach_nic(&self.nic.host, &request).map_err(|error| self.failed(error))?.functions;
        let path = sockets.get(number).ok_or_else(|| VfioUserError::Device {
            target: self.target(),
            reason: format!("it has {} functions, function {number} is missing", sockets.len()),
        })?;
        Client::connect(path, DEFAULT_TIMEOUT).map_err(|error| self.failed(error))
    }

    fn target(&self) -> String {
        format!("{}, NIC {} function {}", self.nic.host.display(), self.nic.request.name, self.function)
    }

    fn migration_committed(&self) {
        self.nic.incoming.store(false, Ordering::Release);
    }
}
