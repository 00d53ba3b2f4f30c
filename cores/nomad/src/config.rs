//! Timeouts, limits, and injected bugs.

/// Maximum number of VMs of one migration.
pub const MAX_VMS_PER_MIGRATION: usize = 256;
/// Maximum number of hosts of a cluster.
pub const MAX_HOSTS: usize = 4096;
/// Maximum number of concurrent migrations of a host, as source and, separately, as destination.
pub const MAX_MIGRATIONS_PER_HOST: usize = 64;
/// Maximum number of peers of a VM in a `Handover`.
pub const MAX_PEERS_PER_VM: usize = 65_536;

/// Timeouts in milliseconds, and how messages spread to many hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Config {
    /// Interval at which a node retransmits an unanswered message.
    pub retry_ms: u32,
    /// As [`Config::retry_ms`] during pre-copy, which takes seconds to minutes while all guests run. A retransmission
    /// then only covers the case that a stream broke.
    pub precopy_retry_ms: u32,
    /// A source aborts a switchover that hasn't reached its vote in this time; the coordinator one that isn't decided.
    pub switch_ms: u32,
    /// The coordinator aborts a migration whose destinations don't answer `Reserve` in this time.
    pub reserve_ms: u32,
    /// The coordinator aborts a migration whose sources haven't converged in this time.
    pub copy_ms: u32,
    /// The coordinator aborts a migration that has been queued for its switchover for this time.
    pub queue_ms: u32,
    /// The coordinator waits this long for a host to settle. Then it frees the migration's VMs, and sends the decision
    /// when the host returns.
    pub settle_ms: u32,
    /// Number of hosts to which one host forwards a message; 0: the origin sends to each host directly.
    pub fanout: u8,
    /// Unanswered retransmissions at [`Config::retry_ms`], of an announcement or a source's vote. After them the
    /// interval is 32 times as long.
    pub fast_retries: u8,
    /// A bug that tests inject, to show that the model checker finds it.
    pub injected_bug: InjectedBug,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            retry_ms: 20,
            precopy_retry_ms: 250,
            switch_ms: 2_000,
            reserve_ms: 2_000,
            copy_ms: 300_000,
            queue_ms: 600_000,
            settle_ms: 10_000,
            fanout: 4,
            fast_retries: 50,
            injected_bug: InjectedBug::None,
        }
    }
}

/// Bugs that tests inject. The model checker must find each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum InjectedBug {
    /// No bug.
    #[default]
    None,
    /// A peer's host acknowledges `Suspend` before its queue pairs are suspended.
    AckBeforeSuspended,
    /// The coordinator commits without the source's vote.
    CommitWithoutSourceVote,
    /// A source that has voted resumes its VMs when a timeout expires.
    RunAfterVote,
    /// Peers accept an announcement of any host, of whatever epoch.
    NoEpochCheck,
    /// The destination makes peers resume before it has received the commit.
    ResumeBeforeCommit,
    /// The coordinator sends a decision that isn't in the ledger yet.
    DecisionNotWritten,
    /// A source stops its VMs before their peers are suspended.
    StopBeforePeersSuspended,
    /// The coordinator decides a second time when it receives a duplicate.
    DecideTwice,
    /// The coordinator waits for every host to settle, without a timeout.
    SettleWithoutTimeout,
    /// The monitor of a destination that has voted ends itself when a timeout expires.
    WithdrawVote,
    /// A restarted daemon, which knows nothing of a migration, reports an abort.
    ForgottenMeansAborted,
    /// The monitor of a source in doubt resumes its guest at its user's request, without asking the service.
    ResumeInDoubt,
    /// A running daemon withdraws its votes, because the service takes it for a restarted one.
    RenumberWithdrawsVotes,
    /// The coordinator lets a VM and its peer, in two migrations, switch over at the same time.
    OverlappingSwitchovers,
}
