//! The preamble of a connection, and its bytes afterwards: sealed with the cluster key, or plain.
//!
//! ```text
//! sealed   the handshake and records of `cluster_key::stream`, with magic "CWpm"
//! plain    "CWpp" │ version (u16) │ zero (u16), in each direction, then frames
//! ```
//! The initiator sends first. Magic, version and key must be the same on both sides.

use std::io;

use cluster_key::ClusterKey;
use cluster_key::stream::{HANDSHAKE_BYTES, Handshake, Mismatch, Opening, Purpose, Sealing};

use super::hello::Refusal;

/// Version of the preamble, and of the frames that follow it.
pub(super) const VERSION: u16 = 1;
const SEALED: Purpose = Purpose { magic: *b"CWpm", version: VERSION, prologue: b"causeway peer messages 1" };
const PLAIN_MAGIC: [u8; 4] = *b"CWpp";
/// Bytes of a plain preamble, and of a sealed one's head.
pub(super) const HEAD_BYTES: usize = 8;

/// A preamble in progress.
pub(super) enum Preamble {
    Plain,
    Sealed(Box<Handshake>),
}

/// Seals what is sent.
pub(super) enum Sealer {
    Plain,
    Sealed(Box<Sealing>),
}

/// Opens what has come.
pub(super) enum Opener {
    Plain,
    Sealed {
        opening: Box<Opening>,
        /// An incomplete record.
        pending: Vec<u8>,
    },
}

impl Preamble {
    pub fn initiator(key: Option<&ClusterKey>) -> io::Result<Self> {
        Self::new(key.map(|key| Handshake::initiator(SEALED, key)))
    }

    pub fn responder(key: Option<&ClusterKey>) -> io::Result<Self> {
        Self::new(key.map(|key| Handshake::responder(SEALED, key)))
    }

    fn new<E: ToString>(handshake: Option<Result<Handshake, E>>) -> io::Result<Self> {
        let handshake = handshake.transpose().map_err(|error| io::Error::other(error.to_string()))?;
        Ok(handshake.map_or(Self::Plain, |handshake| Self::Sealed(Box::new(handshake))))
    }

    /// Bytes to send.
    pub fn put(&mut self) -> io::Result<Vec<u8>> {
        match self {
            Self::Plain => {
                let mut bytes = PLAIN_MAGIC.to_vec();
                bytes.extend_from_slice(&VERSION.to_le_bytes());
                bytes.extend_from_slice(&[0; 2]);
                Ok(bytes)
            }
            Self::Sealed(handshake) => {
                let bytes = handshake.put().map_err(|error| io::Error::other(error.to_string()))?;
                Ok(bytes.to_vec())
            }
        }
    }

    /// Checks the peer's first bytes, and returns how many follow them.
    pub fn check_head(&self, head: &[u8; HEAD_BYTES]) -> Result<usize, Refusal> {
        let [a, b, c, d, low, high, ..] = *head;
        let (own, other, more) = match self {
            Self::Plain => (PLAIN_MAGIC, SEALED.magic, 0),
            Self::Sealed(_) => (SEALED.magic, PLAIN_MAGIC, HANDSHAKE_BYTES - HEAD_BYTES),
        };
        match [a, b, c, d] {
            magic if magic == own => {}
            magic if magic == other => return Err(Refusal::Key),
            _ => return Err(Refusal::Malformed),
        }
        if u16::from_le_bytes([low, high]) != VERSION {
            return Err(Refusal::Version);
        }
        Ok(more)
    }

    /// Takes all of the peer's bytes.
    pub fn take(&mut self, bytes: &[u8]) -> Result<(), Refusal> {
        let Self::Sealed(handshake) = self else { return Ok(()) };
        let bytes = bytes.try_into().map_err(|_| Refusal::Malformed)?;
        handshake.take(bytes).map_err(|mismatch| match mismatch {
            Mismatch::Foreign => Refusal::Malformed,
            Mismatch::Version(_) => Refusal::Version,
            Mismatch::Key => Refusal::Key,
        })
    }

    /// Both directions, after bytes were sent and taken.
    pub fn finish(self) -> io::Result<(Sealer, Opener)> {
        match self {
            Self::Plain => Ok((Sealer::Plain, Opener::Plain)),
            Self::Sealed(handshake) => {
                let (sealing, opening) =
                    handshake.finish().map_err(|error| io::Error::other(error.to_string()))?;
                let opener = Opener::Sealed { opening: Box::new(opening), pending: Vec::new() };
                Ok((Sealer::Sealed(Box::new(sealing)), opener))
            }
        }
    }
}

impl Sealer {
    /// Appends what goes over the wire.
    pub fn seal(&mut self, plain: &[u8], wire: &mut Vec<u8>) -> io::Result<()> {
        match self {
            Self::Plain => wire.extend_from_slice(plain),
            Self::Sealed(sealing) => {
                let mut rest = plain;
                while !rest.is_empty() {
                    let sealed = sealing.write(rest, wire)?;
                    rest = rest.get(sealed..).unwrap_or_default();
                }
            }
        }
        Ok(())
    }
}

impl Opener {
    /// Takes bytes of the wire, and appends what opens. Holds an incomplete record at most. After an error nothing opens any more.
    pub fn open(&mut self, wire: &[u8], plain: &mut Vec<u8>) -> io::Result<()> {
        let Self::Sealed { opening, pending } = self else {
            plain.extend_from_slice(wire);
            return Ok(());
        };
        pending.extend_from_slice(wire);
        let mut opened = 0;
        while let Some((length, rest)) = pending.get(opened..).unwrap_or_default().split_first_chunk::<2>() {
            let length = usize::from(u16::from_le_bytes(*length));
            if rest.len() < length {
                break;
            }
            let end = opened + 2 + length;
            let mut record = pending.get(opened..end).unwrap_or_default();
            let mut part = [0; 4096];
            loop {
                let count = opening.read(&mut part, &mut record)?;
                if count == 0 {
                    break;
                }
                plain.extend_from_slice(part.get(..count).unwrap_or_default());
            }
            opened = end;
        }
        pending.drain(..opened);
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // For tests only.
mod tests {
    use super::*;

    fn key(seed: u8) -> ClusterKey {
        ClusterKey::new(std::array::from_fn(|at| u8::try_from(at).unwrap() ^ seed)).unwrap()
    }

    fn take(preamble: &mut Preamble, bytes: &[u8]) -> Result<(), Refusal> {
        let more = preamble.check_head(bytes.first_chunk().unwrap())?;
        assert_eq!(bytes.len(), HEAD_BYTES + more);
        preamble.take(bytes)
    }

    fn ends(keys: [Option<u8>; 2]) -> Result<(Sealer, Opener), Refusal> {
        let keys = keys.map(|seed| seed.map(key));
        let mut initiator = Preamble::initiator(keys[0].as_ref()).unwrap();
        let mut responder = Preamble::responder(keys[1].as_ref()).unwrap();
        take(&mut responder, &initiator.put().unwrap())?;
        take(&mut initiator, &responder.put().unwrap())?;
        Ok((initiator.finish().unwrap().0, responder.finish().unwrap().1))
    }

    /// However the wire cuts them.
    #[test]
    fn bytes_arrive_as_sent() {
        let bytes: Vec<u8> = (0..200_000_u32).map(|at| at.to_le_bytes()[0] ^ at.to_le_bytes()[1]).collect();
        for keys in [[None; 2], [Some(1); 2]] {
            for cut in [1, 7, 1000, 65_537, 300_000] {
                let (mut sealer, mut opener) = ends(keys).unwrap();
                let (mut wire, mut plain) = (Vec::new(), Vec::new());
                sealer.seal(&bytes, &mut wire).unwrap();
                wire.chunks(cut).for_each(|part| opener.open(part, &mut plain).unwrap());
                assert!(plain == bytes, "{keys:?}, {cut}");
                assert_eq!(wire.len() > bytes.len(), keys[0].is_some());
            }
        }
    }

    #[test]
    fn sides_that_do_not_mean_the_same_are_refused() {
        for keys in [[Some(1), Some(2)], [Some(1), None], [None, Some(1)]] {
            assert_eq!(ends(keys).err(), Some(Refusal::Key), "{keys:?}");
        }
        let preamble = Preamble::responder(None).unwrap();
        assert_eq!(preamble.check_head(b"CWpp\x02\x00\x00\x00"), Err(Refusal::Version));
        assert_eq!(preamble.check_head(b"GET / HT"), Err(Refusal::Malformed));
    }

    #[test]
    fn a_changed_record_does_not_open() {
        let (mut sealer, mut opener) = ends([Some(1); 2]).unwrap();
        let mut wire = Vec::new();
        sealer.seal(b"a message", &mut wire).unwrap();
        wire[5] ^= 1;
        let mut plain = Vec::new();
        assert!(opener.open(&wire, &mut plain).is_err());
        assert!(plain.is_empty());
    }
}
