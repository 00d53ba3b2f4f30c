//! One direction of a connection: the sender lends lists of buffers in its window, and the receiver returns them.
//!
//! ```text
//!  Sender::post ──── message entries: address, length, id ────▶ Receiver::receive (checked against the sender's window)
//!                                                                   reads the buffers in place, for any time
//!  Sender::completion ◀──── completion entries: id, status ──── Receiver::complete
//! ```
//!
//! A sender never has more messages outstanding than the completion ring has entries, so completions always have room. Both ends keep their
//! state in private memory. They read words of the segment once, and check the copy.
//!
//! | message entry | bits | |
//! |---|---|---|
//! | word 0 | | global address |
//! | word 1 | 0-31 | length, not 0 |
//! | | 32-47 | flags: [`FLAG_MORE`]; the others are 0 |
//! | | 48-63 | kind: defined by the user, from the first entry of a message |
//! | word 2 | 0-31 | id: below the number of entries; the same in all entries of a message |
//! | | 32-63 | note: defined by the user, from the first entry |
//! | word 3 | | stamp |
//!
//! | completion entry | bits | |
//! |---|---|---|
//! | word 0 | 0-31 | id |
//! | | 32-63 | status: defined by the user |
//! | word 1 | | stamp |
//!
//! The word "taken" has the number of message entries that the receiver has taken (low 32 bits, wrapping) and the epoch (high 32 bits).

pub use crate::faults::{PostError, Violation};
use crate::layout::{FLAG_MORE, Layout, LayoutError, MOST_PARTS, Side, halves};
pub use crate::part::Part;
use crate::ring::{Consumer, Producer};
use crate::window::Window;
use crate::words::Words;

/// Words of a message entry and of a completion entry.
const MESSAGE: usize = 4;
const COMPLETION: usize = 2;
/// Completion status of a message with parts in a window that its receiver doesn't have. All other statuses are defined by the user.
pub const STATUS_UNREACHABLE: u32 = 0xffff_0003;
/// Marks an outstanding id in a sender's table.
const OUTSTANDING: u32 = u32::MAX;
/// End of the list of free ids.
const END: u32 = u32::MAX - 1;

/// A received message. Every part is in the sender's window, or the message is [`Message::unreachable`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// Id for [`Receiver::complete`].
    pub id: u32,
    /// Kind, defined by the user.
    pub kind: u16,
    /// Note, defined by the user.
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
    /// The parts, at least one; none if the message is [`Message::unreachable`].
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        self.parts.get(..self.count).unwrap_or_default()
    }

    /// Whether some part is in the window of a third member, which isn't mapped here. This is no violation, since the sender may read that
    /// member. The receiver completes the message with [`STATUS_UNREACHABLE`], and the sender may send a copy.
    #[must_use]
    pub const fn unreachable(&self) -> bool {
        self.unreachable
    }
}

/// A completed message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The id that [`Sender::post`] returned.
    pub id: u32,
    /// Status, defined by the user.
    pub status: u32,
}

/// The sending end. `T` is its private table, with a word per ring entry.
#[derive(Debug)]
pub struct Sender<T> {
    messages: Producer<MESSAGE>,
    completions: Consumer<COMPLETION>,
    entries: u32,
    epoch: u32,
    taken_word: usize,
    taken: u32,
    own: Window,
    /// For each id: [`OUTSTANDING`], or the next free id.
    ids: T,
    free: u32,
    outstanding: u32,
}

impl<T: AsRef<[u32]> + AsMut<[u32]>> Sender<T> {
    /// Creates the sending end of side `side`, whose window is `own`, at the start of `epoch` (not 0). The segment has layout `layout`.
    /// `ids` has a word per ring entry, of any content.
    ///
    /// # Errors
    /// If the segment or the table is too small.
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

    /// Number of messages that aren't completed.
    #[must_use]
    pub const fn outstanding(&self) -> u32 {
        self.outstanding
    }

    /// Whether message `id` isn't completed.
    #[must_use]
    pub fn is_outstanding(&self, id: u32) -> bool {
        id < self.entries && self.ids.as_ref().get(id as usize) == Some(&OUTSTANDING)
    }

    /// Posts a message and returns its id. The receiver may read `parts` until it completes the id. Call [`Sender::must_signal`] after one
    /// or several posts.
    ///
    /// # Errors
    /// If there is no room, the parts are invalid, or the peer violated the protocol.
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

    /// Reserves room for `count` entries, and an id.
    #[inline]
    fn reserve(&mut self, words: &(impl Words + ?Sized), count: u32) -> Result<u32, PostError> {
        if !self.room(count) {
            self.read_taken(words).map_err(PostError::Broken)?;
            if !self.room(count) {
                return Err(PostError::Full);
            }
        }
        let id = self.free;
        // The list has only free ids, and its end is no index of the table.
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
            // The receiver hasn't written it in this epoch yet.
            return Ok(());
        }
        let sent = self.messages.tail();
        if says.wrapping_sub(self.taken) > sent.wrapping_sub(self.taken) {
            return Err(Violation::Taken { says, before: self.taken, sent });
        }
        self.taken = says;
        Ok(())
    }

    /// Whether to signal the receiver for messages that were posted since the last call.
    #[must_use]
    #[inline]
    pub fn must_signal(&mut self, words: &(impl Words + ?Sized)) -> bool {
        self.messages.must_signal(words)
    }

    /// The next completion.
    ///
    /// # Errors
    /// If the peer violated the protocol. Later calls return the same error.
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

    /// To be called before this side sleeps until a completion arrives; see [`Consumer::arm`].
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
    /// Value of the word "taken" that was last written.
    told: u32,
    theirs: Window,
}

impl Receiver {
    /// Creates the receiving end for messages of side `sender`, whose window is `theirs`, at the start of `epoch` (not 0).
    ///
    /// # Errors
    /// If the segment is too small.
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

    /// Receives the next message into `message`. Returns false if there is none.
    ///
    /// # Errors
    /// If the peer violated the protocol. Later calls return the same error.
    #[inline]
    pub fn receive(
        &mut self,
        words: &(impl Words + ?Sized),
        message: &mut Message,
    ) -> Result<bool, Violation> {
        let Some(first) = self.messages.peek(words, 0) else {
            // Before this side waits, since the sender may need the room.
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
            // The first entry became valid last.
            entry = self.messages.peek(words, count).ok_or(Violation::Torn)?;
        }
        message.count = if unreachable { 0 } else { count as usize };
        message.unreachable = unreachable;
        self.took(words, count);
        Ok(true)
    }

    fn took(&mut self, words: &(impl Words + ?Sized), count: u32) {
        self.messages.advance(count);
        // Once per quarter of the ring: the sender's read transfers the word's cache line.
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

    /// Completes a message, which returns its buffers. To be called once for each received id, in any order. Call [`Receiver::must_signal`]
    /// after one or several completions.
    #[inline]
    pub fn complete(&mut self, words: &(impl Words + ?Sized), id: u32, status: u32) {
        self.completions.write(words, 1, |_| [u64::from(status) << 32 | u64::from(id), 0]);
    }

    /// Whether to signal the sender for completions since the last call.
    #[must_use]
    #[inline]
    pub fn must_signal(&mut self, words: &(impl Words + ?Sized)) -> bool {
        self.completions.must_signal(words)
    }

    /// To be called before this side sleeps until a message arrives; see [`Consumer::arm`].
    #[must_use]
    pub fn arm(&mut self, words: &(impl Words + ?Sized)) -> bool {
        self.tell(words);
        self.messages.arm(words)
    }
}

#[cfg(test)]
#[path = "channel_tests.rs"]
mod tests;
