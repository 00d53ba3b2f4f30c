//! The database has what the coordinator's records make, after a close at any time and after a crash of its process.

use crate::common::changes;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use changes::{after, changes};
use cluster::state::Change;
use cluster::{RedbStore, Store as _, StoreError};
use facilities::rng::SplitMix64;

/// A store that is opened after a record has all records up to it. All kinds of records occur.
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
    assert_eq!(kinds.len(), 11, "not all kinds of records came up");
    assert_eq!(others.len(), 5, "not all kinds of changes came up");
}

/// Killed at a random time, the writing process leaves every acknowledged transaction, at most one more, and none in
/// part.
#[test]
fn a_killed_process_leaves_whole_records() {
    let folder = tempfile::tempdir().unwrap();
    let mut rng = SplitMix64::new(1);
    for round in 0..12 {
        let path = folder.path().join(format!("{round}.redb"));
        let mut writer = Command::new(std::env::current_exe().unwrap())
            .args(["store::writes_until_killed", "--exact", "--ignored", "--nocapture"])
            .env("STORE", &path)
            .env("SEED", round.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(writer.stdout.take().unwrap()).lines();
        let enough = usize::try_from(rng.between(1, 60)).unwrap();
        let mut said = 0;
        for line in lines.map_while(Result::ok) {
            if let Some(count) = line.strip_prefix("written ") {
                said = count.parse().unwrap();
            }
            if said == enough {
                // SIGKILL. Lines written before it are still read.
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

/// Not a test: the process that `a_killed_process_leaves_whole_records` kills.
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

/// The service refuses a file that another one has open, and a file of another kind, with an error that names the
/// cause.
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
