//! Devices in memory, for tests and simulations: two or more on one network, each with numbers of its own. They keep the promises of a
//! reliable connection: order, protection by domain, key, range and rights, one receive per message, errors at both ends, flushing.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dma::Alias;
use hca::attributes::Access;
use hca::work::{SgeList, Status};
use host::transport::rnic::{
    End, HostCompletion, HostEvent, HostMr, HostPd, HostQp, HostRequest, Operation, Receiving, Registered,
    Rnic, RnicError, RnicInfo, Sending,
};

struct Region {
    mr: HostMr,
    pd: HostPd,
    key: u32,
    start: u64,
    access: Access,
    memory: Alias,
}

impl Region {
    fn offset(&self, address: u64, length: u64) -> Option<usize> {
        let offset = address.checked_sub(self.start)?;
        (offset.checked_add(length)? <= self.memory.len() as u64).then_some(usize::try_from(offset).ok()?)
    }
}

struct Pair {
    name: HostQp,
    number: u32,
    pd: HostPd,
    access: Access,
    peer: Option<End>,
    sends: Option<Sending>,
    failed: bool,
    requests: VecDeque<HostRequest>,
    receives: VecDeque<(u64, SgeList)>,
}

struct Nic {
    gid: [u8; 16],
    next: u32,
    pds: Vec<HostPd>,
    regions: Vec<Region>,
    pairs: Vec<Pair>,
    completions: VecDeque<HostCompletion>,
    events: Vec<(HostQp, HostEvent)>,
    /// Number of requests refused for their memory access.
    refused: u64,
}

/// A network of devices.
#[derive(Clone, Default)]
pub struct Network(Arc<Mutex<Vec<Nic>>>);

/// One device of a network.
pub struct FakeRnic {
    network: Network,
    index: usize,
    /// Limit of queue pairs.
    pub most_pairs: usize,
}

impl Network {
    fn lock(&self) -> MutexGuard<'_, Vec<Nic>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a device. Its numbers begin at `first`.
    pub fn device(&self, first: u32) -> FakeRnic {
        let mut nics = self.lock();
        let index = nics.len();
        let mut gid = [0xFD; 16];
        gid[15] = u8::try_from(index).unwrap_or(0);
        nics.push(Nic {
            gid,
            next: first,
            pds: Vec::new(),
            regions: Vec::new(),
            pairs: Vec::new(),
            completions: VecDeque::new(),
            events: Vec::new(),
            refused: 0,
        });
        FakeRnic { network: self.clone(), index, most_pairs: usize::MAX }
    }

    /// Number of a device's objects: protection domains, regions, queue pairs.
    pub fn objects(&self, device: usize) -> (usize, usize, usize) {
        let nics = self.lock();
        (nics[device].pds.len(), nics[device].regions.len(), nics[device].pairs.len())
    }

    /// The keys of a device's regions.
    pub fn keys(&self, device: usize) -> Vec<u32> {
        self.lock()[device].regions.iter().map(|region| region.key).collect()
    }
}

impl Nic {
    fn name(&mut self) -> u32 {
        self.next += 13;
        self.next
    }

    /// Gathers the bytes of a list.
    fn gather(&self, pd: HostPd, sges: &SgeList) -> Result<Vec<u8>, Status> {
        let mut bytes = Vec::new();
        for sge in sges {
            let region = self.region(pd, sge.lkey).ok_or(Status::LocalProtection)?;
            let offset = region.offset(sge.address, u64::from(sge.length)).ok_or(Status::LocalProtection)?;
            let mut part = vec![0; sge.length as usize];
            assert!(region.memory.read(offset, &mut part));
            bytes.extend(part);
        }
        Ok(bytes)
    }

    fn scatter(&self, pd: HostPd, sges: &SgeList, bytes: &[u8]) -> Result<(), Status> {
        let mut rest = bytes;
        for sge in sges {
            let region =
                self.region(pd, sge.lkey).filter(|region| region.access.contains(Access::LOCAL_WRITE));
            let region = region.ok_or(Status::LocalProtection)?;
            let offset = region.offset(sge.address, u64::from(sge.length)).ok_or(Status::LocalProtection)?;
            let (now, later) = rest.split_at(rest.len().min(sge.length as usize));
            assert!(region.memory.write(offset, now));
            rest = later;
        }
        if rest.is_empty() { Ok(()) } else { Err(Status::LocalLength) }
    }

    fn region(&self, pd: HostPd, key: u32) -> Option<&Region> {
        self.regions.iter().find(|region| region.key == key && region.pd == pd)
    }

    fn remote(
        &self,
        pair: usize,
        address: u64,
        rkey: u32,
        length: usize,
        need: Access,
    ) -> Option<(&Region, usize)> {
        let pair = &self.pairs[pair];
        let region = self.region(pair.pd, rkey)?;
        let allowed = pair.access.contains(need) && region.access.contains(need);
        allowed.then_some((region, region.offset(address, length as u64)?))
    }

    fn fail(&mut self, pair: usize) {
        let pair = &mut self.pairs[pair];
        pair.failed = true;
        let flushed = |wr_id| HostCompletion {
            wr_id,
            status: Status::Flushed,
            length: 0,
            write: false,
            immediate: None,
        };
        let sends = pair.requests.drain(..).map(|request| flushed(request.wr_id));
        self.completions.extend(sends);
        self.completions.extend(pair.receives.drain(..).map(|(wr_id, _)| flushed(wr_id)));
    }
}

/// Outcome of a request at the other end.
enum Served {
    Done { length: u32 },
    NotReady,
    Failed(Status),
}

/// Executes a device's requests.
fn work(nics: &mut [Nic], index: usize) {
    for at in 0..nics[index].pairs.len() {
        loop {
            let pair = &nics[index].pairs[at];
            let (Some(peer), Some(request)) = (pair.peer, pair.requests.front().cloned()) else { break };
            let (pd, number) = (pair.pd, pair.number);
            let other = nics.iter().position(|nic| nic.gid == peer.gid);
            let other = other.and_then(|other| {
                let found = nics[other].pairs.iter().position(|pair| pair.number == peer.number);
                found.map(|found| (other, found))
            });
            // An end that doesn't exist, or has another peer, doesn't respond.
            let Some((other, to)) = other.filter(|(other, to)| {
                let own = nics[index].gid;
                let end = &nics[*other].pairs[*to];
                !end.failed && end.peer.is_some_and(|end| (end.gid, end.number) == (own, number))
            }) else {
                break;
            };
            let served = serve(nics, (index, pd), (other, to), &request);
            let complete = |status, length| HostCompletion {
                wr_id: request.wr_id,
                status,
                length,
                write: false,
                immediate: None,
            };
            match served {
                Served::NotReady => break,
                Served::Done { length } => {
                    nics[index].pairs[at].requests.pop_front();
                    nics[index].completions.push_back(complete(Status::Success, length));
                }
                Served::Failed(status) => {
                    nics[index].pairs[at].requests.pop_front();
                    nics[index].completions.push_back(complete(status, 0));
                    nics[index].fail(at);
                    if matches!(status, Status::RemoteAccess | Status::RemoteInvalidRequest) {
                        nics[other].refused += 1;
                        let event = if status == Status::RemoteAccess {
                            HostEvent::Access
                        } else {
                            HostEvent::Request
                        };
                        let name = nics[other].pairs[to].name;
                        nics[other].events.push((name, event));
                        nics[other].fail(to);
                    }
                }
            }
        }
    }
}

fn serve(
    nics: &mut [Nic],
    (index, pd): (usize, HostPd),
    (other, to): (usize, usize),
    request: &HostRequest,
) -> Served {
    let total: usize = request.sges.iter().map(|sge| sge.length as usize).sum();
    let arrive = |nics: &mut [Nic], bytes: &[u8], write: bool, immediate| {
        let Some((wr_id, sges)) = nics[other].pairs[to].receives.pop_front() else { return Served::NotReady };
        let domain = nics[other].pairs[to].pd;
        let placed = if write { Ok(()) } else { nics[other].scatter(domain, &sges, bytes) };
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let status = placed.err().unwrap_or(Status::Success);
        nics[other].completions.push_back(HostCompletion { wr_id, status, length, write, immediate });
        if status == Status::Success {
            Served::Done { length }
        } else {
            Served::Failed(Status::RemoteInvalidRequest)
        }
    };
    match request.operation {
        Operation::Send { immediate } => match nics[index].gather(pd, &request.sges) {
            Ok(bytes) => arrive(nics, &bytes, false, immediate),
            Err(status) => Served::Failed(status),
        },
        Operation::Write { address, rkey, immediate } => {
            let bytes = match nics[index].gather(pd, &request.sges) {
                Ok(bytes) => bytes,
                Err(status) => return Served::Failed(status),
            };
            if immediate.is_some() && nics[other].pairs[to].receives.is_empty() {
                return Served::NotReady;
            }
            if !bytes.is_empty() {
                let target = nics[other].remote(to, address, rkey, bytes.len(), Access::REMOTE_WRITE);
                let Some((region, offset)) = target else { return Served::Failed(Status::RemoteAccess) };
                assert!(region.memory.write(offset, &bytes));
            }
            match immediate {
                Some(_) => arrive(nics, &bytes, true, immediate),
                None => Served::Done { length: 0 },
            }
        }
        Operation::Read { address, rkey } => {
            let mut bytes = vec![0; total];
            if total > 0 {
                let source = nics[other].remote(to, address, rkey, total, Access::REMOTE_READ);
                let Some((region, offset)) = source else { return Served::Failed(Status::RemoteAccess) };
                assert!(region.memory.read(offset, &mut bytes));
            }
            match nics[index].scatter(pd, &request.sges, &bytes) {
                Ok(()) => Served::Done { length: 0 },
                Err(status) => Served::Failed(status),
            }
        }
        Operation::CompareSwap { .. } | Operation::FetchAdd { .. } => {
            atomic(nics, (index, pd), (other, to), request)
        }
    }
}

/// Executes an atomic operation.
fn atomic(
    nics: &mut [Nic],
    (index, pd): (usize, HostPd),
    (other, to): (usize, usize),
    request: &HostRequest,
) -> Served {
    let (Operation::CompareSwap { address, rkey, .. } | Operation::FetchAdd { address, rkey, .. }) =
        request.operation
    else {
        return Served::Failed(Status::LocalQpOperation);
    };
    let word = nics[other].remote(to, address, rkey, 8, Access::REMOTE_ATOMIC);
    let Some((region, offset)) = word else { return Served::Failed(Status::RemoteAccess) };
    let mut before = [0; 8];
    assert!(region.memory.read(offset, &mut before));
    let value = u64::from_le_bytes(before);
    let after = match request.operation {
        Operation::CompareSwap { compare, swap, .. } if compare == value => swap,
        Operation::FetchAdd { add, .. } => value.wrapping_add(add),
        _ => value,
    };
    assert!(region.memory.write(offset, &after.to_le_bytes()));
    match nics[index].scatter(pd, &request.sges, &before) {
        Ok(()) => Served::Done { length: 8 },
        Err(status) => Served::Failed(status),
    }
}

impl FakeRnic {
    fn with<R>(&self, what: impl FnOnce(&mut Nic) -> R) -> R {
        what(&mut self.network.lock()[self.index])
    }

    fn pair<R>(&self, qp: HostQp, what: impl FnOnce(&mut Pair) -> R) -> Result<R, RnicError> {
        self.with(|nic| {
            let pair = nic.pairs.iter_mut().find(|pair| pair.name == qp);
            pair.map(what).ok_or(RnicError::Gone("queue pair"))
        })
    }
}

impl Rnic for FakeRnic {
    fn info(&self) -> RnicInfo {
        RnicInfo {
            device: format!("fake{}", self.index),
            port: 1,
            address: self.with(|nic| nic.gid).into(),
            mtu: 3,
            sends: 16,
            receives: 32,
            reads: 16,
            served_reads: 16,
        }
    }

    fn allocate_pd(&mut self) -> Result<HostPd, RnicError> {
        self.with(|nic| {
            let pd = HostPd(nic.name());
            nic.pds.push(pd);
            Ok(pd)
        })
    }

    fn free_pd(&mut self, pd: HostPd) {
        self.with(|nic| {
            assert!(nic.regions.iter().all(|region| region.pd != pd), "a domain that has regions");
            assert!(nic.pairs.iter().all(|pair| pair.pd != pd), "a domain that has queue pairs");
            nic.pds.retain(|other| *other != pd);
        });
    }

    fn register(
        &mut self,
        pd: HostPd,
        memory: Alias,
        start: u64,
        access: Access,
    ) -> Result<Registered, RnicError> {
        self.with(|nic| {
            let (mr, key) = (HostMr(nic.name()), nic.name().rotate_left(20));
            nic.regions.push(Region { mr, pd, key, start, access, memory });
            Ok(Registered { mr, lkey: key, rkey: key })
        })
    }

    fn deregister(&mut self, mr: HostMr) {
        self.with(|nic| nic.regions.retain(|region| region.mr != mr));
    }

    fn create_qp(&mut self, pd: HostPd, access: Access) -> Result<(HostQp, u32), RnicError> {
        let most = self.most_pairs;
        self.with(|nic| {
            if nic.pairs.len() >= most {
                let source = std::io::ErrorKind::OutOfMemory.into();
                return Err(RnicError::Refused { what: "create a queue pair", source });
            }
            let (name, number) = (HostQp(nic.name()), nic.name() & 0xFF_FFFF);
            nic.pairs.push(Pair {
                name,
                number,
                pd,
                access,
                peer: None,
                sends: None,
                failed: false,
                requests: VecDeque::new(),
                receives: VecDeque::new(),
            });
            Ok((name, number))
        })
    }

    fn receive_from(&mut self, qp: HostQp, with: &Receiving) -> Result<(), RnicError> {
        self.pair(qp, |pair| pair.peer = Some(with.end))
    }

    fn send_to(&mut self, qp: HostQp, with: &Sending) -> Result<(), RnicError> {
        self.pair(qp, |pair| {
            assert!(pair.peer.is_some(), "it receives before it sends");
            pair.sends = Some(*with);
        })
    }

    fn destroy_qp(&mut self, qp: HostQp) {
        self.with(|nic| nic.pairs.retain(|pair| pair.name != qp));
    }

    fn post_send(&mut self, qp: HostQp, request: &HostRequest) -> Result<(), RnicError> {
        self.pair(qp, |pair| {
            assert!(pair.sends.is_some(), "it sends");
            assert!(pair.requests.len() < 16, "no more than there is room for");
            pair.requests.push_back(request.clone());
        })
    }

    fn post_receive(&mut self, qp: HostQp, wr_id: u64, sges: &SgeList) -> Result<(), RnicError> {
        self.pair(qp, |pair| {
            assert!(pair.receives.len() < 32, "no more than there is room for");
            pair.receives.push_back((wr_id, sges.clone()));
        })
    }

    fn poll(&mut self, into: &mut Vec<HostCompletion>) {
        let mut nics = self.network.lock();
        for index in 0..nics.len() {
            work(&mut nics, index);
        }
        into.extend(nics[self.index].completions.drain(..));
    }

    fn events(&mut self, into: &mut Vec<(HostQp, HostEvent)>) {
        self.with(|nic| into.append(&mut nic.events));
    }

    fn arm(&mut self) {}

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }
}
