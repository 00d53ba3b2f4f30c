//! The store on a real etcd: the store's contract, what the registry writes, and access with TLS and passwords.
#![cfg(feature = "etcd")]

use crate::common::changes;
use crate::common::etcd;

use std::sync::Arc;
use std::time::{Duration, Instant};

use changes::{after, changes};
use cluster::kv::{Guard, Kv, Operation};
use cluster::kv_store::leader_key;
use cluster::state::Change;
use cluster::term::Term;
use cluster::{KvStore, Store as _, StoreError};
use etcd::{Members, is_installed};
use nomad::VmId;
use nomad::coordinator::Record;

const WITHIN: Duration = Duration::from_secs(20);

fn lead(kv: &Arc<dyn Kv>, prefix: &str) -> Arc<Term> {
    let key = leader_key(prefix);
    let lease = kv.grant(Duration::from_secs(60), WITHIN).unwrap();
    assert!(lease.lasts >= Duration::from_secs(60));
    kv.transact(&[], &[Operation::Delete(key.clone())], WITHIN).unwrap().unwrap();
    let put = Operation::Put { key: key.clone(), value: b"me".to_vec(), lease: Some(lease.id) };
    let term = kv.transact(&[Guard::Created(key, 0)], &[put], WITHIN).unwrap().unwrap();
    let until = Instant::now() + Duration::from_secs(3600);
    Arc::new(Term::new(u64::try_from(term).unwrap(), lease.id, until))
}

/// etcd keeps the contract that the fake store models: guards, leases, ranges over several pages, waiting.
#[test]
fn etcd_is_what_the_store_needs() {
    if !is_installed("etcd_is_what_the_store_needs") {
        return;
    }
    let members = Members::start(1);
    let kv = members.client();
    // Guards: a missing key has revision 0, and a key that is created again has another revision than before.
    let key = || "/p/a".to_owned();
    let put = |value: &[u8]| [Operation::put(key(), value.to_vec())];
    let made = kv.transact(&[Guard::Created(key(), 0)], &put(b"1"), WITHIN).unwrap().unwrap();
    assert_eq!(kv.transact(&[Guard::Created(key(), 0)], &put(b"2"), WITHIN).unwrap(), None);
    let changed = kv.transact(&[Guard::Modified(key(), made)], &put(b"3"), WITHIN).unwrap().unwrap();
    assert_eq!(kv.transact(&[Guard::Modified(key(), made)], &put(b"4"), WITHIN).unwrap(), None);
    let entry = kv.get("/p/a", WITHIN).unwrap().unwrap();
    assert_eq!((entry.created, entry.modified, entry.value.as_slice()), (made, changed, &b"3"[..]));
    // More keys than a page holds, and keys outside of the prefix, which aren't returned.
    for portion in (0..1100_u32).collect::<Vec<_>>().chunks(100) {
        let puts: Vec<_> =
            portion.iter().map(|n| Operation::put(format!("/q/{n:04}"), n.to_be_bytes().to_vec())).collect();
        kv.transact(&[], &puts, WITHIN).unwrap().unwrap();
    }
    let all = kv.range("/q/", WITHIN).unwrap();
    assert_eq!(all.len(), 1100);
    assert!(all.windows(2).all(|pair| pair[0].key < pair[1].key));
    kv.transact(&[], &[Operation::DeleteAll("/q/".to_owned())], WITHIN).unwrap().unwrap();
    assert!(kv.range("/q/", WITHIN).unwrap().is_empty());
    assert_eq!(kv.range("/p/", WITHIN).unwrap().len(), 1);
    // A key is deleted with its lease, and a waiter is notified.
    let lease = kv.grant(Duration::from_secs(60), WITHIN).unwrap();
    let held = Operation::Put { key: "/p/l".to_owned(), value: Vec::new(), lease: Some(lease.id) };
    let since = kv.transact(&[], &[held], WITHIN).unwrap().unwrap();
    assert!(kv.renew(lease.id, WITHIN).unwrap().unwrap() >= Duration::from_secs(59));
    assert!(!kv.wait_gone("/p/l", since, Duration::from_millis(100)).unwrap());
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| kv.wait_gone("/p/l", since, WITHIN).unwrap());
        kv.revoke(lease.id, WITHIN).unwrap();
        assert!(waits.join().unwrap());
    });
    assert_eq!(kv.renew(lease.id, WITHIN).unwrap(), None);
    kv.revoke(lease.id, WITHIN).unwrap();
    // etcd refuses a transaction of more than its limit of 128 operations, with an error that names the cause.
    let many: Vec<_> = (0..129).map(|n| Operation::put(format!("/q/{n}"), Vec::new())).collect();
    let error = kv.transact(&[], &many, WITHIN).unwrap_err().to_string();
    assert!(error.contains("refuses") && error.contains("too many operations"), "{error}");
}

/// A store reads back each kind of change, also large ones. An instance that doesn't lead any more can't write.
#[test]
fn what_is_written_is_read() {
    if !is_installed("what_is_written_is_read") {
        return;
    }
    let members = Members::start(1);
    let kv: Arc<dyn Kv> = Arc::new(members.client());
    let open = || KvStore::open(Arc::clone(&kv), "/causeway", lead(&kv, "/causeway")).unwrap();
    let mut changes = changes(5, 120);
    let many = |count: u32| -> Vec<Change> {
        (100..100 + count).map(|vm| Change::Ledger(Record::Linked { a: VmId(99), b: VmId(vm) })).collect()
    };
    changes.insert(60, many(1000));
    changes.push(many(3000));
    let mut store = open();
    for (count, one) in changes.iter().enumerate() {
        store.write(one).unwrap();
        if count % 30 == 0 || one.len() > 500 {
            let mut old = std::mem::replace(&mut store, open());
            assert_eq!(store.state(), &after(&changes[..=count]));
            assert!(matches!(old.write(one), Err(StoreError::NotLeading)));
        }
    }
    assert_eq!(open().state(), &after(&changes));
}

/// etcd with TLS for both sides, then with users. A client without a certificate fails; one with a wrong password
/// receives the reason.
#[test]
fn keys_and_passwords_are_for_those_who_have_them() {
    use cluster::etcd_config::{EtcdConfig, EtcdTls};
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    if !is_installed("keys_and_passwords_are_for_those_who_have_them") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let certified = || {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        (params.signed_by(&key, &authority).unwrap().pem(), key.serialize_pem())
    };
    let of_etcd = certified();
    for (name, text) in [("ca", &authority.pem()), ("cert", &of_etcd.0), ("key", &of_etcd.1)] {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let members = Members::start_with_tls(folder.path());
    let config = |identity: Option<(String, String)>, user: Option<(&str, &str)>| {
        let mut config = EtcdConfig::new(&members.addresses()).unwrap();
        let identity = identity.map(|(certificate, key)| (certificate.into_bytes(), key.into_bytes()));
        config.tls = Some(EtcdTls { authority: authority.pem().into_bytes(), identity });
        config.user = user.map(|(user, password)| (user.to_owned(), password.to_owned()));
        config
    };
    let ours = config(Some(certified()), None).client().unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while let Err(error) = ours.get("x", Duration::from_secs(3)) {
        assert!(Instant::now() < deadline, "{error}");
        std::thread::sleep(Duration::from_millis(100));
    }
    let stranger = config(None, None).client().unwrap();
    assert!(stranger.get("x", Duration::from_secs(3)).is_err());
    // With users: root creates one, and from then on every client needs one.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (certificate, key) = certified();
        let tls = etcd_client::TlsOptions::new()
            .ca_certificate(etcd_client::Certificate::from_pem(authority.pem()))
            .identity(etcd_client::Identity::from_pem(certificate, key));
        let options = etcd_client::ConnectOptions::new().with_tls(tls);
        let mut root = etcd_client::Client::connect([members.addresses()], Some(options)).await.unwrap();
        root.user_add("root", "secret", None).await.unwrap();
        root.user_grant_role("root", "root").await.unwrap();
        root.auth_enable().await.unwrap();
    });
    let user = |password: &str| config(Some(certified()), Some(("root", password))).client().unwrap();
    let ours = user("secret");
    assert_eq!(ours.get("x", WITHIN).unwrap(), None);
    let store = KvStore::open(Arc::clone(&ours), "/causeway", lead(&ours, "/causeway"));
    assert_eq!(store.unwrap().state().revision, 0);
    let error = user("wrong").get("x", WITHIN).unwrap_err().to_string();
    assert!(error.contains("refuses") && error.contains("authentication failed"), "{error}");
}
