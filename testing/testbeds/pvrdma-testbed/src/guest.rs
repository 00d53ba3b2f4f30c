//! A guest's driver: probing, commands, objects.

use dma::{Dma, HeapMemory};
use hca::names::DeviceId;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::host::Host;
pub use crate::objects::{Cq, Qp, QpOptions, Region, Srq};
use pvrdma::abi::PAGE;
use pvrdma::abi::attributes::QueuePair;
use pvrdma::abi::commands::{
    ACKNOWLEDGE, CommandHeader, CqResponse, CreateBind, CreateContext, CreateCq, CreateMr, CreateQp,
    CreateSrq, Handle, ModifyQp, MrResponse, QpResponse, QueryPort, ResponseHeader, mr_kind, number, qp_kind,
};
use pvrdma::abi::pci::VECTOR_RESPONSE;
use pvrdma::abi::registers::{self, control};
use pvrdma::abi::rings::EVENT_RING_PAGES;
use pvrdma::abi::shared_region::{CAPABILITIES, DeviceCapabilities, DriverPart, RingPages};
use pvrdma::abi::work::{receive_slot, send_slot};
use pvrdma::device::Config;

/// Guest page frame at which the guest's firmware placed BAR2.
const UAR_PFN: u64 = 0xF_E000;

/// A guest with one device.
#[derive(Debug)]
pub struct Guest<M> {
    /// Its device.
    pub id: DeviceId,
    /// Its memory.
    pub memory: M,
    /// BAR2: the pages of doorbells (UARs).
    pub uar: HeapMemory,
    /// Capabilities of the device.
    pub capabilities: DeviceCapabilities,
    /// Guest address of the shared region.
    pub region: u64,
    command_slot: u64,
    response_slot: u64,
    /// Index page and first element page of the asynchronous ring.
    pub async_ring: (u64, u64),
    /// The same of the notification ring.
    pub completion_ring: (u64, u64),
    next_page: u64,
    end: u64,
    next_uar: u32,
}

impl<M: Dma + Clone + 'static> Guest<M> {
    /// A guest whose memory reaches from 0 to `end`.
    pub fn new(host: &mut Host<M>, config: Config, memory: M, end: u64) -> Self {
        let uar = HeapMemory::new(usize::try_from(config.uar_bar_size()).unwrap());
        let id = host.add(config, memory.clone());
        Self {
            id,
            memory,
            uar,
            capabilities: DeviceCapabilities::read_from_bytes(&[0; 208]).unwrap(),
            region: 0,
            command_slot: 0,
            response_slot: 0,
            async_ring: (0, 0),
            completion_ring: (0, 0),
            next_page: 2 * PAGE,
            end,
            next_uar: 1,
        }
    }

    /// Makes the driver allocate pages from `page` on.
    pub fn start_at(&mut self, page: u64) {
        self.next_page = page;
    }

    /// Address of the first unused page.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.next_page
    }

    /// The response in the response slot, after the header.
    #[must_use]
    pub fn response(&self) -> [u8; 160] {
        dma::access::read_array(&self.memory, self.response_slot + 16).unwrap()
    }

    /// A zeroed page.
    pub fn page(&mut self) -> u64 {
        let page = self.next_page;
        assert!(page + PAGE <= self.end, "the guest's memory is used up");
        self.next_page += PAGE;
        self.memory.zero(page, PAGE).unwrap();
        page
    }

    /// Zeroed pages, no two of them consecutive.
    pub fn pages(&mut self, count: u32) -> Vec<u64> {
        let mut pages: Vec<u64> = (0..count).map(|_| self.page()).collect();
        pages.reverse();
        pages
    }

    /// A page directory.
    pub fn directory(&mut self, pages: &[u64]) -> u64 {
        let directory = self.page();
        for (index, chunk) in pages.chunks(512).enumerate() {
            let table = self.page();
            self.memory.write(directory + index as u64 * 8, &table.to_le_bytes()).unwrap();
            let bytes: Vec<u8> = chunk.iter().flat_map(|page| page.to_le_bytes()).collect();
            self.memory.write(table, &bytes).unwrap();
        }
        directory
    }

    /// Runs the driver's probe, up to activation.
    pub fn probe(&mut self, host: &mut Host<M>) {
        let interrupts = host.lines[&self.id].raised(VECTOR_RESPONSE);
        let version = host.read(self.id, registers::VERSION);
        assert!(version >= 18);
        self.describe(host);
        let caps = self.capabilities;
        assert!(caps.mode == 0 && caps.gid_types == 2, "driver needs RoCE v1 or v2 support");
        assert!(caps.max_uar.get().is_power_of_two(), "failed to allocate UAR table");
        assert!(caps.max_cq.get() > 0 && caps.max_qp.get() > 0 && caps.max_qp.get() & 0xFFFF != 0);
        host.write(self.id, registers::INTERRUPT_MASK, 0);
        host.write(self.id, registers::CONTROL, control::ACTIVATE);
        assert_eq!(host.read(self.id, registers::ERROR), 0, "failed to activate device");
        assert_eq!(
            host.lines[&self.id].raised(VECTOR_RESPONSE),
            interrupts,
            "an interrupt before any command"
        );
        let port: pvrdma::abi::attributes::Port =
            self.command(host, number::QUERY_PORT, &QueryPort { port: 1, index: 0 }).unwrap();
        assert_eq!(port.gid_table_len, caps.gid_table_len);
    }

    /// Allocates and describes the shared region; the capabilities are in it afterwards.
    pub fn describe(&mut self, host: &mut Host<M>) {
        self.region = self.page();
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
        self.async_ring = async_ring;
        self.completion_ring = completion_ring;
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
        self.memory.write(self.region, part.as_bytes()).unwrap();
        let [low, high] = [self.region & 0xFFFF_FFFF, self.region >> 32].map(|v| u32::try_from(v).unwrap());
        host.write(self.id, registers::DSR_LOW, low);
        host.write(self.id, registers::DSR_HIGH, high);
        let mut caps = [0; 208];
        self.memory.read(self.region + CAPABILITIES, &mut caps).unwrap();
        self.capabilities = DeviceCapabilities::read_from_bytes(&caps).unwrap();
    }

    /// Puts a command into the slot and writes REQUEST. Returns register ERR.
    pub fn request(&mut self, host: &mut Host<M>, code: u32, body: &[u8]) -> u32 {
        self.place(code, body);
        host.write(self.id, registers::REQUEST, 0);
        host.read(self.id, registers::ERROR)
    }

    /// Puts a command into the slot without executing it.
    pub fn place(&self, code: u32, body: &[u8]) {
        // Bytes past the structure are stack garbage.
        let mut slot = [0xA5; 184];
        let header = CommandHeader { response: 0.into(), command: code.into(), reserved: 0.into() };
        slot[..16].copy_from_slice(header.as_bytes());
        slot[16..16 + body.len()].copy_from_slice(body);
        self.memory.write(self.command_slot, &slot).unwrap();
    }

    /// Executes a command with a response; `Err` has register ERR, or 1000 and the response's error byte.
    pub fn command<T: FromBytes + KnownLayout + Immutable>(
        &mut self,
        host: &mut Host<M>,
        code: u32,
        body: &(impl IntoBytes + Immutable),
    ) -> Result<T, u32> {
        let before = host.lines[&self.id].raised(VECTOR_RESPONSE);
        self.memory.write(self.response_slot, &[0xEE; 176]).unwrap();
        let error = self.request(host, code, body.as_bytes());
        let interrupts = host.lines[&self.id].raised(VECTOR_RESPONSE) - before;
        if error != 0 {
            assert_eq!(interrupts, 0, "an interrupt that the next command would take for its own");
            return Err(error);
        }
        assert_eq!(interrupts, 1, "completion timeout or interrupted");
        let mut slot = [0; 176];
        self.memory.read(self.response_slot, &mut slot).unwrap();
        let (header, rest) = ResponseHeader::read_from_prefix(&slot).unwrap();
        assert_eq!(header.acknowledge.get(), ACKNOWLEDGE | code, "unknown response");
        assert_eq!(header.response.get(), 0);
        if header.error != 0 {
            return Err(1000 + u32::from(header.error));
        }
        Ok(T::read_from_prefix(rest).unwrap().0)
    }

    /// Executes a command without a response.
    pub fn fire(
        &mut self,
        host: &mut Host<M>,
        code: u32,
        body: &(impl IntoBytes + Immutable),
    ) -> Result<(), u32> {
        let before = host.lines[&self.id].raised(VECTOR_RESPONSE);
        let error = self.request(host, code, body.as_bytes());
        assert_eq!(host.lines[&self.id].raised(VECTOR_RESPONSE), before, "an interrupt without a response");
        if error == 0 { Ok(()) } else { Err(error) }
    }

    /// Executes a command whose request and response are a handle each.
    pub fn make(&mut self, host: &mut Host<M>, code: u32, of: u32) -> Result<u32, u32> {
        let made: Handle = self.command(host, code, &Handle { handle: of.into() })?;
        Ok(made.handle.get())
    }

    /// Destroys an object.
    pub fn destroy(&mut self, host: &mut Host<M>, code: u32, handle: u32) -> Result<(), u32> {
        self.fire(host, code, &Handle { handle: handle.into() })
    }

    /// Opens a context; returns its UAR page and handle.
    pub fn context(&mut self, host: &mut Host<M>) -> (u32, u32) {
        let uar = self.next_uar;
        self.next_uar += 1;
        (uar, self.context_at(host, uar).unwrap())
    }

    /// Opens a context on a chosen page.
    pub fn context_at(&mut self, host: &mut Host<M>, uar: u32) -> Result<u32, u32> {
        let body = CreateContext { pfn: (UAR_PFN + u64::from(uar)).into() };
        let made: Handle = self.command(host, number::CREATE_UC, &body)?;
        assert_ne!(made.handle.get(), 0, "0 means the kernel");
        Ok(made.handle.get())
    }

    /// Creates a protection domain; `context` 0 is the kernel's.
    pub fn pd(&mut self, host: &mut Host<M>, context: u32) -> u32 {
        let pd = self.make(host, number::CREATE_PD, context).unwrap();
        assert!(pd < 1 << 24);
        pd
    }

    /// Registers a new buffer of `length` bytes, at `address` in the process.
    pub fn register(
        &mut self,
        host: &mut Host<M>,
        pd: u32,
        address: u64,
        length: u64,
        access: u32,
    ) -> Region {
        let count = u32::try_from((address % PAGE + length).div_ceil(PAGE)).unwrap();
        let pages = self.pages(count);
        let directory = self.directory(&pages);
        let body = CreateMr {
            start: address.into(),
            length: length.into(),
            directory: directory.into(),
            pd: pd.into(),
            access: access.into(),
            kind: mr_kind::USER.into(),
            pages: count.into(),
        };
        let made: MrResponse = self.command(host, number::CREATE_MR, &body).unwrap();
        Region { handle: made.handle.get(), address, pages, lkey: made.lkey.get(), rkey: made.rkey.get() }
    }

    /// Memory region without pages of its own: [`mr_kind::DMA`], [`mr_kind::FAST`].
    pub fn kernel_mr(
        &mut self,
        host: &mut Host<M>,
        pd: u32,
        kind: u32,
        access: u32,
        pages: u32,
    ) -> Result<MrResponse, u32> {
        let body = CreateMr {
            start: 0.into(),
            length: 0.into(),
            directory: 0.into(),
            pd: pd.into(),
            access: access.into(),
            kind: kind.into(),
            pages: pages.into(),
        };
        self.command(host, number::CREATE_MR, &body)
    }

    /// Creates a completion queue in a context (handle and UAR page).
    pub fn cq(&mut self, host: &mut Host<M>, context: (u32, u32), entries: u32) -> Cq {
        let count = 1 + (entries * 64).div_ceil(4096);
        let pages = self.pages(count);
        let directory = self.directory(&pages);
        let body = CreateCq {
            directory: directory.into(),
            context: context.1.into(),
            entries: entries.into(),
            pages: count.into(),
            reserved: 0.into(),
        };
        let made: CqResponse = self.command(host, number::CREATE_CQ, &body).unwrap();
        assert_eq!(made.entries.get(), entries);
        assert!(made.handle.get() < self.capabilities.max_cq.get());
        Cq { handle: made.handle.get(), uar: context.0, entries, pages }
    }

    /// A shared receive queue.
    pub fn srq(
        &mut self,
        host: &mut Host<M>,
        uar: u32,
        pd: u32,
        max_wr: u32,
        max_sge: u32,
        limit: u32,
    ) -> Srq {
        let size = receive_slot(max_sge);
        // The provider passes twice the number needed.
        let count = 1 + 2 * u32::try_from((u64::from(max_wr) * size).div_ceil(PAGE)).unwrap();
        let pages = self.pages(count);
        let directory = self.directory(&pages);
        let body = CreateSrq {
            directory: directory.into(),
            pd: pd.into(),
            pages: count.into(),
            max_wr: max_wr.into(),
            max_sge: max_sge.into(),
            limit: limit.into(),
            reserved0: 0.into(),
            kind: 0,
            reserved1: [0; 7],
        };
        let made: Handle = self.command(host, number::CREATE_SRQ, &body).unwrap();
        assert!(made.handle.get() < self.capabilities.max_srq.get());
        Srq { handle: made.handle.get(), uar, pages, max_wr, size }
    }

    /// Creates a queue pair in RESET.
    pub fn qp(
        &mut self,
        host: &mut Host<M>,
        uar: u32,
        pd: u32,
        (send_cq, receive_cq): (&Cq, &Cq),
        srq: Option<&Srq>,
        options: QpOptions,
    ) -> Result<Qp, u32> {
        let (send_size, receive_size) =
            (send_slot(options.max_send_sge), receive_slot(options.max_receive_sge));
        let pages_of =
            |slots: u32, size: u64| u32::try_from((u64::from(slots) * size).div_ceil(PAGE)).unwrap();
        let send_pages = pages_of(options.max_send_wr, send_size);
        let receive_pages = if srq.is_some() { 0 } else { pages_of(options.max_receive_wr, receive_size) };
        let count = 1 + send_pages + receive_pages;
        let pages = self.pages(count);
        let directory = self.directory(&pages);
        let body = CreateQp {
            directory: directory.into(),
            pd: pd.into(),
            send_cq: send_cq.handle.into(),
            receive_cq: receive_cq.handle.into(),
            srq: srq.map_or(0, |srq| srq.handle).into(),
            max_send_wr: options.max_send_wr.into(),
            max_receive_wr: if srq.is_some() { 0 } else { options.max_receive_wr }.into(),
            max_send_sge: options.max_send_sge.into(),
            max_receive_sge: if srq.is_some() { 0 } else { options.max_receive_sge }.into(),
            max_inline_data: 0.into(),
            lkey: 0.into(),
            access: 1.into(),
            total_pages: u16::try_from(count).unwrap().into(),
            send_pages: u16::try_from(send_pages).unwrap().into(),
            max_atomic_argument: 0.into(),
            signal_all: u8::from(options.signal_all),
            kind: options.kind,
            has_srq: u8::from(srq.is_some()),
            reserved: [0x5A; 3],
        };
        let made: QpResponse = self.command(host, number::CREATE_QP, &body)?;
        let (handle, qpn) = (made.handle.get(), made.qpn.get());
        assert!(handle != 0 && handle < self.capabilities.max_qp.get(), "handle {handle}");
        assert_eq!(qpn == 1, options.kind == qp_kind::GSI);
        Ok(Qp {
            handle,
            qpn,
            pd,
            uar,
            pages,
            send_pages,
            max_send_wr: options.max_send_wr,
            max_receive_wr: if srq.is_some() { 0 } else { options.max_receive_wr },
            send_size,
            receive_size,
        })
    }

    /// Modifies a queue pair. Attributes outside of the mask are garbage, as in the driver.
    pub fn modify(
        &mut self,
        host: &mut Host<M>,
        qp: u32,
        mask: u32,
        set: impl FnOnce(&mut QueuePair),
    ) -> Result<(), u32> {
        let mut attributes = QueuePair::read_from_bytes(&[0x77; 160]).unwrap();
        set(&mut attributes);
        let body = ModifyQp { handle: qp.into(), mask: mask.into(), attributes };
        let _: [u8; 0] = self.command(host, number::MODIFY_QP, &body)?;
        Ok(())
    }

    /// Attributes of a queue pair.
    pub fn query(&mut self, host: &mut Host<M>, qp: u32) -> Result<QueuePair, u32> {
        self.command(host, number::QUERY_QP, &[qp.to_le_bytes(), [0xFF; 4]])
    }

    /// Binds a GID.
    pub fn bind(&mut self, host: &mut Host<M>, index: u32, gid: [u8; 16]) -> Result<(), u32> {
        let body = CreateBind {
            mtu: 1024.into(),
            vlan: 0xFFF.into(),
            index: index.into(),
            gid,
            gid_type: 2,
            reserved: [0; 3],
        };
        self.fire(host, number::CREATE_BIND, &body)
    }

    /// RESET to INIT.
    pub fn to_init(&mut self, host: &mut Host<M>, qp: &Qp, access: u32) -> Result<(), u32> {
        self.modify(host, qp.handle, 1 | 1 << 3 | 1 << 4 | 1 << 5, |to| {
            to.state = 1.into();
            to.access = access.into();
            to.pkey_index = 0.into();
            to.port = 1;
        })
    }

    /// A connected queue pair from INIT over RTR to RTS.
    pub fn connect(
        &mut self,
        host: &mut Host<M>,
        qp: &Qp,
        peer_qpn: u32,
        peer_gid: [u8; 16],
    ) -> Result<(), u32> {
        let to_receive = 1 | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 15 | 1 << 17 | 1 << 20;
        self.modify(host, qp.handle, to_receive, |to| {
            to.state = 2.into();
            to.path_mtu = 3.into();
            to.rq_psn = 0.into();
            to.destination_qpn = peer_qpn.into();
            to.max_dest_rd_atomic = 4;
            to.min_rnr_timer = 1;
            to.address.dgid = peer_gid;
            // MACs are those that hosts of tests assign to their guests.
            to.address.dmac = [2, 0, 0, 0, 0, peer_gid[15]];
            to.address.sgid_index = 0;
            to.address.hop_limit = 64;
            to.address.traffic_class = 0;
            to.address.flow_label = 0.into();
            to.address.service_level = 0;
            to.address.flags = 1;
            to.address.port = 1;
        })?;
        let to_send = 1 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 13 | 1 << 16;
        self.modify(host, qp.handle, to_send, |to| {
            to.state = 3.into();
            to.sq_psn = 0.into();
            to.timeout = 14;
            to.retry_count = 7;
            to.rnr_retry = 7;
            to.max_rd_atomic = 4;
        })
    }

    /// A datagram queue pair from RESET to RTS.
    pub fn start_datagrams(&mut self, host: &mut Host<M>, qp: &Qp, qkey: u32) -> Result<(), u32> {
        self.modify(host, qp.handle, 1 | 1 << 4 | 1 << 5 | 1 << 6, |to| {
            to.state = 1.into();
            to.pkey_index = 0.into();
            to.port = 1;
            to.qkey = qkey.into();
        })
        .or_else(|error| {
            // The GSI queue pair's transition has no port attribute; `ib_mad` passes only the P_Key and the Q_Key.
            if qp.qpn != 1 {
                return Err(error);
            }
            self.modify(host, qp.handle, 1 | 1 << 4 | 1 << 6, |to| {
                to.state = 1.into();
                to.pkey_index = 0.into();
                to.qkey = qkey.into();
            })
        })?;
        self.modify(host, qp.handle, 1, |to| to.state = 2.into())?;
        self.modify(host, qp.handle, 1 | 1 << 16, |to| {
            to.state = 3.into();
            to.sq_psn = 0.into();
        })
    }
}
