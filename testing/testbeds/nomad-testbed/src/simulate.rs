//! A cluster in virtual time, with faults from one seed: losses, repetitions, delays, kills and partitions of any host and of the
//! coordinator while groups of VMs move. Afterwards the faults end, and all must come to its end.
//!
//! Times are microseconds. They order events; they are no measurements.

mod report;
mod scenes;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use nomad::config::{Config, InjectedBug};
use nomad::names::{HostId, MigrationId, Node, VmId};

use super::cluster::{Cluster, Pending, Work};
use facilities::rng::SplitMix64;

pub use report::Report;
pub use scenes::{Paths, Scene, run_slowly, run_with};

/// Until when there are faults, where a switch-over may take [`QUICK_SWITCH_MS`].
const FAULTS_END: u64 = 400_000;
/// For how long all may take to end, once the faults have ended.
const ALL_ENDS: u64 = 60_000_000;
/// In half of the random runs a switch-over may take so long, so that there are many, and in the others as long as in the product.
const QUICK_SWITCH_MS: u32 = 150;
/// A user, and a monitor with a fault, wait so long.
const MAX_WAIT_US: u64 = 60_000_000;
/// A host without a heartbeat for so long counts as silent.
const LEASE: u64 = 6_000_000;
/// An operation that isn't answered is sent again.
const RETRY_INTERVAL_US: u64 = 4_000;

/// What is done to one participant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InjectedFault {
    /// It is killed, and is back after 50 ms, having lost all but what it has written.
    Kill,
    /// Nothing reaches it, and nothing of it reaches others, for 5 s: longer than a switch-over may take, and its decision.
    Partition,
    /// As [`InjectedFault::Partition`], for 90 s: longer than any timeout.
    Outage,
    /// A host doesn't reach the service, nor the service the host, for 5 s. Other hosts reach it. Of the service: [`InjectedFault::Partition`].
    Unserved,
    /// A host that fails with its monitors, and never returns.
    Death,
    /// A living daemon that the service takes for one that was started again.
    Renumber,
}

impl InjectedFault {
    /// For how long its messages are lost, microseconds.
    fn duration_us(self) -> u64 {
        match self {
            Self::Kill => 50_000,
            Self::Partition | Self::Unserved => 5_000_000,
            Self::Outage => 90_000_000,
            Self::Death | Self::Renumber => 0,
        }
    }
}

/// One fault at one step.
#[derive(Debug, Clone, Copy)]
pub struct FaultAtStep {
    /// The node that is harmed.
    pub node: Node,
    /// The fault that is injected.
    pub fault: InjectedFault,
    /// After how many steps of the protocol since the migration was asked for.
    pub step: u64,
}

struct Run {
    cluster: Cluster,
    rng: SplitMix64,
    now: u64,
    count: u64,
    queue: BinaryHeap<Reverse<(u64, u64, Pending)>>,
    /// Of each timer the one that was set last: it replaces those before it.
    latest: BTreeMap<Pending, u64>,
    out: Vec<Pending>,
    /// Parts of a thousand messages.
    losses: u32,
    repeats: u32,
    delays: u32,
    /// Nodes that are cut off, until when.
    partitioned: BTreeMap<Node, u64>,
    /// Hosts that are cut off from the service alone, until when.
    unserved: BTreeMap<HostId, u64>,
    /// Direct paths break and work again during the run: parts of a thousand, per half millisecond.
    severs: u32,
    sent: BTreeMap<(VmId, VmId), u64>,
    /// Since when monitors wait for a decision.
    undecided_since: BTreeMap<(HostId, VmId), u64>,
    report: Report,
    aborted_at: Option<u64>,
    /// Since when queue pairs between running VMs are closed; `None`: not measured.
    suspended: Option<BTreeMap<(VmId, VmId), u64>>,
    aborted: u32,
}

impl Run {
    fn new(rng: SplitMix64, cluster: Cluster, out: Vec<Pending>) -> Self {
        Self {
            cluster,
            rng,
            now: 0,
            count: 0,
            queue: BinaryHeap::new(),
            latest: BTreeMap::new(),
            out,
            losses: 0,
            repeats: 0,
            delays: 0,
            partitioned: BTreeMap::new(),
            unserved: BTreeMap::new(),
            severs: 0,
            sent: BTreeMap::new(),
            undecided_since: BTreeMap::new(),
            report: Report::default(),
            aborted_at: None,
            suspended: None,
            aborted: 0,
        }
    }

    fn is_partitioned(&self, node: Node) -> bool {
        self.partitioned.get(&node).is_some_and(|until| *until > self.now)
    }

    /// Whether a node can't exchange anything with the service.
    fn is_unserved(&self, node: Node) -> bool {
        let Node::Host(host) = node else { return false };
        self.is_partitioned(Node::Coordinator)
            || self.unserved.get(&host).is_some_and(|until| *until > self.now)
    }

    /// Puts what has come out in flight.
    fn schedule(&mut self) {
        for pending in std::mem::take(&mut self.out) {
            let slow = self.delays > 0 && self.rng.chance(self.delays);
            let mut between = |low: u32, high: u32| u64::from(self.rng.between(low, high));
            let after = match &pending {
                Pending::Message(_) | Pending::Direct(_) | Pending::Data { .. } | Pending::Done { .. } => {
                    between(20, if slow { 60_000 } else { 150 })
                }
                Pending::Stream { .. } => between(100, 3_000),
                Pending::Work(_, _, Work::Copy(..)) => between(500, 10_000),
                Pending::Work(..) => between(1, 300),
                Pending::Silence(_) => LEASE,
                Pending::Timer(.., after_ms) | Pending::Deadline(.., after_ms) => {
                    u64::from(*after_ms) * 1_000
                }
            };
            if matches!(pending, Pending::Message(_) | Pending::Direct(_)) && self.rng.chance(self.repeats) {
                self.report.repeated += 1;
                let later = after + u64::from(self.rng.between(1, 100_000));
                self.push(later, pending.clone());
            }
            self.push(after, pending);
        }
    }

    fn push(&mut self, after: u64, pending: Pending) {
        self.count += 1;
        if matches!(pending, Pending::Timer(..) | Pending::Deadline(..)) {
            self.latest.insert(pending.clone().without_time(), self.count);
        }
        self.queue.push(Reverse((self.now + after, self.count, pending)));
    }

    /// The next event. `false`: there is none before this time.
    fn step(&mut self, until: u64) -> bool {
        match self.queue.peek() {
            Some(Reverse((at, ..))) if *at <= until => {}
            _ => {
                self.now = until;
                return false;
            }
        }
        let Some(Reverse((at, number, pending))) = self.queue.pop() else { return false };
        self.now = at;
        if matches!(pending, Pending::Timer(..) | Pending::Deadline(..)) {
            let timer = pending.clone().without_time();
            if self.latest.get(&timer) != Some(&number) {
                return true;
            }
            self.latest.remove(&timer);
        }
        self.report.events += 1;
        self.report.steps += u64::from(
            !matches!(pending, Pending::Data { .. } | Pending::Done { .. }) && self.cluster.matters(&pending),
        );
        let ends = match &pending {
            Pending::Message(message) | Pending::Direct(message) => Some((message.from, message.to)),
            Pending::Stream { from, to, .. } | Pending::Data { from, to, .. } => {
                Some((Node::Host(*from), Node::Host(*to)))
            }
            Pending::Done { to, .. } => Some((Node::Host(*to), Node::Host(*to))),
            _ => None,
        };
        // By the service go all messages but direct ones.
        let served = matches!(pending, Pending::Message(_));
        let away = |from, to| {
            served && (self.is_unserved(from) || self.is_unserved(to))
                || self.is_partitioned(from)
                || self.is_partitioned(to)
        };
        let lost = ends.is_some_and(|(from, to)| from != to && away(from, to))
            || ends.is_some() && self.rng.chance(self.losses)
            || self.cluster.is_lost_freely(&pending) && self.rng.chance(500);
        match (&pending, ends) {
            (Pending::Direct(_), _) => self.report.direct += 1,
            (Pending::Message(_), Some((Node::Host(_), Node::Host(_)))) => self.report.passed_on += 1,
            _ => {}
        }
        if lost {
            self.report.lost += 1;
            self.cluster.lose(pending, &mut self.out);
        } else {
            self.cluster.deliver(pending, &mut self.out);
        }
        self.schedule();
        self.watch();
        true
    }

    /// Monitors that have waited for a decision for a minute: users resume those in doubt, where that is allowed.
    fn withdraw_vote(&mut self) {
        let (doubt, voted) = (self.cluster.in_doubt(), self.cluster.voted());
        self.undecided_since.retain(|one, _| doubt.contains(one) || voted.contains(one));
        let now = self.now;
        for one in &doubt {
            if now - *self.undecided_since.entry(*one).or_insert(now) > MAX_WAIT_US {
                self.cluster.resume(one.0, one.1);
            }
        }
        for one in voted {
            let since = *self.undecided_since.entry(one).or_insert(now);
            if now - since > MAX_WAIT_US && self.cluster.config.injected_bug == InjectedBug::WithdrawVote {
                self.cluster.withdraw_vote(one.0, one.1, &mut self.out);
            }
        }
    }

    /// Sends operations that may be sent, and those again that weren't answered.
    fn send(&mut self) {
        let hosts = self.cluster.machines.keys();
        let away: BTreeSet<HostId> =
            hosts.copied().filter(|host| self.is_unserved(Node::Host(*host))).collect();
        self.cluster.poll_decisions(|host| away.contains(&host), &mut self.out);
        self.withdraw_vote();
        let mut ready = Vec::new();
        self.cluster.sends(|data| ready.push(data));
        for data in ready {
            let Pending::Data { vm, peer, .. } = &data else { continue };
            let last = self.sent.entry((*vm, *peer)).or_default();
            if *last == 0 || self.now >= *last + RETRY_INTERVAL_US || self.rng.chance(300) {
                *last = self.now.max(1);
                self.out.push(data);
            }
        }
        self.schedule();
    }

    /// How long it takes from a decision to give up until all queue pairs between living VMs are open.
    fn watch(&mut self) {
        if self.cluster.ends.aborted > self.aborted {
            self.aborted = self.cluster.ends.aborted;
            self.aborted_at = Some(self.now);
        }
        if let Some(since) = self.aborted_at
            && self.all_open()
        {
            self.report.longest_resume = self.report.longest_resume.max(self.now - since);
            self.aborted_at = None;
        }
        self.watch_suspended();
    }

    /// How long queue pairs between running VMs are closed.
    fn watch_suspended(&mut self) {
        let Some(mut closed) = self.suspended.take() else { return };
        for (vm, peer) in self.cluster.flows.keys() {
            let (here, there) = (self.cluster.where_runs(*vm), self.cluster.where_runs(*peer));
            let machine = here.filter(|_| there.is_some()).and_then(|host| self.cluster.machines.get(&host));
            if machine.is_some_and(|machine| !machine.engine.open.contains_key(&(*vm, *peer))) {
                let since = *closed.entry((*vm, *peer)).or_insert(self.now);
                self.report.longest_suspended = self.report.longest_suspended.max(self.now - since);
            } else {
                closed.remove(&(*vm, *peer));
            }
        }
        self.suspended = Some(closed);
    }

    fn all_open(&self) -> bool {
        self.cluster.flows.keys().all(|(vm, peer)| {
            let Some(host) = self.cluster.where_runs(*vm) else { return self.cluster.is_lost(*vm) };
            let open = self.cluster.machines.get(&host);
            let open = open.is_some_and(|machine| machine.engine.open.contains_key(&(*vm, *peer)));
            open || self.cluster.is_lost(*peer)
        })
    }

    fn partition(&mut self, node: Node, duration_us: u64) {
        let until = self.now + duration_us;
        self.partitioned.entry(node).and_modify(|end| *end = until.max(*end)).or_insert(until);
    }

    /// Which hosts reach each other directly: none, some, all, or it changes during the run.
    fn choose_paths(&mut self) {
        let pairs = self.cluster.pairs();
        match self.rng.below(4) {
            0 => pairs.into_iter().for_each(|pair| self.cluster.sever(pair)),
            1 => {
                for pair in pairs {
                    if self.rng.chance(300) {
                        self.cluster.sever(pair);
                    }
                }
            }
            2 => self.severs = 100,
            _ => {}
        }
    }

    /// Direct paths break, and work again.
    fn sever(&mut self) {
        if !self.rng.chance(self.severs) {
            return;
        }
        let pairs = self.cluster.pairs();
        let at = self.rng.below(u32::try_from(pairs.len().max(1)).unwrap_or(1)) as usize;
        let Some(pair) = pairs.get(at) else { return };
        if !self.cluster.severed.remove(pair) {
            self.report.severed += 1;
            self.cluster.sever(*pair);
        }
    }

    fn inject(&mut self, node: Node, fault: InjectedFault, duration_us: u64) {
        if let (InjectedFault::Unserved, Node::Host(host)) = (fault, node) {
            self.report.unserved += 1;
            self.unserved.insert(host, self.now + duration_us);
            return;
        }
        self.partition(node, duration_us);
        match (fault, node) {
            (InjectedFault::Partition | InjectedFault::Outage | InjectedFault::Unserved, _) => {
                self.report.partitions += 1
            }
            (InjectedFault::Death | InjectedFault::Renumber, Node::Coordinator) => {}
            (InjectedFault::Death, Node::Host(host)) => {
                self.report.deaths += 1;
                self.cluster.die(host, &mut self.out);
            }
            (InjectedFault::Renumber, Node::Host(host)) => {
                self.report.renumbers += 1;
                self.cluster.renumber(host, &mut self.out);
            }
            (InjectedFault::Kill, Node::Coordinator) => {
                self.report.coordinator_kills += 1;
                self.queue.retain(|Reverse((.., pending))| !Cluster::passes_by_service(pending));
                self.cluster.kill_coordinator(&mut self.out);
            }
            (InjectedFault::Kill, Node::Host(host)) => {
                self.report.kills += 1;
                self.cluster.kill(host, &mut self.out);
            }
        }
        self.schedule();
        self.watch();
    }

    /// Without faults from now on, until all has ended.
    fn end(&mut self) -> Result<Report, String> {
        (self.losses, self.repeats, self.delays) = (0, 0, 0);
        self.partitioned.clear();
        self.unserved.clear();
        let mut next = self.now;
        let (end, mut forgotten) = (self.now + ALL_ENDS, false);
        loop {
            next += 1_000;
            while self.step(next) {}
            if let Some(violation) = &self.cluster.violation {
                return Err(violation.clone());
            }
            self.send();
            let mut all_sent = true;
            self.cluster.sends(|_| all_sent = false);
            let still = || self.queue.iter().all(|Reverse((.., it))| !self.cluster.matters(it));
            if all_sent && self.cluster.is_idle() && still() {
                break;
            }
            if self.now > end - ALL_ENDS / 2 && !forgotten {
                // Queue pairs that face VMs of hosts that don't return wait for an operator; nothing else waits any more.
                forgotten = true;
                self.cluster.is_free()?;
                self.cluster.forget_dead(&mut self.out);
                self.schedule();
            }
            if self.now > end {
                return Err(self.cluster.stuck());
            }
        }
        self.cluster.ended_well()?;
        self.report.committed = u64::from(self.cluster.ends.committed);
        self.report.aborted = u64::from(self.cluster.ends.aborted);
        self.report.operations = self.cluster.flows.values().map(|flow| u64::from(flow.effects)).sum();
        let lost = self.cluster.disk.vms.keys().filter(|vm| self.cluster.is_lost(**vm)).count();
        self.report.vms_lost = u64::try_from(lost).unwrap_or(u64::MAX);
        Ok(self.report)
    }
}

fn config(bug: InjectedBug, fanout: u8) -> Config {
    Config { injected_bug: bug, fanout, copy_ms: 1_000, reserve_ms: 300, ..Config::default() }
}

/// As [`config`], and by how much longer than otherwise all takes.
fn config_of(seed: u64, bug: InjectedBug, fanout: u8) -> (Config, u64) {
    let real = config(bug, fanout);
    if seed.is_multiple_of(2) {
        (Config { switch_ms: QUICK_SWITCH_MS, settle_ms: 750, ..real }, 1)
    } else {
        (real, u64::from(real.switch_ms / QUICK_SWITCH_MS))
    }
}

/// A run with random faults.
///
/// # Errors
/// What is wrong.
pub fn run(seed: u64, bug: InjectedBug) -> Result<Report, String> {
    let mut rng = SplitMix64::new(seed);
    let hosts = rng.between(2, 9);
    let vms = rng.between(2, 8);
    let fanout = [0, 1, 2, 4][rng.below(4) as usize];
    let mut out = Vec::new();
    let (config, scale) = config_of(seed, bug, fanout);
    let cluster = Cluster::new(hosts, 40, config, &mut out);
    let mut run = Run::new(rng, cluster, out);
    run.schedule();
    // All hosts are known before the first VM.
    while run.step(5_000) {}
    let mut names = Vec::new();
    for vm in (1..=vms).map(VmId) {
        let host = HostId(run.rng.between(1, hosts));
        run.cluster.start_vm(vm, host, &mut run.out);
        names.push(vm);
    }
    let mut links = BTreeSet::new();
    for _ in 0..run.rng.between(1, vms * 2) {
        let (a, b) = (VmId(run.rng.between(1, vms)), VmId(run.rng.between(1, vms)));
        if a != b && links.insert((a.min(b), a.max(b))) {
            run.cluster.link(a, b, &mut run.out);
        }
    }
    run.schedule();
    run.losses = [0, 0, 5, 50, 150][run.rng.below(5) as usize];
    run.repeats = [0, 0, 10, 100][run.rng.below(4) as usize];
    run.delays = [0, 0, 10, 100][run.rng.below(4) as usize];
    run.choose_paths();
    let faults = [0, 0, 1, 1, 2, 4][run.rng.below(6) as usize];
    let (mut migrate_at, mut fault_time) = (run.now, run.now + scale * u64::from(run.rng.between(1, 60_000)));
    let (mut faults_left, mut cancel) = (faults, None::<(u64, MigrationId)>);
    while run.now < scale * FAULTS_END {
        let next = run.now + 500;
        while run.step(next) {}
        if let Some(violation) = &run.cluster.violation {
            return Err(violation.clone());
        }
        run.send();
        run.sever();
        if run.now >= migrate_at {
            let moves = random_moves(&mut run.rng, &names, &run.cluster, hosts);
            let begun = run.cluster.migrate(&moves, &mut run.out);
            if run.rng.chance(400) {
                // Another one at the same time, of peers as often as not.
                let moves = random_moves(&mut run.rng, &names, &run.cluster, hosts);
                run.cluster.migrate(&moves, &mut run.out);
            }
            run.schedule();
            migrate_at = run.now + scale * u64::from(run.rng.between(1_000, 60_000));
            if let Some(migration) = begun.filter(|_| run.rng.chance(80)) {
                cancel = Some((run.now + u64::from(run.rng.between(1, 12_000)), migration));
            }
        }
        if let Some((at, migration)) = cancel
            && run.now >= at
        {
            run.cluster.cancel(migration, &mut run.out);
            run.schedule();
            cancel = None;
        }
        if run.now >= fault_time && faults_left > 0 {
            faults_left -= 1;
            let node = match run.rng.below(4) {
                0 => Node::Coordinator,
                _ => Node::Host(HostId(run.rng.between(1, hosts))),
            };
            let fault = match run.rng.below(20) {
                0 => InjectedFault::Death,
                1 | 2 => InjectedFault::Renumber,
                3..=10 => InjectedFault::Kill,
                11..=14 => InjectedFault::Unserved,
                _ => InjectedFault::Partition,
            };
            let duration_us = scale * u64::from(run.rng.between(100, 300_000));
            run.inject(node, fault, if fault.duration_us() == 0 { 0 } else { duration_us });
            fault_time = run.now + scale * u64::from(run.rng.between(1, 60_000));
        }
    }
    run.end()
}

/// A random group, or two VMs that change places.
fn random_moves(rng: &mut SplitMix64, vms: &[VmId], cluster: &Cluster, hosts: u32) -> Vec<(VmId, HostId)> {
    let pick =
        |rng: &mut SplitMix64| vms.get(rng.below(u32::try_from(vms.len()).unwrap_or(1)) as usize).copied();
    let host = |vm: VmId| cluster.disk.vms.get(&vm).map(|owner| owner.host);
    if rng.chance(300)
        && let (Some(a), Some(b)) = (pick(rng), pick(rng))
        && let (Some(at), Some(bt)) = (host(a), host(b))
    {
        return vec![(a, bt), (b, at)];
    }
    let mut group = BTreeMap::new();
    for _ in 0..rng.between(1, 4) {
        if let Some(vm) = pick(rng) {
            group.insert(vm, HostId(rng.between(1, hosts)));
        }
    }
    group.into_iter().filter(|(vm, to)| host(*vm) != Some(*to)).collect()
}
