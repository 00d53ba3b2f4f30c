//! userfaultfd: a descriptor reports faults of registered mappings of guest RAM, and ioctls resolve them.
//!
//! Source: Linux, admin-guide/mm/userfaultfd and include/uapi/linux/userfaultfd.h.
#![allow(unsafe_code)] // userfaultfd's ioctls, and madvise.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::mm::{Advice, UserfaultfdFlags};

/// No usable userfaultfd.
#[derive(Debug, thiserror::Error)]
pub enum UserfaultError {
    /// The kernel gives this user no userfaultfd that reports faults of the kernel.
    #[error(
        "A userfaultfd that reports faults inside KVM could not be opened; run as a user with CAP_SYS_PTRACE, or that may open /dev/userfaultfd"
    )]
    Open(#[source] io::Error),
    /// The kernel's userfaultfd lacks a feature.
    #[error(
        "This kernel's userfaultfd lacks features for guest memory: it has {has:#x}, and {needs:#x} are needed"
    )]
    Features {
        /// Bits of `UFFD_FEATURE_*` that it has.
        has: u64,
        /// Bits of the required features.
        needs: u64,
    },
}

const API: u64 = 0xaa;

/// `UFFD_FEATURE_*` of include/uapi/linux/userfaultfd.h.
pub(super) mod feature {
    pub(crate) const PAGEFAULT_FLAG_WP: u64 = 1;
    pub(crate) const MISSING_SHMEM: u64 = 1 << 5;
    pub(crate) const THREAD_ID: u64 = 1 << 8;
    pub(crate) const MINOR_SHMEM: u64 = 1 << 10;
    pub(crate) const EXACT_ADDRESS: u64 = 1 << 11;
    pub(crate) const WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
}

/// `UFFDIO_REGISTER_MODE_*` of include/uapi/linux/userfaultfd.h.
pub(super) mod register {
    pub(crate) const MISSING: u64 = 1;
    pub(crate) const WP: u64 = 2;
    pub(crate) const MINOR: u64 = 4;
}

const WRITEPROTECT_WP: u64 = 1;
const WRITEPROTECT_DONTWAKE: u64 = 2;
pub(super) const CONTINUE_DONTWAKE: u64 = 1;
pub(super) const CONTINUE_WP: u64 = 2;
const EVENT_PAGEFAULT: u8 = 0x12;
const FAULT_WRITE: u64 = 1;
const FAULT_WP: u64 = 2;

#[repr(C)]
struct ApiRequest {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// A range of a mapping in this process.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Range {
    /// Address of the first byte.
    pub(super) start: u64,
    /// Length in bytes.
    pub(super) len: u64,
}

/// `uffdio_register` and `uffdio_continue`: both have a range, a mode, and a word that the kernel fills.
#[repr(C)]
struct RangeModeAnswer {
    range: Range,
    mode: u64,
    answer: u64,
}

#[repr(C)]
struct RangeMode {
    range: Range,
    mode: u64,
}

/// `struct uffdio_copy`.
#[repr(C)]
struct Copy {
    to: u64,
    from: u64,
    len: u64,
    mode: u64,
    copied: i64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct UffdMsg {
    event: u8,
    _reserved: [u8; 7],
    flags: u64,
    address: u64,
    thread: u32,
    _padding: u32,
}

const _: () = assert!(size_of::<UffdMsg>() == 32 && size_of::<Copy>() == 40);

const fn request(direction: u64, number: u64, size: usize) -> libc::c_ulong {
    (direction << 30) | ((size as u64) << 16) | (0xaa << 8) | number
}
const READ: u64 = 2;
const READ_WRITE: u64 = 3;
const UFFDIO_REGISTER: libc::c_ulong = request(READ_WRITE, 0, size_of::<RangeModeAnswer>());
const UFFDIO_UNREGISTER: libc::c_ulong = request(READ, 1, size_of::<Range>());
const UFFDIO_WAKE: libc::c_ulong = request(READ, 2, size_of::<Range>());
const UFFDIO_COPY: libc::c_ulong = request(READ_WRITE, 3, size_of::<Copy>());
const UFFDIO_WRITEPROTECT: libc::c_ulong = request(READ_WRITE, 6, size_of::<RangeMode>());
const UFFDIO_CONTINUE: libc::c_ulong = request(READ_WRITE, 7, size_of::<RangeModeAnswer>());
const UFFDIO_API: libc::c_ulong = request(READ_WRITE, 0x3f, size_of::<ApiRequest>());
/// `_IO(0xaa, 0)` on /dev/userfaultfd.
const USERFAULTFD_IOC_NEW: libc::c_ulong = 0xaa00;

/// A fault, as the kernel reports it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fault {
    /// Address in this process.
    pub(super) address: u64,
    /// Whether the access is a store.
    pub(super) write: bool,
    /// The thread's id; 0 without `feature::THREAD_ID`.
    pub(super) thread: u32,
}

/// A descriptor that reports faults of this process, including those inside the kernel. Thread-safe.
#[derive(Debug)]
pub struct Userfault(OwnedFd);

impl Userfault {
    /// Opens one for [`super::postcopy::PostCopyRam`]. To be called while the process still has its privileges.
    ///
    /// # Errors
    /// When the kernel refuses, or lacks missing faults of shared memory (Linux 4.11).
    pub fn for_postcopy() -> Result<Self, UserfaultError> {
        Self::open(feature::MISSING_SHMEM)
    }

    pub(super) fn open(features: u64) -> Result<Self, UserfaultError> {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
        // SAFETY: a new descriptor; nothing is registered with it yet.
        let uffd = match unsafe { rustix::mm::userfaultfd(flags) } {
            Ok(uffd) => Self(uffd),
            Err(rustix::io::Errno::PERM | rustix::io::Errno::NOSYS) => {
                Self(open_device().map_err(UserfaultError::Open)?)
            }
            Err(error) => return Err(UserfaultError::Open(error.into())),
        };
        // On EINVAL, `api.features` has the kernel's answer. UFFDIO_API works once per descriptor, so it isn't repeated.
        let mut api = ApiRequest { api: API, features, ioctls: 0 };
        match uffd.call(UFFDIO_API, &mut api) {
            Ok(()) => Ok(uffd),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                Err(UserfaultError::Features { has: api.features, needs: features })
            }
            Err(error) => Err(UserfaultError::Open(error)),
        }
    }

    /// Readable when there are faults.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Reads pending faults without blocking.
    pub(super) fn faults(&self) -> io::Result<impl Iterator<Item = Fault>> {
        let mut messages = [UffdMsg::default(); 16];
        let size = size_of_val(&messages);
        // SAFETY: the buffer is a local one of `size` bytes; all bit patterns are valid for it.
        let read = unsafe { libc::read(self.0.as_raw_fd(), messages.as_mut_ptr().cast(), size) };
        let read = match usize::try_from(read) {
            Ok(read) => read,
            Err(_) => {
                let error = io::Error::last_os_error();
                if !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) {
                    return Err(error);
                }
                0
            }
        };
        let messages = messages.into_iter().take(read / size_of::<UffdMsg>());
        Ok(messages.filter(|one| one.event == EVENT_PAGEFAULT).map(|one| Fault {
            address: one.address,
            write: one.flags & (FAULT_WRITE | FAULT_WP) != 0,
            thread: one.thread,
        }))
    }

    /// Registers the range for faults of these modes.
    pub(super) fn register(&self, range: Range, modes: u64) -> io::Result<()> {
        self.call(UFFDIO_REGISTER, &mut RangeModeAnswer { range, mode: modes, answer: 0 })
    }

    /// Ends the registration; all threads that wait for the range resume.
    pub(super) fn unregister(&self, mut range: Range) -> io::Result<()> {
        self.call(UFFDIO_UNREGISTER, &mut range)
    }

    /// Wakes the threads that wait for the range; they retry their access.
    pub(super) fn wake(&self, mut range: Range) -> io::Result<()> {
        self.call(UFFDIO_WAKE, &mut range)
    }

    /// Creates a page with these contents where there is none, and wakes the threads that wait for it.
    pub(super) fn copy(&self, to: u64, from: &[u8]) -> io::Result<()> {
        let mut copy =
            Copy { to, from: from.as_ptr().addr() as u64, len: from.len() as u64, mode: 0, copied: 0 };
        self.call(UFFDIO_COPY, &mut copy)
    }

    /// Maps pages that the file has already.
    pub(super) fn map_existing(&self, range: Range, mode: u64) -> io::Result<()> {
        self.call(UFFDIO_CONTINUE, &mut RangeModeAnswer { range, mode, answer: 0 })
    }

    /// Write-protects the range, or ends that. Wakes no thread.
    pub(super) fn write_protect(&self, range: Range, on: bool) -> io::Result<()> {
        let mode = if on { WRITEPROTECT_WP } else { WRITEPROTECT_DONTWAKE };
        self.call(UFFDIO_WRITEPROTECT, &mut RangeMode { range, mode })
    }

    /// Calls an ioctl, and repeats it when the address space is changing (EAGAIN) or a signal interrupts it.
    fn call<T>(&self, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
        loop {
            // SAFETY: each request gets a structure of its type, which outlives the call, as does the memory that it points to. The call
            // changes only ranges that this module's users registered, which are shared mappings of guest RAM.
            let result = unsafe { libc::ioctl(self.0.as_raw_fd(), request, std::ptr::from_mut(argument)) };
            if result >= 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if !matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) {
                return Err(error);
            }
        }
    }
}

fn open_device() -> io::Result<OwnedFd> {
    use std::os::fd::FromRawFd;
    let device = std::fs::File::open("/dev/userfaultfd")?;
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: the request takes flags by value and returns a descriptor.
    let fd = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel returned a new descriptor, which no other code has.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Disables transparent huge pages for a mapping, because its pages change one by one.
pub(super) fn no_huge_pages(address: usize, len: u64) -> io::Result<()> {
    let len = usize::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: a whole mapping of guest RAM; the advice doesn't change its contents.
    match unsafe { rustix::mm::madvise(address as *mut _, len, Advice::LinuxNoHugepage) } {
        // EINVAL: the kernel has no huge pages.
        Ok(()) | Err(rustix::io::Errno::INVAL) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
