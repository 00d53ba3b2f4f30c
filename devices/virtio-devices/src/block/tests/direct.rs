//! Disks with `O_DIRECT`: the guest's view, and concurrent writes to the same block.

use std::path::Path;
use std::sync::Arc;

use super::*;
use crate::block::BlockError;
use crate::device::{Activation, VirtioDevice};

fn direct(path: &Path) -> BlockConfig {
    let mut config = BlockConfig::new("disk0", path);
    config.direct = true;
    config
}

/// If a file system (or kernel) doesn't report its alignment, it is probed.
#[test]
fn a_file_system_that_does_not_report_its_alignment_is_probed() {
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = directory.path().join("disk.raw");
    std::fs::write(&path, vec![5; MIB as usize]).unwrap();
    match Block::open(direct(&path)) {
        Ok(block) => {
            assert_eq!(block.inspect()["direct"], true);
            let mut bench = Bench::new(&block);
            assert_eq!(bench.read(3, 512), (OK, vec![5; 512]));
            assert_eq!(bench.write(3, &[6; 512]), OK);
            assert_eq!(bench.read(2, 1536).1, [vec![5; 512], vec![6; 512], vec![5; 512]].concat());
        }
        // A tmpfs of an older kernel.
        Err(error @ BlockError::Direct { .. }) => {
            facilities::missing(facilities::Facility::DirectIo, error);
        }
        Err(error) => panic!("{error}"),
    }
}

/// Storage with sectors of 4096 bytes: a loop device, and a file system on it.
struct LargeSectors {
    directory: tempfile::TempDir,
    device: String,
}

impl LargeSectors {
    fn new() -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("mounted")).unwrap();
        std::fs::File::create(directory.path().join("backing")).unwrap().set_len(64 * MIB).unwrap();
        let run = |program: &str, arguments: &[&str]| {
            let output =
                std::process::Command::new(program).args(arguments).current_dir(directory.path()).output();
            let output = output.map_err(|error| format!("{program}: {error}"))?;
            let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            if output.status.success() { Ok(text) } else { Err(format!("{program}: {error}")) }
        };
        let device = match run("losetup", &["--find", "--show", "--sector-size", "4096", "backing"]) {
            Ok(device) => device,
            Err(error) => {
                facilities::missing(facilities::Facility::Root, error);
                return None;
            }
        };
        let made = run("mkfs.ext4", &["-q", "-b", "4096", &device]);
        let made = made.and_then(|_| run("mount", &[&device, "mounted"]));
        let storage = Self { directory, device };
        match made {
            Ok(_) => Some(storage),
            Err(error) => {
                facilities::missing(facilities::Facility::Root, error);
                None
            }
        }
    }
}

impl Drop for LargeSectors {
    fn drop(&mut self) {
        let run = |program: &str, argument: &std::ffi::OsStr| {
            let _ = std::process::Command::new(program).arg(argument).output();
        };
        run("umount", self.directory.path().join("mounted").as_os_str());
        let _ = std::process::Command::new("losetup").args(["--detach", &self.device]).output();
    }
}

/// The guest's disk is the same with and without `O_DIRECT`, and has the configured block size.
#[test]
fn the_guests_sectors_do_not_depend_on_how_the_host_does_its_io() {
    let Some(storage) = LargeSectors::new() else { return };
    let path = storage.directory.path().join("mounted/disk.raw");
    std::fs::write(&path, vec![5; MIB as usize]).unwrap();
    let seen = |config: BlockConfig| {
        let block = Block::open(config).unwrap();
        let mut space = [0; 60];
        block.config_read(0, &mut space);
        assert_eq!(Bench::new(&block).write(9, &[6; 512]), OK);
        assert_eq!(Bench::new(&block).read(8, 1536).1, [vec![5; 512], vec![6; 512], vec![5; 512]].concat());
        let block_size = u32::from_le_bytes(space[20..24].try_into().unwrap());
        (space, block_size)
    };
    let (through, block_size) = seen(BlockConfig::new("disk0", &path));
    assert_eq!(block_size, 512);
    assert_eq!(seen(direct(&path)).0, through);
    for wanted in [512, 4096] {
        let with = |config: BlockConfig| BlockConfig { logical_block_size: Some(wanted), ..config };
        let (through, block_size) = seen(with(BlockConfig::new("disk0", &path)));
        assert_eq!(block_size, wanted);
        assert_eq!(seen(with(direct(&path))).0, through);
    }
}

/// Two queues write different sectors of the same blocks: neither loses a sector in the other's read-modify-write.
#[test]
fn writes_of_one_block_by_two_queues_keep_each_others_sectors() {
    const ROUNDS: u8 = 150;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.raw");
    std::fs::write(&path, vec![0; 8192]).unwrap();
    let mut config = direct(&path);
    config.queues = 2;
    let mut block = match Block::open_with_alignment(config, 4096) {
        Ok(block) => block,
        Err(error @ BlockError::Direct { .. }) => {
            return facilities::missing(facilities::Facility::DirectIo, error);
        }
        Err(error) => panic!("{error}"),
    };
    let space = memory(&[(0, 4 << 20)]);
    let mut drivers = [0x8_0000, 0x9_0000].map(|base| MockDriver::new(&space, 0, 64, base, RINGS));
    drivers[1].index = 1;
    let interrupt = MockInterrupt::new();
    block
        .activate(Activation {
            memory: space,
            features: RINGS,
            queues: drivers.iter().map(active_queue).collect(),
            interrupt: Arc::clone(&interrupt) as _,
        })
        .unwrap();
    std::thread::scope(|scope| {
        for (number, driver) in (0u64..).zip(&mut drivers) {
            scope.spawn(move || {
                // Each has its own page for header and status, and its own sectors: even or odd.
                let (header, data) = (HEADER + number * 0x1000, DATA + number * 0x1_0000);
                for round in 1..=ROUNDS {
                    for sector in (number..16).step_by(2) {
                        let mut bytes = [0u8; 16];
                        bytes[..4].copy_from_slice(&OUT.to_le_bytes());
                        bytes[8..].copy_from_slice(&sector.to_le_bytes());
                        driver.put(header, &bytes);
                        driver.put(data, &[round; 512]);
                        let chain = [(header, 16, false), (data, 512, false), (header + 0x800, 1, true)];
                        driver.push(&chain).unwrap();
                        driver.kick();
                        driver.wait_used();
                        assert_eq!(driver.get(header + 0x800, 1), [OK]);
                    }
                }
            });
        }
    });
    block.stop().unwrap();
    assert_eq!(interrupt.failure(), None);
    assert!(block.counters().bounced.get() > 0);
    let content = std::fs::read(&path).unwrap();
    assert!(content.iter().all(|byte| *byte == ROUNDS), "a write is lost");
}
