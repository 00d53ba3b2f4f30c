//! Connections of VMs that move, or that face one (*Nomad*, section 4: what the hardware holds is drained, and made anew at the destination).
//!
//! ```text
//! peer's host    queue pairs held ─ the device's requests end ─ "held" … VM runs elsewhere ─ end destroyed ─ first request: made anew
//! source         queue pairs held ─ the device's requests end ─ stop ─ receives that it had are saved as the next ones … device removed
//! destination    receives restored ─ first request or the peer's question: an end is made, regions are registered
//! ```
//! Both ends know by their own requests' ends what the other has carried out, so nothing is done twice. Receives that the device was given and
//! didn't use are the queue pair's next ones, in their order. Where the VM stays, the connection goes on as it was.

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

    /// Requests of the guest that haven't ended.
    fn requests(&self) -> usize {
        self.waiting.len() + self.posted.len()
    }
}

impl Verbs {
    /// Whether the device is done with all requests of a guest, or of those with one peer.
    ///
    /// # Errors
    /// What it isn't done with.
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

    /// Connections with a VM that lead to other hosts than the one where it is now end here; they are made anew when they are needed. Of a VM that is
    /// nowhere any more they stay: requests end by the device's retries, as on any wire.
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
        // What the VM sent last has arrived: its ends were known before it stopped.
        self.poll(engine, now);
        let gone: Vec<_> =
            self.links.values().filter(elsewhere).map(|link| (link.id, link.qp, link.requests())).collect();
        for (id, qp, requests) in gone {
            self.close_link(id);
            if requests == 0 {
                engine.remote_unbind(qp);
            } else {
                // The protocol lets no VM go before these have ended; nobody can say any more how far they came.
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
