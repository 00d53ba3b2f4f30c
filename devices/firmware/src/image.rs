//! Sources of kernel and initrd bytes: a file, or a byte slice in tests and fuzzers.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use machine::memory::{Bytes, GuestAddress, GuestMemory};

use crate::kernel::KernelError;

/// Random access to an image. A file that shrinks during a load causes an error, and no memory-unsafe access.
pub trait Image {
    /// Returns the path, for error messages.
    fn name(&self) -> String;
    /// Returns the length in bytes.
    fn len(&self) -> u64;
    /// Returns whether the length is 0.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Fills `buffer` from `offset`.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;
    /// Copies `len` bytes from `offset` to guest address `target`, which must be RAM, without an intermediate buffer.
    fn read_to_guest(&self, offset: u64, memory: &GuestMemory, target: u64, len: u64) -> io::Result<()>;
}

/// System calls of loading from files, for the loading thread's seccomp filter.
pub const SYSCALLS: &[i64] = &[libc::SYS_lseek, libc::SYS_pread64, libc::SYS_read];

/// An image in a regular file. Uses the file's cursor, so it must not be shared while loading.
#[derive(Debug)]
pub struct ImageFile {
    path: PathBuf,
    file: File,
    len: u64,
}

impl ImageFile {
    /// Opens `path` for reading. `role` names it in errors: "kernel" or "initrd".
    pub fn open(path: &Path, role: &'static str) -> Result<Self, KernelError> {
        let error = |source| KernelError::Open { role, path: path.to_owned(), source };
        let file = File::open(path).map_err(error)?;
        Self::from_file(file, path, role)
    }

    /// Wraps a file that is already open. `path` is for error messages only.
    pub fn from_file(file: File, path: &Path, role: &'static str) -> Result<Self, KernelError> {
        let error = |source| KernelError::Open { role, path: path.to_owned(), source };
        let meta = file.metadata().map_err(error)?;
        if !meta.is_file() {
            let what = if meta.is_dir() { "a directory" } else { "not a regular file" };
            return Err(KernelError::NotAFile { role, path: path.to_owned(), what });
        }
        Ok(Self { path: path.to_owned(), file, len: meta.len() })
    }
}

impl Image for ImageFile {
    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buffer, offset)
    }

    // Writes through the mapping, so that page faults give RAM its huge pages. `sendfile` into the memfd takes half the
    // time with small pages, but would leave small pages behind.
    fn read_to_guest(&self, offset: u64, memory: &GuestMemory, target: u64, len: u64) -> io::Result<()> {
        let len = usize::try_from(len).map_err(io::Error::other)?;
        (&self.file).seek(SeekFrom::Start(offset))?;
        memory
            .read_exact_volatile_from(GuestAddress(target), &mut (&self.file), len)
            .map_err(io::Error::other)
    }
}

/// An image in memory.
#[derive(Debug, Clone, Copy)]
pub struct ImageBytes<'a>(pub &'a [u8]);

impl ImageBytes<'_> {
    fn slice(&self, offset: u64, len: u64) -> io::Result<&[u8]> {
        let range = || {
            let start = usize::try_from(offset).ok()?;
            let end = start.checked_add(usize::try_from(len).ok()?)?;
            self.0.get(start..end)
        };
        range().ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))
    }
}

impl Image for ImageBytes<'_> {
    fn name(&self) -> String {
        "(bytes)".to_owned()
    }

    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        buffer.copy_from_slice(self.slice(offset, buffer.len() as u64)?);
        Ok(())
    }

    fn read_to_guest(&self, offset: u64, memory: &GuestMemory, target: u64, len: u64) -> io::Result<()> {
        memory.write_slice(self.slice(offset, len)?, GuestAddress(target)).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use machine::memory::{Bitmap, GuestMemoryBackend, GuestMemoryRegion};
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    fn image(bytes: &[u8]) -> ImageFile {
        let mut file = File::from(memfd_create("image-test", MemfdFlags::CLOEXEC).unwrap());
        file.write_all(bytes).unwrap();
        ImageFile::from_file(file, Path::new("test"), "kernel").unwrap()
    }

    /// Two adjacent regions.
    fn memory() -> GuestMemory {
        let regions = [(GuestAddress(0), 0x1_0000), (GuestAddress(0x1_0000), 0x1_0000)];
        GuestMemory::from_ranges(&regions).unwrap()
    }

    #[test]
    fn files_and_bytes_give_the_same_memory_across_regions_and_mark_it_dirty() {
        let bytes: Vec<u8> = (0..0x1_2345u32).map(|n| n.to_le_bytes()[0] ^ n.to_le_bytes()[1]).collect();
        let (file, slice) = (image(&bytes), ImageBytes(&bytes));
        let images: [&dyn Image; 2] = [&file, &slice];
        for image in images {
            let memory = memory();
            image.read_to_guest(0x123, &memory, 0x5432, 0x1_2000).unwrap();
            let mut found = vec![0; 0x2_0000];
            memory.read_slice(&mut found, GuestAddress(0)).unwrap();
            let mut expected = vec![0; 0x2_0000];
            expected[0x5432..0x1_7432].copy_from_slice(&bytes[0x123..0x1_2123]);
            assert!(found == expected);
            let mut dirty = memory.iter().map(|region| {
                (0..16).map(|page| u8::from(region.bitmap().dirty_at(page * 4096))).collect::<Vec<_>>()
            });
            assert_eq!(dirty.next().unwrap(), [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]);
            assert_eq!(dirty.next().unwrap(), [1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
        }
    }

    #[test]
    fn a_file_that_is_too_short_is_an_error() {
        assert!(image(b"kernel").read_to_guest(0, &memory(), 0, 7).is_err());
        assert!(ImageBytes(b"kernel").read_to_guest(0, &memory(), 0, 7).is_err());
    }
}
