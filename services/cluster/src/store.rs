//! The service's state in a database.
//!
//! [`Store`] is what the service needs of one: the state with changes that are staged, and a transaction that writes all staged changes, or
//! none. [`RedbStore`] keeps it in a file:
//!
//! | table | key | value |
//! |---|---|---|
//! | `format` | "version" | [`DATABASE_VERSION`] |
//! | `hosts` | host | incarnation |
//! | `vms` | VM | host, epoch, alive |
//! | `links` | lower VM, higher VM | nothing |
//! | `migrations` | migration | 0 undecided, 1 committed, 2 given up |
//! | `moves` | migration, place in the list | VM, from, to, epoch |
//! | `owed` | migration, host | the host's start, which hasn't said that it has done what was decided; of migrations whose VMs are free |
//! | `last` | "migration", "vm", "revision" | the last migration's and VM's numbers; the transactions so far |
//! | `settings` | "mtu", "sockets" | what is the same on all hosts |
//! | `host_names` | host | [`AboutHost`], postcard |
//! | `vm_names` | VM | [`AboutVm`], postcard |
//!
//! Changes that are staged until a [`Store::commit`] are one transaction, and on the disk when it returns. Concurrency: one process has the file
//! open; redb locks it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use nomad::coordinator::{Decision, Ledger, Owner, StoredMigration};
use nomad::{Epoch, HostId, Incarnation, MigrationId, Move, VmId};
use redb::{Database, ReadableDatabase, ReadableTable, Table, TableDefinition, WriteTransaction};
use serde::{Serialize, de::DeserializeOwned};

use crate::rows::{self, Row};
use crate::state::{AboutHost, AboutVm, Change, Settings, State};
use crate::store_error::{DATABASE_VERSION, OLDEST_DATABASE_VERSION, StoreError};

const FORMAT: TableDefinition<'_, &str, u64> = TableDefinition::new("format");
const HOSTS: TableDefinition<'_, u32, u64> = TableDefinition::new("hosts");
const VMS: TableDefinition<'_, u32, (u32, u64, bool)> = TableDefinition::new("vms");
const LINKS: TableDefinition<'_, (u32, u32), ()> = TableDefinition::new("links");
const MIGRATIONS: TableDefinition<'_, u64, u8> = TableDefinition::new("migrations");
const MOVES: TableDefinition<'_, (u64, u32), (u32, u32, u32, u64)> = TableDefinition::new("moves");
const OWED: TableDefinition<'_, (u64, u32), u64> = TableDefinition::new("owed");
const LAST: TableDefinition<'_, &str, u64> = TableDefinition::new("last");
const SETTINGS: TableDefinition<'_, &str, u64> = TableDefinition::new("settings");
const HOST_NAMES: TableDefinition<'_, u32, &[u8]> = TableDefinition::new("host_names");
const VM_NAMES: TableDefinition<'_, u32, &[u8]> = TableDefinition::new("vm_names");

const UNDECIDED: u8 = 0;
const COMMITTED: u8 = 1;
const ABORTED: u8 = 2;

fn read<E: Into<redb::Error>>(source: E) -> StoreError {
    StoreError::Broken { what: "read", source: Box::new(source.into()) }
}

fn written<E: Into<redb::Error>>(source: E) -> StoreError {
    StoreError::Broken { what: "written", source: Box::new(source.into()) }
}

/// A database of the service. After a [`Store::commit`] that failed, [`Store::recover`] comes first.
pub trait Store: std::fmt::Debug + Send {
    /// The state as it is written, with the changes that are staged.
    fn state(&self) -> &State;

    /// Makes changes in memory, in order, which the next [`Store::commit`] writes. Counts one revision.
    fn stage(&mut self, changes: &[Change]);

    /// Writes all staged changes as one transaction. When this returns they are safe. Nothing where none is staged.
    ///
    /// # Errors
    /// When they can't be written: then none of them is made.
    fn commit(&mut self) -> Result<(), StoreError>;

    /// Makes [`Store::state`] what is written, after a failure. Nothing where it is.
    ///
    /// # Errors
    /// When that can't be read.
    fn recover(&mut self) -> Result<(), StoreError>;

    /// Writes changes, in order, as one transaction.
    ///
    /// # Errors
    /// As [`Store::commit`] and [`Store::recover`].
    fn write(&mut self, changes: &[Change]) -> Result<(), StoreError> {
        self.recover()?;
        self.stage(changes);
        self.commit()
    }
}

/// The state, in memory and in a file.
#[derive(Debug)]
pub struct RedbStore {
    database: Database,
    state: State,
    /// Rows that staged changes touch.
    touched: BTreeSet<Row>,
    /// A transaction has failed, and the state may be ahead of the file.
    stale: bool,
}

impl RedbStore {
    /// Opens a database, or makes one.
    ///
    /// # Errors
    /// When it can't be opened or read, or has another version.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let failed =
            |source: redb::Error| StoreError::Open { path: path.to_owned(), source: Box::new(source) };
        let database = Database::create(path).map_err(|error| failed(error.into()))?;
        let transaction = database.begin_write().map_err(written)?;
        let version = {
            let mut format = transaction.open_table(FORMAT).map_err(written)?;
            let known = format.get("version").map_err(read)?.map(|version| version.value());
            let known = known.unwrap_or(DATABASE_VERSION);
            if (OLDEST_DATABASE_VERSION..=DATABASE_VERSION).contains(&known) {
                format.insert("version", DATABASE_VERSION).map_err(written)?;
            }
            known
        };
        if !(OLDEST_DATABASE_VERSION..=DATABASE_VERSION).contains(&version) {
            return Err(StoreError::Version(version));
        }
        // Tables exist from the beginning, so that reading needs no special case.
        transaction.open_table(HOSTS).map_err(written)?;
        transaction.open_table(VMS).map_err(written)?;
        transaction.open_table(LINKS).map_err(written)?;
        transaction.open_table(MIGRATIONS).map_err(written)?;
        transaction.open_table(MOVES).map_err(written)?;
        transaction.open_table(OWED).map_err(written)?;
        transaction.open_table(LAST).map_err(written)?;
        transaction.open_table(SETTINGS).map_err(written)?;
        transaction.open_table(HOST_NAMES).map_err(written)?;
        transaction.open_table(VM_NAMES).map_err(written)?;
        transaction.commit().map_err(written)?;
        let state = load(&database)?;
        Ok(Self { database, state, touched: BTreeSet::new(), stale: false })
    }
}

impl Store for RedbStore {
    fn state(&self) -> &State {
        &self.state
    }

    fn stage(&mut self, changes: &[Change]) {
        for change in changes {
            rows::touch(change, &self.state, &mut self.touched);
            self.state.apply(change);
        }
        self.state.revision += 1;
        self.touched.insert(Row::Head);
    }

    fn commit(&mut self) -> Result<(), StoreError> {
        let touched = std::mem::take(&mut self.touched);
        if touched.is_empty() {
            return Ok(());
        }
        let result = transact(&self.database, &self.state, &touched);
        if result.is_err() {
            self.stale = true;
            // Where that fails as well, the caller's `recover` tries again.
            drop(self.recover());
        }
        result
    }

    fn recover(&mut self) -> Result<(), StoreError> {
        if self.stale {
            self.state = load(&self.database)?;
            self.touched.clear();
            self.stale = false;
        }
        Ok(())
    }
}

/// Writes rows as the state has them.
fn transact(database: &Database, state: &State, rows: &BTreeSet<Row>) -> Result<(), StoreError> {
    let transaction = database.begin_write().map_err(written)?;
    let mut tables = Tables::open(&transaction)?;
    for row in rows {
        tables.put(row, state)?;
    }
    drop(tables);
    transaction.commit().map_err(written)
}

/// The tables of a transaction, each opened once.
struct Tables<'a> {
    hosts: Table<'a, u32, u64>,
    vms: Table<'a, u32, (u32, u64, bool)>,
    links: Table<'a, (u32, u32), ()>,
    migrations: Table<'a, u64, u8>,
    moves: Table<'a, (u64, u32), (u32, u32, u32, u64)>,
    owed: Table<'a, (u64, u32), u64>,
    last: Table<'a, &'static str, u64>,
    settings: Table<'a, &'static str, u64>,
    host_names: Table<'a, u32, &'static [u8]>,
    vm_names: Table<'a, u32, &'static [u8]>,
}

impl<'a> Tables<'a> {
    fn open(transaction: &'a WriteTransaction) -> Result<Self, StoreError> {
        Ok(Self {
            hosts: transaction.open_table(HOSTS).map_err(written)?,
            vms: transaction.open_table(VMS).map_err(written)?,
            links: transaction.open_table(LINKS).map_err(written)?,
            migrations: transaction.open_table(MIGRATIONS).map_err(written)?,
            moves: transaction.open_table(MOVES).map_err(written)?,
            owed: transaction.open_table(OWED).map_err(written)?,
            last: transaction.open_table(LAST).map_err(written)?,
            settings: transaction.open_table(SETTINGS).map_err(written)?,
            host_names: transaction.open_table(HOST_NAMES).map_err(written)?,
            vm_names: transaction.open_table(VM_NAMES).map_err(written)?,
        })
    }

    /// Writes a row as the state has it, or removes one that it hasn't.
    fn put(&mut self, row: &Row, state: &State) -> Result<(), StoreError> {
        match row {
            Row::Head => {
                self.last.insert("migration", state.ledger.last.0).map_err(written)?;
                self.last.insert("vm", u64::from(state.last_vm)).map_err(written)?;
                self.last.insert("revision", state.revision).map_err(written)?;
            }
            Row::Settings => {
                self.settings.insert("mtu", u64::from(state.settings.mtu)).map_err(written)?;
                self.settings.insert("sockets", u64::from(state.settings.sockets)).map_err(written)?;
            }
            Row::HostName(host) => match state.hosts.get(host) {
                Some(about) => {
                    drop(self.host_names.insert(host.0, encode(about)?.as_slice()).map_err(written)?)
                }
                None => drop(self.host_names.remove(host.0).map_err(written)?),
            },
            Row::VmName(vm) => match state.vms.get(vm) {
                Some(about) => drop(self.vm_names.insert(vm.0, encode(about)?.as_slice()).map_err(written)?),
                None => drop(self.vm_names.remove(vm.0).map_err(written)?),
            },
            Row::Host(_) | Row::Vm(_) | Row::Link(..) | Row::Migration(_) | Row::Owed(..) => {
                self.put_ledger(row, &state.ledger)?;
            }
        }
        Ok(())
    }

    fn put_ledger(&mut self, row: &Row, ledger: &Ledger) -> Result<(), StoreError> {
        match row {
            Row::Host(host) => match ledger.hosts.get(host) {
                Some(incarnation) => drop(self.hosts.insert(host.0, incarnation.0).map_err(written)?),
                None => drop(self.hosts.remove(host.0).map_err(written)?),
            },
            Row::Vm(vm) => match ledger.vms.get(vm) {
                Some(owner) => {
                    let owner = (owner.host.0, owner.epoch.0, owner.alive);
                    self.vms.insert(vm.0, owner).map_err(written)?;
                }
                None => drop(self.vms.remove(vm.0).map_err(written)?),
            },
            Row::Link(a, b) if ledger.links.contains(&(*a, *b)) => {
                self.links.insert((a.0, b.0), ()).map_err(written)?;
            }
            Row::Link(a, b) => drop(self.links.remove((a.0, b.0)).map_err(written)?),
            Row::Migration(migration) => self.put_migration(*migration, ledger.migrations.get(migration))?,
            Row::Owed(migration, host) => {
                let owed =
                    ledger.migrations.get(migration).and_then(|stored| stored.owed.as_ref()?.get(host));
                let key = (migration.0, host.0);
                match owed {
                    Some(incarnation) => drop(self.owed.insert(key, incarnation.0).map_err(written)?),
                    None => drop(self.owed.remove(key).map_err(written)?),
                }
            }
            Row::Head | Row::Settings | Row::HostName(_) | Row::VmName(_) => {}
        }
        Ok(())
    }

    fn put_migration(
        &mut self,
        migration: MigrationId,
        stored: Option<&StoredMigration>,
    ) -> Result<(), StoreError> {
        let Some(stored) = stored else {
            let of = (migration.0, 0)..=(migration.0, u32::MAX);
            self.moves.retain_in(of, |_, _| false).map_err(written)?;
            self.migrations.remove(migration.0).map_err(written)?;
            return Ok(());
        };
        let decision = match stored.decision {
            None => UNDECIDED,
            Some(Decision::Committed) => COMMITTED,
            Some(Decision::Aborted) => ABORTED,
        };
        self.migrations.insert(migration.0, decision).map_err(written)?;
        for (index, moved) in (0_u32..).zip(&stored.moves) {
            let row = (moved.vm.0, moved.from.0, moved.to.0, moved.epoch.0);
            self.moves.insert((migration.0, index), row).map_err(written)?;
        }
        Ok(())
    }
}

fn encode(value: &impl Serialize) -> Result<Vec<u8>, StoreError> {
    postcard::to_stdvec(value)
        .map_err(|error| StoreError::Damaged(format!("a value can't be encoded ({error})")))
}

fn decode<T: DeserializeOwned>(bytes: &[u8], what: &str) -> Result<T, StoreError> {
    postcard::from_bytes(bytes)
        .map_err(|error| StoreError::Damaged(format!("{what} can't be decoded ({error})")))
}

fn load(database: &Database) -> Result<State, StoreError> {
    let mut state = State { ledger: load_ledger(database)?, ..State::default() };
    let transaction = database.begin_read().map_err(read)?;
    let last = transaction.open_table(LAST).map_err(read)?;
    let number = |name: &str| -> Result<u64, StoreError> {
        Ok(last.get(name).map_err(read)?.map_or(0, |value| value.value()))
    };
    state.revision = number("revision")?;
    state.last_vm = u32::try_from(number("vm")?)
        .map_err(|_| StoreError::Damaged("the last VM's number has more than 32 bits".to_owned()))?;
    let settings = transaction.open_table(SETTINGS).map_err(read)?;
    let (mtu, sockets) = (settings.get("mtu").map_err(read)?, settings.get("sockets").map_err(read)?);
    if let (Some(mtu), Some(sockets)) = (mtu, sockets) {
        let (mtu, sockets) = (u32::try_from(mtu.value()), u16::try_from(sockets.value()));
        let (Ok(mtu), Ok(sockets)) = (mtu, sockets) else {
            return Err(StoreError::Damaged("its settings are no numbers of that kind".to_owned()));
        };
        state.settings = Settings { mtu, sockets };
    }
    for row in transaction.open_table(HOST_NAMES).map_err(read)?.iter().map_err(read)? {
        let (host, about) = row.map_err(read)?;
        let about: AboutHost = decode(about.value(), "a host")?;
        state.hosts.insert(HostId(host.value()), about);
    }
    for row in transaction.open_table(VM_NAMES).map_err(read)?.iter().map_err(read)? {
        let (vm, about) = row.map_err(read)?;
        let about: AboutVm = decode(about.value(), "a VM")?;
        state.vms.insert(VmId(vm.value()), about);
    }
    Ok(state)
}

fn load_ledger(database: &Database) -> Result<Ledger, StoreError> {
    let mut ledger = Ledger::default();
    let transaction = database.begin_read().map_err(read)?;
    for row in transaction.open_table(HOSTS).map_err(read)?.iter().map_err(read)? {
        let (host, incarnation) = row.map_err(read)?;
        ledger.hosts.insert(HostId(host.value()), Incarnation(incarnation.value()));
    }
    for row in transaction.open_table(VMS).map_err(read)?.iter().map_err(read)? {
        let (vm, owner) = row.map_err(read)?;
        let (host, epoch, alive) = owner.value();
        ledger.vms.insert(VmId(vm.value()), Owner { host: HostId(host), epoch: Epoch(epoch), alive });
    }
    for row in transaction.open_table(LINKS).map_err(read)?.iter().map_err(read)? {
        let (a, b) = row.map_err(read)?.0.value();
        ledger.links.insert((VmId(a), VmId(b)));
    }
    let mut migrations = BTreeMap::new();
    for row in transaction.open_table(MIGRATIONS).map_err(read)?.iter().map_err(read)? {
        let (migration, decision) = row.map_err(read)?;
        let decision = match decision.value() {
            UNDECIDED => None,
            COMMITTED => Some(Decision::Committed),
            ABORTED => Some(Decision::Aborted),
            other => return Err(StoreError::Damaged(format!("a migration has the decision {other}"))),
        };
        let stored = StoredMigration { decision, ..StoredMigration::new(Vec::new()) };
        migrations.insert(MigrationId(migration.value()), stored);
    }
    for row in transaction.open_table(MOVES).map_err(read)?.iter().map_err(read)? {
        let (key, moved) = row.map_err(read)?;
        let (migration, _) = key.value();
        let (vm, from, to, epoch) = moved.value();
        let stored = migrations.get_mut(&MigrationId(migration));
        let stored = stored.ok_or_else(|| {
            StoreError::Damaged(format!("VM {vm} moves in migration {migration}, which isn't there"))
        })?;
        let moved = Move { vm: VmId(vm), from: HostId(from), to: HostId(to), epoch: Epoch(epoch) };
        stored.moves.push(moved);
    }
    for row in transaction.open_table(OWED).map_err(read)?.iter().map_err(read)? {
        let (key, incarnation) = row.map_err(read)?;
        let (migration, host) = key.value();
        let stored = migrations.get_mut(&MigrationId(migration)).filter(|stored| stored.decision.is_some());
        let stored = stored.ok_or_else(|| {
            StoreError::Damaged(format!(
                "the decision of migration {migration} is kept for host {host}, but it isn't decided"
            ))
        })?;
        let owed = stored.owed.get_or_insert_default();
        owed.insert(HostId(host), Incarnation(incarnation.value()));
    }
    for (migration, stored) in migrations {
        ledger.migrations.insert(migration, stored);
    }
    let last = transaction.open_table(LAST).map_err(read)?.get("migration").map_err(read)?;
    ledger.last = MigrationId(last.map_or(0, |last| last.value()));
    Ok(ledger)
}

#[cfg(test)]
mod tests;
