//! Messages of post-copy.
//!
//! ```text
//! payload of a Missing frame: address u64 of the first page, multiple of 64 pages behind its range's start; then words u64 of a
//!                             bitmap, a bit per page
//! payload of a Want frame:    addresses u64 of pages, 1 to 64
//! ```

use machine::slots::DirtyPages;
use serde::{Deserialize, Serialize};

use super::set::PageSet;
use crate::migration::error::MigrationError;
use crate::migration::pages::PAGE;

/// Limit for the words of a bitmap in a frame: 1 MiB describes 32 GiB of memory.
const MAX_BITMAP_WORDS: usize = 1 << 17;
/// Limit in bytes for a `Missing` frame.
pub const MAX_MISSING_BYTES: usize = 8 + 8 * MAX_BITMAP_WORDS;
/// Limit for the pages that one frame requests.
pub const MAX_WANTED_PAGES: usize = 64;

/// The payload of `Complete`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Complete {
    /// Pages that weren't received because the VM ended.
    pub left: u64,
    /// Pages that threads waited for.
    pub faults: u64,
    /// Median wait in microseconds.
    pub median_us: u32,
    /// Longest wait in microseconds.
    pub worst_us: u32,
}

/// The payloads of the `Missing` frames of a set.
pub fn encode_missing(set: &PageSet) -> impl Iterator<Item = Vec<u8>> + '_ {
    set.sets().iter().flat_map(|set| {
        set.bitmap
            .chunks(MAX_BITMAP_WORDS)
            .zip(0u64..)
            .filter(|(words, _)| words.iter().any(|word| *word != 0))
            .map(|(words, number)| {
                let start = set.start + number * (MAX_BITMAP_WORDS * 64 * PAGE) as u64;
                let mut bytes = start.to_le_bytes().to_vec();
                words.iter().for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
                bytes
            })
    })
}

/// Adds the pages of a `Missing` frame to a set.
///
/// # Errors
/// When the payload is invalid, or has pages that the VM doesn't have.
pub fn decode_missing(payload: &[u8], into: &mut PageSet) -> Result<(), MigrationError> {
    let bad = || MigrationError::Protocol(format!("missing pages in {} bytes", payload.len()));
    let words = words(payload).ok_or_else(bad)?;
    let (start, bitmap) = words.split_first().ok_or_else(bad)?;
    if (bitmap.len() as u64).saturating_mul(64 * PAGE as u64).checked_add(*start).is_none() {
        return Err(MigrationError::Protocol(format!("missing pages at {start:#x}, beyond all memory")));
    }
    let set = DirtyPages { start: *start, bitmap: bitmap.to_vec() };
    into.insert_all(&set).map_err(|error| MigrationError::Protocol(format!("{error}, as missing")))
}

/// The payload of a `Want` frame.
pub fn encode_wanted(pages: &[u64]) -> Vec<u8> {
    pages.iter().flat_map(|page| page.to_le_bytes()).collect()
}

/// Decodes the pages of a `Want` frame; doesn't check whether the VM has them.
///
/// # Errors
/// When the payload is invalid.
pub fn decode_wanted(payload: &[u8]) -> Result<Vec<u64>, MigrationError> {
    let pages = words(payload).filter(|pages| (1..=MAX_WANTED_PAGES).contains(&pages.len()));
    pages.ok_or_else(|| MigrationError::Protocol(format!("a request for pages in {} bytes", payload.len())))
}

fn words(bytes: &[u8]) -> Option<Vec<u64>> {
    let (words, rest) = bytes.as_chunks::<8>();
    rest.is_empty().then(|| words.iter().map(|word| u64::from_le_bytes(*word)).collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RANGES: [(u64, u64); 2] = [(0, 48 << 30), (64 << 30, 100 * 4096)];

    /// A set larger than a frame's limit is received completely; empty parts aren't sent.
    #[test]
    fn missing_pages_arrive() {
        let mut set = PageSet::empty(&RANGES);
        for page in [0, 4096 * 63, 33 << 30, (48 << 30) - 4096, (64 << 30) + 99 * 4096] {
            set.insert(page).unwrap();
        }
        let frames: Vec<_> = encode_missing(&set).collect();
        assert_eq!(frames.len(), 3);
        assert!(frames.iter().all(|frame| frame.len() <= MAX_MISSING_BYTES));
        let mut back = PageSet::empty(&RANGES);
        frames.iter().for_each(|frame| decode_missing(frame, &mut back).unwrap());
        assert_eq!(back, set);
    }

    #[test]
    fn pages_that_cannot_be_are_refused() {
        let mut set = PageSet::empty(&RANGES);
        let frame = |start: u64, words: &[u64]| {
            let all: Vec<u64> = std::iter::once(start).chain(words.iter().copied()).collect();
            encode_wanted(&all)
        };
        for (payload, expected) in [
            (vec![], "in 0 bytes"),
            (vec![0; 15], "in 15 bytes"),
            (frame(48 << 30, &[1]), "isn't RAM"),
            (frame(64 << 30, &[0, 1 << 40]), "isn't RAM"),
            (frame(1, &[1]), "isn't RAM"),
            (frame(u64::MAX - 4095, &[1]), "beyond all memory"),
        ] {
            let error = decode_missing(&payload, &mut set).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        assert_eq!(set.count(), 0);
        assert!(decode_wanted(&[]).is_err() && decode_wanted(&[0; 7]).is_err());
        assert!(decode_wanted(&vec![0; 8 * MAX_WANTED_PAGES + 8]).is_err());
        assert_eq!(decode_wanted(&encode_wanted(&[5, 9])).unwrap(), [5, 9]);
    }

    proptest! {
        /// Any bytes give pages or an error, and never more pages than the set's ranges have.
        #[test]
        fn any_bytes_are_an_answer(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut set = PageSet::empty(&[(0, 1 << 20)]);
            let _ = decode_missing(&bytes, &mut set);
            prop_assert!(set.count() <= 256);
            let _ = decode_wanted(&bytes);
        }
    }
}
