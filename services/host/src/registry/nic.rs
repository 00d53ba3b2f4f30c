//! One NIC, and the threads that serve its functions' sockets.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use rustix::event::{EventfdFlags, eventfd};
use vfio_user_protocol::device::Device;
use vfio_user_protocol::server::{Server, ServerError};

use super::{NicInfo, NicKey, RegistryError};
use crate::function::NicShared;
use crate::function::descriptors::signal;
use crate::function::ethernet::EthernetFunction;
use crate::function::rdma::RdmaFunction;
use crate::listener::{SocketFile, listen};
use crate::segments::{Network, Uplink};

/// A NIC. Dropping it ends its connections and removes its devices; fields are dropped in this order.
#[derive(Debug)]
pub(super) struct Nic {
    pub(super) servers: Vec<FunctionServer>,
    pub(super) shared: Arc<NicShared>,
    pub(super) rdma: Arc<RdmaFunction>,
    pub(super) ethernet: Arc<EthernetFunction>,
    pub(super) uplink: Option<Arc<Uplink>>,
    pub(super) network: Arc<Network>,
    pub(super) mac: [u8; 6],
    pub(super) mtu: u32,
    pub(super) since: Instant,
    pub(super) was_used: bool,
}

/// A thread that serves one function's socket.
#[derive(Debug)]
pub(super) struct FunctionServer {
    path: PathBuf,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    file: Option<SocketFile>,
}

impl FunctionServer {
    pub(super) fn start(
        path: PathBuf,
        device: Arc<dyn Device>,
        key: &NicKey,
        function: usize,
    ) -> Result<Self, RegistryError> {
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| RegistryError::Serve {
            key: key.clone(),
            source,
        };
        let (listener, file) = listen(&path)?.into_parts();
        let server = Server::from_listener(listener).map_err(|error: ServerError| failed(error.into()))?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| failed(io::Error::from(error).into()))?;
        let stop = Arc::new(stop);
        let (stopped, name) = (Arc::clone(&stop), key.to_string());
        let thread = std::thread::Builder::new()
            .name(format!("{}.{function}", key.vm.chars().take(12).collect::<String>()))
            .spawn(move || {
                if let Err(error) = server.serve(&device, stopped.as_fd()) {
                    tracing::error!(
                        error = &error as &dyn std::error::Error,
                        "Function {function} of {name} is no longer served"
                    );
                }
            })
            .map_err(|error| failed(error.into()))?;
        Ok(Self { path, stop, thread: Some(thread), file: Some(file) })
    }
}

impl Drop for FunctionServer {
    fn drop(&mut self) {
        signal(self.stop.as_fd());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("The thread of {} panicked; this is a bug", self.path.display());
        }
    }
}

impl Nic {
    /// Removes its sockets' files. Call it before another NIC of its name can be created: files are named after NICs, and a later removal
    /// would hit the other's.
    pub(super) fn hide(&mut self) {
        for server in &mut self.servers {
            server.file = None;
        }
    }

    /// Its properties.
    pub(super) fn info(&self) -> NicInfo {
        NicInfo {
            key: self.shared.key.clone(),
            mac: self.mac,
            segment: self.network.name().to_owned(),
            tap: self.uplink.as_ref().map(|uplink| uplink.tap().to_owned()),
            mtu: self.mtu,
            uid: self.shared.uid,
            functions: self.servers.iter().map(|server| server.path.clone()).collect(),
            connected: (0..self.servers.len()).map(|function| self.shared.is_connected(function)).collect(),
        }
    }
}
