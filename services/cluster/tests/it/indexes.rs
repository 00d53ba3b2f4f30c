//! The indexes of the state say what scans of it say, whatever was changed, and however it was read.

use crate::common::changes;

use std::collections::BTreeSet;

use changes::changes;
use cluster::state::{AboutVm, Change, Nic, State};
use cluster::{RedbStore, Store as _};
use facilities::rng::SplitMix64;
use nomad::{HostId, VmId};
use proptest::prelude::*;

const SEGMENTS: [&str; 2] = ["blue", "red"];
/// Numbers that changes use, and some that they don't.
const NUMBERS: std::ops::RangeInclusive<u32> = 0..=9;

/// Everything that is looked up by an index, and what a scan finds.
fn compare(state: &State) -> Result<(), TestCaseError> {
    let ledger = &state.ledger;
    for number in NUMBERS {
        let (vm, host) = (VmId(number), HostId(number));
        let name = vm.to_string();
        let scan = state.vms.iter().find(|(_, about)| about.name == name).map(|(vm, _)| *vm);
        prop_assert_eq!(state.vm(&name).map(|(vm, _)| vm), scan, "VM by name");
        let name = host.to_string();
        let scan = state.hosts.iter().find(|(_, about)| about.name == name).map(|(host, _)| *host);
        prop_assert_eq!(state.host(&name).map(|(host, _)| host), scan, "host by name");
        let peers: BTreeSet<VmId> = ledger
            .links
            .iter()
            .filter_map(|(a, b)| if *a == vm { Some(*b) } else { (*b == vm).then_some(*a) })
            .collect();
        prop_assert_eq!(ledger.links.peers(vm).collect::<BTreeSet<_>>(), peers, "peers");
        let has = |stored: &nomad::coordinator::StoredMigration| {
            stored.binds() && stored.moves.iter().any(|moved| moved.vm == vm)
        };
        let binding = ledger.migrations.iter().find(|(_, stored)| has(stored)).map(|(id, _)| *id);
        prop_assert_eq!(ledger.migration_of(vm), binding, "migration of a VM");
        let alive = ledger.vms.iter().filter(|(_, owner)| owner.alive && owner.host == host);
        let alive: BTreeSet<VmId> = alive.map(|(vm, _)| *vm).collect();
        prop_assert_eq!(ledger.vms.alive_on(host).collect::<BTreeSet<_>>(), alive, "VMs of a host");
    }
    for about in state.hosts.values() {
        let scan = state.hosts.iter().filter(|(_, other)| other.address == about.address);
        let scan: BTreeSet<HostId> = scan.map(|(host, _)| *host).collect();
        prop_assert_eq!(state.hosts.at(about.address).collect::<BTreeSet<_>>(), scan, "hosts at an address");
    }
    for segment in SEGMENTS {
        for last in 0..9 {
            let has = |about: &AboutVm| {
                about.nics.iter().any(|nic| nic.segment == segment && nic.addresses.contains(&[last; 16]))
            };
            let alive = |vm: &VmId| ledger.vms.get(vm).is_some_and(|owner| owner.alive);
            let scan = state.vms.iter().find(|(vm, about)| alive(vm) && has(about)).map(|(vm, _)| *vm);
            prop_assert_eq!(state.owner_of(segment, &[last; 16]), scan, "VM by address");
        }
    }
    Ok(())
}

/// Other NICs of VMs that are there, with addresses that others have as well.
fn readdressed(rng: &mut SplitMix64) -> Change {
    let vm = VmId(rng.between(1, 6));
    let nic = |rng: &mut SplitMix64| Nic {
        segment: SEGMENTS[rng.below(2) as usize].to_owned(),
        addresses: (0..rng.below(4)).map(|_| [u8::try_from(rng.below(9)).unwrap(); 16]).collect(),
        mac: None,
    };
    let nics = (0..rng.below(3)).map(|_| nic(rng)).collect();
    Change::Vm(vm, AboutVm { name: VmId(rng.between(1, 6)).to_string(), nics })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn indexes_say_what_scans_say(seed in any::<u64>()) {
        let mut rng = SplitMix64::new(seed);
        let mut state = State::default();
        for (number, mut one) in changes(seed % 1_024, 200).into_iter().enumerate() {
            if rng.chance(300) {
                one.push(readdressed(&mut rng));
            }
            for change in &one {
                state.apply(change);
            }
            compare(&state).map_err(|error| TestCaseError::fail(format!("change {number}: {error}")))?;
        }
    }
}

/// A state that was read has the indexes of the one that was written.
#[test]
fn indexes_are_read_with_the_state() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cluster.redb");
    let mut store = RedbStore::open(&path).unwrap();
    for one in changes(5, 150) {
        store.write(&one).unwrap();
    }
    let written = store.state().clone();
    drop(store);
    let store = RedbStore::open(&path).unwrap();
    assert_eq!(store.state(), &written);
    compare(store.state()).unwrap();
}
