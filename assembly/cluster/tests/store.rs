//! The database has what the coordinator's records make, whenever it is closed or its process is killed.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use cluster::{Store, StoreError};
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

fn after(records: &[Record]) -> Ledger {
    let mut ledger = Ledger::default();
    records.iter().for_each(|record| ledger.apply(record));
    ledger
}

/// Opened again after each record, it has all records up to there. All kinds of records come up.
#[test]
fn what_is_written_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let mut kinds = std::collections::HashSet::new();
    for seed in 0..2 {
        let path = folder.path().join(format!("{seed}.redb"));
        let records = records(seed, 200);
        for (count, record) in records.iter().enumerate() {
            kinds.insert(std::mem::discriminant(record));
            let mut store = Store::open(&path).unwrap();
            assert_eq!(store.ledger(), &after(&records[..count]));
            store.write(record).unwrap();
        }
    }
    assert_eq!(kinds.len(), 9, "not all kinds of records came up");
}

/// The process that writes is killed at random: what it had said to be written is there, at most one record more, and no half one.
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
        let records = records(round, 400);
        let found = Store::open(&path).unwrap().ledger().clone();
        let whole = [said, said + 1].iter().any(|count| found == after(&records[..*count]));
        assert!(whole, "round {round}: after {said} records there is {found:?}");
    }
}

/// Not a test: the process that the test above kills.
#[test]
#[ignore = "run by a_killed_process_leaves_whole_records"]
fn writes_until_killed() {
    let (Some(path), Some(seed)) = (std::env::var_os("STORE"), std::env::var("SEED").ok()) else { return };
    let mut store = Store::open(Path::new(&path)).unwrap();
    for (count, record) in records(seed.parse().unwrap(), 400).iter().enumerate() {
        store.write(record).unwrap();
        println!("written {}", count + 1);
    }
    panic!("not killed in time");
}

/// Two services on one file, and files that are something else, are refused in a sentence.
#[test]
fn a_file_that_is_in_use_or_foreign_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cluster.redb");
    let store = Store::open(&path).unwrap();
    assert!(matches!(Store::open(&path), Err(StoreError::Open { .. })));
    drop(store);
    std::fs::write(&path, b"something else, and long enough to look like a header of a database file")
        .unwrap();
    assert!(matches!(Store::open(&path), Err(StoreError::Open { .. })));
}
