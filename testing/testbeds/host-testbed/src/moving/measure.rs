//! Cost of a migration for the HCA: its share of the blackout, its state, and redirecting connected queue pairs. Three engines in this
//! process have transports on sockets of the loopback interface. The state is that of real queue pairs, some with requests in flight. These
//! complete at the destination afterwards, which verifies the measured state.

mod migration;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use dma::MappedMemory;
use hca::names::{DeviceId, Gid};
use host::migration::{Parts, Source};
use host::transport::Transports;
use nomad::{HostId, VmId};
use pvrdma_testbed::guest::QpOptions;
use pvrdma_testbed::queues::{Post, sge};
use pvrdma_testbed::{Cq, Guest, Host, Qp, Region};

use super::{ALL, LiveDirectory, SEGMENT, SEGMENT_NAME, config, gid, memory};

pub use self::migration::{Sample, blackout};

const MOVER: VmId = VmId(1);
const PEER: VmId = VmId(2);
/// Two VMs on the mover's host that are connected with neither.
const BESIDE: [VmId; 2] = [VmId(3), VmId(4)];
/// Limit of an active queue pair's buffer, bytes.
const BUFFER: u64 = 1 << 20;

struct Engine {
    host: Host<MappedMemory>,
    transports: Transports,
    directory: Arc<LiveDirectory>,
}

impl Engine {
    fn new(hosts: &[SocketAddr], own: usize) -> Self {
        let places = Mutex::new(HashMap::new());
        let directory = Arc::new(LiveDirectory { hosts: hosts.to_vec(), places, pin: None });
        directory.set(MOVER, HostId(1));
        directory.set(PEER, HostId(2));
        BESIDE.into_iter().for_each(|vm| directory.set(vm, HostId(1)));
        let transports = Transports::open(Arc::clone(&directory) as _, hosts[own], None).unwrap();
        Self { host: Host::default(), transports, directory }
    }

    fn parts(&mut self) -> Parts<'_, MappedMemory> {
        let Host { engine, devices, now, .. } = &mut self.host;
        Parts { engine, devices, transports: &mut self.transports, now: *now }
    }

    fn turn<'a>(&mut self, guests: impl IntoIterator<Item = &'a Guest<MappedMemory>>, now: u64) {
        self.host.now = now;
        self.transports.receive(&mut self.host.engine, now);
        self.host.turn(guests.into_iter().map(|guest| (guest.id, &guest.uar)));
        self.host.now = now;
        self.transports.carry(&mut self.host.engine, now);
    }
}

struct Side {
    guest: Guest<MappedMemory>,
    context: (u32, u32),
    pd: u32,
    cq: Cq,
    qps: Vec<(Qp, Region)>,
}

fn side(engine: &mut Engine, vm: VmId, active: u32, buffer: u64) -> Side {
    let size = (u64::from(active) * (buffer + (64 << 10)) + (16 << 20)).next_multiple_of(1 << 20);
    let mut config = config(vm);
    config.capabilities.max_qp = 32_768;
    config.capabilities.max_cq = 32_768;
    let mut guest = Guest::new(&mut engine.host, config, memory(size), size);
    let name = format!("vm{}", vm.0);
    engine.transports.attach(&mut engine.host.engine, guest.id, &name, SEGMENT_NAME, SEGMENT);
    guest.probe(&mut engine.host);
    guest.bind(&mut engine.host, 0, gid(vm)).unwrap();
    let context = guest.context(&mut engine.host);
    let pd = guest.pd(&mut engine.host, context.1);
    let cq = guest.cq(&mut engine.host, context, 16_384);
    let mut qps = Vec::new();
    for number in 0..active {
        let options = QpOptions { max_send_wr: 64, max_receive_wr: 1, ..QpOptions::default() };
        let qp = guest.qp(&mut engine.host, context.0, pd, (&cq, &cq), None, options).unwrap();
        guest.to_init(&mut engine.host, &qp, ALL).unwrap();
        let address = (u64::from(number) + 1) << 24;
        let region = guest.register(&mut engine.host, pd, address, buffer, ALL);
        qps.push((qp, region));
    }
    Side { guest, context, pd, cq, qps }
}

/// Connects the queue pairs of two sides, one by one.
fn connect(engines: &mut [Engine], left: &mut Side, right: &mut Side) {
    for at in 0..left.qps.len() {
        let (here, there) = (left.qps[at].0.clone(), right.qps[at].0.clone());
        left.guest.connect(&mut engines[0].host, &here, there.qpn, gid(PEER)).unwrap();
        right.guest.connect(&mut engines[1].host, &there, here.qpn, gid(MOVER)).unwrap();
    }
}

/// Queue pairs in RTS and idle, each with a completion queue and a region of its own, on shared pages: the HCA's cost is the same, and a
/// test needs little memory.
fn idle(engine: &mut Engine, side: &mut Side, count: u32) {
    let begin = side.guest.used();
    for number in 0..count {
        side.guest.start_at(begin);
        let cq = side.guest.cq(&mut engine.host, side.context, 64);
        let qp = side
            .guest
            .qp(&mut engine.host, side.context.0, side.pd, (&cq, &cq), None, QpOptions::default())
            .unwrap();
        side.guest.to_init(&mut engine.host, &qp, ALL).unwrap();
        side.guest.connect(&mut engine.host, &qp, 0x1_0000 + number, gid(PEER)).unwrap();
        side.guest.register(&mut engine.host, side.pd, 0x100_0000_0000, 4096, ALL);
    }
}

fn engines(hosts: usize) -> Vec<Engine> {
    let port = facilities::ports::free(1);
    let addresses: Vec<SocketAddr> =
        (1..=hosts).map(|host| format!("127.0.0.{host}:{port}").parse().unwrap()).collect();
    (0..hosts).map(|own| Engine::new(&addresses, own)).collect()
}

fn write(side: &Side, at: usize, remote: &Region, wr_id: u64, length: u32) -> Post {
    let local = [sge(&side.qps[at].1, 0, length)];
    Post::remote(wr_id, pvrdma::abi::work::opcode::WRITE, remote.address, remote.rkey, &local)
}

fn nanoseconds(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_nanos()).unwrap()
}

/// Resumes a device's queue pairs towards a VM, at another host.
fn redirect(engine: &mut Engine, device: DeviceId, peer: VmId, to: HostId, now: u64) {
    engine.directory.set(peer, to);
    engine.host.engine.moved_away(SEGMENT, Gid(gid(peer)));
    engine.host.engine.open(device, Gid(gid(peer)));
    engine.transports.go_on(&mut engine.host.engine, device, host::transport::VmId(peer.0), now);
}

/// Suspends and redirects `count` connected queue pairs: nanoseconds each.
pub fn redirected(count: u32) -> (u64, u64) {
    let mut engines = engines(3);
    let mut left = side(&mut engines[0], MOVER, count, 4096);
    let mut right = side(&mut engines[1], PEER, count, 4096);
    connect(&mut engines, &mut left, &mut right);
    let clock = Instant::now();
    let now = || 2_000_000_000 + nanoseconds(clock);
    let mut done = 0;
    for at in 0..left.qps.len() {
        left.guest.post_send(&left.qps[at].0, &write(&left, at, &right.qps[at].1, 0, 64));
        while at as u64 >= done + 1000 || (at + 1 == left.qps.len() && done < u64::from(count)) {
            engines[0].turn(Some(&left.guest), now());
            engines[1].turn(Some(&right.guest), now());
            while let Some(entry) = left.guest.take(&left.cq) {
                assert_eq!(entry.status.get(), 0, "a request failed");
                done += 1;
            }
        }
    }
    let peer = right.guest.id;
    let began = Instant::now();
    engines[1].host.engine.hold(peer, Gid(gid(MOVER)));
    engines[1].transports.hold(peer, host::transport::VmId(MOVER.0), now());
    let held = nanoseconds(began);
    let began = Instant::now();
    redirect(&mut engines[1], peer, MOVER, HostId(3), now());
    (held, nanoseconds(began))
}

/// Latencies of a queue pair on the mover's host that isn't part of the migration, nanoseconds each, sorted.
#[derive(Debug, Clone, Default)]
pub struct Beside {
    /// Without a migration.
    pub alone: Vec<u64>,
    /// During a migration: from the first round to the removal of the device, and until the time is over.
    pub during: Vec<u64>,
    /// Objects of the mover that were saved meanwhile.
    pub objects: u64,
}

/// Number of objects saved between two turns of the engine, as in the daemon.
const PART: usize = 256;

/// WRITEs of 64 bytes between two VMs of one host, one after the other, twice for the time `each`. First a third VM with `qps` queue pairs,
/// as many regions and completion queues stays there, then it leaves. Its memory isn't copied, since its monitor does that in a process of
/// its own.
pub fn beside(qps: u32, active: u32, each: std::time::Duration) -> Beside {
    let mut engines = engines(3);
    let mut left = side(&mut engines[0], MOVER, active, 4096);
    let mut right = side(&mut engines[1], PEER, active, 4096);
    connect(&mut engines, &mut left, &mut right);
    idle(&mut engines[0], &mut left, qps.saturating_sub(active));
    let [one, other] = BESIDE.map(|vm| side(&mut engines[0], vm, 1, 4096));
    let (mut one, mut other) = (one, other);
    let (here, there) = (one.qps[0].0.clone(), other.qps[0].0.clone());
    one.guest.connect(&mut engines[0].host, &here, there.qpn, gid(BESIDE[1])).unwrap();
    other.guest.connect(&mut engines[0].host, &there, here.qpn, gid(BESIDE[0])).unwrap();
    let clock = Instant::now();
    let now = || 2_000_000_000 + nanoseconds(clock);
    let mut number = 0;
    let mut write_one = |engines: &mut [Engine], mover: Option<&Guest<MappedMemory>>| {
        let began = Instant::now();
        one.guest.post_send(&here, &write(&one, 0, &other.qps[0].1, number, 64));
        number += 1;
        loop {
            engines[0].turn([&one.guest, &other.guest].into_iter().chain(mover), now());
            if let Some(entry) = one.guest.take(&one.cq) {
                assert_eq!(entry.status.get(), 0, "a request beside a migration failed");
                return nanoseconds(began);
            }
        }
    };
    let mut beside = Beside::default();
    // New queue pairs are polled for a while.
    for _ in 0..100_000 {
        write_one(&mut engines, Some(&left.guest));
    }
    let began = Instant::now();
    while began.elapsed() < each {
        beside.alone.push(write_one(&mut engines, Some(&left.guest)));
    }
    // The VM leaves: the thread's work for that runs between two requests, or delays one.
    let began = Instant::now();
    let device = left.guest.id;
    let mut part = |engines: &mut [Engine], works: bool, work: &mut dyn FnMut(&mut Engine)| {
        let began = Instant::now();
        work(&mut engines[0]);
        let work = nanoseconds(began);
        beside.during.push(work + write_one(engines, works.then_some(&left.guest)));
    };
    let mut source = None;
    part(&mut engines, true, &mut |engine| source = Some(Source::begin(&mut engine.parts(), device)));
    let mut source = source.unwrap();
    loop {
        let left_over = source.left(&engines[0].host.engine);
        if left_over == 0 {
            break;
        }
        part(&mut engines, true, &mut |engine| {
            source.part(PART, &mut engine.parts(), |_| beside.objects += 1);
        });
    }
    let lines = engines[0].host.lines.remove(&device).unwrap();
    part(&mut engines, false, &mut |engine| {
        source.stop(&mut engine.parts(), &left.guest.uar, &lines).unwrap();
        source.round(&mut engine.parts(), |_| ());
    });
    let mut source = Some(source);
    part(&mut engines, false, &mut |engine| source.take().unwrap().leave(&mut engine.parts()));
    while began.elapsed() < each {
        beside.during.push(write_one(&mut engines, None));
    }
    beside.alone.sort_unstable();
    beside.during.sort_unstable();
    beside
}
