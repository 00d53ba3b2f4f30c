//! Processing of messages from other daemons.

use hca::engine::Engine;
use hca::provider::Provider;
use hca::remote::{ConnectionInfo, NotQueued, Refusal};
use hca::work::Status;

use super::control::{Body, Hello, Message, Reason};
use super::rnic::{End, Receiving};
use super::{Ends, Handed, Refused, Verbs, chain};

impl Verbs {
    /// Processes a message of a VM's daemon for a queue pair of a device. `ends`: the ends of that queue pair's connection, if this
    /// transport may carry it.
    pub fn take<P: Provider>(
        &mut self,
        engine: &mut Engine<P>,
        message: &Message,
        found: Result<(Ends, ConnectionInfo), Reason>,
        now: u64,
    ) -> Option<Message> {
        let answer = |reason| Message {
            own: message.peer,
            peer: message.own,
            from: 1,
            to: message.from,
            body: Body::Refuse(reason),
        };
        let (ends, info) = match found {
            Ok(found) => found,
            Err(reason) => return matches!(message.body, Body::Hello(_)).then(|| answer(reason)),
        };
        if let Body::Hello(hello) = message.body {
            return self.greeted(engine, message, &hello, &ends, &info, now).err().flatten().map(answer);
        }
        let Some(id) = self.find(ends.qp) else {
            self.dropped += 1;
            return None;
        };
        let link = self.links.get_mut(&id)?;
        let refused = matches!(message.body, Body::Refuse(_));
        let theirs = refused || link.peer.is_some_and(|(nonce, _)| nonce == message.from);
        if message.to != link.nonce || !theirs {
            self.dropped += 1;
            return None;
        }
        self.process(engine, id, message.body, now);
        None
    }

    /// Processes a message from the other end of a link.
    fn process<P: Provider>(&mut self, engine: &mut Engine<P>, id: u32, body: Body, now: u64) {
        let Some(link) = self.links.get_mut(&id) else { return };
        match body {
            Body::Hello(_) => {}
            Body::Refuse(reason) => self.was_refused(engine, id, reason),
            Body::Resolve { rkey, serial } => self.resolve_key(engine, id, rkey, serial),
            Body::Resolved { rkey, serial, real } => {
                if link.keys.answer(rkey, serial, real) {
                    link.answered();
                    self.advance(engine, id, now);
                }
            }
            Body::Invalidate { rkey } => {
                link.counters.keys_invalidated += 1;
                let again = link.keys.invalidate(rkey);
                link.say(Body::Invalidated { rkey }, &mut self.outbox);
                if let Some(serial) = again {
                    link.say(Body::Resolve { rkey, serial }, &mut self.outbox);
                }
            }
            Body::Invalidated { rkey } => {
                link.unacknowledged.remove(&rkey);
            }
            Body::Announce { total } => self.announce(engine, id, total, now),
            Body::Ready { total } => {
                let awaited = link.waiting.front().is_some_and(|request| link.awaits_ready(request));
                if link.peer_shared && link.announcing.answer(total) {
                    // The first request may be waiting for a key instead.
                    if awaited {
                        link.answered();
                    }
                    self.advance(engine, id, now);
                }
            }
            Body::Failed { status } => {
                let refusal = match status {
                    9 => Refusal::Invalid,
                    10 => Refusal::Access,
                    _ => Refusal::Operational,
                };
                let qp = link.qp;
                // Earlier messages, from the device.
                self.poll(engine, now);
                engine.remote_refused(qp, refusal);
            }
        }
    }

    /// Responds to the peer with the device's key of a guest's region.
    fn resolve_key<P: Provider>(&mut self, engine: &mut Engine<P>, id: u32, rkey: u32, serial: u32) {
        let Some(link) = self.links.get(&id) else { return };
        let domain = (link.qp.device, link.pd, link.host_pd);
        let real = match self.real_key(engine, domain, rkey) {
            Ok(registered) => registered.map(|registered| registered.rkey),
            Err(why) => {
                telemetry::guest_warn!(self.log, "A guest's region can't be offered to its peer: {why}");
                None
            }
        };
        self.own.tell(domain.0, rkey, id);
        if let Some(link) = self.links.get_mut(&id) {
            link.say(Body::Resolved { rkey, serial, real }, &mut self.outbox);
        }
    }

    /// Handles the total of messages that the peer has announced.
    fn announce<P: Provider>(&mut self, engine: &mut Engine<P>, id: u32, total: u32, now: u64) {
        let Some(link) = self.links.get_mut(&id) else { return };
        let said =
            link.announced.as_mut().map(|announced| (!announced.announce(total)).then(|| announced.said()));
        match said {
            // Its response was lost, or the message was repeated.
            Some(Some(total)) => link.say(Body::Ready { total }, &mut self.outbox),
            Some(None) => {
                self.refill(engine, id, now);
                self.active(now);
            }
            None => self.dropped += 1,
        }
    }

    /// Handles the other end's Hello. The error: the response instead of an own end, if any.
    fn greeted<P: Provider>(
        &mut self,
        engine: &mut Engine<P>,
        message: &Message,
        hello: &Hello,
        ends: &Ends,
        info: &ConnectionInfo,
        now: u64,
    ) -> Result<(), Option<Reason>> {
        // On a wire its packets would be out of sequence.
        if hello.sends && hello.sq_psn != info.attributes.rq_psn {
            self.dropped += 1;
            return Err(None);
        }
        let id = match self.find(ends.qp) {
            Some(id) => id,
            None => self.connect(engine, ends, now).map_err(|refused| {
                telemetry::guest_warn!(self.log, "A connection by transport verbs is refused: {refused}");
                match refused {
                    Refused::Absent(_) => Some(Reason::NoDevice),
                    Refused::Queued(NotQueued::Shared) => Some(Reason::Shared),
                    Refused::Queued(NotQueued::Kernel) => Some(Reason::Kernel),
                    Refused::Queued(NotQueued::Kind) | Refused::Gone => None,
                    Refused::Device(_) => Some(Reason::Refused),
                }
            })?,
        };
        let (Some(link), Some(rnic)) = (self.links.get_mut(&id), &mut self.rnic) else { return Err(None) };
        let end = End { gid: hello.gid, number: hello.number, psn: hello.psn, mtu: hello.mtu };
        match link.peer {
            // The peer's end is a new one, and this end isn't.
            Some((nonce, _)) if nonce != message.from => {
                self.dropped += 1;
                return Err(None);
            }
            Some(_) => {}
            None => {
                let device = rnic.info();
                let attributes = &info.attributes;
                let receiving = Receiving {
                    end,
                    mtu: device.mtu.min(end.mtu),
                    access: attributes.access,
                    served_reads: attributes.max_dest_rd_atomic.min(device.served_reads),
                    min_rnr_timer: attributes.min_rnr_timer,
                    traffic_class: attributes.address.traffic_class,
                    hop_limit: 64,
                };
                if let Err(error) = rnic.receive_from(link.pair, &receiving) {
                    self.fail(engine, id, &chain(error));
                    return Err(Some(Reason::Refused));
                }
                link.peer = Some((message.from, end));
                link.peer_shared = hello.shared;
                // Before the peer learns that it may send.
                self.refill(engine, id, now);
            }
        }
        let Some(link) = self.links.get_mut(&id) else { return Err(None) };
        if message.to == link.nonce && !link.settled {
            link.settled = true;
            link.answered();
        }
        if !hello.settled {
            let sq_psn = info.sends.then_some(info.attributes.sq_psn);
            link.hello(sq_psn, &mut self.outbox);
        }
        self.active(now);
        self.advance(engine, id, now);
        Ok(())
    }

    /// Handles the refusal of the peer's daemon.
    fn was_refused<P: Provider>(&mut self, engine: &mut Engine<P>, id: u32, reason: Reason) {
        let Some(link) = self.links.get_mut(&id) else { return };
        if link.peer.is_some() {
            // Delayed: it has accepted the connection since.
            return;
        }
        let (qp, requests) = (link.qp, Vec::from(std::mem::take(&mut link.waiting)));
        match reason {
            Reason::Shared | Reason::Kernel | Reason::Fabric => {
                self.close_link(id);
                self.handed.push(Handed { qp, reason: reason.to_string(), requests });
            }
            Reason::NoDevice | Reason::Refused => {
                telemetry::guest_warn!(
                    self.log,
                    "A connection pinned to transport verbs is refused: {reason}"
                );
                self.close_link(id);
                for request in requests {
                    engine.remote_complete(qp, request.token, Err(Status::LocalQpOperation));
                }
            }
        }
    }
}
