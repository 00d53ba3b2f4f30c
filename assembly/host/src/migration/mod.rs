//! A VM's HCA as it moves from one host's engine to another's: what is copied while the VM runs, what is left for the pause, and what the
//! destination makes of it. The protocol, who may do what and when, is crate `nomad`; the monitor moves RAM, vCPUs and other devices.
//!
//! ```text
//! Source::begin ─ round ─ round … stop ─ last round ─▶ pieces, Total
//! Arrival::begin ◀─ take ◀─────────────────────────────┘   check ─ start
//! ```
//! A piece is an object of the device (`hca`), with what this device's function remembers of it (`pvrdma`) and, of a queue pair whose
//! peer is on another host, its connection (`roce`).

pub mod manager;
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

/// Objects of a device that may be on their way at most, those destroyed meanwhile included.
const MOST_OBJECTS: usize = 1 << 20;

/// Why a VM's HCA can't move.
#[derive(Debug, thiserror::Error)]
pub enum MigrationError {
    /// A saved object.
    #[error("The HCA's state can't be moved")]
    State(
        #[from]
        #[source]
        InvalidState,
    ),
    /// A connection.
    #[error("The HCA's connections can't be moved")]
    Connection(
        #[from]
        #[source]
        Immovable,
    ),
    /// The stream.
    #[error("The HCA's state has not come as a whole")]
    Stream(
        #[from]
        #[source]
        Incomplete,
    ),
    /// The device at the destination.
    #[error("The destination can't have such a device")]
    Config(
        #[from]
        #[source]
        ConfigError,
    ),
    /// It isn't there.
    #[error("There is no device {0} in this engine")]
    NoDevice(DeviceId),
}

/// What an engine's thread has.
pub struct Parts<'a, M: Dma + Clone + 'static> {
    /// The engine.
    pub engine: &'a mut Engine<Pvrdma<M>>,
    /// Its functions.
    pub devices: &'a mut Devices<M>,
    /// Its connections to other hosts.
    pub transports: &'a mut Transports,
    /// The engine's clock, nanoseconds.
    pub now: u64,
}

impl<M: Dma + Clone + 'static> std::fmt::Debug for Parts<'_, M> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Parts").field("devices", &self.devices).finish_non_exhaustive()
    }
}

/// A VM's HCA that leaves.
#[derive(Debug)]
pub struct Source {
    device: DeviceId,
    outgoing: Outgoing,
}

impl Source {
    /// Begins to note what changes.
    pub fn begin<M: Dma + Clone + 'static>(parts: &mut Parts<'_, M>, device: DeviceId) -> Self {
        parts.engine.track(device, true);
        Self { device, outgoing: Outgoing::new() }
    }

    /// How many objects the next round has.
    #[must_use]
    pub fn left<P: hca::provider::Provider>(&self, engine: &Engine<P>) -> usize {
        engine.touched(self.device)
    }

    /// Pieces of all objects that were touched since the last round. Returns how many.
    pub fn round<M: Dma + Clone + 'static>(
        &mut self,
        parts: &mut Parts<'_, M>,
        each: impl FnMut(Piece),
    ) -> usize {
        self.part(usize::MAX, parts, each)
    }

    /// A part of a round: pieces of at most so many objects, so that other devices' turns come between two. Returns how many.
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
                // The device itself comes last, when it is stopped.
                None => {}
            }
        }
        outgoing.round(usize::MAX, |object| pieces::save(parts, *device, name(object)), each);
        taken
    }

    /// Stops the device, whose vCPUs stand still. Then comes the last [`Source::round`].
    ///
    /// # Errors
    /// When it isn't there, or the host's RDMA device has requests of it.
    pub fn stop<M: Dma + Clone + 'static>(
        &mut self,
        parts: &mut Parts<'_, M>,
        uar: &impl Uar,
        interrupts: &impl Interrupts,
    ) -> Result<(), MigrationError> {
        let Parts { engine, devices, transports, now } = parts;
        let missing = MigrationError::NoDevice(self.device);
        let Some(device) = devices.get_mut(self.device) else { return Err(missing) };
        // What the host's RDMA device has placed: nobody is told of it later.
        transports.catch_up(engine, *now);
        transports.at_rest(self.device, None)?;
        // Doorbells that nobody has seen: the words don't move.
        device.scan(engine, uar, *now);
        engine.stop(self.device, *devices);
        transports.take_over(engine, *now);
        transports.stop(self.device, *now);
        devices.get_mut(self.device).ok_or(missing)?.settle(*now, interrupts);
        Ok(())
    }

    /// What the destination must have, after the last round.
    #[must_use]
    pub fn total(&self) -> Option<Total> {
        self.outgoing.total()
    }

    /// It stays: the device goes on, held towards all its peers until they are opened.
    ///
    /// # Errors
    /// When somebody else has got one of its addresses meanwhile.
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

    /// It has moved: nothing of it stays here.
    pub fn leave<M: Dma + Clone + 'static>(self, parts: &mut Parts<'_, M>) {
        parts.transports.detach(self.device);
        if let Some(device) = parts.devices.remove(self.device) {
            device.remove(parts.engine);
        }
    }
}

/// Where a device belongs.
#[derive(Debug, Clone)]
pub struct Place {
    /// Its VM.
    pub vm: VmId,
    /// Its segment's name.
    pub segment: String,
    /// The same, in this engine.
    pub segment_id: SegmentId,
}

/// A VM's HCA that comes.
#[derive(Debug)]
pub struct Arrival {
    device: DeviceId,
    incoming: Incoming,
}

impl Arrival {
    /// Makes room: a device without objects, which nobody reaches.
    ///
    /// # Errors
    /// When such a device can't be, or the VM isn't known.
    pub fn begin<M: Dma + Clone + 'static>(
        parts: &mut Parts<'_, M>,
        config: Config,
        memory: M,
        place: &Place,
    ) -> Result<Self, MigrationError> {
        let device = Device::dormant(config, memory, parts.engine)?;
        let id = device.id();
        parts.devices.insert(device);
        let arrival = Self { device: id, incoming: Incoming::new(MOST_OBJECTS) };
        if let Err(error) = parts.transports.attach_dormant(id, place.vm, &place.segment, place.segment_id) {
            arrival.discard(parts);
            return Err(error.into());
        }
        Ok(arrival)
    }

    /// Its name in this engine.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// A piece came: its object is made, or made anew.
    ///
    /// # Errors
    /// When it can't be one. The arrival is to be discarded then.
    pub fn take<M: Dma + Clone + 'static>(
        &mut self,
        parts: &mut Parts<'_, M>,
        piece: Piece,
    ) -> Result<(), MigrationError> {
        let Piece { object, version, state } = piece;
        // The bytes are used at once; what is remembered is that they came.
        let kept = state.as_ref().map(|_| Vec::new());
        if self.incoming.take(Piece { object, version, state: kept })? {
            pieces::restore(parts, self.device, name(object), state.as_deref())?;
        }
        Ok(())
    }

    /// Whether all has come.
    ///
    /// # Errors
    /// When something is missing.
    pub fn check(&self, total: Total) -> Result<(), MigrationError> {
        Ok(self.incoming.check(total)?)
    }

    /// The VM runs here now. Its queue pairs are held towards those peers that [`Engine::hold`] was called for. What remembers which objects
    /// have come is dropped afterwards, when the VM runs: for 30,000 queue pairs that takes milliseconds.
    ///
    /// # Errors
    /// When another device has one of its addresses.
    pub fn start<M: Dma + Clone + 'static>(
        &self,
        parts: &mut Parts<'_, M>,
    ) -> Result<DeviceId, MigrationError> {
        let missing = MigrationError::NoDevice(self.device);
        parts.devices.get_mut(self.device).ok_or(missing)?.start(parts.engine)?;
        parts.transports.start(parts.engine, self.device);
        Ok(self.device)
    }

    /// It doesn't come: the room is free again.
    pub fn discard<M: Dma + Clone + 'static>(self, parts: &mut Parts<'_, M>) {
        parts.transports.detach(self.device);
        if let Some(device) = parts.devices.remove(self.device) {
            device.remove(parts.engine);
        }
    }
}
