//! The metadata segment of a pair: memory that both VMs write. `docs/design/specs/neighbours-abi.md` describes it, and
//! `include/causeway_neighbour.h` has it for C. A test keeps the header equal to this module.
//!
//! ```text
//! 0       header: written once, by the registry, before either side sees the segment
//! 256     ready word of side 0 (the lower slot), then its features; on a separate cache line
//! 384     the same of side 1
//! 4096    direction 0: side 0 sends
//!           +0    number of message entries that the receiver has taken          written by the receiver
//!           +128  stamp of the message entry that the receiver sleeps for        written by the receiver
//!           +256  stamp of the completion entry that the sender sleeps for       written by the sender
//!           +512  message entries, 32 bytes each                                 written by the sender
//!           then  completion entries, 16 bytes each                              written by the receiver
//! ...     direction 1: side 1 sends, on the next page after direction 0
//! ```
//!
//! All numbers are little-endian 64-bit words. Each 128 bytes (two cache lines, which CPUs fetch together) have one writer. This is version
//! 1. A different layout needs a new version, and a driver that doesn't know it ignores the pair.

use core::fmt;

use crate::window::{Geometry, PAGE};
use crate::words::Words;

/// First word of the header: `CWNEIGHB` in memory order.
pub const MAGIC: u64 = u64::from_le_bytes(*b"CWNEIGHB");
/// Version of this layout.
pub const VERSION: u32 = 1;

/// Offset of the magic number, bytes.
pub const HEADER_MAGIC: usize = 0;
/// Version (low 32 bits) and entries per ring (high).
pub const HEADER_VERSION_ENTRIES: usize = 8;
/// Offset of the epoch, bytes.
pub const HEADER_EPOCH: usize = 16;
/// Offset of the start of the first window.
pub const HEADER_BASE: usize = 24;
/// Offset of the distance between windows.
pub const HEADER_STRIDE: usize = 32;
/// Offset of the slots of side 0 (low 32 bits) and side 1 (high).
pub const HEADER_SLOTS: usize = 40;
/// Offset of the segment's size.
pub const HEADER_SIZE: usize = 48;
/// Offset of side 0's ready word. Side 1's is [`READY_STRIDE`] further.
pub const READY: usize = 256;
/// Distance between ready words, bytes.
pub const READY_STRIDE: usize = 128;
/// Offset of direction 0.
pub const DIRECTIONS: usize = 4096;
/// Offset in a direction: number of message entries that the receiver has taken.
pub const TAKEN: usize = 0;
/// Offset in a direction: stamp of the message entry that the receiver sleeps for.
pub const RECEIVER_SLEEPS: usize = 128;
/// Offset in a direction: stamp of the completion entry that the sender sleeps for.
pub const SENDER_SLEEPS: usize = 256;
/// Offset in a direction: message entries.
pub const MESSAGES: usize = 512;
/// Bytes of a message entry.
pub const MESSAGE_SIZE: usize = 32;
/// Bytes of a completion entry.
pub const COMPLETION_SIZE: usize = 16;
/// Fewest entries of a ring.
pub const LEAST_ENTRIES: u32 = 8;
/// Most entries of a ring. All numbers of entries are powers of two.
pub const MOST_ENTRIES: u32 = 1 << 14;
/// Limit of entries per message.
pub const MOST_PARTS: usize = 32;
/// Message entry flag: the next entry belongs to the same message.
pub const FLAG_MORE: u16 = 1;

const WORD: usize = 8;
const PAGE_BYTES: usize = 4096;

/// Side of a pair: 0 has the lower slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Side {
    /// The side with the lower slot.
    First,
    /// The side with the higher slot.
    Second,
}

impl Side {
    /// The side of `own` in the pair with `peer`; `None` if both are equal.
    #[must_use]
    pub fn of(own: u32, peer: u32) -> Option<Self> {
        match own.cmp(&peer) {
            core::cmp::Ordering::Less => Some(Self::First),
            core::cmp::Ordering::Greater => Some(Self::Second),
            core::cmp::Ordering::Equal => None,
        }
    }

    /// The other side.
    #[must_use]
    pub const fn other(self) -> Self {
        match self {
            Self::First => Self::Second,
            Self::Second => Self::First,
        }
    }

    const fn index(self) -> usize {
        match self {
            Self::First => 0,
            Self::Second => 1,
        }
    }
}

/// The header of a segment. Both sides can write it, so it only identifies a segment of a known version. Trusted values come from the
/// device's registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Entries per ring.
    pub entries: u32,
    /// Generation of the connection, not 0.
    pub epoch: u32,
    /// Start of the first window, guest-physical.
    pub base: u64,
    /// Distance between windows, bytes.
    pub stride: u64,
    /// Slots of both sides.
    pub slots: [u32; 2],
}

/// Why memory isn't a usable segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayoutError {
    /// The number of ring entries is invalid.
    Entries {
        /// Number of ring entries.
        entries: u32,
    },
    /// The memory is too small.
    Size {
        /// Words present.
        words: usize,
        /// Words needed.
        needed: usize,
    },
    /// The magic number is wrong.
    Magic {
        /// The value found.
        found: u64,
    },
    /// The version is unknown.
    Version {
        /// The version found.
        found: u32,
    },
    /// The header differs from the registers.
    Differs {
        /// Name of the field.
        field: &'static str,
    },
}

impl fmt::Display for LayoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Entries { entries } => write!(
                f,
                "Rings of {entries} entries are not possible; a power of two from {LEAST_ENTRIES} to {MOST_ENTRIES} is"
            ),
            Self::Size { words, needed } => {
                write!(f, "A segment of {words} words is too small; {needed} are needed")
            }
            Self::Magic { found } => {
                write!(f, "The segment begins with {found:#x}, which is not its magic number")
            }
            Self::Version { found } => {
                write!(
                    f,
                    "The segment has version {found}, and this program knows {VERSION}; use the same on both sides"
                )
            }
            Self::Differs { field } => {
                write!(f, "The segment's header has another {field} than the registry announced")
            }
        }
    }
}

impl core::error::Error for LayoutError {}

/// Offsets in a segment with rings of a given size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    entries: u32,
}

/// Offsets of a ring, in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingPlace {
    /// First word of entry 0.
    pub first: usize,
    /// The word in which the consumer stores the stamp that it sleeps for.
    pub sleeps: usize,
    /// Entries, a power of two.
    pub entries: u32,
}

impl Layout {
    /// A layout with rings of `entries` entries, a power of two from [`LEAST_ENTRIES`] to [`MOST_ENTRIES`].
    ///
    /// # Errors
    /// If `entries` is another number.
    pub const fn new(entries: u32) -> Result<Self, LayoutError> {
        if !entries.is_power_of_two() || entries < LEAST_ENTRIES || entries > MOST_ENTRIES {
            return Err(LayoutError::Entries { entries });
        }
        Ok(Self { entries })
    }

    /// Entries per ring.
    #[must_use]
    pub const fn entries(&self) -> u32 {
        self.entries
    }

    const fn direction_size(&self) -> usize {
        (MESSAGES + self.entries as usize * (MESSAGE_SIZE + COMPLETION_SIZE)).next_multiple_of(PAGE_BYTES)
    }

    /// Bytes of the segment: whole pages.
    #[must_use]
    pub const fn size(&self) -> usize {
        DIRECTIONS + 2 * self.direction_size()
    }

    /// Offset of the direction in which `sender` sends, bytes.
    #[must_use]
    pub const fn direction(&self, sender: Side) -> usize {
        DIRECTIONS + sender.index() * self.direction_size()
    }

    /// Offset of the completion entries within a direction, bytes.
    #[must_use]
    pub const fn completions_offset(&self) -> usize {
        MESSAGES + self.entries as usize * MESSAGE_SIZE
    }

    /// The ring of messages that `sender` sends.
    #[must_use]
    pub const fn messages(&self, sender: Side) -> RingPlace {
        let at = self.direction(sender);
        RingPlace {
            first: (at + MESSAGES) / WORD,
            sleeps: (at + RECEIVER_SLEEPS) / WORD,
            entries: self.entries,
        }
    }

    /// The ring of completions for messages of `sender`.
    #[must_use]
    pub const fn completions(&self, sender: Side) -> RingPlace {
        let at = self.direction(sender);
        RingPlace {
            first: (at + self.completions_offset()) / WORD,
            sleeps: (at + SENDER_SLEEPS) / WORD,
            entries: self.entries,
        }
    }

    /// Index of the word with the number of taken message entries of `sender`.
    #[must_use]
    pub const fn taken(&self, sender: Side) -> usize {
        (self.direction(sender) + TAKEN) / WORD
    }

    /// Index of the word in which `side` stores the epoch for which it has made its rings.
    #[must_use]
    pub const fn ready(side: Side) -> usize {
        (READY + side.index() * READY_STRIDE) / WORD
    }

    /// Checks that `words` are enough for this layout.
    ///
    /// # Errors
    /// If they aren't.
    pub fn check(&self, words: &(impl Words + ?Sized)) -> Result<(), LayoutError> {
        let needed = self.size() / WORD;
        if words.count() < needed {
            return Err(LayoutError::Size { words: words.count(), needed });
        }
        Ok(())
    }

    /// Writes the header into a new segment of zeros. The registry does this before it distributes the segment.
    ///
    /// # Errors
    /// If the segment is too small.
    pub fn write_header(
        &self,
        words: &(impl Words + ?Sized),
        epoch: u32,
        geometry: &Geometry,
        slots: [u32; 2],
    ) -> Result<(), LayoutError> {
        self.check(words)?;
        let pair = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        for (offset, value) in [
            (HEADER_VERSION_ENTRIES, pair(VERSION, self.entries)),
            (HEADER_EPOCH, u64::from(epoch)),
            (HEADER_BASE, geometry.base()),
            (HEADER_STRIDE, geometry.stride()),
            (HEADER_SLOTS, pair(slots[0], slots[1])),
            (HEADER_SIZE, self.size() as u64),
        ] {
            words.store(offset / WORD, value);
        }
        words.store_release(HEADER_MAGIC / WORD, MAGIC);
        Ok(())
    }
}

impl Header {
    /// Reads a header, each word once, and the layout that follows from it.
    ///
    /// # Errors
    /// If the magic number or the version is wrong, or the memory is too small for the rings.
    pub fn read(words: &(impl Words + ?Sized)) -> Result<(Self, Layout), LayoutError> {
        let found = words.load_acquire(HEADER_MAGIC / WORD);
        if found != MAGIC {
            return Err(LayoutError::Magic { found });
        }
        let (version, entries) = halves(words.load(HEADER_VERSION_ENTRIES / WORD));
        if version != VERSION {
            return Err(LayoutError::Version { found: version });
        }
        let layout = Layout::new(entries)?;
        layout.check(words)?;
        let (first, second) = halves(words.load(HEADER_SLOTS / WORD));
        let (epoch, above) = halves(words.load(HEADER_EPOCH / WORD));
        if above != 0 || epoch == 0 {
            return Err(LayoutError::Differs { field: "epoch" });
        }
        let header = Self {
            entries,
            epoch,
            base: words.load(HEADER_BASE / WORD),
            stride: words.load(HEADER_STRIDE / WORD),
            slots: [first, second],
        };
        Ok((header, layout))
    }

    /// Checks that the header agrees with the device's registers.
    ///
    /// # Errors
    /// The first field that differs.
    pub fn agrees(&self, epoch: u32, geometry: &Geometry, slots: [u32; 2]) -> Result<(), LayoutError> {
        for (same, field) in [
            (self.epoch == epoch, "epoch"),
            (self.base == geometry.base(), "base of windows"),
            (self.stride == geometry.stride(), "distance of windows"),
            (self.slots == slots, "pair of slots"),
        ] {
            if !same {
                return Err(LayoutError::Differs { field });
            }
        }
        Ok(())
    }
}

/// Low and high 32 bits.
#[expect(clippy::cast_possible_truncation, reason = "that is what it is for")]
pub(crate) const fn halves(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

const _: () = {
    assert!(PAGE == PAGE_BYTES as u64);
    assert!(HEADER_SIZE + WORD <= READY && READY + 2 * READY_STRIDE <= DIRECTIONS);
    assert!(SENDER_SLEEPS + 128 <= MESSAGES);
};

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::AtomicU64;
    use proptest::prelude::*;

    fn zeroed(bytes: usize) -> Vec<AtomicU64> {
        (0..bytes / 8).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn a_header_reads_back_and_differences_are_named() {
        let layout = Layout::new(64).unwrap();
        let words = zeroed(layout.size());
        let geometry = Geometry::new(1 << 39, 1 << 35, 16).unwrap();
        assert_eq!(Header::read(&words[..]), Err(LayoutError::Magic { found: 0 }));
        layout.write_header(&words[..], 7, &geometry, [2, 5]).unwrap();
        let (header, found) = Header::read(&words[..]).unwrap();
        assert_eq!(found, layout);
        header.agrees(7, &geometry, [2, 5]).unwrap();
        assert_eq!(header.agrees(8, &geometry, [2, 5]), Err(LayoutError::Differs { field: "epoch" }));
        assert_eq!(header.agrees(7, &geometry, [2, 4]), Err(LayoutError::Differs { field: "pair of slots" }));
        words[1].store(2, core::sync::atomic::Ordering::Relaxed);
        assert_eq!(Header::read(&words[..]), Err(LayoutError::Version { found: 2 }));
        assert!(Header::read(&words[..10]).is_err());
    }

    proptest! {
        /// Two parts of a segment share 128 bytes only if one side writes both. All parts are inside the segment.
        #[test]
        fn every_place_has_one_writer(bits in 3u32..15) {
            let layout = Layout::new(1 << bits).unwrap();
            // (first byte, bytes, writer: 0 registry, 1 side 0, 2 side 1)
            let mut places = vec![(0, 56, 0), (READY, 8, 1), (READY + READY_STRIDE, 8, 2)];
            for (sender, own, other) in [(Side::First, 1, 2), (Side::Second, 2, 1)] {
                let messages = layout.messages(sender);
                let completions = layout.completions(sender);
                let entries = layout.entries() as usize;
                places.push((layout.taken(sender) * 8, 8, other));
                places.push((messages.sleeps * 8, 8, other));
                places.push((completions.sleeps * 8, 8, own));
                places.push((messages.first * 8, entries * MESSAGE_SIZE, own));
                places.push((completions.first * 8, entries * COMPLETION_SIZE, other));
            }
            for (index, &(start, size, writer)) in places.iter().enumerate() {
                prop_assert!(start + size <= layout.size());
                for &(other, other_size, other_writer) in &places[..index] {
                    prop_assert!(start + size <= other || other + other_size <= start);
                    let lines = |start: usize, size: usize| (start / 128, (start + size - 1) / 128);
                    let (a, b) = (lines(start, size), lines(other, other_size));
                    prop_assert!(a.1 < b.0 || b.1 < a.0 || writer == other_writer);
                }
            }
        }

        /// With any content, reading a header doesn't panic, and an accepted layout fits.
        #[test]
        fn any_header_is_an_answer(first in prop::collection::vec(any::<u64>(), 0..2000), keep in any::<bool>()) {
            let words: Vec<AtomicU64> = first.into_iter().map(AtomicU64::new).collect();
            if keep && words.len() > 2 {
                words[0].store(MAGIC, core::sync::atomic::Ordering::Relaxed);
                words[1].store(8 << 32 | 1, core::sync::atomic::Ordering::Relaxed);
            }
            if let Ok((_, layout)) = Header::read(&words[..]) {
                prop_assert!(layout.size() <= words.len() * 8);
            }
        }
    }
}
