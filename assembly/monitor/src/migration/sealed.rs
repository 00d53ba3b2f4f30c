//! Encryption and authentication of a migration's streams ([`crate::sealing`]), and what sides say that aren't of one mind.
//!
//! ```text
//! source                                                               destination
//!   "CWvm" │ version 1 (u16) │ length (u16) │ e, tag ─────────────────────▶  key right?
//!   ◀───────────────────────────── "CWvm" │ 1 │ length │ e, tag           or a plain `Refused` frame with a sentence
//!   records ◀────────────────────────────────────────────────────────────▶
//! ```
//! What is in the records are the frames of [`super::frame`], wherever one begins.

use std::io::{self, Read, Write};

use cluster_key::ClusterKey;

use super::connection::Connection;
use super::error::MigrationError;
use super::frame::{Kind, Receiver, Sender};
use super::message;
use crate::sealing::{HANDSHAKE_BYTES, Handshake, Mismatch, Purpose};

/// No frame begins like its magic.
const MIGRATION: Purpose = Purpose { magic: *b"CWvm", version: 1, prologue: b"causeway vm 1" };

fn broken(error: snow::Error) -> MigrationError {
    MigrationError::stream("encrypted")(io::Error::other(error.to_string()))
}

fn put(state: &mut Handshake, connection: &mut Connection) -> Result<(), MigrationError> {
    let bytes = state.put().map_err(broken)?;
    connection.write_all(&bytes).map_err(MigrationError::stream("written"))
}

/// Why there is no session.
enum Refusal {
    /// The other side hasn't the same key.
    Key,
    Failed(MigrationError),
}

/// The rest of a handshake message, whose first bytes were those of [`MIGRATION`].
fn take(state: &mut Handshake, connection: &mut Connection) -> Result<(), Refusal> {
    let mut bytes = [0; HANDSHAKE_BYTES];
    let (magic, rest) = bytes.split_at_mut(MIGRATION.magic.len());
    magic.copy_from_slice(&MIGRATION.magic);
    connection.read_exact(rest).map_err(|error| Refusal::Failed(MigrationError::stream("read")(error)))?;
    state.take(&bytes).map_err(|mismatch| match mismatch {
        Mismatch::Key => Refusal::Key,
        Mismatch::Foreign | Mismatch::Version(_) => {
            let version = u16::from_le_bytes([bytes[4], bytes[5]]);
            let known = MIGRATION.version;
            let text = format!("a handshake of version {version}; this one speaks version {known}");
            Refusal::Failed(MigrationError::Protocol(text))
        }
    })
}

/// The source's side: from here on the connection is encrypted.
///
/// # Errors
/// When the destination hasn't this key, or doesn't encrypt: it says so.
pub(super) fn as_source(connection: &mut Connection, key: &ClusterKey) -> Result<(), MigrationError> {
    let mut state = Handshake::initiator(MIGRATION, key).map_err(broken)?;
    put(&mut state, connection)?;
    let mut first = [0; 4];
    connection.read_exact(&mut first).map_err(MigrationError::stream("read"))?;
    if first != MIGRATION.magic {
        // A destination that doesn't encrypt answers with a frame.
        return Err(match Receiver::new().receive(&mut first.as_slice().chain(&mut *connection))? {
            (Kind::Refused, payload) => MigrationError::Refused(message::sentence(payload)),
            (kind, _) => MigrationError::Protocol(format!("{kind:?} where encryption was to begin")),
        });
    }
    take(&mut state, connection).map_err(|error| match error {
        Refusal::Key => MigrationError::Key,
        Refusal::Failed(error) => error,
    })?;
    let (sealing, opening) = state.finish().map_err(broken)?;
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
    let encrypts = connection.begins_with(MIGRATION.magic).map_err(MigrationError::stream("read"))?;
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
    let mut state = Handshake::responder(MIGRATION, key).map_err(broken)?;
    let mut first = [0; 4];
    connection.read_exact(&mut first).map_err(MigrationError::stream("read"))?;
    match take(&mut state, connection) {
        Ok(()) => {}
        Err(Refusal::Key) => return Err(refuse(connection, MigrationError::Key)),
        Err(Refusal::Failed(error)) => return Err(error),
    }
    put(&mut state, connection)?;
    let (sealing, opening) = state.finish().map_err(broken)?;
    connection.encrypt(sealing, opening);
    Ok(())
}

#[cfg(test)]
mod tests;
