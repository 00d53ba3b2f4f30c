//! A client's memory: the table of its mappings, and changes to it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dma::arriving::Bitmap;
use dma::{Dma as _, MapError, MappedMemory, MemoryRegion};
use rustix::io::Errno;
use telemetry::guest_log::GuestLog;
use vfio_user_protocol::device::DmaMapping;

use super::descriptors::{Expected, accept};

/// Limit of ranges of a client. A guest has two for each of at most 64 NUMA nodes. Without a limit one client could exhaust the mappings
/// that the kernel permits this process, and make every access of the engine a long search.
const MOST_RANGES: usize = 128;

/// Timeout for not-present memory without which a device can't continue.
const PAGE_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval of checking whether it is present.
const LOOK_EVERY: Duration = Duration::from_micros(200);

/// Waits until all of some ranges (addresses and lengths) of a table is present.
///
/// # Errors
/// When it takes longer than 60 s.
pub fn await_memory(table: &MappedMemory, mut ranges: Vec<(u64, u64)>) -> io::Result<()> {
    let began = Instant::now();
    loop {
        ranges.retain(|(address, len)| table.awaits(*address, *len, false));
        if ranges.is_empty() {
            return Ok(());
        }
        if began.elapsed() > PAGE_TIMEOUT {
            return Err(Errno::TIMEDOUT.into());
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// The table. Only one connection thread changes it. `publish` passes each new table to its users, which must have dropped the last one
/// when it returns.
#[derive(Debug, Default)]
pub struct ClientMemory {
    table: Mutex<MappedMemory>,
    log: GuestLog,
}

impl ClientMemory {
    /// Maps a range, and publishes the table.
    ///
    /// # Errors
    /// When the range has no file, can't be mapped, exceeds the limit, or `publish` fails; the old table stays in effect then.
    pub fn map(
        &self,
        mapping: &DmaMapping,
        publish: impl FnOnce(MappedMemory) -> io::Result<()>,
    ) -> io::Result<()> {
        let Some(file) = &mapping.fd else {
            telemetry::guest_warn!(
                self.log,
                address = mapping.address,
                size = mapping.size,
                "A client offers memory without a file; guest RAM must be a sealed memfd"
            );
            return Err(Errno::NOTSUP.into());
        };
        if !mapping.readable {
            return Err(Errno::INVAL.into());
        }
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if table.regions().len() >= MOST_RANGES {
            telemetry::guest_warn!(self.log, most = MOST_RANGES, "A client maps more ranges than it may");
            return Err(Errno::NOSPC.into());
        }
        let region =
            MemoryRegion::map(mapping.address, mapping.size, file, mapping.fd_offset, mapping.writable)
                .and_then(|region| table.with(region));
        let new = region.map_err(|error| {
            telemetry::guest_warn!(
                self.log,
                error = &error as &dyn std::error::Error,
                "A client's memory can't be mapped"
            );
            match error {
                MapError::Kernel { source, .. } => io::Error::from(source),
                MapError::Overlap { .. } => Errno::EXIST.into(),
                _ => Errno::INVAL.into(),
            }
        })?;
        publish(new.clone())?;
        *table = new;
        Ok(())
    }

    /// Removes a range; it is unmapped when this returns.
    ///
    /// # Errors
    /// When `publish` fails.
    pub fn unmap(
        &self,
        address: u64,
        size: u64,
        publish: impl FnOnce(MappedMemory) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let (new, gone) = table.without(address, size);
        if gone == 0 {
            return Err(Errno::NOENT.into());
        }
        publish(new.clone())?;
        *table = new;
        Ok(())
    }

    /// The current table.
    #[must_use]
    pub fn table(&self) -> MappedMemory {
        self.table.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Enables or disables the dirty log. A concurrent write may or may not be marked.
    pub fn set_dirty_log(&self, on: bool) {
        self.table().set_dirty_log(on);
    }

    /// Returns and clears the written pages of a range: see [`MappedMemory::take_dirty`].
    ///
    /// # Errors
    /// When the range is invalid.
    pub fn take_dirty(&self, address: u64, size: u64) -> io::Result<Vec<u64>> {
        self.table().take_dirty(address, size).ok_or_else(|| Errno::INVAL.into())
    }

    /// Begins post-copy for part of the client's memory: from here on only present pages are accessed. `wishes` must be one end of a Unix
    /// stream socket.
    ///
    /// # Errors
    /// When `wishes` is anything else, a range is invalid, its bitmap can't be mapped, or the kernel refuses.
    pub fn set_late(
        &self,
        ranges: &[(u64, u64, u64)],
        bitmap: &OwnedFd,
        wishes: OwnedFd,
    ) -> io::Result<MappedMemory> {
        let table = self.table();
        let wishes = Arc::new(self.accept(wishes, Expected::UnixStream, "requests for pages")?);
        for &(address, size, offset) in ranges {
            let late = Bitmap::map(bitmap, offset, size)
                .and_then(|bitmap| table.set_late((address, size), bitmap, Arc::clone(&wishes)));
            late.map_err(|error| {
                telemetry::guest_warn!(
                    self.log,
                    error = &error as &dyn std::error::Error,
                    "A client's memory that is still to come can't be waited for"
                );
                io::Error::from(Errno::INVAL)
            })?;
        }
        Ok(table)
    }

    /// Accepts a descriptor that the client passes with its memory.
    ///
    /// # Errors
    /// When it is of another kind.
    pub(crate) fn accept(
        &self,
        fd: OwnedFd,
        expected: Expected,
        purpose: &'static str,
    ) -> io::Result<OwnedFd> {
        accept(fd, expected, purpose).map_err(|error| {
            telemetry::guest_warn!(
                self.log,
                error = &error as &dyn std::error::Error,
                "A client's memory that is still to come can't be waited for"
            );
            Errno::INVAL.into()
        })
    }

    /// Removes everything; the caller has taken the table from its users.
    pub fn clear(&self) {
        *self.table.lock().unwrap_or_else(PoisonError::into_inner) = MappedMemory::default();
    }

    /// Number of ranges and total size in bytes.
    #[must_use]
    pub fn size(&self) -> (usize, u64) {
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        (table.regions().len(), table.regions().iter().map(|region| region.size()).sum())
    }

    /// Whether an address is mapped.
    #[must_use]
    pub fn contains(&self, address: u64) -> bool {
        let table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        table.regions().iter().any(|region| address.wrapping_sub(region.address()) < region.size())
    }
}

#[cfg(test)]
mod tests {
    use super::ClientMemory;
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    use vfio_user_protocol::device::DmaMapping;

    fn mapping(address: u64, sealed: bool) -> DmaMapping {
        let fd = memfd_create("ram", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, 8192).unwrap();
        if sealed {
            fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        }
        DmaMapping { address, size: 8192, readable: true, writable: true, fd: Some(fd), fd_offset: 0 }
    }

    #[test]
    fn every_change_publishes_the_whole_table() {
        let memory = ClientMemory::default();
        let mut published = Vec::new();
        memory
            .map(&mapping(0, true), |table| {
                published.push(table.regions().len());
                Ok(())
            })
            .unwrap();
        memory
            .map(&mapping(0x10000, true), |table| {
                published.push(table.regions().len());
                Ok(())
            })
            .unwrap();
        assert!(memory.contains(0x10FFF) && !memory.contains(0x12000));
        memory
            .unmap(0, 8192, |table| {
                published.push(table.regions().len());
                Ok(())
            })
            .unwrap();
        assert_eq!((published, memory.size()), (vec![1, 2, 1], (1, 8192)));
        assert!(memory.unmap(0, 8192, |_| Ok(())).is_err());
    }

    #[test]
    fn ranges_are_bounded() {
        let memory = ClientMemory::default();
        let map = |index: usize| memory.map(&mapping(index as u64 * 8192, true), |_| Ok(()));
        assert!((0..super::MOST_RANGES).all(|index| map(index).is_ok()));
        assert!(map(super::MOST_RANGES).is_err());
        memory.unmap(0, 8192, |_| Ok(())).unwrap();
        map(super::MOST_RANGES).unwrap();
    }

    #[test]
    fn memory_that_could_shrink_or_has_no_file_is_refused_and_a_failed_publication_changes_nothing() {
        let memory = ClientMemory::default();
        assert!(memory.map(&mapping(0, false), |_| Ok(())).is_err());
        assert!(memory.map(&DmaMapping { fd: None, ..mapping(0, true) }, |_| Ok(())).is_err());
        assert!(memory.map(&mapping(0, true), |_| Err(rustix::io::Errno::IO.into())).is_err());
        assert_eq!(memory.size(), (0, 0));
    }
}
