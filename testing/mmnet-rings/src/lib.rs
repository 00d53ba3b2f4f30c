//! The rings of the Linux module `guest/mmnet` in a process, for tests and fuzzing: the C source that guests run, with a small shim
//! instead of Linux's headers. A violated invariant of the module, undefined behavior, or an access outside of its tables ends the
//! process.
//!
//! The C sources are GPL-2.0, so a binary that links this crate must not be distributed. It is for tests only.
#![allow(unsafe_code)] // Calls into C; the segment is memory that two ends use as atomic words.

mod ffi;

use core::ffi::CStr;
use core::ptr::NonNull;
use core::sync::atomic::AtomicU64;

use ffi::{MOST_PARTS, Raw, RawMessage};

/// A range of memory that a message names: `struct neigh_part`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Part {
    /// Global address.
    pub address: u64,
    /// Length in bytes.
    pub length: u32,
}

/// A message that the module has received, checked, and passed to its user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Identifier for [`Rings::complete`].
    pub id: u32,
    /// Protocol in the high byte; the low byte is the protocol's.
    pub kind: u16,
    /// Word whose meaning the protocol defines.
    pub note: u32,
    /// Its parts.
    pub parts: Vec<Part>,
    /// Total length of all parts in bytes.
    pub bytes: u64,
}

/// The reason why a message isn't sent: `neigh_post()`'s return value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PostError {
    /// `-ENOSPC`: the ring is full.
    Full,
    /// `-EINVAL`: no parts, too many parts, or a part of length 0.
    Parts,
    /// `-ENOTCONN`: the connection has ended.
    NotConnected,
}

/// Zeroed memory of a pair's segment, between guard pages.
#[derive(Debug)]
pub struct Segment {
    memory: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: atomic words that no other object owns.
unsafe impl Send for Segment {}
// SAFETY: likewise.
unsafe impl Sync for Segment {}

impl Segment {
    /// Allocates `bytes` bytes, a multiple of 4096.
    ///
    /// # Panics
    /// There is no memory, or `bytes` is invalid.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        assert!(bytes > 0 && bytes.is_multiple_of(4096), "{bytes} bytes are not whole pages");
        // SAFETY: any size is permitted.
        let memory = unsafe { ffi::rings_segment(bytes) };
        let memory = NonNull::new(memory.cast()).expect("memory for a segment");
        Self { memory, words: bytes / 8 }
    }

    /// Returns its words.
    #[must_use]
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: page-aligned, initialized, of this length, and valid while `self` lives. C accesses it by atomic operations only.
        unsafe { core::slice::from_raw_parts(self.memory.as_ptr(), self.words) }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: from `rings_segment`, and no longer used.
        unsafe { ffi::rings_segment_free(self.memory.as_ptr().cast()) }
    }
}

/// Geometry of windows, and the slots of the two ends.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// Start of the first window.
    pub base: u64,
    /// Distance of windows in bytes: a power of two that divides `base`.
    pub stride: u64,
    /// Number of windows, at most 64.
    pub slots: u32,
    /// This end's slot.
    pub own: u32,
    /// The other end's slot.
    pub peer: u32,
}

/// The module's end of a live connection. One user, of protocol 1 (the high byte of a kind), may use the whole ring.
#[derive(Debug)]
pub struct Rings<'a> {
    raw: NonNull<Raw>,
    place: Place,
    entries: u32,
    /// Ids that were received and not completed: the module's users complete each once.
    held: Vec<u32>,
    open: bool,
    thirds: Vec<u32>,
    _segment: &'a Segment,
}

impl<'a> Rings<'a> {
    /// Creates the end in `place`, over a segment of rings of `entries` entries, in `epoch`. `peer_ram` are the peer's regions of
    /// RAM: guest-physical start and bytes.
    ///
    /// # Panics
    /// The parameters are invalid, or there is no memory.
    #[must_use]
    pub fn new(
        segment: &'a Segment,
        entries: u32,
        epoch: u32,
        place: Place,
        peer_ram: &[(u64, u64)],
    ) -> Self {
        let direction = (512 + 48 * entries as usize).next_multiple_of(4096);
        assert!(
            entries.is_power_of_two() && segment.words * 8 >= 4096 + 2 * direction,
            "a segment too small"
        );
        assert!(place.own != place.peer && place.own.max(place.peer) < place.slots && place.slots <= 64);
        assert!(place.stride.is_power_of_two() && place.base.is_multiple_of(place.stride));
        let extents = extents(place, place.peer, peer_ram);
        let count = u32::try_from(extents.len()).expect("few pieces");
        // SAFETY: the segment is large enough and outlives the end; the count of regions is right.
        let raw = unsafe {
            ffi::rings_new(
                segment.memory.as_ptr().cast(),
                entries,
                epoch,
                place.own,
                place.peer,
                place.base,
                place.stride,
                place.slots,
                extents.as_ptr(),
                count,
            )
        };
        let raw = NonNull::new(raw).expect("memory for an end of rings, and at most 4 pieces of RAM");
        Self { raw, place, entries, held: Vec::new(), open: true, thirds: Vec::new(), _segment: segment }
    }

    /// Maps the window of a third VM. `common`: the registry says that the peer may read it, too.
    ///
    /// # Panics
    /// The slot doesn't exist or is in use.
    pub fn third(&mut self, slot: u32, ram: &[(u64, u64)], common: bool) {
        let extents = extents(self.place, slot, ram);
        let count = u32::try_from(extents.len()).expect("few pieces");
        // SAFETY: a live end; the count of regions is right.
        let done = unsafe { ffi::rings_third(self.raw.as_ptr(), slot, extents.as_ptr(), count, common) };
        assert!(done, "slot {slot} can't be a third VM's");
        self.thirds.push(slot);
    }

    /// Returns the uses of a third VM's window: 1 for its own connection, and 1 per message that names it.
    ///
    /// # Panics
    /// There is no third VM in that slot.
    #[must_use]
    pub fn third_uses(&self, slot: u32) -> i32 {
        assert!(self.thirds.contains(&slot), "no third VM is in slot {slot}");
        // SAFETY: a live end, which has that third VM.
        unsafe { ffi::rings_third_uses(self.raw.as_ptr(), slot) }
    }

    /// Sends a message; [`Rings::sent`] returns `cookie`.
    ///
    /// # Errors
    /// As `neigh_post()`.
    ///
    /// # Panics
    /// It returns any other value.
    pub fn post(&mut self, parts: &[Part], kind: u16, note: u32, cookie: u64) -> Result<(), PostError> {
        let count = u32::try_from(parts.len()).unwrap_or(u32::MAX);
        // SAFETY: a live end; the count of parts is right.
        match unsafe { ffi::rings_post(self.raw.as_ptr(), parts.as_ptr(), count, kind, note, cookie) } {
            0 => Ok(()),
            -28 => Err(PostError::Full),
            -22 => Err(PostError::Parts),
            -107 => Err(PostError::NotConnected),
            other => panic!("neigh_post() returned {other}"),
        }
    }

    /// Polls once: collects completions and messages. Returns true if the end now sleeps until a signal.
    pub fn poll(&mut self) -> bool {
        // SAFETY: a live end.
        self.open && unsafe { ffi::rings_poll(self.raw.as_ptr()) }
    }

    /// Returns the next polled message.
    pub fn received(&mut self) -> Option<Message> {
        let mut raw =
            RawMessage { id: 0, note: 0, kind: 0, count: 0, bytes: 0, parts: [Part::default(); MOST_PARTS] };
        // SAFETY: a live end, and a place for the message.
        if !unsafe { ffi::rings_received(self.raw.as_ptr(), &raw mut raw) } {
            return None;
        }
        assert!(raw.id < self.entries && !self.held.contains(&raw.id), "id {} is handed out twice", raw.id);
        self.held.push(raw.id);
        let parts = raw.parts.get(..usize::from(raw.count)).expect("at most 32 parts").to_vec();
        Some(Message { id: raw.id, kind: raw.kind, note: raw.note, parts, bytes: raw.bytes })
    }

    /// Completes a received message; the next poll or kick signals. Returns false without effect if it isn't outstanding.
    pub fn complete(&mut self, id: u32, status: u32) -> bool {
        let Some(at) = self.held.iter().position(|held| *held == id) else { return false };
        self.held.swap_remove(at);
        // SAFETY: a live end; the message is outstanding, and is completed once.
        unsafe { ffi::rings_complete(self.raw.as_ptr(), id, status) };
        true
    }

    /// Returns the next completed message: cookie and status.
    pub fn sent(&mut self) -> Option<(u64, u32)> {
        let (mut cookie, mut status) = (0, 0);
        // SAFETY: a live end, and places for both.
        unsafe { ffi::rings_sent(self.raw.as_ptr(), &raw mut cookie, &raw mut status) }
            .then_some((cookie, status))
    }

    /// Signals the peer if it sleeps and messages or completions are pending for it.
    pub fn kick(&mut self) {
        // SAFETY: a live end.
        unsafe { ffi::rings_kick(self.raw.as_ptr()) }
    }

    /// Ends the connection: [`Rings::sent`] returns everything that is outstanding.
    pub fn end(&mut self) {
        if core::mem::replace(&mut self.open, false) {
            // SAFETY: a live end, for the first time.
            unsafe { ffi::rings_end(self.raw.as_ptr()) }
        }
    }

    /// Returns the number of signals to the peer.
    #[must_use]
    pub fn signals(&self) -> u32 {
        // SAFETY: a live end.
        unsafe { ffi::rings_signals(self.raw.as_ptr()) }
    }

    /// Returns the number of notifications to the user that there is room.
    #[must_use]
    pub fn rooms(&self) -> u64 {
        // SAFETY: a live end.
        unsafe { ffi::rings_rooms(self.raw.as_ptr()) }
    }

    /// Returns the peer's protocol violation, if any.
    #[must_use]
    pub fn violation(&self) -> Option<&'static str> {
        // SAFETY: a live end.
        let text = unsafe { ffi::rings_violation(self.raw.as_ptr()) };
        // SAFETY: a constant string of the module, or none.
        let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })?;
        Some(text.to_str().unwrap_or("a sentence that isn't UTF-8"))
    }
}

impl Drop for Rings<'_> {
    fn drop(&mut self) {
        // SAFETY: from `rings_new`, and no longer used.
        unsafe { ffi::rings_free(self.raw.as_ptr()) }
    }
}

/// Returns first and last global address of regions of RAM.
fn extents(place: Place, slot: u32, ram: &[(u64, u64)]) -> Vec<[u64; 2]> {
    let start = place.base + u64::from(slot) * place.stride;
    ram.iter()
        .map(|&(at, size)| {
            assert!(size > 0 && at + size <= place.stride, "RAM outside of its window");
            [start + at, start + at + size - 1]
        })
        .collect()
}
