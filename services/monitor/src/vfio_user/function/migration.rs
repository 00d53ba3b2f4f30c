//! Migration of a served function. The monitor saves its part here, and transfers the device's part from its server to that of the
//! destination. The server logs its writes to guest memory.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use pci::config::SavedConfig;
use pci::function::{FunctionError, SavedFunction};
use pci::interrupt::Msi;
use pci::msix::{Msix, SavedMsix};
use serde::{Deserialize, Serialize};
use vfio_user_protocol::client::{Client, ClientError};
use vfio_user_protocol::migration::DeviceState;

use super::{DmaRange, OpenedFunction, VfioUserFunction, event_error};
use crate::vfio_user::lock;
use crate::vfio_user::{VfioUserError, events::VectorEvent};

/// Value of [`SavedFunction::kind`].
const KIND: &str = "vfio-user";
/// Version of [`Saved`].
const VERSION: u32 = 1;

/// The monitor's part of a function.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Saved {
    config: SavedConfig,
    msix: Option<SavedMsix>,
}

/// A function whose VM is incoming: accepts its state.
#[derive(Debug, Clone)]
pub struct IncomingFunction {
    name: String,
    client: Arc<Client>,
}

impl IncomingFunction {
    /// Name of the function.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device's state is about to come.
    pub fn begin(&self) -> Result<(), ClientError> {
        self.client.set_device_state(DeviceState::Resuming)
    }

    /// Passes on a part of the state.
    pub fn write_state(&self, data: &[u8]) -> Result<(), ClientError> {
        self.client.write_migration_data(data)
    }

    /// Whether the server supports post-copy, in which memory is still not present.
    pub fn supports_postcopy(&self) -> Result<bool, ClientError> {
        self.client.can_be_late()
    }

    /// A part of guest memory is not present: see [`Client::late_memory`].
    pub fn set_postcopy_memory(
        &self,
        ranges: &[(u64, u64, u64)],
        bitmap: BorrowedFd<'_>,
        requests: BorrowedFd<'_>,
        arrivals: BorrowedFd<'_>,
    ) -> Result<bool, ClientError> {
        self.client.late_memory(ranges, bitmap, requests, arrivals)
    }

    /// The state is complete: the server checks it.
    pub fn end(&self) -> Result<(), ClientError> {
        self.client.set_device_state(DeviceState::Stop)
    }
}

impl OpenedFunction {
    /// PCI device ID.
    pub fn device_id(&self) -> u16 {
        self.shape.device_id()
    }

    /// Sends the server the guest's memory, before the VM's contents have come.
    ///
    /// # Errors
    /// If the server refuses, or its device doesn't support migration.
    pub fn connect_incoming(&mut self, ram: &[DmaRange]) -> Result<IncomingFunction, VfioUserError> {
        let server = |source: ClientError| VfioUserError::Server {
            target: self.connector.target(),
            source: source.into(),
        };
        if !self.client.can_migrate().map_err(server)? {
            return Err(VfioUserError::Device {
                target: self.connector.target(),
                reason: "its state can't be moved".to_owned(),
            });
        }
        for range in ram {
            use std::os::fd::AsFd as _;
            let mapped =
                self.client.dma_map(range.file.as_fd(), range.offset, range.address, range.size, true);
            mapped.map_err(server)?;
        }
        self.mapped = true;
        Ok(IncomingFunction { name: self.name.clone(), client: Arc::clone(&self.client) })
    }
}

impl VfioUserFunction {
    /// The same as [`VfioUserFunction::new`], with a saved state. The server already has the device's own state. The device runs after
    /// [`VfioUserFunction::set_device_state`].
    ///
    /// # Errors
    /// As for `new`, and if the state is another function's or damaged.
    pub fn restore(
        opened: OpenedFunction,
        ram: Vec<DmaRange>,
        msi: &dyn Msi,
        saved: &SavedFunction,
    ) -> Result<Arc<Self>, VfioUserError> {
        let target = opened.connector.target();
        let bad = |reason: String| VfioUserError::Device { target: target.clone(), reason };
        if (saved.kind.as_str(), saved.version) != (KIND, VERSION) {
            let text = format!("its saved state is version {} of a {}", saved.version, saved.kind);
            return Err(bad(text));
        }
        let read: Result<Saved, _> = ciborium::from_reader(saved.state.as_slice());
        let saved = read.map_err(|error| bad(format!("its saved state can't be read: {error}")))?;
        let config = opened.shape.config_space().and_then(|config| config.restore(&saved.config));
        let config = config.map_err(|error| bad(error.to_string()))?;
        let (msix, vectors) = match (&opened.shape.msix, &saved.msix) {
            (None, None) => (None, Vec::new()),
            (Some((_, layout)), Some(saved)) => {
                let vectors = msi.allocate(layout.count()).map_err(VfioUserError::Interrupts)?;
                let events = vectors.iter().map(|vector| VectorEvent::new(Arc::clone(vector)));
                let events = events.collect::<std::io::Result<Vec<_>>>().map_err(event_error)?;
                let msix = Msix::restore(*layout, vectors, saved).map_err(|error| bad(error.to_string()))?;
                (Some(msix), events)
            }
            _ => return Err(bad("its saved state has other interrupts".to_owned())),
        };
        Self::assemble(opened, ram, config, msix, vectors)
    }

    /// Saves the monitor's part. To be called after [`VfioUserFunction::set_device_state`] has stopped the device.
    pub(super) fn save_ours(&self) -> Result<SavedFunction, FunctionError> {
        let inner = &self.inner;
        if !self.client()?.can_migrate().map_err(|error| self.failed("be saved", error))? {
            return Err(FunctionError::NotSaveable {
                name: inner.name.clone(),
                reason: "its server doesn't hand out its state".to_owned(),
            });
        }
        let saved = Saved {
            config: lock(&inner.registers).config().save(),
            msix: inner.msix.as_ref().map(Msix::save),
        };
        let mut state = Vec::new();
        ciborium::into_writer(&saved, &mut state).map_err(|error| FunctionError::Failed {
            name: inner.name.clone(),
            what: "be written down".to_owned(),
            source: Box::new(error),
        })?;
        Ok(SavedFunction { kind: KIND.to_owned(), version: VERSION, state })
    }

    fn client(&self) -> Result<Arc<Client>, FunctionError> {
        let gone = || FunctionError::NotSaveable {
            name: self.inner.name.clone(),
            reason: "its server has gone; the device fails until it is back".to_owned(),
        };
        Ok(Arc::clone(&self.inner.link().ok_or_else(gone)?.client))
    }

    /// Sets the device's migration state: pre-copy, stopped, or running.
    ///
    /// # Errors
    /// If the server refuses or is lost.
    pub fn set_device_state(&self, state: DeviceState) -> Result<(), FunctionError> {
        let done = self.client()?.set_device_state(state);
        done.map_err(|error| self.failed("be stopped, moved or started", error))
    }

    /// Reads the part of the device's state that is new since the last call.
    ///
    /// # Errors
    /// If the server refuses or is lost.
    pub fn read_device_state(&self) -> Result<Vec<u8>, FunctionError> {
        let read = self.client()?.read_all_migration_data();
        read.map_err(|error| self.failed("be saved", error))
    }

    /// Starts or stops the server's log of pages of RAM that it writes.
    ///
    /// # Errors
    /// If the server refuses or is lost.
    pub fn log_writes(&self, on: bool) -> Result<(), FunctionError> {
        let client = self.client()?;
        let ranges: Vec<(u64, u64)> =
            self.inner.ram.iter().map(|range| (range.address, range.size)).collect();
        let done = if on { client.start_dma_logging(&ranges) } else { client.stop_dma_logging() };
        done.map_err(|error| self.failed("note what it writes", error))
    }

    /// Makes the server throttle peers' writes to RAM by `percent`. No effect if the server doesn't support it.
    ///
    /// # Errors
    /// If the server refuses or is lost.
    pub fn throttle_peers(&self, percent: u8) -> Result<(), FunctionError> {
        let throttled = self.client()?.hold_back(percent);
        throttled.map(drop).map_err(|error| self.failed("let peers write less", error))
    }

    /// Pages that the server has written since the last call: for each range of RAM its address, and a bit per page.
    ///
    /// # Errors
    /// If the server refuses or is lost.
    pub fn take_written(&self) -> Result<Vec<(u64, Vec<u64>)>, FunctionError> {
        let client = self.client()?;
        let ranges = self.inner.ram.iter();
        ranges
            .map(|range| {
                let words = client.take_dirty(range.address, range.size);
                let words = words.map_err(|error| self.failed("say what it has written", error))?;
                Ok((range.address, words))
            })
            .collect()
    }

    /// The guest runs here now. Makes the thread process earlier events of the server. Signals every vector once, since interrupts of the
    /// blackout may have been lost. Later connections are those of a VM that has arrived.
    pub fn migration_committed(&self) {
        self.inner.connector.migration_committed();
        for vector in &self.inner.vectors {
            if let Some(fd) = vector.fd() {
                // A full counter means that the vector is signaled already.
                let _ = rustix::io::write(fd, &1_u64.to_ne_bytes());
            }
        }
    }
}
