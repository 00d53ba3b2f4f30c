//! One connection to a server, from the first message to its loss.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};

use pci::function::{BarKind, BarLayout, Doorbell};
use telemetry::guest_log::GuestLog;
use vfio_user_protocol::client::{Client, ClientError};
use vfio_user_protocol::device::{INTERRUPT_INTX, INTERRUPT_MSIX, REGION_CONFIG, RegionMapping};
use vfio_user_protocol::doorbell_mode::{self, DoorbellMode};

use super::events::VectorEvent;
use super::function::DmaRange;
use super::lock;
use super::registers::Server;
use super::shape::Shape;

const PAGE: u64 = 4096;

/// Kind of interrupts for which the server has eventfds. VFIO supports one kind at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InterruptMode {
    None,
    Intx,
    Msix,
}

/// A part of a BAR that is the server's memory.
#[derive(Debug, Clone)]
pub(super) struct MappedRange {
    pub bar: u8,
    pub area: RegionMapping,
}

/// A connection. Usable until [`Client::is_failed`].
pub(super) struct Link {
    pub client: Arc<Client>,
    /// Ranges that may be mapped, without MSI-X pages.
    pub ranges: Vec<MappedRange>,
    pub doorbells: Vec<Doorbell>,
    interrupt_mode: Mutex<InterruptMode>,
    log: GuestLog,
}

impl Link {
    /// Reads which ranges may be mapped, and sends the server the guest's memory.
    pub(super) fn new(client: Arc<Client>, shape: &Shape, ram: &[DmaRange]) -> Result<Self, ClientError> {
        let mut ranges = Vec::new();
        let mut doorbells = Vec::new();
        for bar in &shape.bars {
            let region = client.region(bar.index.into())?;
            if bar.kind != BarKind::Io {
                let areas = region.mappings.iter().flat_map(|area| without_msix(shape, bar, area));
                ranges.extend(areas.map(|area| MappedRange { bar: bar.index, area }));
            }
            for io_fd in client.region_io_fds(bar.index.into())? {
                let Ok(width) = u8::try_from(io_fd.size) else { continue };
                // KVM requires a width if there is a value to match.
                let impossible = width == 0 && io_fd.datamatch.is_some();
                let end = io_fd.offset.checked_add(io_fd.size.max(1));
                if impossible || end.is_none_or(|end| end > bar.size) {
                    continue;
                }
                doorbells.push(Doorbell {
                    bar: bar.index,
                    offset: io_fd.offset,
                    width,
                    datamatch: io_fd.datamatch,
                    fd: io_fd.fd,
                });
            }
        }
        for range in ram {
            client.dma_map(range.file.as_fd(), range.offset, range.address, range.size, true)?;
        }
        Ok(Self {
            client,
            ranges,
            doorbells,
            interrupt_mode: Mutex::new(InterruptMode::None),
            log: GuestLog::new(),
        })
    }

    /// Sends the server eventfds for one kind of interrupts, and removes those of the other kind.
    pub(super) fn set_interrupt_mode(
        &self,
        wanted: InterruptMode,
        vectors: &[VectorEvent],
        intx: BorrowedFd<'_>,
    ) -> Result<(), ClientError> {
        let mut interrupt_mode = lock(&self.interrupt_mode);
        if *interrupt_mode == wanted {
            return Ok(());
        }
        match *interrupt_mode {
            InterruptMode::None => {}
            InterruptMode::Intx => self.client.disable_interrupts(INTERRUPT_INTX)?,
            InterruptMode::Msix => self.client.disable_interrupts(INTERRUPT_MSIX)?,
        }
        *interrupt_mode = InterruptMode::None;
        match wanted {
            InterruptMode::None => {}
            InterruptMode::Intx => self.client.set_eventfds(INTERRUPT_INTX, 0, &[Some(intx)])?,
            InterruptMode::Msix => {
                let fds: Vec<_> = vectors.iter().map(VectorEvent::fd).collect();
                self.client.set_eventfds(INTERRUPT_MSIX, 0, &fds)?;
            }
        }
        *interrupt_mode = wanted;
        Ok(())
    }

    /// Sends the eventfd of doorbell mode. The mode is trapped from then on.
    pub(super) fn start_doorbell_mode(&self, event: BorrowedFd<'_>) -> Result<(), ClientError> {
        self.client.set_eventfds(doorbell_mode::INTERRUPT, 0, &[Some(event)])?;
        self.report_mode(DoorbellMode::Trapped)
    }

    /// The mode that the server requests; `None` if the value is invalid.
    pub(super) fn read_requested_mode(&self) -> Result<Option<DoorbellMode>, ClientError> {
        let mut wanted = [0; 4];
        self.client.region_read(doorbell_mode::REGION, doorbell_mode::WANTED_OFFSET, &mut wanted)?;
        Ok(DoorbellMode::from_register(u32::from_le_bytes(wanted)))
    }

    /// Reports the mode in force to the server.
    pub(super) fn report_mode(&self, mode: DoorbellMode) -> Result<(), ClientError> {
        let value = mode.to_register().to_le_bytes();
        self.client.region_write(doorbell_mode::REGION, doorbell_mode::REACHED_OFFSET, &value)
    }

    /// The guest has accessed the device: the server may raise the level-triggered interrupt again.
    pub(super) fn unmask_intx(&self) -> Result<(), ClientError> {
        self.client.mask_interrupt(INTERRUPT_INTX, 0, false)
    }
}

impl Server for Link {
    fn read(&self, offset: u16, data: &mut [u8]) -> bool {
        self.client.region_read(REGION_CONFIG, offset.into(), data).is_ok()
    }

    fn write(&self, offset: u16, data: &[u8]) {
        if let Err(error) = self.client.region_write(REGION_CONFIG, offset.into(), data) {
            telemetry::guest_warn!(self.log, offset, %error, "A vfio-user server refused a configuration write");
        }
    }
}

/// Stands in for a lost connection: reads return the power-on state, and writes are dropped.
pub(super) struct DisconnectedServer;

impl Server for DisconnectedServer {
    fn read(&self, _: u16, _: &mut [u8]) -> bool {
        false
    }

    fn write(&self, _: u16, _: &[u8]) {}
}

/// The parts of a mappable area without the MSI-X table and its pending bits, which the monitor emulates.
fn without_msix(shape: &Shape, bar: &BarLayout, area: &RegionMapping) -> Vec<RegionMapping> {
    let mut forbidden: Vec<(u64, u64)> = Vec::new();
    if let Some((_, layout)) = &shape.msix {
        for (of, offset, size) in [
            (layout.table_bar(), layout.table_offset(), layout.table_size()),
            (layout.pba_bar(), layout.pba_offset(), layout.pba_size()),
        ] {
            if of == bar.index {
                let start = u64::from(offset) / PAGE * PAGE;
                forbidden.push((start, (u64::from(offset) + size).next_multiple_of(PAGE)));
            }
        }
    }
    forbidden.sort_unstable();
    // The client has checked that the area is inside its region. The BAR may be smaller than the region.
    let end = area.offset.saturating_add(area.size).min(bar.size);
    let mut parts = Vec::new();
    let mut at = area.offset;
    for (from, to) in forbidden {
        if from > at {
            parts.push((at, from.min(end)));
        }
        at = at.max(to);
    }
    parts.push((at, end));
    parts
        .into_iter()
        .filter(|(from, to)| from < to)
        .map(|(from, to)| RegionMapping {
            offset: from,
            size: to - from,
            fd: Arc::clone(&area.fd),
            fd_offset: area.fd_offset + (from - area.offset),
        })
        .collect()
}
