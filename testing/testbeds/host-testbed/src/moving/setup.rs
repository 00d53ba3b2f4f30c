//! Hosts, VMs and their connections at the beginning.

use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use host::transport::{TransportKind, Transports};
use nomad::coordinator::{Coordinator, Ledger};
use nomad::{Event, HostId, Incarnation, VmId};
use pvrdma_testbed::guest::QpOptions;
use pvrdma_testbed::{Guest, Host};

use super::directory::{LiveDirectory, OUTSIDE, config, gid, memory};
use super::outside::{Outside, Port, Ports};
use super::traffic::{End, REGION};
use super::{ALL, Clock, Cluster, Machine, Moves, SEGMENT, SEGMENT_NAME, Vm};
use crate::rnic::Network;

impl Cluster {
    pub(super) fn make(hosts: usize, vms: u32, seed: u64, outside: Option<Outside>, by_verbs: bool) -> Self {
        let port = facilities::ports::free(1);
        let addresses: Vec<SocketAddr> =
            (1..=hosts).map(|host| format!("127.0.0.{host}:{port}").parse().unwrap()).collect();
        let config_of_nomad = nomad::Config::default();
        let mut cluster = Self {
            machines: Vec::new(),
            vms: BTreeMap::new(),
            coordinator: Coordinator::new(config_of_nomad, Ledger::default()),
            messages: VecDeque::new(),
            answers: VecDeque::new(),
            timers: BinaryHeap::new(),
            timed: HashMap::new(),
            latest: HashMap::new(),
            next_timer: 0,
            clock: Clock::Real(Instant::now()),
            moves: Moves::default(),
            running: None,
            dice: seed | 1,
            spare: Vec::new(),
            bytes: Vec::new(),
            outside,
            held: None,
            peers: Vec::new(),
            draining: Vec::new(),
        };
        let network = Network::default();
        for (index, &address) in addresses.iter().enumerate() {
            let places = Mutex::new(HashMap::new());
            let pin = by_verbs.then_some(TransportKind::Verbs);
            let directory = Arc::new(LiveDirectory { hosts: addresses.clone(), places, pin });
            let mut transports = Transports::open(Arc::clone(&directory) as _, address, None).unwrap();
            if by_verbs {
                // Each has different numbers.
                let first = u32::try_from(index).unwrap() * 0x11_1111 + 77;
                transports.use_rnic(Box::new(network.device(first)));
            }
            let id = HostId(u32::try_from(index).unwrap() + 1);
            cluster.machines.push(Machine {
                host: Host::default(),
                transports,
                directory,
                nomad: nomad::Host::new(id, Incarnation(1), config_of_nomad),
                here: BTreeMap::new(),
                leaving: BTreeMap::new(),
                arriving: BTreeMap::new(),
                ports: Ports::new(),
            });
        }
        for index in 0..hosts {
            cluster.event(index, Event::Start);
        }
        cluster.deliver();
        for vm in (1..=vms).map(VmId) {
            cluster.start_vm(vm, (vm.0 as usize - 1) % hosts, vms);
        }
        let all: Vec<VmId> = cluster.vms.keys().copied().collect();
        for &one in &all {
            for &other in all.iter().filter(|other| **other > one) {
                cluster.connect(one, other);
            }
        }
        for vm in all {
            cluster.connect_outside(vm);
        }
        cluster
    }

    fn start_vm(&mut self, vm: VmId, on: usize, peers: u32) {
        let host = HostId(u32::try_from(on).unwrap() + 1);
        let mut actions = Vec::new();
        let epoch = self.coordinator.started(vm, host, &mut actions).unwrap();
        self.carry_out(actions);
        for machine in &self.machines {
            machine.directory.set(vm, host);
        }
        let size = (u64::from(peers + 1) * (REGION + (64 << 10)) + (512 << 10)).next_multiple_of(1 << 16);
        let machine = &mut self.machines[on];
        let mut guest = Guest::new(&mut machine.host, config(vm), memory(size), size);
        machine.transports.attach(
            &mut machine.host.engine,
            guest.id,
            &format!("vm{}", vm.0),
            SEGMENT_NAME,
            SEGMENT,
        );
        machine.here.insert(vm, guest.id);
        if self.outside.is_some() {
            let port = Port::new();
            machine.transports.attach_wire(
                &mut machine.host.engine,
                guest.id,
                SEGMENT,
                Arc::clone(&port.port),
            );
            port.connect();
            machine.ports.insert(guest.id, port);
        }
        guest.probe(&mut machine.host);
        guest.bind(&mut machine.host, 0, gid(vm)).unwrap();
        let context = guest.context(&mut machine.host);
        let pd = guest.pd(&mut machine.host, context.1);
        let cq = guest.cq(&mut machine.host, context, 1024);
        let mut ends = BTreeMap::new();
        let outside = self.outside.as_ref().map(|_| OUTSIDE);
        for peer in (1..=peers).map(VmId).filter(|peer| *peer != vm).chain(outside) {
            let qp =
                guest.qp(&mut machine.host, context.0, pd, (&cq, &cq), None, QpOptions::default()).unwrap();
            guest.to_init(&mut machine.host, &qp, ALL).unwrap();
            let address = 0x7000_0000 + u64::from(peer.0) * 0x10_0000;
            let region = guest.register(&mut machine.host, pd, address, REGION, ALL);
            ends.insert(peer, End::new(qp, region));
        }
        self.vms.insert(
            vm,
            Vm { guest, size, cq, on, running: true, stopped_at: 0, ran: (0, 0), left: None, ends },
        );
        let after = self.coordinator.last_of(vm);
        self.event(on, Event::Started { vm, epoch, after });
    }

    fn connect(&mut self, one: VmId, other: VmId) {
        for (vm, peer) in [(one, other), (other, one)] {
            let end = &self.vms[&peer].ends[&vm];
            let (peer_qpn, remote) = (end.qp.qpn, (end.region.address, end.region.rkey));
            let found = self.vms.get_mut(&vm).unwrap();
            let end = found.ends.get_mut(&peer).unwrap();
            end.remote = remote;
            let machine = &mut self.machines[found.on];
            found.guest.connect(&mut machine.host, &end.qp, peer_qpn, gid(peer)).unwrap();
        }
        let mut actions = Vec::new();
        self.coordinator.linked(one, other, true, &mut actions).unwrap();
        self.carry_out(actions);
        for (vm, peer) in [(one, other), (other, one)] {
            let owner = self.coordinator.ledger().vms[&peer];
            let place = nomad::Place { vm: peer, host: owner.host, epoch: owner.epoch };
            self.event(self.vms[&vm].on, Event::Connected { vm, peer: place });
        }
        self.deliver();
    }
}
