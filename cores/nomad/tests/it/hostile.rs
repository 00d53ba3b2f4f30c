//! Hostile messages of peers: a host and the coordinator keep their invariants.

use facilities::rng::SplitMix64;
use nomad::coordinator::{self, Coordinator, Ledger};
use nomad::{
    AbortReason, Action, Body, Config, Epoch, Event, Host, HostId, Incarnation, Message, MigrationId, Move,
    Node, Place, VmId, wire,
};

fn vm(rng: &mut SplitMix64) -> VmId {
    VmId(rng.between(1, 4))
}

fn host(rng: &mut SplitMix64) -> HostId {
    HostId(rng.between(0, 3))
}

fn place(rng: &mut SplitMix64) -> Place {
    Place { vm: vm(rng), host: host(rng), epoch: Epoch(u64::from(rng.below(4))) }
}

fn list<T>(rng: &mut SplitMix64, mut each: impl FnMut(&mut SplitMix64) -> T) -> Vec<T> {
    (0..rng.below(4)).map(|_| each(rng)).collect()
}

fn moved(rng: &mut SplitMix64) -> Move {
    let epoch = if rng.chance(50) { Epoch(u64::MAX) } else { Epoch(u64::from(rng.below(4))) };
    Move { vm: vm(rng), from: host(rng), to: host(rng), epoch }
}

/// A random message, mostly with names that are in use.
fn body(rng: &mut SplitMix64) -> Body {
    let migration = MigrationId(if rng.chance(20) { u64::MAX } else { u64::from(rng.below(5)) });
    let origin = host(rng);
    match rng.below(23) {
        0 => Body::Hello,
        1 => Body::Welcome,
        2 => Body::Reserve { migration, moves: list(rng, moved) },
        3 => Body::Reserved { migration },
        4 => Body::Begin { migration, moves: list(rng, moved) },
        5 => Body::Converged { migration },
        6 => Body::Switch { migration },
        7 => Body::Suspend { migration, origin, vms: list(rng, vm), forward_to: list(rng, host) },
        8 => Body::Suspended { migration, origin, hosts: list(rng, host) },
        9 => Body::Handover { migration, vm: vm(rng), peers: list(rng, place) },
        10 => Body::Loaded { migration },
        11 => Body::Yield { migration },
        12 => Body::Failed { migration, reason: AbortReason::Timeout },
        13 => Body::Commit { migration, places: list(rng, place) },
        14 => Body::Abort { migration, places: list(rng, place) },
        15 => Body::Settled { migration, lost: list(rng, vm) },
        16 => Body::Outcome { migration },
        17 => {
            let vms = list(rng, |rng| (vm(rng), Epoch(u64::from(rng.below(4)))));
            Body::Running { after: migration, origin, vms, forward_to: list(rng, host) }
        }
        18 => Body::Ready { after: migration, origin, hosts: list(rng, host) },
        19 => Body::Where { vm: vm(rng) },
        20 => Body::At { place: place(rng) },
        21 => Body::Queued { migration, waits_for: vm(rng) },
        _ => Body::Lost { vm: vm(rng), epoch: Epoch(u64::from(rng.below(4))) },
    }
}

fn message(rng: &mut SplitMix64, to: Node) -> Message {
    let from = if rng.chance(400) { Node::Coordinator } else { Node::Host(host(rng)) };
    let incarnation = Incarnation(u64::from(rng.between(1, 2)));
    Message { from, incarnation, to, body: body(rng) }
}

fn leaves(message: &Message) {
    let mut bytes = Vec::new();
    wire::encode(message, &mut bytes);
    assert_eq!(wire::parse(&bytes).as_ref(), Ok(message), "what leaves is a message");
}

/// A host never runs a VM that it neither had nor received, and each event makes a bounded number of actions.
#[test]
fn a_host_survives_hostile_peers() {
    let mut ran = 0;
    for seed in 0..4_000 {
        let mut rng = SplitMix64::new(seed);
        let mut here = vec![VmId(1), VmId(2)];
        let mut host = Host::new(HostId(1), Incarnation(1), Config::default());
        let mut actions = Vec::new();
        for vm in &here {
            host.step(Event::Started { vm: *vm, epoch: Epoch(1), after: MigrationId(0) }, &mut actions);
        }
        // Far enough into two migrations that messages have an effect: VM 3 has been received, VM 1 is about to move
        // away.
        let (one, two) = (MigrationId(1), MigrationId(2));
        let comes = Move { vm: VmId(3), from: HostId(2), to: HostId(1), epoch: Epoch(2) };
        let leaves_us = Move { vm: VmId(1), from: HostId(1), to: HostId(2), epoch: Epoch(2) };
        let said = |from, body| {
            let to = Node::Host(HostId(1));
            Event::Message(Message { from, incarnation: Incarnation(1), to, body })
        };
        let peers = list(&mut rng, place);
        for event in [
            said(Node::Coordinator, Body::Reserve { migration: one, moves: vec![comes] }),
            Event::Reservation { migration: one, granted: true },
            said(Node::Host(HostId(2)), Body::Handover { migration: one, vm: VmId(3), peers }),
            Event::Arrived { migration: one, vm: VmId(3) },
            said(Node::Coordinator, Body::Begin { migration: two, moves: vec![leaves_us] }),
            Event::Converged { migration: two, vm: VmId(1) },
            said(Node::Coordinator, Body::Switch { migration: two }),
        ] {
            host.step(event, &mut actions);
        }
        here.push(VmId(3));
        for _ in 0..60 {
            let migration = MigrationId(u64::from(rng.below(5)));
            let of = vm(&mut rng);
            let event = match rng.below(12) {
                0 => Event::Connected { vm: of, peer: place(&mut rng) },
                1 => Event::Reservation { migration, granted: rng.chance(800) },
                2 => Event::Converged { migration, vm: of },
                3 => Event::QpsSuspended { migration, vm: of },
                4 => Event::Stopped { migration, vm: of },
                5 => {
                    here.push(of);
                    Event::Arrived { migration, vm: of }
                }
                _ => Event::Message(message(&mut rng, Node::Host(HostId(1)))),
            };
            host.step(event, &mut actions);
            assert!(actions.len() < 200, "{} actions", actions.len());
            for action in actions.drain(..) {
                match action {
                    Action::Send(message) => leaves(&message),
                    Action::Run { vm, .. } => {
                        assert!(here.contains(&vm), "it runs {vm}, which never came");
                        ran += 1;
                    }
                    _ => {}
                }
            }
        }
    }
    assert!(ran > 50, "VMs ran {ran} times: the messages meant too little");
}

/// The coordinator's state is what its records make, whatever it receives. No host's message gives a VM two owners.
#[test]
fn the_coordinator_survives_hostile_hosts() {
    let mut begun = 0;
    for seed in 0..4_000 {
        let mut rng = SplitMix64::new(seed);
        let mut coordinator = Coordinator::new(Config::default(), Ledger::default());
        let (mut actions, mut written) = (Vec::new(), Ledger::default());
        for (vm, host) in [(1, 1), (2, 1), (3, 2)] {
            coordinator.started(VmId(vm), HostId(host), &mut actions).unwrap();
        }
        for _ in 0..60 {
            match rng.below(8) {
                0 => {
                    let wish = (vm(&mut rng), host(&mut rng));
                    begun += u32::from(coordinator.migrate(&[wish], &mut actions).is_ok());
                }
                1 => coordinator.cancel(MigrationId(u64::from(rng.below(4))), &mut actions),
                2 => {
                    let (a, b) = (vm(&mut rng), vm(&mut rng));
                    let _ = coordinator.linked(a, b, rng.chance(700), &mut actions);
                }
                _ => {
                    let message = message(&mut rng, Node::Coordinator);
                    coordinator.step(coordinator::Event::Message(message), &mut actions);
                }
            }
            for action in actions.drain(..) {
                match action {
                    coordinator::Action::Send(message) => leaves(&message),
                    coordinator::Action::Write(record) => written.apply(&record),
                    _ => {}
                }
            }
            assert_eq!(coordinator.ledger(), &written);
        }
    }
    assert!(begun > 1_000, "{begun} migrations were begun");
}
