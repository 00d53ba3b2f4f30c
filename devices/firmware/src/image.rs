//! Where kernel and initrd bytes come from: a file, or a byte slice in tests and fuzzers.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use machine::memory::{
    Address, Bitmap, Bytes, GuestAddress, GuestMemory, GuestMemoryBackend, GuestMemoryRegion, GuestUsize,
};
use rustix::io::Errno;

use crate::kernel::KernelError;

/// Random access to an image. Implementations never change while they are being loaded as far as
/// memory safety goes: a file that shrinks meanwhile ends in an error.
pub trait Image {
    /// Name for error texts: the path.
    fn name(&self) -> String;
    /// Bytes.
    fn len(&self) -> u64;
    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Fills `buffer` from `offset`.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;
    /// Copies `len` bytes from `offset` straight to guest address `target`, which must be RAM.
    fn read_to_guest(&self, offset: u64, memory: &GuestMemory, target: u64, len: u64) -> io::Result<()>;
    /// The same for memory that nobody has touched yet, where there may be a faster way.
    fn read_to_fresh_guest(
        &self,
        offset: u64,
        memory: &GuestMemory,
        target: u64,
        len: u64,
    ) -> io::Result<()> {
        self.read_to_guest(offset, memory, target, len)
    }
}

/// System calls of loading from files, for the seccomp filter of a thread that does.
pub const SYSCALLS: &[i64] = &[libc::SYS_lseek, libc::SYS_pread64, libc::SYS_read, libc::SYS_sendfile];

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

    /// Takes a file that is already open; `path` is for error texts only.
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

    fn read_to_guest(&self, offset: u64, memory: &GuestMemory, target: u64, len: u64) -> io::Result<()> {
        let len = usize::try_from(len).map_err(io::Error::other)?;
        (&self.file).seek(SeekFrom::Start(offset))?;
        memory
            .read_exact_volatile_from(GuestAddress(target), &mut (&self.file), len)
            .map_err(io::Error::other)
    }

    fn read_to_fresh_guest(
        &self,
        offset: u64,
        memory: &GuestMemory,
        target: u64,
        len: u64,
    ) -> io::Result<()> {
        let done = self.send_to_guest(offset, memory, target, len)?;
        match len - done {
            0 => Ok(()),
            rest => self.read_to_guest(offset + done, memory, target + done, rest),
        }
    }
}

impl ImageFile {
    /// Copies from the file's pages to those of the memfd behind guest memory, within the kernel. Reading
    /// through the mapping would fault on every page first, which takes as long again. Returns how many
    /// bytes were copied: less than `len` where memory has no file, or one that can't be written so (huge
    /// pages).
    fn send_to_guest(&self, offset: u64, memory: &GuestMemory, target: u64, len: u64) -> io::Result<u64> {
        let mut done = 0;
        while done < len {
            let address = GuestAddress(target + done);
            let Some(region) = memory.find_region(address) else { break };
            let Some(backing) = region.file_offset() else { break };
            let start = address.unchecked_offset_from(region.start_addr());
            let part = (len - done).min(region.len() - start);
            backing.file().seek(SeekFrom::Start(backing.start() + start))?;
            let mut from = offset + done;
            let count = usize::try_from(part).map_err(io::Error::other)?;
            match rustix::fs::sendfile(backing.file(), &self.file, Some(&mut from), count) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(sent) => {
                    region.bitmap().mark_dirty(usize::try_from(start).map_err(io::Error::other)?, sent);
                    done += sent as GuestUsize;
                }
                Err(Errno::INTR) => {}
                Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => break,
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(done)
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

    use machine::memory::FileOffset;
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    fn memfd(bytes: &[u8]) -> File {
        let mut file = File::from(memfd_create("image-test", MemfdFlags::CLOEXEC).unwrap());
        file.write_all(bytes).unwrap();
        file
    }

    fn image(bytes: &[u8]) -> ImageFile {
        ImageFile::from_file(memfd(bytes), Path::new("test"), "kernel").unwrap()
    }

    /// Two regions side by side; the first 64 KiB into its file.
    fn memory() -> GuestMemory {
        let region = |address: u64, offset: u64| {
            let file = memfd(&[]);
            file.set_len(0x3_0000).unwrap();
            (GuestAddress(address), 0x1_0000, Some(FileOffset::new(file, offset)))
        };
        GuestMemory::from_ranges_with_files([region(0, 0x1_0000), region(0x1_0000, 0)]).unwrap()
    }

    #[test]
    fn both_ways_of_reading_give_the_same_memory_and_mark_it_dirty() {
        let bytes: Vec<u8> = (0..0x1_2345u32).map(|n| n.to_le_bytes()[0] ^ n.to_le_bytes()[1]).collect();
        let image = image(&bytes);
        for fresh in [false, true] {
            let memory = memory();
            let (offset, target, len) = (0x123, 0x5432, 0x1_2000);
            if fresh {
                assert_eq!(image.send_to_guest(offset, &memory, target, len).unwrap(), len);
            } else {
                image.read_to_guest(offset, &memory, target, len).unwrap();
            }
            let mut found = vec![0; 0x2_0000];
            memory.read_slice(&mut found, GuestAddress(0)).unwrap();
            let mut expected = vec![0; 0x2_0000];
            expected[0x5432..0x1_7432].copy_from_slice(&bytes[0x123..0x1_2123]);
            assert!(found == expected, "fresh: {fresh}");
            let mut dirty = memory.iter().map(|region| {
                (0..16).map(|page| u8::from(region.bitmap().dirty_at(page * 4096))).collect::<Vec<_>>()
            });
            assert_eq!(dirty.next().unwrap(), [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]);
            assert_eq!(dirty.next().unwrap(), [1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
        }
    }

    #[test]
    fn memory_without_a_file_is_read_into_all_the_same() {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 0x1_0000)]).unwrap();
        image(b"kernel").read_to_fresh_guest(1, &memory, 0x100, 5).unwrap();
        let mut found = [0; 5];
        memory.read_slice(&mut found, GuestAddress(0x100)).unwrap();
        assert_eq!(&found, b"ernel");
    }

    #[test]
    fn a_file_that_is_too_short_is_an_error_either_way() {
        let (memory, image) = (memory(), image(b"kernel"));
        assert!(image.read_to_guest(0, &memory, 0, 7).is_err());
        assert!(image.read_to_fresh_guest(0, &memory, 0, 7).is_err());
        assert!(ImageBytes(b"kernel").read_to_guest(0, &memory, 0, 7).is_err());
    }
}
