//! The service's state in a store that several instances share, of which one leads.
//!
//! ```text
//!  PREFIX/leader        the leader's key: goes when its lease ends; the revision that made it is the term
//!  PREFIX/state/…       rows, see [`crate::rows`]
//!  PREFIX/batch/…       a transaction that is too large for one of the store's: its parts, then, when all are there, `commit`
//! ```
//!
//! **Fencing.** Every transaction is guarded by the revision that made the leader's key and by the revision of the last change of the head row,
//! which every transaction changes. So whatever an instance sends after another has become leader does nothing, however late it arrives, and
//! whatever it sent before it gave a request up does nothing after the next one that succeeded.
//!
//! **No answer.** What was sent may be done yet. The state is read again, and where the change isn't in it the head row is written anew: when
//! that succeeds, the old request can't any more. Then, and only then, it is known that nothing has changed, and the change is sent again. Where that can't be found out
//! while the term lasts, the term is over: the next leader reads what is there.
//!
//! **Large transactions.** etcd takes 128 operations and 1.5 MiB at most. What is larger is laid down in parts, which mean nothing yet; the
//! transaction that writes `commit` and the head row is the one that counts. Rows are then written in portions, and the batch is removed.
//! An instance that finds a batch with its `commit` regards the batch's rows as written, and writes them before anything else. It removes a
//! batch without `commit`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::kv::{Guard, Kv, KvError, MAX_BYTES, MAX_OPERATIONS, Operation};
use crate::rows::{self, Row};
use crate::state::{Change, State};
use crate::store::Store;
use crate::store_error::StoreError;
use crate::term::Term;

/// One request takes no longer.
const REQUEST: Duration = Duration::from_secs(2);
/// A store that doesn't answer is asked again after this long.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// Attempts to write staged changes, each after it is certain that the one before has changed nothing.
const ATTEMPTS: u32 = 3;

/// The leader's key.
#[must_use]
pub fn leader_key(prefix: &str) -> String {
    format!("{prefix}/leader")
}

/// The state in memory, and in a shared store for as long as a term holds.
#[derive(Debug)]
pub struct KvStore {
    kv: Arc<dyn Kv>,
    prefix: String,
    term: Arc<Term>,
    state: State,
    /// Changes that `state` has and the store hasn't: one entry per [`Store::stage`].
    staged: Vec<Vec<Change>>,
    /// Rows that they touch.
    touched: BTreeSet<Row>,
    /// `state` has changes that aren't known to be written.
    ahead: bool,
    /// A commit has failed while the state was ahead.
    stale: bool,
    /// Revision of the head row's last change.
    head: i64,
    /// The head row's value after it.
    head_value: Vec<u8>,
    /// Rows of a batch that counts, and that aren't all written.
    batch: Vec<Operation>,
}

/// A part of a batch: rows, and those without a value are removed.
type Part = Vec<(String, Option<Vec<u8>>)>;

impl KvStore {
    /// Reads the state at the beginning of a term.
    ///
    /// # Errors
    /// When the store doesn't answer, has something else there, or the term is over.
    pub fn open(kv: Arc<dyn Kv>, prefix: &str, term: Arc<Term>) -> Result<Self, StoreError> {
        let mut store = Self {
            kv,
            prefix: prefix.to_owned(),
            term,
            state: State::default(),
            staged: Vec::new(),
            touched: BTreeSet::new(),
            ahead: false,
            stale: false,
            head: 0,
            head_value: Vec::new(),
            batch: Vec::new(),
        };
        loop {
            store.read()?;
            // What an earlier attempt of this very term has sent does nothing from here on.
            if store.fence()? {
                store.finish()?;
                return Ok(store);
            }
        }
    }

    /// The term in which it may be written.
    #[must_use]
    pub fn term(&self) -> &Arc<Term> {
        &self.term
    }

    fn key(&self, of: &str) -> String {
        format!("{}/state/{of}", self.prefix)
    }

    fn batch_key(&self, of: &str) -> String {
        format!("{}/batch/{of}", self.prefix)
    }

    /// How long a request may take now.
    fn within(&self) -> Result<Duration, StoreError> {
        let left = self.term.left().unwrap_or(REQUEST).min(REQUEST);
        if left.is_zero() { Err(StoreError::NotLeading) } else { Ok(left) }
    }

    /// One transaction of this term, after what was written last. `None`: a guard doesn't hold.
    fn transact(&self, operations: &[Operation]) -> Result<Option<i64>, StoreError> {
        let term = i64::try_from(self.term.number()).unwrap_or(i64::MAX);
        let guards = [
            Guard::Created(leader_key(&self.prefix), term),
            Guard::Modified(self.key(rows::HEAD), self.head),
        ];
        Ok(self.kv.transact(&guards, operations, self.within()?)?)
    }

    /// Reads everything. The state is what is written then, without staged changes.
    fn read(&mut self) -> Result<(), StoreError> {
        let leader = leader_key(&self.prefix);
        let (states, batches) = (self.key(""), self.batch_key(""));
        let (mut leads, mut head, mut commit) = (false, 0, None);
        let (mut found, mut parts) = (BTreeMap::new(), Vec::new());
        for entry in self.kv.range(&format!("{}/", self.prefix), self.within()?)? {
            if entry.key == leader {
                leads = u64::try_from(entry.created) == Ok(self.term.number());
            } else if let Some(key) = entry.key.strip_prefix(&states) {
                if key == rows::HEAD {
                    head = entry.modified;
                }
                found.insert(key.to_owned(), entry.value);
            } else if let Some(key) = entry.key.strip_prefix(&batches) {
                if key == "commit" { commit = Some(entry.value) } else { parts.push(entry.value) }
            } else {
                let text = format!("{} is no key of it", entry.key.escape_debug());
                return Err(StoreError::Damaged(text));
            }
        }
        if !leads {
            self.term.end();
            return Err(StoreError::NotLeading);
        }
        let mut batch = Vec::new();
        if let Some(commit) = commit {
            let damaged = |text: &str| StoreError::Damaged(format!("its batch {text}"));
            let count: u32 = postcard::from_bytes(&commit).map_err(|_| damaged("has no number of parts"))?;
            if usize::try_from(count) != Ok(parts.len()) {
                return Err(damaged("hasn't all its parts"));
            }
            for part in parts {
                let part: Part = postcard::from_bytes(&part).map_err(|_| damaged("can't be decoded"))?;
                for (key, value) in part {
                    batch.push(match &value {
                        Some(value) => Operation::put(self.key(&key), value.clone()),
                        None => Operation::Delete(self.key(&key)),
                    });
                    match value {
                        Some(value) => drop(found.insert(key, value)),
                        None => drop(found.remove(&key)),
                    }
                }
            }
        }
        match found.remove(rows::FORMAT) {
            Some(version) => rows::check_format(&version)?,
            None if found.is_empty() => {}
            None => return Err(StoreError::Damaged("it has no version".to_owned())),
        }
        let mut state = State::default();
        for (key, value) in &found {
            rows::read(key, value, &mut state)?;
        }
        self.head_value = Row::Head.value(&state)?.unwrap_or_default();
        (self.state, self.head, self.batch) = (state, head, batch);
        self.touched.clear();
        self.ahead = false;
        Ok(())
    }

    /// Writes the head row anew: nothing that was sent before is done any more. `false`: something was done meanwhile, read again.
    fn fence(&mut self) -> Result<bool, StoreError> {
        let mut operations = vec![
            Operation::put(self.key(rows::FORMAT), rows::format()?),
            Operation::put(self.key(rows::HEAD), self.head_value.clone()),
        ];
        if self.batch.is_empty() {
            operations.push(Operation::DeleteAll(self.batch_key("")));
        }
        let done = self.transact(&operations)?;
        self.head = done.unwrap_or(self.head);
        Ok(done.is_some())
    }

    /// Writes the rows of a batch that counts. Where that fails, it is done again from the beginning.
    fn finish(&mut self) -> Result<(), StoreError> {
        while !self.batch.is_empty() {
            let head = Operation::put(self.key(rows::HEAD), self.head_value.clone());
            let last = [Operation::DeleteAll(self.batch_key("")), head];
            let mut done = None;
            for portion in portions(&self.batch, MAX_OPERATIONS).chain([&last[..]]) {
                done = self.transact(portion)?;
                if done.is_none() {
                    break;
                }
            }
            match done {
                Some(head) => {
                    self.head = head;
                    self.batch.clear();
                }
                // An earlier try of ours was done after all, or the term is over.
                None => self.read()?,
            }
        }
        Ok(())
    }

    /// Sends a transaction that makes `revision`. `None`: it isn't known whether it is done.
    fn send(&mut self, operations: Vec<Operation>) -> Result<Option<i64>, StoreError> {
        let bytes: usize = operations.iter().map(Operation::bytes).sum();
        if operations.len() <= MAX_OPERATIONS && bytes <= MAX_BYTES {
            return self.transact(&operations);
        }
        let (states, head) = (self.key(""), self.key(rows::HEAD));
        let (heads, rows): (Vec<_>, Vec<_>) = operations
            .into_iter()
            .partition(|operation| matches!(operation, Operation::Put { key, .. } if *key == head));
        let mut count = 0_u32;
        for portion in portions(&rows, usize::MAX) {
            let row = |operation: &Operation| match operation {
                Operation::Put { key, value, .. } => {
                    (key.strip_prefix(&states).unwrap_or(key).to_owned(), Some(value.clone()))
                }
                Operation::Delete(key) | Operation::DeleteAll(key) => {
                    (key.strip_prefix(&states).unwrap_or(key).to_owned(), None)
                }
            };
            let part: Part = portion.iter().map(row).collect();
            let value = encode(&part)?;
            let key = self.batch_key(&format!("part/{count:08x}"));
            if self.transact(&[Operation::put(key, value)])?.is_none() {
                return Ok(None);
            }
            count += 1;
        }
        let mut commit = vec![Operation::put(self.batch_key("commit"), encode(&count)?)];
        commit.extend(heads);
        let done = self.transact(&commit)?;
        if done.is_some() {
            self.batch = rows;
        }
        Ok(done)
    }

    /// After a transaction whose end isn't known: whether the state has the revision that it makes.
    fn find_out(&mut self, revision: u64) -> Result<bool, StoreError> {
        loop {
            let found = self.read().and_then(|()| {
                if self.state.revision == revision {
                    return Ok(Some(true));
                }
                Ok(self.fence()?.then_some(false))
            });
            match found {
                Ok(Some(found)) => return Ok(found),
                Ok(None) => {}
                Err(StoreError::Kv(KvError::Away { .. })) => std::thread::sleep(RETRY_INTERVAL),
                Err(error) => return Err(error),
            }
        }
    }
}

impl KvStore {
    /// Begins with the state of another store, where there is none here yet. Whether that was so.
    ///
    /// # Errors
    /// As [`Store::write`].
    pub fn begin_with(&mut self, state: &State) -> Result<bool, StoreError> {
        if self.state.revision > 0 || state.revision == 0 {
            return Ok(false);
        }
        self.finish()?;
        self.state = state.clone();
        self.put(&rows::all(state))?;
        Ok(true)
    }

    /// One attempt to write changes that are staged.
    fn attempt(&mut self, staged: &[Vec<Change>]) -> Result<(), StoreError> {
        if !self.term.holds() {
            return Err(StoreError::NotLeading);
        }
        // The batch before comes first.
        self.finish()?;
        if !self.ahead {
            // The state was read again since they were staged.
            for changes in staged {
                self.make(changes);
            }
        }
        let touched = std::mem::take(&mut self.touched);
        self.put(&touched)
    }

    /// Makes changes in memory.
    fn make(&mut self, changes: &[Change]) {
        self.ahead = true;
        self.touched.insert(Row::Head);
        for change in changes {
            rows::touch(change, &self.state, &mut self.touched);
            self.state.apply(change);
        }
        self.state.revision += 1;
    }

    /// Writes rows as the state in memory has them, which is a transaction ahead.
    fn put(&mut self, touched: &BTreeSet<Row>) -> Result<(), StoreError> {
        let revision = self.state.revision;
        let head_value = Row::Head.value(&self.state)?.unwrap_or_default();
        let mut operations = Vec::with_capacity(touched.len());
        for row in touched {
            operations.push(match row.value(&self.state)? {
                Some(value) => Operation::put(self.key(&row.key()), value),
                None => Operation::Delete(self.key(&row.key())),
            });
        }
        let error = match self.send(operations) {
            Ok(Some(head)) => {
                (self.head, self.head_value, self.ahead) = (head, head_value, false);
                if let Err(error) = self.finish() {
                    // It counts; its rows are written before the next.
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "A large transaction isn't in its place yet"
                    );
                }
                return Ok(());
            }
            Ok(None) => StoreError::NotLeading,
            Err(error) => error,
        };
        // The state in memory is ahead.
        let ambiguous = !matches!(error, StoreError::NotLeading | StoreError::Kv(KvError::Refused { .. }));
        match self.find_out(revision) {
            // It was read again.
            Ok(true) => Ok(()),
            Ok(false) => Err(error),
            Err(unclear) => {
                self.term.end();
                tracing::warn!(
                    error = &unclear as &dyn std::error::Error,
                    "This instance of the cluster service doesn't lead any more"
                );
                Err(if ambiguous { StoreError::Unknown } else { error })
            }
        }
    }
}

impl Store for KvStore {
    fn state(&self) -> &State {
        &self.state
    }

    fn stage(&mut self, changes: &[Change]) {
        self.make(changes);
        self.staged.push(changes.to_vec());
    }

    fn commit(&mut self) -> Result<(), StoreError> {
        let staged = std::mem::take(&mut self.staged);
        if staged.is_empty() {
            return Ok(());
        }
        let mut attempts = ATTEMPTS;
        let result = loop {
            attempts -= 1;
            match self.attempt(&staged) {
                // It is certain that nothing has changed, and that nothing of it will. A member of the store was lost: the next one answers.
                Err(StoreError::Kv(KvError::Away { .. })) if attempts > 0 && self.term.holds() => {}
                result => break result,
            }
        };
        self.touched.clear();
        if result.is_err() && self.ahead {
            self.stale = true;
            // Where that fails, the caller's `recover` tries again.
            drop(self.recover());
        }
        result
    }

    fn recover(&mut self) -> Result<(), StoreError> {
        if self.stale {
            if !self.term.holds() {
                return Err(StoreError::NotLeading);
            }
            self.read()?;
            self.staged.clear();
            self.stale = false;
        }
        Ok(())
    }
}

fn encode(value: &impl serde::Serialize) -> Result<Vec<u8>, StoreError> {
    postcard::to_stdvec(value)
        .map_err(|error| StoreError::Damaged(format!("a value can't be encoded ({error})")))
}

/// Operations in portions of at most so many, and of at most [`MAX_BYTES`].
fn portions(operations: &[Operation], most: usize) -> impl Iterator<Item = &[Operation]> {
    let mut rest = operations;
    std::iter::from_fn(move || {
        let mut bytes = 0_usize;
        let fits = rest.iter().take(most).take_while(|operation| {
            bytes += operation.bytes();
            bytes <= MAX_BYTES
        });
        // One operation alone always goes: rows are far smaller than a transaction may be.
        let count = fits.count().max(1).min(rest.len());
        let (portion, after) = rest.split_at(count);
        rest = after;
        (!portion.is_empty()).then_some(portion)
    })
}
