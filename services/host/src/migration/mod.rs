//! Moves a VM's HCA from one host's engine to another's: pre-copy while the VM runs, the rest during the blackout, and
//! its restoration at the destination. Crate `nomad` has the protocol. The monitor moves RAM, vCPUs and other devices.
//!
//! ```text
//! Source::begin ─ round ─ round … stop ─ last round ─▶ pieces, Total
//! Destination::begin ◀─ take ◀─────────────────────────────┘   check ─ start
//! ```
//! A piece is an object of the device (`hca`) with the state that this device's function (`pvrdma`) keeps for it. A
//! piece of a queue pair whose peer is on another host also has its connection (`roce`).

pub mod handle;
pub mod manager;
pub mod phases;
mod pieces;
pub mod stream;

use dma::Dma;
use hca::engine::Engine;
use hca::names::{DeviceId, SegmentId};
use hca::saved::{InvalidState, Name};
use nomad::objects::{Incoming, Incomplete, Outgoing, Piece, Total};
use pvrdma::{Config, ConfigError, Device, Devices, Interrupts, Pvrdma, Uar};

use crate::transport::{Immovable, Transports, VmId};
use pieces::{name, object};

/// Maximum number of objects of a device during a migration, including those destroyed during the copy.
const MAX_OBJECTS: usize = 1 << 20;

/// Why a VM's HCA can't move.
#[derive(Debug, thiserror::Error)]
pub enum MigrationError {
    /// An object can't be saved or restored.
    #[error("The HCA's state can't be moved")]
    State(
        #[from]
        #[source]
        InvalidState,
    ),
    /// A connection can't be saved or restored.
    #[error("The HCA's connections can't be moved")]
    Connection(
        #[from]
        #[source]
        Immovable,
    ),
    /// Objects are missing, or more arrived than the source has.
    #[error("The HCA's state has not come as a whole")]
    Stream(
        #[from]
        #[source]
        Incomplete,
    ),
    /// The destination can't create such a device.
    #[error("The destination can't have such a device")]
    Config(
        #[from]
        #[source]
        ConfigError,
    ),
    /// The engine has no such device.
    #[error("There is no device {0} in this engine")]
    NoDevice(DeviceId),
}

/// State of the engine's thread, borrowed for a step of a migration.
pub struct Parts<'a, M: Dma + Clone + 'static> {
    /// The engine.
    pub engine: &'a mut Engine<Pvrdma<M>>,
    /// The devices' functions, which serve the guests' drivers.
    pub devices: &'a mut Devices<M>,
    /// Its connections to other hosts.
    pub transports: &'a mut Transports,
    /// The engine's clock, in nanoseconds.
    pub now: u64,
}

impl<M: Dma + Clone + 'static> std::fmt::Debug for Parts<'_, M> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Parts").field("devices", &self.devices).finish_non_exhaustive()
    }
}

/// The source's side of an HCA's migration.
#[derive(Debug)]
pub struct Source {
    device: DeviceId,
    outgoing: Outgoing,
}

impl Source {
    /// Starts to track changes of the device.
    pub fn begin<M: Dma + Clone + 'static>(parts: &mut Parts<'_, M>, device: DeviceId) -> Self {
        parts.engine.track(device, true);
        Self { device, outgoing: Outgoing::new() }
    }

    /// Number of objects of the next round.
    #[must_use]
    pub fn left<P: hca::provider::Provider>(&self, engine: &Engine<P>) -> usize {
        engine.touched(self.device)
    }

    /// Passes `each` the pieces of all objects that changed since the last round. Returns their number.
    pub fn round<M: Dma + Clone + 'static>(
        &mut self,
        parts: &mut Parts<'_, M>,
        each: impl FnMut(Piece),
    ) -> usize {
        self.part(usize::MAX, parts, each)
    }

    /// A part of a round, with at most `most` objects, so that the engine serves other devices between two parts.
    /// Returns the number of objects.
    pub fn part<M: Dma + Clone + 'static>(
        &mut self,
        most: usize,
        parts: &mut Parts<'_, M>,
        each: impl FnMut(Piece),
    ) -> usize {
        let Self { device, outgoing } = self;
        let mut names: Vec<Name> = Vec::new();
        parts.engine.take_touched(*device, most, |name| names.push(name));
        let taken = names.len();
        for name in names {
            match pieces::exists(parts, *device, name) {
                Some(true) => outgoing.touched(object(name)),
                Some(false) => outgoing.removed(object(name)),
                // The device's own state moves last, after it has stopped.
                None => {}
            }
        }
        outgoing.round(usize::MAX, |object| pieces::save(parts, *device, name(object)), each);
        taken
    }

    /// Stops the device; its vCPUs must be paused. The last [`Source::round`] follows.
    ///
    /// # Errors
    /// If the device doesn't exist, or the host's RDMA device still has requests of it.
    pub fn stop<M: Dma + Clone + 'static>(
        &mut self,
        parts: &mut Parts<'_, M>,
        uar: &impl Uar,
        interrupts: &impl Interrupts,
    ) -> Result<(), MigrationError> {
        let Parts { engine, devices, transports, now } = parts;
        let missing = MigrationError::NoDevice(self.device);
        let Some(device) = devices.get_mut(self.device) else { return Err(missing) };
        // Handles outstanding completions of the host's RDMA device: the destination doesn't receive them.
        transports.catch_up(engine, *now);
        transports.at_rest(self.device, None)?;
        // Doorbells that the engine hasn't polled: doorbell words aren't moved.
        device.scan(engine, uar, *now);
        engine.stop(self.device, *devices);
        transports.take_over(engine, *now);
        transports.stop(self.device, *now);
        devices.get_mut(self.device).ok_or(missing)?.settle(*now, interrupts);
        Ok(())
    }

    /// The total for the destination, after the last round.
    #[must_use]
    pub fn total(&self) -> Option<Total> {
        self.outgoing.total()
    }

    /// After an abort: the device resumes. Its queue pairs stay suspended towards all peers until they are opened.
    ///
    /// # Errors
    /// If another device took one of its addresses.
    pub fn stay<M: Dma + Clone + 'static>(self, parts: &mut Parts<'_, M>) -> Result<(), MigrationError> {
        if parts.engine.is_stopped(self.device) {
            let missing = MigrationError::NoDevice(self.device);
            parts.devices.get_mut(self.device).ok_or(missing)?.start(parts.engine)?;
            parts.transports.start(parts.engine, self.device);
            parts.transports.go_on_outside(parts.engine, self.device, parts.now);
        }
        parts.engine.track(self.device, false);
        Ok(())
    }

    /// After a commit: removes the device from this host.
    pub fn leave<M: Dma + Clone + 'static>(self, parts: &mut Parts<'_, M>) {
        parts.transports.detach(self.device);
        if let Some(device) = parts.devices.remove(self.device) {
            device.remove(parts.engine);
        }
    }
}

/// The VM and segment of a device.
#[derive(Debug, Clone)]
pub struct Place {
    /// The VM that has the device.
    pub vm: VmId,
    /// Its segment's name.
    pub segment: String,
    /// The segment's number in this engine.
    pub segment_id: SegmentId,
}

/// The destination's side of an HCA's migration.
#[derive(Debug)]
pub struct Destination {
    device: DeviceId,
    incoming: Incoming,
}

impl Destination {
    /// Reserves capacity: creates a device without objects, which no peer can reach.
    ///
    /// # Errors
    /// If the device's configuration is impossible here, or the VM is unknown.
    pub fn begin<M: Dma + Clone + 'static>(
        parts: &mut Parts<'_, M>,
        config: Config,
        memory: M,
        place: &Place,
    ) -> Result<Self, MigrationError> {
        let device = Device::dormant(config, memory, parts.engine)?;
        let id = device.id();
        parts.devices.insert(device);
        let arrival = Self { device: id, incoming: Incoming::new(MAX_OBJECTS) };
        if let Err(error) = parts.transports.attach_dormant(id, place.vm, &place.segment, place.segment_id) {
            arrival.discard(parts);
            return Err(error.into());
        }
        Ok(arrival)
    }

    /// The device's number in this engine.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Restores a received object, or replaces it.
    ///
    /// # Errors
    /// If the piece is invalid. The caller must discard the arrival then.
    pub fn take<M: Dma + Clone + 'static>(
        &mut self,
        parts: &mut Parts<'_, M>,
        piece: Piece,
    ) -> Result<(), MigrationError> {
        let Piece { object, version, state } = piece;
        // The state is used at once; only its version is recorded.
        let kept = state.as_ref().map(|_| Vec::new());
        if self.incoming.take(Piece { object, version, state: kept })? {
            pieces::restore(parts, self.device, name(object), state.as_deref())?;
        }
        Ok(())
    }

    /// Checks that all objects have been received.
    ///
    /// # Errors
    /// If an object is missing or differs.
    pub fn check(&self, total: Total) -> Result<(), MigrationError> {
        Ok(self.incoming.check(total)?)
    }

    /// After a commit: the VM runs here. Queue pairs stay suspended towards peers for which [`Engine::hold`] was
    /// called. The caller drops this record of versions after the VM has resumed: for 30,000 queue pairs that takes
    /// milliseconds.
    ///
    /// # Errors
    /// If another device has one of its addresses.
    pub fn start<M: Dma + Clone + 'static>(
        &self,
        parts: &mut Parts<'_, M>,
    ) -> Result<DeviceId, MigrationError> {
        let missing = MigrationError::NoDevice(self.device);
        parts.devices.get_mut(self.device).ok_or(missing)?.start(parts.engine)?;
        parts.transports.start(parts.engine, self.device);
        Ok(self.device)
    }

    /// After an abort: removes the device, and frees its capacity.
    pub fn discard<M: Dma + Clone + 'static>(self, parts: &mut Parts<'_, M>) {
        parts.transports.detach(self.device);
        if let Some(device) = parts.devices.remove(self.device) {
            device.remove(parts.engine);
        }
    }
}
