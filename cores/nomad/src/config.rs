//! Times, bounds, and planted faults.

/// Most VMs of one migration.
pub const MAX_MOVES: usize = 256;
/// Most hosts of a cluster.
pub const MAX_HOSTS: usize = 4096;
/// Most migrations that a host takes part in at one time, as source and as destination.
pub const MAX_MIGRATIONS: usize = 64;
/// Most peers of a VM that travel with it.
pub const MAX_FACES: usize = 65_536;

/// Times in milliseconds, and how messages to many hosts travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Config {
    /// An unanswered message is sent again.
    pub retry_ms: u32,
    /// As [`Config::retry_ms`] while memory is copied, which takes seconds or minutes in which nobody stands still: what is said again then is only for
    /// the case that a stream broke.
    pub calm_ms: u32,
    /// A source gives up a switch-over that hasn't come to its vote, and the coordinator one that isn't decided.
    pub switch_ms: u32,
    /// The coordinator gives up a migration whose destinations don't answer.
    pub reserve_ms: u32,
    /// The coordinator gives up a migration whose sources haven't converged.
    pub copy_ms: u32,
    /// The coordinator gives up a migration that has waited so long for its turn to switch over.
    pub queue_ms: u32,
    /// A host that hasn't said in this time that it has done what was decided isn't waited for any longer: the VMs are free, and it is told when it is back.
    pub settle_ms: u32,
    /// How many hosts a host passes a message on to; 0: whoever has something to say says it to each host.
    pub fan: u8,
    /// Announcements that a peer host doesn't answer before the owner leaves it to the peer to ask.
    pub announcements: u8,
    /// A fault that is put in, to see that it is found.
    pub plant: Plant,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            retry_ms: 20,
            calm_ms: 250,
            switch_ms: 2_000,
            reserve_ms: 2_000,
            copy_ms: 300_000,
            queue_ms: 600_000,
            settle_ms: 10_000,
            fan: 4,
            announcements: 50,
            plant: Plant::None,
        }
    }
}

/// Faults that can be put in: each must be found by the model checker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Plant {
    /// None.
    #[default]
    None,
    /// A peer says that its queue pairs are held before they are.
    AckBeforeHeld,
    /// The coordinator commits without the source's vote.
    CommitWithoutYield,
    /// A source that has voted runs on when nothing is heard of the others.
    RunAfterYield,
    /// Peers believe whoever says that it runs a VM, whatever the epoch.
    NoEpochCheck,
    /// The destination tells peers to go on before it knows of the commit.
    ResumeBeforeCommit,
    /// The decision isn't written before it is told.
    DecisionNotWritten,
    /// A source stops without waiting for peers.
    StopBeforeHeld,
    /// The coordinator takes a decision anew when it is asked again.
    DecideTwice,
    /// The coordinator waits without a limit for every host to do what was decided.
    TellForEver,
    /// A destination's monitor that has voted ends itself when nothing is heard for a while.
    VoteTakenBack,
    /// A daemon that knows nothing of a migration, since it was started again, says that it was given up.
    ForgottenIsGivenUp,
    /// A source's monitor that doesn't know how its migration ended lets its guest go on when its user says so, and asks nobody.
    ResumeInDoubt,
    /// A living daemon that the service takes for one that was started again takes its votes back.
    RenumberTakesVotesBack,
    /// The coordinator lets a VM and its peer, of two migrations, switch over at the same time.
    SwitchTogether,
}
