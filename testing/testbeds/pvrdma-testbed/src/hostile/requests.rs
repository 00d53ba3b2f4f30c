//! Work requests: most are nearly valid, so that they get past the first checks.

use std::sync::atomic::{AtomicBool, Ordering};

use dma::Dma;
use zerocopy::IntoBytes;

use super::dice::{Dice, Entropy, Seed};
use super::objects::{Kind, RING};
use super::{Hostile, PAIRS, gid};
use crate::watched::Watched;
use pvrdma::abi::PAGE;
use pvrdma::abi::doorbells;
use pvrdma::abi::rings::state;
use pvrdma::abi::work::{
    AddressVector, AtomicOperands, DatagramOperands, FastRegisterOperands, RemoteOperands, SendHeader, Sge,
    opcode,
};

impl<M: Dma + Clone + 'static, E: Entropy> Hostile<M, E> {
    /// Posts a batch to a random queue.
    pub(super) fn post(&mut self) {
        self.consume();
        // Most go to the connections, where requests get furthest.
        let at = if self.dice.one_in(4) { self.dice.below(self.slots.len()) } else { self.dice.below(PAIRS) };
        let slot = self.slots[at].clone();
        let handle = slot.live.map_or(7, |live| live.handle);
        let context = slot.live.map_or(0, |live| live.context);
        let page = self.contexts.iter().find(|(_, of)| *of == context).map_or(0, |context| context.0);
        let count = 1 + u32::try_from(self.dice.below(RING as usize)).unwrap();
        let receive = slot.kind == Kind::Shared || self.dice.one_in(6);
        match slot.kind {
            Kind::Queues | Kind::Shared => {
                let (first, size, words) = match (slot.kind, receive) {
                    (Kind::Queues, false) => (1, 128, (state::TX_TAIL, state::TX_HEAD)),
                    (Kind::Queues, true) => (3, 64, (state::RX_TAIL, state::RX_HEAD)),
                    _ => (1, 64, (state::RX_TAIL, state::RX_HEAD)),
                };
                let memory = self.attacker.memory.clone();
                let tail = memory.load_u32(slot.pages[0] + words.0).unwrap() & (2 * RING - 1);
                let head = memory.load_u32(slot.pages[0] + words.1).unwrap() & (2 * RING - 1);
                let room = RING.saturating_sub(tail.wrapping_sub(head) & (2 * RING - 1));
                let count = count.min(room);
                for index in 0..count {
                    let byte = u64::from((tail + index) & (RING - 1)) * size;
                    let at = slot.pages[first + usize::try_from(byte / PAGE).unwrap()] + byte % PAGE;
                    if receive {
                        memory.write(at, &self.receive()).unwrap();
                    } else {
                        memory.write(at, &self.send()).unwrap();
                    }
                }
                memory.store_u32(slot.pages[0] + words.0, (tail + count) & (2 * RING - 1)).unwrap();
                let (word, flag) = match (slot.kind, receive) {
                    (Kind::Shared, _) => (doorbells::SRQ, doorbells::SRQ_RECEIVE),
                    (_, false) => (doorbells::QP, doorbells::QP_SEND),
                    (_, true) => (doorbells::QP, doorbells::QP_RECEIVE),
                };
                self.attacker.uar.store_u32(u64::from(page) * PAGE + word, handle | flag).unwrap();
            }
            Kind::Completions => {
                let flag =
                    self.dice.pick(&[doorbells::CQ_ARM, doorbells::CQ_ARM_SOLICITED, doorbells::CQ_POLL]);
                self.attacker.uar.store_u32(u64::from(page) * PAGE + doorbells::CQ, handle | flag).unwrap();
            }
            Kind::Region => {
                let page = self.dice.pick(&slot.pages);
                let value = self.dice.any();
                self.attacker.memory.write(page + 8 * (value >> 55), &value.to_le_bytes()).unwrap();
            }
        }
    }

    /// Consumes completions without checking them.
    fn consume(&mut self) {
        for slot in self.slots.iter().filter(|slot| slot.kind == Kind::Completions && slot.live.is_some()) {
            if !self.dice.one_in(50) {
                let tail = self.attacker.memory.load_u32(slot.pages[0] + state::RX_TAIL).unwrap();
                self.attacker.memory.store_u32(slot.pages[0] + state::RX_HEAD, tail).unwrap();
            }
        }
        while self.peer.take(&self.peer_cq).is_some() {}
    }

    fn sge(&mut self) -> Sge {
        let at = self.dice.below(self.slots.len());
        let slot = &self.slots[at];
        let (address, key) = match slot.live {
            Some(live) if slot.kind == Kind::Region => (slot.address, live.lkey),
            _ => self
                .slots
                .iter()
                .filter(|slot| slot.kind == Kind::Region)
                .find_map(|slot| slot.live.map(|live| (slot.address, live.lkey)))
                .unwrap_or((0x1234, 0x100)),
        };
        let offset = self.dice.below(8000) as u64;
        let length = u32::try_from(self.dice.below(4000)).unwrap();
        match self.dice.below(120) {
            0 => Sge { address: self.dice.any().into(), length: length.into(), lkey: key.into() },
            1 => {
                Sge { address: (address + offset).into(), length: self.dice.word().into(), lkey: key.into() }
            }
            2 => Sge {
                address: (address + offset).into(),
                length: length.into(),
                lkey: self.dice.word().into(),
            },
            3 => Sge { address: (address + 3 * PAGE - 1).into(), length: 2.into(), lkey: key.into() },
            _ => Sge { address: (address + offset).into(), length: length.into(), lkey: key.into() },
        }
    }

    fn receive(&mut self) -> [u8; 64] {
        let count = self.dice.below(4);
        let mut bytes = [0; 64];
        bytes[..8].copy_from_slice(&self.dice.any().to_le_bytes());
        let shown = if self.dice.one_in(100) { self.dice.word() } else { u32::try_from(count).unwrap() };
        bytes[8..12].copy_from_slice(&shown.to_le_bytes());
        for index in 0..count.min(3) {
            let at = 16 + 16 * index;
            bytes[at..at + 16].copy_from_slice(self.sge().as_bytes());
        }
        bytes
    }

    fn send(&mut self) -> [u8; 128] {
        let mut code = self.dice.pick(Self::opcodes());
        if self.dice.one_in(60) {
            code = if self.dice.one_in(9) { self.dice.word() } else { self.dice.word() % 16 };
        }
        let atomic = matches!(code, opcode::COMPARE_SWAP | opcode::FETCH_ADD);
        let count = if atomic { 1 } else { self.dice.below(3) };
        let shown = if self.dice.one_in(150) { self.dice.word() } else { u32::try_from(count).unwrap() };
        let header = SendHeader {
            wr_id: self.dice.any().into(),
            sge_count: shown.into(),
            total_length: self.dice.word().into(),
            opcode: code.into(),
            flags: (self.dice.word() % 32).into(),
            immediate: self.any_key().to_le_bytes(),
            reserved: 0.into(),
            operands: self.operands(code),
        };
        let mut bytes = [0; 128];
        bytes[..80].copy_from_slice(header.as_bytes());
        for index in 0..count {
            let mut sge = self.sge();
            if atomic {
                sge.length = 8.into();
            }
            bytes[80 + 16 * index..96 + 16 * index].copy_from_slice(sge.as_bytes());
        }
        bytes
    }

    fn any_key(&mut self) -> u32 {
        let regions: Vec<u32> =
            self.slots.iter().filter_map(|slot| slot.live).map(|live| live.rkey).collect();
        match self.dice.below(12) {
            0 => self.dice.word(),
            1 => self.secret.0.rkey,
            2 => self.exposed.rkey ^ 1,
            3 if !regions.is_empty() => self.dice.pick(&regions),
            _ => self.exposed.rkey,
        }
    }

    fn operands(&mut self, code: u32) -> [u8; 48] {
        let near = self.exposed.address + 8 * self.dice.below(1000) as u64;
        let address = match self.dice.below(60) {
            0 => self.dice.any(),
            1 => self.secret.0.address,
            2 => self.exposed.address.wrapping_sub(1),
            3 => self.exposed.address + 3 * PAGE - 1,
            _ => near & !7,
        };
        let rkey = if self.dice.one_in(40) { self.any_key() } else { self.exposed.rkey };
        let mut operands = [0; 48];
        match code {
            opcode::COMPARE_SWAP | opcode::FETCH_ADD => {
                let body = AtomicOperands {
                    address: if self.dice.one_in(50) { address + 4 } else { address }.into(),
                    compare_or_add: self.dice.any().into(),
                    swap: self.dice.any().into(),
                    rkey: rkey.into(),
                    unused: [0; 20],
                };
                operands.copy_from_slice(body.as_bytes());
            }
            opcode::FAST_REGISTER => {
                let at = self.dice.below(self.slots.len());
                let directory = self.dice.pick(&[self.slots[at].directory, 0, 1, u64::MAX - 4095]);
                // The device would need access to the region's pages for as long as the key may live, so the list is always invalid.
                let directory = directory | 1;
                let body = FastRegisterOperands {
                    iova: address.into(),
                    directory: directory.into(),
                    page_shift: self.dice.pick(&[12, 12, 12, 21]).into(),
                    page_count: (self.dice.word() % 140).into(),
                    length: (self.dice.word() % 20_000).into(),
                    access: 15.into(),
                    rkey: self.any_key().into(),
                    unused: [0; 12],
                };
                operands.copy_from_slice(body.as_bytes());
            }
            opcode::SEND | opcode::SEND_IMMEDIATE => {
                let at = self.dice.below(self.peer_qps.len());
                let pd = self.pds.first().map_or(1, |pd| pd.0);
                let body = DatagramOperands {
                    qpn: self.dice.pick(&[1, self.peer_qps[at].qpn, 0, 0xFF_FFFF]).into(),
                    qkey: self.dice.pick(&[0x11u32, 0x8001_0000, 0]).into(),
                    address: AddressVector {
                        port_pd: (pd | self.dice.pick(&[1u32, 1, 1, 2]) << 24).into(),
                        traffic: self.dice.word().into(),
                        dgid: gid(self.dice.pick(&[1, 2, 3, 4, 99])),
                        source_path: 0x80,
                        gid_index: self.dice.pick(&[0, 0, 0, 200]),
                        static_rate: 0,
                        hop_limit: 1,
                        dmac: [1; 6],
                        reserved: [0; 6],
                    },
                };
                operands.copy_from_slice(body.as_bytes());
            }
            _ => {
                let body = RemoteOperands { address: address.into(), rkey: rkey.into(), unused: [0; 36] };
                operands.copy_from_slice(body.as_bytes());
            }
        }
        operands
    }

    /// A second attacker for its own thread: it rewrites requests and indices while the device reads them.
    pub fn scribbler(&self, seed: u64) -> Scribbler<M> {
        let rings = self.slots.iter().filter(|slot| matches!(slot.kind, Kind::Queues | Kind::Shared));
        let lists = self.slots.iter().map(|slot| (slot.table, slot.pages[0])).collect();
        let mut values = vec![0, 1, 2, 8, 64, 4096, u64::MAX, self.exposed.address, self.secret.0.address];
        values.extend(self.slots.iter().map(|slot| slot.address));
        values.extend([self.exposed.rkey, self.secret.0.rkey].map(u64::from));
        Scribbler {
            memory: self.attacker.memory.unwatched(),
            requests: rings.clone().flat_map(|slot| slot.pages[1..].to_vec()).collect(),
            indices: self
                .slots
                .iter()
                .filter(|slot| slot.kind != Kind::Region)
                .map(|slot| slot.pages[0])
                .collect(),
            lists,
            values,
            seed,
        }
    }
}

/// Rewrites requests, indices and page lists at any moment.
#[derive(Debug)]
pub struct Scribbler<M> {
    memory: Watched<M>,
    requests: Vec<u64>,
    indices: Vec<u64>,
    /// Tables, and their first entry.
    lists: Vec<(u64, u64)>,
    values: Vec<u64>,
    seed: u64,
}

impl<M: Dma + Clone> Scribbler<M> {
    /// Runs until `stop`. Returns the number of words written.
    #[must_use]
    pub fn run(self, stop: &AtomicBool) -> u64 {
        let mut dice = Dice::new(Seed(self.seed));
        let mut written = 0;
        while !stop.load(Ordering::Relaxed) {
            written += 1;
            match dice.below(1000) {
                0 => {
                    let at = dice.pick(&self.indices) + 4 * dice.below(4) as u64;
                    let _ = self.memory.store_u32(at, dice.word() % 140);
                }
                1..=20 => {
                    let (table, first) = dice.pick(&self.lists);
                    // An address that isn't the guest's, and back.
                    let _ = self.memory.write(table, &dice.pick(&[0u64, 1, u64::MAX]).to_le_bytes());
                    std::hint::spin_loop();
                    let _ = self.memory.write(table, &first.to_le_bytes());
                }
                _ => {
                    let at = dice.pick(&self.requests) + 4 * dice.below(1024) as u64;
                    let value = if dice.one_in(3) { dice.any() } else { dice.pick(&self.values) };
                    let low = u32::try_from(value & 0xFFFF_FFFF).unwrap();
                    let _ = self.memory.store_u32(at, low);
                }
            }
            // One word at a time, with pauses: a request that is rewritten constantly is always invalid.
            for _ in 0..dice.below(2000) {
                std::hint::spin_loop();
            }
        }
        written
    }
}
