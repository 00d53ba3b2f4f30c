//! Descriptors and completions, 16 bytes each, as words copied out of guest memory.

use dma::access::read_array;
use dma::{Dma, DmaFault};

/// Bytes of every descriptor and completion.
pub(crate) const DESCRIPTOR: u64 = 16;

/// A position in a ring, and the generation of entries that belong to the reader there. The generation starts at 1 and flips at each wrap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Cursor {
    pub next: u32,
    pub generation: bool,
}

impl Cursor {
    pub const START: Self = Self { next: 0, generation: true };

    /// The next position in a ring of `size` entries.
    #[must_use]
    pub fn after(self, size: u32) -> Self {
        if self.next + 1 >= size {
            Self { next: 0, generation: !self.generation }
        } else {
            Self { next: self.next + 1, ..self }
        }
    }

    /// Address of its entry in a ring at `base`. Activation has checked that it doesn't wrap around.
    pub fn address(self, base: u64) -> u64 {
        base.wrapping_add(u64::from(self.next) * DESCRIPTOR)
    }
}

/// The offload of a TX descriptor (`om`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OffloadMode {
    None,
    /// Tunnels; never offered.
    Encapsulated,
    Checksum,
    Tso,
}

/// A TX descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TxDescriptor {
    pub address: u64,
    /// Length of the buffer, 1 to 16384 bytes.
    pub len: u32,
    pub generation: bool,
    pub dtype: bool,
    /// MSS, or offset of the checksum field.
    pub msscof: u16,
    /// Bytes of headers, or offset where the checksum starts.
    pub header_len: u16,
    pub mode: OffloadMode,
    pub eop: bool,
    /// VLAN tag to insert.
    pub vlan: Option<u16>,
}

const TX_GENERATION: u32 = 1 << 14;
const RX_GENERATION: u32 = 1 << 31;
const COMPLETION_GENERATION: u32 = 1 << 31;

impl TxDescriptor {
    /// Loads the descriptor at `address`; `None` while its generation isn't `generation`. Loads word 2, which holds the generation, first:
    /// the other words are then what the driver wrote before it.
    pub fn load(memory: &impl Dma, address: u64, generation: bool) -> Result<Option<Self>, DmaFault> {
        let word2 = memory.load_u32(address.wrapping_add(8))?;
        if (word2 & TX_GENERATION != 0) != generation {
            return Ok(None);
        }
        let bytes: [u8; 16] = read_array(memory, address)?;
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let buffer = u64::from(word(0)) | u64::from(word(4)) << 32;
        Ok(Some(Self::decode(buffer, word2, word(12))))
    }

    /// Decodes a descriptor's words.
    pub fn decode(address: u64, word2: u32, word3: u32) -> Self {
        let len = word2 & 0x3FFF;
        let low16 = |value: u32| {
            let [a, b, ..] = value.to_le_bytes();
            u16::from_le_bytes([a, b])
        };
        Self {
            address,
            len: if len == 0 { 1 << 14 } else { len },
            generation: word2 & TX_GENERATION != 0,
            dtype: word2 & 1 << 16 != 0,
            msscof: low16(word2 >> 18),
            header_len: low16(word3 & 0x3FF),
            mode: match word3 >> 10 & 3 {
                0 => OffloadMode::None,
                1 => OffloadMode::Encapsulated,
                2 => OffloadMode::Checksum,
                _ => OffloadMode::Tso,
            },
            eop: word3 & 1 << 12 != 0,
            vlan: (word3 & 1 << 15 != 0).then(|| low16(word3 >> 16)),
        }
    }
}

/// An RX descriptor that the device may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RxDescriptor {
    pub address: u64,
    /// Length of the buffer, bytes.
    pub len: u32,
    /// Whether it is for the second and later pieces of a frame.
    pub body: bool,
}

impl RxDescriptor {
    /// As [`TxDescriptor::load`].
    pub fn load(memory: &impl Dma, address: u64, generation: bool) -> Result<Option<Self>, DmaFault> {
        let word2 = memory.load_u32(address.wrapping_add(8))?;
        if (word2 & RX_GENERATION != 0) != generation {
            return Ok(None);
        }
        let bytes: [u8; 8] = read_array(memory, address)?;
        Ok(Some(Self { address: u64::from_le_bytes(bytes), len: word2 & 0x3FFF, body: word2 & 1 << 14 != 0 }))
    }
}

/// Writes a TX completion. Stores the generation last, with release order.
pub(crate) fn store_tx_completion(
    memory: &impl Dma,
    base: u64,
    at: Cursor,
    eop_index: u32,
) -> Result<(), DmaFault> {
    store_completion(memory, base, at, [eop_index & 0xFFF, 0, 0], 0)
}

/// Contents of an RX completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct RxCompletion {
    pub index: u32,
    pub sop: bool,
    pub eop: bool,
    pub ring_id: u32,
    pub len: u32,
    /// VLAN tag that the device removed from the data.
    pub vlan: Option<u16>,
    pub checksum: RxChecksum,
}

/// Checksum status in an RX completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum RxChecksum {
    /// Not verified.
    #[default]
    Unknown,
    /// The checksums of IPv4 (if present) and of TCP or UDP are good.
    Good { v6: bool, udp: bool },
}

impl RxCompletion {
    /// Encodes words 0 to 3, without the generation.
    pub fn encode(&self) -> [u32; 4] {
        const CNC: u32 = 1 << 30;
        const FCS: u32 = 1 << 23;
        const TYPE: u32 = 3 << 24;
        let flag = |set: bool, bit: u32| u32::from(set) << bit;
        let word0 = self.index & 0xFFF
            | flag(self.eop, 14)
            | flag(self.sop, 15)
            | (self.ring_id & 0x3FF) << 16
            | if self.checksum == RxChecksum::Unknown { CNC } else { 0 };
        let word2 =
            self.len & 0x3FFF | flag(self.vlan.is_some(), 15) | u32::from(self.vlan.unwrap_or(0)) << 16;
        let word3 = match self.checksum {
            RxChecksum::Unknown => FCS | TYPE,
            RxChecksum::Good { v6, udp } => {
                // tuc, ipc, and one each of udp or tcp, v6 or v4.
                FCS | TYPE | 1 << 16 | 1 << 19 | flag(udp, 17) | flag(!udp, 18) | flag(v6, 20) | flag(!v6, 21)
            }
        };
        [word0, 0, word2, word3]
    }

    /// Writes the completion. Stores the generation last, with release order.
    pub fn store(&self, memory: &impl Dma, base: u64, at: Cursor) -> Result<(), DmaFault> {
        let [a, b, c, d] = self.encode();
        store_completion(memory, base, at, [a, b, c], d)
    }
}

fn store_completion(
    memory: &impl Dma,
    base: u64,
    at: Cursor,
    words: [u32; 3],
    last: u32,
) -> Result<(), DmaFault> {
    let mut bytes = [0; 12];
    for (chunk, word) in bytes.chunks_exact_mut(4).zip(words) {
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    let address = at.address(base);
    memory.write(address, &bytes)?;
    let generation = if at.generation { COMPLETION_GENERATION } else { 0 };
    memory.store_u32(address.wrapping_add(12), last | generation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tx_descriptor_is_read_field_by_field() {
        let word2 = 100 | 1 << 14 | 1448 << 18;
        let word3 = 54 | 3 << 10 | 1 << 12 | 1 << 15 | 0x2064 << 16;
        let descriptor = TxDescriptor::decode(0x1_2345_6789, word2, word3);
        assert_eq!(
            descriptor,
            TxDescriptor {
                address: 0x1_2345_6789,
                len: 100,
                generation: true,
                dtype: false,
                msscof: 1448,
                header_len: 54,
                mode: OffloadMode::Tso,
                eop: true,
                vlan: Some(0x2064),
            }
        );
        assert_eq!(TxDescriptor::decode(0, 0, 0).len, 16384, "0 stands for 16384");
    }

    #[test]
    fn the_simplest_rx_completion_has_the_words_of_the_specification() {
        let plain =
            RxCompletion { index: 5, sop: true, eop: true, ring_id: 0, len: 60, ..Default::default() };
        assert_eq!(plain.encode(), [5 | 1 << 14 | 1 << 15 | 1 << 30, 0, 60, 1 << 23 | 3 << 24]);
        let good = RxCompletion {
            checksum: RxChecksum::Good { v6: false, udp: false },
            vlan: Some(7),
            ring_id: 1,
            ..plain
        };
        assert_eq!(
            good.encode(),
            [
                5 | 1 << 14 | 1 << 15 | 1 << 16,
                0,
                60 | 1 << 15 | 7 << 16,
                1 << 23 | 3 << 24 | 1 << 16 | 1 << 18 | 1 << 19 | 1 << 21
            ]
        );
    }

    #[test]
    fn a_cursor_flips_its_generation_at_each_wrap() {
        let mut cursor = Cursor::START;
        for _ in 0..3 {
            cursor = cursor.after(3);
        }
        assert_eq!(cursor, Cursor { next: 0, generation: false });
        assert_eq!(Cursor::START.after(1), Cursor { next: 0, generation: false });
    }
}
