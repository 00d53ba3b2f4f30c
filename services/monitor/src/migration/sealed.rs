//! Encryption and authentication of a migration's streams ([`cluster_key::stream`]), and the errors when the two sides are configured
//! differently.
//!
//! ```text
//! source                                                               destination
//!   "CWvm" │ version 1 (u16) │ length (u16) │ e, tag ─────────────────────▶  key right?
//!   ◀───────────────────────────── "CWvm" │ 1 │ length │ e, tag           or a plain `Refused` frame with a sentence
//!   records ◀────────────────────────────────────────────────────────────▶
//! ```
//! The records contain the frames of [`super::frame`]; a frame may begin anywhere in them.

use std::io::{self, Read, Write};

use cluster_key::ClusterKey;

use super::connection::Connection;
use super::error::MigrationError;
use super::frame::{Kind, Receiver, Sender};
use super::message;
use cluster_key::stream::{HANDSHAKE_BYTES, Handshake, Mismatch, Purpose};

/// No frame begins with its magic.
const MIGRATION: Purpose = Purpose { magic: *b"CWvm", version: 1, prologue: b"causeway vm 1" };

fn broken(error: snow::Error) -> MigrationError {
    MigrationError::stream("encrypted")(io::Error::other(error.to_string()))
}

fn put(state: &mut Handshake, connection: &mut Connection) -> Result<(), MigrationError> {
    let bytes = state.put().map_err(broken)?;
    connection.write_all(&bytes).map_err(MigrationError::stream("written"))
}

/// Why the handshake failed.
enum Refusal {
    /// The other side doesn't have the same key.
    Key,
    Failed(MigrationError),
}

/// Reads the rest of a handshake message, after the magic of [`MIGRATION`].
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

/// The source's side of the handshake: encrypts the connection from here on.
///
/// # Errors
/// When the destination doesn't have this key, or doesn't encrypt; it sends the reason.
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

/// The destination's side of the handshake: encrypts the connection from here on, if this side has a key. Refuses an unencrypted source
/// if this side has a key, and an encrypted one if it has none; sends the reason.
///
/// # Errors
/// When only one side has a key, or the keys differ.
pub(super) fn as_destination(
    connection: &mut Connection,
    key: Option<&ClusterKey>,
) -> Result<(), MigrationError> {
    let encrypts = connection.begins_with(MIGRATION.magic).map_err(MigrationError::stream("read"))?;
    let refuse = |connection: &mut Connection, error: MigrationError| {
        // The source may have disconnected already.
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
