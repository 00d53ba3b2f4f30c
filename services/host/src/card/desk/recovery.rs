//! Recovery of a failed shared card: its reset, and the state in which guests find it.

use std::time::{Duration, Instant};

use dma::MappedMemory;
use vpio::sharing::OwnRing;
use vpio::{GuestId, MonitorError};

use super::{Card, State};

/// Lower bound of the interval between two resets after failures. Until it has passed, guests read ones.
const RESET_INTERVAL: Duration = Duration::from_millis(500);

impl<P: Card, O: OwnRing> State<P, O> {
    /// Resets a card that failed. After a second failure within [`RESET_INTERVAL`] the reset waits for the end of that interval; until then
    /// reads of all guests return ones.
    pub(super) fn fail(&mut self, error: &MonitorError) {
        self.failures += 1;
        if self.failed.is_some() {
            return;
        }
        let resident = self.monitor.resident();
        let holder = resident.and_then(|id| self.places.get(id.0));
        let holder = holder.map_or("nobody", |place| place.name.as_str()).to_owned();
        self.failed = Some(error.to_string());
        (self.busy, self.owed) = (None, None);
        self.monitor.abandon();
        self.monitor.physical().seat(None);
        if let Some(GuestId(seat)) = resident {
            self.monitor.physical().vacate(seat);
            self.scheduler.forget(GuestId(seat));
        }
        if self.try_again().is_none() {
            tracing::warn!(
                error = error as &dyn std::error::Error,
                holder,
                "The card failed and was reset; who had it has to start its driver anew"
            );
        } else {
            tracing::error!(
                error = error as &dyn std::error::Error,
                holder,
                "The card failed; its guests read ones until it has been reset, which is tried twice a second"
            );
        }
    }

    /// Resets a card that has failed. Returns when to retry; `None` when the card works.
    pub(super) fn try_again(&mut self) -> Option<Duration> {
        let left = self.reset_at.map_or(Duration::ZERO, |at| RESET_INTERVAL.saturating_sub(at.elapsed()));
        if !left.is_zero() {
            return Some(left);
        }
        self.reset_at = Some(Instant::now());
        match self.recover() {
            Ok(()) => {
                self.failed = None;
                None
            }
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "The card can't be reset");
                Some(RESET_INTERVAL)
            }
        }
    }

    /// Resets the card, which no guest has then, and starts its receiver.
    fn recover(&mut self) -> Result<(), MonitorError> {
        self.monitor.physical().restart()?;
        self.monitor.recover()?;
        // Includes guests that disconnected while the card could not be reset.
        for seat in 0..self.places.len() {
            self.monitor.physical().forget_memory(seat)?;
        }
        let card = self.monitor.physical().card();
        card.give(&MappedMemory::default());
        card.unmask().map_err(MonitorError::from)
    }

    /// As [`Self::power_on`], for a guest without the card.
    pub(super) fn begin_anew(&mut self, seat: usize) {
        self.monitor.physical().vacate(seat);
        if self.monitor.resident() != Some(GuestId(seat))
            && let Err(error) = self.power_on(seat)
        {
            self.fail(&error);
        }
    }
}
