//! One of several instances leads: whoever holds the leader's key, which lives as long as its lease.
//!
//! ```text
//!            ┌─────────── key is there: wait until it goes ───────────┐
//!            ▼                                                        │
//!   look at the leader's key ── gone ──▶ grant a lease, make the key ─┴─ made ──▶ read the state ──▶ lead: renew the lease
//!            ▲                            (guard: it isn't there)                                       │
//!            └──────────────── not renewed in time, lease gone, fenced, stopped ◀─────────────────────────┘
//! ```
//!
//! The term of an instance ends by its own clock before its lease can: it is counted from when the renewal was sent, less a tenth of the lease
//! for clocks that don't run alike. An instance whose clock stood still (its process was stopped, its machine paused) may take itself for the
//! leader for a moment longer; the store's guards keep it from changing anything ([`crate::kv_store`]).

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::keeper;
use crate::kv::{Guard, Kv, KvError, Operation};
use crate::kv_store::{KvStore, leader_key};
use crate::registry::Registry;
use crate::roles::Roles;
use crate::state::State;
use crate::store::StoreError;
use crate::term::Term;

/// Wait before a store that doesn't answer is asked again.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// Wait after this instance couldn't lead although it was elected.
const UNFIT: Duration = Duration::from_secs(1);

/// How an instance takes part.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// What keys begin with, without a slash at the end.
    pub prefix: String,
    /// Own address, as daemons and the other instances' clients reach it: `HOST:PORT`.
    pub address: String,
    /// What to begin with where the store has nothing yet.
    pub begin_with: Option<Arc<State>>,
    /// How long the leader's key outlives an instance that is gone. Between 2 s (etcd's least, as it is delivered) and a minute.
    pub lease: Duration,
}

/// What makes the registry of a term, from its store.
pub(crate) type Make = Arc<dyn Fn(KvStore) -> Result<(Registry, u64), StoreError> + Send + Sync>;

/// When a lease may be over for its holder, that was renewed by a request sent at `sent`.
#[must_use]
pub fn ends(sent: Instant, lasts: Duration) -> Instant {
    sent + lasts - lasts / 10
}

/// Takes part until told to stop.
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
    /// Waits; whether it is over.
    fn stopped(&self, wait: Duration) -> bool {
        !matches!(self.stop.recv_timeout(wait), Err(RecvTimeoutError::Timeout))
    }

    /// How long a request may take: a third of the lease, so that there is time for another.
    fn within(&self) -> Duration {
        self.candidate.lease / 3
    }

    fn away(&self, error: &KvError) {
        // Who leads isn't known any more; once in the log.
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

    /// Follows the leader for a while, or becomes leader where there is none. How long to wait before the next.
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
        // Where the member that is asked is lost meanwhile, the others say next whether the store answers.
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
        // Whether it has led, has lost, or doesn't know: nothing is done by this lease any more. Where that can't be said, it ends by itself.
        drop(self.kv.revoke(lease.id, self.within()));
        made.map(|_| wait)
    }

    /// Leads until the term is over, one way or the other. How long to leave it to others then.
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
                    // Nobody waits for it where this instance ends.
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
        // It may have begun to lead when its term was over.
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
        // Others that wait for the key see it go with the lease, at once.
        Duration::ZERO
    }

    /// Renews the lease as long as that goes in time. Whether it was told to stop.
    fn hold(&self, term: &Term) -> bool {
        let every = self.candidate.lease / 4;
        let mut wait = every;
        loop {
            // A term that somebody else has ended is seen soon.
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
