//! Memory that the program shares out.

#![allow(unsafe_code)] // Cuts raw memory into arrays that several vCPUs use.

use crate::{PAGE, Refused};
use core::marker::PhantomData;
use core::ops::Range;
use core::sync::atomic::{AtomicU32, AtomicU64};

/// What may lie in shared arrays.
///
/// # Safety
/// All zero bits are a value of the type, and it needs no more alignment than a page.
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

/// What all vCPUs cut arrays from: each has a heap of its own over the same memory, and asks it for the same things in the same
/// order, so that all get the same arrays.
#[derive(Debug, Clone)]
pub struct Heap {
    next: usize,
    end: usize,
}

impl Heap {
    /// Over `length` bytes from `start`.
    ///
    /// # Safety
    /// The memory is zero, stays valid while anything from the heap is used, and nothing but heaps over the same memory uses it.
    pub unsafe fn new(start: *mut u8, length: usize) -> Self {
        let start = start.expose_provenance();
        Self { next: start.next_multiple_of(PAGE), end: start.saturating_add(length) }
    }

    /// Bytes left.
    pub fn left(&self) -> usize {
        self.end.saturating_sub(self.next)
    }

    /// An array of zeros on pages of its own.
    ///
    /// # Errors
    /// When there is not that much memory.
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

/// An array that all vCPUs see. Who may use which part when is the program's affair, so its slices are unsafe; arrays of atomics
/// are not ([`Shared::atomics`]).
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

// SAFETY: its slices are unsafe to get, and elements may go between threads (`Plain`).
unsafe impl<T: Plain> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Plain> Sync for Shared<T> {}

impl<T: Plain> Shared<T> {
    /// Elements.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// A part, to read.
    ///
    /// # Safety
    /// Nobody writes it while the slice is used.
    ///
    /// # Panics
    /// When the array hasn't such a part.
    pub unsafe fn read(&self, part: Range<usize>) -> &[T] {
        self.check(&part);
        // SAFETY: inside the array, initialised as `Plain`; the caller vouches for writers.
        unsafe { core::slice::from_raw_parts(self.start.add(part.start), part.len()) }
    }

    /// A part, to write.
    ///
    /// # Safety
    /// Nobody else reads or writes it while the slice is used.
    ///
    /// # Panics
    /// When the array hasn't such a part.
    #[expect(clippy::mut_from_ref, reason = "the caller vouches that nobody else has the part")]
    pub unsafe fn write(&self, part: Range<usize>) -> &mut [T] {
        self.check(&part);
        // SAFETY: as in `read`.
        unsafe { core::slice::from_raw_parts_mut(self.start.add(part.start), part.len()) }
    }

    /// Where it begins.
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

/// What may be read and written by several at once.
pub trait Atomic: Plain {}
impl Atomic for AtomicU32 {}
impl Atomic for AtomicU64 {}

impl<T: Atomic + 'static> Shared<T> {
    /// All elements.
    pub fn atomics(&self) -> &[T] {
        // SAFETY: atomics may be used by all at once, and the heap gives slices of them in no other way that excludes it.
        unsafe { self.read(0..self.length) }
    }
}

#[cfg(test)]
mod tests {
    use super::Heap;
    use crate::{PAGE, Refused};
    use std::sync::atomic::{AtomicU64, Ordering};

    /// Two heaps over the same memory give the same arrays, on pages of their own; too much is refused with what is left.
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
