//! Devices whose state is in another process of the host, and that process's word on when the VM stops and where it runs.
//!
//! ```text
//! source's monitor            its daemon                  destination's daemon            destination's monitor
//!   │── begin ─────────────────▶│ ⋯ the cluster service, room at the destination ⋯ ▶│           │ waits
//!   │◀── copy ──────────────────│                                                   │           │
//!   │══ memory, state ══════════════════════════════════════════════════════════════════════════▶│
//!   │── converged ─────────────▶│ peers hold                                        │           │
//!   │◀── stop ──────────────────│                                                   │           │
//!   │ stops                     │                                                   │           │
//!   │── stopped ───────────────▶│                                                   │           │
//!   │══ the rest ═══════════════════════════════════════════════════════════════════════════════▶│ checks
//!   │                           │                                                   │◀─ arrived ─│
//!   │◀── moved, or stays ───────│◀─────── the decision ────────────────────────────▶│─ runs ────▶│ runs the guest
//! ```
//! The decision is the coordinator's (docs/migration.md): neither monitor runs the guest before it hears of it. A daemon that can't be asked
//! leaves it standing still, as in doubt.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use control_api::host::proto::move_vm_reply::State;
use control_api::host::proto::move_vm_request::Step;
use control_api::host::proto::{BeginTogether, PeerHold};
use control_api::host::{HostClient, HostError};
use control_api::migration::PeerPause;

use super::connection::Stop;
use super::error::{MigrationError, line};
use super::source::milliseconds;

/// A daemon that doesn't answer is asked again for so long, once the guest stands still.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long the other VMs that are to move together are waited for, before anything begins. Less than the destination waits for a word.
const GATHERING: Duration = Duration::from_secs(45);
/// How long a VM that moves by itself may have to wait until it is to be stopped.
pub(super) const BEGINNING: Duration = Duration::from_secs(120);
const AGAIN: Duration = Duration::from_millis(200);
/// How often the daemon is asked, while memory is copied, whether the migration is still under way.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How a migration ended, for one of its sides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The VM runs on this side's host.
    RunsHere,
    /// It runs on the other.
    RunsThere,
    /// It was given up, for this reason: it runs at the source.
    GivenUp(String),
}

/// How a daemon answers.
type Answer = dyn Fn(&Step) -> Result<(State, String), HostError> + Send + Sync;

/// The daemon that serves a VM's devices. Calls block.
pub struct Daemon {
    client: HostClient,
    vm: String,
    answer: Box<Answer>,
}

impl std::fmt::Debug for Daemon {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Daemon").field("client", &self.client).finish_non_exhaustive()
    }
}

fn refused(error: HostError) -> MigrationError {
    MigrationError::Daemon(Box::new(error))
}

fn odd(state: State) -> MigrationError {
    MigrationError::Protocol(format!("{state:?} as the daemon's answer, which doesn't fit"))
}

impl Daemon {
    /// The daemon at a socket, and the VM as it knows it.
    #[must_use]
    pub fn new(socket: PathBuf, vm: String) -> Self {
        let client = HostClient::new(socket);
        let (asked, name) = (client.clone(), vm.clone());
        let answer = move |step: &Step| {
            let reply = asked.move_vm(&name, step.clone())?;
            Ok((State::try_from(reply.state).unwrap_or(State::Pending), reply.reason))
        };
        Self { client, vm, answer: Box::new(answer) }
    }

    /// One that answers as a test has it.
    #[cfg(test)]
    pub fn answering(
        answer: impl Fn(&Step) -> Result<(State, String), HostError> + Send + Sync + 'static,
    ) -> Self {
        Self { client: HostClient::new("nowhere"), vm: String::new(), answer: Box::new(answer) }
    }

    fn say(&self, step: &Step) -> Result<(State, String), HostError> {
        (self.answer)(step)
    }

    /// This host's name in its cluster.
    ///
    /// # Errors
    /// When the daemon can't be asked, or has no cluster service.
    pub fn host(&self) -> Result<String, MigrationError> {
        let host = self.client.version().map_err(refused)?.host;
        if host.is_empty() {
            let socket = self.client.socket().display().to_string();
            return Err(MigrationError::NoCluster(socket));
        }
        Ok(host)
    }

    /// Has the migration begin; the VM may be copied when this returns.
    ///
    /// # Errors
    /// When it is refused, with the reason.
    pub fn begin(&self, host: &str) -> Result<(), MigrationError> {
        match self.say(&Step::Begin(host.to_owned())).map_err(refused)? {
            (State::Copy, _) => Ok(()),
            (State::Stays, reason) => Err(MigrationError::GivenUp(reason)),
            (other, _) => Err(odd(other)),
        }
    }

    /// As [`Daemon::begin`], together with others: returns when their monitors have asked as well, and all may be copied. `attempt`: a number that no
    /// other try of this VM has.
    ///
    /// # Errors
    /// When it is refused, others don't ask in time, or `cancelled` says so.
    pub fn begin_together(
        &self,
        host: &str,
        vms: &[String],
        attempt: u64,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<(), MigrationError> {
        let step = Step::BeginTogether(BeginTogether { host: host.to_owned(), vms: vms.to_vec(), attempt });
        let until = Instant::now() + GATHERING;
        loop {
            let error = match self.say(&step) {
                Ok((State::Copy, _)) => return Ok(()),
                Ok((State::Stays, reason)) => return Err(MigrationError::GivenUp(reason)),
                Ok((State::Pending, _)) if cancelled() => MigrationError::Cancelled,
                Ok((State::Pending, _)) if Instant::now() < until => continue,
                Ok((State::Pending, reason)) => {
                    MigrationError::GivenUp(format!("after {} s it still {reason}", GATHERING.as_secs()))
                }
                Ok((other, _)) => odd(other),
                Err(error @ HostError::Refused { .. }) => return Err(refused(error)),
                Err(error) => refused(error),
            };
            // It may have begun just now.
            if let Err(unknown) = self.say(&Step::Broken(true)) {
                tracing::warn!(
                    error = line(&unknown),
                    "The host's daemon can't be told that the VM doesn't move"
                );
            }
            return Err(error);
        }
    }

    /// Does `work`, which copies. When another host, or the service, gives the migration up meanwhile, `stop` says so, with the reason.
    pub fn watched<T>(&self, stop: &Stop, work: impl FnOnce() -> T) -> T {
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let watcher = scope.spawn(|| self.watch(stop, &over));
            let result = work();
            over.store(true, Ordering::Release);
            watcher.thread().unpark();
            result
        })
    }

    fn watch(&self, stop: &Stop, over: &AtomicBool) {
        let mut next = Instant::now() + LOOK_EVERY;
        while !over.load(Ordering::Acquire) {
            let left = next.saturating_duration_since(Instant::now());
            if !left.is_zero() {
                std::thread::park_timeout(left);
                continue;
            }
            // An error says nothing here: whatever is asked next meets it as well.
            if let Ok((State::Stays, reason)) = self.say(&Step::Look(true)) {
                return stop.give_up(reason);
            }
            next = Instant::now() + LOOK_EVERY;
        }
    }

    /// Little is left: whether the guest is to be stopped now. `false` after some seconds, where other VMs of the migration aren't ready.
    ///
    /// # Errors
    /// When the migration was given up.
    pub fn may_stop(&self) -> Result<bool, MigrationError> {
        match self.say(&Step::Converged(true)).map_err(refused)? {
            (State::Stop, _) => Ok(true),
            (State::Stays, reason) => Err(MigrationError::GivenUp(reason)),
            (State::Copy | State::Pending, _) => Ok(false),
            (other, _) => Err(odd(other)),
        }
    }

    /// The guest stands still.
    ///
    /// # Errors
    /// When the daemon can't be told.
    pub fn stopped(&self) -> Result<(), MigrationError> {
        self.say(&Step::Stopped(true)).map(drop).map_err(refused)
    }

    /// All of the VM is here: waits for the decision.
    ///
    /// # Errors
    /// When the daemon can't be asked: it isn't known.
    pub fn arrived(&self) -> Result<Verdict, MigrationError> {
        self.decided(&Step::Arrived(true))
    }

    /// The rest has been sent: waits for the decision.
    ///
    /// # Errors
    /// As [`Daemon::arrived`].
    pub fn outcome(&self) -> Result<Verdict, MigrationError> {
        self.decided(&Step::Wait(true))
    }

    /// This side can't go on. How it ended all the same: the decision may have been taken.
    ///
    /// # Errors
    /// As [`Daemon::arrived`].
    pub fn give_up(&self) -> Result<Verdict, MigrationError> {
        self.decided(&Step::Broken(true))
    }

    /// The VM has moved: how long its peers were held, by their hosts. Without an answer nothing is known; it has moved all the same.
    pub fn peers(&self) -> Vec<PeerPause> {
        let reply = match self.client.move_vm(&self.vm, Step::Peers(true)) {
            Ok(reply) => reply,
            Err(error) => {
                tracing::debug!(
                    error = line(&error),
                    "The host's daemon doesn't say how long peers were held"
                );
                return Vec::new();
            }
        };
        let pause = |held: PeerHold| PeerPause {
            host: held.host,
            pause_ms: milliseconds(Duration::from_micros(held.microseconds)),
        };
        reply.peers.into_iter().map(pause).collect()
    }

    fn decided(&self, first: &Step) -> Result<Verdict, MigrationError> {
        let until = Instant::now() + PATIENCE;
        let mut step = first.clone();
        loop {
            match self.say(&step) {
                Ok((State::Runs, _)) => return Ok(Verdict::RunsHere),
                Ok((State::Moved, _)) => return Ok(Verdict::RunsThere),
                Ok((State::Stays, reason)) => return Ok(Verdict::GivenUp(reason)),
                Ok((State::Failed, _)) => {
                    let text = "the VM's RDMA NICs don't work at the destination; its daemon's log says why";
                    return Err(MigrationError::Protocol(text.to_owned()));
                }
                Ok(_) if Instant::now() < until => {}
                Ok((state, _)) => return Err(odd(state)),
                Err(error @ HostError::Refused { .. }) => return Err(refused(error)),
                Err(error) if Instant::now() >= until => return Err(refused(error)),
                Err(error) => {
                    tracing::warn!(
                        error = line(&error),
                        "The host's daemon doesn't say how the migration ended; it is asked again"
                    );
                    std::thread::sleep(AGAIN);
                }
            }
            if matches!(step, Step::Broken(_)) {
                step = Step::Wait(true);
            }
        }
    }
}
