//! Host memory other than RAM that is mapped into a guest.
#![allow(unsafe_code)] // mmap and munmap of whole files' parts.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags};

use super::{PAGE, SlotError};

/// Part of a file or memfd, mapped shared into this process while this value lives. A process that can shrink the file can make guest
/// accesses fail ([`crate::vcpu::VcpuEvent::Failed`]): require sealed memfds from other processes.
#[derive(Debug)]
pub struct HostMapping {
    address: NonNull<u8>,
    len: usize,
    writable: bool,
}

// SAFETY: it only returns the address and the length; code that dereferences the pointer is responsible for the access.
unsafe impl Send for HostMapping {}
// SAFETY: as above; the fields don't change after construction.
unsafe impl Sync for HostMapping {}

impl HostMapping {
    /// Maps `len` bytes at `offset` of `fd` (both whole pages), writable or not. The descriptor may be closed afterwards.
    pub fn new(
        name: &str,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        writable: bool,
    ) -> Result<Arc<Self>, SlotError> {
        let refused = |source: io::Error| SlotError::Refused {
            name: name.to_owned(),
            what: format!("mapped with {len:#x} bytes at file offset {offset:#x}"),
            source,
        };
        let bad = |reason| SlotError::Bad { name: name.to_owned(), start: offset, len, reason };
        if len == 0 || !len.is_multiple_of(PAGE) || !offset.is_multiple_of(PAGE) {
            return Err(bad(
                "offset and length in its file must be whole pages of 4096 bytes, and not empty",
            ));
        }
        let size = usize::try_from(len).map_err(|_| bad("it doesn't fit this process's address space"))?;
        let stat = rustix::fs::fstat(fd.as_fd()).map_err(|error| refused(error.into()))?;
        if rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::RegularFile {
            let file_size = u64::try_from(stat.st_size).unwrap_or(0);
            if offset.checked_add(len).is_none_or(|end| end > file_size) {
                return Err(bad("its file ends before that"));
            }
        }
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a new mapping at an address of the kernel's choice; no memory of this program changes.
        let address =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), size, protection, MapFlags::SHARED, fd, offset) }
                .map_err(|error| refused(error.into()))?;
        let address = NonNull::new(address.cast()).ok_or_else(|| refused(io::ErrorKind::Other.into()))?;
        Ok(Arc::new(Self { address, len: size, writable }))
    }

    /// Length in bytes; never 0.
    #[allow(clippy::len_without_is_empty)] // An empty mapping can't be made.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Whether this process (and so the guest) may write.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Address of the mapping. Valid while the mapping lives. The guest and other processes may change the contents at any time, so
    /// access them only with volatile or atomic operations.
    pub fn as_ptr(&self) -> *mut u8 {
        self.address.as_ptr()
    }
}

impl Drop for HostMapping {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `new`; memslots hold an `Arc` of it until KVM has removed them.
        let result = unsafe { rustix::mm::munmap(self.address.as_ptr().cast(), self.len) };
        if let Err(error) = result {
            tracing::error!(%error, address = ?self.address, len = self.len, "A mapping could not be released");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    #[test]
    fn only_whole_pages_within_the_file_can_be_mapped() {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 3 * PAGE).unwrap();
        let map = |offset, len| HostMapping::new("test", fd.as_fd(), offset, len, true).map(drop);
        map(PAGE, 2 * PAGE).unwrap();
        for (offset, len) in
            [(0, 0), (0, 1), (1, PAGE), (0, 4 * PAGE), (PAGE, 3 * PAGE), (u64::MAX - PAGE + 1, PAGE)]
        {
            assert!(map(offset, len).is_err(), "{offset:#x} {len:#x}");
        }
    }

    #[test]
    fn a_read_only_descriptor_can_not_be_mapped_writable() {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, PAGE).unwrap();
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
        let read_only = std::fs::File::open(path).unwrap();
        assert!(HostMapping::new("test", read_only.as_fd(), 0, PAGE, true).is_err());
        assert!(!HostMapping::new("test", read_only.as_fd(), 0, PAGE, false).unwrap().is_writable());
    }
}
