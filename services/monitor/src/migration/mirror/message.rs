//! Messages about disks that are copied.
//!
//! ```text
//! payload of a Block frame: disk u32, what u32 (0 contents follow, 1 all zero), offset u64, bytes u64, contents
//! ```

use serde::{Deserialize, Serialize};

use crate::migration::error::MigrationError;

/// Bytes of a block's header.
pub const BLOCK_HEADER: usize = 24;
/// Limit in bytes for the contents in a frame.
pub const MAX_CONTENTS_BYTES: usize = 256 << 10;
/// Limit in bytes for the zeroes of a frame: a piece ([`super::source::PIECE_BYTES`]).
pub const MAX_ZEROES_BYTES: u64 = 1 << 20;
/// Limit in bytes for a request, and for an answer.
pub const MAX_REQUEST_BYTES: usize = 256 << 10;

const CONTENTS: u32 = 0;
const ZERO: u32 = 1;

/// A disk that the source requests to copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestedDisk {
    /// Its name in the VM.
    pub name: String,
    /// Size that the guest sees, in bytes.
    pub bytes: u64,
    /// The disk is a block device at the source.
    pub device: bool,
    /// The user named the disk, and so asserts that it isn't shared.
    pub named: bool,
}

/// The payload of a `Mirror` frame of the source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MirrorRequest {
    /// The disks; `Block` frames identify them by their index in this list.
    pub disks: Vec<RequestedDisk>,
}

/// The payload of the destination's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MirrorReply {
    /// Disks that aren't copied because the image is the source's own: index and reason.
    pub shared: Vec<(u32, String)>,
}

/// A piece of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block<'a> {
    /// Index in the request; not checked.
    pub disk: u32,
    /// First byte.
    pub offset: u64,
    /// Length in bytes; not checked against the disk's size.
    pub bytes: u64,
    /// Contents; `None` for zeroes.
    pub contents: Option<&'a [u8]>,
}

/// Encodes a frame's header.
#[must_use]
pub fn header(disk: u32, zero: bool, offset: u64, bytes: u64) -> [u8; BLOCK_HEADER] {
    let mut header = [0; BLOCK_HEADER];
    header[..4].copy_from_slice(&disk.to_le_bytes());
    header[4..8].copy_from_slice(&if zero { ZERO } else { CONTENTS }.to_le_bytes());
    header[8..16].copy_from_slice(&offset.to_le_bytes());
    header[16..].copy_from_slice(&bytes.to_le_bytes());
    header
}

/// Decodes a frame.
///
/// # Errors
/// When the payload isn't a valid block.
pub fn parse(payload: &[u8]) -> Result<Block<'_>, MigrationError> {
    let bad = |text: String| MigrationError::Protocol(text);
    let Some((header, contents)) = payload.split_first_chunk::<BLOCK_HEADER>() else {
        return Err(bad(format!("a piece of a disk of {} bytes, without a header", payload.len())));
    };
    let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
    let (disk, what, offset, bytes) = (word(0), word(4), long(8), long(16));
    match what {
        CONTENTS if bytes > 0 && contents.len() as u64 == bytes => {
            Ok(Block { disk, offset, bytes, contents: Some(contents) })
        }
        ZERO if (1..=MAX_ZEROES_BYTES).contains(&bytes) && contents.is_empty() => {
            Ok(Block { disk, offset, bytes, contents: None })
        }
        _ => Err(bad(format!(
            "{bytes} bytes of disk {disk} as {what} with {} bytes, which can't be",
            contents.len()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_block_is_read_as_it_was_written() {
        let contents = [&header(3, false, 1 << 40, 512)[..], &[7; 512]].concat();
        let block = Block { disk: 3, offset: 1 << 40, bytes: 512, contents: Some(&[7; 512]) };
        assert_eq!(parse(&contents).unwrap(), block);
        let zeroes = header(0, true, 512, MAX_ZEROES_BYTES);
        assert_eq!(
            parse(&zeroes).unwrap(),
            Block { disk: 0, offset: 512, bytes: MAX_ZEROES_BYTES, contents: None }
        );
        for bad in [
            &contents[..contents.len() - 1],
            &contents[..BLOCK_HEADER],
            &header(0, true, 0, 0)[..],
            &header(0, true, 0, MAX_ZEROES_BYTES + 1)[..],
            &header(0, false, 0, 0)[..],
            &[][..],
        ] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
    }

    proptest! {
        /// Any bytes give a block of the announced length or an error.
        #[test]
        fn any_bytes_are_a_block_or_a_sentence(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            if let Ok(block) = parse(&bytes) {
                prop_assert!(block.bytes <= MAX_ZEROES_BYTES);
                prop_assert!(block.contents.is_none_or(|contents| contents.len() as u64 == block.bytes));
            }
        }
    }
}
