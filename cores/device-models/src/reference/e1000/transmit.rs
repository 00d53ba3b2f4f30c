//! The transmitter: descriptors from head to tail (manual of the PCI/PCI-X family, 3.3).

use super::offload::Wishes;
use super::{E1000Card, GPTC, TPT, TXQE, size};
use crate::devices::e1000::{CTRL, EN, LBM, RCTL, TCTL, TDBAH, TDBAL, TDH, TDLEN, TDT, TXDW, VET};
use crate::physical::Bus;

/// Descriptors that are looked at before time goes on.
const AT_A_TIME: u32 = 256;
/// Command bits of a descriptor: end of the frame, checksum (legacy) or segmentation (extended), report, extended, VLAN tag.
const EOP: u8 = 0x01;
const CHECKSUM_OR_CUT: u8 = 0x04;
const REPORT: u8 = 0x08;
const EXTENDED: u8 = 0x20;
const TAG: u8 = 0x40;
/// CTRL: VLAN tags are handled.
const VME: u32 = 1 << 30;
/// The longest frame that goes out (82540EM, TCTL).
const LONGEST_FRAME: usize = 16288;

impl<B: Bus> E1000Card<B> {
    /// Time passes: what lies between head and tail is sent. A head beyond the ring's end goes on through memory, as the silicon's.
    pub fn tick(&mut self) {
        let mut causes = 0;
        for _ in 0..AT_A_TIME {
            let head = self.value(TDH) & 0xFFFF;
            if self.value(TCTL) & EN == 0 || head == self.value(TDT) & 0xFFFF {
                break;
            }
            causes |= self.transmit(head);
            let next = (head + 1) & 0xFFFF;
            self.graph.set(TDH, if next * 16 == self.value(TDLEN) { 0 } else { next });
            if self.value(TDH) == self.value(TDT) & 0xFFFF {
                causes |= TXQE;
            }
        }
        if causes != 0 {
            self.cause(causes);
        }
    }

    /// The descriptor at `head`; its causes.
    fn transmit(&mut self, head: u32) -> u32 {
        let base = u64::from(self.value(TDBAL) & !0xF) | u64::from(self.value(TDBAH)) << 32;
        let at = base.wrapping_add(u64::from(head) * 16);
        let mut descriptor = [0; 16];
        if !self.port.read(at, &mut descriptor) {
            return 0;
        }
        let command = descriptor[11];
        let kind = descriptor[10] >> 4;
        match (command & EXTENDED != 0, kind) {
            (true, 0) => self.offload.set_context(&descriptor),
            (true, 1) => {
                let length = u32::from_le_bytes([descriptor[8], descriptor[9], descriptor[10] & 0xF, 0]);
                let wishes = Wishes {
                    ip: descriptor[13] & 1 != 0,
                    transport: descriptor[13] & 2 != 0,
                    segments: command & CHECKSUM_OR_CUT != 0,
                };
                self.gather(&descriptor, size(length), wishes);
            }
            (true, _) => {}
            (false, _) => {
                let length = usize::from(u16::from_le_bytes([descriptor[8], descriptor[9]]));
                self.gather(&descriptor, length, Wishes::default());
            }
        }
        if command & REPORT == 0 {
            return 0;
        }
        descriptor[12] |= 1;
        self.port.write(at + 8, &descriptor[8..]);
        TXDW
    }

    fn gather(&mut self, descriptor: &[u8; 16], length: usize, wishes: Wishes) {
        let mut address = [0; 8];
        address.copy_from_slice(&descriptor[..8]);
        let mut piece = vec![0; length];
        self.port.read(u64::from_le_bytes(address), &mut piece);
        self.offload.push(&piece, wishes);
        let command = descriptor[11];
        if command & EOP == 0 {
            return;
        }
        for mut frame in self.offload.finish() {
            let extended = command & EXTENDED != 0;
            if !extended && command & CHECKSUM_OR_CUT != 0 {
                legacy_checksum(&mut frame, descriptor[13], descriptor[10]);
            }
            if command & TAG != 0 && self.value(CTRL) & VME != 0 && frame.len() >= 12 {
                let kind = self.value(VET).to_le_bytes();
                let tag = [kind[1], kind[0], descriptor[15], descriptor[14]];
                frame.splice(12..12, tag);
            }
            self.send(frame);
        }
    }

    fn send(&mut self, frame: Vec<u8>) {
        if frame.is_empty() || frame.len() > LONGEST_FRAME {
            return;
        }
        self.count(GPTC);
        self.count(TPT);
        self.pass(&frame);
        if self.value(RCTL) & LBM == LBM {
            self.store(&frame);
        } else {
            self.sent.push(frame);
        }
    }
}

/// The sum from `start` to the end, put at `place` (legacy descriptors, 3.3.3.1).
fn legacy_checksum(frame: &mut [u8], start: u8, place: u8) {
    let sum = frame.get(usize::from(start)..).map(|covered| {
        covered.chunks(2).fold(0u32, |sum, pair| {
            let sum = sum + u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
            (sum & 0xFFFF) + (sum >> 16)
        })
    });
    let place = frame.get_mut(usize::from(place)..usize::from(place) + 2);
    if let (Some(sum), Some(place)) = (sum, place) {
        place.copy_from_slice(&(!u16::try_from(sum & 0xFFFF).unwrap_or(0)).to_be_bytes());
    }
}
