//! Two VMs with an HCA each, and the engine that serves them, in this process: a payload program posts and polls in
//! the one, nobody runs in the other.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use anyhow::{Context, bail};
use dma::{Dma, MappedMemory, MemoryRegion};
use hca::EngineConfig;
use hca::names::SegmentId;
use payload_loops::job::Job;
use payload_loops::verbs;
use pvrdma::Config;
use pvrdma::abi::PAGE;
use pvrdma::abi::commands::{
    CqResponse, CreateCq, CreateMr, CreateQp, MrResponse, QpResponse, mr_kind, number, qp_kind,
};
use pvrdma::abi::work::{RemoteOperands, SendHeader, Sge, opcode, receive_slot, send_slot};
use pvrdma::testing::{Cq, Guest, Host, Qp};
use zerocopy::{IntoBytes, transmute};

use crate::measuring_vm::{MeasuringVm, Settings};
use crate::peers;

/// Access flags: local write, remote write, remote read, remote atomic.
const ACCESS: u32 = 15;
/// Send slots of the first queue pair.
pub const FIRST_SLOTS: u32 = 128;
/// Send slots of each other queue pair: a page of them.
const SEND_SLOTS: u32 = 32;
/// Doorbell pages that lie before a VM's memory as its driver sees it.
const UAR_PAGES: u64 = 512;
const GIDS: [[u8; 16]; 2] = [
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 10, 0, 0, 1],
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 10, 0, 0, 2],
];

/// What the beds are to have.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Queue pairs that the program uses.
    pub queue_pairs: u32,
    /// Queue pairs more, connected, which nobody uses.
    pub idle: u32,
    /// Bytes of each VM's RAM.
    pub memory: u64,
    /// Bytes of the buffer of each side.
    pub buffer: u64,
}

/// A program's memory as the engine and the set-up reach it: by offset from where free RAM begins.
struct Side {
    vm: MeasuringVm,
    /// Where the driver's memory begins in the VM.
    base: u64,
    memory: MappedMemory,
    doorbells: MappedMemory,
}

impl Side {
    fn start(program: &Path, cpu: usize, memory: u64) -> anyhow::Result<Self> {
        let plain = MeasuringVm::plain(program, cpu, memory);
        let vm = MeasuringVm::start(Settings { transparent_huge: true, ..plain })?;
        let (free, room) = vm.free();
        let base = free + UAR_PAGES * PAGE;
        let size = (room - UAR_PAGES * PAGE) / PAGE * PAGE;
        let map = |address, size| -> anyhow::Result<MappedMemory> {
            let (file, offset) = vm.ram_file(address, size)?;
            let file: OwnedFd = file.try_clone().context("A VM's memfd could not be duplicated")?.into();
            Ok(MappedMemory::default().with(MemoryRegion::map(0, size, &file, offset, true)?)?)
        };
        let (doorbells, memory) = (map(free, UAR_PAGES * PAGE)?, map(base, size)?);
        Ok(Self { vm, base, memory, doorbells })
    }

    fn size(&self) -> u64 {
        self.memory.regions().iter().map(|region| region.size()).sum()
    }
}

/// What the engine's thread is told.
#[derive(Default)]
struct Orders {
    run: AtomicBool,
    stop: AtomicBool,
}

/// The two VMs, their devices and the engine's thread.
pub struct Bed {
    first: Side,
    second: Side,
    orders: Arc<Orders>,
    engine: Option<JoinHandle<()>>,
    queues: u64,
    queue_count: u64,
    completions: u64,
    source: Buffer,
    target: Buffer,
    templates: u64,
}

/// A registered buffer.
#[derive(Debug, Clone, Copy)]
struct Buffer {
    /// Driver's address, also the address that work requests name.
    address: u64,
    length: u64,
    lkey: u32,
    rkey: u32,
}

impl Bed {
    /// Starts VMs, creates and connects all queue pairs through the device's registers, and starts the engine's thread, which
    /// rests until something is measured.
    pub fn start(program: &Path, cpus: [usize; 2], plan: Plan) -> anyhow::Result<Self> {
        let first = Side::start(program, cpus[0], plan.memory)?;
        let second = Side::start(program, cpus[0], plan.memory)?;
        let mut host: Host<MappedMemory> = Host::new(EngineConfig::default());
        let config = |name: &str, last| Config::new(name, SegmentId(1), [2, 0, 0, 0, 0, last]);
        let mut guests = [
            Guest::new(&mut host, config("first", 1), first.memory.clone(), first.size()),
            Guest::new(&mut host, config("second", 2), second.memory.clone(), second.size()),
        ];
        let mut made = Vec::new();
        for (guest, gid) in guests.iter_mut().zip(GIDS) {
            guest.probe(&mut host);
            if guest.bind(&mut host, 0, gid).is_err() {
                bail!("The device refused a GID");
            }
            let context = guest.context(&mut host);
            let pd = guest.pd(&mut host, context.1);
            let cq = completion_queue(guest, &mut host, context, 8192)?;
            let buffer = register(guest, &mut host, pd, plan.buffer)?;
            made.push((context, pd, cq, buffer));
        }
        let [a, b] = &mut guests;
        let (Some(on_a), Some(on_b)) = (made.first(), made.get(1)) else { bail!("Two devices were wanted") };
        let mut pairs = Vec::new();
        for index in 0..plan.queue_pairs + plan.idle {
            let slots = if index == 0 { FIRST_SLOTS } else { SEND_SLOTS };
            let left = queue_pair(a, &mut host, on_a.0.0, on_a.1, &on_a.2, slots)?;
            let right = queue_pair(b, &mut host, on_b.0.0, on_b.1, &on_b.2, SEND_SLOTS)?;
            let done = a
                .to_init(&mut host, &left, ACCESS)
                .and_then(|()| b.to_init(&mut host, &right, ACCESS))
                .and_then(|()| a.connect(&mut host, &left, right.qpn, GIDS[1]))
                .and_then(|()| b.connect(&mut host, &right, left.qpn, GIDS[0]));
            if let Err(code) = done {
                bail!("A queue pair could not be connected: error {code}");
            }
            pairs.push(left);
        }
        // Idle ones among the others, as they would be.
        let stride = usize::try_from((plan.queue_pairs + plan.idle) / plan.queue_pairs.max(1)).unwrap_or(1);
        let used: Vec<&Qp> =
            pairs.iter().step_by(stride.max(1)).take(usize::try_from(plan.queue_pairs)?).collect();
        let templates = a.page();
        let in_vm = |address: u64| first.base + address;
        let mut bytes = Vec::new();
        for qp in &used {
            let queue = verbs::SendQueue {
                slots: in_vm(*qp.pages.get(1).context("A queue pair has no send queue")?),
                indices: in_vm(*qp.pages.first().context("A queue pair has no pages")?),
                entries: qp.max_send_wr,
                slot_size: u32::try_from(qp.send_size)?,
                template: in_vm(templates),
                template_len: 96,
                handle: qp.handle,
                tail: 0,
                reserved: [0; 5],
            };
            bytes.extend_from_slice(&send_queue_bytes(&queue));
        }
        let queues = contiguous(a, pages_for(bytes.len() as u64))?;
        first.memory.write(queues, &bytes)?;
        let completions = a.page();
        let (context, _, cq, source) = on_a;
        let ring = completion_queue_bytes(&verbs::CompletionQueue {
            entries_at: in_vm(*cq.pages.get(1).context("A completion queue has no entries")?),
            indices: in_vm(*cq.pages.first().context("A completion queue has no pages")?) + 8,
            entries: cq.entries,
            handle: cq.handle,
            doorbells: in_vm(0) - UAR_PAGES * PAGE + u64::from(context.0) * PAGE,
        });
        first.memory.write(completions, &ring)?;
        let (source, target) = (*source, on_b.3);
        let orders = Arc::new(Orders::default());
        let engine = {
            let ids = [a.id, b.id];
            let doorbells = [first.doorbells.clone(), second.doorbells.clone()];
            let orders = Arc::clone(&orders);
            let cpu = cpus[1];
            std::thread::Builder::new()
                .name("engine".to_owned())
                .spawn(move || serve(host, ids, &doorbells, &orders, cpu))
                .context("The engine's thread could not be started")?
        };
        Ok(Self {
            queue_count: used.len() as u64,
            first,
            second,
            orders,
            engine: Some(engine),
            queues,
            completions,
            source,
            target,
            templates,
        })
    }

    /// Has the program post `operations` RDMA writes of `length` bytes, round robin over the first `queue_pairs` of its queue pairs, at
    /// most `window` outstanding. Returns the ticks.
    pub fn write(
        &mut self,
        length: u32,
        queue_pairs: u64,
        window: u64,
        operations: u64,
    ) -> anyhow::Result<u64> {
        let slots = if queue_pairs == 1 { FIRST_SLOTS } else { SEND_SLOTS };
        if u64::from(length) > self.source.length || window > queue_pairs * u64::from(slots) {
            bail!("{length} bytes or a window of {window} are more than this bed has");
        }
        let header = SendHeader {
            wr_id: 1.into(),
            sge_count: 1.into(),
            total_length: 0.into(),
            opcode: opcode::WRITE.into(),
            flags: 2.into(),
            immediate: [0; 4],
            reserved: 0.into(),
            operands: transmute!(RemoteOperands {
                address: self.target.address.into(),
                rkey: self.target.rkey.into(),
                unused: [0; 36],
            }),
        };
        let sge =
            Sge { address: self.source.address.into(), length: length.into(), lkey: self.source.lkey.into() };
        let mut template = header.as_bytes().to_vec();
        template.extend_from_slice(sge.as_bytes());
        self.first.memory.write(self.templates, &template)?;
        let job = Job::Verbs {
            queues: self.first.base + self.queues,
            count: queue_pairs.min(self.queue_count),
            completions: self.first.base + self.completions,
            operations,
            window,
        };
        self.orders.run.store(true, Ordering::SeqCst);
        if let Some(engine) = &self.engine {
            engine.thread().unpark();
        }
        let ticks = self.first.vm.run(&[job]);
        self.orders.run.store(false, Ordering::SeqCst);
        match ticks?.first() {
            Some(&verbs::FAILED) => bail!("A work request completed with an error"),
            Some(&verbs::STUCK) => bail!("A completion did not come within ten seconds"),
            Some(ticks) => Ok(*ticks),
            None => bail!("No vCPU ran the job"),
        }
    }

    /// Writes a pattern of `seed` at the source, has it written over, and says whether the target has it.
    pub fn verify(&mut self, length: u32, seed: u8) -> anyhow::Result<()> {
        let bytes: Vec<u8> =
            (0..length).map(|at| u8::try_from(at % 251).unwrap_or(0).wrapping_mul(seed) ^ seed).collect();
        self.first.memory.write(self.source.address, &bytes)?;
        self.second.memory.zero(self.target.address, u64::from(length))?;
        self.write(length, 1, 1, 1)?;
        let mut back = vec![0; bytes.len()];
        self.second.memory.read(self.target.address, &mut back)?;
        if back != bytes {
            bail!("{length} bytes written by RDMA did not arrive as they were sent");
        }
        Ok(())
    }

    /// Where source and target lie in this process, for the peer that copies the same pages.
    pub fn host_addresses(&self) -> anyhow::Result<(u64, u64)> {
        let length = self.source.length;
        Ok((
            self.first.vm.host_address(self.first.base + self.source.address, length)?,
            self.second.vm.host_address(self.second.base + self.target.address, length)?,
        ))
    }

    /// Exits of the program's VM to the monitor so far.
    pub fn exits(&self) -> u64 {
        self.first.vm.exits()
    }

    /// Ends the VMs and the engine.
    pub fn finish(mut self) -> anyhow::Result<()> {
        self.stop();
        let Self { first, second, .. } = &mut self;
        first.vm.close();
        second.vm.close();
        Ok(())
    }

    fn stop(&mut self) {
        self.orders.stop.store(true, Ordering::SeqCst);
        if let Some(engine) = self.engine.take() {
            engine.thread().unpark();
            if engine.join().is_err() {
                eprintln!("bench: rdma: the engine's thread panicked");
            }
        }
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The engine's thread: what the daemon's does while doorbells are memory.
fn serve(
    mut host: Host<MappedMemory>,
    ids: [hca::names::DeviceId; 2],
    doorbells: &[MappedMemory; 2],
    orders: &Orders,
    cpu: usize,
) {
    if let Err(error) = peers::pin(cpu) {
        eprintln!("bench: rdma: {error:#}");
    }
    let clock = quanta::Clock::new();
    let began = clock.raw();
    while !orders.stop.load(Ordering::Relaxed) {
        if !orders.run.load(Ordering::Relaxed) {
            std::thread::park_timeout(std::time::Duration::from_millis(10));
            continue;
        }
        // `turn` advances its clock by a microsecond; this one follows the real clock.
        host.now = 1_000_000_000 + clock.delta_as_nanos(began, clock.raw());
        host.turn(ids.iter().copied().zip(doorbells));
    }
}

/// Pages that lie one after the other.
fn contiguous(guest: &mut Guest<MappedMemory>, count: u32) -> anyhow::Result<u64> {
    guest.pages(count).last().copied().context("No pages were asked for")
}

/// [`contiguous`], page by page.
fn ascending(guest: &mut Guest<MappedMemory>, count: u32) -> Vec<u64> {
    let mut pages = guest.pages(count);
    pages.sort_unstable();
    pages
}

fn pages_for(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(PAGE)).unwrap_or(u32::MAX)
}

fn refused(what: &str) -> impl Fn(u32) -> anyhow::Error {
    move |code| anyhow::anyhow!("The device refused to create a {what}: error {code}")
}

fn register(
    guest: &mut Guest<MappedMemory>,
    host: &mut Host<MappedMemory>,
    pd: u32,
    length: u64,
) -> anyhow::Result<Buffer> {
    let pages = ascending(guest, pages_for(length));
    let address = pages.first().copied().context("An empty buffer")?;
    let directory = guest.directory(&pages);
    let body = CreateMr {
        start: address.into(),
        length: length.into(),
        directory: directory.into(),
        pd: pd.into(),
        access: ACCESS.into(),
        kind: mr_kind::USER.into(),
        pages: u32::try_from(pages.len())?.into(),
    };
    let made: MrResponse = guest.command(host, number::CREATE_MR, &body).map_err(refused("memory region"))?;
    Ok(Buffer { address, length, lkey: made.lkey.get(), rkey: made.rkey.get() })
}

fn completion_queue(
    guest: &mut Guest<MappedMemory>,
    host: &mut Host<MappedMemory>,
    (uar, context): (u32, u32),
    entries: u32,
) -> anyhow::Result<Cq> {
    let pages = ascending(guest, 1 + pages_for(u64::from(entries) * 64));
    let directory = guest.directory(&pages);
    let body = CreateCq {
        directory: directory.into(),
        context: context.into(),
        entries: entries.into(),
        pages: u32::try_from(pages.len())?.into(),
        reserved: 0.into(),
    };
    let made: CqResponse =
        guest.command(host, number::CREATE_CQ, &body).map_err(refused("completion queue"))?;
    Ok(Cq { handle: made.handle.get(), uar, entries, pages })
}

fn queue_pair(
    guest: &mut Guest<MappedMemory>,
    host: &mut Host<MappedMemory>,
    uar: u32,
    pd: u32,
    cq: &Cq,
    slots: u32,
) -> anyhow::Result<Qp> {
    let send_pages = pages_for(u64::from(slots) * send_slot(1));
    let pages = ascending(guest, 2 + send_pages);
    let directory = guest.directory(&pages);
    let body = CreateQp {
        directory: directory.into(),
        pd: pd.into(),
        send_cq: cq.handle.into(),
        receive_cq: cq.handle.into(),
        srq: 0.into(),
        max_send_wr: slots.into(),
        max_receive_wr: 16.into(),
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
    let made: QpResponse = guest.command(host, number::CREATE_QP, &body).map_err(refused("queue pair"))?;
    Ok(Qp {
        handle: made.handle.get(),
        qpn: made.qpn.get(),
        pd,
        uar,
        pages,
        send_pages,
        max_send_wr: slots,
        max_receive_wr: 16,
        send_size: send_slot(1),
        receive_size: receive_slot(1),
    })
}

fn send_queue_bytes(queue: &verbs::SendQueue) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(64);
    bytes.extend_from_slice(&queue.slots.to_le_bytes());
    bytes.extend_from_slice(&queue.indices.to_le_bytes());
    bytes.extend_from_slice(&queue.entries.to_le_bytes());
    bytes.extend_from_slice(&queue.slot_size.to_le_bytes());
    bytes.extend_from_slice(&queue.template.to_le_bytes());
    bytes.extend_from_slice(&queue.template_len.to_le_bytes());
    bytes.extend_from_slice(&queue.handle.to_le_bytes());
    bytes.extend_from_slice(&queue.tail.to_le_bytes());
    bytes.resize(64, 0);
    bytes
}

fn completion_queue_bytes(queue: &verbs::CompletionQueue) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(32);
    bytes.extend_from_slice(&queue.entries_at.to_le_bytes());
    bytes.extend_from_slice(&queue.indices.to_le_bytes());
    bytes.extend_from_slice(&queue.entries.to_le_bytes());
    bytes.extend_from_slice(&queue.handle.to_le_bytes());
    bytes.extend_from_slice(&queue.doorbells.to_le_bytes());
    bytes
}
