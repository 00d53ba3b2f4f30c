//! I/O that bypasses the host's page cache (`O_DIRECT`): required alignment, and unaligned requests.
//!
//! ```text
//! guest's request          0 ··········[=====guest's bytes=====]·············
//! blocks of the alignment  |-----------|-----------|-----------|-----------|
//! bounce buffer            ·······[first block] … [last block]···   read before a write that covers them partly
//! ```
//!
//! An unaligned request uses an aligned bounce buffer instead of the page cache. A dirty page of a cached write would be written back over
//! a later aligned write beside it. Such writes exclude others of the same blocks ([`super::gate`]).
#![allow(unsafe_code)] // statx with alignment fields and vectored writes with flags have no safe wrapper here.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::FileType;

use super::error::BlockError;
use super::image::host;
use super::request::SECTOR;

/// Alignments to probe, in bytes. The last one is used where reads prove nothing, as in a hole.
const TRIED: [usize; 4] = [512, 1024, 2048, 4096];
const SAFE_ALIGNMENT: usize = 4096;
/// Limit of a file system's alignment, and size of a bounce buffer, bytes.
pub(super) const BUFFER_BYTES: usize = 256 << 10;

/// An image opened with `O_DIRECT`, beside the file that uses the page cache.
pub(super) struct Direct {
    pub file: File,
    /// Alignment of buffers in bytes, a power of two.
    pub memory_alignment: usize,
    /// Alignment of offsets and lengths in bytes, a power of two and at least [`SECTOR`].
    pub offset_alignment: u64,
}

impl Direct {
    /// Opens the same file again. Uses the alignment that the kernel reports, else probes it by reads.
    pub(super) fn open(file: &File, path: &Path, read_only: bool) -> Result<Self, BlockError> {
        let link = format!("/proc/self/fd/{}", file.as_raw_fd());
        let direct = File::options()
            .read(true)
            .write(!read_only)
            .custom_flags(libc::O_DIRECT | libc::O_CLOEXEC)
            .open(link)
            .map_err(|source| match source.raw_os_error() {
                Some(libc::EINVAL) => BlockError::Direct {
                    path: path.to_owned(),
                    reason: "its file system has no I/O around the page cache (O_DIRECT)",
                },
                _ => host(path, "opened with O_DIRECT")(source),
            })?;
        let (memory, offset) = match reported(&direct) {
            Some(alignment) => alignment,
            None => probed(&direct).map_err(host(path, "read with O_DIRECT"))?,
        };
        let offset = offset.next_power_of_two().max(512);
        if offset > BUFFER_BYTES || memory > BUFFER_BYTES {
            let reason = "its file system asks for an alignment above 256 KiB";
            return Err(BlockError::Direct { path: path.to_owned(), reason });
        }
        Ok(Self {
            file: direct,
            memory_alignment: memory.next_power_of_two(),
            offset_alignment: u64::try_from(offset).unwrap_or(SECTOR),
        })
    }

    /// Whether the kernel accepts this request unchanged.
    pub(super) fn takes(&self, vecs: &[libc::iovec], offset: u64) -> bool {
        let unit = usize::try_from(self.offset_alignment).unwrap_or(usize::MAX);
        offset.is_multiple_of(self.offset_alignment)
            && vecs.iter().all(|vec| {
                vec.iov_base.addr().is_multiple_of(self.memory_alignment) && vec.iov_len.is_multiple_of(unit)
            })
    }

    /// Whether a read into `buffer` is aligned.
    pub(super) fn takes_buffer(&self, buffer: &[u8], offset: u64) -> bool {
        buffer.as_ptr().addr().is_multiple_of(self.memory_alignment)
            && offset.is_multiple_of(self.offset_alignment)
            && (buffer.len() as u64).is_multiple_of(self.offset_alignment)
    }

    /// The whole blocks around a range: their first byte and the byte after them.
    pub(super) fn blocks(&self, offset: u64, len: u64) -> (u64, u64) {
        let unit = self.offset_alignment;
        (offset / unit * unit, offset.saturating_add(len).next_multiple_of(unit))
    }

    /// Reads whole blocks from `offset`; fewer bytes at the end of the file. Returns the number of bytes.
    fn read_blocks(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.file.read_at(buffer, offset) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // A short read means the end of the file: blocks are read whole.
                result => return result,
            }
        }
    }
}

/// Alignment of memory and of offsets by statx; `None` on kernels and file systems that don't report it.
fn reported(file: &File) -> Option<(usize, usize)> {
    // SAFETY: an all-zero statx is a valid value of that plain C struct.
    let mut statx: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open, the path is an empty C string, `statx` is valid for writes.
    let result = unsafe {
        libc::statx(file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN, &raw mut statx)
    };
    let told = result == 0 && statx.stx_mask & libc::STATX_DIOALIGN != 0;
    let both =
        |memory: u32, offset: u32| Some((usize::try_from(memory).ok()?, usize::try_from(offset).ok()?));
    both(statx.stx_dio_mem_align, statx.stx_dio_offset_align)
        .filter(|(memory, offset)| told && *memory > 0 && *offset > 0)
}

/// The same by probing, as QEMU does: the first alignment with which a read works.
fn probed(file: &File) -> io::Result<(usize, usize)> {
    // A device's sector size is known; for a file, reads may prove nothing.
    let least = match file.metadata()?.file_type().is_block_device() {
        true => usize::try_from(rustix::fs::ioctl_blksszget(file)?).unwrap_or(SAFE_ALIGNMENT),
        false => 1,
    };
    let mut buffer = AlignedBuffer::new(2 * SAFE_ALIGNMENT, SAFE_ALIGNMENT);
    let bytes = buffer.bytes();
    let mut works = |shift: usize, len: usize| match file.read_at(&mut bytes[shift..shift + len], 0) {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(false),
        Err(error) => Err(error),
    };
    let offset = first_that(|len| works(0, len))?.max(least);
    let memory = first_that(|shift| works(shift, SAFE_ALIGNMENT))?;
    Ok((memory, offset))
}

/// The first of [`TRIED`] that works.
fn first_that(mut works: impl FnMut(usize) -> io::Result<bool>) -> io::Result<usize> {
    // One byte is never aligned: a read of it succeeds only if the storage isn't accessed.
    if works(1)? {
        return Ok(SAFE_ALIGNMENT);
    }
    for alignment in TRIED {
        if works(alignment)? {
            return Ok(alignment);
        }
    }
    Err(io::Error::other("no read with an alignment up to 4096 bytes works"))
}

/// Aligned memory for `O_DIRECT`.
pub(super) struct AlignedBuffer {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl AlignedBuffer {
    /// `len` zero bytes, aligned to `alignment` (a power of two).
    pub(super) fn new(len: usize, alignment: usize) -> Self {
        let memory = vec![0; len + alignment - 1];
        let address = memory.as_ptr().addr();
        Self { start: address.next_multiple_of(alignment) - address, memory, len }
    }

    pub(super) fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

/// The next part of an unaligned request.
pub(super) struct Piece {
    /// First byte of its blocks.
    begin: u64,
    /// Length of its blocks, bytes.
    span: usize,
    /// Offset of the guest's bytes in the blocks.
    skip: usize,
    /// Number of the guest's bytes.
    pub len: usize,
}

impl Piece {
    /// As many of `len` bytes at `offset` as a bounce buffer holds.
    pub(super) fn new(direct: &Direct, offset: u64, len: u64) -> Self {
        let (begin, _) = direct.blocks(offset, 0);
        let skip = usize::try_from(offset - begin).unwrap_or(0);
        let room = BUFFER_BYTES - skip;
        let len = usize::try_from(len).unwrap_or(usize::MAX).min(room);
        let (_, end) = direct.blocks(offset, len as u64);
        Self { begin, span: usize::try_from(end - begin).unwrap_or(BUFFER_BYTES), skip, len }
    }

    /// The guest's bytes in the buffer.
    fn place(&self) -> std::ops::Range<usize> {
        self.skip..self.skip + self.len
    }

    /// Reads it. Returns the guest's bytes: fewer than [`Piece::len`] at the end of the file.
    pub(super) fn read<'a>(&self, direct: &Direct, buffer: &'a mut [u8]) -> io::Result<&'a [u8]> {
        let buffer = &mut buffer[..self.span];
        let came = direct.read_blocks(self.begin, buffer)?;
        Ok(&buffer[self.skip.min(came)..(self.skip + self.len).min(came)])
    }

    /// Writes the bytes that `fill` puts in the guest's place, after reading the rest of the first and last block. Returns how many of the
    /// guest's bytes were written. No other request may write the blocks concurrently.
    pub(super) fn write(
        &self,
        direct: &Direct,
        cached: &File,
        durable: bool,
        buffer: &mut [u8],
        fill: impl FnOnce(&mut [u8]) -> io::Result<()>,
    ) -> io::Result<usize> {
        let buffer = &mut buffer[..self.span];
        let state = rustix::fs::fstat(cached)?;
        let is_file = FileType::from_raw_mode(state.st_mode) == FileType::RegularFile;
        if is_file && self.begin + self.span as u64 > u64::try_from(state.st_size).unwrap_or(0) {
            // A whole block would make the file longer than the disk. The page is clean again before other requests may write it.
            let bytes = &mut buffer[self.place()];
            fill(bytes)?;
            let offset = self.begin + self.skip as u64;
            return write_at(cached, bytes, offset, libc::RWF_DSYNC);
        }
        let unit = usize::try_from(direct.offset_alignment).unwrap_or(BUFFER_BYTES);
        let last = self.span - unit;
        if self.skip > 0 {
            self.read_block(direct, buffer, 0, unit)?;
        }
        if self.skip + self.len < self.span && (last > 0 || self.skip == 0) {
            self.read_block(direct, buffer, last, unit)?;
        }
        fill(&mut buffer[self.place()])?;
        let flags = if durable { libc::RWF_DSYNC } else { 0 };
        let written = write_at(&direct.file, buffer, self.begin, flags)?;
        Ok(written.saturating_sub(self.skip).min(self.len))
    }

    fn read_block(&self, direct: &Direct, buffer: &mut [u8], at: usize, unit: usize) -> io::Result<()> {
        let block = &mut buffer[at..at + unit];
        let came = direct.read_blocks(self.begin + at as u64, block)?;
        block[came..].fill(0);
        Ok(())
    }
}

fn write_at(file: &File, bytes: &[u8], offset: u64, flags: libc::c_int) -> io::Result<usize> {
    let vec = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let offset = i64::try_from(offset).map_err(io::Error::other)?;
    // SAFETY: the one entry points to `bytes`, which the kernel only reads, and which live until the return.
    let written = unsafe { libc::pwritev2(file.as_raw_fd(), &raw const vec, 1, offset, flags) };
    usize::try_from(written).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Probing must not yield less than the kernel reports: requests of that alignment would fail.
    #[test]
    fn probing_agrees_with_what_the_kernel_reports() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.raw");
        std::fs::write(&path, vec![7; 64 << 10]).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        file.sync_all().unwrap();
        let direct = match Direct::open(&file, &path, false) {
            Ok(direct) => direct,
            Err(error @ BlockError::Direct { .. }) => {
                return facilities::missing(facilities::Facility::DirectIo, error);
            }
            Err(error) => panic!("{error}"),
        };
        let (memory, offset) = probed(&direct.file).unwrap();
        assert!(offset as u64 >= direct.offset_alignment && offset <= SAFE_ALIGNMENT, "{offset}");
        assert!(memory >= direct.memory_alignment.min(512) && memory <= SAFE_ALIGNMENT, "{memory}");
        // In a hole, reads prove nothing.
        let hole = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path.with_extension("hole"))
            .unwrap();
        hole.set_len(64 << 10).unwrap();
        let hole = Direct::open(&hole, &path, false).unwrap();
        let (_, of_hole) = probed(&hole.file).unwrap();
        assert!(of_hole as u64 >= hole.offset_alignment, "{of_hole}");
    }

    #[test]
    fn pieces_cover_a_request_and_fit_the_buffer() {
        let file = File::open("/dev/null").unwrap();
        for unit in [512u64, 4096, 65_536] {
            let direct =
                Direct { file: file.try_clone().unwrap(), memory_alignment: 512, offset_alignment: unit };
            for (offset, len) in [(0, 512), (512, 512), (3584, 1024), (512, 4 << 20), (65_024, 300 << 10)] {
                let (mut at, end) = (offset, offset + len);
                while at < end {
                    let piece = Piece::new(&direct, at, end - at);
                    assert!(piece.len > 0 && piece.span <= BUFFER_BYTES);
                    assert!(piece.begin.is_multiple_of(unit) && (piece.span as u64).is_multiple_of(unit));
                    assert_eq!(piece.begin + piece.skip as u64, at);
                    assert!(piece.place().end <= piece.span);
                    at += piece.len as u64;
                }
                assert_eq!(at, end);
            }
        }
    }
}
