//! The program's shared memory.

#![allow(unsafe_code)] // Cuts raw memory into arrays that several vCPUs use.

use crate::{PAGE, Refused};
use core::marker::PhantomData;
use core::ops::Range;
use core::sync::atomic::{AtomicU32, AtomicU64};

/// Types that shared arrays may contain.
///
/// # Safety
/// All zero bits must be a value of the type, and its alignment must not exceed a page.
pub unsafe trait Plain: Send + Sync {}
// SAFETY: zero is a value of each, and alignments are at most 8.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for u64 {}
// SAFETY: as above.
unsafe impl Plain for f64 {}
// SAFETY: as above.
unsafe impl Plain for AtomicU32 {}
// SAFETY: as above.
unsafe impl Plain for AtomicU64 {}

/// Allocator of shared arrays. Each vCPU has its own heap over the same memory, and makes the same requests in the same order. So all
/// get the same arrays.
#[derive(Debug, Clone)]
pub struct Heap {
    next: usize,
    end: usize,
}

impl Heap {
    /// Creates a heap over `length` bytes from `start`.
    ///
    /// # Safety
    /// The memory must be zero, must stay valid while anything from the heap is used, and only heaps over the same memory may use it.
    pub unsafe fn new(start: *mut u8, length: usize) -> Self {
        let start = start.expose_provenance();
        Self { next: start.next_multiple_of(PAGE), end: start.saturating_add(length) }
    }

    /// Returns the free bytes.
    pub fn left(&self) -> usize {
        self.end.saturating_sub(self.next)
    }

    /// Allocates an array of zeros on pages of its own.
    ///
    /// # Errors
    /// There isn't enough memory.
    pub fn array<T: Plain>(&mut self, length: usize) -> Result<Shared<T>, Refused> {
        let bytes = length.checked_mul(size_of::<T>()).and_then(|bytes| bytes.checked_next_multiple_of(PAGE));
        let Some(bytes) = bytes.filter(|bytes| *bytes <= self.left()) else {
            let needed = length.saturating_mul(size_of::<T>());
            return Err(Refused::Memory { needed: needed as u64, left: self.left() as u64 });
        };
        let start = core::ptr::with_exposed_provenance_mut(self.next);
        self.next += bytes;
        Ok(Shared { start, length, of: PhantomData })
    }
}

/// An array that all vCPUs see. The program decides which vCPU uses which part when, so its slices are unsafe; arrays of atomics are
/// safe ([`Shared::atomics`]).
#[derive(Debug)]
pub struct Shared<T> {
    start: *mut T,
    length: usize,
    of: PhantomData<T>,
}

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Shared<T> {}

// SAFETY: access to its slices is unsafe, and elements may move between threads (`Plain`).
unsafe impl<T: Plain> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Plain> Sync for Shared<T> {}

impl<T: Plain> Shared<T> {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Returns whether the array is empty.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns a part for reading.
    ///
    /// # Safety
    /// No code may write it while the slice is used.
    ///
    /// # Panics
    /// The array has no such part.
    pub unsafe fn read(&self, part: Range<usize>) -> &[T] {
        self.check(&part);
        // SAFETY: inside the array, initialized as `Plain`; the caller vouches for writers.
        unsafe { core::slice::from_raw_parts(self.start.add(part.start), part.len()) }
    }

    /// Returns a part for writing.
    ///
    /// # Safety
    /// No other code may access it while the slice is used.
    ///
    /// # Panics
    /// The array has no such part.
    #[expect(clippy::mut_from_ref, reason = "the caller vouches that nobody else has the part")]
    pub unsafe fn write(&self, part: Range<usize>) -> &mut [T] {
        self.check(&part);
        // SAFETY: as in `read`.
        unsafe { core::slice::from_raw_parts_mut(self.start.add(part.start), part.len()) }
    }

    /// Returns the start of the array.
    pub fn address(&self) -> *mut T {
        self.start
    }

    fn check(&self, part: &Range<usize>) {
        assert!(
            part.start <= part.end && part.end <= self.length,
            "part {part:?} of an array of {}",
            self.length
        );
    }
}

/// Types that several vCPUs may read and write at once.
pub trait Atomic: Plain {}
impl Atomic for AtomicU32 {}
impl Atomic for AtomicU64 {}

impl<T: Atomic + 'static> Shared<T> {
    /// Returns all elements.
    pub fn atomics(&self) -> &[T] {
        // SAFETY: all vCPUs may use atomics at once, and the heap returns no conflicting slices of them.
        unsafe { self.read(0..self.length) }
    }
}

#[cfg(test)]
mod tests {
    use super::Heap;
    use crate::{PAGE, Refused};
    use std::sync::atomic::{AtomicU64, Ordering};

    /// Two heaps over the same memory return the same arrays, on separate pages. A request beyond the free bytes is refused, with
    /// their number.
    #[test]
    fn heaps_that_are_asked_alike_give_the_same() {
        let mut memory = vec![0_u64; 4 * PAGE / 8];
        let bytes = memory.len() * 8;
        let start = memory.as_mut_ptr().cast::<u8>();
        // SAFETY: the memory outlives both, and only they use it.
        let (mut one, mut other) = unsafe { (Heap::new(start, bytes), Heap::new(start, bytes)) };
        let (a, b) = (one.array::<u8>(1).unwrap(), other.array::<u8>(1).unwrap());
        assert_eq!(a.address(), b.address());
        let (c, d) = (one.array::<AtomicU64>(3).unwrap(), other.array::<AtomicU64>(3).unwrap());
        assert_eq!(c.address().addr() % PAGE, 0);
        assert_ne!(c.address().addr(), a.address().addr());
        c.atomics()[2].store(5, Ordering::Relaxed);
        assert_eq!(d.atomics()[2].load(Ordering::Relaxed), 5);
        assert!(matches!(one.array::<f64>(1 << 20), Err(Refused::Memory { needed: 0x80_0000, .. })));
        assert!(one.array::<f64>(usize::MAX).is_err());
    }
}
