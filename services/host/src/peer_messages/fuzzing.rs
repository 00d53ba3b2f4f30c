//! For the fuzz target `peer_frames`: the reader of frames, on its own and behind records, and Hellos.

use cluster_key::ClusterKey;

use super::channel::{HEAD_BYTES, Preamble};
use super::frame::{Frame, FrameReader, HEADER_BYTES};
use super::hello::{HELLO_BYTES, Hello};

/// Reads frames from bytes that come in parts. Returns the sum of the frames' payloads.
///
/// # Panics
/// If more is held than may be, or a frame isn't written as it was read.
pub fn frames(parts: &[Vec<u8>]) -> usize {
    let (mut reader, mut payloads) = (FrameReader::default(), 0);
    for part in parts {
        reader.push(part);
        loop {
            match reader.next() {
                Ok(Some(frame)) => {
                    let mut bytes = Vec::new();
                    frame.encode(&mut bytes);
                    let mut again = FrameReader::default();
                    again.push(&bytes);
                    assert_eq!(again.next(), Ok(Some(frame.clone())), "frames are written as read");
                    payloads += bytes.len() - HEADER_BYTES;
                    match frame {
                        Frame::Hello(payload) => hello(&payload),
                        Frame::Message(payload) => drop(nomad::wire::parse(&payload)),
                        Frame::Probe | Frame::Received(_) => {}
                    }
                }
                Ok(None) => break,
                Err(_) => return payloads,
            }
        }
        assert!(reader.held_bytes() < HEADER_BYTES + nomad::wire::MAX_MESSAGE_BYTES);
    }
    payloads
}

fn hello(payload: &[u8; HELLO_BYTES]) {
    if let Ok(hello) = Hello::parse(payload) {
        assert_eq!(hello.encode(), *payload);
    }
}

/// A peer without the key: whatever it sends as a preamble and records, nothing opens.
///
/// # Panics
/// If something opens.
pub fn sealed(preamble: &[u8], records: &[Vec<u8>]) {
    let key = ClusterKey::new(*b"thirty-two bytes that are a key!");
    let (Some(key), Some(head)) = (key, preamble.first_chunk::<HEAD_BYTES>()) else { return };
    let Ok(mut responder) = Preamble::responder(Some(&key)) else { return };
    if responder.check_head(head).is_ok() {
        assert!(responder.take(preamble).is_err(), "nobody guesses the key");
    }
    let (Ok(mut one), Ok(mut other)) = (Preamble::initiator(Some(&key)), Preamble::responder(Some(&key)))
    else {
        return;
    };
    let Ok(()) = one.put().map(|bytes| other.take(&bytes)).map(drop) else { return };
    let Ok(()) = other.put().map(|bytes| one.take(&bytes)).map(drop) else { return };
    let Ok((_, mut opener)) = one.finish() else { return };
    let mut plain = Vec::new();
    for record in records {
        if opener.open(record, &mut plain).is_err() {
            break;
        }
    }
    assert!(plain.is_empty(), "nothing forged opens");
}
