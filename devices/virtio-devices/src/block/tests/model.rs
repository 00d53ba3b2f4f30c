//! Random requests on a disk and on a vector of bytes: both must give the same results, with either engine, with and without `O_DIRECT`,
//! whatever the buffers' boundaries.

use proptest::prelude::*;

use super::*;
use crate::device::VirtioDevice;
use crate::fixtures::activation;

#[derive(Debug, Clone)]
enum Step {
    Write { sector: u64, sectors: u64, seed: u8, cuts: Vec<u64> },
    Read { sector: u64, sectors: u64, cuts: Vec<u64> },
    Zero { sector: u64, sectors: u64, unmap: bool },
    Discard { sector: u64, sectors: u64 },
    Flush,
}

const SECTORS: u64 = 2048;

fn step() -> impl Strategy<Value = Step> {
    let place = || (0u64..SECTORS + 8, 1u64..64);
    let cuts = || prop::collection::vec(1u64..32768, 0..5);
    prop_oneof![
        4 => (place(), any::<u8>(), cuts()).prop_map(|((sector, sectors), seed, cuts)| Step::Write { sector, sectors, seed, cuts }),
        4 => (place(), cuts()).prop_map(|((sector, sectors), cuts)| Step::Read { sector, sectors, cuts }),
        1 => (place(), any::<bool>()).prop_map(|((sector, sectors), unmap)| Step::Zero { sector, sectors, unmap }),
        1 => place().prop_map(|(sector, sectors)| Step::Discard { sector, sectors }),
        1 => Just(Step::Flush),
    ]
}

/// `len` bytes at `DATA`, split into buffers.
fn buffers(len: u64, cuts: &[u64], writable: bool) -> Vec<(u64, u32, bool)> {
    let mut points: Vec<u64> = cuts.iter().map(|cut| cut % len).filter(|cut| *cut > 0).collect();
    points.extend([0, len]);
    points.sort_unstable();
    points.dedup();
    points.windows(2).map(|pair| (DATA + pair[0], (pair[1] - pair[0]) as u32, writable)).collect()
}

fn pattern(seed: u8, len: u64) -> Vec<u8> {
    (0..len).map(|at| seed.wrapping_add((at / 7) as u8)).collect()
}

/// Runs the steps on a disk with its threads, one request at a time.
fn run(steps: &[Step], mut block: Block) {
    let space = memory(&[(0, 4 << 20)]);
    let mut driver = MockDriver::new(&space, 0, 64, 0x8_0000, RINGS);
    let interrupt = MockInterrupt::new();
    let features = RINGS | block.features();
    block.activate(activation(&space, features, &[&driver], &interrupt)).unwrap();
    let mut model = vec![0u8; (SECTORS * 512) as usize];
    let request = |driver: &mut MockDriver, kind: u32, sector: u64, data: &[(u64, u32, bool)]| {
        let mut header = [0u8; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        driver.put(HEADER, &header);
        driver.put(STATUS, &[0xAA]);
        let mut chain = vec![(HEADER, 16, false)];
        chain.extend(data);
        chain.push((STATUS, 1, true));
        driver.push(&chain).unwrap();
        driver.kick();
        driver.wait_used();
        driver.get(STATUS, 1)[0]
    };
    for step in steps {
        let span = |sector: u64, sectors: u64| {
            (sector + sectors <= SECTORS)
                .then(|| (sector * 512) as usize..((sector + sectors) * 512) as usize)
        };
        match step {
            Step::Write { sector, sectors, seed, cuts } => {
                let data = pattern(*seed, sectors * 512);
                driver.put(DATA, &data);
                let status = request(&mut driver, OUT, *sector, &buffers(sectors * 512, cuts, false));
                match span(*sector, *sectors) {
                    Some(range) => {
                        assert_eq!(status, OK, "{step:?}");
                        model[range].copy_from_slice(&data);
                    }
                    None => assert_eq!(status, IOERR, "{step:?}"),
                }
            }
            Step::Read { sector, sectors, cuts } => {
                let status = request(&mut driver, IN, *sector, &buffers(sectors * 512, cuts, true));
                match span(*sector, *sectors) {
                    Some(range) => {
                        assert_eq!(status, OK, "{step:?}");
                        assert!(driver.get(DATA, (sectors * 512) as usize) == model[range], "{step:?}");
                    }
                    None => assert_eq!(status, IOERR, "{step:?}"),
                }
            }
            Step::Zero { sector, sectors, .. } | Step::Discard { sector, sectors } => {
                let (kind, flags) = match step {
                    Step::Zero { unmap, .. } => (WRITE_ZEROES, u32::from(*unmap)),
                    _ => (DISCARD, 0),
                };
                let mut entry = sector.to_le_bytes().to_vec();
                entry.extend((*sectors as u32).to_le_bytes());
                entry.extend(flags.to_le_bytes());
                driver.put(DATA, &entry);
                let status = request(&mut driver, kind, 0, &[(DATA, 16, false)]);
                match span(*sector, *sectors) {
                    Some(range) => {
                        assert_eq!(status, OK, "{step:?}");
                        model[range].fill(0);
                    }
                    None => assert_eq!(status, IOERR, "{step:?}"),
                }
            }
            Step::Flush => assert_eq!(request(&mut driver, FLUSH, 0, &[]), OK),
        }
    }
    block.stop().unwrap();
    assert_eq!(interrupt.failure(), None);
    assert_eq!(block.counters().in_flight(), 0);
}

fn with_engine(engine: EngineChoice) -> Option<Block> {
    let mut config = BlockConfig::new("disk0", "(memory)");
    config.engine = engine;
    match Block::from_file(image(SECTORS * 512), config) {
        Ok(block) => Some(block),
        Err(error @ crate::block::BlockError::NoUring { .. }) => {
            facilities::missing(facilities::Facility::IoUring, error);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn a_disk_is_a_vector_of_bytes_with_io_uring(steps in prop::collection::vec(step(), 1..60)) {
        if let Some(block) = with_engine(EngineChoice::Uring) {
            run(&steps, block);
        }
    }

    #[test]
    fn a_disk_is_a_vector_of_bytes_without_io_uring(steps in prop::collection::vec(step(), 1..60)) {
        run(&steps, with_engine(EngineChoice::Synchronous).unwrap());
    }

    /// `O_DIRECT` on storage with large blocks: requests of sectors, and of unaligned buffers, use a bounce buffer.
    #[test]
    fn a_disk_is_a_vector_of_bytes_around_the_page_cache(
        steps in prop::collection::vec(step(), 1..40), uring in any::<bool>(), alignment in prop_oneof![Just(512), Just(4096), Just(65_536)], odd in 0..3u64,
    ) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.raw");
        std::fs::File::create(&path).unwrap().set_len(SECTORS * 512 - odd * 100).unwrap();
        let mut config = BlockConfig::new("disk0", &path);
        config.direct = true;
        config.engine = if uring { EngineChoice::Auto } else { EngineChoice::Synchronous };
        match Block::open_with_alignment(config, alignment) {
            Ok(block) => run(&steps, block),
            Err(error @ crate::block::BlockError::Direct { .. }) => facilities::missing(facilities::Facility::DirectIo, error),
            Err(error) => panic!("{error}"),
        }
    }

    /// A file on a file system: it zeroes ranges, and has `O_DIRECT` if possible, mixed with unaligned buffers.
    #[test]
    fn a_disk_is_a_vector_of_bytes_on_a_file_system(steps in prop::collection::vec(step(), 1..40), direct in any::<bool>()) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.raw");
        std::fs::File::create(&path).unwrap().set_len(SECTORS * 512).unwrap();
        let mut config = BlockConfig::new("disk0", &path);
        config.direct = direct;
        match Block::open(config) {
            Ok(block) => run(&steps, block),
            Err(error @ crate::block::BlockError::Direct { .. }) => facilities::missing(facilities::Facility::DirectIo, error),
            Err(error) => panic!("{error}"),
        }
    }
}
