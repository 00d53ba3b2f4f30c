//! Hostile guests: whatever they post, the engine accesses no byte that is not registered, and never panics or stalls.

use dma::HeapMemory;
use hca::attributes::{Access, QpAttributeMask as Mask, QpKind, QpState};
use hca::names::{CqHandle, Gid, MrHandle, PdHandle, QpHandle, Qpn, SrqHandle};
use hca::work::{
    Arm, Datagram, FastRegister, Malformed, Operation, ReceiveRequest, Remote, SendRequest, Sge,
};
use hca::{MrInfo, MrInit};
use hca_testbed::{Connected, Guest, World, requests};
use proptest::prelude::*;

const RAM: u64 = 0x10000;

/// The oracle: bytes of guest memory that are registered with the rights for an access.
#[derive(Default)]
struct Registered(Vec<(u64, u64, bool)>);

impl Registered {
    fn allows(&self, access: dma::heap::Access) -> bool {
        (access.address..access.address + access.len).all(|byte| {
            self.0
                .iter()
                .any(|(start, end, write)| (*start..*end).contains(&byte) && (*write || !access.write))
        })
    }
}

/// Numbers that are often valid, and often invalid by little.
fn number(good: &'static [u64]) -> impl Strategy<Value = u64> {
    prop_oneof![
        6 => prop::sample::select(good),
        2 => (prop::sample::select(good), -2i64..3).prop_map(|(n, d)| n.wrapping_add_signed(d)),
        1 => any::<u64>(),
    ]
}

const ADDRESSES: &[u64] = &[0, 0x1000, 0x1800, 0x2000, 0x3000, 0x7000, 0xF000, 0x10000, u64::MAX];
const LENGTHS: &[u64] = &[0, 1, 8, 40, 100, 0x800, 0x1000, 0x2000, 0xFFFF_FFFF];

/// A key: of region `which`, XORed.
fn key() -> impl Strategy<Value = (usize, u32)> {
    (0usize..6, prop_oneof![6 => Just(0u32), 1 => Just(1), 1 => any::<u32>()])
}

#[derive(Debug, Clone)]
struct RawSge {
    address: u64,
    length: u64,
    key: (usize, u32),
}

fn sges() -> impl Strategy<Value = Vec<RawSge>> {
    let sge = (number(ADDRESSES), number(LENGTHS), key());
    let sge = sge.prop_map(|(address, length, key)| RawSge { address, length, key });
    prop::collection::vec(sge, 0..5)
}

#[derive(Debug, Clone)]
enum Act {
    Send { qp: usize, opcode: u8, sges: Vec<RawSge>, address: u64, key: (usize, u32), word: u64 },
    Receive { qp: usize, sges: Vec<RawSge> },
    Shared { sges: Vec<RawSge> },
    Modify { qp: usize, state: u8, mask: u32, value: u32 },
    Register { start: u64, length: u64, pages: Vec<u64>, access: u32, which: usize },
    Deregister { handle: u32 },
    Destroy { what: u8, handle: u32 },
    Ring { handle: u32 },
    Arm { handle: u32, solicited: bool },
    Time { nanoseconds: u64 },
    Exact { exact: bool },
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        20 => (0usize..6, 0u8..16, sges(), number(ADDRESSES), key(), number(&[0, 1, 8]))
            .prop_map(|(qp, opcode, sges, address, key, word)| Act::Send { qp, opcode, sges, address, key, word }),
        10 => (0usize..6, sges()).prop_map(|(qp, sges)| Act::Receive { qp, sges }),
        4 => sges().prop_map(|sges| Act::Shared { sges }),
        4 => (0usize..6, 0u8..7, any::<u32>(), any::<u32>())
            .prop_map(|(qp, state, mask, value)| Act::Modify { qp, state, mask, value }),
        4 => (number(ADDRESSES), number(LENGTHS), prop::collection::vec(number(ADDRESSES), 0..4), any::<u32>(), 0usize..6)
            .prop_map(|(start, length, pages, access, which)| Act::Register { start, length, pages, access, which }),
        1 => any::<u32>().prop_map(|handle| Act::Deregister { handle: handle % 10 }),
        1 => (0u8..4, 0u32..8).prop_map(|(what, handle)| Act::Destroy { what, handle }),
        3 => any::<u32>().prop_map(|handle| Act::Ring { handle: handle % 10 }),
        2 => (0u32..10, any::<bool>()).prop_map(|(handle, solicited)| Act::Arm { handle, solicited }),
        3 => number(&[1, 10_000, 100_000_000]).prop_map(|ns| Act::Time { nanoseconds: ns % 1_000_000_000 }),
        1 => any::<bool>().prop_map(|exact| Act::Exact { exact }),
    ]
}

struct Scene {
    world: World,
    guest: Guest,
    qps: Vec<Connected>,
    shared: hca_testbed::ReceiveRing,
    srq: SrqHandle,
    regions: Vec<Option<MrInfo>>,
    oracle: Registered,
}

impl Scene {
    fn new() -> Self {
        let mut world: World = World::default();
        let guest = world.guest(HeapMemory::new(usize::try_from(RAM).unwrap()));
        let (srq, shared) = world.shared_queue(&guest, 1);
        let mut scene = Self {
            world,
            guest,
            qps: Vec::new(),
            shared,
            srq,
            regions: Vec::new(),
            oracle: Registered::default(),
        };
        let all = (Access::all() - Access::ZERO_BASED).bits();
        scene.register(0x1000, 0x1000, &[0x1000], all);
        scene.register(0x1800, 0x1800, &[0x5000, 0x3000], all);
        scene.register(0x7000, 0x10, &[0x7000], 0);
        let fast = scene.world.engine.allocate_fast_mr(scene.guest.device, scene.guest.pd, 4).unwrap();
        scene.regions.push(Some(fast));
        let guest = scene.guest.clone();
        for srq in [None, Some(srq)] {
            let (left, right) = (
                scene.world.queue_pair(&guest, QpKind::Rc, srq),
                scene.world.queue_pair(&guest, QpKind::Rc, None),
            );
            scene.world.join(&guest, &left, &guest, &right, QpKind::Rc);
            scene.qps.extend([left, right]);
        }
        for kind in [QpKind::Ud, QpKind::Gsi] {
            let one = scene.world.queue_pair(&guest, kind, None);
            let with = World::<HeapMemory>::attributes(guest.gid, one.qp.qpn);
            scene.world.raise(guest.device, one.qp.handle, kind, QpState::ReadyToSend, &with);
            scene.qps.push(one);
        }
        scene.guest.memory.record();
        scene
    }

    /// Registers a region, and adds it to the oracle. The oracle never removes one: an access to what was once registered isn't an error
    /// here.
    fn register(&mut self, start: u64, length: u64, pages: &[u64], access: u32) {
        let init = MrInit { start, length, access, pages: pages.into() };
        let made = self.world.engine.register_mr(self.guest.device, self.guest.pd, init);
        if made.is_ok() {
            self.allow(start % 4096, length, pages, access);
        }
        self.regions.push(made.ok());
    }

    fn allow(&mut self, first: u64, length: u64, pages: &[u64], access: u32) {
        let write = access & 11 != 0;
        let mut left = length;
        for (index, page) in pages.iter().enumerate() {
            let skip = if index == 0 { first } else { 0 };
            let here = left.min(4096 - skip);
            self.oracle.0.push((page + skip, page.saturating_add(skip + here), write));
            left -= here;
        }
    }

    fn key(&self, (which, wrong): (usize, u32)) -> u32 {
        let found = self.regions.get(which).or(self.regions.last()).copied().flatten();
        found.map_or(0, |region| region.rkey) ^ wrong
    }

    fn sges(&self, raw: &[RawSge]) -> Vec<Sge> {
        let length = |length: u64| u32::try_from(length & 0xFFFF_FFFF).unwrap();
        raw.iter()
            .map(|raw| Sge { address: raw.address, length: length(raw.length), lkey: self.key(raw.key) })
            .collect()
    }

    fn operation(&mut self, opcode: u8, address: u64, rkey: u32, word: u64) -> Option<Operation> {
        let remote = Remote { address, rkey };
        let datagram = Datagram {
            qpn: if word == 0 { Qpn(1) } else { self.qps[4].qp.qpn },
            qkey: 0x1234,
            pd: self.guest.pd.0,
            dgid: if word == 1 { Gid([7; 16]) } else { self.guest.gid },
            sgid_index: word.to_le_bytes()[0],
            traffic_class: 0,
            flow_label: rkey,
            hop_limit: 0,
            dmac: [0; 6],
        };
        let fast = |this: &mut Self, pages: Vec<u64>| {
            let length = pages.len() as u64 * 4096;
            let length = length.saturating_sub(address % 4096).wrapping_sub(word & 1);
            // Whether or not it succeeds, the guest has offered these pages.
            if pages.iter().all(|page| page.is_multiple_of(4096)) {
                this.allow(address % 4096, length, &pages, 15);
            }
            let pages = pages.into();
            Operation::FastRegister(Box::new(FastRegister { iova: address, length, access: 15, rkey, pages }))
        };
        Some(match opcode {
            0 => Operation::Send { immediate: Some([1; 4]), invalidate: None, datagram: None },
            1 => Operation::Send { immediate: None, invalidate: Some(rkey), datagram: None },
            2 | 3 => Operation::Send { immediate: None, invalidate: None, datagram: Some(datagram) },
            4 | 5 => Operation::Write { remote, immediate: None },
            6 => Operation::Write { remote, immediate: Some([2; 4]) },
            7 | 8 => Operation::Read { remote },
            9 => Operation::CompareSwap { remote, compare: word, swap: 1 },
            10 => Operation::FetchAdd { remote, add: word },
            11 => Operation::LocalInvalidate { rkey },
            12 => fast(self, vec![0x9000, 0xB000]),
            13 => fast(self, vec![0x9000, address]),
            _ => return None,
        })
    }

    fn act(&mut self, act: &Act) {
        let device = self.guest.device;
        match act {
            Act::Send { qp, opcode, sges, address, key, word } => {
                let qp = self.qps[*qp].clone();
                match self.operation(*opcode, *address, self.key(*key), *word) {
                    None => qp.sends.post_malformed(1, Malformed::Opcode(u32::from(*opcode))),
                    Some(operation) => {
                        let request: SendRequest = requests::request(2, operation, &self.sges(sges));
                        qp.sends.post(request);
                    }
                }
                self.world.engine.doorbell_send(device, qp.qp.handle);
            }
            Act::Receive { qp, sges } => {
                let sges = self.sges(sges);
                let qp = self.qps[*qp].clone();
                self.world.receive(&qp, 3, &sges);
            }
            Act::Shared { sges } => {
                let sges = self.sges(sges).into_iter().collect();
                self.shared.post(ReceiveRequest { wr_id: 4, sges });
                self.world.engine.doorbell_srq(device, self.srq);
            }
            Act::Modify { qp, state, mask, value } => self.modify(*qp, *state, *mask, *value),
            Act::Register { start, length, pages, access, which } => {
                let length = *length & 0xFFFF;
                let count = usize::try_from((start % 4096 + length).div_ceil(4096)).unwrap();
                let pages: Vec<u64> = pages.iter().copied().cycle().take(count).collect();
                self.register(*start, length, &pages, *access);
                let made = self.regions.pop().flatten();
                if made.is_some() && *which < self.regions.len() {
                    self.regions[*which] = made;
                }
            }
            Act::Deregister { handle } => {
                let _ = self.world.engine.deregister_mr(device, MrHandle(*handle));
            }
            Act::Destroy { what, handle } => {
                let engine = &mut self.world.engine;
                let _ = match what {
                    0 => engine.destroy_qp(device, QpHandle(*handle)),
                    1 => engine.destroy_cq(device, CqHandle(*handle)),
                    2 => engine.destroy_srq(device, SrqHandle(*handle)),
                    _ => engine.destroy_pd(device, PdHandle(*handle)),
                };
            }
            Act::Ring { handle } => {
                self.world.engine.doorbell_send(device, QpHandle(*handle));
                self.world.engine.doorbell_receive(device, QpHandle(*handle));
                self.world.engine.doorbell_srq(device, SrqHandle(*handle));
                self.world.engine.scan_context(device, hca::names::ContextHandle(*handle));
            }
            Act::Arm { handle, solicited } => {
                let arm = if *solicited { Arm::Solicited } else { Arm::Next };
                self.world.engine.arm_cq(device, CqHandle(*handle), arm, &mut self.world.events);
            }
            Act::Time { nanoseconds } => {
                self.world.now += nanoseconds;
                self.world.poll();
            }
            Act::Exact { exact } => self.world.engine.set_arm_exact(device, *exact),
        }
    }

    fn modify(&mut self, qp: usize, state: u8, mask: u32, value: u32) {
        let states = [
            QpState::Reset,
            QpState::Init,
            QpState::ReadyToReceive,
            QpState::ReadyToSend,
            QpState::SendQueueDrained,
            QpState::SendQueueError,
            QpState::Error,
        ];
        let qp = self.qps[qp].clone();
        let peer = self.qps[usize::try_from(value % 6).unwrap()].qp.qpn;
        let mut with = World::<HeapMemory>::attributes(self.guest.gid, peer);
        with.state = states[usize::from(state)];
        with.current_state = states[usize::try_from(value % 7).unwrap()];
        let [a, b, c, d] = value.to_le_bytes();
        (with.timeout, with.retry_count, with.rnr_retry, with.path_mtu) = (a, b % 9, c % 9, d % 7);
        with.rq_psn = value;
        with.address.sgid_index = a & 1;
        let device = self.guest.device;
        // A random mask hardly ever fits; bare transitions do.
        let mask = if mask.is_multiple_of(3) { Mask::from_bits_truncate(mask) } else { Mask::empty() };
        let _ = self.world.modify(device, qp.qp.handle, mask, &with);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_touched_that_is_not_registered(acts in prop::collection::vec(act(), 1..80)) {
        let mut scene = Scene::new();
        for act in &acts {
            scene.act(act);
            // Bounded: it becomes idle, or waits, within some polls.
            let mut polls = 0;
            while scene.world.poll().next.is_some_and(|next| next <= scene.world.now) {
                polls += 1;
                prop_assert!(polls < 10_000, "no rest after {act:?}");
            }
            for access in scene.guest.memory.take_record() {
                prop_assert!(scene.oracle.allows(access), "{access:?} by {act:?}");
            }
        }
        for qp in &scene.qps {
            for done in qp.completions.drain() {
                prop_assert_eq!(done.qp, qp.qp.handle);
            }
        }
    }
}
