//! Versions of the database.

#![allow(clippy::unwrap_used)] // A test that can't go on has failed.

use std::path::Path;

use nomad::coordinator::Record;

use super::*;

/// Makes a database one of another version, without the tables that came since.
fn make_version(path: &Path, version: u64) {
    let database = Database::create(path).unwrap();
    let transaction = database.begin_write().unwrap();
    transaction.open_table(FORMAT).unwrap().insert("version", version).unwrap();
    transaction.delete_table(OWED).unwrap();
    transaction.commit().unwrap();
}

/// A database of the version before is read, with its migration, and is one of this version afterwards.
#[test]
fn a_database_of_version_2_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cluster.redb");
    let moved = Move { vm: VmId(1), from: HostId(1), to: HostId(2), epoch: Epoch(2) };
    let records = [
        Record::Host { host: HostId(1), incarnation: Incarnation(1), lost: Vec::new() },
        Record::Host { host: HostId(2), incarnation: Incarnation(1), lost: Vec::new() },
        Record::Vm { vm: VmId(1), host: HostId(1), epoch: Epoch(1) },
        Record::Begun { migration: MigrationId(1), moves: vec![moved] },
        Record::Committed { migration: MigrationId(1) },
    ];
    let mut store = RedbStore::open(&path).unwrap();
    store.write(&records.map(Change::Ledger)).unwrap();
    let before = store.state().clone();
    drop(store);
    make_version(&path, 2);
    let mut store = RedbStore::open(&path).unwrap();
    assert_eq!(store.state(), &before);
    let owed = vec![(HostId(1), Incarnation(1)), (HostId(2), Incarnation(1))];
    let released = Record::Released { migration: MigrationId(1), owed, lost: Vec::new() };
    store.write(&[Change::Ledger(released)]).unwrap();
    let before = store.state().clone();
    drop(store);
    assert_eq!(RedbStore::open(&path).unwrap().state(), &before);
}

/// Others are refused by their number.
#[test]
fn other_versions_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for version in [1, DATABASE_VERSION + 1] {
        let path = folder.path().join(format!("{version}.redb"));
        drop(RedbStore::open(&path).unwrap());
        make_version(&path, version);
        let error = RedbStore::open(&path).unwrap_err();
        assert!(matches!(error, StoreError::Version(found) if found == version), "{error}");
        assert!(error.to_string().contains(&format!("has version {version}, this program knows 2 to 3")));
    }
}
