//! Encryption and authentication of byte streams between processes that share a cluster key: monitors' migrations, nodes of a VM, and
//! messages of host daemons.
//!
//! The handshake is `NNpsk0` of the Noise protocol framework (revision 34, chapters 7 and 9), as packets between
//! host daemons use it. Ephemeral X25519 keys ensure that a key stolen later opens no earlier stream. The cluster key admits only its
//! holders. Each stream has a handshake of its own, before its first byte:
//!
//! ```text
//! initiator                                                             responder
//!   magic (4) │ version (u16) │ length (u16) │ e, tag ────────────────────▶  same key?
//!   ◀──────────────────────────── magic │ version │ length │ e, tag
//!   records: length (u16) │ sealed bytes, tag ◀──────────────────────────▶  counted from 0, separately in each direction
//! ```
//! Each direction changes its key after `REKEY_AFTER` records (section 11.3). A record that is missing, repeated, changed or from another
//! stream doesn't open. The handshake includes the stream's purpose ([`Purpose`]), so a stream can't be replayed for another one.
//!
//! No I/O of its own: callers exchange the handshake's messages, and records go through `Read` and `Write`.

use std::io::{self, Read, Write};
use std::sync::{Arc, PoisonError, RwLock};

use snow::{Builder, HandshakeState, StatelessTransportState};

use crate::ClusterKey;

const PROTOCOL: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";
/// Bytes of the head of a handshake message.
const HEAD: usize = 8;
/// Bytes of a handshake message without its head: an ephemeral key and a tag.
const MESSAGE: usize = 32 + TAG;
const TAG: usize = 16;
/// Bytes of a handshake message with its head.
pub const HANDSHAKE_BYTES: usize = HEAD + MESSAGE;
/// Bytes of a record besides the sealed ones.
pub const RECORD_OVERHEAD_BYTES: usize = 2 + TAG;
/// Limit of plain bytes in a record.
const MAX_RECORD_PLAINTEXT_BYTES: usize = u16::MAX as usize - TAG;
/// Records under one key: 64 GiB, far below the limit of AES-GCM.
const REKEY_AFTER: u64 = 1 << 20;

/// Purpose of a stream. Both sides must have the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Purpose {
    /// First bytes of the stream. No other protocol at the same address begins with them.
    pub magic: [u8; 4],
    /// Version of the handshake and of what follows. Both sides must have the same one.
    pub version: u16,
    /// Part of the handshake. It changes with the format of the sealed bytes.
    pub prologue: &'static [u8],
}

/// Why a handshake failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mismatch {
    /// The message isn't a handshake for this purpose.
    Foreign,
    /// The handshake has another version.
    Version(u16),
    /// The other side doesn't have the same key.
    Key,
}

/// A handshake in progress.
#[allow(missing_debug_implementations, reason = "it holds keys")]
pub struct Handshake {
    purpose: Purpose,
    state: HandshakeState,
}

impl Handshake {
    /// The handshake of the side that sends first.
    ///
    /// # Errors
    /// If the library doesn't support the protocol.
    pub fn initiator(purpose: Purpose, key: &ClusterKey) -> Result<Self, snow::Error> {
        Ok(Self { purpose, state: builder(purpose, key)?.build_initiator()? })
    }

    /// The handshake of the other side.
    ///
    /// # Errors
    /// If the library doesn't support the protocol.
    pub fn responder(purpose: Purpose, key: &ClusterKey) -> Result<Self, snow::Error> {
        Ok(Self { purpose, state: builder(purpose, key)?.build_responder()? })
    }

    /// The message to send.
    ///
    /// # Errors
    /// If it isn't this side's turn.
    pub fn put(&mut self) -> Result<[u8; HANDSHAKE_BYTES], snow::Error> {
        let mut bytes = [0; HANDSHAKE_BYTES];
        let (head, message) = bytes.split_at_mut(HEAD);
        let length = self.state.write_message(&[], message)?;
        head[..4].copy_from_slice(&self.purpose.magic);
        head[4..6].copy_from_slice(&self.purpose.version.to_le_bytes());
        head[6..].copy_from_slice(&u16::try_from(length).unwrap_or(u16::MAX).to_le_bytes());
        Ok(bytes)
    }

    /// Processes the other side's message.
    ///
    /// # Errors
    /// If purpose, version or key differ.
    pub fn take(&mut self, bytes: &[u8; HANDSHAKE_BYTES]) -> Result<(), Mismatch> {
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

    /// The two directions, after both messages were exchanged.
    ///
    /// # Errors
    /// If one is missing.
    pub fn finish(self) -> Result<(Sealing, Opening), snow::Error> {
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

    /// Changes the key when it is due.
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

/// The sending direction of a stream.
#[derive(Debug)]
pub struct Sealing {
    direction: Direction,
    record: Vec<u8>,
}

impl Sealing {
    /// Seals and writes the first bytes of `from`, as many as a record holds. Returns their number.
    ///
    /// # Errors
    /// If `to` fails, or the key has sealed as much as it may.
    pub fn write(&mut self, from: &[u8], to: &mut impl Write) -> io::Result<usize> {
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

/// The receiving direction of a stream.
#[derive(Debug)]
pub struct Opening {
    direction: Direction,
    sealed: Vec<u8>,
    plain: Vec<u8>,
    /// Bytes of `plain` that were read.
    taken: usize,
}

impl Opening {
    /// Reads bytes of the open record, or of the next one. Returns 0 at the end of the stream.
    ///
    /// # Errors
    /// If `from` fails or ends within a record, or a record doesn't open (`InvalidData`).
    pub fn read(&mut self, into: &mut [u8], from: &mut impl Read) -> io::Result<usize> {
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

    /// Reads and opens the next record. Returns `false` at the end of the stream.
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
        // Bytes that didn't open must not be read.
        self.plain.truncate(*opened.as_ref().unwrap_or(&0));
        opened.map_err(|_| invalid("a record came that its sender hasn't sealed, or not here and now"))?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests;
