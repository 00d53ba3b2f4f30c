//! Neighbours' rings between two VMs, with the code of the crate `neighbour`. The reference is a ring through which data is copied in
//! and out.

use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering};

use neighbour::channel::{Message, Part, PostError, Receiver, Sender};
use neighbour::layout::{Layout, Side};
use neighbour::window::{Geometry, Window};

use crate::copy::{self, Variant};

/// [`run`]'s result after an error: an invalid message or bed.
pub const FAILED: u64 = u64::MAX;
/// [`run`]'s result if the other side doesn't respond for billions of polls.
pub const STUCK: u64 = u64::MAX - 1;

/// Limit of polls without progress: a minute or more, for loaded machines.
const MAX_IDLE_POLLS: u64 = 20_000_000_000;
/// Messages that are answered before their buffers are completed.
const HELD: usize = 16;
/// Bytes before the data of a slot of the copying ring.
const SLOT_HEADER: u64 = 128;

/// Parameters of both sides, in guest memory's format.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bed {
    /// Address of the segment.
    pub segment: u64,
    /// Entries of its rings.
    pub entries: u64,
    /// The epoch, nonzero, different in each run.
    pub epoch: u64,
    /// Start of the first window.
    pub base: u64,
    /// Distance of windows in bytes.
    pub stride: u64,
    /// Size of each VM's RAM in bytes, contiguous from 0.
    pub ram: u64,
    /// Own slot: 0 or 1; the peer's is the other one.
    pub slot: u64,
    /// Address of a table with a 32-bit word per ring entry.
    pub ids: u64,
    /// Address of the own buffers.
    pub buffers: u64,
    /// Number of buffers; a power of two.
    pub count: u64,
    /// Address of the copying ring's memory, zeroed at the start of a run.
    pub copied: u64,
    /// Slots of the copying ring; a power of two.
    pub slots: u64,
}

impl Bed {
    /// Returns the words in memory's format.
    pub fn words(&self) -> [u64; 12] {
        [
            self.segment,
            self.entries,
            self.epoch,
            self.base,
            self.stride,
            self.ram,
            self.slot,
            self.ids,
            self.buffers,
            self.count,
            self.copied,
            self.slots,
        ]
    }
}

/// A side's role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Sends messages, as many at once as it has buffers, until all are completed.
    Send,
    /// Reads each message in place, and completes it.
    Receive,
    /// Sends a message and waits for the answer.
    Ping,
    /// Answers each message.
    Pong,
    /// Copies each message into a ring.
    CopyIn,
    /// Copies each message out of the ring.
    CopyOut,
    /// Reads the peer's buffers without messages, as fast as this processor can.
    Read,
}

impl Role {
    const ALL: [Self; 7] =
        [Self::Send, Self::Receive, Self::Ping, Self::Pong, Self::CopyIn, Self::CopyOut, Self::Read];

    /// Returns its number in a job.
    pub fn number(self) -> u64 {
        self as u64
    }

    /// Returns the role of this number.
    pub fn from_number(number: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.number() == number)
    }
}

struct Ends<'a> {
    words: &'a [AtomicU64],
    sender: Sender<&'a mut [u32]>,
    receiver: Receiver,
    own: Window,
    theirs: Window,
    bed: Bed,
    message: Message,
    /// Ids to be completed.
    held: [u32; HELD],
    holds: usize,
}

/// Plays `role` for `messages` messages of `length` bytes (a multiple of 64); returns the ticks, [`FAILED`] or [`STUCK`].
///
/// # Safety
/// `bed` must be the address of a valid [`Bed`], and the other side must play the other role.
pub unsafe fn run(bed: u64, role: Role, messages: u64, length: u64) -> u64 {
    // SAFETY: the caller vouches for the bed.
    let bed = unsafe { at::<Bed>(bed).read() };
    // SAFETY: the caller vouches for the bed's addresses.
    let Some(mut ends) = (unsafe { ends(bed) }) else { return FAILED };
    let started = crate::tsc::start();
    // SAFETY: the caller vouches for the bed's addresses.
    let result = unsafe {
        match role {
            Role::Send => ends.send(messages, length),
            Role::Receive => ends.receive(messages, length),
            Role::Ping => ends.ping(messages, length),
            Role::Pong => ends.pong(messages, length),
            Role::CopyIn => ends.copy_in(messages, length),
            Role::CopyOut => ends.copy_out(messages, length),
            Role::Read => ends.read(messages, length),
        }
    };
    match result {
        Ok(()) => crate::tsc::end().wrapping_sub(started),
        Err(code) => code,
    }
}

/// # Safety
/// As for [`run`].
unsafe fn ends<'a>(bed: Bed) -> Option<Ends<'a>> {
    let layout = Layout::new(u32::try_from(bed.entries).ok()?).ok()?;
    let geometry = Geometry::new(bed.base, bed.stride, 2).ok()?;
    let (own_slot, peer) = if bed.slot == 0 { (0, 1) } else { (1, 0) };
    let own = geometry.window(own_slot, &[(0, bed.ram)]).ok()?;
    let theirs = geometry.window(peer, &[(0, bed.ram)]).ok()?;
    let side = Side::of(own_slot, peer)?;
    let epoch = u32::try_from(bed.epoch).ok()?;
    // SAFETY: the segment has the layout's size, and both sides use it as atomic words.
    let words = unsafe { core::slice::from_raw_parts(at::<AtomicU64>(bed.segment), layout.size() / 8) };
    let entries = usize::try_from(bed.entries).ok()?;
    // SAFETY: only this side uses the table.
    let ids = unsafe { core::slice::from_raw_parts_mut(at::<u32>(bed.ids), entries) };
    let sender = Sender::new(words, &layout, epoch, side, own, ids).ok()?;
    let receiver = Receiver::new(words, &layout, epoch, side.other(), theirs).ok()?;
    Some(Ends {
        words,
        sender,
        receiver,
        own,
        theirs,
        bed,
        message: Message::default(),
        held: [0; HELD],
        holds: 0,
    })
}

impl Ends<'_> {
    fn buffer(&self, number: u64, length: u64) -> u64 {
        self.bed.buffers + (number & (self.bed.count - 1)) * length
    }

    /// Writes the number at both ends of a buffer and posts it.
    ///
    /// # Safety
    /// As for [`run`].
    unsafe fn post(&mut self, number: u64, length: u64) -> Result<bool, u64> {
        let buffer = self.buffer(number, length);
        // SAFETY: within the buffer, which this side owns until it is posted.
        unsafe {
            at::<u64>(buffer).write_volatile(number);
            at::<u64>(buffer + length - 8).write_volatile(number);
        }
        let length = u32::try_from(length).map_err(|_| FAILED)?;
        let address = self.own.global(buffer, length).ok_or(FAILED)?;
        match self.sender.post(self.words, &[Part { address, length }], 0, 0) {
            Ok(_) => Ok(true),
            Err(PostError::Full) => Ok(false),
            Err(_) => Err(FAILED),
        }
    }

    /// Receives a message and reads it in place. Returns its id for the completion, or `None` if there is no message.
    ///
    /// # Safety
    /// As for [`run`].
    unsafe fn take(&mut self, number: u64, length: u64) -> Result<Option<u32>, u64> {
        if !self.receiver.receive(self.words, &mut self.message).map_err(|_| FAILED)? {
            return Ok(None);
        }
        let [part] = self.message.parts() else { return Err(FAILED) };
        if u64::from(part.length) != length {
            return Err(FAILED);
        }
        // SAFETY: `receive` has checked that it is in the peer's window, which is mapped.
        unsafe {
            load(part.address, length);
            let ends = [at::<u64>(part.address), at::<u64>(part.address + length - 8)];
            if ends.iter().any(|end| end.read_volatile() != number) {
                return Err(FAILED);
            }
        }
        Ok(Some(self.message.id))
    }

    /// # Safety
    /// As for [`run`].
    unsafe fn send(&mut self, messages: u64, length: u64) -> Result<(), u64> {
        let (mut posted, mut done, mut idle) = (0, 0, 0);
        while done < messages {
            let before = posted + done;
            while posted < messages && posted - done < self.bed.count {
                // SAFETY: as for `run`.
                if !unsafe { self.post(posted, length) }? {
                    break;
                }
                posted += 1;
            }
            // No side sleeps here. A driver still checks once after a batch of posts.
            if self.sender.must_signal(self.words) {
                return Err(FAILED);
            }
            while self.sender.completion(self.words).map_err(|_| FAILED)?.is_some() {
                done += 1;
            }
            waited(&mut idle, posted + done != before)?;
        }
        Ok(())
    }

    /// # Safety
    /// As for [`run`].
    unsafe fn receive(&mut self, messages: u64, length: u64) -> Result<(), u64> {
        let (mut taken, mut idle) = (0, 0);
        while taken < messages {
            // SAFETY: as for `run`.
            let got = unsafe { self.take(taken, length) }?;
            if let Some(id) = got {
                self.receiver.complete(self.words, id, 0);
                taken += 1;
            }
            // As above: if there are no more messages, or after some.
            if (got.is_none() || taken & 15 == 0) && self.receiver.must_signal(self.words) {
                return Err(FAILED);
            }
            waited(&mut idle, got.is_some())?;
        }
        Ok(())
    }

    /// # Safety
    /// As for [`run`].
    unsafe fn ping(&mut self, messages: u64, length: u64) -> Result<(), u64> {
        for number in 0..messages {
            // SAFETY: as for `run`.
            unsafe {
                self.post_now(number, length)?;
                let id = self.take_now(number, length)?;
                self.give_back(id)?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// As for [`run`].
    unsafe fn pong(&mut self, messages: u64, length: u64) -> Result<(), u64> {
        for number in 0..messages {
            // SAFETY: as for `run`.
            unsafe {
                let id = self.take_now(number, length)?;
                // The answer first: the other side waits for it.
                self.post_now(number, length)?;
                self.give_back(id)?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// As for [`run`].
    unsafe fn post_now(&mut self, number: u64, length: u64) -> Result<(), u64> {
        // SAFETY: as for `run`. There are more buffers and entries than the other side holds.
        if !unsafe { self.post(number, length) }? || self.sender.must_signal(self.words) {
            return Err(FAILED);
        }
        while self.sender.completion(self.words).map_err(|_| FAILED)?.is_some() {}
        Ok(())
    }

    /// # Safety
    /// As for [`run`].
    unsafe fn take_now(&mut self, number: u64, length: u64) -> Result<u32, u64> {
        let mut idle = 0;
        loop {
            // SAFETY: as for `run`.
            if let Some(id) = unsafe { self.take(number, length) }? {
                return Ok(id);
            }
            waited(&mut idle, false)?;
        }
    }

    /// Completes a buffer, in batches: no side waits for that.
    fn give_back(&mut self, id: u32) -> Result<(), u64> {
        if let Some(place) = self.held.get_mut(self.holds) {
            *place = id;
            self.holds += 1;
        }
        if self.holds < HELD {
            return Ok(());
        }
        self.holds = 0;
        for id in self.held {
            self.receiver.complete(self.words, id, 0);
        }
        if self.receiver.must_signal(self.words) { Err(FAILED) } else { Ok(()) }
    }

    fn slot(&self, number: u64, length: u64) -> u64 {
        // The first 128 bytes of the memory contain the number of received messages.
        self.bed.copied + SLOT_HEADER + (number & (self.bed.slots - 1)) * (SLOT_HEADER + length)
    }

    /// # Safety
    /// As for [`run`].
    unsafe fn copy_in(&mut self, messages: u64, length: u64) -> Result<(), u64> {
        // SAFETY: only this function and `copy_out` use the shared memory; words are atomic.
        unsafe {
            let taken = &*at::<AtomicU64>(self.bed.copied);
            let mut seen = 0;
            for number in 0..messages {
                let mut idle = 0;
                while number - seen >= self.bed.slots {
                    seen = taken.load(Ordering::Acquire);
                    waited(&mut idle, false)?;
                }
                let buffer = self.buffer(number, length);
                at::<u64>(buffer).write_volatile(number);
                let slot = self.slot(number, length);
                copy::once(Variant::RepMovsb, slot + SLOT_HEADER, buffer, length);
                (*at::<AtomicU64>(slot)).store(number + 1, Ordering::Release);
            }
            let mut idle = 0;
            while taken.load(Ordering::Acquire) < messages {
                waited(&mut idle, false)?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// As for [`run`].
    unsafe fn copy_out(&mut self, messages: u64, length: u64) -> Result<(), u64> {
        // SAFETY: as for `copy_in`.
        unsafe {
            let taken = &*at::<AtomicU64>(self.bed.copied);
            for number in 0..messages {
                let slot = self.slot(number, length);
                let mut idle = 0;
                while (*at::<AtomicU64>(slot)).load(Ordering::Acquire) != number + 1 {
                    waited(&mut idle, false)?;
                }
                let buffer = self.buffer(number, length);
                copy::once(Variant::RepMovsb, buffer, slot + SLOT_HEADER, length);
                if at::<u64>(buffer).read_volatile() != number {
                    return Err(FAILED);
                }
                taken.store(number + 1, Ordering::Release);
            }
        }
        Ok(())
    }

    /// # Safety
    /// As for [`run`].
    unsafe fn read(&mut self, messages: u64, length: u64) -> Result<(), u64> {
        for number in 0..messages {
            let buffer = self.buffer(number, length);
            let length = u32::try_from(length).map_err(|_| FAILED)?;
            // Both VMs have their buffers at the same guest-physical address.
            let address = self.theirs.global(buffer, length).ok_or(FAILED)?;
            // SAFETY: RAM of the peer, in its window.
            unsafe { load(address, length.into()) };
        }
        Ok(())
    }
}

/// Counts iterations without progress.
fn waited(idle: &mut u64, progress: bool) -> Result<(), u64> {
    if progress {
        *idle = 0;
        return Ok(());
    }
    *idle += 1;
    if *idle > MAX_IDLE_POLLS { Err(STUCK) } else { Ok(()) }
}

/// Loads `length` bytes (a multiple of 64), 16 at a time, and discards them.
///
/// # Safety
/// They must be readable.
#[inline]
unsafe fn load(address: u64, length: u64) {
    let lines = length / 64;
    if lines == 0 {
        return;
    }
    // SAFETY: the caller vouches for the memory.
    unsafe {
        asm!(
            "2:",
            "movdqu {a}, [{address}]",
            "movdqu {b}, [{address} + 16]",
            "movdqu {c}, [{address} + 32]",
            "movdqu {d}, [{address} + 48]",
            "add {address}, 64",
            "dec {lines}",
            "jnz 2b",
            address = inout(reg) address => _, lines = inout(reg) lines => _,
            a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, d = out(xmm_reg) _,
            options(nostack, readonly)
        );
    }
}

fn at<T>(address: u64) -> *mut T {
    // x86-64 has 64-bit pointers.
    core::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0))
}
