//! A server's handling of one client's messages: checks them and calls the device. Uses no sockets.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

use crate::device::{Device, DmaMapping, Interrupts, REGION_VGA, Region, SetInterrupts};
use crate::migration::{DeviceState, LateMemory, Migration};
use crate::region_info::{self, Encoded, RegionError};
use crate::version::{MAX_DMA_MAPS, Offer, PeerLimits};
use crate::wire::{
    DEVICE_PCI, DEVICE_RESETTABLE, DMA_READABLE, DMA_WRITABLE, DeviceFeature, DeviceInfo, DmaMap, DmaUnmap,
    HoldBack, IRQ_AUTOMASKED, IRQ_EVENTFD, IRQ_MASKABLE, IRQ_NO_RESIZE, IoFdsInfo, IrqInfo, IrqSet, LOG_PAGE,
    LateRange, LateStart, LoggingRange, LoggingReport, LoggingStart, MAX_LOG_RANGES, MAX_TRANSFER,
    MIGRATION_PRE_COPY, MIGRATION_STOP_COPY, MigData, MigDeviceState, RegionAccess, RegionInfo,
    SET_ACTION_MASK, SET_ACTION_TRIGGER, SET_ACTION_UNMASK, SET_ACTIONS, SET_DATA_BOOL, SET_DATA_EVENTFD,
    SET_DATA_MASK, SET_DATA_NONE, VERSION_MAJOR, VERSION_MINOR, Version, command, feature, wire_len,
};

/// Limit of interrupts per index of a device (MSI-X has 2048).
const MAX_INTERRUPTS: u32 = 4096;

/// One client's state.
pub(crate) struct Session<'a> {
    device: &'a dyn Device,
    regions: BTreeMap<u32, Region>,
    interrupts: BTreeMap<u32, Interrupts>,
    /// Mapped ranges: address to size.
    dma: BTreeMap<u64, u64>,
    peer: Option<PeerLimits>,
}

/// The reason for an error reply.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// The connection stays open.
    Error(io::Error),
    /// The connection ends after the reply.
    Fatal(io::Error),
}

impl Refusal {
    pub(crate) fn errno(&self) -> u32 {
        let (Self::Error(error) | Self::Fatal(error)) = self;
        let code = error.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
        u32::try_from(code).unwrap_or(0)
    }
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::Error(error)
    }
}

impl From<Errno> for Refusal {
    fn from(error: Errno) -> Self {
        Self::Error(error.into())
    }
}

impl<'a> Session<'a> {
    /// Creates the state for one client of `device`.
    pub(crate) fn new(device: &'a dyn Device) -> Result<Self, RegionError> {
        let mut regions = BTreeMap::new();
        for region in device.regions() {
            region_info::check(&region)?;
            regions.insert(region.index, region);
        }
        let interrupts = device.interrupts().into_iter().map(|kind| (kind.index, kind)).collect();
        Ok(Self { device, regions, interrupts, dma: BTreeMap::new(), peer: None })
    }

    /// Handles one command. The caller drops the reply if the client didn't request one.
    pub(crate) fn handle(
        &mut self,
        command: u16,
        body: &[u8],
        fds: Vec<OwnedFd>,
    ) -> Result<Encoded, Refusal> {
        if command == command::VERSION {
            return self.version(body);
        }
        let Some(peer) = self.peer else { return Err(Refusal::Fatal(Errno::PROTO.into())) };
        let body = match command {
            command::DMA_MAP => self.dma_map(body, fds)?,
            command::DMA_UNMAP => self.dma_unmap(body)?,
            command::DEVICE_GET_INFO => self.device_info(body)?,
            command::DEVICE_GET_REGION_INFO => return self.region_info(body),
            command::DEVICE_GET_REGION_IO_FDS => return self.region_io_fds(body, peer),
            command::DEVICE_GET_IRQ_INFO => self.interrupt_info(body)?,
            command::DEVICE_SET_IRQS => self.set_interrupts(body, fds)?,
            command::REGION_READ => self.region_read(body, peer)?,
            command::REGION_WRITE => self.region_write(body)?,
            command::DEVICE_RESET => {
                self.device.reset()?;
                Vec::new()
            }
            command::DEVICE_FEATURE => self.feature(body, fds)?,
            command::MIG_DATA_READ => self.read_data(body, peer)?,
            command::MIG_DATA_WRITE => self.write_data(body)?,
            _ => return Err(Errno::NOTSUP.into()),
        };
        Ok(Encoded { body, fds: Vec::new() })
    }

    fn migration(&self) -> Result<&'a dyn Migration, Refusal> {
        self.device.migration().ok_or(Errno::NOTSUP.into())
    }

    /// Parses the client's description of not-present memory.
    fn late_memory(&self, data: &[u8], fds: Vec<OwnedFd>) -> Result<LateMemory, Refusal> {
        let (start, rest) = LateStart::read_from_prefix(data).map_err(|_| Errno::INVAL)?;
        let size =
            usize::try_from(start.ranges).ok().map(|count| count.saturating_mul(size_of::<LateRange>()));
        if start.ranges == 0 || start.ranges > MAX_DMA_MAPS || size != Some(rest.len()) {
            return Err(Errno::INVAL.into());
        }
        let [bitmap, wishes, arrivals] = <[OwnedFd; 3]>::try_from(fds).map_err(|_| Errno::INVAL)?;
        let mut ranges = Vec::new();
        for bytes in rest.chunks_exact(size_of::<LateRange>()) {
            let range = fixed::<LateRange>(bytes)?;
            if self.dma.get(&range.address) != Some(&range.size) {
                return Err(Errno::NOENT.into());
            }
            ranges.push((range.address, range.size, range.bitmap));
        }
        Ok(LateMemory { ranges, bitmap, wishes, arrivals })
    }

    fn feature(&self, body: &[u8], fds: Vec<OwnedFd>) -> Result<Vec<u8>, Refusal> {
        let migration = self.migration()?;
        let (request, data) = DeviceFeature::read_from_prefix(body).map_err(|_| Errno::INVAL)?;
        let what = request.flags & feature::MASK;
        let how = request.flags & !feature::MASK;
        let settable = [
            feature::MIG_DEVICE_STATE,
            feature::DMA_LOGGING_START,
            feature::DMA_LOGGING_STOP,
            feature::HOLD_BACK,
            feature::LATE_MEMORY,
        ];
        let gettable = [feature::MIGRATION, feature::MIG_DEVICE_STATE, feature::DMA_LOGGING_REPORT];
        let (sets, gets) = (settable.contains(&what), gettable.contains(&what));
        if !sets && !gets {
            return Err(Errno::NOTTY.into());
        }
        let mut answer = Vec::new();
        match how {
            _ if how & feature::PROBE != 0 => {
                let asked = (how & feature::SET == 0 || sets) && (how & feature::GET == 0 || gets);
                if !asked || how & !(feature::PROBE | feature::SET | feature::GET) != 0 {
                    return Err(Errno::INVAL.into());
                }
            }
            feature::SET if sets => answer = self.set_feature(migration, what, data, fds)?,
            feature::GET if gets => answer = self.get_feature(migration, what, data)?,
            _ => return Err(Errno::INVAL.into()),
        }
        let argsz = wire_len(size_of::<DeviceFeature>() + answer.len());
        let mut reply = DeviceFeature { argsz, flags: request.flags }.as_bytes().to_vec();
        reply.extend_from_slice(&answer);
        Ok(reply)
    }

    fn set_feature(
        &self,
        migration: &dyn Migration,
        what: u32,
        data: &[u8],
        fds: Vec<OwnedFd>,
    ) -> Result<Vec<u8>, Refusal> {
        let mut answer = Vec::new();
        match what {
            feature::MIG_DEVICE_STATE => {
                let wanted = fixed::<MigDeviceState>(data)?;
                let state = DeviceState::from_wire(wanted.state).ok_or(Errno::INVAL)?;
                migration.set_state(state)?;
                answer.extend_from_slice(wanted.as_bytes());
            }
            feature::DMA_LOGGING_START => {
                let (start, ranges) = LoggingStart::read_from_prefix(data).map_err(|_| Errno::INVAL)?;
                let size = usize::try_from(start.ranges)
                    .ok()
                    .map(|count| count.saturating_mul(size_of::<LoggingRange>()));
                if start.page_size != LOG_PAGE || start.ranges > MAX_LOG_RANGES || size != Some(ranges.len())
                {
                    return Err(Errno::INVAL.into());
                }
                // The device logs all of the client's memory, which includes these ranges.
                migration.start_logging()?;
            }
            feature::HOLD_BACK => {
                let percent = u8::try_from(fixed::<HoldBack>(data)?.percent).map_err(|_| Errno::INVAL)?;
                if percent > 99 {
                    return Err(Errno::INVAL.into());
                }
                migration.hold_back(percent)?;
            }
            feature::LATE_MEMORY => migration.late_memory(self.late_memory(data, fds)?)?,
            _ => migration.stop_logging()?,
        }
        Ok(answer)
    }

    fn get_feature(&self, migration: &dyn Migration, what: u32, data: &[u8]) -> Result<Vec<u8>, Refusal> {
        let mut answer = Vec::new();
        match what {
            feature::MIGRATION => {
                answer.extend_from_slice((MIGRATION_STOP_COPY | MIGRATION_PRE_COPY).as_bytes());
            }
            feature::MIG_DEVICE_STATE => {
                let state = MigDeviceState { state: migration.state() as u32, data_fd: u32::MAX };
                answer.extend_from_slice(state.as_bytes());
            }
            _ => {
                let report = fixed::<LoggingReport>(data)?;
                let end = report.address.checked_add(report.size).ok_or(Errno::INVAL)?;
                let most = u64::from(MAX_TRANSFER) / 8 * 64 * LOG_PAGE;
                let known = self.dma.range(..=report.address).next_back();
                let within = known.is_some_and(|(start, size)| end <= start.saturating_add(*size));
                if report.page_size != LOG_PAGE || report.size == 0 || report.size > most || !within {
                    return Err(Errno::INVAL.into());
                }
                let words = migration.take_dirty(report.address, report.size)?;
                answer.extend_from_slice(report.as_bytes());
                answer.extend_from_slice(words.as_bytes());
            }
        }
        Ok(answer)
    }

    fn read_data(&self, body: &[u8], peer: PeerLimits) -> Result<Vec<u8>, Refusal> {
        let request = fixed::<MigData>(body)?;
        if request.size == 0 || request.size > peer.max_transfer.min(MAX_TRANSFER) {
            return Err(Errno::INVAL.into());
        }
        let most = usize::try_from(request.size).map_err(|_| Errno::INVAL)?;
        let mut data = self.migration()?.read_data(most)?;
        data.truncate(most);
        let head = MigData { argsz: wire_len(size_of::<MigData>() + data.len()), size: wire_len(data.len()) };
        Ok([head.as_bytes(), &data].concat())
    }

    fn write_data(&self, body: &[u8]) -> Result<Vec<u8>, Refusal> {
        let (head, data) = MigData::read_from_prefix(body).map_err(|_| Errno::INVAL)?;
        if usize::try_from(head.size) != Ok(data.len()) {
            return Err(Errno::INVAL.into());
        }
        self.migration()?.write_data(data)?;
        Ok(MigData { argsz: wire_len(size_of::<MigData>()), size: 0 }.as_bytes().to_vec())
    }

    fn version(&mut self, body: &[u8]) -> Result<Encoded, Refusal> {
        let fatal = |error: Errno| Refusal::Fatal(error.into());
        if self.peer.is_some() {
            return Err(Errno::INVAL.into());
        }
        let (version, data) = Version::read_from_prefix(body).map_err(|_| fatal(Errno::INVAL))?;
        if version.major != VERSION_MAJOR {
            return Err(fatal(Errno::NOTSUP));
        }
        let offer = Offer::parse(data).ok_or_else(|| fatal(Errno::INVAL))?;
        self.peer = Some(offer.limits());
        let answer = Version { major: VERSION_MAJOR, minor: version.minor.min(VERSION_MINOR) };
        let mut body = answer.as_bytes().to_vec();
        body.extend_from_slice(&offer.answer());
        Ok(Encoded { body, fds: Vec::new() })
    }

    fn dma_map(&mut self, body: &[u8], fds: Vec<OwnedFd>) -> Result<Vec<u8>, Refusal> {
        let map = fixed::<DmaMap>(body)?;
        let end = map.address.checked_add(map.size).ok_or(Errno::INVAL)?;
        let known_flags = DMA_READABLE | DMA_WRITABLE;
        if map.size == 0 || map.flags & !known_flags != 0 || fds.len() > 1 {
            return Err(Errno::INVAL.into());
        }
        if map.offset.checked_add(map.size).is_none() {
            return Err(Errno::INVAL.into());
        }
        // Ranges don't overlap, so the last one that begins before the end decides.
        let before = self.dma.range(..end).next_back();
        if before.is_some_and(|(start, size)| start.saturating_add(*size) > map.address) {
            return Err(Errno::EXIST.into());
        }
        if self.dma.len() >= usize::try_from(MAX_DMA_MAPS).unwrap_or(usize::MAX) {
            return Err(Errno::NOSPC.into());
        }
        self.device.dma_map(DmaMapping {
            address: map.address,
            size: map.size,
            readable: map.flags & DMA_READABLE != 0,
            writable: map.flags & DMA_WRITABLE != 0,
            fd: fds.into_iter().next(),
            fd_offset: map.offset,
        })?;
        self.dma.insert(map.address, map.size);
        Ok(Vec::new())
    }

    fn dma_unmap(&mut self, body: &[u8]) -> Result<Vec<u8>, Refusal> {
        let unmap = fixed::<DmaUnmap>(body)?;
        if unmap.flags != 0 {
            return Err(Errno::NOTSUP.into());
        }
        if self.dma.get(&unmap.address) != Some(&unmap.size) {
            return Err(Errno::NOENT.into());
        }
        self.device.dma_unmap(unmap.address, unmap.size)?;
        self.dma.remove(&unmap.address);
        Ok(DmaUnmap { argsz: wire_len(size_of::<DmaUnmap>()), ..unmap }.as_bytes().to_vec())
    }

    fn device_info(&self, body: &[u8]) -> Result<Vec<u8>, Refusal> {
        fixed::<DeviceInfo>(body)?;
        let count = |last: Option<&u32>, least: u32| last.map_or(0, |last| last.saturating_add(1)).max(least);
        let info = DeviceInfo {
            argsz: wire_len(size_of::<DeviceInfo>()),
            flags: DEVICE_RESETTABLE | DEVICE_PCI,
            num_regions: count(self.regions.keys().next_back(), REGION_VGA + 1),
            num_irqs: count(self.interrupts.keys().next_back(), crate::device::INTERRUPT_REQUEST + 1),
        };
        Ok(info.as_bytes().to_vec())
    }

    fn region_info(&self, body: &[u8]) -> Result<Encoded, Refusal> {
        let wanted = fixed::<RegionInfo>(body)?;
        let region = self.regions.get(&wanted.index);
        if region.is_none() && wanted.index > REGION_VGA {
            return Err(Errno::INVAL.into());
        }
        Ok(region_info::encode(wanted.index, region, wanted.argsz))
    }

    fn region_io_fds(&self, body: &[u8], peer: PeerLimits) -> Result<Encoded, Refusal> {
        let wanted = fixed::<IoFdsInfo>(body)?;
        if wanted.flags != 0 || wanted.count != 0 {
            return Err(Errno::INVAL.into());
        }
        let region = self.regions.get(&wanted.index).ok_or(Errno::INVAL)?;
        Ok(region_info::encode_io_fds(region, wanted.argsz, peer.max_fds)?)
    }

    fn interrupt_info(&self, body: &[u8]) -> Result<Vec<u8>, Refusal> {
        let wanted = fixed::<IrqInfo>(body)?;
        let found = self.interrupts.get(&wanted.index);
        if found.is_none() && wanted.index > crate::device::INTERRUPT_REQUEST {
            return Err(Errno::INVAL.into());
        }
        let flags = found.map_or(0, |found| {
            let flags = &found.flags;
            [
                (flags.eventfd, IRQ_EVENTFD),
                (flags.maskable, IRQ_MASKABLE),
                (flags.automasked, IRQ_AUTOMASKED),
                (flags.no_resize, IRQ_NO_RESIZE),
            ]
            .iter()
            .fold(0, |bits, (set, bit)| bits | if *set { *bit } else { 0 })
        });
        let info = IrqInfo {
            argsz: wire_len(size_of::<IrqInfo>()),
            flags,
            index: wanted.index,
            count: found.map_or(0, |found| found.count),
        };
        Ok(info.as_bytes().to_vec())
    }

    fn set_interrupts(&self, body: &[u8], fds: Vec<OwnedFd>) -> Result<Vec<u8>, Refusal> {
        let (set, data) = IrqSet::read_from_prefix(body).map_err(|_| Errno::INVAL)?;
        let available = self.interrupts.get(&set.index).ok_or(Errno::INVAL)?.count.min(MAX_INTERRUPTS);
        let end = set.start.checked_add(set.count).ok_or(Errno::INVAL)?;
        if set.flags & !(SET_DATA_MASK | SET_ACTIONS) != 0 || end > available {
            return Err(Errno::INVAL.into());
        }
        let count = usize::try_from(set.count).map_err(|_| Errno::INVAL)?;
        let change = match (set.flags & SET_DATA_MASK, set.flags & SET_ACTIONS) {
            (SET_DATA_NONE, SET_ACTION_TRIGGER) if count == 0 && set.start == 0 => SetInterrupts::Disable,
            _ if count == 0 => return Err(Errno::INVAL.into()),
            (SET_DATA_EVENTFD, SET_ACTION_TRIGGER) if fds.is_empty() => {
                SetInterrupts::Eventfds((0..count).map(|_| None).collect())
            }
            (SET_DATA_EVENTFD, SET_ACTION_TRIGGER) if fds.len() == count => {
                SetInterrupts::Eventfds(fds.into_iter().map(Some).collect())
            }
            // Eventfds for masking are for devices that mask by themselves, which these servers don't support.
            (SET_DATA_EVENTFD, SET_ACTION_MASK | SET_ACTION_UNMASK) => return Err(Errno::NOTSUP.into()),
            (SET_DATA_NONE, action) => on_all(action, vec![true; count])?,
            (SET_DATA_BOOL, action) if data.len() == count => {
                on_all(action, data.iter().map(|byte| *byte != 0).collect())?
            }
            _ => return Err(Errno::INVAL.into()),
        };
        self.device.set_interrupts(set.index, set.start, set.count, change)?;
        Ok(Vec::new())
    }

    /// Returns the region if an access of `count` bytes is within it.
    fn access(&self, access: &RegionAccess) -> Result<&Region, Refusal> {
        let region = self.regions.get(&access.region).ok_or(Errno::INVAL)?;
        let end = access.offset.checked_add(u64::from(access.count)).ok_or(Errno::INVAL)?;
        if access.count == 0 || access.count > MAX_TRANSFER || end > region.size {
            return Err(Errno::INVAL.into());
        }
        Ok(region)
    }

    fn region_read(&self, body: &[u8], peer: PeerLimits) -> Result<Vec<u8>, Refusal> {
        let access = fixed::<RegionAccess>(body)?;
        if !self.access(&access)?.readable {
            return Err(Errno::ACCESS.into());
        }
        if access.count > peer.max_transfer {
            return Err(Errno::INVAL.into());
        }
        let mut body = access.as_bytes().to_vec();
        let head = body.len();
        body.resize(head + usize::try_from(access.count).map_err(|_| Errno::INVAL)?, 0);
        self.device.region_read(access.region, access.offset, &mut body[head..])?;
        Ok(body)
    }

    fn region_write(&self, body: &[u8]) -> Result<Vec<u8>, Refusal> {
        let (access, data) = RegionAccess::read_from_prefix(body).map_err(|_| Errno::INVAL)?;
        if !self.access(&access)?.writable {
            return Err(Errno::ACCESS.into());
        }
        if usize::try_from(access.count) != Ok(data.len()) {
            return Err(Errno::INVAL.into());
        }
        self.device.region_write(access.region, access.offset, data)?;
        Ok(access.as_bytes().to_vec())
    }
}

fn on_all(action: u32, which: Vec<bool>) -> Result<SetInterrupts, Refusal> {
    match action {
        SET_ACTION_TRIGGER => Ok(SetInterrupts::Trigger(which)),
        SET_ACTION_MASK => Ok(SetInterrupts::Mask(which)),
        SET_ACTION_UNMASK => Ok(SetInterrupts::Unmask(which)),
        _ => Err(Errno::INVAL.into()),
    }
}

/// Parses a request that has only its fixed part.
fn fixed<T: FromBytes>(body: &[u8]) -> Result<T, Refusal> {
    T::read_from_bytes(body).map_err(|_| Errno::INVAL.into())
}
