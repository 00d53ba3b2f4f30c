//! The system calls of a request, their order, and the effects of their failures; driven by the test, without an engine.

use std::sync::Arc;

use machine::memory::{GuestAddress, GuestAddressSpace, GuestMemory};

use super::*;
use crate::block::disk::Disk;
use crate::block::image::Image;
use crate::block::request::{Limits, Operation, Range, Request, Status};
use crate::block::task::{Op, Start, Task};
use crate::queue::Segment;

fn fixture(write_through: bool) -> (Disk, Arc<GuestMemory>) {
    let config = BlockConfig::new("disk0", "(memory)");
    let disk = Disk::new("disk0", [0; 20], Image::from_file(image(MIB), &config).unwrap());
    disk.set_write_through(write_through);
    (disk, memory(&[(0, 4 << 20)]).memory().into_inner())
}

fn start(operation: Operation, disk: &Disk, memory: &Arc<GuestMemory>) -> Box<Task> {
    let request = Request { head: 0, status: GuestAddress(STATUS), operation, writable: 0 };
    match Task::start(request, memory, disk).unwrap() {
        Start::Running(task) => task,
        Start::Done(_, status) => panic!("done at once: {status:?}"),
    }
}

fn data(len: u32) -> Vec<Segment> {
    vec![Segment { address: GuestAddress(DATA), len }]
}

fn range(start: u64, len: u64) -> Range {
    Range { start, len, unmap: false }
}

#[test]
fn a_flush_is_one_fdatasync_and_fails_with_it() {
    let (disk, memory) = fixture(false);
    let mut task = start(Operation::Flush, &disk, &memory);
    assert!(matches!(task.op(&disk), Some(Op::DataSync { .. })));
    assert_eq!(task.advance(&disk, Ok(0)), Some(Status::Ok));
    let mut task = start(Operation::Flush, &disk, &memory);
    assert_eq!(task.advance(&disk, Err(libc::EIO)), Some(Status::IoError), "a lost write is told");
}

#[test]
fn a_short_write_goes_on_where_it_ended() {
    let (disk, memory) = fixture(false);
    let mut task = start(Operation::Write { offset: 512, data: data(4096) }, &disk, &memory);
    let mut at = 512;
    for moved in [100usize, 1, 3000] {
        let Some(Op::Writev { offset, durable: false, .. }) = task.op(&disk) else { panic!() };
        assert_eq!(offset, at);
        assert_eq!(task.advance(&disk, Ok(moved)), None);
        at += moved as u64;
    }
    assert_eq!(task.advance(&disk, Err(libc::EINTR)), None, "interrupted: again");
    assert_eq!(task.advance(&disk, Ok(995)), Some(Status::Ok));
}

#[test]
fn no_progress_and_a_full_disk_are_errors() {
    let (disk, memory) = fixture(false);
    for result in [Ok(0), Err(libc::ENOSPC), Err(libc::EIO), Err(libc::EFBIG)] {
        let mut task = start(Operation::Write { offset: 0, data: data(4096) }, &disk, &memory);
        assert_eq!(task.advance(&disk, result), Some(Status::IoError), "{result:?}");
        task.finish(Status::IoError, &memory, &disk).unwrap();
    }
    assert_eq!(disk.counters.errors.get(), 4);
    let mut task = start(Operation::Write { offset: 0, data: data(4096) }, &disk, &memory);
    let end = (0..2000).find_map(|_| task.advance(&disk, Err(libc::EINTR)));
    assert_eq!(end, Some(Status::IoError), "not interrupted for ever");
}

#[test]
fn with_write_through_everything_is_durable_before_it_completes() {
    let (disk, memory) = fixture(true);
    let task = start(Operation::Write { offset: 0, data: data(512) }, &disk, &memory);
    assert!(matches!(task.op(&disk), Some(Op::Writev { durable: true, .. })));
    let mut task = start(Operation::Discard(vec![range(0, 512), range(1024, 512)]), &disk, &memory);
    for start in [0, 1024] {
        let Some(Op::Fallocate { offset, len: 512, .. }) = task.op(&disk) else { panic!() };
        assert_eq!(offset, start);
        assert_eq!(task.advance(&disk, Ok(0)), None);
    }
    assert!(matches!(task.op(&disk), Some(Op::DataSync { .. })));
    assert_eq!(task.advance(&disk, Ok(0)), Some(Status::Ok));
}

/// Zeroing falls back from unmapping to zeroing a range to writing. A discard that isn't possible succeeds.
#[test]
fn what_the_file_system_cannot_do_is_done_otherwise() {
    let (disk, memory) = fixture(false);
    let unmap = Range { unmap: true, ..range(0, 700 << 10) };
    let mut task = start(Operation::WriteZeroes(vec![unmap]), &disk, &memory);
    let Some(Op::Fallocate { mode, .. }) = task.op(&disk) else { panic!() };
    assert_ne!(mode & libc::FALLOC_FL_PUNCH_HOLE, 0);
    assert_eq!(task.advance(&disk, Err(libc::EOPNOTSUPP)), None);
    let Some(Op::Fallocate { mode, .. }) = task.op(&disk) else { panic!() };
    assert_ne!(mode & libc::FALLOC_FL_ZERO_RANGE, 0);
    assert_eq!(task.advance(&disk, Err(libc::EOPNOTSUPP)), None);
    let mut written = 0;
    loop {
        let Some(Op::WriteStatic { data, offset, .. }) = task.op(&disk) else { panic!() };
        assert_eq!(offset, written);
        assert!(data.iter().all(|byte| *byte == 0));
        written += data.len() as u64;
        if let Some(status) = task.advance(&disk, Ok(data.len())) {
            assert_eq!(status, Status::Ok);
            break;
        }
    }
    assert_eq!(written, 700 << 10);
    // Later requests write at once.
    let task = start(Operation::WriteZeroes(vec![range(0, 512)]), &disk, &memory);
    assert!(matches!(task.op(&disk), Some(Op::WriteStatic { .. })));

    let mut task = start(Operation::Discard(vec![range(0, 512)]), &disk, &memory);
    assert_eq!(task.advance(&disk, Err(libc::EOPNOTSUPP)), Some(Status::Ok));
}

#[test]
fn without_unmap_space_is_not_given_back() {
    let (disk, memory) = fixture(false);
    let task = start(Operation::WriteZeroes(vec![range(0, 512)]), &disk, &memory);
    let Some(Op::Fallocate { mode, .. }) = task.op(&disk) else { panic!() };
    assert_eq!(mode & libc::FALLOC_FL_PUNCH_HOLE, 0);
}

/// A device that discards but can't zero still offers discard, in whole units, and zeroes by writing.
#[test]
fn a_device_that_only_discards_is_given_space_back() {
    let config = BlockConfig::new("disk0", "(memory)");
    let mut image = Image::from_file(image(MIB), &config).unwrap();
    (image.can_punch, image.device_discard) = (false, Some(4096));
    let disk = Disk::new("disk0", [0; 20], image);
    let memory = memory(&[(0, 4 << 20)]).memory().into_inner();
    assert!(disk.limits.discard);
    let ranges = vec![range(512, 8192), range(0, 4096), range(512, 512)];
    let mut task = start(Operation::Discard(ranges), &disk, &memory);
    for (expected, end) in [((4096, 4096), None), ((0, 4096), Some(Status::Ok))] {
        let Some(Op::Discard { offset, len, .. }) = task.op(&disk) else { panic!() };
        assert_eq!((offset, len), expected);
        assert_eq!(task.advance(&disk, Ok(0)), end);
    }
    let mut task = start(Operation::Discard(vec![range(0, 4096)]), &disk, &memory);
    assert_eq!(task.advance(&disk, Err(libc::EOPNOTSUPP)), Some(Status::Ok), "a discard is a hint");
    let unmap = Range { unmap: true, ..range(0, 4096) };
    let task = start(Operation::WriteZeroes(vec![unmap]), &disk, &memory);
    let Some(Op::Fallocate { mode, .. }) = task.op(&disk) else { panic!() };
    assert_ne!(mode & libc::FALLOC_FL_ZERO_RANGE, 0, "what is discarded may read as anything");
}

/// A device refuses ranges that aren't whole units of its own. Zeroes are written there, and other ranges still use the device's operation.
#[test]
fn a_range_that_a_device_refuses_is_zeroed_by_writing() {
    let (disk, memory) = fixture(false);
    let mut task = start(Operation::WriteZeroes(vec![range(512, 512)]), &disk, &memory);
    assert!(matches!(task.op(&disk), Some(Op::Fallocate { .. })));
    assert_eq!(task.advance(&disk, Err(libc::EINVAL)), None);
    assert!(matches!(task.op(&disk), Some(Op::WriteStatic { .. })));
    assert_eq!(task.advance(&disk, Ok(512)), Some(Status::Ok));
    let task = start(Operation::WriteZeroes(vec![range(0, 4096)]), &disk, &memory);
    assert!(matches!(task.op(&disk), Some(Op::Fallocate { .. })));
}

#[test]
fn limits_follow_the_image() {
    let (disk, _) = fixture(false);
    let limits = Limits { capacity: 2048, read_only: false, discard: true, write_zeroes: true };
    assert_eq!(disk.limits, limits);
}
