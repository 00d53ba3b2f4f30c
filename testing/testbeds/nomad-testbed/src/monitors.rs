//! VMs' monitors: they run guests, outlive their host's daemon, and believe what [`nomad::monitor`] lets them believe.

use nomad::config::InjectedBug;
use nomad::coordinator::MayRun;
use nomad::event::Event;
use nomad::monitor::{Answer, ClaimResult, Next, Side, after_claim, next};
use nomad::names::{Epoch, HostId, MigrationId, VmId};

use super::cluster::{Cluster, Pending};

/// A VM's monitor on a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Monitor {
    /// Its vCPUs run.
    pub guest: bool,
    /// The epoch in which they do, or would.
    pub epoch: Epoch,
    /// What it is at.
    pub state: MonitorState,
}

/// What a monitor is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MonitorState {
    /// Its guest runs, and its devices work.
    Running,
    /// Its guest runs; what served its devices has lost them.
    Orphan,
    /// It has stopped its guest for a migration, and asks how that ends.
    Stopped(MigrationId),
    /// It takes memory in.
    Receiving(MigrationId),
    /// It has said that all is there, and asks how that ends.
    Voted(MigrationId),
    /// It has ended.
    Ended,
}

impl Monitor {
    /// The daemon has lost the state of the VM's devices. A guest that runs continues without them. A destination that hasn't voted ends,
    /// since it can't use the memory that it receives. A monitor that awaits a decision continues to wait.
    pub fn lose_devices(&mut self) {
        match self.state {
            MonitorState::Running => self.state = MonitorState::Orphan,
            MonitorState::Receiving(_) => self.state = MonitorState::Ended,
            MonitorState::Orphan
            | MonitorState::Stopped(_)
            | MonitorState::Voted(_)
            | MonitorState::Ended => {}
        }
    }

    fn side(&self) -> Option<Side> {
        match self.state {
            MonitorState::Stopped(_) => Some(Side::Source),
            MonitorState::Voted(_) => Some(Side::Destination),
            _ => None,
        }
    }
}

impl Cluster {
    /// A VM's monitor on a host.
    #[must_use]
    pub fn monitor(&self, host: HostId, vm: VmId) -> Option<&Monitor> {
        self.machines.get(&host)?.monitors.get(&vm)
    }

    /// Whether a host has a monitor for a VM that hasn't ended.
    #[must_use]
    pub fn is_monitored(&self, host: HostId, vm: VmId) -> bool {
        self.monitor(host, vm).is_some_and(|monitor| monitor.state != MonitorState::Ended)
    }

    /// Monitors that wait for a decision, and their sides.
    fn waiting(&self) -> impl Iterator<Item = (HostId, VmId, Side)> {
        self.machines.iter().flat_map(|(host, machine)| {
            let side = |(vm, monitor): (&VmId, &Monitor)| Some((*host, *vm, monitor.side()?));
            machine.monitors.iter().filter_map(side)
        })
    }

    /// Those that would learn something if they asked now.
    #[must_use]
    pub fn can_learn_outcome(&self) -> Vec<(HostId, VmId)> {
        let learns = |(host, vm, side): &(HostId, VmId, Side)| {
            self.is_reclaimable(*host, *vm)
                || self.answer(*host, *vm, *side).is_some_and(|(next, _)| next != Next::Retry)
        };
        self.waiting().filter(learns).map(|(host, vm, _)| (host, vm)).collect()
    }

    /// Monitors of sources that don't know how their migrations end.
    #[must_use]
    pub fn in_doubt(&self) -> Vec<(HostId, VmId)> {
        let source = |(host, vm, side): (HostId, VmId, Side)| (side == Side::Source).then_some((host, vm));
        self.waiting().filter_map(source).collect()
    }

    /// Monitors of destinations that have voted.
    #[must_use]
    pub fn voted(&self) -> Vec<(HostId, VmId)> {
        let there =
            |(host, vm, side): (HostId, VmId, Side)| (side == Side::Destination).then_some((host, vm));
        self.waiting().filter_map(there).collect()
    }

    /// Whether a source's monitor, of whose migration its daemon hears nothing, finds that its VM was counted as lost: then it is the host's again.
    fn is_reclaimable(&self, host: HostId, vm: VmId) -> bool {
        let Some(machine) = self.machines.get(&host) else { return false };
        let pending = machine.engine.phases.get(&vm).is_some_and(|(answer, _)| *answer == Answer::Pending);
        let monitor = machine.monitors.get(&vm).filter(|monitor| monitor.side() == Some(Side::Source));
        pending
            && monitor
                .is_some_and(|monitor| self.coordinator.may_run(vm, host, monitor.epoch) == MayRun::Lost)
    }

    /// What a monitor does if it asks now, and the epoch in which its guest runs then.
    fn answer(&self, host: HostId, vm: VmId, side: Side) -> Option<(Next, Epoch)> {
        let machine = self.machines.get(&host)?;
        let monitor = machine.monitors.get(&vm)?;
        let (answer, epoch) = machine.engine.phases.get(&vm).copied().unwrap_or((
            match self.config.injected_bug {
                InjectedBug::ForgottenMeansAborted => Answer::Aborted,
                _ => Answer::Forgotten,
            },
            monitor.epoch,
        ));
        match next(side, answer) {
            Next::AskService => {
                Some((after_claim(side, self.claimed(host, vm, monitor.epoch)), monitor.epoch))
            }
            decided => Some((decided, epoch)),
        }
    }

    fn claimed(&self, host: HostId, vm: VmId, epoch: Epoch) -> ClaimResult {
        match self.coordinator.may_run(vm, host, epoch) {
            MayRun::Undecided(_) => ClaimResult::Unknown,
            // A daemon registers it anew then; what becomes of it isn't modelled further.
            MayRun::Here(_) | MayRun::Lost => ClaimResult::Here,
            MayRun::Elsewhere(_) | MayRun::Ended => ClaimResult::Elsewhere,
        }
    }

    /// A monitor asks how its migration ended.
    pub fn learn_outcome(&mut self, host: HostId, vm: VmId, out: &mut Vec<Pending>) {
        if self.is_reclaimable(host, vm) {
            return self.reclaim(host, vm, out);
        }
        let Some(side) = self.monitor(host, vm).and_then(Monitor::side) else { return };
        let Some((next, epoch)) = self.answer(host, vm, side) else { return };
        match (next, side) {
            (Next::Retry | Next::AskService, _) => {}
            (Next::Running, _) | (Next::Aborted, Side::Source) => self.guest_runs(host, vm, epoch),
            (Next::Aborted | Next::Moved | Next::Lost, _) => self.end_monitor(host, vm),
        }
    }

    fn reclaim(&mut self, host: HostId, vm: VmId, out: &mut Vec<Pending>) {
        let Some(epoch) = self.monitor(host, vm).map(|monitor| monitor.epoch) else { return };
        let mut actions = Vec::new();
        let claimed = self.coordinator.claim(vm, host, epoch, &mut actions);
        self.execute(actions, out);
        if let MayRun::Here(epoch) = claimed {
            self.broken.insert(vm);
            let after = self.coordinator.last_of(vm);
            self.host(host, Event::Started { vm, epoch, after }, out);
        }
        self.check();
    }

    /// The user resumes the guest of a source monitor that is in doubt. The monitor refuses unless the service answers that the VM stays
    /// here.
    pub fn resume(&mut self, host: HostId, vm: VmId) {
        let Some(monitor) = self.monitor(host, vm).copied() else { return };
        let allowed = self.config.injected_bug == InjectedBug::ResumeInDoubt
            || after_claim(Side::Source, self.claimed(host, vm, monitor.epoch)) == Next::Aborted;
        if monitor.side() == Some(Side::Source) && allowed {
            self.guest_runs(host, vm, monitor.epoch);
        }
    }

    /// [`InjectedBug::WithdrawVote`]: a destination's monitor has heard nothing for too long, and ends; its NICs go with it.
    pub fn withdraw_vote(&mut self, host: HostId, vm: VmId, out: &mut Vec<Pending>) {
        let Some(MonitorState::Voted(migration)) = self.monitor(host, vm).map(|monitor| monitor.state) else {
            return;
        };
        self.end_monitor(host, vm);
        if let Some(machine) = self.machines.get_mut(&host) {
            machine.engine.instances.remove(&vm);
        }
        self.host(host, Event::StreamBroke { migration }, out);
    }

    fn guest_runs(&mut self, host: HostId, vm: VmId, epoch: Epoch) {
        let Some(machine) = self.machines.get_mut(&host) else { return };
        let state = if machine.engine.instances.contains_key(&vm) {
            MonitorState::Running
        } else {
            MonitorState::Orphan
        };
        machine.monitors.insert(vm, Monitor { guest: true, epoch, state });
        self.check();
    }

    fn end_monitor(&mut self, host: HostId, vm: VmId) {
        let monitors = self.machines.get_mut(&host).map(|machine| &mut machine.monitors);
        if let Some(monitor) = monitors.and_then(|monitors| monitors.get_mut(&vm)) {
            *monitor = Monitor { guest: false, epoch: Epoch(0), state: MonitorState::Ended };
        }
        self.check();
    }

    /// Every monitor that would learn something asks. `away`: whether a host can't ask the service now.
    pub fn poll_decisions(&mut self, away: impl Fn(HostId) -> bool, out: &mut Vec<Pending>) {
        for (host, vm) in self.can_learn_outcome() {
            let knows = self.machines.get(&host).is_some_and(|machine| {
                machine.engine.phases.get(&vm).is_some_and(|(answer, _)| *answer != Answer::Pending)
            });
            if knows || !away(host) {
                self.learn_outcome(host, vm, out);
            }
        }
    }
}
