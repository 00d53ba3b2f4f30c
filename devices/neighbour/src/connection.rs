//! The life of one connection, as a driver in a guest sees it.
//!
//! ```text
//!            Offer(e)             peer's ready word = e
//!  Waiting ───────────▶ Offered(e) ───────────▶ Live(e)
//!    ▲                     │ Gone, Violation,     │
//!    │                     │ Offer(later)         │
//!    │                     ▼                      ▼
//!    └──── LetGo ──────── Dead(e) ◀───────────────┘
//! ```
//!
//! An *epoch* names one connection of a pair: the registry raises it with each, and never uses one twice. What a driver must do
//! comes out as [`Action`]s: make its own rings and then write its ready word; begin; fail what is outstanding; release.
//! The window and the segment of a dead connection stay mapped until `LetGo`, so that no access to them faults; a new offer
//! waits until then.
//!
//! A driver writes its ready word after its rings, and reads the peer's before it believes anything of them. Stamps hold the
//! epoch as well, so that neither side takes what the last connection left.

/// What a driver sees or does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The registry offers a connection with this epoch: window and segment are there.
    Offer(u32),
    /// The peer's ready word, as read from the segment.
    PeerReady(u64),
    /// The registry says that the connection of this epoch is over: the peer died, hangs, or left.
    Gone(u32),
    /// The peer broke the rules ([`crate::channel::Violation`]), or the segment's header is wrong.
    Violation,
    /// The driver holds nothing of the dead connection any more: no buffer of the peer's, no work outstanding.
    LetGo,
}

/// What a driver is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Make the own ends of both directions for this epoch, then write it into the own ready word, and signal the peer.
    Prepare(u32),
    /// The peer is ready: send and receive.
    Begin(u32),
    /// Fail what is outstanding and report an error; stop using the segment. Then, once nothing of the peer's memory is in
    /// use: [`Event::LetGo`].
    Fail(u32),
    /// Tell the registry that window and segment of this epoch are no longer used.
    Release(u32),
}

/// Where a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// No offer.
    Waiting,
    /// Own rings are made; the peer's aren't known to be.
    Offered(u32),
    /// In use.
    Live(u32),
    /// Over, and memory of the peer's may still be in use.
    Dead(u32),
}

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connection {
    state: State,
    /// The latest epoch that was ever taken up; later ones only are.
    latest: u32,
    /// An offer that came before the last connection was released.
    next: Option<u32>,
}

impl Default for Connection {
    fn default() -> Self {
        Self::new()
    }
}

impl Connection {
    /// Before any offer.
    #[must_use]
    pub const fn new() -> Self {
        Self { state: State::Waiting, latest: 0, next: None }
    }

    /// Where it is.
    #[must_use]
    pub const fn state(&self) -> State {
        self.state
    }

    /// The epoch in which messages may be sent and received.
    #[must_use]
    pub const fn live(&self) -> Option<u32> {
        match self.state {
            State::Live(epoch) => Some(epoch),
            _ => None,
        }
    }

    /// Takes an event, and says what is to be done, in order.
    #[must_use]
    pub fn on(&mut self, event: Event) -> [Option<Action>; 2] {
        match (event, self.state) {
            (Event::Offer(epoch), State::Waiting) if epoch > self.latest => [self.take_up(epoch), None],
            (Event::Offer(epoch), State::Offered(of) | State::Live(of)) if epoch > of => {
                // The end of the old one was missed, or comes later.
                self.next = Some(epoch);
                [self.end(of), None]
            }
            (Event::Offer(epoch), State::Dead(of)) if epoch > of => {
                self.next = self.next.max(Some(epoch));
                [None, None]
            }
            (Event::PeerReady(word), State::Offered(epoch)) if word == u64::from(epoch) => {
                self.state = State::Live(epoch);
                [Some(Action::Begin(epoch)), None]
            }
            (Event::Gone(epoch), State::Offered(of) | State::Live(of)) if epoch == of => [self.end(of), None],
            (Event::Gone(epoch), _) if self.next == Some(epoch) => {
                self.next = None;
                self.latest = self.latest.max(epoch);
                [None, None]
            }
            (Event::Violation, State::Offered(of) | State::Live(of)) => [self.end(of), None],
            (Event::LetGo, State::Dead(of)) => {
                self.state = State::Waiting;
                let next = self.next.take().and_then(|epoch| self.take_up(epoch));
                [Some(Action::Release(of)), next]
            }
            _ => [None, None],
        }
    }

    fn take_up(&mut self, epoch: u32) -> Option<Action> {
        self.state = State::Offered(epoch);
        self.latest = epoch;
        Some(Action::Prepare(epoch))
    }

    fn end(&mut self, epoch: u32) -> Option<Action> {
        self.state = State::Dead(epoch);
        Some(Action::Fail(epoch))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_peer_that_dies_and_comes_back() {
        let mut connection = Connection::new();
        assert_eq!(connection.on(Event::Offer(3)), [Some(Action::Prepare(3)), None]);
        assert_eq!(connection.on(Event::PeerReady(2)), [None, None]);
        assert_eq!(connection.on(Event::PeerReady(3)), [Some(Action::Begin(3)), None]);
        assert_eq!(connection.live(), Some(3));
        assert_eq!(connection.on(Event::Gone(3)), [Some(Action::Fail(3)), None]);
        assert_eq!(connection.live(), None);
        // The offer comes while buffers of the dead peer are still in use.
        assert_eq!(connection.on(Event::Offer(4)), [None, None]);
        assert_eq!(connection.on(Event::LetGo), [Some(Action::Release(3)), Some(Action::Prepare(4))]);
        assert_eq!(connection.on(Event::PeerReady(4)), [Some(Action::Begin(4)), None]);
    }

    #[test]
    fn an_old_offer_is_not_taken_up() {
        let mut connection = Connection::new();
        let _ = connection.on(Event::Offer(3));
        let _ = connection.on(Event::Violation);
        let _ = connection.on(Event::LetGo);
        for old in 0..=3 {
            assert_eq!(connection.on(Event::Offer(old)), [None, None]);
        }
        assert_eq!(connection.on(Event::Offer(4)), [Some(Action::Prepare(4)), None]);
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            (0u32..12).prop_map(Event::Offer),
            (0u64..12).prop_map(Event::PeerReady),
            any::<u64>().prop_map(Event::PeerReady),
            (0u32..12).prop_map(Event::Gone),
            Just(Event::Violation),
            Just(Event::LetGo),
        ]
    }

    proptest! {
        /// Whatever happens in whatever order: each epoch is prepared at most once, epochs rise, one begins only between being
        /// prepared and failing, and each that was prepared is failed before it is released, once, and released before the next.
        #[test]
        fn epochs_rise_and_each_ends_once(events in prop::collection::vec(event(), 0..60)) {
            let mut connection = Connection::new();
            let mut prepared = 0;
            // 0: released, 1: prepared, 2: live, 3: failed
            let mut stage = 0;
            for event in events {
                for action in connection.on(event).into_iter().flatten() {
                    match action {
                        Action::Prepare(epoch) => {
                            prop_assert!(epoch > prepared && stage == 0);
                            (prepared, stage) = (epoch, 1);
                        }
                        Action::Begin(epoch) => {
                            prop_assert!(epoch == prepared && stage == 1);
                            prop_assert_eq!(event, Event::PeerReady(u64::from(epoch)));
                            stage = 2;
                        }
                        Action::Fail(epoch) => {
                            prop_assert!(epoch == prepared && (stage == 1 || stage == 2));
                            stage = 3;
                        }
                        Action::Release(epoch) => {
                            prop_assert!(epoch == prepared && stage == 3);
                            stage = 0;
                        }
                    }
                }
                prop_assert_eq!(connection.live().is_some(), stage == 2);
            }
        }
    }
}
