//! The coordinator: who may run a VM, and how each migration is decided.
//!
//! ```text
//! Reserving ─all destinations─▶ Copying ─all sources─▶ Queued ─no peer switches over─▶ Switching ─all votes─▶ COMMIT ─all hosts─▶ finished
//!     │                            │                     │                               │                    │         ▲  ▲
//!     └──── failure, restart, deadline, cancel ──────────┴───────────────────────────────┴──────▶ ABORT ──────┼─all hosts┘  │ all hosts
//!                                                                                                   └deadline─┴─▶ released ─┘
//! ```
//! Peers may be copied at the same time. Their switchovers exclude each other, until all hosts have settled the decision ([`queue`]).
//!
//! A decided migration ends even if a host doesn't settle it. After [`Config::settle_ms`] the coordinator frees the migration's VMs, and
//! keeps the decision for each host that hasn't sent `Settled`. It sends the decision when the host asks, when the host sends `Hello`, and
//! every `settle_ms`.
//!
//! Decisions are in the [`Ledger`], and are written before they are sent. Everything else is in memory. A coordinator that starts with a
//! ledger aborts the ledger's undecided migrations, and sends the decisions of the others again.

mod indexes;
mod ledger;
mod owed;
mod queue;
mod rollback;
mod verbs;

use std::collections::{BTreeMap, BTreeSet};

use crate::config::{Config, InjectedBug};
use crate::message::{AbortReason, Body, Message};
use crate::names::{HostId, Incarnation, MigrationId, Move, Node, Place, VmId};

pub use indexes::{Links, Migrations, Owners};
pub use ledger::{Decision, Ledger, Owner, Record, StoredMigration};
pub use owed::MayRun;
pub use rollback::Checkpoint;
pub use verbs::Refused;

/// The coordinator's input.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Event {
    /// The coordinator starts, with the ledger of its predecessor if there was one.
    Start,
    /// A message for the coordinator has been received.
    Message(Message),
    /// A host's lease has expired. The host may still run.
    Silent {
        /// The host.
        host: HostId,
    },
    /// A timer has expired.
    Timer(Timer),
}

/// A timer of the coordinator. [`Coordinator::awaits`] returns whether its expiry still matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Timer {
    /// Retransmits what hosts haven't answered.
    Retry(MigrationId),
    /// Ends a stage that takes too long.
    Deadline(MigrationId, Stage),
}

/// What a migration waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    /// Capacity at the destinations.
    Reserving,
    /// Most of the state to be copied.
    Copying,
    /// The switchover of another migration, which moves a peer of one of its VMs.
    Queued,
    /// The votes.
    Switching,
    /// The migration is decided: the hosts' `Settled`.
    Settling,
}

/// An output of the coordinator.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Action {
    /// Writes a record. It must be safe before the actions behind it are carried out.
    Write(Record),
    /// Sends a message.
    Send(Message),
    /// Sets a timer.
    Timer {
        /// The timer. It replaces an equal one that was set before.
        timer: Timer,
        /// Delay in milliseconds.
        after_ms: u32,
    },
    /// Reports that a migration has entered a stage; for logs.
    StageEntered {
        /// The migration's number.
        migration: MigrationId,
        /// The stage that it has entered.
        stage: Stage,
    },
    /// Reports that a migration is decided; hosts may not have settled it yet. For logs and statistics.
    Ended {
        /// The migration's number.
        migration: MigrationId,
        /// Commit or abort.
        decision: Decision,
        /// Why it was aborted; `None` after a commit.
        reason: Option<AbortReason>,
    },
}

/// A migration in progress, as far as it isn't in the ledger.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct MigrationProgress {
    stage: Stage,
    /// Hosts that haven't answered this stage's request: destinations, or sources.
    waiting: BTreeSet<HostId>,
    /// Sources that haven't voted, while switching.
    unvoted_sources: BTreeSet<HostId>,
    /// VMs that their owner doesn't have.
    lost: BTreeSet<VmId>,
    /// While queued: the peer that switches over first.
    waits_for: Option<VmId>,
    /// Sources may have been asked to switch over.
    switched: bool,
}

impl MigrationProgress {
    fn new(stage: Stage, waiting: BTreeSet<HostId>) -> Self {
        let (unvoted_sources, lost) = (BTreeSet::new(), BTreeSet::new());
        Self { stage, waiting, unvoted_sources, lost, waits_for: None, switched: false }
    }
}

/// The coordinator's state.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Coordinator {
    config: Config,
    ledger: Ledger,
    progress: BTreeMap<MigrationId, MigrationProgress>,
}

impl Coordinator {
    /// A coordinator that continues with a ledger.
    #[must_use]
    pub fn new(config: Config, ledger: Ledger) -> Self {
        Self { config, ledger, progress: BTreeMap::new() }
    }

    /// The durable state.
    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Handles an event, and appends the actions that follow from it.
    pub fn step(&mut self, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Start => self.start(actions),
            Event::Message(message) => self.message(message, actions),
            Event::Silent { host } => self.abort_migrations_of(host, AbortReason::Timeout, actions),
            Event::Timer(timer) => {
                if self.awaits(timer) {
                    self.timer(timer, actions);
                }
            }
        }
    }

    /// Whether a timer's expiry still matters.
    #[must_use]
    pub fn awaits(&self, timer: Timer) -> bool {
        match timer {
            Timer::Retry(migration) => self.progress.contains_key(&migration) || self.is_released(migration),
            Timer::Deadline(migration, stage) => {
                self.progress.get(&migration).is_some_and(|progress| progress.stage == stage)
            }
        }
    }

    /// The stage of a migration; `None`: it is over, or there was none.
    #[must_use]
    pub fn stage(&self, migration: MigrationId) -> Option<Stage> {
        self.progress.get(&migration).map(|progress| progress.stage)
    }

    /// Aborts a migration at a user's request, unless it is decided.
    pub fn cancel(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        self.abort(migration, AbortReason::Cancelled, actions);
    }

    fn start(&mut self, actions: &mut Vec<Action>) {
        let bind = self.ledger.migrations.iter().filter(|(_, stored)| stored.binds());
        let migrations: Vec<_> = bind.map(|(migration, stored)| (*migration, stored.decision)).collect();
        for (migration, decision) in migrations {
            if decision.is_none() {
                self.write(Record::Aborted { migration }, actions);
            }
            self.start_settling(migration, actions);
        }
        let owed = self.ledger.migrations.keys().filter(|migration| self.is_released(**migration));
        for migration in owed.copied().collect::<Vec<_>>() {
            self.resend_kept_decision(migration, actions);
        }
    }

    fn message(&mut self, message: Message, actions: &mut Vec<Action>) {
        let Node::Host(host) = message.from else { return };
        if message.to != Node::Coordinator || !self.is_current(host, message.incarnation, actions) {
            return;
        }
        match message.body {
            Body::Hello => {
                self.send(host, Body::Welcome, actions);
                self.send_kept_decisions(host, actions);
            }
            Body::Reserved { migration }
            | Body::Converged { migration }
            | Body::Loaded { migration }
            | Body::Yield { migration }
            | Body::Outcome { migration } => {
                // The host may not know that the migration is decided, or may have begun one that is over, by an old message.
                // Then it gets the decision, or an abort.
                let answered = self.answer_if_decided(host, migration, actions);
                if !answered {
                    self.host_reported(host, &message.body, migration, actions);
                }
            }
            Body::Failed { migration, reason } if self.takes_part(host, migration) => {
                self.abort(migration, reason, actions);
            }
            Body::Settled { migration, lost } => self.settled(host, migration, &lost, actions),
            Body::Where { vm } => self.locate(host, vm, actions),
            _ => {}
        }
    }

    /// Whether a message is of a host's present incarnation. A new incarnation voids the promises of the one before.
    fn is_current(&mut self, host: HostId, incarnation: Incarnation, actions: &mut Vec<Action>) -> bool {
        match self.ledger.hosts.get(&host) {
            Some(known) if *known == incarnation => return true,
            Some(known) if *known > incarnation => return false,
            _ => {}
        }
        // A source that has voted isn't needed any more: its VMs live if their destinations do.
        let spared: BTreeSet<VmId> = self
            .progress
            .iter()
            .filter(|(_, progress)| {
                progress.stage == Stage::Switching && !progress.unvoted_sources.contains(&host)
            })
            .filter_map(|(migration, _)| self.ledger.migrations.get(migration))
            .flat_map(|stored| &stored.moves)
            .filter(|moved| moved.from == host)
            .map(|moved| moved.vm)
            .chain(self.unanswered(host))
            .collect();
        let lost = self.ledger.vms.alive_on(host).filter(|vm| !spared.contains(vm)).collect();
        self.write(Record::Host { host, incarnation, lost }, actions);
        self.abort_migrations_of(host, AbortReason::Restarted, actions);
        true
    }

    /// Aborts undecided migrations that need a host.
    fn abort_migrations_of(&mut self, host: HostId, reason: AbortReason, actions: &mut Vec<Action>) {
        let needs = |migration: &MigrationId| {
            let Some(progress) = self.progress.get(migration) else { return false };
            let Some(stored) = self.ledger.migrations.get(migration) else { return false };
            let is_destination = stored.moves.iter().any(|moved| moved.to == host);
            let is_source = stored.moves.iter().any(|moved| moved.from == host);
            let voted = progress.stage == Stage::Switching && !progress.unvoted_sources.contains(&host);
            is_destination || is_source && !voted
        };
        let migrations: Vec<_> = self.progress.keys().copied().filter(needs).collect();
        for migration in migrations {
            self.abort(migration, reason, actions);
        }
    }

    fn takes_part(&self, host: HostId, migration: MigrationId) -> bool {
        let stored = self.ledger.migrations.get(&migration);
        stored.is_some_and(|stored| stored.moves.iter().any(|moved| moved.from == host || moved.to == host))
    }

    /// Sends a host the decision of a decided migration, or an abort for one that the ledger doesn't have. Returns `false`, and sends
    /// nothing, if the migration is undecided.
    fn answer_if_decided(&mut self, host: HostId, migration: MigrationId, actions: &mut Vec<Action>) -> bool {
        let body = match self.ledger.migrations.get(&migration) {
            // All hosts have settled it, or it never existed: no vote of this host counts any more.
            None => Body::Abort { migration, places: Vec::new() },
            Some(StoredMigration { decision: None, .. }) => return false,
            Some(stored) => self.decision_body(host, migration, stored),
        };
        self.send(host, body, actions);
        true
    }

    /// A host reports its progress in an undecided migration.
    fn host_reported(
        &mut self,
        host: HostId,
        body: &Body,
        migration: MigrationId,
        actions: &mut Vec<Action>,
    ) {
        match body {
            Body::Reserved { .. } => self.done(host, migration, Stage::Reserving, actions),
            Body::Converged { .. } => self.done(host, migration, Stage::Copying, actions),
            Body::Loaded { .. } => self.done(host, migration, Stage::Switching, actions),
            Body::Yield { .. } => {
                if let Some(progress) = self.progress.get_mut(&migration)
                    && progress.stage == Stage::Switching
                {
                    progress.unvoted_sources.remove(&host);
                }
                self.decide(migration, actions);
            }
            _ => {}
        }
    }

    /// A host has answered a stage's request.
    fn done(&mut self, host: HostId, migration: MigrationId, stage: Stage, actions: &mut Vec<Action>) {
        let Some(progress) = self.progress.get_mut(&migration) else { return };
        if progress.stage != stage {
            // A message of another stage. A destination's vote, or a source's `Converged`, may be early: the host retransmits it.
            return;
        }
        progress.waiting.remove(&host);
        match stage {
            Stage::Switching => self.decide(migration, actions),
            Stage::Reserving | Stage::Copying if progress.waiting.is_empty() => {
                self.advance(migration, actions)
            }
            _ => {}
        }
    }

    fn advance(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        let Some(stored) = self.ledger.migrations.get(&migration) else { return };
        let (sources, _) = hosts_of(&stored.moves);
        let Some(progress) = self.progress.get_mut(&migration) else { return };
        match progress.stage {
            Stage::Reserving => {
                progress.stage = Stage::Copying;
                progress.waiting = sources;
                self.enter(migration, actions);
            }
            Stage::Copying => {
                progress.stage = Stage::Queued;
                progress.waiting = sources;
                self.admit(actions);
            }
            Stage::Queued | Stage::Switching | Stage::Settling => {}
        }
    }

    /// Begins a stage: sends its requests, and sets its timers.
    fn enter(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        let Some(stage) = self.stage(migration) else { return };
        actions.push(Action::StageEntered { migration, stage });
        let after_ms = match stage {
            Stage::Reserving => self.config.reserve_ms,
            Stage::Copying => self.config.copy_ms,
            Stage::Queued => self.config.queue_ms,
            Stage::Switching => self.config.switch_ms.saturating_mul(2),
            Stage::Settling => self.config.settle_ms,
        };
        actions.push(Action::Timer { timer: Timer::Deadline(migration, stage), after_ms });
        self.send_requests(migration, actions);
    }

    /// Sends the requests of the present stage, or retransmits them.
    fn send_requests(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        let Some(progress) = self.progress.get(&migration) else { return };
        let Some(stored) = self.ledger.migrations.get(&migration).cloned() else { return };
        let hosts =
            if progress.stage == Stage::Switching { &progress.unvoted_sources } else { &progress.waiting };
        let (stage, hosts, waits_for) = (progress.stage, hosts.clone(), progress.waits_for);
        for host in hosts {
            let part = |is: &dyn Fn(&Move) -> HostId| {
                stored.moves.iter().filter(|moved| is(moved) == host).copied().collect()
            };
            let body = match stage {
                Stage::Reserving => Body::Reserve { migration, moves: part(&|moved| moved.to) },
                Stage::Copying => Body::Begin { migration, moves: part(&|moved| moved.from) },
                Stage::Queued => match waits_for {
                    Some(waits_for) => Body::Queued { migration, waits_for },
                    None => continue,
                },
                Stage::Switching => Body::Switch { migration },
                Stage::Settling => self.decision_body(host, migration, &stored),
            };
            self.send(host, body, actions);
        }
        let Config { retry_ms, precopy_retry_ms, .. } = self.config;
        let calm = matches!(stage, Stage::Copying | Stage::Queued);
        let after_ms = if calm { precopy_retry_ms } else { retry_ms };
        actions.push(Action::Timer { timer: Timer::Retry(migration), after_ms });
    }

    /// Commits when all votes are there and the owners are those of the beginning.
    fn decide(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        let Some(progress) = self.progress.get(&migration) else { return };
        let yielded = progress.unvoted_sources.is_empty()
            || self.config.injected_bug == InjectedBug::CommitWithoutSourceVote;
        if progress.stage != Stage::Switching || !progress.waiting.is_empty() || !yielded {
            return;
        }
        let Some(stored) = self.ledger.migrations.get(&migration) else { return };
        let same = stored.moves.iter().all(|moved| {
            self.ledger.vms.get(&moved.vm).is_some_and(|owner| {
                owner.alive && owner.host == moved.from && owner.epoch.0.checked_add(1) == Some(moved.epoch.0)
            })
        });
        if !same {
            self.abort(migration, AbortReason::Epoch, actions);
            return;
        }
        if self.config.injected_bug == InjectedBug::DecisionNotWritten {
            self.ledger.apply(&Record::Committed { migration });
        } else {
            self.write(Record::Committed { migration }, actions);
        }
        actions.push(Action::Ended { migration, decision: Decision::Committed, reason: None });
        self.start_settling(migration, actions);
    }

    fn abort(&mut self, migration: MigrationId, reason: AbortReason, actions: &mut Vec<Action>) {
        let Some(stored) = self.ledger.migrations.get(&migration) else { return };
        let twice = self.config.injected_bug == InjectedBug::DecideTwice
            && stored.decision == Some(Decision::Committed);
        if stored.decision.is_some() && !twice {
            return;
        }
        self.write(Record::Aborted { migration }, actions);
        actions.push(Action::Ended { migration, decision: Decision::Aborted, reason: Some(reason) });
        self.start_settling(migration, actions);
        self.admit(actions);
    }

    fn start_settling(&mut self, migration: MigrationId, actions: &mut Vec<Action>) {
        let Some(stored) = self.ledger.migrations.get(&migration) else { return };
        let (sources, destinations) = hosts_of(&stored.moves);
        let waiting = sources.union(&destinations).copied().collect();
        // A coordinator that has just started doesn't know whether the switchover had begun.
        let switched = self.progress.get(&migration).is_none_or(|before| before.switched);
        self.progress.insert(
            migration,
            MigrationProgress { switched, ..MigrationProgress::new(Stage::Settling, waiting) },
        );
        self.enter(migration, actions);
    }

    fn locate(&mut self, host: HostId, vm: VmId, actions: &mut Vec<Action>) {
        let body = match self.ledger.vms.get(&vm) {
            Some(owner) if owner.alive => {
                Body::At { place: Place { vm, host: owner.host, epoch: owner.epoch } }
            }
            Some(owner) => Body::Lost { vm, epoch: owner.epoch },
            None => Body::Lost { vm, epoch: crate::names::Epoch(u64::MAX) },
        };
        self.send(host, body, actions);
    }

    fn timer(&mut self, timer: Timer, actions: &mut Vec<Action>) {
        match timer {
            Timer::Retry(migration) if self.is_released(migration) => {
                self.resend_kept_decision(migration, actions)
            }
            Timer::Retry(migration) => self.send_requests(migration, actions),
            Timer::Deadline(migration, Stage::Settling) => self.release(migration, actions),
            Timer::Deadline(migration, Stage::Queued) => self.abort(migration, AbortReason::Queue, actions),
            Timer::Deadline(migration, _) => self.abort(migration, AbortReason::Timeout, actions),
        }
    }

    fn write(&mut self, record: Record, actions: &mut Vec<Action>) {
        self.ledger.apply(&record);
        actions.push(Action::Write(record));
    }

    fn send(&self, to: HostId, body: Body, actions: &mut Vec<Action>) {
        let (from, incarnation) = (Node::Coordinator, Incarnation(0));
        actions.push(Action::Send(Message { from, incarnation, to: Node::Host(to), body }));
    }
}

/// Sources and destinations.
fn hosts_of(moves: &[Move]) -> (BTreeSet<HostId>, BTreeSet<HostId>) {
    (moves.iter().map(|moved| moved.from).collect(), moves.iter().map(|moved| moved.to).collect())
}
