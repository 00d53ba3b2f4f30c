//! Encryption and authentication of a stream between monitors that have the same cluster key.
//!
//! The Noise protocol framework's handshake `NNpsk0` (revision 34, chapters 7 and 9), as daemons of different hosts use it: ephemeral X25519 keys, so that a
//! key that is stolen later opens nothing that was sent before, and the cluster key, so that only its holders take part. Each stream has a handshake of its own,
//! before its first frame:
//!
//! ```text
//! source                                                               destination
//!   "CWvm" │ version 1 (u16) │ length (u16) │ e, tag ─────────────────────▶  key right?
//!   ◀───────────────────────────── "CWvm" │ 1 │ length │ e, tag           or a plain `Refused` frame with a sentence
//!   records: length (u16) │ sealed bytes, tag ◀──────────────────────────▶  counted from 0, each direction by itself
//! ```
//! What is in the records are the frames of [`super::frame`], wherever one begins. Each direction changes its key after [`REKEY_AFTER`] records (section
//! 11.3). A record that is missing, repeated, changed or from another stream doesn't open, and ends the migration.

use std::io::{self, Read, Write};
use std::sync::{Arc, PoisonError, RwLock};

use cluster_key::ClusterKey;
use snow::{Builder, HandshakeState, StatelessTransportState};

use super::connection::Connection;
use super::error::MigrationError;
use super::frame::{Kind, Receiver, Sender};
use super::message;

const PROTOCOL: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";
/// Changes with this module's format.
const PROLOGUE: &[u8] = b"causeway vm 1";
/// No frame begins like this.
const MAGIC: [u8; 4] = *b"CWvm";
const VERSION: u16 = 1;
/// Bytes before a handshake message.
const HEAD: usize = 8;
/// A handshake message: an ephemeral key and a tag.
const MESSAGE: usize = 32 + TAG;
const TAG: usize = 16;
/// Most bytes that a record seals.
const MOST: usize = u16::MAX as usize - TAG;
/// Records under one key: 64 GiB, far below what AES-GCM stands.
const REKEY_AFTER: u64 = 1 << 20;

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
pub(super) struct Sealing {
    direction: Direction,
    record: Vec<u8>,
}

impl Sealing {
    /// Sends the first bytes, at most as many as a record has; how many.
    pub fn write(&mut self, from: &[u8], to: &mut impl Write) -> io::Result<usize> {
        let part = from.get(..MOST).unwrap_or(from);
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
pub(super) struct Opening {
    direction: Direction,
    sealed: Vec<u8>,
    plain: Vec<u8>,
    /// Bytes of it that were taken.
    taken: usize,
}

impl Opening {
    /// Takes bytes of the record that is here, or of the next one.
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

/// Both directions, once the handshake is over.
fn directions(state: HandshakeState) -> Result<(Sealing, Opening), snow::Error> {
    let cipher = Arc::new(RwLock::new(state.into_stateless_transport_mode()?));
    let sealing = Sealing { direction: Direction::new(&cipher), record: Vec::new() };
    let opening =
        Opening { direction: Direction::new(&cipher), sealed: Vec::new(), plain: Vec::new(), taken: 0 };
    Ok((sealing, opening))
}

fn builder(key: &ClusterKey) -> Result<Builder<'_>, snow::Error> {
    Builder::new(PROTOCOL.parse()?).prologue(PROLOGUE)?.psk(0, key.bytes())
}

fn broken(error: snow::Error) -> MigrationError {
    MigrationError::stream("encrypted")(io::Error::other(error.to_string()))
}

fn put(state: &mut HandshakeState, connection: &mut Connection) -> Result<(), MigrationError> {
    let mut bytes = [0; HEAD + MESSAGE];
    let length = state.write_message(&[], &mut bytes[HEAD..]).map_err(broken)?;
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
    bytes[6..8].copy_from_slice(&u16::try_from(length).unwrap_or(u16::MAX).to_le_bytes());
    connection.write_all(&bytes[..HEAD + length]).map_err(MigrationError::stream("written"))
}

/// The rest of a handshake message, whose first bytes were [`MAGIC`].
fn take(state: &mut HandshakeState, connection: &mut Connection) -> Result<(), Handshake> {
    let read = |error| Handshake::Failed(MigrationError::stream("read")(error));
    let mut rest = [0; HEAD - 4];
    connection.read_exact(&mut rest).map_err(read)?;
    let [version_low, version_high, low, high] = rest;
    let version = u16::from_le_bytes([version_low, version_high]);
    if version != VERSION || usize::from(u16::from_le_bytes([low, high])) != MESSAGE {
        let text = format!("a handshake of version {version}; this one speaks version {VERSION}");
        return Err(Handshake::Failed(MigrationError::Protocol(text)));
    }
    let mut message = [0; MESSAGE];
    connection.read_exact(&mut message).map_err(read)?;
    state.read_message(&message, &mut []).map(drop).map_err(|_| Handshake::Key)
}

/// Why there is no session.
enum Handshake {
    /// The other side hasn't the same key.
    Key,
    Failed(MigrationError),
}

/// The source's side: from here on the connection is encrypted.
///
/// # Errors
/// When the destination hasn't this key, or doesn't encrypt: it says so.
pub(super) fn as_source(connection: &mut Connection, key: &ClusterKey) -> Result<(), MigrationError> {
    let mut state = builder(key).and_then(Builder::build_initiator).map_err(broken)?;
    put(&mut state, connection)?;
    let mut first = [0; 4];
    connection.read_exact(&mut first).map_err(MigrationError::stream("read"))?;
    if first != MAGIC {
        // A destination that doesn't encrypt answers with a frame.
        return Err(match Receiver::new().receive(&mut first.as_slice().chain(&mut *connection))? {
            (Kind::Refused, payload) => MigrationError::Refused(message::sentence(payload)),
            (kind, _) => MigrationError::Protocol(format!("{kind:?} where encryption was to begin")),
        });
    }
    take(&mut state, connection).map_err(|error| match error {
        Handshake::Key => MigrationError::Key,
        Handshake::Failed(error) => error,
    })?;
    let (sealing, opening) = directions(state).map_err(broken)?;
    connection.encrypt(sealing, opening);
    Ok(())
}

/// The destination's side: from here on the connection is encrypted, if this side has a key. What has none is told so, and sent away, and so is what has
/// one where this side hasn't.
///
/// # Errors
/// When the source isn't of the same mind, or has another key.
pub(super) fn as_destination(
    connection: &mut Connection,
    key: Option<&ClusterKey>,
) -> Result<(), MigrationError> {
    let encrypts = connection.begins_with(MAGIC).map_err(MigrationError::stream("read"))?;
    let refuse = |connection: &mut Connection, error: MigrationError| {
        // A source that has gone needn't hear it.
        let _ = Sender::new().send(connection, Kind::Refused, &[error.to_string().as_bytes()]);
        error
    };
    let key = match (key, encrypts) {
        (None, false) => return Ok(()),
        (None, true) => return Err(refuse(connection, MigrationError::NoKey)),
        (Some(_), false) => return Err(refuse(connection, MigrationError::Plain)),
        (Some(key), true) => key,
    };
    let mut state = builder(key).and_then(Builder::build_responder).map_err(broken)?;
    let mut first = [0; 4];
    connection.read_exact(&mut first).map_err(MigrationError::stream("read"))?;
    match take(&mut state, connection) {
        Ok(()) => {}
        Err(Handshake::Key) => return Err(refuse(connection, MigrationError::Key)),
        Err(Handshake::Failed(error)) => return Err(error),
    }
    put(&mut state, connection)?;
    let (sealing, opening) = directions(state).map_err(broken)?;
    connection.encrypt(sealing, opening);
    Ok(())
}

#[cfg(test)]
mod tests;
