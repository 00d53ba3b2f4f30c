//! Plain memory that implements [`Dma`], for tests, simulation and model checking. An access outside of it fails. It can record all
//! accesses, so that an oracle knows what a device touched.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::access::{CopyFault, Dma, DmaFault};
use crate::alias::{Alias, AliasError};

/// Memory from address 0 (or a chosen base) on; clones share it.
#[derive(Debug, Clone)]
pub struct HeapMemory {
    base: u64,
    bytes: Arc<[AtomicU8]>,
    /// Serialises word accesses and copies, so that words are atomic here as well.
    words: Arc<Mutex<()>>,
    log: Arc<Mutex<Option<Vec<Access>>>>,
    late: Arc<Mutex<Late>>,
}

/// x86-64 base page, bytes.
const PAGE: u64 = 4096;

/// Not-present pages.
#[derive(Debug, Default)]
struct Late {
    missing: BTreeSet<u64>,
    asked: BTreeSet<u64>,
    refused: u64,
}

impl Late {
    /// The not-present pages that an access needs.
    fn needed(&self, address: u64, len: u64, write: bool) -> Vec<u64> {
        let end = address.saturating_add(len);
        let covered = |page: &u64| write && *page >= address && page + PAGE <= end;
        let pages = self.missing.range(address - address % PAGE..end).copied();
        pages.filter(|page| len > 0 && !covered(page)).collect()
    }
}

/// An access that a device made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// First byte.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
    /// Whether it wrote.
    pub write: bool,
}

impl HeapMemory {
    /// `len` zero bytes from address 0 on.
    #[must_use]
    pub fn new(len: usize) -> Self {
        Self::at(0, len)
    }

    /// `len` zero bytes from `base` on.
    #[must_use]
    pub fn at(base: u64, len: usize) -> Self {
        Self {
            base,
            bytes: (0..len).map(|_| AtomicU8::new(0)).collect(),
            words: Arc::default(),
            log: Arc::default(),
            late: Arc::default(),
        }
    }

    /// Makes these pages not present, by their addresses. Their contents mean nothing to the guest until they arrive.
    pub fn set_missing(&self, pages: impl IntoIterator<Item = u64>) {
        let pages: BTreeSet<u64> = pages.into_iter().collect();
        for page in &pages {
            for cell in self.range(*page, PAGE, true).into_iter().flatten() {
                cell.store(0xEE, Ordering::Relaxed);
            }
        }
        lock(&self.late).missing = pages;
    }

    /// Returns and clears the pages that accesses requested.
    #[must_use]
    pub fn take_asked(&self) -> BTreeSet<u64> {
        std::mem::take(&mut lock(&self.late).asked)
    }

    /// Delivers a page, unless a device has overwritten it as a whole.
    pub fn come(&self, page: u64, contents: &[u8]) {
        if lock(&self.late).missing.remove(&page) {
            for (cell, byte) in self.range(page, PAGE, true).into_iter().flatten().zip(contents) {
                cell.store(*byte, Ordering::Relaxed);
            }
        }
    }

    /// Starts recording accesses.
    pub fn record(&self) {
        *lock(&self.log) = Some(Vec::new());
    }

    /// Returns and clears the accesses since [`HeapMemory::record`] or the last call.
    #[must_use]
    pub fn take_record(&self) -> Vec<Access> {
        lock(&self.log).as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn range(&self, address: u64, len: u64, write: bool) -> Result<&[AtomicU8], DmaFault> {
        let fault = DmaFault { address, len };
        let start = address.checked_sub(self.base).ok_or(fault)?;
        let end = start.checked_add(len).ok_or(fault)?;
        let start = usize::try_from(start).map_err(|_| fault)?;
        let end = usize::try_from(end).map_err(|_| fault)?;
        let range = self.bytes.get(start..end).ok_or(fault)?;
        let mut late = lock(&self.late);
        if !late.missing.is_empty() {
            let needed = late.needed(address, len, write);
            if !needed.is_empty() {
                late.refused += 1;
                late.asked.extend(needed);
                return Err(fault);
            }
            if write {
                late.missing.retain(|page| *page < address || page + PAGE > address + len);
            }
        }
        drop(late);
        if let Some(log) = lock(&self.log).as_mut() {
            log.push(Access { address, len, write });
        }
        Ok(range)
    }

    fn word<const N: usize>(
        &self,
        address: u64,
        write: bool,
        change: impl FnOnce([u8; N]) -> Option<[u8; N]>,
    ) -> Result<[u8; N], DmaFault> {
        let len = N as u64;
        if !address.is_multiple_of(len) {
            return Err(DmaFault { address, len });
        }
        let range = self.range(address, len, write)?;
        let _guard = lock(&self.words);
        let before: [u8; N] = std::array::from_fn(|i| range[i].load(Ordering::SeqCst));
        if let Some(after) = change(before) {
            for (cell, byte) in range.iter().zip(after) {
                cell.store(byte, Ordering::SeqCst);
            }
        }
        Ok(before)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Dma for HeapMemory {
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), DmaFault> {
        let range = self.range(address, into.len() as u64, false)?;
        for (byte, cell) in into.iter_mut().zip(range) {
            *byte = cell.load(Ordering::Relaxed);
        }
        Ok(())
    }

    fn write(&self, address: u64, from: &[u8]) -> Result<(), DmaFault> {
        let range = self.range(address, from.len() as u64, true)?;
        for (byte, cell) in from.iter().zip(range) {
            cell.store(*byte, Ordering::Relaxed);
        }
        Ok(())
    }

    fn zero(&self, address: u64, len: u64) -> Result<(), DmaFault> {
        for cell in self.range(address, len, true)? {
            cell.store(0, Ordering::Relaxed);
        }
        Ok(())
    }

    fn load_u32(&self, address: u64) -> Result<u32, DmaFault> {
        self.word(address, false, |_| None).map(u32::from_le_bytes)
    }

    fn store_u32(&self, address: u64, value: u32) -> Result<(), DmaFault> {
        self.word(address, true, |_| Some(value.to_le_bytes())).map(drop)
    }

    fn swap_u32(&self, address: u64, value: u32) -> Result<u32, DmaFault> {
        self.word(address, true, |_| Some(value.to_le_bytes())).map(u32::from_le_bytes)
    }

    fn compare_exchange_u64(&self, address: u64, expected: u64, new: u64) -> Result<u64, DmaFault> {
        self.word(address, true, |before| (before == expected.to_le_bytes()).then_some(new.to_le_bytes()))
            .map(u64::from_le_bytes)
    }

    fn fetch_add_u64(&self, address: u64, operand: u64) -> Result<u64, DmaFault> {
        self.word(address, true, |before| {
            Some(u64::from_le_bytes(before).wrapping_add(operand).to_le_bytes())
        })
        .map(u64::from_le_bytes)
    }

    fn copy_to(&self, from: u64, to: &Self, address: u64, len: u64) -> Result<(), CopyFault> {
        let source = self.range(from, len, false).map_err(CopyFault::Source)?;
        let target = to.range(address, len, true).map_err(CopyFault::Destination)?;
        // As memmove: both may be the same guest's memory, and overlap.
        let copy: Vec<u8> = source.iter().map(|cell| cell.load(Ordering::Relaxed)).collect();
        for (cell, byte) in target.iter().zip(copy) {
            cell.store(byte, Ordering::Relaxed);
        }
        Ok(())
    }

    fn check(&self, address: u64, len: u64) -> Result<(), DmaFault> {
        let fault = DmaFault { address, len };
        let start = address.checked_sub(self.base).ok_or(fault)?;
        let end = start.checked_add(len).ok_or(fault)?;
        if end <= self.bytes.len() as u64 { Ok(()) } else { Err(fault) }
    }

    fn is_late(&self) -> bool {
        !lock(&self.late).missing.is_empty()
    }

    fn awaits(&self, address: u64, len: u64, write: bool) -> bool {
        let mut late = lock(&self.late);
        let needed = late.needed(address, len, write);
        late.asked.extend(&needed);
        !needed.is_empty()
    }

    fn absences(&self) -> u64 {
        lock(&self.late).refused
    }

    fn alias(&self, _: &[(u64, u64)]) -> Result<Alias, AliasError> {
        Err(AliasError::NotMapped)
    }
}
