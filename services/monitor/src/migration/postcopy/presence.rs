//! Presence map of post-copy memory for the host daemon, which also has the VM's memory mapped. The daemon can't block on a not-present
//! page as this process's threads do: its access would make the page zero for good ([`dma::arriving`]).

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dma::MapError;
use dma::arriving::{Bitmap, bitmap_size, wished};
use machine::slots::DirtyPages;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// Bytes of a page, as `u64`.
const STEP: u64 = 4096;

/// The presence map can't be created.
#[derive(Debug, thiserror::Error)]
pub enum PresenceError {
    /// The host refused an operation.
    #[error("The map of not-present pages for the host's daemon could not be {what}")]
    Refused {
        /// What was tried.
        what: &'static str,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
    /// The map's memory can't be mapped.
    #[error("The map of not-present pages for the host's daemon could not be mapped")]
    Mapped(
        #[from]
        #[source]
        MapError,
    ),
}

fn refused(what: &'static str) -> impl FnOnce(Errno) -> PresenceError {
    move |source| PresenceError::Refused { what, source: source.into() }
}

/// One range of RAM.
#[derive(Debug)]
struct Range {
    address: u64,
    size: u64,
    /// Offset of its bitmap in the file, in bytes.
    offset: u64,
    bitmap: Bitmap,
}

/// Which pages are present, as the daemon sees it, and which of them it has requested.
#[derive(Debug)]
pub struct Presence {
    file: OwnedFd,
    ranges: Vec<Range>,
    requests: OwnedFd,
    /// The daemon's end of the socket for requests.
    daemon_socket: OwnedFd,
    arrivals: OwnedFd,
    /// Pages that the daemon waits for.
    wanted: Mutex<HashSet<u64>>,
    /// The daemon has the map.
    is_shared: AtomicBool,
}

impl Presence {
    /// For ranges of RAM (address, bytes), with no page present.
    ///
    /// # Errors
    /// When the host refuses descriptors or memory.
    pub fn new(ranges: &[(u64, u64)]) -> Result<Self, PresenceError> {
        let name = "pages that are here";
        let file =
            memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(refused("made"))?;
        let total = ranges.iter().fold(0, |sum: u64, (_, size)| sum.saturating_add(bitmap_size(*size)));
        ftruncate(&file, total).map_err(refused("given room"))?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).map_err(refused("sealed"))?;
        let mut offset = 0;
        let mut all = Vec::new();
        for &(address, size) in ranges {
            all.push(Range { address, size, offset, bitmap: Bitmap::map(&file, offset, size)? });
            offset += bitmap_size(size);
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (requests, daemon_socket) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(refused("given a pair of sockets"))?;
        let arrivals = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(refused("given an eventfd"))?;
        Ok(Self {
            file,
            ranges: all,
            requests,
            daemon_socket,
            arrivals,
            wanted: Mutex::default(),
            is_shared: AtomicBool::new(false),
        })
    }

    /// Marks all pages but `missing` as present. To be called before [`Presence::share`].
    pub fn fill(&self, missing: &[DirtyPages]) {
        for range in &self.ranges {
            let missing = missing.iter().find(|set| set.start == range.address);
            for index in 0..range.size.div_ceil(64 * STEP) {
                let word = usize::try_from(index).ok().and_then(|index| missing?.bitmap.get(index));
                range.bitmap.set_word(index, !word.copied().unwrap_or(0));
            }
        }
    }

    /// Passes the map to the daemon by `share`. Its arguments are the ranges (address, bytes, offset of the bitmap), the file with
    /// bitmaps, the socket and the eventfd.
    pub fn share<E>(
        &self,
        share: impl FnOnce(&[(u64, u64, u64)], BorrowedFd<'_>, BorrowedFd<'_>, BorrowedFd<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let ranges: Vec<_> =
            self.ranges.iter().map(|range| (range.address, range.size, range.offset)).collect();
        self.is_shared.store(true, Ordering::Release);
        share(&ranges, self.file.as_fd(), self.daemon_socket.as_fd(), self.arrivals.as_fd())
    }

    /// Readable when the daemon requests pages.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.requests.as_fd()
    }

    fn wanted(&self) -> MutexGuard<'_, HashSet<u64>> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the daemon's requests, and appends the guest-physical addresses of requested pages of RAM that aren't present.
    ///
    /// # Errors
    /// When the socket fails.
    pub fn take_requests(&self, into: &mut Vec<u64>) -> io::Result<()> {
        let mut bytes = [0; 4096];
        loop {
            let read = match rustix::io::read(&self.requests, &mut bytes) {
                Ok(0) | Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => continue,
                Ok(read) => read,
                Err(error) => return Err(error.into()),
            };
            // The daemon writes each request in one piece.
            for request in bytes.get(..read).unwrap_or_default().as_chunks::<8>().0 {
                let (address, pages) = wished(*request);
                let pages = (0..pages).filter_map(|index| address.checked_add(index * STEP));
                into.extend(pages.filter(|page| self.is_missing(*page)));
            }
            let mut wanted = self.wanted();
            wanted.extend(into.iter().copied());
        }
    }

    fn is_missing(&self, page: u64) -> bool {
        self.find(page).is_some_and(|(range, index)| !range.bitmap.has(index))
    }

    fn find(&self, page: u64) -> Option<(&Range, u64)> {
        let found = self.ranges.iter().find(|range| page.wrapping_sub(range.address) < range.size)?;
        Some((found, (page - found.address) / STEP))
    }

    /// Marks a page as present. Returns whether the daemon has waited for it.
    #[must_use]
    pub fn placed(&self, page: u64) -> bool {
        if let Some((range, index)) = self.find(page) {
            range.bitmap.set(index);
        }
        self.is_shared.load(Ordering::Acquire) && self.wanted().remove(&page)
    }

    /// Signals the daemon that pages it has waited for are present.
    pub fn notify(&self) {
        if let Some(range) = self.ranges.first() {
            range.bitmap.came();
        }
        self.signal();
    }

    /// Marks all pages as present, and signals the daemon.
    pub fn complete(&self) {
        self.ranges.iter().for_each(|range| range.bitmap.complete());
        self.signal();
    }

    fn signal(&self) {
        // A full counter means that a signal is pending already.
        let _ = rustix::io::write(&self.arrivals, &1_u64.to_ne_bytes());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // For tests only.
mod tests {
    use std::sync::Arc;

    use dma::{Dma, MappedMemory, MemoryRegion};

    use super::*;

    fn ram(address: u64, pages: u64) -> MemoryRegion {
        let fd = memfd_create("ram", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, pages * STEP).unwrap();
        fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
        MemoryRegion::map(address, pages * STEP, &fd, 0, true).unwrap()
    }

    /// The daemon's side and this one: the daemon requests each page that it lacks once, and finds it when it was placed. Requests for
    /// present pages, or outside RAM, have no effect.
    #[test]
    fn a_daemon_requests_pages_and_finds_them() {
        let ranges = [(0, 100 * STEP), (1 << 32, 70 * STEP)];
        let presence = Presence::new(&ranges).unwrap();
        let set = |start, pages: &[u64]| DirtyPages {
            start,
            bitmap: (0..2)
                .map(|word| {
                    pages
                        .iter()
                        .filter(|page| **page / 64 == word)
                        .fold(0, |bits, page| bits | 1 << (page % 64))
                })
                .collect(),
        };
        presence.fill(&[set(0, &[3, 99]), set(1 << 32, &[0, 64])]);
        let memory = MappedMemory::default().with(ram(0, 100)).unwrap().with(ram(1 << 32, 70)).unwrap();
        let shared = presence.share(|ranges, bitmap, requests, _| {
            let requests = Arc::new(requests.try_clone_to_owned().unwrap());
            for &(address, size, offset) in ranges {
                let bitmap = Bitmap::map(&bitmap, offset, size).unwrap();
                memory.set_late((address, size), bitmap, Arc::clone(&requests)).unwrap();
            }
            Ok::<_, ()>(())
        });
        shared.unwrap();
        memory.write(4 * STEP, &[1; 8192]).unwrap();
        assert!(memory.awaits(0, 100 * STEP, false) && memory.awaits(1 << 32, 70 * STEP, false));
        let mut wanted = Vec::new();
        presence.take_requests(&mut wanted).unwrap();
        wanted.sort_unstable();
        assert_eq!(wanted, [3 * STEP, 99 * STEP, 1 << 32, (1 << 32) + 64 * STEP]);
        rustix::io::write(&presence.daemon_socket, &dma::arriving::wish(4 * STEP, 3)).unwrap();
        rustix::io::write(&presence.daemon_socket, &dma::arriving::wish(1 << 40, 4096)).unwrap();
        let mut none = Vec::new();
        presence.take_requests(&mut none).unwrap();
        assert!(none.is_empty(), "{none:?}");
        assert!(presence.placed(3 * STEP) && !presence.placed(3 * STEP) && !presence.placed(5 * STEP));
        let before = memory.arrivals();
        presence.notify();
        assert_ne!(memory.arrivals(), before);
        memory.store_u32(3 * STEP, 1).unwrap();
        assert!(memory.store_u32(99 * STEP, 1).is_err());
        presence.complete();
        assert!(!memory.is_late());
        memory.store_u32(99 * STEP, 1).unwrap();
        let mut count = [0; 8];
        rustix::io::read(&presence.arrivals, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 2);
    }
}
