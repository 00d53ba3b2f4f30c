//! The rings of the Linux module `guest/mmnet` in a process, for tests and fuzzing: the very C source that guests run, with a small shim in
//! place of Linux's headers. An invariant of the module that breaks, undefined behavior, and an access outside of its tables ends the process.
//!
//! The C sources are GPL-2.0, so nothing that is linked with this crate may be distributed; it is for tests only.
#![allow(unsafe_code)] // Calls into C; the segment is memory that two ends use as atomic words.

mod ffi;

use core::ffi::CStr;
use core::ptr::NonNull;
use core::sync::atomic::AtomicU64;

use ffi::{MOST_PARTS, Raw, RawMessage};

/// A piece of memory that a message names: `struct neigh_part`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Part {
    /// Global address.
    pub address: u64,
    /// Bytes.
    pub length: u32,
}

/// A message that the module has received, checked, and handed to its user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// For [`Rings::complete`].
    pub id: u32,
    /// The users' own.
    pub kind: u16,
    /// The users' own.
    pub note: u32,
    /// Its parts.
    pub parts: Vec<Part>,
    /// Bytes of all parts.
    pub bytes: u64,
}

/// Why a message isn't sent: what `neigh_post()` returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PostError {
    /// `-ENOSPC`: the ring is full.
    Full,
    /// `-EINVAL`: no parts, too many, or one of length 0.
    Parts,
    /// `-ENOTCONN`: the connection is over.
    NotConnected,
}

/// Memory of a pair's segment, zeroed, with pages around it that can't be touched.
#[derive(Debug)]
pub struct Segment {
    memory: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: atomic words, which belong to it alone.
unsafe impl Send for Segment {}
// SAFETY: likewise.
unsafe impl Sync for Segment {}

impl Segment {
    /// `bytes` of memory, a multiple of 4096.
    ///
    /// # Panics
    /// When there is no memory, or `bytes` is no such number.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        assert!(bytes > 0 && bytes.is_multiple_of(4096), "{bytes} bytes are not whole pages");
        // SAFETY: any size may be asked for.
        let memory = unsafe { ffi::rings_segment(bytes) };
        let memory = NonNull::new(memory.cast()).expect("memory for a segment");
        Self { memory, words: bytes / 8 }
    }

    /// Its words.
    #[must_use]
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: page-aligned, initialized, that long, and there until `self` goes; C accesses it by atomic operations only.
        unsafe { core::slice::from_raw_parts(self.memory.as_ptr(), self.words) }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: from `rings_segment`, and not used any more.
        unsafe { ffi::rings_segment_free(self.memory.as_ptr().cast()) }
    }
}

/// Where windows lie, and whose the two ends are.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// Start of the first window.
    pub base: u64,
    /// Bytes between windows; a power of two, which `base` is a multiple of.
    pub stride: u64,
    /// Windows, 64 at most.
    pub slots: u32,
    /// This end's slot.
    pub own: u32,
    /// The other end's.
    pub peer: u32,
}

/// The module's end of a connection that is live. One user, of the protocol 1 (the high byte of a kind), may use the whole ring.
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
    /// The end in `place`, over a segment of rings of `entries` entries, in `epoch`. `peer_ram` are the peer's pieces of RAM: guest-physical
    /// start and bytes.
    ///
    /// # Panics
    /// When these can't be, or there is no memory.
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
        // SAFETY: the segment is large enough and outlives the end; the pieces are that many.
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

    /// The window of a third VM is mapped; `common`: the registry says that the peer may read it, too.
    ///
    /// # Panics
    /// When there is no such slot, or it is taken.
    pub fn third(&mut self, slot: u32, ram: &[(u64, u64)], common: bool) {
        let extents = extents(self.place, slot, ram);
        let count = u32::try_from(extents.len()).expect("few pieces");
        // SAFETY: a live end; the pieces are that many.
        let done = unsafe { ffi::rings_third(self.raw.as_ptr(), slot, extents.as_ptr(), count, common) };
        assert!(done, "slot {slot} can't be a third VM's");
        self.thirds.push(slot);
    }

    /// Uses of a third VM's window: 1 is its own connection's, and each message that names it is one.
    ///
    /// # Panics
    /// When there is no third VM in that slot.
    #[must_use]
    pub fn third_uses(&self, slot: u32) -> i32 {
        assert!(self.thirds.contains(&slot), "no third VM is in slot {slot}");
        // SAFETY: a live end, which has that third.
        unsafe { ffi::rings_third_uses(self.raw.as_ptr(), slot) }
    }

    /// Sends a message; `cookie` comes back by [`Rings::sent`].
    ///
    /// # Errors
    /// As `neigh_post()`.
    ///
    /// # Panics
    /// When it says anything else.
    pub fn post(&mut self, parts: &[Part], kind: u16, note: u32, cookie: u64) -> Result<(), PostError> {
        let count = u32::try_from(parts.len()).unwrap_or(u32::MAX);
        // SAFETY: a live end; the parts are that many.
        match unsafe { ffi::rings_post(self.raw.as_ptr(), parts.as_ptr(), count, kind, note, cookie) } {
            0 => Ok(()),
            -28 => Err(PostError::Full),
            -22 => Err(PostError::Parts),
            -107 => Err(PostError::NotConnected),
            other => panic!("neigh_post() returned {other}"),
        }
    }

    /// Polls once: takes what came back and what came in. True when it sleeps now, until it is signalled.
    pub fn poll(&mut self) -> bool {
        // SAFETY: a live end.
        self.open && unsafe { ffi::rings_poll(self.raw.as_ptr()) }
    }

    /// The next message that a poll has taken.
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

    /// Gives a received message back; the next poll or kick signals. False, and nothing is done, when it isn't out.
    pub fn complete(&mut self, id: u32, status: u32) -> bool {
        let Some(at) = self.held.iter().position(|held| *held == id) else { return false };
        self.held.swap_remove(at);
        // SAFETY: a live end; the message is out, and given back once.
        unsafe { ffi::rings_complete(self.raw.as_ptr(), id, status) };
        true
    }

    /// The next message that came back: cookie and status.
    pub fn sent(&mut self) -> Option<(u64, u32)> {
        let (mut cookie, mut status) = (0, 0);
        // SAFETY: a live end, and places for both.
        unsafe { ffi::rings_sent(self.raw.as_ptr(), &raw mut cookie, &raw mut status) }
            .then_some((cookie, status))
    }

    /// Signals the peer if it sleeps for what was posted or given back.
    pub fn kick(&mut self) {
        // SAFETY: a live end.
        unsafe { ffi::rings_kick(self.raw.as_ptr()) }
    }

    /// The connection is over: everything that is outstanding comes back by [`Rings::sent`].
    pub fn end(&mut self) {
        if core::mem::replace(&mut self.open, false) {
            // SAFETY: a live end, for the first time.
            unsafe { ffi::rings_end(self.raw.as_ptr()) }
        }
    }

    /// How often the peer was signalled.
    #[must_use]
    pub fn signals(&self) -> u32 {
        // SAFETY: a live end.
        unsafe { ffi::rings_signals(self.raw.as_ptr()) }
    }

    /// How often the user was told that there is room.
    #[must_use]
    pub fn rooms(&self) -> u64 {
        // SAFETY: a live end.
        unsafe { ffi::rings_rooms(self.raw.as_ptr()) }
    }

    /// What the peer did that it must not.
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
        // SAFETY: from `rings_new`, and not used any more.
        unsafe { ffi::rings_free(self.raw.as_ptr()) }
    }
}

/// Global start and last address of pieces of RAM.
fn extents(place: Place, slot: u32, ram: &[(u64, u64)]) -> Vec<[u64; 2]> {
    let start = place.base + u64::from(slot) * place.stride;
    ram.iter()
        .map(|&(at, size)| {
            assert!(size > 0 && at + size <= place.stride, "RAM outside of its window");
            [start + at, start + at + size - 1]
        })
        .collect()
}
