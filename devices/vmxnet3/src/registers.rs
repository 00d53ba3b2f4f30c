//! Register offsets, command codes and limits (Linux `vmxnet3_defs.h`).

/// Limit of TX queues, and of RX queues, of an activation. Drivers of revision 1 decide themselves and use up to 8; later ones are limited
/// to one.
pub const QUEUES_MAX: u8 = 8;
/// Limit of interrupts in the driver-shared area.
pub const INTERRUPTS_MAX: u8 = 25;
/// Limit of descriptors of a ring: completions have 12 bits for an index.
pub const RING_MAX: u32 = 4096;
/// Limit of entries of a completion ring: RX has one per descriptor of both rings.
pub const COMPLETION_RING_MAX: u32 = 2 * RING_MAX;

/// Interrupt mask registers, one every 8 bytes (BAR 0).
pub const IMR: u64 = 0x000;
/// Producer index of TX queues, one every 8 bytes (BAR 0).
pub const TXPROD: u64 = 0x600;
/// Producer index of ring 0 of RX queues (BAR 0).
pub const RXPROD: u64 = 0x800;
/// Producer index of ring 1 of RX queues (BAR 0).
pub const RXPROD2: u64 = 0xA00;

/// Offered revisions; a write selects one (BAR 1).
pub const VRRS: u64 = 0x00;
/// Offered UPT versions (BAR 1).
pub const UVRS: u64 = 0x08;
/// Address of the driver-shared area, low half (BAR 1).
pub const DSAL: u64 = 0x10;
/// Address of the driver-shared area, high half (BAR 1).
pub const DSAH: u64 = 0x18;
/// Commands; a read returns the result of the last one (BAR 1).
pub const CMD: u64 = 0x20;
/// Station address, bytes 0 to 3 (BAR 1).
pub const MACL: u64 = 0x28;
/// Station address, bytes 4 to 5 (BAR 1).
pub const MACH: u64 = 0x30;
/// Interrupt cause of INTx (BAR 1); always 0, there is no INTx.
pub const ICR: u64 = 0x38;
/// Acknowledges events (BAR 1).
pub const ECR: u64 = 0x40;

/// Value of VRRS: revisions 7 and 1. Revision 7 limits the driver to one queue pair and declares no tunnel offload. Revision 1 is for
/// drivers that support nothing newer.
pub const REVISIONS: u32 = 0x41;
/// Value of UVRS.
pub const UPT_VERSIONS: u32 = 1;

/// Command codes.
pub mod command {
    /// Starts the device from the driver-shared area.
    pub const ACTIVATE_DEV: u32 = 0xCAFE_0000;
    /// Stops it; no DMA after the write returns.
    pub const QUIESCE_DEV: u32 = 0xCAFE_0001;
    /// Resets the device.
    pub const RESET_DEV: u32 = 0xCAFE_0002;
    /// Reads the receive mode again.
    pub const UPDATE_RX_MODE: u32 = 0xCAFE_0003;
    /// Reads the table of group addresses again.
    pub const UPDATE_MAC_FILTERS: u32 = 0xCAFE_0004;
    /// Reads the table of VLANs again.
    pub const UPDATE_VLAN_FILTERS: u32 = 0xCAFE_0005;
    /// Reads the features again.
    pub const UPDATE_FEATURE: u32 = 0xCAFE_0009;
    /// Writes queue states into guest memory.
    pub const GET_QUEUE_STATUS: u32 = 0xF00D_0000;
    /// Writes statistics into guest memory.
    pub const GET_STATS: u32 = 0xF00D_0001;
    /// Link speed in Mbit/s times 65536, plus 1 when up.
    pub const GET_LINK: u32 = 0xF00D_0002;
    /// Built-in address, bytes 0 to 3.
    pub const GET_PERM_MAC_LO: u32 = 0xF00D_0003;
    /// Built-in address, bytes 4 to 5.
    pub const GET_PERM_MAC_HI: u32 = 0xF00D_0004;
    /// PCI device.
    pub const GET_DID_LO: u32 = 0xF00D_0005;
    /// PCI revision.
    pub const GET_DID_HI: u32 = 0xF00D_0006;
    /// Interrupt type and mask mode; 0 is "automatic" for both.
    pub const GET_CONF_INTR: u32 = 0xF00D_0008;
    /// Bytes per entry of the TX data ring.
    pub const GET_TXDATA_DESC_SIZE: u32 = 0xF00D_000A;
    /// Limit of queues: RX times 256 plus TX.
    pub const GET_MAX_QUEUES_CONF: u32 = 0xF00D_000F;
}

/// Event bits of the shared word `ecr`.
pub mod event {
    /// An RX queue stopped.
    pub const RQ_ERROR: u32 = 1;
    /// A TX queue stopped.
    pub const TQ_ERROR: u32 = 2;
    /// The link went up or down.
    pub const LINK: u32 = 4;
}

/// Bits of `uptFeatures`.
pub mod feature {
    /// The device reports checksums of received frames.
    pub const RXCSUM: u64 = 1;
    /// The device removes VLAN tags from received frames.
    pub const RXVLAN: u64 = 4;
}

/// Bits of `rxMode`.
pub mod rx_mode {
    /// Accept frames to the station address.
    pub const UNICAST: u32 = 1;
    /// Accept frames to groups in the table.
    pub const MULTICAST: u32 = 2;
    /// Accept broadcast frames.
    pub const BROADCAST: u32 = 4;
    /// Accept frames to any group.
    pub const ALL_MULTICAST: u32 = 8;
    /// Accept all frames.
    pub const PROMISCUOUS: u32 = 16;
}

/// Why a queue is stopped, in its status (Linux `VMXNET3_ERR_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueError {
    /// A packet without a last descriptor.
    NoEop,
    /// A packet with too many descriptors or bytes.
    BigPacket,
    /// An unsupported kind of descriptor.
    NotSupported,
    /// An RX buffer of length 0.
    SmallBuffer,
    /// A descriptor or ring outside of the guest's memory.
    Invalid,
}

impl QueueError {
    /// The code that the guest reads.
    #[must_use]
    pub fn code(self) -> u32 {
        match self {
            Self::NoEop => 0x8000_0000,
            Self::BigPacket => 0x8000_0002,
            Self::NotSupported => 0x8000_0003,
            Self::SmallBuffer => 0x8000_0004,
            Self::Invalid => 0x8000_0007,
        }
    }
}

impl std::fmt::Display for QueueError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::NoEop => "a packet has no last descriptor",
            Self::BigPacket => "a packet has too many descriptors or bytes",
            Self::NotSupported => "a descriptor is of a kind that was not offered",
            Self::SmallBuffer => "a receive buffer has no room",
            Self::Invalid => "a descriptor or ring lies outside of the guest's memory",
        })
    }
}

impl From<dma::DmaFault> for QueueError {
    fn from(_: dma::DmaFault) -> Self {
        Self::Invalid
    }
}
