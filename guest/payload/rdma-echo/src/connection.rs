//! A completion queue and its queue pairs: one that exchanges messages with the peer, and idle ones.

use zerocopy::{FromBytes, FromZeros};

use crate::abi::attributes::QueuePair;
use crate::abi::commands::{
    CqResponse, CreateContext, CreateCq, CreateMr, CreateQp, Handle, ModifyQp, MrResponse, QpResponse,
    mr_kind, number, qp_kind,
};
use crate::abi::completion::Entry;
use crate::abi::doorbells;
use crate::abi::rings::state;
use crate::abi::work::{ReceiveHeader, SendHeader, Sge, opcode, receive_slot, send_flags, send_slot};
use crate::device::{Device, doorbell, uar_frame};
use crate::fail;
use crate::memory::{PAGE, Pages, load, read, store, word, write};

/// Slots of the send and of the receive queue.
const SLOTS: u32 = 64;
/// Receives that are posted all the time.
const RECEIVES: u32 = 16;
const ENTRIES: u32 = 256;
/// Page of doorbells.
const UAR: u64 = 1;
/// Pages of a queue pair: indices, send queue, receive queue.
const SEND_PAGES: u64 = (SLOTS as u64 * send_slot(1)).div_ceil(PAGE);
const QP_PAGES: u64 = 1 + SEND_PAGES + (SLOTS as u64 * receive_slot(1)).div_ceil(PAGE);
/// Bytes of a message.
const MESSAGE: u32 = 8;
/// Timeout code, 67 ms, and retries. A move is much shorter.
const TIMEOUT: u8 = 14;
const RETRIES: u8 = 7;
/// Access to memory by the peer: none of it is used.
const ACCESS: u32 = 0xf;

/// States of a queue pair.
const INIT: u32 = 1;
const READY_TO_RECEIVE: u32 = 2;
const READY_TO_SEND: u32 = 3;

/// Queue pairs in INIT, then connected.
pub struct Connection {
    cq: (u32, u64),
    /// Handle and pages of the queue pair that exchanges messages.
    qp: (u32, u64),
    /// Handles of the idle ones ascend from this one on.
    idle: (u32, u32),
    /// Received messages, then the one to send; a page each.
    buffer: u64,
    lkey: u32,
    /// Its number.
    pub qpn: u32,
}

/// The GID of a VM: the IPv4 address 10.80.0.`last`.
pub fn gid(last: u64) -> [u8; 16] {
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 80, 0, last.to_le_bytes()[0]]
}

fn place(pages: u64, slot: u32, size: u64) -> u64 {
    pages + u64::from(slot & (SLOTS - 1)) * size
}

/// The next index of a ring: indices count to twice the number of slots.
const fn next(index: u32, slots: u32) -> u32 {
    (index + 1) & (2 * slots - 1)
}

impl Connection {
    /// Creates the objects, and in all `count` queue pairs. The idle ones share a list of pages, unlike a driver's, so that RAM of any size
    /// suffices.
    pub fn new(device: &Device, pages: &mut Pages, count: u32) -> Self {
        let context: Handle = device.command(number::CREATE_UC, CreateContext { pfn: uar_frame(UAR).into() });
        let pd: Handle = device.command(number::CREATE_PD, context);
        let buffer = pages.take(2);
        let mr: MrResponse = device.command(
            number::CREATE_MR,
            CreateMr {
                start: buffer.into(),
                length: (2 * PAGE).into(),
                directory: pages.directory(buffer, 2).into(),
                pd: pd.handle,
                access: ACCESS.into(),
                kind: mr_kind::USER.into(),
                pages: 2.into(),
            },
        );
        let cq_pages = 1 + u64::from(ENTRIES) * 64 / PAGE;
        let ring = pages.take(cq_pages);
        let cq: CqResponse = device.command(
            number::CREATE_CQ,
            CreateCq {
                directory: pages.directory(ring, cq_pages).into(),
                context: context.handle,
                entries: ENTRIES.into(),
                pages: word(cq_pages).into(),
                reserved: 0.into(),
            },
        );
        let mut make = |count: u32| {
            let ring = pages.take(QP_PAGES);
            let body = create_qp(pages.directory(ring, QP_PAGES), pd, cq.handle.get());
            let mut first = None;
            for _ in 0..count {
                let made: QpResponse = device.command(number::CREATE_QP, body);
                modify(device, made.handle.get(), 1 | 1 << 3 | 1 << 4 | 1 << 5, |to| {
                    to.state = INIT.into();
                    to.access = ACCESS.into();
                    to.port = 1;
                });
                let made = (made.handle.get(), made.qpn.get());
                first.get_or_insert(made);
            }
            (first, ring)
        };
        let (Some((handle, qpn)), ring_of_qp) = make(1) else { fail("no queue pair") };
        let idle = count.saturating_sub(1);
        let first_idle = make(idle).0.map_or(0, |(handle, _)| handle);
        Self {
            cq: (cq.handle.get(), ring),
            qp: (handle, ring_of_qp),
            idle: (first_idle, idle),
            buffer,
            lkey: mr.lkey.get(),
            qpn,
        }
    }

    /// Connects all queue pairs to the peer's, the idle ones as well, and posts receives.
    pub fn connect(&self, device: &Device, peer_qpn: u32, peer_gid: [u8; 16]) {
        raise(device, self.qp.0, peer_qpn, peer_gid);
        for number in 0..self.idle.1 {
            raise(device, self.idle.0 + number, peer_qpn, peer_gid);
        }
        for _ in 0..RECEIVES {
            self.post_receive();
        }
    }

    /// Posts a receive.
    pub fn post_receive(&self) {
        let ring = self.qp.1;
        let tail = load(ring + state::RX_TAIL);
        let at = place(ring + (1 + SEND_PAGES) * PAGE, tail, receive_slot(1));
        let offset = u64::from(tail & (SLOTS - 1)) * 64;
        write(at, ReceiveHeader { wr_id: offset.into(), sge_count: 1.into(), total_length: 0.into() });
        let sge =
            Sge { address: (self.buffer + offset).into(), length: MESSAGE.into(), lkey: self.lkey.into() };
        write(at + size_of::<ReceiveHeader>() as u64, sge);
        store(ring + state::RX_TAIL, next(tail, SLOTS));
        doorbell(UAR, doorbells::QP, self.qp.0 | doorbells::QP_RECEIVE);
    }

    /// Posts a SEND of a number.
    pub fn post_send(&self, value: u64) {
        let ring = self.qp.1;
        let tail = load(ring + state::TX_TAIL);
        if tail == load(ring + state::TX_HEAD) ^ SLOTS {
            fail("the send queue is full");
        }
        write(self.buffer + PAGE, value);
        let at = place(ring + PAGE, tail, send_slot(1));
        let header = SendHeader {
            wr_id: u64::MAX.into(),
            sge_count: 1.into(),
            total_length: 0.into(),
            opcode: opcode::SEND.into(),
            flags: send_flags::SIGNALED.into(),
            immediate: [0; 4],
            reserved: 0.into(),
            operands: [0; 48],
        };
        write(at, header);
        let sge =
            Sge { address: (self.buffer + PAGE).into(), length: MESSAGE.into(), lkey: self.lkey.into() };
        write(at + size_of::<SendHeader>() as u64, sge);
        store(ring + state::TX_TAIL, next(tail, SLOTS));
        doorbell(UAR, doorbells::QP, self.qp.0 | doorbells::QP_SEND);
    }

    /// Takes a completion: the number that a message had, or none for a SEND's.
    pub fn poll(&self) -> Option<Option<u64>> {
        let ring = self.cq.1;
        let head = load(ring + state::RX_HEAD);
        if load(ring + state::RX_TAIL) == head {
            return None;
        }
        let entry: Entry = read(ring + PAGE + u64::from(head & (ENTRIES - 1)) * 64);
        store(ring + state::RX_HEAD, next(head, ENTRIES));
        if entry.status.get() != 0 {
            crate::serial::reply(b'S', &[entry.status.get().into()]);
            fail("a completion has an error");
        }
        let offset = entry.wr_id.get();
        Some((offset != u64::MAX).then(|| read(self.buffer + offset)))
    }
}

/// A number of pages as 16 bits.
fn half(pages: u64) -> u16 {
    u16::try_from(pages).unwrap_or_else(|_| fail("a queue pair has too many pages"))
}

fn create_qp(directory: u64, pd: Handle, cq: u32) -> CreateQp {
    CreateQp {
        directory: directory.into(),
        pd: pd.handle,
        send_cq: cq.into(),
        receive_cq: cq.into(),
        srq: 0.into(),
        max_send_wr: SLOTS.into(),
        max_receive_wr: SLOTS.into(),
        max_send_sge: 1.into(),
        max_receive_sge: 1.into(),
        max_inline_data: 0.into(),
        lkey: 0.into(),
        access: 1.into(),
        total_pages: half(QP_PAGES).into(),
        send_pages: half(SEND_PAGES).into(),
        max_atomic_argument: 0.into(),
        signal_all: 1,
        kind: qp_kind::RC,
        has_srq: 0,
        reserved: [0; 3],
    }
}

fn modify(device: &Device, qp: u32, mask: u32, set: impl FnOnce(&mut QueuePair)) {
    let mut attributes = QueuePair::new_zeroed();
    set(&mut attributes);
    let _: Nothing =
        device.command(number::MODIFY_QP, ModifyQp { handle: qp.into(), mask: mask.into(), attributes });
}

/// A response without a body.
#[derive(FromBytes)]
#[repr(C)]
struct Nothing;

/// INIT over RTR to RTS.
fn raise(device: &Device, qp: u32, peer_qpn: u32, peer_gid: [u8; 16]) {
    modify(device, qp, 1 | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 15 | 1 << 17 | 1 << 20, |to| {
        to.state = READY_TO_RECEIVE.into();
        to.path_mtu = 3.into();
        to.destination_qpn = peer_qpn.into();
        to.max_dest_rd_atomic = 4;
        to.min_rnr_timer = 1;
        to.address.dgid = peer_gid;
        to.address.hop_limit = 64;
        to.address.flags = 1;
        to.address.port = 1;
    });
    modify(device, qp, 1 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 13 | 1 << 16, |to| {
        to.state = READY_TO_SEND.into();
        to.timeout = TIMEOUT;
        to.retry_count = RETRIES;
        to.rnr_retry = 7;
        to.max_rd_atomic = 4;
    });
}
