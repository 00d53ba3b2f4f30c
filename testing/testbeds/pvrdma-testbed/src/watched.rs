//! Guest memory with an oracle: each page has a current grant, and the device panics on any other access.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use dma::access::CopyFault;
use dma::{Alias, AliasError, Dma, DmaFault};

use pvrdma::abi::PAGE;

/// The accesses to a page that are granted to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Grant {
    /// None: never granted, or revoked.
    Nothing = 0,
    /// Page directories and requests.
    Read = 1,
    /// Read all, write the first 16 bytes: indices.
    Indices = 2,
    /// Read and write.
    Write = 3,
}

/// Memory whose oracle checks the device's accesses, but not the guest's.
#[derive(Debug, Clone)]
pub struct Watched<M> {
    inner: M,
    base: u64,
    grants: Arc<[AtomicU8]>,
    watching: bool,
}

impl<M: Dma + Clone> Watched<M> {
    /// Adds the oracle to `inner`, memory of `pages` pages from `base` on.
    pub fn new(inner: M, base: u64, pages: usize) -> Self {
        Self { inner, base, grants: (0..pages).map(|_| AtomicU8::new(0)).collect(), watching: true }
    }

    /// The same memory for the guest, unchecked.
    #[must_use]
    pub fn unwatched(&self) -> Self {
        Self { watching: false, ..self.clone() }
    }

    /// Sets the grant of pages.
    pub fn grant(&self, pages: &[u64], what: Grant) {
        for page in pages {
            let index = usize::try_from((page - self.base) / PAGE).unwrap();
            self.grants[index].store(what as u8, Ordering::Relaxed);
        }
    }

    #[inline]
    fn watch(&self, address: u64, len: u64, write: bool) {
        if !self.watching || len == 0 || self.inner.check(address, len).is_err() {
            return;
        }
        let first = (address - self.base) / PAGE;
        let last = (address + len - 1 - self.base) / PAGE;
        for page in first..=last {
            let grant = self.grants[usize::try_from(page).unwrap()].load(Ordering::Relaxed);
            let fine = match grant {
                0 => false,
                1 => !write,
                2 => !write || (address % PAGE + len <= 16 && first == last),
                _ => true,
            };
            let what = if write { "writes" } else { "reads" };
            assert!(
                fine,
                "the device {what} {len} bytes at {address:#x}, which it was not given (grant {grant})"
            );
        }
    }
}

impl<M: Dma + Clone> Dma for Watched<M> {
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), DmaFault> {
        self.watch(address, into.len() as u64, false);
        self.inner.read(address, into)
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), DmaFault> {
        self.watch(address, from.len() as u64, true);
        self.inner.write(address, from)
    }

    fn zero(&self, address: u64, len: u64) -> Result<(), DmaFault> {
        self.watch(address, len, true);
        self.inner.zero(address, len)
    }

    fn load_u32(&self, address: u64) -> Result<u32, DmaFault> {
        self.watch(address, 4, false);
        self.inner.load_u32(address)
    }

    fn store_u32(&self, address: u64, value: u32) -> Result<(), DmaFault> {
        self.watch(address, 4, true);
        self.inner.store_u32(address, value)
    }

    fn swap_u32(&self, address: u64, value: u32) -> Result<u32, DmaFault> {
        self.watch(address, 4, true);
        self.inner.swap_u32(address, value)
    }

    fn compare_exchange_u64(&self, address: u64, expected: u64, new: u64) -> Result<u64, DmaFault> {
        self.watch(address, 8, true);
        self.inner.compare_exchange_u64(address, expected, new)
    }

    fn fetch_add_u64(&self, address: u64, operand: u64) -> Result<u64, DmaFault> {
        self.watch(address, 8, true);
        self.inner.fetch_add_u64(address, operand)
    }

    fn copy_to(&self, from: u64, to: &Self, address: u64, len: u64) -> Result<(), CopyFault> {
        self.watch(from, len, false);
        to.watch(address, len, true);
        self.inner.copy_to(from, &to.inner, address, len)
    }

    fn check(&self, address: u64, len: u64) -> Result<(), DmaFault> {
        self.inner.check(address, len)
    }

    fn alias(&self, pieces: &[(u64, u64)]) -> Result<Alias, AliasError> {
        self.inner.alias(pieces)
    }
}
