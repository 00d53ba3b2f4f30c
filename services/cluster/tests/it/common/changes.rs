//! Random sequences of changes, as the service writes them.
#![allow(dead_code, clippy::unwrap_used, clippy::missing_panics_doc)] // Tests' other half; each uses its part.

use cluster::state::{AboutHost, AboutVm, Change, Nic, Settings, State};
use facilities::rng::SplitMix64;
use nomad::coordinator::{Action, Coordinator, Event, Ledger, Record, Stage, Timer};
use nomad::{AbortReason, Body, Config, HostId, Incarnation, Message, MigrationId, Node, VmId};

/// Records of a coordinator that receives random messages of hosts and requests of users.
fn records(seed: u64, count: usize) -> Vec<Record> {
    let mut rng = SplitMix64::new(seed);
    let mut coordinator = Coordinator::new(Config::default(), Ledger::default());
    let mut written = Vec::new();
    let mut actions = Vec::new();
    let mut starts = [1_u64; 5];
    while written.len() < count {
        let (vm, mut host) = (VmId(rng.between(1, 6)), HostId(rng.between(1, 4)));
        let migration = MigrationId(coordinator.ledger().last.0.saturating_sub(u64::from(rng.below(2))));
        match rng.below(12) {
            0 => drop(coordinator.started(vm, host, &mut actions)),
            1 => drop(coordinator.linked(vm, VmId(rng.between(1, 6)), rng.chance(700), &mut actions)),
            2 => drop(coordinator.ended(vm, &mut actions)),
            3 | 4 => {
                let begun = coordinator.migrate(&[(vm, host)], &mut actions);
                // Half of the migrations go through all steps.
                if let Ok(migration) = begun
                    && rng.chance(500)
                {
                    let moved = coordinator.ledger().migrations[&migration].moves[0];
                    let settled = || Body::Settled { migration, lost: Vec::new() };
                    for (from, body) in [
                        (moved.to, Body::Reserved { migration }),
                        (moved.from, Body::Converged { migration }),
                        (moved.to, Body::Loaded { migration }),
                        (moved.from, Body::Yield { migration }),
                        (moved.from, settled()),
                        (moved.to, settled()),
                    ] {
                        let incarnation = Incarnation(starts[from.0 as usize]);
                        let (from, to) = (Node::Host(from), Node::Coordinator);
                        coordinator
                            .step(Event::Message(Message { from, incarnation, to, body }), &mut actions);
                    }
                }
            }
            5 => coordinator.cancel(migration, &mut actions),
            6 => {
                let late = Event::Timer(Timer::Deadline(migration, Stage::Settling));
                coordinator.step(late, &mut actions);
            }
            7 if rng.chance(100) => drop(coordinator.forget(host, &mut actions)),
            _ => {
                // Mostly the hosts that take part.
                if let Some(moved) =
                    coordinator.ledger().migrations.get(&migration).map(|stored| stored.moves[0])
                {
                    host = [moved.from, moved.to, host][rng.below(3) as usize];
                }
                let body = match rng.below(6) {
                    0 => Body::Reserved { migration },
                    1 => Body::Converged { migration },
                    2 => Body::Loaded { migration },
                    3 => Body::Yield { migration },
                    4 => {
                        Body::Settled { migration, lost: if rng.chance(100) { vec![vm] } else { Vec::new() } }
                    }
                    _ if rng.chance(200) => Body::Failed { migration, reason: AbortReason::NoRoom },
                    _ => Body::Hello,
                };
                let start = &mut starts[host.0 as usize];
                let known = coordinator.ledger().hosts.get(&host).map_or(0, |known| known.0);
                *start = known.max(*start) + u64::from(rng.chance(10));
                let incarnation = Incarnation(*start);
                let message = Message { from: Node::Host(host), incarnation, to: Node::Coordinator, body };
                coordinator.step(Event::Message(message), &mut actions);
            }
        }
        written.extend(actions.drain(..).filter_map(|action| match action {
            Action::Write(record) => Some(record),
            _ => None,
        }));
    }
    written.truncate(count);
    written
}

/// The coordinator's records, with the service's own changes between them.
pub fn changes(seed: u64, count: usize) -> Vec<Vec<Change>> {
    let mut rng = SplitMix64::new(seed ^ 0xABCD);
    let mut changes: Vec<Vec<Change>> = Vec::new();
    for record in records(seed, count) {
        let mut one = vec![Change::Ledger(record.clone())];
        match record {
            Record::Host { host, .. } => {
                let about = AboutHost { name: host.to_string(), address: ([10, 0, 0, 1], 4792).into() };
                one.insert(0, Change::Host(host, about));
            }
            Record::Vm { vm, .. } => {
                let addresses =
                    (0..rng.below(3)).map(|_| [u8::try_from(rng.below(9)).unwrap(); 16]).collect();
                let mac = rng.chance(500).then_some([2, 0, 0, 0, 0, 1]);
                let nics = vec![Nic { segment: "blue".to_owned(), addresses, mac }];
                one.insert(0, Change::Vm(vm, AboutVm { name: vm.to_string(), nics }));
            }
            Record::VmEnded { vm } => one.push(Change::VmForgotten(vm)),
            _ if rng.chance(50) => one.push(Change::Settings(Settings { mtu: 4096, sockets: 3 })),
            _ => {}
        }
        changes.push(one);
    }
    changes
}

/// The state after the changes.
pub fn after(changes: &[Vec<Change>]) -> State {
    let mut state = State::default();
    for change in changes.iter().flatten() {
        state.apply(change);
    }
    state.revision = u64::try_from(changes.len()).unwrap();
    state
}
