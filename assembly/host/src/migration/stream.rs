//! A device's state as a stream of bytes: what vfio-user carries between this daemon and a monitor, and monitors between each other.
//!
//! ```text
//! u32 length of the rest   u8 what   …
//!   0 beginning: u16 version, u8[6] MAC address, segment's name
//!   1 piece:     u8 kind, u32 handle, u64 version, u8 exists, its state
//!   2 total:     u64 objects, u64 sum; the last record
//!   3 function:  the state of a vmxnet3, as JSON
//!   4 outside:   u8 whether the segment has a tap; before the first connection by `wire`. Daemons of before such connections moved refuse it
//! ```
//! Little endian. The stream may be cut anywhere, and come from anywhere.

use nomad::objects::{Kind, Object, Piece, Total};

/// The version that is written, and the only one that is read.
pub const VERSION: u16 = 1;
/// Bytes of a record at most: an object and its head.
const MAX_RECORD_BYTES: usize = nomad::objects::MAX_OBJECT + 64;

/// A stream isn't one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// A length that no record has.
    #[error("A record of a device's state has {0} bytes; 1 to {MAX_RECORD_BYTES} are possible")]
    Length(usize),
    /// A record that means nothing.
    #[error("A record of a device's state can't be read: its {0} is wrong")]
    Record(&'static str),
    /// It ends in a record.
    #[error("A device's state ends in the middle of a record")]
    Cut,
    /// Another version.
    #[error(
        "A device's state has version {0}; this daemon reads {VERSION}: use the same release on both hosts"
    )]
    Version(u16),
    /// It is another device's.
    #[error(
        "The state is that of {found}, the device here is {own}; give the NIC the same MAC address and segment at both ends"
    )]
    OtherDevice {
        /// What came.
        found: String,
        /// What is here.
        own: String,
    },
    /// Frames have no way there.
    #[error(
        "The VM has connections with peers outside of the cluster (transport wire), and its NIC has a tap where it runs and none here; give the NIC here a tap of the same network"
    )]
    NoTap,
    /// Something is missing or twice.
    #[error("A device's state has {0} where it can't be")]
    Order(&'static str),
}

/// A record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// Whose state it is.
    Begin {
        /// MAC address.
        mac: [u8; 6],
        /// Name of the segment.
        segment: String,
    },
    /// An object of the HCA.
    Piece(Piece),
    /// What there must be in the end.
    Total(Total),
    /// The state of a vmxnet3.
    Function(Vec<u8>),
    /// Connections with peers outside of the cluster come.
    Outside {
        /// The source's NIC has a tap.
        tap: bool,
    },
}

/// Appends a record.
pub fn put(record: &Record, into: &mut Vec<u8>) {
    let at = into.len();
    into.extend([0; 4]);
    match record {
        Record::Begin { mac, segment } => {
            into.push(0);
            into.extend(VERSION.to_le_bytes());
            into.extend(mac);
            into.extend(segment.as_bytes());
        }
        Record::Piece(Piece { object, version, state }) => {
            into.extend([1, object.kind as u8]);
            into.extend(object.handle.to_le_bytes());
            into.extend(version.to_le_bytes());
            into.push(u8::from(state.is_some()));
            into.extend(state.as_deref().unwrap_or_default());
        }
        Record::Total(total) => {
            into.push(2);
            into.extend(total.objects.to_le_bytes());
            into.extend(total.sum.to_le_bytes());
        }
        Record::Function(state) => {
            into.push(3);
            into.extend(state);
        }
        Record::Outside { tap } => into.extend([4, u8::from(*tap)]),
    }
    // What is longer than a record may be is refused by whoever reads it.
    let length = u32::try_from(into.len() - at - 4).unwrap_or(u32::MAX);
    into[at..at + 4].copy_from_slice(&length.to_le_bytes());
}

/// Reads records from bytes that come in parts.
#[derive(Debug, Default)]
pub struct Reader {
    waiting: Vec<u8>,
}

impl Reader {
    /// More bytes: the records that are whole now.
    ///
    /// # Errors
    /// When the bytes are none. Nothing more can be read then.
    pub fn take(&mut self, bytes: &[u8]) -> Result<Vec<Record>, StreamError> {
        self.waiting.extend_from_slice(bytes);
        let mut records = Vec::new();
        let mut at = 0;
        while let Some(head) = self.waiting.get(at..).and_then(|rest| rest.first_chunk::<4>()) {
            let length = usize::try_from(u32::from_le_bytes(*head)).unwrap_or(usize::MAX);
            if length == 0 || length > MAX_RECORD_BYTES {
                return Err(StreamError::Length(length));
            }
            let Some(record) = self.waiting.get(at + 4..at + 4 + length) else { break };
            records.push(parse(record)?);
            at += 4 + length;
        }
        self.waiting.drain(..at);
        Ok(records)
    }

    /// The stream has ended.
    ///
    /// # Errors
    /// When it did so in a record.
    pub fn end(&self) -> Result<(), StreamError> {
        if self.waiting.is_empty() { Ok(()) } else { Err(StreamError::Cut) }
    }
}

fn kind(byte: u8) -> Option<Kind> {
    [
        Kind::Device,
        Kind::Context,
        Kind::ProtectionDomain,
        Kind::MemoryRegion,
        Kind::CompletionQueue,
        Kind::SharedReceiveQueue,
        Kind::QueuePair,
    ]
    .into_iter()
    .find(|kind| *kind as u8 == byte)
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], StreamError> {
    let found = bytes.get(at..).and_then(|rest| rest.first_chunk::<N>());
    found.copied().ok_or(StreamError::Record("length"))
}

fn parse(record: &[u8]) -> Result<Record, StreamError> {
    let (what, rest) = record.split_first().ok_or(StreamError::Length(0))?;
    match what {
        0 => {
            let version = u16::from_le_bytes(array(rest, 0)?);
            if version != VERSION {
                return Err(StreamError::Version(version));
            }
            let mac = array(rest, 2)?;
            let segment = std::str::from_utf8(rest.get(8..).unwrap_or_default());
            let segment =
                segment.ok().filter(|name| name.len() <= 64).ok_or(StreamError::Record("segment"))?;
            Ok(Record::Begin { mac, segment: segment.to_owned() })
        }
        1 => {
            let [byte] = array(rest, 0)?;
            let kind = kind(byte).ok_or(StreamError::Record("kind"))?;
            let handle = u32::from_le_bytes(array(rest, 1)?);
            let version = u64::from_le_bytes(array(rest, 5)?);
            let state = match (array::<1>(rest, 13)?, rest.get(14..).unwrap_or_default()) {
                ([0], []) => None,
                ([1], state) => Some(state.to_vec()),
                _ => return Err(StreamError::Record("mark of existence")),
            };
            Ok(Record::Piece(Piece { object: Object { kind, handle }, version, state }))
        }
        2 if rest.len() == 16 => {
            let (objects, sum) = (u64::from_le_bytes(array(rest, 0)?), u64::from_le_bytes(array(rest, 8)?));
            Ok(Record::Total(Total { objects, sum }))
        }
        3 => Ok(Record::Function(rest.to_vec())),
        4 => match rest {
            [tap @ (0 | 1)] => Ok(Record::Outside { tap: *tap == 1 }),
            _ => Err(StreamError::Record("mark of a tap")),
        },
        _ => Err(StreamError::Record("kind of record")),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // For tests only.
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn records() -> Vec<Record> {
        let object = |kind, handle| Object { kind, handle };
        vec![
            Record::Begin { mac: [2, 0, 0, 0, 0, 1], segment: "blue".to_owned() },
            Record::Piece(Piece {
                object: object(Kind::QueuePair, 7),
                version: 3,
                state: Some(vec![1, 2, 3]),
            }),
            Record::Piece(Piece { object: object(Kind::Device, 0), version: u64::MAX, state: None }),
            Record::Piece(Piece { object: object(Kind::Context, 1), version: 1, state: Some(Vec::new()) }),
            Record::Function(b"{}".to_vec()),
            Record::Total(Total { objects: 9, sum: 1 << 63 }),
        ]
    }

    /// What is read, byte by byte or at once, is what was written; an end within a record is seen.
    #[test]
    fn records_are_read_as_they_were_written() {
        let mut bytes = Vec::new();
        records().iter().for_each(|record| put(record, &mut bytes));
        assert_eq!(Reader::default().take(&bytes).unwrap(), records());
        let mut reader = Reader::default();
        let mut read = Vec::new();
        for byte in &bytes {
            read.extend(reader.take(&[*byte]).unwrap());
        }
        assert_eq!((read, reader.end()), (records(), Ok(())));
        reader.take(&bytes[..bytes.len() - 1]).unwrap();
        assert_eq!(reader.end(), Err(StreamError::Cut));
    }

    #[test]
    fn what_is_no_record_is_refused() {
        let refused = |bytes: &[u8]| Reader::default().take(bytes).unwrap_err();
        assert_eq!(refused(&[0; 4]), StreamError::Length(0));
        assert_eq!(refused(&[0xFF; 4]), StreamError::Length(0xFFFF_FFFF));
        assert_eq!(refused(&[9, 0, 0, 0, 0, 2, 0, 1, 1, 1, 1, 1, 1]), StreamError::Version(2));
        for record in [&[9][..], &[1], &[1, 7, 0, 0, 0, 0], &[2, 0], &[0, 1, 0, 1]] {
            let head = u32::try_from(record.len()).unwrap().to_le_bytes();
            assert!(matches!(refused(&[&head, record].concat()), StreamError::Record(_)), "{record:?}");
        }
    }

    proptest! {
        /// Any bytes are records or a refusal.
        #[test]
        fn any_bytes_are_an_answer(parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..8)) {
            let mut reader = Reader::default();
            for part in parts {
                if reader.take(&part).is_err() {
                    break;
                }
            }
        }
    }
}
