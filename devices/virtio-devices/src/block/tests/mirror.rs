//! Copying a disk while its guest writes: both sides are equal after the last round, whatever the order of events.

use std::collections::VecDeque;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use proptest::prelude::*;

use super::super::chunks::Written;
use super::super::{BlockError, Buffer, CHUNK, Chunks, DiskContent};
use super::*;
use crate::device::VirtioDevice;
use crate::fixtures::activation;

/// The next event. A write has three: it begins, its data is in the image, it is noted.
#[derive(Debug, Clone)]
enum Moment {
    Begin { start: u64, len: u64 },
    Land,
    Note,
    Take,
    Copy,
}

const BYTES: u64 = 8 * CHUNK + 512;

fn moment() -> impl Strategy<Value = Moment> {
    let write = (0..BYTES, 1..3 * CHUNK)
        .prop_map(|(start, len)| Moment::Begin { start, len: len.min(BYTES - start) });
    prop_oneof![4 => write, 4 => Just(Moment::Land), 4 => Just(Moment::Note), 1 => Just(Moment::Take), 6 => Just(Moment::Copy)]
}

/// A disk with a stamp per sector, its copy, and writes in flight.
struct Model {
    written: Written,
    here: Vec<u32>,
    there: Vec<u32>,
    left: VecDeque<u64>,
    landing: VecDeque<(u64, u64, u32)>,
    noting: VecDeque<(u64, u64)>,
    stamp: u32,
}

impl Model {
    fn new() -> Self {
        let written = Written::default();
        let here: Vec<u32> = (0..(BYTES / 512) as u32).collect();
        let there = vec![u32::MAX; here.len()];
        written.begin(BYTES);
        let left = Chunks::all(BYTES).iter().collect();
        Self { written, here, there, left, landing: VecDeque::new(), noting: VecDeque::new(), stamp: 1 << 20 }
    }

    fn sectors(start: u64, len: u64) -> std::ops::RangeInclusive<usize> {
        (start / 512) as usize..=((start + len - 1) / 512) as usize
    }

    fn land(&mut self) {
        if let Some((start, len, stamp)) = self.landing.pop_front() {
            self.here[Self::sectors(start, len)].fill(stamp);
            self.noting.push_back((start, len));
        }
    }

    fn note(&mut self) {
        if let Some((start, len)) = self.noting.pop_front() {
            self.written.note(start, len);
        }
    }

    fn take(&mut self) {
        let taken = self.written.take().unwrap();
        let new: Vec<u64> = taken.iter().filter(|chunk| !self.left.contains(chunk)).collect();
        self.left.extend(new);
    }

    fn copy(&mut self) {
        if let Some(chunk) = self.left.pop_front() {
            let sectors = Self::sectors(chunk * CHUNK, CHUNK.min(BYTES - chunk * CHUNK));
            self.there[sectors.clone()].copy_from_slice(&self.here[sectors]);
        }
    }

    fn step(&mut self, moment: &Moment) {
        match *moment {
            Moment::Begin { start, len } => {
                self.stamp += 1;
                self.landing.push_back((start, len, self.stamp));
            }
            Moment::Land => self.land(),
            Moment::Note => self.note(),
            Moment::Take => self.take(),
            Moment::Copy => self.copy(),
        }
    }

    /// Suspends the guest: waits for everything in flight, then runs the last round.
    fn end(&mut self) {
        while !self.landing.is_empty() {
            self.land();
        }
        while !self.noting.is_empty() {
            self.note();
        }
        self.take();
        while !self.left.is_empty() {
            self.copy();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    /// Whatever the order of writes, takes and copies, both sides are equal after the last round.
    #[test]
    fn a_copy_is_equal_after_the_last_round(moments in prop::collection::vec(moment(), 0..200)) {
        let mut model = Model::new();
        moments.iter().for_each(|moment| model.step(moment));
        model.end();
        prop_assert!(model.here == model.there);
    }

    /// A set has exactly the inserted chunks, and covers as many bytes as the disk has there.
    #[test]
    fn a_set_is_the_chunks_that_were_touched(ranges in prop::collection::vec((0..BYTES + CHUNK, 0..2 * CHUNK), 0..8)) {
        let (mut set, mut model) = (Chunks::none(BYTES), vec![false; BYTES.div_ceil(CHUNK) as usize]);
        for (start, len) in &ranges {
            set.insert(*start, *len);
            for byte in (*start..(start + len).min(BYTES)).step_by(512).chain((*len > 0 && *start < BYTES).then(|| (start + len).min(BYTES) - 1)) {
                model[(byte / CHUNK) as usize] = true;
            }
        }
        let expected: Vec<u64> = (0..).zip(&model).filter(|(_, there)| **there).map(|(chunk, _)| chunk).collect();
        prop_assert_eq!(set.iter().collect::<Vec<_>>(), expected.clone());
        let covered: u64 = expected.iter().map(|chunk| CHUNK.min(BYTES - chunk * CHUNK)).sum();
        prop_assert_eq!(set.covered(), covered);
    }
}

/// The property can fail: if a write is noted before its data is in the image, a take and a copy in between lose it.
#[test]
fn a_write_that_is_noted_too_early_would_be_lost() {
    let mut model = Model::new();
    model.written.note(0, 512);
    model.take();
    while !model.left.is_empty() {
        model.copy();
    }
    model.here[0] = 77;
    model.take();
    assert!(model.left.is_empty());
    assert_ne!(model.here, model.there);
}

/// Requests whose completion can't be awaited cause an error, not an equal copy.
#[test]
fn lost_requests_are_said() {
    let written = Written::default();
    written.begin(BYTES);
    written.note(CHUNK, 1);
    assert_eq!(written.take().unwrap().iter().collect::<Vec<_>>(), [1]);
    written.end();
    written.note(CHUNK, 1);
    assert_eq!(written.take().unwrap().iter().count(), 0);
    written.lose();
    assert!(written.take().is_err());
}

fn copy_round(disk: &DiskContent, to: &File, chunks: &Chunks) {
    let mut buffer = Buffer::new(CHUNK as usize);
    for chunk in chunks.iter() {
        let len = CHUNK.min(disk.bytes() - chunk * CHUNK);
        let bytes = buffer.first(len as usize);
        disk.read(chunk * CHUNK, bytes).unwrap();
        to.write_all_at(bytes, chunk * CHUNK).unwrap();
    }
}

/// A driver writes, zeroes and discards on a disk with threads of its own while its content is copied, round by round. The disk stops at
/// any moment, and the copy equals the image. With either engine, and with `O_DIRECT`.
#[test]
fn a_disk_is_copied_while_its_driver_writes() {
    let bytes = 6 * super::MIB + 4096;
    for (engine, direct) in
        [(EngineChoice::Auto, false), (EngineChoice::Synchronous, false), (EngineChoice::Auto, true)]
    {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.raw");
        std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
        let config = BlockConfig { engine, direct, ..BlockConfig::new("disk0", &path) };
        let mut block = match Block::open(config) {
            Err(error @ BlockError::Direct { .. }) => {
                facilities::missing(facilities::Facility::DirectIo, error);
                continue;
            }
            other => other.unwrap(),
        };
        let space = memory(&[(0, 4 << 20)]);
        let mut driver = MockDriver::new(&space, 0, 64, 0x8_0000, RINGS);
        let interrupt = MockInterrupt::new();
        let features = RINGS | block.features();
        block.activate(activation(&space, features, &[&driver], &interrupt)).unwrap();
        let (content, copy, over) = (block.content(), image(bytes), AtomicBool::new(false));
        let requests = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let (mut number, mut seed) = (0u64, 12345u64);
                // Several in flight: none waits for another.
                while !over.load(Ordering::Relaxed) {
                    seed =
                        seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let slot = number % 8;
                    number += 1;
                    requests.store(number, Ordering::Relaxed);
                    let (header, data) = (HEADER + slot * 32, DATA + slot * 0x2_0000);
                    let sectors = 8 * (1 + (seed >> 40) % 12);
                    let sector = 8 * ((seed >> 20) % (bytes / 4096 - 12));
                    let kind = [OUT, OUT, OUT, WRITE_ZEROES, DISCARD][(seed >> 55) as usize % 5];
                    let mut first = [0u8; 16];
                    first[..4].copy_from_slice(&kind.to_le_bytes());
                    let mut buffers = vec![(header, 16, false)];
                    if kind == OUT {
                        first[8..].copy_from_slice(&sector.to_le_bytes());
                        driver.put(data, &vec![number as u8 | 1; (sectors * 512) as usize]);
                        buffers.push((data, (sectors * 512) as u32, false));
                    } else {
                        let mut entry = sector.to_le_bytes().to_vec();
                        entry.extend((sectors as u32).to_le_bytes());
                        entry.extend(0u32.to_le_bytes());
                        driver.put(data, &entry);
                        buffers.push((data, 16, false));
                    }
                    driver.put(header, &first);
                    buffers.push((STATUS + slot, 1, true));
                    driver.push(&buffers).unwrap();
                    driver.kick();
                    if slot == 7 {
                        for _ in 0..8 {
                            driver.wait_used();
                        }
                    }
                }
            });
            content.begin_noting();
            let mut left = content.present().unwrap();
            // Holes are zero on the other side, too.
            let mut rounds = 0;
            // Even on a slow host the driver completes some requests meanwhile.
            while rounds < 12 || (requests.load(Ordering::Relaxed) <= 20 && !writer.is_finished()) {
                rounds += 1;
                copy_round(&content, &copy, &left);
                left = content.take_written().unwrap();
                std::thread::sleep(std::time::Duration::from_millis(3));
            }
            over.store(true, Ordering::Relaxed);
            writer.join().unwrap();
            block.stop().unwrap();
            left.add(&content.take_written().unwrap());
            copy_round(&content, &copy, &left);
        });
        let (mut a, mut b) = (vec![0; bytes as usize], vec![1; bytes as usize]);
        content.read(0, &mut a).unwrap();
        copy.read_exact_at(&mut b, 0).unwrap();
        assert!(a == b && a.iter().any(|byte| *byte != 0), "{engine:?}, direct {direct}");
        assert_eq!(interrupt.failure(), None);
    }
}

/// An image that is being filled is locked, and no disk until it is complete: an incomplete one is refused by name. Zeroes are holes.
#[test]
fn an_image_is_no_disk_until_it_is_filled() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.raw");
    let file = std::fs::File::create(&path).unwrap();
    file.write_all_at(&vec![7; 1 << 20], 0).unwrap();
    let marks =
        rustix::fs::fsetxattr(&file, "user.causeway.try", b"1", rustix::fs::XattrFlags::empty()).is_ok();
    drop(file);
    let arriving = || Block::open(BlockConfig { claim: false, ..BlockConfig::new("disk0", &path) }).unwrap();

    let mut block = arriving();
    let content = block.content();
    assert!(content.lock().unwrap());
    content.begin_filling().unwrap();
    assert!(matches!(
        Block::open(BlockConfig::new("other", &path)),
        Err(BlockError::Locked { .. } | BlockError::Incomplete { .. })
    ));
    let error = arriving().content().lock().unwrap_err();
    assert!(matches!(error, BlockError::Locked { .. }), "{error}");
    assert!(block.take_over().is_err(), "half a disk");
    assert!(content.fill(1 << 20, &[1]).is_err() && content.fill_zeroes(u64::MAX, 2).is_err());
    content.fill(0, b"half").unwrap();
    drop((content, block));
    if marks {
        for read_only in [false, true] {
            let error =
                Block::open(BlockConfig { read_only, ..BlockConfig::new("disk0", &path) }).err().unwrap();
            assert!(matches!(error, BlockError::Incomplete { .. }), "{error}");
        }
        assert!(arriving().take_over().is_err(), "a monitor that waits for a VM whose disk isn't filled");
    } else {
        facilities::missing(facilities::Facility::Xattr, "an incomplete disk is not marked");
    }

    let mut block = arriving();
    let content = block.content();
    content.lock().unwrap();
    content.begin_filling().unwrap();
    content.fill_zeroes(0, 1 << 20).unwrap();
    content.fill(CHUNK + 5, b"whole").unwrap();
    content.sync().unwrap();
    content.filled();
    block.take_over().unwrap();
    content.in_use();
    assert_eq!(content.present().unwrap().iter().collect::<Vec<_>>(), [1]);
    assert!(std::fs::metadata(&path).unwrap().blocks() <= 2 * CHUNK / 512);
    drop((content, block));
    Block::open(BlockConfig::new("disk0", &path)).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    assert_eq!(&bytes[CHUNK as usize + 5..][..5], b"whole");
    assert_eq!(bytes.iter().filter(|byte| **byte != 0).count(), 5);
}
