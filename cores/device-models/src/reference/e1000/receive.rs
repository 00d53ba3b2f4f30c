//! The receiver: filters, and buffer descriptors between head and tail (manual of the PCI/PCI-X family, 3.2).

use super::{ADDRESS_VALID, E1000Card, GPRC, MPC, RXDMT0, RXO, TPR, number, size};
use crate::devices::e1000::{EN, LBM, RAH0, RAL0, RCTL, RDBAH, RDBAL, RDH, RDLEN, RDT, RXT0, UPE};
use crate::physical::Bus;
use crate::reference::SHORTEST;
use crate::reference::filter::{Filter, Groups};

/// RCTL: multicast promiscuous, long packets, broadcast accept, buffer size extension, strip CRC.
const MPE: u32 = 0x10;
const LPE: u32 = 0x20;
const BAM: u32 = 1 << 15;
const BSEX: u32 = 1 << 25;
const SECRC: u32 = 1 << 26;
/// Largest frame in bytes without LPE, including its CRC.
const MAX_SHORT_FRAME_BYTES: usize = 1522;
/// Descriptor status: done, end of packet, ignore checksum indication.
const DONE: u8 = 0x01;
const END: u8 = 0x02;
const NO_CHECKSUM: u8 = 0x04;

impl<B: Bus> E1000Card<B> {
    /// Receives a frame from the wire; a card in loopback ignores it. Returns whether it was stored.
    pub fn receive(&mut self, frame: &[u8]) -> bool {
        self.value(RCTL) & LBM != LBM && self.store(frame)
    }

    /// Returns the size in bytes of each buffer.
    fn buffer_bytes(&self) -> usize {
        let bytes = 2048 >> (self.value(RCTL) >> 16 & 3);
        // With the extension 2,048 would mean 32 KiB, which is reserved: the largest valid size applies.
        if self.value(RCTL) & BSEX == 0 { bytes } else { (bytes * 16).min(16384) }
    }

    /// Returns the number of descriptors that the card owns.
    fn free(&self) -> u32 {
        let (head, tail) = (self.value(RDH) & 0xFFFF, self.value(RDT) & 0xFFFF);
        let all = self.value(RDLEN) / 16;
        if tail >= head { tail - head } else { (tail + all).saturating_sub(head) }
    }

    pub(super) fn store(&mut self, frame: &[u8]) -> bool {
        if !self.filter().accepts(frame) {
            return false;
        }
        let mut bytes = frame.to_vec();
        bytes.resize(bytes.len().max(SHORTEST), 0);
        self.pass(&bytes);
        if self.value(RCTL) & SECRC == 0 {
            bytes.extend_from_slice(&[0xCC; 4]);
        }
        if self.is_too_long(bytes.len()) {
            return false;
        }
        let room = self.buffer_bytes();
        if !self.has_room(frame.len()) {
            self.count(MPC);
            self.cause(RXO);
            return false;
        }
        let last = bytes.len().div_ceil(room) - 1;
        for (at, piece) in bytes.chunks(room).enumerate() {
            self.fill(piece, at == last);
        }
        self.count(GPRC);
        self.count(TPR);
        let few = (self.value(RDLEN) / 16) >> ((self.value(RCTL) >> 8 & 3) + 1);
        self.cause(RXT0 | if self.free() <= few { RXDMT0 } else { 0 });
        true
    }

    /// Fills one buffer.
    fn fill(&mut self, piece: &[u8], last: bool) {
        let base = u64::from(self.value(RDBAL) & !0xF) | u64::from(self.value(RDBAH)) << 32;
        let head = self.value(RDH) & 0xFFFF;
        let at = base.wrapping_add(u64::from(head) * 16);
        let mut descriptor = [0; 16];
        if self.port.read(at, &mut descriptor) {
            let mut address = [0; 8];
            address.copy_from_slice(&descriptor[..8]);
            let address = u64::from_le_bytes(address);
            // A descriptor without a buffer is skipped, together with its part of the frame.
            if address != 0 {
                self.port.write(address, piece);
            }
            let length = number(piece.len()).to_le_bytes();
            descriptor[8..12].copy_from_slice(&[length[0], length[1], 0, 0]);
            descriptor[12] = DONE | NO_CHECKSUM | if last { END } else { 0 };
            descriptor[13..].fill(0);
            self.port.write(at + 8, &descriptor[8..]);
        }
        let next = (head + 1) & 0xFFFF;
        self.graph.set(RDH, if next * 16 == self.value(RDLEN) { 0 } else { next });
    }

    /// Returns the current filter.
    pub fn filter(&self) -> Filter {
        let rcr = self.value(RCTL);
        let groups = if rcr & MPE != 0 {
            Groups::All
        } else {
            // Twelve bits of the address, which RCTL selects.
            Groups::Table([4, 3, 2, 0][size(rcr >> 12 & 3)], self.tables.multicast)
        };
        // A promiscuous receiver accepts all unicast frames, and multicast frames as without it.
        let filter = Filter::new(rcr & EN != 0, false, rcr & (BAM | MPE) != 0, groups);
        let filter = if rcr & UPE == 0 { filter } else { filter.with_stations() };
        let first = [self.value(RAL0), self.value(RAH0)];
        let pairs = std::iter::once(&first).chain(self.tables.addresses.as_chunks::<2>().0);
        pairs.filter(|pair| pair[1] & ADDRESS_VALID != 0).fold(filter, |filter, pair| {
            let [low, high] = pair.map(u32::to_le_bytes);
            filter.with([low[0], low[1], low[2], low[3], high[0], high[1]])
        })
    }

    /// Returns whether there are descriptors for a frame of `length` bytes. A frame beyond the receiver's limit needs
    /// none.
    pub fn has_room(&self, length: usize) -> bool {
        let stored = length.max(SHORTEST) + if self.value(RCTL) & SECRC == 0 { 4 } else { 0 };
        self.is_too_long(stored) || size(self.free()) >= stored.div_ceil(self.buffer_bytes())
    }

    fn is_too_long(&self, stored: usize) -> bool {
        stored > MAX_SHORT_FRAME_BYTES && self.value(RCTL) & LPE == 0
    }
}
