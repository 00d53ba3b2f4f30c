//! A disk's content, apart from its queues: read while the guest writes, to be the same elsewhere; or filled, for a guest that comes.
//!
//! An image that is being filled carries a mark (an extended attribute, where the file system has them) until the guest runs on it. With the mark
//! nobody else uses it as a disk: half of one can't be told from a whole one by its bytes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::fs::{FallocateFlags, SeekFrom, XattrFlags};
use rustix::io::Errno;

use super::chunks::{CHUNK, Chunks};
use super::disk::Disk;
use super::error::BlockError;
use super::image::{Image, host};

/// The mark of an image that isn't whole.
const MARK: &std::ffi::CStr = c"user.causeway.incomplete";
/// Zeroes are written in pieces of this many bytes, where an image can't have holes.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// What a migration has to do with an image's content.
#[derive(Debug, Default)]
pub(super) struct Completeness(AtomicU8);

/// Nothing: it is a disk.
const WHOLE: u8 = 0;
/// A migration that was to fill it has ended before.
const LEFT: u8 = 1;
/// It is being filled.
const FILLING: u8 = 2;
/// It was filled, and is marked all the same until the guest runs.
const FILLED: u8 = 3;

impl Completeness {
    /// Of an image that was just opened.
    pub(super) fn of(file: &File) -> Self {
        let marked = rustix::fs::fgetxattr(file, MARK, &mut [0u8; 64][..]).is_ok();
        Self(AtomicU8::new(if marked { LEFT } else { WHOLE }))
    }

    /// Whether the guest may have it.
    pub(super) fn check(&self, path: &Path) -> Result<(), BlockError> {
        match self.0.load(Ordering::Acquire) {
            WHOLE | FILLED => Ok(()),
            _ => Err(BlockError::Incomplete { path: path.to_owned() }),
        }
    }
}

/// A disk's content. Cheap to clone, usable from any thread.
#[derive(Clone)]
pub struct DiskContent(Arc<Disk>);

impl std::fmt::Debug for DiskContent {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("DiskContent").field(&self.0.name).finish()
    }
}

impl DiskContent {
    pub(super) fn new(disk: Arc<Disk>) -> Self {
        Self(disk)
    }

    fn image(&self) -> &Image {
        &self.0.image
    }

    fn file(&self) -> Result<&File, BlockError> {
        let image = self.image();
        let other = || io::Error::other("its bytes aren't the disk's");
        image.backend.raw().ok_or_else(|| host(&image.path, "copied")(other()))
    }

    /// The disk's name in its VM.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its image.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.image().path
    }

    /// Bytes that the guest sees.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.image().size
    }

    /// Whether the guest may not write it.
    #[must_use]
    pub fn read_only(&self) -> bool {
        self.image().read_only
    }

    /// Whether the image is a block device.
    #[must_use]
    pub fn is_device(&self) -> bool {
        self.image().device
    }

    // While the guest uses it.

    /// Notes from here on what the guest writes.
    pub fn begin_noting(&self) {
        self.0.written.begin(self.bytes());
    }

    /// No more.
    pub fn end_noting(&self) {
        self.0.written.end();
    }

    /// Chunks that the guest may have changed since the last call, or since [`DiskContent::begin_noting`]. What is read of them from here on has
    /// all that was completed before, and what comes later is in the next set.
    ///
    /// # Errors
    /// When writes were in flight that could not be waited for.
    pub fn take_written(&self) -> Result<Chunks, BlockError> {
        let lost = |_| {
            let text = "requests of the guest were in flight that could not be waited for";
            host(self.path(), "followed")(io::Error::other(text))
        };
        self.0.written.take().map_err(lost)
    }

    /// Chunks that have any data; the others are holes, and zero.
    ///
    /// # Errors
    /// When the host refuses.
    pub fn present(&self) -> Result<Chunks, BlockError> {
        let (file, bytes) = (self.file()?, self.bytes());
        let mut present = Chunks::none(bytes);
        let mut at = 0;
        while at < bytes {
            let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
                Ok(start) => start,
                Err(Errno::NXIO) => break,
                // Without a map of holes all may be data.
                Err(_) => return Ok(Chunks::all(bytes)),
            };
            let end = rustix::fs::seek(file, SeekFrom::Hole(start)).unwrap_or(bytes);
            if end <= start {
                return Ok(Chunks::all(bytes));
            }
            present.insert(start, end - start);
            // The rest of a chunk that is in the set need not be looked at.
            at = end.next_multiple_of(CHUNK);
        }
        Ok(present)
    }

    /// Reads bytes as the guest would.
    ///
    /// # Errors
    /// When the host can't read them.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), BlockError> {
        self.image().read(offset, into).map_err(host(self.path(), "read"))
    }

    // Before a guest comes to it.

    /// Keeps other monitors from the image from here on. Whether the file system has locks, so that another user of the same image would have been
    /// found.
    ///
    /// # Errors
    /// [`BlockError::Locked`] where another monitor has it, and when the host refuses.
    pub fn lock(&self) -> Result<bool, BlockError> {
        self.image().lock_only()
    }

    /// The image, which was locked, is going to be filled: its content is undefined until [`DiskContent::filled`], and it is marked so.
    ///
    /// # Errors
    /// For an image whose bytes aren't the disk's.
    pub fn begin_filling(&self) -> Result<(), BlockError> {
        let file = self.file()?;
        self.image().completeness.0.store(FILLING, Ordering::Release);
        match rustix::fs::fsetxattr(file, MARK, b"being filled by a migration", XattrFlags::empty()) {
            Ok(()) => {}
            Err(error) => tracing::info!(
                "Disk {}: {} can't be marked as incomplete while it is filled ({error})",
                self.name(),
                self.path().display()
            ),
        }
        Ok(())
    }

    /// Puts bytes where the guest would find them.
    ///
    /// # Errors
    /// When the range isn't in the disk, or the host can't take them.
    pub fn fill(&self, offset: u64, data: &[u8]) -> Result<(), BlockError> {
        self.inside(offset, data.len() as u64)?;
        self.file()?.write_all_at(data, offset).map_err(host(self.path(), "filled"))
    }

    /// The same with zeroes, as a hole where there can be one.
    ///
    /// # Errors
    /// As [`DiskContent::fill`].
    pub fn fill_zeroes(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        self.inside(offset, len)?;
        let file = self.file()?;
        if self.image().can_punch {
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            match rustix::fs::fallocate(file, punch, offset, len) {
                Ok(()) => return Ok(()),
                // Not at this place (a device's own unit), or not at all.
                Err(Errno::OPNOTSUPP | Errno::INVAL) => {}
                Err(error) => return Err(host(self.path(), "filled with zeroes")(error.into())),
            }
        }
        let mut done = 0;
        while done < len {
            let piece = usize::try_from(len - done).unwrap_or(usize::MAX).min(ZEROES.len());
            file.write_all_at(&ZEROES[..piece], offset + done).map_err(host(self.path(), "filled"))?;
            done += piece as u64;
        }
        Ok(())
    }

    fn inside(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        if offset.checked_add(len).is_some_and(|end| end <= self.bytes()) {
            return Ok(());
        }
        let text = format!("{len} bytes at {offset} lie beyond its {} bytes", self.bytes());
        Err(host(self.path(), "filled")(io::Error::other(text)))
    }

    /// Makes durable what it was filled with.
    ///
    /// # Errors
    /// When the host can't.
    pub fn sync(&self) -> Result<(), BlockError> {
        self.file()?.sync_data().map_err(host(self.path(), "made durable"))
    }

    /// All is there, and durable: a guest may have it. The mark stays until [`DiskContent::in_use`].
    pub fn filled(&self) {
        self.image().completeness.0.store(FILLED, Ordering::Release);
    }

    /// The guest runs on it from here on: takes the mark away, if it was filled. A host that fails before the guest's first flush may
    /// leave the mark.
    pub fn in_use(&self) {
        let completeness = &self.image().completeness.0;
        if completeness.compare_exchange(FILLED, WHOLE, Ordering::AcqRel, Ordering::Acquire).is_err() {
            return;
        }
        let removed = self.file().map(|file| rustix::fs::fremovexattr(file, MARK));
        if let Ok(Err(error)) = removed
            && !matches!(error, Errno::NODATA | Errno::OPNOTSUPP | Errno::PERM)
        {
            tracing::warn!(
                "Disk {}: the mark of an incomplete image can't be taken from {} ({error}): setfattr -x {} {}",
                self.name(),
                self.path().display(),
                MARK.to_string_lossy(),
                self.path().display()
            );
        }
    }
}

/// A buffer for [`DiskContent::read`] whose bytes begin at a multiple of 4096, which every alignment that `O_DIRECT` asks for divides.
#[derive(Debug)]
pub struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// Of so many bytes, zero.
    #[must_use]
    pub fn new(len: usize) -> Self {
        let bytes = vec![0u8; len + 4095];
        let start = bytes.as_ptr().addr().next_multiple_of(4096) - bytes.as_ptr().addr();
        Self { bytes, start, len }
    }

    /// Its first bytes; at most as many as it has.
    pub fn first(&mut self, len: usize) -> &mut [u8] {
        let end = self.start + len.min(self.len);
        &mut self.bytes[self.start..end]
    }
}
