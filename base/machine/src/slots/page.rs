//! A page that this process writes and a guest maps read-only (a shadow register page).
#![allow(unsafe_code)] // Atomic stores into a mapping.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::{HostMapping, PAGE, SlotError};

/// [`PAGE`] as `usize`.
const SIZE: usize = 4096;
const _: () = assert!(SIZE as u64 == PAGE);

/// A page of 4096 bytes, initially zero. The guest sees each store atomically, and all stores in program order (x86).
#[derive(Debug)]
pub struct SharedPage {
    file: Arc<OwnedFd>,
    mapping: Arc<HostMapping>,
}

impl SharedPage {
    /// Allocates a page.
    ///
    /// # Errors
    /// When the host has no memory or descriptor for it.
    pub fn new(name: &str) -> Result<Self, SlotError> {
        let refused = |source: io::Error| SlotError::Refused {
            name: name.to_owned(),
            what: "given a page of memory".to_owned(),
            source,
        };
        let file = || {
            let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
            ftruncate(&file, PAGE)?;
            fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
            io::Result::Ok(file)
        };
        let file = Arc::new(file().map_err(refused)?);
        let mapping = HostMapping::new(name, file.as_fd(), 0, PAGE, true)?;
        Ok(Self { file, mapping })
    }

    /// The memfd, for code that maps it.
    pub fn file(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.file)
    }

    /// Stores the lowest `bytes` (1, 2 or 4) of a value, atomically where the offset is a multiple of `bytes`. Ignores a store that ends
    /// beyond the page.
    pub fn store(&self, offset: u32, bytes: u8, value: u32) {
        let (at, size) = (offset as usize, usize::from(bytes));
        if !matches!(size, 1 | 2 | 4) || at + size > SIZE {
            return;
        }
        let [low, high, ..] = value.to_le_bytes();
        // SAFETY: `at` lies in the mapping, which lives as long as `self`.
        let place = unsafe { self.mapping.as_ptr().add(at) };
        match size {
            4 if at.is_multiple_of(4) => {
                // SAFETY: aligned, in the page, and only accessed atomically.
                unsafe { AtomicU32::from_ptr(place.cast()) }.store(value, Ordering::Release);
            }
            2 if at.is_multiple_of(2) => {
                let value = u16::from_ne_bytes([low, high]);
                // SAFETY: as above.
                unsafe { AtomicU16::from_ptr(place.cast()) }.store(value, Ordering::Release);
            }
            _ => {
                for (distance, byte) in value.to_le_bytes().into_iter().take(size).enumerate() {
                    // SAFETY: as above; a byte is always aligned.
                    unsafe { AtomicU8::from_ptr(place.add(distance)) }.store(byte, Ordering::Release);
                }
            }
        }
    }

    /// Loads the lowest `bytes` (1, 2 or 4) of a value, atomically where the offset is a multiple of `bytes`. Returns 0 for a load that
    /// ends beyond the page.
    pub fn load(&self, offset: u32, bytes: u8) -> u32 {
        let (at, size) = (offset as usize, usize::from(bytes));
        if at + size > SIZE {
            return 0;
        }
        // SAFETY: `at` lies in the mapping, which lives as long as `self`.
        let place = unsafe { self.mapping.as_ptr().add(at) };
        match size {
            // SAFETY: aligned, in the page, and only accessed atomically.
            4 if at.is_multiple_of(4) => unsafe { AtomicU32::from_ptr(place.cast()) }.load(Ordering::Acquire),
            2 if at.is_multiple_of(2) => {
                // SAFETY: as above.
                u32::from(unsafe { AtomicU16::from_ptr(place.cast()) }.load(Ordering::Acquire))
            }
            _ => (0..size.min(4)).fold(0, |value, distance| {
                // SAFETY: as above; a byte is always aligned.
                let byte = unsafe { AtomicU8::from_ptr(place.add(distance)) }.load(Ordering::Acquire);
                value | u32::from(byte) << (8 * distance)
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_land_where_they_should_and_nothing_lands_outside() {
        let page = SharedPage::new("test").unwrap();
        page.store(0x10, 4, 0x4433_2211);
        page.store(0x15, 2, 0xBBAA);
        page.store(0x18, 1, 0xFFFF_FF77);
        page.store(0xFFE, 4, u32::MAX);
        page.store(u32::MAX, 1, 1);
        page.store(0x20, 3, 1);
        let bytes: Vec<u32> = (0x10..0x1A).map(|at| page.load(at, 1)).collect();
        assert_eq!(bytes, [0x11, 0x22, 0x33, 0x44, 0, 0xAA, 0xBB, 0, 0x77, 0]);
        assert_eq!(
            [page.load(0x10, 4), page.load(0x12, 4), page.load(0x12, 2)],
            [0x4433_2211, 0xAA00_4433, 0x4433]
        );
        assert_eq!(
            [page.load(0xFFE, 2), page.load(0x20, 1), page.load(0x1000, 1), page.load(0xFFF, 4)],
            [0; 4]
        );
    }

    #[test]
    fn whoever_has_the_memory_can_not_make_it_shorter() {
        let page = SharedPage::new("test").unwrap();
        assert!(ftruncate(page.file(), 0).is_err());
    }
}
