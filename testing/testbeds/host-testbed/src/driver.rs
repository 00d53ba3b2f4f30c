//! A guest's driver and an application, which act like Linux's `vmw_pvrdma` and rdma-core's provider, as far as tests need it.

use dma::access::read_array;
use dma::{Dma, MappedMemory};
use pvrdma::abi::PAGE;
use pvrdma::abi::attributes::QueuePair;
use pvrdma::abi::commands::{
    ACKNOWLEDGE, CommandHeader, CqResponse, CreateBind, CreateContext, CreateCq, CreateMr, CreateQp, Handle,
    ModifyQp, MrResponse, QpResponse, ResponseHeader, mr_kind, number, qp_kind,
};
use pvrdma::abi::completion::Entry;
use pvrdma::abi::doorbells;
use pvrdma::abi::registers::{self, control};
use pvrdma::abi::rings::{ASYNC_SLOTS, COMPLETION_SLOTS, EVENT_RING_PAGES, state};
use pvrdma::abi::shared_region::{DriverPart, RingPages};
use pvrdma::abi::work::{
    AtomicOperands, ReceiveHeader, RemoteOperands, SendHeader, Sge, opcode, receive_slot, send_slot,
};
use pvrdma::ring::Indices;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, transmute};

use super::monitor::{Machine, Monitor};

/// Guest page frame of BAR 2.
const UAR_PFN: u64 = 0xF_E000;
const SLOTS: u32 = 64;
const ENTRIES: u32 = 256;

/// A driver in a machine's memory. Each call gets the connection, so that the connection can be lost and replaced.
pub struct Guest {
    ram: MappedMemory,
    end: u64,
    next_page: u64,
    command_slot: u64,
    response_slot: u64,
    async_ring: (u64, u64),
    completion_ring: (u64, u64),
    /// Timeout code of queue pairs: 4.096 µs << code. 8 is about a millisecond.
    pub timeout: u8,
    /// Number of retries of a queue pair.
    pub retries: u8,
}

/// A context with a queue pair and its objects.
pub struct Endpoint {
    uar: u32,
    pd: u32,
    cq: (u32, Vec<u64>),
    pub qp: (u32, u32, Vec<u64>),
    send_pages: u32,
    pub buffer: Buffer,
}

/// A registered buffer.
pub struct Buffer {
    pub address: u64,
    pages: Vec<u64>,
    pub lkey: u32,
    pub rkey: u32,
}

impl Guest {
    pub fn new(machine: &Machine) -> Self {
        Self {
            ram: machine.ram.clone(),
            end: machine.size,
            next_page: 16 * PAGE,
            command_slot: 0,
            response_slot: 0,
            async_ring: (0, 0),
            completion_ring: (0, 0),
            timeout: 8,
            retries: 2,
        }
    }

    /// Moves the guest to the memory of another machine.
    pub fn moved(&mut self, machine: &Machine) {
        self.ram = machine.ram.clone();
    }

    fn page(&mut self) -> u64 {
        let page = self.next_page;
        assert!(page + PAGE <= self.end, "the guest's memory is used up");
        self.next_page += PAGE;
        self.ram.zero(page, PAGE).unwrap();
        page
    }

    fn pages(&mut self, count: u32) -> Vec<u64> {
        (0..count).map(|_| self.page()).collect()
    }

    fn directory(&mut self, pages: &[u64]) -> u64 {
        let directory = self.page();
        for (index, chunk) in pages.chunks(512).enumerate() {
            let table = self.page();
            self.ram.write(directory + index as u64 * 8, &table.to_le_bytes()).unwrap();
            let bytes: Vec<u8> = chunk.iter().flat_map(|page| page.to_le_bytes()).collect();
            self.ram.write(table, &bytes).unwrap();
        }
        directory
    }

    /// Probes the device, up to binding its address.
    pub fn probe(&mut self, monitor: &Monitor, gid: [u8; 16]) {
        assert!(monitor.read(registers::VERSION) >= 18);
        let region = self.page();
        self.command_slot = self.page();
        self.response_slot = self.page();
        let mut ring = || {
            let pages = self.pages(EVENT_RING_PAGES);
            let directory = self.directory(&pages);
            let described =
                RingPages { pages: EVENT_RING_PAGES.into(), reserved: 0.into(), directory: directory.into() };
            (described, (pages[0], pages[1]))
        };
        let (async_described, async_ring) = ring();
        let (completion_described, completion_ring) = ring();
        (self.async_ring, self.completion_ring) = (async_ring, completion_ring);
        let part = DriverPart {
            driver_version: 20.into(),
            pad0: 0.into(),
            os: (2 | 1 << 2 | 1 << 6).into(),
            pad1: 0.into(),
            command_slot: self.command_slot.into(),
            response_slot: self.response_slot.into(),
            async_ring: async_described,
            completion_ring: completion_described,
            uar_pfn: UAR_PFN.into(),
        };
        self.ram.write(region, part.as_bytes()).unwrap();
        monitor.write(registers::DSR_LOW, u32::try_from(region).unwrap());
        monitor.write(registers::DSR_HIGH, 0);
        monitor.write(registers::INTERRUPT_MASK, 0);
        monitor.write(registers::CONTROL, control::ACTIVATE);
        assert_eq!(monitor.read(registers::ERROR), 0, "failed to activate device");
        let bind = CreateBind {
            mtu: 1024.into(),
            vlan: 0xFFF.into(),
            index: 0.into(),
            gid,
            gid_type: 2,
            reserved: [0; 3],
        };
        assert_eq!(self.request(monitor, number::CREATE_BIND, bind.as_bytes()), 0);
    }

    fn request(&self, monitor: &Monitor, code: u32, body: &[u8]) -> u32 {
        let mut slot = [0xA5; 184];
        let header = CommandHeader { response: 0.into(), command: code.into(), reserved: 0.into() };
        slot[..16].copy_from_slice(header.as_bytes());
        slot[16..16 + body.len()].copy_from_slice(body);
        self.ram.write(self.command_slot, &slot).unwrap();
        monitor.write(registers::REQUEST, 0);
        monitor.read(registers::ERROR)
    }

    /// Executes a command with a response; `Err` is register ERR.
    pub fn command<T: FromBytes + KnownLayout + Immutable>(
        &self,
        monitor: &Monitor,
        code: u32,
        body: &(impl IntoBytes + Immutable),
    ) -> Result<T, u32> {
        let error = self.request(monitor, code, body.as_bytes());
        if error != 0 {
            return Err(error);
        }
        assert!(monitor.await_interrupt(0), "completion timeout");
        let slot: [u8; 176] = read_array(&self.ram, self.response_slot).unwrap();
        let (header, rest) = ResponseHeader::read_from_prefix(&slot).unwrap();
        assert_eq!((header.acknowledge.get(), header.error), (ACKNOWLEDGE | code, 0));
        Ok(T::read_from_prefix(rest).unwrap().0)
    }

    fn make(&self, monitor: &Monitor, code: u32, of: u32) -> u32 {
        let made: Handle = self.command(monitor, code, &Handle { handle: of.into() }).unwrap();
        made.handle.get()
    }

    /// Opens a context on UAR page `uar`, with a buffer of `pages` pages and a queue pair in INIT.
    pub fn endpoint(&mut self, monitor: &Monitor, uar: u32, pages: u32) -> Endpoint {
        let body = CreateContext { pfn: (UAR_PFN + u64::from(uar)).into() };
        let context: Handle = self.command(monitor, number::CREATE_UC, &body).unwrap();
        let context = context.handle.get();
        let pd = self.make(monitor, number::CREATE_PD, context);
        let buffer = self.register(monitor, pd, 0x7F00_0000_0000, pages);
        let cq_pages = self.pages(1 + ENTRIES * 64 / 4096);
        let body = CreateCq {
            directory: self.directory(&cq_pages).into(),
            context: context.into(),
            entries: ENTRIES.into(),
            pages: u32::try_from(cq_pages.len()).unwrap().into(),
            reserved: 0.into(),
        };
        let cq: CqResponse = self.command(monitor, number::CREATE_CQ, &body).unwrap();
        let cq = (cq.handle.get(), cq_pages);
        let pages_of = |size: u64| u32::try_from((u64::from(SLOTS) * size).div_ceil(PAGE)).unwrap();
        let send_pages = pages_of(send_slot(1));
        let qp_pages = self.pages(1 + send_pages + pages_of(receive_slot(1)));
        let body = self.create_qp(pd, cq.0, &qp_pages, send_pages);
        let qp: QpResponse = self.command(monitor, number::CREATE_QP, &body).unwrap();
        let endpoint =
            Endpoint { uar, pd, cq, qp: (qp.handle.get(), qp.qpn.get(), qp_pages), send_pages, buffer };
        self.init(monitor, endpoint.qp.0);
        endpoint
    }

    /// Another queue pair in INIT in an endpoint's context, on its completion queue, with a buffer of a page.
    pub fn another(&mut self, monitor: &Monitor, at: &Endpoint) -> Endpoint {
        let buffer = self.register(monitor, at.pd, 0x7F00_0000_0000, 1);
        let pages = self.pages(u32::try_from(at.qp.2.len()).unwrap());
        let body = self.create_qp(at.pd, at.cq.0, &pages, at.send_pages);
        let qp: QpResponse = self.command(monitor, number::CREATE_QP, &body).unwrap();
        self.init(monitor, qp.handle.get());
        Endpoint {
            uar: at.uar,
            pd: at.pd,
            cq: at.cq.clone(),
            qp: (qp.handle.get(), qp.qpn.get(), pages),
            send_pages: at.send_pages,
            buffer,
        }
    }

    fn create_qp(&mut self, pd: u32, cq: u32, pages: &[u64], send_pages: u32) -> CreateQp {
        CreateQp {
            directory: self.directory(pages).into(),
            pd: pd.into(),
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
            total_pages: u16::try_from(pages.len()).unwrap().into(),
            send_pages: u16::try_from(send_pages).unwrap().into(),
            max_atomic_argument: 0.into(),
            signal_all: 1,
            kind: qp_kind::RC,
            has_srq: 0,
            reserved: [0; 3],
        }
    }

    /// Creates `count` more queue pairs like an endpoint's, connected to a peer and idle. They share one page list, unlike a driver's, so
    /// that RAM of any size suffices.
    pub fn idle_queue_pairs(
        &mut self,
        monitor: &Monitor,
        at: &Endpoint,
        count: u32,
        peer_qpn: u32,
        peer_gid: [u8; 16],
    ) {
        let pages = self.pages(u32::try_from(at.qp.2.len()).unwrap());
        let body = self.create_qp(at.pd, at.cq.0, &pages, at.send_pages);
        for _ in 0..count {
            let made: QpResponse = self.command(monitor, number::CREATE_QP, &body).unwrap();
            self.init(monitor, made.handle.get());
            self.raise(monitor, made.handle.get(), peer_qpn, peer_gid);
        }
    }

    /// RESET to INIT.
    fn init(&self, monitor: &Monitor, qp: u32) {
        self.modify(monitor, qp, 1 | 1 << 3 | 1 << 4 | 1 << 5, |to| {
            to.state = 1.into();
            to.access = 0xF.into();
            to.pkey_index = 0.into();
            to.port = 1;
        });
    }

    fn register(&mut self, monitor: &Monitor, pd: u32, address: u64, count: u32) -> Buffer {
        let pages = self.pages(count);
        let body = CreateMr {
            start: address.into(),
            length: (u64::from(count) * PAGE).into(),
            directory: self.directory(&pages).into(),
            pd: pd.into(),
            access: 0xF.into(),
            kind: mr_kind::USER.into(),
            pages: count.into(),
        };
        let made: MrResponse = self.command(monitor, number::CREATE_MR, &body).unwrap();
        Buffer { address, pages, lkey: made.lkey.get(), rkey: made.rkey.get() }
    }

    fn modify(&self, monitor: &Monitor, qp: u32, mask: u32, set: impl FnOnce(&mut QueuePair)) {
        let mut attributes = QueuePair::read_from_bytes(&[0x77; 160]).unwrap();
        set(&mut attributes);
        let body = ModifyQp { handle: qp.into(), mask: mask.into(), attributes };
        let _: [u8; 0] = self.command(monitor, number::MODIFY_QP, &body).unwrap();
    }

    /// INIT over RTR to RTS.
    pub fn connect(&self, monitor: &Monitor, at: &Endpoint, peer_qpn: u32, peer_gid: [u8; 16]) {
        self.raise(monitor, at.qp.0, peer_qpn, peer_gid);
    }

    fn raise(&self, monitor: &Monitor, qp: u32, peer_qpn: u32, peer_gid: [u8; 16]) {
        self.modify(monitor, qp, 1 | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 15 | 1 << 17 | 1 << 20, |to| {
            to.state = 2.into();
            to.path_mtu = 3.into();
            to.rq_psn = 0.into();
            to.destination_qpn = peer_qpn.into();
            to.max_dest_rd_atomic = 4;
            to.min_rnr_timer = 1;
            to.address.dgid = peer_gid;
            to.address.sgid_index = 0;
            to.address.hop_limit = 64;
            to.address.traffic_class = 0;
            to.address.flow_label = 0.into();
            to.address.service_level = 0;
            to.address.flags = 1;
            to.address.port = 1;
        });
        self.modify(monitor, qp, 1 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 13 | 1 << 16, |to| {
            to.state = 3.into();
            to.sq_psn = 0.into();
            to.timeout = self.timeout;
            to.retry_count = self.retries;
            to.rnr_retry = 7;
            to.max_rd_atomic = 4;
        });
    }

    /// Posts an RDMA WRITE of one element, and writes the doorbell. `false` when the queue is full.
    pub fn post_write(
        &self,
        monitor: &Monitor,
        at: &Endpoint,
        wr_id: u64,
        length: u32,
        to: (u64, u32),
    ) -> bool {
        self.post_write_from(monitor, at, wr_id, 0..length, to)
    }

    /// As [`Guest::post_write`], from a part of the buffer.
    pub fn post_write_from(
        &self,
        monitor: &Monitor,
        at: &Endpoint,
        wr_id: u64,
        part: std::ops::Range<u32>,
        to: (u64, u32),
    ) -> bool {
        let operands = RemoteOperands { address: to.0.into(), rkey: to.1.into(), unused: [0; 36] };
        self.post(monitor, at, wr_id, opcode::WRITE, transmute!(operands), part)
    }

    /// Posts a SEND of a part of the buffer. `false` when the queue is full.
    pub fn post_send(
        &self,
        monitor: &Monitor,
        at: &Endpoint,
        wr_id: u64,
        part: std::ops::Range<u32>,
    ) -> bool {
        self.post(monitor, at, wr_id, opcode::SEND, [0; 48], part)
    }

    /// Posts a fetch-and-add of 1; the old value goes to the eight bytes at `offset` of the buffer. `false` when the queue is full.
    pub fn post_fetch_add(
        &self,
        monitor: &Monitor,
        at: &Endpoint,
        wr_id: u64,
        offset: u32,
        to: (u64, u32),
    ) -> bool {
        let operands = AtomicOperands {
            address: to.0.into(),
            compare_or_add: 1.into(),
            swap: 0.into(),
            rkey: to.1.into(),
            unused: [0; 20],
        };
        self.post(monitor, at, wr_id, opcode::FETCH_ADD, transmute!(operands), offset..offset + 8)
    }

    fn post(
        &self,
        monitor: &Monitor,
        at: &Endpoint,
        wr_id: u64,
        opcode: u32,
        operands: [u8; 48],
        part: std::ops::Range<u32>,
    ) -> bool {
        let header = SendHeader {
            wr_id: wr_id.into(),
            sge_count: 1.into(),
            total_length: 0.into(),
            opcode: opcode.into(),
            flags: 2.into(),
            immediate: [0; 4],
            reserved: 0.into(),
            operands,
        };
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend_from_slice(at.buffer.sge(part).as_bytes());
        let ring = (at.qp.2[0], state::TX_TAIL, state::TX_HEAD);
        let posted = self.enqueue(ring, &at.qp.2, PAGE, send_slot(1), &bytes);
        if posted {
            let word = u64::from(at.uar) * PAGE + doorbells::QP;
            monitor.doorbells.ring(word, at.qp.0 | doorbells::QP_SEND);
        }
        posted
    }

    /// Posts a receive, and writes the doorbell.
    pub fn post_receive(&self, monitor: &Monitor, at: &Endpoint, wr_id: u64, length: u32) -> bool {
        let header = ReceiveHeader { wr_id: wr_id.into(), sge_count: 1.into(), total_length: 0.into() };
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend_from_slice(at.buffer.sge(0..length).as_bytes());
        let first = u64::from(at.send_pages + 1) * PAGE;
        let ring = (at.qp.2[0], state::RX_TAIL, state::RX_HEAD);
        let posted = self.enqueue(ring, &at.qp.2, first, receive_slot(1), &bytes);
        if posted {
            let word = u64::from(at.uar) * PAGE + doorbells::QP;
            monitor.doorbells.ring(word, at.qp.0 | doorbells::QP_RECEIVE);
        }
        posted
    }

    fn enqueue(&self, ring: (u64, u64, u64), pages: &[u64], first: u64, size: u64, bytes: &[u8]) -> bool {
        let (page, tail_at, head_at) = ring;
        let indices = Indices::new(SLOTS).unwrap();
        let tail = self.ram.load_u32(page + tail_at).unwrap();
        if tail == self.ram.load_u32(page + head_at).unwrap() ^ SLOTS {
            return false;
        }
        let byte = first + u64::from(indices.slot(tail)) * size;
        let at = pages[usize::try_from(byte / PAGE).unwrap()] + byte % PAGE;
        self.ram.write(at, bytes).unwrap();
        self.ram.store_u32(page + tail_at, indices.advance(tail, 1)).unwrap();
        true
    }

    /// Arms the completion queue.
    pub fn arm(&self, monitor: &Monitor, at: &Endpoint) {
        let word = u64::from(at.uar) * PAGE + doorbells::CQ;
        monitor.doorbells.ring(word, at.cq.0 | doorbells::CQ_ARM);
    }

    /// Consumes a completion; an empty poll writes the doorbell, as the provider does.
    pub fn poll(&self, monitor: &Monitor, at: &Endpoint) -> Option<Entry> {
        let taken = self.take(at);
        if taken.is_none() {
            let word = u64::from(at.uar) * PAGE + doorbells::CQ;
            monitor.doorbells.ring(word, at.cq.0 | doorbells::CQ_POLL);
            return self.take(at);
        }
        taken
    }

    /// Consumes a completion without a doorbell.
    pub fn take(&self, at: &Endpoint) -> Option<Entry> {
        let indices = Indices::new(ENTRIES).unwrap();
        let tail = self.ram.load_u32(at.cq.1[0] + state::RX_TAIL).unwrap();
        let head = self.ram.load_u32(at.cq.1[0] + state::RX_HEAD).unwrap();
        assert!(indices.between(tail, head).is_some(), "CQ ring state invalid: {tail} {head}");
        if tail == head {
            return None;
        }
        let byte = PAGE + u64::from(indices.slot(head)) * 64;
        let place = at.cq.1[usize::try_from(byte / PAGE).unwrap()] + byte % PAGE;
        let bytes: [u8; 64] = read_array(&self.ram, place).unwrap();
        self.ram.store_u32(at.cq.1[0] + state::RX_HEAD, indices.advance(head, 1)).unwrap();
        Some(transmute!(bytes))
    }

    /// Consumes the notification ring.
    pub fn notifications(&self) -> Vec<u32> {
        self.drain(self.completion_ring, COMPLETION_SLOTS, 4)
    }

    /// Consumes the ring of asynchronous events: their types.
    pub fn events(&self) -> Vec<u32> {
        self.drain(self.async_ring, ASYNC_SLOTS, 8)
    }

    fn drain(&self, ring: (u64, u64), slots: u32, size: u64) -> Vec<u32> {
        let indices = Indices::new(slots).unwrap();
        let mut taken = Vec::new();
        loop {
            let tail = self.ram.load_u32(ring.0 + state::RX_TAIL).unwrap();
            let head = self.ram.load_u32(ring.0 + state::RX_HEAD).unwrap();
            if tail == head {
                return taken;
            }
            let at = ring.1 + u64::from(indices.slot(head)) * size;
            taken.push(self.ram.load_u32(at).unwrap());
            self.ram.store_u32(ring.0 + state::RX_HEAD, indices.advance(head, 1)).unwrap();
        }
    }

    /// Fills a buffer.
    pub fn fill(&self, buffer: &Buffer, byte: u8) {
        for page in &buffer.pages {
            self.ram.write(*page, &[byte; 4096]).unwrap();
        }
    }

    /// Writes bytes at `offset` of a buffer, within one page of it.
    pub fn put(&self, buffer: &Buffer, offset: u64, bytes: &[u8]) {
        self.ram.write(buffer.page_of(offset) + offset % PAGE, bytes).unwrap();
    }

    /// Loads the aligned word at `offset` of a buffer, with acquire order.
    pub fn word(&self, buffer: &Buffer, offset: u64) -> u32 {
        while self.ram.awaits(buffer.page_of(offset) + offset % PAGE, 4, false) {
            // A vCPU waits at a not-present page.
            std::thread::sleep(std::time::Duration::from_micros(100));
        }
        self.ram.load_u32(buffer.page_of(offset) + offset % PAGE).unwrap()
    }

    /// The contents of a buffer.
    pub fn bytes(&self, buffer: &Buffer) -> Vec<u8> {
        let pages = buffer.pages.iter();
        pages.flat_map(|page| read_array::<4096>(&self.ram, *page).unwrap()).collect()
    }
}

impl Buffer {
    pub fn page_of(&self, offset: u64) -> u64 {
        self.pages[usize::try_from(offset / PAGE).unwrap()]
    }

    fn sge(&self, part: std::ops::Range<u32>) -> Sge {
        let (address, length) = (self.address + u64::from(part.start), part.end - part.start);
        Sge { address: address.into(), length: length.into(), lkey: self.lkey.into() }
    }
}
