//! Bytes of another daemon: frames of a plain connection, and preambles and records of one without the key.
//!
//! Checked: frames are written as read, an incomplete frame is bounded, nothing forged opens; no panic.

#![no_main]

use arbitrary::Arbitrary;
use host::peer_messages::fuzzing::{frames, sealed};
use libfuzzer_sys::fuzz_target;

#[derive(Debug, Arbitrary)]
enum Part {
    /// A frame with the length of its payload, unless that is changed.
    Frame { kind: u8, reserved: bool, payload: Vec<u8>, longer: i16 },
    /// A message of the migration protocol.
    Message { kind: u8, ends: u8, body: Vec<u8> },
    /// Any bytes.
    Raw(Vec<u8>),
    /// A sealed record with its length.
    Record(Vec<u8>),
}

#[derive(Debug, Arbitrary)]
struct Input {
    preamble: Vec<u8>,
    known_magic: bool,
    parts: Vec<Part>,
}

fn bytes(part: Part) -> Vec<u8> {
    let frame = |kind: u8, reserved: bool, payload: &[u8], longer: i16| {
        let length = (payload.len() as u32).wrapping_add_signed(longer.into());
        let mut bytes = vec![kind % 6, 0, u8::from(reserved), 0];
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(payload);
        bytes
    };
    match part {
        Part::Frame { kind, reserved, payload, longer } => frame(kind, reserved, &payload, longer),
        Part::Message { kind, ends, body } => {
            let mut message = vec![nomad::wire::VERSION, kind % 25, ends & 3, 0];
            message.extend_from_slice(&(body.len() as u32).to_le_bytes());
            message.extend_from_slice(&[1, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
            message.extend_from_slice(&body);
            frame(2, false, &message, 0)
        }
        Part::Raw(bytes) => bytes,
        Part::Record(sealed) => {
            let mut bytes = (sealed.len() as u16).to_le_bytes().to_vec();
            bytes.extend_from_slice(&sealed);
            bytes
        }
    }
}

fuzz_target!(|input: Input| {
    let parts: Vec<Vec<u8>> = input.parts.into_iter().map(bytes).collect();
    frames(&parts);
    let mut preamble = input.preamble;
    if input.known_magic {
        preamble.splice(0..preamble.len().min(8), *b"CWpm\x01\x00\x30\x00");
    }
    sealed(&preamble, &parts);
});
