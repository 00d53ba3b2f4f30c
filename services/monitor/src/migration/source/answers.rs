//! Answers of the destination, and keepalive frames in both directions while a side flushes disks.

use std::time::Instant;

use super::{DESTINATION_SILENCE_TIMEOUT, OutgoingMigration};
use crate::migration::error::MigrationError;
use crate::migration::frame::Kind;
use crate::migration::message;

impl OutgoingMigration<'_> {
    /// Waits for one answer of the destination. While the destination shows that it works on it, this side lives as well.
    pub(super) fn answer(&mut self, wanted: Kind) -> Result<Vec<u8>, MigrationError> {
        // Only flushing disks may take longer than the time-out, and only while the guest runs: a destination can't extend its blackout.
        let (began, guest_stopped) = (Instant::now(), self.timeline.until_stop_ms > 0.0);
        loop {
            let none = || MigrationError::Protocol("nothing: there is no stream".to_owned());
            let control = self.streams.first_mut().ok_or_else(none)?;
            match self.answers.receive(&mut control.connection)? {
                (Kind::Keepalive, _) if wanted == Kind::Settled => {
                    if self.stop.is_set() {
                        return Err(MigrationError::Cancelled);
                    }
                    if guest_stopped && began.elapsed() > DESTINATION_SILENCE_TIMEOUT {
                        let late = std::io::Error::from(std::io::ErrorKind::TimedOut);
                        return Err(MigrationError::stream("read while disks are flushed")(late));
                    }
                    self.send_keepalives()?;
                }
                (kind, payload) if kind == wanted => return Ok(payload.to_vec()),
                (Kind::Refused, payload) => return Err(MigrationError::Refused(message::sentence(payload))),
                (other, _) => {
                    return Err(MigrationError::Protocol(format!("{other:?} where {wanted:?} was to come")));
                }
            }
        }
    }

    pub(super) fn send_keepalives(&mut self) -> Result<(), MigrationError> {
        let keepalive = self.keepalive;
        let mut streams = self.streams.iter_mut();
        streams.try_for_each(|stream| keepalive.send_if_silent(&mut stream.sender, &mut stream.connection))
    }

    /// Makes devices' writes durable, however long that takes.
    pub(super) fn settle(&mut self) -> Result<(), MigrationError> {
        let machine = self.machine;
        self.keepalive.while_busy(|| machine.settle(), || self.send_keepalives())?
    }
}
