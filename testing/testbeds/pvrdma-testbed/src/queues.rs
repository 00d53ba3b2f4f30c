//! Posting, polling and arming, as driver and provider do.

use dma::Dma;
use dma::access::read_array;
use zerocopy::{IntoBytes, transmute};

use crate::guest::{Cq, Guest, Qp, Region, Srq};
use pvrdma::abi::PAGE;
use pvrdma::abi::completion::Entry;
use pvrdma::abi::doorbells;
use pvrdma::abi::rings::{ASYNC_SLOTS, COMPLETION_SLOTS, state};
use pvrdma::abi::work::{
    AddressVector, AtomicOperands, DatagramOperands, FastRegisterOperands, ReceiveHeader, RemoteOperands,
    SendHeader, Sge, opcode,
};
use pvrdma::ring::Indices;

/// A send request to post.
#[derive(Debug, Clone)]
pub struct Post {
    /// Echoed in the completion.
    pub wr_id: u64,
    /// Number of [`opcode`].
    pub opcode: u32,
    /// Bits of [`pvrdma::abi::work::send_flags`].
    pub flags: u32,
    /// Immediate data, or a key.
    pub immediate: [u8; 4],
    /// Operands. Fields that the opcode doesn't use are garbage.
    pub operands: [u8; 48],
    /// Scatter-gather elements of the request.
    pub sges: Vec<Sge>,
}

/// An element.
#[must_use]
pub fn sge(region: &Region, offset: u64, length: u32) -> Sge {
    Sge { address: (region.address + offset).into(), length: length.into(), lkey: region.lkey.into() }
}

impl Post {
    /// A SEND.
    #[must_use]
    pub fn send(wr_id: u64, sges: &[Sge]) -> Self {
        Self {
            wr_id,
            opcode: opcode::SEND,
            flags: 2,
            immediate: [0xC3; 4],
            operands: [0xC3; 48],
            sges: sges.to_vec(),
        }
    }

    /// A one-sided operation of `code`.
    #[must_use]
    pub fn remote(wr_id: u64, code: u32, address: u64, rkey: u32, sges: &[Sge]) -> Self {
        let operands = RemoteOperands { address: address.into(), rkey: rkey.into(), unused: [0xC3; 36] };
        Self { opcode: code, operands: transmute!(operands), ..Self::send(wr_id, sges) }
    }

    /// An atomic.
    #[must_use]
    pub fn atomic(wr_id: u64, code: u32, at: (u64, u32), operands: (u64, u64), sges: &[Sge]) -> Self {
        let operands = AtomicOperands {
            address: at.0.into(),
            compare_or_add: operands.0.into(),
            swap: operands.1.into(),
            rkey: at.1.into(),
            unused: [0xC3; 20],
        };
        Self { opcode: code, operands: transmute!(operands), ..Self::send(wr_id, sges) }
    }

    /// A datagram.
    #[must_use]
    pub fn datagram(wr_id: u64, pd: u32, qpn: u32, qkey: u32, dgid: [u8; 16], sges: &[Sge]) -> Self {
        let address = AddressVector {
            port_pd: (pd | 1 << 24).into(),
            traffic: 0.into(),
            dgid,
            source_path: 0x80,
            gid_index: 0,
            static_rate: 0,
            hop_limit: 64,
            dmac: [0; 6],
            reserved: [0; 6],
        };
        let operands = DatagramOperands { qpn: qpn.into(), qkey: qkey.into(), address };
        Self { operands: transmute!(operands), ..Self::send(wr_id, sges) }
    }

    /// A fast registration.
    #[must_use]
    pub fn fast_register(
        wr_id: u64,
        directory: u64,
        pages: u32,
        iova: u64,
        length: u32,
        access: u32,
        rkey: u32,
    ) -> Self {
        let operands = FastRegisterOperands {
            iova: iova.into(),
            directory: directory.into(),
            page_shift: 12.into(),
            page_count: pages.into(),
            length: length.into(),
            access: access.into(),
            rkey: rkey.into(),
            unused: [0xC3; 12],
        };
        Self { opcode: opcode::FAST_REGISTER, operands: transmute!(operands), ..Self::send(wr_id, &[]) }
    }

    /// Sets immediate data; the opcode must be one that has it.
    #[must_use]
    pub fn immediate(mut self, code: u32, wire: [u8; 4]) -> Self {
        self.opcode = code;
        self.immediate = wire;
        self
    }

    /// With flags.
    #[must_use]
    pub fn flags(mut self, flags: u32) -> Self {
        self.flags = flags;
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let header = SendHeader {
            wr_id: self.wr_id.into(),
            sge_count: u32::try_from(self.sges.len()).unwrap().into(),
            total_length: 0xDEAD_BEEF.into(),
            opcode: self.opcode.into(),
            flags: self.flags.into(),
            immediate: self.immediate,
            reserved: 0xDEAD_BEEF.into(),
            operands: self.operands,
        };
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend_from_slice(self.sges.as_bytes());
        bytes
    }
}

fn place(pages: &[u64], byte: u64) -> u64 {
    pages[usize::try_from(byte / PAGE).unwrap()] + byte % PAGE
}

fn receive_bytes(wr_id: u64, sges: &[Sge]) -> Vec<u8> {
    let count = u32::try_from(sges.len()).unwrap();
    let header = ReceiveHeader { wr_id: wr_id.into(), sge_count: count.into(), total_length: 7.into() };
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend_from_slice(sges.as_bytes());
    bytes
}

impl<M: Dma + Clone + 'static> Guest<M> {
    /// Writes an element and publishes the tail. `false` when the ring is full.
    fn enqueue(&self, ring: (u64, u64, u64), slots: u32, at: impl Fn(u32) -> u64, bytes: &[u8]) -> bool {
        let (state, tail_at, head_at) = ring;
        let indices = Indices::new(slots).unwrap();
        let tail = self.memory.load_u32(state + tail_at).unwrap();
        let head = self.memory.load_u32(state + head_at).unwrap();
        assert!(tail < 2 * slots && head < 2 * slots, "ring state invalid: {tail} {head} {slots}");
        if tail == head ^ slots {
            return false;
        }
        self.memory.write(at(indices.slot(tail)), bytes).unwrap();
        self.memory.store_u32(state + tail_at, indices.advance(tail, 1)).unwrap();
        true
    }

    fn ring(&self, page: u32, word: u64, value: u32) {
        self.uar.store_u32(u64::from(page) * PAGE + word, value).unwrap();
    }

    /// Posts a send without a doorbell. `false` when the queue is full.
    pub fn enqueue_send(&self, qp: &Qp, post: &Post) -> bool {
        let at = |slot: u32| place(&qp.pages, PAGE + u64::from(slot) * qp.send_size);
        self.enqueue((qp.pages[0], state::TX_TAIL, state::TX_HEAD), qp.max_send_wr, at, &post.bytes())
    }

    /// Posts a send. `false` when the queue is full.
    pub fn post_send(&self, qp: &Qp, post: &Post) -> bool {
        let posted = self.enqueue_send(qp, post);
        if posted {
            self.ring(qp.uar, doorbells::QP, qp.handle | doorbells::QP_SEND);
        }
        posted
    }

    /// Posts a receive. `false` when the queue is full.
    pub fn post_receive(&self, qp: &Qp, wr_id: u64, sges: &[Sge]) -> bool {
        let first = u64::from(qp.send_pages + 1) * PAGE;
        let at = |slot: u32| place(&qp.pages, first + u64::from(slot) * qp.receive_size);
        let bytes = receive_bytes(wr_id, sges);
        let ring = (qp.pages[0], state::RX_TAIL, state::RX_HEAD);
        let posted = self.enqueue(ring, qp.max_receive_wr, at, &bytes);
        if posted {
            self.ring(qp.uar, doorbells::QP, qp.handle | doorbells::QP_RECEIVE);
        }
        posted
    }

    /// Posts to a shared receive queue. `false` when it is full.
    pub fn post_shared(&self, srq: &Srq, wr_id: u64, sges: &[Sge]) -> bool {
        let at = |slot: u32| place(&srq.pages, PAGE + u64::from(slot) * srq.size);
        let bytes = receive_bytes(wr_id, sges);
        let posted = self.enqueue((srq.pages[0], state::RX_TAIL, state::RX_HEAD), srq.max_wr, at, &bytes);
        if posted {
            self.ring(srq.uar, doorbells::SRQ, srq.handle | doorbells::SRQ_RECEIVE);
        }
        posted
    }

    /// Consumes a completion. An empty poll writes the doorbell, as the provider does.
    #[must_use]
    pub fn poll(&self, cq: &Cq) -> Option<Entry> {
        let taken = self.take(cq);
        if taken.is_none() {
            self.ring(cq.uar, doorbells::CQ, cq.handle | doorbells::CQ_POLL);
            return self.take(cq);
        }
        taken
    }

    /// Consumes a completion, without a doorbell.
    #[must_use]
    pub fn take(&self, cq: &Cq) -> Option<Entry> {
        let indices = Indices::new(cq.entries).unwrap();
        let tail = self.memory.load_u32(cq.pages[0] + state::RX_TAIL).unwrap();
        let head = self.memory.load_u32(cq.pages[0] + state::RX_HEAD).unwrap();
        assert!(indices.between(tail, head).is_some(), "CQ ring state invalid: {tail} {head}");
        if tail == head {
            return None;
        }
        let at = place(&cq.pages, PAGE + u64::from(indices.slot(head)) * 64);
        let bytes: [u8; 64] = read_array(&self.memory, at).unwrap();
        self.memory.store_u32(cq.pages[0] + state::RX_HEAD, indices.advance(head, 1)).unwrap();
        Some(transmute!(bytes))
    }

    /// Arms the completion queue.
    pub fn arm(&self, cq: &Cq, solicited: bool) {
        let flag = if solicited { doorbells::CQ_ARM_SOLICITED } else { doorbells::CQ_ARM };
        self.ring(cq.uar, doorbells::CQ, cq.handle | flag);
    }

    /// Consumes the notification ring: completion queue handles.
    #[must_use]
    pub fn notifications(&self) -> Vec<u32> {
        self.drain(self.completion_ring, COMPLETION_SLOTS, 4, |at| self.memory.load_u32(at).unwrap())
    }

    /// Consumes whatever is in the event rings, even if the indices are invalid.
    pub fn discard_events(&self) {
        for ring in [self.completion_ring, self.async_ring] {
            let tail = self.memory.load_u32(ring.0 + state::RX_TAIL).unwrap();
            self.memory.store_u32(ring.0 + state::RX_HEAD, tail).unwrap();
        }
    }

    /// Consumes the ring of asynchronous events: types and objects.
    #[must_use]
    pub fn events(&self) -> Vec<(u32, u32)> {
        self.drain(self.async_ring, ASYNC_SLOTS, 8, |at| {
            (self.memory.load_u32(at).unwrap(), self.memory.load_u32(at + 4).unwrap())
        })
    }

    fn drain<T>(&self, ring: (u64, u64), slots: u32, size: u64, element: impl Fn(u64) -> T) -> Vec<T> {
        let indices = Indices::new(slots).unwrap();
        let mut taken = Vec::new();
        loop {
            let tail = self.memory.load_u32(ring.0 + state::RX_TAIL).unwrap();
            let head = self.memory.load_u32(ring.0 + state::RX_HEAD).unwrap();
            if tail == head {
                return taken;
            }
            assert!(indices.between(tail, head).is_some(), "event ring state invalid: {tail} {head}");
            taken.push(element(ring.1 + u64::from(indices.slot(head)) * size));
            self.memory.store_u32(ring.0 + state::RX_HEAD, indices.advance(head, 1)).unwrap();
        }
    }
}
