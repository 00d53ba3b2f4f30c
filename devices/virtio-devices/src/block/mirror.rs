//! A disk's content, apart from its queues. A migration's source reads it while the guest writes; its destination fills it before the guest
//! starts there.
//!
//! An image that is being filled has a mark (an extended attribute, where the file system has them) until the guest runs on it. While it
//! has the mark, no VM can use it as a disk: an incomplete image can't be distinguished from a complete one by its bytes.

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

/// The mark of an incomplete image.
const MARK: &std::ffi::CStr = c"user.causeway.incomplete";
/// Buffer for writing zeroes, where an image can't have holes.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// State of an image with regard to migrations.
#[derive(Debug, Default)]
pub(super) struct Completeness(AtomicU8);

/// Complete: it is a disk.
const WHOLE: u8 = 0;
/// Incomplete: an earlier migration ended while filling it.
const LEFT: u8 = 1;
/// A migration is filling it.
const FILLING: u8 = 2;
/// Filled, and still marked until the guest runs.
const FILLED: u8 = 3;

impl Completeness {
    /// The state of an image that was just opened.
    pub(super) fn of(file: &File) -> Self {
        let marked = rustix::fs::fgetxattr(file, MARK, &mut [0u8; 64][..]).is_ok();
        Self(AtomicU8::new(if marked { LEFT } else { WHOLE }))
    }

    /// Whether a guest may use it.
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

    /// Size of the guest's disk, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.image().size
    }

    /// Whether the disk is read-only for the guest.
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

    /// Starts the log of chunks that the guest writes.
    pub fn begin_noting(&self) {
        self.0.written.begin(self.bytes());
    }

    /// Stops the log.
    pub fn end_noting(&self) {
        self.0.written.end();
    }

    /// Returns and clears the chunks that the guest may have changed since the last call, or since [`DiskContent::begin_noting`]. A later
    /// read of them includes every earlier completed write; later writes are in the next set.
    ///
    /// # Errors
    /// When writes were in flight whose completion could not be awaited.
    pub fn take_written(&self) -> Result<Chunks, BlockError> {
        let lost = |_| {
            let text = "requests of the guest were in flight that could not be waited for";
            host(self.path(), "followed")(io::Error::other(text))
        };
        self.0.written.take().map_err(lost)
    }

    /// Chunks with data; the others are holes, which read as zero.
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
                // Without a map of holes all chunks may have data.
                Err(_) => return Ok(Chunks::all(bytes)),
            };
            let end = rustix::fs::seek(file, SeekFrom::Hole(start)).unwrap_or(bytes);
            if end <= start {
                return Ok(Chunks::all(bytes));
            }
            present.insert(start, end - start);
            // The rest of a chunk that is in the set needs no look-up.
            at = end.next_multiple_of(CHUNK);
        }
        Ok(present)
    }

    /// Reads bytes of the guest's disk.
    ///
    /// # Errors
    /// When the host can't read them.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), BlockError> {
        self.image().read(offset, into).map_err(host(self.path(), "read"))
    }

    // Before a guest uses it.

    /// Locks other monitors out. Returns whether the file system has locks, so that another user of the image would have been detected.
    ///
    /// # Errors
    /// [`BlockError::Locked`] if another monitor uses it, and when the host refuses.
    pub fn lock(&self) -> Result<bool, BlockError> {
        self.image().lock_only()
    }

    /// Begins to fill the image, which must be locked. Its content is undefined until [`DiskContent::filled`], and it gets the mark.
    ///
    /// # Errors
    /// For an image whose bytes aren't the disk's (qcow2).
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

    /// Writes bytes of the guest's disk.
    ///
    /// # Errors
    /// When the range isn't in the disk, or the host can't write it.
    pub fn fill(&self, offset: u64, data: &[u8]) -> Result<(), BlockError> {
        self.inside(offset, data.len() as u64)?;
        self.file()?.write_all_at(data, offset).map_err(host(self.path(), "filled"))
    }

    /// Zeroes bytes of the guest's disk, as a hole where possible.
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
                // Not possible at this offset (a device's granularity), or at all.
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

    /// Makes filled data durable.
    ///
    /// # Errors
    /// When the host can't.
    pub fn sync(&self) -> Result<(), BlockError> {
        self.file()?.sync_data().map_err(host(self.path(), "made durable"))
    }

    /// Records that the content is complete and durable: a guest may use it. The mark stays until [`DiskContent::in_use`].
    pub fn filled(&self) {
        self.image().completeness.0.store(FILLED, Ordering::Release);
    }

    /// Records that the guest runs on it: removes the mark, if it was filled. A host crash before the guest's first flush may leave the
    /// mark.
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

/// A buffer for [`DiskContent::read`], aligned to 4096 bytes, which satisfies every alignment of `O_DIRECT`.
#[derive(Debug)]
pub struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// A buffer of `len` zero bytes.
    #[must_use]
    pub fn new(len: usize) -> Self {
        let bytes = vec![0u8; len + 4095];
        let start = bytes.as_ptr().addr().next_multiple_of(4096) - bytes.as_ptr().addr();
        Self { bytes, start, len }
    }

    /// The first `len` bytes, limited to the buffer's length.
    pub fn first(&mut self, len: usize) -> &mut [u8] {
        let end = self.start + len.min(self.len);
        &mut self.bytes[self.start..end]
    }
}
