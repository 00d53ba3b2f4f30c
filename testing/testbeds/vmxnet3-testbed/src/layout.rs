//! Where Linux's driver puts the fields of the driver-shared area and of the queue table (`vmxnet3_defs.h`), stated
//! apart from the device, so that both agree with the driver and not only with each other.

/// First word of the area.
pub const MAGIC: u32 = 0xBABE_FEE1;
/// Bytes of a queue's entry in the queue table.
pub const QUEUE_ENTRY: u64 = 256;

/// Offsets in the area and in a queue's entry.
pub mod offset {
    /// `misc.uptFeatures`.
    pub const FEATURES: u64 = 24;
    /// `intrConf.intrCtrl`.
    pub const INTERRUPT_CONTROL: u64 = 108;
    /// `rxFilterConf.rxMode`.
    pub const RX_MODE: u64 = 120;
    /// `rxFilterConf.mfTableLen`.
    pub const MULTICAST_LENGTH: u64 = 124;
    /// `rxFilterConf.mfTablePA`.
    pub const MULTICAST_TABLE: u64 = 128;
    /// `rxFilterConf.vfTable`.
    pub const VLAN_TABLE: u64 = 136;
    /// `ecr`.
    pub const EVENTS: u64 = 696;
    /// In a TX queue's entry: `ctrl.txThreshold`.
    pub const TX_THRESHOLD: u64 = 4;
    /// In an RX queue's entry: `ctrl.updateRxProd`.
    pub const UPDATE_RX_PROD: u64 = 0;
    /// In both queues' entries: `status.stopped`.
    pub const STOPPED: u64 = 80;
    /// In both queues' entries: `status.error`.
    pub const ERROR: u64 = 84;
    /// In both queues' entries: `stats`.
    pub const STATISTICS: u64 = 88;
}
