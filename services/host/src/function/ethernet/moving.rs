//! The function's state as its client reads and writes it. The state is small, and copied after the device has stopped.

use std::io;
use std::sync::{Arc, MutexGuard, PoisonError};

use dma::Dma as _;
use rustix::io::Errno;
use vfio_user_protocol::migration::{DeviceState, LateMemory, Migration};
use vmxnet3::saved::SavedVmxnet3;

use super::{EthernetFunction, Vectors, rules};
use crate::function::descriptors::Expected;
use crate::function::memory::await_memory;
use crate::function::stream::{Stream, failed};
use crate::migration::stream::{Record, StreamError};

/// The place of a device whose VM arrives.
#[derive(Debug, Default)]
pub(super) struct Coming {
    begun: bool,
    saved: Option<SavedVmxnet3>,
}

impl EthernetFunction {
    pub(super) fn stream(&self) -> MutexGuard<'_, Stream> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn coming(&self) -> MutexGuard<'_, Coming> {
        self.coming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refused(&self, what: &str, error: &(dyn std::error::Error + 'static)) -> io::Error {
        failed(&self.nic.key.vm, &self.nic.key.name, what, error)
    }

    /// Stops the device, whose vCPUs are suspended. Frames that arrive from here on are lost, as on a wire.
    fn stop(&self, stream: &mut Stream) -> io::Result<()> {
        let device = self.device()?;
        device.set_bus_master(false);
        let saved = device.save().map_err(|error| self.refused("be saved", &error))?;
        let bytes = serde_json::to_vec(&saved).map_err(|error| self.refused("be saved", &error))?;
        let (mac, segment) = (self.config.mac.0, self.network.name().to_owned());
        stream.clear();
        stream.push(&Record::Begin { mac, segment });
        stream.push(&Record::Function(bytes));
        Ok(())
    }

    /// Adds the arrived device to its segment.
    fn arrive(&self) -> io::Result<()> {
        let Some(saved) = self.coming().saved.take() else { return Ok(()) };
        let events = self.events.clone().ok_or(Errno::INVAL)?;
        let interrupts = Box::new(Vectors(Arc::clone(&self.msix)));
        let attached =
            self.network.ethernet().attach_arrived(self.config.clone(), rules(), interrupts, saved, events);
        let device = attached.map_err(|error| self.refused("come here", &error))?;
        device.set_bus_master(self.header.bus_master());
        device.set_memory(Some(self.memory.table()));
        self.plugged(device);
        Ok(())
    }

    fn record(&self, record: Record) -> io::Result<()> {
        let mut coming = self.coming();
        match record {
            Record::Begin { mac, segment } if !coming.begun => {
                if (mac, segment.as_str()) != (self.config.mac.0, self.network.name()) {
                    let text = |mac, segment: &str| {
                        format!("a NIC with address {} in segment {segment}", crate::identity::mac_text(mac))
                    };
                    let found = text(mac, &segment);
                    let own = text(self.config.mac.0, self.network.name());
                    return Err(self.refused("come here", &StreamError::OtherDevice { found, own }));
                }
                coming.begun = true;
                Ok(())
            }
            Record::Function(bytes) if coming.begun && coming.saved.is_none() => {
                let saved = serde_json::from_slice(&bytes);
                coming.saved = Some(saved.map_err(|error| self.refused("come here", &error))?);
                Ok(())
            }
            _ => Err(self.refused("come here", &StreamError::Order("another record"))),
        }
    }
}

impl Migration for EthernetFunction {
    fn set_state(&self, wanted: DeviceState) -> io::Result<()> {
        use DeviceState::{PreCopy, Resuming, Running, Stop, StopCopy};
        let mut stream = self.stream();
        match (stream.state, wanted) {
            (before, after) if before == after => return Ok(()),
            (Running, PreCopy) => stream.clear(),
            (Running | PreCopy, StopCopy) => self.stop(&mut stream)?,
            (Stop, Resuming) if self.nic.is_incoming() => {
                stream.clear();
                *self.coming() = Coming::default();
            }
            (Resuming, Stop) => {
                let whole = stream.end().and_then(|()| match &self.coming().saved {
                    Some(_) => Ok(()),
                    None => Err(StreamError::Order("no state")),
                });
                whole.map_err(|error| self.refused("come here", &error))?;
                let table = self.memory.table();
                if table.is_late() {
                    let mut ranges = Vec::new();
                    if let Some(saved) = &self.coming().saved {
                        saved.memory(&mut |address, len| ranges.push((address, len)));
                    }
                    await_memory(&table, ranges)?;
                }
            }
            (PreCopy | StopCopy | Stop, Running) => {
                if self.nic.is_locked() {
                    // The client doesn't decide how a migration ends.
                    return Err(Errno::BUSY.into());
                }
                self.arrive()?;
                self.device()?.set_bus_master(self.header.bus_master());
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
        match stream.state {
            DeviceState::PreCopy | DeviceState::StopCopy => Ok(stream.next(most)),
            _ => Err(Errno::INVAL.into()),
        }
    }

    fn write_data(&self, data: &[u8]) -> io::Result<()> {
        let records = {
            let mut stream = self.stream();
            if stream.state != DeviceState::Resuming {
                return Err(Errno::INVAL.into());
            }
            stream.take(data).map_err(|error| self.refused("come here", &error))?
        };
        records.into_iter().try_for_each(|record| self.record(record))
    }

    fn start_logging(&self) -> io::Result<()> {
        self.memory.set_dirty_log(true);
        // Only the segment's thread writes, and it has completed earlier requests then.
        self.device()?.catch_up();
        Ok(())
    }

    fn stop_logging(&self) -> io::Result<()> {
        self.memory.set_dirty_log(false);
        Ok(())
    }

    fn late_memory(&self, late: LateMemory) -> io::Result<()> {
        if self.stream().state != DeviceState::Resuming {
            return Err(Errno::INVAL.into());
        }
        // Frames without present buffers are dropped, so arrivals need no notification. An invalid descriptor is refused all the same.
        self.memory.accept(late.arrivals, Expected::EventFd, "pages that have come")?;
        self.memory.set_late(&late.ranges, &late.bitmap, late.wishes).map(drop)
    }

    fn take_dirty(&self, address: u64, size: u64) -> io::Result<Vec<u64>> {
        self.memory.take_dirty(address, size)
    }
}
