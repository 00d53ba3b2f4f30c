//! Wire format of messages: host byte order, natural alignment, as both sides are on one host.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Limit in bytes of a message in either direction: the largest transfer with its headers.
pub(crate) const MAX_MESSAGE: usize = HEADER + size_of::<RegionAccess>() + MAX_TRANSFER_LEN;
/// Limit in bytes of one read or write (`max_data_xfer_size`): the protocol's default.
pub(crate) const MAX_TRANSFER: u32 = 1 << 20;
const MAX_TRANSFER_LEN: usize = 1 << 20;
/// Limit of descriptors per message (`max_msg_fds`).
pub(crate) const MAX_FDS: usize = 64;
/// Limit in bytes of a version message's JSON text.
pub(crate) const MAX_VERSION_DATA: usize = 4096;
/// Size in bytes of [`Header`].
pub(crate) const HEADER: usize = size_of::<Header>();

/// Supported protocol version: 0.1.
pub(crate) const VERSION_MAJOR: u16 = 0;
/// Minor version.
pub(crate) const VERSION_MINOR: u16 = 1;

/// Message commands.
pub(crate) mod command {
    pub(crate) const VERSION: u16 = 1;
    pub(crate) const DMA_MAP: u16 = 2;
    pub(crate) const DMA_UNMAP: u16 = 3;
    pub(crate) const DEVICE_GET_INFO: u16 = 4;
    pub(crate) const DEVICE_GET_REGION_INFO: u16 = 5;
    pub(crate) const DEVICE_GET_REGION_IO_FDS: u16 = 6;
    pub(crate) const DEVICE_GET_IRQ_INFO: u16 = 7;
    pub(crate) const DEVICE_SET_IRQS: u16 = 8;
    pub(crate) const REGION_READ: u16 = 9;
    pub(crate) const REGION_WRITE: u16 = 10;
    pub(crate) const DEVICE_RESET: u16 = 13;
    pub(crate) const DEVICE_FEATURE: u16 = 16;
    pub(crate) const MIG_DATA_READ: u16 = 17;
    pub(crate) const MIG_DATA_WRITE: u16 = 18;
}

/// The type of a message, in the low bits of its flags.
pub(crate) const FLAG_TYPE_MASK: u32 = 0xF;
pub(crate) const FLAG_REPLY: u32 = 1;
pub(crate) const FLAG_NO_REPLY: u32 = 1 << 4;
pub(crate) const FLAG_ERROR: u32 = 1 << 5;

pub(crate) const DMA_READABLE: u32 = 1;
pub(crate) const DMA_WRITABLE: u32 = 1 << 1;

pub(crate) const DEVICE_RESETTABLE: u32 = 1;
pub(crate) const DEVICE_PCI: u32 = 1 << 1;

pub(crate) const REGION_READABLE: u32 = 1;
pub(crate) const REGION_WRITABLE: u32 = 1 << 1;
pub(crate) const REGION_MAPPABLE: u32 = 1 << 2;
pub(crate) const REGION_CAPABILITIES: u32 = 1 << 3;

pub(crate) const CAPABILITY_SPARSE: u16 = 1;
pub(crate) const CAPABILITY_TYPE: u16 = 2;

pub(crate) const IO_FD_IOEVENTFD: u32 = 0;
/// `KVM_IOEVENTFD_FLAG_DATAMATCH`: only writes of a value signal the eventfd.
pub(crate) const IO_FD_DATAMATCH: u32 = 1;

pub(crate) const IRQ_EVENTFD: u32 = 1;
pub(crate) const IRQ_MASKABLE: u32 = 1 << 1;
pub(crate) const IRQ_AUTOMASKED: u32 = 1 << 2;
pub(crate) const IRQ_NO_RESIZE: u32 = 1 << 3;

pub(crate) const SET_DATA_NONE: u32 = 1;
pub(crate) const SET_DATA_BOOL: u32 = 1 << 1;
pub(crate) const SET_DATA_EVENTFD: u32 = 1 << 2;
pub(crate) const SET_DATA_MASK: u32 = SET_DATA_NONE | SET_DATA_BOOL | SET_DATA_EVENTFD;
pub(crate) const SET_ACTION_MASK: u32 = 1 << 3;
pub(crate) const SET_ACTION_UNMASK: u32 = 1 << 4;
pub(crate) const SET_ACTION_TRIGGER: u32 = 1 << 5;
pub(crate) const SET_ACTIONS: u32 = SET_ACTION_MASK | SET_ACTION_UNMASK | SET_ACTION_TRIGGER;

/// Features of DEVICE_FEATURE, in the low half of its flags.
pub(crate) mod feature {
    pub(crate) const MASK: u32 = 0xFFFF;
    pub(crate) const GET: u32 = 1 << 16;
    pub(crate) const SET: u32 = 1 << 17;
    pub(crate) const PROBE: u32 = 1 << 18;
    pub(crate) const MIGRATION: u32 = 1;
    pub(crate) const MIG_DEVICE_STATE: u32 = 2;
    pub(crate) const DMA_LOGGING_START: u32 = 6;
    pub(crate) const DMA_LOGGING_STOP: u32 = 7;
    pub(crate) const DMA_LOGGING_REPORT: u32 = 8;
    /// Causeway's own feature, far from VFIO's numbers: [`super::HoldBack`].
    pub(crate) const HOLD_BACK: u32 = 0xCA01;
    /// Causeway's own feature for post-copy: [`super::LateStart`].
    pub(crate) const LATE_MEMORY: u32 = 0xCA02;
}

/// `VFIO_MIGRATION_STOP_COPY`: a stopped device's state can be transferred.
pub(crate) const MIGRATION_STOP_COPY: u64 = 1;
/// `VFIO_MIGRATION_PRE_COPY`: state can be transferred while the device runs.
pub(crate) const MIGRATION_PRE_COPY: u64 = 1 << 2;
/// Page size of DMA logging in bytes.
pub(crate) const LOG_PAGE: u64 = 4096;
/// Limit of ranges in a start of DMA logging.
pub(crate) const MAX_LOG_RANGES: u32 = 4096;

/// The start of every message.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct Header {
    pub id: u16,
    pub command: u16,
    /// Size of the whole message in bytes.
    pub size: u32,
    pub flags: u32,
    pub error: u32,
}

impl Header {
    pub(crate) fn is_command(&self) -> bool {
        self.flags & FLAG_TYPE_MASK == 0
    }

    pub(crate) fn is_reply(&self) -> bool {
        self.flags & FLAG_TYPE_MASK == FLAG_REPLY
    }

    pub(crate) fn no_reply(&self) -> bool {
        self.flags & FLAG_NO_REPLY != 0
    }
}

/// VERSION; JSON text with a terminating NUL follows.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct Version {
    pub major: u16,
    pub minor: u16,
}

/// Body of DMA_MAP: guest memory that the device may access.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct DmaMap {
    pub argsz: u32,
    pub flags: u32,
    pub offset: u64,
    pub address: u64,
    pub size: u64,
}

/// DMA_UNMAP and its reply.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct DmaUnmap {
    pub argsz: u32,
    pub flags: u32,
    pub address: u64,
    pub size: u64,
}

/// DEVICE_GET_INFO and its reply.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct DeviceInfo {
    pub argsz: u32,
    pub flags: u32,
    pub num_regions: u32,
    pub num_irqs: u32,
}

/// DEVICE_GET_REGION_INFO and its reply; capabilities follow in the reply.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct RegionInfo {
    pub argsz: u32,
    pub flags: u32,
    pub index: u32,
    pub cap_offset: u32,
    pub size: u64,
    pub offset: u64,
}

/// The start of every region capability.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct CapabilityHeader {
    pub id: u16,
    pub version: u16,
    pub next: u32,
}

/// Sparse mappings; areas follow.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct SparseHeader {
    pub areas: u32,
    pub reserved: u32,
}

/// One mappable area.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct SparseArea {
    pub offset: u64,
    pub size: u64,
}

/// Type of a device-specific region.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct RegionType {
    pub kind: u32,
    pub subkind: u32,
}

/// DEVICE_GET_REGION_IO_FDS and its reply; sub-regions follow in the reply.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct IoFdsInfo {
    pub argsz: u32,
    pub flags: u32,
    pub index: u32,
    pub count: u32,
}

/// One sub-region.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct IoFd {
    pub offset: u64,
    pub size: u64,
    pub fd_index: u32,
    pub kind: u32,
    pub flags: u32,
    pub padding: u32,
    pub datamatch: u64,
}

/// DEVICE_GET_IRQ_INFO and its reply.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct IrqInfo {
    pub argsz: u32,
    pub flags: u32,
    pub index: u32,
    pub count: u32,
}

/// DEVICE_SET_IRQS; booleans follow if the flags say so.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct IrqSet {
    pub argsz: u32,
    pub flags: u32,
    pub index: u32,
    pub start: u32,
    pub count: u32,
}

/// REGION_READ, REGION_WRITE and their replies; data follow.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct RegionAccess {
    pub offset: u64,
    pub region: u32,
    pub count: u32,
}

/// DEVICE_FEATURE and its reply; the feature's data follow.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct DeviceFeature {
    pub argsz: u32,
    pub flags: u32,
}

/// Feature MIG_DEVICE_STATE.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct MigDeviceState {
    pub state: u32,
    /// Unused: data are sent in messages.
    pub data_fd: u32,
}

/// Feature HOLD_BACK.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct HoldBack {
    pub percent: u32,
}

/// Feature LATE_MEMORY (post-copy). Ranges follow, and three descriptors: the bitmap, a Unix stream socket for page
/// requests, an eventfd for arrivals.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct LateStart {
    pub ranges: u32,
    pub reserved: u32,
}

/// A mapped range, and the offset of its bitmap in the file.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct LateRange {
    pub address: u64,
    pub size: u64,
    pub bitmap: u64,
}

/// Feature DMA_LOGGING_START; ranges follow.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct LoggingStart {
    pub page_size: u64,
    pub ranges: u32,
    pub reserved: u32,
}

/// A range to log.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct LoggingRange {
    pub address: u64,
    pub size: u64,
}

/// Feature DMA_LOGGING_REPORT; the bitmap follows in the reply.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct LoggingReport {
    pub address: u64,
    pub size: u64,
    pub page_size: u64,
}

/// MIG_DATA_READ and MIG_DATA_WRITE; data follow in the reply or the request, respectively.
#[derive(Debug, Clone, Copy, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct MigData {
    pub argsz: u32,
    pub size: u32,
}

const _: () = {
    assert!(size_of::<DeviceFeature>() == 8);
    assert!(size_of::<MigDeviceState>() == 8);
    assert!(size_of::<HoldBack>() == 4);
    assert!(size_of::<LateStart>() == 8);
    assert!(size_of::<LateRange>() == 24);
    assert!(size_of::<LoggingStart>() == 16);
    assert!(size_of::<LoggingRange>() == 16);
    assert!(size_of::<LoggingReport>() == 24);
    assert!(size_of::<MigData>() == 8);
    assert!(size_of::<Header>() == 16);
    assert!(size_of::<Version>() == 4);
    assert!(size_of::<DmaMap>() == 32);
    assert!(size_of::<DmaUnmap>() == 24);
    assert!(size_of::<DeviceInfo>() == 16);
    assert!(size_of::<RegionInfo>() == 32);
    assert!(size_of::<CapabilityHeader>() == 8);
    assert!(size_of::<SparseHeader>() == 8);
    assert!(size_of::<SparseArea>() == 16);
    assert!(size_of::<RegionType>() == 8);
    assert!(size_of::<IoFdsInfo>() == 16);
    assert!(size_of::<IoFd>() == 40);
    assert!(size_of::<IrqInfo>() == 16);
    assert!(size_of::<IrqSet>() == 20);
    assert!(size_of::<RegionAccess>() == 16);
    assert!(MAX_TRANSFER as usize == MAX_TRANSFER_LEN);
};

/// Converts a length that is known to be small to a wire field.
pub(crate) fn wire_len(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}
