//! Two VMs of one host, with pins in the directory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dma::{Dma, HeapMemory};
use hca::attributes::{Access, QpAttributeMask, QpAttributes, QpKind, QpState};
use hca::names::SegmentId;
use hca::work::{Completion, Sge, Status};
use hca_testbed::{Connected, Guest, World, requests};

use super::{ClusterKey, Directory, FileDirectory, Transports, VmId};

const SIZE: u64 = 1 << 20;

struct Host {
    world: World,
    guests: [Guest; 2],
    qps: [Connected; 2],
    keys: [u32; 2],
    lkey: u32,
    transports: Transports,
    started: Instant,
}

fn directory(pins: [&str; 2], at: u16) -> FileDirectory {
    let pin = |pin: &str| if pin.is_empty() { String::new() } else { format!("transport = \"{pin}\"\n") };
    let vm = |name: &str, id: u32, last: u32, pin: String| {
        format!(
            "[[vm]]\nname = \"{name}\"\nid = {id}\nhost = \"h1\"\n{pin}[[vm.nic]]\nsegment = \"s0\"\naddresses = [\"10.0.0.{last}\"]\n"
        )
    };
    let text = format!(
        "[[host]]\nname = \"h1\"\naddress = \"127.0.0.1:{at}\"\n{}{}",
        vm("a", 1, 1, pin(pins[0])),
        vm("b", 2, 2, pin(pins[1]))
    );
    FileDirectory::parse(&text, "pins".as_ref()).unwrap()
}

impl Host {
    fn new(pins: [&str; 2], kind: QpKind, key: Option<&ClusterKey>) -> Self {
        let at = facilities::ports::free(2);
        let directory: Arc<dyn Directory> = Arc::new(directory(pins, at));
        let mut world = World::after(0);
        let guests = [(); 2].map(|()| world.guest(HeapMemory::new(usize::try_from(SIZE).unwrap())));
        let regions =
            guests.each_ref().map(|guest| world.register(guest, 0, SIZE, Access::all() - Access::ZERO_BASED));
        let qps = guests.each_ref().map(|guest| world.queue_pair(guest, kind, None));
        let address = format!("127.0.0.1:{at}").parse().unwrap();
        let mut transports = Transports::open(directory, address, key).unwrap();
        for (guest, vm) in guests.iter().zip(["a", "b"]) {
            transports.attach(&mut world.engine, guest.device, vm, "s0", SegmentId(1));
        }
        for (own, peer) in [(0, 1), (1, 0)] {
            let peer = World::<HeapMemory>::attributes(guests[peer].gid, qps[peer].qp.qpn);
            let peer = QpAttributes { timeout: 14, retry_count: 7, ..peer };
            world.raise(qps[own].device, qps[own].qp.handle, kind, QpState::ReadyToSend, &peer);
        }
        let keys = regions.each_ref().map(|region| region.rkey);
        let lkey = regions[0].lkey;
        Self { world, guests, qps, keys, lkey, transports, started: Instant::now() }
    }

    fn round(&mut self) {
        let now = u64::try_from(self.started.elapsed().as_nanos()).unwrap();
        self.world.now = self.world.now.max(now);
        self.transports.receive(&mut self.world.engine, now);
        self.world.poll();
        self.transports.carry(&mut self.world.engine, now);
    }

    fn until<T>(&mut self, mut done: impl FnMut(&mut Self) -> Option<T>) -> T {
        loop {
            assert!(self.started.elapsed() < Duration::from_secs(60), "nothing came");
            self.round();
            if let Some(done) = done(self) {
                return done;
            }
        }
    }

    /// Writes from a's RAM to b's, and returns the completion.
    fn write(&mut self) -> Completion {
        self.guests[0].memory.write(0, &[0x3C; 5000]).unwrap();
        let source = Sge { address: 0, length: 5000, lkey: self.lkey };
        let at = self.qps[0].clone();
        self.world.send(&at, requests::write(1, 0x1_0000, self.keys[1], &[source]));
        self.until(|host| host.qps[0].completions.poll())
    }

    fn written(&self) -> bool {
        let mut bytes = vec![0; 5000];
        self.guests[1].memory.read(0x1_0000, &mut bytes).unwrap();
        bytes == [0x3C; 5000]
    }
}

#[test]
fn two_vms_of_one_host_use_the_fabric_when_one_is_pinned_to_it() {
    let key =
        ClusterKey::parse(&[b'1', b'e'].repeat(31).into_iter().chain(*b"00").collect::<Vec<_>>()).unwrap();
    for (pins, key) in [(["fabric", ""], None), (["", "fabric"], None), (["fabric", "fabric"], Some(&key))] {
        let mut host = Host::new(pins, QpKind::Rc, key);
        let device = host.guests[0].device;
        assert_eq!(host.transports.reaches(device, host.guests[1].gid), Some("fabric"));
        assert!(!host.world.engine.is_beside(device, SegmentId(1), host.guests[1].gid));
        assert!(host.world.engine.is_beside(device, SegmentId(1), host.guests[0].gid), "it reaches itself");
        assert_eq!(host.write().status, Status::Success, "{pins:?}");
        assert!(host.written());
        let report = host.transports.report(device, host.qps[0].qp.qpn).unwrap();
        assert_eq!(report.transport, "fabric");
        assert!(
            report.counters.unwrap().sent_packets >= 4 && host.transports.counters().packets_received >= 5
        );
        // A removed connection's counters stay.
        let before = host.transports.device_counters(device).unwrap();
        let nothing = World::<HeapMemory>::attributes(host.guests[1].gid, host.qps[1].qp.qpn);
        let at = host.qps[0].qp.handle;
        let nothing = QpAttributes { state: QpState::Reset, ..nothing };
        host.world.modify(device, at, QpAttributeMask::empty(), &nothing).unwrap();
        host.started = Instant::now() - Duration::from_secs(5);
        host.until(|host| host.transports.report(device, host.qps[0].qp.qpn).is_none().then_some(()));
        let after = host.transports.device_counters(device).unwrap();
        assert!(before.sent_packets >= 4 && after.sent_packets >= before.sent_packets, "{after:?}");
    }
}

#[test]
fn datagrams_follow_the_pin() {
    for (pins, carried) in [(["fabric", ""], true), (["verbs", ""], true), (["", ""], false)] {
        let mut host = Host::new(pins, QpKind::Ud, None);
        let at = host.qps[1].clone();
        let buffer = Sge { address: 0x2000, length: 1000, lkey: host.keys[1] };
        host.world.receive(&at, 9, &[buffer]);
        let source = Sge { address: 0, length: 100, lkey: host.lkey };
        let (gid, qpn, pd) = (host.guests[1].gid, host.qps[1].qp.qpn, host.guests[0].pd.0);
        let from = host.qps[0].clone();
        host.world.send(&from, requests::datagram(2, pd, gid, qpn, 0x1234, &[source]));
        let done = host.until(|host| host.qps[1].completions.poll());
        assert_eq!((done.wr_id, done.byte_len), (9, 140));
        assert_eq!(host.transports.counters().packets_sent > 0, carried);
    }
}

#[test]
fn without_a_pin_and_with_local_nothing_leaves_the_host() {
    for pins in [["", ""], ["local", ""], ["local", "local"]] {
        let mut host = Host::new(pins, QpKind::Rc, None);
        assert_eq!(host.write().status, Status::Success);
        assert!(host.written() && host.transports.counters().packets_sent == 0);
    }
}

#[test]
fn a_pin_that_cannot_be_met_refuses_and_takes_no_other_way() {
    for pins in [["wire", ""], ["", "verbs"], ["local", "fabric"], ["fabric", "wire"]] {
        let mut host = Host::new(pins, QpKind::Rc, None);
        assert_eq!(host.write().status, Status::LocalQpOperation, "{pins:?}");
        assert_eq!(host.transports.reaches(host.guests[0].device, host.guests[1].gid), Some("refused"));
        assert_eq!(host.world.state(&host.qps[0]), QpState::Error);
        assert!(!host.written() && host.transports.counters().packets_sent == 0);
    }
}

#[test]
fn a_pin_holds_for_packets_that_come_as_well() {
    let mut host = Host::new(["wire", ""], QpKind::Rc, None);
    // A packet of a daemon that doesn't know the pin.
    let kind = super::Kind::Connected;
    let segment = super::header::tag("s0");
    let header = super::Header { kind, source: VmId(2), destination: VmId(1), segment };
    let mut packet = header.encode(super::header::PLAIN).to_vec();
    packet.extend([0x0A; 40]);
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.send_to(&packet, host.transports.directory.hosts()[0]).unwrap();
    host.until(|host| (host.transports.counters().dropped_pinned == 1).then_some(()));
}
