//! The engine's own cost per message: rings that never run empty and cost next to nothing, real mapped memory.
//!
//! `cargo run --release -p hca --example engine_rate [MESSAGES [CASE]]`: messages per sample, of which the best of five counts, and the
//! only case to run. A small count and one case suit `valgrind --tool=callgrind`, which counts instructions whatever else the machine does.

#![allow(clippy::unwrap_used)] // A failure to set up should panic.
#![allow(clippy::cast_possible_truncation)] // Figures for people.

use std::os::fd::OwnedFd;

use dma::{MappedMemory, MemoryRegion};
use hca::attributes::{Access, QpKind, QpState};
use hca::names::{ContextHandle, DeviceId, PdHandle, SegmentId};
use hca::provider::{
    CompletionQueue, CompletionQueueFailed, Consumer, Fetched, Provider, ReceiveQueue, SendQueue,
};
use hca::work::{Completion, ReceiveRequest, SendRequest, Sge};
use hca::{Capabilities, DeviceConfig, Engine, EngineConfig, Limits, MrInfo, MrInit, QpInfo, QpInit};
use hca_testbed::{Events, World, gid, mac, requests};

/// A guest that posts the same request without end.
struct Endless;

struct Sends(Option<SendRequest>);
struct Receives(ReceiveRequest);
struct Completions(u32);

impl Provider for Endless {
    type Memory = MappedMemory;
    type SendQueue = Sends;
    type ReceiveQueue = Receives;
    type CompletionQueue = Completions;
}

impl SendQueue<MappedMemory> for Sends {
    type Saved = ();

    fn save(&self) {}

    fn memory(&self, _: &mut dyn FnMut(u64, u64)) {}

    fn restore((): ()) -> Result<Self, &'static str> {
        Err("ring: these are made by the measurement only")
    }

    fn start(&mut self, _: &MappedMemory) {}
    fn pending(&self, _: &MappedMemory) -> bool {
        self.0.is_some()
    }
    fn fetch(&mut self, _: &MappedMemory) -> Fetched<SendRequest> {
        self.0.clone().map_or(Fetched::Empty, Fetched::Request)
    }
    fn retire(&mut self, _: &MappedMemory, _: u32) {}
}

impl ReceiveQueue<MappedMemory> for Receives {
    type Saved = ();

    fn save(&self) {}

    fn memory(&self, _: &mut dyn FnMut(u64, u64)) {}

    fn restore((): ()) -> Result<Self, &'static str> {
        Err("ring: these are made by the measurement only")
    }

    fn start(&mut self, _: &MappedMemory) {}
    fn available(&self, _: &MappedMemory) -> u32 {
        1
    }
    fn take(&mut self, _: &MappedMemory) -> Fetched<ReceiveRequest> {
        Fetched::Request(self.0.clone())
    }
}

impl CompletionQueue<MappedMemory> for Completions {
    type Saved = ();

    fn save(&self) {}

    fn memory(&self, _: &mut dyn FnMut(u64, u64)) {}

    fn restore((): ()) -> Result<Self, &'static str> {
        Err("ring: these are made by the measurement only")
    }

    fn push(&mut self, _: &MappedMemory, _: &Completion) -> Result<(), CompletionQueueFailed> {
        self.0 = self.0.wrapping_add(1);
        Ok(())
    }
    fn publish(&mut self, _: &MappedMemory) -> Result<(), CompletionQueueFailed> {
        Ok(())
    }
    fn consumer(&self, _: &MappedMemory) -> Option<Consumer> {
        Some(Consumer { position: self.0, unconsumed: 0 })
    }
}

const RAM: u64 = 64 << 20;

struct Guest {
    device: DeviceId,
    pd: PdHandle,
    mr: MrInfo,
    number: u8,
}

struct Bench {
    engine: Engine<Endless>,
    events: Events,
    now: u64,
}

impl Bench {
    fn guest(&mut self, number: u8) -> Guest {
        let file: OwnedFd = rustix::fs::memfd_create("rate", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, RAM).unwrap();
        rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::SHRINK).unwrap();
        let memory =
            MappedMemory::default().with(MemoryRegion::map(0, RAM, &file, 0, true).unwrap()).unwrap();
        let config = DeviceConfig {
            name: String::new(),
            segment: SegmentId(0),
            limits: Limits::default(),
            capabilities: Capabilities::default(),
        };
        let device = self.engine.add_device(config, memory).unwrap();
        self.engine.bind_gid(device, 0, gid(number), mac(number)).unwrap();
        let pd = self.engine.create_pd(device, ContextHandle(0)).unwrap();
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let pages = (0..RAM / 4096).map(|page| page * 4096).collect();
        let init = MrInit { start: 0, length: RAM, access: access.bits(), pages };
        let mr = self.engine.register_mr(device, pd, init).unwrap();
        Guest { device, pd, mr, number }
    }

    fn qp(&mut self, guest: &Guest, send: Option<SendRequest>, bytes: u32, index: u64) -> QpInfo {
        let cq = self.engine.create_cq(guest.device, ContextHandle(0), 1024, Completions(0)).unwrap();
        let init = QpInit {
            pd: guest.pd,
            kind: QpKind::Rc,
            send_cq: cq,
            receive_cq: cq,
            srq: None,
            signal_all: false,
            max_send_wr: 64,
            max_receive_wr: 64,
            max_send_sge: 4,
            max_receive_sge: 4,
        };
        let sge = Sge { address: index % 8192 * 4096, length: bytes, lkey: guest.mr.lkey };
        let receive = ReceiveRequest { wr_id: 1, sges: [sge].into_iter().collect() };
        self.engine.create_qp(guest.device, init, Sends(send), Some(Receives(receive))).unwrap()
    }

    fn up(&mut self, guest: &Guest, qp: QpInfo, peer: &Guest, with: QpInfo) {
        use hca::attributes::QpAttributeMask as Mask;
        let mut attributes = World::<dma::HeapMemory>::attributes(gid(peer.number), with.qpn);
        let steps = [
            (QpState::Init, Mask::PKEY_INDEX | Mask::PORT | Mask::ACCESS_FLAGS),
            (
                QpState::ReadyToReceive,
                Mask::ADDRESS_VECTOR
                    | Mask::PATH_MTU
                    | Mask::DESTINATION_QPN
                    | Mask::RQ_PSN
                    | Mask::MAX_DEST_RD_ATOMIC
                    | Mask::MIN_RNR_TIMER,
            ),
            (
                QpState::ReadyToSend,
                Mask::SQ_PSN | Mask::TIMEOUT | Mask::RETRY_COUNT | Mask::RNR_RETRY | Mask::MAX_RD_ATOMIC,
            ),
        ];
        for (state, mask) in steps {
            attributes.state = state;
            let mask = mask | Mask::STATE;
            self.engine.modify_qp(guest.device, qp.handle, mask, &attributes, &mut self.events).unwrap();
        }
    }

    /// Nanoseconds per message of `bytes`, with `active` and `idle` queue pairs.
    fn run(messages: u64, active: u64, idle: u64, bytes: u32, write: bool) -> f64 {
        let engine = Engine::new(EngineConfig::default());
        let mut bench = Self { engine, events: Events::default(), now: 0 };
        let (a, b) = (bench.guest(1), bench.guest(2));
        for index in 0..active + idle {
            let sge = Sge { address: index % 8192 * 4096, length: bytes, lkey: a.mr.lkey };
            let request = if write {
                requests::write(1, index % 8192 * 4096, b.mr.rkey, &[sge])
            } else {
                requests::send(1, &[sge])
            };
            let left = bench.qp(&a, (index < active).then_some(request), bytes, index);
            let right = bench.qp(&b, None, bytes, index);
            bench.up(&a, left, &b, right);
            bench.up(&b, right, &a, left);
        }
        let mut best = f64::MAX;
        for _ in 0..5 {
            let start = cpu_time();
            let mut done: u64 = 0;
            while done < messages {
                bench.now += 1000;
                done += u64::from(bench.engine.poll(bench.now, &mut bench.events).requests);
                if u64::from(bytes) * done > 4 << 30 {
                    break;
                }
            }
            best = best.min((cpu_time() - start) / done as f64);
        }
        best
    }
}

/// CPU time of this thread, nanoseconds: other processes don't count. A system call, since valgrind hides the vDSO's clock.
fn cpu_time() -> f64 {
    let times = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    times.split(' ').next().unwrap().parse().unwrap()
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let messages = arguments.next().map_or(1_000_000, |count| count.parse().unwrap());
    let only: Option<usize> = arguments.next().map(|case| case.parse().unwrap());
    let cases = [
        ("send 8 B, 1 queue pair", 1, 0, 8, false),
        ("write 8 B, 1 queue pair", 1, 0, 8, true),
        ("send 8 B, 4096 queue pairs", 4096, 0, 8, false),
        ("send 8 B, 1 active and 30000 idle", 1, 30_000, 8, false),
        ("write 64 KiB, 1 queue pair", 1, 0, 65_536, true),
    ];
    for (case, (what, active, idle, bytes, write)) in cases.into_iter().enumerate() {
        if only.is_none_or(|only| only == case) {
            println!("{what}: {:.1} ns a message", Bench::run(messages, active, idle, bytes, write));
        }
    }
}
