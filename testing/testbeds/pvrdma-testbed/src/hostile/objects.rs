//! The attacker's objects. Their pages lie apart, with a page between that the device may never access. The device may access a page from
//! the creating command on, until the object or its owner is destroyed.

use std::ops::Range;

use dma::Dma;
use zerocopy::{FromBytes, IntoBytes};

use super::dice::Entropy;
use super::{BASE, Hostile, PAGES, PAIRS};
use crate::guest::{Qp, QpOptions};
use crate::watched::Grant;
use pvrdma::abi::PAGE;
use pvrdma::abi::commands::{
    CreateCq, CreateMr, CreateQp, CreateSrq, MrResponse, QpResponse, mr_kind, number, qp_kind,
};

/// Number of pages at the beginning for the driver's own structures.
pub(super) const BOOKKEEPING: u64 = 64;
/// Number of slots of all rings.
pub(super) const RING: u32 = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Queues,
    Completions,
    Shared,
    Region,
}

/// A place for an object.
#[derive(Debug, Clone)]
pub(super) struct Slot {
    pub kind: Kind,
    pub pages: Vec<u64>,
    pub directory: u64,
    pub table: u64,
    /// Address of a region in the attacker's process.
    pub address: u64,
    pub live: Option<Live>,
}

/// An existing object of the device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Live {
    pub handle: u32,
    pub qpn: u32,
    pub pd: u32,
    pub context: u32,
    pub lkey: u32,
    pub rkey: u32,
}

impl Slot {
    pub fn as_qp(&self, handle: u32, qpn: u32) -> Qp {
        Qp {
            handle,
            qpn,
            pd: self.live.map_or(0, |live| live.pd),
            uar: 1,
            pages: self.pages.clone(),
            send_pages: 2,
            max_send_wr: RING,
            max_receive_wr: RING,
            send_size: 128,
            receive_size: 64,
        }
    }
}

/// A command that creates an object.
struct Command {
    code: u32,
    body: Vec<u8>,
    /// Bytes of the directory's address.
    fixed: Range<usize>,
    /// Offset of the protection domain, if the command has one.
    pd_at: Option<usize>,
    /// Offset of the context, if the command has one.
    context_at: Option<usize>,
}

impl Command {
    fn word(&self, at: usize) -> u32 {
        given_word(&self.body, at)
    }
}

fn create_cq(directory: u64, pages: u32, context: u32) -> Command {
    let body = CreateCq {
        directory: directory.into(),
        context: context.into(),
        entries: 256.into(),
        pages: pages.into(),
        reserved: 0.into(),
    };
    let body = body.as_bytes().to_vec();
    Command { code: number::CREATE_CQ, body, fixed: 0..8, pd_at: None, context_at: Some(8) }
}

fn create_srq(directory: u64, pages: u32, pd: u32) -> Command {
    let body = CreateSrq {
        directory: directory.into(),
        pd: pd.into(),
        pages: pages.into(),
        max_wr: RING.into(),
        max_sge: 3.into(),
        limit: 5.into(),
        reserved0: 0.into(),
        kind: 0,
        reserved1: [0; 7],
    };
    let body = body.as_bytes().to_vec();
    Command { code: number::CREATE_SRQ, body, fixed: 0..8, pd_at: Some(8), context_at: None }
}

impl<M: Dma + Clone + 'static, E: Entropy> Hostile<M, E> {
    /// Lays out the places for objects, once.
    pub(super) fn prepare(&mut self) {
        self.attacker.start_at(BASE + BOOKKEEPING * PAGE);
        let layout = [
            (Kind::Queues, PAIRS + 6, 4),
            (Kind::Completions, 6, 5),
            (Kind::Shared, 2, 2),
            (Kind::Region, 10, 4),
        ];
        for (kind, count, pages) in layout {
            for _ in 0..count {
                let pages: Vec<u64> = (0..pages)
                    .map(|_| {
                        let page = self.attacker.page();
                        // The device may never access it.
                        let _ = self.attacker.page();
                        page
                    })
                    .collect();
                let directory = self.attacker.directory(&pages);
                let table = directory + PAGE;
                self.attacker.memory.grant(&[directory, table], Grant::Read);
                let address = 0x7000_0000_0000
                    + self.slots.len() as u64 * 0x10_0000
                    + (self.slots.len() as u64 % 3) * 40
                    + 8;
                self.slots.push(Slot { kind, pages, directory, table, address, live: None });
            }
        }
        assert!(self.attacker.used() < BASE + PAGES as u64 * PAGE);
    }

    /// Revokes all pages after a device reset; the next driver grants its own.
    pub(super) fn forget_all(&mut self) {
        let all: Vec<u64> = self.slots.iter().flat_map(|slot| slot.pages.clone()).collect();
        self.attacker.memory.grant(&all, Grant::Nothing);
        self.attacker.memory.grant(&super::bookkeeping(), Grant::Nothing);
        for slot in &mut self.slots {
            slot.live = None;
        }
        self.contexts.clear();
        self.pds.clear();
    }

    fn give(&self, at: usize) {
        let slot = &self.slots[at];
        let (first, rest) = slot.pages.split_first().unwrap();
        let memory = &self.attacker.memory;
        match slot.kind {
            Kind::Region => memory.grant(&slot.pages, Grant::Write),
            Kind::Completions => {
                memory.grant(&[*first], Grant::Indices);
                memory.grant(rest, Grant::Write);
            }
            Kind::Queues | Kind::Shared => {
                memory.grant(&[*first], Grant::Indices);
                memory.grant(rest, Grant::Read);
            }
        }
    }

    fn take_back(&mut self, at: usize) {
        self.slots[at].live = None;
        self.attacker.memory.grant(&self.slots[at].pages, Grant::Nothing);
    }

    pub(super) fn attackers_qp(&self, at: usize) -> Option<(u32, u32)> {
        self.slots[at].live.map(|live| (live.handle, live.qpn))
    }

    /// Creates valid objects that a connection lacks.
    pub(super) fn create_missing(&mut self, at: usize) {
        if self.contexts.is_empty() {
            self.create_context(1);
        }
        let Some(&(_, context)) = self.contexts.first() else { return };
        if !self.pds.iter().any(|(_, of)| *of == context) {
            self.create_pd(context);
        }
        let completions = |slot: &Slot| slot.kind == Kind::Completions;
        if !self
            .slots
            .iter()
            .any(|slot| completions(slot) && slot.live.is_some_and(|live| live.context == context))
        {
            match self.slots.iter().position(|slot| completions(slot) && slot.live.is_none()) {
                Some(cq) => drop(self.create(cq, context, false)),
                // All pages belong to other contexts.
                None => drop(self.destroy_any()),
            }
        }
        let regions = self.slots.iter().position(|slot| slot.kind == Kind::Region && slot.live.is_none());
        if let Some(region) = regions {
            self.create(region, context, false);
        }
        self.create(at, context, false);
        self.tally.commands += 2;
    }

    fn create_context(&mut self, page: u32) -> bool {
        let Ok(handle) = self.attacker.context_at(&mut self.host, page) else { return false };
        // The earlier context of the page is gone with all its objects.
        if let Some(old) = self.contexts.iter().position(|(used, _)| *used == page) {
            let (_, old) = self.contexts.swap_remove(old);
            self.context_gone(old);
        }
        self.contexts.push((page, handle));
        true
    }

    fn create_pd(&mut self, context: u32) -> bool {
        let Ok(pd) = self.attacker.make(&mut self.host, number::CREATE_PD, context) else { return false };
        self.pds.push((pd, context));
        true
    }

    /// Creates something, or tries to.
    pub(super) fn create_any(&mut self) -> bool {
        let context = self.any_context();
        match self.dice.below(10) {
            0 => {
                let page = u32::try_from(self.dice.below(9)).unwrap();
                self.create_context(page)
            }
            1 => self.create_pd(context),
            _ => {
                let at = self.dice.below(self.slots.len());
                let wrong = self.dice.one_in(3);
                self.slots[at].live.is_none() && self.create(at, context, wrong)
            }
        }
    }

    fn any_context(&mut self) -> u32 {
        match self.dice.below(8) {
            0 => 0,
            1 => self.dice.word() % 20,
            _ => {
                let at = self.dice.below(self.contexts.len());
                self.contexts.get(at).map_or(0, |context| context.1)
            }
        }
    }

    fn live_in(&self, kind: Kind, context: u32) -> u32 {
        self.slots
            .iter()
            .filter(|slot| slot.kind == kind)
            .filter_map(|slot| slot.live)
            .find(|live| live.context == context)
            .map_or(0, |live| live.handle)
    }

    fn create(&mut self, at: usize, context: u32, wrong: bool) -> bool {
        let pd = self.pds.iter().rfind(|(_, of)| *of == context).map_or(0, |pd| pd.0);
        let cq = self.live_in(Kind::Completions, context);
        let slot = self.slots[at].clone();
        let directory = match wrong && self.dice.one_in(8) {
            false => slot.directory,
            true => self.dice.pick(&[0, 8, slot.directory + 4, BASE - PAGE, u64::MAX - 4095, slot.table]),
        };
        let pages = u32::try_from(slot.pages.len()).unwrap();
        let mut command = match slot.kind {
            Kind::Region => self.create_mr(slot.address, directory, pages, context, pd),
            Kind::Completions => create_cq(directory, pages, context),
            Kind::Shared => create_srq(directory, pages, pd),
            Kind::Queues => self.create_qp(at, directory, context, pd, cq),
        };
        if wrong {
            self.corrupt(&mut command);
        }
        if slot.kind == Kind::Region && command.word(32) == mr_kind::DMA {
            // It would grant all of memory.
            return false;
        }
        self.give(at);
        if self.attacker.request(&mut self.host, command.code, &command.body) != 0 {
            self.take_back(at);
            return false;
        }
        let live = self.created(slot.kind, &command);
        assert_ne!(live.context, u32::MAX, "an object was made for a protection domain that isn't there");
        self.slots[at].live = Some(live);
        true
    }

    fn create_mr(&mut self, start: u64, directory: u64, pages: u32, context: u32, pd: u32) -> Command {
        let kind = if context == 0 && self.dice.one_in(3) { mr_kind::FAST } else { mr_kind::USER };
        let body = CreateMr {
            start: start.into(),
            length: (3 * PAGE).into(),
            directory: directory.into(),
            pd: pd.into(),
            access: self.dice.pick(&[15u32, 15, 15, 1, 3, 5, 0x10_000F]).into(),
            kind: kind.into(),
            pages: pages.into(),
        };
        Command {
            code: number::CREATE_MR,
            body: body.as_bytes().to_vec(),
            fixed: 16..24,
            pd_at: Some(24),
            context_at: None,
        }
    }

    fn create_qp(&mut self, at: usize, directory: u64, context: u32, pd: u32, cq: u32) -> Command {
        let srq = self.live_in(Kind::Shared, context);
        let shared = at >= PAIRS && srq != 0 && self.dice.one_in(3);
        let kind = if at < PAIRS {
            qp_kind::RC
        } else {
            self.dice.pick(&[qp_kind::UD, qp_kind::UD, qp_kind::RC, qp_kind::GSI])
        };
        let QpOptions { signal_all, .. } = QpOptions::default();
        let body = CreateQp {
            directory: directory.into(),
            pd: pd.into(),
            send_cq: cq.into(),
            receive_cq: cq.into(),
            srq: srq.into(),
            max_send_wr: RING.into(),
            max_receive_wr: if shared { 0 } else { RING }.into(),
            max_send_sge: 3.into(),
            max_receive_sge: if shared { 0 } else { 3 }.into(),
            max_inline_data: 0.into(),
            lkey: 0.into(),
            access: 1.into(),
            total_pages: 4.into(),
            send_pages: 2.into(),
            max_atomic_argument: 0.into(),
            signal_all: u8::from(signal_all != self.dice.one_in(4)),
            kind,
            has_srq: u8::from(shared),
            reserved: [0; 3],
        };
        let body = body.as_bytes().to_vec();
        Command { code: number::CREATE_QP, body, fixed: 0..8, pd_at: Some(8), context_at: None }
    }

    /// Replaces a word of a command, but not the directory's address.
    fn corrupt(&mut self, command: &mut Command) {
        let word = 4 * self.dice.below(command.body.len() / 4);
        if !command.fixed.contains(&word) {
            let value = match self.dice.below(3) {
                0 => self.dice.word(),
                1 => u32::try_from(self.dice.below(9)).unwrap(),
                _ => 1 << self.dice.below(32),
            };
            command.body[word..word + 4].copy_from_slice(&value.to_le_bytes());
        }
    }

    /// The object that a command has created. Its context is `u32::MAX` if its protection domain doesn't exist.
    fn created(&self, kind: Kind, command: &Command) -> Live {
        let answer = self.attacker.response();
        let mut live = Live { handle: given_word(&answer, 0), qpn: 0, pd: 0, context: 0, lkey: 0, rkey: 0 };
        live.pd = command.pd_at.map_or(0, |at| command.word(at));
        live.context = match command.context_at {
            Some(at) => command.word(at),
            None => self.pds.iter().find(|(pd, _)| *pd == live.pd).map_or(u32::MAX, |pd| pd.1),
        };
        match kind {
            Kind::Queues => {
                let made = QpResponse::read_from_prefix(&answer).unwrap().0;
                live.handle = made.handle.get();
                live.qpn = made.qpn.get();
            }
            Kind::Region => {
                let made = MrResponse::read_from_prefix(&answer).unwrap().0;
                (live.lkey, live.rkey) = (made.lkey.get(), made.rkey.get());
            }
            Kind::Completions | Kind::Shared => {}
        }
        live
    }

    /// Destroys something, or tries to.
    pub(super) fn destroy_any(&mut self) -> bool {
        let at = self.dice.below(self.slots.len());
        let (code, handle) = match (self.dice.below(40), self.slots[at].live) {
            (0, _) => (number::DESTROY_UC, self.any_context()),
            (1, _) => {
                let pd = self.dice.below(self.pds.len());
                (number::DESTROY_PD, self.pds.get(pd).map_or(3, |pd| pd.0))
            }
            (2..=8, _) => {
                let code = self.dice.pick(&[
                    number::DESTROY_MR,
                    number::DESTROY_CQ,
                    number::DESTROY_QP,
                    number::DESTROY_SRQ,
                    number::DESTROY_PD,
                    number::DESTROY_UC,
                ]);
                (code, self.dice.word() % 50)
            }
            // Connections live longer than other objects.
            (9..=20, _) if at < PAIRS => return false,
            (_, Some(live)) => (code_of(self.slots[at].kind), live.handle),
            (_, None) => return false,
        };
        let done = self.attacker.request(&mut self.host, code, &handle.to_le_bytes()) == 0;
        if done {
            self.gone(code, handle);
        }
        done
    }

    fn gone(&mut self, code: u32, handle: u32) {
        match code {
            number::DESTROY_UC => {
                self.contexts.retain(|(_, context)| *context != handle);
                self.context_gone(handle);
            }
            number::DESTROY_PD => self.pd_gone(handle),
            _ => {
                let is = |slot: &Slot| {
                    code_of(slot.kind) == code && slot.live.is_some_and(|live| live.handle == handle)
                };
                let at = self.slots.iter().position(is).expect("only what was made can be destroyed");
                self.take_back(at);
            }
        }
    }

    fn context_gone(&mut self, context: u32) {
        for (pd, _) in self.pds.clone().into_iter().filter(|(_, of)| *of == context) {
            self.pd_gone(pd);
        }
        for at in 0..self.slots.len() {
            let slot = &self.slots[at];
            if slot.kind == Kind::Completions && slot.live.is_some_and(|live| live.context == context) {
                self.take_back(at);
            }
        }
    }

    fn pd_gone(&mut self, pd: u32) {
        self.pds.retain(|(handle, _)| *handle != pd);
        for at in 0..self.slots.len() {
            let slot = &self.slots[at];
            if slot.kind != Kind::Completions && slot.live.is_some_and(|live| live.pd == pd) {
                self.take_back(at);
            }
        }
    }

    /// Tries a transition that is mostly invalid.
    pub(super) fn modify_any(&mut self) -> bool {
        let at = self.dice.below(PAIRS + 6);
        let handle = self.slots[at].live.map_or(9, |live| live.handle);
        if at >= PAIRS && self.dice.one_in(2) {
            let shape = self.slots[at].as_qp(handle, self.slots[at].live.map_or(2, |live| live.qpn));
            return self.attacker.start_datagrams(&mut self.host, &shape, 0x11).is_ok();
        }
        let (state, mask) = (self.dice.word() % 8, self.dice.word() & self.dice.word());
        let garbage: Vec<u8> = (0..160).map(|_| u8::try_from(self.dice.any() >> 56).unwrap()).collect();
        let mask = if self.dice.one_in(4) { 1 } else { mask };
        self.attacker
            .modify(&mut self.host, handle, mask, |to| {
                to.as_mut_bytes().copy_from_slice(&garbage);
                to.state = state.into();
            })
            .is_ok()
    }
}

fn given_word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn code_of(kind: Kind) -> u32 {
    match kind {
        Kind::Queues => number::DESTROY_QP,
        Kind::Completions => number::DESTROY_CQ,
        Kind::Shared => number::DESTROY_SRQ,
        Kind::Region => number::DESTROY_MR,
    }
}
