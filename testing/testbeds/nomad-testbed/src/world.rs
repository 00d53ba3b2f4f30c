//! A small cluster with budgets of faults: what may happen next, and what comes of it. For the model checker.

use std::hash::{Hash, Hasher};

use nomad::config::{Config, InjectedBug};
use nomad::names::{HostId, MigrationId, VmId};

use super::cluster::{Cluster, Pending, Work};

/// How many faults may happen in one run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Budget {
    /// Messages, streams and operations lost.
    pub losses: u8,
    /// Messages delivered twice.
    pub repeats: u8,
    /// Direct paths between two hosts that break. They may work again at any time.
    pub severs: u8,
    /// Hosts killed.
    pub kills: u8,
    /// The coordinator killed.
    pub coordinator_kills: u8,
    /// Hosts that fail and never return.
    pub deaths: u8,
    /// Living daemons that the service takes for ones that were started again.
    pub renumbers: u8,
    /// Guests in doubt that their users resume.
    pub resumes: u8,
    /// Timers that run out although what they wait for is still in flight.
    pub timers: u8,
    /// Migrations cancelled.
    pub cancels: u8,
    /// Migrations begun after the first one has ended.
    pub more: u8,
    /// Operations sent.
    pub sends: u8,
}

/// What a run begins with.
#[derive(Debug, Clone)]
pub struct Setup {
    /// For reports.
    pub name: &'static str,
    /// Number of hosts; their ids begin with 1.
    pub hosts: u32,
    /// VMs and their hosts.
    pub vms: Vec<(VmId, HostId)>,
    /// Pairs of VMs that are connected at the start.
    pub links: Vec<(VmId, VmId)>,
    /// The migration.
    pub moves: Vec<(VmId, HostId)>,
    /// Another one, asked for at the same time; empty: none.
    pub concurrent: Vec<(VmId, HostId)>,
    /// Hosts reach each other directly; otherwise the service passes all messages on.
    pub direct: bool,
    /// The beginning is where sources copy: what comes before happens in one order.
    pub copying: bool,
    /// What is asked for afterwards, when the budget allows.
    pub then: Vec<(VmId, HostId)>,
    /// How often each kind of injected fault, and of user action, may happen in a run.
    pub budget: Budget,
    /// Times and injected bugs.
    pub config: Config,
    /// One of so many states is let run to its end without faults; 0: none.
    pub settle: u64,
}

/// Something that may happen.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Step {
    /// Something in flight arrives.
    Deliver(Pending),
    /// It is lost.
    Lose(Pending),
    /// It arrives and stays in flight.
    Repeat(Pending),
    /// An operation is sent.
    Send(Pending),
    /// The direct path between two hosts breaks.
    Sever(HostId, HostId),
    /// It works again.
    Restore(HostId, HostId),
    /// A host is killed.
    Kill(HostId),
    /// The coordinator is killed.
    KillCoordinator,
    /// A host fails, and never returns.
    Die(HostId),
    /// The service takes a living daemon for one that was started again.
    Renumber(HostId),
    /// A monitor learns how its migration ended.
    LearnOutcome(HostId, VmId),
    /// The user of a monitor in doubt resumes its guest.
    Resume(HostId, VmId),
    /// A monitor that has voted waits no longer.
    WithdrawVote(HostId, VmId),
    /// The migration is cancelled.
    Cancel(MigrationId),
    /// The next one is asked for.
    Migrate,
}

/// A state.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct World {
    /// The cluster.
    pub cluster: Cluster,
    /// What is in flight, in order of its value.
    pub in_flight: Vec<Pending>,
    /// Faults left.
    pub budget: Budget,
    /// What is wrong.
    pub violation: Option<String>,
}

impl World {
    /// The beginning: hosts are known, VMs run, the migration is asked for.
    #[must_use]
    pub fn new(setup: &Setup) -> Self {
        let mut out = Vec::new();
        let mut cluster = Cluster::new(setup.hosts, 2, setup.config, &mut out);
        if !setup.direct {
            cluster.pairs().into_iter().for_each(|pair| cluster.sever(pair));
        }
        // Hosts become known before anything else.
        while let Some(pending) = out.pop() {
            if !matches!(pending, Pending::Timer(..)) {
                cluster.deliver(pending, &mut out);
            }
        }
        for (vm, host) in &setup.vms {
            cluster.start_vm(*vm, *host, &mut out);
        }
        for (one, other) in &setup.links {
            cluster.link(*one, *other, &mut out);
        }
        let all = [&setup.moves, &setup.concurrent].into_iter().filter(|moves| !moves.is_empty());
        let begun = all.map(|moves| cluster.migrate(moves, &mut out)).collect::<Option<Vec<_>>>();
        let violation = if begun.is_none() { Some("a migration isn't begun".to_owned()) } else { None };
        if setup.copying {
            let mut kept = Vec::new();
            while !out.is_empty() {
                for pending in std::mem::take(&mut out) {
                    match pending {
                        Pending::Timer(..) | Pending::Deadline(..) | Pending::Work(_, _, Work::Copy(..)) => {
                            kept.push(pending)
                        }
                        other => cluster.deliver(other, &mut out),
                    }
                }
            }
            out = kept;
        }
        let mut world = Self { cluster, in_flight: Vec::new(), budget: setup.budget, violation };
        world.add_in_flight(out);
        world
    }

    fn add_in_flight(&mut self, out: Vec<Pending>) {
        // Anything may take any time here, timers too.
        self.in_flight.extend(out.into_iter().map(Pending::without_time));
        let cluster = &self.cluster;
        self.in_flight.retain(|pending| cluster.matters(pending));
        self.in_flight.sort_unstable();
        // What is in flight twice may as well be there once: repeating is a fault of its own, and all is idempotent.
        self.in_flight.dedup();
        if self.violation.is_none() {
            self.violation.clone_from(&self.cluster.violation);
        }
        // What doesn't change what can happen would only multiply states.
        self.cluster.undelivered = 0;
    }

    /// What may happen.
    pub fn steps(&self, setup: &Setup, steps: &mut Vec<Step>) {
        if self.violation.is_some() {
            return;
        }
        for pending in &self.in_flight {
            match pending {
                Pending::Timer(..) | Pending::Deadline(..) => {
                    if self.budget.timers > 0 {
                        steps.push(Step::Deliver(pending.clone()));
                    }
                    continue;
                }
                Pending::Work(..) => {}
                Pending::Stream { .. } => {
                    if self.budget.losses > 0 {
                        steps.push(Step::Lose(pending.clone()));
                    }
                }
                Pending::Message(_) | Pending::Direct(_) => {
                    if self.budget.losses > 0 || self.cluster.is_lost_freely(pending) {
                        steps.push(Step::Lose(pending.clone()));
                    }
                    if self.budget.repeats > 0 {
                        steps.push(Step::Repeat(pending.clone()));
                    }
                }
                Pending::Data { .. } | Pending::Done { .. } | Pending::Silence(_) => {}
            }
            steps.push(Step::Deliver(pending.clone()));
        }
        if self.budget.sends > 0 {
            self.cluster.sends(|data| {
                let Pending::Data { vm, peer, .. } = &data else { return };
                let same = |other: &Pending| matches!(other, Pending::Data { vm: a, peer: b, .. } | Pending::Done { vm: a, peer: b, .. } if (a, b) == (vm, peer));
                if !self.in_flight.iter().any(same) {
                    steps.push(Step::Send(data));
                }
            });
        }
        steps.extend(
            self.cluster.can_learn_outcome().into_iter().map(|(host, vm)| Step::LearnOutcome(host, vm)),
        );
        if self.budget.resumes > 0 {
            steps.extend(self.cluster.in_doubt().into_iter().map(|(host, vm)| Step::Resume(host, vm)));
        }
        if self.budget.timers > 0 && self.cluster.config.injected_bug == InjectedBug::WithdrawVote {
            steps.extend(self.cluster.voted().into_iter().map(|(host, vm)| Step::WithdrawVote(host, vm)));
        }
        if self.budget.deaths > 0 {
            steps.extend(self.cluster.machines.keys().map(|host| Step::Die(*host)));
        }
        if self.budget.renumbers > 0 {
            steps.extend(self.cluster.machines.keys().map(|host| Step::Renumber(*host)));
        }
        if self.budget.severs > 0 {
            let whole = |pair: &(HostId, HostId)| !self.cluster.severed.contains(pair);
            let pairs = self.cluster.pairs().into_iter().filter(whole);
            steps.extend(pairs.map(|(one, other)| Step::Sever(one, other)));
        }
        if setup.direct {
            steps.extend(self.cluster.severed.iter().map(|(one, other)| Step::Restore(*one, *other)));
        }
        if self.budget.kills > 0 {
            steps.extend(self.cluster.machines.keys().map(|host| Step::Kill(*host)));
        }
        if self.budget.coordinator_kills > 0 {
            steps.push(Step::KillCoordinator);
        }
        let migrations = &self.cluster.disk.migrations;
        let over = migrations.is_empty();
        if self.budget.cancels > 0 {
            steps.extend(migrations.keys().map(|migration| Step::Cancel(*migration)));
        }
        if self.budget.more > 0 && over && !setup.then.is_empty() {
            steps.push(Step::Migrate);
        }
    }

    /// What comes of a step.
    #[must_use]
    pub fn after(&self, setup: &Setup, step: Step) -> Option<Self> {
        let mut next = self.clone();
        let mut out = Vec::new();
        match step {
            Step::Deliver(pending) => {
                next.remove(&pending)?;
                if matches!(pending, Pending::Timer(..) | Pending::Deadline(..)) {
                    next.budget.timers -= 1;
                }
                next.cluster.deliver(pending, &mut out);
            }
            Step::Lose(pending) => {
                next.remove(&pending)?;
                if !next.cluster.is_lost_freely(&pending) {
                    next.budget.losses -= 1;
                }
                next.cluster.lose(pending, &mut out);
            }
            Step::Repeat(pending) => {
                next.budget.repeats -= 1;
                next.cluster.deliver(pending, &mut out);
            }
            Step::Send(data) => {
                next.budget.sends -= 1;
                out.push(data);
            }
            Step::Sever(one, other) => {
                next.budget.severs -= 1;
                next.cluster.sever((one, other));
            }
            Step::Restore(one, other) => {
                next.cluster.severed.remove(&(one, other));
            }
            Step::Kill(host) => {
                next.budget.kills -= 1;
                next.cluster.kill(host, &mut out);
            }
            Step::KillCoordinator => {
                next.budget.coordinator_kills -= 1;
                next.in_flight.retain(|pending| !Cluster::passes_by_service(pending));
                next.cluster.kill_coordinator(&mut out);
            }
            Step::Die(host) => {
                next.budget.deaths -= 1;
                next.cluster.die(host, &mut out);
            }
            Step::Renumber(host) => {
                next.budget.renumbers -= 1;
                next.cluster.renumber(host, &mut out);
            }
            Step::LearnOutcome(host, vm) => next.cluster.learn_outcome(host, vm, &mut out),
            Step::Resume(host, vm) => {
                next.budget.resumes -= 1;
                next.cluster.resume(host, vm);
            }
            Step::WithdrawVote(host, vm) => {
                next.budget.timers -= 1;
                next.cluster.withdraw_vote(host, vm, &mut out);
            }
            Step::Cancel(migration) => {
                next.budget.cancels -= 1;
                next.cluster.cancel(migration, &mut out);
            }
            Step::Migrate => {
                next.budget.more -= 1;
                next.cluster.migrate(&setup.then, &mut out)?;
            }
        }
        next.add_in_flight(out);
        next.check_settles(setup);
        Some(next)
    }

    fn remove(&mut self, pending: &Pending) -> Option<()> {
        let at = self.in_flight.binary_search(pending).ok()?;
        self.in_flight.remove(at);
        Some(())
    }

    /// From here on without faults: does all end well?
    fn check_settles(&mut self, setup: &Setup) {
        if setup.settle == 0 || self.violation.is_some() {
            return;
        }
        let mut hasher = std::hash::DefaultHasher::new();
        self.hash(&mut hasher);
        let only_timers = self
            .in_flight
            .iter()
            .all(|pending| matches!(pending, Pending::Timer(..) | Pending::Deadline(..)));
        if only_timers || hasher.finish().is_multiple_of(setup.settle) {
            let mut cluster = self.cluster.clone();
            if let Err(wrong) = cluster.settle(self.in_flight.clone()) {
                self.violation = Some(format!("without further faults: {wrong}"));
            }
        }
    }

    /// Nothing more can happen, and all is as it should be.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.violation.is_none() && self.cluster.is_idle()
    }
}
