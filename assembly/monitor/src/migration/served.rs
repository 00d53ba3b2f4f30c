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
//! The decision is the coordinator's (docs/design/migration.md): neither monitor runs the guest before it hears of it, or takes silence for one ([`nomad::monitor`]). Where nothing is
//! heard for [`DOUBT_AFTER`] the VM is in doubt; it is asked for all the same, until it is known.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use control_api::host::proto::move_vm_reply::State;
use control_api::host::proto::move_vm_request::Step;
use control_api::host::proto::{BeginTogether, ClaimVm, MoveVmReply, PeerHold};
use control_api::host::{HostClient, HostError};
use control_api::migration::PeerPause;
use nomad::monitor::{Answer, Claimed, Next, Side, after_claim, next};

use super::connection::Stop;
use super::error::{MigrationError, line};
use super::source::milliseconds;

/// A VM whose migration's end isn't known is shown as in doubt when nothing was heard for so long.
pub const DOUBT_AFTER: Duration = Duration::from_secs(60);
/// A daemon is told for so long that a migration is over whose guest has never stopped.
const WITHDRAWAL_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the other VMs that are to move together are waited for, before anything begins. Less than the destination waits for a word.
const GATHERING: Duration = Duration::from_secs(45);
/// How long a VM that moves by itself may have to wait until it is to be stopped.
pub(super) const BEGINNING: Duration = Duration::from_secs(120);
const DECISION_RETRY_INTERVAL: Duration = Duration::from_millis(200);
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

/// Whether the guest is to be stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Turn {
    /// Now.
    Now,
    /// Not yet: other VMs of the migration aren't ready.
    Later,
    /// Not before this VM, a peer of one of the migration's, has moved.
    Behind(String),
}

/// How a daemon answers.
type Asked = dyn Fn(&Step) -> Result<MoveVmReply, HostError> + Send + Sync;

/// What happens while a decision is waited for.
pub struct Waits<'a> {
    /// It takes so long that the VM is in doubt; why nothing is known. Called once.
    pub doubtful: &'a dyn Fn(&str),
    /// It isn't to be waited for any longer: the user has ended the VM, or let it go on.
    pub is_over: &'a dyn Fn() -> bool,
}

/// The daemon that serves a VM's devices. Calls block.
pub struct Daemon {
    client: HostClient,
    vm: String,
    answer: Box<Asked>,
    /// The epoch in which the VM runs on this host, or is to run here, as the daemon said last; 0: it hasn't.
    epoch: AtomicU64,
    doubt_after: Duration,
    /// Between two questions where the first was answered at once.
    again: Duration,
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
        let answer = move |step: &Step| asked.move_vm(&name, step.clone());
        let (epoch, doubt_after, again) = (AtomicU64::new(0), DOUBT_AFTER, DECISION_RETRY_INTERVAL);
        Self { client, vm, answer: Box::new(answer), epoch, doubt_after, again }
    }

    /// One that answers as a test has it; what isn't known at once is in doubt.
    #[cfg(test)]
    pub fn answering(
        answer: impl Fn(&Step) -> Result<(State, String), HostError> + Send + Sync + 'static,
    ) -> Self {
        let answer = move |step: &Step| {
            let (state, reason) = answer(step)?;
            let waits_for = if state == State::Copy { reason.clone() } else { String::new() };
            Ok(MoveVmReply { state: state.into(), reason, epoch: 3, waits_for, ..MoveVmReply::default() })
        };
        let (client, vm, epoch) = (HostClient::new("nowhere"), String::new(), AtomicU64::new(0));
        let (doubt_after, again) = (Duration::ZERO, Duration::ZERO);
        Self { client, vm, answer: Box::new(answer), epoch, doubt_after, again }
    }

    fn ask(&self, step: &Step) -> Result<MoveVmReply, HostError> {
        let reply = (self.answer)(step)?;
        if reply.epoch != 0 {
            self.epoch.store(reply.epoch, Ordering::SeqCst);
        }
        Ok(reply)
    }

    fn say(&self, step: &Step) -> Result<(State, String), HostError> {
        let reply = self.ask(step)?;
        Ok((State::try_from(reply.state).unwrap_or(State::Pending), reply.reason))
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
            if let Ok((State::Stays | State::Unknown, reason)) = self.say(&Step::Look(true)) {
                return stop.give_up(reason);
            }
            next = Instant::now() + LOOK_EVERY;
        }
    }

    /// Little is left: whether the guest is to be stopped now. Any other answer comes after some seconds.
    ///
    /// # Errors
    /// When the migration was given up.
    pub fn may_stop(&self) -> Result<Turn, MigrationError> {
        let reply = self.ask(&Step::Converged(true)).map_err(refused)?;
        match State::try_from(reply.state).unwrap_or(State::Pending) {
            State::Stop => Ok(Turn::Now),
            State::Stays | State::Unknown => Err(MigrationError::GivenUp(reply.reason)),
            State::Copy if !reply.waits_for.is_empty() => Ok(Turn::Behind(reply.waits_for)),
            State::Copy | State::Pending => Ok(Turn::Later),
            other => Err(odd(other)),
        }
    }

    /// The guest stands still.
    ///
    /// # Errors
    /// When the daemon can't be told.
    pub fn stopped(&self) -> Result<(), MigrationError> {
        self.say(&Step::Stopped(true)).map(drop).map_err(refused)
    }

    /// Before all of the VM is here: which VM comes, so that its decision can be asked for however the daemon fares.
    ///
    /// # Errors
    /// When the daemon can't be asked, or the VM doesn't come any more.
    pub fn look(&self) -> Result<(), MigrationError> {
        match self.say(&Step::Look(true)).map_err(refused)? {
            (State::Stays | State::Unknown, reason) => Err(MigrationError::GivenUp(reason)),
            _ => Ok(()),
        }
    }

    /// All of the VM is here: waits for the decision, for as long as it takes.
    ///
    /// # Errors
    /// When the VM's devices are lost, or `waits` says that it is over.
    pub fn arrived(&self, waits: &Waits<'_>) -> Result<Verdict, MigrationError> {
        self.decided(Side::Destination, Step::Arrived(true), waits)
    }

    /// The rest has been sent: waits for the decision, for as long as it takes.
    ///
    /// # Errors
    /// As [`Daemon::arrived`].
    pub fn outcome(&self, waits: &Waits<'_>) -> Result<Verdict, MigrationError> {
        self.decided(Side::Source, Step::Wait(true), waits)
    }

    /// This side can't go on, and its guest stands still. How it ended all the same: the decision may have been taken.
    ///
    /// # Errors
    /// As [`Daemon::arrived`].
    pub fn give_up(&self, waits: &Waits<'_>) -> Result<Verdict, MigrationError> {
        self.decided(Side::Source, Step::Broken(true), waits)
    }

    /// This side can't go on, and its guest has never stopped: nothing can have been decided.
    ///
    /// # Errors
    /// When the daemon can't be told.
    pub fn withdraw(&self) -> Result<(), MigrationError> {
        let until = Instant::now() + WITHDRAWAL_TIMEOUT;
        let mut step = Step::Broken(true);
        loop {
            match self.say(&step) {
                Ok((State::Stays | State::Unknown | State::Runs | State::Moved | State::Failed, _)) => {
                    return Ok(());
                }
                Ok(_) if Instant::now() < until => step = Step::Wait(true),
                Ok((state, _)) => return Err(odd(state)),
                Err(error @ HostError::Refused { .. }) => return Err(refused(error)),
                Err(error) if Instant::now() >= until => return Err(refused(error)),
                Err(_) => std::thread::sleep(self.again),
            }
        }
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

    fn decided(&self, side: Side, first: Step, waits: &Waits<'_>) -> Result<Verdict, MigrationError> {
        let began = Instant::now();
        let (mut step, mut in_doubt) = (first, false);
        loop {
            if (waits.is_over)() {
                return Err(MigrationError::NotAwaited);
            }
            let (answer, mut reason) = self.answer(&step);
            let mut what = next(side, answer);
            // A source's daemon that lives may have been counted as gone, and its VM as lost: then nobody tells it.
            if what == Next::AskTheService || what == Next::AskAgain && in_doubt && side == Side::Source {
                let claimed = self.claim(side);
                (what, reason) = (after_claim(side, claimed.0), claimed.1);
            }
            match what {
                Next::Runs => return Ok(Verdict::RunsHere),
                Next::Moved => return Ok(Verdict::RunsThere),
                Next::GivenUp => return Ok(Verdict::GivenUp(reason)),
                Next::Lost => {
                    let text = "the VM's RDMA NICs don't work at the destination; its daemon's log says why";
                    return Err(MigrationError::Protocol(text.to_owned()));
                }
                Next::AskAgain | Next::AskTheService => {}
            }
            if !in_doubt && began.elapsed() >= self.doubt_after {
                in_doubt = true;
                tracing::warn!(
                    reason,
                    "It isn't known how the migration ended; the VM stands still, and it is asked again"
                );
                (waits.doubtful)(&reason);
            }
            if answer != Answer::Pending {
                std::thread::sleep(self.again);
            }
            if matches!(step, Step::Broken(_)) && answer != Answer::Silent {
                step = Step::Wait(true);
            }
        }
    }

    /// What the daemon says, and why.
    fn answer(&self, step: &Step) -> (Answer, String) {
        match self.say(step) {
            Ok((state, reason)) => {
                let answer = match state {
                    State::Runs => Answer::Runs,
                    State::Moved => Answer::Moved,
                    State::Stays => Answer::Stays,
                    State::Failed => Answer::Failed,
                    State::Unknown => Answer::Forgotten,
                    State::Pending | State::Copy | State::Stop => Answer::Pending,
                };
                let none = || "its daemon hasn't heard of a decision".to_owned();
                (answer, if reason.is_empty() && answer == Answer::Pending { none() } else { reason })
            }
            // One that has just been started again doesn't know the VM's NICs yet.
            Err(error) => (Answer::Silent, line(&error)),
        }
    }

    /// What the cluster service says by the daemon.
    fn claim(&self, side: Side) -> (Claimed, String) {
        let (epoch, keeps) = (self.epoch.load(Ordering::SeqCst), side == Side::Source);
        let (answer, reason) = self.answer(&Step::Claim(ClaimVm { epoch, keeps }));
        let claimed = match answer {
            Answer::Runs | Answer::Stays | Answer::Failed => Claimed::Here,
            Answer::Moved => Claimed::Elsewhere,
            Answer::Pending | Answer::Forgotten | Answer::Silent => Claimed::Unknown,
        };
        (claimed, reason)
    }
}
