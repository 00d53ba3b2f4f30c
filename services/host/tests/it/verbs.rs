//! Two hosts whose guests are pinned to the hosts' devices, which are in memory and assign numbers of their own. The daemons' messages use
//! UDP on the loopback interface.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dma::{Dma, MappedMemory, MemoryRegion};
use hca::MrInit;
use hca::attributes::{Access, QpAttributeMask, QpAttributes, QpKind, QpState};
use hca::names::SegmentId;
use hca::work::{Completion, Sge, Status};
use hca_testbed::{CompletionRing, Connected, Guest, World, requests};
use host::transport::{Directory, Transports, VmId};
use host_testbed::rnic::Network;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

mod directory;
mod shared;

use directory::TwoHosts;

/// Size of a guest's RAM, bytes.
const SIZE: u64 = 2 << 20;
/// First address of its region: a program's, unlike those of its RAM.
const START: u64 = 0x7F00_0000_0123;
/// Length of the region, bytes.
const LENGTH: u64 = 1 << 20;

fn ram() -> MappedMemory {
    let fd = memfd_create("ram", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, SIZE).unwrap();
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    MappedMemory::default().with(MemoryRegion::map(0, SIZE, &fd, 0, true).unwrap()).unwrap()
}

struct Side {
    world: World<MappedMemory>,
    guest: Guest<MappedMemory>,
    qp: Connected,
    mr: hca::MrInfo,
    srq: Option<hca::names::SrqHandle>,
    transports: Transports,
    started: Instant,
    now: u64,
}

/// Parameters that differ between the two hosts, and between tests.
#[derive(Clone, Copy)]
struct Setup {
    pin: &'static str,
    /// Whether a host has a device.
    devices: [bool; 2],
    /// Whether a guest's queue pair is its kernel's.
    kernel: [bool; 2],
    /// Whether it has a shared receive queue.
    shared: [bool; 2],
    /// Whether that queue is in another protection domain.
    apart: bool,
    rnr_retry: u8,
    access: Access,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            pin: "verbs",
            devices: [true; 2],
            kernel: [false; 2],
            shared: [false; 2],
            apart: false,
            rnr_retry: 7,
            access: Access::all() - Access::ZERO_BASED,
        }
    }
}

/// Guest pages of the region, in an order without adjacent pages.
fn pages() -> Vec<u64> {
    let count = (START % 4096 + LENGTH).div_ceil(4096);
    (0..count).map(|page| ((page * 97) % 509) * 4096).collect()
}

impl Side {
    fn new(which: usize, setup: Setup, directory: Arc<dyn Directory>, at: &str, network: &Network) -> Self {
        let mut world = World::after(if which == 0 { 0 } else { 7 });
        let mut guest = world.guest(ram());
        let context = if setup.kernel[which] {
            hca::names::ContextHandle(0)
        } else {
            world.engine.create_context(guest.device).unwrap()
        };
        guest.pd = world.engine.create_pd(guest.device, context).unwrap();
        let init =
            MrInit { start: START, length: LENGTH, access: setup.access.bits(), pages: pages().into() };
        let mr = world.engine.register_mr(guest.device, guest.pd, init).unwrap();
        let srq = setup.shared[which].then(|| {
            // A domain of its own, if configured.
            let pd =
                if setup.apart { world.engine.create_pd(guest.device, context).unwrap() } else { guest.pd };
            let pd = std::mem::replace(&mut guest.pd, pd);
            let shared = world.shared_queue(&guest, 0);
            guest.pd = pd;
            shared
        });
        let completions = CompletionRing::new(4096);
        let cq = world.engine.create_cq(guest.device, context, 4096, completions.clone()).unwrap();
        let mut qp =
            world.queue_pair_on(&guest, QpKind::Rc, srq.as_ref().map(|(srq, _)| *srq), cq, completions);
        if let Some((_, ring)) = &srq {
            qp.receives = ring.clone();
        }
        let srq = srq.map(|(srq, _)| srq);
        let mut transports = Transports::open(directory, at.parse().unwrap(), None).unwrap();
        if setup.devices[which] {
            // Numbers that differ from the guest's, and from the other host's.
            let device = network.device([0x1_1111, 0x7_7777][which]);
            transports.use_rnic(Box::new(device));
        }
        transports.attach(&mut world.engine, guest.device, ["a", "b"][which], "s0", SegmentId(1));
        Self { world, guest, qp, mr, srq, transports, started: Instant::now(), now: 0 }
    }

    fn round(&mut self) {
        let real = u64::try_from(self.started.elapsed().as_nanos()).unwrap();
        self.now = self.now.max(real);
        self.world.now = self.world.now.max(self.now);
        self.transports.receive(&mut self.world.engine, self.now);
        self.world.poll();
        self.transports.carry(&mut self.world.engine, self.now);
    }

    fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge { address: START + offset, length, lkey: self.mr.lkey }
    }

    /// Guest address of a byte of the region.
    fn at(offset: u64) -> u64 {
        let place = START % 4096 + offset;
        pages()[usize::try_from(place / 4096).unwrap()] + place % 4096
    }

    fn fill(&self, offset: u64, bytes: &[u8]) {
        for (offset, byte) in (offset..).zip(bytes) {
            self.guest.memory.write(Self::at(offset), &[*byte]).unwrap();
        }
    }

    fn bytes(&self, offset: u64, len: u64) -> Vec<u8> {
        (offset..offset + len)
            .map(|offset| {
                let mut byte = [0];
                self.guest.memory.read(Self::at(offset), &mut byte).unwrap();
                byte[0]
            })
            .collect()
    }

    fn transport(&self) -> (&'static str, Option<String>) {
        let report = self.transports.report(self.qp.device, self.qp.qp.qpn).unwrap();
        (report.transport, report.instead_of_verbs)
    }

    fn deregister(&mut self) {
        self.world.engine.deregister_mr(self.guest.device, self.mr.handle).unwrap();
        self.transports.settle(&mut self.world.engine, self.now);
    }
}

struct Pair {
    sides: [Side; 2],
    network: Network,
    directory: Arc<TwoHosts>,
}

impl Pair {
    fn new(setup: Setup) -> Self {
        let at = facilities::ports::free(2);
        let pin =
            if setup.pin.is_empty() { String::new() } else { format!("transport = \"{}\"\n", setup.pin) };
        let text = format!(
            "[[host]]\nname = \"h1\"\naddress = \"127.0.0.1:{at}\"\n[[host]]\nname = \"h2\"\naddress = \"127.0.0.2:{at}\"\n\
             [[vm]]\nname = \"a\"\nid = 1\nhost = \"h1\"\n{pin}[[vm.nic]]\nsegment = \"s0\"\naddresses = [\"10.0.0.1\"]\n\
             [[vm]]\nname = \"b\"\nid = 2\nhost = \"h2\"\n{pin}[[vm.nic]]\nsegment = \"s0\"\naddresses = [\"10.0.0.8\"]\n"
        );
        let directory = Arc::new(TwoHosts::parse(&text));
        let network = Network::default();
        let side = |which: usize| {
            let at = format!("127.0.0.{}:{at}", which + 1);
            Side::new(which, setup, Arc::clone(&directory) as _, &at, &network)
        };
        let mut pair = Self { sides: [side(0), side(1)], network, directory };
        pair.connect(setup);
        pair
    }

    fn connect(&mut self, setup: Setup) {
        let ends = self.sides.each_ref().map(|side| (side.guest.gid, side.qp.qp.qpn));
        for (side, (gid, qpn)) in self.sides.iter_mut().zip([ends[1], ends[0]]) {
            let mut with = World::<MappedMemory>::attributes(gid, qpn);
            (with.timeout, with.retry_count, with.rnr_retry) = (14, 7, setup.rnr_retry);
            side.world.raise(side.qp.device, side.qp.qp.handle, QpKind::Rc, QpState::ReadyToSend, &with);
        }
    }

    fn until<T>(&mut self, mut done: impl FnMut(&mut [Side; 2]) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            assert!(start.elapsed() < Duration::from_secs(60), "nothing came");
            for side in &mut self.sides {
                side.round();
            }
            if let Some(done) = done(&mut self.sides) {
                return done;
            }
        }
    }

    fn completion(&mut self, which: usize) -> Completion {
        self.until(|sides| sides[which].qp.completions.poll())
    }

    fn send(&mut self, which: usize, request: hca::work::SendRequest) {
        let at = self.sides[which].qp.clone();
        self.sides[which].world.send(&at, request);
    }

    fn receive(&mut self, which: usize, wr_id: u64, sge: Sge) {
        let side = &mut self.sides[which];
        let at = side.qp.clone();
        match side.srq {
            None => side.world.receive(&at, wr_id, &[sge]),
            Some(srq) => {
                at.receives.post(hca::work::ReceiveRequest { wr_id, sges: [sge].into_iter().collect() });
                side.world.engine.doorbell_srq(at.device, srq);
            }
        }
    }
}

/// Every operation moves the right bytes between scattered pages, in either direction, although the guests' numbers differ from the
/// devices'.
#[test]
fn all_operations_reach_a_guest_of_another_host() {
    let mut pair = Pair::new(Setup::default());
    let data: Vec<u8> = (0..200_003u32).map(|at| at.wrapping_mul(0x9E37_79B9).to_le_bytes()[3]).collect();
    let length = 200_003;
    for (from, to) in [(0, 1), (1, 0)] {
        pair.sides[from].fill(1, &data);
        let rkey = pair.sides[to].mr.rkey;
        let sge = pair.sides[from].sge(1, length);
        pair.send(from, requests::write(1, START + 300_000, rkey, &[sge]));
        assert_eq!(pair.completion(from).status, Status::Success);
        assert!(pair.sides[to].bytes(300_000, u64::from(length)) == data, "WRITE");

        let sge = pair.sides[from].sge(600_000, length);
        pair.send(from, requests::read(2, START + 300_000, rkey, &[sge]));
        let done = pair.completion(from);
        assert_eq!((done.status, done.byte_len), (Status::Success, length));
        assert!(pair.sides[from].bytes(600_000, u64::from(length)) == data, "READ");

        let buffer = pair.sides[to].sge(800_000, length + 9);
        pair.receive(to, 3, buffer);
        let sges = [pair.sides[from].sge(1, 100_000), pair.sides[from].sge(100_001, length - 100_000)];
        pair.send(from, requests::send(4, &sges));
        assert_eq!(pair.completion(from).status, Status::Success);
        assert!(pair.sides[to].bytes(800_000, u64::from(length)) == data, "SEND");
        let done = pair.completion(to);
        assert_eq!((done.wr_id, done.byte_len, done.status), (3, length, Status::Success));

        // Aligned to 8 in the region's addresses.
        let word = 0xDD;
        pair.sides[to].fill(word, &40u64.to_le_bytes());
        for wr_id in 10..20 {
            let sge = pair.sides[from].sge(900_005, 8);
            pair.send(from, requests::fetch_add(wr_id, START + word, rkey, 2, &[sge]));
        }
        for wr_id in 10..20 {
            let done = pair.completion(from);
            assert_eq!((done.wr_id, done.status, done.byte_len), (wr_id, Status::Success, 8));
        }
        assert_eq!(pair.sides[to].bytes(word, 8), 60u64.to_le_bytes());
        assert_eq!(pair.sides[from].bytes(900_005, 8), 58u64.to_le_bytes(), "the last one's value before");
    }
    for side in &pair.sides {
        assert_eq!(side.transport(), ("verbs", None));
        let link = side.transports.report(side.qp.device, side.qp.qp.qpn).unwrap().verbs.unwrap();
        assert_ne!(Some(link.number), Some(side.qp.qp.qpn.0));
        assert_eq!((link.state, link.peer_keys, link.counters.keys_asked), ("sends", 1, 1));
        assert_eq!(link.counters.requests, 13);
    }
    for device in 0..2 {
        let mr = pair.sides[device].mr;
        assert!(!pair.network.keys(device).contains(&mr.rkey), "numbers differ");
    }
}

/// More receives and requests than the device has room for: each completes once, in order.
#[test]
fn many_requests_under_way_complete_in_order() {
    let mut pair = Pair::new(Setup::default());
    for wr_id in 0..60 {
        let sge = pair.sides[1].sge(wr_id * 1000, 1000);
        pair.receive(1, wr_id, sge);
    }
    for wr_id in 0..60u64 {
        pair.sides[0].fill(wr_id * 1000, &[u8::try_from(wr_id).unwrap(); 1000]);
        let sge = pair.sides[0].sge(wr_id * 1000, 1000);
        pair.send(0, requests::send(wr_id, &[sge]));
    }
    for which in [0, 1] {
        for wr_id in 0..60 {
            let done = pair.completion(which);
            assert_eq!((done.wr_id, done.status), (wr_id, Status::Success), "side {which}");
        }
    }
    for wr_id in 0..60u64 {
        assert!(pair.sides[1].bytes(wr_id * 1000, 1000).iter().all(|byte| u64::from(*byte) == wr_id));
    }
}

/// A receive that is posted after the message was sent is found without another doorbell of the sender.
#[test]
fn a_sender_waits_for_a_receive() {
    let mut pair = Pair::new(Setup::default());
    let sge = pair.sides[0].sge(0, 100);
    pair.send(0, requests::send(1, &[sge]));
    let start = Instant::now();
    pair.until(|sides| {
        assert!(sides[0].qp.completions.poll().is_none());
        (start.elapsed() > Duration::from_millis(100)).then_some(())
    });
    let buffer = pair.sides[1].sge(0, 100);
    pair.receive(1, 2, buffer);
    assert_eq!(pair.completion(0).status, Status::Success);
    assert_eq!(pair.completion(1).wr_id, 2);
}

/// A wrong key, one without the right, and a range beyond the region fail the request and both ends; later requests are flushed.
#[test]
fn refused_requests_fail_both_ends() {
    let read_only = Access::LOCAL_WRITE | Access::REMOTE_READ;
    for (access, wrong_key, address) in [
        (Setup::default().access, 1, START),
        (read_only, 0, START),
        (Setup::default().access, 0, START + LENGTH - 10),
        (Setup::default().access, 0, START - 1),
    ] {
        let mut pair = Pair::new(Setup { access, ..Setup::default() });
        let sge = pair.sides[0].sge(0, 5000);
        let rkey = pair.sides[1].mr.rkey ^ wrong_key;
        let before = pair.sides[1].bytes(0, 100);
        pair.send(0, requests::write(1, address, rkey, &[sge]));
        let sge = pair.sides[0].sge(0, 8);
        pair.send(0, requests::send(2, &[sge]));
        assert_eq!(pair.completion(0).status, Status::RemoteAccess);
        assert_eq!(pair.completion(0).status, Status::Flushed);
        pair.until(|sides| {
            let states = sides.each_ref().map(|side| side.world.state(&side.qp));
            (states == [QpState::Error; 2]).then_some(())
        });
        assert_eq!(pair.sides[1].bytes(0, 100), before, "nothing was written");
        pair.until(|_| Some(()));
        assert_eq!(
            pair.network.objects(0).2 + pair.network.objects(1).2,
            0,
            "no queue pair is left at a device"
        );
    }
}

/// A region that its guest has deregistered can't be accessed when the command completes. Its key, registered again, refers to the new
/// region.
#[test]
fn a_deregistered_region_is_gone_at_once() {
    let mut pair = Pair::new(Setup::default());
    let rkey = pair.sides[1].mr.rkey;
    let sge = pair.sides[0].sge(0, 64);
    pair.send(0, requests::write(1, START, rkey, &[sge]));
    assert_eq!(pair.completion(0).status, Status::Success);
    assert_eq!(pair.network.objects(1).1, 1);
    pair.sides[1].deregister();
    assert_eq!(pair.network.objects(1).1, 0, "the device has let go of it");
    // The peer is notified.
    pair.until(|sides| {
        let report = sides[0].transports.report(sides[0].qp.device, sides[0].qp.qp.qpn)?;
        (report.verbs?.counters.keys_invalidated > 0).then_some(())
    });
    pair.send(0, requests::write(2, START, rkey, &[sge]));
    assert_eq!(pair.completion(0).status, Status::RemoteAccess);
}

/// Connections that a device can't carry use fabric, entirely, and the report has the reason; whichever end begins.
#[test]
fn what_no_device_can_carry_goes_by_fabric_and_says_so() {
    for (which, from) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        for shared in [false, true] {
            let mut setup = Setup { apart: shared, ..Setup::default() };
            if shared {
                setup.shared[which] = true;
            } else {
                setup.kernel[which] = true;
            }
            let mut pair = Pair::new(setup);
            let to = 1 - from;
            // The guest's region isn't in the other domain: only messages without bytes can arrive there.
            let length = if shared { 0 } else { 100 };
            let buffer = pair.sides[to].sge(0, length);
            pair.receive(to, 7, buffer);
            let sge = pair.sides[from].sge(0, length);
            pair.send(from, requests::send(1, &[sge]));
            assert_eq!(pair.completion(from).status, Status::Success, "{which} {from} {shared}");
            assert_eq!(pair.completion(to).wr_id, 7);
            let (transport, why) = pair.sides[from].transport();
            assert_eq!(transport, "fabric");
            let why = why.unwrap();
            assert!(why.contains(if shared { "protection domain" } else { "kernel's" }), "{why}");
            assert_eq!(pair.network.objects(0).2 + pair.network.objects(1).2, 0);
        }
    }
}

/// If one host has no device, connections pinned to it are refused and use no other transport.
#[test]
fn without_a_device_a_pinned_connection_is_refused() {
    for devices in [[true, false], [false, true], [false, false]] {
        let mut pair = Pair::new(Setup { devices, ..Setup::default() });
        let sge = pair.sides[0].sge(0, 64);
        let rkey = pair.sides[1].mr.rkey;
        pair.send(0, requests::write(1, START, rkey, &[sge]));
        assert_eq!(pair.completion(0).status, Status::LocalQpOperation, "{devices:?}");
        let reached = pair.sides[0].transports.reaches(pair.sides[0].qp.device, pair.sides[1].guest.gid);
        assert_eq!(reached, Some(if devices[0] { "verbs" } else { "refused" }));
    }
}

/// Without the pin, devices have no effect.
#[test]
fn connections_that_are_not_pinned_use_the_fabric() {
    let mut pair = Pair::new(Setup { pin: "", ..Setup::default() });
    let sge = pair.sides[0].sge(0, 64);
    let rkey = pair.sides[1].mr.rkey;
    pair.send(0, requests::write(1, START, rkey, &[sge]));
    assert_eq!(pair.completion(0).status, Status::Success);
    assert_eq!(pair.sides[0].transport(), ("fabric", None));
    assert_eq!(pair.network.objects(0), (0, 0, 0));
}

/// An unresponsive peer ends in retries exceeded, as on a wire.
#[test]
fn a_silent_peer_ends_in_retries_exceeded() {
    let mut pair = Pair::new(Setup::default());
    let other = pair.sides[1].qp.device;
    pair.sides[1].transports.detach(other);
    let sge = pair.sides[0].sge(0, 64);
    let rkey = pair.sides[1].mr.rkey;
    let start = Instant::now();
    pair.send(0, requests::write(1, START, rkey, &[sge]));
    assert_eq!(pair.completion(0).status, Status::RetryExceeded);
    assert!(start.elapsed() >= Duration::from_secs(2));
}

/// A daemon that didn't run for longer than its peer's timeout sent no requests in that time: it repeats its request, and the peer
/// responds.
#[test]
fn a_daemon_that_was_asleep_asks_again() {
    let mut pair = Pair::new(Setup::default());
    let sge = pair.sides[0].sge(0, 64);
    let rkey = pair.sides[1].mr.rkey;
    pair.send(0, requests::write(1, START, rkey, &[sge]));
    for _ in 0..100 {
        pair.sides[0].round();
    }
    // Its request waits at the peer, which hasn't had a turn either.
    std::thread::sleep(Duration::from_millis(2500));
    for _ in 0..100 {
        pair.sides[0].round();
    }
    assert_eq!(pair.completion(0).status, Status::Success);
}

/// A connection stays if its peer stays, or if its peer is lost. It ends, and returns its receives, if its peer is on another host.
#[test]
fn connections_end_where_their_peer_has_moved_and_only_there() {
    let mut pair = Pair::new(Setup::default());
    let (sge, target) = (pair.sides[0].sge(0, 64), pair.sides[1].sge(0, 64));
    for wr_id in 0..3 {
        pair.receive(1, 10 + wr_id, target);
    }
    pair.send(0, requests::send(1, &[sge]));
    assert_eq!((pair.completion(0).status, pair.completion(1).wr_id), (Status::Success, 10));
    let leave = |pair: &mut Pair, host: Option<SocketAddr>| {
        pair.directory.move_first(host);
        let side = &mut pair.sides[1];
        side.transports.go_on(&mut side.world.engine, side.qp.device, VmId(1), side.now);
        side.transports.verbs().connections
    };
    let own = pair.directory.host(VmId(1));
    assert_eq!(leave(&mut pair, None), 1, "the VM is lost: nothing else carries the connection");
    assert_eq!(leave(&mut pair, own), 1);
    assert!(pair.sides[1].transports.at_rest(pair.sides[1].qp.device, None).is_ok());
    assert_eq!(leave(&mut pair, Some("192.0.2.1:4792".parse().unwrap())), 0);
    assert_eq!(pair.network.objects(1).2, 0, "the device's queue pair is gone");
    // The device's unused receives are the queue pair's again, in order.
    let qp =
        pair.sides[1].world.engine.qp_by_handle(pair.sides[1].qp.device, pair.sides[1].qp.qp.handle).unwrap();
    let saved = pair.sides[1].world.engine.save_qp(qp.device, qp.handle.0).unwrap();
    assert_eq!(saved.taken.iter().map(|receive| receive.wr_id).collect::<Vec<_>>(), [11, 12]);
}

/// Queue pairs that are reset are destroyed at the devices at once, and their protection domains once no region is left. Connected again,
/// they are new connections.
#[test]
fn a_reset_queue_pair_is_another_connection() {
    let setup = Setup::default();
    let mut pair = Pair::new(setup);
    for round in 0..3 {
        let sge = pair.sides[0].sge(0, 64);
        let rkey = pair.sides[1].mr.rkey;
        pair.send(0, requests::write(round, START, rkey, &[sge]));
        assert_eq!(pair.completion(0).status, Status::Success);
        for side in &mut pair.sides {
            let nothing = World::<MappedMemory>::attributes(side.guest.gid, side.qp.qp.qpn);
            let nothing = QpAttributes { state: QpState::Reset, ..nothing };
            let (device, handle) = (side.qp.device, side.qp.qp.handle);
            side.world.modify(device, handle, QpAttributeMask::empty(), &nothing).unwrap();
            side.transports.settle(&mut side.world.engine, side.now);
        }
        assert_eq!((pair.network.objects(0).2, pair.network.objects(1).2), (0, 0));
        pair.connect(setup);
    }
    for side in &mut pair.sides {
        side.deregister();
    }
    assert_eq!((pair.network.objects(0), pair.network.objects(1)), ((0, 0, 0), (0, 0, 0)));
}

/// Removing a device removes all of its objects at the host's device.
#[test]
fn a_device_that_leaves_leaves_nothing_behind() {
    let mut pair = Pair::new(Setup::default());
    let sge = pair.sides[0].sge(0, 64);
    let rkey = pair.sides[1].mr.rkey;
    pair.send(0, requests::write(1, START, rkey, &[sge]));
    assert_eq!(pair.completion(0).status, Status::Success);
    let device = pair.sides[1].qp.device;
    let side = &mut pair.sides[1];
    side.transports.suspend(&mut side.world.engine, device);
    assert_eq!(side.world.state(&side.qp), QpState::Error);
    assert_eq!(pair.network.objects(1), (0, 0, 0));
}
