//! The state as rows. Each row is a function of the state, so that changes are written as the rows that they touch, as they are after the
//! last change; writing a row again means the same. A store without tables has a key in text and a value for each row:
//!
//! | key | value, postcard |
//! |---|---|
//! | `version` | [`ETCD_VERSION`] |
//! | `head` | revision, the last VM's and the last migration's numbers; written by every transaction |
//! | `settings` | mtu, sockets |
//! | `hosts/ID` | incarnation |
//! | `host-names/ID` | [`AboutHost`] |
//! | `vms/ID` | host, epoch, alive |
//! | `vm-names/ID` | [`AboutVm`] |
//! | `links/ID-ID` | nothing |
//! | `migrations/ID` | 0 undecided, 1 committed, 2 given up; VM, from, to, epoch of each move |
//! | `owed/ID-ID` | of a migration and a host: the host's start, which hasn't said that it has done what was decided |
//! | `groups/NAME` | named groups of releases before this one: passed over |
//!
//! IDs are 8 (hosts, VMs) or 16 hexadecimal digits.

use std::collections::BTreeSet;

use nomad::coordinator::{Decision, Owner, Record, StoredMigration};
use nomad::{Epoch, HostId, Incarnation, MigrationId, Move, VmId};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::state::{AboutHost, AboutVm, Change, Settings, State};
use crate::store_error::{ETCD_VERSION, StoreError};

/// Key of the row that every transaction writes.
pub const HEAD: &str = "head";
/// Key of the version.
pub const FORMAT: &str = "version";

/// A row. Its value is the state's.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Row {
    /// Revision and last numbers.
    Head,
    /// Settings that all hosts share.
    Settings,
    /// A host's incarnation.
    Host(HostId),
    /// A host's name and address.
    HostName(HostId),
    /// A VM's owner: host, epoch, and whether the VM is alive.
    Vm(VmId),
    /// A VM's name and NICs.
    VmName(VmId),
    /// A connection, the lower VM first.
    Link(VmId, VmId),
    /// A migration.
    Migration(MigrationId),
    /// A host that a migration's decision is kept for.
    Owed(MigrationId, HostId),
}

/// The rows that a change touches, given the state before it.
pub fn touch(change: &Change, before: &State, rows: &mut BTreeSet<Row>) {
    rows.insert(Row::Head);
    match change {
        Change::Settings(_) => drop(rows.insert(Row::Settings)),
        Change::Host(host, _) => drop(rows.insert(Row::HostName(*host))),
        Change::Vm(vm, _) | Change::VmForgotten(vm) => drop(rows.insert(Row::VmName(*vm))),
        Change::Ledger(record) => touch_ledger(record, before, rows),
    }
}

/// All rows of a state.
#[must_use]
pub fn all(state: &State) -> BTreeSet<Row> {
    let ledger = &state.ledger;
    let mut rows = BTreeSet::from([Row::Head, Row::Settings]);
    rows.extend(ledger.hosts.keys().copied().map(Row::Host));
    rows.extend(state.hosts.keys().copied().map(Row::HostName));
    rows.extend(ledger.vms.keys().copied().map(Row::Vm));
    rows.extend(state.vms.keys().copied().map(Row::VmName));
    rows.extend(ledger.links.iter().map(|(a, b)| Row::Link(*a, *b)));
    rows.extend(ledger.migrations.keys().copied().map(Row::Migration));
    for (migration, stored) in &ledger.migrations {
        rows.extend(stored.owed.iter().flat_map(|owed| owed.keys()).map(|host| Row::Owed(*migration, *host)));
    }
    rows
}

fn touch_ledger(record: &Record, before: &State, rows: &mut BTreeSet<Row>) {
    match record {
        Record::Host { host, lost, .. } => {
            rows.insert(Row::Host(*host));
            rows.extend(lost.iter().copied().map(Row::Vm));
        }
        Record::Vm { vm, .. } => drop(rows.insert(Row::Vm(*vm))),
        Record::VmEnded { vm } => {
            rows.insert(Row::Vm(*vm));
            let peers = before.ledger.links.peers(*vm);
            rows.extend(peers.map(|peer| Row::Link(*vm.min(&peer), *vm.max(&peer))));
        }
        Record::Linked { a, b } | Record::Unlinked { a, b } => drop(rows.insert(Row::Link(*a, *b))),
        Record::Begun { migration, .. } | Record::Aborted { migration } => {
            rows.insert(Row::Migration(*migration));
        }
        Record::Committed { migration } => {
            rows.insert(Row::Migration(*migration));
            let moves = before.ledger.migrations.get(migration).into_iter().flat_map(|stored| &stored.moves);
            rows.extend(moves.map(|moved| Row::Vm(moved.vm)));
        }
        Record::Released { migration, owed, lost } => {
            rows.extend(owed.iter().map(|(host, _)| Row::Owed(*migration, *host)));
            rows.extend(lost.iter().copied().map(Row::Vm));
        }
        Record::HostSettled { migration, host, lost } => {
            rows.insert(Row::Owed(*migration, *host));
            rows.insert(Row::Migration(*migration));
            rows.extend(lost.iter().copied().map(Row::Vm));
        }
        Record::Finished { migration, lost } => {
            rows.insert(Row::Migration(*migration));
            rows.extend(lost.iter().copied().map(Row::Vm));
        }
    }
}

fn encode(value: &impl Serialize) -> Result<Vec<u8>, StoreError> {
    postcard::to_stdvec(value)
        .map_err(|error| StoreError::Damaged(format!("a value can't be encoded ({error})")))
}

fn decode<T: DeserializeOwned>(key: &str, value: &[u8]) -> Result<T, StoreError> {
    let damaged =
        |error: String| StoreError::Damaged(format!("{} can't be read ({error})", key.escape_debug()));
    let (decoded, rest) = postcard::take_from_bytes(value).map_err(|error| damaged(error.to_string()))?;
    if rest.is_empty() { Ok(decoded) } else { Err(damaged("something follows".to_owned())) }
}

/// Checks the value of [`FORMAT`].
///
/// # Errors
/// When it is another version's.
pub fn check_format(value: &[u8]) -> Result<(), StoreError> {
    match decode(FORMAT, value)? {
        1 | ETCD_VERSION => Ok(()),
        other => Err(StoreError::EtcdVersion(other)),
    }
}

/// The value of [`FORMAT`].
///
/// # Errors
/// None that can be thought of.
pub fn format() -> Result<Vec<u8>, StoreError> {
    encode(&ETCD_VERSION)
}

/// A migration's row.
type Migrating = (u8, Vec<(u32, u32, u32, u64)>);

impl Row {
    /// Its key, without a prefix.
    #[must_use]
    pub fn key(&self) -> String {
        match self {
            Self::Head => HEAD.to_owned(),
            Self::Settings => "settings".to_owned(),
            Self::Host(HostId(id)) => format!("hosts/{id:08x}"),
            Self::HostName(HostId(id)) => format!("host-names/{id:08x}"),
            Self::Vm(VmId(id)) => format!("vms/{id:08x}"),
            Self::VmName(VmId(id)) => format!("vm-names/{id:08x}"),
            Self::Link(VmId(a), VmId(b)) => format!("links/{a:08x}-{b:08x}"),
            Self::Migration(MigrationId(id)) => format!("migrations/{id:016x}"),
            Self::Owed(MigrationId(id), HostId(host)) => format!("owed/{id:016x}-{host:08x}"),
        }
    }

    /// Its value in a state; `None`: it isn't there.
    ///
    /// # Errors
    /// None that can be thought of.
    pub fn value(&self, state: &State) -> Result<Option<Vec<u8>>, StoreError> {
        let ledger = &state.ledger;
        Ok(Some(match self {
            Self::Head => encode(&(state.revision, state.last_vm, ledger.last.0))?,
            Self::Settings => encode(&(state.settings.mtu, state.settings.sockets))?,
            Self::Host(host) => match ledger.hosts.get(host) {
                Some(incarnation) => encode(&incarnation.0)?,
                None => return Ok(None),
            },
            Self::HostName(host) => match state.hosts.get(host) {
                Some(about) => encode(about)?,
                None => return Ok(None),
            },
            Self::Vm(vm) => match ledger.vms.get(vm) {
                Some(owner) => encode(&(owner.host.0, owner.epoch.0, owner.alive))?,
                None => return Ok(None),
            },
            Self::VmName(vm) => match state.vms.get(vm) {
                Some(about) => encode(about)?,
                None => return Ok(None),
            },
            Self::Link(a, b) if ledger.links.contains(&(*a, *b)) => Vec::new(),
            Self::Link(..) => return Ok(None),
            Self::Migration(migration) => match ledger.migrations.get(migration) {
                Some(stored) => {
                    let decision = match stored.decision {
                        None => 0,
                        Some(Decision::Committed) => 1,
                        Some(Decision::Aborted) => 2,
                    };
                    let moved = |moved: &Move| (moved.vm.0, moved.from.0, moved.to.0, moved.epoch.0);
                    let row: Migrating = (decision, stored.moves.iter().map(moved).collect());
                    encode(&row)?
                }
                None => return Ok(None),
            },
            Self::Owed(migration, host) => {
                let owed =
                    ledger.migrations.get(migration).and_then(|stored| stored.owed.as_ref()?.get(host));
                match owed {
                    Some(incarnation) => encode(&incarnation.0)?,
                    None => return Ok(None),
                }
            }
        }))
    }
}

/// Takes a row that was read into a state that is empty but for other rows.
///
/// # Errors
/// When it is no such row.
pub fn read(key: &str, value: &[u8], state: &mut State) -> Result<(), StoreError> {
    let unknown = || StoreError::Damaged(format!("{} is no key of it", key.escape_debug()));
    let number = |text: &str| {
        let digits = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        u32::from_str_radix(text, 16).ok().filter(|_| text.len() == 8 && digits).ok_or_else(unknown)
    };
    let ledger = &mut state.ledger;
    match key.split_once('/') {
        None if key == HEAD => {
            let (revision, last_vm, last) = decode(key, value)?;
            (state.revision, state.last_vm, ledger.last) = (revision, last_vm, MigrationId(last));
        }
        None if key == "settings" => {
            let (mtu, sockets) = decode(key, value)?;
            state.settings = Settings { mtu, sockets };
        }
        Some(("hosts", id)) => {
            ledger.hosts.insert(HostId(number(id)?), Incarnation(decode(key, value)?));
        }
        Some(("host-names", id)) => {
            let about: AboutHost = decode(key, value)?;
            state.hosts.insert(HostId(number(id)?), about);
        }
        Some(("vms", id)) => {
            let (host, epoch, alive) = decode(key, value)?;
            let owner = Owner { host: HostId(host), epoch: Epoch(epoch), alive };
            ledger.vms.insert(VmId(number(id)?), owner);
        }
        Some(("vm-names", id)) => {
            let about: AboutVm = decode(key, value)?;
            state.vms.insert(VmId(number(id)?), about);
        }
        Some(("links", pair)) => {
            let (a, b) = pair.split_once('-').ok_or_else(unknown)?;
            ledger.links.insert((VmId(number(a)?), VmId(number(b)?)));
        }
        Some(("migrations", id)) => {
            let id = u64::from_str_radix(id, 16).map_err(|_| unknown())?;
            let (decision, moves): Migrating = decode(key, value)?;
            let decision = match decision {
                0 => None,
                1 => Some(Decision::Committed),
                2 => Some(Decision::Aborted),
                other => return Err(StoreError::Damaged(format!("a migration has the decision {other}"))),
            };
            let moved = |(vm, from, to, epoch)| Move {
                vm: VmId(vm),
                from: HostId(from),
                to: HostId(to),
                epoch: Epoch(epoch),
            };
            let moves = moves.into_iter().map(moved).collect();
            ledger
                .migrations
                .insert(MigrationId(id), StoredMigration { decision, ..StoredMigration::new(moves) });
        }
        // Behind its migration, as keys are in order.
        Some(("owed", pair)) => {
            let (id, host) = pair.split_once('-').ok_or_else(unknown)?;
            let id = u64::from_str_radix(id, 16).map_err(|_| unknown())?;
            let decided = ledger.migrations.get(&MigrationId(id)).filter(|stored| stored.decision.is_some());
            decided.ok_or_else(unknown)?;
            let (host, incarnation) = (HostId(number(host)?), Incarnation(decode(key, value)?));
            ledger.migrations.change(MigrationId(id), |stored| {
                stored.owed.get_or_insert_default().insert(host, incarnation);
            });
        }
        Some(("groups", _)) => {}
        _ => return Err(unknown()),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{State, read};

    proptest! {
        /// Whatever lies under the prefix is read or refused.
        #[test]
        fn foreign_rows_are_refused_in_a_sentence(
            key in "(head|settings|version|(hosts|host-names|vms|vm-names|links|migrations|owed|groups)/[0-9a-fG+-]{0,18})",
            value in proptest::collection::vec(any::<u8>(), 0..40),
        ) {
            if let Err(error) = read(&key, &value, &mut State::default()) {
                prop_assert!(error.to_string().contains("is damaged"), "{error}");
            }
        }
    }
}
