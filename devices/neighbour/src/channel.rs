//! One direction of a connection: lists of buffers in the sender's window go over, and the buffers come back.
//!
//! ```text
//!  Sender::post ──── message entries: address, length, id ────▶ Receiver::receive (checked against the sender's window)
//!                                                                   reads the buffers in place, as long as it likes
//!  Sender::completion ◀──── completion entries: id, status ──── Receiver::complete
//! ```
//!
//! A sender never has more messages outstanding than the completion ring has entries, so completions always have room. Both
//! keep what they decide by in private memory; words of the segment are read once and checked.
//!
//! | message entry | bits | |
//! |---|---|---|
//! | word 0 | | global address |
//! | word 1 | 0-31 | length, not 0 |
//! | | 32-47 | flags: [`FLAG_MORE`]; the others are 0 |
//! | | 48-63 | kind: the users' own, taken from the first entry of a message |
//! | word 2 | 0-31 | id: below the number of entries; the same in all entries of a message |
//! | | 32-63 | note: the users' own, taken from the first entry |
//! | word 3 | | stamp |
//!
//! | completion entry | bits | |
//! |---|---|---|
//! | word 0 | 0-31 | id |
//! | | 32-63 | status: the users' own |
//! | word 1 | | stamp |
//!
//! The word "taken" has the number of message entries taken (low 32 bits, wrapping) and the epoch (high).

use core::fmt;

use crate::layout::{FLAG_MORE, Layout, LayoutError, MOST_PARTS, Side, halves};
use crate::ring::{Consumer, Producer};
use crate::views::{Names, Owner};
use crate::window::Window;
use crate::words::Words;

/// Words of a message entry and of a completion entry.
const MESSAGE: usize = 4;
const COMPLETION: usize = 2;
/// Mark of an id that is outstanding, in a sender's table.
const OUTSTANDING: u32 = u32::MAX;
/// End of the list of free ids.
const END: u32 = u32::MAX - 1;

/// A buffer, or a part of one: global address and length in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Part {
    /// Global address.
    pub address: u64,
    /// Bytes, not 0.
    pub length: u32,
}

/// A received message: every part lies in the sender's window, or in that of a third whom the sender may name
/// ([`crate::views`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// For [`Receiver::complete`].
    pub id: u32,
    /// The users' own.
    pub kind: u16,
    /// The users' own.
    pub note: u32,
    parts: [Part; MOST_PARTS],
    count: usize,
    owners: u64,
    unreachable: bool,
}

impl Default for Message {
    fn default() -> Self {
        Self {
            id: 0,
            kind: 0,
            note: 0,
            parts: [Part::default(); MOST_PARTS],
            count: 0,
            owners: 0,
            unreachable: false,
        }
    }
}

impl Message {
    /// Its parts: at least one, but none when it is [`Message::unreachable`].
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        self.parts.get(..self.count).unwrap_or_default()
    }

    /// Whose memory its parts lie in: a bit per slot.
    #[must_use]
    pub const fn owners(&self) -> u64 {
        self.owners
    }

    /// Some part lies in the window of a third that isn't mapped here: it is to be completed with
    /// [`crate::views::STATUS_UNREACHABLE`].
    #[must_use]
    pub const fn unreachable(&self) -> bool {
        self.unreachable
    }
}

/// A buffer list that came back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// As [`Sender::post`] gave it.
    pub id: u32,
    /// The users' own.
    pub status: u32,
}

/// A message can't be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PostError {
    /// The receiver has not taken enough yet, or too many messages are outstanding: try again after completions.
    Full,
    /// No parts, or more than [`MOST_PARTS`] (or than the ring has entries).
    Parts {
        /// As given.
        count: usize,
    },
    /// A part is not in the own window, nor in one that the receiver has as well.
    Outside(Part),
    /// The peer broke the rules.
    Broken(Violation),
}

impl fmt::Display for PostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => write!(f, "The ring is full; wait for completions"),
            Self::Parts { count } => {
                write!(
                    f,
                    "A message of {count} parts is not possible; it has 1 to {MOST_PARTS}, and no more than the ring"
                )
            }
            Self::Outside(part) => {
                write!(
                    f,
                    "{:#x} bytes at {:#x} are not in this VM's own window, nor in one that the receiver has as well",
                    part.length, part.address
                )
            }
            Self::Broken(violation) => write!(f, "{violation}"),
        }
    }
}

impl core::error::Error for PostError {}

/// What a peer did that it must not. The connection ends with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Violation {
    /// A part of a message isn't RAM of its sender, nor of anybody whom it could name.
    Outside(Part),
    /// Flags that this version doesn't have.
    Flags(u16),
    /// A message with more than [`MOST_PARTS`] parts, or more than the ring holds.
    TooLong,
    /// The first entry of a message is there, and another isn't.
    Torn,
    /// An id that can't be, or differs within a message.
    Id(u32),
    /// A completion of what isn't outstanding.
    NotOutstanding(u32),
    /// The peer says that it took entries which were never sent, or fewer than before.
    Taken {
        /// What it says.
        says: u32,
        /// What it said before.
        before: u32,
        /// What was sent.
        sent: u32,
    },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Outside(part) => {
                write!(
                    f,
                    "The neighbour sent {:#x} bytes at {:#x}, which is not its RAM",
                    part.length, part.address
                )
            }
            Self::Flags(flags) => write!(f, "The neighbour sent an entry with unknown flags {flags:#x}"),
            Self::TooLong => write!(f, "The neighbour sent a message with more than {MOST_PARTS} parts"),
            Self::Torn => write!(f, "The neighbour sent a message without its later parts"),
            Self::Id(id) => write!(f, "The neighbour sent a message with the impossible id {id}"),
            Self::NotOutstanding(id) => {
                write!(f, "The neighbour completed message {id}, which is not outstanding")
            }
            Self::Taken { says, before, sent } => write!(
                f,
                "The neighbour says that it took {says} entries, after {before}, and {sent} were sent"
            ),
        }
    }
}

impl core::error::Error for Violation {}

/// The sending end. `T` is its private table: a word per ring entry.
#[derive(Debug)]
pub struct Sender<T> {
    messages: Producer<MESSAGE>,
    completions: Consumer<COMPLETION>,
    entries: u32,
    epoch: u32,
    taken_word: usize,
    taken: u32,
    own: Window,
    /// Per id: [`OUTSTANDING`], or the next free id.
    ids: T,
    free: u32,
    outstanding: u32,
}

impl<T: AsRef<[u32]> + AsMut<[u32]>> Sender<T> {
    /// At the beginning of `epoch` (not 0), in a segment of that layout, from the side `side` whose window is `own`.
    /// Nothing of what `ids` holds matters, but it has a word per ring entry.
    ///
    /// # Errors
    /// When the segment, or the table, is too small.
    pub fn new(
        words: &(impl Words + ?Sized),
        layout: &Layout,
        epoch: u32,
        side: Side,
        own: Window,
        mut ids: T,
    ) -> Result<Self, LayoutError> {
        layout.check(words)?;
        let entries = layout.entries();
        let table = ids.as_mut();
        if table.len() < entries as usize {
            return Err(LayoutError::Size { words: table.len(), needed: entries as usize });
        }
        for (id, next) in (1..).zip(table.iter_mut()) {
            *next = if id < entries { id } else { END };
        }
        Ok(Self {
            messages: Producer::new(layout.messages(side), epoch),
            completions: Consumer::new(layout.completions(side), epoch),
            entries,
            epoch,
            taken_word: layout.taken(side),
            taken: 0,
            own,
            ids,
            free: 0,
            outstanding: 0,
        })
    }

    /// Messages that have not come back.
    #[must_use]
    pub const fn outstanding(&self) -> u32 {
        self.outstanding
    }

    /// Whether message `id` has not come back.
    #[must_use]
    pub fn is_outstanding(&self, id: u32) -> bool {
        id < self.entries && self.ids.as_ref().get(id as usize) == Some(&OUTSTANDING)
    }

    /// Sends a message: `parts` are the receiver's to read until its id comes back. Call [`Sender::must_signal`] after one or
    /// several.
    ///
    /// # Errors
    /// When there is no room, the parts are impossible, or the peer broke the rules.
    #[inline]
    pub fn post(
        &mut self,
        words: &(impl Words + ?Sized),
        parts: &[Part],
        kind: u16,
        note: u32,
    ) -> Result<u32, PostError> {
        let own = self.own;
        self.post_by(words, &own, parts, kind, note)
    }

    /// The same along a pipeline: `names` says what may be named ([`crate::views::Views::to`]).
    ///
    /// # Errors
    /// As [`Sender::post`].
    #[inline]
    pub fn post_by(
        &mut self,
        words: &(impl Words + ?Sized),
        names: &impl Names,
        parts: &[Part],
        kind: u16,
        note: u32,
    ) -> Result<u32, PostError> {
        let bad = PostError::Parts { count: parts.len() };
        let count = u32::try_from(parts.len()).map_err(|_| bad)?;
        if count == 0 || parts.len() > MOST_PARTS || count > self.entries {
            return Err(bad);
        }
        if let Some(part) = parts.iter().find(|part| !matches!(names.owner(**part), Owner::Slot(_))) {
            return Err(PostError::Outside(*part));
        }
        if !self.room(count) {
            self.read_taken(words).map_err(PostError::Broken)?;
            if !self.room(count) {
                return Err(PostError::Full);
            }
        }
        let id = self.free;
        // Only a free id is in the list; its end is none.
        let Some(slot) = self.ids.as_mut().get_mut(id as usize) else { return Err(PostError::Full) };
        self.free = core::mem::replace(slot, OUTSTANDING);
        self.outstanding += 1;
        self.messages.write(words, count, |at| {
            let part = parts.get(at as usize).copied().unwrap_or_default();
            let flags = if at + 1 < count { FLAG_MORE } else { 0 };
            [
                part.address,
                u64::from(kind) << 48 | u64::from(flags) << 32 | u64::from(part.length),
                u64::from(note) << 32 | u64::from(id),
                0,
            ]
        });
        Ok(id)
    }

    fn room(&self, count: u32) -> bool {
        let used = self.messages.tail().wrapping_sub(self.taken);
        used <= self.entries - count
    }

    fn read_taken(&mut self, words: &(impl Words + ?Sized)) -> Result<(), Violation> {
        let (says, epoch) = halves(words.load_acquire(self.taken_word));
        if epoch != self.epoch {
            // Not said in this epoch yet.
            return Ok(());
        }
        let sent = self.messages.tail();
        if says.wrapping_sub(self.taken) > sent.wrapping_sub(self.taken) {
            return Err(Violation::Taken { says, before: self.taken, sent });
        }
        self.taken = says;
        Ok(())
    }

    /// Whether the receiver must be signalled because of what was posted since the last call.
    #[must_use]
    #[inline]
    pub fn must_signal(&mut self, words: &(impl Words + ?Sized)) -> bool {
        self.messages.must_signal(words)
    }

    /// The next message that came back.
    ///
    /// # Errors
    /// When the peer broke the rules; the same is found again then.
    #[inline]
    pub fn completion(&mut self, words: &(impl Words + ?Sized)) -> Result<Option<Completion>, Violation> {
        let Some([word, _]) = self.completions.peek(words, 0) else { return Ok(None) };
        let (id, status) = halves(word);
        if !self.is_outstanding(id) {
            return Err(Violation::NotOutstanding(id));
        }
        if let Some(slot) = self.ids.as_mut().get_mut(id as usize) {
            *slot = self.free;
        }
        self.free = id;
        self.outstanding -= 1;
        self.completions.advance(1);
        Ok(Some(Completion { id, status }))
    }

    /// Before this side sleeps until something comes back; see [`Consumer::arm`].
    #[must_use]
    pub fn arm(&self, words: &(impl Words + ?Sized)) -> bool {
        self.completions.arm(words)
    }
}

/// The receiving end.
#[derive(Debug)]
pub struct Receiver {
    messages: Consumer<MESSAGE>,
    completions: Producer<COMPLETION>,
    entries: u32,
    epoch: u32,
    taken_word: usize,
    /// What the sender was told last.
    told: u32,
    theirs: Window,
}

impl Receiver {
    /// At the beginning of `epoch` (not 0), for what `sender` sends, whose window is `theirs`.
    ///
    /// # Errors
    /// When the segment is too small.
    pub fn new(
        words: &(impl Words + ?Sized),
        layout: &Layout,
        epoch: u32,
        sender: Side,
        theirs: Window,
    ) -> Result<Self, LayoutError> {
        layout.check(words)?;
        Ok(Self {
            messages: Consumer::new(layout.messages(sender), epoch),
            completions: Producer::new(layout.completions(sender), epoch),
            entries: layout.entries(),
            epoch,
            taken_word: layout.taken(sender),
            told: 0,
            theirs,
        })
    }

    /// Takes the next message into `message`; false when there is none.
    ///
    /// # Errors
    /// When the peer broke the rules; the same is found again then.
    #[inline]
    pub fn receive(
        &mut self,
        words: &(impl Words + ?Sized),
        message: &mut Message,
    ) -> Result<bool, Violation> {
        let theirs = self.theirs;
        self.receive_by(words, &theirs, message)
    }

    /// The same along a pipeline: `names` says what the sender may name. Use [`crate::views::Views::receive`], which also holds
    /// what is named.
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    #[inline]
    pub fn receive_by(
        &mut self,
        words: &(impl Words + ?Sized),
        names: &impl Names,
        message: &mut Message,
    ) -> Result<bool, Violation> {
        let Some(first) = self.messages.peek(words, 0) else {
            // Before it is waited: the sender may need the room.
            self.tell(words);
            return Ok(false);
        };
        let (id, note) = halves(first[2]);
        if id >= self.entries {
            return Err(Violation::Id(id));
        }
        let mut entry = first;
        let mut count = 0_u32;
        let (mut owners, mut unreachable) = (0_u64, false);
        loop {
            let (length, above) = halves(entry[1]);
            #[expect(clippy::cast_possible_truncation, reason = "the low half of 32 bits")]
            let flags = above as u16;
            let part = Part { address: entry[0], length };
            if flags & !FLAG_MORE != 0 {
                return Err(Violation::Flags(flags));
            }
            if halves(entry[2]).0 != id {
                return Err(Violation::Id(halves(entry[2]).0));
            }
            match names.owner(part) {
                Owner::Slot(slot) => owners |= 1_u64.checked_shl(slot).unwrap_or(0),
                Owner::Unreachable => unreachable = true,
                Owner::Nobody => return Err(Violation::Outside(part)),
            }
            let Some(place) = message.parts.get_mut(count as usize) else { return Err(Violation::TooLong) };
            *place = part;
            count += 1;
            if flags & FLAG_MORE == 0 {
                break;
            }
            if count >= self.entries {
                return Err(Violation::TooLong);
            }
            // The first became valid last.
            entry = self.messages.peek(words, count).ok_or(Violation::Torn)?;
        }
        message.id = id;
        let kind = (first[1] >> 48) as u16;
        message.kind = kind;
        message.note = note;
        message.count = if unreachable { 0 } else { count as usize };
        message.owners = if unreachable { 0 } else { owners };
        message.unreachable = unreachable;
        self.messages.advance(count);
        // A quarter of the ring at a time: the word moves to the sender's processor when it is read.
        if self.messages.head().wrapping_sub(self.told) >= self.entries / 4 {
            self.tell(words);
        }
        Ok(true)
    }

    fn tell(&mut self, words: &(impl Words + ?Sized)) {
        if self.told != self.messages.head() {
            self.told = self.messages.head();
            words.store_release(self.taken_word, u64::from(self.epoch) << 32 | u64::from(self.told));
        }
    }

    /// Gives a message's buffers back. Each id that was received is given back once, in any order. Call
    /// [`Receiver::must_signal`] after one or several.
    #[inline]
    pub fn complete(&mut self, words: &(impl Words + ?Sized), id: u32, status: u32) {
        self.completions.write(words, 1, |_| [u64::from(status) << 32 | u64::from(id), 0]);
    }

    /// Whether the sender must be signalled because of what was given back since the last call.
    #[must_use]
    #[inline]
    pub fn must_signal(&mut self, words: &(impl Words + ?Sized)) -> bool {
        self.completions.must_signal(words)
    }

    /// Before this side sleeps until a message comes; see [`Consumer::arm`].
    #[must_use]
    pub fn arm(&mut self, words: &(impl Words + ?Sized)) -> bool {
        self.tell(words);
        self.messages.arm(words)
    }
}

#[cfg(test)]
#[path = "channel_tests.rs"]
mod tests;
