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
    /// The peer broke the rules ([`neighbour::channel::Violation`]), or the segment's header is wrong.
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
