//! The program on the engine.

use dma::{Dma, HeapMemory};
use hca::attributes::{QpAttributeMask as Mask, QpKind, QpState};
use hca::names::MrHandle;
use hca::work::{Completion, Malformed, Operation, ReceiveRequest, Remote, SendRequest, Sge, SgeList};
use hca::{EngineConfig, MrInfo, MrInit};
use hca_testbed::{Connected, Guest, World, requests};

use super::{Call, Element, Kind, Named, PAGES, PAIRS, QPS, REGIONS, guest_of_qp, region_plan};

/// The fields of a completion that the model knows: request, operation, status, bytes, immediate.
pub(crate) type Seen = (u64, u32, u32, u32, Option<[u8; 4]>);

pub(crate) struct Side {
    world: World,
    guests: Vec<Guest>,
    qps: Vec<Connected>,
    regions: Vec<MrInfo>,
}

impl Side {
    pub(crate) fn new(quantum: u64, many_active: u32) -> Self {
        let config = EngineConfig {
            quantum_bytes: quantum,
            quantum_alone_bytes: quantum,
            many_active,
            ..EngineConfig::default()
        };
        let mut world = World::new(config);
        let size = usize::try_from(PAGES * 4096).expect("small");
        let guests: Vec<Guest> = (0..2).map(|_| world.guest(HeapMemory::new(size))).collect();
        let qps: Vec<_> =
            (0..QPS).map(|qp| world.queue_pair(&guests[guest_of_qp(qp)], QpKind::Rc, None)).collect();
        let regions = (0..REGIONS)
            .map(|index| {
                let plan = region_plan(index);
                let guest = &guests[plan.guest];
                let init = MrInit {
                    start: plan.start,
                    length: plan.length,
                    access: plan.access,
                    pages: plan.pages.into(),
                };
                world.engine.register_mr(guest.device, guest.pd, init).expect("within limits")
            })
            .collect();
        let mut side = Self { world, guests, qps, regions };
        for pair in 0..PAIRS {
            side.connect(pair);
        }
        side
    }

    pub(crate) fn keys(&self) -> Vec<u32> {
        self.regions.iter().map(|region| region.rkey).collect()
    }

    fn connect(&mut self, pair: usize) {
        for (own, other) in [(2 * pair, 2 * pair + 1), (2 * pair + 1, 2 * pair)] {
            let peer = &self.guests[guest_of_qp(other)];
            let mut with = World::<HeapMemory>::attributes(peer.gid, self.qps[other].qp.qpn);
            with.rnr_retry = 7;
            let qp = &self.qps[own];
            self.world.raise(qp.device, qp.qp.handle, QpKind::Rc, QpState::ReadyToSend, &with);
        }
    }

    fn key(&self, named: Named) -> u32 {
        self.regions[named.region].rkey ^ named.wrong
    }

    fn sges(&self, elements: &[Element]) -> SgeList {
        let sge = |element: &Element| Sge {
            address: address(element.named, element.offset),
            length: element.length,
            lkey: self.key(element.named),
        };
        elements.iter().map(sge).collect()
    }

    fn request(&self, wr_id: u64, kind: &Kind, elements: &[Element], signaled: bool) -> Option<SendRequest> {
        let remote = |named: Named, offset| Remote { address: address(named, offset), rkey: self.key(named) };
        let immediate = |byte: Option<u8>| byte.map(|byte| [byte; 4]);
        let operation = match *kind {
            Kind::Send { immediate: byte } => {
                Operation::Send { immediate: immediate(byte), invalidate: None, datagram: None }
            }
            Kind::Write { named, offset, immediate: byte } => {
                Operation::Write { remote: remote(named, offset), immediate: immediate(byte) }
            }
            Kind::Read { named, offset } => Operation::Read { remote: remote(named, offset) },
            Kind::FetchAdd { named, offset, add } => {
                Operation::FetchAdd { remote: remote(named, offset), add }
            }
            Kind::CompareSwap { named, offset, compare, swap } => {
                Operation::CompareSwap { remote: remote(named, offset), compare, swap }
            }
            Kind::Malformed => return None,
        };
        let mut request = requests::request(wr_id, operation, &self.sges(elements));
        request.signaled = signaled;
        Some(request)
    }

    pub(crate) fn call(&mut self, number: u64, call: &Call) {
        match call {
            Call::Post { qp, kind, elements, signaled } => {
                match self.request(number, kind, elements, *signaled) {
                    Some(request) => self.qps[*qp].sends.post(request),
                    None => self.qps[*qp].sends.post_malformed(number, Malformed::Opcode(99)),
                }
                self.world.engine.doorbell_send(self.qps[*qp].device, self.qps[*qp].qp.handle);
            }
            Call::Receive { qp, elements } => {
                let request = ReceiveRequest { wr_id: number, sges: self.sges(elements) };
                self.qps[*qp].receives.post(request);
                self.world.engine.doorbell_receive(self.qps[*qp].device, self.qps[*qp].qp.handle);
            }
            Call::Deregister { region } => {
                let plan = region_plan(*region);
                let handle = self.regions[*region].handle;
                // A second deregistration fails.
                let _ = self.world.engine.deregister_mr(self.guests[plan.guest].device, MrHandle(handle.0));
            }
            Call::Fail { qp } => self.bring(*qp, QpState::Error),
            Call::Reconnect { pair } => {
                for qp in [2 * pair, 2 * pair + 1] {
                    self.bring(qp, QpState::Reset);
                    self.qps[qp].sends.clear();
                    self.qps[qp].receives.clear();
                }
                self.connect(*pair);
            }
            Call::Pass => self.world.pass(100_000),
        }
        self.world.settle();
    }

    fn bring(&mut self, qp: usize, state: QpState) {
        let qp = &self.qps[qp];
        let mut with = World::<HeapMemory>::attributes(self.guests[0].gid, qp.qp.qpn);
        with.state = state;
        self.world.modify(qp.device, qp.qp.handle, Mask::empty(), &with).expect("always possible");
    }

    pub(crate) fn state(&self, qp: usize) -> QpState {
        self.world.state(&self.qps[qp])
    }

    /// Completions since the last call: of sends, of receives.
    pub(crate) fn take(&mut self, qp: usize) -> (Vec<Seen>, Vec<Seen>) {
        let all = self.qps[qp].completions.drain();
        let seen = |c: Completion| (c.wr_id, c.operation as u32, c.status as u32, c.byte_len, c.immediate);
        let (receives, sends): (Vec<_>, Vec<_>) = all.into_iter().map(seen).partition(|seen| seen.1 >= 128);
        (sends, receives)
    }

    pub(crate) fn memory(&self, guest: usize) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(PAGES * 4096).expect("small")];
        self.guests[guest].memory.read(0, &mut bytes).expect("all of it");
        bytes
    }
}

pub(crate) fn address(named: Named, offset: i64) -> u64 {
    region_plan(named.region).start.wrapping_add_signed(offset)
}
