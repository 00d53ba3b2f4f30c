//! Translation of the guest's requests and receives into the device's.

use hca::engine::Engine;
use hca::names::{DeviceId, PdHandle};
use hca::provider::Provider;
use hca::remote::{Posted, PostedOperation, first_bytes};
use hca::work::{Remote, SgeList, Status};

use super::control::Body;
use super::link::takes_receive;
use super::numbers::PeerKey;
use super::rnic::{HostPd, HostRequest, Operation, Registered, Sending};
use super::{RECEIVE, Verbs, chain};

impl Verbs {
    /// The device's keys of a guest's region, which is registered if needed.
    pub(super) fn real_key<P: Provider>(
        &mut self,
        engine: &mut Engine<P>,
        (device, pd, host_pd): (DeviceId, PdHandle, HostPd),
        key: u32,
    ) -> Result<Option<Registered>, String> {
        if let Some(registered) = self.own.get(device, pd, key) {
            return Ok(Some(registered));
        }
        let Some(rnic) = &mut self.rnic else { return Ok(None) };
        let Some(region) = engine.remote_region(device, pd, key) else { return Ok(None) };
        let memory = engine.remote_alias(device, &region.pieces).map_err(|error| error.to_string())?;
        let registered = rnic.register(host_pd, memory, region.start, region.access).map_err(chain)?;
        self.own.insert(device, pd, key, registered, region.length);
        if let Some((_, users)) = self.pds.get_mut(&(device, pd)) {
            *users += 1;
        }
        Ok(Some(registered))
    }

    /// Scatter-gather elements with the device's keys.
    fn translated<P: Provider>(
        &mut self,
        engine: &mut Engine<P>,
        id: u32,
        sges: &[hca::work::Sge],
    ) -> Result<SgeList, String> {
        let domain = self.links.get(&id).map(|link| (link.qp.device, link.pd, link.host_pd));
        let domain = domain.ok_or("the connection is gone")?;
        let mut list = SgeList::new();
        for sge in sges.iter().filter(|sge| sge.length > 0) {
            let registered = self.real_key(engine, domain, sge.lkey)?;
            let registered = registered.ok_or_else(|| format!("no region has the key {:#x}", sge.lkey))?;
            list.push(hca::work::Sge { lkey: registered.lkey, ..*sge });
        }
        if let Some(link) = self.links.get_mut(&id) {
            link.counters.translations += list.len() as u64;
        }
        Ok(list)
    }

    /// Posts the guest's requests to the device, as far as possible.
    pub(super) fn advance<P: Provider>(&mut self, engine: &mut Engine<P>, id: u32, now: u64) {
        loop {
            let Some(link) = self.links.get_mut(&id) else { return };
            let (Some(rnic), Some(device)) = (&mut self.rnic, &self.info) else { return };
            let Some(&request) = link.waiting.front() else { return };
            let Some(info) = engine.connection(link.qp) else { return };
            if !link.settled {
                if link.asking_since.is_none() {
                    link.hello(Some(info.attributes.sq_psn), &mut self.outbox);
                }
                link.expect(now);
                let next = link.next();
                return self.due(next);
            }
            if !link.sends {
                let sending = Sending {
                    psn: link.own.psn,
                    timeout: info.attributes.timeout,
                    retry_count: info.attributes.retry_count,
                    rnr_retry: info.attributes.rnr_retry,
                    reads: info.attributes.max_rd_atomic.min(device.reads),
                };
                if let Err(error) = rnic.send_to(link.pair, &sending) {
                    return self.fail(engine, id, &chain(error));
                }
                link.sends = true;
            }
            link.announce(&mut self.outbox);
            if link.posted.len() >= usize::try_from(device.sends).unwrap_or(0) {
                return;
            }
            let remote = remote_of(&request);
            let mut rkey = 0;
            if let Some(remote) = remote {
                match link.keys.get(remote.rkey) {
                    Some(PeerKey::Real(real)) => rkey = real,
                    Some(PeerKey::Asked(_)) => return,
                    Some(PeerKey::None) => {
                        link.keys.forget(remote.rkey);
                        return self.refuse_remotely(engine, id, request.token);
                    }
                    None => {
                        let serial = link.keys.ask(remote.rkey);
                        link.counters.keys_asked += 1;
                        link.say(Body::Resolve { rkey: remote.rkey, serial }, &mut self.outbox);
                        link.expect(now);
                        let next = link.next();
                        return self.due(next);
                    }
                }
                link.counters.translations += 1;
            }
            if matches!(request.operation, PostedOperation::Send { invalidate: Some(_), .. }) {
                // Only a kernel's keys can be invalidated so, and its queue pairs don't use this transport.
                return self.refuse_remotely(engine, id, request.token);
            }
            if link.awaits_ready(&request) {
                link.expect(now);
                let next = link.next();
                return self.due(next);
            }
            let qp = link.qp;
            let Some(sges) = engine.remote_sges(qp, request.token) else {
                link.waiting.pop_front();
                continue;
            };
            let sges = first_bytes(sges, u64::from(request.length));
            let sges = self.translated(engine, id, &sges);
            let (Some(link), Some(rnic)) = (self.links.get_mut(&id), &mut self.rnic) else { return };
            let posted = sges.and_then(|sges| {
                let wr_id = (u64::from(id) << 32) | (request.token & 0xFFFF_FFFF);
                let operation = operation(&request.operation, rkey);
                let (fence, solicited) = (request.fence, request.solicited);
                rnic.post_send(link.pair, &HostRequest { wr_id, operation, fence, solicited, sges })
                    .map_err(chain)
            });
            link.waiting.pop_front();
            match posted {
                Ok(()) => {
                    link.posted.push_back((request.token, request.length));
                    if takes_receive(&request) {
                        link.announcing.sent();
                    }
                    link.counters.requests += 1;
                }
                Err(why) => {
                    telemetry::guest_warn!(self.log, "A request can't be handed to the RDMA device: {why}");
                    engine.remote_complete(qp, request.token, Err(Status::LocalQpOperation));
                    return;
                }
            }
            self.active(now);
        }
    }

    /// Fails a request that the peer would refuse.
    fn refuse_remotely<P: Provider>(&mut self, engine: &mut Engine<P>, id: u32, token: u64) {
        let Some(link) = self.links.get_mut(&id) else { return };
        link.waiting.pop_front();
        let status = Status::RemoteAccess;
        link.say(Body::Failed { status: status as u32 }, &mut self.outbox);
        engine.remote_complete(link.qp, token, Err(status));
    }

    /// Fails the connection.
    pub(super) fn fail<P: Provider>(&mut self, engine: &mut Engine<P>, id: u32, why: &str) {
        let Some(link) = self.links.get_mut(&id) else { return };
        telemetry::guest_warn!(self.log, "A connection by transport verbs fails: {why}");
        let qp = link.qp;
        if let Some(request) = link.waiting.pop_front() {
            engine.remote_complete(qp, request.token, Err(Status::LocalQpOperation));
        }
        engine.remote_fail(qp);
    }

    /// Posts receives of the guest to the device.
    pub(super) fn refill<P: Provider>(&mut self, engine: &mut Engine<P>, id: u32, now: u64) {
        self.hand_receives(engine, id, now);
        let (Some(link), Some(device)) = (self.links.get_mut(&id), &self.info) else { return };
        let room = link.ahead < device.receives;
        if let Some(total) = link.announced.as_mut().and_then(|announced| announced.news(room)) {
            link.say(Body::Ready { total }, &mut self.outbox);
        }
    }

    fn hand_receives<P: Provider>(&mut self, engine: &mut Engine<P>, id: u32, now: u64) {
        loop {
            let (Some(link), Some(device)) = (self.links.get_mut(&id), &self.info) else { return };
            // Before that, another transport may still need them.
            if link.peer.is_none() || link.ahead >= device.receives || link.dies_at.is_some() {
                return;
            }
            if link.announced.is_some_and(|announced| !announced.wants()) {
                return;
            }
            let Ok(sges) = engine.remote_receive_ahead(link.qp) else { return };
            let sges = self.translated(engine, id, &sges);
            let (Some(link), Some(rnic)) = (self.links.get_mut(&id), &mut self.rnic) else { return };
            let wr_id = RECEIVE | (u64::from(id) << 32);
            let posted = sges.and_then(|sges| rnic.post_receive(link.pair, wr_id, &sges).map_err(chain));
            match posted {
                Ok(()) => {
                    link.ahead += 1;
                    if let Some(announced) = &mut link.announced {
                        announced.take();
                    }
                    link.counters.receives += 1;
                }
                Err(why) => return self.fail(engine, id, &format!("a receive can't be used: {why}")),
            }
            if self.armed {
                self.active(now);
            }
        }
    }
}

/// Remote address and key of a request that needs a key: one without data needs none.
pub(super) fn remote_of(request: &Posted) -> Option<Remote> {
    match request.operation {
        PostedOperation::Send { .. } => None,
        PostedOperation::Write { remote, .. }
        | PostedOperation::Read { remote }
        | PostedOperation::CompareSwap { remote, .. }
        | PostedOperation::FetchAdd { remote, .. } => (request.length > 0).then_some(remote),
    }
}

fn operation(posted: &PostedOperation, rkey: u32) -> Operation {
    match *posted {
        PostedOperation::Send { immediate, .. } => Operation::Send { immediate },
        PostedOperation::Write { remote, immediate } => {
            Operation::Write { address: remote.address, rkey, immediate }
        }
        PostedOperation::Read { remote } => Operation::Read { address: remote.address, rkey },
        PostedOperation::CompareSwap { remote, compare, swap } => {
            Operation::CompareSwap { address: remote.address, rkey, compare, swap }
        }
        PostedOperation::FetchAdd { remote, add } => {
            Operation::FetchAdd { address: remote.address, rkey, add }
        }
    }
}
