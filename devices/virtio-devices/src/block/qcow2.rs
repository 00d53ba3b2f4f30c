//! The features in a qcow2 header, checked before the library opens the image.
//!
//! The library knows no encryption: it would pass ciphertext to the guest. It refuses unknown incompatible features by number; here they
//! have names. A reader may ignore compatible and autoclear features, internal snapshots, persistent bitmaps and header extensions, and so
//! does this check.

use std::fs::File;

use super::format::read_head;

/// Length of a version 2 header, up to and with `snapshots_offset`.
const VERSION_2_BYTES: usize = 72;
/// Lower bound of a version 3 header, which ends with `header_length`.
const VERSION_3_BYTES: usize = 104;
/// Length of the longest known header, which ends with `compression_type` and its padding.
const LONGEST_BYTES: usize = 112;

/// Incompatible features with a name, by bit. Bit 2, an external data file, is checked with the other files that an image refers to.
const EXTERNAL_DATA_FILE: u32 = 2;
const COMPRESSION_TYPE: u32 = 3;

/// The name of the feature for which the image can't be read, if any. An invalid header is left to the library.
pub(super) fn unsupported(file: &File) -> Option<String> {
    unsupported_in(read_head(file, &mut [0; LONGEST_BYTES]))
}

fn unsupported_in(header: &[u8]) -> Option<String> {
    if header.len() < VERSION_2_BYTES {
        return None;
    }
    let version = word(header, 4);
    if !matches!(version, 2 | 3) {
        return Some(format!("version {version} of the format"));
    }
    match word(header, 32) {
        0 => {}
        1 => return Some("AES encryption".to_owned()),
        2 => return Some("LUKS encryption".to_owned()),
        other => return Some(format!("encryption method {other}")),
    }
    if version == 2 || header.len() < VERSION_3_BYTES {
        return None;
    }
    let incompatible = u64::from(word(header, 72)) << 32 | u64::from(word(header, 76));
    let header_len = usize::try_from(word(header, 100)).unwrap_or(usize::MAX);
    // The field exists in headers that are long enough; 0 is deflate, 1 is Zstandard.
    let compression = if header_len > VERSION_3_BYTES { header.get(104).copied().unwrap_or(0) } else { 0 };
    let compression = match compression {
        0 => "a compression type".to_owned(),
        1 => "Zstandard compression".to_owned(),
        other => format!("compression type {other}"),
    };
    (0..u64::BITS)
        .filter(|bit| *bit != EXTERNAL_DATA_FILE && incompatible >> bit & 1 != 0)
        .map(|bit| match bit {
            0 => "the dirty bit, as it was not closed and its reference counts may be wrong".to_owned(),
            1 => "the corrupt bit, as it was found to be damaged".to_owned(),
            COMPRESSION_TYPE => compression.clone(),
            4 => "extended L2 entries".to_owned(),
            other => format!("incompatible feature {other}, which is not known here"),
        })
        .next()
}

/// A big-endian field.
fn word(header: &[u8], at: usize) -> u32 {
    header.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(change: impl FnOnce(&mut [u8; LONGEST_BYTES])) -> Option<String> {
        let mut header = [0; LONGEST_BYTES];
        header[..4].copy_from_slice(b"QFI\xfb");
        header[7] = 3;
        header[103] = 112;
        change(&mut header);
        unsupported_in(&header)
    }

    #[test]
    fn every_feature_that_changes_what_is_read_has_a_name() {
        assert_eq!(header(|_| {}), None);
        for (bit, name) in [
            (0, "the dirty bit"),
            (1, "the corrupt bit"),
            (3, "a compression type"),
            (4, "extended L2 entries"),
            (5, "incompatible feature 5"),
            (63, "incompatible feature 63"),
        ] {
            let found = header(|header| header[79 - bit / 8] = 1 << (bit % 8)).unwrap();
            assert!(found.starts_with(name), "{found}");
        }
        for (method, name) in [(1, "AES encryption"), (2, "LUKS encryption"), (3, "encryption method 3")] {
            assert_eq!(header(|header| header[35] = method).as_deref(), Some(name));
            let second = header(|header| (header[7], header[35]) = (2, method));
            assert_eq!(second.as_deref(), Some(name), "version 2");
        }
        assert_eq!(header(|header| header[7] = 4).as_deref(), Some("version 4 of the format"));
        let zstd = header(|header| (header[79], header[104]) = (8, 1));
        assert_eq!(zstd.as_deref(), Some("Zstandard compression"));
        // An external data file is refused by its name; compatible and autoclear features are ignored.
        assert_eq!(header(|header| header[79] = 4), None);
        assert_eq!(header(|header| (header[87], header[95]) = (0xff, 0xff)), None);
    }

    #[test]
    fn short_files_have_no_features() {
        for len in 0..VERSION_2_BYTES {
            assert_eq!(unsupported_in(&vec![0xff; len]), None);
        }
    }
}
