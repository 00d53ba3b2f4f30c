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

pub use crate::faults::{PostError, Violation};
use crate::layout::{FLAG_MORE, Layout, LayoutError, MOST_PARTS, Side, halves};
pub use crate::part::Part;
use crate::ring::{Consumer, Producer};
use crate::window::Window;
use crate::words::Words;

/// Words of a message entry and of a completion entry.
const MESSAGE: usize = 4;
const COMPLETION: usize = 2;
/// Completion status of a message whose parts lie in a window that its receiver doesn't have: the one status that isn't the
/// users' own.
pub const STATUS_UNREACHABLE: u32 = 0xffff_0003;
/// Mark of an id that is outstanding, in a sender's table.
const OUTSTANDING: u32 = u32::MAX;
/// End of the list of free ids.
const END: u32 = u32::MAX - 1;

/// A received message: every part lies in the sender's window, or the message is [`Message::unreachable`].
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
    unreachable: bool,
}

impl Default for Message {
    fn default() -> Self {
        Self { id: 0, kind: 0, note: 0, parts: [Part::default(); MOST_PARTS], count: 0, unreachable: false }
    }
}

impl Message {
    /// Its parts, at least one; none when it is [`Message::unreachable`].
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        self.parts.get(..self.count).unwrap_or_default()
    }

    /// Some part lies in the window of a third member, which isn't mapped here. That breaks no rule, as the sender may read it: the
    /// message is to be completed with [`STATUS_UNREACHABLE`], and the sender may send a copy.
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
        let bad = PostError::Parts { count: parts.len() };
        let count = u32::try_from(parts.len()).map_err(|_| bad)?;
        if count == 0 || parts.len() > MOST_PARTS || count > self.entries {
            return Err(bad);
        }
        if let Some(part) = parts.iter().find(|part| self.own.local(part.address, part.length).is_none()) {
            return Err(PostError::Outside(*part));
        }
        let id = self.reserve(words, count)?;
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

    /// Room for `count` entries, and an id.
    #[inline]
    fn reserve(&mut self, words: &(impl Words + ?Sized), count: u32) -> Result<u32, PostError> {
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
        let Some(first) = self.messages.peek(words, 0) else {
            // Before it is waited: the sender may need the room.
            self.tell(words);
            return Ok(false);
        };
        let (id, note) = halves(first[2]);
        if id >= self.entries {
            return Err(Violation::Id(id));
        }
        let kind = (first[1] >> 48) as u16;
        (message.id, message.kind, message.note) = (id, kind, note);
        let mut entry = first;
        let mut count = 0_u32;
        let mut unreachable = false;
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
            if self.theirs.local(part.address, part.length).is_none() {
                if !self.theirs.could_be_of_another(part.address, part.length) {
                    return Err(Violation::Outside(part));
                }
                unreachable = true;
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
        message.count = if unreachable { 0 } else { count as usize };
        message.unreachable = unreachable;
        self.took(words, count);
        Ok(true)
    }

    fn took(&mut self, words: &(impl Words + ?Sized), count: u32) {
        self.messages.advance(count);
        // A quarter of the ring at a time: the word moves to the sender's processor when it is read.
        if self.messages.head().wrapping_sub(self.told) >= self.entries / 4 {
            self.tell(words);
        }
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
