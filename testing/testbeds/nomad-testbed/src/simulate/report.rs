//! Counts of a run of the simulator.

/// What a run has seen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Report {
    /// Events that came due: messages, operations, timers and timeouts, lost ones included.
    pub events: u64,
    /// Of these, what isn't an operation or its answer.
    pub steps: u64,
    /// Migrations that VMs moved in.
    pub committed: u64,
    /// Migrations given up.
    pub aborted: u64,
    /// Hosts killed.
    pub kills: u64,
    /// Times that the coordinator was killed.
    pub coordinator_kills: u64,
    /// Nodes cut off.
    pub partitions: u64,
    /// Hosts that the service couldn't be reached from, and only the service.
    pub unserved: u64,
    /// Direct paths that broke during a run.
    pub severed: u64,
    /// Messages between hosts that went directly.
    pub direct: u64,
    /// Messages between hosts that the service passed on.
    pub passed_on: u64,
    /// Hosts that never returned.
    pub deaths: u64,
    /// Living daemons that counted as started again.
    pub renumbers: u64,
    /// Messages lost.
    pub lost: u64,
    /// Messages delivered twice.
    pub repeated: u64,
    /// Operations carried out.
    pub operations: u64,
    /// VMs that were lost with the host that owned them.
    pub vms_lost: u64,
    /// Longest time, in virtual microseconds, from a decision to give up until all queue pairs between living VMs were open again.
    pub longest_resume: u64,
    /// Longest time, in virtual microseconds, for which a queue pair between two running VMs was closed; only of runs of one scene.
    pub longest_suspended: u64,
}

impl Report {
    /// Adds another run.
    pub fn add(&mut self, other: &Self) {
        self.events += other.events;
        self.steps += other.steps;
        self.committed += other.committed;
        self.aborted += other.aborted;
        self.kills += other.kills;
        self.coordinator_kills += other.coordinator_kills;
        self.partitions += other.partitions;
        self.unserved += other.unserved;
        self.severed += other.severed;
        self.direct += other.direct;
        self.passed_on += other.passed_on;
        self.deaths += other.deaths;
        self.renumbers += other.renumbers;
        self.lost += other.lost;
        self.repeated += other.repeated;
        self.operations += other.operations;
        self.vms_lost += other.vms_lost;
        self.longest_resume = self.longest_resume.max(other.longest_resume);
        self.longest_suspended = self.longest_suspended.max(other.longest_suspended);
    }
}
