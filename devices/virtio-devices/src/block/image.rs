//! Opening a disk image: what it is, whether it may be used, what it can do.
#![allow(unsafe_code)] // OFD locks and statx with alignment fields have no safe wrapper here.

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
use super::error::BlockError;
use super::mirror::Completeness;
use super::qcow2;
use super::request::SECTOR;

/// What requests are served from.
pub(super) enum Backend {
    /// A file or block device, byte for byte.
    Raw {
        /// Through the page cache.
        file: File,
        /// Around it, where asked for.
        direct: Option<Direct>,
    },
    /// Read-only.
    Qcow2(Box<FormatAccess<imago::file::File>>),
}

/// The same image opened with `O_DIRECT`. Requests that don't keep its alignment go through the page cache.
pub(super) struct Direct {
    pub file: File,
    /// Alignment of buffers in bytes.
    pub memory: usize,
    /// Alignment of offsets and lengths in bytes.
    pub offset: u64,
}

/// An open image and what it can do.
pub(super) struct Image {
    pub path: PathBuf,
    pub backend: Backend,
    /// Bytes.
    pub size: u64,
    pub read_only: bool,
    /// Smallest unit the guest should use, bytes.
    pub block_size: u32,
    /// Unit that is cheap to write, bytes.
    pub physical_block: u32,
    /// Space can be given back.
    pub can_punch: bool,
    /// It is a block device.
    pub device: bool,
    /// Whether a migration has left it half filled.
    pub completeness: Completeness,
    /// Whether other monitors are kept out (false where the file system has no locks).
    locked: AtomicBool,
    /// Whether it may be used: false until [`Image::claim`] where the image was opened for a VM that runs elsewhere.
    claimed: AtomicBool,
}

impl Image {
    /// Opens and locks the image that `config` names.
    pub(super) fn open(config: &BlockConfig) -> Result<Self, BlockError> {
        let path = config.path.clone();
        let file = open_file(&path, config.read_only)?;
        Self::from_file(file, config)
    }

    /// The same with a file that is open already.
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
        // Opened without blocking, in case it were a pipe; io_uring treats such files differently.
        rustix::fs::fcntl_getfl(&file)
            .and_then(|flags| rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK))
            .map_err(|error| host(&path, "set to blocking mode")(error.into()))?;
        // Readers don't keep readers out, so these never wait for a VM that comes from elsewhere.
        let claimed = config.claim || config.read_only;
        let locked = claimed && lock(&file, config.read_only, &path)?;

        let completeness = Completeness::of(&file);
        if config.claim {
            completeness.check(&path)?;
        }
        let mut magic = [0u8; 4];
        let is_qcow2 = file.read_exact_at(&mut magic, 0).is_ok() && magic == *b"QFI\xfb";
        match config.format {
            ImageFormat::Qcow2 if !is_qcow2 => return Err(BlockError::NotQcow2 { path }),
            ImageFormat::Qcow2 | ImageFormat::Auto if is_qcow2 => {
                return Self::qcow2(file, path, config, locked);
            }
            _ => {}
        }

        let device = kind.is_block_device();
        let size = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0))
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
        let direct = if config.direct { Some(open_direct(&file, &path, config.read_only)?) } else { None };
        let block_size = match &direct {
            Some(direct) => logical.max(u32::try_from(direct.offset).unwrap_or(4096)),
            None => logical,
        };
        if size == 0 || !size.is_multiple_of(u64::from(block_size)) {
            return Err(BlockError::Size { path, size, unit: block_size });
        }
        let can_punch = !config.read_only
            && if device { device_can_zero(&metadata) } else { file_can_punch(&file, size) };
        Ok(Self {
            path,
            backend: Backend::Raw { file, direct },
            size,
            read_only: config.read_only,
            block_size,
            physical_block: physical.max(block_size),
            can_punch,
            device,
            completeness,
            locked: locked.into(),
            claimed: claimed.into(),
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
        // The image may come from anywhere: what the library can't cope with must not end the process.
        let opened = contain(|| {
            let storage = imago::file::File::from_open_file(file, StorageOpenOptions::new().filename(&path))?;
            // Nothing that the header names is opened: a guest that can write a header into a raw image
            // could otherwise read any file of this user. The check below refuses such images.
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
        let size = access.size();
        if size == 0 || !size.is_multiple_of(SECTOR) {
            return Err(BlockError::Size { path, size, unit: 512 });
        }
        Ok(Self {
            path,
            backend: Backend::Qcow2(Box::new(access)),
            size,
            read_only: true,
            block_size: 512,
            physical_block: 4096,
            can_punch: false,
            device: false,
            completeness: Completeness::default(),
            locked: locked.into(),
            claimed: true.into(),
        })
    }
}

impl Image {
    /// Whether other monitors are kept out (false where the file system has no locks).
    pub(super) fn locked(&self) -> bool {
        self.locked.load(Ordering::Acquire)
    }

    /// Whether it may be used.
    pub(super) fn claimed(&self) -> bool {
        self.claimed.load(Ordering::Acquire)
    }

    /// Takes the image for this monitor.
    pub(super) fn claim(&self) -> Result<(), BlockError> {
        self.completeness.check(&self.path)?;
        if !self.claimed() {
            self.lock_only()?;
        }
        self.claimed.store(true, Ordering::Release);
        Ok(())
    }

    /// Keeps other monitors out; whether the file system could do that.
    pub(super) fn lock_only(&self) -> Result<bool, BlockError> {
        let Backend::Raw { file, .. } = &self.backend else { return Ok(self.locked()) };
        let locked = lock(file, self.read_only, &self.path).or_else(|error| {
            // Half a lock would keep the other side from having its own back.
            unlock(file).map_err(host(&self.path, "unlocked"))?;
            Err(error)
        })?;
        self.locked.store(locked, Ordering::Release);
        Ok(locked)
    }

    /// Makes what was written durable.
    pub(super) fn settle(&self) -> Result<(), BlockError> {
        match &self.backend {
            Backend::Raw { file, .. } if !self.read_only => {
                file.sync_all().map_err(host(&self.path, "made durable"))
            }
            _ => Ok(()),
        }
    }

    /// Lets another monitor have it: what was written is made durable, then the locks go. Readers keep theirs.
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

/// Opens the same file once more, around the page cache.
fn open_direct(file: &File, path: &Path, read_only: bool) -> Result<Direct, BlockError> {
    let refuse = |reason| BlockError::Direct { path: path.to_owned(), reason };
    // SAFETY: an all-zero statx is a valid value of that plain C struct.
    let mut statx: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open, the path is an empty C string, `statx` is valid for writes.
    let result = unsafe {
        libc::statx(file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN, &raw mut statx)
    };
    if result != 0 || statx.stx_mask & libc::STATX_DIOALIGN == 0 {
        return Err(refuse("this kernel doesn't tell its alignment"));
    }
    if statx.stx_dio_offset_align == 0 {
        return Err(refuse("the file system can't"));
    }
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    let direct = File::options()
        .read(true)
        .write(!read_only)
        .custom_flags(libc::O_DIRECT | libc::O_CLOEXEC)
        .open(link)
        .map_err(host(path, "opened with O_DIRECT"))?;
    Ok(Direct {
        file: direct,
        memory: usize::try_from(statx.stx_dio_mem_align).unwrap_or(4096).max(1),
        offset: u64::from(statx.stx_dio_offset_align).max(SECTOR),
    })
}

/// Whether the file system can punch holes: tried behind the end, where there is nothing to lose.
fn file_can_punch(file: &File, size: u64) -> bool {
    let behind = size.next_multiple_of(4096);
    rustix::fs::fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, behind, 4096).is_ok()
}

/// Whether a block device has an operation that zeroes and gives back space.
fn device_can_zero(metadata: &std::fs::Metadata) -> bool {
    let device = metadata.rdev();
    let base = format!("/sys/dev/block/{}:{}", libc::major(device), libc::minor(device));
    // A partition has its queue one level up.
    ["queue", "../queue"].iter().any(|queue| {
        std::fs::read_to_string(format!("{base}/{queue}/write_zeroes_max_bytes"))
            .is_ok_and(|text| text.trim().parse::<u64>().is_ok_and(|bytes| bytes > 0))
    })
}

/// Keeps other monitors out, by the byte-range protocol that QEMU follows as well: a shared lock on byte
/// 100 + p says "I use permission p", one on 200 + p "nobody else may". Both are set first and then
/// checked against the others', so that of two that start together at least one sees the other.
/// Permissions: 0 read, 1 write, 3 resize.
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

/// Takes back what [`lock`] has set, also where it got stuck half-way.
fn unlock(file: &File) -> io::Result<()> {
    for byte in [100, 101, 201, 203] {
        match ofd_lock(file, libc::F_OFD_SETLK, libc::F_UNLCK, byte) {
            // A file system without locks has none to give back.
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

/// One byte, one fcntl; for `F_OFD_GETLK` the answer says who is in the way.
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
    /// The file behind a raw image.
    pub(super) fn raw(&self) -> Option<&File> {
        match self {
            Self::Raw { file, .. } => Some(file),
            Self::Qcow2(_) => None,
        }
    }
}
