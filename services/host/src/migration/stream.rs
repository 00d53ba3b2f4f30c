//! A device's state as a byte stream. vfio-user carries it between this daemon and a monitor, and a connection between
//! monitors.
//!
//! ```text
//! u32 length of the rest   u8 type   …
//!   0 begin:    u16 version, u8[6] MAC address, segment's name
//!   1 piece:    u8 kind, u32 handle, u64 version, u8 exists, its state
//!   2 total:    u64 objects, u64 sum; the last record
//!   3 function: the state of a vmxnet3, as JSON
//!   4 outside:  u8 whether the segment has a tap; before the first connection by `wire`. Daemons of earlier releases refuse it
//! ```
//! Little endian. Records may be split at any byte. The input is untrusted.

use nomad::objects::{Kind, Object, Piece, Total};

/// The version that this daemon writes, and the only one that it reads.
pub const VERSION: u16 = 1;
/// Maximum size of a record, in bytes: an object and its header.
const MAX_RECORD_BYTES: usize = nomad::objects::MAX_OBJECT_BYTES + 64;

/// Why a stream can't be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// A length that no record can have.
    #[error("A record of a device's state has {0} bytes; 1 to {MAX_RECORD_BYTES} are possible")]
    Length(usize),
    /// A record with an invalid type or content.
    #[error("A record of a device's state can't be read: its {0} is wrong")]
    Record(&'static str),
    /// The stream ends within a record.
    #[error("A device's state ends in the middle of a record")]
    Cut,
    /// The state has another version.
    #[error(
        "A device's state has version {0}; this daemon reads {VERSION}: use the same release on both hosts"
    )]
    Version(u16),
    /// The state belongs to a device with another MAC address or segment.
    #[error(
        "The state is that of {found}, the device here is {own}; give the NIC the same MAC address and segment at both ends"
    )]
    OtherDevice {
        /// The received MAC address and segment.
        found: String,
        /// This device's MAC address and segment.
        own: String,
    },
    /// The VM has connections by `wire`, but its NIC has no tap here.
    #[error(
        "The VM has connections with peers outside of the cluster (transport wire), and its NIC has a tap where it runs and none here; give the NIC here a tap of the same network"
    )]
    NoTap,
    /// A record is missing, duplicate or in the wrong order.
    #[error("A device's state has {0} where it can't be")]
    Order(&'static str),
}

/// A record of the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// The first record: the device's identity.
    Begin {
        /// The NIC's MAC address.
        mac: [u8; 6],
        /// Name of the NIC's segment.
        segment: String,
    },
    /// An object of the HCA.
    Piece(Piece),
    /// The set of objects that the source has.
    Total(Total),
    /// The state of a vmxnet3.
    Function(Vec<u8>),
    /// Connections with peers outside of the cluster follow.
    Outside {
        /// Whether the source's NIC has a tap.
        tap: bool,
    },
}

/// Appends a record's bytes.
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
    // The reader refuses a record that is too long.
    let length = u32::try_from(into.len() - at - 4).unwrap_or(u32::MAX);
    into[at..at + 4].copy_from_slice(&length.to_le_bytes());
}

/// Parses records from a stream that arrives in parts.
#[derive(Debug, Default)]
pub struct Reader {
    waiting: Vec<u8>,
}

impl Reader {
    /// Adds bytes, and returns the records that are complete now.
    ///
    /// # Errors
    /// If a record is invalid. The stream can't be read any further then.
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

    /// Checks the end of the stream.
    ///
    /// # Errors
    /// If it ends within a record.
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

    /// Records survive a round trip, parsed byte by byte or at once. An end within a record is detected.
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
        /// Any bytes result in records or an error.
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
