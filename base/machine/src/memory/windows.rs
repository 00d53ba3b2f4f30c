//! Windows: memory of other VMs that a guest sees read-only. The guest's devices may read it too, so that a disk can write a neighbour's
//! buffer without a copy. The mapping has no write permission: a store by this process would kill it. So devices check the target of each
//! write with [`is_writable`].

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, PoisonError};

use rustix::io::fcntl_dupfd_cloexec;
use vm_memory::mmap::{MmapRegionBuilder, MmapRegionError, NewBitmap};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap};

use super::{
    Address, AtomicBitmap, FileOffset, GuestAddress, GuestAddressSpace, GuestMemory, GuestMemorySpace,
};

/// A window can't be made readable for devices.
#[derive(Debug, thiserror::Error)]
#[error("Memory of {size:#x} bytes at {start:#x} could not be {what} for devices to read")]
pub struct WindowError {
    /// Guest-physical address.
    pub start: u64,
    /// Size in bytes.
    pub size: u64,
    /// What was tried.
    pub what: &'static str,
    /// Why it failed.
    #[source]
    pub source: io::Error,
}

/// Lets devices read the `size` bytes at `offset` of `file` at the guest-physical address `start`. A snapshot of the space that a device
/// took before doesn't include them. [`unmap_window`] removes the window.
///
/// # Errors
/// When the range can't be mapped, or overlaps other memory.
pub fn map_window(
    space: &GuestMemorySpace,
    start: u64,
    file: BorrowedFd<'_>,
    offset: u64,
    size: u64,
) -> Result<(), WindowError> {
    let failed = |what, source| WindowError { start, size, what, source };
    let stat = rustix::fs::fstat(file).map_err(|error| failed("looked at", error.into()))?;
    let held = u64::try_from(stat.st_size).unwrap_or(0);
    if offset.checked_add(size).is_none_or(|end| end > held) {
        return Err(failed("mapped", io::Error::other(format!("its file has {held:#x} bytes only"))));
    }
    let own = fcntl_dupfd_cloexec(file.as_fd(), 0).map_err(|error| failed("kept open", error.into()))?;
    let len = usize::try_from(size).map_err(|error| failed("mapped", io::Error::other(error)))?;
    let mapping = MmapRegionBuilder::new_with_bitmap(len, AtomicBitmap::with_len(len))
        .with_mmap_prot(libc::PROT_READ)
        .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
        .with_file_offset(FileOffset::new(own.into(), offset))
        .build()
        .map_err(|error| match error {
            MmapRegionError::Mmap(source) => failed("mapped", source),
            other => failed("mapped", io::Error::other(other)),
        })?;
    let region = GuestRegionMmap::new(mapping, GuestAddress(start))
        .ok_or_else(|| failed("placed", io::Error::other("it ends beyond the address space")))?;
    let guard = space.lock().unwrap_or_else(PoisonError::into_inner);
    let with = space.memory().insert_region(Arc::new(region));
    guard.replace(with.map_err(|error| failed("placed", io::Error::other(error)))?);
    Ok(())
}

/// Removes a window of [`map_window`]. It stays mapped until in-flight requests release their snapshots.
///
/// # Errors
/// When there is no such window.
pub fn unmap_window(space: &GuestMemorySpace, start: u64, size: u64) -> Result<(), WindowError> {
    let guard = space.lock().unwrap_or_else(PoisonError::into_inner);
    let without = space.memory().remove_region(GuestAddress(start), size);
    let (without, _) = without.map_err(|error| WindowError {
        start,
        size,
        what: "taken back",
        source: io::Error::other(error),
    })?;
    guard.replace(without);
    Ok(())
}

/// Whether all `len` bytes at `address` are RAM of the guest itself, which devices may write. They may extend over several adjacent
/// regions. `false` for `len` 0.
#[must_use]
pub fn is_writable(memory: &GuestMemory, address: u64, len: u64) -> bool {
    let Some(end) = address.checked_add(len) else { return false };
    let mut at = address;
    while at < end {
        let Some(region) = memory.find_region(GuestAddress(at)) else { return false };
        if region.prot() & libc::PROT_WRITE == 0 {
            return false;
        }
        let Some(next) = region.last_addr().raw_value().checked_add(1) else { return len > 0 };
        at = next;
    }
    len > 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use vm_memory::Bytes;

    const PAGE: u64 = 4096;
    const WINDOW: u64 = 1 << 39;

    fn space() -> GuestMemorySpace {
        let ranges =
            [(GuestAddress(0), 0x2000), (GuestAddress(0x2000), 0x1000), (GuestAddress(0x10000), 0x1000)];
        GuestMemorySpace::new(GuestMemory::from_ranges(&ranges).unwrap())
    }

    /// A window can be read and isn't writable; a removed one stays mapped for an in-flight request.
    #[test]
    fn a_window_is_read_only_and_stays_for_those_who_use_it() {
        let fd = memfd_create("window", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 3 * PAGE).unwrap();
        rustix::io::pwrite(&fd, b"theirs", PAGE + 8).unwrap();
        let space = space();
        map_window(&space, WINDOW, fd.as_fd(), PAGE, 2 * PAGE).unwrap();
        let busy = space.memory();
        let mut seen = [0; 6];
        busy.read_slice(&mut seen, GuestAddress(WINDOW + 8)).unwrap();
        assert_eq!(&seen, b"theirs");
        assert!(busy.check_range(GuestAddress(WINDOW), 0x2000));
        assert!(!is_writable(&busy, WINDOW, 8) && !is_writable(&busy, WINDOW + PAGE, PAGE));

        assert!(map_window(&space, WINDOW, fd.as_fd(), 0, PAGE).is_err(), "something is there");
        assert!(
            map_window(&space, WINDOW + (1 << 30), fd.as_fd(), PAGE, 3 * PAGE).is_err(),
            "its file is shorter"
        );
        assert!(unmap_window(&space, WINDOW, PAGE).is_err());
        unmap_window(&space, WINDOW, 2 * PAGE).unwrap();
        assert!(!space.memory().check_range(GuestAddress(WINDOW), 1));
        busy.read_slice(&mut seen, GuestAddress(WINDOW + 8)).unwrap();
        assert_eq!(&seen, b"theirs");
    }

    #[test]
    fn ram_is_writable_whole_or_not_at_all() {
        let memory = space().memory().clone();
        for (address, len, wanted) in [
            (0, 0x3000, true),
            (0x1fff, 2, true),
            (0, 0x3001, false),
            (0x2fff, 2, false),
            (0x10000, 0x1000, true),
            (0x10fff, 2, false),
            (0, 0, false),
            (0x5000, 1, false),
            (u64::MAX, 2, false),
        ] {
            assert_eq!(is_writable(&memory, address, len), wanted, "{address:#x} {len:#x}");
        }
    }
}
