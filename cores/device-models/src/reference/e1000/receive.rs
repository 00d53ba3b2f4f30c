//! The receiver: filters, and descriptors of buffers between head and tail (manual of the PCI/PCI-X family, 3.2).

use super::{ADDRESS_VALID, E1000Card, GPRC, MPC, RXDMT0, RXO, TPR, number, size};
use crate::devices::e1000::{EN, LBM, RAH0, RAL0, RCTL, RDBAH, RDBAL, RDH, RDLEN, RDT, RXT0, UPE};
use crate::physical::Bus;
use crate::reference::SHORTEST;

/// RCTL: all multicast frames, long frames, broadcasts, buffer sizes times 16, CRC is left out.
const MPE: u32 = 0x10;
const LPE: u32 = 0x20;
const BAM: u32 = 1 << 15;
const BSEX: u32 = 1 << 25;
const SECRC: u32 = 1 << 26;
/// The longest frame without LPE, with its CRC.
const LONGEST: usize = 1522;
/// Status of a descriptor: done, end of the frame, checksums weren't looked at.
const DONE: u8 = 0x01;
const END: u8 = 0x02;
const NO_CHECKSUM: u8 = 0x04;

impl<B: Bus> E1000Card<B> {
    /// A frame arrives from the wire; a card that sends to itself doesn't hear it. Whether it was stored.
    pub fn receive(&mut self, frame: &[u8]) -> bool {
        self.value(RCTL) & LBM != LBM && self.store(frame)
    }

    /// Bytes of each buffer.
    fn buffer_bytes(&self) -> usize {
        let bytes = 2048 >> (self.value(RCTL) >> 16 & 3);
        // With the extension 2,048 means 32 KiB, which is reserved: the largest there is.
        if self.value(RCTL) & BSEX == 0 { bytes } else { (bytes * 16).min(16384) }
    }

    /// Descriptors that are the card's.
    fn free(&self) -> u32 {
        let (head, tail) = (self.value(RDH) & 0xFFFF, self.value(RDT) & 0xFFFF);
        let all = self.value(RDLEN) / 16;
        if tail >= head { tail - head } else { (tail + all).saturating_sub(head) }
    }

    pub(super) fn store(&mut self, frame: &[u8]) -> bool {
        if self.value(RCTL) & EN == 0 || !self.accepts(frame) {
            return false;
        }
        let mut bytes = frame.to_vec();
        bytes.resize(bytes.len().max(SHORTEST), 0);
        self.pass(&bytes);
        if self.value(RCTL) & SECRC == 0 {
            bytes.extend_from_slice(&[0xCC; 4]);
        }
        if bytes.len() > LONGEST && self.value(RCTL) & LPE == 0 {
            return false;
        }
        let room = self.buffer_bytes();
        if size(self.free()) < bytes.len().div_ceil(room) {
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

    /// One buffer.
    fn fill(&mut self, piece: &[u8], last: bool) {
        let base = u64::from(self.value(RDBAL) & !0xF) | u64::from(self.value(RDBAH)) << 32;
        let head = self.value(RDH) & 0xFFFF;
        let at = base.wrapping_add(u64::from(head) * 16);
        let mut descriptor = [0; 16];
        if self.port.read(at, &mut descriptor) {
            let mut address = [0; 8];
            address.copy_from_slice(&descriptor[..8]);
            let address = u64::from_le_bytes(address);
            // A descriptor without a buffer is skipped, with what belonged into it.
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

    fn accepts(&self, frame: &[u8]) -> bool {
        let Some(to) = frame.first_chunk::<6>() else { return false };
        let rcr = self.value(RCTL);
        if *to == [0xFF; 6] {
            return rcr & BAM != 0 || rcr & MPE != 0;
        }
        if to[0] & 1 == 1 {
            return rcr & MPE != 0 || self.in_multicast_table(*to);
        }
        let first = [self.value(RAL0), self.value(RAH0)];
        let others = self.tables.addresses.as_chunks::<2>().0;
        let own = |pair: &[u32; 2]| {
            let low = u32::from_le_bytes([to[0], to[1], to[2], to[3]]);
            let high = u32::from_le_bytes([to[4], to[5], 0, 0]);
            pair[1] & ADDRESS_VALID != 0 && pair[0] == low && pair[1] & 0xFFFF == high
        };
        rcr & UPE != 0 || own(&first) || others.iter().any(own)
    }

    /// The filter is indexed by twelve bits of the address that RCTL chooses.
    fn in_multicast_table(&self, to: [u8; 6]) -> bool {
        let shift = [4, 3, 2, 0][size(self.value(RCTL) >> 12 & 3)];
        let index = (u32::from(u16::from_le_bytes([to[4], to[5]])) >> shift) & 0xFFF;
        self.tables.multicast[size(index >> 5)] >> (index & 31) & 1 == 1
    }
}
