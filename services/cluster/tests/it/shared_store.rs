//! The store that several instances share, against a fake of etcd with the same guards and limits. The same changes make the same state as
//! in a file. An instance that no longer leads changes nothing. A change is applied wholly or not at all, whichever requests and answers
//! are lost.

use crate::common::changes;

use std::sync::Arc;
use std::time::{Duration, Instant};

use changes::{after, changes};
use cluster::kv::{Guard, Kv as _, Operation};
use cluster::kv_store::leader_key;
use cluster::state::{AboutVm, Change, Nic, State};
use cluster::term::Term;
use cluster::{KvStore, RedbStore, Store as _, StoreError};
use cluster_testbed::{FakeKv, Fate};
use facilities::rng::SplitMix64;
use nomad::VmId;
use nomad::coordinator::Record;
use proptest::prelude::*;

const PREFIX: &str = "/causeway";
const LONG: Duration = Duration::from_secs(3600);

/// Becomes leader, the one before gone or not.
fn lead(kv: &FakeKv) -> Arc<Term> {
    let lease = kv.grant(LONG, LONG).unwrap();
    let key = leader_key(PREFIX);
    if let Some(before) = kv.get(&key, LONG).unwrap() {
        let gone = [Operation::Delete(key.clone())];
        kv.transact(&[Guard::Created(key.clone(), before.created)], &gone, LONG).unwrap().unwrap();
    }
    let put = Operation::Put { key: key.clone(), value: Vec::new(), lease: Some(lease.id) };
    let term = kv.transact(&[Guard::Created(key, 0)], &[put], LONG).unwrap().unwrap();
    Arc::new(Term::new(u64::try_from(term).unwrap(), lease.id, Instant::now() + LONG))
}

fn open(kv: &FakeKv) -> KvStore {
    KvStore::open(Arc::new(kv.clone()), PREFIX, lead(kv)).unwrap()
}

/// Links of one VM with many: more rows than a transaction of etcd takes, and none of them without its change.
fn many(count: u32) -> Vec<Change> {
    (2..count + 2).map(|peer| Change::Ledger(Record::Linked { a: VmId(1), b: VmId(peer) })).collect()
}

/// VMs with as many addresses as they may have: more bytes than a transaction of etcd takes.
fn wide(count: u32) -> Vec<Change> {
    let addresses = |vm: u32| {
        (0..128_u32).map(|number| (u128::from(vm) << 32 | u128::from(number)).to_be_bytes()).collect()
    };
    let nics = |vm| {
        (0..16).map(|nic| Nic { segment: format!("s{nic}"), addresses: addresses(vm), mac: None }).collect()
    };
    (1..=count).map(|vm| Change::Vm(VmId(vm), AboutVm { name: format!("vm{vm}"), nics: nics(vm) })).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10, ..ProptestConfig::default() })]

    /// The same changes make the same state as in a file: in the leader's memory, and as the next leader reads it.
    #[test]
    fn the_same_changes_make_the_same_state(seed in 100_u64..100_000) {
        let folder = tempfile::tempdir().unwrap();
        let mut file = RedbStore::open(&folder.path().join("cluster.redb")).unwrap();
        let kv = FakeKv::default();
        let mut store = open(&kv);
        let changes = changes(seed, 120);
        for (count, one) in changes.iter().enumerate() {
            store.write(one).unwrap();
            if seed % 4 == 0 {
                file.write(one).unwrap();
                prop_assert_eq!(store.state(), file.state());
            }
            if count % 10 == 0 {
                store = open(&kv);
            }
            prop_assert_eq!(store.state(), &after(&changes[..=count]));
        }
    }

    /// The fake loses, delays and refuses requests and answers at random. A write that succeeded is in the state, and one that failed
    /// isn't. After [`StoreError::Unknown`] the next leader finds the write wholly or not at all. Delayed requests that arrive then change
    /// nothing.
    #[test]
    fn what_is_said_is_so(seed in any::<u64>()) {
        let kv = FakeKv::default();
        let mut store = open(&kv);
        let mut rng = SplitMix64::new(seed);
        let mut expected = State::default();
        for (number, mut one) in changes(seed % 64, 80).into_iter().enumerate() {
            if rng.chance(200) {
                one.extend(many(rng.between(90, 350)));
            }
            for _ in 0..rng.below(5) {
                let fates = [Fate::Answered, Fate::RequestLost, Fate::AnswerLost, Fate::Late, Fate::Refused];
                kv.fate(&[fates[rng.below(5) as usize]]);
            }
            let mut with = expected.clone();
            for change in &one {
                with.apply(change);
            }
            with.revision += 1;
            match store.write(&one) {
                Ok(()) => expected = with,
                Err(StoreError::Kv(_) | StoreError::NotLeading) => {}
                Err(StoreError::Unknown) => {
                    // The store was refused while it determined the outcome. The next leader's state shows it.
                    kv.calm();
                    store = open(&kv);
                    prop_assert!(*store.state() == expected || *store.state() == with, "change {number} is there in part");
                    expected = store.state().clone();
                }
                Err(other) => panic!("{other}"),
            }
            kv.calm();
            if rng.chance(300) {
                kv.arrive();
            }
            if rng.chance(200) || !store.term().holds() {
                store = open(&kv);
            }
            prop_assert_eq!(store.state(), &expected, "change {}", number);
        }
        kv.arrive();
        let last = open(&kv);
        prop_assert_eq!(last.state(), &expected);
    }
}

/// An instance that doesn't lead any more, and doesn't know it, changes nothing.
#[test]
fn who_does_not_lead_any_more_changes_nothing() {
    let kv = FakeKv::default();
    let changes = changes(7, 20);
    let mut first = open(&kv);
    first.write(&changes[0]).unwrap();
    let mut second = open(&kv);
    assert_eq!(second.state(), first.state());
    for write in [changes[1].clone(), many(400)] {
        assert!(matches!(first.write(&write), Err(StoreError::NotLeading)));
        assert!(!first.term().holds(), "who is told so knows it from then on");
    }
    second.write(&changes[1]).unwrap();
    assert_eq!(second.state(), &after(&changes[..2]));
    assert_eq!(open(&kv).state(), &after(&changes[..2]));
}

/// A leader whose key is gone changes nothing, whether or not another leader's key exists that hasn't written yet. That holds for its new
/// requests and for those in flight.
#[test]
fn without_the_leaders_key_nothing_is_changed() {
    let changes = changes(7, 20);
    for (another, large) in [(false, false), (false, true), (true, false), (true, true)] {
        let kv = FakeKv::default();
        let mut first = open(&kv);
        first.write(&changes[0]).unwrap();
        // The last that it sent before it was cut off, on its way.
        let cut = kv.clone();
        let mut held = KvStore::open(Arc::new(cut.clone()), PREFIX, lead(&kv)).unwrap();
        let before = held.state().clone();
        kv.fate(&[Fate::Late]);
        kv.die_after(1, cut.switch(), Arc::clone(held.term()));
        assert!(matches!(held.write(&changes[1]), Err(StoreError::Unknown)));
        let lease = held.term().lease();
        // Until the lease is over it is the leader's to write.
        let mut first = KvStore::open(Arc::new(kv.clone()), PREFIX, Arc::new(same(held.term()))).unwrap();
        kv.revoke(lease, LONG).unwrap();
        let next = another.then(|| lead(&kv));
        let write = if large { many(300) } else { changes[1].clone() };
        assert!(matches!(first.write(&write), Err(StoreError::NotLeading)));
        assert_eq!(kv.arrive(), [false]);
        let next = next.unwrap_or_else(|| lead(&kv));
        assert_eq!(KvStore::open(Arc::new(kv.clone()), PREFIX, next).unwrap().state(), &before);
    }
}

/// A term as an instance knows it that hasn't heard of its end.
fn same(term: &Term) -> Term {
    Term::new(term.number(), term.lease(), Instant::now() + LONG)
}

/// What a leader sent, and sent again because no answer came, does nothing when it arrives: not to the next leader's state, and not to its own.
#[test]
fn a_request_that_arrives_late_does_nothing() {
    let changes = changes(7, 20);
    // A small change, and each request of a large one: its part, the one that counts, three portions of rows and the end.
    for (write, requests) in [(changes[1].clone(), 1), (many(250), 6)] {
        for late in 0..requests {
            for taken_over in [false, true] {
                let kv = FakeKv::default();
                let mut first = open(&kv);
                first.write(&changes[0]).unwrap();
                kv.fate(&vec![Fate::Answered; late]);
                kv.fate(&[Fate::Late]);
                let written = first.write(&write);
                assert!(written.is_ok(), "it is sent again, {late}: {written:?}");
                let mut next = if taken_over { open(&kv) } else { first };
                if !taken_over {
                    // Its own next transaction goes before it.
                    next.write(&changes[2]).unwrap();
                }
                let state = next.state().clone();
                assert_eq!(kv.arrive(), [false], "request {late}");
                assert_eq!(open(&kv).state(), &state, "request {late}");
            }
        }
    }
}

/// A leader dies after each request of a large change: the next one finds all of it or nothing.
#[test]
fn a_large_change_is_there_wholly_or_not_at_all() {
    for write in [many(1000), wide(40)] {
        let kv = FakeKv::default();
        let mut store = open(&kv);
        let before = kv.transactions();
        store.write(&write).unwrap();
        let requests = kv.transactions() - before;
        assert!(requests > 4, "it wasn't large");
        let mut all = State::default();
        for change in &write {
            all.apply(change);
        }
        all.revision = 1;
        assert_eq!(open(&kv).state(), &all);
        let mut seen = [0; 2];
        for answered in 0..requests {
            let kv = FakeKv::default();
            let client = kv.clone();
            let cut = client.switch();
            let mut store = KvStore::open(Arc::new(client), PREFIX, lead(&kv)).unwrap();
            kv.die_after(answered, cut, Arc::clone(store.term()));
            drop(store.write(&write));
            let found = open(&kv);
            assert!(*found.state() == all || *found.state() == State::default(), "after {answered} requests");
            seen[usize::from(*found.state() == all)] += 1;
            // Nothing of it is left over.
            assert!(kv.range("/causeway/batch/", LONG).unwrap().is_empty());
        }
        assert!(seen.iter().all(|times| *times > 1), "{seen:?}");
    }
}

/// An empty store takes over the whole state of a cluster's file. A store with a state keeps its own.
#[test]
fn a_files_state_is_taken_over_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut file = RedbStore::open(&folder.path().join("cluster.redb")).unwrap();
    for one in changes(11, 150).iter().chain([&many(500)]) {
        file.write(one).unwrap();
    }
    assert!(!file.state().ledger.migrations.is_empty());
    let kv = FakeKv::default();
    let mut store = open(&kv);
    assert!(store.begin_with(file.state()).unwrap());
    assert_eq!(store.state(), file.state());
    let mut next = open(&kv);
    assert_eq!(next.state(), file.state());
    next.write(&many(3)).unwrap();
    let before = next.state().clone();
    assert!(!next.begin_with(file.state()).unwrap());
    assert_eq!(open(&kv).state(), &before);
}

/// Foreign things under the prefix, and another version, are refused in a sentence.
#[test]
fn what_is_something_else_is_refused() {
    let at = |key: &str, value: &[u8]| {
        let kv = FakeKv::default();
        kv.transact(&[], &[Operation::put(format!("{PREFIX}/{key}"), value.to_vec())], LONG).unwrap();
        KvStore::open(Arc::new(kv.clone()), PREFIX, lead(&kv)).map(drop).unwrap_err().to_string()
    };
    assert!(at("state/version", &[9]).contains("has version 9"));
    assert!(at("state/hosts/00000001", &[9]).contains("no version"));
    assert!(at("something", &[]).contains("is damaged"));
}
