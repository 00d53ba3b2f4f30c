//! Frames, the units of a stream.
//!
//! ```text
//! offset 0  kind        u16, little endian as all
//!        2  zero        u16
//!        4  number      u32, counts frames of this direction from 0
//!        8  length      u32, of the payload in bytes
//!       12  checksum    u32, CRC-32 of the payload
//!       16  payload
//! ```

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use super::error::MigrationError;

/// Bytes before the payload.
pub const HEADER: usize = 16;
/// Limit for the pages in a frame with contents.
pub const MAX_PAGES_PER_FRAME: usize = 64;

/// Type of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// First frame on every stream, from source to destination.
    Hello = 1,
    /// The guest-visible shape of the machine.
    Offer = 2,
    /// The destination accepts the offer.
    Accepted = 3,
    /// The destination refuses the offer, or can't continue; the payload is a sentence.
    Refused = 4,
    /// Contents of pages.
    Pages = 5,
    /// The machine's state, without RAM.
    State = 6,
    /// The last frame of a stream before the answer, with the number of pages.
    End = 7,
    /// The destination has restored everything and could run the guest.
    Ready = 8,
    /// The commit: the destination must run the guest.
    Go = 9,
    /// The guest runs at the destination.
    Running = 10,
    /// The source aborts; the payload is a sentence.
    Abort = 11,
    /// State of a served device: its number among the served functions (u32), and its server's data. From version 2 on.
    Device = 12,
    /// The source requests permission for post-copy: [`super::postcopy`]. This frame and the following need version 3.
    Postcopy = 13,
    /// Pages that will still be at the source when the guest runs at the destination.
    Missing = 14,
    /// The destination requests pages.
    Want = 15,
    /// The destination has all pages.
    Complete = 16,
    /// The disks to copy, and the answer: [`super::mirror`]. This frame and the following need version 4.
    Mirror = 32,
    /// A piece of a disk.
    Block = 33,
    /// This stream's share of a round of disks was sent.
    Settle = 34,
    /// The round is durable at the destination.
    Settled = 35,
    /// The sender works on something that sends nothing; no payload. From version 5 on: [`super::keepalive`].
    Keepalive = 48,
}

/// Limit in bytes for a served device's state in a frame.
pub const MAX_DEVICE_STATE_BYTES: usize = 1 << 20;

impl Kind {
    fn of(number: u16) -> Option<Self> {
        use Kind::{
            Abort, Accepted, Block, Complete, Device, End, Go, Hello, Keepalive, Mirror, Missing, Offer,
            Pages, Postcopy, Ready, Refused, Running, Settle, Settled, State, Want,
        };
        let first = [Hello, Offer, Accepted, Refused, Pages, State, End, Ready, Go, Running, Abort, Device];
        let post_copy = [Postcopy, Missing, Want, Complete];
        let disks = [Mirror, Block, Settle, Settled];
        first.into_iter().chain(post_copy).chain(disks).chain([Keepalive]).find(|kind| *kind as u16 == number)
    }

    /// Limit for the payload in bytes.
    fn limit(self) -> usize {
        match self {
            Self::Hello | Self::End | Self::Accepted | Self::Ready | Self::Go | Self::Running => 256,
            Self::Postcopy | Self::Complete | Self::Settle | Self::Settled => 256,
            Self::Keepalive => 0,
            Self::Mirror => super::mirror::message::MAX_REQUEST_BYTES,
            Self::Block => super::mirror::message::BLOCK_HEADER + super::mirror::message::MAX_CONTENTS_BYTES,
            Self::Missing => super::postcopy::message::MAX_MISSING_BYTES,
            Self::Want => 8 * super::postcopy::message::MAX_WANTED_PAGES,
            Self::Refused | Self::Abort => 4096,
            Self::Offer => 1 << 20,
            Self::Pages => super::pages::RUN_HEADER + MAX_PAGES_PER_FRAME * super::pages::PAGE,
            Self::Device => 4 + MAX_DEVICE_STATE_BYTES,
            Self::State => 64 << 20,
        }
    }
}

/// The sending side of a stream.
#[derive(Debug)]
pub struct Sender {
    next: u32,
    bytes: u64,
    buffer: Vec<u8>,
    last: Instant,
}

impl Sender {
    /// Starts at the first frame.
    pub fn new() -> Self {
        Self { next: 0, bytes: 0, buffer: Vec::new(), last: Instant::now() }
    }

    /// Bytes sent so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Time since the last frame was sent.
    pub fn silence(&self) -> Duration {
        self.last.elapsed()
    }

    /// Sends one frame with `parts` as its payload in a single write.
    pub fn send(&mut self, to: &mut impl Write, kind: Kind, parts: &[&[u8]]) -> io::Result<()> {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        let too_long =
            || io::Error::new(io::ErrorKind::InvalidInput, format!("{length} bytes don't fit a {kind:?}"));
        let announced = u32::try_from(length).ok().filter(|_| length <= kind.limit()).ok_or_else(too_long)?;
        let mut checksum = crc32fast::Hasher::new();
        parts.iter().for_each(|part| checksum.update(part));
        self.buffer.clear();
        self.buffer.extend_from_slice(&(kind as u16).to_le_bytes());
        self.buffer.extend_from_slice(&[0; 2]);
        self.buffer.extend_from_slice(&self.next.to_le_bytes());
        self.buffer.extend_from_slice(&announced.to_le_bytes());
        self.buffer.extend_from_slice(&checksum.finalize().to_le_bytes());
        parts.iter().for_each(|part| self.buffer.extend_from_slice(part));
        to.write_all(&self.buffer)?;
        self.next = self.next.wrapping_add(1);
        self.bytes += self.buffer.len() as u64;
        self.last = Instant::now();
        Ok(())
    }
}

impl Default for Sender {
    fn default() -> Self {
        Self::new()
    }
}

/// The receiving side of a stream.
#[derive(Debug, Default)]
pub struct Receiver {
    next: u32,
    payload: Vec<u8>,
}

impl Receiver {
    /// Starts at the first frame.
    pub fn new() -> Self {
        Self::default()
    }

    /// Waits for one frame. Checks the payload's length and checksum, not its content.
    pub fn receive(&mut self, from: &mut impl Read) -> Result<(Kind, &[u8]), MigrationError> {
        let bad = |what: String| Err(MigrationError::Protocol(what));
        let mut header = [0; HEADER];
        from.read_exact(&mut header).map_err(MigrationError::stream("read"))?;
        let half = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        let word = |at: usize| u32::from(half(at)) | u32::from(half(at + 2)) << 16;
        let Some(kind) = Kind::of(half(0)).filter(|_| half(2) == 0) else {
            return bad(format!("a frame of kind {:#06x} {:#06x}, which isn't known", half(0), half(2)));
        };
        let (number, length, checksum) = (word(4), word(8), word(12));
        if number != self.next {
            return bad(format!("frame {number} where frame {} was to come", self.next));
        }
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > kind.limit() {
            return bad(format!("a {kind:?} of {length} bytes; {} are possible", kind.limit()));
        }
        // The buffer grows as bytes arrive: a hostile length alone allocates no memory.
        self.payload.clear();
        let read = from.by_ref().take(length as u64).read_to_end(&mut self.payload);
        read.map_err(MigrationError::stream("read"))?;
        if self.payload.len() < length {
            let end = io::Error::from(io::ErrorKind::UnexpectedEof);
            return Err(MigrationError::Stream { what: "read to the end of a frame", source: end });
        }
        if crc32fast::hash(&self.payload) != checksum {
            return bad(format!("a damaged {kind:?} of {length} bytes: its checksum is wrong"));
        }
        self.next = self.next.wrapping_add(1);
        Ok((kind, &self.payload))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stream(frames: &[(Kind, Vec<u8>)]) -> Vec<u8> {
        let (mut sender, mut bytes) = (Sender::new(), Vec::new());
        for (kind, payload) in frames {
            sender.send(&mut bytes, *kind, &[payload]).unwrap();
        }
        assert_eq!(sender.bytes(), bytes.len() as u64);
        bytes
    }

    /// Received frames are equal to the sent ones. A stream that is cut at any byte is an error, not a shorter stream.
    #[test]
    fn frames_arrive_whole_or_not_at_all() {
        let frames = [(Kind::Hello, vec![1; 32]), (Kind::Go, vec![]), (Kind::Refused, b"no".to_vec())];
        let bytes = stream(&frames);
        let mut receiver = Receiver::new();
        let mut from = bytes.as_slice();
        for (kind, payload) in &frames {
            assert_eq!(receiver.receive(&mut from).unwrap(), (*kind, payload.as_slice()));
        }
        let ends = [0, HEADER + 32, 2 * HEADER + 32];
        for cut in 0..bytes.len() {
            let (mut receiver, mut from) = (Receiver::new(), &bytes[..cut]);
            let whole = ends.iter().filter(|end| **end > 0 && **end <= cut).count();
            for _ in 0..whole {
                receiver.receive(&mut from).unwrap();
            }
            assert!(
                matches!(receiver.receive(&mut from), Err(MigrationError::Stream { .. })),
                "cut at {cut}"
            );
        }
    }

    /// A payload longer than the type's limit is refused before it is read, and isn't sent.
    #[test]
    fn lengths_have_limits() {
        let mut bytes = stream(&[(Kind::Go, vec![])]);
        bytes[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        let error = Receiver::new().receive(&mut bytes.as_slice()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "The other side of the migration sent a Go of 4294967295 bytes; 256 are possible"
        );
        assert!(Sender::new().send(&mut Vec::new(), Kind::Go, &[&[0; 257]]).is_err());
    }

    proptest! {
        /// A changed bit anywhere is detected.
        #[test]
        fn any_changed_bit_is_noticed(payload in prop::collection::vec(any::<u8>(), 0..200), at in any::<prop::sample::Index>(), bit in 0..8u8) {
            let mut bytes = stream(&[(Kind::Refused, payload)]);
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            let mut receiver = Receiver::new();
            // A frame with a changed type can be a valid frame of the other type; every other change is an error.
            match receiver.receive(&mut bytes.as_slice()) {
                Ok((kind, _)) => prop_assert!(at < 2 && kind != Kind::Refused),
                Err(error) => prop_assert!(!error.to_string().is_empty()),
            }
        }

        /// Any bytes give a frame or an error, never a panic.
        #[test]
        fn any_bytes_are_an_answer(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = Receiver::new().receive(&mut bytes.as_slice());
        }
    }
}
