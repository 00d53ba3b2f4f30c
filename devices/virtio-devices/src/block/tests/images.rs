//! Which images are accepted, and the errors for others.

use std::path::Path;

use imago::{DenyImplicitOpenGate, FormatAccess, FormatCreateBuilder, FormatDriverBuilder, Storage};

use super::*;
use crate::block::{BlockError, ImageFormat};
use crate::device::VirtioDevice;

fn file(path: &Path, size: u64) {
    std::fs::File::create(path).unwrap().set_len(size).unwrap();
}

fn refused(config: BlockConfig) -> BlockError {
    let error = Block::open(config).err().expect("refused");
    let text = error.to_string();
    assert!(text.starts_with("Disk") || text.starts_with("Serial") || text.starts_with("Saved"), "{text}");
    error
}

#[test]
fn what_is_no_disk_is_refused_with_a_sentence() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    file(&path("odd"), 1000);
    file(&path("empty"), 0);
    rustix::fs::mknodat(rustix::fs::CWD, path("pipe"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let open = |name: &str| refused(BlockConfig::new("disk0", path(name)));
    assert!(matches!(open("missing"), BlockError::Missing { .. }));
    assert!(matches!(open("."), BlockError::WrongKind { kind: "directory", .. }));
    assert!(matches!(open("pipe"), BlockError::WrongKind { kind: "pipe or socket", .. }));
    assert!(matches!(open("empty"), BlockError::Empty { size: 0, unit: 512, .. }));
    assert!(matches!(open("odd/below"), BlockError::Host { .. }));
    let mut config = BlockConfig::new("disk0", "/dev/null");
    config.read_only = true;
    assert!(matches!(refused(config), BlockError::WrongKind { kind: "character device", .. }));
}

#[test]
fn wishes_that_cannot_be_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.raw");
    file(&path, MIB);
    let config = |change: fn(&mut BlockConfig)| {
        let mut config = BlockConfig::new("disk0", &path);
        change(&mut config);
        config
    };
    assert!(matches!(refused(config(|c| c.queues = 0)), BlockError::Queues { .. }));
    assert!(matches!(refused(config(|c| c.queues = 65)), BlockError::Queues { .. }));
    assert!(matches!(
        refused(config(|c| c.logical_block_size = Some(1024))),
        BlockError::BlockSize { bytes: 1024, .. }
    ));
    for serial in ["", "123456789012345678901", "tab\t", "ünï"] {
        let mut config = config(|_| {});
        config.serial = Some(serial.to_owned());
        assert!(matches!(refused(config), BlockError::Serial { .. }), "{serial:?}");
    }
    assert!(matches!(refused(config(|c| c.format = ImageFormat::Qcow2)), BlockError::NotQcow2 { .. }));
}

/// Two monitors can't write one image, nor can one write what the other reads; two may read.
#[test]
fn images_are_locked_against_a_second_writer() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.raw");
    file(&path, MIB);
    let config = |read_only: bool| {
        let mut config = BlockConfig::new("disk0", &path);
        config.read_only = read_only;
        config
    };
    let writer = Block::open(config(false)).unwrap();
    assert_eq!(writer.inspect()["locked"], true);
    assert!(matches!(refused(config(false)), BlockError::Locked { .. }));
    assert!(matches!(refused(config(true)), BlockError::Locked { .. }));
    drop(writer);
    let first = Block::open(config(true)).unwrap();
    let second = Block::open(config(true)).unwrap();
    assert!(matches!(refused(config(false)), BlockError::Locked { .. }));
    drop((first, second));
    Block::open(config(false)).unwrap();
}

/// An image is handed over to another monitor and back. At each moment one may use it, and a monitor that fails to claim it leaves no lock
/// behind.
#[test]
fn an_image_is_handed_over_and_taken_back() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.raw");
    file(&path, MIB);
    let mut source = Block::open(BlockConfig::new("disk0", &path)).unwrap();
    let waiting = BlockConfig { claim: false, ..BlockConfig::new("disk0", &path) };
    let mut destination = Block::open(waiting).unwrap();
    assert_eq!(destination.inspect()["locked"], false);
    let refusal = destination.take_over().unwrap_err();
    assert!(format!("{:?}", std::error::Error::source(&refusal)).contains("Locked"), "{refusal:?}");
    source.hand_over().unwrap();
    assert_eq!(source.inspect()["locked"], false);
    destination.take_over().unwrap();
    assert_eq!(destination.inspect()["locked"], true);
    source.take_over().unwrap_err();
    destination.hand_over().unwrap();
    source.take_over().unwrap();
    assert_eq!(source.inspect()["locked"], true);
}

/// QEMU uses the same protocol: it can't write an image of this monitor.
#[test]
fn qemu_respects_the_lock() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.raw");
    file(&path, MIB);
    let block = Block::open(BlockConfig::new("disk0", &path)).unwrap();
    let grow = || {
        std::process::Command::new("qemu-img").args(["resize", "-f", "raw"]).arg(&path).arg("+1M").output()
    };
    let Ok(locked) = grow() else {
        facilities::missing(facilities::Facility::QemuImg, "QEMU's locks are not checked");
        return;
    };
    let text = String::from_utf8_lossy(&locked.stderr).into_owned();
    assert!(!locked.status.success() && text.contains("lock"), "{text}");
    drop(block);
    assert!(grow().unwrap().status.success());
}

/// Makes a qcow2 image with `data` at the start of its second megabyte.
fn qcow2(path: &Path, size: u64, data: &[u8], backing: bool) {
    file(path, 0);
    let storage =
        imago::file::File::open(imago::StorageOpenOptions::new().filename(path).write(true)).unwrap();
    let mut builder = imago::qcow2::Qcow2::<imago::file::File>::create_builder(storage).size(size);
    if backing {
        builder = builder.backing("/etc/passwd".to_owned(), "raw".to_owned());
    }
    builder.create().unwrap();
    if !data.is_empty() {
        let options = imago::StorageOpenOptions::new().filename(path).write(true);
        let storage = imago::file::File::open(options).unwrap();
        let image = imago::qcow2::Qcow2::<imago::file::File>::builder(storage)
            .write(true)
            .open(DenyImplicitOpenGate::default())
            .unwrap();
        let image = FormatAccess::new(image);
        image.write(data, MIB).unwrap();
        image.flush().unwrap();
    }
}

/// Configuration to read a qcow2 image.
fn qcow2_config(path: &Path) -> BlockConfig {
    BlockConfig { read_only: true, format: ImageFormat::Qcow2, ..BlockConfig::new("disk0", path) }
}

#[test]
fn qcow2_is_read_and_never_written() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.qcow2");
    let data: Vec<u8> = (0..200_000u32 / 512 * 512).map(|i| (i % 253) as u8).collect();
    qcow2(&path, 64 * MIB, &data, false);
    let writable = BlockConfig { read_only: false, ..qcow2_config(&path) };
    assert!(matches!(refused(writable), BlockError::Qcow2Writable { .. }));
    let mut config = qcow2_config(&path);
    let block = Block::open(config.clone()).unwrap();
    assert_eq!(block.inspect()["format"], "qcow2");
    assert_eq!(block.inspect()["bytes"], 64 * MIB);
    let mut bench = Bench::new(&block);
    assert_eq!(bench.read(MIB / 512, data.len()), (OK, data));
    assert_eq!(bench.read(0, 4096), (OK, vec![0; 4096]));
    assert_eq!(bench.read(64 * MIB / 512 - 1, 512), (OK, vec![0; 512]));
    assert_eq!(bench.write(0, &[1; 512]), IOERR);
    assert_eq!(bench.request(FLUSH, 0, &[]), OK);
    // As raw, the same file begins with its header.
    config.format = ImageFormat::Raw;
    let raw = Block::open(config).unwrap();
    assert_eq!(Bench::new(&raw).read(0, 512).1[..4], *b"QFI\xfb");
}

/// Images by qemu-img, of both versions and with compressed clusters, read as the data written.
#[test]
fn images_of_qemu_img_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let (raw, qcow2) = (directory.path().join("disk.raw"), directory.path().join("disk.qcow2"));
    let data: Vec<u8> = (0..300 * 1024u32).map(|i| (i / 1000) as u8).collect();
    file(&raw, 8 * MIB);
    std::os::unix::fs::FileExt::write_all_at(
        &std::fs::File::options().write(true).open(&raw).unwrap(),
        &data,
        MIB,
    )
    .unwrap();
    for options in [&["-o", "compat=1.1"][..], &["-o", "compat=0.10"], &["-c"], &["-o", "cluster_size=4096"]]
    {
        let made = std::process::Command::new("qemu-img")
            .args(["convert", "-O", "qcow2"])
            .args(options)
            .args([&raw, &qcow2])
            .status();
        match made {
            Ok(status) => assert!(status.success()),
            Err(error) => {
                facilities::missing(facilities::Facility::QemuImg, error);
                return;
            }
        }
        let config = qcow2_config(&qcow2);
        let block = Block::open(config).unwrap();
        let mut bench = Bench::new(&block);
        assert_eq!(bench.read(MIB / 512, data.len()), (OK, data.clone()), "{options:?}");
        assert_eq!(bench.read(0, 4096), (OK, vec![0; 4096]));
    }
}

/// An image by qemu-img with these options; `None` without qemu-img.
fn qemu_image(path: &Path, options: &[&str]) -> Option<()> {
    let made = std::process::Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2"])
        .args(options)
        .arg(path)
        .arg("4M")
        .output();
    match made {
        Ok(output) => {
            assert!(output.status.success(), "{options:?}: {}", String::from_utf8_lossy(&output.stderr));
            Some(())
        }
        Err(error) => {
            facilities::missing(facilities::Facility::QemuImg, error);
            None
        }
    }
}

/// A guest must never read bytes that aren't its data: ciphertext, or clusters with another meaning.
#[test]
fn images_with_features_that_are_not_understood_are_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.qcow2");
    let secret = ["--object", "secret,id=s,data=geheim"];
    let with_secret = |options: &'static str| vec![secret[0], secret[1], "-o", options];
    for (options, feature) in [
        (with_secret("encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10"), "LUKS encryption"),
        (with_secret("encrypt.format=aes,encrypt.key-secret=s"), "AES encryption"),
        (with_secret("compat=0.10,encrypt.format=aes,encrypt.key-secret=s"), "AES encryption"),
        (vec!["-o", "compression_type=zstd"], "Zstandard compression"),
        (vec!["-o", "extended_l2=on"], "extended L2 entries"),
    ] {
        let Some(()) = qemu_image(&path, &options) else { return };
        let config = qcow2_config(&path);
        let error = refused(config);
        assert!(matches!(&error, BlockError::Qcow2Feature { .. }), "{options:?}: {error}");
        assert!(error.to_string().contains(&format!("({feature})")), "{error}");
    }
}

/// Images of unsupported formats aren't passed to the guest as raw data, unless `raw` is configured.
#[test]
fn images_of_formats_that_are_not_read_are_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.img");
    for (format, name) in [
        ("vmdk", "VMDK"),
        ("vhdx", "VHDX"),
        ("vpc", "VHD"),
        ("vdi", "VDI"),
        ("qed", "QED"),
        ("parallels", "Parallels"),
        ("qcow2", "qcow2"),
    ] {
        let Some(()) = qemu_image(&path, &["-f", format]) else { return };
        let error = refused(BlockConfig::new("disk0", &path));
        assert!(matches!(&error, BlockError::FormatNotStated { .. }), "{format}: {error}");
        assert!(error.to_string().contains(&format!("begins like one in {name} format")), "{error}");
        let mut config = BlockConfig::new("disk0", &path);
        config.format = ImageFormat::Raw;
        Block::open(config).unwrap();
    }
    let descriptor = b"# Disk DescriptorFile\nversion=1\n";
    std::fs::write(&path, [&descriptor[..], &[0; 512]].concat()).unwrap();
    assert!(matches!(
        refused(BlockConfig::new("disk0", &path)),
        BlockError::FormatNotStated { format: "VMDK", .. }
    ));
}

/// Features that a reader may ignore by the format's rules don't make an image unreadable.
#[test]
fn bitmaps_snapshots_and_lazy_counts_of_qemu_img_are_no_obstacle() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.qcow2");
    let Some(()) = qemu_image(&path, &["-o", "lazy_refcounts=on"]) else { return };
    for change in [&["bitmap", "--add"][..], &["snapshot", "-c", "first"]] {
        let mut command = std::process::Command::new("qemu-img");
        command.args(change).arg(&path);
        if change[0] == "bitmap" {
            command.arg("b0");
        }
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let config = qcow2_config(&path);
    let block = Block::open(config).unwrap();
    assert_eq!(Bench::new(&block).read(0, 4096), (OK, vec![0; 4096]));
}

/// A guest that writes a qcow2 header to its raw disk can't make the next start read another file.
#[test]
fn files_that_a_header_names_are_never_opened() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.qcow2");
    qcow2(&path, 4 * MIB, &[], true);
    let config = qcow2_config(&path);
    let error = refused(config);
    assert!(matches!(&error, BlockError::Qcow2References { other, .. } if other == "/etc/passwd"), "{error}");
}

/// Truncated and bit-flipped images end in an error, or in a disk that completes every read with a status.
#[test]
fn damaged_qcow2_images_are_survived() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.qcow2");
    qcow2(&path, 4 * MIB, &[7; 4096], false);
    let whole = std::fs::read(&path).unwrap();
    let damaged = directory.path().join("damaged.qcow2");
    let mut noise = 0x9E37_79B9_7F4A_7C15u64;
    for round in 0..300usize {
        let mut bytes = whole.clone();
        if round % 3 == 0 {
            bytes.truncate(whole.len() * round / 300);
        } else {
            for _ in 0..=round % 4 {
                noise ^= noise << 13;
                noise ^= noise >> 7;
                noise ^= noise << 17;
                // Mostly in the header.
                let at = if round % 2 == 0 { noise as usize % 112 } else { noise as usize % bytes.len() };
                bytes[at] ^= 1 << (noise >> 60 & 7);
            }
        }
        std::fs::write(&damaged, &bytes).unwrap();
        let config = qcow2_config(&damaged);
        if let Ok(block) = Block::open(config) {
            let mut bench = Bench::new(&block);
            for sector in [0, 2048, 4000] {
                let (status, _) = bench.read(sector, 512);
                assert!(status == OK || status == IOERR);
            }
        }
    }
}

/// An image whose last block is partial is padded with zeroes, as in QEMU; the guest can write there.
#[test]
fn an_image_that_ends_in_a_block_is_padded() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.raw");
    for (block_size, capacity) in [(512u32, 3u64), (4096, 8)] {
        std::fs::write(&path, [7; 1200]).unwrap();
        let open = |read_only| {
            let mut config = BlockConfig::new("disk0", &path);
            config.read_only = read_only;
            config.logical_block_size = Some(block_size);
            Block::open(config).unwrap()
        };
        let bytes = capacity as usize * 512;
        let mut expected = vec![7; 1200];
        expected.resize(bytes, 0);
        let block = open(true);
        assert_eq!(block.inspect()["bytes"], capacity * 512);
        assert_eq!(Bench::new(&block).read(0, bytes), (OK, expected.clone()));
        assert_eq!(Bench::new(&block).read(2, 512), (OK, expected[1024..1536].to_vec()));
        let mut copy = vec![1; bytes];
        block.content().read(0, &mut copy).unwrap();
        assert_eq!(copy, expected);
        drop(block);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 1200, "opening changes nothing");

        let block = open(false);
        let mut bench = Bench::new(&block);
        assert_eq!(bench.write(2, &[9; 512]), OK);
        expected[1024..1536].fill(9);
        assert_eq!(bench.read(0, bytes), (OK, expected));
    }
}

/// The same with qcow2, whose header may hold any size.
#[test]
fn a_qcow2_image_that_ends_in_a_block_is_padded() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.qcow2");
    qcow2(&path, MIB + 700, &[], false);
    let config = qcow2_config(&path);
    let block = Block::open(config).unwrap();
    assert_eq!(block.inspect()["bytes"], MIB + 1024);
    assert_eq!(Bench::new(&block).read(MIB / 512, 1024), (OK, vec![0; 1024]));
}

#[test]
fn a_saved_disk_is_restored_over_the_same_image_only() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.raw");
    file(&path, MIB);
    let config = BlockConfig::new("disk0", &path);
    let saved = Block::open(config.clone()).unwrap().save().unwrap();
    let block = Block::restore(config.clone(), &saved).unwrap();
    assert_eq!(block.save().unwrap(), saved);
    drop(block);
    let mut more = config.clone();
    more.queues = 2;
    assert!(matches!(Block::restore(more, &saved), Err(BlockError::Restore { .. })));
    let mut larger_blocks = config.clone();
    larger_blocks.logical_block_size = Some(4096);
    let error = Block::restore(larger_blocks, &saved).err().unwrap().to_string();
    assert!(error.contains("logical blocks of 512 bytes, now it has 4096"), "{error}");
    file(&path, 2 * MIB);
    let error = Block::restore(config, &saved).err().unwrap().to_string();
    assert!(error.contains("2048 sectors"), "{error}");
}

#[test]
fn configuration_space_says_what_the_disk_is() {
    let block = disk(8 * MIB, |config| config.queues = 3);
    let read = |offset: u64, len: usize| {
        let mut data = vec![0; len];
        block.config_read(offset, &mut data);
        data
    };
    assert_eq!(read(0, 8), (16384u64).to_le_bytes());
    assert_eq!(read(12, 4), 254u32.to_le_bytes());
    assert_eq!(read(20, 4), 512u32.to_le_bytes());
    assert_eq!(read(32, 1), [1]);
    assert_eq!(read(34, 2), 3u16.to_le_bytes());
    assert_eq!(read(56, 1), [1]);
    assert_eq!(read(60, 8), [0; 8]);
    assert_eq!(read(u64::MAX, 4), [0; 4]);
}
