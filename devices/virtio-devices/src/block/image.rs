//! Opening a disk image: its format, its locks, and its capabilities.
#![allow(unsafe_code)] // OFD locks have no safe wrapper here.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use imago::qcow2::Qcow2;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder, StorageOpenOptions};
use rustix::fs::{FallocateFlags, OFlags};
use telemetry::containment::contain;

use super::device::{BlockConfig, ImageFormat};
use super::direct::Direct;
use super::error::BlockError;
use super::format;
use super::mirror::Completeness;
use super::qcow2;

/// The storage of a disk.
pub(super) enum Backend {
    /// A file or block device, byte for byte.
    Raw {
        /// Through the page cache.
        file: File,
        /// The file opened with `O_DIRECT`, if configured.
        direct: Option<Direct>,
    },
    /// A read-only qcow2 image.
    Qcow2(Box<FormatAccess<imago::file::File>>),
}

/// An open image and its capabilities.
pub(super) struct Image {
    pub path: PathBuf,
    pub backend: Backend,
    /// Size of the guest's disk in bytes, whole blocks.
    pub size: u64,
    /// Size of the image in bytes when it was opened. Bytes behind it read as zeroes until the guest writes them.
    pub content_bytes: u64,
    /// Source of the zeroes behind the content of a raw image; `None` if it ends with a whole block.
    pub padding: Option<File>,
    pub read_only: bool,
    /// Logical block size, bytes.
    pub block_size: u32,
    /// Physical block size, bytes.
    pub physical_block: u32,
    /// Holes can be punched, which then read as zeroes (fallocate).
    pub can_punch: bool,
    /// Granularity of the device's own discard (BLKDISCARD), bytes, if it has one.
    pub device_discard: Option<u64>,
    /// It is a block device.
    pub device: bool,
    /// Whether a migration has left it incomplete.
    pub completeness: Completeness,
    /// Whether other monitors are locked out (false where the file system has no locks).
    locked: AtomicBool,
    /// Whether it may be used. False until [`Image::claim`] if the image was opened for a VM that runs on another host.
    claimed: AtomicBool,
}

impl Image {
    /// Opens and locks the image of `config`.
    pub(super) fn open(config: &BlockConfig) -> Result<Self, BlockError> {
        let path = config.path.clone();
        let file = open_file(&path, config.read_only)?;
        Self::from_file(file, config)
    }

    /// As [`Image::open`], with a file that is open already.
    pub(super) fn from_file(file: File, config: &BlockConfig) -> Result<Self, BlockError> {
        let path = config.path.clone();
        let metadata = file.metadata().map_err(host(&path, "examined"))?;
        let kind = metadata.file_type();
        let wrong = |kind| BlockError::WrongKind { path: path.clone(), kind };
        if kind.is_dir() {
            return Err(wrong("directory"));
        } else if kind.is_fifo() || kind.is_socket() {
            return Err(wrong("pipe or socket"));
        } else if kind.is_char_device() {
            return Err(wrong("character device"));
        }
        // It was opened without blocking, in case it is a pipe; io_uring treats such files differently.
        rustix::fs::fcntl_getfl(&file)
            .and_then(|flags| rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK))
            .map_err(|error| host(&path, "set to blocking mode")(error.into()))?;
        // Readers don't exclude readers, so these never wait for a VM of another host.
        let claimed = config.claim || config.read_only;
        let locked = claimed && lock(&file, config.read_only, &path)?;

        let completeness = Completeness::of(&file);
        if config.claim {
            completeness.check(&path)?;
        }
        match config.format {
            ImageFormat::Qcow2 if !format::is_qcow2(&file) => return Err(BlockError::NotQcow2 { path }),
            ImageFormat::Qcow2 => return Self::qcow2(file, path, config, locked),
            // The guest of a VM that migrates here uses the image already, whatever it has written.
            ImageFormat::Auto if config.claim => {
                if let Some(format) = format::recognized(&file) {
                    return Err(BlockError::FormatNotStated { path, format });
                }
            }
            ImageFormat::Auto | ImageFormat::Raw => {}
        }
        Self::raw(file, &metadata, config, completeness, locked)
    }

    fn raw(
        file: File,
        metadata: &std::fs::Metadata,
        config: &BlockConfig,
        completeness: Completeness,
        locked: bool,
    ) -> Result<Self, BlockError> {
        let path = config.path.clone();
        let device = metadata.file_type().is_block_device();
        let content_bytes = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0))
            .map_err(|error| host(&path, "measured")(error.into()))?;
        let (logical, physical) = if device {
            let get = |result: Result<u32, rustix::io::Errno>| {
                result.map_err(|error| host(&path, "asked for its block size")(error.into()))
            };
            (
                get(rustix::fs::ioctl_blksszget(&file))?.max(512),
                get(rustix::fs::ioctl_blkpbszget(&file))?.max(512),
            )
        } else {
            (512, u32::try_from(metadata.blksize()).unwrap_or(4096).clamp(512, 1 << 16))
        };
        let direct = if config.direct { Some(Direct::open(&file, &path, config.read_only)?) } else { None };
        // The guest's block size doesn't depend on how the host does I/O.
        let block_size = config.logical_block_size.unwrap_or(logical);
        let size = disk_bytes(&path, content_bytes, block_size, device)?;
        let padding = if size > content_bytes {
            Some(File::open("/dev/zero").map_err(host(&path, "padded with zeroes from /dev/zero"))?)
        } else {
            None
        };
        let writable = !config.read_only;
        let operations = if device { DeviceOperations::of(metadata) } else { DeviceOperations::default() };
        let can_punch =
            writable && if device { operations.write_zeroes } else { file_can_punch(&file, size) };
        Ok(Self {
            path,
            backend: Backend::Raw { file, direct },
            size,
            content_bytes,
            padding,
            read_only: config.read_only,
            block_size,
            physical_block: physical.max(block_size),
            can_punch,
            device_discard: (writable && operations.discard).then(|| u64::from(logical)),
            device,
            completeness,
            locked: locked.into(),
            claimed: (config.claim || config.read_only).into(),
        })
    }

    fn qcow2(file: File, path: PathBuf, config: &BlockConfig, locked: bool) -> Result<Self, BlockError> {
        if !config.read_only {
            return Err(BlockError::Qcow2Writable { path });
        }
        if config.direct {
            return Err(BlockError::Direct { path, reason: "it is in qcow2 format" });
        }
        if let Some(feature) = qcow2::unsupported(&file) {
            return Err(BlockError::Qcow2Feature { path, feature });
        }
        // The image may be hostile: a panic of the library must not end the process.
        let opened = contain(|| {
            let storage = imago::file::File::from_open_file(file, StorageOpenOptions::new().filename(&path))?;
            // No file that the header names is opened. A guest that can write a header to a raw image could otherwise read any file of this
            // user. The check below refuses such images.
            Qcow2::<imago::file::File>::builder(storage)
                .backing(None)
                .data_file(None)
                .open(DenyImplicitOpenGate::default())
        })
        .unwrap_or_else(|panic| Err(io::Error::other(format!("the qcow2 library panicked: {panic}"))));
        let qcow2 = match opened {
            Ok(qcow2) => qcow2,
            Err(source) => return Err(BlockError::Qcow2Damaged { path, source }),
        };
        if let Some(other) = qcow2.implicit_backing_file() {
            return Err(BlockError::Qcow2References { path, other: other.clone() });
        }
        if qcow2.requires_external_data_file() {
            let other = qcow2.implicit_external_data_file().cloned();
            return Err(BlockError::Qcow2References {
                path,
                other: other.unwrap_or_else(|| "an external data file".to_owned()),
            });
        }
        let access = FormatAccess::new(qcow2);
        let content_bytes = access.size();
        let block_size = config.logical_block_size.unwrap_or(512);
        let size = disk_bytes(&path, content_bytes, block_size, false)?;
        Ok(Self {
            path,
            backend: Backend::Qcow2(Box::new(access)),
            size,
            content_bytes,
            padding: None,
            read_only: true,
            block_size,
            physical_block: 4096,
            can_punch: false,
            device_discard: None,
            device: false,
            completeness: Completeness::default(),
            locked: locked.into(),
            claimed: true.into(),
        })
    }
}

impl Image {
    /// Whether other monitors are locked out (false where the file system has no locks).
    pub(super) fn locked(&self) -> bool {
        self.locked.load(Ordering::Acquire)
    }

    /// Whether it may be used.
    pub(super) fn claimed(&self) -> bool {
        self.claimed.load(Ordering::Acquire)
    }

    /// Claims the image for this monitor.
    pub(super) fn claim(&self) -> Result<(), BlockError> {
        self.completeness.check(&self.path)?;
        if !self.claimed() {
            self.lock_only()?;
        }
        self.claimed.store(true, Ordering::Release);
        Ok(())
    }

    /// Locks other monitors out. Returns whether the file system has locks.
    pub(super) fn lock_only(&self) -> Result<bool, BlockError> {
        let Backend::Raw { file, .. } = &self.backend else { return Ok(self.locked()) };
        let locked = lock(file, self.read_only, &self.path).or_else(|error| {
            // A partial lock would keep the other side from reclaiming the image.
            unlock(file).map_err(host(&self.path, "unlocked"))?;
            Err(error)
        })?;
        self.locked.store(locked, Ordering::Release);
        Ok(locked)
    }

    /// Reads bytes of the disk: zeroes behind the image's content.
    pub(super) fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let content = usize::try_from(self.content_bytes.saturating_sub(offset)).unwrap_or(usize::MAX);
        match &self.backend {
            // Bypasses the page cache as the guest does, if both are aligned: a copy should not evict the host's cache.
            Backend::Raw { direct: Some(direct), .. } if direct.takes_buffer(into, offset) => {
                self.read_padded(&direct.file, offset, into)
            }
            Backend::Raw { file, .. } => self.read_padded(file, offset, into),
            Backend::Qcow2(image) => {
                let (data, padding) = into.split_at_mut(content.min(into.len()));
                padding.fill(0);
                if data.is_empty() { Ok(()) } else { image.read(data, offset) }
            }
        }
    }

    fn read_padded(&self, file: &File, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < into.len() {
            let at = offset + done as u64;
            match file.read_at(&mut into[done..], at) {
                Ok(0) if at >= self.content_bytes => {
                    into[done..].fill(0);
                    return Ok(());
                }
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => done += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Makes written data durable.
    pub(super) fn settle(&self) -> Result<(), BlockError> {
        match &self.backend {
            Backend::Raw { file, .. } if !self.read_only => {
                file.sync_all().map_err(host(&self.path, "made durable"))
            }
            _ => Ok(()),
        }
    }

    /// Releases the image to another monitor: makes written data durable, then releases the locks. Readers keep theirs.
    pub(super) fn release(&self) -> Result<(), BlockError> {
        let Backend::Raw { file, .. } = &self.backend else { return Ok(()) };
        if self.read_only {
            return Ok(());
        }
        self.settle()?;
        self.claimed.store(false, Ordering::Release);
        unlock(file).map_err(host(&self.path, "unlocked"))?;
        self.locked.store(false, Ordering::Release);
        Ok(())
    }
}

pub(super) fn host(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> BlockError {
    let path = path.to_owned();
    move |source| BlockError::Host { path, what, source }
}

fn open_file(path: &Path, read_only: bool) -> Result<File, BlockError> {
    let flags = OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let result = File::options()
        .read(true)
        .write(!read_only)
        .custom_flags(i32::try_from(flags.bits()).unwrap_or(0))
        .open(path);
    result.map_err(|source| {
        let path = path.to_owned();
        let access = if read_only { "reading" } else { "reading and writing" };
        match source.raw_os_error() {
            Some(libc::ENOENT) => BlockError::Missing { path },
            Some(libc::EACCES | libc::EPERM) => BlockError::Permission { path, access },
            Some(libc::EROFS) => BlockError::ReadOnlyFileSystem { path },
            Some(libc::EISDIR) => BlockError::WrongKind { path, kind: "directory" },
            Some(libc::ENXIO) => BlockError::WrongKind { path, kind: "pipe or socket" },
            _ => BlockError::Host { path, what: "opened", source },
        }
    })
}

/// Whether the file system can punch holes, tried behind the end of the image, where no data is lost.
fn file_can_punch(file: &File, size: u64) -> bool {
    let behind = size.next_multiple_of(4096);
    rustix::fs::fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, behind, 4096).is_ok()
}

/// Size of the disk of an image of `content` bytes, in whole blocks. As in QEMU, a file is padded. A device can't grow, so a partial last
/// block is left out.
fn disk_bytes(path: &Path, content: u64, block: u32, device: bool) -> Result<u64, BlockError> {
    let block = u64::from(block);
    let size = match device {
        true => content / block * block,
        false => content.checked_next_multiple_of(block).unwrap_or(content / block * block),
    };
    if size == 0 {
        return Err(BlockError::Empty { path: path.to_owned(), size: content, unit: block });
    }
    if size != content {
        tracing::warn!(
            "Disk image {} is {content} bytes long, which is no whole number of {block}-byte blocks; the guest sees {size} bytes{}",
            path.display(),
            if device { "" } else { ", and reads zeroes behind the image's end" }
        );
    }
    Ok(size)
}

/// Operations of a block device besides reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct DeviceOperations {
    /// Discard: deallocates space, with undefined contents afterwards.
    discard: bool,
    /// Zeroes a range, and deallocates space where it can.
    write_zeroes: bool,
}

impl DeviceOperations {
    fn of(metadata: &std::fs::Metadata) -> Self {
        let device = metadata.rdev();
        let base = format!("/sys/dev/block/{}:{}", libc::major(device), libc::minor(device));
        // A partition's queue is one level up.
        let queues = ["queue", "../queue"].map(|queue| Path::new(&base).join(queue));
        queues.iter().find(|queue| queue.exists()).map_or_else(Self::default, |queue| Self::of_queue(queue))
    }

    /// Reads the limits in the kernel's queue folder; a limit of 0 means that the operation doesn't exist.
    fn of_queue(queue: &Path) -> Self {
        let has = |limit: &str| {
            std::fs::read_to_string(queue.join(limit))
                .is_ok_and(|text| text.trim().parse::<u64>().is_ok_and(|bytes| bytes > 0))
        };
        Self { discard: has("discard_max_bytes"), write_zeroes: has("write_zeroes_max_bytes") }
    }
}

/// Locks other monitors out, by QEMU's byte-range protocol. A shared lock on byte 100 + p means "this process uses permission p", one on
/// 200 + p "no other process may". Both are set first and then checked against other processes', so of two that start together at least one
/// fails. Permissions: 0 read, 1 write, 3 resize.
fn lock(file: &File, read_only: bool, path: &Path) -> Result<bool, BlockError> {
    let used: &[i64] = if read_only { &[0] } else { &[0, 1] };
    let denied: &[i64] = &[1, 3];
    let set = used.iter().map(|p| 100 + p).chain(denied.iter().map(|p| 200 + p));
    for byte in set {
        match ofd_lock(file, libc::F_OFD_SETLK, libc::F_RDLCK, byte) {
            Ok(_) => {}
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
                return Err(BlockError::Locked { path: path.to_owned(), pid: None });
            }
            Err(error) => {
                tracing::warn!(
                    "Disk image {} is not protected against use by another virtual machine: its file system has no locks ({error})",
                    path.display()
                );
                return Ok(false);
            }
        }
    }
    let conflicts = used.iter().map(|p| 200 + p).chain(denied.iter().map(|p| 100 + p));
    for byte in conflicts {
        let found = ofd_lock(file, libc::F_OFD_GETLK, libc::F_WRLCK, byte).map_err(host(path, "locked"))?;
        if i32::from(found.l_type) != libc::F_UNLCK {
            let pid = (found.l_pid > 0).then_some(found.l_pid);
            return Err(BlockError::Locked { path: path.to_owned(), pid });
        }
    }
    Ok(true)
}

/// Releases the locks that [`lock`] has set, even if it failed half-way.
fn unlock(file: &File) -> io::Result<()> {
    for byte in [100, 101, 201, 203] {
        match ofd_lock(file, libc::F_OFD_SETLK, libc::F_UNLCK, byte) {
            // A file system without locks has none to release.
            Err(error)
                if !matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP | libc::ENOLCK)) =>
            {
                return Err(error);
            }
            _ => {}
        }
    }
    Ok(())
}

/// A fcntl for one byte's lock; after `F_OFD_GETLK` the result describes the conflicting lock.
fn ofd_lock(file: &File, command: i32, kind: i32, byte: i64) -> io::Result<libc::flock> {
    let mut lock = libc::flock {
        l_type: i16::try_from(kind).unwrap_or(0),
        l_whence: 0, // SEEK_SET
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open and `lock` is valid for reads and writes during the call.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) };
    if result == 0 { Ok(lock) } else { Err(io::Error::last_os_error()) }
}

impl Backend {
    /// The file of a raw image.
    pub(super) fn raw(&self) -> Option<&File> {
        match self {
            Self::Raw { file, .. } => Some(file),
            Self::Qcow2(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::DeviceOperations;

    /// A device may have a discard without zeroing, and vice versa.
    #[test]
    fn a_devices_operations_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        for (discard, zero) in [("0", "0"), ("4294966784", "0"), ("0", "1048576"), ("512", "512")] {
            std::fs::write(folder.path().join("discard_max_bytes"), format!("{discard}\n")).unwrap();
            std::fs::write(folder.path().join("write_zeroes_max_bytes"), format!("{zero}\n")).unwrap();
            let expected = DeviceOperations { discard: discard != "0", write_zeroes: zero != "0" };
            assert_eq!(DeviceOperations::of_queue(folder.path()), expected);
        }
        let nothing = tempfile::tempdir().unwrap();
        assert_eq!(DeviceOperations::of_queue(nothing.path()), DeviceOperations::default());
    }
}
