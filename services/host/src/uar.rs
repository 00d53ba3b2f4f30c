//! The doorbell pages of a PVRDMA function (BAR 2): a memfd that clients map into the guest.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use dma::{Dma, MappedMemory, MemoryRegion};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

/// The pages: guests store to them, the engine polls them. They can neither grow nor shrink.
#[derive(Debug)]
pub struct UarPages {
    fd: Arc<OwnedFd>,
    size: u64,
    memory: MappedMemory,
}

impl UarPages {
    /// `size` zero bytes, whole pages.
    ///
    /// # Errors
    /// When the kernel has no memory or descriptor left.
    pub fn new(size: u64) -> io::Result<Self> {
        let fd = memfd_create("uar", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, size)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let region = MemoryRegion::map(0, size, &fd, 0, true).map_err(io::Error::other)?;
        let memory = MappedMemory::default().with(region).map_err(io::Error::other)?;
        Ok(Self { fd: Arc::new(fd), size, memory })
    }

    /// The file, for clients.
    #[must_use]
    pub fn fd(&self) -> &Arc<OwnedFd> {
        &self.fd
    }

    /// Size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The pages; address 0 is the first byte of the BAR.
    #[must_use]
    pub fn memory(&self) -> &MappedMemory {
        &self.memory
    }

    /// Clears the pages: an earlier client's doorbells have no meaning for the next one.
    pub fn clear(&self) {
        // It is mapped and writable, so this can't fail.
        let _ = self.memory.zero(0, self.size);
    }
}

#[cfg(test)]
mod tests {
    use super::UarPages;
    use dma::Dma;

    #[test]
    fn what_a_client_stores_is_seen_and_nobody_can_shrink_the_pages() {
        let pages = UarPages::new(8192).unwrap();
        rustix::io::pwrite(pages.fd(), &7_u32.to_le_bytes(), 4096).unwrap();
        assert_eq!(pages.memory().swap_u32(4096, 0).unwrap(), 7);
        assert_eq!(pages.memory().load_u32(4096).unwrap(), 0);
        assert!(rustix::fs::ftruncate(pages.fd(), 4096).is_err());
        rustix::io::pwrite(pages.fd(), &[1; 4], 0).unwrap();
        pages.clear();
        assert_eq!(pages.memory().load_u32(0).unwrap(), 0);
    }
}
