//! The database has what the coordinator's records make, whenever it is closed or its process is killed.
#![allow(clippy::unwrap_used)] // A test that can't go on has failed.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use cluster::state::{AboutHost, AboutVm, Change, Nic, Settings, State};
use cluster::{RedbStore, Store as _, StoreError};
use nomad::coordinator::{Action, Coordinator, Event, Ledger, Record};
use nomad::testing::dice::Dice;
use nomad::{Body, Config, HostId, Incarnation, Message, MigrationId, Node, Reason, VmId};

/// Records of a coordinator that is told random things by hosts and users.
fn records(seed: u64, count: usize) -> Vec<Record> {
    let mut dice = Dice::new(seed);
    let mut coordinator = Coordinator::new(Config::default(), Ledger::default());
    let mut written = Vec::new();
    let mut actions = Vec::new();
    let mut starts = [1_u64; 5];
    while written.len() < count {
        let (vm, mut host) = (VmId(dice.between(1, 6)), HostId(dice.between(1, 4)));
        let migration = MigrationId(coordinator.ledger().last.0.saturating_sub(u64::from(dice.below(2))));
        match dice.below(12) {
            0 => drop(coordinator.started(vm, host, &mut actions)),
            1 => drop(coordinator.linked(vm, VmId(dice.between(1, 6)), dice.chance(700), &mut actions)),
            2 => drop(coordinator.ended(vm, &mut actions)),
            3 | 4 => {
                let begun = coordinator.migrate(&[(vm, host)], &mut actions);
                // Half of them go all the way.
                if let Ok(migration) = begun
                    && dice.chance(500)
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
            _ => {
                // Mostly those that take part.
                if let Some(moved) =
                    coordinator.ledger().migrations.get(&migration).map(|stored| stored.moves[0])
                {
                    host = [moved.from, moved.to, host][dice.below(3) as usize];
                }
                let body = match dice.below(6) {
                    0 => Body::Reserved { migration },
                    1 => Body::Converged { migration },
                    2 => Body::Loaded { migration },
                    3 => Body::Yield { migration },
                    4 => Body::Settled {
                        migration,
                        lost: if dice.chance(100) { vec![vm] } else { Vec::new() },
                    },
                    _ if dice.chance(200) => Body::Failed { migration, reason: Reason::NoRoom },
                    _ => Body::Hello,
                };
                let start = &mut starts[host.0 as usize];
                *start += u64::from(dice.chance(10));
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

/// The coordinator's records, and what the service writes beside them.
fn changes(seed: u64, count: usize) -> Vec<Vec<Change>> {
    let mut dice = Dice::new(seed ^ 0xABCD);
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
                    (0..dice.below(3)).map(|_| [u8::try_from(dice.below(9)).unwrap(); 16]).collect();
                let mac = dice.chance(500).then_some([2, 0, 0, 0, 0, 1]);
                let nics = vec![Nic { segment: "blue".to_owned(), addresses, mac }];
                one.insert(0, Change::Vm(vm, AboutVm { name: vm.to_string(), nics }));
            }
            Record::VmEnded { vm } => one.push(Change::VmForgotten(vm)),
            _ if dice.chance(200) => {
                let vms = (0..dice.below(4)).map(|_| VmId(dice.between(1, 6))).collect();
                one.push(Change::Group(format!("g{}", dice.below(3)), vms));
            }
            _ if dice.chance(50) => one.push(Change::Settings(Settings { mtu: 4096, sockets: 3 })),
            _ => {}
        }
        changes.push(one);
    }
    changes
}

fn after(changes: &[Vec<Change>]) -> State {
    let mut state = State::default();
    for change in changes.iter().flatten() {
        state.apply(change);
    }
    state.revision = u64::try_from(changes.len()).unwrap();
    state
}

/// Opened again after each record, it has all records up to there. All kinds of records come up.
#[test]
fn what_is_written_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let (mut kinds, mut others) = (std::collections::HashSet::new(), std::collections::HashSet::new());
    for seed in 0..2 {
        let path = folder.path().join(format!("{seed}.redb"));
        let changes = changes(seed, 200);
        for (count, one) in changes.iter().enumerate() {
            for change in one {
                others.insert(std::mem::discriminant(change));
                if let Change::Ledger(record) = change {
                    kinds.insert(std::mem::discriminant(record));
                }
            }
            let mut store = RedbStore::open(&path).unwrap();
            assert_eq!(store.state(), &after(&changes[..count]));
            store.write(one).unwrap();
            assert_eq!(store.state(), &after(&changes[..=count]));
        }
    }
    assert_eq!(kinds.len(), 9, "not all kinds of records came up");
    assert_eq!(others.len(), 6, "not all kinds of changes came up");
}

/// The process that writes is killed at random: what it had said to be written is there, at most one transaction more, and no half one.
#[test]
fn a_killed_process_leaves_whole_records() {
    let folder = tempfile::tempdir().unwrap();
    let mut dice = Dice::new(1);
    for round in 0..12 {
        let path = folder.path().join(format!("{round}.redb"));
        let mut writer = Command::new(std::env::current_exe().unwrap())
            .args(["writes_until_killed", "--exact", "--ignored", "--nocapture"])
            .env("STORE", &path)
            .env("SEED", round.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(writer.stdout.take().unwrap()).lines();
        let enough = usize::try_from(dice.between(1, 60)).unwrap();
        let mut said = 0;
        for line in lines.map_while(Result::ok) {
            if let Some(count) = line.strip_prefix("written ") {
                said = count.parse().unwrap();
            }
            if said == enough {
                // SIGKILL; what was said meanwhile is still read.
                writer.kill().unwrap();
            }
        }
        writer.wait().unwrap();
        assert!(said >= enough, "the writer ended after {said} records");
        let changes = changes(round, 400);
        let found = RedbStore::open(&path).unwrap().state().clone();
        let whole = [said, said + 1].iter().any(|count| found == after(&changes[..*count]));
        assert!(whole, "round {round}: after {said} records there is {found:?}");
    }
}

/// Not a test: the process that the test above kills.
#[test]
#[ignore = "run by a_killed_process_leaves_whole_records"]
fn writes_until_killed() {
    let (Some(path), Some(seed)) = (std::env::var_os("STORE"), std::env::var("SEED").ok()) else { return };
    let mut store = RedbStore::open(Path::new(&path)).unwrap();
    for (count, one) in changes(seed.parse().unwrap(), 400).iter().enumerate() {
        store.write(one).unwrap();
        println!("written {}", count + 1);
    }
    panic!("not killed in time");
}

/// Two services on one file, and files that are something else, are refused in a sentence.
#[test]
fn a_file_that_is_in_use_or_foreign_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cluster.redb");
    let store = RedbStore::open(&path).unwrap();
    assert!(matches!(RedbStore::open(&path), Err(StoreError::Open { .. })));
    drop(store);
    std::fs::write(&path, b"something else, and long enough to look like a header of a database file")
        .unwrap();
    assert!(matches!(RedbStore::open(&path), Err(StoreError::Open { .. })));
}
