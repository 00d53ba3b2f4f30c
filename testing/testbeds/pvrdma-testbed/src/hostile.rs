//! A hostile guest: it does everything that a driver and its processes could do to a device, wrongly. Meanwhile a peer has a connection
//! with it, and two other guests communicate. The oracle ([`crate::watched`]) checks every access of the device.
//!
//! | module | holds |
//! |---|---|
//! | [`dice`] | source of choices |
//! | `objects` | the attacker's objects, and their pages |
//! | `requests` | work requests and ring indices, mostly invalid |

pub mod dice;
mod objects;
mod requests;

use dma::Dma;
use hca::names::SegmentId;

use crate::guest::{Guest, Qp, QpOptions, Region};
use crate::host::Host;
use crate::queues::{Post, sge};
use crate::watched::{Grant, Watched};
use dice::{Dice, Entropy};
use objects::{Kind, Slot};
use pvrdma::abi::PAGE;
use pvrdma::abi::commands::number;
use pvrdma::abi::registers::{self, control};
use pvrdma::abi::rings::state;
use pvrdma::abi::work::opcode;
use pvrdma::device::Config;
pub use requests::Scribbler;

/// First guest address of each guest's memory; address 0 is no page.
pub const BASE: u64 = 0x10_0000;
/// Number of pages of each guest.
pub const PAGES: usize = 1024;
/// Number of connections between the attacker and its peer.
const PAIRS: usize = 6;
/// All access rights.
const ALL: u32 = 1 | 2 | 4 | 8;

/// Counts of what was done.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tally {
    /// Requests that the engine executed, flushed or refused.
    pub requests: u64,
    /// Number of commands sent.
    pub commands: u64,
    /// Commands that succeeded.
    pub accepted: u64,
    /// Other register writes.
    pub registers: u64,
    /// Messages between the innocent guests, each verified.
    pub verified: u64,
    /// Limit of turns that one of those messages took.
    pub slowest: u32,
}

/// An attacker, its peer, and two innocent guests.
pub struct Hostile<M: Dma + Clone + 'static, E> {
    host: Host<Watched<M>>,
    dice: Dice<E>,
    attacker: Guest<Watched<M>>,
    slots: Vec<Slot>,
    contexts: Vec<(u32, u32)>,
    pds: Vec<(u32, u32)>,
    peer: Guest<Watched<M>>,
    peer_qps: Vec<Qp>,
    peer_cq: crate::Cq,
    exposed: Region,
    secret: (Region, Vec<u8>),
    innocent: [(Guest<Watched<M>>, Qp, crate::Cq, Region); 2],
    round: u64,
    /// Counts of what was done.
    pub tally: Tally,
}

impl<M: Dma + Clone + 'static, E> std::fmt::Debug for Hostile<M, E> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Hostile").field("tally", &self.tally).finish_non_exhaustive()
    }
}

fn gid(last: u8) -> [u8; 16] {
    let mut gid = [0; 16];
    gid[10..].copy_from_slice(&[0xFF, 0xFF, 10, 0, 0, last]);
    gid
}

/// Pages of the attacker's driver.
fn bookkeeping() -> Vec<u64> {
    (1..objects::BOOKKEEPING).map(|page| BASE + page * PAGE).collect()
}

fn guest<M: Dma + Clone + 'static>(host: &mut Host<Watched<M>>, last: u8, inner: M) -> Guest<Watched<M>> {
    let mut config = Config::new(format!("vm{last}"), SegmentId(1), [2, 0, 0, 0, 0, last]);
    config.max_uar = 8;
    config.full_scan_interval = 5_000_000;
    let end = BASE + PAGES as u64 * PAGE;
    let memory = Watched::new(inner, BASE, PAGES);
    let mut guest = Guest::new(host, config, memory.clone(), end);
    guest.memory = memory.unwatched();
    guest.start_at(BASE + PAGE);
    guest
}

/// A well-behaved guest. The device may access all of its memory but one page in four, which holds nothing.
fn honest<M: Dma + Clone + 'static>(host: &mut Host<Watched<M>>, last: u8, inner: M) -> Guest<Watched<M>> {
    let mut guest = guest(host, last, inner);
    let pages: Vec<u64> = (0..PAGES as u64).map(|page| BASE + page * PAGE).collect();
    guest.memory.grant(&pages, Grant::Write);
    guest.probe(host);
    guest.bind(host, 0, gid(last)).unwrap();
    guest
}

impl<M: Dma + Clone + 'static, E: Entropy> Hostile<M, E> {
    /// Four guests, each with memory from `memory`: [`PAGES`] pages from [`BASE`] on.
    pub fn new(mut memory: impl FnMut() -> M, source: E) -> Self {
        let mut host = Host::default();
        let attacker = guest(&mut host, 1, memory());
        let mut peer = honest(&mut host, 2, memory());
        let context = peer.context(&mut host);
        let pd = peer.pd(&mut host, context.1);
        let cq = peer.cq(&mut host, context, 512);
        let exposed = peer.register(&mut host, pd, 0x7100_0000_0010, 3 * PAGE, ALL);
        let secret = peer.register(&mut host, pd, 0x7200_0000_0000, 2 * PAGE, 1);
        let kept: Vec<u8> = (0..2 * PAGE).map(|i| u8::try_from(i * 7 % 253).unwrap()).collect();
        secret.write(&peer.memory, 0, &kept);
        let options = QpOptions { max_receive_sge: 1, ..QpOptions::default() };
        let peer_qps = (0..PAIRS)
            .map(|_| peer.qp(&mut host, context.0, pd, (&cq, &cq), None, options).unwrap())
            .collect();

        let mut innocent = [3, 4].map(|last| {
            let mut guest = honest(&mut host, last, memory());
            let context = guest.context(&mut host);
            let pd = guest.pd(&mut host, context.1);
            let cq = guest.cq(&mut host, context, 64);
            let qp = guest.qp(&mut host, context.0, pd, (&cq, &cq), None, QpOptions::default()).unwrap();
            let region = guest.register(&mut host, pd, 0x7300_0000_0123, 5000, ALL);
            guest.to_init(&mut host, &qp, ALL).unwrap();
            (guest, qp, cq, region)
        });
        let [left, right] = &mut innocent;
        left.0.connect(&mut host, &left.1, right.1.qpn, gid(4)).unwrap();
        right.0.connect(&mut host, &right.1, left.1.qpn, gid(3)).unwrap();

        let mut this = Self {
            host,
            dice: Dice::new(source),
            attacker,
            slots: Vec::new(),
            contexts: Vec::new(),
            pds: Vec::new(),
            peer,
            peer_qps,
            peer_cq: cq,
            exposed,
            secret: (secret, kept),
            innocent,
            round: 0,
            tally: Tally::default(),
        };
        this.prepare();
        this.begin();
        this
    }

    /// Whether the input has ended.
    pub fn over(&self) -> bool {
        self.dice.over
    }

    /// One pass of the engine, as a daemon runs it.
    pub fn turn(&mut self) -> bool {
        let guests = [&self.attacker, &self.peer, &self.innocent[0].0, &self.innocent[1].0];
        let before: u64 = self.host.requests;
        let worked = self.host.turn(guests.map(|guest| (guest.id, &guest.uar)));
        self.tally.requests += self.host.requests - before;
        worked
    }

    /// The attacker's driver starts, or restarts.
    fn begin(&mut self) {
        self.forget_all();
        self.attacker.start_at(BASE + PAGE);
        self.attacker.memory.grant(&bookkeeping(), Grant::Write);
        self.attacker.probe(&mut self.host);
        let _ = self.attacker.bind(&mut self.host, 0, gid(1));
        self.tally.commands += 2;
    }

    /// One act of the attacker, and its consequences.
    pub fn step(&mut self) {
        self.round += 1;
        self.act();
        for _ in 0..=self.dice.below(4) {
            self.turn();
        }
        if self.round.is_multiple_of(256) {
            self.check_innocents();
        }
        if self.round.is_multiple_of(4096) {
            let (region, kept) = &self.secret;
            assert_eq!(
                &region.read(&self.peer.memory, 0, 2 * PAGE),
                kept,
                "memory without remote access changed"
            );
        }
    }

    /// One act of the attacker alone.
    pub fn act(&mut self) {
        match self.dice.below(100) {
            0..=74 => {
                for _ in 0..=self.dice.below(12) {
                    self.post();
                }
            }
            75..=81 => self.command(),
            82..=91 => self.connect_one(),
            92..=93 => self.scribble(),
            94..=97 => self.doorbells(),
            98 => self.registers(),
            _ => self.peer_receives(),
        }
    }

    /// One of the innocent guests posts a WRITE of 8 bytes to the other.
    pub fn innocent_posts(&mut self) {
        let [left, right] = &self.innocent;
        let to = (right.3.address, right.3.rkey);
        self.round += 1;
        let write = Post::remote(self.round, opcode::WRITE, to.0, to.1, &[sge(&left.3, 0, 8)]);
        assert!(left.0.post_send(&left.1, &write));
    }

    /// Whether that WRITE is complete.
    pub fn innocent_polls(&mut self) -> bool {
        let left = &self.innocent[0];
        let Some(entry) = left.0.poll(&left.2) else { return false };
        assert_eq!((entry.status.get(), entry.wr_id.get()), (0, self.round));
        true
    }

    /// Checks that the innocent guests' messages arrive unchanged.
    fn check_innocents(&mut self) {
        let [left, right] = &self.innocent;
        let data: Vec<u8> = (0..5000u64).map(|i| u8::try_from((i * 3 + self.round) % 251).unwrap()).collect();
        left.3.write(&left.0.memory, 0, &data);
        assert!(right.0.post_receive(&right.1, self.round, &[sge(&right.3, 0, 5000)]));
        assert!(left.0.post_send(&left.1, &Post::send(self.round, &[sge(&left.3, 0, 5000)])));
        let mut turns = 0;
        let (mut sent, mut received) = (None, None);
        while sent.is_none() || received.is_none() {
            assert!(turns < 10_000, "an innocent guest's message is not delivered");
            turns += 1;
            self.turn();
            let [left, right] = &self.innocent;
            sent = sent.or_else(|| left.0.poll(&left.2));
            received = received.or_else(|| right.0.poll(&right.2));
        }
        self.tally.slowest = self.tally.slowest.max(turns);
        let [_, right] = &self.innocent;
        for entry in [sent, received].into_iter().flatten() {
            assert_eq!((entry.status.get(), entry.wr_id.get()), (0, self.round));
        }
        assert_eq!(right.3.read(&right.0.memory, 0, 5000), data);
        self.tally.verified += 1;
    }

    /// The peer posts receives for the attacker to fill.
    fn peer_receives(&mut self) {
        let qp = self.peer_qps[self.dice.below(PAIRS)].clone();
        let length = u32::try_from(self.dice.below(8000)).unwrap();
        for _ in 0..self.dice.below(40) {
            self.peer.post_receive(&qp, 1, &[sge(&self.exposed, 0, length)]);
        }
    }

    /// Connects a pair again from whatever state it is in, on both sides.
    fn connect_one(&mut self) {
        let at = self.dice.below(PAIRS);
        let peer = self.peer_qps[at].clone();
        let Some((handle, qpn)) = self.attackers_qp(at) else {
            self.create_missing(at);
            return;
        };
        let host = &mut self.host;
        // Nothing else polls the peer's completions.
        let side = &mut self.peer;
        side.modify(host, peer.handle, 1, |to| to.state = 0.into()).unwrap();
        side.memory.zero(peer.pages[0], 16).unwrap();
        side.to_init(host, &peer, ALL).unwrap();
        side.connect(host, &peer, qpn, gid(1)).unwrap();
        for wr_id in 0..4 {
            side.post_receive(&peer, wr_id, &[sge(&self.exposed, 0, 4096)]);
        }
        while side.take(&self.peer_cq).is_some() {}
        let slot = &self.slots[at];
        let pages = slot.pages.clone();
        let shape = slot.as_qp(handle, qpn);
        self.tally.commands += 8;
        let attacker = &mut self.attacker;
        let up = attacker.modify(&mut self.host, handle, 1, |to| to.state = 0.into()).is_ok();
        attacker.memory.zero(pages[0], 16).unwrap();
        let up = up
            && attacker.to_init(&mut self.host, &shape, ALL).is_ok()
            && attacker.connect(&mut self.host, &shape, peer.qpn, gid(2)).is_ok();
        self.tally.accepted += 4 + 4 * u64::from(up);
    }

    /// Random register accesses; some restart the device.
    fn registers(&mut self) {
        self.tally.registers += 1;
        let id = self.attacker.id;
        match self.dice.below(200) {
            0 => {
                self.host.write(id, registers::CONTROL, control::RESET);
                self.forget_all();
                self.begin();
            }
            1 => {
                // An invalid region address: the device is silent until the driver returns.
                let low = self.dice.pick(&[0, 7, 0xFFFF_FFF8, 0x10_0001]);
                self.host.write(id, registers::DSR_LOW, low);
                self.host.write(id, registers::DSR_HIGH, self.dice.pick(&[0, u32::MAX]));
                self.forget_all();
                self.host.write(id, registers::REQUEST, 0);
                self.begin();
            }
            2 => {
                let device = self.host.devices.get_mut(id).unwrap();
                device.set_bus_master(&mut self.host.engine, false);
                for _ in 0..20 {
                    self.turn();
                }
                let device = self.host.devices.get_mut(id).unwrap();
                device.set_bus_master(&mut self.host.engine, true);
            }
            3..=20 => {
                let offset = self.dice.pick(&[0, 0x14, 0x18, 0x20, 0x24, 0x28, 0xFFC]);
                let value = self.dice.word();
                self.host.write(id, offset, value);
                let _ = self.host.read(id, offset);
            }
            21..=30 => {
                let value = self.dice.pick(&[0, 1, 3, 0xFFFF_FFFF]);
                self.host.write(id, registers::CONTROL, value);
            }
            31..=40 => {
                let value = self.dice.pick(&[1, 2, u32::MAX]);
                self.host.write(id, registers::REQUEST, value);
            }
            _ => {
                let value = self.dice.pick(&[0, 1, u32::MAX]);
                self.host.write(id, registers::INTERRUPT_MASK, value);
                self.post();
                self.turn();
                self.host.write(id, registers::INTERRUPT_MASK, 0);
            }
        }
    }

    fn doorbells(&mut self) {
        let page = self.dice.below(8) as u64;
        let word = self.dice.pick(&[0u64, 4, 8]);
        let handle = u32::try_from(self.dice.below(40)).unwrap();
        let flags = self.dice.word() & 0xE000_0000;
        let handle = if self.dice.one_in(8) { self.dice.word() } else { handle };
        self.attacker.uar.store_u32(page * PAGE + word, handle | flags).unwrap();
        if self.dice.one_in(4) {
            let device = self.host.devices.get_mut(self.attacker.id).unwrap();
            device.doorbell_write(&mut self.host.engine, page * PAGE + word, handle | flags);
        }
        // Events are consumed sometimes.
        if self.dice.one_in(3) {
            self.attacker.discard_events();
        }
    }

    /// Stores random index words.
    fn scribble(&mut self) {
        let at = self.dice.below(self.slots.len());
        let page = self.slots[at].pages[0];
        let word = self.dice.pick(&[state::TX_TAIL, state::TX_HEAD, state::RX_TAIL, state::RX_HEAD]);
        if self.slots[at].kind == Kind::Region {
            return;
        }
        let value = match self.dice.below(4) {
            0 => self.dice.word(),
            _ => u32::try_from(self.dice.below(600)).unwrap(),
        };
        self.attacker.memory.store_u32(page + word, value).unwrap();
    }

    /// Executes commands of which some are valid.
    fn command(&mut self) {
        self.tally.commands += 1;
        let accepted = match self.dice.below(12) {
            0..=5 => self.create_any(),
            6..=8 => self.destroy_any(),
            9 => {
                let code = self.dice.pick(&[
                    number::QUERY_PORT,
                    number::QUERY_PKEY,
                    number::QUERY_QP,
                    number::QUERY_SRQ,
                ]);
                let body: Vec<u8> = (0..16).map(|_| u8::try_from(self.dice.below(4)).unwrap()).collect();
                self.attacker.request(&mut self.host, code, &body) == 0
            }
            10 => self.modify_any(),
            _ => {
                let index = u32::try_from(self.dice.below(140)).unwrap();
                let last = u8::try_from(self.dice.below(6)).unwrap();
                self.attacker.bind(&mut self.host, index, gid(last)).is_ok()
            }
        };
        self.tally.accepted += u64::from(accepted);
    }

    /// Opcodes, repeated by their frequency.
    fn opcodes() -> &'static [u32] {
        &[
            opcode::WRITE,
            opcode::WRITE,
            opcode::WRITE_IMMEDIATE,
            opcode::SEND,
            opcode::SEND,
            opcode::SEND_IMMEDIATE,
            opcode::READ,
            opcode::READ,
            opcode::COMPARE_SWAP,
            opcode::FETCH_ADD,
        ]
    }
}
