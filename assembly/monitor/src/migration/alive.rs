//! Frames that show that a side works on something that sends nothing: reading memory that is zero, or making disks durable. Without
//! them the other side would take the silence for a lost connection.

use std::io::Write;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use super::error::MigrationError;
use super::frame::{Kind, Sender};

/// The first version of the protocol with these frames.
pub const SINCE: u16 = 5;
/// Silence after which a frame is sent: a sixth of both sides' time-outs.
const SILENCE: Duration = Duration::from_secs(10);

/// When one side sends these frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alive {
    /// Never: the other side's version doesn't have them.
    Unknown,
    /// After so long a silence of a stream.
    After(Duration),
}

impl Alive {
    /// What the version in use permits.
    pub fn of(version: u16) -> Self {
        if version < SINCE { Self::Unknown } else { Self::After(SILENCE) }
    }

    /// Sends a frame on a stream that was silent for long enough.
    ///
    /// # Errors
    /// The stream can't be written.
    pub fn show(self, sender: &mut Sender, to: &mut impl Write) -> Result<(), MigrationError> {
        match self {
            Self::After(silence) if sender.silence() >= silence => {
                sender.send(to, Kind::Alive, &[]).map_err(MigrationError::stream("written"))
            }
            _ => Ok(()),
        }
    }

    /// Runs `work` on another thread, and `show` on this one whenever streams may have been silent for long enough. Returns when both are
    /// over.
    ///
    /// # Errors
    /// The first error of `show`, or `work` panicked.
    pub fn while_busy<T: Send>(
        self,
        work: impl FnOnce() -> T + Send,
        mut show: impl FnMut() -> Result<(), MigrationError>,
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
                shown = shown.and_then(|()| show());
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
        let kinds = |alive: Alive| {
            let (mut sender, mut bytes) = (Sender::new(), Vec::new());
            alive.show(&mut sender, &mut bytes).unwrap();
            let received = Receiver::new().receive(&mut bytes.as_slice()).map(|(kind, _)| kind);
            received.ok()
        };
        assert_eq!(kinds(Alive::After(Duration::ZERO)), Some(Kind::Alive));
        assert_eq!(kinds(Alive::After(Duration::from_secs(600))), None);
        assert_eq!(kinds(Alive::of(SINCE - 1)), None);
        assert_eq!(Alive::of(SINCE), Alive::After(SILENCE));
    }

    /// Work that waits for the second sign of life: it would never end without them.
    #[test]
    fn signs_of_life_come_during_work() {
        let (shown, seen) = channel();
        let alive = Alive::After(Duration::from_millis(1));
        let work = move || [(); 2].map(|()| seen.recv_timeout(Duration::from_secs(60)).is_ok());
        let done = alive.while_busy(work, || {
            // Nobody listens any more once the work is over.
            let _ = shown.send(());
            Ok(())
        });
        assert_eq!(done.unwrap(), [true, true]);
    }

    #[test]
    fn an_error_is_returned_when_the_work_is_over() {
        let alive = Alive::After(Duration::from_millis(1));
        let lost = || Err(MigrationError::Cancelled);
        let done = alive.while_busy(|| std::thread::sleep(Duration::from_millis(50)), lost);
        assert!(matches!(done, Err(MigrationError::Cancelled)));
        assert_eq!(Alive::Unknown.while_busy(|| 7, lost).unwrap(), 7);
    }
}
