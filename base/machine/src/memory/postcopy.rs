//! RAM of a post-copy destination: an access to a not-present page blocks until the page is placed.
//!
//! ```text
//!   vCPU, KVM, device thread ──accesses a not-present page─▶ userfaultfd event (faults)
//!                        blocks                                   │ the monitor fetches the contents from the source
//!                        resumes ◀── UFFDIO_COPY (place) ─────────┘
//! ```
//!
//! A not-present page is a hole of its memfd, and this process registers its one mapping of the RAM for missing faults
//! (`UFFDIO_REGISTER_MODE_MISSING`). Every access through this process blocks. This includes vCPUs, KVM and vhost on its behalf, and
//! system calls with an address in the mapping. **Another process that has the memfd mapped doesn't block**: it would read a zero page,
//! and that page would stay in the file for the guest. This module can't detect such a process; the caller must ensure that there is
//! none.
//!
//! Source: Linux, admin-guide/mm/userfaultfd.
#![allow(unsafe_code)] // madvise on mappings of guest RAM.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::mm::Advice;

use super::RamRegion;
use super::present::present_in;
use super::userfault::{Range, Userfault, no_huge_pages, register};
use crate::slots::{DirtyPages, PAGE};

/// RAM couldn't be prepared for not-present pages.
#[derive(Debug, thiserror::Error)]
pub enum PostCopyRamError {
    /// The host refused an operation.
    #[error("Guest RAM at {start:#x} with {len:#x} bytes could not be {what}")]
    Refused {
        /// Guest-physical address of the region.
        start: u64,
        /// Bytes of the region.
        len: u64,
        /// What was tried.
        what: &'static str,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
    /// A page that must be not-present is still in memory, for instance as part of a huge page.
    #[error(
        "{pages} pages of guest RAM that aren't present yet can't be removed from it, the first at {first:#x}"
    )]
    Stuck {
        /// Number of such pages.
        pages: u64,
        /// Guest-physical address of the first one.
        first: u64,
    },
}

/// RAM with not-present pages. Thread-safe.
#[derive(Debug)]
pub struct PostCopyRam {
    uffd: Userfault,
    regions: Vec<RamRegion>,
}

fn refused(region: &RamRegion, what: &'static str) -> impl FnOnce(io::Error) -> PostCopyRamError {
    let (start, len) = (region.range.start, region.range.size);
    move |source| PostCopyRamError::Refused { start, len, what, source }
}

/// The region's range of addresses in this process.
fn whole(region: &RamRegion) -> Range {
    Range { start: region.host_address as u64, len: region.range.size }
}

/// Disables transparent huge pages for the RAM. To be called before anything is written to RAM whose pages will be removed again.
///
/// # Errors
/// [`PostCopyRamError::Refused`] when the host refuses.
pub fn disable_huge_pages(regions: &[RamRegion]) -> Result<(), PostCopyRamError> {
    regions.iter().try_for_each(|region| {
        no_huge_pages(region.host_address, region.range.size).map_err(refused(region, "kept from huge pages"))
    })
}

/// Undoes [`disable_huge_pages`]: the kernel may use transparent huge pages again.
pub fn enable_huge_pages(regions: &[RamRegion]) {
    for region in regions {
        let len = usize::try_from(region.range.size).unwrap_or(0);
        // SAFETY: a whole mapping of guest RAM; the advice doesn't change its contents.
        let advised =
            unsafe { rustix::mm::madvise(region.host_address as *mut _, len, Advice::LinuxHugepage) };
        if let Err(error) = advised {
            tracing::debug!(%error, "Guest RAM stays in small pages");
        }
    }
}

impl PostCopyRam {
    /// Removes the pages `missing` (whole sets of one region each) from RAM, whatever they contain, and registers all of the RAM for
    /// faults. No thread may access the RAM meanwhile. A page that isn't in memory faults also if it isn't among `missing`.
    ///
    /// # Errors
    /// When the host refuses, or a page can't be removed. RAM may have lost pages then.
    pub fn new(
        uffd: Userfault,
        regions: Vec<RamRegion>,
        missing: &[DirtyPages],
    ) -> Result<Self, PostCopyRamError> {
        let left_over = |region: &RamRegion| -> Result<Vec<u64>, PostCopyRamError> {
            let there = present_in(region).map_err(refused(region, "looked at"))?;
            Ok(there.pages().filter(|page| missing.iter().any(|set| has(set, *page))).collect())
        };
        for region in &regions {
            let mut pages = left_over(region)?.into_iter().peekable();
            while let Some(first) = pages.next() {
                let mut len = PAGE;
                while pages.next_if_eq(&(first + len)).is_some() {
                    len += PAGE;
                }
                let removed = usize::try_from(first - region.range.start)
                    .ok()
                    .and_then(|offset| region.host_address.checked_add(offset))
                    .zip(usize::try_from(len).ok());
                let (address, len) = removed
                    .ok_or(io::ErrorKind::InvalidInput.into())
                    .map_err(refused(region, "addressed"))?;
                // SAFETY: pages of a region of guest RAM, whose mapping `regions` keeps. All accesses to guest RAM are volatile or
                // atomic; the caller asks for the pages to become zero.
                unsafe { rustix::mm::madvise(address as *mut _, len, Advice::LinuxRemove) }
                    .map_err(io::Error::from)
                    .map_err(refused(region, "freed where pages are still to come"))?;
            }
            let stuck = left_over(region)?;
            if let Some(first) = stuck.first() {
                return Err(PostCopyRamError::Stuck { pages: stuck.len() as u64, first: *first });
            }
        }
        for region in &regions {
            uffd.register(whole(region), register::MISSING).map_err(refused(region, "watched for faults"))?;
        }
        Ok(Self { uffd, regions })
    }

    /// Readable when there are faults.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.uffd.fd()
    }

    /// Reads pending faults without blocking, and appends the guest-physical addresses of their pages to `into`.
    ///
    /// # Errors
    /// When reading the descriptor fails.
    pub fn faults(&self, into: &mut Vec<u64>) -> io::Result<()> {
        for fault in self.uffd.faults()? {
            let page = self.regions.iter().find_map(|region| {
                let offset = fault.address.checked_sub(region.host_address as u64)?;
                (offset < region.range.size).then(|| region.range.start + offset / PAGE * PAGE)
            });
            into.extend(page);
        }
        Ok(())
    }

    /// Places a page at a guest-physical address atomically, and wakes the threads that wait for it. `false`: the page is present already
    /// and stays unchanged.
    ///
    /// # Errors
    /// When the address isn't the start of a page of this RAM, `contents` isn't a page, or the host refuses (it has no memory, say).
    pub fn place(&self, address: u64, contents: &[u8]) -> io::Result<bool> {
        let to = self.host(address)?;
        if u64::try_from(contents.len()) != Ok(PAGE) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "contents of no page"));
        }
        match self.uffd.copy(to, contents) {
            Ok(()) => Ok(true),
            Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {
                self.uffd.wake(Range { start: to, len: PAGE })?;
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// To be called when all pages are present: ends the registration, which wakes all waiting threads. With `huge` the kernel may use
    /// transparent huge pages again.
    pub fn release(&self, huge: bool) {
        for region in &self.regions {
            if let Err(error) = self.uffd.unregister(whole(region)) {
                tracing::error!(%error, start = region.range.start, "Guest RAM is still registered for faults, which slows the guest");
            }
        }
        if huge {
            enable_huge_pages(&self.regions);
        }
    }

    fn host(&self, address: u64) -> io::Result<u64> {
        let found = self.regions.iter().find_map(|region| {
            let offset = address.checked_sub(region.range.start)?;
            (offset < region.range.size && offset.is_multiple_of(PAGE))
                .then(|| region.host_address as u64 + offset)
        });
        found.ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidInput, format!("there is no page at {address:#x}"))
        })
    }
}

fn has(set: &DirtyPages, page: u64) -> bool {
    let index = page.checked_sub(set.start).map(|offset| offset / PAGE);
    let word = index.and_then(|index| usize::try_from(index / 64).ok()).and_then(|at| set.bitmap.get(at));
    word.zip(index).is_some_and(|(word, index)| word >> (index % 64) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{
        Bytes, GuestAddress, GuestAddressSpace, GuestRam, RamLayout, RamOptions, UserfaultError,
    };

    /// `None` where this machine has no userfaultfd.
    fn uffd() -> Option<Userfault> {
        match Userfault::for_postcopy() {
            Ok(uffd) => Some(uffd),
            Err(UserfaultError::Open(error)) => {
                facilities::missing(facilities::Facility::Userfaultfd, error);
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn ram() -> GuestRam {
        GuestRam::allocate(&RamLayout::new(&[4 << 20]).unwrap(), &RamOptions::default()).unwrap()
    }

    fn read(ram: &GuestRam, page: u64) -> std::thread::JoinHandle<u64> {
        let memory = ram.memory();
        std::thread::spawn(move || memory.memory().read_obj(GuestAddress(page * PAGE + 8)).unwrap())
    }

    fn next(postcopy: &PostCopyRam) -> u64 {
        let mut faults = Vec::new();
        while faults.is_empty() {
            let mut fds =
                [rustix::event::PollFd::from_borrowed_fd(postcopy.fd(), rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut fds, None).unwrap();
            postcopy.faults(&mut faults).unwrap();
        }
        assert_eq!(faults.len(), 1, "{faults:?}");
        faults[0]
    }

    /// A removed page faults, and then has the placed contents; a page that stayed doesn't fault; a present page isn't overwritten. A
    /// system call into the RAM blocks as a thread does. After the release nothing faults.
    #[test]
    fn missing_pages_wait_for_their_contents() {
        let Some(uffd) = uffd() else { return };
        let ram = ram();
        let write = |page: u64, value: u64| {
            ram.memory().memory().write_obj(value, GuestAddress(page * PAGE + 8)).unwrap();
        };
        write(3, 30);
        write(4, 40);
        disable_huge_pages(ram.regions()).unwrap();
        let missing = [DirtyPages { start: 0, bitmap: vec![1 << 4 | 1 << 9] }];
        let postcopy = PostCopyRam::new(uffd, ram.regions().to_vec(), &missing).unwrap();
        assert_eq!(read(&ram, 3).join().unwrap(), 30);
        let waits = read(&ram, 4);
        assert_eq!(next(&postcopy), 4 * PAGE);
        let contents = |value: u64| value.to_ne_bytes().repeat(512);
        assert!(postcopy.place(4 * PAGE, &contents(41)).unwrap());
        assert_eq!(waits.join().unwrap(), 41);
        write(4, 42);
        assert!(!postcopy.place(4 * PAGE, &contents(41)).unwrap());
        assert_eq!(read(&ram, 4).join().unwrap(), 42);

        // A read from a pipe writes to page 9.
        let (from, to) = rustix::pipe::pipe().unwrap();
        rustix::io::write(&to, &7u64.to_ne_bytes()).unwrap();
        let memory = ram.memory();
        let call = std::thread::spawn(move || {
            let mut from = std::fs::File::from(from);
            memory.memory().read_exact_volatile_from(GuestAddress(9 * PAGE + 8), &mut from, 8).unwrap();
        });
        assert_eq!(next(&postcopy), 9 * PAGE);
        assert!(postcopy.place(9 * PAGE, &contents(1)).unwrap());
        call.join().unwrap();
        assert_eq!(read(&ram, 9).join().unwrap(), 7);

        let waits = read(&ram, 200);
        assert_eq!(next(&postcopy), 200 * PAGE);
        postcopy.release(false);
        assert_eq!(waits.join().unwrap(), 0, "a page that was nowhere");
        assert_eq!(read(&ram, 201).join().unwrap(), 0);
    }

    #[test]
    fn what_is_no_page_of_the_ram_is_refused() {
        let Some(uffd) = uffd() else { return };
        let ram = ram();
        let postcopy = PostCopyRam::new(uffd, ram.regions().to_vec(), &[]).unwrap();
        for address in [1, 4 << 20, u64::MAX - 4095] {
            assert!(postcopy.place(address, &[0; 4096]).is_err(), "{address:#x}");
        }
        assert!(postcopy.place(0, &[0; 4095]).is_err());
        postcopy.release(true);
    }
}
