//! A key-value store in memory for tests, shared by several instances of one process. It has etcd's semantics and
//! limits. Tests can drop or delay its requests and responses.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cluster::kv::{Entry, Guard, Kv, KvError, Lease, Operation};
use cluster::term::Term;

/// etcd's default limits.
const ETCD_OPERATIONS: usize = 128;
const ETCD_BYTES: usize = 1_572_864;

/// The fate of a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It is carried out and answered.
    Answered,
    /// The request is lost.
    RequestLost,
    /// It is carried out, but the response is lost.
    AnswerLost,
    /// The response is lost, and it is carried out when [`FakeKv::arrive`] is called.
    Late,
    /// The store refuses it.
    Refused,
}

#[derive(Debug, Clone)]
struct Stored {
    value: Vec<u8>,
    created: i64,
    modified: i64,
    lease: Option<i64>,
}

#[derive(Debug)]
struct Held {
    lasts: Duration,
    until: Instant,
}

#[derive(Debug, Default)]
struct Inner {
    revision: i64,
    keys: BTreeMap<String, Stored>,
    leases: BTreeMap<i64, Held>,
    next_lease: i64,
    /// Added to the time at which leases expire.
    ahead: Duration,
    fates: VecDeque<Fate>,
    late: Vec<(Vec<Guard>, Vec<Operation>)>,
    transactions: u64,
    /// After this many transactions the leader dies: its client is cut off, and its term ends.
    dying: Option<(u64, Arc<AtomicBool>, Arc<Term>)>,
}

impl Inner {
    fn expire(&mut self) -> bool {
        let now = Instant::now() + self.ahead;
        let over: Vec<i64> =
            self.leases.iter().filter(|(_, held)| held.until <= now).map(|(id, _)| *id).collect();
        for lease in &over {
            self.end(*lease);
        }
        !over.is_empty()
    }

    fn end(&mut self, lease: i64) {
        self.leases.remove(&lease);
        let before = self.keys.len();
        self.keys.retain(|_, stored| stored.lease != Some(lease));
        if self.keys.len() != before {
            self.revision += 1;
        }
    }

    fn holds(&self, guard: &Guard) -> bool {
        match guard {
            Guard::Created(key, revision) => {
                self.keys.get(key).map_or(0, |stored| stored.created) == *revision
            }
            Guard::Modified(key, revision) => {
                self.keys.get(key).map_or(0, |stored| stored.modified) == *revision
            }
        }
    }

    fn transact(&mut self, guards: &[Guard], operations: &[Operation]) -> Option<i64> {
        if !guards.iter().all(|guard| self.holds(guard)) {
            return None;
        }
        self.revision += 1;
        for operation in operations {
            match operation {
                Operation::Put { key, value, lease } => {
                    let created = self.keys.get(key).map_or(self.revision, |stored| stored.created);
                    let stored =
                        Stored { value: value.clone(), created, modified: self.revision, lease: *lease };
                    self.keys.insert(key.clone(), stored);
                }
                Operation::Delete(key) => drop(self.keys.remove(key)),
                Operation::DeleteAll(prefix) => self.keys.retain(|key, _| !key.starts_with(prefix)),
            }
        }
        Some(self.revision)
    }
}

/// A key-value store in memory. Clones share the keys; each is a client that can be cut off on its own.
#[derive(Debug, Default)]
pub struct FakeKv {
    shared: Arc<(Mutex<Inner>, Condvar)>,
    cut: Arc<AtomicBool>,
    deceived: Arc<AtomicBool>,
}

impl Clone for FakeKv {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared), cut: Arc::default(), deceived: Arc::default() }
    }
}

impl FakeKv {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        let mut inner = self.shared.0.lock().unwrap_or_else(PoisonError::into_inner);
        if inner.expire() {
            self.shared.1.notify_all();
        }
        inner
    }

    /// The flag that cuts this client off while it is set.
    #[must_use]
    pub fn switch(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.cut)
    }

    /// The flag that makes this client believe, while it is set, that renewals succeed. It models a client whose clock
    /// has stopped.
    #[must_use]
    pub fn deceived(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.deceived)
    }

    /// Advances the clock by which leases expire.
    pub fn advance(&self, by: Duration) {
        self.lock().ahead += by;
        drop(self.lock());
    }

    /// Sets the fates of the next transactions.
    pub fn fate(&self, fates: &[Fate]) {
        self.lock().fates.extend(fates);
    }

    /// Clears the remaining fates: later transactions are answered. Delayed ones stay delayed.
    pub fn calm(&self) {
        self.lock().fates.clear();
    }

    /// Carries out delayed transactions. Returns for each whether its guards held.
    pub fn arrive(&self) -> Vec<bool> {
        let mut inner = self.lock();
        let late = std::mem::take(&mut inner.late);
        late.iter().map(|(guards, operations)| inner.transact(guards, operations).is_some()).collect()
    }

    /// Number of transactions received so far.
    #[must_use]
    pub fn transactions(&self) -> u64 {
        self.lock().transactions
    }

    /// Makes the leader die after this many transactions: its client is cut off, and its term ends.
    pub fn die_after(&self, transactions: u64, client: Arc<AtomicBool>, term: Arc<Term>) {
        let mut inner = self.lock();
        inner.dying = Some((inner.transactions + transactions, client, term));
    }

    fn away(&self) -> KvError {
        KvError::Away { place: self.place(), reason: "cut off".to_owned() }
    }

    fn reach(&self) -> Result<MutexGuard<'_, Inner>, KvError> {
        if self.cut.load(Ordering::SeqCst) { Err(self.away()) } else { Ok(self.lock()) }
    }
}

impl Kv for FakeKv {
    fn place(&self) -> String {
        "memory".to_owned()
    }

    fn grant(&self, lasts: Duration, _: Duration) -> Result<Lease, KvError> {
        let mut inner = self.reach()?;
        inner.next_lease += 1;
        let (id, until) = (inner.next_lease, Instant::now() + inner.ahead + lasts);
        inner.leases.insert(id, Held { lasts, until });
        Ok(Lease { id, lasts })
    }

    fn renew(&self, lease: i64, _: Duration) -> Result<Option<Duration>, KvError> {
        let mut inner = self.reach()?;
        if self.deceived.load(Ordering::SeqCst) {
            return Ok(Some(Duration::from_secs(3600)));
        }
        let now = Instant::now() + inner.ahead;
        let held = inner.leases.get_mut(&lease);
        Ok(held.map(|held| {
            held.until = now + held.lasts;
            held.lasts
        }))
    }

    fn revoke(&self, lease: i64, _: Duration) -> Result<(), KvError> {
        self.reach()?.end(lease);
        self.shared.1.notify_all();
        Ok(())
    }

    fn get(&self, key: &str, _: Duration) -> Result<Option<Entry>, KvError> {
        let inner = self.reach()?;
        Ok(inner.keys.get(key).map(|stored| Entry {
            key: key.to_owned(),
            value: stored.value.clone(),
            created: stored.created,
            modified: stored.modified,
        }))
    }

    fn range(&self, prefix: &str, _: Duration) -> Result<Vec<Entry>, KvError> {
        let inner = self.reach()?;
        let with = inner.keys.iter().filter(|(key, _)| key.starts_with(prefix));
        Ok(with
            .map(|(key, stored)| Entry {
                key: key.clone(),
                value: stored.value.clone(),
                created: stored.created,
                modified: stored.modified,
            })
            .collect())
    }

    fn transact(
        &self,
        guards: &[Guard],
        operations: &[Operation],
        _: Duration,
    ) -> Result<Option<i64>, KvError> {
        let mut inner = self.reach()?;
        if inner.dying.as_ref().is_some_and(|(at, ..)| inner.transactions >= *at)
            && let Some((_, client, term)) = inner.dying.take()
        {
            client.store(true, Ordering::SeqCst);
            term.end();
            return Err(self.away());
        }
        inner.transactions += 1;
        let refused = |reason: &str| KvError::Refused { place: self.place(), reason: reason.to_owned() };
        if operations.len() > ETCD_OPERATIONS {
            return Err(refused("too many operations in txn request"));
        }
        if operations.iter().map(Operation::bytes).sum::<usize>() > ETCD_BYTES {
            return Err(refused("request is too large"));
        }
        let mut put = BTreeSet::new();
        for operation in operations {
            if let Operation::Put { key, lease, .. } = operation {
                if !put.insert(key) {
                    return Err(refused("duplicate key given in txn request"));
                }
                if lease.is_some_and(|lease| !inner.leases.contains_key(&lease)) {
                    return Err(refused("requested lease not found"));
                }
            }
        }
        match inner.fates.pop_front().unwrap_or(Fate::Answered) {
            Fate::Answered => Ok(inner.transact(guards, operations)),
            Fate::RequestLost => Err(self.away()),
            Fate::AnswerLost => {
                inner.transact(guards, operations);
                Err(self.away())
            }
            Fate::Late => {
                inner.late.push((guards.to_vec(), operations.to_vec()));
                Err(self.away())
            }
            Fate::Refused => Err(refused("no space")),
        }
    }

    fn wait_gone(&self, key: &str, _: i64, within: Duration) -> Result<bool, KvError> {
        let end = Instant::now() + within;
        loop {
            let inner = self.reach()?;
            if !inner.keys.contains_key(key) {
                return Ok(true);
            }
            if Instant::now() >= end {
                return Ok(false);
            }
            // Leases expire by time alone: checks again soon.
            drop(self.shared.1.wait_timeout(inner, Duration::from_millis(10)));
        }
    }
}
