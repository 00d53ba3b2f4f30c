//! Pages that go from node to node: number (8, little-endian), 1 if contents follow or 0 for all zero (1), contents (4096); again and again.

use dsm::Page;
use dsm::wire::PAGE_SIZE;

/// Most pages of one frame: half a MiB.
pub(super) const MOST: usize = 128;
const HEAD: usize = 9;
static ZERO: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// Appends a page, of [`PAGE_SIZE`] bytes.
pub(super) fn append(into: &mut Vec<u8>, page: Page, content: &[u8]) {
    let zero = content.iter().all(|byte| *byte == 0);
    into.extend_from_slice(&page.to_le_bytes());
    into.push(u8::from(!zero));
    if !zero {
        into.extend_from_slice(content);
    }
}

/// Takes them apart. After an error there is nothing more.
pub(super) fn parse(bytes: &[u8]) -> impl Iterator<Item = Result<(Page, &[u8]), String>> {
    let mut rest = bytes;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let Some(one) = first(rest) else {
            rest = &[];
            return Some(Err("its bytes are no pages".to_owned()));
        };
        let (page, content, after) = one;
        rest = after;
        Some(Ok((page, content)))
    })
}

fn first(bytes: &[u8]) -> Option<(Page, &[u8], &[u8])> {
    let (head, rest) = bytes.split_at_checked(HEAD)?;
    let page = u64::from_le_bytes(head.get(..8)?.try_into().ok()?);
    match head.get(8)? {
        0 => Some((page, &ZERO, rest)),
        1 => rest.split_at_checked(PAGE_SIZE).map(|(content, rest)| (page, content, rest)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_come_out_as_they_went_in() {
        let content = |page: u64| [u8::try_from(page % 256).unwrap(); PAGE_SIZE];
        let mut bytes = Vec::new();
        for page in [7, 0, u64::MAX, 256] {
            append(&mut bytes, page, &content(page));
        }
        // Two are all zero.
        assert_eq!(bytes.len(), 4 * HEAD + 2 * PAGE_SIZE);
        let pages: Vec<_> = parse(&bytes).map(Result::unwrap).collect();
        assert_eq!(pages.len(), 4);
        for ((page, found), expected) in pages.into_iter().zip([7, 0, u64::MAX, 256]) {
            assert_eq!((page, found), (expected, &content(expected)[..]));
        }
    }

    /// Whatever the bytes: an end is reached, what is cut off or of another kind is refused, and nothing comes after that.
    #[test]
    fn other_bytes_are_refused() {
        let mut bytes = Vec::new();
        append(&mut bytes, 3, &[0; PAGE_SIZE]);
        append(&mut bytes, 4, &[9; PAGE_SIZE]);
        for len in 1..bytes.len() {
            let found: Vec<_> = parse(&bytes[..len]).collect();
            let whole = len == HEAD;
            assert_eq!(found.iter().filter(|one| one.is_err()).count(), usize::from(!whole), "{len}");
            assert!(found.iter().rev().skip(1).all(Result::is_ok));
        }
        bytes[8] = 2;
        let found: Vec<_> = parse(&bytes).collect();
        assert!(found.len() == 1 && found[0].is_err());
    }
}
