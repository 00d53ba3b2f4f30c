//! Messages between the lab and the agent inside a host, over one virtio-serial port.
//!
//! ```text
//! lab → agent:  Start {json}   Stdin bytes   StdinEnd   Resize rows,cols   Signal n   Ping
//! agent → lab:  Hello   Stdout bytes   Stderr bytes   Exit code   Failed text   Pong
//! frame:        session u32 · kind u8 · length u32 · payload        (little-endian)
//! ```
//! Several sessions share the port; a session is one process group. Both ends come from the same build.

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};

/// Limit of a frame's payload in bytes.
pub const MAX_PAYLOAD_BYTES: usize = 1 << 20;

/// Type of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Start a session: the payload is a [`Start`] in JSON.
    Start = 1,
    /// Bytes for the process's standard input.
    Stdin = 2,
    /// End of standard input.
    StdinEnd = 3,
    /// The terminal's size: rows and columns, `u16` each.
    Resize = 4,
    /// A signal for the process group: `u32`.
    Signal = 5,
    /// Request a [`Kind::Pong`].
    Ping = 6,
    /// The agent has started.
    Hello = 17,
    /// Bytes from standard output.
    Stdout = 18,
    /// Bytes from standard error.
    Stderr = 19,
    /// The process ended: `i32`, 128 plus the signal's number after a signal.
    Exit = 20,
    /// The process couldn't be started: text.
    Failed = 21,
    /// Response to a [`Kind::Ping`].
    Pong = 22,
}

impl Kind {
    fn from(byte: u8) -> Option<Self> {
        use Kind::*;
        [Start, Stdin, StdinEnd, Resize, Signal, Ping, Hello, Stdout, Stderr, Exit, Failed, Pong]
            .into_iter()
            .find(|k| *k as u8 == byte)
    }
}

/// A process to start.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct Start {
    /// A script for `/bin/sh -c`.
    pub script: String,
    /// Run it in a terminal of this many rows and columns.
    pub terminal: Option<(u16, u16)>,
}

/// One frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The session's number; 0 for none.
    pub session: u32,
    /// The type.
    pub kind: Kind,
    /// The payload.
    pub data: Vec<u8>,
}

/// Writes one frame in one piece.
pub fn send(to: &mut impl Write, session: u32, kind: Kind, data: &[u8]) -> Result<()> {
    let Ok(length) = u32::try_from(data.len()) else { bail!("A frame of {} bytes is too long", data.len()) };
    let mut bytes = Vec::with_capacity(9 + data.len());
    bytes.extend(session.to_le_bytes());
    bytes.push(kind as u8);
    bytes.extend(length.to_le_bytes());
    bytes.extend(data);
    to.write_all(&bytes)?;
    to.flush()?;
    Ok(())
}

/// Reads one frame.
pub fn receive(from: &mut impl Read) -> Result<Frame> {
    let mut head = [0; 9];
    from.read_exact(&mut head)?;
    let [a, b, c, d, kind, e, f, g, h] = head;
    let length = u32::from_le_bytes([e, f, g, h]) as usize;
    let Some(kind) = Kind::from(kind) else {
        bail!("The channel carries a frame of kind {kind}: the two ends have lost each other")
    };
    if length > MAX_PAYLOAD_BYTES {
        bail!("The channel announces a frame of {length} bytes: the two ends have lost each other");
    }
    let mut data = vec![0; length];
    from.read_exact(&mut data)?;
    Ok(Frame { session: u32::from_le_bytes([a, b, c, d]), kind, data })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn frames_survive_the_journey() {
        let mut wire = Vec::new();
        let start = Start { script: "ls".into(), terminal: Some((24, 80)) };
        send(&mut wire, 7, Kind::Start, &serde_json::to_vec(&start).unwrap()).unwrap();
        send(&mut wire, 7, Kind::Exit, &0i32.to_le_bytes()).unwrap();
        let mut from = wire.as_slice();
        let got = receive(&mut from).unwrap();
        assert_eq!((got.session, got.kind), (7, Kind::Start));
        assert_eq!(serde_json::from_slice::<Start>(&got.data).unwrap(), start);
        assert_eq!(receive(&mut from).unwrap().kind, Kind::Exit);
        assert!(receive(&mut from).is_err());
    }

    proptest! {
        #[test]
        fn noise_is_an_error_or_a_frame(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = receive(&mut bytes.as_slice());
        }
    }
}
