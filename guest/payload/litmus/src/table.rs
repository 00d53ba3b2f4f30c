//! The table of tests in the program's file.
//!
//! ```text
//! magic (16)  capacity (4)  length (4)  tests (4)  0 (4)     capacity: of what follows; the others are 0 until the host fills it
//! record (RECORD_SIZE) per test
//! code; records say where
//! ```
//! All numbers are little-endian.

use crate::{MOST_LOCATIONS, MOST_OBSERVED, MOST_THREADS};

/// Start of the table in the file. It must be unique in the file, so programs must not name it.
pub const MAGIC: [u8; 16] = *b"causeway.litmus\x01";
/// Size of the header in bytes.
pub const HEADER_SIZE: usize = 32;
/// Bytes after the header.
pub const CAPACITY: usize = 256 << 10;
/// Bytes of a test's name, padded with zeros.
pub const NAME_SIZE: usize = 48;
/// Size of a record in bytes.
pub const RECORD_SIZE: usize = NAME_SIZE + 4 * 4 + 8 * MOST_LOCATIONS + 8 * MOST_THREADS;

/// Placement of a test's locations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Placement {
    /// In one cache line.
    Line,
    /// In one page, each in a cache line of its own.
    Page,
    /// Each in a page of its own.
    Pages,
    /// Each across the boundary of its own two pages: half of the accessed bytes on each side.
    Cross,
}

impl Placement {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Line, Self::Page, Self::Pages, Self::Cross];

    /// Returns the placement's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Line => "line",
            Self::Page => "page",
            Self::Pages => "pages",
            Self::Cross => "cross",
        }
    }

    const fn number(self) -> u32 {
        match self {
            Self::Line => 0,
            Self::Page => 1,
            Self::Pages => 2,
            Self::Cross => 3,
        }
    }
}

/// A thread of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Thread {
    /// Offset of its code from the end of the header.
    pub code: u32,
    /// Number of observed registers.
    pub observed: u32,
}

/// A test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// Its name, padded with zeros.
    pub name: [u8; NAME_SIZE],
    /// Placement of its locations.
    pub placement: Placement,
    /// Size of an access in bytes, for [`Placement::Cross`].
    pub width: u32,
    /// Number of threads.
    pub threads: u32,
    /// Number of locations.
    pub locations: u32,
    /// Initial values of the locations.
    pub initial: [u64; MOST_LOCATIONS],
    /// The threads.
    pub thread: [Thread; MOST_THREADS],
}

impl Record {
    /// Returns the bytes in the table.
    pub fn to_bytes(&self) -> [u8; RECORD_SIZE] {
        let mut bytes = [0; RECORD_SIZE];
        let mut at = 0;
        let mut put = |field: &[u8]| {
            bytes[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        };
        put(&self.name);
        for word in [self.placement.number(), self.width, self.threads, self.locations] {
            put(&word.to_le_bytes());
        }
        self.initial.iter().for_each(|word| put(&word.to_le_bytes()));
        for thread in self.thread {
            put(&thread.code.to_le_bytes());
            put(&thread.observed.to_le_bytes());
        }
        bytes
    }

    /// Parses a record. Returns `None` if the bytes are invalid or its code starts beyond `length` bytes.
    pub fn from_bytes(bytes: &[u8], length: usize) -> Option<Self> {
        let (name, rest) = bytes.split_first_chunk::<NAME_SIZE>()?;
        let (words, rest) = rest.split_first_chunk::<16>()?;
        let word =
            |index: usize| Some(u32::from_le_bytes(words.get(index * 4..index * 4 + 4)?.try_into().ok()?));
        let placement = *Placement::ALL.get(word(0)? as usize)?;
        let mut this = Self {
            name: *name,
            placement,
            width: word(1)?,
            threads: word(2)?,
            locations: word(3)?,
            initial: [0; MOST_LOCATIONS],
            thread: [Thread::default(); MOST_THREADS],
        };
        let (initial, threads) = rest.split_at_checked(8 * MOST_LOCATIONS)?;
        for (value, bytes) in this.initial.iter_mut().zip(initial.chunks_exact(8)) {
            *value = u64::from_le_bytes(bytes.try_into().ok()?);
        }
        for (thread, bytes) in this.thread.iter_mut().zip(threads.chunks_exact(8)) {
            let (code, observed) = bytes.split_at_checked(4)?;
            thread.code = u32::from_le_bytes(code.try_into().ok()?);
            thread.observed = u32::from_le_bytes(observed.try_into().ok()?);
        }
        let possible =
            (1..=MOST_THREADS).contains(&(this.threads as usize))
                && (1..=MOST_LOCATIONS).contains(&(this.locations as usize))
                && [4, 8].contains(&this.width)
                && this.thread.iter().take(this.threads as usize).all(|thread| {
                    (thread.code as usize) < length && thread.observed as usize <= MOST_OBSERVED
                });
        possible.then_some(this)
    }

    /// Returns the name as text.
    pub fn name(&self) -> &str {
        let length = self.name.iter().position(|byte| *byte == 0).unwrap_or(NAME_SIZE);
        self.name.get(..length).and_then(|name| core::str::from_utf8(name).ok()).unwrap_or("?")
    }
}

/// Returns a name in a record's form, if it fits.
pub fn name_bytes(name: &str) -> Option<[u8; NAME_SIZE]> {
    let mut bytes = [0; NAME_SIZE];
    bytes.get_mut(..name.len())?.copy_from_slice(name.as_bytes());
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::{Placement, RECORD_SIZE, Record, Thread, name_bytes};

    #[test]
    fn records_come_back_and_impossible_ones_do_not() {
        let record = Record {
            name: name_bytes("SB+mfences").unwrap(),
            placement: Placement::Cross,
            width: 8,
            threads: 2,
            locations: 3,
            initial: [1, 2, 3, 4],
            thread: [Thread { code: 7, observed: 1 }; 4],
        };
        let bytes = record.to_bytes();
        assert_eq!(Record::from_bytes(&bytes, 8), Some(record));
        assert_eq!(record.name(), "SB+mfences");
        assert_eq!(Record::from_bytes(&bytes, 7), None);
        assert_eq!(Record::from_bytes(&bytes[..RECORD_SIZE - 1], 8).is_some_and(|_| false), false);
        for wrong in [
            Record { threads: 5, ..record },
            Record { width: 3, ..record },
            Record { locations: 0, ..record },
        ] {
            assert_eq!(Record::from_bytes(&wrong.to_bytes(), 8), None);
        }
        assert_eq!(name_bytes(&"x".repeat(49)), None);
    }
}
