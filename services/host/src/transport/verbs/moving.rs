//! `verbs` connections of VMs that migrate, or are connected with one that does. As in *Nomad* (2006; see `cores/nomad`), section 4, the
//! hardware's state is drained, and created again at the destination.
//!
//! ```text
//! peer's host    suspended ─ the device's requests complete ─ "held" … VM runs elsewhere ─ end destroyed ─ first request: new end
//! source         suspended ─ the device's requests complete ─ stop ─ its unused receives are saved as the next ones … removed
//! destination    receives restored ─ first request or the peer's Hello: an end is created, regions are registered
//! ```
//! Both ends know from their own requests' completions what the other has executed, so nothing is executed twice. Receives that the device
//! got and didn't use are the queue pair's next ones, in order. If the VM stays, the connection continues unchanged.

use std::net::SocketAddr;

use hca::engine::Engine;
use hca::names::DeviceId;
use hca::provider::Provider;

use super::super::directory::VmId;
use super::super::moving::Immovable;
use super::Verbs;
use super::link::Link;

impl Link {
    fn faces(&self, device: DeviceId, peer: Option<VmId>) -> bool {
        self.qp.device == device && peer.is_none_or(|peer| self.header.destination == peer)
    }

    /// Number of the guest's incomplete requests.
    fn requests(&self) -> usize {
        self.waiting.len() + self.posted.len()
    }
}

impl Verbs {
    /// Whether the device has completed all requests of a guest, or of those with one peer.
    ///
    /// # Errors
    /// [`Immovable`] with the incomplete requests.
    pub fn at_rest(&self, device: DeviceId, peer: Option<VmId>) -> Result<(), Immovable> {
        let mut busy = self.links.values().filter(|link| link.faces(device, peer) && link.requests() > 0);
        match busy.next() {
            None => Ok(()),
            Some(link) => Err(Immovable::UnderWay {
                qpn: link.qpn,
                peer: link.header.destination.0,
                requests: link.requests(),
            }),
        }
    }

    /// Ends connections with a VM to hosts other than its current one; they are created again when they are needed. Connections with a VM
    /// that runs nowhere stay: requests end by the device's retries, as on any wire.
    pub fn leave_places<P: Provider>(
        &mut self,
        engine: &mut Engine<P>,
        (device, peer): (DeviceId, VmId),
        host: Option<SocketAddr>,
        now: u64,
    ) {
        if host.is_none() {
            return;
        }
        let elsewhere = |link: &&Link| link.faces(device, Some(peer)) && link.host != host;
        if !self.links.values().any(|link| elsewhere(&link)) {
            return;
        }
        // The VM's last messages have arrived: it stopped only after their completion.
        self.poll(engine, now);
        let gone: Vec<_> =
            self.links.values().filter(elsewhere).map(|link| (link.id, link.qp, link.requests())).collect();
        for (id, qp, requests) in gone {
            self.close_link(id);
            if requests == 0 {
                engine.remote_unbind(qp);
            } else {
                // The protocol lets no VM move before these have completed; their progress can't be determined any more.
                telemetry::guest_warn!(
                    self.log,
                    qpn = qp.handle.0,
                    "A connection by transport verbs is lost: its peer has moved before {requests} requests had ended"
                );
                engine.remote_fail(qp);
            }
        }
    }
}
