//! Metrics of a card's daemon.

use telemetry::metrics::{EncodeError, Family, encode};
use vpio::GuestId;
use vpio::sharing::OwnRing;

use super::{Card, Desk};

impl<P: Card, O: OwnRing + Send + 'static> Desk<P, O> {
    /// The metrics in Prometheus' text format.
    ///
    /// # Errors
    /// When the text can't be encoded.
    pub fn metrics(&self) -> Result<String, EncodeError> {
        let state = self.lock();
        let totals = state.monitor.physical_ref().totals();
        let counters = [
            ("failures", "Times that the card failed, and was reset for it.", state.failures),
            ("handoffs", "Times that the card went from one guest to another.", state.handoffs),
            ("forced_handoffs", "Hand-offs by which a guest lost what it had begun.", state.forced),
            ("resets", "Times that the card was reset with what it held.", totals.resets),
            ("overruns", "Times that the card had no room for a frame that came in.", totals.overruns),
            ("frames_in", "Frames that came in.", totals.arrived),
            ("frames_for_nobody", "Frames that came in and are for none of the guests.", totals.for_nobody),
            ("frames_between_guests", "Frames of one guest for another.", totals.between_guests),
        ];
        let mut families: Vec<Family> = counters
            .into_iter()
            .map(|(name, help, value)| {
                let mut family = Family::counter(&format!("causeway_card_{name}_total"), help);
                family.add_count(&[], value);
                family
            })
            .collect();
        let mut failed = Family::gauge("causeway_card_failed", "Whether the card can't be used at present.");
        failed.add_count(&[], state.failed.is_some().into());
        families.push(failed);
        let mut sent =
            Family::counter("causeway_card_frames_sent_total", "A guest's frames, handed to the card.");
        let mut refused = Family::counter(
            "causeway_card_frames_refused_total",
            "A guest's frames that the card may not have.",
        );
        let mut requests = Family::counter(
            "causeway_card_requests_refused_total",
            "A guest's accesses that its model refused.",
        );
        for (seat, place) in (0..).zip(&state.places) {
            let labels = [("guest", place.name.as_str())];
            let fed = state.monitor.physical_ref().fed(seat);
            sent.add_count(&labels, fed.sent);
            refused.add_count(&labels, fed.refused);
            requests.add_count(&labels, state.monitor.counters(GuestId(seat)).refused);
        }
        families.extend([sent, refused, requests]);
        encode(&families, &[("device", self.device.name)])
    }
}
