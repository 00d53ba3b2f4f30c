//! One device's doorbell mode: the mode that the daemon wants, the mode that the client has read, and the mode that the client has reached
//! (see [`vfio_user_protocol::doorbell_mode`]).
//!
//! ```text
//!  wanted    signalled   client read    client reached
//!  Trapped      -             -             Trapped      idle: the daemon may sleep
//!  Mapped      yes            no            Trapped      doorbells may be memory from the signal on: polled
//!  Mapped      yes           yes            Trapped      polled
//!  Mapped       -             -             Mapped       polled
//!  Trapped     yes            no            Mapped       polled
//!  Trapped     yes           yes            Mapped       polled; REACHED = Trapped ends it, after a last poll
//! ```
//!
//! A confirmation counts only if the client has read WANTED after the signal: an earlier one belongs to an earlier signal. So the daemon
//! requests another mode only after the client has confirmed the last one.

use vfio_user_protocol::doorbell_mode::DoorbellMode;

/// Time for a client to respond before the daemon stops polling busily, nanoseconds.
const BUSY_WAIT_NS: u64 = 1_000_000_000;
/// First back-off before the daemon repeats a request that the client could not meet, nanoseconds; doubled each time.
const FIRST_RETRY: u64 = 100_000_000;
const LAST_RETRY: u64 = 30_000_000_000;

/// State of the handshake; see the module.
#[derive(Debug)]
pub(super) struct Handshake {
    /// Whether the client has set the eventfd of the extension.
    offered: bool,
    wanted: DoorbellMode,
    reached: DoorbellMode,
    /// A request that was signalled and not confirmed yet.
    pending: Option<Pending>,
    /// Earliest time to repeat a failed request.
    retry_at: u64,
    retry: u64,
    pub switches: u64,
    pub failures: u64,
}

#[derive(Debug, Clone, Copy)]
struct Pending {
    since: u64,
    told: bool,
}

/// Meaning of a client's write to REACHED.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reached {
    /// No change.
    Same,
    /// Doorbells are memory now.
    Mapped,
    /// Doorbells trap now: poll the memory once more.
    Trapped,
}

impl Handshake {
    /// State of a new connection: trapped, whatever the previous one ended with.
    pub fn new() -> Self {
        Self {
            offered: false,
            wanted: DoorbellMode::Trapped,
            reached: DoorbellMode::Trapped,
            pending: None,
            retry_at: 0,
            retry: FIRST_RETRY,
            switches: 0,
            failures: 0,
        }
    }

    /// Records that the client has set or removed the eventfd.
    pub fn set_offered(&mut self, offered: bool) {
        let (switches, failures) = (self.switches, self.failures);
        *self = Self { offered, switches, failures, ..Self::new() };
    }

    /// Whether the client supports the extension.
    pub fn offered(&self) -> bool {
        self.offered
    }

    /// Requests a mode. `true`: signal the client. `false` when that mode is wanted already, a change is in progress, it failed recently,
    /// or the client doesn't support the extension.
    #[must_use]
    pub fn want(&mut self, mode: DoorbellMode, now: u64) -> bool {
        if !self.offered || self.pending.is_some() || self.wanted == mode || now < self.retry_at {
            return false;
        }
        self.wanted = mode;
        self.pending = Some(Pending { since: now, told: false });
        true
    }

    /// Handles the client's read of WANTED.
    pub fn read_wanted(&mut self) -> u32 {
        if let Some(pending) = &mut self.pending {
            pending.told = true;
        }
        self.wanted.to_register()
    }

    /// Handles the client's write to REACHED.
    #[must_use]
    pub fn reach(&mut self, mode: DoorbellMode, now: u64) -> Reached {
        match self.pending {
            // A confirmation of an earlier signal counts only if it makes the daemon more careful.
            Some(Pending { told: false, .. }) if mode == DoorbellMode::Trapped => return Reached::Same,
            Some(Pending { told: false, .. }) => {}
            Some(_) => {
                self.pending = None;
                if mode == self.wanted {
                    self.retry = FIRST_RETRY;
                } else {
                    self.failures += 1;
                    self.retry_at = now.saturating_add(self.retry);
                    self.retry = (self.retry * 2).min(LAST_RETRY);
                }
                self.wanted = mode;
            }
            None => self.wanted = mode,
        }
        if std::mem::replace(&mut self.reached, mode) == mode {
            // Memory was polled for as long as Mapped was wanted, so a last poll is due here as well.
            return if mode == DoorbellMode::Trapped { Reached::Trapped } else { Reached::Same };
        }
        self.switches += 1;
        match mode {
            DoorbellMode::Mapped => Reached::Mapped,
            DoorbellMode::Trapped => Reached::Trapped,
        }
    }

    /// Whether a doorbell may be in memory without a notification.
    pub fn in_memory(&self) -> bool {
        !self.offered || self.pending.is_some() || self.reached == DoorbellMode::Mapped
    }

    /// Whether the client is slow to respond, so that busy polling is of no use.
    pub fn is_late(&self, now: u64) -> bool {
        self.pending.is_some_and(|pending| now.saturating_sub(pending.since) > BUSY_WAIT_NS)
    }

    /// The mode, for `inspect`.
    pub fn describe(&self) -> &'static str {
        match (self.offered, self.pending.is_some(), self.reached) {
            (false, _, _) => {
                "always memory: the client has no doorbell mode, so the engine looks from time to time"
            }
            (_, true, DoorbellMode::Trapped) => "becoming memory",
            (_, true, DoorbellMode::Mapped) => "becoming trapped",
            (_, false, DoorbellMode::Trapped) => "trapped",
            (_, false, DoorbellMode::Mapped) => "memory",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Handshake, Reached};
    use vfio_user_protocol::doorbell_mode::DoorbellMode::{Mapped, Trapped};

    fn offered() -> Handshake {
        let mut handshake = Handshake::new();
        handshake.set_offered(true);
        // The client's first report, and the signal, which it handles as usual.
        assert_eq!(handshake.reach(Trapped, 0), Reached::Trapped);
        assert_eq!((handshake.read_wanted(), handshake.reach(Trapped, 0)), (0, Reached::Trapped));
        assert!(!handshake.in_memory());
        handshake
    }

    #[test]
    fn there_and_back() {
        let mut handshake = offered();
        assert!(handshake.want(Mapped, 1));
        assert!(handshake.in_memory(), "stores may land in memory from the signal on");
        assert!(!handshake.want(Trapped, 2), "no change of mind before the client has answered");
        assert_eq!(handshake.read_wanted(), 1);
        assert_eq!(handshake.reach(Mapped, 3), Reached::Mapped);
        assert!(handshake.want(Trapped, 4));
        assert!(handshake.in_memory());
        assert_eq!((handshake.read_wanted(), handshake.reach(Trapped, 5)), (0, Reached::Trapped));
        assert!(!handshake.in_memory());
        assert_eq!(handshake.switches, 2);
    }

    #[test]
    fn an_answer_to_an_earlier_signal_does_not_let_the_daemon_sleep() {
        let mut handshake = Handshake::new();
        handshake.set_offered(true);
        assert!(handshake.want(Mapped, 0));
        // The client's first report crosses the signal.
        assert_eq!(handshake.reach(Trapped, 1), Reached::Same);
        assert!(handshake.in_memory());
        assert_eq!((handshake.read_wanted(), handshake.reach(Mapped, 2)), (1, Reached::Mapped));
        // The client handles the signal itself once more.
        assert_eq!((handshake.read_wanted(), handshake.reach(Mapped, 3)), (1, Reached::Same));
    }

    #[test]
    fn what_a_client_cannot_do_is_asked_for_again_later_and_later() {
        let mut handshake = offered();
        let (mut now, mut asked) = (1, 0);
        while now < 10_000_000_000 {
            if handshake.want(Mapped, now) {
                asked += 1;
                handshake.read_wanted();
                assert_eq!(handshake.reach(Trapped, now), Reached::Trapped);
                assert!(!handshake.in_memory());
            }
            now += 10_000_000;
        }
        assert_eq!((asked, handshake.failures), (7, 7));
    }

    #[test]
    fn a_client_without_the_extension_has_its_doorbells_in_memory() {
        let mut handshake = Handshake::new();
        assert!(handshake.in_memory() && !handshake.want(Mapped, 1));
    }

    /// A client that follows the rules, and a guest, in every order of their steps: whenever the daemon may sleep, no unread doorbell is in
    /// memory.
    #[test]
    fn no_doorbell_is_lost_in_any_order_of_steps() {
        #[derive(Clone, Copy)]
        struct Client {
            mapped: bool,
            signal: bool,
            told: Option<bool>,
        }
        for seed in 0..4096_u32 {
            let mut random = seed.wrapping_mul(2_654_435_761) | 1;
            let mut next = move |n: u32| {
                random ^= random << 13;
                random ^= random >> 17;
                random ^= random << 5;
                random % n
            };
            let mut handshake = offered();
            let mut client = Client { mapped: false, signal: false, told: None };
            let (mut memory, mut rung, mut seen) = (false, 0, 0);
            for now in 0..200 {
                match next(6) {
                    0 => {
                        let mode = if next(2) == 0 { Mapped } else { Trapped };
                        client.signal |= handshake.want(mode, now);
                    }
                    // The guest writes a doorbell: to memory, or trapped, which the daemon receives at once.
                    1 => {
                        rung += 1;
                        if client.mapped { memory = true } else { seen = rung }
                    }
                    2 if client.signal && client.told.is_none() => {
                        client.signal = false;
                        client.told = Some(handshake.read_wanted() == 1);
                    }
                    // Changes, then reports.
                    3 => {
                        if let Some(mapped) = client.told.take() {
                            let fails = next(8) == 0;
                            client.mapped = if fails { client.mapped } else { mapped };
                            let mode = if client.mapped { Mapped } else { Trapped };
                            if handshake.reach(mode, now) == Reached::Trapped && std::mem::take(&mut memory) {
                                seen = rung;
                            }
                        }
                    }
                    // The daemon polls while it must.
                    4 if handshake.in_memory() && std::mem::take(&mut memory) => seen = rung,
                    _ => {}
                }
                assert!(handshake.in_memory() || !memory, "seed {seed}, step {now}");
                assert!(memory || seen == rung, "seed {seed}, step {now}");
            }
        }
    }
}
