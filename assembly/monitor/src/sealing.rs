//! Encryption and authentication of byte streams between monitors that have the same cluster key.
//!
//! The Noise protocol framework's handshake `NNpsk0` (revision 34, chapters 7 and 9), as daemons of different hosts use it: ephemeral X25519 keys, so that a
//! key that is stolen later opens nothing that was sent before, and the cluster key, so that only its holders take part. Each stream has a handshake of its own,
//! before its first byte:
//!
//! ```text
//! initiator                                                             responder
//!   magic (4) │ version (u16) │ length (u16) │ e, tag ────────────────────▶  key right?
//!   ◀──────────────────────────── magic │ version │ length │ e, tag
//!   records: length (u16) │ sealed bytes, tag ◀──────────────────────────▶  counted from 0, each direction by itself
//! ```
//! Each direction changes its key after [`REKEY_AFTER`] records (section 11.3). A record that is missing, repeated, changed or from another stream doesn't
//! open. What a stream is for goes into the handshake ([`Purpose`]), so that one recorded for one purpose is none for another.

use std::io::{self, Read, Write};
use std::sync::{Arc, PoisonError, RwLock};

use cluster_key::ClusterKey;
use snow::{Builder, HandshakeState, StatelessTransportState};

const PROTOCOL: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";
/// Bytes before a handshake message.
const HEAD: usize = 8;
/// A handshake message: an ephemeral key and a tag.
const MESSAGE: usize = 32 + TAG;
const TAG: usize = 16;
/// Bytes of a handshake message with its head.
pub(crate) const HANDSHAKE_BYTES: usize = HEAD + MESSAGE;
/// Bytes of a record beside those that it seals.
pub(crate) const RECORD_OVERHEAD_BYTES: usize = 2 + TAG;
/// Most bytes that a record seals.
const MAX_RECORD_PLAINTEXT_BYTES: usize = u16::MAX as usize - TAG;
/// Records under one key: 64 GiB, far below what AES-GCM stands.
const REKEY_AFTER: u64 = 1 << 20;

/// What a stream is for: both sides mean the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Purpose {
    /// First bytes of the stream; no other protocol at the same address begins like this.
    pub(crate) magic: [u8; 4],
    pub(crate) version: u16,
    /// Goes into the handshake; changes with the format of what is sealed.
    pub(crate) prologue: &'static [u8],
}

/// Why there is no session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mismatch {
    /// It is no handshake for this purpose.
    Foreign,
    /// It is one of another version.
    Version(u16),
    /// The other side hasn't the same key.
    Key,
}

/// A handshake under way.
pub(crate) struct Handshake {
    purpose: Purpose,
    state: HandshakeState,
}

impl Handshake {
    /// Of the side that speaks first.
    ///
    /// # Errors
    /// The library has no such protocol.
    pub(crate) fn initiator(purpose: Purpose, key: &ClusterKey) -> Result<Self, snow::Error> {
        Ok(Self { purpose, state: builder(purpose, key)?.build_initiator()? })
    }

    /// Of the other side.
    ///
    /// # Errors
    /// The library has no such protocol.
    pub(crate) fn responder(purpose: Purpose, key: &ClusterKey) -> Result<Self, snow::Error> {
        Ok(Self { purpose, state: builder(purpose, key)?.build_responder()? })
    }

    /// This side's message.
    ///
    /// # Errors
    /// It isn't this side's turn.
    pub(crate) fn put(&mut self) -> Result<[u8; HANDSHAKE_BYTES], snow::Error> {
        let mut bytes = [0; HANDSHAKE_BYTES];
        let (head, message) = bytes.split_at_mut(HEAD);
        let length = self.state.write_message(&[], message)?;
        head[..4].copy_from_slice(&self.purpose.magic);
        head[4..6].copy_from_slice(&self.purpose.version.to_le_bytes());
        head[6..].copy_from_slice(&u16::try_from(length).unwrap_or(u16::MAX).to_le_bytes());
        Ok(bytes)
    }

    /// The other side's message.
    ///
    /// # Errors
    /// It isn't of the same mind.
    pub(crate) fn take(&mut self, bytes: &[u8; HANDSHAKE_BYTES]) -> Result<(), Mismatch> {
        let (head, message) = bytes.split_at(HEAD);
        if head[..4] != self.purpose.magic {
            return Err(Mismatch::Foreign);
        }
        let word = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
        if word(4) != self.purpose.version || usize::from(word(6)) != MESSAGE {
            return Err(Mismatch::Version(word(4)));
        }
        self.state.read_message(message, &mut []).map(drop).map_err(|_| Mismatch::Key)
    }

    /// Both directions, once both messages went over.
    ///
    /// # Errors
    /// One of them didn't.
    pub(crate) fn finish(self) -> Result<(Sealing, Opening), snow::Error> {
        let cipher = Arc::new(RwLock::new(self.state.into_stateless_transport_mode()?));
        let sealing = Sealing { direction: Direction::new(&cipher), record: Vec::new() };
        let opening =
            Opening { direction: Direction::new(&cipher), sealed: Vec::new(), plain: Vec::new(), taken: 0 };
        Ok((sealing, opening))
    }
}

fn builder(purpose: Purpose, key: &ClusterKey) -> Result<Builder<'_>, snow::Error> {
    Builder::new(PROTOCOL.parse()?).prologue(purpose.prologue)?.psk(0, key.bytes())
}

type Shared = Arc<RwLock<StatelessTransportState>>;

/// One direction of a stream.
#[derive(Debug)]
struct Direction {
    cipher: Shared,
    /// Records so far.
    records: u64,
    rekey_after: u64,
}

impl Direction {
    fn new(cipher: &Shared) -> Self {
        Self { cipher: Arc::clone(cipher), records: 0, rekey_after: REKEY_AFTER }
    }

    /// Changes the key where it is time to.
    fn turn(&mut self, rekey: impl FnOnce(&mut StatelessTransportState)) {
        if self.records > 0 && self.records.is_multiple_of(self.rekey_after) {
            rekey(&mut self.cipher.write().unwrap_or_else(PoisonError::into_inner));
        }
    }

    fn seal(&mut self, plain: &[u8], into: &mut [u8]) -> Result<usize, snow::Error> {
        self.turn(StatelessTransportState::rekey_outgoing);
        let cipher = self.cipher.read().unwrap_or_else(PoisonError::into_inner);
        let written = cipher.write_message(self.records, plain, into)?;
        drop(cipher);
        self.records += 1;
        Ok(written)
    }

    fn open(&mut self, sealed: &[u8], into: &mut [u8]) -> Result<usize, snow::Error> {
        self.turn(StatelessTransportState::rekey_incoming);
        let cipher = self.cipher.read().unwrap_or_else(PoisonError::into_inner);
        let read = cipher.read_message(self.records, sealed, into)?;
        drop(cipher);
        self.records += 1;
        Ok(read)
    }
}

/// What is sent over a stream.
#[derive(Debug)]
pub(crate) struct Sealing {
    direction: Direction,
    record: Vec<u8>,
}

impl Sealing {
    /// Sends the first bytes, at most as many as a record has; how many.
    pub(crate) fn write(&mut self, from: &[u8], to: &mut impl Write) -> io::Result<usize> {
        let part = from.get(..MAX_RECORD_PLAINTEXT_BYTES).unwrap_or(from);
        if part.is_empty() {
            return Ok(0);
        }
        self.record.resize(2 + part.len() + TAG, 0);
        let failed = |_| io::Error::other("a record can't be sealed");
        let (head, sealed) = self.record.split_at_mut(2);
        let length = self.direction.seal(part, sealed).map_err(failed)?;
        head.copy_from_slice(&u16::try_from(length).unwrap_or(u16::MAX).to_le_bytes());
        to.write_all(&self.record)?;
        Ok(part.len())
    }
}

/// What comes over a stream.
#[derive(Debug)]
pub(crate) struct Opening {
    direction: Direction,
    sealed: Vec<u8>,
    plain: Vec<u8>,
    /// Bytes of it that were taken.
    taken: usize,
}

impl Opening {
    /// Takes bytes of the record that is here, or of the next one.
    pub(crate) fn read(&mut self, into: &mut [u8], from: &mut impl Read) -> io::Result<usize> {
        if into.is_empty() {
            return Ok(0);
        }
        if self.taken == self.plain.len() && !self.next(from)? {
            return Ok(0);
        }
        let rest = self.plain.get(self.taken..).unwrap_or_default();
        let count = rest.len().min(into.len());
        into[..count].copy_from_slice(&rest[..count]);
        self.taken += count;
        Ok(count)
    }

    /// The next record that has anything; `false` at the end of the stream.
    fn next(&mut self, from: &mut impl Read) -> io::Result<bool> {
        let mut head = [0; 2];
        if from.read(&mut head[..1])? == 0 {
            return Ok(false);
        }
        from.read_exact(&mut head[1..])?;
        let length = usize::from(u16::from_le_bytes(head));
        let invalid = |text| io::Error::new(io::ErrorKind::InvalidData, text);
        if length <= TAG {
            return Err(invalid("a record without contents came"));
        }
        self.sealed.resize(length, 0);
        from.read_exact(&mut self.sealed)?;
        self.plain.resize(length - TAG, 0);
        self.taken = 0;
        let opened = self.direction.open(&self.sealed, &mut self.plain);
        // What didn't open must not be read.
        self.plain.truncate(*opened.as_ref().unwrap_or(&0));
        opened.map_err(|_| invalid("a record came that its sender hasn't sealed, or not here and now"))?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests;
