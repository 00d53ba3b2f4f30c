//! Frames of a connection between two daemons.
//!
//! ```text
//!  0 kind (1)   1 zero (3)   4 length of the payload (4)   8 payload
//!
//!  kind           payload
//!  1 Hello        who the sender is (`hello`): the first frame in each direction, and no other one
//!  2 Message      one message of the migration protocol (`nomad::wire`)
//!  3 Probe        empty: asks for an acknowledgement
//!  4 Received     how many Message and Probe frames have come so far (8)
//! ```
//! Little-endian. Version rule: another kind or format is another version of the preamble (`channel::VERSION`), and a daemon refuses versions
//! that it doesn't know. The cluster service passes messages between such daemons on.

use super::hello::HELLO_BYTES;

/// Bytes before the payload.
pub(super) const HEADER_BYTES: usize = 8;

const HELLO: u8 = 1;
const MESSAGE: u8 = 2;
const PROBE: u8 = 3;
const RECEIVED: u8 = 4;

/// A frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Frame {
    Hello([u8; HELLO_BYTES]),
    Message(Vec<u8>),
    Probe,
    Received(u64),
}

/// Why bytes aren't a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum FrameError {
    #[error("a frame of kind {0} came, which this version doesn't know")]
    Kind(u8),
    #[error("a frame of kind {kind} with a payload of {length} bytes came, which it can't have")]
    Length { kind: u8, length: u32 },
    #[error("a frame came whose reserved bytes aren't zero")]
    Reserved,
}

impl Frame {
    /// Appends the frame's bytes.
    pub fn encode(&self, to: &mut Vec<u8>) {
        match self {
            Self::Hello(payload) => encode(HELLO, payload, to),
            Self::Message(payload) => encode(MESSAGE, payload, to),
            Self::Probe => encode(PROBE, &[], to),
            Self::Received(count) => encode(RECEIVED, &count.to_le_bytes(), to),
        }
    }
}

/// Appends a Message frame.
pub(super) fn encode_message(payload: &[u8], to: &mut Vec<u8>) {
    encode(MESSAGE, payload, to);
}

fn encode(kind: u8, payload: &[u8], to: &mut Vec<u8>) {
    to.extend_from_slice(&[kind, 0, 0, 0]);
    // Senders keep to the limits that receivers check.
    to.extend_from_slice(&u32::try_from(payload.len()).unwrap_or(u32::MAX).to_le_bytes());
    to.extend_from_slice(payload);
}

/// Whether a payload of a kind may be so long.
fn check_length(kind: u8, length: u32) -> Result<usize, FrameError> {
    let (least, most) = match kind {
        HELLO => (HELLO_BYTES, HELLO_BYTES),
        MESSAGE => (nomad::wire::HEADER_BYTES, nomad::wire::MAX_MESSAGE_BYTES),
        PROBE => (0, 0),
        RECEIVED => (8, 8),
        _ => return Err(FrameError::Kind(kind)),
    };
    let bytes = usize::try_from(length).ok().filter(|bytes| (least..=most).contains(bytes));
    bytes.ok_or(FrameError::Length { kind, length })
}

/// Finds frames in a stream of untrusted bytes. Holds one incomplete frame at most, besides what was pushed last.
#[derive(Debug, Default)]
pub(super) struct FrameReader {
    bytes: Vec<u8>,
    /// Bytes of complete frames that were taken.
    taken: usize,
}

impl FrameReader {
    /// Appends bytes. The caller takes all complete frames before the next ones.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.taken);
        self.taken = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// Bytes that are held.
    pub fn held_bytes(&self) -> usize {
        self.bytes.len() - self.taken
    }

    /// The next complete frame. After an error the stream has no meaning any more.
    pub fn next(&mut self) -> Result<Option<Frame>, FrameError> {
        let rest = self.bytes.get(self.taken..).unwrap_or_default();
        let Some((header, rest)) = rest.split_first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let [kind, a, b, c, length @ ..] = *header;
        // Before the payload is there: a length is never waited for that can't be.
        let length = check_length(kind, u32::from_le_bytes(length))?;
        if [a, b, c] != [0; 3] {
            return Err(FrameError::Reserved);
        }
        let Some(payload) = rest.get(..length) else { return Ok(None) };
        let frame = match kind {
            HELLO => Frame::Hello(array(payload)),
            MESSAGE => Frame::Message(payload.to_vec()),
            PROBE => Frame::Probe,
            _ => Frame::Received(u64::from_le_bytes(array(payload))),
        };
        self.taken += HEADER_BYTES + length;
        Ok(Some(frame))
    }
}

/// The length was checked.
fn array<const N: usize>(payload: &[u8]) -> [u8; N] {
    payload.first_chunk().copied().unwrap_or([0; N])
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // For tests only.
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame() -> impl Strategy<Value = Frame> {
        prop_oneof![
            prop::array::uniform32(any::<u8>()).prop_map(Frame::Hello),
            prop::collection::vec(any::<u8>(), nomad::wire::HEADER_BYTES..3_000).prop_map(Frame::Message),
            Just(Frame::Probe),
            any::<u64>().prop_map(Frame::Received),
        ]
    }

    fn read_all(reader: &mut FrameReader) -> Result<Vec<Frame>, FrameError> {
        let mut frames = Vec::new();
        while let Some(frame) = reader.next()? {
            frames.push(frame);
        }
        Ok(frames)
    }

    proptest! {
        /// However the bytes are cut, the frames are those that were sent.
        #[test]
        fn frames_are_read_as_written(
            frames in prop::collection::vec(frame(), 0..8),
            cuts in prop::collection::vec(1_usize..2_000, 1..20),
        ) {
            let mut bytes = Vec::new();
            frames.iter().for_each(|frame| frame.encode(&mut bytes));
            let (mut reader, mut read, mut rest) = (FrameReader::default(), Vec::new(), &bytes[..]);
            for cut in cuts.iter().cycle() {
                let (part, others) = rest.split_at(rest.len().min(*cut));
                reader.push(part);
                read.extend(read_all(&mut reader).unwrap());
                rest = others;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(read, frames);
            prop_assert_eq!(reader.held_bytes(), 0);
        }

        /// Any bytes: an error or frames, and never more held than one frame and what came last.
        #[test]
        fn foreign_bytes_are_bounded(parts in prop::collection::vec(prop::collection::vec(0_u8..6, 0..600), 0..40)) {
            let mut reader = FrameReader::default();
            for part in parts {
                reader.push(&part);
                if read_all(&mut reader).is_err() {
                    break;
                }
                prop_assert!(reader.held_bytes() < HEADER_BYTES + nomad::wire::MAX_MESSAGE_BYTES);
            }
        }
    }

    /// A length that can't be is refused with the header, not waited for.
    #[test]
    fn an_impossible_length_is_refused_at_once() {
        let most = u32::try_from(nomad::wire::MAX_MESSAGE_BYTES).unwrap();
        for (kind, length) in [(HELLO, 31), (MESSAGE, most + 1), (MESSAGE, 0), (PROBE, 1), (RECEIVED, 9)] {
            let mut reader = FrameReader::default();
            reader.push(&[kind, 0, 0, 0]);
            assert_eq!(reader.next(), Ok(None));
            reader.push(&length.to_le_bytes());
            assert_eq!(reader.next(), Err(FrameError::Length { kind, length }));
        }
        let mut reader = FrameReader::default();
        reader.push(&[9, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(reader.next(), Err(FrameError::Kind(9)));
        let mut reader = FrameReader::default();
        reader.push(&[PROBE, 0, 1, 0, 0, 0, 0, 0]);
        assert_eq!(reader.next(), Err(FrameError::Reserved));
    }
}
