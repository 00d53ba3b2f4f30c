//! The order of faults (participant, action, step) from a seed, and the losses that each fault permits.

use std::time::Duration;

/// A participant of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Who {
    SourceMonitor,
    DestinationMonitor,
    SourceDaemon,
    DestinationDaemon,
    PeerDaemon,
    Service,
    /// A member of etcd, if the service uses it.
    Etcd,
}

/// A fault's action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum How {
    /// SIGKILL; a daemon or service is restarted.
    Kill,
    /// SIGSTOP for [`How::lasts`].
    Stop,
    /// The host's links are down for [`How::lasts`].
    Cut,
    /// As a cut, longer than all time-outs of daemons and monitors.
    Outage,
    /// The host's monitor and daemon are killed and don't return, until the cluster has forgotten the host.
    Destroy,
}

impl How {
    /// Returns the duration of a temporary fault.
    pub fn lasts(self) -> Duration {
        Duration::from_secs(if self == How::Outage { 90 } else { 4 })
    }
}

/// A fault's step: before the source's daemon reports pre-copy, at that report, and at its next steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Step {
    Begun,
    Copying,
    Stop,
    Handing,
    Moved,
}

/// One fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Fault {
    pub how: How,
    pub who: Who,
    pub step: Step,
}

pub(super) const STEPS: [Step; 5] = [Step::Begun, Step::Copying, Step::Stop, Step::Handing, Step::Moved];
const ALL: [Who; 6] = [
    Who::SourceMonitor,
    Who::DestinationMonitor,
    Who::SourceDaemon,
    Who::DestinationDaemon,
    Who::PeerDaemon,
    Who::Service,
];

impl Step {
    /// Returns the line of the source's daemon at this step.
    pub fn said(self) -> Option<&'static str> {
        match self {
            Step::Begun => None,
            Step::Copying => Some("phase=Copying"),
            Step::Stop => Some("phase=Stop"),
            Step::Handing => Some("phase=Handing"),
            Step::Moved => Some("phase=Moved"),
        }
    }

    /// Returns the step from the lines that the source's daemon has printed since the start.
    pub fn of(lines: &[String]) -> Step {
        let has = |step: Step| step.said().is_some_and(|said| lines.iter().any(|line| line.contains(said)));
        STEPS.into_iter().rev().find(|step| has(*step)).unwrap_or(Step::Begun)
    }
}

/// Pseudorandom numbers (SplitMix64).
pub(super) struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
}

/// Returns each fault at each step once, in the seed's order. A cut, an outage and a destruction concern a host, so one participant of
/// each host.
pub(super) fn faults(dice: &mut Dice) -> Vec<Fault> {
    faults_of(&ALL, dice)
}

/// Does the same for the service and the members of etcd.
pub(super) fn faults_with_etcd(dice: &mut Dice) -> Vec<Fault> {
    faults_of(&[Who::Service, Who::Etcd], dice)
}

fn faults_of(them: &[Who], dice: &mut Dice) -> Vec<Fault> {
    let mut all = Vec::new();
    for step in STEPS {
        for &who in them {
            let both = [How::Kill, How::Stop].into_iter();
            let host = [Who::SourceDaemon, Who::DestinationDaemon, Who::PeerDaemon].contains(&who);
            let cuts = [How::Cut, How::Outage].into_iter().filter(|_| host);
            // The third host has the service as well.
            let destroyed = (host && who != Who::PeerDaemon).then_some(How::Destroy);
            all.extend(both.chain(cuts).chain(destroyed).map(|how| Fault { how, who, step }));
        }
    }
    for last in (1..all.len()).rev() {
        let other = usize::try_from(dice.roll() % (last as u64 + 1)).unwrap_or(0);
        all.swap(last, other);
    }
    all
}

/// The VM's place afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    Source,
    Destination,
    Nowhere,
}

impl Fault {
    /// Returns whether the fault may lose the VM if the source's daemon had reached at least this step. That holds for the process that
    /// runs it, and for a destination that could have voted.
    pub fn may_lose(self, at: Step) -> bool {
        let voted = at >= Step::Stop;
        self.kills()
            && match self.who {
                Who::SourceMonitor | Who::SourceDaemon => true,
                Who::DestinationMonitor | Who::DestinationDaemon => voted,
                Who::PeerDaemon | Who::Service | Who::Etcd => false,
            }
    }

    /// Returns whether the fault ends processes.
    fn kills(self) -> bool {
        matches!(self.how, How::Kill | How::Destroy)
    }

    /// Returns whether the fault ends a VM that has migrated. The migration's command has then succeeded, and the VM ends with the
    /// destination like any other VM there.
    pub fn ends_what_has_moved(self, at: Step) -> bool {
        let there = matches!(self.who, Who::DestinationMonitor | Who::DestinationDaemon);
        self.kills() && there && at == Step::Moved
    }

    /// Returns whether the VM loses its RDMA device, since the killed daemon served it.
    pub fn harms_the_mover(self, ending: Ending) -> bool {
        self.kills()
            && matches!(
                (self.who, ending),
                (Who::SourceDaemon, Ending::Source) | (Who::DestinationDaemon, Ending::Destination)
            )
    }

    /// Returns whether the peer loses its device.
    pub fn harms_the_peer(self) -> bool {
        self.how == How::Kill && self.who == Who::PeerDaemon
    }

    /// Returns the host's number: that of the source, of the destination, or of the peer and the service.
    pub fn host(self, source: usize) -> usize {
        match self.who {
            Who::SourceMonitor | Who::SourceDaemon => source,
            Who::DestinationMonitor | Who::DestinationDaemon => 1 - source,
            Who::PeerDaemon | Who::Service | Who::Etcd => 2,
        }
    }
}

/// A VM's numbered heartbeats. Detects repeated or decreasing numbers, which only a second running copy can send.
#[derive(Debug, Default)]
pub(super) struct Beats {
    last: std::collections::BTreeMap<u64, u64>,
    pub doubles: u64,
    pub taken: u64,
}

impl Beats {
    /// Processes a line `BEAT boot number`.
    pub fn take(&mut self, line: &str) {
        let mut words = line.split_whitespace();
        let (Some("BEAT"), Some(Ok(boot)), Some(Ok(number))) =
            (words.next(), words.next().map(str::parse::<u64>), words.next().map(str::parse::<u64>))
        else {
            return;
        };
        self.taken += 1;
        let last = self.last.entry(boot).or_default();
        if number <= *last {
            self.doubles += 1;
        } else {
            *last = number;
        }
    }

    /// Returns the highest number of a boot.
    pub fn newest(&self, boot: u64) -> u64 {
        self.last.get(&boot).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Every participant is killed and stopped, and every host cut off, at each step, in the seed's order.
    #[test]
    fn each_fault_is_there_once() {
        let first = faults(&mut Dice(1));
        assert_eq!(first.len(), 5 * (6 * 2 + 3 * 2 + 2));
        assert_eq!(first.iter().copied().collect::<BTreeSet<_>>().len(), first.len());
        assert_eq!(first, faults(&mut Dice(1)));
        assert_ne!(first, faults(&mut Dice(2)));
        let etcd = faults_with_etcd(&mut Dice(1));
        assert_eq!(etcd.iter().copied().collect::<BTreeSet<_>>().len(), 5 * 2 * 2);
        assert!(etcd.iter().all(|fault| !fault.may_lose(Step::Moved) && !fault.harms_the_peer()));
    }

    /// A second copy that continues from the same memory repeats numbers, which is detected.
    #[test]
    fn a_second_owner_is_seen() {
        let mut beats = Beats::default();
        ["BEAT 1 1", "BEAT 1 2", "BEAT 1 5", "noise", "BEAT 2 1"]
            .into_iter()
            .for_each(|line| beats.take(line));
        assert_eq!((beats.doubles, beats.taken, beats.newest(1)), (0, 4, 5));
        ["BEAT 1 6", "BEAT 1 6", "BEAT 1 7"].into_iter().for_each(|line| beats.take(line));
        assert_eq!(beats.doubles, 1);
    }

    #[test]
    fn steps_are_read_from_what_the_daemon_says() {
        let lines = ["x phase=Begun", "Migration vm=\"a\" phase=Copying(4)", "phase=Stop"].map(str::to_owned);
        assert_eq!(Step::of(&lines), Step::Stop);
        assert_eq!(Step::of(&lines[..2]), Step::Copying);
        assert_eq!(Step::of(&lines[..1]), Step::Begun);
    }

    /// A temporary stop or cut loses nothing, and neither does the death of a process without the VM.
    #[test]
    fn only_a_process_that_has_the_vm_may_lose_it() {
        for fault in faults(&mut Dice(3)) {
            let of_owner = !matches!(fault.who, Who::PeerDaemon | Who::Service);
            assert!(fault.kills() && of_owner || !fault.may_lose(Step::Moved), "{fault:?}");
            let destination = matches!(fault.who, Who::DestinationMonitor | Who::DestinationDaemon);
            assert!(!(destination && fault.may_lose(Step::Copying)), "{fault:?}");
            // After the command's success the VM has migrated: only the destination's death loses it afterwards.
            assert!(!fault.ends_what_has_moved(Step::Handing), "{fault:?}");
            assert_eq!(fault.ends_what_has_moved(Step::Moved), destination && fault.kills());
        }
    }
}
