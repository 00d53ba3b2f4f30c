//! The parts of a guest's PVRDMA driver that a measurement needs: probe, objects, connections. It uses registers and guest memory
//! like Linux' `vmw_pvrdma`, with any server behind the registers. The payload program posts and polls afterwards.

use std::ops::Range;

use anyhow::{Context as _, bail};
use dma::access::read_array;
use dma::{Dma, MappedMemory};
use pvrdma::abi::PAGE;
use pvrdma::abi::attributes::QueuePair as Attributes;
use pvrdma::abi::commands::{
    ACKNOWLEDGE, CommandHeader, CqResponse, CreateBind, CreateContext, CreateCq, CreateMr, CreateQp, Handle,
    ModifyQp, MrResponse, QpResponse, ResponseHeader, mr_kind, number, qp_kind,
};
use pvrdma::abi::registers::{self, control};
use pvrdma::abi::rings::EVENT_RING_PAGES;
use pvrdma::abi::shared_region::{DriverPart, RingPages};
use pvrdma::abi::work::send_slot;
use zerocopy::{FromBytes, FromZeros as _, Immutable, IntoBytes, KnownLayout};

/// Access flags: local write, remote write, remote read, remote atomic.
const ACCESS: u32 = 15;
/// Receive slots of a queue pair: a page has room for them.
const RECEIVE_SLOTS: u32 = 16;
const DRIVER_VERSION: u32 = 20;
const OLDEST_DEVICE_VERSION: u32 = 18;
/// Guest information of a 64-bit Linux guest.
const GUEST_KIND: u32 = 2 | 1 << 2 | 1 << 6;

/// A driver's access to a device's registers.
pub trait Registers {
    /// Reads the register at an offset of BAR 1; ones if the device is gone.
    fn read(&self, offset: u64) -> u32;
    /// Writes a register. The device has processed the write on return.
    fn write(&self, offset: u64, value: u32);
    /// Waits for the interrupt of a command's response.
    ///
    /// # Errors
    /// None arrives within a minute.
    fn await_response(&self) -> anyhow::Result<()>;
}

/// The driver of one guest.
pub struct Driver<'a> {
    registers: &'a dyn Registers,
    memory: MappedMemory,
    pages: Range<u64>,
    doorbells: u64,
    command_slot: u64,
    response_slot: u64,
}

/// A user process's context: its handle, and its doorbell page.
#[derive(Debug, Clone, Copy)]
pub struct Context {
    pub handle: u32,
    pub doorbells: u64,
}

/// A completion queue. Its first page has the indices.
#[derive(Debug, Clone)]
pub struct CompletionQueue {
    pub handle: u32,
    pub entries: u32,
    pub pages: Vec<u64>,
}

/// A queue pair. Its first page has the indices, and the send queue follows.
#[derive(Debug, Clone)]
pub struct QueuePair {
    pub handle: u32,
    pub number: u32,
    pub send_slots: u32,
    pub pages: Vec<u64>,
}

/// A registered buffer.
#[derive(Debug, Clone, Copy)]
pub struct Buffer {
    /// Guest address, also the address that work requests name.
    pub address: u64,
    pub len_bytes: u64,
    pub lkey: u32,
    pub rkey: u32,
}

impl<'a> Driver<'a> {
    /// Creates a driver that uses the pages `pages` (guest addresses, also in `memory`), with its doorbells at guest address
    /// `doorbells`.
    pub fn new(
        registers: &'a dyn Registers,
        memory: MappedMemory,
        pages: Range<u64>,
        doorbells: u64,
    ) -> Self {
        Self { registers, memory, pages, doorbells, command_slot: 0, response_slot: 0 }
    }

    /// Allocates a zeroed page.
    pub fn page(&mut self) -> anyhow::Result<u64> {
        self.contiguous(1)?.first().copied().context("No page was asked for")
    }

    /// Allocates consecutive zeroed pages.
    pub fn contiguous(&mut self, count: u32) -> anyhow::Result<Vec<u64>> {
        let (start, size) = (self.pages.start, u64::from(count) * PAGE);
        if size > self.pages.end - start {
            bail!(
                "{count} more pages do not fit into a measuring VM's memory, which ends at {:#x}",
                self.pages.end
            );
        }
        self.memory.zero(start, size)?;
        self.pages.start += size;
        Ok((start..start + size).step_by(usize::try_from(PAGE)?).collect())
    }

    fn directory(&mut self, pages: &[u64]) -> anyhow::Result<u64> {
        let directory = self.page()?;
        for (entry, chunk) in (directory..).step_by(8).zip(pages.chunks(512)) {
            let table = self.page()?;
            self.memory.write(entry, &table.to_le_bytes())?;
            let bytes: Vec<u8> = chunk.iter().flat_map(|page| page.to_le_bytes()).collect();
            self.memory.write(table, &bytes)?;
        }
        Ok(directory)
    }

    /// Describes the shared region, activates the device and sets an address.
    pub fn probe(&mut self, gid: [u8; 16]) -> anyhow::Result<()> {
        let version = self.registers.read(registers::VERSION);
        if !(OLDEST_DEVICE_VERSION..u32::MAX).contains(&version) {
            bail!(
                "The RDMA device has version {version:#x}, and {OLDEST_DEVICE_VERSION} is the oldest that a driver takes"
            );
        }
        let region = self.page()?;
        self.command_slot = self.page()?;
        self.response_slot = self.page()?;
        let part = DriverPart {
            driver_version: DRIVER_VERSION.into(),
            pad0: 0.into(),
            os: GUEST_KIND.into(),
            pad1: 0.into(),
            command_slot: self.command_slot.into(),
            response_slot: self.response_slot.into(),
            async_ring: self.event_ring()?,
            completion_ring: self.event_ring()?,
            uar_pfn: (self.doorbells / PAGE).into(),
        };
        self.memory.write(region, part.as_bytes())?;
        self.registers.write(registers::DSR_LOW, u32::try_from(region & 0xFFFF_FFFF)?);
        self.registers.write(registers::DSR_HIGH, u32::try_from(region >> 32)?);
        self.registers.write(registers::INTERRUPT_MASK, 0);
        self.registers.write(registers::CONTROL, control::ACTIVATE);
        let error = self.registers.read(registers::ERROR);
        if error != 0 {
            bail!("The RDMA device could not be activated: its error register says {error:#x}");
        }
        let bind = CreateBind {
            mtu: 1024.into(),
            vlan: 0xFFF.into(),
            index: 0.into(),
            gid,
            gid_type: 2,
            reserved: [0; 3],
        };
        // This command has no response.
        self.request("bind a GID", number::CREATE_BIND, bind.as_bytes())
    }

    fn event_ring(&mut self) -> anyhow::Result<RingPages> {
        let pages = self.contiguous(EVENT_RING_PAGES)?;
        let directory = self.directory(&pages)?;
        Ok(RingPages { pages: EVENT_RING_PAGES.into(), reserved: 0.into(), directory: directory.into() })
    }

    fn request(&self, what: &str, code: u32, body: &[u8]) -> anyhow::Result<()> {
        let header = CommandHeader { response: 0.into(), command: code.into(), reserved: 0.into() };
        self.memory.write(self.command_slot, header.as_bytes())?;
        self.memory.write(self.command_slot + size_of::<CommandHeader>() as u64, body)?;
        self.registers.write(registers::REQUEST, 0);
        match self.registers.read(registers::ERROR) {
            0 => Ok(()),
            u32::MAX => bail!("The RDMA device is gone; it was asked to {what}"),
            error => bail!("The RDMA device refused to {what}: its error register says {error:#x}"),
        }
    }

    fn command<T: FromBytes + KnownLayout + Immutable>(
        &self,
        what: &str,
        code: u32,
        body: &(impl IntoBytes + Immutable),
    ) -> anyhow::Result<T> {
        self.request(what, code, body.as_bytes())?;
        self.registers.await_response().with_context(|| format!("The RDMA device was asked to {what}"))?;
        let slot: [u8; 176] = read_array(&self.memory, self.response_slot)?;
        let (header, rest) = ResponseHeader::read_from_prefix(&slot)
            .ok()
            .context("A response slot is shorter than its header")?;
        if (header.acknowledge.get(), header.error) != (ACKNOWLEDGE | code, 0) {
            let (acknowledge, error) = (header.acknowledge.get(), header.error);
            bail!("The RDMA device answered {acknowledge:#x} with error {error} when it was asked to {what}");
        }
        Ok(T::read_from_prefix(rest).ok().context("A response is longer than its slot")?.0)
    }

    /// Opens a context on the doorbell page with that number.
    pub fn context(&mut self, page: u32) -> anyhow::Result<Context> {
        let doorbells = self.doorbells + u64::from(page) * PAGE;
        let body = CreateContext { pfn: (doorbells / PAGE).into() };
        let made: Handle = self.command("open a context", number::CREATE_UC, &body)?;
        Ok(Context { handle: made.handle.get(), doorbells })
    }

    /// Creates a protection domain.
    pub fn protection_domain(&mut self, context: Context) -> anyhow::Result<u32> {
        let body = Handle { handle: context.handle.into() };
        let made: Handle = self.command("make a protection domain", number::CREATE_PD, &body)?;
        Ok(made.handle.get())
    }

    /// Registers a new contiguous buffer of `len_bytes`.
    pub fn register(&mut self, pd: u32, len_bytes: u64) -> anyhow::Result<Buffer> {
        let pages = self.contiguous(pages_for(len_bytes))?;
        let address = pages.first().copied().context("An empty buffer can't be registered")?;
        let body = CreateMr {
            start: address.into(),
            length: len_bytes.into(),
            directory: self.directory(&pages)?.into(),
            pd: pd.into(),
            access: ACCESS.into(),
            kind: mr_kind::USER.into(),
            pages: u32::try_from(pages.len())?.into(),
        };
        let made: MrResponse = self.command("register memory", number::CREATE_MR, &body)?;
        Ok(Buffer { address, len_bytes, lkey: made.lkey.get(), rkey: made.rkey.get() })
    }

    /// Creates a completion queue; `entries` is a power of two.
    pub fn completion_queue(&mut self, context: Context, entries: u32) -> anyhow::Result<CompletionQueue> {
        let pages = self.contiguous(1 + pages_for(u64::from(entries) * 64))?;
        let body = CreateCq {
            directory: self.directory(&pages)?.into(),
            context: context.handle.into(),
            entries: entries.into(),
            pages: u32::try_from(pages.len())?.into(),
            reserved: 0.into(),
        };
        let made: CqResponse = self.command("make a completion queue", number::CREATE_CQ, &body)?;
        Ok(CompletionQueue { handle: made.handle.get(), entries, pages })
    }

    /// Creates an RC queue pair in INIT; `send_slots` is a power of two.
    pub fn queue_pair(&mut self, pd: u32, cq: u32, send_slots: u32) -> anyhow::Result<QueuePair> {
        let send_pages = pages_for(u64::from(send_slots) * send_slot(1));
        let pages = self.contiguous(2 + send_pages)?;
        let body = CreateQp {
            directory: self.directory(&pages)?.into(),
            pd: pd.into(),
            send_cq: cq.into(),
            receive_cq: cq.into(),
            srq: 0.into(),
            max_send_wr: send_slots.into(),
            max_receive_wr: RECEIVE_SLOTS.into(),
            max_send_sge: 1.into(),
            max_receive_sge: 1.into(),
            max_inline_data: 0.into(),
            lkey: 0.into(),
            access: 1.into(),
            total_pages: u16::try_from(2 + send_pages)?.into(),
            send_pages: u16::try_from(send_pages)?.into(),
            max_atomic_argument: 0.into(),
            signal_all: 1,
            kind: qp_kind::RC,
            has_srq: 0,
            reserved: [0; 3],
        };
        let made: QpResponse = self.command("make a queue pair", number::CREATE_QP, &body)?;
        let qp = QueuePair { handle: made.handle.get(), number: made.qpn.get(), send_slots, pages };
        self.modify(&qp, 1 | 1 << 3 | 1 << 4 | 1 << 5, |to| {
            to.state = 1.into();
            to.access = ACCESS.into();
            to.port = 1;
        })?;
        Ok(qp)
    }

    /// Moves a queue pair from INIT over RTR to RTS, connected to the peer's queue pair of that number.
    pub fn connect(&mut self, qp: &QueuePair, peer: u32, peer_gid: [u8; 16]) -> anyhow::Result<()> {
        self.modify(qp, 1 | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 15 | 1 << 17 | 1 << 20, |to| {
            to.state = 2.into();
            to.path_mtu = 3.into();
            to.destination_qpn = peer.into();
            to.max_dest_rd_atomic = 4;
            to.min_rnr_timer = 1;
            to.address.dgid = peer_gid;
            to.address.hop_limit = 64;
            to.address.flags = 1;
            to.address.port = 1;
        })?;
        self.modify(qp, 1 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 13 | 1 << 16, |to| {
            to.state = 3.into();
            to.timeout = 14;
            to.retry_count = 7;
            to.rnr_retry = 7;
            to.max_rd_atomic = 4;
        })
    }

    fn modify(&self, qp: &QueuePair, mask: u32, set: impl FnOnce(&mut Attributes)) -> anyhow::Result<()> {
        let mut attributes = Attributes::new_zeroed();
        set(&mut attributes);
        let body = ModifyQp { handle: qp.handle.into(), mask: mask.into(), attributes };
        let _: [u8; 0] = self.command("modify a queue pair", number::MODIFY_QP, &body)?;
        Ok(())
    }
}

fn pages_for(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(PAGE)).unwrap_or(u32::MAX)
}
