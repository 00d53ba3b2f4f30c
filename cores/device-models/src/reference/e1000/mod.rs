//! Reference e1000 (82540EM): descriptor rings in memory, offloads, the PHY, and the window on the packet buffer. A
//! register read advances time.
//!
//! | module | holds |
//! |---|---|
//! | `transmit` | descriptors of frames to send, VLAN tags |
//! | `offload` | checksums and segmentation |
//! | `receive` | filters, descriptors of buffers |

mod offload;
mod receive;
mod transmit;

pub use transmit::{Parsed, parse, reports};

use super::port::Port;
use crate::describe::{Class, Event, Reg};
use crate::devices::e1000::{
    CTRL, E1000, EECD, ICR, MAC0, MDIC, MTA, PHY_RST, RA, RAH0, RAL0, RST, STATISTICS, STATUS, TCTL, VFTA,
};
use crate::graph::{Given, Graph, Piece, truncated};
use crate::physical::{Bus, DeviceError, Mapping, PhysicalDevice};

use offload::Offload;

/// STATUS: full duplex, link up, 1000 Mb/s, and the other bits of QEMU's card.
const LINK_UP: u32 = 0x8008_0783;
const LINK_BITS: u32 = 0xC3;
/// MDIC: read; ready.
const MDIC_READ: u32 = 1 << 27;
const MDIC_READY: u32 = 1 << 28;
const MDIC_ERROR: u32 = 1 << 30;
/// RAH: address valid.
const ADDRESS_VALID: u32 = 1 << 31;
/// The window on the packet buffer, through which frames pass.
const BUFFER_WINDOW: u32 = 0x1_0000;
const BUFFER_BYTES: usize = 0x1_0000;
/// Causes in ICR.
const TXQE: u32 = 0x02;
const RXDMT0: u32 = 0x10;
const RXO: u32 = 0x40;
/// Statistics: missed packets, good packets received and sent, all packets received and sent (offsets from 4000h).
const MPC: u32 = 0x10;
const GPRC: u32 = 0x74;
const GPTC: u32 = 0x80;
const TPR: u32 = 0xD0;
const TPT: u32 = 0xD4;

/// Registers of an M88E1011 whose partner supports 1000 Mb/s full duplex. The others are 0.
const PHY: [(u32, u16); 9] = [
    (0, 0x1140),
    (1, 0x796D),
    (2, 0x0141),
    (3, 0x0C20),
    (4, 0x0DE1),
    (5, 0x41E0),
    (9, 0x0E00),
    (10, 0x3C00),
    (17, 0xAC08),
];

fn number(size: usize) -> u32 {
    u32::try_from(size).unwrap_or(u32::MAX)
}

fn size(number: u32) -> usize {
    usize::try_from(number).unwrap_or(0)
}

/// Words of the register tables.
#[derive(Debug, Clone)]
struct Tables {
    /// Multicast filter.
    multicast: [u32; 128],
    /// Addresses 1 to 15.
    addresses: [u32; 30],
    vlans: [u32; 128],
    statistics: [u32; 0x128 / 4],
}

impl Tables {
    const EMPTY: Self =
        Self { multicast: [0; 128], addresses: [0; 30], vlans: [0; 128], statistics: [0; 0x128 / 4] };

    fn word(&mut self, reg: Reg, offset: u32) -> Option<&mut u32> {
        // The old offsets of the tables are below all new ones.
        let (words, new, old): (&mut [u32], u32, u32) = match reg {
            MTA => (&mut self.multicast, 0x5200, 0x200),
            RA => (&mut self.addresses, 0x5408, 0x48),
            VFTA => (&mut self.vlans, 0x5600, 0x600),
            STATISTICS => (&mut self.statistics, 0x4000, 0x4000),
            _ => return None,
        };
        let start = if offset >= new { new } else { old };
        words.get_mut(size(offset.checked_sub(start)? / 4))
    }
}

/// The device.
#[derive(Debug)]
pub struct E1000Card<B> {
    graph: Graph,
    port: Port<B>,
    tables: Tables,
    phy: [u16; 32],
    /// The last context descriptor, and the frame under construction. No register exposes them.
    offload: Offload,
    /// The packet buffer, and the position of the next frame.
    buffer: Vec<u8>,
    buffered: usize,
    /// Whether the card transmits by itself.
    transmits: bool,
    /// The register that the second BAR's window selects.
    indirect: u32,
    sent: Vec<Vec<u8>>,
}

impl<B: Bus> E1000Card<B> {
    /// Creates a card with a station address on a bus. With `iommu` it reaches mapped memory only.
    pub fn new(address: [u8; 6], bus: B, iommu: bool) -> Self {
        let mut graph = Graph::new(&E1000);
        for (at, byte) in (0u8..).zip(address) {
            graph.set(Reg(MAC0.0 + at), u32::from(byte));
        }
        let mut card = Self {
            graph,
            port: Port::new(bus, iommu),
            tables: Tables::EMPTY,
            phy: [0; 32],
            offload: Offload::default(),
            buffer: vec![0; BUFFER_BYTES],
            buffered: 0,
            transmits: true,
            indirect: 0,
            sent: Vec::new(),
        };
        card.clear();
        card.reset_phy();
        card
    }

    /// Makes it a card that transmits nothing by itself. The caller does, from its ring ([`Self::descriptor`] to
    /// [`Self::sent_to`]).
    #[must_use]
    pub fn without_transmitter(mut self) -> Self {
        self.transmits = false;
        self
    }

    /// Returns the register of an access of `bytes` bytes.
    pub fn register_at(&self, offset: u32, bytes: u8, write: bool) -> Option<Reg> {
        self.graph.piece(&E1000, offset, bytes, write).reg
    }

    /// Raises interrupt causes of another part of the card.
    pub fn raise(&mut self, causes: u32) {
        self.cause(causes);
    }

    /// Sets the link from another card's STATUS: up, duplex, speed.
    pub fn set_link(&mut self, status: u32) {
        self.graph.set(STATUS, LINK_UP & !LINK_BITS | status & LINK_BITS);
    }

    /// Sets a register of the PHY, 0 to 31.
    pub fn set_phy(&mut self, register: u32, value: u16) {
        if let Some(place) = self.phy.get_mut(size(register)) {
            *place = value;
        }
    }

    /// Returns the bus.
    pub fn bus(&mut self) -> &mut B {
        &mut self.port.bus
    }

    /// Returns the number of DMA accesses that the IOMMU or a disabled bus master blocked.
    pub fn blocked(&self) -> u64 {
        self.port.blocked
    }

    /// Returns the frames that were sent since the last call.
    pub fn take_sent(&mut self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.sent)
    }

    /// Returns the card's value of a register.
    pub fn value(&self, reg: Reg) -> u32 {
        self.graph.value(reg)
    }

    fn address(&self) -> [u8; 6] {
        std::array::from_fn(|at| {
            let at = u8::try_from(at).unwrap_or(0);
            self.value(Reg(MAC0.0 + at)).to_le_bytes()[0]
        })
    }

    fn clear(&mut self) {
        self.graph.reset(&E1000);
        let mac = self.address();
        self.graph.set(RAL0, u32::from_le_bytes([mac[0], mac[1], mac[2], mac[3]]));
        self.graph.set(RAH0, u32::from_le_bytes([mac[4], mac[5], 0, 0]) | ADDRESS_VALID);
        self.graph.set(STATUS, LINK_UP);
        self.tables = Tables::EMPTY;
        self.offload = Offload::default();
    }

    /// Resets the PHY to its power-on state. A reset of the card leaves it unchanged, as on the real card.
    pub fn reset_phy(&mut self) {
        self.phy = [0; 32];
        for (register, value) in PHY {
            self.phy[size(register)] = value;
        }
    }

    fn cause(&mut self, causes: u32) {
        self.graph.set(ICR, self.value(ICR) | causes);
    }

    fn count(&mut self, statistic: u32) {
        if let Some(word) = self.tables.word(STATISTICS, 0x4000 + statistic) {
            *word = word.saturating_add(1);
        }
    }

    /// Passes a frame through the packet buffer.
    fn pass(&mut self, frame: &[u8]) {
        let at = if self.buffered + frame.len() > BUFFER_BYTES { 0 } else { self.buffered };
        if let Some(place) = self.buffer.get_mut(at..at + frame.len()) {
            place.copy_from_slice(frame);
            self.buffered = at + frame.len();
        }
    }

    fn mdic(&mut self, value: u32) {
        let register = size(value >> 16 & 0x1F);
        let known = value >> 21 & 0x1F == 1;
        let data = if value & MDIC_READ != 0 && known {
            u32::from(self.phy[register])
        } else {
            if known && register == 0 {
                // Reset and renegotiation complete at once.
                self.phy[0] = u16::try_from(value & 0x7DFF).unwrap_or(0);
            } else if known && matches!(register, 4 | 9 | 16 | 20) {
                self.phy[register] = u16::try_from(value & 0xFFFF).unwrap_or(0);
            }
            value & 0xFFFF
        };
        let failed = if known { 0 } else { MDIC_ERROR };
        self.graph.set(MDIC, value & 0x2FFF_0000 | data | MDIC_READY | failed);
    }

    fn write_register(&mut self, piece: Piece, reg: Reg, value: u32) {
        let register = E1000.register(reg);
        if matches!(register.write, None | Some(Class::Deny)) {
            return;
        }
        if let Some(word) = self.tables.word(reg, piece.offset) {
            *word = value;
            return;
        }
        if reg == CTRL && value & RST != 0 {
            self.clear();
            return;
        }
        if reg == CTRL && value & PHY_RST != 0 {
            self.reset_phy();
        }
        let stored = register.stored(self.value(reg), value);
        let given = Given { size: u32::from(piece.bytes), offset: piece.offset, written: value };
        self.graph.happen(&E1000, Event::Write(reg), Some((reg, stored)), given);
        if reg == MDIC {
            self.mdic(value);
        } else if reg == TCTL {
            // A frame that was incomplete when the transmitter was disabled is lost.
            self.offload.forget_frame();
        }
    }

    fn read_register(&mut self, piece: Piece, reg: Reg) -> u32 {
        self.tick();
        if let Some(word) = self.tables.word(reg, piece.offset) {
            let value = *word;
            if reg == STATISTICS {
                *word = 0;
            }
            return value;
        }
        if reg == ICR || reg == EECD {
            let answer = self.graph.happen(&E1000, Event::Read(reg), None, Given::size(4));
            return answer.unwrap_or_else(|| self.value(reg));
        }
        self.value(reg)
    }

    fn read_at(&mut self, offset: u32, bytes: u8) -> u32 {
        if let Some(at) = offset.checked_sub(BUFFER_WINDOW) {
            let from = |byte: u8| self.buffer.get(size(at) + usize::from(byte)).copied().unwrap_or(0);
            return (0..bytes).fold(0, |value, byte| value | u32::from(from(byte)) << (8 * byte));
        }
        let (mut done, mut value) = (0, 0);
        while done < bytes {
            let piece = self.graph.piece(&E1000, offset + u32::from(done), bytes - done, false);
            let part = piece.reg.map_or(0, |reg| self.read_register(piece, reg) >> (8 * piece.skip));
            value |= truncated(part, piece.bytes) << (8 * done);
            done += piece.bytes;
        }
        value
    }

    fn write_at(&mut self, offset: u32, bytes: u8, value: u32) {
        if let Some(at) = offset.checked_sub(BUFFER_WINDOW) {
            for byte in 0..bytes {
                if let Some(place) = self.buffer.get_mut(size(at) + usize::from(byte)) {
                    *place = (value >> (8 * byte)).to_le_bytes()[0];
                }
            }
            return;
        }
        let mut done = 0;
        while done < bytes {
            let piece = self.graph.piece(&E1000, offset + u32::from(done), bytes - done, true);
            if let Some(reg) = piece.reg {
                let mask = truncated(u32::MAX, piece.bytes) << (8 * piece.skip);
                let part = truncated(value >> (8 * done), piece.bytes) << (8 * piece.skip);
                // A part of a register: the rest is unchanged.
                let whole =
                    if piece.is_whole(E1000.register(reg)) { part } else { self.value(reg) & !mask | part };
                self.write_register(piece, reg, whole);
            }
            done += piece.bytes;
        }
    }
}

impl<B: Bus> super::Card for E1000Card<B> {
    fn tick(&mut self) {
        Self::tick(self);
    }

    fn take_sent(&mut self) -> Vec<Vec<u8>> {
        Self::take_sent(self)
    }

    fn receive(&mut self, frame: &[u8]) -> bool {
        Self::receive(self, frame)
    }

    fn blocked(&self) -> u64 {
        Self::blocked(self)
    }
}

impl<B: Bus> PhysicalDevice for E1000Card<B> {
    fn read(&mut self, bar: u8, offset: u32, bytes: u8) -> Result<u32, DeviceError> {
        Ok(match (bar, offset) {
            (0, _) => self.read_at(offset, bytes),
            (_, 0..4) => self.indirect,
            (_, 4..8) => self.read_at(self.indirect, 4),
            _ => 0,
        })
    }

    fn write(&mut self, bar: u8, offset: u32, bytes: u8, value: u32) -> Result<(), DeviceError> {
        match (bar, offset) {
            (0, _) => self.write_at(offset, bytes, value),
            (_, 0..4) => self.indirect = value & 0x1_FFFC,
            (_, 4..8) => self.write_at(self.indirect, 4, value),
            _ => {}
        }
        Ok(())
    }

    fn interrupt(&mut self) -> Result<bool, DeviceError> {
        Ok(self.graph.line(&E1000))
    }

    fn reset(&mut self) -> Result<(), DeviceError> {
        self.clear();
        Ok(())
    }

    fn set_bus_master(&mut self, on: bool) -> Result<(), DeviceError> {
        self.port.bus_master = on;
        Ok(())
    }

    fn has_iommu(&self) -> bool {
        self.port.has_iommu()
    }

    fn map(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        self.port.map(mapping)
    }

    fn unmap(&mut self, mapping: Mapping) -> Result<(), DeviceError> {
        self.port.unmap(mapping)
    }
}
