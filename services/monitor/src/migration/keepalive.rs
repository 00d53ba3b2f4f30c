//! Frames that show that a side works on something that sends nothing: reading memory that is zero, or making disks durable. Without
//! them the other side would take the silence for a lost connection.

use std::io::Write;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use super::error::MigrationError;
use super::frame::{Kind, Sender};

/// The first version of the protocol with these frames.
pub const KEEPALIVE_MIN_VERSION: u16 = 5;
/// Silence after which a frame is sent: a sixth of both sides' time-outs.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);

/// When one side sends these frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keepalive {
    /// Never: the other side's version doesn't have them.
    Unknown,
    /// After so long a silence of a stream.
    After(Duration),
}

impl Keepalive {
    /// What the version in use permits.
    pub fn of(version: u16) -> Self {
        if version < KEEPALIVE_MIN_VERSION { Self::Unknown } else { Self::After(KEEPALIVE_INTERVAL) }
    }

    /// Sends a frame on a stream that was silent for long enough.
    ///
    /// # Errors
    /// The stream can't be written.
    pub fn send_if_silent(self, sender: &mut Sender, to: &mut impl Write) -> Result<(), MigrationError> {
        match self {
            Self::After(silence) if sender.silence() >= silence => {
                sender.send(to, Kind::Keepalive, &[]).map_err(MigrationError::stream("written"))
            }
            _ => Ok(()),
        }
    }

    /// Runs `work` on another thread, and `send_if_silent` on this one whenever streams may have been silent for long enough. Returns when
    /// both are over.
    ///
    /// # Errors
    /// The first error of `send_if_silent`, or `work` panicked.
    pub fn while_busy<T: Send>(
        self,
        work: impl FnOnce() -> T + Send,
        mut send_if_silent: impl FnMut() -> Result<(), MigrationError>,
    ) -> Result<T, MigrationError> {
        let Self::After(silence) = self else { return Ok(work()) };
        std::thread::scope(|scope| {
            let (works, is_over) = channel::<()>();
            let worker = scope.spawn(move || {
                // Dropped at the end, also of a panic.
                let _works = works;
                work()
            });
            let mut shown = Ok(());
            while is_over.recv_timeout(silence) == Err(RecvTimeoutError::Timeout) {
                shown = shown.and_then(|()| send_if_silent());
            }
            let panicked = |_| MigrationError::Protocol("nothing: a thread of this side panicked".to_owned());
            let done = worker.join().map_err(panicked)?;
            shown.map(|()| done)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::migration::frame::Receiver;

    #[test]
    fn a_silent_stream_gets_a_frame_and_another_one_none() {
        let kinds = |keepalive: Keepalive| {
            let (mut sender, mut bytes) = (Sender::new(), Vec::new());
            keepalive.send_if_silent(&mut sender, &mut bytes).unwrap();
            let received = Receiver::new().receive(&mut bytes.as_slice()).map(|(kind, _)| kind);
            received.ok()
        };
        assert_eq!(kinds(Keepalive::After(Duration::ZERO)), Some(Kind::Keepalive));
        assert_eq!(kinds(Keepalive::After(Duration::from_secs(600))), None);
        assert_eq!(kinds(Keepalive::of(KEEPALIVE_MIN_VERSION - 1)), None);
        assert_eq!(Keepalive::of(KEEPALIVE_MIN_VERSION), Keepalive::After(KEEPALIVE_INTERVAL));
    }

    /// Work that waits for the second sign of life: it would never end without them.
    #[test]
    fn signs_of_life_come_during_work() {
        let (shown, seen) = channel();
        let keepalive = Keepalive::After(Duration::from_millis(1));
        let work = move || [(); 2].map(|()| seen.recv_timeout(Duration::from_secs(60)).is_ok());
        let done = keepalive.while_busy(work, || {
            // Nobody listens any more once the work is over.
            let _ = shown.send(());
            Ok(())
        });
        assert_eq!(done.unwrap(), [true, true]);
    }

    #[test]
    fn an_error_is_returned_when_the_work_is_over() {
        let keepalive = Keepalive::After(Duration::from_millis(1));
        let lost = || Err(MigrationError::Cancelled);
        let done = keepalive.while_busy(|| std::thread::sleep(Duration::from_millis(50)), lost);
        assert!(matches!(done, Err(MigrationError::Cancelled)));
        assert_eq!(Keepalive::Unknown.while_busy(|| 7, lost).unwrap(), 7);
    }
}
