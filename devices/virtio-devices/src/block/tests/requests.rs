//! Single requests, valid and invalid, and their system calls.

use proptest::prelude::*;
use virtio_devices_testbed::RawDescriptor;

use super::*;
use crate::block::request::{Limits, Operation, Request};
use crate::queue::Ring;

#[test]
fn what_was_written_is_read() {
    let block = disk(MIB, |_| {});
    let mut bench = Bench::new(&block);
    let data: Vec<u8> = (0..4096u32).map(|i| (i % 251) as u8).collect();
    assert_eq!(bench.write(8, &data), OK);
    assert_eq!(bench.request(FLUSH, 0, &[]), OK);
    assert_eq!(bench.read(8, 4096), (OK, data));
    let counters = block.counters();
    assert_eq!((counters.writes_completed.get(), counters.written_bytes.get()), (1, 4096));
    assert_eq!((counters.reads_completed.get(), counters.read_bytes.get()), (1, 4096));
    assert_eq!((counters.flushes.get(), counters.errors.get(), counters.in_flight()), (1, 0, 0));
}

#[test]
fn header_data_and_status_may_be_cut_anywhere() {
    let block = disk(MIB, |_| {});
    let mut bench = Bench::new(&block);
    bench.write(0, &[0x77; 1024]);
    bench.header(IN, 0);
    // The header in three pieces, the data in odd pieces, the last together with the status byte.
    let buffers = [
        (HEADER, 1, false),
        (HEADER + 1, 10, false),
        (HEADER + 11, 5, false),
        (DATA, 1, true),
        (DATA + 100, 700, true),
        (DATA + 1000, 324, true),
    ];
    bench.driver.push(&buffers).unwrap();
    bench.serve().unwrap();
    assert_eq!(bench.driver.pop_used().unwrap().1, 1025);
    assert_eq!(bench.driver.get(DATA + 1000, 324), [vec![0x77; 323], vec![OK]].concat());
}

#[test]
fn requests_beyond_the_end_fail_and_change_nothing() {
    let block = disk(MIB, |_| {});
    let mut bench = Bench::new(&block);
    for sector in [2048, 2047, u64::MAX, u64::MAX - 1, 1 << 55] {
        assert_eq!(bench.write(sector, &[1; 1024]), IOERR, "sector {sector}");
        assert_eq!(bench.read(sector, 1024), (IOERR, vec![0x55; 1024]));
    }
    assert_eq!(bench.read(0, 512), (OK, vec![0; 512]));
    assert_eq!(bench.read(2047, 512), (OK, vec![0; 512]));
    assert_eq!(block.counters().errors.get(), 10);
}

#[test]
fn parts_of_sectors_are_refused() {
    let block = disk(MIB, |_| {});
    let mut bench = Bench::new(&block);
    assert_eq!(bench.write(0, &[1; 511]), IOERR);
    assert_eq!(bench.read(0, 513).0, IOERR);
}

#[test]
fn unknown_types_are_unsupported() {
    let block = disk(MIB, |_| {});
    let mut bench = Bench::new(&block);
    for kind in [2, 3, 5, 9, 14, 16, 0x8000_0000, u32::MAX] {
        assert_eq!(bench.request(kind, 0, &[]), UNSUPP, "type {kind}");
    }
}

#[test]
fn a_read_only_disk_refuses_every_kind_of_write() {
    let block = disk(MIB, |config| config.read_only = true);
    let mut bench = Bench::new(&block);
    assert_eq!(bench.write(0, &[1; 512]), IOERR);
    assert_eq!(bench.ranges(DISCARD, &[(0, 8, 0)]), IOERR);
    assert_eq!(bench.ranges(WRITE_ZEROES, &[(0, 8, 0)]), IOERR);
    assert_eq!(bench.request(FLUSH, 0, &[]), OK);
    assert_eq!(bench.read(0, 512), (OK, vec![0; 512]));
}

#[test]
fn the_serial_number_is_twenty_bytes() {
    let block = disk(MIB, |config| config.serial = Some("QM00001".to_owned()));
    let mut bench = Bench::new(&block);
    bench.driver.put(DATA, &[0xFF; 32]);
    assert_eq!(bench.request(GET_ID, 0, &[(DATA, 20, true)]), OK);
    assert_eq!(bench.driver.get(DATA, 21), [&b"QM00001"[..], &[0; 13], &[0xFF]].concat());
    assert_eq!(bench.request(GET_ID, 0, &[]), IOERR);
}

#[test]
fn zeroes_are_written_and_discards_give_space_back() {
    use std::os::unix::fs::MetadataExt;
    let file = image(MIB);
    let mut config = BlockConfig::new("disk0", "(memory)");
    config.engine = EngineChoice::Synchronous;
    let block = Block::from_file(file.try_clone().unwrap(), config).unwrap();
    let mut bench = Bench::new(&block);
    bench.write(0, &vec![0xEE; 256 << 10]);
    let full = file.metadata().unwrap().blocks();
    assert_eq!(bench.ranges(WRITE_ZEROES, &[(8, 8, 0), (24, 1, 1)]), OK);
    assert_eq!(bench.read(8, 4096), (OK, vec![0; 4096]));
    assert_eq!(bench.read(24, 1024), (OK, [[0; 512], [0xEE; 512]].concat()));
    assert_eq!(bench.ranges(DISCARD, &[(128, 128, 0)]), OK);
    assert!(file.metadata().unwrap().blocks() < full, "space came back");
    assert_eq!(bench.read(128, 512), (OK, vec![0; 512]));
    assert_eq!(bench.read(0, 512), (OK, vec![0xEE; 512]));
    assert_eq!((block.counters().write_zeroes.get(), block.counters().discards.get()), (1, 1));
}

#[test]
fn ranges_that_break_the_limits_are_refused() {
    let block = disk(MIB, |_| {});
    let mut bench = Bench::new(&block);
    bench.write(0, &[0xEE; 4096]);
    assert_eq!(bench.ranges(DISCARD, &[(0, 8, 1)]), UNSUPP, "unmap with a discard");
    assert_eq!(bench.ranges(WRITE_ZEROES, &[(0, 8, 2)]), UNSUPP, "unknown flag");
    assert_eq!(bench.ranges(DISCARD, &[(2040, 9, 0)]), IOERR, "beyond the end");
    assert_eq!(bench.ranges(DISCARD, &[(u64::MAX, 2, 0)]), IOERR);
    assert_eq!(bench.ranges(WRITE_ZEROES, &[(0, u32::MAX, 0)]), IOERR);
    assert_eq!(bench.ranges(WRITE_ZEROES, &[(0, 1, 0); 17]), IOERR, "too many");
    assert_eq!(bench.request(DISCARD, 0, &[]), IOERR, "none");
    assert_eq!(bench.ranges(DISCARD, &[(0, 0, 0)]), OK, "empty");
    // One valid range and one invalid: nothing changes.
    assert_eq!(bench.ranges(WRITE_ZEROES, &[(0, 8, 0), (4096, 1, 0)]), IOERR);
    assert_eq!(bench.read(0, 4096), (OK, vec![0xEE; 4096]));
}

#[test]
fn a_chain_without_room_for_header_or_status_stops_the_device() {
    let chains: [&[(u64, u32, bool)]; 4] = [
        &[(HEADER, 16, false)],
        &[(HEADER, 15, false), (STATUS, 1, true)],
        &[(STATUS, 1, true)],
        &[(HEADER, 16, false), (DATA, 512, false)],
    ];
    for chain in chains {
        let block = disk(MIB, |_| {});
        let mut bench = Bench::new(&block);
        bench.header(IN, 0);
        bench.driver.push(chain).unwrap();
        let reason = bench.serve().unwrap_err();
        assert!(reason.contains("ends after"), "{reason}");
    }
}

/// If the driver can't flush, a completed write is durable: `pwritev2` with `RWF_DSYNC`.
#[test]
fn a_driver_that_cannot_flush_gets_write_through() {
    use crate::device::VirtioDevice;
    use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_FLUSH};
    let flush = 1 << VIRTIO_BLK_F_FLUSH;
    let wce = 1 << VIRTIO_BLK_F_CONFIG_WCE;
    let mut block = disk(MIB, |_| {});
    let space = memory(&[(0, 4 << 20)]);
    let interrupt = MockInterrupt::new();
    let mut mode = |features: u64, writeback: Option<u8>| {
        block.activate(crate::fixtures::activation(&space, RINGS | features, &[], &interrupt)).unwrap();
        if let Some(value) = writeback {
            block.config_write(32, &[value]);
        }
        let cached = block.inspect()["write_cache"].as_bool().unwrap();
        let mut shown = [0];
        block.config_read(32, &mut shown);
        block.stop().unwrap();
        block.reset();
        (cached, shown[0])
    };
    assert!(!mode(0, None).0);
    assert!(mode(flush, None).0);
    assert_eq!(mode(flush | wce, None), (true, 1));
    assert_eq!(mode(flush | wce, Some(0)), (false, 0));
    assert_eq!(mode(flush | wce, Some(1)), (true, 1), "a reset turned the cache on again");
    assert_eq!(mode(flush, Some(0)), (true, 1), "not negotiated: ignored");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    /// Any header and any buffers: parsed into an operation within the disk, or refused, without a panic.
    #[test]
    fn any_request_stays_inside_the_disk(
        kind in prop_oneof![0u32..16, any::<u32>()],
        sector in prop_oneof![0u64..3000, any::<u64>()],
        readable in prop::collection::vec((0u64..(4 << 20), 0u32..5000), 0..6),
        writable in prop::collection::vec((0u64..(4 << 20), 0u32..5000), 0..6),
        content in prop::collection::vec(any::<u8>(), 256),
        capacity in 1u64..4096,
        read_only in any::<bool>(),
    ) {
        let space = memory(&[(0, 4 << 20)]);
        let mut driver = MockDriver::new(&space, 0, 16, 0x8_0000, RINGS);
        let mut header = content.clone();
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..16].copy_from_slice(&sector.to_le_bytes());
        let mut buffers: Vec<_> = readable.into_iter().map(|(a, l)| (a, l, false)).collect();
        if let Some((address, _, _)) = buffers.first() && *address < (4 << 20) - 256 {
            driver.put(*address, &header);
        }
        buffers.extend(writable.into_iter().map(|(a, l)| (a, l, true)));
        prop_assume!(driver.push(&buffers).is_some());
        let shared = machine::memory::GuestAddressSpace::memory(&space).into_inner();
        let mut ring = Ring::new(active_queue(&driver), RINGS);
        let limits = Limits { capacity, read_only, discard: true, write_zeroes: true };
        if let Ok(Some(chain)) = ring.pop(&shared) && let Ok(request) = Request::parse(&chain, &shared, &limits) {
            let end = capacity * 512;
            match request.operation {
                Operation::Read { offset, data } => prop_assert!(offset + crate::queue::total_len(&data) <= end),
                Operation::Write { offset, data } => {
                    prop_assert!(!read_only && offset + crate::queue::total_len(&data) <= end);
                }
                Operation::Discard(ranges) | Operation::WriteZeroes(ranges) => {
                    prop_assert!(!read_only && ranges.iter().all(|r| r.len > 0 && r.start + r.len <= end));
                }
                _ => {}
            }
        }
    }

    /// A whole disk over rings of random bytes: it serves them, or fails with a reason.
    #[test]
    fn random_rings_serve_or_fail_with_a_reason(
        table in prop::collection::vec((0u64..(5 << 20), 0u32..0x2000, 0u16..8, 0u16..17), 16),
        heads in prop::collection::vec(0u16..16, 1..16),
        content in prop::collection::vec(any::<u8>(), 512),
    ) {
        let block = disk(MIB, |_| {});
        let mut bench = Bench::new(&block);
        for at in (0..0x8000u64).step_by(512) {
            bench.driver.put(at, &content);
        }
        for (index, (address, len, flags, next)) in (0u16..).zip(table) {
            bench.driver.set_descriptor(index, RawDescriptor { address: address % (4 << 20), len, flags, next });
        }
        for head in heads {
            bench.driver.push_head(head);
        }
        if let Err(reason) = bench.serve() {
            prop_assert!(!reason.is_empty());
        }
        prop_assert!(crate::device::VirtioDevice::inspect(&block).is_object());
    }
}
