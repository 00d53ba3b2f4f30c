//! The function's state as its client reads and writes it.

use std::io;
use std::sync::{Arc, MutexGuard, PoisonError};

use dma::{Dma as _, MappedMemory};
use nomad::objects::{Piece, Total};
use pvrdma::Config;
use rustix::io::Errno;
use vfio_user_protocol::migration::{DeviceState, LateMemory, Migration};

use super::RdmaFunction;
use crate::engine::{DeviceSetup, EngineStopped, Worker};
use crate::function::descriptors::Expected;
use crate::function::memory::await_memory;
use crate::function::stream::{Stream, failed};
use crate::migration::MigrationError;
use crate::migration::stream::{Record, StreamError};
use crate::transport::VmId;

/// Number of objects saved or restored at once: some 100 us of the engine's thread.
const MOST_AT_ONCE: usize = 256;

impl RdmaFunction {
    pub(super) fn stream(&self) -> MutexGuard<'_, Stream> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refused(&self, what: &str, error: &(dyn std::error::Error + 'static)) -> io::Error {
        failed(&self.nic.key.vm, &self.nic.key.name, what, error)
    }

    fn gone(&self, what: &str, result: io::Result<Result<(), MigrationError>>) -> io::Result<()> {
        result?.map_err(|error| self.refused(what, &error))
    }

    fn own(&self) -> Record {
        Record::Begin { mac: self.config.mac, segment: self.segment.clone() }
    }

    fn push(&self, stream: &mut Stream, outside: bool, pieces: Vec<Piece>, total: Option<Total>) {
        if outside && !std::mem::replace(&mut self.state().said_outside, true) {
            stream.push(&Record::Outside { tap: self.nic.tap });
        }
        for piece in pieces {
            stream.push(&Record::Piece(piece));
        }
        if let Some(total) = total {
            stream.push(&Record::Total(total));
        }
    }

    /// Begins to save: its client reads the state from here on.
    fn begin(&self, stream: &mut Stream) -> io::Result<()> {
        self.gone("leave", self.with(|worker, device| worker.begin_outgoing(device)))?;
        stream.clear();
        stream.push(&self.own());
        self.state().said_outside = false;
        Ok(())
    }

    fn stop(&self, stream: &mut Stream) -> io::Result<()> {
        let stopped = self.with(|worker, device| {
            worker.stop_outgoing(device).map(|(pieces, total)| (worker.faces_outside(device), pieces, total))
        })?;
        let (outside, pieces, total) =
            stopped.map_err(|error| self.refused("be stopped and saved", &error))?;
        self.push(stream, outside, pieces, Some(total));
        Ok(())
    }

    /// Adds the dormant device to the engine, once the VM is known.
    fn resume(&self, stream: &mut Stream) -> io::Result<()> {
        if self.state().device.is_some() {
            return Err(Errno::INVAL.into());
        }
        let vm = self.nic.arriving_vm().ok_or_else(|| {
            let key = &self.nic.key;
            tracing::warn!(
                vm = key.vm,
                nic = key.name,
                "An RDMA NIC can't come: the cluster has no running VM of this name on another host"
            );
            io::Error::from(Errno::NOENT)
        })?;
        let config = Config { limits: self.limits(), ..self.config.clone() };
        let (pages, msix, mode) = (Arc::clone(&self.pages), Arc::clone(&self.msix), Arc::clone(&self.mode));
        let (name, segment) = (self.nic.key.vm.clone(), self.segment.clone());
        let wire = Arc::clone(&self.nic.wire);
        let setup = DeviceSetup { vm: name, segment, config, pages, msix, mode, wire };
        let memory: MappedMemory = self.memory.table();
        let attached = self.engine.call(move |worker| worker.attach_dormant(setup, memory, VmId(vm)));
        let attached = attached.map_err(|EngineStopped| io::Error::from(Errno::NODEV))?;
        let device = attached.map_err(|error| self.refused("come here", &error))?;
        self.state().device = Some(device);
        stream.clear();
        if self.mode.is_connected(0) {
            self.with(|worker, device| worker.set_mode_offered(device, true))?;
        }
        Ok(())
    }

    /// Checks that all has arrived.
    fn arrived(&self, stream: &Stream) -> io::Result<()> {
        let whole = || -> Result<Total, StreamError> {
            stream.end()?;
            self.state().expected.ok_or(StreamError::Order("no end"))
        };
        let total = whole().map_err(|error| self.refused("come here", &error))?;
        let table = self.memory.table();
        if table.is_late() {
            let ranges = self.with(Worker::control_memory)?;
            let count = ranges.len();
            await_memory(&table, ranges)?;
            tracing::debug!(
                vm = self.nic.key.vm,
                nic = self.nic.key.name,
                count,
                "The NIC's own memory is here"
            );
        }
        self.gone("come here", self.with(move |worker, device| worker.check_incoming(device, total)))
    }

    /// Starts the device on this host: after a rollback, or after an arrival. Called by its client, or by the migration that decides how it
    /// ends.
    pub(crate) fn run(&self) -> io::Result<()> {
        let (name, wire) = (self.nic.key.vm.clone(), Arc::clone(&self.nic.wire));
        let bus_master = self.header.bus_master();
        let run = move |worker: &mut crate::engine::Worker, device| {
            worker.roll_back(device)?;
            worker.start_incoming(device, &name, wire)?;
            // Client requests from when the device didn't exist or was stopped.
            worker.set_bus_master(device, bus_master);
            Ok(())
        };
        self.gone("go on", self.with(run))?;
        self.nic.has_arrived();
        self.stream().clear();
        // Guest address of the driver's shared region, for the next daemon of this host.
        if let Ok(region) = self.with(|worker, device| worker.shared_region(device)) {
            self.remember(region);
        }
        Ok(())
    }

    /// Removes the device, which has moved away.
    pub(crate) fn leave(&self) {
        if let Some(device) = self.state().device.take() {
            // When the daemon ends, the engine is gone, and with it the device.
            let _ = self.engine.call(move |worker| worker.remove_migrated(device));
        }
        self.remember(None);
    }

    /// Restores objects. Each call waits for the engine's thread, so there is one call for many.
    fn restore(&self, pieces: &mut Vec<Piece>) -> io::Result<()> {
        if pieces.is_empty() {
            return Ok(());
        }
        let pieces = std::mem::take(pieces);
        self.gone("come here", self.with(move |worker, device| worker.restore_pieces(device, pieces)))
    }

    /// Handles a record other than an object.
    fn record(&self, record: Record) -> io::Result<()> {
        let order = |what| Err(self.refused("come here", &StreamError::Order(what)));
        let begun = self.state().begun;
        match record {
            Record::Begin { mac, segment } if !begun => {
                let text = |mac: [u8; 6], segment: &str| {
                    format!("a NIC with address {} in segment {segment}", crate::identity::mac_text(mac))
                };
                if (mac, &segment) != (self.config.mac, &self.segment) {
                    let (found, own) = (text(mac, &segment), text(self.config.mac, &self.segment));
                    return Err(self.refused("come here", &StreamError::OtherDevice { found, own }));
                }
                self.state().begun = true;
                Ok(())
            }
            Record::Total(total) if begun && self.state().expected.is_none() => {
                self.state().expected = Some(total);
                Ok(())
            }
            Record::Outside { tap } if begun => {
                if tap && !self.nic.tap {
                    return Err(self.refused("come here", &StreamError::NoTap));
                }
                Ok(())
            }
            Record::Begin { .. } => order("a second beginning"),
            Record::Function(_) => order("another function's state"),
            _ => order("an object or an end"),
        }
    }
}

impl Migration for RdmaFunction {
    fn set_state(&self, wanted: DeviceState) -> io::Result<()> {
        use DeviceState::{PreCopy, Resuming, Running, Stop, StopCopy};
        let mut stream = self.stream();
        match (stream.state, wanted) {
            (before, after) if before == after => return Ok(()),
            (Running, PreCopy) => self.begin(&mut stream)?,
            (Running, StopCopy) => {
                self.begin(&mut stream)?;
                self.stop(&mut stream)?;
            }
            (PreCopy, StopCopy) => self.stop(&mut stream)?,
            (Stop, Resuming) if self.nic.is_incoming() => self.resume(&mut stream)?,
            (Resuming, Stop) => self.arrived(&stream)?,
            (PreCopy | StopCopy | Stop, Running) => {
                if self.nic.is_locked() {
                    // The client doesn't decide how a migration ends.
                    return Err(Errno::BUSY.into());
                }
                if self.device().is_none() {
                    return Err(Errno::NODEV.into());
                }
                drop(stream);
                self.run()?;
                stream = self.stream();
            }
            _ => return Err(Errno::INVAL.into()),
        }
        stream.state = wanted;
        Ok(())
    }

    fn state(&self) -> DeviceState {
        self.stream().state
    }

    fn read_data(&self, most: usize) -> io::Result<Vec<u8>> {
        let mut stream = self.stream();
        if !matches!(stream.state, DeviceState::PreCopy | DeviceState::StopCopy) {
            return Err(Errno::INVAL.into());
        }
        if stream.state == DeviceState::PreCopy {
            if stream.is_empty() && stream.round_left == 0 {
                stream.round_left = self.with(|worker, device| worker.outgoing_left(device))?;
            }
            // Other devices get their turns between two parts.
            while stream.round_left > 0 && stream.len() < most {
                let now = stream.round_left.min(MOST_AT_ONCE);
                let part = self.with(move |worker, device| {
                    let pieces = worker.outgoing_part(device, now)?;
                    Ok::<_, MigrationError>((worker.faces_outside(device), pieces))
                })?;
                let (outside, pieces) = part.map_err(|error| self.refused("be saved", &error))?;
                stream.round_left -= now;
                self.push(&mut stream, outside, pieces, None);
            }
        }
        Ok(stream.next(most))
    }

    fn write_data(&self, data: &[u8]) -> io::Result<()> {
        let records = {
            let mut stream = self.stream();
            if stream.state != DeviceState::Resuming {
                return Err(Errno::INVAL.into());
            }
            stream.take(data).map_err(|error| self.refused("come here", &error))?
        };
        let mut pieces = Vec::new();
        for record in records {
            match record {
                Record::Piece(piece) if self.state().begun => pieces.push(piece),
                other => {
                    self.restore(&mut pieces)?;
                    self.record(other)?;
                }
            }
            if pieces.len() == MOST_AT_ONCE {
                self.restore(&mut pieces)?;
            }
        }
        self.restore(&mut pieces)
    }

    fn start_logging(&self) -> io::Result<()> {
        self.memory.set_dirty_log(true);
        // Only the engine's thread writes, and it has completed earlier requests then.
        self.engine.call(|_| ()).map_err(|EngineStopped| Errno::NODEV.into())
    }

    fn stop_logging(&self) -> io::Result<()> {
        self.memory.set_dirty_log(false);
        Ok(())
    }

    fn hold_back(&self, percent: u8) -> io::Result<()> {
        if self.stream().state != DeviceState::PreCopy {
            return Err(Errno::INVAL.into());
        }
        self.gone("be written more slowly", self.with(move |worker, device| worker.throttle(device, percent)))
    }

    fn late_memory(&self, late: LateMemory) -> io::Result<()> {
        if self.stream().state != DeviceState::Resuming {
            return Err(Errno::INVAL.into());
        }
        if self.with(|worker, device| worker.is_pinned_to_verbs(device))? {
            tracing::error!(
                "{} can't run before its memory is there: its VM is pinned to transport verbs, and the host's RDMA device would take pages that are still to come",
                self.nic.key
            );
            return Err(Errno::OPNOTSUPP.into());
        }
        let arrivals = self.memory.accept(late.arrivals, Expected::EventFd, "pages that have come")?;
        let table = self.memory.set_late(&late.ranges, &late.bitmap, late.wishes)?;
        self.with(move |worker, device| worker.set_late(device, table, arrivals))
    }

    fn take_dirty(&self, address: u64, size: u64) -> io::Result<Vec<u64>> {
        self.memory.take_dirty(address, size)
    }
}
