//! The content of a page in a message: nothing, a difference, or all bytes.

use crate::names::Page;
use crate::pages::Pages;

/// Content of a page in a message.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Payload {
    /// All bytes are zero.
    Zero,
    /// The content that the receiver has kept under the version that it named.
    Same,
    /// The content that the receiver has kept, overwritten with these runs (offset, bytes).
    Difference(Vec<(u16, Vec<u8>)>),
    /// All bytes.
    Raw(Vec<u8>),
}

/// Equal bytes that end a run: fewer are cheaper to send than the four bytes of a new run's header.
const GAP: usize = 8;

impl Payload {
    /// The shortest form of `content`. `base` is the content that the receiver has, if it is known here.
    #[must_use]
    pub fn shortest(content: Vec<u8>, base: Option<&[u8]>) -> Self {
        if is_zero(&content) {
            return Self::Zero;
        }
        match base.and_then(|base| difference(base, &content)) {
            Some(runs) => Self::Difference(runs),
            None => Self::Raw(content),
        }
    }

    /// Bytes of the encoded payload.
    #[must_use]
    pub fn wire_len(&self) -> usize {
        match self {
            Self::Zero | Self::Same => 0,
            Self::Difference(runs) => runs.iter().map(|(_, bytes)| 4 + bytes.len()).sum::<usize>() + 2,
            Self::Raw(bytes) => bytes.len(),
        }
    }

    /// Writes the payload into a page. Returns false, with nothing written, if it doesn't fit.
    pub fn install(&self, page: Page, pages: &mut impl Pages) -> bool {
        let size = pages.size();
        match self {
            Self::Zero => pages.write(page, 0, &vec![0; size]),
            Self::Same => {}
            Self::Difference(runs) => {
                if runs.iter().any(|(offset, bytes)| usize::from(*offset) + bytes.len() > size) {
                    return false;
                }
                for (offset, bytes) in runs {
                    pages.write(page, usize::from(*offset), bytes);
                }
            }
            Self::Raw(bytes) => {
                if bytes.len() != size {
                    return false;
                }
                pages.write(page, 0, bytes);
            }
        }
        true
    }
}

/// Whether all bytes are zero. Compares groups of 64 bytes, for vector instructions, and stops at the first that isn't zero.
fn is_zero(content: &[u8]) -> bool {
    content.chunks(64).all(|group| group.iter().fold(0, |any, byte| any | byte) == 0)
}

/// Runs that turn `base` into `content`; none if at least half of the page changed or the lengths differ.
fn difference(base: &[u8], content: &[u8]) -> Option<Vec<(u16, Vec<u8>)>> {
    if base.len() != content.len() {
        return None;
    }
    // Many pages change as a whole, and counting is fast.
    if changed_bytes(base, content) * 2 >= content.len() {
        return None;
    }
    let mut runs: Vec<(usize, usize)> = Vec::new();
    // Encoded bytes of the runs, without the last one, which may grow.
    let mut taken = 0;
    for (word, (old, new)) in base.chunks(8).zip(content.chunks(8)).enumerate() {
        if old == new {
            continue;
        }
        for at in (word * 8..).take(new.len()).filter(|at| base[*at] != content[*at]) {
            match runs.last_mut() {
                Some((_, end)) if at - *end < GAP => *end = at + 1,
                last => {
                    taken += last.map_or(0, |(start, end)| 4 + *end - *start);
                    runs.push((at, at + 1));
                }
            }
        }
        let last = runs.last().map_or(0, |(start, end)| 4 + end - start);
        if (taken + last) * 2 >= content.len() {
            return None;
        }
    }
    runs.into_iter()
        .map(|(start, end)| Some((u16::try_from(start).ok()?, content[start..end].to_vec())))
        .collect()
}

/// Number of bytes that differ.
#[must_use]
pub fn changed_bytes(a: &[u8], b: &[u8]) -> usize {
    // At most 128 differences fit in a byte, which lets the compiler use vector instructions.
    let some = |(a, b): (&[u8], &[u8])| a.iter().zip(b).map(|(a, b)| u8::from(a != b)).sum::<u8>();
    a.chunks(128).zip(b.chunks(128)).map(|both| usize::from(some(both))).sum()
}
