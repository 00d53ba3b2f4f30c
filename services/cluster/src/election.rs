//! Leader election among instances: the leader is the instance that owns the leader's key. The key is deleted when the
//! owner's lease ends.
//!
//! ```text
//!            ┌─────────── key exists: wait for its deletion ──────────┐
//!            ▼                                                        │
//!      read the leader's key ── none ──▶ grant a lease, make the key ─┴─ made ──▶ read the state ──▶ lead: renew the lease
//!            ▲                            (guard: it doesn't exist)                                      │
//!            └──────── not renewed in time, lease revoked, fenced, stopped ◀─────────────────────────────┘
//! ```
//!
//! An instance's term ends by its own clock before its lease can expire. The term counts from the sending of the
//! renewal, and is a tenth shorter than the lease, for clocks of different rates. An instance whose clock was suspended
//! (its process or its machine was) may believe for a moment longer that it leads. The store's guards fence it: its
//! transactions fail ([`crate::kv_store`]).

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::keeper;
use crate::kv::{Guard, Kv, KvError, Operation};
use crate::kv_store::{KvStore, leader_key};
use crate::registry::Registry;
use crate::roles::Roles;
use crate::state::State;
use crate::store_error::StoreError;
use crate::term::Term;

/// Delay before a retry, when the store doesn't answer.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// Delay before the next election, when this instance was elected but couldn't lead.
const UNFIT: Duration = Duration::from_secs(1);

/// How an instance takes part in the election.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// Prefix of all keys, without a slash at its end.
    pub prefix: String,
    /// This instance's address, as hosts and clients reach it: `HOST:PORT`.
    pub address: String,
    /// The initial state, if the store is empty.
    pub begin_with: Option<Arc<State>>,
    /// Time to live of the leader's key after its owner has died: 2 s (etcd's default minimum) to 60 s.
    pub lease: Duration,
}

/// Creates the registry of a term from its store.
pub(crate) type Make = Arc<dyn Fn(KvStore) -> Result<(Registry, u64), StoreError> + Send + Sync>;

/// When a lease may expire for its owner, whose grant or renewal was sent at `sent`.
#[must_use]
pub fn ends(sent: Instant, lasts: Duration) -> Instant {
    sent + lasts - lasts / 10
}

/// Takes part in elections until the service stops.
pub(crate) fn run(
    kv: &Arc<dyn Kv>,
    candidate: &Candidate,
    roles: &Arc<Roles>,
    make: &Make,
    stop: &Receiver<()>,
) {
    let mut election = Election { kv, candidate, roles, make, stop, key: leader_key(&candidate.prefix) };
    while !election.stopped(Duration::ZERO) {
        match election.round() {
            Ok(wait) => {
                if election.stopped(wait) {
                    return;
                }
            }
            Err(error) => {
                election.away(&error);
                if election.stopped(RETRY_INTERVAL) {
                    return;
                }
            }
        }
    }
}

struct Election<'a> {
    kv: &'a Arc<dyn Kv>,
    candidate: &'a Candidate,
    roles: &'a Arc<Roles>,
    make: &'a Make,
    stop: &'a Receiver<()>,
    key: String,
}

impl Election<'_> {
    /// Waits. Returns whether the service stops.
    fn stopped(&self, wait: Duration) -> bool {
        !matches!(self.stop.recv_timeout(wait), Err(RecvTimeoutError::Timeout))
    }

    /// Timeout of a request: a third of the lease, so that a retry fits.
    fn within(&self) -> Duration {
        self.candidate.lease / 3
    }

    fn away(&self, error: &KvError) {
        // The leader isn't known any more. The log has the first error only.
        self.roles.follow(None);
        if self.roles.trouble(Some(error.to_string())) {
            tracing::warn!(
                "{error}: until that changes this instance of the cluster service neither leads nor knows who does"
            );
        }
    }

    fn answered(&self) {
        if self.roles.trouble(None) {
            tracing::info!("{} answers again", self.kv.place());
        }
    }

    /// Follows the leader for a while, or campaigns if there is none. Returns the delay before the next round.
    fn round(&mut self) -> Result<Duration, KvError> {
        let leader = self.kv.get(&self.key, self.within())?;
        self.answered();
        let Some(entry) = leader else { return self.campaign() };
        let address = String::from_utf8_lossy(&entry.value).into_owned();
        let term = u64::try_from(entry.created).unwrap_or(0);
        if self.roles.follow(Some((address.clone(), term))) && address != self.candidate.address {
            tracing::info!(
                leader = address,
                term,
                "Another instance of the cluster service leads; this one stands by"
            );
        }
        // If this request fails with its member of etcd, the next request goes to another member and shows whether the
        // store answers.
        let waited = self.kv.wait_gone(&self.key, entry.modified, self.within());
        Ok(if waited.is_ok() { Duration::ZERO } else { RETRY_INTERVAL })
    }

    fn campaign(&mut self) -> Result<Duration, KvError> {
        self.roles.follow(None);
        let sent = Instant::now();
        let lease = self.kv.grant(self.candidate.lease, self.within())?;
        let put = Operation::Put {
            key: self.key.clone(),
            value: self.candidate.address.clone().into_bytes(),
            lease: Some(lease.id),
        };
        let made = self.kv.transact(&[Guard::Created(self.key.clone(), 0)], &[put], self.within());
        let wait = match &made {
            Ok(Some(revision)) => {
                let number = u64::try_from(*revision).unwrap_or(0);
                let term = Arc::new(Term::new(number, lease.id, ends(sent, lease.lasts)));
                self.lead(&term)
            }
            Ok(None) | Err(_) => Duration::ZERO,
        };
        // Whether it led, lost or has no answer: this lease isn't used again. If the revocation fails, the lease
        // expires.
        drop(self.kv.revoke(lease.id, self.within()));
        made.map(|_| wait)
    }

    /// Leads until the term ends. Returns the delay before the next election.
    fn lead(&mut self, term: &Arc<Term>) -> Duration {
        let (handle, inbox) = keeper::channel(Arc::clone(term));
        let (kv, prefix, make) = (Arc::clone(self.kv), self.candidate.prefix.clone(), Arc::clone(self.make));
        let (roles, leading, led) = (Arc::clone(self.roles), handle.clone(), Arc::clone(term));
        let (report, failed) = channel();
        let keeper = std::thread::Builder::new().name("keeper".to_owned()).spawn(move || {
            let made = KvStore::open(kv, &prefix, Arc::clone(&led)).and_then(|store| make(store));
            match made {
                Ok((registry, instance)) => {
                    tracing::info!(
                        term = led.number(),
                        revision = registry.state().revision,
                        "This instance of the cluster service leads"
                    );
                    roles.lead(leading);
                    keeper::run(registry, instance, Arc::clone(&led), &inbox);
                }
                Err(error) => {
                    led.end();
                    // The receiver is gone if this instance is stopping.
                    let _ = report.send(error);
                }
            }
        });
        let stopped = match &keeper {
            Ok(_) => self.hold(term),
            Err(error) => {
                tracing::error!(%error, "The keeper's thread can't be started");
                false
            }
        };
        term.end();
        handle.end();
        self.roles.follow(None);
        if let Ok(keeper) = keeper
            && keeper.join().is_err()
        {
            tracing::error!("A thread of the cluster service panicked; this is a bug");
        }
        // The registry may have started to lead after its term had ended.
        self.roles.follow(None);
        if let Ok(error) = failed.try_recv() {
            tracing::error!(
                error = &error as &dyn std::error::Error,
                "This instance of the cluster service was elected and can't lead"
            );
            self.roles.trouble(Some(error.to_string()));
            return UNFIT;
        }
        if !stopped {
            tracing::warn!(
                term = term.number(),
                "This instance of the cluster service doesn't lead any more"
            );
        }
        // Instances that wait for the key see its deletion at once.
        Duration::ZERO
    }

    /// Renews the lease until the term ends. Returns whether the service stops.
    fn hold(&self, term: &Term) -> bool {
        let every = self.candidate.lease / 4;
        let mut wait = every;
        loop {
            // Short waits, so that a term that another thread ends is detected soon.
            let slice = wait.min(RETRY_INTERVAL);
            if self.stopped(slice) {
                return true;
            }
            wait -= slice;
            let Some(left) = term.left().filter(|left| !left.is_zero()) else { return false };
            if !wait.is_zero() {
                continue;
            }
            let sent = Instant::now();
            match self.kv.renew(term.lease(), self.within().min(left)) {
                Ok(Some(lasts)) => {
                    self.answered();
                    term.extend(ends(sent, lasts));
                    wait = every;
                }
                Ok(None) => return false,
                Err(error) => {
                    if self.roles.trouble(Some(error.to_string())) {
                        tracing::warn!(
                            "{error}: this instance of the cluster service leads for {left:.1?} more without"
                        );
                    }
                    wait = RETRY_INTERVAL.min(left);
                }
            }
        }
    }
}
