//! Requests to a virtio disk, well-formed or not. The synchronous engine serves them from a small file in memory.
//!
//! Checked: no panic and no endless loop; the file keeps its size; a read-only disk is never written; a completed request has a valid
//! status.

#![no_main]

use std::cell::Cell;
use std::fs::File;
use std::os::unix::fs::FileExt;

use causeway_fuzz::ring::{Address, Buffer, DATA, Driver, Guest, Poke, RingShape};
use libfuzzer_sys::fuzz_target;
use machine::memory::{Bytes, GuestAddress};
use virtio_devices::block::{Block, BlockConfig, EngineChoice, ImageFormat};
use virtio_devices::device::VirtioInterrupt;
use virtio_devices::queue::Ring;

/// 64 sectors.
const DISK_BYTES: u64 = 64 * 512;
/// Limit of reads of the stop flag per execution: overlapping rings can feed themselves forever.
const STOP_FLAG_READS: u32 = 100;
const READ_ONLY_BYTE: u8 = 0x5A;

#[derive(Debug, arbitrary::Arbitrary)]
struct Input {
    shape: RingShape,
    read_only: bool,
    requests: Vec<Request>,
    pokes: Vec<Poke>,
}

#[derive(Debug, arbitrary::Arbitrary)]
struct Request {
    kind: Kind,
    sector: Sector,
    buffers: Vec<Buffer>,
    /// Ranges of a discard or write-zeroes request.
    ranges: Vec<(Sector, u8, u8)>,
    indirect: bool,
    status: Option<Address>,
    /// Address of the header, instead of its own.
    header: Option<Address>,
}

#[derive(Debug, arbitrary::Arbitrary)]
enum Kind {
    In,
    Out,
    Flush,
    GetId,
    Discard,
    WriteZeroes,
    Other(u32),
}

#[derive(Debug, arbitrary::Arbitrary)]
enum Sector {
    Near(u8),
    Far(u64),
}

impl Sector {
    fn value(&self) -> u64 {
        match self {
            // Up to slightly beyond the end.
            Self::Near(near) => u64::from(*near) % 72,
            Self::Far(far) => *far,
        }
    }
}

/// Raises no interrupts.
struct Silent;

impl VirtioInterrupt for Silent {
    fn queue(&self, _index: u16) {}

    fn config(&self) {}

    fn failed(&self, _reason: &str) {}
}

struct Disks {
    guest: Guest,
    writable: (Block, File),
    read_only: (Block, File),
}

thread_local! {
    static DISKS: Disks = Disks::new();
}

impl Disks {
    fn new() -> Self {
        Self { guest: Guest::new(), writable: disk(false), read_only: disk(true) }
    }
}

fn disk(read_only: bool) -> (Block, File) {
    let name = if read_only { "ro" } else { "rw" };
    let fd = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    let file = File::from(fd);
    file.set_len(DISK_BYTES).expect("a small file");
    if read_only {
        file.write_all_at(&[READ_ONLY_BYTE; DISK_BYTES as usize], 0).expect("a small file");
    }
    let config = BlockConfig {
        read_only,
        format: ImageFormat::Raw,
        engine: EngineChoice::Synchronous,
        ..BlockConfig::new(name, "/fuzz")
    };
    let block = Block::from_file(file.try_clone().expect("a descriptor"), config).expect("a raw disk");
    (block, file)
}

fuzz_target!(|input: Input| DISKS.with(|disks| run(disks, &input)));

fn run(disks: &Disks, input: &Input) {
    let Disks { guest, writable, read_only } = disks;
    guest.clear();
    let (block, file) = if input.read_only { read_only } else { writable };
    let mut driver = Driver::new(guest, &input.shape, 0);
    let mut statuses = Vec::new();
    for (at, request) in (0_u64..).zip(input.requests.iter().take(8)) {
        // Header, ranges, indirect table and status of each request have 256 bytes of their own.
        let own = DATA + 0x100 * at;
        let header = request.header.map_or(own, |address| address.0);
        let status = request.status.map_or(own + 0xFF, |address| address.0);
        let mut bytes = [0; 16];
        let kind = match request.kind {
            Kind::In => 0,
            Kind::Out => 1,
            Kind::Flush => 4,
            Kind::GetId => 8,
            Kind::Discard => 11,
            Kind::WriteZeroes => 13,
            Kind::Other(other) => other,
        };
        bytes[..4].copy_from_slice(&kind.to_le_bytes());
        bytes[8..].copy_from_slice(&request.sector.value().to_le_bytes());
        guest.put(header, &bytes);
        let mut chain = vec![(header, 16, false)];
        let ranges: Vec<u8> = request
            .ranges
            .iter()
            .take(6)
            .flat_map(|(sector, sectors, flags)| {
                let mut range = sector.value().to_le_bytes().to_vec();
                range.extend(u32::from(*sectors).to_le_bytes());
                range.extend(u32::from(*flags & 3).to_le_bytes());
                range
            })
            .collect();
        if !ranges.is_empty() {
            guest.put(own + 0x10, &ranges);
            chain.push((own + 0x10, ranges.len() as u32, false));
        }
        let buffers = request.buffers.iter().take(5).map(|buffer| {
            // Mostly whole sectors.
            let len = if buffer.len.0 & 1 == 0 { buffer.len.0 & !0x1FF } else { buffer.len.0 };
            let writable = match request.kind {
                Kind::In | Kind::GetId => true,
                Kind::Out | Kind::Discard | Kind::WriteZeroes => false,
                Kind::Flush | Kind::Other(_) => buffer.writable,
            };
            (buffer.address.0, len.max(1), writable)
        });
        chain.extend(buffers);
        chain.push((status, 1, true));
        let table = request.indirect.then_some(own + 0x70);
        if driver.push(&chain, table) && request.status.is_none() {
            statuses.push(status);
        }
    }
    for status in &statuses {
        guest.put(*status, &[0xEE]);
    }
    for poke in &input.pokes {
        guest.put(poke.address.0, &poke.bytes);
    }
    let ring = Ring::new(driver.finish(0), input.shape.features());
    let mut queue = block.queue(ring, guest.space.clone());
    let looks = Cell::new(0);
    let stopping = || {
        looks.set(looks.get() + 1);
        looks.get() > STOP_FLAG_READS
    };
    let served = queue.serve(&Silent, &stopping);
    drop(queue.finish(&Silent));

    let size = file.metadata().expect("an open file").len();
    assert_eq!(size, DISK_BYTES, "the disk changed its size");
    if input.read_only {
        let mut content = [0; DISK_BYTES as usize];
        file.read_exact_at(&mut content, 0).expect("a small file");
        assert!(content == [READ_ONLY_BYTE; DISK_BYTES as usize], "a read-only disk was written");
    }
    let tame = input.pokes.is_empty()
        && input.shape.descriptors.is_empty()
        && [input.shape.table, input.shape.available, input.shape.used].iter().all(Option::is_none)
        && input.requests.iter().all(|request| {
            request.header.is_none() && request.status.is_none() && request.buffers.is_empty()
        });
    if served.is_ok() && tame && input.shape.heads.is_empty() && input.shape.jump < 0x8000 {
        for status in statuses {
            let mut byte = [0];
            guest.memory().read_slice(&mut byte, GuestAddress(status)).expect("RAM");
            assert!(byte[0] <= 2, "status {} at {status:#x}", byte[0]);
        }
    }
}
