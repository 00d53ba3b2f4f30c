//! Two VMs with an HCA each. A payload program posts and polls in the first; the second runs none. A `causeway host` daemon serves
//! the HCAs, or the engine alone on a thread of this process.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};
use dma::{Dma, MappedMemory, MemoryRegion};
use payload_loops::job::Job;
use payload_loops::verbs;
use pvrdma::abi::PAGE;
use pvrdma::abi::work::{RemoteOperands, SendHeader, Sge, opcode, send_slot};
use zerocopy::{IntoBytes, transmute};

use super::driver::{Buffer, CompletionQueue, Context as UserContext, Driver, QueuePair, Registers};
use super::engine_alone::{Devices, EngineAlone};
use super::nic::{self, Nic};
use crate::host_daemon::HostDaemon;
use crate::measuring_vm::{MeasuringVm, Settings};

/// Send slots of the first queue pair.
pub const FIRST_SLOTS: u32 = 128;
/// Send slots of each other queue pair: a page of them.
const SEND_SLOTS: u32 = 32;
const COMPLETIONS: u32 = 8192;
/// The program's doorbell page; the kernel has page 0.
const DOORBELL_PAGE: u32 = 1;
/// Doorbell pages of the engine alone, as many as a daemon's device has.
const DOORBELL_PAGES: u64 = 512;
/// Writes before doorbells are memory.
const WARM_UP_WRITES: u64 = 512;
const WARM_UP_ROUNDS: u32 = 10_000;
/// Exits of a measured run: the request for a job, and its completion.
const EXITS_PER_RUN: u64 = 2;
const GIDS: [[u8; 16]; 2] = [
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 10, 0, 0, 1],
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 10, 0, 0, 2],
];

/// Parameters of the test beds.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Queue pairs that the program uses.
    pub queue_pairs: u32,
    /// Additional connected queue pairs that stay idle.
    pub idle: u32,
    /// RAM of each VM in bytes.
    pub memory: u64,
    /// Buffer of each side in bytes.
    pub buffer: u64,
}

/// A VM, and its memory in this process by guest address.
struct Side {
    vm: MeasuringVm,
    memory: MappedMemory,
    /// Its free range.
    free: Range<u64>,
}

impl Side {
    fn start(program: &Path, cpu: usize, memory: u64) -> anyhow::Result<Self> {
        let plain = MeasuringVm::plain(program, cpu, memory);
        let vm = MeasuringVm::start(Settings { transparent_huge: true, room: nic::ROOM, ..plain })?;
        let (start, room) = vm.free();
        let free = start..start + room / PAGE * PAGE;
        let memory = map(&vm, &free, free.start)?;
        Ok(Self { vm, memory, free })
    }
}

/// Maps a range of a VM's memory, so that guest address `address` is its start.
fn map(vm: &MeasuringVm, range: &Range<u64>, address: u64) -> anyhow::Result<MappedMemory> {
    let size = range.end - range.start;
    let (file, offset) = vm.ram_file(range.start, size)?;
    let file: OwnedFd = file.try_clone().context("A VM's memfd could not be duplicated")?.into();
    Ok(MappedMemory::default().with(MemoryRegion::map(address, size, &file, offset, true)?)?)
}

/// The server of the HCAs.
enum Server {
    Daemon(Box<Served>),
    Alone(EngineAlone),
}

/// A daemon and its NICs. Fields are dropped in order: connections close, then the daemon ends, then its directory is removed.
struct Served {
    nics: [Nic; 2],
    daemon: HostDaemon,
    folder: tempfile::TempDir,
}

/// The two VMs and their server.
pub struct Bed {
    server: Server,
    first: Side,
    second: Side,
    made: Made,
    exits: u64,
    runs: u64,
}

/// The drivers' objects, as jobs name them.
#[derive(Debug, Clone, Copy)]
struct Made {
    queues: u64,
    queue_count: u64,
    completions: u64,
    templates: u64,
    source: Buffer,
    target: Buffer,
}

impl Bed {
    /// Starts a daemon as a user does (`causeway` is the program), with the VMs on the first CPU and the daemon's engine on the
    /// second. Attaches a NIC to each VM, and creates and connects all queue pairs through the devices' registers. `folder` contains
    /// the daemon's sockets, and is removed with it.
    pub fn by_daemon(
        folder: tempfile::TempDir,
        causeway: &Path,
        program: &Path,
        cpus: [usize; 2],
        plan: Plan,
    ) -> anyhow::Result<Self> {
        let options = ["--engine-cpu".to_owned(), cpus[1].to_string()];
        let socket = folder.path().join("host.sock");
        let daemon = HostDaemon::start(Command::new(causeway), &socket, &options)?;
        let sides = [(); 2].map(|()| Side::start(program, cpus[0], plan.memory));
        let [first, second] = sides;
        let (first, second) = (first?, second?);
        let attach = |side: &Side, name| {
            Nic::attach(&side.vm, daemon.socket(), name)
                .with_context(|| format!("VM {name} gets no RDMA NIC from the daemon"))
        };
        let nics = [attach(&first, "vm1")?, attach(&second, "vm2")?];
        let doorbells = [nics[0].doorbells(), nics[1].doorbells()];
        let free = [first.free.clone(), second.free.clone()];
        let made = make([&nics[0], &nics[1]], [&first, &second], free, doorbells, plan)?;
        let server = Server::Daemon(Box::new(Served { nics, daemon, folder }));
        Ok(Self { server, first, second, made, exits: 0, runs: 0 })
    }

    /// Does the same with the engine on a thread of this process on the second CPU, and doorbells in the VMs' RAM. The thread is idle
    /// outside of measurements.
    pub fn engine_alone(program: &Path, cpus: [usize; 2], plan: Plan) -> anyhow::Result<Self> {
        let first = Side::start(program, cpus[0], plan.memory)?;
        let second = Side::start(program, cpus[0], plan.memory)?;
        let split = |side: &Side| {
            let doorbells = side.free.start..side.free.start + DOORBELL_PAGES * PAGE;
            (doorbells.clone(), doorbells.end..side.free.end)
        };
        let (doorbells, free) = (split(&first).0, [split(&first).1, split(&second).1]);
        let devices = Devices::new([first.memory.clone(), second.memory.clone()]);
        let made = {
            let [left, right] = devices.registers();
            make([&left, &right], [&first, &second], free, [doorbells.start; 2], plan)?
        };
        let pages = [map(&first.vm, &doorbells, 0)?, map(&second.vm, &doorbells, 0)?];
        let server = Server::Alone(devices.serve(pages, cpus[1])?);
        Ok(Self { server, first, second, made, exits: 0, runs: 0 })
    }

    /// Lets the program post `operations` RDMA writes of `length` bytes, round robin over the first `queue_pairs` queue pairs, with
    /// at most `window` outstanding. Returns the ticks. Doorbells are memory at the start, and the server is idle at the end.
    pub fn write(
        &mut self,
        length: u32,
        queue_pairs: u64,
        window: u64,
        operations: u64,
    ) -> anyhow::Result<u64> {
        let slots = if queue_pairs == 1 { FIRST_SLOTS } else { SEND_SLOTS };
        if u64::from(length) > self.made.source.len_bytes || window > queue_pairs * u64::from(slots) {
            bail!("{length} bytes or a window of {window} are more than this bed has");
        }
        let job = |operations| Job::Verbs {
            queues: self.made.queues,
            count: queue_pairs.min(self.made.queue_count),
            completions: self.made.completions,
            operations,
            window,
        };
        let (warm_up, measured) = (job(WARM_UP_WRITES), job(operations));
        if let Server::Alone(engine) = &self.server {
            engine.set_running(true);
        }
        let result = self.warm_up(warm_up).and_then(|()| {
            self.request(length)?;
            let before = self.first.vm.exits();
            let ticks = self.run(measured)?;
            self.exits += self.first.vm.exits() - before;
            self.runs += 1;
            Ok(ticks)
        });
        match &self.server {
            Server::Alone(engine) => engine.set_running(false),
            Server::Daemon(served) if result.is_ok() => served.nics.iter().try_for_each(Nic::await_rest)?,
            Server::Daemon(_) => {}
        }
        result
    }

    /// Writes until doorbells are memory: the last writes cause no exits.
    fn warm_up(&mut self, job: Job) -> anyhow::Result<()> {
        self.request(8)?;
        for _ in 0..WARM_UP_ROUNDS {
            let before = self.first.vm.exits();
            self.run(job)?;
            if self.first.vm.exits() - before <= EXITS_PER_RUN {
                return Ok(());
            }
        }
        bail!(
            "The daemon has not made memory of the doorbells after {WARM_UP_ROUNDS} times {WARM_UP_WRITES} writes"
        );
    }

    /// Creates the request that the program posts repeatedly.
    fn request(&self, length: u32) -> anyhow::Result<()> {
        let header = SendHeader {
            wr_id: 1.into(),
            sge_count: 1.into(),
            total_length: 0.into(),
            opcode: opcode::WRITE.into(),
            flags: 2.into(),
            immediate: [0; 4],
            reserved: 0.into(),
            operands: transmute!(RemoteOperands {
                address: self.made.target.address.into(),
                rkey: self.made.target.rkey.into(),
                unused: [0; 36],
            }),
        };
        let Buffer { address, lkey, .. } = self.made.source;
        let sge = Sge { address: address.into(), length: length.into(), lkey: lkey.into() };
        let mut template = header.as_bytes().to_vec();
        template.extend_from_slice(sge.as_bytes());
        Ok(self.first.memory.write(self.made.templates, &template)?)
    }

    fn run(&mut self, job: Job) -> anyhow::Result<u64> {
        let server = &mut self.server;
        let is_served = || match server {
            Server::Daemon(served) => match served.daemon.trouble()? {
                Some(trouble) => bail!("{trouble}"),
                None => Ok(()),
            },
            Server::Alone(_) => Ok(()),
        };
        match self.first.vm.run_while(&[job], is_served)?.first() {
            Some(&verbs::FAILED) => bail!("A work request completed with an error"),
            Some(&verbs::STUCK) => bail!("A completion did not come within ten seconds"),
            Some(ticks) => Ok(*ticks),
            None => bail!("No vCPU ran the job"),
        }
    }

    /// Writes a pattern of `seed` at the source, copies it by an RDMA write, and returns whether the target has it.
    pub fn verify(&mut self, length: u32, seed: u8) -> anyhow::Result<()> {
        let bytes: Vec<u8> =
            (0..length).map(|at| u8::try_from(at % 251).unwrap_or(0).wrapping_mul(seed) ^ seed).collect();
        self.first.memory.write(self.made.source.address, &bytes)?;
        self.second.memory.zero(self.made.target.address, u64::from(length))?;
        self.write(length, 1, 1, 1)?;
        let mut back = vec![0; bytes.len()];
        self.second.memory.read(self.made.target.address, &mut back)?;
        if back != bytes {
            bail!("{length} bytes written by RDMA did not arrive as they were sent");
        }
        Ok(())
    }

    /// Returns the addresses of source and target in this process, for the peer that copies the same pages.
    pub fn host_addresses(&self) -> anyhow::Result<(u64, u64)> {
        let Made { source, target, .. } = self.made;
        Ok((
            self.first.vm.host_address(source.address, source.len_bytes)?,
            self.second.vm.host_address(target.address, source.len_bytes)?,
        ))
    }

    /// Returns the exits of the program's VM in measured runs since the last call, beyond those of its requests for jobs.
    pub fn take_exits(&mut self) -> u64 {
        let asked = EXITS_PER_RUN * std::mem::take(&mut self.runs);
        std::mem::take(&mut self.exits).saturating_sub(asked)
    }

    /// Returns the daemon, if any.
    pub fn daemon(&self) -> Option<&HostDaemon> {
        match &self.server {
            Server::Daemon(served) => Some(&served.daemon),
            Server::Alone(_) => None,
        }
    }

    /// Ends the VMs, and the daemon, which must end successfully.
    pub fn finish(self) -> anyhow::Result<()> {
        let Self { server, first, second, .. } = self;
        first.vm.close();
        second.vm.close();
        match server {
            Server::Daemon(served) => {
                let Served { nics, daemon, folder } = *served;
                drop(nics);
                daemon.finish()?;
                folder.close().context("A daemon's folder could not be removed")
            }
            Server::Alone(_) => Ok(()),
        }
    }
}

/// Objects of one side's driver.
struct Objects {
    context: UserContext,
    pd: u32,
    cq: CompletionQueue,
    buffer: Buffer,
}

/// Drives both devices: creates objects, connections, and the structures in the first VM's memory for its program.
fn make(
    registers: [&dyn Registers; 2],
    sides: [&Side; 2],
    free: [Range<u64>; 2],
    doorbells: [u64; 2],
    plan: Plan,
) -> anyhow::Result<Made> {
    let [free_a, free_b] = free;
    let mut a = Driver::new(registers[0], sides[0].memory.clone(), free_a, doorbells[0]);
    let mut b = Driver::new(registers[1], sides[1].memory.clone(), free_b, doorbells[1]);
    let (on_a, on_b) = (objects(&mut a, GIDS[0], plan)?, objects(&mut b, GIDS[1], plan)?);
    let mut pairs = Vec::new();
    for index in 0..plan.queue_pairs + plan.idle {
        let slots = if index == 0 { FIRST_SLOTS } else { SEND_SLOTS };
        let left = a.queue_pair(on_a.pd, on_a.cq.handle, slots)?;
        let right = b.queue_pair(on_b.pd, on_b.cq.handle, SEND_SLOTS)?;
        a.connect(&left, right.number, GIDS[1])?;
        b.connect(&right, left.number, GIDS[0])?;
        pairs.push(left);
    }
    // Spreads idle queue pairs among the others.
    let stride = usize::try_from((plan.queue_pairs + plan.idle) / plan.queue_pairs.max(1)).unwrap_or(1);
    let used = pairs.iter().step_by(stride.max(1)).take(usize::try_from(plan.queue_pairs)?);
    let templates = a.page()?;
    let mut bytes = Vec::new();
    for qp in used {
        bytes.extend_from_slice(&send_queue_bytes(&send_queue(qp, templates)?));
    }
    let queue_count = (bytes.len() / size_of::<verbs::SendQueue>()) as u64;
    let pages = u32::try_from((bytes.len() as u64).div_ceil(PAGE))?;
    let queues = a.contiguous(pages)?.first().copied().context("No queue pairs were asked for")?;
    sides[0].memory.write(queues, &bytes)?;
    let completions = a.page()?;
    let ring = verbs::CompletionQueue {
        entries_at: *on_a.cq.pages.get(1).context("A completion queue has no entries")?,
        indices: *on_a.cq.pages.first().context("A completion queue has no pages")? + 8,
        entries: on_a.cq.entries,
        handle: on_a.cq.handle,
        doorbells: on_a.context.doorbells,
    };
    sides[0].memory.write(completions, &completion_queue_bytes(&ring))?;
    Ok(Made { queues, queue_count, completions, templates, source: on_a.buffer, target: on_b.buffer })
}

fn objects(driver: &mut Driver<'_>, gid: [u8; 16], plan: Plan) -> anyhow::Result<Objects> {
    driver.probe(gid)?;
    let context = driver.context(DOORBELL_PAGE)?;
    let pd = driver.protection_domain(context)?;
    let cq = driver.completion_queue(context, COMPLETIONS)?;
    let buffer = driver.register(pd, plan.buffer)?;
    Ok(Objects { context, pd, cq, buffer })
}

fn send_queue(qp: &QueuePair, template: u64) -> anyhow::Result<verbs::SendQueue> {
    Ok(verbs::SendQueue {
        slots: *qp.pages.get(1).context("A queue pair has no send queue")?,
        indices: *qp.pages.first().context("A queue pair has no pages")?,
        entries: qp.send_slots,
        slot_size: u32::try_from(send_slot(1))?,
        template,
        template_len: u32::try_from(size_of::<SendHeader>() + size_of::<Sge>())?,
        handle: qp.handle,
        tail: 0,
        reserved: [0; 5],
    })
}

fn send_queue_bytes(queue: &verbs::SendQueue) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(size_of::<verbs::SendQueue>());
    bytes.extend_from_slice(&queue.slots.to_le_bytes());
    bytes.extend_from_slice(&queue.indices.to_le_bytes());
    bytes.extend_from_slice(&queue.entries.to_le_bytes());
    bytes.extend_from_slice(&queue.slot_size.to_le_bytes());
    bytes.extend_from_slice(&queue.template.to_le_bytes());
    bytes.extend_from_slice(&queue.template_len.to_le_bytes());
    bytes.extend_from_slice(&queue.handle.to_le_bytes());
    bytes.extend_from_slice(&queue.tail.to_le_bytes());
    bytes.resize(size_of::<verbs::SendQueue>(), 0);
    bytes
}

fn completion_queue_bytes(queue: &verbs::CompletionQueue) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(size_of::<verbs::CompletionQueue>());
    bytes.extend_from_slice(&queue.entries_at.to_le_bytes());
    bytes.extend_from_slice(&queue.indices.to_le_bytes());
    bytes.extend_from_slice(&queue.entries.to_le_bytes());
    bytes.extend_from_slice(&queue.handle.to_le_bytes());
    bytes.extend_from_slice(&queue.doorbells.to_le_bytes());
    bytes
}
