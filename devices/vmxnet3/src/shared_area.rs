//! The driver-shared area and the queue table, copied once and validated.

use dma::access::read_array;
use dma::{Dma, DmaFault};

use crate::pci::VECTORS;
use crate::registers::{COMPLETION_RING_MAX, INTERRUPTS_MAX, QUEUES_MAX, RING_MAX};

/// Bytes of the area that every driver has. Later drivers append fields that only devices with many queues need.
const AREA: usize = 720;
/// First word of the area.
pub(crate) const MAGIC: u32 = 0xBABE_FEE1;
/// Bytes of a queue's entry in the queue table.
pub(crate) const QUEUE_ENTRY: u64 = 256;

/// Offsets in the area that the device reads or writes again while it is active.
pub(crate) mod offset {
    pub const FEATURES: u64 = 24;
    pub const INTERRUPT_CONTROL: u64 = 108;
    pub const RX_MODE: u64 = 120;
    pub const MULTICAST_LENGTH: u64 = 124;
    pub const MULTICAST_TABLE: u64 = 128;
    pub const VLAN_TABLE: u64 = 136;
    pub const EVENTS: u64 = 696;
    /// In a TX queue's entry.
    pub const TX_THRESHOLD: u64 = 4;
    /// In an RX queue's entry.
    pub const UPDATE_RX_PROD: u64 = 0;
    /// In both queues' entries.
    pub const STOPPED: u64 = 80;
    /// In both queues' entries.
    pub const ERROR: u64 = 84;
    /// In both queues' entries.
    pub const STATISTICS: u64 = 88;
}

/// Why the device can't be activated. The guest gets a non-zero result, the log gets the text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ActivationError {
    /// No memory is mapped, or bus mastering is disabled.
    #[error("The device has no guest memory; map it, and set the bus master bit")]
    NoMemory,
    /// The area doesn't begin with `MAGIC`.
    #[error("The driver-shared area at {address:#x} begins with {magic:#x} instead of 0xbabefee1")]
    Magic {
        /// Guest address.
        address: u64,
        /// Value found.
        magic: u32,
    },
    /// A number is out of range.
    #[error("The driver asks for {what} = {value}, possible are {low} to {high}")]
    Range {
        /// Name of the field.
        what: &'static str,
        /// Its value.
        value: u64,
        /// Lower bound.
        low: u64,
        /// Upper bound.
        high: u64,
    },
    /// An address isn't aligned.
    #[error("The driver's {what} at {address:#x} is not aligned to {alignment} bytes")]
    Alignment {
        /// Name of the structure.
        what: &'static str,
        /// Guest address.
        address: u64,
        /// Required alignment, bytes.
        alignment: u64,
    },
    /// A structure is outside of the guest's memory.
    #[error("The driver's {what} is not in the guest's memory")]
    Memory {
        /// Name of the structure.
        what: &'static str,
        /// The failed access.
        #[source]
        source: DmaFault,
    },
}

/// The fields of the driver-shared area that the device uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DriverShared {
    pub features: u64,
    pub queue_table: u64,
    pub mtu: u32,
    pub tx_queues: u8,
    pub rx_queues: u8,
    pub auto_mask: bool,
    pub interrupts: u8,
    pub event_vector: u8,
    pub rx_mode: u32,
}

/// Layout of a TX queue, from the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct TxLayout {
    pub entry: u64,
    pub ring: u64,
    pub ring_size: u32,
    pub completion: u64,
    pub completion_size: u32,
    pub vector: u8,
}

/// Layout of an RX queue, from the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct RxLayout {
    pub entry: u64,
    pub rings: [u64; 2],
    pub ring_sizes: [u32; 2],
    pub completion: u64,
    pub completion_size: u32,
    pub vector: u8,
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn range(what: &'static str, value: impl Into<u64>, low: u64, high: u64) -> Result<(), ActivationError> {
    let value = value.into();
    if (low..=high).contains(&value) {
        Ok(())
    } else {
        Err(ActivationError::Range { what, value, low, high })
    }
}

fn aligned(what: &'static str, address: u64, alignment: u64) -> Result<(), ActivationError> {
    if address.is_multiple_of(alignment) {
        Ok(())
    } else {
        Err(ActivationError::Alignment { what, address, alignment })
    }
}

fn memory(what: &'static str) -> impl Fn(DmaFault) -> ActivationError {
    move |source| ActivationError::Memory { what, source }
}

impl DriverShared {
    /// Copies and validates the area at `address`.
    pub fn read(memory_of: &impl Dma, address: u64) -> Result<Self, ActivationError> {
        aligned("shared area", address, 8)?;
        let bytes: [u8; AREA] = read_array(memory_of, address).map_err(memory("shared area"))?;
        let magic = u32_at(&bytes, 0);
        if magic != MAGIC {
            return Err(ActivationError::Magic { address, magic });
        }
        let shared = Self {
            features: u64_at(&bytes, 24),
            queue_table: u64_at(&bytes, 40),
            mtu: u32_at(&bytes, 56),
            tx_queues: bytes[62],
            rx_queues: bytes[63],
            auto_mask: bytes[80] != 0,
            interrupts: bytes[81],
            event_vector: bytes[82],
            rx_mode: u32_at(&bytes, 120),
        };
        range("TX queues", shared.tx_queues, 1, QUEUES_MAX.into())?;
        range("RX queues", shared.rx_queues, 1, QUEUES_MAX.into())?;
        range("MTU", shared.mtu, 60, crate::frame::MTU_MAX)?;
        range("interrupts", shared.interrupts, 1, u64::from(INTERRUPTS_MAX).min(VECTORS.into()))?;
        range("event interrupt", shared.event_vector, 0, u64::from(shared.interrupts) - 1)?;
        aligned("queue table", shared.queue_table, 8)?;
        Ok(shared)
    }

    /// Copies and validates the queue table: TX entries, then RX entries.
    pub fn read_queues(
        &self,
        memory_of: &impl Dma,
    ) -> Result<(Vec<TxLayout>, Vec<RxLayout>), ActivationError> {
        let overflow = |address| DmaFault { address, len: QUEUE_ENTRY };
        let entry = |index: u8| -> Result<u64, ActivationError> {
            self.queue_table
                .checked_add(QUEUE_ENTRY * u64::from(index))
                .ok_or_else(|| memory("queue table")(overflow(self.queue_table)))
        };
        let mut tx = Vec::with_capacity(self.tx_queues.into());
        for index in 0..self.tx_queues {
            tx.push(self.read_tx(memory_of, entry(index)?)?);
        }
        let mut rx = Vec::with_capacity(self.rx_queues.into());
        for index in 0..self.rx_queues {
            rx.push(self.read_rx(memory_of, entry(self.tx_queues + index)?)?);
        }
        Ok((tx, rx))
    }

    fn read_tx(&self, memory_of: &impl Dma, entry: u64) -> Result<TxLayout, ActivationError> {
        let bytes: [u8; 256] = read_array(memory_of, entry).map_err(memory("queue table"))?;
        let layout = TxLayout {
            entry,
            ring: u64_at(&bytes, 16),
            ring_size: u32_at(&bytes, 56),
            completion: u64_at(&bytes, 32),
            completion_size: u32_at(&bytes, 64),
            vector: bytes[72],
        };
        range("TX interrupt", layout.vector, 0, u64::from(self.interrupts) - 1)?;
        ring(memory_of, "TX ring", layout.ring, layout.ring_size, RING_MAX)?;
        ring(
            memory_of,
            "TX completion ring",
            layout.completion,
            layout.completion_size,
            COMPLETION_RING_MAX,
        )?;
        Ok(layout)
    }

    fn read_rx(&self, memory_of: &impl Dma, entry: u64) -> Result<RxLayout, ActivationError> {
        let bytes: [u8; 256] = read_array(memory_of, entry).map_err(memory("queue table"))?;
        let layout = RxLayout {
            entry,
            rings: [u64_at(&bytes, 16), u64_at(&bytes, 24)],
            ring_sizes: [u32_at(&bytes, 56), u32_at(&bytes, 60)],
            completion: u64_at(&bytes, 32),
            completion_size: u32_at(&bytes, 64),
            vector: bytes[72],
        };
        range("RX interrupt", layout.vector, 0, u64::from(self.interrupts) - 1)?;
        ring(memory_of, "RX ring 0", layout.rings[0], layout.ring_sizes[0], RING_MAX)?;
        if layout.ring_sizes[1] > 0 {
            ring(memory_of, "RX ring 1", layout.rings[1], layout.ring_sizes[1], RING_MAX)?;
        }
        ring(
            memory_of,
            "RX completion ring",
            layout.completion,
            layout.completion_size,
            COMPLETION_RING_MAX,
        )?;
        Ok(layout)
    }
}

/// A ring of `size` 16-byte descriptors.
fn ring(
    memory_of: &impl Dma,
    what: &'static str,
    address: u64,
    size: u32,
    max: u32,
) -> Result<(), ActivationError> {
    range(what, size, 1, max.into())?;
    aligned(what, address, 16)?;
    memory_of.check(address, u64::from(size) * 16).map_err(memory(what))
}

/// Reads the current table of group addresses of the area at `shared`, at most 64 KiB. The table is copied, since the driver frees it when
/// the command returns.
pub(crate) fn read_multicast(memory_of: &impl Dma, shared: u64) -> Result<Vec<crate::MacAddress>, DmaFault> {
    let len: [u8; 2] = read_array(memory_of, shared.wrapping_add(offset::MULTICAST_LENGTH))?;
    let table: [u8; 8] = read_array(memory_of, shared.wrapping_add(offset::MULTICAST_TABLE))?;
    let mut bytes = vec![0; usize::from(u16_at(&len, 0))];
    if !bytes.is_empty() {
        memory_of.read(u64_at(&table, 0), &mut bytes)?;
    }
    Ok(bytes.chunks_exact(6).map(|chunk| crate::MacAddress(std::array::from_fn(|i| chunk[i]))).collect())
}

/// Reads the current VLAN table of the area at `shared`: a bit per VLAN.
pub(crate) fn read_vlans(memory_of: &impl Dma, shared: u64) -> Result<[u32; 128], DmaFault> {
    let bytes: [u8; 512] = read_array(memory_of, shared.wrapping_add(offset::VLAN_TABLE))?;
    Ok(std::array::from_fn(|i| u32_at(&bytes, 4 * i)))
}
