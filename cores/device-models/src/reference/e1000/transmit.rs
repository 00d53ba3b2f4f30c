//! The transmitter: descriptors from head to tail (manual of the PCI/PCI-X family, 3.3).

use super::offload::Wishes;
use super::{E1000Card, GPTC, TPT, TXQE};
use crate::devices::e1000::{CTRL, EN, LBM, RCTL, TCTL, TDBAH, TDBAL, TDH, TDLEN, TDT, TXDW, VET};
use crate::physical::Bus;

/// Limit of descriptors that are processed per step of time.
const AT_A_TIME: u32 = 256;
/// Descriptor command bits: end of packet, checksum (legacy) or segmentation (extended), report status, extended, VLAN
/// tag.
const EOP: u8 = 0x01;
const CHECKSUM_OR_CUT: u8 = 0x04;
const REPORT: u8 = 0x08;
const EXTENDED: u8 = 0x20;
const TAG: u8 = 0x40;
/// CTRL: VLAN mode enable.
const VME: u32 = 1 << 30;
/// A parsed descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parsed {
    /// A context, with or without segmentation.
    Context {
        /// For segmented frames.
        segments: bool,
    },
    /// A piece of a frame.
    Data {
        /// Address of the first byte.
        address: u64,
        /// Length in bytes, less than 1 MiB.
        length: usize,
        /// The frame ends with this piece.
        last: bool,
    },
    /// An undefined kind, which is skipped.
    Unknown,
}

/// Parses a descriptor.
pub fn parse(descriptor: &[u8; 16]) -> Parsed {
    let command = descriptor[11];
    let short = usize::from(u16::from_le_bytes([descriptor[8], descriptor[9]]));
    let length = match (command & EXTENDED != 0, descriptor[10] >> 4) {
        (false, _) => short,
        (true, 1) => short | usize::from(descriptor[10] & 0xF) << 16,
        (true, 0) => return Parsed::Context { segments: command & CHECKSUM_OR_CUT != 0 },
        (true, _) => return Parsed::Unknown,
    };
    let mut address = [0; 8];
    address.copy_from_slice(&descriptor[..8]);
    Parsed::Data { address: u64::from_le_bytes(address), length, last: command & EOP != 0 }
}

/// Returns whether the driver requests a report for this descriptor.
pub fn reports(descriptor: &[u8; 16]) -> bool {
    descriptor[11] & REPORT != 0
}

/// Limit in bytes of a transmitted frame (82540EM, TCTL).
const LONGEST_FRAME: usize = 16288;

impl<B: Bus> E1000Card<B> {
    /// Advances time: sends the descriptors between head and tail. A head beyond the ring's end continues through
    /// memory, as on the real chip.
    pub fn tick(&mut self) {
        let mut causes = 0;
        for _ in 0..if self.transmits { AT_A_TIME } else { 0 } {
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

    /// Transmits the descriptor at `head`. Returns its causes.
    fn transmit(&mut self, head: u32) -> u32 {
        let Some((at, descriptor)) = self.descriptor(head) else { return 0 };
        for frame in self.assemble(&descriptor) {
            self.send(frame);
        }
        if !reports(&descriptor) {
            return 0;
        }
        self.report(at, &descriptor);
        TXDW
    }

    /// Reads a descriptor of the transmit ring by its number. Returns its address and content, or `None` if the card
    /// may not read it.
    pub fn descriptor(&mut self, number: u32) -> Option<(u64, [u8; 16])> {
        let base = u64::from(self.value(TDBAL) & !0xF) | u64::from(self.value(TDBAH)) << 32;
        let at = base.wrapping_add(u64::from(number) * 16);
        let mut descriptor = [0; 16];
        self.port.read(at, &mut descriptor).then_some((at, descriptor))
    }

    /// Writes a descriptor back as done.
    pub fn report(&mut self, at: u64, descriptor: &[u8; 16]) {
        let mut back = [0; 8];
        back.copy_from_slice(&descriptor[8..]);
        back[4] |= 1;
        self.port.write(at + 8, &back);
    }

    /// Reads memory as the card does. Returns false, without a change of `into`, if the card may not.
    pub fn peek(&mut self, address: u64, into: &mut [u8]) -> bool {
        self.port.read(address, into)
    }

    /// Returns the frames for the wire after this descriptor and those before it. Neither sends nor reports anything.
    pub fn assemble(&mut self, descriptor: &[u8; 16]) -> Vec<Vec<u8>> {
        let command = descriptor[11];
        let (address, length, wishes) = match parse(descriptor) {
            Parsed::Context { .. } => {
                self.offload.set_context(descriptor);
                return Vec::new();
            }
            Parsed::Unknown => return Vec::new(),
            Parsed::Data { address, length, .. } if command & EXTENDED == 0 => {
                (address, length, Wishes::default())
            }
            Parsed::Data { address, length, .. } => {
                let wishes = Wishes {
                    ip: descriptor[13] & 1 != 0,
                    transport: descriptor[13] & 2 != 0,
                    segments: command & CHECKSUM_OR_CUT != 0,
                };
                (address, length, wishes)
            }
        };
        let mut piece = vec![0; length];
        self.port.read(address, &mut piece);
        self.offload.push(&piece, wishes);
        if command & EOP == 0 {
            return Vec::new();
        }
        let mut frames = self.offload.finish();
        for frame in &mut frames {
            if command & EXTENDED == 0 && command & CHECKSUM_OR_CUT != 0 {
                legacy_checksum(frame, descriptor[13], descriptor[10]);
            }
            if command & TAG != 0 && self.value(CTRL) & VME != 0 && frame.len() >= 12 {
                let kind = self.value(VET).to_le_bytes();
                let tag = [kind[1], kind[0], descriptor[15], descriptor[14]];
                frame.splice(12..12, tag);
            }
        }
        frames.retain(|frame| !frame.is_empty() && frame.len() <= LONGEST_FRAME);
        frames
    }

    /// Drops the incomplete frame.
    pub fn forget_frame(&mut self) {
        self.offload.forget_frame();
    }

    /// Advances the head of a card without its own transmitter ([`E1000Card::without_transmitter`]), and raises causes.
    pub fn sent_to(&mut self, head: u32, causes: u32) {
        self.graph.set(TDH, head & 0xFFFF);
        let empty = if head & 0xFFFF == self.value(TDT) & 0xFFFF { TXQE } else { 0 };
        self.cause(causes | empty);
    }

    fn send(&mut self, frame: Vec<u8>) {
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

/// Stores the sum from `start` to the end at `place` (legacy descriptors, 3.3.3.1).
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
