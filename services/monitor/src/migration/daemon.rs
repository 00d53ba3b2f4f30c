//! Devices whose state is in the host daemon, and the daemon's part in a migration: when the guest is stopped and where it runs.
//!
//! ```text
//! source's monitor            its daemon                                       destination's daemon   destination's monitor
//!   │── begin ─────────────────▶│ ⋯ the cluster service, room at the destination ⋯ ▶│                  │ waits
//!   │◀── copy ──────────────────│                                                   │                  │
//!   │══ memory, state ════════════════════════════════════════════════════════════════════════════════▶│
//!   │── converged ─────────────▶│ peers suspend                                     │                  │
//!   │◀── stop ──────────────────│                                                   │                  │
//!   │ stops                     │                                                   │                  │
//!   │── stopped ───────────────▶│                                                   │                  │
//!   │══ the rest ═════════════════════════════════════════════════════════════════════════════════════▶│ checks
//!   │                           │                                                   │◀─ arrived ───────│
//!   │◀── moved, or stays ───────│◀─────────────── the decision ────────────────────▶│─ runs ──────────▶│ runs the guest
//! ```
//! The coordinator decides (docs/design/migration.md). Neither monitor runs the guest before it gets the decision, and a missing answer
//! is no decision ([`nomad::monitor`]). Without an answer for [`DOUBT_AFTER`] the VM is in doubt; the monitor repeats its request until
//! the decision is known.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use control_api::host::proto::move_vm_reply::State;
use control_api::host::proto::move_vm_request::Step;
use control_api::host::proto::{BeginTogether, ClaimVm, MoveVmReply, PeerHold};
use control_api::host::{HostClient, HostError};
use control_api::migration::PeerPause;
use nomad::monitor::{Answer, ClaimResult, Next, Side, after_claim, next};

use super::connection::Stop;
use super::error::{MigrationError, line};
use super::source::milliseconds;

/// A VM is shown as in doubt when its migration's decision has been unknown for this long.
pub const DOUBT_AFTER: Duration = Duration::from_secs(60);
/// Time-out for withdrawing from a migration whose guest was never stopped: the monitor repeats its report to the daemon until then.
const WITHDRAWAL_TIMEOUT: Duration = Duration::from_secs(60);
/// Time-out for the other VMs of a group to request their migration. Shorter than the destination's time-out for the source.
const GROUP_BEGIN_TIMEOUT: Duration = Duration::from_secs(45);
/// Time-out for the request to stop a VM that doesn't wait for other VMs.
pub(super) const STOP_REQUEST_TIMEOUT: Duration = Duration::from_secs(120);
const DECISION_RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// Interval at which the monitor asks the daemon, while memory is copied, whether the migration was aborted.
const STATUS_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// How a migration ended, for one of its sides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MigrationOutcome {
    /// The VM runs on this side's host.
    RunsHere,
    /// The VM runs on the other side's host.
    RunsThere,
    /// The migration was aborted, for this reason: the VM runs at the source.
    Aborted(String),
}

/// Whether the guest must be stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StopPermission {
    /// Now: the peers' queue pairs are suspended.
    Now,
    /// Not yet: other VMs of the group aren't ready.
    NotYet,
    /// Not before this VM, a peer, has migrated.
    After(String),
}

/// Sends a step to the daemon; returns its reply.
type SendStep = dyn Fn(&Step) -> Result<MoveVmReply, HostError> + Send + Sync;

/// Callbacks during a wait for the decision.
pub struct DecisionWait<'a> {
    /// Called once, when the VM becomes in doubt, with the reason why no decision is known.
    pub on_doubt: &'a dyn Fn(&str),
    /// Whether to end the wait: the user has ended or resumed the VM.
    pub is_over: &'a dyn Fn() -> bool,
}

/// The host daemon that serves a VM's devices. Calls block.
pub struct Daemon {
    client: HostClient,
    vm: String,
    answer: Box<SendStep>,
    /// The daemon's last report of the epoch in which the VM runs, or is to run, on this host; 0: none yet.
    epoch: AtomicU64,
    doubt_after: Duration,
    /// Interval of requests where the daemon answers at once.
    retry_interval: Duration,
}

impl std::fmt::Debug for Daemon {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Daemon").field("client", &self.client).finish_non_exhaustive()
    }
}

fn refused(error: HostError) -> MigrationError {
    MigrationError::Daemon(Box::new(error))
}

fn unexpected(state: State) -> MigrationError {
    MigrationError::Protocol(format!("{state:?} as the daemon's answer, which doesn't fit"))
}

impl Daemon {
    /// The daemon at a socket, and the VM's name at the daemon.
    #[must_use]
    pub fn new(socket: PathBuf, vm: String) -> Self {
        let client = HostClient::new(socket);
        let (sender, name) = (client.clone(), vm.clone());
        let answer = move |step: &Step| sender.move_vm(&name, step.clone());
        let (epoch, doubt_after, retry_interval) = (AtomicU64::new(0), DOUBT_AFTER, DECISION_RETRY_INTERVAL);
        Self { client, vm, answer: Box::new(answer), epoch, doubt_after, retry_interval }
    }

    /// A daemon with a test's answers; a VM is in doubt as soon as an answer has no decision.
    #[cfg(test)]
    pub fn with_answers(
        answer: impl Fn(&Step) -> Result<(State, String), HostError> + Send + Sync + 'static,
    ) -> Self {
        let answer = move |step: &Step| {
            let (state, reason) = answer(step)?;
            let waits_for = if state == State::Copy { reason.clone() } else { String::new() };
            Ok(MoveVmReply { state: state.into(), reason, epoch: 3, waits_for, ..MoveVmReply::default() })
        };
        let (client, vm, epoch) = (HostClient::new("nowhere"), String::new(), AtomicU64::new(0));
        let (doubt_after, retry_interval) = (Duration::ZERO, Duration::ZERO);
        Self { client, vm, answer: Box::new(answer), epoch, doubt_after, retry_interval }
    }

    fn send_step(&self, step: &Step) -> Result<MoveVmReply, HostError> {
        let reply = (self.answer)(step)?;
        if reply.epoch != 0 {
            self.epoch.store(reply.epoch, Ordering::SeqCst);
        }
        Ok(reply)
    }

    fn request(&self, step: &Step) -> Result<(State, String), HostError> {
        let reply = self.send_step(step)?;
        Ok((State::try_from(reply.state).unwrap_or(State::Pending), reply.reason))
    }

    /// This host's name in its cluster.
    ///
    /// # Errors
    /// When the daemon can't be reached, or uses no cluster service.
    pub fn host(&self) -> Result<String, MigrationError> {
        let host = self.client.version().map_err(refused)?.host;
        if host.is_empty() {
            let socket = self.client.socket().display().to_string();
            return Err(MigrationError::NoCluster(socket));
        }
        Ok(host)
    }

    /// Begins the migration. When this returns, the VM may be copied.
    ///
    /// # Errors
    /// When it is refused, with the reason.
    pub fn begin(&self, host: &str) -> Result<(), MigrationError> {
        match self.request(&Step::Begin(host.to_owned())).map_err(refused)? {
            (State::Copy, _) => Ok(()),
            (State::Stays, reason) => Err(MigrationError::Aborted(reason)),
            (other, _) => Err(unexpected(other)),
        }
    }

    /// As [`Daemon::begin`], for a group. Returns when the other VMs' monitors have begun as well, and all may be copied. `attempt` is
    /// unique among the attempts of this VM.
    ///
    /// # Errors
    /// When it is refused, the others don't begin in time, or `cancelled` returns `true`.
    pub fn begin_together(
        &self,
        host: &str,
        vms: &[String],
        attempt: u64,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<(), MigrationError> {
        let step = Step::BeginTogether(BeginTogether { host: host.to_owned(), vms: vms.to_vec(), attempt });
        let until = Instant::now() + GROUP_BEGIN_TIMEOUT;
        loop {
            let error = match self.request(&step) {
                Ok((State::Copy, _)) => return Ok(()),
                Ok((State::Stays, reason)) => return Err(MigrationError::Aborted(reason)),
                Ok((State::Pending, _)) if cancelled() => MigrationError::Cancelled,
                Ok((State::Pending, _)) if Instant::now() < until => continue,
                Ok((State::Pending, reason)) => MigrationError::Aborted(format!(
                    "after {} s it still {reason}",
                    GROUP_BEGIN_TIMEOUT.as_secs()
                )),
                Ok((other, _)) => unexpected(other),
                Err(error @ HostError::Refused { .. }) => return Err(refused(error)),
                Err(error) => refused(error),
            };
            // The migration may have begun in the meantime.
            if let Err(unknown) = self.request(&Step::Broken(true)) {
                tracing::warn!(
                    error = line(&unknown),
                    "The host's daemon could not be notified that the VM doesn't migrate"
                );
            }
            return Err(error);
        }
    }

    /// Runs `work`, which copies. If another host or the service aborts the migration meanwhile, sets `stop` with the reason.
    pub fn watched<T>(&self, stop: &Stop, work: impl FnOnce() -> T) -> T {
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let watcher = scope.spawn(|| self.watch_for_abort(stop, &over));
            let result = work();
            over.store(true, Ordering::Release);
            watcher.thread().unpark();
            result
        })
    }

    fn watch_for_abort(&self, stop: &Stop, over: &AtomicBool) {
        let mut next = Instant::now() + STATUS_POLL_INTERVAL;
        while !over.load(Ordering::Acquire) {
            let left = next.saturating_duration_since(Instant::now());
            if !left.is_zero() {
                std::thread::park_timeout(left);
                continue;
            }
            // An error is ignored here: the next step meets it as well.
            if let Ok((State::Stays | State::Unknown, reason)) = self.request(&Step::Look(true)) {
                return stop.abort(reason);
            }
            next = Instant::now() + STATUS_POLL_INTERVAL;
        }
    }

    /// Little is left: asks whether the guest must be stopped now. A negative answer takes some seconds.
    ///
    /// # Errors
    /// When the migration was aborted.
    pub fn may_stop(&self) -> Result<StopPermission, MigrationError> {
        let reply = self.send_step(&Step::Converged(true)).map_err(refused)?;
        match State::try_from(reply.state).unwrap_or(State::Pending) {
            State::Stop => Ok(StopPermission::Now),
            State::Stays | State::Unknown => Err(MigrationError::Aborted(reply.reason)),
            State::Copy if !reply.waits_for.is_empty() => Ok(StopPermission::After(reply.waits_for)),
            State::Copy | State::Pending => Ok(StopPermission::NotYet),
            other => Err(unexpected(other)),
        }
    }

    /// Reports that the guest is stopped.
    ///
    /// # Errors
    /// When the report can't be sent.
    pub fn stopped(&self) -> Result<(), MigrationError> {
        self.request(&Step::Stopped(true)).map(drop).map_err(refused)
    }

    /// Before the whole VM is received: registers with the daemon which VM migrates here, so that the decision can be found even after a
    /// restart of the daemon.
    ///
    /// # Errors
    /// When the daemon can't be reached, or the migration was aborted.
    pub fn register(&self) -> Result<(), MigrationError> {
        match self.request(&Step::Look(true)).map_err(refused)? {
            (State::Stays | State::Unknown, reason) => Err(MigrationError::Aborted(reason)),
            _ => Ok(()),
        }
    }

    /// The whole VM was received: votes, and waits for the decision without a time limit.
    ///
    /// # Errors
    /// When the VM's devices are lost, or `wait` ends the wait.
    pub fn vote(&self, wait: &DecisionWait<'_>) -> Result<MigrationOutcome, MigrationError> {
        self.repeat_until_decided(Side::Destination, Step::Arrived(true), wait)
    }

    /// The rest was sent: waits for the decision without a time limit.
    ///
    /// # Errors
    /// As [`Daemon::vote`].
    pub fn await_decision(&self, wait: &DecisionWait<'_>) -> Result<MigrationOutcome, MigrationError> {
        self.repeat_until_decided(Side::Source, Step::Wait(true), wait)
    }

    /// This side fails while its guest is stopped. Reports that, and waits for the decision, which may have been made already.
    ///
    /// # Errors
    /// As [`Daemon::vote`].
    pub fn abort(&self, wait: &DecisionWait<'_>) -> Result<MigrationOutcome, MigrationError> {
        self.repeat_until_decided(Side::Source, Step::Broken(true), wait)
    }

    /// This side fails, and its guest was never stopped: a commit can't have happened. Reports that.
    ///
    /// # Errors
    /// When the report can't be sent.
    pub fn withdraw(&self) -> Result<(), MigrationError> {
        let until = Instant::now() + WITHDRAWAL_TIMEOUT;
        let mut step = Step::Broken(true);
        loop {
            match self.request(&step) {
                Ok((State::Stays | State::Unknown | State::Runs | State::Moved | State::Failed, _)) => {
                    return Ok(());
                }
                Ok(_) if Instant::now() < until => step = Step::Wait(true),
                Ok((state, _)) => return Err(unexpected(state)),
                Err(error @ HostError::Refused { .. }) => return Err(refused(error)),
                Err(error) if Instant::now() >= until => return Err(refused(error)),
                Err(_) => std::thread::sleep(self.retry_interval),
            }
        }
    }

    /// After the commit: peer pauses, as their hosts measured them. Empty if the daemon doesn't answer; the VM has migrated nevertheless.
    pub fn peers(&self) -> Vec<PeerPause> {
        let reply = match self.client.move_vm(&self.vm, Step::Peers(true)) {
            Ok(reply) => reply,
            Err(error) => {
                tracing::debug!(
                    error = line(&error),
                    "The host's daemon has no measurement of the peer pauses"
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

    fn repeat_until_decided(
        &self,
        side: Side,
        first: Step,
        wait: &DecisionWait<'_>,
    ) -> Result<MigrationOutcome, MigrationError> {
        let began = Instant::now();
        let (mut step, mut in_doubt) = (first, false);
        loop {
            if (wait.is_over)() {
                return Err(MigrationError::WaitEnded);
            }
            let (answer, mut reason) = self.answer(&step);
            let mut next_step = next(side, answer);
            // The service may have declared this source's host dead and the VM lost. Then no decision is sent to it, and the monitor asks
            // the service.
            if next_step == Next::AskService || next_step == Next::Retry && in_doubt && side == Side::Source {
                let claimed = self.claim(side);
                (next_step, reason) = (after_claim(side, claimed.0), claimed.1);
            }
            match next_step {
                Next::Running => return Ok(MigrationOutcome::RunsHere),
                Next::Moved => return Ok(MigrationOutcome::RunsThere),
                Next::Aborted => return Ok(MigrationOutcome::Aborted(reason)),
                Next::Lost => {
                    let text = "the VM's RDMA NICs don't work at the destination; its daemon's log says why";
                    return Err(MigrationError::Protocol(text.to_owned()));
                }
                Next::Retry | Next::AskService => {}
            }
            if !in_doubt && began.elapsed() >= self.doubt_after {
                in_doubt = true;
                tracing::warn!(
                    reason,
                    "The decision about the migration isn't known; the VM stays stopped, in doubt, and the request is repeated"
                );
                (wait.on_doubt)(&reason);
            }
            if answer != Answer::Pending {
                std::thread::sleep(self.retry_interval);
            }
            if matches!(step, Step::Broken(_)) && answer != Answer::Silent {
                step = Step::Wait(true);
            }
        }
    }

    /// The daemon's answer to a step, and its reason.
    fn answer(&self, step: &Step) -> (Answer, String) {
        match self.request(step) {
            Ok((state, reason)) => {
                let answer = match state {
                    State::Runs => Answer::Running,
                    State::Moved => Answer::Moved,
                    State::Stays => Answer::Aborted,
                    State::Failed => Answer::Failed,
                    State::Unknown => Answer::Forgotten,
                    State::Pending | State::Copy | State::Stop => Answer::Pending,
                };
                let none = || "its daemon hasn't heard of a decision".to_owned();
                (answer, if reason.is_empty() && answer == Answer::Pending { none() } else { reason })
            }
            // A daemon that was just restarted doesn't know the VM's NICs yet.
            Err(error) => (Answer::Silent, line(&error)),
        }
    }

    /// The cluster service's answer, through the daemon.
    fn claim(&self, side: Side) -> (ClaimResult, String) {
        let (epoch, keeps) = (self.epoch.load(Ordering::SeqCst), side == Side::Source);
        let (answer, reason) = self.answer(&Step::Claim(ClaimVm { epoch, keeps }));
        let claimed = match answer {
            Answer::Running | Answer::Aborted | Answer::Failed => ClaimResult::Here,
            Answer::Moved => ClaimResult::Elsewhere,
            Answer::Pending | Answer::Forgotten | Answer::Silent => ClaimResult::Unknown,
        };
        (claimed, reason)
    }
}
