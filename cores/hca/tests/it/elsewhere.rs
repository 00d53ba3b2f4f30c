//! Remote peers: over a lossless transport, both guests observe the same as with a local peer.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)] // For tests only.

use crate::common;

use common::{SIZE, sge};
use dma::{Dma, HeapMemory};
use hca::MrInfo;
use hca::attributes::{Access, QpAttributeMask as Mask, QpKind, QpState};
use hca::names::SegmentId;
use hca::remote::{
    Action, AheadReceived, AtomicOperation, IncomingDatagram, Posted, PostedOperation, QpId, Refusal, Unmoved,
};
use hca::work::{AsyncEvent, Completion, Operation, Remote, SendRequest, Status};
use hca_testbed::{Connected, Guest, World, requests};
use proptest::prelude::*;

/// Bytes per packet of the transport.
const MTU: usize = 1024;
const SEGMENT: SegmentId = SegmentId(1);

/// One host: an engine with a guest, and its queue pair.
struct Side {
    world: World,
    guest: Guest,
    qp: Connected,
    mr: MrInfo,
}

impl Side {
    fn new(number: u8, kind: QpKind) -> Self {
        let mut world = World::after(number);
        world.engine.set_uplink(SEGMENT, true);
        let guest = world.guest(HeapMemory::new(usize::try_from(SIZE).unwrap()));
        let mr = world.register(&guest, 0, SIZE, Access::all() - Access::ZERO_BASED);
        let qp = world.queue_pair(&guest, kind, None);
        Self { world, guest, qp, mr }
    }

    fn id(&self) -> Option<QpId> {
        self.world.engine.connected(self.guest.device, self.qp.qp.qpn)
    }
}

/// Two hosts and a transport between them, or one host with both guests.
struct Pair {
    left: Side,
    right: Side,
    /// Requests that wait in the transport because no receive was posted.
    held: Vec<(QpId, Posted)>,
    closed: Vec<QpId>,
}

impl Pair {
    fn new(kind: QpKind) -> Self {
        let mut pair =
            Self { left: Side::new(0, kind), right: Side::new(7, kind), held: vec![], closed: vec![] };
        let to_right = World::<HeapMemory>::attributes(pair.right.guest.gid, pair.right.qp.qp.qpn);
        let to_left = World::<HeapMemory>::attributes(pair.left.guest.gid, pair.left.qp.qp.qpn);
        let (left, right) = (&mut pair.left, &mut pair.right);
        left.world.raise(left.qp.device, left.qp.qp.handle, kind, QpState::ReadyToSend, &to_right);
        right.world.raise(right.qp.device, right.qp.qp.handle, kind, QpState::ReadyToSend, &to_left);
        pair
    }

    fn send(&mut self, request: SendRequest) {
        let qp = self.left.qp.clone();
        self.left.world.send(&qp, request);
        self.settle();
    }

    fn receive(&mut self, wr_id: u64, address: u64, length: u32) {
        let qp = self.right.qp.clone();
        self.right.world.receive(&qp, wr_id, &[sge(address, length, self.right.mr.lkey)]);
        self.settle();
    }

    fn sge(&self, address: u64, length: u32) -> hca::work::Sge {
        sge(address, length, self.left.mr.lkey)
    }

    /// Polls and transfers until nothing changes.
    fn settle(&mut self) {
        loop {
            self.left.world.settle();
            self.right.world.settle();
            let mut posts: Vec<_> = std::mem::take(&mut self.held);
            let held = posts.len();
            for action in self.left.world.engine.take_actions() {
                match action {
                    Action::Post { qp, request } => posts.push((qp, request)),
                    Action::Closed { qp } => self.closed.push(qp),
                    Action::ReceivePosted { .. } | Action::RegionGone { .. } | Action::MemoryCame { .. } => {}
                    Action::Datagram(datagram) => {
                        let incoming = IncomingDatagram {
                            segment: datagram.segment,
                            source_qpn: datagram.source_qpn,
                            source_gid: datagram.source_gid,
                            dgid: datagram.to.dgid,
                            qpn: datagram.to.qpn,
                            qkey: datagram.to.qkey,
                            traffic_class: datagram.to.traffic_class,
                            flow_label: datagram.to.flow_label,
                            hop_limit: datagram.to.hop_limit,
                            immediate: datagram.immediate,
                            solicited: datagram.solicited,
                            header: None,
                            payload: &datagram.payload,
                        };
                        self.right.world.engine.remote_datagram(&incoming);
                    }
                }
            }
            for (qp, request) in &posts {
                if self.closed.contains(qp) {
                    continue;
                }
                if !self.held.is_empty() {
                    self.held.push((*qp, *request));
                    continue;
                }
                match self.carry(*qp, request) {
                    Ok(bytes) => self.left.world.engine.remote_complete(*qp, request.token, Ok(bytes)),
                    Err(Refused::Remote(Refusal::NotReady { .. } | Refusal::NotHere)) => {
                        self.held.push((*qp, *request));
                    }
                    Err(refused) => {
                        let status = refused.status();
                        self.left.world.engine.remote_complete(*qp, request.token, Err(status));
                    }
                }
            }
            if posts.len() == held && self.held.len() == held {
                self.left.world.settle();
                self.right.world.settle();
                return;
            }
        }
    }

    fn carry(&mut self, qp: QpId, request: &Posted) -> Result<u32, Refused> {
        let Some(peer) = self.right.id() else { return Err(Refused::Remote(Refusal::Gone)) };
        let (left, right) = (&mut self.left.world.engine, &mut self.right.world.engine);
        right.remote_established(peer);
        let length = request.length;
        let chunks = (0..length).step_by(MTU).map(|at| (at, (length - at).min(MTU as u32)));
        let mut buffer = [0; MTU];
        match request.operation {
            PostedOperation::Send { immediate, invalidate } => {
                right.remote_receive_begin(peer).map_err(Refused::Remote)?;
                for (at, len) in chunks {
                    let part = &mut buffer[..len as usize];
                    left.remote_gather(qp, request.token, at, part).map_err(Refused::from)?;
                    right.remote_receive_data(peer, at, part).map_err(Refused::Remote)?;
                }
                if let Some(key) = invalidate {
                    right.remote_invalidate(peer, key).map_err(Refused::Remote)?;
                }
                right
                    .remote_receive_end(peer, length, immediate, invalidate, request.solicited)
                    .map_err(Refused::Remote)?;
                Ok(length)
            }
            PostedOperation::Write { remote, immediate } => {
                right.remote_write(peer, remote, length, 0, &[]).map_err(Refused::Remote)?;
                for (at, len) in chunks {
                    let part = &mut buffer[..len as usize];
                    left.remote_gather(qp, request.token, at, part).map_err(Refused::from)?;
                    right.remote_write(peer, remote, length, at, part).map_err(Refused::Remote)?;
                }
                if let Some(immediate) = immediate {
                    right.remote_receive_begin(peer).map_err(Refused::Remote)?;
                    right
                        .remote_write_end(peer, length, immediate, request.solicited)
                        .map_err(Refused::Remote)?;
                }
                Ok(length)
            }
            PostedOperation::Read { remote } => {
                right.remote_read(peer, remote, length, 0, &mut []).map_err(Refused::Remote)?;
                for (at, len) in chunks {
                    let part = &mut buffer[..len as usize];
                    right.remote_read(peer, remote, length, at, part).map_err(Refused::Remote)?;
                    left.remote_place(qp, request.token, at, part).map_err(Refused::from)?;
                }
                Ok(length)
            }
            PostedOperation::CompareSwap { remote, compare, swap } => {
                let operation = AtomicOperation::CompareSwap { compare, swap };
                let before = right.remote_atomic(peer, remote, operation).map_err(Refused::Remote)?;
                left.remote_place(qp, request.token, 0, &before.to_le_bytes()).map_err(Refused::from)?;
                Ok(8)
            }
            PostedOperation::FetchAdd { remote, add } => {
                let operation = AtomicOperation::FetchAdd { add };
                let before = right.remote_atomic(peer, remote, operation).map_err(Refused::Remote)?;
                left.remote_place(qp, request.token, 0, &before.to_le_bytes()).map_err(Refused::from)?;
                Ok(8)
            }
        }
    }
}

enum Refused {
    Local(Status),
    Remote(Refusal),
}

impl From<Unmoved> for Refused {
    fn from(unmoved: Unmoved) -> Self {
        match unmoved {
            Unmoved::Failed(status) => Self::Local(status),
            Unmoved::NotHere => Self::Remote(Refusal::NotHere),
        }
    }
}

impl Refused {
    fn status(self) -> Status {
        match self {
            Self::Local(status) => status,
            Self::Remote(Refusal::Invalid) => Status::RemoteInvalidRequest,
            Self::Remote(Refusal::Access) => Status::RemoteAccess,
            Self::Remote(Refusal::Operational) => Status::RemoteOperation,
            Self::Remote(Refusal::Gone) => Status::RetryExceeded,
            Self::Remote(Refusal::NotReady { .. }) => Status::RnrRetryExceeded,
            Self::Remote(Refusal::NotHere) => Status::General,
        }
    }
}

fn bytes(side: &Side, address: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    side.guest.memory.read(address, &mut bytes).unwrap();
    bytes
}

#[test]
fn a_datagram_goes_elsewhere_with_its_addresses() {
    let mut pair = Pair::new(QpKind::Ud);
    pair.receive(1, 0x2000, 200);
    pair.left.guest.memory.write(0x1000, b"hello").unwrap();
    let (gid, qpn, pd) = (pair.right.guest.gid, pair.right.qp.qp.qpn, pair.left.guest.pd.0);
    pair.send(requests::datagram(2, pd, gid, qpn, 0x1234, &[pair.sge(0x1000, 5)]));
    assert_eq!(bytes(&pair.right, 0x2000 + 40, 5), b"hello");
    let done = pair.right.qp.completions.poll().unwrap();
    assert_eq!((done.wr_id, done.byte_len, done.source), (1, 45, Some(pair.left.qp.qp.qpn)));
    pair.receive(3, 0x3000, 200);
    pair.send(requests::datagram(4, pd, gid, qpn, 0x9999, &[pair.sge(0x1000, 5)]));
    assert!(pair.right.qp.completions.poll().is_none(), "a wrong Q_Key");
    assert_eq!(pair.left.qp.completions.drain().len(), 2);
}

#[test]
fn a_reset_closes_the_connection_and_its_old_name_leads_nowhere() {
    let mut pair = Pair::new(QpKind::Rc);
    pair.send(requests::write(1, 0, pair.right.mr.rkey, &[pair.sge(0, 8)]));
    assert_eq!(pair.left.qp.completions.drain().len(), 1);
    let old = pair.left.id().unwrap();
    let attributes = World::<HeapMemory>::attributes(pair.right.guest.gid, pair.right.qp.qp.qpn);
    let reset = hca::attributes::QpAttributes { state: QpState::Reset, ..attributes };
    let (device, handle) = (pair.left.qp.device, pair.left.qp.qp.handle);
    pair.left.world.modify(device, handle, Mask::empty(), &reset).unwrap();
    assert_eq!(pair.left.world.engine.take_actions(), [Action::Closed { qp: old }]);
    pair.left.world.raise(device, handle, QpKind::Rc, QpState::ReadyToSend, &attributes);
    assert_ne!(pair.left.id().unwrap(), old);
    assert!(pair.left.world.engine.connection(old).is_none());
    assert_eq!(pair.left.world.engine.remote_receive_begin(old), Err(Refusal::Gone));
}

/// Receives consumed ahead by a transport complete in order. On failure they are flushed before those that are still in the ring. The
/// engine reports that none is posted, and later that one is.
#[test]
fn receives_taken_ahead_complete_or_are_flushed_in_order() {
    let mut pair = Pair::new(QpKind::Rc);
    let qp = pair.right.id().unwrap();
    pair.right.world.engine.remote_bind(qp);
    for wr_id in 1..=4 {
        pair.receive(wr_id, 0x1000 * wr_id, 100);
    }
    let engine = &mut pair.right.world.engine;
    for wr_id in 1..=3 {
        assert_eq!(engine.remote_receive_ahead(qp).unwrap()[0].address, 0x1000 * wr_id);
    }
    let got = AheadReceived { length: 7, immediate: None, write: false, solicited: true };
    engine.remote_ahead_end(qp, Ok(got));
    engine.remote_fail(qp);
    pair.right.world.settle();
    let done = pair.right.qp.completions.drain();
    let seen: Vec<_> = done.iter().map(|done| (done.wr_id, done.status)).collect();
    let flushed = |wr_id| (wr_id, Status::Flushed);
    assert_eq!(seen, [(1, Status::Success), flushed(2), flushed(3), flushed(4)]);
    assert_eq!(done[0].byte_len, 7);

    let mut pair = Pair::new(QpKind::Rc);
    let qp = pair.right.id().unwrap();
    assert!(matches!(pair.right.world.engine.remote_receive_ahead(qp), Err(Refusal::NotReady { .. })));
    let at = pair.right.qp.clone();
    pair.right.world.receive(&at, 9, &[sge(0, 8, pair.right.mr.lkey)]);
    pair.right.world.poll();
    assert_eq!(pair.right.world.engine.take_actions(), [Action::ReceivePosted { qp }]);
    assert!(pair.right.world.engine.remote_receive_ahead(qp).is_ok());
}

/// The engine reports the end of each region that a transport has registered, however it ends, and of no other.
#[test]
fn the_end_of_a_region_is_told_to_whom_it_was_shown() {
    let mut pair = Pair::new(QpKind::Rc);
    let (device, pd, mr) = (pair.left.guest.device, pair.left.guest.pd, pair.left.mr);
    let other = pair.left.world.register(&pair.left.guest, 0, 100, Access::LOCAL_WRITE);
    let engine = &mut pair.left.world.engine;
    assert_eq!(engine.remote_region(device, pd, mr.lkey ^ 1), None);
    assert_eq!(engine.remote_region(device, hca::names::PdHandle(pd.0 + 1), mr.lkey), None);
    let region = engine.remote_region(device, pd, mr.lkey).unwrap();
    assert_eq!((region.start, region.length, region.pieces), (0, SIZE, vec![(0, SIZE)]));
    engine.deregister_mr(device, other.handle).unwrap();
    assert_eq!(engine.take_actions(), []);
    engine.deregister_mr(device, mr.handle).unwrap();
    assert_eq!(engine.take_actions(), [Action::RegionGone { device, key: mr.lkey }]);
    let again = pair.left.world.register(&pair.left.guest, 0, 100, Access::LOCAL_WRITE);
    let engine = &mut pair.left.world.engine;
    assert!(engine.remote_region(device, pd, again.lkey).is_some());
    engine.reset_device(device);
    assert!(engine.take_actions().contains(&Action::RegionGone { device, key: again.lkey }));
}

#[test]
fn drained_means_that_the_transport_has_nothing_left() {
    let mut pair = Pair::new(QpKind::Rc);
    let request = requests::send(1, &[pair.sge(0, 8)]);
    pair.send(request);
    assert!(pair.left.qp.completions.poll().is_none(), "no receive is posted");
    let (device, handle) = (pair.left.qp.device, pair.left.qp.qp.handle);
    let mut attributes = World::<HeapMemory>::attributes(pair.right.guest.gid, pair.right.qp.qp.qpn);
    attributes.state = QpState::SendQueueDrained;
    attributes.sqd_notify = true;
    pair.left.world.modify(device, handle, Mask::SQD_NOTIFY, &attributes).unwrap();
    assert!(pair.left.world.events.others.is_empty());
    pair.receive(2, 0, 8);
    assert_eq!(pair.left.qp.completions.drain().len(), 1);
    assert_eq!(pair.left.world.events.others, [(device, AsyncEvent::SqDrained(handle))]);
}

/// A step of a program.
#[derive(Debug, Clone)]
enum Call {
    Receive { length: u32, good_key: bool },
    Send { length: u32, immediate: bool, good_key: bool },
    Write { length: u32, immediate: bool, offset: u64, good_key: bool },
    Read { length: u32, offset: u64, good_key: bool },
    Add { offset: u64 },
    Swap { offset: u64, compare: u64 },
    Invalidate,
}

fn call() -> impl Strategy<Value = Call> {
    let length = prop_oneof![Just(0u32), 1..64u32, 1000..5000u32];
    let good = proptest::bool::weighted(0.95);
    prop_oneof![
        4 => (length.clone(), good).prop_map(|(length, good_key)| Call::Receive { length, good_key }),
        3 => (length.clone(), any::<bool>(), good)
            .prop_map(|(length, immediate, good_key)| Call::Send { length, immediate, good_key }),
        3 => (length.clone(), any::<bool>(), 0..0x4000u64, good).prop_map(
            |(length, immediate, offset, good_key)| Call::Write { length, immediate, offset, good_key }),
        3 => (length, 0..0x4000u64, good)
            .prop_map(|(length, offset, good_key)| Call::Read { length, offset, good_key }),
        2 => (0..64u64).prop_map(|word| Call::Add { offset: word * 4 }),
        1 => (0..64u64, 0..3u64).prop_map(|(word, compare)| Call::Swap { offset: word * 8, compare }),
        1 => Just(Call::Invalidate),
    ]
}

/// The request of a call, between a sender's and a receiver's keys; `None` for a receive.
fn request(wr_id: u64, call: &Call, lkey: u32, rkey: u32) -> Option<SendRequest> {
    let local = |length, good: bool| [sge(0x8000 + (wr_id % 7) * 0x1000, length, lkey ^ u32::from(!good))];
    let at = |offset, good: bool| Remote { address: 0x2_0000 + offset, rkey: rkey ^ u32::from(!good) };
    Some(match *call {
        Call::Receive { .. } => return None,
        Call::Send { length, immediate, good_key } => {
            let mut request = requests::send(wr_id, &local(length, good_key));
            request.solicited = wr_id.is_multiple_of(2);
            let immediate = immediate.then_some([9, 8, 7, 6]);
            request.operation = Operation::Send { immediate, invalidate: None, datagram: None };
            request
        }
        Call::Write { length, immediate, offset, good_key } => {
            let mut request = requests::write(wr_id, 0, 0, &local(length, true));
            let immediate = immediate.then_some([9, 8, 7, 6]);
            request.operation = Operation::Write { remote: at(offset, good_key), immediate };
            request
        }
        Call::Read { length, offset, good_key } => {
            let mut request = requests::read(wr_id, 0, 0, &local(length, true));
            request.operation = Operation::Read { remote: at(offset, good_key) };
            request
        }
        Call::Add { offset } => {
            let remote = at(offset, true);
            requests::fetch_add(wr_id, remote.address, remote.rkey, wr_id, &local(8, true))
        }
        Call::Swap { offset, compare } => {
            requests::compare_swap(wr_id, at(offset, true), compare, wr_id, &local(8, true))
        }
        Call::Invalidate => requests::invalidate(wr_id, lkey ^ 0x100),
    })
}

fn seen(done: &[Completion]) -> Vec<(u64, Status, u32, Option<[u8; 4]>)> {
    done.iter().map(|done| (done.wr_id, done.status, done.byte_len, done.immediate)).collect()
}

/// Memory of the programs: sources, targets of one-sided operations, receives.
const USED: [(u64, usize); 3] = [(0x8000, 0x9000), (0x2_0000, 0x6000), (0x4_0000, 0x2_0000)];

fn fill(memory: &HeapMemory) {
    for (start, len) in USED {
        let pattern: Vec<u8> =
            (start..).take(len).map(|at| at.wrapping_mul(0x9E37_79B9).to_le_bytes()[2]).collect();
        memory.write(start, &pattern).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// The same program, with a local and with a remote peer: same completions at both ends, same events, same bytes.
    #[test]
    fn elsewhere_is_as_here(calls in proptest::collection::vec(call(), 1..40)) {
        let mut here = common::Pair::new(QpKind::Rc);
        let mut there = Pair::new(QpKind::Rc);
        for memory in [&here.a.memory, &here.b.memory, &there.left.guest.memory, &there.right.guest.memory] {
            fill(memory);
        }
        for (wr_id, call) in (1u64..).zip(&calls) {
            if let Call::Receive { length, good_key } = call {
                let address = 0x4_0000 + (wr_id % 16) * 0x2000;
                let wrong = u32::from(!good_key);
                // A remote responder checks the first packet's key before it finds that the last packet is too long.
                let length = if *good_key { *length } else { 0x2000 };
                let right = here.right.clone();
                let buffer = sge(address, length, here.right_mr.lkey ^ wrong);
                here.world.receive(&right, wr_id, &[buffer]);
                here.world.settle();
                let right = there.right.qp.clone();
                let buffer = sge(address, length, there.right.mr.lkey ^ wrong);
                there.right.world.receive(&right, wr_id, &[buffer]);
                there.settle();
                continue;
            }
            here.send(request(wr_id, call, here.left_mr.lkey, here.right_mr.rkey).unwrap());
            there.send(request(wr_id, call, there.left.mr.lkey, there.right.mr.rkey).unwrap());
        }
        prop_assert_eq!(
            seen(&here.left.completions.drain()), seen(&there.left.qp.completions.drain()), "requester"
        );
        prop_assert_eq!(
            seen(&here.right.completions.drain()), seen(&there.right.qp.completions.drain()), "responder"
        );
        prop_assert_eq!(here.world.state(&here.left), there.left.world.state(&there.left.qp));
        prop_assert_eq!(here.world.state(&here.right), there.right.world.state(&there.right.qp));
        let here_events = here.world.events.others.iter().map(|(_, event)| format!("{event:?}"));
        let both = there.left.world.events.others.iter().chain(&there.right.world.events.others);
        let (mut a, mut b): (Vec<_>, Vec<_>) =
            (here_events.collect(), both.map(|(_, event)| format!("{event:?}")).collect());
        a.sort();
        b.sort();
        prop_assert_eq!(a, b);
        // A message that fails in its middle has written its first packets.
        if here.world.state(&here.right) == QpState::ReadyToSend {
            for (start, len) in USED {
                prop_assert!(here.left_bytes(start, len) == bytes(&there.left, start, len), "requester's memory");
                prop_assert!(here.right_bytes(start, len) == bytes(&there.right, start, len), "responder's memory");
            }
        }
    }
}
