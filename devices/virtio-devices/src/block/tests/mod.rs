//! Disks under test: against a model, with hostile requests, with real rings and threads, over all kinds
//! of images.
#![allow(clippy::cast_possible_truncation)] // Small numbers of the tests' own.

mod direct;
mod images;
mod mirror;
mod model;
mod requests;
mod running;
mod steps;

use std::fs::File;

use rustix::fs::MemfdFlags;
use virtio_devices_testbed::{MockDriver, MockInterrupt, RINGS, memory};

use super::{Block, BlockConfig, EngineChoice};
use crate::fixtures::active_queue;

const MIB: u64 = 1 << 20;
/// Guest addresses of headers, data and status.
const HEADER: u64 = 0x1000;
const STATUS: u64 = 0x1800;
const DATA: u64 = 0x10_0000;

/// Request types.
const IN: u32 = 0;
const OUT: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

/// An image in memory of this many bytes. memfds can punch holes but not zero ranges, so zeroes are written.
fn image(size: u64) -> File {
    let file = File::from(rustix::fs::memfd_create("test image", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(size).unwrap();
    file
}

fn disk(size: u64, change: impl FnOnce(&mut BlockConfig)) -> Block {
    let mut config = BlockConfig::new("disk0", "(memory)");
    config.engine = EngineChoice::Synchronous;
    change(&mut config);
    Block::from_file(image(size), config).unwrap()
}

/// A driver that sends one request at a time to a disk without threads.
struct Bench {
    driver: MockDriver,
    queue: super::BlockQueue,
    interrupt: std::sync::Arc<MockInterrupt>,
}

impl Bench {
    fn new(block: &Block) -> Self {
        let space = memory(&[(0, 4 << 20)]);
        let driver = MockDriver::new(&space, 0, 64, 0x8_0000, RINGS);
        let ring = crate::queue::Ring::new(active_queue(&driver), RINGS);
        let queue = block.queue(ring, space);
        Self { driver, queue, interrupt: MockInterrupt::new() }
    }

    fn serve(&mut self) -> Result<(), String> {
        self.queue.serve(&*self.interrupt, &|| false)?;
        self.queue.finish(&*self.interrupt)
    }

    fn header(&self, kind: u32, sector: u64) {
        let mut header = [0u8; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.driver.put(HEADER, &header);
        self.driver.put(STATUS, &[0xAA]);
    }

    /// Executes a request with these data buffers; returns its status.
    fn request(&mut self, kind: u32, sector: u64, data: &[(u64, u32, bool)]) -> u8 {
        self.header(kind, sector);
        let mut buffers = vec![(HEADER, 16, false)];
        buffers.extend(data);
        buffers.push((STATUS, 1, true));
        let head = self.driver.push(&buffers).unwrap();
        self.serve().unwrap();
        assert_eq!(self.driver.pop_used().map(|(head, _)| head), Some(head));
        self.driver.get(STATUS, 1)[0]
    }

    fn write(&mut self, sector: u64, data: &[u8]) -> u8 {
        self.driver.put(DATA, data);
        self.request(OUT, sector, &[(DATA, data.len() as u32, false)])
    }

    fn read(&mut self, sector: u64, len: usize) -> (u8, Vec<u8>) {
        self.driver.put(DATA, &vec![0x55; len]);
        let status = self.request(IN, sector, &[(DATA, len as u32, true)]);
        (status, self.driver.get(DATA, len))
    }

    /// Discard or write-zeroes with these ranges: sector, sectors, flags.
    fn ranges(&mut self, kind: u32, ranges: &[(u64, u32, u32)]) -> u8 {
        let mut bytes = Vec::new();
        for (sector, sectors, flags) in ranges {
            bytes.extend(sector.to_le_bytes());
            bytes.extend(sectors.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
        }
        self.driver.put(DATA, &bytes);
        self.request(kind, 0, &[(DATA, bytes.len() as u32, false)])
    }
}
