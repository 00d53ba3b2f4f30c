//! For tests: a store of keys and values in memory that several instances of one process share, with etcd's meaning and limits, whose answers
//! can be lost or late.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::kv::{Entry, Guard, Kv, KvError, Lease, Operation};
use crate::term::Term;

/// etcd's limits, as it is delivered.
const ETCD_OPERATIONS: usize = 128;
const ETCD_BYTES: usize = 1_572_864;

/// What becomes of a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It is answered.
    Answered,
    /// It isn't done, and not answered.
    RequestLost,
    /// It is done, and not answered.
    AnswerLost,
    /// It isn't answered, and is done when [`FakeKv::arrive`] is called.
    Late,
    /// It is refused.
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
    /// How far this store's clock is ahead.
    ahead: Duration,
    fates: VecDeque<Fate>,
    late: Vec<(Vec<Guard>, Vec<Operation>)>,
    transactions: u64,
    /// After so many more transactions, a client is cut off and its term is over.
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

/// See the module. Clones share the keys; each is a client of its own that can be cut off.
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

    /// Whether this client is cut off.
    #[must_use]
    pub fn switch(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.cut)
    }

    /// Whether this client believes that its leases are renewed, which they aren't: as one whose clock stands still.
    #[must_use]
    pub fn deceived(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.deceived)
    }

    /// Lets leases grow older.
    pub fn advance(&self, by: Duration) {
        self.lock().ahead += by;
        drop(self.lock());
    }

    /// What becomes of the next transactions.
    pub fn fate(&self, fates: &[Fate]) {
        self.lock().fates.extend(fates);
    }

    /// From now on all is answered; what is late stays so.
    pub fn calm(&self) {
        self.lock().fates.clear();
    }

    /// Late transactions are done now. Which of them were.
    pub fn arrive(&self) -> Vec<bool> {
        let mut inner = self.lock();
        let late = std::mem::take(&mut inner.late);
        late.iter().map(|(guards, operations)| inner.transact(guards, operations).is_some()).collect()
    }

    /// Transactions that were sent so far.
    #[must_use]
    pub fn transactions(&self) -> u64 {
        self.lock().transactions
    }

    /// The leader dies after so many more transactions: this client is cut off, and its term over.
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
            // Leases end by time alone: looked at again soon.
            drop(self.shared.1.wait_timeout(inner, Duration::from_millis(10)));
        }
    }
}
