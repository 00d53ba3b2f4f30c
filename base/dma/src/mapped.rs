//! The RAM of a guest that runs in another process, mapped from the memfds that process sent.

#![allow(unsafe_code)] // Maps shared memory and accesses it by pointer; the only module of this crate that may.

use std::arch::asm;
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::access::{CopyFault, Dma, DmaFault};
use crate::alias::{Alias, AliasError};
use crate::arriving::{Bitmap, Late};
use crate::dirty::DirtyLog;
use crate::map_error::MapError;

/// x86-64 cache line, bytes.
const LINE: usize = 64;
/// x86-64 base page, bytes.
const PAGE: u64 = 4096;

/// One mapped range. It is unmapped when the last table that holds it is dropped.
#[derive(Debug)]
pub struct MemoryRegion {
    address: u64,
    size: u64,
    host: *mut u8,
    writable: bool,
    /// Pages written through this mapping.
    log: DirtyLog,
    /// Not-present pages of a post-copy migration.
    late: Late,
}

// SAFETY: the mapping is shared memory that lives as long as the region. No reference into it exists, so no code assumes that it stays
// unchanged. Words are accessed atomically. What a caller reads is copied out by loads that the compiler can neither repeat nor omit
// (`copy_out`). Bulk copies (`write`, `zero`, `copy_to`) move bytes without interpreting them, whatever mixture they are.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Maps `size` bytes of `file` from `offset` on as guest memory at `address`. The file must be sealed against
    /// shrinking, so that no later act of its owner can fault this process.
    pub fn map(
        address: u64,
        size: u64,
        file: &OwnedFd,
        offset: u64,
        writable: bool,
    ) -> Result<Self, MapError> {
        let kernel = |source| MapError::Kernel { address, size, source };
        let page = PAGE;
        let aligned = [address, size, offset].iter().all(|v| v.is_multiple_of(page));
        let (Some(needed), Some(_), true) =
            (offset.checked_add(size), address.checked_add(size), aligned && size > 0)
        else {
            return Err(MapError::Shape { address, size });
        };
        if !fcntl_get_seals(file.as_fd()).is_ok_and(|seals| seals.contains(SealFlags::SHRINK)) {
            return Err(MapError::NotSealed { address });
        }
        let len = u64::try_from(fstat(file.as_fd()).map_err(kernel)?.st_size).unwrap_or(0);
        if len < needed {
            return Err(MapError::TooShort { address, len, needed });
        }
        let bytes = usize::try_from(size).map_err(|_| MapError::Shape { address, size })?;
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        let host =
            // SAFETY: a new shared mapping at an address of the kernel's choice touches nothing that exists.
            unsafe { mmap(std::ptr::null_mut(), bytes, protection, MapFlags::SHARED, file.as_fd(), offset) }
                .map_err(kernel)?;
        Ok(Self { address, size, host: host.cast(), writable, log: DirtyLog::default(), late: Late::new() })
    }

    /// First guest address.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Where it is mapped in this process, as long as this region lives. For an IOMMU, which needs only the number.
    #[must_use]
    pub fn host_address(&self) -> usize {
        self.host.expose_provenance()
    }

    /// Whether it may be written.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    fn end(&self) -> u64 {
        self.address + self.size
    }

    /// Records a write of `len` bytes, which is complete.
    #[inline]
    fn wrote(&self, offset: u64, len: u64) {
        self.log.mark(offset, len);
        self.late.wrote(offset, len);
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // The size came from a usize in `map`.
        let bytes = usize::try_from(self.size).unwrap_or(0);
        // SAFETY: this region made the mapping, and no reference to it is left.
        let unmapped = unsafe { munmap(self.host.cast(), bytes) };
        debug_assert!(unmapped.is_ok(), "munmap of an own mapping fails only on wrong arguments");
    }
}

/// A guest's memory: an immutable table of regions, cheap to clone. A change makes a new table ([`MappedMemory::with`],
/// [`MappedMemory::without`]); the old one keeps its mappings alive until it is dropped.
#[derive(Debug, Clone, Default)]
pub struct MappedMemory {
    /// Sorted by address, disjoint.
    regions: Arc<[Arc<MemoryRegion>]>,
}

impl MappedMemory {
    /// This table with one more region.
    ///
    /// # Errors
    /// [`MapError::Overlap`].
    pub fn with(&self, region: MemoryRegion) -> Result<Self, MapError> {
        if let Some(other) =
            self.regions.iter().find(|r| r.address < region.end() && region.address < r.end())
        {
            return Err(MapError::Overlap {
                address: region.address,
                size: region.size,
                other: other.address,
            });
        }
        let mut regions: Vec<_> = self.regions.to_vec();
        regions.push(Arc::new(region));
        regions.sort_by_key(|r| r.address);
        Ok(Self { regions: regions.into() })
    }

    /// This table without the regions that lie wholly within a range (the rule of vfio-user's DMA_UNMAP), and the number of regions
    /// removed.
    #[must_use]
    pub fn without(&self, address: u64, size: u64) -> (Self, usize) {
        let end = address.saturating_add(size);
        let kept: Vec<_> =
            self.regions.iter().filter(|r| !(address <= r.address && r.end() <= end)).cloned().collect();
        let gone = self.regions.len() - kept.len();
        (Self { regions: kept.into() }, gone)
    }

    /// The regions, sorted by address.
    #[must_use]
    pub fn regions(&self) -> &[Arc<MemoryRegion>] {
        &self.regions
    }

    /// Enables the dirty log, with no page marked, or disables it. Applies to all tables that share these regions. A concurrent write of
    /// another thread may or may not be marked: synchronise with the writers' threads first.
    pub fn set_dirty_log(&self, on: bool) {
        for region in self.regions.iter() {
            region.log.set(on, region.size);
        }
    }

    /// Returns and clears the pages of 4096 bytes written since the log was enabled or since the last call. A bit per page; the lowest bit
    /// of the first word is the page at `address`. `None` when the range isn't whole pages of one region, or doesn't begin at a multiple of
    /// 64 pages in it.
    #[must_use]
    pub fn take_dirty(&self, address: u64, len: u64) -> Option<Vec<u64>> {
        let (region, _, room) = self.find(address)?;
        let offset = region.size - room;
        let fits = len <= room && len.is_multiple_of(PAGE) && offset.is_multiple_of(64 * PAGE);
        // Returning a word clears it, so the range must cover all pages of its last word.
        let whole = len.is_multiple_of(64 * PAGE) || len == room;
        (fits && whole && len > 0).then(|| region.log.take(offset / PAGE, len / PAGE))
    }

    /// Begins post-copy for the region at `address`: from here on only pages in the bitmap are present. An access to another page requests
    /// it over the Unix socket `wishes`, without blocking. Applies to all tables that share the region, until the bitmap marks all
    /// pages as present. Once per region.
    ///
    /// # Errors
    /// When there is no such region, post-copy has begun for it already, or the kernel refuses.
    pub fn set_late(
        &self,
        (address, size): (u64, u64),
        bitmap: Bitmap,
        wishes: Arc<OwnedFd>,
    ) -> Result<(), MapError> {
        let found = self.regions.iter().find(|region| (region.address, region.size) == (address, size));
        let region = found.ok_or(MapError::Shape { address, size })?;
        region.late.begin((address, size), region.host, bitmap, wishes)
    }

    /// Sum of the bitmaps' generations, which grows when requested pages arrive. `None` when all pages are present.
    #[must_use]
    pub fn arrivals(&self) -> Option<u64> {
        let mut late = self.regions.iter().filter_map(|region| region.late.generation()).peekable();
        late.peek()?;
        Some(late.fold(0, u64::wrapping_add))
    }

    /// Pointer to `address`, and the number of bytes that follow it in its region.
    #[inline]
    fn find(&self, address: u64) -> Option<(&MemoryRegion, *mut u8, u64)> {
        // A guest has one to three regions: a linear search beats a binary one.
        let region = self.regions.iter().find(|r| address.wrapping_sub(r.address) < r.size)?;
        let offset = address - region.address;
        // SAFETY: the offset lies within the mapping.
        let pointer = unsafe { region.host.add(usize::try_from(offset).ok()?) };
        Some((region, pointer, region.size - offset))
    }

    /// Calls `each` with the pieces of a range, in order. Checks the whole range before the first call.
    #[inline]
    fn pieces(
        &self,
        address: u64,
        len: u64,
        write: bool,
        mut each: impl FnMut(*mut u8, usize),
    ) -> Result<(), DmaFault> {
        let fault = DmaFault { address, len };
        let size = usize::try_from(len).map_err(|_| fault)?;
        match self.find(address) {
            Some((region, pointer, room)) if len <= room && (region.writable || !write) => {
                if region.late.refuses(region.size - room, len, write) {
                    return Err(fault);
                }
                each(pointer, size);
                if write {
                    region.wrote(region.size - room, len);
                }
                return Ok(());
            }
            _ if len == 0 => return Ok(()),
            _ => self.check_pieces(address, len, write)?,
        }
        let (mut at, mut left) = (address, len);
        while left > 0 {
            let (region, pointer, room) = self.find(at).ok_or(fault)?;
            let now = left.min(room);
            if region.late.refuses(region.size - room, now, write) {
                return Err(fault);
            }
            each(pointer, usize::try_from(now).map_err(|_| fault)?);
            if write {
                region.wrote(region.size - room, now);
            }
            at += now;
            left -= now;
        }
        Ok(())
    }

    fn check_pieces(&self, address: u64, len: u64, write: bool) -> Result<(), DmaFault> {
        let fault = DmaFault { address, len };
        address.checked_add(len).ok_or(fault)?;
        let (mut at, mut left) = (address, len);
        while left > 0 {
            let (region, _, room) = self.find(at).ok_or(fault)?;
            if write && !region.writable {
                return Err(fault);
            }
            let now = left.min(room);
            at += now;
            left -= now;
        }
        Ok(())
    }

    /// The word at an address, and the region it lies in.
    #[inline]
    fn word_u32(&self, address: u64, write: bool) -> Result<(&AtomicU32, &MemoryRegion), DmaFault> {
        let (pointer, region) = self.word(address, 4, write)?;
        // SAFETY: mapped for as long as `self`, aligned to 4, and only accessed atomically or by raw copies.
        Ok((unsafe { AtomicU32::from_ptr(pointer.cast()) }, region))
    }

    #[inline]
    fn word_u64(&self, address: u64) -> Result<(&AtomicU64, &MemoryRegion), DmaFault> {
        let (pointer, region) = self.word(address, 8, true)?;
        // SAFETY: mapped for as long as `self`, aligned to 8, and only accessed atomically or by raw copies.
        Ok((unsafe { AtomicU64::from_ptr(pointer.cast()) }, region))
    }

    #[inline]
    fn word(&self, address: u64, len: u64, write: bool) -> Result<(*mut u8, &MemoryRegion), DmaFault> {
        let fault = DmaFault { address, len };
        let (region, pointer, room) = self.find(address).ok_or(fault)?;
        // Regions and their mappings are page-aligned, so an aligned guest address is an aligned pointer.
        if !address.is_multiple_of(len) || room < len || (write && !region.writable) {
            return Err(fault);
        }
        if region.late.refuses(region.size - room, len, write) {
            return Err(fault);
        }
        Ok((pointer, region))
    }
}

impl Dma for MappedMemory {
    #[inline]
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), DmaFault> {
        let mut done = 0;
        self.pieces(address, into.len() as u64, false, |pointer, len| {
            // SAFETY: the piece is `len` mapped bytes, `into` has room for it; the guest may write meanwhile, so
            // the bytes are any mixture, which all callers expect.
            unsafe { copy_out(pointer, into.as_mut_ptr().add(done), len) };
            done += len;
        })
    }

    #[inline]
    fn write(&self, address: u64, from: &[u8]) -> Result<(), DmaFault> {
        let mut done = 0;
        self.pieces(address, from.len() as u64, true, |pointer, len| {
            // SAFETY: as in `read`, in the other direction: `from` is this process's own, and nothing reads the copy.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr().add(done), pointer, len) };
            done += len;
        })
    }

    fn zero(&self, address: u64, len: u64) -> Result<(), DmaFault> {
        self.pieces(address, len, true, |pointer, len| {
            // SAFETY: the piece is `len` mapped, writable bytes.
            unsafe { std::ptr::write_bytes(pointer, 0, len) };
        })
    }

    #[inline]
    fn load_u32(&self, address: u64) -> Result<u32, DmaFault> {
        Ok(u32::from_le(self.word_u32(address, false)?.0.load(Ordering::Acquire)))
    }

    #[inline]
    fn store_u32(&self, address: u64, value: u32) -> Result<(), DmaFault> {
        let (word, region) = self.word_u32(address, true)?;
        word.store(value.to_le(), Ordering::Release);
        region.log.mark(address - region.address, 4);
        Ok(())
    }

    #[inline]
    fn swap_u32(&self, address: u64, value: u32) -> Result<u32, DmaFault> {
        let (word, region) = self.word_u32(address, true)?;
        let before = word.swap(value.to_le(), Ordering::SeqCst);
        region.log.mark(address - region.address, 4);
        Ok(u32::from_le(before))
    }

    fn compare_exchange_u64(&self, address: u64, expected: u64, new: u64) -> Result<u64, DmaFault> {
        let (word, region) = self.word_u64(address)?;
        let result = word.compare_exchange(expected.to_le(), new.to_le(), Ordering::SeqCst, Ordering::SeqCst);
        region.log.mark(address - region.address, 8);
        Ok(u64::from_le(result.unwrap_or_else(|before| before)))
    }

    fn fetch_add_u64(&self, address: u64, operand: u64) -> Result<u64, DmaFault> {
        let (word, region) = self.word_u64(address)?;
        let before = word.fetch_add(operand.to_le(), Ordering::SeqCst);
        region.log.mark(address - region.address, 8);
        Ok(u64::from_le(before))
    }

    fn copy_to(&self, from: u64, to: &Self, address: u64, len: u64) -> Result<(), CopyFault> {
        self.check_pieces(from, len, false).map_err(CopyFault::Source)?;
        to.check_pieces(address, len, true).map_err(CopyFault::Destination)?;
        let mut at = address;
        let mut destination = Ok(());
        self.pieces(from, len, false, |source, len| {
            let mut done = 0;
            let piece = to.pieces(at, len as u64, true, |target, len| {
                // SAFETY: both are `len` mapped bytes. They may be the same guest's memory, hence a copy that allows overlap. No code
                // interprets the bytes, so a source that changes concurrently is copied as any mixture.
                unsafe { std::ptr::copy(source.add(done), target, len) };
                done += len;
            });
            if destination.is_ok() {
                destination = piece;
            }
            at += len as u64;
        })
        .map_err(CopyFault::Source)?;
        // Later word stores (ring indices) must not pass the data.
        fence(Ordering::Release);
        destination.map_err(CopyFault::Destination)
    }

    fn check(&self, address: u64, len: u64) -> Result<(), DmaFault> {
        self.check_pieces(address, len, false)
    }

    fn awaits(&self, address: u64, len: u64, write: bool) -> bool {
        if !self.is_late() {
            return false;
        }
        let (mut at, mut left, mut awaits) = (address, len, false);
        while left > 0 {
            // An address outside of memory has no page to wait for.
            let Some((region, _, room)) = self.find(at) else { break };
            let now = left.min(room);
            awaits |= region.late.awaits(region.size - room, now, write);
            at = at.wrapping_add(now);
            left -= now;
        }
        awaits
    }

    #[inline]
    fn is_late(&self) -> bool {
        self.regions.iter().any(|region| region.late.is_on())
    }

    fn absences(&self) -> u64 {
        self.regions.iter().fold(0, |sum, region| sum.wrapping_add(region.late.refused()))
    }

    fn alias(&self, pieces: &[(u64, u64)]) -> Result<Alias, AliasError> {
        if self.is_late() {
            return Err(AliasError::Late);
        }
        Alias::map(pieces, |address| {
            let (region, pointer, room) = self.find(address)?;
            region.writable.then_some((pointer, room))
        })
    }

    #[inline]
    fn prefetch(&self, address: u64, len: u64) {
        let Some((_, pointer, room)) = self.find(address) else { return };
        let Ok(len) = usize::try_from(len.min(room)) else { return };
        for offset in (0..len).step_by(LINE) {
            // SAFETY: a prefetch neither faults nor changes memory, and the address lies within the mapping.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(pointer.add(offset).cast_const().cast()) };
        }
    }

    #[inline]
    fn prefetch_write(&self, address: u64, len: u64) {
        let Some((_, pointer, room)) = self.find(address) else { return };
        let Ok(len) = usize::try_from(len.min(room)) else { return };
        for offset in (0..len).step_by(LINE) {
            // SAFETY: as in `prefetch`; `prefetchw` is a no-op at worst on every x86-64 processor that Linux runs on. The
            // intrinsic would be a plain prefetch without a target feature that isn't assumed here.
            unsafe {
                asm!("prefetchw [{0}]", in(reg) pointer.add(offset), options(nostack, preserves_flags, readonly));
            }
        }
    }
}

/// From this length on a string copy is faster than a load per word.
const STRING_COPY_BYTES: usize = 512;
const WORD: usize = size_of::<u64>();

/// Copies bytes out of memory that others change concurrently. Loads each byte exactly once, so what the caller validates in the copy is
/// what it uses. A plain copy wouldn't guarantee that: the compiler may assume that memory doesn't change, and load it again.
///
/// # Safety
/// `from` must be mapped for `len` bytes. `to` must be writable for as many bytes, which no other thread accesses.
#[inline]
pub(crate) unsafe fn copy_out(from: *const u8, to: *mut u8, len: usize) {
    if len >= STRING_COPY_BYTES {
        // SAFETY: the caller's ranges. The compiler doesn't see these loads, so it can't repeat them. The direction flag is clear (ABI).
        unsafe {
            asm!(
                "rep movsb",
                inout("rcx") len => _,
                inout("rsi") from => _,
                inout("rdi") to => _,
                options(nostack, preserves_flags),
            );
        }
        return;
    }
    let byte = |at: usize| {
        // SAFETY: `at` is below `len`.
        unsafe { to.add(at).write(from.add(at).read_volatile()) };
    };
    let head = from.align_offset(WORD).min(len);
    (0..head).for_each(byte);
    let words = head + (len - head) / WORD * WORD;
    for at in (head..words).step_by(WORD) {
        // SAFETY: a whole word below `len`, aligned at the source.
        unsafe { to.add(at).cast::<u64>().write_unaligned(from.add(at).cast::<u64>().read_volatile()) };
    }
    (words..len).for_each(byte);
}

/// Prefetches an object of the host into this CPU's cache. A hint without effect on memory.
#[inline]
pub fn prefetch_object<T>(object: &T) {
    for offset in (0..size_of::<T>()).step_by(LINE) {
        // SAFETY: a prefetch neither faults nor changes memory, and the address lies within the object.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(object).cast::<i8>().add(offset)) };
    }
}

#[cfg(test)]
mod tests;
