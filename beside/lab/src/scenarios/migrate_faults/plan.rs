//! What is done to whom at which step, in an order that follows from a seed; and what may be lost by it.

/// Who takes part in a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Who {
    SourceMonitor,
    DestinationMonitor,
    SourceDaemon,
    DestinationDaemon,
    PeerDaemon,
    Service,
    /// A member of etcd, where the service keeps its state there.
    Etcd,
}

/// What is done: ended by SIGKILL, stopped for a while by SIGSTOP, or its host's links are down for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum How {
    Kill,
    Stop,
    Cut,
}

/// When: before the source's daemon has said that it copies, then, and at its next steps.
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
    /// What the source's daemon says then.
    pub fn said(self) -> Option<&'static str> {
        match self {
            Step::Begun => None,
            Step::Copying => Some("phase=Copying"),
            Step::Stop => Some("phase=Stop"),
            Step::Handing => Some("phase=Handing"),
            Step::Moved => Some("phase=Moved"),
        }
    }

    /// Where it was, by the lines that the source's daemon has said since the beginning.
    pub fn of(lines: &[String]) -> Step {
        let has = |step: Step| step.said().is_some_and(|said| lines.iter().any(|line| line.contains(said)));
        STEPS.into_iter().rev().find(|step| has(*step)).unwrap_or(Step::Begun)
    }
}

/// Numbers that look random (SplitMix64).
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

/// Each fault at each step once, in an order of the seed's; a cut is of a host's links, so of one participant of each host.
pub(super) fn faults(dice: &mut Dice) -> Vec<Fault> {
    faults_of(&ALL, dice)
}

/// The same for the service and the members of etcd that hold its state.
pub(super) fn faults_with_etcd(dice: &mut Dice) -> Vec<Fault> {
    faults_of(&[Who::Service, Who::Etcd], dice)
}

fn faults_of(them: &[Who], dice: &mut Dice) -> Vec<Fault> {
    let mut all = Vec::new();
    for step in STEPS {
        for &who in them {
            let both = [How::Kill, How::Stop].into_iter();
            let cut = [Who::SourceDaemon, Who::DestinationDaemon, Who::PeerDaemon].contains(&who);
            all.extend(both.chain(cut.then_some(How::Cut)).map(|how| Fault { how, who, step }));
        }
    }
    for last in (1..all.len()).rev() {
        let other = usize::try_from(dice.roll() % (last as u64 + 1)).unwrap_or(0);
        all.swap(last, other);
    }
    all
}

/// Where the VM runs afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    Source,
    Destination,
    Nowhere,
}

impl Fault {
    /// Whether the VM may be lost by it, where the source's daemon was at this step at least when it came: with the process that it ran in, and with a destination
    /// that could have voted.
    pub fn may_lose(self, at: Step) -> bool {
        let voted = at >= Step::Stop;
        self.how == How::Kill
            && match self.who {
                Who::SourceMonitor | Who::SourceDaemon => true,
                Who::DestinationMonitor | Who::DestinationDaemon => voted,
                Who::PeerDaemon | Who::Service | Who::Etcd => false,
            }
    }

    /// Whether it ended a VM that had moved: the command that moved it has succeeded then, and the VM ends with the destination like any other VM there.
    pub fn ends_what_has_moved(self, at: Step) -> bool {
        let there = matches!(self.who, Who::DestinationMonitor | Who::DestinationDaemon);
        self.how == How::Kill && there && at == Step::Moved
    }

    /// Whether the VM's RDMA device is lost with the daemon that was killed, where the VM runs.
    pub fn harms_the_mover(self, ending: Ending) -> bool {
        self.how == How::Kill
            && matches!(
                (self.who, ending),
                (Who::SourceDaemon, Ending::Source) | (Who::DestinationDaemon, Ending::Destination)
            )
    }

    /// Whether the peer's is.
    pub fn harms_the_peer(self) -> bool {
        self.how == How::Kill && self.who == Who::PeerDaemon
    }

    /// Which of three hosts: that of the source, of the destination, of the peer and the service.
    pub fn host(self, source: usize) -> usize {
        match self.who {
            Who::SourceMonitor | Who::SourceDaemon => source,
            Who::DestinationMonitor | Who::DestinationDaemon => 1 - source,
            Who::PeerDaemon | Who::Service | Who::Etcd => 2,
        }
    }
}

/// A VM's numbered heartbeats: numbers that came twice or went back, which only a second one that runs can send.
#[derive(Debug, Default)]
pub(super) struct Beats {
    last: std::collections::BTreeMap<u64, u64>,
    pub doubles: u64,
    pub taken: u64,
}

impl Beats {
    /// Takes a line `BEAT boot number`.
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

    /// The newest number of a boot.
    pub fn newest(&self, boot: u64) -> u64 {
        self.last.get(&boot).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Every participant is killed and stopped, and every host cut off, at each step; the order is the seed's.
    #[test]
    fn each_fault_is_there_once() {
        let first = faults(&mut Dice(1));
        assert_eq!(first.len(), 5 * (6 * 2 + 3));
        assert_eq!(first.iter().copied().collect::<BTreeSet<_>>().len(), first.len());
        assert_eq!(first, faults(&mut Dice(1)));
        assert_ne!(first, faults(&mut Dice(2)));
        let etcd = faults_with_etcd(&mut Dice(1));
        assert_eq!(etcd.iter().copied().collect::<BTreeSet<_>>().len(), 5 * 2 * 2);
        assert!(etcd.iter().all(|fault| !fault.may_lose(Step::Moved) && !fault.harms_the_peer()));
    }

    /// A second VM that goes on from the same memory sends numbers that were sent: it is seen.
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

    /// Nothing that only stops or is cut off for a while loses anything, nor the death of whoever doesn't have the VM.
    #[test]
    fn only_a_process_that_has_the_vm_may_lose_it() {
        for fault in faults(&mut Dice(3)) {
            let of_owner = !matches!(fault.who, Who::PeerDaemon | Who::Service);
            assert!(fault.how == How::Kill && of_owner || !fault.may_lose(Step::Moved), "{fault:?}");
            let destination = matches!(fault.who, Who::DestinationMonitor | Who::DestinationDaemon);
            assert!(!(destination && fault.may_lose(Step::Copying)), "{fault:?}");
            // A command that succeeded says that the VM has moved: only the destination's death loses it afterwards.
            assert!(!fault.ends_what_has_moved(Step::Handing), "{fault:?}");
            assert_eq!(fault.ends_what_has_moved(Step::Moved), destination && fault.how == How::Kill);
        }
    }
}
