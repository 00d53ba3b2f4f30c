//! The reference model.

use std::collections::VecDeque;

use hca::attributes::QpState;

use super::engine_side::{Seen, address};
use super::{Call, Element, Kind, Named, PAGES, QPS, REGIONS, guest_of_qp, region_plan};

const SUCCESS: u32 = 0;
const LOCAL_LENGTH: u32 = 1;
const LOCAL_QP_OPERATION: u32 = 2;
const LOCAL_PROTECTION: u32 = 4;
const FLUSHED: u32 = 5;
const REMOTE_INVALID_REQUEST: u32 = 9;
const REMOTE_ACCESS: u32 = 10;
const REMOTE_OPERATION: u32 = 11;
const RETRY_EXCEEDED: u32 = 12;

const LOCAL_WRITE: u32 = 1;
const REMOTE_WRITE: u32 = 2;
const REMOTE_READ: u32 = 4;
const REMOTE_ATOMIC: u32 = 8;

/// A byte of a guest: guest and guest address.
type Place = (usize, usize);

#[derive(Clone)]
struct Request {
    wr_id: u64,
    kind: Kind,
    elements: Vec<Element>,
    signaled: bool,
}

/// Why a send queue waits. It is retried when the reason may have gone, or when time has passed.
#[derive(Default, PartialEq)]
enum Blocked {
    #[default]
    No,
    Receive,
    Peer,
}

#[derive(Default)]
struct Qp {
    failed: bool,
    blocked: Blocked,
    sends: VecDeque<Request>,
    receives: VecDeque<(u64, Vec<Element>)>,
    seen_sends: Vec<Seen>,
    seen_receives: Vec<Seen>,
}

/// Outcome of the first request of a queue.
enum Outcome {
    Done(u32),
    Failed(u32),
    /// The peer failed as well.
    BothFailed(u32),
    NoReceive,
    NoPeer,
}

pub(crate) struct Model {
    memory: [Vec<u8>; 2],
    /// Keys of existing regions.
    keys: Vec<Option<u32>>,
    /// Keys as they were created.
    made: Vec<u32>,
    qps: Vec<Qp>,
    /// Memory was copied onto itself since the last check.
    unknown: bool,
}

impl Model {
    pub(crate) fn new(keys: Vec<u32>) -> Self {
        let ram = vec![0; usize::try_from(PAGES * 4096).expect("small")];
        Self {
            memory: [ram.clone(), ram],
            keys: keys.iter().copied().map(Some).collect(),
            made: keys,
            qps: (0..QPS).map(|_| Qp::default()).collect(),
            unknown: false,
        }
    }

    pub(crate) fn state(&self, qp: usize) -> QpState {
        if self.qps[qp].failed { QpState::Error } else { QpState::ReadyToSend }
    }

    pub(crate) fn take(&mut self, qp: usize) -> (Vec<Seen>, Vec<Seen>) {
        let qp = &mut self.qps[qp];
        (std::mem::take(&mut qp.seen_sends), std::mem::take(&mut qp.seen_receives))
    }

    pub(crate) fn memory(&self, guest: usize) -> Vec<u8> {
        self.memory[guest].clone()
    }

    /// Adopts the engine's memory, if its contents are unspecified.
    pub(crate) fn adopt(&mut self, memory: impl Fn(usize) -> Vec<u8>) {
        if std::mem::take(&mut self.unknown) {
            self.memory = [memory(0), memory(1)];
        }
    }

    pub(crate) fn call(&mut self, number: u64, call: &Call) {
        match call {
            Call::Post { qp, kind, elements, signaled } => {
                let (kind, elements) = (kind.clone(), elements.clone());
                self.qps[*qp].sends.push_back(Request { wr_id: number, kind, elements, signaled: *signaled });
            }
            Call::Receive { qp, elements } => {
                self.qps[*qp].receives.push_back((number, elements.clone()));
                self.unblock(*qp ^ 1);
            }
            Call::Deregister { region } => self.keys[*region] = None,
            Call::Fail { qp } => self.fail(*qp),
            Call::Reconnect { pair } => {
                for qp in [2 * pair, 2 * pair + 1] {
                    let qp = &mut self.qps[qp];
                    qp.failed = false;
                    qp.blocked = Blocked::No;
                    qp.sends.clear();
                    qp.receives.clear();
                }
            }
            Call::Pass => self.pass(),
        }
        self.settle();
    }

    /// All timers expire, several times.
    fn pass(&mut self) {
        let mut again = true;
        while again {
            again = false;
            for qp in 0..QPS {
                self.qps[qp].blocked = Blocked::No;
                again |= self.step(qp);
                if self.qps[qp].blocked == Blocked::Peer {
                    self.complete_first(qp, RETRY_EXCEEDED, 0);
                    self.fail(qp);
                    again = true;
                }
            }
        }
    }

    fn fail(&mut self, qp: usize) {
        self.qps[qp].failed = true;
        self.unblock(qp ^ 1);
    }

    /// Retries send queues that wait for a receive.
    fn unblock(&mut self, qp: usize) {
        if self.qps[qp].blocked == Blocked::Receive {
            self.qps[qp].blocked = Blocked::No;
        }
    }

    fn settle(&mut self) {
        let mut again = true;
        while again {
            again = false;
            for qp in 0..QPS {
                while self.step(qp) {
                    again = true;
                }
            }
        }
    }

    /// Executes or flushes the first request of a queue pair; `false` when there is none.
    fn step(&mut self, qp: usize) -> bool {
        if self.qps[qp].failed {
            if let Some((wr_id, _)) = self.qps[qp].receives.pop_front() {
                self.qps[qp].seen_receives.push((wr_id, 128, FLUSHED, 0, None));
                return true;
            }
            if self.qps[qp].sends.is_empty() {
                return false;
            }
            self.complete_first(qp, FLUSHED, 0);
            return true;
        }
        if self.qps[qp].blocked != Blocked::No {
            return false;
        }
        let Some(request) = self.qps[qp].sends.front().cloned() else { return false };
        match self.execute(qp, &request) {
            Outcome::Done(bytes) => self.complete_first(qp, SUCCESS, bytes),
            Outcome::Failed(status) => {
                self.complete_first(qp, status, 0);
                self.fail(qp);
            }
            Outcome::BothFailed(status) => {
                self.complete_first(qp, status, 0);
                self.fail(qp);
                self.fail(qp ^ 1);
            }
            Outcome::NoReceive => {
                self.qps[qp].blocked = Blocked::Receive;
                return false;
            }
            Outcome::NoPeer => {
                self.qps[qp].blocked = Blocked::Peer;
                return false;
            }
        }
        true
    }

    fn complete_first(&mut self, qp: usize, status: u32, bytes: u32) {
        let request = self.qps[qp].sends.pop_front().expect("the caller looked");
        let operation = match request.kind {
            Kind::Send { .. } | Kind::Malformed => 0,
            Kind::Write { .. } => 1,
            Kind::Read { .. } => 2,
            Kind::CompareSwap { .. } => 3,
            Kind::FetchAdd { .. } => 4,
        };
        if status != SUCCESS || request.signaled {
            self.qps[qp].seen_sends.push((request.wr_id, operation, status, bytes, None));
        }
    }

    /// The bytes of a range, if a guest may access all of it.
    fn range(&self, guest: usize, named: Named, offset: i64, length: u64, right: u32) -> Option<Vec<Place>> {
        let at = address(named, offset);
        // The key belongs to whatever region has it now.
        let key = self.made[named.region] ^ named.wrong;
        // Guests number their regions alike, so one key may be valid at each.
        let index = (0..REGIONS)
            .find(|index| region_plan(*index).guest == guest && self.keys[*index] == Some(key))?;
        let plan = region_plan(index);
        if plan.access & right != right {
            return None;
        }
        let inside = at.checked_sub(plan.start)?;
        if inside.checked_add(length)? > plan.length {
            return None;
        }
        let first = plan.start % 4096;
        let place = |byte: u64| {
            let position = first + inside + byte;
            let page = plan.pages[usize::try_from(position / 4096).expect("small")];
            (guest, usize::try_from(page + position % 4096).expect("small"))
        };
        Some((0..length).map(place).collect())
    }

    /// The elements' bytes that contain the first `total` bytes.
    fn list(&self, guest: usize, elements: &[Element], total: usize, right: u32) -> Option<Vec<Place>> {
        let mut places = Vec::new();
        for element in elements.iter().filter(|element| element.length > 0) {
            if places.len() >= total {
                break;
            }
            let length = u64::from(element.length);
            places.extend(self.range(guest, element.named, element.offset, length, right)?);
        }
        places.truncate(total);
        Some(places)
    }

    /// Copies bytes. The result of a copy onto itself is unspecified.
    fn copy(&mut self, from: &[Place], to: &[Place]) {
        let targets: std::collections::HashSet<_> = to.iter().collect();
        self.unknown |= from.iter().any(|place| targets.contains(place));
        let bytes: Vec<u8> = from.iter().map(|(guest, at)| self.memory[*guest][*at]).collect();
        for (byte, (guest, at)) in bytes.into_iter().zip(to) {
            self.memory[*guest][*at] = byte;
        }
    }

    fn execute(&mut self, qp: usize, request: &Request) -> Outcome {
        let peer = qp ^ 1;
        let (own, other) = (guest_of_qp(qp), guest_of_qp(peer));
        let length: usize = request.elements.iter().map(|element| element.length as usize).sum();
        let bytes = u32::try_from(length).expect("small");
        let gone = self.qps[peer].failed;
        match request.kind {
            Kind::Malformed => Outcome::Failed(LOCAL_QP_OPERATION),
            Kind::Send { immediate } => {
                let Some(from) = self.list(own, &request.elements, length, 0) else {
                    return Outcome::Failed(LOCAL_PROTECTION);
                };
                if gone {
                    return Outcome::NoPeer;
                }
                self.receive(peer, &from, 128, immediate, bytes)
            }
            Kind::Write { named, offset, immediate } => {
                let Some(from) = self.list(own, &request.elements, length, 0) else {
                    return Outcome::Failed(LOCAL_PROTECTION);
                };
                if gone {
                    return Outcome::NoPeer;
                }
                if length > 0 {
                    let Some(to) = self.range(other, named, offset, length as u64, REMOTE_WRITE) else {
                        return Outcome::BothFailed(REMOTE_ACCESS);
                    };
                    self.copy(&from, &to);
                }
                match immediate {
                    Some(_) => self.receive(peer, &[], 129, immediate, bytes),
                    None => Outcome::Done(0),
                }
            }
            Kind::Read { named, offset } => {
                let Some(to) = self.list(own, &request.elements, length, LOCAL_WRITE) else {
                    return Outcome::Failed(LOCAL_PROTECTION);
                };
                if gone {
                    return Outcome::NoPeer;
                }
                if length > 0 {
                    let Some(from) = self.range(other, named, offset, length as u64, REMOTE_READ) else {
                        return Outcome::BothFailed(REMOTE_ACCESS);
                    };
                    self.copy(&from, &to);
                }
                Outcome::Done(bytes)
            }
            Kind::FetchAdd { named, offset, add } => {
                self.atomic(qp, request, named, offset, |before| before.wrapping_add(add))
            }
            Kind::CompareSwap { named, offset, compare, swap } => {
                let change = |before| if before == compare { swap } else { before };
                self.atomic(qp, request, named, offset, change)
            }
        }
    }

    fn atomic(
        &mut self,
        qp: usize,
        request: &Request,
        named: Named,
        offset: i64,
        change: impl Fn(u64) -> u64,
    ) -> Outcome {
        let length: usize = request.elements.iter().map(|element| element.length as usize).sum();
        if length < 8 {
            return Outcome::Failed(LOCAL_LENGTH);
        }
        let Some(to) = self.list(guest_of_qp(qp), &request.elements, 8, LOCAL_WRITE) else {
            return Outcome::Failed(LOCAL_PROTECTION);
        };
        if self.qps[qp ^ 1].failed {
            return Outcome::NoPeer;
        }
        if !address(named, offset).is_multiple_of(8) {
            return Outcome::BothFailed(REMOTE_INVALID_REQUEST);
        }
        let Some(word) = self.range(guest_of_qp(qp ^ 1), named, offset, 8, REMOTE_ATOMIC) else {
            return Outcome::BothFailed(REMOTE_ACCESS);
        };
        let before: Vec<u8> = word.iter().map(|(guest, at)| self.memory[*guest][*at]).collect();
        let value = u64::from_le_bytes(before.clone().try_into().expect("eight"));
        for (byte, (guest, at)) in change(value).to_le_bytes().into_iter().zip(word) {
            self.memory[guest][at] = byte;
        }
        for (byte, (guest, at)) in before.into_iter().zip(to) {
            self.memory[guest][at] = byte;
        }
        Outcome::Done(8)
    }

    /// A message that consumes a receive of `peer`.
    fn receive(
        &mut self,
        peer: usize,
        from: &[Place],
        operation: u32,
        immediate: Option<u8>,
        bytes: u32,
    ) -> Outcome {
        let Some((wr_id, elements)) = self.qps[peer].receives.front().cloned() else {
            return Outcome::NoReceive;
        };
        let room: usize = elements.iter().map(|element| element.length as usize).sum();
        self.qps[peer].receives.pop_front();
        if from.len() > room {
            self.qps[peer].seen_receives.push((wr_id, 128, LOCAL_LENGTH, 0, None));
            return Outcome::BothFailed(REMOTE_INVALID_REQUEST);
        }
        let Some(to) = self.list(guest_of_qp(peer), &elements, from.len(), LOCAL_WRITE) else {
            self.qps[peer].seen_receives.push((wr_id, 128, LOCAL_PROTECTION, 0, None));
            return Outcome::BothFailed(REMOTE_OPERATION);
        };
        self.copy(from, &to);
        let immediate = immediate.map(|byte| [byte; 4]);
        self.qps[peer].seen_receives.push((wr_id, operation, SUCCESS, bytes, immediate));
        Outcome::Done(0)
    }
}
