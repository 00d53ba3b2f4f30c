//! Guest RAM in use before all its pages are there: an access to one that is missing waits until it is placed.
//!
//! ```text
//!   vCPU, KVM, device thread ──touches a page that is missing──▶ fault told (faults)
//!                        waits                                    │ its contents are fetched from elsewhere
//!                        goes on ◀── UFFDIO_COPY (place) ─────────┘
//! ```
//!
//! A missing page is a hole of its memfd, and the one mapping of the RAM in this process is registered for missing faults
//! (`UFFDIO_REGISTER_MODE_MISSING`). Whoever touches it through this process waits: vCPUs, KVM and vhost for their part of the
//! process, system calls that get an address in it. **Another process that has the memfd mapped doesn't**: it would find a zero page,
//! and leave it there for the guest. Nothing here can see that; who starts it must know that there is none.
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

/// RAM can't be used before its pages are there.
#[derive(Debug, thiserror::Error)]
pub enum ArrivingRamError {
    /// The host refused.
    #[error("Guest RAM at {start:#x} with {len:#x} bytes could not be {what}")]
    Refused {
        /// Its guest-physical address.
        start: u64,
        /// Its bytes.
        len: u64,
        /// What was tried.
        what: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A page that must be missing is there: part of a larger one, say.
    #[error(
        "{pages} pages of guest RAM that are still to come can't be taken out of it, the first at {first:#x}"
    )]
    Stuck {
        /// How many.
        pages: u64,
        /// Guest-physical address of the first.
        first: u64,
    },
}

/// RAM some of whose pages are still to come. Thread-safe.
#[derive(Debug)]
pub struct ArrivingRam {
    uffd: Userfault,
    regions: Vec<RamRegion>,
}

fn refused(region: &RamRegion, what: &'static str) -> impl FnOnce(io::Error) -> ArrivingRamError {
    let (start, len) = (region.range.start, region.range.size);
    move |source| ArrivingRamError::Refused { start, len, what, source }
}

/// Bytes of a region in this process.
fn whole(region: &RamRegion) -> Range {
    Range { start: region.host_address as u64, len: region.range.size }
}

/// Keeps RAM of small pages from becoming huge ones: to be called before anything is written into RAM of which pages shall be taken
/// out again.
///
/// # Errors
/// When the host refuses.
pub fn keep_small(regions: &[RamRegion]) -> Result<(), ArrivingRamError> {
    regions.iter().try_for_each(|region| {
        no_huge_pages(region.host_address, region.range.size).map_err(refused(region, "kept from huge pages"))
    })
}

/// The opposite of [`keep_small`]: the kernel may make huge pages of small ones.
pub fn allow_huge(regions: &[RamRegion]) {
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

impl ArrivingRam {
    /// Takes the pages `missing` (whole sets of one region each) out of RAM, whatever they hold, and watches all of it from here on. Nobody
    /// may use the RAM meanwhile. Pages of memory that is neither there nor among `missing` fault, too.
    ///
    /// # Errors
    /// When the host refuses, or a page can't be taken out. RAM may have lost pages then.
    pub fn new(
        uffd: Userfault,
        regions: Vec<RamRegion>,
        missing: &[DirtyPages],
    ) -> Result<Self, ArrivingRamError> {
        let left_over = |region: &RamRegion| -> Result<Vec<u64>, ArrivingRamError> {
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
                let taken = usize::try_from(first - region.range.start)
                    .ok()
                    .and_then(|offset| region.host_address.checked_add(offset))
                    .zip(usize::try_from(len).ok());
                let (address, len) =
                    taken.ok_or(io::ErrorKind::InvalidInput.into()).map_err(refused(region, "addressed"))?;
                // SAFETY: pages of a region of guest RAM, whose mapping `regions` keeps. The memory is only accessed as a guest's is:
                // by volatile or atomic loads and stores; that it becomes zero is what the caller asks for.
                unsafe { rustix::mm::madvise(address as *mut _, len, Advice::LinuxRemove) }
                    .map_err(io::Error::from)
                    .map_err(refused(region, "freed where pages are still to come"))?;
            }
            let stuck = left_over(region)?;
            if let Some(first) = stuck.first() {
                return Err(ArrivingRamError::Stuck { pages: stuck.len() as u64, first: *first });
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

    /// Takes faults that have been told, as guest-physical addresses of pages; none when there are none now.
    ///
    /// # Errors
    /// When the descriptor fails.
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

    /// Puts a page at a guest-physical address, all at once, and wakes who waits for it. `false`: one is there, and stays as it is.
    ///
    /// # Errors
    /// When the address isn't a page of this RAM, or the host refuses (no memory, say).
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

    /// All pages are there: nothing faults any more, and who waits goes on. With `huge` the kernel may make huge pages again.
    pub fn release(&self, huge: bool) {
        for region in &self.regions {
            if let Err(error) = self.uffd.unregister(whole(region)) {
                tracing::error!(%error, start = region.range.start, "Guest RAM is still watched for faults, which costs time");
            }
        }
        if huge {
            allow_huge(&self.regions);
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

    /// `None` where this machine gives no userfaultfd.
    fn uffd() -> Option<Userfault> {
        match Userfault::for_arriving_ram() {
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

    fn next(arriving: &ArrivingRam) -> u64 {
        let mut faults = Vec::new();
        while faults.is_empty() {
            let mut fds =
                [rustix::event::PollFd::from_borrowed_fd(arriving.fd(), rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut fds, None).unwrap();
            arriving.faults(&mut faults).unwrap();
        }
        assert_eq!(faults.len(), 1, "{faults:?}");
        faults[0]
    }

    /// A page that was there and is taken out faults and is what was placed; one that stayed doesn't; one that is there isn't
    /// overwritten; a system call into the RAM waits as a thread does; after the release nothing faults.
    #[test]
    fn missing_pages_wait_for_their_contents() {
        let Some(uffd) = uffd() else { return };
        let ram = ram();
        let write = |page: u64, value: u64| {
            ram.memory().memory().write_obj(value, GuestAddress(page * PAGE + 8)).unwrap();
        };
        write(3, 30);
        write(4, 40);
        keep_small(ram.regions()).unwrap();
        let missing = [DirtyPages { start: 0, bitmap: vec![1 << 4 | 1 << 9] }];
        let arriving = ArrivingRam::new(uffd, ram.regions().to_vec(), &missing).unwrap();
        assert_eq!(read(&ram, 3).join().unwrap(), 30);
        let waits = read(&ram, 4);
        assert_eq!(next(&arriving), 4 * PAGE);
        let contents = |value: u64| value.to_ne_bytes().repeat(512);
        assert!(arriving.place(4 * PAGE, &contents(41)).unwrap());
        assert_eq!(waits.join().unwrap(), 41);
        write(4, 42);
        assert!(!arriving.place(4 * PAGE, &contents(41)).unwrap());
        assert_eq!(read(&ram, 4).join().unwrap(), 42);

        // A pipe's end is read into page 9.
        let (from, to) = rustix::pipe::pipe().unwrap();
        rustix::io::write(&to, &7u64.to_ne_bytes()).unwrap();
        let memory = ram.memory();
        let call = std::thread::spawn(move || {
            let mut from = std::fs::File::from(from);
            memory.memory().read_exact_volatile_from(GuestAddress(9 * PAGE + 8), &mut from, 8).unwrap();
        });
        assert_eq!(next(&arriving), 9 * PAGE);
        assert!(arriving.place(9 * PAGE, &contents(1)).unwrap());
        call.join().unwrap();
        assert_eq!(read(&ram, 9).join().unwrap(), 7);

        let waits = read(&ram, 200);
        assert_eq!(next(&arriving), 200 * PAGE);
        arriving.release(false);
        assert_eq!(waits.join().unwrap(), 0, "a page that was nowhere");
        assert_eq!(read(&ram, 201).join().unwrap(), 0);
    }

    #[test]
    fn what_is_no_page_of_the_ram_is_refused() {
        let Some(uffd) = uffd() else { return };
        let ram = ram();
        let arriving = ArrivingRam::new(uffd, ram.regions().to_vec(), &[]).unwrap();
        for address in [1, 4 << 20, u64::MAX - 4095] {
            assert!(arriving.place(address, &[0; 4096]).is_err(), "{address:#x}");
        }
        assert!(arriving.place(0, &[0; 4095]).is_err());
        arriving.release(true);
    }
}
